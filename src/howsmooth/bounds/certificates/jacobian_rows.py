"""Certificate R: an upper bound on ‖D_X f‖ of one head from the norms of the Jacobian's block rows."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.certificate import (
    Certificate,
    certify,
    check_iterations,
    checked_input,
    one_head,
)
from howsmooth.bounds.certificates.eigenvalues import shrink
from howsmooth.bounds.certificates.quadratic_forms import sandwich
from howsmooth.bounds.certificates.rounded_heads import HeadsAt, row_blocks
from howsmooth.bounds.certificates.rounding import Enclosed
from howsmooth.bounds.certificates.weight_search import tidy
from howsmooth.roundoff import gamma, up

__all__ = ["certificate_rows"]

_SMALLEST_TAU = 1e-14
_POWER_STEPS = 5


def certificate_rows(attention: object, X: Tensor | None = None, *, iterations: int = 30) -> Certificate:
    """Bound ‖D_X f‖ of one head at given tokens by howsmooth's Theorem R, including all rounding.

    The square of the bound is max_j q_j⁻¹ (Σ_i P_ij Λ_i + τ_j Λ_j). Λ_i = λ_max(V [Σ_j P_ij q_j B_ij
    B_ijᵀ + (q_i/τ_i) C_i A Aᵀ C_i] Vᵀ) with B_ij = I + z_ij y_iᵀ and weights q, τ > 0. Every q and τ give a
    valid bound; a search chooses them.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.SelfAttention` with one head (any mask, rotary positions and output
        map), a captured site whose map is one, or a :class:`~howsmooth.bounds.Head`.
    X
        Tokens (..., n, d), float32 or float64, taken as exact numbers; None for the tokens of the site.
    iterations
        Number of steps of the search for q and τ; with 0, q = 1.

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
    f, x = checked_input(attention, X, any_scores=False)
    one_head(f, "certificate_rows")
    steps = check_iterations(iterations)
    source = 'howsmooth documentation, "Certificates at given tokens", Theorem R'
    return certify("certificate_rows", source, f, x, partial(by_rows, iterations=steps))


def by_rows(at: HeadsAt, *, iterations: int) -> Enclosed:
    """Bound the Jacobian's norm for one head by Theorem R, after a search for positive weights of the tokens.

    A search chooses the positive weights in the theorem.
    """
    q, tau = row_weights(at, iterations)
    return rows_value(at, q, tau)


def rows_value(at: HeadsAt, q: Float[Tensor, " n"], tau: Float[Tensor, " n"]) -> Enclosed:
    """Evaluate Theorem R's bound on the Jacobian's norm for one head, at given weights q, τ of the tokens.

    The head's attention weights, values and queries are taken as rounded to float64. The bound holds for all
    positive weights q and τ.
    """
    P = at.heads[0].P
    diagonal, diagonal_slack = diagonal_squares(at)
    M, slack = row_squares(at, q)
    ratio = q / tau
    M = M + ratio[:, None, None] * diagonal
    levels = sandwich([shrink(at.W[0])], [M], [slack + up(ratio * diagonal_slack)])
    sums = [P.T @ level + tau * level for level in levels]
    upper = (sums[0] / q).amax() * (1 + 2 * gamma(at.n + 8))
    return Enclosed(upper, (sums[1] / q).amax()).root()


def row_weights(at: HeadsAt, iterations: int) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Search for positive weights of the tokens at which Theorem R's bound on the Jacobian is small.

    The two results are the weights q and τ.
    """
    W = shrink(at.W[0])
    diagonal, _ = diagonal_squares(at)
    P = at.heads[0].P
    q = torch.ones(at.n, dtype=torch.float64)
    tau = torch.full_like(q, 1e-3)
    u = torch.empty(at.n, len(W), dtype=q.dtype)
    best, best_value = (q, tau), float("inf")
    for iteration in range(iterations + 1):
        M, _ = row_squares(at, q)
        for _ in range(1 if iteration else 3):
            whole = W @ (M + (q / tau)[:, None, None] * diagonal) @ W.mT
            u = _follow_top(whole, u) if iteration else torch.linalg.eigh(whole).eigenvectors[:, :, -1]
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


def _follow_top(matrices: Float[Tensor, "n r r"], u: Float[Tensor, "n r"]) -> Float[Tensor, "n r"]:
    """Improve estimates ``u`` of the matrices' leading eigenvectors by power steps."""
    for _ in range(_POWER_STEPS):
        u = (matrices @ u[..., None])[..., 0]
        u = u / u.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return u


def row_squares(
    at: HeadsAt, q: Float[Tensor, " n"]
) -> tuple[Float[Tensor, "n value_dim value_dim"], Float[Tensor, " n"]]:
    """Return a Gram matrix of each block row of the Jacobian, and bounds on their rounding errors.

    For row i the matrix is Σ_j P_ij q_j N_ij N_ijᵀ with N_ij = V + w_ij y_ijᵀ, where P_ij N_ij is the block
    of the Jacobian without its block-diagonal part.
    """
    head = at.heads[0]
    n, width = head.v.shape
    k, d = head.K.shape
    VV, VK, KK = head.V @ head.V.mT, head.V @ head.K.mT, head.K @ head.K.mT
    # With rotary maps T_j, products with K in N_ij N_ijᵀ depend on j: V Kᵀ T_jᵀ and T_j K Kᵀ T_jᵀ.
    turn_V, turn_K = VK, KK
    if head.turns is not None:
        turn_V = torch.einsum("vk,jlk->vjl", VK, head.turns)
        turn_K = head.turns @ KK @ head.turns.mT
    squares = torch.empty(n, width, width, dtype=q.dtype)
    slack = torch.empty(n, dtype=q.dtype)
    V_size = head.V.norm()
    y_size = head.turn_norm * head.K.norm() * head.q.norm(dim=1)
    for rows in row_blocks(n, n * max(width, k)):
        rho = head.P[rows] * q
        w = head.v[None] - head.o[rows, None]
        left = rho[..., None] * w
        here = head.q[rows]
        if head.turns is None:
            cross = left.sum(1)[:, :, None] * (here @ turn_V.mT)[:, None, :]
            y_square = ((here @ turn_K) * here).sum(1).clamp_min(0)[:, None]
        else:
            moved = torch.einsum("ik,vjk->ijv", here, turn_V)
            cross = left.mT @ moved
            outer = (here[:, :, None] * here[:, None, :]).flatten(1)
            y_square = (outer @ turn_K.flatten(1).mT).clamp_min(0)
        if head.turns is None:
            last = y_square[..., None] * (left.mT @ w)
        else:
            last = (left * y_square[..., None]).mT @ w
        squares[rows] = rho.sum(1)[:, None, None] * VV + cross + cross.mT + last
        size = V_size + torch.linalg.vector_norm(w, dim=-1) * y_size[rows, None]
        slack[rows] = (rho * size.square()).sum(1)
    return squares, up(gamma(d + 5 * k + n + 60) * slack)


def diagonal_squares(at: HeadsAt) -> tuple[Float[Tensor, "n value_dim value_dim"], Float[Tensor, " n"]]:
    """Return the Gram matrix of each block on the Jacobian's diagonal, and bounds on their rounding errors.

    For row i the Gram matrix is F_i Q Qᵀ F_iᵀ with the factor F_i of :class:`HeadAt`.
    """
    head = at.heads[0]
    squares = head.F @ (head.Q @ head.Q.mT) @ head.F.mT
    k, d = head.Q.shape
    size = torch.linalg.matrix_norm(head.F).square() * head.Q.square().sum()
    return squares, up(gamma(d + 2 * k + 20) * size)
