"""The Lanczos recurrence on JᵀJ with full reorthogonalisation, for a batch of linear maps J.

With a start g, v₁ = g / |g| and v₀ = 0, step k computes

    α_k = |J v_k|²
    z   = JᵀJ v_k − α_k v_k − γ_{k−1} v_{k−1},   made orthogonal to v₁, …, v_k
    γ_k = |z|
    v_{k+1} = z / γ_k

The α on the diagonal and the γ beside it are the tridiagonal matrix T_k = V_kᵀ JᵀJ V_k.
"""

from __future__ import annotations

import math
from collections.abc import Generator

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from howsmooth.spectral.accurate_sums import row_lengths
from howsmooth.spectral.krylov_basis import Basis
from howsmooth.spectral.operator import LinearOperator

__all__ = ["Products", "Recurrence", "inverse"]

Products = Generator[tuple[LinearOperator, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A step that asks for an operator's ``energy_product`` with some vectors, and is sent the result."""


class Recurrence:
    """The vectors and coefficients that each Lanczos step for JᵀJ passes to the next step, for a batch of
    linear maps J.

    Before step k it holds z and γ_{k−1} of the last step, v_{k−1}, and the basis.

    Vectors are the rows of tensors (member, size); α and γ are (member,) in float64.

    Parameters
    ----------
    operator
        The batch of maps J.
    start
        The vectors g, (batch, *in_shape).
    basis
        An empty basis, which keeps the v.

    """

    def __init__(self, operator: LinearOperator, start: Tensor, basis: Basis) -> None:
        self.basis = basis
        self._operator = operator
        self._z: Tensor | None = start.reshape(operator.batch, -1).clone()
        self._gamma = row_lengths(self._z)
        self._before: Tensor | None = None
        # The recurrence runs on J times these powers of two, one for each member; None if all are one.
        self._factors: Tensor | None = None

    @property
    def units(self) -> np.ndarray:
        """Factors (member,) that convert singular values of the scaled maps in the recurrence to singular
        values of the given maps.
        """
        if self._factors is None:
            return np.ones(len(self._gamma))
        units: np.ndarray = 1.0 / self._factors.cpu().numpy()
        return units

    def step(self) -> Products:
        """Carry out one step of Lanczos, and return the new entries α_k and γ_k of the tridiagonal matrix.

        This is a generator, which asks its caller for the product.
        """
        # v_k, which joins the basis
        v, before, gamma = self._normalised(), self._before, self._gamma
        self.basis.append(v)
        # α_k = |J v_k|² and z = JᵀJ v_k
        alpha, z = yield from (self._first_product(v) if before is None else self._product(v))
        # z − α_k v_k − γ_{k−1} v_{k−1}
        z = torch.addcmul(z, alpha.to(z.dtype)[:, None], v, value=-1)
        if before is not None:
            z.addcmul_(gamma.to(z.dtype)[:, None], before, value=-1)
        # Orthogonal to all of the basis, since rounding errors would otherwise bring found directions back
        gamma = self.basis.orthogonalise_(z, [v] if before is None else [v, before])
        self._z, self._before, self._gamma = z, v, gamma
        return alpha, gamma

    def add_rest_(self, x: Float[Tensor, " size"], row: int, factor: float) -> None:
        """Add ``factor`` times the vector z of the last Lanczos step to the vector ``x``, in place. Here z
        belongs to the map with the index ``row`` in the batch.
        """
        assert self._z is not None
        x.add_(self._z[row], alpha=factor)

    def keep(self, rows: Int[Tensor, " kept"]) -> None:
        """Restrict the recurrence to the given maps of the batch."""
        assert self._z is not None
        assert self._before is not None
        self._operator = self._operator.select(rows)
        self._z, self._before, self._gamma = self._z[rows], self._before[rows], self._gamma[rows]
        self._factors = None if self._factors is None else self._factors[rows]
        self.basis.keep(rows)

    def _normalised(self) -> Float[Tensor, "member size"]:
        """Return the next Lanczos vector v_k = z / γ_{k−1}, which has norm one.

        It is written over z, because a further vector may not fit in memory.
        """
        assert self._z is not None
        z, self._z = self._z, None
        return z.mul_(inverse(self._gamma).to(z.dtype)[:, None])

    def _first_product(self, v: Float[Tensor, "member size"]) -> Products:
        """Return |J v|² and JᵀJ v for the start vectors v, and choose the powers of two by which each map J
        is scaled.
        """
        energy, z = yield from self._product(v)
        # Lengths of J v in this range say that no number of the recurrence leaves the range of its dtype.
        if bool(((energy >= 2.0**-40) & (energy <= 2.0**40)).all()):
            return energy, z
        w, z = self._gram(v)
        self._factors = _factors(w)
        if self._factors is not None:  # the product may have overflowed, so make it again with J scaled
            w, z = self._gram(v)
        return row_lengths(w).square(), z

    def _gram(
        self, v: Float[Tensor, "member size"]
    ) -> tuple[Float[Tensor, "member out_size"], Float[Tensor, "member size"]]:
        """Return J v and JᵀJ v for each map J of the batch and its vector v, where J is scaled by a power of
        two.
        """
        w, z = self._operator.gram_product(self._scaled(v).view(len(v), *self._operator.in_shape))
        return w.reshape(len(v), -1), self._scaled(z.reshape(len(v), -1))

    def _product(self, v: Float[Tensor, "member size"]) -> Products:
        """Return |J v|² and JᵀJ v for each map J of the batch and its vector v, where J is scaled by a power
        of two.

        This is a generator, which asks its caller for the operator's energy product.
        """
        energy, z = yield self._operator, self._scaled(v).view(len(v), *self._operator.in_shape)
        return energy, self._scaled(z.reshape(len(v), -1))

    def _scaled(self, x: Float[Tensor, "member size"]) -> Float[Tensor, "member size"]:
        return x if self._factors is None else self._factors[:, None].to(x.dtype) * x


def _factors(w: Float[Tensor, "member out_size"]) -> Float[Tensor, " member"] | None:
    """Return the powers of two that scale each map J of the batch so that ‖J‖⁴ stays in the range of float32.

    They are chosen from images ``w`` = J v. The result is None if no map needs scaling, which is so for
    entries of ``w`` between 2⁻²⁰ and 2²⁰. A power of two scales without rounding.
    """
    largest = torch.linalg.vector_norm(w, ord=math.inf, dim=1).double()
    exponents = torch.log2(largest).round()
    near = (largest == 0) | ~torch.isfinite(largest) | (exponents.abs() <= 20)
    return None if bool(near.all()) else torch.exp2(torch.where(near, 0.0, -exponents))


def inverse(lengths: Float[Tensor, " member"]) -> Float[Tensor, " member"]:
    """Return 1 / length for each of the given lengths, and zero for length zero."""
    return torch.where(lengths > 0, 1.0 / lengths, 0.0)
