"""The search for positive weights q_j, one for each token, that make the bound of Theorem N small.

All positive weights give a valid bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.rounded_heads import HeadsAt

__all__ = ["Weights", "diagonal_guess", "joint_weights", "tidy"]

_FIRST_STEPS = 6
_STEPS = 2
_LAST_STEPS = 20
_SMALLEST = 1e-12

# Estimates by power steps are raised by this factor, because a failed proof costs one factorisation more.
_ABOVE = 1 + 1e-3


def tidy(q: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Scale positive weights so that the largest one is 1, and raise tiny weights to a minimum.

    If the largest weight is zero or not finite, all weights become 1.
    """
    top = q.amax()
    return (q / top).clamp_min(_SMALLEST) if bool(torch.isfinite(top)) and top > 0 else torch.ones_like(q)


@dataclass(frozen=True, eq=False)
class Weights:
    """The tokens' weights in Theorem N, and estimates of the eigenvalues that these weights give.

    ``c`` has the estimates of c_i, and ``nu_square`` is the estimate of ν².
    """

    q: Float[Tensor, " n"]
    c: Float[Tensor, " n"]
    nu_square: Float[Tensor, ""]


def joint_weights(at: HeadsAt, iterations: int) -> Weights:
    """Search for weights q_j of the tokens that make the bound of Theorem N small.

    The iteration q ← √(q Φ(q)) makes the theorem's term ν small, where ν² = max_j Φ_j(q)/q_j and
    Φ_j(q) = λ_max(Σ_h Σ_i P_ij c_i(q) y_ij y_ijᵀ). Eigenvalues are estimated by power steps, which need
    products with P but no matrix for every row.
    """
    n = at.n
    q = torch.ones(n, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(n, at.W[0].shape[0], generator=generator, dtype=torch.float64)
    z = torch.randn(n, at.heads[0].K.shape[1], generator=generator, dtype=torch.float64)
    for iteration in range(iterations):
        steps = _STEPS if iteration else _FIRST_STEPS
        c, u = _follow(partial(_values_image, at, q), u, steps)
        phi, z = _follow(partial(_keys_image, at, c), z, steps)
        q = tidy((q * phi).sqrt())
    c, _ = _follow(partial(_values_image, at, q), u, _LAST_STEPS)
    phi, _ = _follow(partial(_keys_image, at, c), z, _LAST_STEPS)
    return Weights(q, c * _ABOVE, (phi / q).amax() * _ABOVE)


def diagonal_guess(at: HeadsAt) -> Float[Tensor, ""]:
    """Estimate, without proof, the norm of the Jacobian's block-diagonal part by power steps."""
    z = torch.randn(at.heads[0].Q.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, _ = _follow(partial(_diagonal_image, at), z.expand(at.n, -1), _LAST_STEPS)
    return value.amax().sqrt() * _ABOVE


def _follow(image: Callable[[Tensor], Tensor], u: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Estimate the largest eigenvalues of matrices, and their eigenvectors, by power steps.

    ``image`` multiplies every row of ``u`` by its matrix. The results are Rayleigh quotients and unit
    vectors.
    """
    value = torch.zeros(len(u), dtype=u.dtype)
    for _ in range(steps):
        u = u / u.norm(dim=1, keepdim=True).clamp_min(1e-300)
        moved = image(u)
        value = (u * moved).sum(1).clamp_min(0)
        u = torch.where(moved.norm(dim=1, keepdim=True) > 0, moved, u)
    return value, u / u.norm(dim=1, keepdim=True).clamp_min(1e-300)


def _values_image(at: HeadsAt, q: Tensor, u: Tensor) -> Tensor:
    """Multiply vectors by the weighted covariances of the values, without forming any matrix.

    The largest eigenvalue of matrix i is the number c_i of Theorem N. The matrix is Σ_h W_h (Σ_j M_ij q_j
    w_ij w_ijᵀ) W_hᵀ, where w_ij is value j minus output i.
    """
    total = torch.zeros_like(u)
    for head, w in zip(at.heads, at.W, strict=True):
        x = u @ w
        along = x @ head.v.mT - (x * head.o).sum(1, keepdim=True)
        weighted = head.moving * q * along
        total = total + (weighted @ head.v - weighted.sum(1, keepdim=True) * head.o) @ w.mT
    return total


def _keys_image(at: HeadsAt, c: Tensor, z: Tensor) -> Tensor:
    """Multiply vectors by the weighted second moments of the queries, without forming any matrix.

    The largest eigenvalue of matrix j is the number Φ_j of :func:`joint_weights`. The matrix is Σ_h K_hᵀ T_jᵀ
    (Σ_i M_ij c_i q_i q_iᵀ) T_j K_h, where T_j is the derivative of norm and rotary positions at key j.
    """
    total = torch.zeros_like(z)
    for head in at.heads:
        x = z @ head.K.mT
        x = x if head.turns is None else (head.turns @ x[..., None])[..., 0]
        weighted = (head.moving * c[:, None]).mT * (x @ head.q.mT)
        back = weighted @ head.q
        back = back if head.turns is None else (head.turns.mT @ back[..., None])[..., 0]
        total = total + back @ head.K
    return total


def _diagonal_image(at: HeadsAt, z: Tensor) -> Tensor:
    """Multiply vectors by D_iᵀ D_i for each diagonal block D_i of the Jacobian.

    D_i is a block of the Jacobian's block-diagonal part, D_i = Σ_h W_h F_i^h Q_h with the factors F_i^h of
    :class:`HeadAt`.
    """
    out = torch.zeros(at.n, at.W[0].shape[0], dtype=z.dtype)
    for head, w in zip(at.heads, at.W, strict=True):
        out = out + (head.F @ (z @ head.Q.mT)[..., None])[..., 0] @ w.mT
    total = torch.zeros_like(z)
    for head, w in zip(at.heads, at.W, strict=True):
        total = total + (head.F.mT @ (out @ w)[..., None])[..., 0] @ head.Q
    return total
