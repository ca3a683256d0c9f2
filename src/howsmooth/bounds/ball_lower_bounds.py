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
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth.bounds.attention_parameters import Head, Parameters, log_spectral_norm
from howsmooth.bounds.ball_upper_bounds import Masking, causal, masked_or_not, no_query_bias, unmasked
from howsmooth.bounds.bound_problem import Problem
from howsmooth.bounds.catalogue import OURS, PAPER, Condition
from howsmooth.bounds.log_numbers import Log, maximum
from howsmooth.bounds.worst_case_tokens import (
    HeavyTokens,
    light_rows,
    log_tie,
    score_vectors,
    searched_pairs,
    searched_tokens,
    spread_directions,
    two_cluster_points,
)
from howsmooth.rounding import below, gamma, spectral_norm_below, up

__all__ = [
    "causal_two_cluster_lower_bound", "causal_two_heavy_tokens_lower_bound", "equal_tokens_lower_bound",
    "heavy_token_lower_bound", "proposition_3_4", "quadratic_growth", "two_cluster_lower_bound",
    "two_heavy_tokens_lower_bound",
]  # fmt: skip

_PAGE = f'{OURS}"Worst inputs, and lower bounds"'

# The causal constant does not decrease with n, so the bound for this many rows also holds for more tokens.
_MOST_ROWS = 1 << 16
# Size up to which the norm of a Cesàro matrix is computed from the dense matrix.
_MOST_DENSE_CESARO = 512
# Under a window only this number of first rows is used. Their norm is a lower bound on the norm of all rows,
# and rows at the ends of the sequence have the largest weights.
_DENSE_ROWS = 1024

_REAL_EIGENVALUE = Condition[Problem](
    "A has a real eigenvalue (else use heavy_token_lower_bound)", lambda p: bool(p.head.real_eigenpairs)
)
_THREE_TOKENS_IN_A_PLANE = (
    Condition[Problem]("n >= 3", lambda p: p.n >= 3),
    Condition[Problem]("d >= 2", lambda p: p.parameters.heads[0].d >= 2),
)
VALUES_ARE_TOKENS = Condition[Problem](
    "V = I", lambda p: torch.equal(p.head.V, torch.eye(p.head.d, dtype=torch.float64))
)


@masked_or_not(side="lower", source=_PAGE, heads="any", masks="none or causal", searched=True)
def heavy_token_lower_bound(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from below by ‖D_X f‖ at tokens X, one of which gets most of the attention.

    The token is called heavy, the others light. The bound is √(n−1) p ‖V(I + (1−p)(z−w)yᵀ)‖ at X = (z, w, …,
    w). z = Ry/|y|, y = Aw + b, and w is sought by local ascent in the ball of radius R; every w gives a valid
    bound. p is the weight of z. Without bias and at the best w, p = 1/(1 + (n−1)e^{−ER²}) with
    E = max_{|w|≤1} (|Aw| − ⟨Aw, w⟩) ≥ max(−2γ_min, γ_max/4, ‖A‖/4). A need not have a real eigenvalue. With
    several heads, tokens are sought for each head, and the bound at them takes all heads into account. With a
    causal mask, z comes first.
    """
    points = [t for head in _folded(p) for t in searched_tokens(head, p.radius)[:2]]
    return _largest(p.parameters, p.n, points)


@masked_or_not(
    side="lower", source=_PAGE, heads="any", listed=lambda p: p.plain and p.parameters.masking != "other"
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
        norm = _cesaro_norm(min(n, _MOST_ROWS if window is None else window))
    elif parameters.masking == "other":
        rows = slice(0, n if window is None else min(n, _DENSE_ROWS))
        shown = seen.block(rows, seen.keys(rows))
        if shown is not None:
            shares = shown / shown.sum(1, keepdim=True, dtype=torch.float64)
            norm = max(norm, spectral_norm_below(shares))
    return Log.of(norm) * Log(_log_norm(_total_value(parameters)))


@unmasked(side="lower", source=_PAGE, heads="any", needs=_THREE_TOKENS_IN_A_PLANE, searched=True)
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
    return _two_heavy(p, "none")


@causal(side="lower", source=_PAGE, heads="any", needs=_THREE_TOKENS_IN_A_PLANE, searched=True)
def causal_two_heavy_tokens_lower_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of causal attention from below by ‖D_X f‖ at tokens X, two of which get
    most of the attention.

    The tokens are as in :func:`two_heavy_tokens_lower_bound`, heavy tokens first. The bound is at least
    √(2Σ_{i=3}^n p_i²) sinθ |y| R |Vv| with p_i = 1/(2 + (i−2)e^{−(R|y|cosθ − ⟨y,w⟩)}).
    """
    return _two_heavy(p, "causal")


@unmasked(
    side="lower",
    source=f"Proposition 3.4 and Lemma C.7, {PAPER}",
    needs=(VALUES_ARE_TOKENS, no_query_bias(), _REAL_EIGENVALUE),
)
def proposition_3_4(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from below by Proposition 3.4 of the paper.

    The proposition is for V = I and a matrix A with a real eigenvalue. The bound is √(n−1) / (1 + (n−1)
    e^{−2R²γ}) with γ = max(−γ_min, γ_max/8). γ_min and γ_max are the smallest and largest real eigenvalues of
    A.
    """
    points = two_cluster_points(p.head, p.radius)
    if points is None:
        return Log(-math.inf)
    log_m, log_rows = light_rows(p.n, 1, causal=False)
    share = float(_log_weights([p.head], points, log_m)[0])
    # If the scores overflow, the bound is the trivial one, 0.
    found = 0.5 * float(log_rows) + share - _rounding([p.head], points, -math.expm1(share))
    return Log(found if math.isfinite(share) else -math.inf)


@unmasked(side="lower", source=f"{_PAGE}; sharpens Proposition 3.4, {PAPER}", needs=(_REAL_EIGENVALUE,))
def two_cluster_lower_bound(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) from below by ‖D_X f‖ at tokens X that form two clusters.

    The bound is √(n−1) p ‖V(I + (1−p)(z−w)yᵀ)‖. u is a unit eigenvector of A for γ_max or γ_min, X consists
    of z = Ru and n − 1 copies of w = Ru/2 or −Ru, y = Aw + b, and p = 1/(1 + (n−1)e^{−⟨y, z−w⟩}). The larger
    of the two bounds is returned. It holds for any V and query bias, and sharpens Proposition 3.4.
    """
    return _two_clusters(p, "none")


@causal(side="lower", source=_PAGE, needs=(_REAL_EIGENVALUE,))
def causal_two_cluster_lower_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of causal attention from below by ‖D_X f‖ at tokens that form two
    clusters.

    The tokens are as in :func:`two_cluster_lower_bound`, with the heavy token Ru first. Without bias, the
    bound is the norm of the blocks V and p_i V(I + 2g(1−p_i)uuᵀ), i = 2, …, n, stacked, where p_i is the
    weight of the heavy token in row i and g = γ_max R²/8 or −γ_min R². It is at least √(1+Σp_i²)‖V‖ and
    √(Σp_i²(1+2g(1−p_i))²)|Vu|.
    """
    return _two_clusters(p, "causal")


@masked_or_not(
    side="lower",
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
    head, n = p.head, p.n
    variance = (n - 1) / n - (0.0 if n % 2 else 1 / (n * n))
    # Both terms are divided by the larger of 1/n and σ²R², which may overflow.
    logs = -math.log(n), float((variance * Log.of(p.radius) ** 2).log)
    share, growth = (math.exp(log - max(logs)) for log in logs)
    found = [-math.inf]
    for u in spread_directions(head):
        matrix = share * head.V + growth * torch.outer(head.V @ u, (u @ head.left) @ head.right)
        found.append(max(logs) + _log_norm(matrix))
    return Log(max(found))


# ---- the parts of several bounds


def _largest(parameters: Parameters, n: int, points: Iterable[HeavyTokens]) -> Log:
    return Log(max((log_column_norm(parameters, n, t) for t in points), default=-math.inf))


def _folded(p: Problem) -> list[Head]:
    return [p.parameters.folded(h) for h in range(len(p.parameters.heads))]


def _under(p: Problem, masking: Masking) -> Parameters:
    return replace(p.parameters, masking=masking, mask=None, window=None, causal=False)


def _two_clusters(p: Problem, masking: Masking) -> Log:
    """Return the larger of the bounds for the largest and for the least real eigenvalue of A."""
    both = (two_cluster_points(p.head, p.radius, choice) for choice in ("max", "min"))
    return _largest(_under(p, masking), p.n, (points for points in both if points is not None))


def _two_heavy(p: Problem, masking: Masking) -> Log:
    if p.n < 3:
        return Log(-math.inf)
    masked, heads = masking == "causal", _folded(p)
    points = [t for head in heads for t in searched_pairs(head, p.n, p.radius, masked=masked)[:2]]
    found = _largest(_under(p, masking), p.n, points)
    if len(heads) > 1:
        return found
    formulas = (_log_two_heavy_formula(heads[0], p.n, t, causal=masked) for t in points)
    return maximum(found, *map(Log, formulas))


def _log_two_heavy_formula(head: Head, n: int, points: HeavyTokens, *, causal: bool) -> float:
    """Return the log of a lower bound on ‖D_X f‖, rounded down. Two tokens, called heavy, get equal and large
    attention weights; all other tokens are copies of one light token.

    At huge radii rounding makes the scores of the two heavy tokens differ, so that the norm of their columns
    is smaller.
    """
    log_m, log_rows = light_rows(min(n, _MOST_ROWS) if causal else n, 2, causal=causal)
    bound, log_p = log_tie(head, points.heavies, points.light, log_m, log_rows)
    # The derivative of log p in the gap is 1 − 2p.
    log = float(bound) - _rounding([head], points, 1 - 2 * float(log_p.min().exp()))
    return log if math.isfinite(log) else -math.inf


def _cesaro_norm(n: int) -> float:
    """Bound the norm of the Cesàro matrix of means of first entries from below, by ratios |Px|/|x|."""
    counts = torch.arange(1, n + 1, dtype=torch.float64)
    few = counts[:_MOST_DENSE_CESARO]
    norm = spectral_norm_below(torch.ones(len(few), len(few), dtype=torch.float64).tril() / few[:, None])
    if n == len(few):
        return norm
    vector = counts.rsqrt()
    for _ in range(50):
        image = vector.cumsum(0) / counts
        ratio = float(image.norm() / vector.norm())
        norm = max(norm, below(ratio, 3 * n))
        # Multiply by the transposed Cesàro matrix: entry j is Σ_{i≥j} image_i / i.
        vector = (image / counts).flip(0).cumsum(0).flip(0)
        vector = vector / vector.norm()
    return norm


# ---- the columns of the heavy tokens


def log_column_norm(p: Parameters, n: int, points: HeavyTokens) -> float:
    """Return the log of the norm of a part of D_X f: the derivative of the outputs of light tokens with
    respect to the heavy tokens. Heavy tokens get most of the attention.

    The norm of this part is a lower bound on ‖D_X f‖. With a causal mask the first row is included.
    """
    c, d = points.heavies.shape
    if n <= c:
        return _log_norm(_total_value(p)) if p.masking == "causal" else -math.inf
    causal, heads = p.masking == "causal", p.heads
    log_m, log_rows = light_rows(min(n, _MOST_ROWS) if causal else n, c, causal=causal)
    log_p, log_light = _log_weights(heads, points, log_m)  # (rows, H, c), (rows, H)
    # With U_h = W_h V_h and the weights p of head h in a light row, the block of heavy token a in that row is
    # M_a = Σ_h p_a U_h + U_h(Σ_b p_a p_b (z_a − z_b) + p_a p_light (z_a − w)) y_hᵀ.
    # So it is a combination of fixed matrices with the coefficients p_a, p_a p_b and p_a p_light.
    pair = log_p[..., :, None] + log_p[..., None, :]
    coefficients = torch.cat([log_p[..., None], pair, (log_p + log_light[..., None])[..., None]], dim=-1)
    top = float(coefficients.max())
    if not math.isfinite(top):
        return -math.inf
    table = torch.exp(coefficients - top).flatten(1)  # (rows, H c (1 + c + 1))
    stacked = _same_gram(table).unflatten(1, (len(heads), c, c + 2))

    values = torch.stack([w @ head.V for w, head in zip(p.outputs, heads, strict=True)])  # (H, d_out, d)
    y = torch.stack([score_vectors(head, points.light) for head in heads])  # (H, d)
    shifts = points.heavies[:, None, :] - torch.cat([points.heavies, points.light[None]])  # (c, c + 1, d)
    moved = torch.einsum("hod,abd->habo", values, shifts)
    blocks = torch.einsum("rha,hod->road", stacked[..., 0], values)
    blocks += torch.einsum("rhab,habo,hd->road", stacked[..., 1:], moved, y)
    matrix = blocks.flatten(2).flatten(0, 1)  # (rows d_out, c d)
    if causal and top > -600:
        first = torch.zeros(values.shape[1], c * d, dtype=torch.float64)
        first[:, :d] = values.sum(0) * math.exp(-top)
        matrix = torch.cat([first, matrix])
    log = _log_norm(matrix)
    # The relative error of a weight p is about (1 − p) times the error of the scores.
    undecided = 1 - float(log_p.amax(dim=-1).min().exp())
    found = top + 0.5 * float(log_rows[0]) + log - _rounding(heads, points, undecided)
    return found if math.isfinite(log) else -math.inf


def _log_weights(heads: Sequence[Head], points: HeavyTokens, log_m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logs of the attention weights that light tokens give to each heavy token (rows, H, c), and
    to all light tokens together (rows, H). ``log_m`` (rows,) are the logs of the numbers of light tokens that
    they see.
    """
    y = torch.stack([score_vectors(head, points.light) for head in heads])
    gaps = y @ (points.heavies - points.light).mT  # (H, c)
    total = torch.logaddexp(torch.logsumexp(gaps, dim=1), log_m[:, None])  # (rows, H)
    return gaps - total[..., None], log_m[:, None] - total


def _same_gram(table: Tensor) -> Tensor:
    """Return a matrix of few rows whose Gram matrix is nearly that of ``table``, and never larger."""
    if len(table) == 1:
        return table
    factor = torch.linalg.qr(table, mode="r").R
    _, s, vh = torch.linalg.svd(factor, full_matrices=False)
    # Leaving out small singular values subtracts a positive semidefinite matrix: the bound remains valid.
    few: Tensor = (s[:, None] * vh)[s > 1e-13 * s[0]]
    return few


def _rounding(heads: Sequence[Head], points: HeavyTokens, slope: float) -> float:
    """Bound the error in the log of a lower bound that comes from rounded score differences of heavy and
    light tokens. The derivative of the log with respect to these differences is at most ``slope``.
    """
    if slope <= 0:
        return 0.0
    w = points.light.abs()
    sizes = [float((h.left.abs() @ (h.right.abs() @ w) + h.b.abs()).norm()) for h in heads]
    shift = float(torch.linalg.vector_norm(points.heavies - points.light, dim=1).max())
    terms = 2 * heads[0].d + heads[0].left.shape[1]
    allowance = up(gamma(terms + 4) * max(sizes) * shift)
    return slope * allowance if math.isfinite(allowance) else math.inf


def _log_norm(matrix: Tensor) -> float:
    """Return the log of the spectral norm, rounded down; −inf if it is zero or not finite."""
    return log_spectral_norm(matrix, upper=False) if bool(matrix.isfinite().all()) else -math.inf


def _total_value(p: Parameters) -> Tensor:
    """Return Σ_h W_h V_h, the sum over heads of output map times value matrix, (d_out, d)."""
    return torch.stack([w @ head.V for w, head in zip(p.outputs, p.heads, strict=True)]).sum(0)
