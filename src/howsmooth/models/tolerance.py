"""Tolerances for comparing two computations of the same tensors, derived from machine epsilon."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["lowest_epsilon", "one_operation", "relative_error", "tolerance"]


def lowest_epsilon(dtype: torch.dtype, *, downcast: bool = False) -> float:
    """Return the machine epsilon of the lowest precision in which the model computes.

    This is the epsilon of ``dtype``, or of float32 if the model computes some steps in float32.

    A float64 model may compute some steps in float32: transformers' RMSNorm of Llama type, and its eager
    softmax, convert to float32 and back. The output of such a layer carries float32 errors, and the captured
    map does not, so that the two agree only to float32.
    """
    return torch.finfo(torch.float32 if downcast else dtype).eps


def tolerance(eps: float, condition: float = 0.0) -> float:
    """Return the largest relative difference at which a captured map counts as equal to the model's layer.

    Parameters
    ----------
    eps
        Machine epsilon, from :func:`lowest_epsilon`.
    condition
        A bound on the absolute scores, scale · max|q| · max|k|. A score s has an absolute error of a few
        eps·|s|, and the exponential turns it into a relative error of the attention weights.

    """
    return 64.0 * eps * (1.0 + condition)


def one_operation(eps: float) -> float:
    """Return the largest relative difference at which two ways of adding the same numbers count as equal."""
    return 4.0 * eps


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return max|got − wanted| / max|wanted|, over all entries.

    It is 0 if the tensors are equal, and infinite if only ``wanted`` is zero.
    """
    difference = float((got - wanted).abs().max())
    size = float(wanted.abs().max())
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else float("inf")
