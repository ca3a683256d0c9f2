"""Checks that the products of a linear operator are finite, and that rounding leaves them at least one
correct digit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from howsmooth.errors import NonFiniteError
from howsmooth.spectral.operator import LinearOperator

__all__ = ["check_finite", "checked_rounding"]


def checked_rounding(operator: LinearOperator) -> np.ndarray:
    """Return the estimated relative rounding error of the norm of each map in an operator, after checking
    that it is below 0.1.

    Raise NonFiniteError otherwise, because no digit of such a norm is known.
    """
    slack: np.ndarray = operator.rounding.numpy()
    if operator.proved is not None:
        # Infinite where nothing is proved, because the scores have lost their digits.
        slack = np.where(np.isfinite(operator.proved.total.numpy()), slack, np.inf)
    if not (slack < 0.1).all():
        raise NonFiniteError(
            "f",
            expected=f"a Jacobian of which {operator.dtype} products keep a digit",
            got=f"a relative rounding of {slack.max():.1e}",
            remedy="Attention scores are too large for it, or terms cancel; measure in float64 or at smaller "
            "tokens.",
        )
    return slack


def check_finite(norms: Tensor) -> None:
    """Raise NonFiniteError unless all numbers in ``norms``, lengths of an operator's products, are finite."""
    if not bool(torch.isfinite(norms).all()):
        raise NonFiniteError(
            "f",
            expected="finite Jacobian products",
            got="NaN or infinity",
            remedy="Look for overflow: tokens or parameters too large for their dtype.",
        )
