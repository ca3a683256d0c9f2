"""Train a small classifier of headlines of the BERT kind, plain and with a spectral penalty.

    python examples/news/train.py --data ag_news/test.csv              # both forms, a quarter of an hour
    python examples/news/train.py --data ag_news/test.csv --quick --out out/news

Three layers of dimension 128 with standard LayerNorm and GELU. Both forms begin with the same weights and see
the same batches; ``penalised`` adds the mean local Lipschitz constant of the layers, and of all modules
in them, to the loss. Weights are rounded to float16 after training, and all numbers are of the rounded
ones. They go into OUT/FORM.safetensors; what is there already is not done again. ``radii.py`` beside this
file computes what is proved of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.news.data import CLASSES, LONGEST, VOCABULARY, Sentences, ids_of, load, make_vocabulary
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification

from howsmooth.nn.penalty import SpectralPenalty

HERE = Path(__file__).resolve().parent
WORDS = 4000
UNKNOWN = 1  # the id of [UNK]


@dataclass(frozen=True)
class Recipe:
    """How one form is trained."""

    penalty: float = 0.0  # times the mean local constant of the layers and all modules in them
    penalise_every: int = 4  # steps; the penalty is multiplied by as much
    hidden_words: float = 0.15  # share of the tokens that are replaced by [UNK] in training
    epochs: int = 4
    batch: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05


FORMS = {"plain": Recipe(), "penalised": Recipe(penalty=0.1)}


def main() -> int:
    """Train what is asked for and not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="test.csv of AG_NEWS")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the weights")
    parser.add_argument("--quick", action="store_true", help="some steps only")
    parser.add_argument("--threads", type=int, default=1, help="of the processor; 1 by default")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    training, held_out = load(asked.data)
    if not VOCABULARY.exists():
        make_vocabulary(training.texts, WORDS)
    asked.out.mkdir(parents=True, exist_ok=True)
    for form in asked.forms:
        path = weights_path(asked.out, form)
        if not path.exists():
            model, seconds = fit(FORMS[form], training, steps=20 if asked.quick else None)
            save_file({name: weight.half() for name, weight in model.state_dict().items()}, path)
            print(f"{form}: trained in {seconds:.0f} s of the processor", flush=True)
        print(f"{form}: {accuracy(read_model(path), held_out):.3f} of the held-out headlines", flush=True)
    return 0


def new_model(seed: int = 0) -> BertForSequenceClassification:
    """Return the model, untrained."""
    torch.manual_seed(seed)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(VOCABULARY.read_text(encoding="utf-8").splitlines()),
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=LONGEST,
            num_labels=len(CLASSES),
            hidden_dropout_prob=0.3,
            attention_probs_dropout_prob=0.1,
            attn_implementation="eager",
        )
    )


def fit(
    recipe: Recipe, training: Sentences, *, steps: int | None = None, seed: int = 0
) -> tuple[BertForSequenceClassification, float]:
    """Train a model; return it with the seconds of the processor that this took."""
    begin = time.process_time()
    ids = ids_of(training.texts)
    model = new_model(seed).train()
    order = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    total = steps or recipe.epochs * (len(ids) // recipe.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=total, pct_start=0.2
    )
    penalty = None
    if recipe.penalty:
        parts = [name for name, _ in model.named_modules() if name.startswith("bert.encoder.layer.")]
        penalty = SpectralPenalty(model, parts, on_input=True, members=8, steps=2).attach()
    losses: list[float] = []
    while len(losses) < total:
        for which in batches(ids, recipe.batch, order)[: total - len(losses)]:
            given, mask = padded([ids[i] for i in which])
            hidden = torch.rand(given.shape, generator=order) < recipe.hidden_words
            hidden[:, 0] = False  # [CLS]
            given = given.masked_fill(hidden & mask.bool(), UNKNOWN)
            logits = model(input_ids=given, attention_mask=mask).logits
            loss = nn.functional.cross_entropy(logits, training.labels[which])
            losses.append(float(loss.detach()))
            if penalty is not None and len(losses) % recipe.penalise_every == 0:
                loss = loss + recipe.penalise_every * recipe.penalty * penalty(tokens=mask.bool())
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            if len(losses) % 200 == 0:
                print(f"step {len(losses)} of {total}: loss {sum(losses[-200:]) / 200:.3f}", file=sys.stderr)
    if penalty is not None:
        penalty.detach()
    return model.eval(), time.process_time() - begin


def batches(ids: list[Tensor], size: int, order: torch.Generator) -> list[list[int]]:
    """Return a random order in batches of about equal lengths."""
    shuffled = torch.randperm(len(ids), generator=order).tolist()
    pools = [shuffled[i : i + 20 * size] for i in range(0, len(shuffled), 20 * size)]
    found = []
    for pool in pools:
        pool.sort(key=lambda i: len(ids[i]))
        found += [pool[i : i + size] for i in range(0, len(pool) - size + 1, size)]
    return [found[i] for i in torch.randperm(len(found), generator=order).tolist()]


def padded(ids: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids (batch, n) and the mask of what is a token."""
    mask = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    return pad_sequence(ids, batch_first=True), mask


@torch.no_grad()
def accuracy(model: nn.Module, sentences: Sentences) -> float:
    """Return the share of sentences that are classified rightly."""
    given, mask = padded(ids_of(sentences.texts))
    right = model(input_ids=given, attention_mask=mask).logits.argmax(dim=1) == sentences.labels
    return float(right.double().mean())


def weights_path(out: Path, form: str) -> Path:
    """Return where the weights of a form are kept."""
    return out / f"{form}.safetensors"


def read_model(path: Path) -> BertForSequenceClassification:
    """Return a trained model in float32, with exactly the weights of the file."""
    model = new_model().eval()
    model.load_state_dict({name: weight.float() for name, weight in load_file(path).items()})
    return model.requires_grad_(False)


if __name__ == "__main__":
    sys.exit(main())
