"""A projected gradient search for the smallest change of the tokens that changes the answer of a classifier.

The size of what it finds is an upper bound on every proved radius.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.bounds.radius.transformer_network import Network
from howsmooth.rounding import LEAST_DIVISOR
from howsmooth.threads import renew_threads

__all__ = ["attack_radius"]

_TOGETHER = 16  # number of gradients that are computed at once
_STARTS = 4
_STEPS = 30


def attack_radius(
    network: Network,
    x: Tensor,
    injection: Tensor,
    functionals: Tensor,
    offsets: Tensor,
    first: float,
    *,
    norm: float = 2,
    seed: int = 0,
) -> float:
    """Search for the smallest change of the tokens that changes the answer of a classifier; return its size.

    The size is infinite if no such change is found. The answer changes where the margin is at most 0: the
    smallest entry of ``functionals`` (m, classes) @ logits + ``offsets`` (m,). The margin is minimised on
    spheres of growing radius, from ``first``, along its normalised gradient, then the radius is halved in on.
    The starts are the gradients of the entries that reach 0 first in a linear network, and random. ``norm``
    is 2 or infinity.
    """
    noise = torch.Generator().manual_seed(seed)
    k = injection.shape[2]
    best = math.inf

    def margins(delta: Tensor) -> Tensor:
        return functionals @ network.logits(x + injection @ delta) + offsets

    gradients = torch.func.vmap(torch.func.grad_and_value(lambda delta: margins(delta).min()))
    found = torch.randn(_STARTS, k, generator=noise, dtype=x.dtype)
    still = torch.zeros(k, dtype=x.dtype)
    slopes = torch.func.jacrev(margins, chunk_size=_TOGETHER)(still)
    nearest = (margins(still) / slopes.norm(dim=1)).argsort()[: _STARTS - 1]
    found[: len(nearest)] = -slopes[nearest]

    def length(delta: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(delta, norm, dim=1, keepdim=True)
        return found

    def on_sphere(radius: float, delta: Tensor) -> Tensor:
        return delta * (radius / length(delta).clamp_min(LEAST_DIVISOR))

    def reached(radius: float, delta: Tensor) -> tuple[bool, Tensor]:
        nonlocal best
        delta = on_sphere(radius, delta)
        for step in range(_STEPS):
            renew_threads()
            slope, value = gradients(delta)
            if bool((value <= 0).any()):
                best = min(best, float(length(delta[value <= 0]).min()))
                return True, delta
            size = radius * 0.5 * (1 - step / _STEPS)
            if norm == 2:
                delta = on_sphere(radius, delta - size * on_sphere(1.0, slope))
            else:
                delta = (delta - size * slope.sign()).clamp(-radius, radius)
        return False, delta

    low, high = 0.0, first
    for _ in range(8):
        crossed, moved = reached(high, found)
        if crossed:
            break
        low, high, found = high, 2 * high, moved
    else:
        return best
    for _ in range(6):
        middle = (low + min(high, best)) / 2
        crossed, moved = reached(middle, found)
        if crossed:
            high = middle
        else:
            low, found = middle, moved
    return best
