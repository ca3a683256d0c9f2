"""The formula that the published code evaluates for the bound of Theorem C.3."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.bounds.parameters import parameters_of
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["c_3_as_coded"]


def c_3_as_coded(attention: object, X: Tensor) -> float:
    """‖V‖ √(R_A² r² (n + 1) + n) with R_A = max_i |A x_i| and r the diameter of the tokens.

    This is no bound on ‖D_X f‖, and is returned as a bare number for that reason: C_i A depends on Aᵀ x_j,
    which R_A leaves out, and on the query bias, which is ignored. A = 10 e₂e₁ᵀ, V = I and
    X = ((0, 1), (0, −1)) give √2, where ‖D_X f‖ is 10.1. ``bounds.theorem_c_3`` is the valid form.

    Parameters
    ----------
    attention
        One head: a ``SelfAttention`` or a ``Head``.
    X
        Tokens (n, d).

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or X does not fit.
    NonFiniteError
        If an entry of X is NaN or infinite.

    References
    ----------
    Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, Theorem C.3, and the code published with it.

    """
    head = parameters_of(attention).one_head("c_3_as_coded")
    if not isinstance(X, Tensor) or X.ndim != 2 or X.shape[0] < 1 or X.shape[1] != head.d:
        got = f"shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
        raise ArgumentError("X", expected=f"tokens of shape (n, {head.d})", got=got)
    if not bool(torch.isfinite(X).all()):
        raise NonFiniteError("X", expected="finite numbers", got="NaN or infinity")
    x = X.detach().to(dtype=torch.float64, device="cpu")
    largest = float(torch.linalg.vector_norm(x @ head.right.mT @ head.left.mT, dim=1).amax())
    r = float(torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").amax())
    return head.V_norm * math.hypot(largest * r * math.sqrt(len(x) + 1), math.sqrt(len(x)))
