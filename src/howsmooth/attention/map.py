"""What every map on tokens of this library has in common."""

from __future__ import annotations

import abc
from typing import TypeVar, overload

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.weighting import Weighting
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["AbstractMeasure", "TokenMap", "as_parameter", "check_measure", "check_tokens"]

Measure = TypeVar("Measure", bound="AbstractMeasure")


class TokenMap(abc.ABC):
    """A differentiable map X (..., n, d) -> (..., n, d_out), independent over the leading axes.

    Called on a probability measure it gives its image, a measure again (Definitions 2.4 and 2.6). Its
    parameters are plain tensors without gradients; a map is never changed after it is built.
    """

    @property
    @abc.abstractmethod
    def d(self) -> int:
        """Dimension of an input token."""

    @property
    @abc.abstractmethod
    def d_out(self) -> int:
        """Dimension of an output token."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """Data type of the parameters."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device of the parameters."""

    @abc.abstractmethod
    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> TokenMap:
        """Return the same map with parameters of another dtype or on another device."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return one phrase that says what the map is, masks and residuals included."""

    def check_length(self, n: int) -> None:  # noqa: B027 - most maps take any length
        """Raise ArgumentError if the map cannot take ``n`` tokens."""

    @abc.abstractmethod
    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        """Apply the map to tokens that were checked; ``weighting`` makes them the atoms of a measure."""

    @overload
    def __call__(self, X: Tensor) -> Tensor: ...

    @overload
    def __call__(self, X: Measure) -> Measure: ...

    def __call__(self, X: object) -> Float[Tensor, "*batch n d_out"] | AbstractMeasure:
        """Apply the map to tokens X (..., n, d), giving (..., n, d_out), or to a measure, giving its image.

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


class AbstractMeasure(abc.ABC):
    """A probability measure on tokens that a :class:`~howsmooth.attention.TokenMap` can be called on.

    The measures themselves are in :mod:`howsmooth.measures`.
    """

    @property
    @abc.abstractmethod
    def d(self) -> int:
        """Dimension of a token."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """Data type of the measure."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device of the measure."""

    @abc.abstractmethod
    def push_forward(self, f: TokenMap) -> AbstractMeasure:
        """Return the image F(μ) = (Γ_μ)_# μ under the mean-field map of ``f``, a measure of the same kind."""

    @abc.abstractmethod
    def weighted_tokens(self) -> tuple[Tensor, Weighting]:
        """Return the atoms (n, d) with their weighting.

        Raises
        ------
        ArgumentError
            If the measure has no atoms.

        """


def check_measure(measure: AbstractMeasure, f: TokenMap) -> None:
    """Raise ArgumentError unless dimension, dtype and device of the measure are those of ``f``."""
    for what, got, wanted in (
        ("dimension", measure.d, f.d),
        ("dtype", measure.dtype, f.dtype),
        ("device", measure.device, f.device),
    ):
        if got != wanted:
            raise ArgumentError(
                "measure",
                expected=f"{what} {wanted}, as the map's",
                got=str(got),
                remedy="" if what == "dimension" else f"Convert one of the two, with .to({what}=...).",
            )


def check_tokens(x: Tensor, f: TokenMap) -> None:
    """Raise ArgumentError unless ``f`` takes ``x``: shape (..., n >= 1, d), dtype, device, length."""
    if x.ndim < 2 or x.shape[-1] != f.d or x.shape[-2] < 1:
        raise ArgumentError(
            "X",
            expected=f"tokens of shape (..., n, {f.d}) with n >= 1",
            got=f"shape {tuple(x.shape)}",
            remedy="Put one token in each row; for one token write x[None, :].",
        )
    if x.dtype != f.dtype:
        raise ArgumentError(
            "X",
            expected=f"dtype {f.dtype} as the map's parameters",
            got=str(x.dtype),
            remedy="Convert one of the two, with X.to(dtype) or map.to(dtype=...).",
        )
    if x.device != f.device:
        raise ArgumentError(
            "X",
            expected=f"a tensor on {f.device} as the map's parameters",
            got=str(x.device),
            remedy="Move one of the two, with X.to(device) or map.to(device=...).",
        )
    f.check_length(x.shape[-2])


def as_parameter(
    name: str,
    value: object,
    shape: tuple[int | str, ...],
    *,
    like: Tensor | None = None,
) -> Tensor:
    """Return ``value`` detached, after checking its shape, dtype, device and that it is finite.

    ``shape`` holds sizes, or names for sizes that may be anything positive.
    """
    expected = f"a floating-point tensor of shape ({', '.join(str(s) for s in shape)})"
    if not isinstance(value, Tensor):
        raise ArgumentError(name, expected=expected, got=type(value).__name__, remedy="Use torch.as_tensor.")
    fits = value.ndim == len(shape) and all(
        size == want if isinstance(want, int) else size >= 1
        for size, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        raise ArgumentError(name, expected=expected, got=f"shape {tuple(value.shape)}")
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
