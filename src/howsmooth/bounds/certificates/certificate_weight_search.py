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

_STEPS = 10
_LAST_STEPS = 20
_DIAGONAL_STEPS = 5
_SMALLEST = 1e-12

# The search multiplies q_j by this power of Phi_j/q_j. With the power 1 it may swing between two states.
_POWER = 0.8

# The search ends when a step makes nu^2 smaller by less than this fraction.
_PROGRESS = 0.005

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

    The iteration q_j ← q_j (Φ_j(q)/q_j)^0.8 makes the theorem's term ν small, where ν² = max_j Φ_j(q)/q_j and
    Φ_j(q) = λ_max(Σ_h Σ_i P_ij c_i(q) y_ij y_ijᵀ). It ends when ν² hardly falls, and the best weights are
    taken. Eigenvalues are estimated by Lanczos steps, which need products with P but no matrix for every row.
    """
    forms, value_scale, key_scale = _QuadraticForms.of(at).in_float32()
    generator = torch.Generator().manual_seed(0)
    of_values = torch.randn(at.n, len(forms.W_gram), generator=generator)
    of_keys = torch.randn(at.n, len(forms.K_gram), generator=generator)

    def eigenvalues(q: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        c = _lanczos(forms.values_image(q), forms.W_gram, of_values, steps)
        return c, _lanczos(forms.keys_image(c), forms.K_gram, of_keys, steps)

    q = best = torch.ones(at.n, dtype=torch.float32)
    smallest = float("inf")
    for _ in range(iterations + 1):
        _, phi = eigenvalues(q, _STEPS)
        nu_square = float((phi / q).amax())
        if nu_square < smallest:
            best = q
        if nu_square > smallest * (1 - _PROGRESS):
            break
        smallest = nu_square
        q = tidy(q * (phi / q).pow(_POWER))
    q = best
    c, phi = eigenvalues(q, _LAST_STEPS)
    q, c, phi = q.double(), c.double() * value_scale, phi.double() * (value_scale * key_scale)
    return Weights(q, c * _ABOVE, (phi / q).amax() * _ABOVE)


@dataclass(frozen=True, eq=False)
class _QuadraticForms:
    """The matrices of one token each whose largest eigenvalues are the terms c_i and Φ_j of Theorem N, in
    factors that are stacked over the heads.
    """

    moving: Float[Tensor, "heads n n"]
    v: Float[Tensor, "heads n value_dim"]
    o: Float[Tensor, "heads n value_dim"]
    queries: Float[Tensor, "heads n key_dim"]
    turns: Float[Tensor, "heads n key_dim key_dim"] | None
    W_gram: Float[Tensor, "m m"]
    K_gram: Float[Tensor, "k k"]

    @classmethod
    def of(cls, at: HeadsAt) -> _QuadraticForms:
        """Stack the factors of all heads."""
        moving, v, o, queries = (
            torch.stack([getattr(head, name) for head in at.heads]) for name in ("moving", "v", "o", "q")
        )
        turns = [head.turns for head in at.heads if head.turns is not None]
        W = torch.cat(at.W, dim=1)
        K = torch.cat([head.K for head in at.heads])
        return cls(moving, v, o, queries, torch.stack(turns) if turns else None, W.mT @ W, K @ K.mT)

    def in_float32(self) -> tuple[_QuadraticForms, float, float]:
        """Return the forms in float32, scaled so that the entries of each factor are at most 1, and the two
        numbers by which the scaling has divided the matrices of the values and those of the keys.

        Only estimates come of them, which take half the time in this precision.
        """
        (v, o), of_v = _largest_one(torch.stack((self.v, self.o)))
        queries, of_queries = _largest_one(self.queries)
        turns, of_turns = (None, 1.0) if self.turns is None else _largest_one(self.turns)
        W_gram, of_W = _largest_one(self.W_gram)
        K_gram, of_K = _largest_one(self.K_gram)
        single = _QuadraticForms(self.moving.float(), v, o, queries, turns, W_gram, K_gram)
        return single, of_v**2 * of_W, (of_queries * of_turns) ** 2 * of_K

    def values_image(self, q: Float[Tensor, " n"]) -> Callable[[Tensor], Tensor]:
        """Return the function that multiplies, in each head, the vector of query i by the matrix
        Σ_j rho_ij w_ij w_ijᵀ. Here w_ij is value j minus output i, and rho_ij is ``moving`` times q_j.
        """
        rho = self.moving * q

        def image(y: Tensor) -> Tensor:
            x = _by_head(y, len(rho))
            weighted = rho * (x @ self.v.mT - (x * self.o).sum(-1, keepdim=True))
            return _side_by_side(weighted @ self.v - weighted.sum(-1, keepdim=True) * self.o)

        return image

    def keys_image(self, c: Float[Tensor, " n"]) -> Callable[[Tensor], Tensor]:
        """Return the function that multiplies, in each head, the vector of key j by the matrix
        T_jᵀ (Σ_i rho_ji q_i q_iᵀ) T_j. Here q_i are the queries, T_j the derivatives ``turns`` of
        :class:`HeadAt`, and rho_ji is ``moving`` of i and j times c_i.
        """
        rho = (self.moving * c[:, None]).mT.contiguous()

        def image(y: Tensor) -> Tensor:
            x = _by_head(y, len(rho))
            x = x if self.turns is None else (self.turns @ x[..., None])[..., 0]
            back = (rho * (x @ self.queries.mT)) @ self.queries
            back = back if self.turns is None else (self.turns.mT @ back[..., None])[..., 0]
            return _side_by_side(back)

        return image


def diagonal_guesses(at: HeadsAt) -> Float[Tensor, " n"]:
    """Estimate the squared norm of each diagonal block of the Jacobian by Lanczos steps. The estimates are
    not proved.

    The blocks are D_i = Σ_h W_h F_i^h Q_h with the factors F_i^h of :class:`HeadAt`.
    """
    W = torch.cat(at.W, dim=1)
    Q = torch.cat([head.Q for head in at.heads])
    W_gram = W.mT @ W

    def image(y: Tensor) -> Tensor:
        x = _by_head(y, len(at.heads))
        moved = torch.cat([(h.F @ x[i, :, :, None])[..., 0] for i, h in enumerate(at.heads)], dim=1)
        z = _by_head(moved @ W_gram, len(at.heads))
        return torch.cat([(h.F.mT @ z[i, :, :, None])[..., 0] for i, h in enumerate(at.heads)], dim=1)

    b = torch.randn(Q.shape[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return _lanczos(image, Q @ Q.mT, b.expand(at.n, -1), _DIAGONAL_STEPS) * _ABOVE


def _lanczos(image: Callable[[Tensor], Tensor], gram: Tensor, b: Tensor, steps: int) -> Tensor:
    """Estimate the largest eigenvalues of the matrices O B_i Oᵀ, for one matrix O and many matrices B_i, by
    Lanczos steps.

    ``image`` multiplies row i by B_i, and ``gram`` is OᵀO. The steps start at the rows of ``b``. A row b
    stands for the vector O b, so that a step needs one product with ``gram`` and none with O. The estimates
    are below the eigenvalues, up to rounding.
    """
    alphas, betas = [], []
    y = b @ gram
    precision = torch.finfo(b.dtype)
    length = (b * y).sum(1, keepdim=True).clamp_min(0).sqrt().clamp_min(precision.tiny)
    b, y, last = b / length, y / length, torch.zeros_like(b)
    beta = torch.zeros_like(length)
    size = torch.zeros_like(length)
    noise = (16 * precision.eps * torch.linalg.matrix_norm(gram)).sqrt()
    for _ in range(steps):
        z = image(y)
        alpha = (y * z).sum(1, keepdim=True)
        size = torch.maximum(size, alpha)
        z = z - alpha * b - beta * last
        y = z @ gram
        beta = (z * y).sum(1, keepdim=True).clamp_min(0).sqrt()
        # A beta this small is rounding: the vectors span an invariant space, and the steps of this row end.
        # Parts of z that gram maps to nearly zero count in the rounding of y alone.
        rounding = noise * torch.linalg.vector_norm(z, dim=1, keepdim=True)
        beta = torch.where(beta > torch.maximum(1e-3 * size, rounding), beta, 0.0)
        inverse = torch.where(beta > 0, 1 / beta, 0.0)
        alphas.append(alpha)
        betas.append(beta)
        last, b, y = b, z * inverse, y * inverse
    side = torch.cat(betas[:-1], dim=1)
    tridiagonal = torch.diag_embed(torch.cat(alphas, dim=1)) + torch.diag_embed(side, offset=-1)
    largest: Tensor = torch.linalg.eigvalsh(tridiagonal)[:, -1].clamp_min(0)
    return largest


def _largest_one(t: Tensor) -> tuple[Tensor, float]:
    """Divide a tensor by the size of its largest entry and round it to float32; return this size too."""
    size = float(t.abs().amax()) or 1.0
    return (t / size).float(), size


def _by_head(y: Float[Tensor, "n m"], heads: int) -> Float[Tensor, "heads n k"]:
    found: Tensor = y.unflatten(1, (heads, -1)).transpose(0, 1)
    return found


def _side_by_side(x: Float[Tensor, "heads n k"]) -> Float[Tensor, "n m"]:
    found: Tensor = x.transpose(0, 1).flatten(1)
    return found
