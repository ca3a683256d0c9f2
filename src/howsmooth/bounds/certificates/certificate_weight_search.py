"""The search for positive weights q_j, one for each token, that make an upper bound on ‖D_X f‖ small.

All positive weights give a valid bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.attention_with_error_bounds import HeadsAt

__all__ = ["Weights", "diagonal_guesses", "joint_weights", "tidy"]

_FIRST_STEPS = 6
_STEPS = 2
_LAST_STEPS = 20
_DIAGONAL_STEPS = 8
_SMALLEST = 1e-12

# Estimates are raised by this factor, because a failed proof costs one factorisation more.
_ABOVE = 1 + 5e-4


def tidy(q: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Scale positive weights so that the largest weight is 1, and replace tiny weights by a minimum.

    If the largest weight is zero or not finite, all weights become 1.
    """
    top = q.amax()
    return (q / top).clamp_min(_SMALLEST) if bool(torch.isfinite(top)) and top > 0 else torch.ones_like(q)


@dataclass(frozen=True, eq=False)
class Weights:
    """A positive weight for each token, and estimates of the eigenvalues in the bound of
    :func:`certificate_heads` for these weights.

    ``c`` has the estimates of c_i, and ``nu_square`` is the estimate of ν².
    """

    q: Float[Tensor, " n"]
    c: Float[Tensor, " n"]
    nu_square: Float[Tensor, ""]


def joint_weights(at: HeadsAt, iterations: int) -> Weights:
    """Search for positive weights q_j of the tokens j that make the upper bound of :func:`certificate_heads`
    on ‖D_X f‖ small.

    The iteration q ← √(q Φ(q)) makes the theorem's term ν small, where ν² = max_j Φ_j(q)/q_j and
    Φ_j(q) = λ_max(Σ_h Σ_i P_ij c_i(q) y_ij y_ijᵀ). Eigenvalues are estimated by power steps, which need
    products with P but no matrix for every row.
    """
    n = at.n
    moving = torch.stack([head.moving for head in at.heads])
    v, o, queries = (torch.stack([getattr(head, name) for head in at.heads]) for name in ("v", "o", "q"))
    turns = None if at.heads[0].turns is None else torch.stack([_turns(head.turns) for head in at.heads])
    W = torch.cat(at.W, dim=1)
    K = torch.cat([head.K for head in at.heads])
    W_gram, K_gram = W.mT @ W, K @ K.mT

    def values_image(rho: Tensor, y: Tensor) -> Tensor:
        """Multiply, in each head, the vector of query i by the matrix Σ_j rho_ij w_ij w_ijᵀ. Here rho_ij are
        given weights, and w_ij is value j minus output i.
        """
        x = _by_head(y, at)
        weighted = rho * (x @ v.mT - (x * o).sum(-1, keepdim=True))
        return _side_by_side(weighted @ v - weighted.sum(-1, keepdim=True) * o)

    def keys_image(rho: Tensor, y: Tensor) -> Tensor:
        """Multiply, in each head, the vector of key j by the matrix T_jᵀ (Σ_i rho_ji q_i q_iᵀ) T_j. Here
        rho_ji are given weights, q_i the queries, and T_j the derivatives ``turns`` of :class:`HeadAt`.
        """
        x = _by_head(y, at)
        x = x if turns is None else (turns @ x[..., None])[..., 0]
        back = (rho * (x @ queries.mT)) @ queries
        back = back if turns is None else (turns.mT @ back[..., None])[..., 0]
        return _side_by_side(back)

    def follow_values(q: Tensor, b: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        rho = moving * q
        return _follow(lambda y: values_image(rho, y), W_gram, b, steps)

    def follow_keys(c: Tensor, b: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        rho = (moving * c[:, None]).mT.contiguous()
        return _follow(lambda y: keys_image(rho, y), K_gram, b, steps)

    q = torch.ones(n, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    of_values = torch.randn(n, W.shape[1], generator=generator, dtype=torch.float64)
    of_keys = torch.randn(n, K.shape[0], generator=generator, dtype=torch.float64)
    for iteration in range(iterations):
        steps = _STEPS if iteration else _FIRST_STEPS
        c, of_values = follow_values(q, of_values, steps)
        phi, of_keys = follow_keys(c, of_keys, steps)
        q = tidy((q * phi).sqrt())
    rho = moving * q
    c = _lanczos(lambda y: values_image(rho, y), W_gram, of_values)
    rho = (moving * c[:, None]).mT.contiguous()
    phi = _lanczos(lambda y: keys_image(rho, y), K_gram, of_keys)
    return Weights(q, c * _ABOVE, (phi / q).amax() * _ABOVE)


def diagonal_guesses(at: HeadsAt) -> Float[Tensor, " n"]:
    """Estimate the squared norm of each diagonal block of the Jacobian by Lanczos steps. The estimates are
    not proved.

    The blocks are D_i = Σ_h W_h F_i^h Q_h with the factors F_i^h of :class:`HeadAt`.
    """
    W = torch.cat(at.W, dim=1)
    Q = torch.cat([head.Q for head in at.heads])
    W_gram = W.mT @ W

    def image(y: Tensor) -> Tensor:
        x = _by_head(y, at)
        moved = torch.cat([(h.F @ x[i, :, :, None])[..., 0] for i, h in enumerate(at.heads)], dim=1)
        z = _by_head(moved @ W_gram, at)
        return torch.cat([(h.F.mT @ z[i, :, :, None])[..., 0] for i, h in enumerate(at.heads)], dim=1)

    b = torch.randn(Q.shape[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return _lanczos(image, Q @ Q.mT, b.expand(at.n, -1), _DIAGONAL_STEPS) * _ABOVE


def _follow(image: Callable[[Tensor], Tensor], gram: Tensor, b: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Estimate the largest eigenvalues of the matrices O B_i Oᵀ, for one matrix O and many matrices B_i, by
    steps of the power method.

    ``image`` multiplies row i by B_i, and ``gram`` is OᵀO. The steps start at the rows of ``b``. A row b
    stands for the vector O b, so that a step needs one product with ``gram`` and none with O. The results are
    Rayleigh quotients and the last rows.
    """
    value = torch.zeros(len(b), dtype=b.dtype)
    for _ in range(steps):
        y = b @ gram
        length = (b * y).sum(1, keepdim=True).clamp_min(0).sqrt()
        y = y / length.clamp_min(1e-300)
        moved = image(y)
        value = (y * moved).sum(1).clamp_min(0)
        b = torch.where(moved.norm(dim=1, keepdim=True) > 0, moved, b)
    return value, b / b.norm(dim=1, keepdim=True).clamp_min(1e-300)


def _lanczos(image: Callable[[Tensor], Tensor], gram: Tensor, b: Tensor, steps: int = _LAST_STEPS) -> Tensor:
    """Estimate the largest eigenvalues of the matrices O B_i Oᵀ, for one matrix O and many matrices B_i, by
    Lanczos steps.

    The arguments are those of :func:`_follow`. The estimates are below the eigenvalues, up to rounding.
    """
    alphas, betas = [], []
    y = b @ gram
    length = (b * y).sum(1, keepdim=True).clamp_min(0).sqrt().clamp_min(1e-300)
    b, y, last = b / length, y / length, torch.zeros_like(b)
    beta = torch.zeros_like(length)
    size = torch.zeros_like(length)
    for _ in range(steps):
        z = image(y)
        alpha = (y * z).sum(1, keepdim=True)
        size = torch.maximum(size, alpha)
        z = z - alpha * b - beta * last
        y = z @ gram
        beta = (z * y).sum(1, keepdim=True).clamp_min(0).sqrt()
        # A beta this small is rounding: the vectors span an invariant space, and the steps of this row end.
        beta = torch.where(beta > 1e-6 * size, beta, 0.0)
        inverse = torch.where(beta > 0, 1 / beta, 0.0)
        alphas.append(alpha)
        betas.append(beta)
        last, b, y = b, z * inverse, y * inverse
    side = torch.cat(betas[:-1], dim=1)
    tridiagonal = torch.diag_embed(torch.cat(alphas, dim=1)) + torch.diag_embed(side, offset=-1)
    largest: Tensor = torch.linalg.eigvalsh(tridiagonal)[:, -1].clamp_min(0)
    return largest


def _turns(turns: Tensor | None) -> Tensor:
    assert turns is not None
    return turns


def _by_head(y: Float[Tensor, "n m"], at: HeadsAt) -> Float[Tensor, "heads n k"]:
    found: Tensor = y.unflatten(1, (len(at.heads), -1)).transpose(0, 1)
    return found


def _side_by_side(x: Float[Tensor, "heads n k"]) -> Float[Tensor, "n m"]:
    found: Tensor = x.transpose(0, 1).flatten(1)
    return found
