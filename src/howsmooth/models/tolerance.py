"""How close two computations of the same thing must be: derived from machine epsilon, in this place only."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["one_operation", "precision", "relative_error", "tolerance"]


def precision(dtype: torch.dtype, *, downcast: bool = False) -> float:
    """Machine epsilon of the arithmetic that was really used.

    A float64 model may compute some steps in float32: transformers' RMSNorm of Llama type, and its
    eager softmax, convert to float32 and back. What such a layer returns then carries float32 errors,
    while the captured map does not downcast; the two can only agree to float32.
    """
    return torch.finfo(torch.float32 if downcast else dtype).eps


def tolerance(eps: float, condition: float = 0.0) -> float:
    """Largest admissible relative error between a captured map and the model's own sublayer.

    Parameters
    ----------
    eps
        From :func:`precision`.
    condition
        Bound on the absolute scores, scale · max|q| · max|k|. A score s carries an absolute error of a few
        eps·|s|, which the exponential turns into a relative error of the attention weights.

    """
    return 64.0 * eps * (1.0 + condition)


def one_operation(eps: float) -> float:
    """Largest admissible relative error of a single sum, done in the same precision on both sides."""
    return 4.0 * eps


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest absolute difference, relative to the largest entry of ``wanted``; 0 if both vanish."""
    difference = float((got - wanted).abs().max())
    size = float(wanted.abs().max())
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else float("inf")
