"""Search for a counterexample to an inequality: random draws, and gradient ascent from each of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Point = dict[str, Tensor]


def largest_ratio(
    ratio: Callable[[Point], Tensor],
    draw: Callable[[torch.Generator], Point],
    *,
    trials: int,
    steps: int,
    seed: int = 0,
    rate: float = 0.05,
) -> float:
    """Return the largest value of ``ratio`` (truth over bound, at least nearly differentiable) that is found.

    ``draw`` gives a random point; all its tensors are changed by Adam, ``steps`` times, to raise the
    ratio. Every value seen counts, also those on the way.
    """
    best = 0.0
    for trial in range(trials):
        generator = torch.Generator().manual_seed(1_000_003 * seed + trial)
        point = {name: value.clone().requires_grad_() for name, value in draw(generator).items()}
        optimiser = torch.optim.Adam(list(point.values()), lr=rate, maximize=True)
        for _ in range(steps + 1):
            optimiser.zero_grad()
            value = ratio(point)
            assert torch.isfinite(value), "the ratio is not finite"
            best = max(best, float(value.detach()))
            if not value.requires_grad:
                break
            torch.log(value).backward()
            optimiser.step()
    return best
