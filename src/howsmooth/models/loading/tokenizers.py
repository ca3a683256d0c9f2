"""From text to token ids: the model's own tokenizer, or one trained on the text where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from howsmooth.errors import ModelError

__all__ = ["Tokenizer", "own_tokenizer", "trained_tokenizer"]

#: Largest vocabulary trained on a text: more merges than a book-sized text has any use for.
TRAINED_VOCABULARY = 8000

#: Something that any tokenizer of text can encode without resorting to its unknown token.
_PROBE = "The cat sat on a mat, and it was all that it had to do."


class Tokenizer:
    """Text to token ids, without special tokens.

    Parameters
    ----------
    backend
        A tokenizer of transformers, or None if the model has none: then every use raises a ModelError.
    obstacle
        Why there is none.

    """

    def __init__(self, backend: PreTrainedTokenizerBase | None, obstacle: str = "") -> None:
        self._backend = backend
        self._obstacle = obstacle

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        if self._backend is None:
            raise ModelError(self._obstacle)
        # verbose: a text longer than the model is no mistake here, it is cut into sequences afterwards.
        ids = self._backend(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [int(i) for i in ids]

    def located(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a text, and the letter of the text at which each begins.

        The second list is empty if the tokenizer cannot tell.
        """
        if not isinstance(self._backend, PreTrainedTokenizerFast):
            return self.encode(text), []
        found = self._backend(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        return [int(i) for i in found["input_ids"]], [int(start) for start, _ in found["offset_mapping"]]

    def decoded(self, ids: list[int]) -> list[str]:
        """Return what each token stands for by itself, as far as letters can say it; else its number."""
        if self._backend is None:
            return [str(i) for i in ids]
        return [str(self._backend.decode([i])) for i in ids]

    @property
    def serialized(self) -> str:
        """All that determines the ids, as text; empty if there is no tokenizer."""
        if self._backend is None:
            return ""
        if isinstance(self._backend, PreTrainedTokenizerFast):
            return str(self._backend.backend_tokenizer.to_str())
        return json.dumps([type(self._backend).__name__, self._backend.get_vocab()], sort_keys=True)


def own_tokenizer(name: str | Path, *, local_files_only: bool) -> Tokenizer | None:
    """Return the tokenizer that comes with a model, or None if none comes with it.

    transformers builds an *empty* tokenizer where it finds no vocabulary: what it builds is believed only
    if it can encode a plain sentence.
    """
    try:
        backend: Any = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, local_files_only=local_files_only
        )
        tokenizer = Tokenizer(backend)
        ids = tokenizer.encode(_PROBE)
    except Exception:  # whatever is wrong with it, there is no usable tokenizer; the caller says so
        return None
    unknown = getattr(backend, "unk_token_id", None)
    known = [i for i in ids if i != unknown]
    return tokenizer if len(known) > len(ids) // 2 else None


def trained_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE on a text; the same text gives the same tokenizer.

    At most ``vocabulary`` token ids, which is how many the model knows, and at most 8000 are made.

    Raises
    ------
    ModelError
        If the model knows fewer than the 256 bytes.

    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary < len(alphabet):
        raise ModelError(
            f"No tokenizer can be trained for a model that knows {vocabulary} token ids: a byte-level one "
            f"needs at least {len(alphabet)}."
        )
    tokenizer = BpeTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment, unused-ignore]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment, unused-ignore]
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, TRAINED_VOCABULARY), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
