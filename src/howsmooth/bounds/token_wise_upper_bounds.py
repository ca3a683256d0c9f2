"""Upper bounds on the Lipschitz constant of attention in the norm max_i |x_i| of sequences.

If every input token moves by at most ε, every output token moves by at most the constant times ε. The
bound on a ball does not depend on the number of tokens. Proofs: documentation page "Influence: the blocks of
the Jacobian", section "Token-wise bounds".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.bounds.attention_parameters import Head, log_size, parameters_of, unit
from howsmooth.bounds.ball_upper_bounds import log, log_product, log_sum, upper
from howsmooth.bounds.bound import Bound, Quantity, check_radius
from howsmooth.bounds.local_upper_bounds import OneHead
from howsmooth.bounds.multi_head_upper_bounds import log_quadratic_form
from howsmooth.rounding import spectral_norm_above

__all__ = ["token_wise_ball_upper_bound", "token_wise_upper_bound"]

_OURS = 'howsmooth documentation, "Influence: the blocks of the Jacobian", {}'
# Covariances and their norms are rounded up by this relative error, far above the error of float64.
_MARGIN = 1e-12


def token_wise_ball_upper_bound(attention: object, radius: object) -> Bound:
    """Bound the Lipschitz constant of attention on the ball B_R^n, for sequences with the norm max_i |x_i|.

    With a_h = ‖A_h‖R² and c_h = √(1 + (a_h + |b_h|R)²) + a_h, the bound is (Σ_{h,g} ‖O_hᵀO_g‖ c_h c_g)^{1/2},
    where O_h = W_h V_h; for one head it is ‖V‖ (√(1 + (‖A‖R² + |b|R)²) + ‖A‖R²). It holds for every number of
    tokens and every mask, and is attained in the limit n → ∞ by one head with A = aI, V = I and d ≥ 2.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.SelfAttention` with any number of heads and any mask, a
        :class:`~howsmooth.bounds.Head`, or a captured site.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on the Lipschitz constant on B_R^n between the norms max_j |x_j| and max_i |y_i|.

    Raises
    ------
    ArgumentError
        If there are rotary positions, or scores are modified, or the radius does not fit.

    References
    ----------
    Documentation page "Influence: the blocks of the Jacobian", Theorem T.

    """
    parameters, R = parameters_of(attention), check_radius(radius)
    pairs = list(zip(parameters.outputs, parameters.heads, strict=True))
    maps = [unit(W) @ unit(head.V) for W, head in pairs]
    logs = [log_product(log_size(W), log_size(head.V), _log_row(head, R)) for W, head in pairs]
    return upper(
        "token_wise_ball_upper_bound",
        Quantity.TOKEN_WISE,
        _OURS.format("Theorem T"),
        log_quadratic_form(maps, logs),
    )


def _log_row(head: Head, R: float) -> float:
    """Return the log of √(1 + (‖A‖R² + |b|R)²) + ‖A‖R², the main factor of the bound on one head."""
    a = head.log_A_norm + 2 * math.log(R)
    largest = log_sum(a, log(head.b_norm) + math.log(R))
    return log_sum(0.5 * log_sum(0.0, 2 * largest), a)


def token_wise_upper_bound(attention: object, X: Tensor | None = None) -> Bound:
    """Bound the operator norm of D_X f of one head at given tokens, for sequences with the norm max_i |x_i|.

    The bound is max_i (‖V Vᵀ + |A x_i + b|² V C_i Vᵀ‖^{1/2} + ‖V C_i A‖), where C_i is the covariance of
    the tokens under row i of P. It is at most :func:`token_wise_ball_upper_bound` on a ball that holds the
    tokens.

    Parameters
    ----------
    attention
        One head: a :class:`~howsmooth.attention.SelfAttention`, a captured site or a
        :class:`~howsmooth.bounds.Head`.
    X
        Tokens (n, d), or None for the tokens of the site.

    Returns
    -------
    Bound
        Upper bound on max_i sup |Σ_j J_ij e_j| over tangents with |e_j| ≤ 1.

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or an argument does not fit.
    NonFiniteError
        If an entry of X is NaN or infinite.

    References
    ----------
    Documentation page "Influence: the blocks of the Jacobian", section "Token-wise bounds".

    """
    at = OneHead.at(attention, X, "token_wise_upper_bound")
    V, largest = at.head.V, 0.0
    P = at.weights
    for p, y in zip(P, at.y, strict=True):
        z = p.sqrt()[:, None] * (at.X - p @ at.X)  # C_i = zᵀ z
        moved, length = z @ V.mT, float(torch.linalg.vector_norm(y))
        # ‖V Vᵀ + |y|² V C Vᵀ‖^{1/2} is the norm of V and |y| z Vᵀ side by side.
        values = spectral_norm_above(torch.cat((V.mT, length * moved)))
        keys = spectral_norm_above(moved.mT @ ((z @ at.head.left) @ at.head.right))
        largest = max(largest, values + keys)
    return upper(
        "token_wise_upper_bound",
        Quantity.LOCAL_TOKEN_WISE,
        _OURS.format("Token-wise bounds"),
        log(largest * (1 + _MARGIN)),
    )
