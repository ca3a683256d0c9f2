"""Bounds on ‖D_{RX} f‖ for tokens R·X of large radius R, from the limit as R → ∞ and an explicit rate of
convergence.

Proofs: documentation page "Large radius".
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.bounds.attention_parameters import Head, largest_distance, log_size, row_blocks, unit
from howsmooth.bounds.ball_upper_bounds import (
    PAPER,
    log,
    log_product,
    log_sum,
    no_query_bias,
    one_head,
    unmasked,
)
from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_radius
from howsmooth.bounds.masked_ball_upper_bounds import causal
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["LargeRadius", "large_radius", "theorem_3_7", "theorem_4_5"]

_PAGE = 'with the rate of the documentation page "Large radius"'

# Head rounds spectral norms up by this relative error of float64 arithmetic.
_NORM_MARGIN = 1e-12


@dataclass(frozen=True)
class LargeRadius:
    """The distance between the Jacobian of attention at tokens R·X and its limit as R → ∞.

    It has the norm of the limit, and a bound on the distance of D_{RX} f from it. The limit is Π⊗V. Π_ij is 1
    where token j has the largest score of row i, and 0 elsewhere.

    Attributes
    ----------
    log_limit
        Logarithm of ‖Π⊗V‖ = ‖V‖ √(max_j #{i : row i has its argmax at j}).
    log_distance
        Logarithm of an upper bound on ‖D_{RX}f − Π⊗V‖.
    gap
        The smallest difference, over the rows, of the two largest scores ⟨A x_i, x_j⟩ at R = 1, minus a bound
        on its rounding error. It is positive only if every row has a unique argmax.

    """

    log_limit: float
    log_distance: float
    gap: float


def theorem_3_7(attention: object, X: object, radius: object, *, side: object = "upper") -> Bound:
    """Bound ‖D_{RX} f‖ from above or below by the limit as R → ∞ and the convergence rate in Theorem 3.7.

    The bound is the limit plus or minus a distance. The limit is ‖V‖ √(max_j #{i : m_i = j}), where m_i is
    the argmax over j of ⟨A x_i, x_j⟩. The distance from the limit is at most ‖V‖ η (√(2n)(1 + R² r max|A
    x_i|) + R² r² ‖A‖), where r is the diameter of X, δ the smallest gap between the two largest scores of a
    row, and η = (n−1)e^{−δR²}/(1 + (n−1)e^{−δR²}). It tends to zero as R → ∞.

    Parameters
    ----------
    attention
        One head: a :class:`~howsmooth.bounds.Head`, a :class:`~howsmooth.attention.SelfAttention` or a
        captured site.
    X
        Tokens (n, d), float32 or float64. The bound is for the Jacobian at ``radius * X``.
    radius
        The factor R > 0.
    side
        "upper" for the limit plus the distance, "lower" for the limit minus the distance.

    Returns
    -------
    Bound
        Bound on ‖D_{RX} f‖. Hypotheses: no mask, no query bias, a unique argmax in every row.

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or an argument does not fit.
    NonFiniteError
        If ``X`` is not finite.

    References
    ----------
    Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, Theorem 3.7. The rate is proved
    on the documentation page "Large radius".

    """
    parameters, head = one_head(attention, "theorem_3_7")
    found = large_radius(head, X, check_radius(radius), masked=False)
    return _bound(
        "theorem_3_7", f"{PAPER}, Theorem 3.7, {_PAGE}", found, side, head, unmasked(attention, parameters)
    )


def theorem_4_5(attention: object, X: object, radius: object, *, side: object = "upper") -> Bound:
    """Bound ‖D_{RX} f^m‖ of causal attention by the limit as R → ∞ and the convergence rate in Theorem 4.5.

    The bound is the limit plus or minus a distance. The limit and the distance are as in :func:`theorem_3_7`,
    with m_i the argmax over j <= i.

    Parameters
    ----------
    attention
        One head: a :class:`~howsmooth.bounds.Head` (taken as causal), a causal
        :class:`~howsmooth.attention.SelfAttention` or a captured site.
    X, radius, side
        As for :func:`theorem_3_7`.

    Returns
    -------
    Bound
        Bound on ‖D_{RX} f^m‖. Hypotheses: only a causal mask, no query bias, a unique argmax in every row.

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or an argument does not fit.
    NonFiniteError
        If ``X`` is not finite.

    References
    ----------
    Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, Theorem 4.5. The rate is proved
    on the documentation page "Large radius".

    """
    parameters, head = one_head(attention, "theorem_4_5")
    found = large_radius(head, X, check_radius(radius), masked=True)
    return _bound(
        "theorem_4_5", f"{PAPER}, Theorem 4.5, {_PAGE}", found, side, head, causal(attention, parameters)
    )


def large_radius(head: Head, X: object, radius: float, *, masked: bool) -> LargeRadius:
    """Compare the Jacobian of attention at tokens R·X with its limit as R → ∞.

    The results are the norm of the limit, and an upper bound on the distance from it at R = ``radius``.

    Parameters
    ----------
    head
        The head; its query bias is ignored.
    X
        Tokens (n, d).
    radius
        The factor R > 0.
    masked
        Whether row i sees only the tokens j <= i.

    Raises
    ------
    ArgumentError
        If ``X`` does not fit.
    NonFiniteError
        If ``X`` is not finite.

    """
    x = _tokens(X, head.d)
    n = x.shape[0]
    keys, queries = x @ head.left, x @ head.right.mT
    y = queries @ head.left.mT  # rows A x_i
    # Rounding error of a score x_iᵀAx_j: relative to the same product of absolute values of all factors.
    sizes = (head.left.abs().mT @ x.abs().mT).mT, x.abs() @ head.right.abs().mT
    relative = 2 * (2 * head.d + head.left.shape[1]) * sys.float_info.epsilon
    order = torch.arange(n)
    gap, chosen = math.inf, []
    for rows in row_blocks(n):
        scores, error = queries[rows] @ keys.mT, relative * (sizes[1][rows] @ sizes[0].mT)
        if masked:
            hidden = order > order[rows, None]
            scores, error = scores.masked_fill(hidden, -math.inf), error.masked_fill(hidden, 0.0)
        top, best = scores.max(dim=1)
        differences = top[:, None] - scores - error - error.gather(1, best[:, None])
        gap = min(gap, float(differences.scatter(1, best[:, None], math.inf).min()))
        chosen.append(best)
    count = int(torch.bincount(torch.cat(chosen), minlength=n).max())
    log_limit = log_product(head.log_V_norm, 0.5 * math.log(count))
    if n == 1:
        return LargeRadius(log_limit, -math.inf, math.inf)
    # Of vectors divided by their largest entries, because squares leave the range of float64 earlier
    diameter = log(largest_distance(unit(x))) + log_size(x) + 1e-12
    longest = log(float(torch.linalg.vector_norm(unit(y), dim=1).max())) + log_size(y) + 1e-12
    # η = 1/(1 + e^{−t}) with t = log((n−1) e^{−δR²})
    t = (
        math.log(n - 1) - gap * radius * radius
    )  # multiplied in this order, because a zero gap times R² = ∞ would be NaN
    log_eta = min(t, 0.0) - math.log1p(math.exp(-abs(t)))
    log_r2 = 2 * math.log(radius)
    outside = log_sum(0.0, log_product(log_r2, diameter, longest))
    inside = log_sum(0.5 * math.log(2 * n) + outside, log_product(log_r2, 2 * diameter, head.log_A_norm))
    return LargeRadius(log_limit, log_product(head.log_V_norm, log_eta, inside), gap)


def _bound(
    name: str, source: str, found: LargeRadius, side: object, head: Head, masking: Hypothesis
) -> Bound:
    hypotheses = (
        masking,
        no_query_bias(head),
        Hypothesis("the largest score of every row is attained by one token", found.gap > 0),
    )
    if side == "upper":
        return Bound.upper(
            name,
            Quantity.LOCAL,
            source,
            log_formula=log_sum(found.log_limit, found.log_distance),
            hypotheses=hypotheses,
        )
    if side != "lower":
        raise ArgumentError("side", expected="'upper' or 'lower'", got=repr(side))
    # The lower bound needs ‖V‖ rounded down: the margin by which it was rounded up is taken off.
    log_low = found.log_limit - 3 * _NORM_MARGIN
    ratio = found.log_distance - log_low if math.isfinite(log_low) else math.inf
    log_lower = log_low + math.log1p(-math.exp(ratio)) if ratio < 0 else -math.inf
    return Bound.lower(name, Quantity.LOCAL, source, log_formula=log_lower, hypotheses=hypotheses)


def _tokens(X: object, d: int) -> Tensor:
    if not isinstance(X, Tensor) or X.ndim != 2 or X.shape[0] < 1 or X.shape[1] != d:
        got = f"shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
        raise ArgumentError("X", expected=f"tokens of shape (n, {d}) with n >= 1", got=got)
    if X.dtype not in (torch.float32, torch.float64):
        raise ArgumentError("X", expected="dtype float32 or float64", got=str(X.dtype))
    if not bool(torch.isfinite(X).all()):
        raise NonFiniteError("X", expected="finite numbers", got="NaN or infinity")
    return X.detach().to(device="cpu", dtype=torch.float64)
