"""The quadratic forms in Theorem N and Theorem R, and proved upper bounds on their largest eigenvalues.

For each row i of the attention, ``sandwich`` bounds λ_max(Σ_h O_h B_i^h O_hᵀ) for given positive semidefinite
blocks B_i^h. The blocks are sums of nonnegative multiples of w wᵀ, with a rounding error of γ times their
trace, and a product O B Oᵀ has a rounding error of γ ‖O‖_F² tr B (documentation page "Certificates at given
tokens", section "Rounding").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.eigenvalues import Rule, largest_eigenvalue, shrink
from howsmooth.bounds.certificates.rounded_heads import HeadAt, HeadsAt, row_blocks
from howsmooth.bounds.certificates.rounding import Enclosed
from howsmooth.roundoff import U, gamma, up

FULL_SPECTRUM = 128
"""Size of matrices above which eigenvalues are estimated by power iteration before they are proved."""

__all__ = ["diagonal_norms", "key_sums", "sandwich", "value_sums"]


def value_sums(head: HeadAt, q: Float[Tensor, " n"]) -> Float[Tensor, "n value_dim value_dim"]:
    """Return, for each query, a weighted covariance of the values that it attends to.

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
    """Return, for each key, a weighted sum of the matrices q_i q_iᵀ of the queries q_i.

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
    rule: Rule = "cholesky",
    guess: Float[Tensor, " batch"] | None = None,
) -> Enclosed:
    """Bound the largest eigenvalue of each symmetric matrix Σ_h O_h B^h O_hᵀ, a sum over the heads h.

    Each matrix is Σ_h O_h B^h O_hᵀ, a sum over heads h. ``outer`` has one matrix O_h for each head,
    ``blocks`` one batch of symmetric matrices B^h for each head. The result has one bound for each matrix of
    the batch. ``slack`` bounds the norm of a matrix that bounds the errors of B^h entry by entry. ``guess``
    is an estimate of the eigenvalues; without it they are computed.
    """
    rows, count = outer[0].shape[0], len(blocks[0])
    width = sum(o.shape[1] for o in outer)
    squares = [o.square().sum() for o in outer]
    factor = gamma(width + max(o.shape[1] for o in outer) + 6)
    error = torch.zeros(count, dtype=outer[0].dtype)
    for square, b, s in zip(squares, blocks, slack, strict=True):
        error += square * (s + factor * (torch.linalg.matrix_norm(b) + s))
    uppers, plains = [], []
    whole = torch.cat(tuple(outer), dim=1).mT
    for part in row_blocks(count, rows * max(width, rows)):
        middle = torch.cat([o @ b[part] for o, b in zip(outer, blocks, strict=True)], dim=-1)
        tried = guess[part] if guess is not None and rows > FULL_SPECTRUM else None
        found = largest_eigenvalue(middle @ whole, up(error[part]), rule, tried)
        uppers.append(found.upper)
        plains.append(found.plain)
    return Enclosed(torch.cat(uppers), torch.cat(plains))


def diagonal_norms(at: HeadsAt, rule: Rule = "cholesky", guess: Float[Tensor, ""] | None = None) -> Enclosed:
    """Bound the block-diagonal part of the Jacobian, which comes from the derivative of the queries.

    This norm is max_i ‖Σ_h W_h F_i^h Q_h‖ with the factors F_i^h of :class:`HeadAt`.
    """
    W = shrink(torch.cat(at.W, dim=1))
    Q = shrink(torch.cat([head.Q for head in at.heads]).mT).mT
    Ws = W.split([o.shape[1] for o in at.W], dim=1)
    Qs = Q.split([head.Q.shape[0] for head in at.heads])
    width = Q.shape[0] + max(o.shape[1] for o in Ws) + 6
    error = sum(
        w.norm() * q.norm() * torch.linalg.matrix_norm(head.F)
        for w, q, head in zip(Ws, Qs, at.heads, strict=True)
    )
    assert isinstance(error, Tensor)
    rows, columns = W.shape[0], Q.shape[1]
    target = guess if min(rows, columns) > FULL_SPECTRUM else None
    uppers, plains = [], []
    for part in row_blocks(at.n, Q.shape[0] * max(rows, columns)):
        left = torch.cat([w @ head.F[part] for w, head in zip(Ws, at.heads, strict=True)], dim=-1)
        product = left @ Q
        product = product if rows <= columns else product.mT
        plain = torch.linalg.matrix_norm(product)
        size = plain.square() * (1 + 2 * gamma(rows * columns + 4))
        upper = size.sqrt() * (1 + 4 * U)
        # The Frobenius norm suffices for blocks where it is below the estimated largest spectral norm.
        long = torch.ones_like(plain, dtype=torch.bool) if target is None else plain > target
        if bool(long.any()):
            matrices = product[long]
            tried = None if target is None else target.square().expand(len(matrices))
            slack = up(gamma(product.shape[-1] + 2) * size[long])
            found = largest_eigenvalue(matrices @ matrices.mT, slack, rule, tried).root()
            upper[long], plain[long] = found
        uppers.append(upper + up(gamma(width) * error[part]))
        plains.append(plain)
    return Enclosed(torch.cat(uppers).amax(), torch.cat(plains).amax())
