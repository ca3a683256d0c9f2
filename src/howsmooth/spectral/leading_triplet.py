"""The result of a measurement of the largest singular value of each linear map in a batch."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["LeadingTriplet"]


@dataclass(frozen=True)
class LeadingTriplet:
    """The largest singular value of each linear map in a batch, an interval that contains it, and its
    singular vectors.

    ``sigma``, ``lower`` and ``upper`` are float64, with lower <= sigma <= upper. ``converged`` says whether
    upper − lower <= rtol · sigma. ``broke_down`` says whether the Krylov space was exhausted, or rounding
    allows no narrower interval. ``right`` and ``left`` are unit vectors in the input and output space;
    ``left`` is zero for a map that is zero.
    """

    sigma: Float[Tensor, " batch"]
    lower: Float[Tensor, " batch"]
    upper: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]
    broke_down: Bool[Tensor, " batch"]
    steps: Int[Tensor, " batch"]
    right: Float[Tensor, "batch *in_shape"]
    left: Float[Tensor, "batch *out_shape"]
