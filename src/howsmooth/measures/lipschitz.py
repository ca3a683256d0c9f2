"""The local Lipschitz constant of mean-field attention in W₂, where atoms may split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import AbstractMeasure, TokenMap, Weighting
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import frozen_derivatives
from howsmooth.lipschitz import LipschitzEstimate, local_lipschitz

__all__ = ["WassersteinLipschitz", "wasserstein_lipschitz"]

# Spectral norms taken together, the largest Frobenius norms first.
_TOGETHER = 8


@dataclass(frozen=True)
class WassersteinLipschitz:
    """The local Lipschitz constant of F at a discrete measure in W₂, with its interval and its two parts.

    Attributes
    ----------
    value, lower, upper
        The larger of the two parts below, and an interval that holds it with probability at least
        ``confidence``.
    confidence
        Over the random start of the first part.
    converged
        upper − lower <= rtol · value.
    by
        "displacement" where the atoms move whole, "splitting" where one of them splits: the larger part.
    weighted
        First part: the weighted norm ‖J‖_a, where the atoms move whole.
    splitting, splitting_lower, splitting_upper
        Second part: max_i ‖D Γ_μ(x_i)‖, for one head max_i ‖V C_i A‖, widened for rounding.
    atom, splitting_direction
        The atom i at which it is attained, and the unit vector (d,) along which its two halves move apart.
    scope
        What was measured, in words.

    """

    value: float
    lower: float
    upper: float
    confidence: float
    converged: bool
    by: Literal["displacement", "splitting"]
    weighted: LipschitzEstimate
    splitting: float
    splitting_lower: float
    splitting_upper: float
    atom: int
    splitting_direction: Float[Tensor, " d"]
    scope: str

    def __repr__(self) -> str:
        status = "converged" if self.converged else "NOT converged"
        return (
            f"WassersteinLipschitz({self.value:.6g} in [{self.lower:.6g}, {self.upper:.6g}] at "
            f"{self.confidence:.4%} confidence, {status}, by {self.by}: atoms that move whole "
            f"{float(self.weighted.value):.6g}, one that splits {self.splitting:.6g}; {self.scope})"
        )


def wasserstein_lipschitz(
    f: TokenMap,
    measure: object,
    *,
    rtol: float = 1e-4,
    confidence: float = 0.999,
    max_iterations: int = 200,
    seed: int | Sequence[int] = 0,
) -> WassersteinLipschitz:
    """Measure the local Lipschitz constant in W₂ of the mean-field map of ``f`` at a discrete measure.

    It is the limit, as δ → 0, of the largest W₂(F(ν), F(ν')) / W₂(ν, ν') over measures ν ≠ ν' within δ of the
    measure in W_∞, and equals max(‖J‖_a, max_i ‖D Γ_μ(x_i)‖): atoms move whole, or split. With positions and
    a causal map the distance is the conditional d₂ (Definition 4.1), and positions stay.

    Parameters
    ----------
    f
        A map that acts on measures.
    measure
        A measure with atoms. Those that coincide may be given apart or together: the constant is the same.
    rtol, confidence, max_iterations, seed
        As for :func:`howsmooth.local_lipschitz`, of which the first part is a result.

    Raises
    ------
    ArgumentError
        If an argument does not fit, or the measure has no atoms.
    NonFiniteError
        If the constant is beyond float64's range.

    References
    ----------
    Lemma C.5 of Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, for atoms that move whole; this
    library: docs/theory/mean-field.md.

    """
    if not isinstance(measure, AbstractMeasure):
        raise ArgumentError(
            "measure",
            expected="a discrete measure",
            got=type(measure).__name__,
            remedy="Of tokens X it is DiscreteMeasure(X), or DiscreteMeasure.sequence(X) for a causal map.",
        )
    weighted = local_lipschitz(
        f, measure, rtol=rtol, confidence=confidence, max_iterations=max_iterations, seed=seed
    )
    points, weighting = measure.weighted_tokens()
    weighting = Weighting(weighting.log_weights.detach(), weighting.positions)
    splitting, atom, direction = _largest(f.to(dtype=torch.float64), points.detach().double(), weighting)
    value, lower, upper = (float(limit) for limit in (weighted.value, weighted.lower, weighted.upper))
    # Both parts are made of the same probabilities, so the first part's rounding serves the second.
    rounding = 1.0 - lower / value if value > 0 else 0.0
    least, most = splitting * (1.0 - rounding), splitting * (1.0 + rounding)
    value, lower, upper = max(value, splitting), max(lower, least), max(upper, most)
    return WassersteinLipschitz(
        value=value,
        lower=lower,
        upper=upper,
        confidence=confidence,
        converged=upper - lower <= rtol * value,
        by="splitting" if splitting > float(weighted.value) else "displacement",
        weighted=weighted,
        splitting=splitting,
        splitting_lower=least,
        splitting_upper=most,
        atom=atom,
        splitting_direction=direction,
        scope=weighted.scope,
    )


def _largest(f: TokenMap, x: Tensor, weighting: Weighting) -> tuple[float, int, Tensor]:
    """Return max_i ‖D Γ_μ(x_i)‖, the atom i and the leading right singular vector."""
    best, atom, direction, first = -1.0, 0, x.new_zeros(f.d), 0
    for block in frozen_derivatives(f, x, weighting):
        sizes, order = torch.linalg.matrix_norm(block).sort(descending=True)
        # A spectral norm is at most the Frobenius norm, which costs nothing.
        for begin in range(0, len(order), _TOGETHER):
            chosen = order[begin : begin + _TOGETHER]
            if float(sizes[begin]) <= best:
                break
            _, values, right = torch.linalg.svd(block[chosen], full_matrices=False)
            place = int(values[:, 0].argmax())
            if float(values[place, 0]) > best:
                best, atom = float(values[place, 0]), first + int(chosen[place])
                direction = right[place, 0]
        first += len(block)
    return best, atom, direction
