"""Upper bounds on ‖D_X f‖ that split the Jacobian into three parts and bound each of them (Theorem N of the
documentation).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from howsmooth.bounds.certificates.attention_with_error_bounds import HeadsAt
from howsmooth.bounds.certificates.certificate import (
    Certificate,
    certify,
    check_iterations,
    checked_input,
    one_head,
)
from howsmooth.bounds.certificates.certificate_weight_search import Weights, joint_weights
from howsmooth.bounds.certificates.eigenvalue_bounds import Rule, nonnegative_norm, norm, shrink
from howsmooth.bounds.certificates.number_with_error_bound import Enclosed
from howsmooth.bounds.certificates.weighted_gram_matrices import (
    diagonal_norms,
    key_sums,
    sandwich,
    value_sums,
)
from howsmooth.roundoff import U, gamma, up

__all__ = ["certificate_frobenius", "certificate_heads", "certificate_parts"]

_SOURCE = 'howsmooth documentation, "Certificates at given tokens", {}'


def certificate_parts(attention: object, X: Tensor | None = None, *, iterations: int = 30) -> Certificate:
    """Bound ‖D_X f‖ of one head at given tokens by the sum of bounds on three parts of the Jacobian. The
    bound covers all rounding errors.

    The bound is ‖V‖‖P‖ + ν + max_i ‖V C_i A‖, where ν² = max_j q_j⁻¹ λ_max(Σ_i P_ij c_i y_i y_iᵀ) with
    c_i = λ_max(V Σ_j P_ij q_j z_ij z_ijᵀ Vᵀ), z_ij = x_j − m_i and weights q > 0. Every q gives a valid
    bound; a search chooses q. With rotary positions, norms of queries and keys, a soft cap, a score bias or
    sinks, y_i and C_i are those of the documentation page.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.SelfAttention` with one head (any mask, scores and output map; norms
        of queries and keys act on each head alone), a captured site whose map is one, or a
        :class:`~howsmooth.bounds.Head`.
    X
        Tokens (..., n, d), float32 or float64, taken as exact numbers; None for the tokens of the site.
    iterations
        Largest number of steps of the search for q, which ends earlier when it hardly gains; with 0, q = 1.

    Returns
    -------
    Certificate
        Certificate of shape (...), float64.

    Raises
    ------
    ArgumentError
        If there are several heads (use :func:`certificate_heads`) or an argument does not fit.
    NonFiniteError
        If an entry is not finite, or scores are too large for float64.

    """
    f, x = checked_input(attention, X)
    one_head(f, "certificate_parts")
    steps = check_iterations(iterations)
    return certify(
        "certificate_parts", _SOURCE.format("Theorem N"), f, x, partial(parts_value, iterations=steps)
    )


def certificate_heads(attention: object, X: Tensor | None = None, *, iterations: int = 30) -> Certificate:
    """Bound ‖D_X f‖ of multi-head attention at given tokens by the sum of bounds on three parts of the
    Jacobian. The bound covers all rounding errors.

    The bound is t₁ + ν + max_i ‖Σ_h W_h V_h C_i^h A_h‖. ν and c_i are defined as in
    :func:`certificate_parts`, with sums over all heads inside λ_max, and t₁ = min{‖W‖ ‖stack_h(‖P^h‖ V_h)‖,
    ‖[W_1V_1 … W_HV_H]‖ √λ_max(Σ_h P^hᵀP^h)}.

    Parameters
    ----------
    attention
        As for :func:`certificate_parts`, with any number of heads, also with grouped queries.
    X, iterations
        As for :func:`certificate_parts`.

    Returns
    -------
    Certificate
        Certificate of shape (...), float64.

    Raises
    ------
    ArgumentError
        If an argument does not fit.
    NonFiniteError
        If an entry is not finite, or scores are too large for float64.

    """
    f, x = checked_input(attention, X)
    steps = check_iterations(iterations)
    return certify(
        "certificate_heads",
        _SOURCE.format("Theorem N for several heads"),
        f,
        x,
        partial(parts_value, iterations=steps),
    )


def certificate_frobenius(attention: object, X: Tensor | None = None, *, iterations: int = 2) -> Certificate:
    """Bound ‖D_X f‖ of one head at given tokens like :func:`certificate_parts`, but faster, with Frobenius
    norms in place of eigenvalues.

    It uses λ_max(G) ≤ √tr G², so that no eigenvalue and no factorisation is computed.

    Parameters
    ----------
    attention, X, iterations
        As for :func:`certificate_parts`.

    Returns
    -------
    Certificate
        Certificate of shape (...), float64.

    Raises
    ------
    ArgumentError
        If there are several heads (use :func:`certificate_heads`) or an argument does not fit.
    NonFiniteError
        If an entry is not finite, or scores are too large for float64.

    """
    f, x = checked_input(attention, X)
    one_head(f, "certificate_frobenius")
    steps = check_iterations(iterations)
    evaluate = partial(parts_value, iterations=steps, rule="frobenius")
    return certify("certificate_frobenius", _SOURCE.format("Theorem N without eigenvalues"), f, x, evaluate)


def parts_value(at: HeadsAt, *, iterations: int, rule: Rule = "cholesky") -> Enclosed:
    """Return an upper bound on the norm of the Jacobian of attention, the sum of the bounds on its three
    parts.

    The Jacobian is taken with the attention weights, values and queries as rounded to float64.
    """
    weights = joint_weights(at, iterations)
    diagonal = diagonal_norms(at, rule)
    parts = (averages(at, rule), moving_keys_norm(at, weights, rule), diagonal)
    upper = sum(part.upper for part in parts)
    plain = sum(part.plain for part in parts)
    assert isinstance(upper, Tensor)
    assert isinstance(plain, Tensor)
    return Enclosed(upper * (1 + 4 * U), plain)


def averages(at: HeadsAt, rule: Rule) -> Enclosed:
    """Bound the part of the Jacobian that remains if the attention weights are held fixed.

    The part is Σ_h P^h ⊗ W_h V_h with the attention weights P^h.
    """
    p = [nonnegative_norm(head.P, rule) for head in at.heads]
    W = at.outer.split([w.shape[1] for w in at.W], dim=1)
    V_squares = [(head.V @ head.V.mT)[None] for head in at.heads]
    slack = [up(gamma(head.V.shape[1] + 2) * head.V.square().sum())[None] for head in at.heads]
    folded = sandwich(W, V_squares, slack).root()  # a single matrix, so its eigenvalue is cheap
    if len(at.heads) == 1:
        return Enclosed(folded.upper[0] * p[0].upper * (1 + 4 * U), folded.plain[0] * p[0].plain)
    stacked_p = norm(torch.cat([head.P for head in at.heads])[None])
    uppers = torch.cat([head.V * part.upper for head, part in zip(at.heads, p, strict=True)])
    stacked_v, whole = norm(uppers[None]), norm(torch.cat(at.W, dim=1)[None])
    first = Enclosed(
        whole.upper[0] * (stacked_v.upper[0] + up(gamma(2) * uppers.norm())) * (1 + 4 * U),
        whole.plain[0] * stacked_v.plain[0],
    )
    second = Enclosed(
        folded.upper[0] * stacked_p.upper[0] * (1 + 4 * U), folded.plain[0] * stacked_p.plain[0]
    )
    return first if first.upper <= second.upper else second


def moving_keys_norm(at: HeadsAt, weights: Weights, rule: Rule) -> Enclosed:
    """Bound the part of the Jacobian that comes from the derivative of the scores with respect to the keys.

    The bound is ν of Theorem N, see :func:`certificate_parts`.
    """
    q = weights.q
    W = at.outer.split([w.shape[1] for w in at.W], dim=1)
    blocks = [value_sums(head, q) for head in at.heads]
    relative = up(torch.tensor(gamma(at.n + 8), dtype=torch.float64))
    traces = [relative * b.diagonal(dim1=-2, dim2=-1).sum(-1) for b in blocks]
    c = sandwich(W, blocks, traces, rule, weights.c, lambda: at.domination)
    K = shrink(torch.cat([head.K for head in at.heads]).mT).split(
        [head.K.shape[0] for head in at.heads], dim=1
    )
    sums = [key_sums(head, c.upper) for head in at.heads]
    slack = [
        (relative + gamma(2 * b.shape[-1] + 16)) * head.turn_norm**2 * b.diagonal(dim1=-2, dim2=-1).sum(-1)
        for head, b in zip(at.heads, sums, strict=True)
    ]
    blocks = [head.key_blocks(b) for head, b in zip(at.heads, sums, strict=True)]
    phi = sandwich(K, blocks, slack, rule, weights.nu_square * q)
    ratio = Enclosed(phi.upper / q * (1 + 4 * U), phi.plain / q)
    return Enclosed(ratio.upper.amax(), ratio.plain.amax()).root()
