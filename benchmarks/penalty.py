"""What a penalty on leading singular values costs, and how far a remembered direction lags behind.

    OMP_NUM_THREADS=1 python benchmarks/penalty.py             # both parts, some ten minutes
    OMP_NUM_THREADS=1 python benchmarks/penalty.py --part cost

Part 1: processor seconds of one call of the penalty with its backward pass, over those of a forward and
backward pass of what it stands beside: one attention layer (with PyTorch's fused kernel, gradients by weights
and input), and a Transformer of four layers. Medians of rounds in turns; ratios, since a machine has
its own speed.

Part 2: a small Transformer on scikit-learn's digits, 64 new images in each batch: mean and smallest ratio of
the penalty's value to the singular value itself (60 Lanczos steps from a random start), at both layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from howsmooth.nn.penalty import JasminPenalty, SpectralPenalty

# Sequences, tokens, width, heads.
SHAPES = ((64, 16, 32, 4), (8, 64, 64, 4), (8, 128, 128, 4), (4, 256, 256, 8))
# Products a step, share of the batch.
SETTINGS = ((1, 1.0), (2, 1.0), (4, 1.0), (4, 0.25))


class Layer(nn.Module):
    """One attention layer."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


def transformer(d: int, heads: int, layers: int = 4) -> nn.Module:
    """Pre-norm, MLPs four times as wide."""
    layer = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds."""
    began = time.process_time()
    work()
    return time.process_time() - began


def ratios(model: nn.Module, x: Tensor, rounds: int) -> dict[str, float]:
    """Cost of each penalty over a forward and backward pass."""
    penalties: dict[str, SpectralPenalty | JasminPenalty] = {
        f"{steps} products, {share:.0%} of the batch": SpectralPenalty(
            model, steps=steps, members=max(1, round(share * len(x)))
        )
        for steps, share in SETTINGS
    }
    penalties["JaSMin"] = JasminPenalty(model)
    times: dict[str, list[float]] = {name: [] for name in ("alone", *penalties)}
    for _ in range(rounds + 2):
        times["alone"].append(seconds(lambda: model(x).square().mean().backward()))
        for name, penalty in penalties.items():
            with penalty:
                model(x)
                times[name].append(seconds(lambda penalty=penalty: penalty().backward()))
    # The first rounds begin at random directions.
    medians = {name: statistics.median(taken[2:]) for name, taken in times.items()}
    return {name: medians[name] / medians["alone"] for name in penalties}


def cost(console: Console, rounds: int) -> None:
    """Part 1."""
    rows: list[tuple[str, dict[str, float]]] = []
    for members, n, d, heads in SHAPES:
        torch.manual_seed(0)
        x = torch.randn(members, n, d, requires_grad=True)
        shape = f"{members} × {n} × {d}, {heads} heads"
        rows.append((f"layer, {shape}", ratios(Layer(d, heads), x, rounds)))
        rows.append((f"Transformer, {shape}", ratios(transformer(d, heads), x, rounds)))
    table = Table("beside", *rows[0][1], title="cost over a forward and backward pass")
    for name, found in rows:
        table.add_row(name, *(f"{ratio:.2f}" for ratio in found.values()))
    console.print(table)


class Digits(nn.Module):
    """16 patches of 2 × 2 pixels, two layers of width 32."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, 32)
        self.position = nn.Parameter(0.02 * torch.randn(16, 32))
        self.body = transformer(32, 4, 2)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.patch(x) + self.position).mean(dim=1))
        return y


def lag(console: Console, weight: float, batches: int) -> None:
    """Part 2."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images / 16.0).float()
    patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(images), 16, 4)
    labels = torch.tensor(digits.target)
    table = Table("products", "mean ratio", "least", "accuracy on the rest", title=f"weight {weight:g}")
    for steps in (1, 2, 3, 5):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        model = Digits()
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        found: list[Tensor] = []
        penalty = SpectralPenalty(model, steps=steps).attach()
        for batch in range(1, batches + 1):
            chosen = torch.randint(0, 1500, (64,), generator=generator)
            optimizer.zero_grad()
            judge = SpectralPenalty(model, first_steps=60, rtol=1e-4)
            if batch % 50 == 0:
                judge.attach()
            loss = nn.functional.cross_entropy(model(patches[chosen]), labels[chosen])
            (loss + weight * penalty()).backward()
            if batch % 50 == 0:
                judge()
                judge.detach()
                pairs = zip(penalty.report.layers, judge.report.layers, strict=True)
                found += [mine.value / true.value for mine, true in pairs]
            optimizer.step()
        penalty.detach()
        with torch.no_grad():
            right = (model(patches[1500:]).argmax(1) == labels[1500:]).float().mean()
        all_found = torch.cat(found)
        table.add_row(str(steps), f"{all_found.mean():.3f}", f"{all_found.min():.3f}", f"{right:.3f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("cost", "lag", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--weight", type=float, default=0.1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=150)
    if given.part in ("cost", "both"):
        cost(console, given.rounds)
    if given.part in ("lag", "both"):
        lag(console, given.weight, given.batches)


if __name__ == "__main__":
    main()
