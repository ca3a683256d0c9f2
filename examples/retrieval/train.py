"""Train a 1-Lipschitz Transformer to retrieve a marked token, with each kind of attention.

    python examples/retrieval/train.py                     # everything, about ten minutes of one core
    python examples/retrieval/train.py --kinds softmax     # one kind
    python examples/retrieval/train.py --steps 20 --out x  # far from trained

A sequence has eight tokens, each of them one of eight contents as a unit vector, and one token is marked by a
ninth coordinate. The class is the content of the marked token. A token of its own is put in front, and the
model reads this token alone, so that only attention brings it what the others hold: without attention every
sequence gives the same logits, and one of eight is right. Results go into OUT/results.json. What is there
already is not done again, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.digits.models import ATTENTIONS, attended, without_attention
from examples.digits.train import Recipe, criterion, read, write
from torch import Tensor, nn

import howsmooth as hs

HERE = Path(__file__).resolve().parent
CONTENTS, LENGTH, DIM, BLOCKS = 8, 8, 16, 2
RADIUS = 1.5  # tokens have norm at most √2
WEIGHT = 0.5  # of attention in each residual at the start
RADII = (0.01, 0.02, 0.03, 0.05)
RECIPE = Recipe(epochs=1, learning_rate=5e-3, temperature=40.0, margin=0.05)
STEPS, TESTED = 1000, 1000

# True where hidden: the token in front sees all, the others see themselves alone.
FRONT_ALONE = ~torch.eye(LENGTH + 1, dtype=torch.bool)
FRONT_ALONE[0] = False

KINDS: dict[str, dict[str, object]] = {
    **{kind: {"kind": kind} for kind in ATTENTIONS},
    "softmax, front token alone attends": {"kind": "softmax", "mask": FRONT_ALONE},
    "none": {"kind": None},
}


def main() -> int:
    """Train and write, as asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the optimiser")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "results.json"
    for seed in asked.seeds:
        for kind in asked.kinds:
            name = f"{kind}-{seed}"
            if name in read(path):
                continue
            begin = time.process_time()
            model = fit(seed, asked.steps, **KINDS[kind])
            write(path, read(path) | {name: {"attention": kind, "seed": seed, **evaluate(model)}})
            seconds = time.process_time() - begin
            print(f"{name}: {json.dumps(read(path)[name])}, {seconds:.0f} s of the processor", flush=True)
    return 0


def sequences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences (count, 8, 9) and the contents of their marked tokens (count,)."""
    contents = torch.randint(CONTENTS, (count, LENGTH), generator=generator)
    marked = torch.randint(LENGTH, (count, 1), generator=generator)
    x = nn.functional.one_hot(contents, CONTENTS + 1).float()
    x[torch.arange(count), marked[:, 0], CONTENTS] = 1.0
    return x, contents.gather(1, marked)[:, 0]


def build(kind: str | None, **mask: object) -> nn.Sequential:
    """Return a model of constant at most 1 for all inputs."""
    nns = hs.nn
    parts: list[nn.Module] = [nns.ClipTokens(2**0.5), nns.OrthogonalLinear(CONTENTS + 1, DIM)]
    parts.append(nns.PrependToken(DIM))
    for _ in range(BLOCKS):
        if kind is not None:
            parts.append(attended(kind, DIM, LENGTH + 1, RADIUS, WEIGHT, **mask))
        parts += [_square(), nns.MaxMin(), _square()]
    return nn.Sequential(*parts, nns.TakeToken(0), nn.Flatten(), nns.OrthogonalLinear(DIM, CONTENTS))


def fit(seed: int, steps: int, kind: str | None, **mask: object) -> nn.Sequential:
    """Train a model on sequences that are drawn anew in each step."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = build(kind, **mask)
    optimiser = torch.optim.Adam(model.parameters(), lr=RECIPE.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, RECIPE.learning_rate, total_steps=steps, pct_start=0.2
    )
    for _ in range(steps):
        x, labels = sequences(RECIPE.batch, generator)
        optimiser.zero_grad()
        criterion(model(x), labels, RECIPE).backward()
        optimiser.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def evaluate(model: nn.Sequential) -> dict[str, object]:
    """Return clean and certified accuracy, accuracy without attention, and the learned weights."""
    x, labels = sequences(TESTED, torch.Generator().manual_seed(10**6))
    logits = model(x)
    right = logits.argmax(dim=1) == labels
    constant = hs.nn.certify(model, LENGTH, math.inf)
    radii = constant.certified_radius(logits, labels)
    without = without_attention(model)(x).argmax(dim=1) == labels
    return {
        "clean": float(right.double().mean()),
        "radii": RADII,
        "certified": [float((right & (radii >= radius)).double().mean()) for radius in RADII],
        "without": float(without.double().mean()),
        "constant": constant.constant,
        "weights": [part.weight for part in model if isinstance(part, hs.nn.AverageResidual)],
    }


def _square() -> nn.Module:
    return hs.nn.OrthogonalLinear(DIM, DIM, orthogonal_map="cayley")


if __name__ == "__main__":
    sys.exit(main())
