"""The results of a measurement: local Lipschitz constants of one or several inputs, with their intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["LipschitzEstimate", "LipschitzEstimates", "Method"]

Method = Literal["closed form", "autodiff"]


@dataclass(frozen=True)
class _Constants:
    """The fields that both result classes share: constants, intervals, and how they were measured."""

    value: Float[Tensor, "*batch"]
    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]
    confidence: float
    converged: Bool[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    method: Method
    scope: str
    rtol: float
    seed: int | tuple[int, ...]

    @property
    def remedy(self) -> str:
        """What to do about members that did not converge; an empty string if all converged."""
        missed = int((~self.converged).sum())
        if not missed:
            return ""
        steps = int(self.iterations[~self.converged].max())
        return (
            f"{missed} of {self.converged.numel()} members did not reach rtol = {self.rtol:g} within {steps} "
            "iterations: raise max_iterations or, if fewer steps were made, memory; loosen rtol, as rounding "
            "may allow no narrower interval; or measure in float64. Their intervals hold all the same."
        )

    def __repr__(self) -> str:
        name = type(self).__name__
        if self.value.ndim == 0:
            status = "converged" if bool(self.converged) else "NOT converged"
            return (
                f"{name}({float(self.value):.6g} in [{float(self.lower):.6g}, "
                f"{float(self.upper):.6g}] at {self.confidence:.4%} confidence, {status} in "
                f"{int(self.iterations)} iterations; {self.scope}; {self.method})"
            )
        return (
            f"{name}(shape {tuple(self.value.shape)}, {int(self.converged.sum())} of "
            f"{self.converged.numel()} converged; {self.scope}; {self.method})"
        )


@dataclass(frozen=True, repr=False)
class LipschitzEstimate(_Constants):
    """The local Lipschitz constant of each member of a batch, with an interval for each.

    Attributes
    ----------
    value
        The best estimate of each constant, float64, shape (...). It is the leading Ritz value; for the
        closed form in float32 it is ‖J v‖, computed in float64 for the direction v that was found. Up to
        rounding, it is also a lower limit.
    lower, upper
        Limits of an interval that contains ‖D_X f‖₂ with probability at least ``confidence`` for each
        member. The probability is over the random start, and lower <= value <= upper. The interval allows
        for rounding. For the closed form in float64 the allowance is proved. In float32 the lower limit is
        proved and the upper limit is correct to first order. For autodiff the allowance is calibrated by
        experiment (documentation page "Rounding, proved").
    confidence
        Probability that the interval of a member contains its constant.
    converged
        Whether upper − lower <= rtol · value. Where false, the interval is wider than requested, and the
        value may be far below the constant.
    iterations
        Number of Golub–Kahan or Lanczos steps. Each step takes one product with the Jacobian and one with
        its adjoint.
    input_direction, output_direction
        Leading singular vectors of the Jacobian, with Frobenius norm 1, of shapes (..., n, d) and (..., n,
        d_out), or of the shapes of the map's input and output: the perturbation of X that changes the
        output most, and the direction of that change. If the leading singular value is repeated (as at
        symmetric inputs), they are one of many possible choices. The output direction is zero if the
        constant is zero. At a measure, their rows are √a_i e_i, where e_i is the displacement of atom i and
        a_i its weight.
    method
        How the Jacobian was applied: "closed form" or "autodiff".
    scope
        A description of the measured map with its masks, residuals and norms.
    rtol, seed
        The arguments of the call.

    """

    input_direction: Float[Tensor, "..."]
    output_direction: Tensor


@dataclass(frozen=True, repr=False)
class LipschitzEstimates(_Constants):
    """The local Lipschitz constants at several sequences of different lengths.

    The attributes are those of :class:`LipschitzEstimate`, with shape (sequences,). The directions are
    tuples with one tensor for each sequence, of shapes (n_i, d) and (n_i, d_out).
    """

    input_direction: tuple[Tensor, ...]
    output_direction: tuple[Tensor, ...]
