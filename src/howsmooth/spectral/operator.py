"""The base class of linear operators: a batch of linear maps that are given by their products with
vectors.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import above, gamma
from howsmooth.spectral.accurate_sums import squared_lengths

__all__ = [
    "LinearOperator", "ProductError", "Subset", "check_finite", "checked_rounding", "length_rounding",
    "squared_lengths",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class ProductError:
    """Proved bounds on the errors of the matrix–vector products that an operator computes. Each bound is a
    tensor with one entry for each linear map in the operator's batch.

    J is the exact map, and J̃ the map that the stored numbers of the operator define in exact arithmetic. The
    bounds are float64 tensors on the CPU.

    ``model`` is an upper bound of ‖J̃ − J‖, ``rounding`` one of |computed J̃ v − J̃ v| / |v| for all v, and
    of the same for the adjoint, and ``size`` one of ‖J‖ and ‖J̃‖.
    """

    model: Float[Tensor, " batch"]
    rounding: Float[Tensor, " batch"]
    size: Float[Tensor, " batch"]

    @property
    def total(self) -> Float[Tensor, " batch"]:
        """Upper bound on the error of a computed product J v, divided by the norm of v."""
        return above(self.model + self.rounding, 1)

    def select(self, members: Int[Tensor, " chosen"]) -> ProductError:
        """Return the error bounds of the chosen maps of the batch."""
        members = members.cpu()
        return ProductError(*(t[members] for t in vars(self).values()))

    @classmethod
    def of_all(cls, parts: Sequence[ProductError | None]) -> ProductError | None:
        """Return the error bounds of a batch that is put together from several operators.

        The result is None unless every operator has bounds.
        """
        given = [part for part in parts if part is not None]
        if len(given) < len(parts):
            return None
        return cls(*map(torch.cat, zip(*(vars(part).values() for part in given), strict=True)))


class LinearOperator(abc.ABC):
    """A batch of real linear maps J_1, …, J_batch of equal shape that are given by their products with
    vectors.

    A subclass defines ``_product`` and ``_adjoint_product``. The base class checks shapes, dtypes and
    devices.

    Parameters
    ----------
    batch
        Number of maps.
    in_shape, out_shape
        Shape of one input and of one output.
    dtype, device
        The dtype and the device of inputs and outputs.
    rounding
        Estimate of the relative error of each ‖J_b‖ that rounding in the products, and in forming the
        operator, may cause: float64 on the CPU, (batch,); 32 machine epsilons if None.
    proved
        Proved bounds on the error of the products; None where nothing is proved.

    """

    def __init__(
        self,
        batch: int,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        rounding: Tensor | None = None,
        proved: ProductError | None = None,
    ) -> None:
        self.batch = batch
        self.in_shape = in_shape
        self.out_shape = out_shape
        self.dtype = dtype
        self.device = device
        if rounding is None:
            rounding = torch.full((batch,), 32.0 * torch.finfo(dtype).eps, dtype=torch.float64)
        self.rounding = rounding
        self.proved = proved

    @property
    def in_size(self) -> int:
        """The dimension of the input space of one map of the batch."""
        return math.prod(self.in_shape)

    @property
    def out_size(self) -> int:
        """The dimension of the output space of one map of the batch."""
        return math.prod(self.out_shape)

    def product(self, E: Float[Tensor, "batch *in_shape"]) -> Float[Tensor, "batch *out_shape"]:
        """Return J_b E_b for each linear map J_b of the batch, where the vectors E_b are the members of E
        (batch, *in_shape).
        """
        self._check("E", E, self.in_shape)
        return self._product(E)

    def adjoint_product(self, U: Float[Tensor, "batch *out_shape"]) -> Float[Tensor, "batch *in_shape"]:
        """Return J_bᵀ U_b for each linear map J_b of the batch, where the vectors U_b are the members of U
        (batch, *out_shape).
        """
        self._check("U", U, self.out_shape)
        return self._adjoint_product(U)

    def gram_product(
        self, E: Float[Tensor, "batch *in_shape"]
    ) -> tuple[Float[Tensor, "batch *out_shape"], Float[Tensor, "batch *in_shape"]]:
        """Return J_b E_b and J_bᵀ J_b E_b for each linear map J_b of the batch, where E has shape (batch,
        *in_shape).

        The default makes one product after the other; a subclass that can share work between them overrides
        ``_gram_product``.
        """
        self._check("E", E, self.in_shape)
        return self._gram_product(E)

    def energy_product(
        self, E: Float[Tensor, "batch *in_shape"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch *in_shape"]]:
        """Return |J_b E_b|² and J_bᵀ J_b E_b for each linear map J_b of the batch, as a Lanczos step needs
        them.

        The squared norms are float64; E has shape (batch, *in_shape).

        The default takes the length of J E; a subclass that knows it without forming J E overrides
        ``_energy_product``.
        """
        self._check("E", E, self.in_shape)
        return self._energy_product(E)

    def select(self, members: Int[Tensor, " chosen"]) -> LinearOperator:
        """Return an operator with the maps at the given indices of the batch, in the given order.

        By default the products of the whole batch are computed, and the results of these members are kept. A
        subclass that can do less work overrides this method.
        """
        return Subset(self, members)

    def _gram_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        image = self._product(e)
        return image, self._adjoint_product(image)

    def _energy_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        image, gram = self._gram_product(e)
        return squared_lengths(image.flatten(1)), gram

    @abc.abstractmethod
    def _product(self, e: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def _adjoint_product(self, u: Tensor) -> Tensor: ...

    def _check(self, name: str, given: Tensor, shape: tuple[int, ...]) -> None:
        if given.shape != (self.batch, *shape):
            raise ArgumentError(
                name, expected=f"shape {(self.batch, *shape)}", got=f"shape {tuple(given.shape)}"
            )
        if given.dtype != self.dtype or given.device != self.device:
            raise ArgumentError(
                name, expected=f"{self.dtype} on {self.device}", got=f"{given.dtype} on {given.device}"
            )


def length_rounding(operator: LinearOperator) -> float:
    """Bound the relative rounding error of a ratio |J v| / |v| whose norms are computed in float64."""
    return 2.0 * gamma(operator.in_size + operator.out_size + 8)


class Subset(LinearOperator):
    """An operator that consists of some of the maps of a larger operator. It computes each product with all
    maps of the larger operator, and selects from the results.
    """

    def __init__(self, whole: LinearOperator, members: Int[Tensor, " chosen"]) -> None:
        super().__init__(
            len(members),
            whole.in_shape,
            whole.out_shape,
            whole.dtype,
            whole.device,
            whole.rounding[members.cpu()],
            None if whole.proved is None else whole.proved.select(members),
        )
        self.whole = whole
        self.members = members.to(whole.device)

    def select(self, members: Int[Tensor, " chosen"]) -> LinearOperator:
        """Return an operator with the chosen maps of this subset."""
        return Subset(self.whole, self.members[members.to(self.members.device)])

    def _scattered(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.whole.batch, *x.shape[1:]).index_copy_(0, self.members, x)

    def _product(self, e: Tensor) -> Tensor:
        return self.whole.product(self._scattered(e))[self.members]

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self.whole.adjoint_product(self._scattered(u))[self.members]

    def _gram_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        image, back = self.whole.gram_product(self._scattered(e))
        return image[self.members], back[self.members]


def checked_rounding(operator: LinearOperator) -> np.ndarray:
    """Return the estimated relative rounding error of the norm of each map in an operator. Raise
    NonFiniteError if an error is 0.1 or more, because then no digit of the norm is known.
    """
    slack: np.ndarray = operator.rounding.numpy()
    if operator.proved is not None:
        # Infinite where nothing is proved, because the scores have lost their digits.
        slack = np.where(np.isfinite(operator.proved.total.numpy()), slack, np.inf)
    if not (slack < 0.1).all():
        raise NonFiniteError(
            "f",
            expected=f"a Jacobian of which {operator.dtype} products keep a digit",
            got=f"a relative rounding of {slack.max():.1e}",
            remedy="Attention scores are too large for it, terms cancel, numbers underflow, or f has a kink "
            "at these tokens, as where it clips tokens of exactly its radius; measure "
            + ("" if "64" in str(operator.dtype) else "in float64 or ")
            + "at smaller tokens.",
        )
    return slack


def check_finite(norms: Tensor) -> None:
    """Raise NonFiniteError unless all ``norms`` of the products of an operator are finite."""
    if not bool(torch.isfinite(norms).all()):
        raise NonFiniteError(
            "f",
            expected="finite Jacobian products",
            got="NaN or infinity",
            remedy="Look for overflow: tokens or parameters too large for their dtype.",
        )
