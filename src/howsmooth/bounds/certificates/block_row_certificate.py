"""An upper bound on ‖D_X f‖ of one head from the norms of the block rows of the Jacobian (Theorem R of the
documentation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.attention_with_error_bounds import HeadsAt, row_blocks
from howsmooth.bounds.certificates.certificate_weight_search import tidy
from howsmooth.bounds.certificates.weighted_gram_matrices import sandwich
from howsmooth.rounding import Enclosed, gamma, shrink, up

__all__ = ["by_rows"]

Terms = Sequence[tuple[slice, Tensor, Tensor]]
"""The results of :func:`row_terms` in a sequence."""

_SMALLEST_TAU = 1e-14
_POWER_STEPS = 5
_FIRST_POWER_STEPS = 20


def by_rows(at: HeadsAt, iterations: int) -> Enclosed:
    """Bound the norm of the Jacobian of one head from its block rows.

    The square of the bound is max_j q_j⁻¹ (Σ_i P_ij Λ_i + τ_j Λ_j). Λ_i = λ_max(V [Σ_j P_ij q_j B_ij
    B_ijᵀ + (q_i/τ_i) C_i A Aᵀ C_i] Vᵀ) with B_ij = I + z_ij y_iᵀ and weights q, τ > 0. Every q and τ give a
    valid bound; a search of so many steps chooses them.
    """
    q, tau = row_weights(at, iterations)
    return rows_value(at, q, tau)


def rows_value(at: HeadsAt, q: Float[Tensor, " n"], tau: Float[Tensor, " n"]) -> Enclosed:
    """Bound the norm of the Jacobian of one head from its block rows, for given positive weights of the
    tokens.

    The head's attention weights, values and queries are taken as rounded to float64. The bound holds for all
    positive weights q and τ.
    """
    P = at.heads[0].P
    diagonal, diagonal_slack = diagonal_squares(at)
    M, slack = row_squares(at, q), row_squares_slack(at, q)
    ratio = q / tau
    M = M + ratio[:, None, None] * diagonal
    levels = sandwich([shrink(at.W[0])], [M], [slack + up(ratio * diagonal_slack)])
    sums = [P.T @ level + tau * level for level in levels]
    upper = (sums[0] / q).amax() * (1 + 2 * gamma(at.n + 8))
    return Enclosed(upper, (sums[1] / q).amax()).root()


def row_weights(at: HeadsAt, iterations: int) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Search for positive weights of the tokens that make the bound of :func:`rows_value` small.

    The two results are the weights q and τ.
    """
    W = shrink(at.W[0])
    diagonal, _ = diagonal_squares(at)
    P = at.heads[0].P
    q = torch.ones(at.n, dtype=torch.float64)
    tau = torch.full_like(q, 1e-3)
    u = torch.randn(at.n, len(W), generator=torch.Generator().manual_seed(0), dtype=q.dtype)
    best, best_value = (q, tau), float("inf")
    blocks = row_blocks(at.n, at.n * max(len(at.heads[0].K), len(at.heads[0].V)))
    terms = list(row_terms(at)) if len(blocks) == 1 else None  # more blocks would take memory n² value_dim
    for iteration in range(iterations + 1):
        M = row_squares(at, q, terms)
        for _ in range(1 if iteration else 3):
            whole = W @ (M + (q / tau)[:, None, None] * diagonal) @ W.mT
            u = _follow_top(whole, u, _POWER_STEPS if iteration else _FIRST_POWER_STEPS)
            x = u @ W
            along = (x * (M @ x[..., None])[..., 0]).sum(1).clamp_min(1e-300)
            across = (x * (diagonal @ x[..., None])[..., 0]).sum(1).clamp_min(0)
            level = along + q * across / tau
            value = float(((P.T @ level + tau * level) / q).amax())
            if value < best_value:
                best, best_value = (q, tau), value
            tau = (q * across / along).sqrt().clamp_min(_SMALLEST_TAU)
        q = tidy((q * (P.T @ level + tau * level)).sqrt())
    return best


def _follow_top(
    matrices: Float[Tensor, "n r r"], u: Float[Tensor, "n r"], steps: int
) -> Float[Tensor, "n r"]:
    """Improve estimates ``u`` of the leading eigenvectors of matrices by steps of the power method."""
    for _ in range(steps):
        u = (matrices @ u[..., None])[..., 0]
        u = u / u.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return u


def row_squares(
    at: HeadsAt, q: Float[Tensor, " n"], terms: Terms | None = None
) -> Float[Tensor, "n value_dim value_dim"]:
    """Return a weighted Gram matrix for each block row of the Jacobian without its block-diagonal part.

    For row i the matrix is Σ_j P_ij q_j N_ij N_ijᵀ with N_ij = V + w_ij y_ijᵀ, where P_ij N_ij is the block
    of the Jacobian without its block-diagonal part. :func:`row_squares_slack` bounds the rounding errors.
    ``terms`` are those of :func:`row_terms`, which do not depend on q.
    """
    head = at.heads[0]
    VV = head.V @ head.V.mT
    squares = torch.empty(at.n, len(VV), len(VV), dtype=q.dtype)
    for rows, w, beside in terms or row_terms(at):
        rho = head.P[rows] * q
        half = (rho[..., None] * w).mT @ beside
        squares[rows] = rho.sum(1)[:, None, None] * VV + half + half.mT
    return squares


def row_terms(at: HeadsAt) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield two vectors for each query i and key j, from which :func:`row_squares` computes its Gram
    matrices. Each item holds the vectors of one block of queries.

    They are w_ij and s_ij = V y_ij + |y_ij|² w_ij / 2, and N_ij N_ijᵀ = V Vᵀ + s_ij w_ijᵀ + w_ij s_ijᵀ.
    """
    head = at.heads[0]
    n, width = head.v.shape
    k = head.K.shape[0]
    VK, KK = head.V @ head.K.mT, head.K @ head.K.mT
    if head.turns is not None:
        # With rotary maps T_j, products with K in N_ij N_ijᵀ depend on j: T_j K Vᵀ and T_j K Kᵀ T_jᵀ.
        turn_V = (head.turns @ VK.mT).transpose(0, 1).flatten(1)
        turn_K = (head.turns @ KK @ head.turns.mT).flatten(1).mT
    for rows in row_blocks(n, n * max(width, k)):
        w = head.v[None] - head.o[rows, None]
        here = head.q[rows]
        if head.turns is None:
            moved = (here @ VK.mT)[:, None, :]
            y_square = ((here @ KK) * here).sum(1).clamp_min(0)[:, None]
        else:
            moved = (here @ turn_V).unflatten(1, (n, width))
            outer = (here[:, :, None] * here[:, None, :]).flatten(1)
            y_square = (outer @ turn_K).clamp_min(0)
        yield rows, w, torch.addcmul(moved, y_square[..., None], w, value=0.5)


def row_squares_slack(at: HeadsAt, q: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return bounds on the rounding errors of the Gram matrices that :func:`row_squares` returns."""
    head = at.heads[0]
    n, width = head.v.shape
    k, d = head.K.shape
    slack = torch.empty(n, dtype=q.dtype)
    V_size = head.V.norm()
    y_size = head.turn_norm * head.K.norm() * head.q.norm(dim=1)
    for rows in row_blocks(n, n * max(width, k)):
        w_size = torch.linalg.vector_norm(head.v[None] - head.o[rows, None], dim=-1)
        slack[rows] = (head.P[rows] * q * (V_size + w_size * y_size[rows, None]).square()).sum(1)
    return up(gamma(d + 5 * k + n + 60) * slack)


def diagonal_squares(at: HeadsAt) -> tuple[Float[Tensor, "n value_dim value_dim"], Float[Tensor, " n"]]:
    """Return the Gram matrix of each diagonal block of the Jacobian, and bounds on the rounding errors.

    For row i the Gram matrix is F_i Q Qᵀ F_iᵀ with the factor F_i of :class:`HeadAt`.
    """
    head = at.heads[0]
    squares = head.F @ (head.Q @ head.Q.mT) @ head.F.mT
    k, d = head.Q.shape
    size = torch.linalg.matrix_norm(head.F).square() * head.Q.square().sum()
    return squares, up(gamma(d + 2 * k + 20) * size)
