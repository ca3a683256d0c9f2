"""Certificate N for one head, and the joint one for several: three parts of the Jacobian, each bounded."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from howsmooth.bounds.certificates.certificate import (
    Certificate,
    certify,
    check_iterations,
    one_head,
    the_question,
)
from howsmooth.bounds.certificates.forms import diagonal_norms, key_sums, sandwich, value_sums
from howsmooth.bounds.certificates.heads import HeadsAt
from howsmooth.bounds.certificates.rounding import Enclosed
from howsmooth.bounds.certificates.verified import Rule, norm, perron_norm, shrink
from howsmooth.bounds.certificates.weights import Weights, diagonal_guess, joint_weights
from howsmooth.roundoff import U, gamma, up

__all__ = ["certificate_cheap", "certificate_joint", "certificate_n"]

_SOURCE = "howsmooth, docs/theory/certificates.md, {}"


def certificate_n(attention: object, X: Tensor | None = None, *, iterations: int = 30) -> Certificate:
    """Certificate N: ‖D_X f‖ ≤ ‖V‖‖P‖ + ν + max_i ‖V C_i A‖, for one head, any mask and biases.

    ν² = max_j q_j⁻¹ λ_max(Σ_i P_ij c_i y_i y_iᵀ), c_i = λ_max(V Σ_j P_ij q_j z_ij z_ijᵀ Vᵀ), for every q > 0.

    Parameters
    ----------
    attention
        A one-head ``SelfAttention`` (any mask, rotary positions, output map), a captured
        site whose map is one, or a ``Head``.
    X
        Tokens (..., n, d), float32 or float64, taken as exact; None: the tokens of the site.
    iterations
        Steps of the search for q; 0 takes q = 1.

    Returns
    -------
    Certificate
        Of shape (...), float64.

    Raises
    ------
    ArgumentError
        If there are several heads (use :func:`certificate_joint`) or an argument does not fit.
    NonFiniteError
        If numbers are not finite, or too large for float64.

    """
    f, x = the_question(attention, X)
    one_head(f, "certificate_n")
    steps = check_iterations(iterations)
    return certify("certificate_n", _SOURCE.format("Theorem N"), f, x, partial(three_parts, iterations=steps))


def certificate_joint(attention: object, X: Tensor | None = None, *, iterations: int = 30) -> Certificate:
    """Joint certificate of several heads: ‖D_X f‖ ≤ t₁ + ν + max_i ‖Σ_h W_h V_h C_i^h A_h‖.

    As :func:`certificate_n`, with the sums of c_i and ν taken over all heads before their eigenvalues, and
    t₁ = min{‖W‖ ‖stack_h(‖P^h‖ V_h)‖, ‖[W_1V_1 … W_HV_H]‖ √λ_max(Σ_h P^hᵀP^h)}.

    Parameters
    ----------
    attention
        Of any number of heads, grouped or not; else as for :func:`certificate_n`.
    X, iterations
        As for :func:`certificate_n`.

    Returns
    -------
    Certificate
        Of shape (...), float64.

    Raises
    ------
    ArgumentError
        If an argument does not fit.
    NonFiniteError
        If numbers are not finite, or too large for float64.

    """
    f, x = the_question(attention, X)
    steps = check_iterations(iterations)
    return certify(
        "certificate_joint",
        _SOURCE.format("Theorem N for several heads"),
        f,
        x,
        partial(three_parts, iterations=steps),
    )


def certificate_cheap(attention: object, X: Tensor | None = None, *, iterations: int = 3) -> Certificate:
    """Certificate N with Frobenius norms of Gram matrices for their eigenvalues: λ_max(G) ≤ √tr G².

    No eigenvalue and no factorisation is computed. For one head; for several, use :func:`certificate_joint`.

    Parameters
    ----------
    attention, X, iterations
        As for :func:`certificate_n`.

    Returns
    -------
    Certificate
        Of shape (...), float64.

    Raises
    ------
    ArgumentError
        If there are several heads or an argument does not fit.
    NonFiniteError
        If numbers are not finite, or too large for float64.

    """
    f, x = the_question(attention, X)
    one_head(f, "certificate_cheap")
    steps = check_iterations(iterations)
    evaluate = partial(three_parts, iterations=steps, rule="frobenius")
    return certify("certificate_cheap", _SOURCE.format("Theorem N without eigenvalues"), f, x, evaluate)


def three_parts(at: HeadsAt, *, iterations: int, rule: Rule = "cholesky") -> Enclosed:
    """Evaluate Theorem N on the floats of ``at``."""
    weights = joint_weights(at, iterations)
    diagonal = diagonal_norms(at, rule, diagonal_guess(at))
    parts = (averages(at, rule), tokens_moved(at, weights, rule), diagonal)
    upper = sum(part.upper for part in parts)
    plain = sum(part.plain for part in parts)
    assert isinstance(upper, Tensor)
    assert isinstance(plain, Tensor)
    return Enclosed(upper * (1 + 4 * U), plain)


def averages(at: HeadsAt, rule: Rule) -> Enclosed:
    """t₁: the norm of Σ_h P^h ⊗ W_h V_h, where the weights are held fixed."""
    p = [perron_norm(head.P, rule) for head in at.heads]
    W = [shrink(torch.cat(at.W, dim=1))]
    W = list(W[0].split([w.shape[1] for w in at.W], dim=1))
    V_squares = [(head.V @ head.V.mT)[None] for head in at.heads]
    slack = [up(gamma(head.V.shape[1] + 2) * head.V.square().sum())[None] for head in at.heads]
    folded = sandwich(W, V_squares, slack).root()  # one matrix: its eigenvalue costs nothing
    if len(at.heads) == 1:
        return Enclosed(folded.upper[0] * p[0].upper * (1 + 4 * U), folded.plain[0] * p[0].plain)
    stacked_p = norm(torch.cat([head.P for head in at.heads])[None])
    uppers = torch.cat([head.V * part.upper for head, part in zip(at.heads, p, strict=True)])
    plains = torch.cat([head.V * part.plain for head, part in zip(at.heads, p, strict=True)])
    size = uppers.norm()
    whole = norm(torch.cat(at.W, dim=1)[None])
    first = Enclosed(
        whole.upper[0] * (norm(uppers[None]).upper[0] + up(gamma(2) * size)) * (1 + 4 * U),
        whole.plain[0] * norm(plains[None]).plain[0],
    )
    second = Enclosed(
        folded.upper[0] * stacked_p.upper[0] * (1 + 4 * U), folded.plain[0] * stacked_p.plain[0]
    )
    return first if first.upper <= second.upper else second


def tokens_moved(at: HeadsAt, weights: Weights, rule: Rule) -> Enclosed:
    """ν: the part where a token moves as a key, with the Cauchy–Schwarz weights q."""
    q = weights.q
    W = shrink(torch.cat(at.W, dim=1)).split([w.shape[1] for w in at.W], dim=1)
    blocks = [value_sums(head, q) for head in at.heads]
    relative = up(torch.tensor(gamma(at.n + 8), dtype=torch.float64))
    traces = [relative * b.diagonal(dim1=-2, dim2=-1).sum(-1) for b in blocks]
    c = sandwich(W, blocks, traces, rule, weights.c)
    K = shrink(torch.cat([head.K for head in at.heads]).mT).split(
        [head.K.shape[0] for head in at.heads], dim=1
    )
    sums = [key_sums(head, c.upper) for head in at.heads]
    turn = at.turn_norm**2
    slack = [(relative + gamma(16)) * turn * b.diagonal(dim1=-2, dim2=-1).sum(-1) for b in sums]
    phi = sandwich(K, [at.key_blocks(b) for b in sums], slack, rule, weights.nu_square * q)
    ratio = Enclosed(phi.upper / q * (1 + 4 * U), phi.plain / q)
    return Enclosed(ratio.upper.amax(), ratio.plain.amax()).root()
