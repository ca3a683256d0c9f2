"""An upper bound on ‖D_X f‖ of one head from the norms of the block rows of the Jacobian (Theorem R)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.eigenvalue_bounds import sandwich
from howsmooth.bounds.certificates.rounded_attention import HeadAt, HeadsAt, row_blocks
from howsmooth.rounding import Enclosed, above, gamma, up

__all__ = ["by_rows", "rows_value"]

Terms = Sequence[tuple[slice, Tensor, Tensor]]
"""For blocks of rows i, the vectors g_ij w_ij and s_ij = V y_ij + |y_ij|² g_ij w_ij / 2 of all keys j."""

_SMALLEST = 1e-12
_SMALLEST_TAU = 1e-14


def by_rows(at: HeadsAt, iterations: int) -> Enclosed:
    """Bound the Jacobian of one head by Theorem R, with weights from ``iterations`` steps of a search."""
    head, W, n = at.heads[0], at.outer, at.n
    diagonal, _ = _diagonal_squares(head)
    q = torch.ones(n, dtype=torch.float64)
    tau = torch.full_like(q, 1e-3)
    u = torch.randn(n, len(W), generator=torch.Generator().manual_seed(0), dtype=q.dtype)
    best, best_value = (q, tau), float("inf")
    terms: Terms | None = None
    if len(_blocks(head)) == 1:  # more blocks would take memory n² value_dim
        terms = list(_terms(head))
    for iteration in range(iterations + 1):
        M = _row_squares(head, q, terms)
        for _ in range(1 if iteration else 3):
            whole = W @ (M + (q / tau)[:, None, None] * diagonal) @ W.mT
            for _ in range(5 if iteration else 20):  # steps of the power method
                u = torch.nn.functional.normalize((whole @ u[..., None])[..., 0], dim=1, eps=1e-300)
            x = u @ W
            along = (x * (M @ x[..., None])[..., 0]).sum(1).clamp_min(1e-300)
            across = (x * (diagonal @ x[..., None])[..., 0]).sum(1).clamp_min(0)
            level = along + q * across / tau
            value = float(((head.P.mT @ level + tau * level) / q).amax())
            if value < best_value:
                best, best_value = (q, tau), value
            tau = (q * across / along).sqrt().clamp_min(_SMALLEST_TAU)
        q = (q * (head.P.mT @ level + tau * level)).sqrt()
        top = q.amax()
        q = (q / top).clamp_min(_SMALLEST) if 0 < float(top) < float("inf") else torch.ones_like(q)
    return rows_value(at, *best)


def rows_value(at: HeadsAt, q: Float[Tensor, " n"], tau: Float[Tensor, " n"]) -> Enclosed:
    """Evaluate the bound of Theorem R, which holds for all positive weights q and τ."""
    head = at.heads[0]
    diagonal, diagonal_slack = _diagonal_squares(head)
    ratio = q / tau
    M = _row_squares(head, q) + ratio[:, None, None] * diagonal
    levels = sandwich([at.outer], [M], [_slack(head, q) + up(ratio * diagonal_slack)])
    sums = [head.P.mT @ level + tau * level for level in levels]
    upper = above((sums[0] / q).amax(), at.n + 8)
    return Enclosed(upper, (sums[1] / q).amax()).root()


def _blocks(head: HeadAt) -> list[slice]:
    return row_blocks(len(head.v), len(head.v) * max(len(head.K), len(head.V)))


def _moved_values(head: HeadAt, rows: slice) -> Float[Tensor, "rows n value_dim"]:
    P, moving = head.P[rows], head.moving[rows]
    slope = torch.where(P > 0, moving / P, 0.0)
    return slope[..., None] * (head.v[None] - head.o[rows, None])


def _terms(head: HeadAt) -> Iterator[tuple[slice, Tensor, Tensor]]:
    VK, KK = head.V @ head.K.mT, head.K @ head.K.mT
    if head.turns is not None:
        # Products with K depend on j: T_j K Vᵀ and T_j K Kᵀ T_jᵀ.
        turn_V = (head.turns @ VK.mT).transpose(0, 1).flatten(1)
        turn_K = (head.turns @ KK @ head.turns.mT).flatten(1).mT
    for rows in _blocks(head):
        w, here = _moved_values(head, rows), head.q[rows]
        if head.turns is None:
            moved = (here @ VK.mT)[:, None, :]
            y_square = ((here @ KK) * here).sum(1).clamp_min(0)[:, None]
        else:
            moved = (here @ turn_V).unflatten(1, w.shape[1:])
            outer = (here[:, :, None] * here[:, None, :]).flatten(1)
            y_square = (outer @ turn_K).clamp_min(0)
        yield rows, w, torch.addcmul(moved, y_square[..., None], w, value=0.5)


def _row_squares(
    head: HeadAt, q: Float[Tensor, " n"], terms: Terms | None = None
) -> Float[Tensor, "n value_dim value_dim"]:
    """For each row i of Jacobian blocks P_ij N_ij + δ_ij F_i Q, return Σ_j P_ij q_j N_ij N_ijᵀ."""
    # N_ij N_ijᵀ = V Vᵀ + s_ij g_ij w_ijᵀ + g_ij w_ij s_ijᵀ
    VV = head.V @ head.V.mT
    squares = torch.empty(len(q), *VV.shape, dtype=q.dtype)
    for rows, w, beside in terms or _terms(head):
        rho = head.P[rows] * q
        half = (rho[..., None] * w).mT @ beside
        squares[rows] = rho.sum(1)[:, None, None] * VV + half + half.mT
    return squares


def _slack(head: HeadAt, q: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    slack = torch.empty_like(q)
    y_size = head.turn_norm * head.K.norm() * head.q.norm(dim=1)
    for rows in _blocks(head):
        w_size = torch.linalg.vector_norm(_moved_values(head, rows), dim=-1)
        slack[rows] = (head.P[rows] * q * (head.V.norm() + w_size * y_size[rows, None]).square()).sum(1)
    k, d = head.K.shape
    return up(gamma(d + 5 * k + len(q) + 64) * slack)


def _diagonal_squares(head: HeadAt) -> tuple[Float[Tensor, "n value_dim value_dim"], Float[Tensor, " n"]]:
    """Return F_i Q (F_i Q)ᵀ for the part F_i Q of each diagonal block, and bounds on the rounding errors."""
    k, d = head.Q.shape
    size = torch.linalg.matrix_norm(head.F).square() * head.Q.square().sum()
    return head.F @ (head.Q @ head.Q.mT) @ head.F.mT, up(gamma(d + 2 * k + 20) * size)
