"""The local Lipschitz constant, in the Wasserstein distance W₂, of attention as a map of measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import AbstractMeasure
from howsmooth.errors import ArgumentError
from howsmooth.jacobian.fixed_measure_derivative import frozen_derivatives
from howsmooth.lipschitz import LipschitzEstimate, local_lipschitz
from howsmooth.rounding import interval_in_digits

__all__ = ["WassersteinLipschitz", "wasserstein_lipschitz"]

# The number of matrices in one batched singular value decomposition.
_TOGETHER = 8


@dataclass(frozen=True)
class WassersteinLipschitz:
    """The local Lipschitz constant of attention as a map of measures, in the Wasserstein distance W₂.

    It is the larger of two parts: one for perturbations that move whole atoms, one for those that split one.

    Attributes
    ----------
    value, lower, upper
        The constant, which is the larger of the two parts below, and an interval that contains it with
        probability at least ``confidence``.
    confidence
        Probability that the interval contains the constant, over the random start of the first part.
    converged
        Whether upper − lower <= rtol · value.
    by
        The larger part: "displacement" if the worst perturbation moves whole atoms, "splitting" if it splits
        an atom.
    weighted
        First part: the weighted norm ‖J‖_a, the constant for perturbations that move whole atoms.
    splitting, splitting_lower, splitting_upper
        Second part: max_i ‖D Γ_μ(x_i)‖ (for one head, max_i ‖V C_i A‖), and an interval that allows for
        rounding.
    atom, splitting_direction
        The atom i with the largest ‖D Γ_μ(x_i)‖, and the unit vector (d,) along which its two halves move
        apart.
    scope
        A description of what was measured.

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
            f"WassersteinLipschitz({self.value:.6g} in {interval_in_digits(self.lower, self.upper)} at "
            f"{100 * self.confidence:.6g} % confidence, {status}, by {self.by}: atoms that move whole "
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
    """Measure the local Lipschitz constant of a map ``f`` of measures, in the Wasserstein distance W₂, near a
    discrete measure.

    The constant is the limit, as δ → 0, of the largest W₂(F(ν), F(ν')) / W₂(ν, ν') over measures ν ≠ ν' whose
    W_∞ distance from the given measure is at most δ. It equals max(‖J‖_a, max_i ‖D Γ_μ(x_i)‖). The first part
    belongs to perturbations that move whole atoms, the second to perturbations that split an atom. For a
    causal map and a measure with positions, the distance is the conditional d₂ (Definition 4.1), and
    positions do not change.

    Parameters
    ----------
    f
        A map that acts on measures.
    measure
        A measure with atoms. Merging coinciding atoms does not change the constant.
    rtol, confidence, max_iterations, seed
        As for :func:`howsmooth.local_lipschitz`, which computes the first part.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value, or the measure has no atoms.
    NonFiniteError
        If the constant is beyond the range of float64.

    References
    ----------
    For perturbations that move whole atoms: Lemma C.5 of Castin, Ablin, Peyré, *How Smooth Is Attention?*,
    ICML 2024. For atoms that split: documentation page "The local constant of mean-field attention".

    """
    if not isinstance(measure, AbstractMeasure):
        raise ArgumentError(
            "measure",
            expected="a discrete measure",
            got=type(measure).__name__,
            remedy="For tokens X use DiscreteMeasure(X), or DiscreteMeasure.sequence(X) for a causal map.",
        )
    weighted = local_lipschitz(
        f, measure, rtol=rtol, confidence=confidence, max_iterations=max_iterations, seed=seed
    )
    points, weighting = measure.weighted_tokens()
    weighting = Weighting(weighting.log_weights.detach(), weighting.positions)
    splitting, atom, direction = _largest(f.to(dtype=torch.float64), points.detach().double(), weighting)
    value, lower, upper = (float(limit) for limit in (weighted.value, weighted.lower, weighted.upper))
    # Both parts are computed from the same probabilities, so the rounding allowance of the first part also
    # covers the second.
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
    """Return max_i ‖D Γ_μ(x_i)‖, the atom that attains it, and the leading right singular vector there."""
    best, atom, direction, first = -1.0, 0, x.new_zeros(f.d), 0
    for block in frozen_derivatives(f, x, weighting):
        sizes, order = torch.linalg.matrix_norm(block).sort(descending=True)
        # Matrices are taken in order of decreasing Frobenius norm. The spectral norm is at most the Frobenius
        # norm, so the search can stop at the first Frobenius norm below the best spectral norm.
        for begin in range(0, len(order), _TOGETHER):
            chosen = order[begin : begin + _TOGETHER]
            # No later matrix of this block can have a larger spectral norm.
            if float(sizes[begin]) <= best:
                break
            _, values, right = torch.linalg.svd(block[chosen], full_matrices=False)
            place = int(values[:, 0].argmax())
            if float(values[place, 0]) > best:
                best, atom = float(values[place, 0]), first + int(chosen[place])
                direction = right[place, 0]
        first += len(block)
    return best, atom, direction
