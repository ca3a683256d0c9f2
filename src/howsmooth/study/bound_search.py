"""Search a ball of tokens for those at which attention has the largest local Lipschitz constant."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth import adversarial, lipschitz
from howsmooth.attention import SelfAttention
from howsmooth.errors import NonFiniteError
from howsmooth.lipschitz_estimate import LipschitzEstimate
from howsmooth.seeds import derive_seed
from howsmooth.study.attention_sources import Target, largest_norm

__all__ = ["Worst", "search_ball"]

# Rounding can make tokens on the sphere longer than its radius: those of a search by less than the first
# fraction, those that a model computed in float32 by less than the second.
_ROUNDING, _ROUNDING_OF_MODEL = 1e-9, 1e-6


@dataclass(frozen=True, eq=False)
class Worst:
    """The tokens ``x`` with the largest constant that a search found, with an interval of this constant.

    ``by`` says how they were found: they are the ``tokens`` of the input, or the name of a construction, or
    ``ascent``.
    """

    x: Tensor
    by: str
    estimate: LipschitzEstimate

    @property
    def lower(self) -> float:
        """The lower limit of the constant at these tokens, which the constant of the ball is at least."""
        return float(self.estimate.lower)


def search_ball(
    one: Target, n: int, radius: float, *, steps: int, seed: int, told: Callable[[float], None]
) -> Worst:
    """Measure the given tokens, if they are in the ball, and the constructions; then climb from them.

    ``told`` is called with the share of the work that is done.
    """
    f = one.attention.to(dtype=torch.float64, device="cpu")
    start = derive_seed(purpose="search", seed=seed, scope=one.scope, layer=one.layer, head=one.head, n=n)
    ascent = adversarial.ascend(
        f,
        length=n,
        radius=radius,
        steps=steps,
        atom_steps=3 * steps,
        seed=start,
        # The search among few distinct tokens, which comes first, takes about as long as the ascent.
        on_evaluation=lambda row: told(0.5 + 0.5 * float(str(row["step"])) / (steps + 1)),
    )
    assert isinstance(ascent.estimate, LipschitzEstimate)
    found = [Worst(ascent.x, "ascent", ascent.estimate)]
    for by, x in _given(one, f, n, radius):
        # Tokens at which float64 loses all digits of the Jacobian are left out.
        with contextlib.suppress(NonFiniteError):
            found.append(Worst(x, by, lipschitz.local_lipschitz(f, x, rtol=1e-4, seed=start)))
    return max(found, key=lambda worst: worst.lower)


def _given(one: Target, f: SelfAttention, n: int, radius: float) -> Iterator[tuple[str, Tensor]]:
    """Yield the tokens of the input, if they lie in the ball up to rounding, and those of constructions."""
    x = one.x.double()
    excess = x.norm(dim=-1, keepdim=True) / radius
    x = torch.where((excess > 1) & (excess < 1 + _ROUNDING_OF_MODEL), x / excess, x)
    if largest_norm(x) <= radius * (1 + _ROUNDING):
        yield "tokens", x
    plain = isinstance(f, SelfAttention) and f.rotary is None and f.mask is None and f.window is None
    if plain and not f.feature_names():
        yield from ((made.name, made.x.double()) for made in adversarial.constructions(f, n, radius))
