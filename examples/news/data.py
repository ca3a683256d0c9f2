"""Headlines of AG_NEWS in four classes. The user provides them: they are free for research only."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from torch import Tensor

CLASSES = ("World", "Sports", "Business", "Sci/Tech")
HELD_OUT = 200
SPLIT_SEED = 0
LONGEST = 24  # tokens of a sentence, with [CLS] and [SEP]
VOCABULARY = Path(__file__).resolve().parent / "vocab.txt"


@dataclass(frozen=True)
class Sentences:
    """Sentences, and their classes (count,), int64."""

    texts: tuple[str, ...]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.texts)


def load(path: Path) -> tuple[Sentences, Sentences]:
    """Return training sentences and 200 held-out headlines of ``test.csv`` of AG_NEWS, always the same.

    Headlines and descriptions of the other articles are sentences of their own in training. An article whose
    headline is held out, or the same as one that is, gives none.
    """
    with path.open(encoding="utf-8", newline="") as file:
        articles = [(int(label) - 1, _plain(title), _plain(text)) for label, title, text in csv.reader(file)]
    order = torch.randperm(len(articles), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    held_out = [articles[i] for i in order[:HELD_OUT]]
    headlines = {title.lower() for _, title, _ in held_out}
    rest = [articles[i] for i in order[HELD_OUT:] if articles[i][1].lower() not in headlines]
    training = [(label, text) for label, *both in rest for text in both]
    return (
        Sentences(tuple(text for _, text in training), torch.tensor([label for label, _ in training])),
        Sentences(tuple(title for _, title, _ in held_out), torch.tensor([label for label, *_ in held_out])),
    )


def _plain(text: str) -> str:
    """Remove what is left of escapes: backslashes for new lines, and '#36;' for a dollar sign."""
    return " ".join(text.replace("\\", " ").replace("#36;", "$").replace("#39;", "'").split())


def make_vocabulary(texts: tuple[str, ...], size: int) -> None:
    """Train the WordPiece vocabulary, and write it beside this file."""
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(texts, vocab_size=size, min_frequency=2, show_progress=False)
    tokenizer.save_model(str(VOCABULARY.parent))


def ids_of(texts: tuple[str, ...]) -> list[Tensor]:
    """Return the ids of each text, [CLS] … [SEP], int64."""
    tokenizer = BertWordPieceTokenizer(str(VOCABULARY), lowercase=True)
    tokenizer.enable_truncation(LONGEST)
    return [torch.tensor(found.ids) for found in tokenizer.encode_batch(list(texts))]


def words_of(text: str) -> list[str]:
    """Return the tokens of a text as they are read."""
    tokenizer = BertWordPieceTokenizer(str(VOCABULARY), lowercase=True)
    tokenizer.enable_truncation(LONGEST)
    return list(tokenizer.encode(text).tokens)
