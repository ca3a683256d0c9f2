"""Checks of the arguments of layers with a known Lipschitz constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from howsmooth.bounds.bound import check_length as check_whole_length
from howsmooth.errors import ArgumentError, HowsmoothError

__all__ = ["check_ball", "check_length", "check_placement", "check_size", "check_tokens", "look", "require"]

# A radius of zero is replaced by this one, because formulas divide by the radius or take its logarithm.
# Bounds on the larger ball hold on the smaller one, too.
_SMALLEST = 1e-100
# Larger integers are not exact in float64.
_LONGEST = 2**53


def check_length(length: object) -> int:
    """Return the number of tokens after checking that it is an integer from 1 to 2^53."""
    n = check_whole_length(length)
    if n > _LONGEST:
        raise ArgumentError(
            "length", expected=f"an integer number of tokens n <= {_LONGEST}", got="a larger number"
        )
    return n


def check_ball(radius: object) -> float:
    """Return the radius of a ball of tokens after checking that it is a number >= 0 or infinity.

    A radius of zero is replaced by a tiny number.
    """
    try:
        value = float(radius)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if isinstance(radius, bool | str) or not value >= 0:
        raise ArgumentError(
            "radius",
            expected="a number >= 0, the largest norm of a token, or math.inf for all tokens",
            got=repr(radius),
        )
    return max(value, _SMALLEST)


def check_size(argument: str, value: object, *, least: int = 1) -> int:
    """Return ``value`` after checking that it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(argument, expected=f"a whole number >= {least}", got=repr(value))
    return value


def check_placement(device: object, dtype: object) -> None:
    """Raise ArgumentError if the device does not exist or the dtype is not a floating-point dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError("dtype", expected="torch.float32 or torch.float64", got=repr(dtype))
    try:
        torch.empty(0, device=device)  # type: ignore[call-overload]
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:100]
        raise ArgumentError(
            "device", expected="a device that PyTorch finds here, such as 'cpu'", got=f"{device!r} ({reason})"
        ) from error


def check_tokens(
    argument: str, x: object, *, dim: int | None = None, ndim: int | None = None, like: Tensor | None = None
) -> Tensor:
    """Return ``x`` after checking that it is a tensor of floating-point tokens.

    If they are given, ``dim`` is the size of the last axis, ``ndim`` is the number of axes, and ``like`` is a
    tensor on the same device.
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        got = type(x).__name__ if not isinstance(x, Tensor) else str(x.layout)
        raise ArgumentError(argument, expected="a dense tensor of tokens (batch, n, d)", got=got)
    if like is not None and x.device != like.device:
        raise ArgumentError(
            argument, expected=f"a tensor on {like.device}, as the weights", got=str(x.device)
        )
    if not x.is_floating_point() or x.ndim < 1 or (ndim is not None and x.ndim != ndim):
        shape = "tokens (..., d)" if ndim is None else f"{ndim} axes"
        raise ArgumentError(
            argument, expected=f"floating-point numbers, {shape}", got=f"{x.dtype}, shape {tuple(x.shape)}"
        )
    if dim is not None and x.shape[-1] != dim:
        raise ArgumentError(
            argument, expected=f"tokens of {dim} numbers (last axis)", got=f"shape {tuple(x.shape)}"
        )
    return x


def require(
    t: Tensor, good: Callable[[Tensor], Tensor], error: Callable[[Tensor], HowsmoothError], words: str
) -> None:
    """Raise an error if a condition is false in any entry of a tensor, also inside torch.func.vmap.

    Inside vmap, the values of a single member cannot be read in Python. There ``good`` and ``error`` get the
    values of all members, stacked along a first axis. A graph that torch.compile or torch.export records has
    no values; it gets an assertion instead, which raises RuntimeError with ``words`` when the graph runs.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(good(t.detach()).all(), words)
        return

    def check(seen: Tensor) -> None:
        if not bool(good(seen).all()):
            raise error(seen)

    look(t, check)


def look(t: Tensor, at: Callable[[Tensor], object]) -> None:
    """Call ``at`` with an ordinary tensor that has the values of ``t``, also inside torch.func transforms.

    Tensors that ``at`` makes stay valid after the transform. Inside torch.func.vmap, ``at`` gets the values
    of all members, stacked along a first axis.
    """
    _Look.apply(t.detach(), at)  # type: ignore[no-untyped-call]


class _Look(torch.autograd.Function):
    """The autograd function with which :func:`look` calls a function inside torch.func transforms."""

    @staticmethod
    def forward(t: Tensor, at: Callable[[Tensor], object]) -> Tensor:
        at(t)
        return t.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], t: Tensor, at: Callable[[Tensor], object]
    ) -> tuple[Tensor, None]:
        _Look.apply(t.movedim(in_dims[0], 0), at)  # type: ignore[no-untyped-call]
        return t.new_empty(0), None
