"""Bounds on ‖D_{RX} f‖ for tokens R·X of large radius R, from the limit as R → ∞ and an explicit rate of
convergence.

Proofs: documentation page "Large radius".
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch

from howsmooth.bounds.attention_parameters import log_spectral_norm, row_blocks
from howsmooth.bounds.ball_upper_bounds import no_query_bias
from howsmooth.bounds.bound import Quantity
from howsmooth.bounds.bound_problem import Problem, Vectors, far_out
from howsmooth.bounds.catalogue import PAPER, Condition, statement
from howsmooth.bounds.log_numbers import Log
from howsmooth.rounding import entries_of, known_to, plain

__all__ = ["theorem_3_7", "theorem_4_5"]

_PAGE = 'with the rate of the documentation page "Large radius"'


class LargeRadius(NamedTuple):
    """The distance between the Jacobian of attention at tokens R·X and its limit Π⊗V as R → ∞.

    Π_ij is 1 where token j has the largest score of row i, and 0 elsewhere. ‖Π⊗V‖ = ‖V‖ √(max_j #{i : row i
    has its argmax at j}).
    """

    #: ‖Π⊗V‖, rounded up and down.
    limit: Log
    limit_below: Log
    #: An upper bound on ‖D_{RX}f − Π⊗V‖.
    distance: Log
    #: The smallest difference, over the rows, of the two largest scores ⟨A x_i, x_j⟩ at R = 1, minus a bound
    #: on its rounding error. It is positive only if every row has a unique argmax.
    gap: float


_far_out = partial(statement, far_out, side=None, quantity=Quantity.LOCAL)


def _needs(*, masked: bool) -> tuple[Condition[Problem], ...]:
    words = "the largest score of every row is attained by one token"
    return no_query_bias(), Condition(words, lambda p: p.once(large_radius, masked).gap > 0)


@_far_out(source=f"{PAPER}, Theorem 3.7, {_PAGE}", masks="none", needs=_needs(masked=False))
def theorem_3_7(p: Problem) -> tuple[Log, Log]:
    """Bound ‖D_{RX} f‖ from above or below by the limit as R → ∞ and the convergence rate in Theorem 3.7.

    The bound is the limit plus or minus a distance. The limit is ‖V‖ √(max_j #{i : m_i = j}), where m_i is
    the argmax over j of ⟨A x_i, x_j⟩. The distance from the limit is at most ‖V‖ η (√(2n)(1 + R² r max|A
    x_i|) + R² r² ‖A‖), where r is the diameter of X, δ the smallest gap between the two largest scores of a
    row, and η = (n−1)e^{−δR²}/(1 + (n−1)e^{−δR²}). It tends to zero as R → ∞.
    """
    return _ends(p.once(large_radius, False))


@_far_out(source=f"{PAPER}, Theorem 4.5, {_PAGE}", masks="causal", needs=_needs(masked=True))
def theorem_4_5(p: Problem) -> tuple[Log, Log]:
    """Bound ‖D_{RX} f^m‖ of causal attention by the limit as R → ∞ and the convergence rate in Theorem 4.5.

    The bound is the limit plus or minus a distance. The limit and the distance are as in :func:`theorem_3_7`,
    with m_i the argmax over j <= i.
    """
    return _ends(p.once(large_radius, True))


def _ends(found: LargeRadius) -> tuple[Log, Log]:
    low = found.limit_below
    share = float((found.distance / low).value)
    return low * (1 - share) if share < 1 else Log(-math.inf), found.limit + found.distance


def large_radius(p: Problem, masked: bool) -> LargeRadius:
    """Compare the Jacobian of one head without query bias at tokens R·X with its limit as R → ∞. ``masked``
    says whether row i sees only the tokens j <= i.
    """
    x, head, n, R = p.tokens, p.head, len(p.tokens), Log.of(p.factor)
    keys, queries = known_to(x) @ known_to(head.left), known_to(x) @ known_to(head.right).mT
    order = torch.arange(n)
    gap, chosen = math.inf, []
    for rows in row_blocks(n):
        rounded = queries[rows] @ keys.mT
        if masked:
            rounded = rounded.masked_fill(order > order[rows, None], -math.inf)
        scores, error = plain(rounded), entries_of(rounded)
        top, best = scores.max(dim=1)
        differences = top[:, None] - scores - error - error.gather(1, best[:, None])
        gap = min(gap, float(differences.scatter(1, best[:, None], math.inf).min()))
        chosen.append(best)
    count = int(torch.bincount(torch.cat(chosen), minlength=n).max())
    below = Log(log_spectral_norm(*head.V_factors, upper=False))
    limit, limit_below = p.V * Log.of(count) ** 0.5, below * Log.of(count) ** 0.5
    if n == 1:
        return LargeRadius(limit, limit_below, Log(-math.inf), math.inf)
    # Multiplied in this order, because a zero gap times R² = ∞ would be NaN
    share = (n - 1) * Log(-gap * p.factor * p.factor)
    moved = R**2 * p.diameter
    bare = torch.zeros_like(head.b)
    longest = Vectors.of(x, head.right.mT, head.left.mT, bare).longest
    inside = Log.of(2 * n) ** 0.5 * (1 + moved * longest) + moved * p.diameter * Log(head.log_A_norm)
    return LargeRadius(limit, limit_below, p.V * (1 / (1 + 1 / share)) * inside, gap)
