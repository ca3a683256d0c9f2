"""Lower bounds on the Lipschitz constant of attention on the ball of radius R.

Lip(f on B_R^n) is the Lipschitz constant of f, in Frobenius norms, on all sequences of n tokens of norm at
most R, and f^m is f with a causal mask. A head has the scores ⟨A x_i + b, x_j⟩ and the values V x_j.

Each bound but ``proposition_3_4``, ``quadratic_growth`` and ``equal_tokens_lower_bound`` evaluates one lemma
at tokens that make the Jacobian large: some heavy tokens z_1, …, z_c, once each, and copies of one light
token w. The columns of the Jacobian that belong to the heavy tokens are known in closed form, and their norm
is a lower bound on ‖D_X f‖, so on the Lipschitz constant on every ball that contains these tokens. The lemma
holds for the float64 tokens themselves, so an eigenvector or an optimisation that has not converged makes a
bound smaller, but not wrong. With a causal mask the bound for 2^16 tokens is returned for more tokens, for
which it holds. Derivations: documentation page "Worst inputs, and lower bounds".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from howsmooth.bounds.attention_parameters import Head, Parameters
from howsmooth.bounds.ball_upper_bounds import ball_quantity, no_query_bias
from howsmooth.bounds.bound import Quantity
from howsmooth.bounds.bound_problem import Problem, on_ball
from howsmooth.bounds.catalogue import OURS, PAPER, Condition, statement
from howsmooth.bounds.jacobian_column_lower_bounds import (
    MOST_ROWS,
    log_column_norm,
    log_integer,
    log_norm,
    log_rank_one,
    log_weights,
    rounding_of_scores,
    total_value,
)
from howsmooth.bounds.log_numbers import Log
from howsmooth.bounds.worst_case_tokens import (
    HeavyTokens,
    TwoHeavyTokens,
    real_eigenpairs,
    searched_pairs,
    searched_tokens,
    spread_directions,
    two_cluster_points,
)
from howsmooth.rounding import below, spectral_norm_below

__all__ = [
    "causal_two_cluster_lower_bound",
    "causal_two_heavy_tokens_lower_bound",
    "equal_tokens_lower_bound",
    "heavy_token_lower_bound",
    "proposition_3_4",
    "quadratic_growth",
    "two_cluster_lower_bound",
    "two_heavy_tokens_lower_bound",
]

_PAGE = f'{OURS}"Worst inputs, and lower bounds"'

# Size up to which the norm of a Cesàro matrix is computed from the dense matrix.
_MOST_DENSE_CESARO = 512
# Under a window only this number of first rows is used. Their norm is a lower bound on the norm of all rows,
# and rows at the ends of the sequence have the largest weights.
_DENSE_ROWS = 1024

_REAL_EIGENVALUE = Condition[Problem](
    "A has a real eigenvalue (else use heavy_token_lower_bound)", lambda p: bool(real_eigenpairs(p.head))
)
_THREE_TOKENS_IN_A_PLANE = (
    Condition[Problem]("n >= 3", lambda p: p.n >= 3),
    Condition[Problem]("d >= 2", lambda p: p.parameters.heads[0].d >= 2),
)


def is_identity(p: Problem) -> bool:
    """Return whether V = I."""
    V = p.head.V
    return V.shape[0] == V.shape[1] and bool((torch.eye(len(V), dtype=V.dtype) == V).all())


@statement(
    on_ball,
    side="lower",
    quantity=ball_quantity,
    source=_PAGE,
    heads="any",
    masks="none or causal",
    searched=True,
)
def heavy_token_lower_bound(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from below by ‖D_X f‖ at tokens X, one of which gets most of the attention.

    The token is called heavy, the others light. The bound is √(n−1) p ‖V(I + (1−p)(z−w)yᵀ)‖ at X = (z, w, …,
    w). z = Ry/|y|, y = Aw + b, and w is sought by local ascent in the ball of radius R; every w gives a valid
    bound. p is the weight of z. Without bias and at the best w, p = 1/(1 + (n−1)e^{−ER²}) with
    E = max_{|w|≤1} (|Aw| − ⟨Aw, w⟩) ≥ max(−2γ_min, γ_max/4, ‖A‖/4). A need not have a real eigenvalue. With
    several heads, tokens are sought for each head, and the bound at them takes all heads into account. With a
    causal mask, z comes first.
    """
    parameters = p.parameters
    heads = (parameters.folded(h) for h in range(len(parameters.heads)))
    return _largest(parameters, p.n, (t for head in heads for t in searched_tokens(head, p.radius)[:2]))


@statement(
    on_ball,
    side="lower",
    quantity=ball_quantity,
    source=_PAGE,
    heads="any",
    listed=lambda p: p.plain and p.parameters.masking != "other",
)
def equal_tokens_lower_bound(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from below by ‖D_X f‖ at a sequence X of n equal tokens.

    It is ‖Σ_h W_h V_h‖ ‖P‖, where P is uniform over the visible tokens. Without a mask ‖P‖ = 1. With a causal
    mask P is the Cesàro matrix, whose norm grows from 1 to 2 with n (Hardy's inequality). Under a window, the
    norm of the first rows of P is used. The bound does not depend on the radius.
    """
    parameters, n = p.parameters, p.n
    window = parameters.window
    seen, norm = parameters.visibility(n), 1.0  # a matrix whose rows sum to one has at least this norm
    wide = window is None or window > _DENSE_ROWS
    if seen.causal and parameters.mask is None and wide:
        # A causal window and a causal mask have equal first rows.
        norm = _cesaro_norm(min(n, MOST_ROWS if window is None else window))
    elif parameters.masking == "other":
        rows = slice(0, n if window is None else min(n, _DENSE_ROWS))
        shown = seen.block(rows, seen.keys(rows))
        if shown is not None:
            shares = shown / shown.sum(1, keepdim=True, dtype=torch.float64)
            norm = max(norm, spectral_norm_below(shares))
    return Log.of(norm) * Log(log_norm(total_value(parameters)))


@statement(
    on_ball,
    side="lower",
    quantity=Quantity.GLOBAL,
    source=_PAGE,
    heads="any",
    masks="none",
    needs=_THREE_TOKENS_IN_A_PLANE,
    searched=True,
)
def two_heavy_tokens_lower_bound(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from below by ‖D_X f‖ at tokens X, two of which get most of the attention.

    The two tokens are called heavy, the others light. The bound is at least √(2(n−2)) p sinθ |y| R |Vv|. X
    consists of two heavy tokens R(cosθ ŷ ± sinθ v) and n − 2 copies of w, |w| ≤ R, where y = Aw + b, ŷ =
    y/|y|, v is a unit vector orthogonal to ŷ, and p = 1/(2 + (n−2)e^{−(R|y|cosθ − ⟨y,w⟩)}) is the weight of
    each heavy token. θ, w and v are sought by local ascent; every choice gives a valid bound. With several
    heads, tokens are sought for each head, and the bound at them takes all heads into account. The returned
    bound is the norm of the two heavy columns in the rows of the light tokens. It attains the rate R²√n of
    Theorem 3.3.
    """
    return _two_heavy(p, masked=False)


@statement(
    on_ball,
    side="lower",
    quantity=Quantity.MASKED,
    source=_PAGE,
    heads="any",
    masks="causal",
    needs=_THREE_TOKENS_IN_A_PLANE,
    searched=True,
)
def causal_two_heavy_tokens_lower_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of causal attention from below by ‖D_X f‖ at tokens X, two of which get
    most of the attention.

    The tokens are as in :func:`two_heavy_tokens_lower_bound`, heavy tokens first. The bound is at least
    √(2Σ_{i=3}^n p_i²) sinθ |y| R |Vv| with p_i = 1/(2 + (i−2)e^{−(R|y|cosθ − ⟨y,w⟩)}).
    """
    return _two_heavy(p, masked=True)


@statement(
    on_ball,
    side="lower",
    quantity=Quantity.GLOBAL,
    source=f"Proposition 3.4 and Lemma C.7, {PAPER}",
    masks="none",
    needs=(Condition("V = I", is_identity), no_query_bias(), _REAL_EIGENVALUE),
)
def proposition_3_4(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from below by Proposition 3.4 of the paper.

    The proposition is for V = I and a matrix A with a real eigenvalue. The bound is √(n−1) / (1 + (n−1)
    e^{−2R²γ}) with γ = max(−γ_min, γ_max/8). γ_min and γ_max are the smallest and largest real eigenvalues of
    A.
    """
    points = two_cluster_points(p.head, p.radius)
    if points is None or p.n == 1:
        return Log(-math.inf)
    log_p, _ = log_weights([p.head], points.heavies, points.light, log_integer(p.n - 1))
    share = float(log_p[0, 0, 0])
    error = rounding_of_scores([p.head], points) if share < 0 else 0.0
    # If the scores overflow, the bound is the trivial one, 0.
    found = 0.5 * log_integer(p.n - 1) + share + math.expm1(share) * error
    return Log(found if math.isfinite(share) else -math.inf)


@statement(
    on_ball,
    side="lower",
    quantity=Quantity.GLOBAL,
    source=f"{_PAGE}; sharpens Proposition 3.4, {PAPER}",
    masks="none",
    needs=(_REAL_EIGENVALUE,),
)
def two_cluster_lower_bound(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from below by ‖D_X f‖ at tokens X that form two clusters.

    The bound is √(n−1) p ‖V(I + (1−p)(z−w)yᵀ)‖. u is a unit eigenvector of A for γ_max or γ_min, X consists
    of z = Ru and n − 1 copies of w = Ru/2 or −Ru, y = Aw + b, and p = 1/(1 + (n−1)e^{−⟨y, z−w⟩}). The larger
    of the two bounds is returned. It holds for any V and query bias, and sharpens Proposition 3.4.
    """
    return _two_clusters(p, masked=False)


@statement(
    on_ball,
    side="lower",
    quantity=Quantity.MASKED,
    source=_PAGE,
    masks="causal",
    needs=(_REAL_EIGENVALUE,),
)
def causal_two_cluster_lower_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of causal attention from below by ‖D_X f‖ at tokens that form two
    clusters.

    The tokens are as in :func:`two_cluster_lower_bound`, with the heavy token Ru first. Without bias, the
    bound is the norm of the blocks V and p_i V(I + 2g(1−p_i)uuᵀ), i = 2, …, n, stacked, where p_i is the
    weight of the heavy token in row i and g = γ_max R²/8 or −γ_min R². It is at least √(1+Σp_i²)‖V‖ and
    √(Σp_i²(1+2g(1−p_i))²)|Vu|.
    """
    return _two_clusters(p, masked=True)


@statement(
    on_ball,
    side="lower",
    quantity=ball_quantity,
    source=f"Kim, Papamakarios, Mnih, ICML 2021; Appendix C, {PAPER}",
    masks="none or causal",
    needs=(no_query_bias(),),
)
def quadratic_growth(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from below by a number that grows like R², after Kim et al. (2021).

    The bound is ‖V(I/n + σ²R²u(Aᵀu)ᵀ)‖. The last token is 0, the others alternate between Ru and −Ru. The
    last row gives equal weight to all tokens, so the last diagonal block of the Jacobian is V(I/n + C A) with
    the covariance C = σ²R²uuᵀ of the tokens, where σ² is (n−1)/n for odd n and (n−1)/n − 1/n² for even n. Any
    unit vector u gives a valid bound; some that depend on singular vectors of A and V are tried. For A = γI,
    V = I and odd n the bound is 1/n + γR²(n−1)/n.
    """
    head, n, R = p.head, p.n, p.radius
    # 1/n and σ² are formed first and R is multiplied one by one, so that R² cannot overflow.
    variance = (n - 1) / n - (0.0 if n % 2 else 1 / (n * n))
    logs = (
        log_rank_one(head.V, 1 / n, variance * (u * R), (u * R) @ head.left @ head.right)
        for u in spread_directions(head)
    )
    return Log(max(logs, default=-math.inf))


# ---- the parts of several bounds


def _largest(parameters: Parameters, n: int, points: Iterable[HeavyTokens]) -> Log:
    """Return the largest norm of heavy columns at several sequences."""
    return Log(max((log_column_norm(parameters, n, t) for t in points), default=-math.inf))


def _masked(p: Problem, *, masked: bool) -> Parameters:
    return replace(p.parameters, masking="causal" if masked else "none", mask=None, window=None, causal=False)


def _two_clusters(p: Problem, *, masked: bool) -> Log:
    """Bound at the two-cluster inputs of the paper for the largest and the smallest real eigenvalue of A."""
    head = p.head
    identity = torch.eye(head.V.shape[0], dtype=torch.float64)
    alone = replace(_masked(p, masked=masked), heads=(head,), outputs=(identity,))
    both = (two_cluster_points(head, p.radius, choice) for choice in ("max", "min"))
    return _largest(alone, p.n, (points for points in both if points is not None))


def _two_heavy(p: Problem, *, masked: bool) -> Log:
    n, parameters = p.n, _masked(p, masked=masked)
    found = [-math.inf]
    for h in range(len(parameters.heads) if n >= 3 else 0):
        head = parameters.folded(h)
        for points in searched_pairs(head, n, p.radius, masked=masked)[:2]:
            found.append(log_column_norm(parameters, n, points))
            if len(parameters.heads) == 1:
                found.append(_log_two_heavy_formula(head, n, points, masked=masked))
    return Log(max(found))


def _log_two_heavy_formula(head: Head, n: int, points: TwoHeavyTokens, *, masked: bool) -> float:
    """Return the log of a lower bound on ‖D_X f‖ in closed form, at tokens X of which two get equal and large
    attention weights.

    The formula is in :func:`two_heavy_tokens_lower_bound`. At huge radii rounding makes the two scores
    differ, so that the norm of the heavy columns is smaller.
    """
    y = head.left @ (head.right @ points.light) + head.b
    mean, half = (points.heavy_1 + points.heavy_2) / 2, (points.heavy_1 - points.heavy_2) / 2
    gap = float(y @ (mean - points.light))
    size, strength = float(y.norm()), float((head.V @ half).norm())
    if not (math.isfinite(gap) and 0 < size < math.inf and 0 < strength < math.inf):
        return -math.inf
    # Numbers m of light tokens that a row sees: 1, 2, … under a causal mask, all n − 2 without one.
    if masked:
        log_m = torch.arange(1, min(n, MOST_ROWS) - 1, dtype=torch.float64).log()
    else:
        log_m = torch.tensor([log_integer(n - 2)], dtype=torch.float64)
    log_p = -torch.logaddexp(torch.tensor(math.log(2), dtype=torch.float64), log_m - gap)
    rows = float(torch.logsumexp(2 * log_p, dim=0)) + (0.0 if masked else float(log_m[0]))
    # The derivative of log p in the gap is 1 − 2p, so rounding of the gap matters only where p is below 1/2.
    undecided = max(0.0, 1 - 2 * float(log_p.min().exp()))
    error = undecided * rounding_of_scores([head], points) if undecided else 0.0
    return 0.5 * (math.log(2) + rows) + math.log(size) + math.log(strength) - error


def _cesaro_norm(n: int) -> float:
    """Return a tight lower bound on the spectral norm of the n × n Cesàro matrix.

    This matrix maps a vector to the means of its first 1, 2, …, n entries. For large n the power method is
    used: each ratio |Px|/|x| is a lower bound.
    """
    small = min(n, _MOST_DENSE_CESARO)
    counts = torch.arange(1, small + 1, dtype=torch.float64)
    dense = torch.ones(small, small, dtype=torch.float64).tril() / counts[:, None]
    norm = spectral_norm_below(dense)
    if n == small:
        return norm
    counts = torch.arange(1, n + 1, dtype=torch.float64)
    vector = counts.rsqrt()
    for _ in range(50):
        image = vector.cumsum(0) / counts
        ratio = float(image.norm() / vector.norm())
        norm = max(norm, below(ratio, 3 * n))
        # Multiply by the transposed Cesàro matrix: entry j is Σ_{i≥j} image_i / i.
        vector = (image / counts).flip(0).cumsum(0).flip(0)
        vector = vector / vector.norm()
    return norm
