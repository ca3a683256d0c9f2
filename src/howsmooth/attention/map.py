"""The base class of maps of tokens, the interface of measures of tokens, and checks of the inputs of such
maps.
"""

from __future__ import annotations

import abc
import inspect
from functools import cache
from typing import Any, Self, TypeVar, overload

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["AbstractMeasure", "TokenMap", "as_parameter", "check_measure", "check_tokens", "converted"]

Measure = TypeVar("Measure", bound="AbstractMeasure")


class TokenMap(abc.ABC):
    """Base class of differentiable maps of sequences of tokens, X (..., n, d) -> (..., n, d_out).

    Leading axes are batch axes. Called on a probability measure, the map returns the image measure
    (Definitions 2.4 and 2.6 of Castin et al., 2024). Its parameters are tensors without gradients, and a map
    does not change after construction. The arguments of its constructor are attributes of the same names, of
    which the first has the dtype and the device of the map; a subclass of another kind overrides what rests
    on them.
    """

    @property
    @abc.abstractmethod
    def d(self) -> int:
        """Dimension of the map's input tokens."""

    @property
    def d_out(self) -> int:
        """Dimension of the map's output tokens."""
        return self.d

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the map's parameters."""
        dtype: torch.dtype = getattr(self, _arguments(type(self))[0]).dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Device of the map's parameters."""
        device: torch.device = getattr(self, _arguments(type(self))[0]).device
        return device

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Self:
        """Return the map with its parameters converted to another dtype or device."""
        own = _arguments(type(self))
        return self._rebuilt(**{name: converted(getattr(self, name), dtype, device) for name in own})

    def _rebuilt(self, **changes: object) -> Self:
        """Return a map of the same class with the constructor arguments in ``changes`` changed."""
        arguments: dict[str, Any] = {name: getattr(self, name) for name in _arguments(type(self))}
        return type(self)(**(arguments | changes))

    @abc.abstractmethod
    def describe(self) -> str:
        """Return a phrase that describes the map, masks and residuals included, for messages and reports."""

    def check_length(self, n: int) -> None:  # noqa: B027 - most maps accept any length
        """Raise ArgumentError if the map cannot take ``n`` tokens."""

    @abc.abstractmethod
    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        """Apply the map to tokens whose shape, dtype and values have been checked.

        With a ``weighting``, the tokens are the atoms of a measure.
        """

    @overload
    def __call__(self, X: Tensor) -> Tensor: ...

    @overload
    def __call__(self, X: Measure) -> Measure: ...

    def __call__(self, X: object) -> Float[Tensor, "*batch n d_out"] | AbstractMeasure:
        """Apply the map to tokens X (..., n, d), or push a measure of tokens forward by the map.

        The result has the shape (..., n, d_out), or is a measure on R^d_out.

        Raises
        ------
        ArgumentError
            If shape, dtype, device or length do not fit, or the map does not act on such a measure.

        """
        if isinstance(X, AbstractMeasure):
            return X.push_forward(self)
        if not isinstance(X, Tensor):
            raise ArgumentError(
                "X",
                expected="a tensor of tokens (..., n, d), or a measure",
                got=type(X).__name__,
                remedy="Use torch.as_tensor, or howsmooth.measures.DiscreteMeasure.",
            )
        check_tokens(X, self)
        return self._forward(X)


@cache
def _arguments(kind: type[TokenMap]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def converted(value: Any, dtype: torch.dtype | None, device: torch.device | str | None) -> Any:
    """Return ``value`` in another dtype or on another device, if it is a tensor or holds tensors."""
    if isinstance(value, Tensor):
        return value.to(dtype=dtype if value.is_floating_point() else None, device=device)
    to = getattr(value, "to", None)
    return value if to is None else to(dtype=dtype, device=device)


class AbstractMeasure(abc.ABC):
    """The interface of a probability measure of tokens in R^d, which an attention map can push forward.

    :mod:`howsmooth.measures` implements it.
    """

    @property
    @abc.abstractmethod
    def d(self) -> int:
        """Dimension of the tokens, which are the points of the measure."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """Data type of the measure's atoms and weights."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device of the measure."""

    @abc.abstractmethod
    def push_forward(self, f: TokenMap) -> AbstractMeasure:
        """Return the image F(μ) = (Γ_μ)_# μ of this measure μ, in which each point x has moved to Γ_μ(x)."""

    @abc.abstractmethod
    def weighted_tokens(self) -> tuple[Tensor, Weighting]:
        """Return the atoms of the measure as tokens (n, d), with their weights and causal positions. Raise
        ArgumentError if it has no atoms.
        """


def check_measure(measure: AbstractMeasure, f: TokenMap) -> None:
    """Raise ArgumentError unless the measure and the map ``f`` have the same dimension, dtype and device."""
    if measure.d != f.d:
        expected = f"dimension {f.d}, as the map's"
        raise ArgumentError("measure", expected=expected, got=str(measure.d))
    _check_placed("measure", measure, f)


def check_tokens(x: Tensor, f: TokenMap) -> None:
    """Raise ArgumentError unless the shape, dtype, device and length of tokens ``x`` fit the map ``f``."""
    if x.ndim < 2 or x.shape[-1] != f.d or x.shape[-2] < 1:
        raise ArgumentError(
            "X",
            expected=f"tokens of shape (..., n, {f.d}) with n >= 1",
            got=f"shape {tuple(x.shape)}",
            remedy="Put one token in each row; for one token write x[None, :].",
        )
    _check_placed("X", x, f)
    f.check_length(x.shape[-2])


def _check_placed(name: str, given: Tensor | AbstractMeasure, f: TokenMap) -> None:
    for what, got, wanted in (("dtype", given.dtype, f.dtype), ("device", given.device, f.device)):
        if got != wanted:
            raise ArgumentError(
                name,
                expected=f"{what} {wanted}, as the map's parameters",
                got=str(got),
                remedy=f"Convert one of the two, with .to({what}=...).",
            )


def as_parameter(
    name: str, value: object, shape: tuple[int | str, ...], *, like: Tensor | None = None
) -> Tensor:
    """Check a parameter of a map, and return it detached. Raise ArgumentError unless it is a tensor of this
    shape, with the dtype and device of ``like``. Raise NonFiniteError if an entry is NaN or infinite.

    An entry of ``shape`` is a required size, or the name of a size that may be any positive number.
    """
    expected = f"a floating-point tensor of shape ({', '.join(str(s) for s in shape)})"
    if not isinstance(value, Tensor):
        raise ArgumentError(name, expected=expected, got=type(value).__name__, remedy="Use torch.as_tensor.")
    fits = value.ndim == len(shape) and all(
        size == want if isinstance(want, int) else size >= 1
        for size, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        one_head = shape[0] in ("heads", "kv_heads") and value.ndim == len(shape) - 1
        remedy = f"For a single head give {name}[None]." if one_head else ""
        raise ArgumentError(name, expected=expected, got=f"shape {tuple(value.shape)}", remedy=remedy)
    if value.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            name,
            expected="dtype float32 or float64",
            got=str(value.dtype),
            remedy="Convert it, for instance with .float(): half precision cannot carry the interval.",
        )
    if like is not None and (value.dtype != like.dtype or value.device != like.device):
        raise ArgumentError(
            name,
            expected=f"{like.dtype} on {like.device}, as the other parameters",
            got=f"{value.dtype} on {value.device}",
            remedy="Give all parameters one dtype and one device.",
        )
    if not bool(torch.isfinite(value).all()):
        raise NonFiniteError(name, expected="finite numbers", got="NaN or infinity")
    return value.detach()
