"""Upper bounds on the Lipschitz constant of one attention head with a causal mask or any other mask, on a
ball.

Lip(f^m on B_R^n) is the Lipschitz constant of causal attention f^m, in Frobenius norms, on all sequences of n
tokens of norm at most R. The scores are ⟨A x_i + b, x_j⟩ and the values V x_j. In the formulas a = ‖A‖R² and
a₃ = (‖A‖R + |b|)R. Proofs: documentation page "Bounds on a ball".
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from howsmooth.attention.masks import Visibility
from howsmooth.bounds.attention_parameters import Head, Parameters
from howsmooth.bounds.ball_upper_bounds import (
    OURS,
    PAPER,
    log,
    log_h_star,
    log_product,
    log_row,
    log_sum,
    log_theorem_3_3,
    no_query_bias,
    one_head,
    score_sizes,
    softplus,
    upper,
)
from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_length, check_radius

__all__ = [
    "causal_ball_upper_bound",
    "causal_mean_field_upper_bound",
    "masked_ball_upper_bound",
    "theorem_4_3",
    "theorem_4_4",
]

# The least ‖A‖R² for which Theorem 4.4 follows from causal_mean_field_upper_bound; see theorem_4_4.
_THEOREM_4_4_FROM = 0.4

# Bounds on the rows up to this one are summed; the sum over later rows is bounded by an integral.
_SUMMED_ROWS = 20_000

# Number of entries in a block of a mask.
_ENTRIES = 1 << 24


def theorem_4_3(attention: object, length: object, radius: object) -> Bound:
    """Bound Lip(f^m on B_R^n) of causal attention from above by Theorem 4.3 of the paper.

    The bound is √3 ‖V‖ (‖A‖²R⁴(4n+1) + n)^{1/2}, as in Theorem 3.3.

    Parameters
    ----------
    attention
        One head: a :class:`~howsmooth.bounds.Head` (taken as causal), a causal
        :class:`~howsmooth.attention.SelfAttention` or a captured site.
    length
        Number n >= 1 of tokens.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip(f^m on B_R^n). Hypotheses: only a causal mask, no query bias.

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or length or radius do not fit.

    References
    ----------
    Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, Theorem 4.3.

    """
    parameters, head = one_head(attention, "theorem_4_3")
    n, R = check_length(length), check_radius(radius)
    return upper(
        "theorem_4_3",
        Quantity.MASKED,
        f"{PAPER}, Theorem 4.3",
        log_theorem_3_3(head, n, R),
        causal(attention, parameters),
        no_query_bias(head, "causal_ball_upper_bound"),
    )


def theorem_4_4(attention: object, radius: object) -> Bound:
    """Bound the Lipschitz constant of causal mean-field attention by a corrected version of Theorem 4.4 of
    the paper.

    The bound is ‖V‖ (1 + 3a) e^{2a} with a = ‖A‖R² >= 0.4, in the conditional distance d₂. The published
    theorem claims the bound for every a, which is false for small a. For A = 0, V = I the map averages the
    tokens seen so far; its norm is 1.14 for two tokens and tends to 2 (Hardy), but the formula gives 1.
    Copies of one token give the same averages for any A, so the formula is no bound where it is below 2, that
    is for a <= 0.155. For a >= 0.4 it follows from :func:`causal_mean_field_upper_bound`.

    Parameters
    ----------
    attention
        One head, as for :func:`theorem_4_3`.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip_d2(F^m on P(B_R)), and so on Lip(f^m on B_R^n) for every n. Hypotheses: only a
        causal mask, no query bias, ‖A‖R² >= 0.4.

    Raises
    ------
    ArgumentError
        As for :func:`theorem_4_3`.

    References
    ----------
    Castin, Ablin, Peyré, ICML 2024, Theorem 4.4. For the hypothesis on a: documentation page "Bounds on a
    ball", section "Theorem 4.4 as printed is false for small a".

    """
    parameters, head = one_head(attention, "theorem_4_4")
    a, _ = score_sizes(head, check_radius(radius))
    return upper(
        "theorem_4_4",
        Quantity.MASKED_MEAN_FIELD,
        f"{PAPER}, Theorem 4.4, with a hypothesis added",
        log_product(head.log_V_norm, math.log1p(3 * a) + 2 * a),
        causal(attention, parameters),
        no_query_bias(head, "causal_mean_field_upper_bound"),
        Hypothesis(f"‖A‖R² ≥ {_THEOREM_4_4_FROM}", a >= _THEOREM_4_4_FROM),
    )


def causal_ball_upper_bound(attention: object, length: object, radius: object) -> Bound:
    """Bound Lip(f^m on B_R^n) of one head with a causal mask from above by Theorem A of the documentation.

    The bound is ‖V‖ (a + √(1 + Σ_{i=2}^n ρ_i)). ρ_i = min{h*(a₃), (1 + a₃²) P̄(i, a₃)} with a = ‖A‖R²,
    a₃ = (‖A‖R + |b|)R, the function h* of ``row_norm_maximum``, and P̄(i, a) = 1/(1 + (i−1)e^{−2a}). For
    n = 1 the bound is ‖V‖.

    Parameters
    ----------
    attention, length, radius
        As for :func:`theorem_4_3`.

    Returns
    -------
    Bound
        Upper bound on Lip(f^m on B_R^n). Hypothesis: only a causal mask.

    Raises
    ------
    ArgumentError
        As for :func:`theorem_4_3`.

    References
    ----------
    Documentation page "Bounds on a ball", Theorem A with a mask.

    """
    parameters, head = one_head(attention, "causal_ball_upper_bound")
    n, R = check_length(length), check_radius(radius)
    a, a3 = score_sizes(head, R)
    factor = 0.0 if n == 1 else log_sum(log(a), 0.5 * log_causal_rows(n, a3))
    return upper(
        "causal_ball_upper_bound",
        Quantity.MASKED,
        f"{OURS}, Theorem A with a mask",
        log_product(head.log_V_norm, factor),
        causal(attention, parameters),
    )


def masked_ball_upper_bound(attention: object, length: object, radius: object) -> Bound:
    """Bound Lip(f on B_R^n) of one head with an arbitrary mask from above by Theorem A of the documentation.

    The bound is ‖V‖ (a + √(max_j Σ_{i sees j} ρ_i)). ρ_i = min{h*(a₃), (1 + a₃²) P̄(n_i, a₃)} for a row i
    that sees n_i tokens, and 1 if n_i = 1, in the notation of :func:`causal_ball_upper_bound`. Without a mask
    this is Theorem A, and with a causal mask its causal form. Under a window, the width of the window takes
    the place of n. If every row sees one token, the map is linear and the term a is left out.

    Parameters
    ----------
    attention
        One head; a :class:`~howsmooth.bounds.Head` is taken as unmasked.
    length
        Number n >= 1 of tokens, which must be the size of a mask that is given as a matrix.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip(f on B_R^n) for the attention f with its mask. It has no hypotheses.

    Raises
    ------
    ArgumentError
        As for :func:`theorem_4_3`, or if the length is not that of the mask.

    References
    ----------
    Documentation page "Bounds on a ball", Theorem A with a mask.

    """
    parameters, head = one_head(attention, "masked_ball_upper_bound")
    n, R = check_length(length), check_radius(radius)
    a, a3 = score_sizes(head, R)
    alone = n == 1
    if parameters.masking == "other":
        log_rows, largest = _log_rows_of_mask(parameters.visibility(n), a3)
        alone = largest == 1
    elif parameters.masking == "causal":
        log_rows = log_causal_rows(n, a3)
    else:
        log_rows = math.log(n) + log_row(n, a3)
    return upper(
        "masked_ball_upper_bound",
        Quantity.MASKED if parameters.masking == "causal" else Quantity.GLOBAL,
        f"{OURS}, Theorem A with any mask",
        log_product(head.log_V_norm, 0.5 * log_rows if alone else log_sum(log(a), 0.5 * log_rows)),
    )


def _log_rows_of_mask(seen: Visibility, a3: float) -> tuple[float, int]:
    """Sum bounds on the squared norms of the block rows of the Jacobian over the queries that see the same
    key. The first result is the log of the largest sum, the second is the largest number of keys that a query
    sees.

    The largest sum is max_j Σ_{i sees j} ρ_i, where ρ_i is Theorem A's bound on row i.
    """
    sizes = torch.cat([block.sum(dim=1) for _, block in mask_blocks(seen)])
    distinct, size_of_row = torch.unique(sizes, return_inverse=True)
    largest = int(distinct[-1])
    log_rho = torch.tensor([log_row(int(size), a3) for size in distinct], dtype=torch.float64)
    top = float(log_rho.max())
    if not math.isfinite(top):
        return top, largest
    rho, columns = torch.exp(log_rho - top)[size_of_row], torch.zeros(seen.n, dtype=torch.float64)
    for (rows, keys), block in mask_blocks(seen):
        columns[keys] += rho[rows] @ block.double()
    return top + math.log(float(columns.max())), largest


def mask_blocks(seen: Visibility) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Cut the mask into blocks. Yield for each block the slices of its rows and keys, and its entries."""
    longest = seen.n if seen.window is None else max(seen.window, 64)
    step = max(1, min(longest, _ENTRIES // min(seen.n, 3 * longest)))
    for start in range(0, seen.n, step):
        rows = slice(start, min(start + step, seen.n))
        keys = seen.keys(rows)
        block = seen.block(rows, keys)
        if block is None:
            block = torch.ones(rows.stop - start, keys.stop - keys.start, dtype=torch.bool)
        yield (rows, keys), block


def causal_mean_field_upper_bound(attention: object, radius: object) -> Bound:
    """Bound the Lipschitz constant of causal attention on the ball of radius R by a number that holds for all
    lengths n.

    The bound is ‖V‖ (a + e^{a₃}(2 + √6 a₃)), Theorem B. a = ‖A‖R² and a₃ = (‖A‖R + |b|)R. The bound is also
    one for the causal mean-field map in d₂. Its exponent is half that of Theorem 4.4, and it holds for every
    a. For A = 0 it is 2‖V‖, which is the supremum of the Lipschitz constant over n (Hardy's inequality).

    Parameters
    ----------
    attention
        One head, as for :func:`theorem_4_3`.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip_d2(F^m on P(B_R)), and so on Lip(f^m on B_R^n) for every n. Hypothesis: only a
        causal mask.

    Raises
    ------
    ArgumentError
        As for :func:`theorem_4_3`.

    References
    ----------
    Documentation page "Bounds on a ball", Theorem B.

    """
    parameters, head = one_head(attention, "causal_mean_field_upper_bound")
    a, a3 = score_sizes(head, check_radius(radius))
    return upper(
        "causal_mean_field_upper_bound",
        Quantity.MASKED_MEAN_FIELD,
        f"{OURS}, Theorem B",
        log_product(head.log_V_norm, log_sum(log(a), a3 + math.log(2 + math.sqrt(6) * a3))),
        causal(attention, parameters),
    )


def causal(attention: object, parameters: Parameters) -> Hypothesis:
    """Return the hypothesis that the mask is exactly the causal mask, together with whether it holds.

    A bare :class:`Head` is taken as causal.
    """
    holds = isinstance(attention, Head) or parameters.masking == "causal"
    return Hypothesis("a causal mask and no other", holds)


def log_causal_rows(n: int, a3: float) -> float:
    """Return the log of the sum of bounds on the squared norms of all block rows of the Jacobian under a
    causal mask, rounded up.

    The sum is Σ_{i=1}^n ρ_i, where ρ_i is Theorem A's bound on row i. ρ_1 = 1 and ρ_i = min{h*(a₃), (1 + a₃²)
    P̄(i, a₃)}. The sum is exact up to row 20000. Beyond it, ρ_i is replaced by h* up to some row and by (1 +
    a₃²) P̄(i, a₃) after that row. The latter is convex in i, so its sum is at most its integral from half a
    step before the first to half a step after the last row.
    """
    log_h, log_b = log_h_star(a3), 2 * math.log(math.hypot(1.0, a3))
    if n > 1 and math.isinf(log_h):
        return math.inf
    near = min(n, _SUMMED_ROWS)
    seen_before = np.arange(1, near, dtype=np.float64)
    log_rho = np.minimum(log_h, log_b - np.logaddexp(0.0, np.log(seen_before) - 2 * a3))
    terms = [0.0]
    if near > 1:
        top = float(log_rho.max())
        terms.append(top + math.log(math.fsum(np.exp(log_rho - top))))
    if n > near:
        # With m = i − 1, rows with m below the crossing count h* each. Every split gives a valid bound, and
        # this one gives the smallest.
        log_crossing = log(math.expm1(log_b - log_h)) + 2 * a3
        if log_crossing >= math.log(n - 1):
            terms.append(math.log(n - near) + log_h)
        else:
            crossing = near if log_crossing <= math.log(near) else math.ceil(_exp_int(log_crossing))
            if crossing > near:
                terms.append(math.log(crossing - near) + log_h)
            span = softplus(log_of_half(2 * n - 1) - 2 * a3) - softplus(
                log_of_half(2 * crossing - 1) - 2 * a3
            )
            terms.append(log_b + 2 * a3 + log(span))
    return log_sum(*terms)


def log_of_half(twice: int) -> float:
    """Return log(twice / 2) for an integer ``twice`` that may be too large for a float."""
    return math.log(twice) - math.log(2)


def _exp_int(log_x: float) -> int:
    """Return e^log_x, rounded down to an integer. Some 17 digits are correct, and numbers that would overflow
    a float are returned too.
    """
    bits = max(0, int(log_x / math.log(2)) - 60)
    return int(math.exp(log_x - bits * math.log(2))) << bits
