"""The search for positive weights q_j, one for each token, that make an upper bound on ‖D_X f‖ small.

All positive weights give a valid bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.attention_with_error_bounds import HeadsAt
from howsmooth.rounding.eigenvalue_estimates import lanczos

__all__ = ["Weights", "diagonal_guesses", "joint_weights", "tidy"]

# Numbers of Lanczos steps: from random vectors, from the vectors of the iteration before, and for the
# estimates that are returned.
_FIRST_STEPS = 10
_STEPS = 5
_LAST_STEPS = 10
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
    Theorem N for these weights.

    ``c`` has the estimates of c_i, and ``nu_square`` is the estimate of ν².
    """

    q: Float[Tensor, " n"]
    c: Float[Tensor, " n"]
    nu_square: Float[Tensor, ""]


def joint_weights(at: HeadsAt, iterations: int) -> Weights:
    """Search for positive weights q_j of the tokens j that make the upper bound of Theorem N
    on ‖D_X f‖ small.

    The iteration q_j ← q_j (Φ_j(q)/q_j)^0.8 makes the theorem's term ν small, where ν² = max_j Φ_j(q)/q_j and
    Φ_j(q) = λ_max(Σ_h Σ_i P_ij c_i(q) y_ij y_ijᵀ). It ends when ν² hardly falls, and the best weights are
    taken. Eigenvalues are estimated by Lanczos steps, which need products with P but no matrix for every row.
    The steps start at the vectors of the iteration before.
    """
    forms = _QuadraticForms.of(at)
    generator = torch.Generator().manual_seed(0)
    of_values = torch.randn(at.n, len(forms.W_gram), generator=generator, dtype=torch.float32)
    of_keys = torch.randn(at.n, len(forms.K_gram), generator=generator, dtype=torch.float32)

    def eigenvalues(q: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        nonlocal of_values, of_keys
        c, of_values = lanczos(forms.values_image(q), forms.W_gram, of_values, steps)
        phi, of_keys = lanczos(forms.keys_image(c), forms.K_gram, of_keys, steps)
        return c, phi

    q = best = torch.ones(at.n, dtype=torch.float32)
    smallest = float("inf")
    for step in range(iterations + 1):
        _, phi = eigenvalues(q, _STEPS if step else _FIRST_STEPS)
        nu_square = float((phi / q).amax())
        if nu_square < smallest:
            best = q
        if nu_square > smallest * (1 - _PROGRESS):
            break
        smallest = nu_square
        q = tidy(q * (phi / q).pow(_POWER))
    q = best
    c, phi = eigenvalues(q, _LAST_STEPS)
    q, c = q.double(), c.double() * forms.value_scale
    phi = phi.double() * (forms.value_scale * forms.key_scale)
    return Weights(q, c * _ABOVE, (phi / q).amax() * _ABOVE)


@dataclass(frozen=True, eq=False)
class _QuadraticForms:
    """The matrices of one token each whose largest eigenvalues are the terms c_i and Φ_j of Theorem N, in
    factors that are stacked over the heads.

    Only estimates are computed from them. The factors are in float32, which halves the time, and are scaled
    so that their entries are at most 1: the matrices of the values and those of the keys must be multiplied
    by ``value_scale`` and ``key_scale``.
    """

    moving: Float[Tensor, "heads n n"]
    v: Float[Tensor, "heads n value_dim"]
    o: Float[Tensor, "heads n value_dim"]
    queries: Float[Tensor, "heads n key_dim"]
    turns: Float[Tensor, "heads n key_dim key_dim"] | None
    W_gram: Float[Tensor, "m m"]
    K_gram: Float[Tensor, "k k"]
    value_scale: float
    key_scale: float

    @classmethod
    def of(cls, at: HeadsAt) -> _QuadraticForms:
        """Stack the factors of all heads."""
        moving = torch.stack([head.moving.float() for head in at.heads])
        values, of_v = _scaled([t for head in at.heads for t in (head.v, head.o)])
        queries, of_queries = _scaled([head.q for head in at.heads])
        found = [head.turns for head in at.heads if head.turns is not None]
        turns, of_turns = _scaled(found) if found else (None, 1.0)
        W_gram, of_W = _scaled_gram(at.W)
        K_gram, of_K = _scaled_gram([head.K.mT for head in at.heads])
        return cls(
            moving,
            values[::2],
            values[1::2],
            queries,
            turns,
            W_gram,
            K_gram,
            of_v**2 * of_W,
            (of_queries * of_turns) ** 2 * of_K,
        )

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
            x = x if self.turns is None else _multiplied(x, self.turns)
            back = (rho * (x @ self.queries.mT)) @ self.queries
            back = back if self.turns is None else _multiplied(back, self.turns.mT)
            return _side_by_side(back)

        return image


def diagonal_guesses(at: HeadsAt) -> Float[Tensor, " n"]:
    """Estimate the squared norm of each diagonal block of the Jacobian by Lanczos steps. The estimates are
    not proved.

    The blocks are D_i = Σ_h W_h F_i^h Q_h with the factors F_i^h of :class:`HeadAt`.
    """
    W_gram, of_W = _scaled_gram(at.W)
    Q_gram, of_Q = _scaled_gram([head.Q.mT for head in at.heads])
    F, of_F = _scaled([head.F for head in at.heads])

    def image(y: Tensor) -> Tensor:
        moved = _side_by_side(_multiplied(_by_head(y, len(F)), F))
        z = _by_head(moved @ W_gram, len(F))
        return _side_by_side(_multiplied(z, F.mT))

    b = torch.randn(len(Q_gram), generator=torch.Generator().manual_seed(1)).expand(at.n, -1)
    estimates, _ = lanczos(image, Q_gram, b, _DIAGONAL_STEPS)
    return estimates.double() * (of_F**2 * of_W * of_Q * _ABOVE)


def _scaled(parts: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Divide tensors by the size of their largest entry, round them to float32 and stack them; return this
    size too.
    """
    size = max(float(t.abs().amax()) for t in parts) or 1.0
    return torch.stack([(t / size).float() for t in parts]), size


def _scaled_gram(columns: Sequence[Float[Tensor, "rows _k"]]) -> tuple[Float[Tensor, "m m"], float]:
    """Return the Gram matrix of matrices side by side, divided by a number and rounded to float32. The second
    result is this number.
    """
    (whole,), size = _scaled((torch.cat(tuple(columns), dim=1),))
    return whole.mT @ whole, size**2


def _multiplied(x: Float[Tensor, "heads n k"], matrices: Float[Tensor, "heads n l k"]) -> Tensor:
    """Multiply each vector by its own matrix. Row vectors from the left take PyTorch an eighth of the time of
    columns.
    """
    found: Tensor = (x[..., None, :] @ matrices.mT)[..., 0, :]
    return found


def _by_head(y: Float[Tensor, "n m"], heads: int) -> Float[Tensor, "heads n k"]:
    found: Tensor = y.unflatten(1, (heads, -1)).transpose(0, 1)
    return found


def _side_by_side(x: Float[Tensor, "heads n k"]) -> Float[Tensor, "n m"]:
    found: Tensor = x.transpose(0, 1).flatten(1)
    return found
