"""What a measurement says: the local Lipschitz constants of several inputs, with their intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["LipschitzEstimate", "LipschitzEstimates", "Method"]

Method = Literal["closed form", "autodiff"]


@dataclass(frozen=True)
class _Constants:
    """Constants of several members, and how they were measured."""

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
        """What to do about members that did not converge; empty if all did."""
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
    """The local Lipschitz constant of each member of a batch, with its interval.

    Attributes
    ----------
    value
        The best estimate, and up to rounding a lower limit, float64, shape (...): the leading Ritz value;
        for the closed form in float32, ‖J v‖ in float64 along the direction v that was found.
    lower, upper
        Interval that holds ‖D_X f‖₂ with probability at least ``confidence``, for each member, over the
        random start; lower <= value <= upper. Rounding is in it: proved for the closed form in float64; in
        float32 the lower limit is proved and the upper one right to first order; else an allowance is
        calibrated (docs/theory/rounding.md).
    confidence
        See ``upper``.
    converged
        upper − lower <= rtol · value. Where false, the value is a lower limit and nothing more.
    iterations
        Golub–Kahan (or Lanczos) steps, each one product with the Jacobian and one with its adjoint.
    input_direction, output_direction
        Unit vectors (Frobenius norm) in input and output space, (..., n, d) and (..., n, d_out), or shaped as
        other members are: the perturbation of X that moves the output most, and where it moves it. Where
        singular values are repeated (symmetric inputs) they are one choice of many. The output direction is
        zero where the constant is. At a measure they hold √a_i e_i, e_i the displacement of atom i, of weight
        a_i.
    method
        "closed form" or "autodiff".
    scope
        What was measured, in words: the map with its masks, residuals and norms.
    rtol, seed
        As asked for.

    """

    input_direction: Float[Tensor, "..."]
    output_direction: Tensor


@dataclass(frozen=True, repr=False)
class LipschitzEstimates(_Constants):
    """The local Lipschitz constants at several sequences of lengths of their own.

    As :class:`LipschitzEstimate`, with shape (sequences,); the directions are tuples of one tensor a
    sequence, (n_i, d) and (n_i, d_out).
    """

    input_direction: tuple[Tensor, ...]
    output_direction: tuple[Tensor, ...]
