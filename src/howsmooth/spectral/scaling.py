"""Powers of two that keep the numbers of a linear operator in the range of their dtype.

In float32, the square of a number below 1e-22 underflows to zero, and products of several small matrices with
a vector do so inside. Products are linear, so that a vector may be multiplied by a power of two before, and
its product by another one after. Neither rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.errors import NonFiniteError
from howsmooth.spectral.operator import LinearOperator, ProductError

__all__ = ["PowersOfTwo", "Scaled", "in_range", "out_of_range", "times_power", "unscaled"]

_Product = Callable[[Tensor], Tensor]
_Exponents = Int[np.ndarray, " batch"]


@dataclass(frozen=True, eq=False)
class PowersOfTwo:
    """The exponents of the powers of two by which each map J of a batch is multiplied.

    The scaled map is 2^total · J. ``before`` and ``adjoint_before`` are the shares of ``total`` by which
    vectors are multiplied before products with J and with Jᵀ; the rest multiplies the products.
    """

    total: _Exponents
    before: _Exponents
    adjoint_before: _Exponents

    @classmethod
    def ones(cls, batch: int) -> PowersOfTwo:
        """Return exponents of zero for all maps of a batch, which change nothing."""
        zero = np.zeros(batch, dtype=np.int64)
        return cls(zero, zero, zero)

    def __bool__(self) -> bool:
        """Return True if some map J is scaled, or some vector before its product with J."""
        return bool(self.total.any() or self.before.any())

    @cached_property
    def _any(self) -> bool:
        return bool(self) or bool(self.adjoint_before.any())

    def product(self, product: _Product, e: Tensor) -> Tensor:
        """Multiply vectors ``e`` by the scaled maps, where ``product`` multiplies by the maps themselves."""
        if not self._any:
            return product(e)
        return times_power(product(times_power(e, self.before)), self.total - self.before)

    def adjoint_product(self, product: _Product, u: Tensor) -> Tensor:
        """Multiply ``u`` by the transposed scaled maps, where ``product`` multiplies by the transposed
        maps.
        """
        if not self._any:
            return product(u)
        return times_power(product(times_power(u, self.adjoint_before)), self.total - self.adjoint_before)

    def among(self, chosen: Bool[np.ndarray, " batch"]) -> PowersOfTwo:
        """Return a copy in which the maps that are not ``chosen`` have exponents of zero."""
        exponents = self.total, self.before, self.adjoint_before
        return PowersOfTwo(*(np.where(chosen, e, 0) for e in exponents))

    def select(self, members: Tensor) -> PowersOfTwo:
        """Return the powers of the chosen maps of the batch."""
        chosen = members.cpu().numpy()
        return PowersOfTwo(self.total[chosen], self.before[chosen], self.adjoint_before[chosen])


class Scaled(LinearOperator):
    """A linear operator multiplied by a power of two for each map of its batch."""

    def __init__(self, whole: LinearOperator, powers: PowersOfTwo) -> None:
        proved = None
        if whole.proved is not None:
            factors = torch.from_numpy(np.ldexp(1.0, powers.total))
            proved = ProductError(*(factors * bound for bound in vars(whole.proved).values()))
        shapes = whole.in_shape, whole.out_shape
        super().__init__(whole.batch, *shapes, whole.dtype, whole.device, whole.rounding, proved)
        self.whole = whole
        self.powers = powers

    def select(self, members: Int[Tensor, " chosen"]) -> Scaled:
        """Return the scaled operator restricted to the chosen maps of its batch."""
        return Scaled(self.whole.select(members), self.powers.select(members))

    def _product(self, e: Tensor) -> Tensor:
        return self.powers.product(self.whole.product, e)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self.powers.adjoint_product(self.whole.adjoint_product, u)


def in_range(operator: LinearOperator, e: Tensor, image: Tensor) -> tuple[PowersOfTwo, Tensor]:
    """Choose powers of two that bring the norms of an operator's maps near to one. Maps are not scaled if
    their squares stay in the range of the dtype, and their products are finite and not zero.

    The argument ``image`` is the product with Gaussian vectors ``e``; the second result is that of the scaled
    operator. Maps in the ordinary range are left as they are.
    """
    smallest, largest = _ordinary(operator.dtype)
    lengths = torch.linalg.vector_norm(image.flatten(1), ord=torch.inf, dim=1)
    powers = PowersOfTwo.ones(len(image))
    if bool(((lengths >= smallest) & (lengths <= largest)).all()):
        return powers, image
    before, image = _before(operator.product, e, image)
    total = before - out_of_range(image)
    image = times_power(image, total - before)
    # A cotangent along the image, for which the adjoint product is as large as the map
    sizes = _sizes(image)
    u = times_power(image, -np.frexp(np.where(np.isfinite(sizes), sizes, 0.0))[1].astype(np.int64))
    u = torch.where(image.flatten(1).any(dim=1).view(-1, *(1,) * (image.ndim - 1)), u, 1.0)
    adjoint_before, _ = _before(operator.adjoint_product, u, operator.adjoint_product(u))
    return PowersOfTwo(total, before, adjoint_before), image


def unscaled(
    limits: Float[np.ndarray, "3 batch"], exponents: Int[np.ndarray, "..."], dtype: torch.dtype
) -> Float[np.ndarray, "3 batch"]:
    """Convert singular values of scaled maps, with their lower and upper limits, to those of the maps
    themselves. Each row of ``limits`` is divided by 2 to the power of ``exponents``.

    The limits are widened by what numbers below the smallest normal one lose, such as the weights that make
    so small a map. Each of them errs by half of the smallest positive number; the width is 2^14 times as much
    in float32, and 2^43 times in float64.

    Raises
    ------
    NonFiniteError
        If a value is beyond the range of float64, of which its logarithm still tells the size.
    """
    lost = np.where((exponents != 0) & (limits[2] > 0.0), torch.finfo(dtype).tiny * 2.0**-10, 0.0)
    with np.errstate(over="ignore", under="ignore"):
        value, lower, upper = np.ldexp(limits, -exponents)
    beyond = np.isinf(value)
    if beyond.any():
        log = float((np.log(limits[0]) - exponents * np.log(2.0))[beyond].max())
        raise NonFiniteError("f", expected="a constant in the range of float64", got=f"exp({log:.6g})")
    return np.stack((value, np.maximum(lower - lost, 0.0), upper + lost))


def times_power(t: Tensor, exponents: _Exponents) -> Tensor:
    """Multiply each member of a batch by two to the power of its exponent."""
    if not exponents.any():
        return t
    # In two factors, because a single one could leave the range of the dtype
    for part in (exponents // 2, exponents - exponents // 2):
        if part.any():
            factors = torch.from_numpy(np.ldexp(1.0, part)).to(t)
            t = t * factors.view(-1, *(1,) * (t.ndim - 1))
    return t


def _before(product: _Product, vectors: Tensor, made: Tensor) -> tuple[_Exponents, Tensor]:
    """Scale ``vectors`` by powers of two. Return the exponents and the product; ``made`` is unscaled."""
    reach = _binary_exponents(vectors.dtype) * 3 // 4
    sizes = _sizes(made)
    wanted = -out_of_range(made)
    # Large products stay as they are, with room for larger ones.
    shift = np.where(wanted > 0, np.minimum(wanted, reach), np.minimum(wanted + reach, 0))
    shift = np.where(sizes == 0.0, reach, np.where(np.isfinite(sizes), shift, -reach))
    if not shift.any():
        return shift, made
    # Room for vectors that are larger than these
    room = np.where(shift > 0, 8, 0)
    again = times_power(product(times_power(vectors, shift + room)), -room)
    # Where the numbers overflow inside, the product stays as it was.
    worse = np.isfinite(sizes) & ~np.isfinite(_sizes(again))
    if worse.any():
        chosen = torch.from_numpy(worse).to(made.device).view(-1, *(1,) * (made.ndim - 1))
        again, shift = torch.where(chosen, made, again), np.where(worse, 0, shift)
    return shift, again


def out_of_range(t: Tensor) -> _Exponents:
    """Return the binary exponent of each member of a batch, or 0 if its size is in the ordinary range."""
    sizes = _sizes(t)
    smallest, largest = _ordinary(t.dtype)
    ordinary = (sizes == 0.0) | ~np.isfinite(sizes) | ((sizes >= smallest) & (sizes <= largest))
    exponents: np.ndarray = np.where(ordinary, 0, np.frexp(np.where(ordinary, 1.0, sizes))[1])
    return exponents.astype(np.int64)


def _sizes(t: Tensor) -> np.ndarray:
    sizes: np.ndarray = torch.linalg.vector_norm(t.flatten(1), ord=torch.inf, dim=1).double().cpu().numpy()
    return sizes


def _ordinary(dtype: torch.dtype) -> tuple[float, float]:
    """Return the range of |J v| in which neither JᵀJ v nor its squared length loses digits."""
    limit = 2.0 ** (_binary_exponents(dtype) // (4 if dtype == torch.float32 else 8))
    return 1.0 / limit, limit


def _binary_exponents(dtype: torch.dtype) -> int:
    return int(np.log2(torch.finfo(dtype).max))
