"""Weighted sums of outer products of values and of queries, and proved upper bounds on the eigenvalues of
these sums, of which certificates of attention consist.

For each row i of the attention, ``sandwich`` bounds λ_max(Σ_h O_h B_i^h O_hᵀ) for given positive semidefinite
blocks B_i^h. The blocks are sums of nonnegative multiples of w wᵀ, with a rounding error of γ times their
trace, and a product O B Oᵀ has a rounding error of γ ‖O‖_F² tr B (documentation page "Certificates at given
tokens", section "Rounding").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.attention_with_error_bounds import HeadAt, HeadsAt, row_blocks
from howsmooth.bounds.certificates.certificate_weight_search import diagonal_guesses
from howsmooth.bounds.certificates.eigenvalue_bounds_of_congruences import Domination
from howsmooth.rounding import Enclosed, gamma, largest_eigenvalues_above, shrink, up

__all__ = ["FORMED", "diagonal_norms", "key_sums", "sandwich", "value_sums"]

FORMED = 128
"""Largest size of matrices O B Oᵀ that are formed. Eigenvalues of larger ones are bounded by domination."""


def value_sums(head: HeadAt, q: Float[Tensor, " n"]) -> Float[Tensor, "n value_dim value_dim"]:
    """Return for each query a weighted covariance matrix of the values that it attends to.

    For row i it is Σ_j M_ij q_j w_ij w_ijᵀ with weights q_j, where w_ij is value j minus output i, and M_ij
    the attention weight, times the derivative of the soft cap if there is one. The rounding error is at most
    γ_{n+8} times the trace.
    """
    n, width = head.v.shape
    sums = torch.empty(n, width, width, dtype=q.dtype)
    for rows in row_blocks(n, n * width):
        w = head.v[None] - head.o[rows, None]
        sums[rows] = ((head.moving[rows] * q)[..., None] * w).mT @ w
    return sums


def key_sums(head: HeadAt, c: Float[Tensor, " n"]) -> Float[Tensor, "n key_dim key_dim"]:
    """Return for each key a weighted sum of the matrices q_i q_iᵀ over all query vectors q_i.

    For key j it is Σ_i M_ij c_i q_i q_iᵀ, where q_i is query i and c_i a given weight. The rounding error is
    at most γ_{n+8} times the trace.
    """
    n, k = head.q.shape
    outer = (head.q[:, :, None] * head.q[:, None, :]).reshape(n, k * k)
    return ((head.moving * c[:, None]).mT @ outer).reshape(n, k, k)


def sandwich(
    outer: Sequence[Float[Tensor, "rows _k"]],
    blocks: Sequence[Float[Tensor, "batch _k _k"]],
    slack: Sequence[Float[Tensor, " batch"]],
    guess: Float[Tensor, " batch"] | None = None,
    domination: Callable[[], Domination] | None = None,
) -> Enclosed:
    """Bound the largest eigenvalues of the symmetric matrices Σ_h O_h B^h O_hᵀ, where h runs over the heads.
    The matrices O_h and batches of matrices B^h are given.

    ``outer`` has one matrix O_h for each head, ``blocks`` one batch of symmetric matrices B^h for each head.
    The result has one bound for each matrix of the batch. ``slack`` bounds the norm of a matrix that bounds
    the errors of B^h entry by entry. ``guess`` is an estimate of the eigenvalues; without it they are
    computed. ``domination`` returns the :class:`Domination` of all O_h side by side, where it is known.
    """
    rows, count = outer[0].shape[0], len(blocks[0])
    width = sum(o.shape[1] for o in outer)
    squares = [o.square().sum() for o in outer]
    error = torch.zeros(count, dtype=outer[0].dtype)
    if guess is not None and rows > FORMED and any(float(s) for s in squares):
        for square, s in zip(squares, slack, strict=True):
            error += square * s
        ends = list(itertools.accumulate(b.shape[1] for b in blocks))

        def subtract(a: Tensor, members: Tensor) -> None:
            for b, end in zip(blocks, ends, strict=True):
                own = slice(end - b.shape[1], end)
                a[:, own, own].sub_(b[members])

        near = Domination.of(torch.cat(tuple(outer), dim=1)) if domination is None else domination()
        return near.largest_eigenvalues(subtract, guess, up(error))
    factor = gamma(width + max(o.shape[1] for o in outer) + 6)
    for square, b, s in zip(squares, blocks, slack, strict=True):
        error += square * (s + factor * (torch.linalg.matrix_norm(b) + s))
    uppers, plains = [], []
    whole = torch.cat(tuple(outer), dim=1).mT
    for part in row_blocks(count, rows * max(width, rows)):
        middle = torch.cat([o @ b[part] for o, b in zip(outer, blocks, strict=True)], dim=-1)
        found = largest_eigenvalues_above(middle @ whole, up(error[part]))
        uppers.append(found.upper)
        plains.append(found.plain)
    return Enclosed(torch.cat(uppers), torch.cat(plains))


def diagonal_norms(at: HeadsAt) -> Enclosed:
    """Bound the norm of the block-diagonal part of the Jacobian, which contains the derivatives of the
    queries.

    The result bounds the norm max_i ‖Σ_h W_h F_i^h Q_h‖ with the factors F_i^h of :class:`HeadAt`.
    """
    W = at.outer
    Q = shrink(torch.cat([head.Q for head in at.heads]).mT).mT
    Ws = W.split([o.shape[1] for o in at.W], dim=1)
    Qs = Q.split([head.Q.shape[0] for head in at.heads])
    rows, columns = W.shape[0], Q.shape[1]
    if min(rows, columns) > FORMED and bool(W.any()):
        return _diagonal_norms_by_domination(at, Qs)
    width = Q.shape[0] + max(o.shape[1] for o in Ws) + 6
    error = sum(
        w.norm() * q.norm() * torch.linalg.matrix_norm(head.F)
        for w, q, head in zip(Ws, Qs, at.heads, strict=True)
    )
    assert isinstance(error, Tensor)
    uppers, plains = [], []
    for part in row_blocks(at.n, Q.shape[0] * max(rows, columns)):
        left = torch.cat([w @ head.F[part] for w, head in zip(Ws, at.heads, strict=True)], dim=-1)
        product = left @ Q
        product = product if rows <= columns else product.mT
        size = torch.linalg.matrix_norm(product).square() * (1 + 2 * gamma(rows * columns + 4))
        slack = up(gamma(product.shape[-1] + 2) * size)
        found = largest_eigenvalues_above(product @ product.mT, slack).root()
        uppers.append(found.upper + up(gamma(width) * error[part]))
        plains.append(found.plain)
    return Enclosed(torch.cat(uppers).amax(), torch.cat(plains).amax())


def _diagonal_norms_by_domination(at: HeadsAt, Qs: Sequence[Float[Tensor, "_k columns"]]) -> Enclosed:
    """Bound the largest norm of the diagonal blocks of the Jacobian by comparing all blocks with one matrix,
    which :class:`Domination` computes.

    The block of row i is W F_i Q, where W and Q stack the matrices of all heads and F_i is block-diagonal.
    Its squared norm is the largest eigenvalue of W M_i Wᵀ with M_i = F_i Q Qᵀ F_iᵀ.
    """
    H, v = len(at.heads), at.heads[0].F.shape[1]
    Q = torch.stack(tuple(Qs))
    gram = torch.einsum("hkd,gld->hkgl", Q, Q)
    F = torch.stack([head.F for head in at.heads], dim=1)
    size = (torch.linalg.matrix_norm(F).square() * Q.square().sum((1, 2))).sum(1)
    # A sum over members and entries of a head is one inner product of at most n key_dim terms.
    error = up(gamma(Q.shape[2] + (at.n + 1) * Q.shape[1] + 20) * size)

    def subtract(a: Tensor, members: Tensor) -> None:
        factors = F[members]
        columns = factors.permute(1, 0, 3, 2).flatten(1, 2)  # for each head, (members and key_dim, value_dim)
        for h in range(H):
            # The factorisation reads the lower triangle, so head h meets the heads up to h.
            left = factors[:, h] @ gram[h, :, : h + 1].flatten(1)
            left = left.unflatten(2, (h + 1, -1)).permute(2, 1, 0, 3).flatten(2)
            block = (left @ columns[: h + 1]).transpose(0, 1).flatten(1)
            a[h * v : (h + 1) * v, : (h + 1) * v] -= block

    slack = up(at.outer.square().sum() * error)
    return at.domination.largest_of_all(subtract, diagonal_guesses(at), slack).root()
