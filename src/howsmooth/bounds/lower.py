"""Lower bounds on the Lipschitz constant over a ball, one function a statement.

All but ``proposition_3_4`` and ``quadratic_growth`` come from one lemma: tokens z_1..z_c once each and
copies of one token w; the Jacobian's columns of the heavy tokens are known in closed form, and their norm
is a lower bound of the local constant there, so of the Lipschitz constant over any ball that holds these
tokens. The tokens are float64 numbers, and the lemma is evaluated at them as they are: no bound depends on
how well an eigenvector or an optimisation converged. Derivations: docs/theory/worst-inputs.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_length, check_radius
from howsmooth.bounds.heavy_columns import (
    MOST_ROWS,
    log_heavy_columns,
    log_int,
    log_rank_one,
    log_weights,
    rounding_of_scores,
    total_value,
)
from howsmooth.bounds.parameters import Head, Parameters, parameters_of
from howsmooth.bounds.witness import Tie, TwoPoints, best_ties, steepest_pairs, two_cluster_points
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = [
    "heavy_token",
    "masked_tie",
    "masked_two_cluster",
    "no_real_eigenvalue",
    "proposition_3_4",
    "quadratic_growth",
    "repeated_token",
    "tie",
    "two_cluster_sharp",
]

_PAPER = "Castin, Ablin, Peyré, ICML 2024"
_PAGE = "docs/theory/worst-inputs.md"

_MOST_DENSE_CESARO = 512

# Rows of a window whose norm is taken: the rows at its ends have the largest.
_DENSE_ROWS = 1024


def proposition_3_4(attention: object, length: int, radius: float) -> Bound:
    """Lip(f|B_R^n) ≥ √(n−1) / (1 + (n−1) e^{−2R²γ}), γ = max(−γ_min, γ_max/8).

    γ_min and γ_max are the smallest and largest real eigenvalues of A.

    Parameters
    ----------
    attention
        One head: a Head, a SelfAttention with one head or a captured site of one.
    length
        Number of tokens n >= 1.
    radius
        Radius R > 0 of the ball.

    Returns
    -------
    Bound
        Lower, on the global constant. Hypotheses: no mask, V = I, no query bias, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    Proposition 3.4 and Lemma C.7, Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024.

    """
    p, n, R = parameters_of(attention), check_length(length), check_radius(radius)
    head = p.one_head("Proposition 3.4")
    points = two_cluster_points(head, R)
    log = -math.inf
    if points is not None and n > 1:
        log_p, _ = log_weights([head], points.heavies, points.light, log_int(n - 1))
        share = float(log_p[0, 0, 0])
        error = rounding_of_scores([head], points) if share < 0 else 0.0
        # Scores that overflow say nothing, and nothing is claimed.
        log = 0.5 * log_int(n - 1) + share + math.expm1(share) * error if math.isfinite(share) else log
    return Bound.lower(
        "proposition_3_4",
        Quantity.GLOBAL,
        f"Proposition 3.4 and Lemma C.7, {_PAPER}",
        log_formula=log,
        hypotheses=(
            _unmasked(p),
            Hypothesis("V = I", _is_identity(head.V)),
            Hypothesis("no query bias", not bool(head.b.any())),
            _has_real_eigenvalue(points),
        ),
    )


def two_cluster_sharp(attention: object, length: int, radius: float) -> Bound:
    """Lip(f|B_R^n) ≥ √(n−1) p ‖V(I + (1−p)(z−w)yᵀ)‖ at two clusters on an eigenvector, for any V and bias.

    With z = Ru, w = Ru/2 or −Ru, y = Aw + b, p = 1/(1 + (n−1)e^{−⟨y, z−w⟩}). Without bias this is
    √(n−1) p ‖V(I + 2g(1−p)uuᵀ)‖, g = γR². The better of γ_max/8 and −γ_min for the value is taken.

    Parameters
    ----------
    attention
        One head, as in :func:`proposition_3_4`.
    length
        Number of tokens n >= 1.
    radius
        Radius R > 0 of the ball.

    Returns
    -------
    Bound
        Lower, on the global constant. Hypotheses: no mask, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    This library: docs/theory/worst-inputs.md; it sharpens Proposition 3.4 of Castin, Ablin, Peyré,
    ICML 2024.

    """
    p, n, R = parameters_of(attention), check_length(length), check_radius(radius)
    head = p.one_head("the two-cluster bound")
    points = _two_clusters(head, R)
    log = max(
        (log_heavy_columns(Parameters((head,), (_eye(head),), "none", None), n, t) for t in points),
        default=-math.inf,
    )
    return Bound.lower(
        "two_cluster_sharp",
        Quantity.GLOBAL,
        f"howsmooth, {_PAGE}; sharpens Proposition 3.4, {_PAPER}",
        log_formula=log,
        hypotheses=(_unmasked(p), _has_real_eigenvalue(points or None)),
    )


def masked_two_cluster(attention: object, length: int, radius: float) -> Bound:
    """Lip(f^m|B_R^n) at the two clusters of :func:`two_cluster_sharp` with the heavy token first.

    With p_i the weight of the heavy token for i visible tokens, and g = γR²: the norm of V and
    p_i V(I + 2g(1−p_i)uuᵀ), i = 2..n, stacked; at least √(1+Σp_i²)‖V‖ and √(Σp_i²(1+2g(1−p_i))²)|Vu|.

    Parameters
    ----------
    attention
        One head, as in :func:`proposition_3_4`.
    length
        Number of tokens n >= 1. Beyond 2^16 the bound for 2^16 is returned: it holds for more tokens.
    radius
        Radius R > 0 of the ball.

    Returns
    -------
    Bound
        Lower, on the masked constant. Hypotheses: causal mask, a real eigenvalue.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    This library: docs/theory/worst-inputs.md.

    """
    p, n, R = parameters_of(attention), check_length(length), check_radius(radius)
    head = p.one_head("the masked two-cluster bound")
    points = _two_clusters(head, R)
    causal = Parameters((head,), (_eye(head),), "causal", None)
    log = max((log_heavy_columns(causal, n, t) for t in points), default=-math.inf)
    return Bound.lower(
        "masked_two_cluster",
        Quantity.MASKED,
        f"howsmooth, {_PAGE}",
        log_formula=log,
        hypotheses=(_causal(p, attention), _has_real_eigenvalue(points or None)),
    )


def no_real_eigenvalue(attention: object, length: int, radius: float) -> Bound:
    """Lip ≥ √(n−1) p ‖V(I + (1−p)(z−w)yᵀ)‖ for any A: z = Ry/|y|, y = Aw + b, |w| ≤ R.

    p = 1/(1 + (n−1)e^{−ER²}), with E = max_{|w|≤1} (|Aw| − ⟨Aw, w⟩) ≥ max(−2γ_min, γ_max/4, ‖A‖/4) without
    bias, where w attains it. The search for w is local; any w gives a valid bound.

    Parameters
    ----------
    attention
        One head or several (the points are then sought for each head, and all heads counted), with no mask
        or causal; with a causal mask the heavy token comes first.
    length
        Number of tokens n >= 1.
    radius
        Radius R > 0 of the ball.

    Returns
    -------
    Bound
        Lower, on the global constant, masked if the attention is. Hypothesis: no mask, or causal.

    Raises
    ------
    ArgumentError
        If an argument is out of range.

    References
    ----------
    This library: docs/theory/worst-inputs.md.

    """
    p, n, R = parameters_of(attention), check_length(length), check_radius(radius)
    points = [t for h in range(len(p.heads)) for t in steepest_pairs(p.folded(h), R)[:2]]
    log = max((log_heavy_columns(p, n, t) for t in points), default=-math.inf)
    return Bound.lower(
        "no_real_eigenvalue",
        _quantity(p),
        f"howsmooth, {_PAGE}",
        log_formula=log,
        hypotheses=(_simple_mask(p),),
    )


def heavy_token(attention: object, length: int, heavy: Tensor, light: Tensor) -> Bound:
    """‖D_X f‖ ≥ √(n−1) ‖M‖ at X = (z, w, …, w), for any tokens z and w.

    M = Σ_h W_h V_h p_h (I + (1−p_h)(z−w)y_hᵀ), y_h = A_h w + b_h, p_h = 1/(1 + (n−1)e^{−⟨y_h, z−w⟩}). With a
    causal mask, z first: the norm of Σ_h W_hV_h and M_2, …, M_n stacked, where M_i has i in place of n.

    Parameters
    ----------
    attention
        Any number of heads, with no mask or causal.
    length
        Number of tokens n >= 1.
    heavy, light
        z and w, (d,).

    Returns
    -------
    Bound
        Lower, on the local constant at X; so on the global one for every ball that holds z and w.

    Raises
    ------
    ArgumentError
        If an argument is out of range or does not fit.
    NonFiniteError
        If a token is not finite.

    References
    ----------
    This library: docs/theory/worst-inputs.md.

    """
    p, n = parameters_of(attention), check_length(length)
    d = p.heads[0].d
    points = TwoPoints.of(_token("heavy", heavy, d), _token("light", light, d))
    log = log_heavy_columns(p, n, points)
    return Bound.lower(
        "heavy_token", Quantity.LOCAL, f"howsmooth, {_PAGE}", log_formula=log, hypotheses=(_simple_mask(p),)
    )


def tie(attention: object, length: int, radius: float) -> Bound:
    """Lip(f|B_R^n) ≥ √(2(n−2)) p sinθ |y| R |Vv|: two heavy tokens between which n − 2 rows cannot decide.

    Tokens R(cosθ ŷ ± sinθ v) once each and w, |w| ≤ R, n − 2 times, where y = Aw + b, ŷ = y/|y|, v ⊥ ŷ and
    p = 1/(2 + (n−2)e^{−(R|y|cosθ − ⟨y,w⟩)}). It attains the rate R²√n of Theorem 3.3. θ, w and v are
    sought locally; any of them gives a valid bound. What is returned is the norm of the two heavy
    columns, at least the formula above.

    Parameters
    ----------
    attention
        One head, or several (then sought for each head, all heads counted).
    length
        Number of tokens.
    radius
        Radius R > 0 of the ball.

    Returns
    -------
    Bound
        Lower, on the global constant. Hypotheses: no mask, n ≥ 3, d ≥ 2.

    Raises
    ------
    ArgumentError
        If an argument is out of range.

    References
    ----------
    This library: docs/theory/worst-inputs.md.

    """
    p, n, R = parameters_of(attention), check_length(length), check_radius(radius)
    log = _log_tie(p, n, R, masked=False)
    return Bound.lower(
        "tie",
        Quantity.GLOBAL,
        f"howsmooth, {_PAGE}",
        log_formula=log,
        hypotheses=(_unmasked(p), *_tie_hypotheses(n, p.heads[0].d)),
    )


def masked_tie(attention: object, length: int, radius: float) -> Bound:
    """Lip(f^m|B_R^n) ≥ √(2Σ_{i=3}^n p_i²) sinθ |y| R |Vv| at the tokens of :func:`tie`, heavy ones first.

    p_i = 1/(2 + (i−2)e^{−(R|y|cosθ − ⟨y,w⟩)}).

    Parameters
    ----------
    attention
        One head or several.
    length
        Number of tokens. Beyond 2^16 the bound for 2^16 is returned: it holds for more tokens.
    radius
        Radius R > 0 of the ball.

    Returns
    -------
    Bound
        Lower, on the masked constant. Hypotheses: causal mask, n ≥ 3, d ≥ 2.

    Raises
    ------
    ArgumentError
        If an argument is out of range.

    References
    ----------
    This library: docs/theory/worst-inputs.md.

    """
    p, n, R = parameters_of(attention), check_length(length), check_radius(radius)
    log = _log_tie(Parameters(p.heads, p.outputs, "causal", None), n, R, masked=True)
    return Bound.lower(
        "masked_tie",
        Quantity.MASKED,
        f"howsmooth, {_PAGE}",
        log_formula=log,
        hypotheses=(_causal(p, attention), *_tie_hypotheses(n, p.heads[0].d)),
    )


def repeated_token(attention: object, length: int, radius: float) -> Bound:
    """‖D_X f‖ = ‖Σ_h W_h V_h‖ ‖P‖ where all tokens are one: P is uniform over the visible tokens.

    Without a mask ‖P‖ = 1. With a causal mask P is the Cesàro matrix, whose norm grows from 1 to 2 (Hardy).

    Parameters
    ----------
    attention
        Any number of heads, any mask.
    length
        Number of tokens n >= 1; that of the mask, if there is one that is not causal.
    radius
        Radius R > 0 of the ball; the value does not depend on it.

    Returns
    -------
    Bound
        Lower, on the global constant, masked if the attention is.

    Raises
    ------
    ArgumentError
        If an argument is out of range.

    References
    ----------
    This library: docs/theory/worst-inputs.md.

    """
    p, n = parameters_of(attention), check_length(length)
    check_radius(radius)
    seen, norm = p.visibility(n), 1.0  # what rows that sum to one have at least
    wide = p.window is None or p.window > _DENSE_ROWS
    if seen.causal and p.mask is None and wide:  # the first rows of a window are those of a triangle
        norm = _cesaro_norm(min(n, MOST_ROWS if p.window is None else p.window))
    elif p.masking == "other":
        rows = slice(0, n if p.window is None else min(n, _DENSE_ROWS))
        keys = seen.keys(rows)
        shown = seen.block(rows, keys)
        if shown is not None:
            shares = shown / shown.sum(1, keepdim=True, dtype=torch.float64)
            norm = max(norm, float(torch.linalg.matrix_norm(shares, 2)))
    formula = norm * float(torch.linalg.matrix_norm(total_value(p), 2)) * (1 - 1e-12)
    return Bound.lower("repeated_token", _quantity(p), f"howsmooth, {_PAGE}", formula=formula)


def quadratic_growth(attention: object, length: int, radius: float) -> Bound:
    """Lip ≥ ‖V(I + mR²u(Aᵀu)ᵀ)‖/n: tokens 0 and ±Ru, m of them, last a token 0; n − m is 1 or 2, m even.

    J_nn = V(I/n + C_n A), where row n sees all tokens alike and C_n = (m/n)R²uuᵀ. For A = γI, V = I it is
    1/n + γR²(n−1)/n for odd n. Any unit u will do; left and right singular vectors of A, V are tried.

    Parameters
    ----------
    attention
        One head, with no mask or causal.
    length
        Number of tokens n >= 1.
    radius
        Radius R > 0 of the ball.

    Returns
    -------
    Bound
        Lower, on the global constant, masked if the attention is. Hypotheses: no query bias; no mask or
        causal; n >= 3.

    Raises
    ------
    ArgumentError
        If there are several heads, or an argument is out of range.

    References
    ----------
    Kim, Papamakarios, Mnih, ICML 2021, in the form of Castin, Ablin, Peyré, ICML 2024, Appendix C.

    """
    p, n, R = parameters_of(attention), check_length(length), check_radius(radius)
    head = p.one_head("quadratic growth")
    pairs = 2 * ((n - 1) // 2)
    candidates = torch.cat([torch.linalg.svd(head.A).U[:, :2], torch.linalg.svd(head.V).Vh[:2].mT], dim=1).mT
    # Divided by n first, and R² only where it cannot overflow: 1/n and m/n are at most 1.
    share = 0.0 if n < 3 else float(pairs / n)
    log = max(
        log_rank_one(head.V, 1 / n, share * (u * R), (u * R) @ head.left @ head.right) for u in candidates
    )
    return Bound.lower(
        "quadratic_growth",
        _quantity(p),
        f"Kim, Papamakarios, Mnih, ICML 2021; Appendix C, {_PAPER}",
        log_formula=log,
        hypotheses=(
            _simple_mask(p),
            Hypothesis("no query bias", not bool(head.b.any())),
            Hypothesis("n >= 3", n >= 3),
        ),
    )


def _log_tie(p: Parameters, n: int, radius: float, *, masked: bool) -> float:
    if n < 3:
        return -math.inf
    masking = Parameters(p.heads, p.outputs, "causal" if masked else "none", None)
    found = [-math.inf]
    for h in range(len(p.heads)):
        head = p.folded(h)
        for points in best_ties(head, n, radius, masked=masked)[:2]:
            found.append(log_heavy_columns(masking, n, points))
            if len(p.heads) == 1:
                found.append(_log_tie_formula(head, n, points, masked=masked))
    return max(found)


def _log_tie_formula(head: Head, n: int, points: Tie, *, masked: bool) -> float:
    """Logarithm of √(2Σp²) sinθ |y| R |Vv|, which needs no equality of two rounded scores: for huge radii."""
    y = head.left @ (head.right @ points.light) + head.b
    mean, half = (points.heavy_1 + points.heavy_2) / 2, (points.heavy_1 - points.heavy_2) / 2
    gap = float(y @ (mean - points.light))
    size, strength = float(y.norm()), float((head.V @ half).norm())
    if not (math.isfinite(gap) and 0 < size < math.inf and 0 < strength < math.inf):
        return -math.inf
    if masked:
        log_m = torch.arange(1, min(n, MOST_ROWS) - 1, dtype=torch.float64).log()
    else:
        log_m = torch.tensor([log_int(n - 2)], dtype=torch.float64)
    log_p = -torch.logaddexp(torch.tensor(math.log(2), dtype=torch.float64), log_m - gap)
    rows = float(torch.logsumexp(2 * log_p, dim=0)) + (0.0 if masked else float(log_m[0]))
    undecided = max(0.0, 1 - 2 * float(log_p.min().exp()))
    error = undecided * 4e-15 * size * float((mean - points.light).norm()) if undecided else 0.0
    return 0.5 * (math.log(2) + rows) + math.log(size) + math.log(strength) - error - 1e-12


def _two_clusters(head: Head, radius: float) -> list[TwoPoints]:
    """Return the points for γ_max and for γ_min; empty without a real eigenvalue."""
    both = (two_cluster_points(head, radius, choice) for choice in ("max", "min"))
    return [points for points in both if points is not None]


def _cesaro_norm(n: int) -> float:
    """Norm of the n × n Cesàro matrix, rounded down; from below for large n, by any vector's image."""
    small = min(n, _MOST_DENSE_CESARO)
    counts = torch.arange(1, small + 1, dtype=torch.float64)
    dense = torch.ones(small, small, dtype=torch.float64).tril() / counts[:, None]
    norm = float(torch.linalg.matrix_norm(dense, 2))
    if n == small:
        return norm * (1 - 1e-12)
    counts = torch.arange(1, n + 1, dtype=torch.float64)
    vector = counts.rsqrt()
    for _ in range(50):
        image = vector.cumsum(0) / counts
        ratio = float(image.norm() / vector.norm())
        norm = max(norm, ratio * (1 - 1e-9))
        # the transposed Cesàro matrix: Σ_{i≥j} image_i / i
        vector = (image / counts).flip(0).cumsum(0).flip(0)
        vector = vector / vector.norm()
    return norm * (1 - 1e-12)


# ---- hypotheses and checks


def _unmasked(p: Parameters) -> Hypothesis:
    return Hypothesis("no mask", p.masking == "none")


def _causal(p: Parameters, attention: object) -> Hypothesis:
    return Hypothesis("causal mask", p.masking == "causal" or isinstance(attention, Head))


def _simple_mask(p: Parameters) -> Hypothesis:
    return Hypothesis("no mask, or causal", p.masking != "other")


def _has_real_eigenvalue(points: object) -> Hypothesis:
    return Hypothesis("A has a real eigenvalue (else use no_real_eigenvalue)", points is not None)


def _tie_hypotheses(n: int, d: int) -> tuple[Hypothesis, ...]:
    return (Hypothesis("n >= 3", n >= 3), Hypothesis("d >= 2", d >= 2))


def _quantity(p: Parameters) -> Quantity:
    return Quantity.GLOBAL if p.masking == "none" else Quantity.MASKED


def _is_identity(V: Tensor) -> bool:
    return V.shape[0] == V.shape[1] and bool((torch.eye(len(V), dtype=V.dtype) == V).all())


def _eye(head: Head) -> Tensor:
    return torch.eye(head.V.shape[0], dtype=torch.float64)


def _token(name: str, value: object, d: int) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != (d,) or not value.is_floating_point():
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(name, expected=f"a floating-point vector ({d},)", got=got)
    if not bool(torch.isfinite(value).all()):
        raise NonFiniteError(name, expected="finite numbers", got="NaN or infinity")
    return value.detach().to(device="cpu", dtype=torch.float64)
