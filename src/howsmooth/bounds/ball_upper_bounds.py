"""Upper bounds on the Lipschitz constant of one attention head on the ball of radius R, with any mask.

Lip(f on B_R^n) is the Lipschitz constant of f, in Frobenius norms, on all sequences of n tokens of norm at
most R, and f^m is f with a causal mask. The scores are ⟨A x_i + b, x_j⟩ and the values V x_j. In the formulas
a = ‖A‖R² and a₃ = (‖A‖R + |b|)R, which equals a without a query bias b. Proofs: documentation page "Bounds on
a ball".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from howsmooth.attention.masks import Visibility
from howsmooth.bounds.bound import Quantity
from howsmooth.bounds.bound_problem import Problem, for_every_length, on_ball
from howsmooth.bounds.catalogue import OURS, PAPER, Condition, statement
from howsmooth.bounds.log_numbers import Log, minimum

__all__ = [
    "ball_upper_bound", "causal_ball_upper_bound", "causal_mean_field_upper_bound",
    "masked_ball_upper_bound", "mean_field_upper_bound", "theorem_3_3", "theorem_3_5", "theorem_4_3",
    "theorem_4_4", "theorem_e_3",
]  # fmt: skip

_PAGE = f'{OURS}"Bounds on a ball"'

# The least ‖A‖R² for which Theorem 4.4 follows from causal_mean_field_upper_bound; see theorem_4_4.
_THEOREM_4_4_FROM = 0.4
# Bounds on the rows up to this one are summed; the sum over later rows is bounded by an integral.
_SUMMED_ROWS = 20_000
# Number of entries in a block of a mask.
_ENTRIES = 1 << 24

Masking = Literal["none", "causal", "other"]

# Decorators for statements about a mask, and about each mask in its own quantity.
unmasked = partial(statement, on_ball, quantity=Quantity.GLOBAL, masks="none")
causal = partial(statement, on_ball, quantity=Quantity.MASKED, masks="causal")
mean_field = partial(statement, for_every_length, quantity=Quantity.MEAN_FIELD, masks="none")
causal_mean_field = partial(statement, for_every_length, quantity=Quantity.MASKED_MEAN_FIELD, masks="causal")
masked_or_not = partial(
    statement,
    on_ball,
    quantity=lambda p: Quantity.MASKED if p.parameters.masking == "causal" else Quantity.GLOBAL,
)


def no_query_bias(other: str = "") -> Condition[Problem]:
    """Return the hypothesis that the head has no query bias. ``other`` names a bound that allows one."""
    words = "no query bias" + (f", which {other} allows" if other else "")
    return Condition(words, lambda p: p.head.b_norm == 0)


@unmasked(source=f"{PAPER}, Theorem 3.3", needs=(no_query_bias("ball_upper_bound"),))
def theorem_3_3(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from above by Theorem 3.3 of the paper; the bound grows like R²√n.

    The bound is √3 ‖V‖ (‖A‖²R⁴(4n+1) + n)^{1/2}.
    """
    return _theorem_3_3(p)


@causal(source=f"{PAPER}, Theorem 4.3", needs=(no_query_bias("causal_ball_upper_bound"),))
def theorem_4_3(p: Problem) -> Log:
    """Bound Lip(f^m on B_R^n) of causal attention from above by Theorem 4.3 of the paper.

    The bound is √3 ‖V‖ (‖A‖²R⁴(4n+1) + n)^{1/2}, as in Theorem 3.3.
    """
    return _theorem_3_3(p)


def _theorem_3_3(p: Problem) -> Log:
    return p.V * (3 * (p.a**2 * (4 * p.n + 1) + p.n)) ** 0.5


@mean_field(
    source=f"{PAPER}, Theorem 3.5 (after Geshkovski et al. 2023)",
    needs=(no_query_bias("mean_field_upper_bound"),),
)
def theorem_3_5(p: Problem) -> Log:
    """Bound the W₂-Lipschitz constant of mean-field attention from above by Theorem 3.5 of the paper.

    The bound is ‖V‖ (1 + 3a) e^{2a}. It is after Geshkovski, Letrouit, Polyanskiy, Rigollet, *The emergence
    of clusters in self-attention dynamics*, 2023.
    """
    return _theorem_3_5(p)


@causal_mean_field(
    source=f"{PAPER}, Theorem 4.4, with a hypothesis added",
    needs=(
        no_query_bias("causal_mean_field_upper_bound"),
        Condition(f"‖A‖R² ≥ {_THEOREM_4_4_FROM}", lambda p: bool(p.a.value >= _THEOREM_4_4_FROM)),
    ),
)
def theorem_4_4(p: Problem) -> Log:
    """Bound the Lipschitz constant of causal mean-field attention by a corrected version of Theorem 4.4 of
    the paper.

    The bound is ‖V‖ (1 + 3a) e^{2a} for a >= 0.4, in the conditional distance d₂. The published theorem
    claims it for every a, which is false for small a. For A = 0, V = I the map averages the tokens seen so
    far; its norm is 1.14 for two tokens and tends to 2 (Hardy), but the formula gives 1. Copies of one token
    give the same averages for any A, so the formula is no bound where it is below 2, that is for a <= 0.155.
    For a >= 0.4 it follows from :func:`causal_mean_field_upper_bound` (documentation page "Bounds on a ball",
    section "Theorem 4.4 as printed is false for small a").
    """
    return _theorem_3_5(p)


def _theorem_3_5(p: Problem) -> Log:
    return p.V * (1 + 3 * p.a) * Log(2 * p.a.value)


@unmasked(source=f"{PAPER}, Theorem E.3")
def theorem_e_3(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from above by Theorem E.3 of the paper, which allows a query bias.

    The bound is √3 ‖V‖ (‖A‖²R⁴ + 4nR²(‖A‖R + |b|)² + n)^{1/2}, where b is the query bias.
    """
    return p.V * (3 * (p.a**2 + 4 * p.n * p.a3**2 + p.n)) ** 0.5


@unmasked(source=f"{_PAGE}, Theorem A")
def ball_upper_bound(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from above by Theorem A of the documentation, which is sharper than Theorem 3.3
    and allows a query bias.

    The bound is ‖V‖ (a + √(n·min{h*(a₃), (1 + a₃²) P̄(n, a₃)})). h*(a) is the maximum over p in [0, 1] of p²(1
    + 2a(1−p))² + (1−p)²(1 − 2ap)², and P̄(n, a) = 1/(1 + (n−1)e^{−2a}) bounds a single attention weight.
    Theorem A is below Theorems 3.3, 3.5 and E.3 for all parameters. For n = 1 it is ‖V‖, which is the
    Lipschitz constant.
    """
    return theorem_a(p, "none")


@causal(source=f"{_PAGE}, Theorem A with a mask")
def causal_ball_upper_bound(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) of one head with a causal mask from above by Theorem A of the documentation.

    The bound is ‖V‖ (a + √(1 + Σ_{i=2}^n ρ_i)) with ρ_i = min{h*(a₃), (1 + a₃²) P̄(i, a₃)}, in the notation of
    :func:`ball_upper_bound`. For n = 1 the bound is ‖V‖.
    """
    return theorem_a(p, "causal")


@masked_or_not(
    source=f"{_PAGE}, Theorem A with any mask",
    listed=lambda p: p.plain and p.parameters.masking == "other" and len(p.parameters.heads) == 1,
)
def masked_ball_upper_bound(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) of one head with an arbitrary mask from above by Theorem A of the documentation.

    The bound is ‖V‖ (a + √(max_j Σ_{i sees j} ρ_i)). ρ_i = min{h*(a₃), (1 + a₃²) P̄(n_i, a₃)} for a row i
    that sees n_i tokens, and 1 if n_i = 1, in the notation of :func:`ball_upper_bound`. Without a mask this
    is Theorem A, and with a causal mask its causal form. Under a window, the width of the window takes the
    place of n. If every row sees one token, the map is linear and the term a is left out.
    """
    return theorem_a(p, p.parameters.masking)


def theorem_a(p: Problem, masking: Masking) -> Log:
    """Return the upper bound of Theorem A on Lip(f on B_R^n) for one head with a mask."""
    a3, alone = p.a3.value, p.n == 1
    if masking == "other":
        rows, most = _rows_of_mask(p.parameters.visibility(p.n), a3)
        alone = most == 1
    else:
        rows = causal_rows(p.n, a3) if masking == "causal" else p.n * row_square(p.n, a3)
    return p.V * (rows**0.5 if alone else p.a + rows**0.5)


@mean_field(source=f"{_PAGE}, Theorem A for all n")
def mean_field_upper_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of one head on the ball of radius R by a number that holds for all lengths
    n.

    The bound is ‖V‖ (a + e^{a₃} √(1 + a₃²)). It is also one for the mean-field map in W₂, and its exponent is
    half that of Theorem 3.5.
    """
    return for_all_lengths(p, "none")


@causal_mean_field(source=f"{_PAGE}, Theorem B")
def causal_mean_field_upper_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of causal attention on the ball of radius R by a number that holds for all
    lengths n.

    The bound is ‖V‖ (a + e^{a₃}(2 + √6 a₃)), Theorem B. It is also one for the causal mean-field map in d₂.
    Its exponent is half that of Theorem 4.4, and it holds for every a. For A = 0 it is 2‖V‖, which is the
    supremum of the Lipschitz constant over n (Hardy's inequality).
    """
    return for_all_lengths(p, "causal")


def for_all_lengths(p: Problem, masking: Masking) -> Log:
    """Return an upper bound on Lip(f on B_R^n) for all n: Theorem B with a causal mask, else Theorem A."""
    factor = 2 + math.sqrt(6) * p.a3 if masking == "causal" else (1 + p.a3**2) ** 0.5
    return p.V * (p.a + Log(p.a3.value) * factor)


# ---- the norm of one row


def row_square(keys: int | Tensor, a3: Tensor) -> Log:
    """Bound the squared norm of a block row of the Jacobian from above, if V = I and the query is held fixed.
    Scores are at most ``a3`` in absolute value.

    The query sees ``keys`` tokens. The bound is min{h*(a₃), (1 + a₃²) P̄}, and 1 for a row that sees one.
    """
    one_plus_square = Log(2 * torch.hypot(a3, torch.ones_like(a3)).log())
    found = minimum(h_star(a3), one_plus_square * largest_weight(keys, a3))
    return Log(torch.where(torch.as_tensor(keys <= 1, device=a3.device), 0.0, found.log))


def largest_weight(keys: int | Tensor, a: Tensor) -> Log:
    """Return P̄ = 1/(1 + (m−1)e^{−2a}), the largest attention weight that is possible if a query sees m keys
    with scores in [−a, a].
    """
    return 1 / (1 + Log.of(keys - 1) * Log(-2 * a))


def h_star(a: Tensor) -> Log:
    """Return h*(a), an upper bound on the squared norm of a block row of the Jacobian if V = I and the query
    is held fixed. The scores of the row must lie in an interval of length 2a.

    h*(a) is the maximum over p in [0, 1] of p²(1 + 2a(1−p))² + (1−p)²(1 − 2ap)². It is 1 for a <= 1/2, and at
    most 1 + a²/2. It bounds Σ_j P_j²(1 + t_j)² for all probability vectors P and all numbers t_j in an
    interval of length 2a with Σ_j P_j t_j = 0 (documentation page "Bounds on a ball", Lemma 2). The gradient
    holds the maximiser fixed.
    """
    w = torch.tensor([_h_star_maximiser(x) for x in a.detach().flatten().tolist()], dtype=torch.float64)
    w = w.reshape(a.shape).to(a.device)
    # a = s·t, where s > 1 only if squares would overflow. There h* is a²/2 = s² h*(t) in float64.
    s = (a.detach() / 1e100).clamp(min=1.0)
    t = torch.where(torch.isinf(s), 1e100, a / s)
    h = 1 + 0.5 * (1 - w) * (1 + w) * (t - 1 + t * w) * (t + 1 - t * w)
    return Log(h.log() + 2 * s.log())


def _h_star_maximiser(a: float) -> float:
    """Return w = 2p − 1 for the p that attains the maximum by which ``h_star`` is defined."""
    if a <= 0.5:
        return 1.0
    if not a <= 1e8:  # h* = 1 + a²/2 up to the last digit; also of NaN
        return 0.0
    # In terms of w = 2p − 1 the function is 1 + (1 − w²)(a² − (1 − aw)²)/2. The cubic below is its
    # derivative up to a factor, so the maximum is at one of its roots or at w = 0.
    roots = np.roots([2.0, -3.0 / a, 1.0 / (a * a) - 2.0, 1.0 / a])
    candidates = [min(max(float(root.real), 0.0), 1.0) for root in roots] + [0.0]
    return max(candidates, key=lambda w: (1 - w) * (1 + w) * (a - 1 + a * w) * (a + 1 - a * w))


# ---- the rows under a mask


def _rows_of_mask(seen: Visibility, a3: Tensor) -> tuple[Log, int]:
    """Return two numbers: max_j Σ_{i sees j} ρ_i, where ρ_i is the bound of :func:`row_square` on row i, and
    the largest number of keys that a query sees.
    """
    sizes = torch.cat([block.sum(dim=1) for _, block in mask_blocks(seen)])
    log_rho = row_square(sizes.double(), a3).log
    top = log_rho.max()
    if not bool(torch.isfinite(top)):
        return Log(top), int(sizes.max())
    rho, columns = torch.exp(log_rho - top), torch.zeros(seen.n, dtype=torch.float64)
    for (rows, keys), block in mask_blocks(seen):
        columns[keys] += rho[rows] @ block.double()
    return Log(top + columns.max().log()), int(sizes.max())


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


def causal_rows(n: int, a3: Tensor) -> Log:
    """Return Σ_{i=1}^n ρ_i, rounded up, where ρ_i is the bound of ``row_square`` on row i of a causal mask.

    The sum is exact up to row 20000. Beyond it, ρ_i is replaced by h* up to some row and by (1 + a₃²) P̄(i,
    a₃) after that row. The latter is convex in i, so its sum is at most its integral from half a step before
    the first to half a step after the last row.
    """
    near = min(n, _SUMMED_ROWS)
    found = row_square(torch.arange(1, near + 1, dtype=torch.float64), a3).sum()
    if n == near:
        return found
    h, size = h_star(a3), 1 + Log.of(a3) ** 2
    if bool(torch.isinf(h.log)):
        return h
    # With m = i − 1, rows with m below the crossing count h* each. Every split gives a valid bound, and this
    # one gives the smallest.
    gain = float(torch.expm1(size.log - h.log))
    log_crossing = (math.log(gain) if gain > 0 else -math.inf) + 2 * float(a3)
    if log_crossing >= math.log(n - 1):
        return found + (n - near) * h
    crossing = near if log_crossing <= math.log(near) else math.ceil(_exp_int(log_crossing))
    if crossing > near:
        found = found + (crossing - near) * h
    ends = [(1 + Log.of(2 * m - 1) * Log(-2 * a3) / 2).log for m in (n, crossing)]
    return found + size * Log(2 * a3) * (ends[0] - ends[1])


def _exp_int(log_x: float) -> int:
    """Return e^log_x rounded down to an integer of any size, of which some 17 digits are correct."""
    bits = max(0, int(log_x / math.log(2)) - 60)
    return int(math.exp(log_x - bits * math.log(2))) << bits
