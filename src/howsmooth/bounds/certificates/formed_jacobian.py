"""An upper bound on ‖D_X f‖ from the matrix of the Jacobian itself, where it is small enough to be formed."""

from __future__ import annotations

import torch

from howsmooth.bounds.certificates.rounded_attention import HeadsAt
from howsmooth.rounding import Enclosed, above, gamma, shrink, spectral_norms, up

__all__ = ["by_whole", "is_small"]

# Multiplications for the Gram matrix of the Jacobian: about a second on two cores.
_MULTIPLICATIONS = 1 << 33


def is_small(at: HeadsAt) -> bool:
    """Return whether the Jacobian can be formed: its Gram matrix takes at most 2^33 multiplications."""
    rows, right = at.outer.shape[0], sum(2 * head.K.shape[0] + head.V.shape[0] for head in at.heads)
    short, long = sorted((at.n * rows, at.n * min(right, at.heads[0].V.shape[1])))
    return short**2 * long <= _MULTIPLICATIONS


def by_whole(at: HeadsAt, iterations: int = 0) -> Enclosed:
    """Bound the norm of the Jacobian by forming its matrix. The bound is sharp up to rounding."""
    n = at.n
    factors = [factor for head in at.heads for factor in (head.V, head.K, head.Q)]
    Z = shrink(torch.cat(factors).mT).mT.split([len(factor) for factor in factors])
    J = torch.zeros(n, at.outer.shape[0], n, Z[0].shape[1], dtype=torch.float64)
    size = torch.zeros(n, n, dtype=torch.float64)
    here = torch.arange(n)
    Ws = at.outer.chunk(len(at.heads), dim=1)
    for head, W, V, K, Q in zip(at.heads, Ws, Z[::3], Z[1::3], Z[2::3], strict=True):
        w = head.moving[..., None] * (head.v[None] - head.o[:, None])
        turned = head.q[:, None] if head.turns is None else (head.q[:, None, None] @ head.turns)[:, :, 0]
        J += torch.einsum("ij,ab->iajb", head.P, W @ V)
        J += torch.einsum("ija,ijb->iajb", w @ W.mT, (turned @ K).expand(n, n, -1))
        J[here, :, here] += W @ head.F @ Q
        moved = torch.linalg.vector_norm(w, dim=2) * torch.linalg.vector_norm(head.q, dim=1)[:, None]
        size += W.norm() * (head.P * V.norm() + head.turn_norm * K.norm() * moved)
        size.diagonal().add_(W.norm() * Q.norm() * torch.linalg.matrix_norm(head.F))
    found = spectral_norms(J.reshape(n * J.shape[1], -1))
    roundings = len(V) + 2 * len(K) + 3 * len(at.heads) + 8
    return Enclosed(above(found.upper + up(gamma(roundings) * size.norm()), 1), found.plain)
