"""Checks of the arguments of layers with a known Lipschitz constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor

from howsmooth.bounds.bound import check_length as check_whole_length
from howsmooth.errors import ArgumentError, HowsmoothError, NonFiniteError, check_number, reason
from howsmooth.rounding import spectral_norm_above

__all__ = [
    "Placement", "check", "check_ball", "check_layer_input", "check_length", "check_placement", "look",
    "norm_above", "refuse_where", "require",
]  # fmt: skip

# A radius of zero is replaced by this one, because formulas divide by the radius or take its logarithm.
# Bounds on the larger ball hold on the smaller one, too.
_SMALLEST = 1e-100
# Larger integers are not exact in float64.
_LONGEST = 2**53


def norm_above(argument: str, matrix: Tensor) -> float:
    """Bound the spectral norm of a matrix (m, k) from above. An entry that is not finite is an error."""
    if not bool(torch.isfinite(matrix).all()):
        raise NonFiniteError(argument, expected="finite numbers", got="NaN or infinity")
    return spectral_norm_above(matrix)


def check(ok: bool, argument: str, expected: str, got: object, remedy: str = "") -> None:
    """Raise ArgumentError with the given words unless ``ok``."""
    if not ok:
        raise ArgumentError(argument, expected=expected, got=str(got), remedy=remedy)


def check_length(length: object) -> int:
    """Return the number of tokens after checking that it is an integer from 1 to 2^53."""
    n = check_whole_length(length)
    check(n <= _LONGEST, "length", f"an integer number of tokens n <= {_LONGEST}", "a larger number")
    return n


def check_ball(radius: object) -> float:
    """Return the radius of a ball after checking that it is >= 0 or infinite. Zero becomes a tiny number."""
    expected = "a number >= 0, the largest norm of a token, or math.inf for all tokens"
    return max(check_number("radius", radius, expected, lambda number: number >= 0), _SMALLEST)


class Placement(TypedDict, total=False):
    """The arguments of constructors for the device and dtype of the weights, as in PyTorch."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def check_placement(device: object = None, dtype: object = None) -> None:
    """Raise ArgumentError if the device does not exist or the dtype is not a floating-point dtype."""
    floating = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    check(floating, "dtype", "torch.float32 or torch.float64", repr(dtype))
    try:
        torch.empty(0, device=device)  # type: ignore[call-overload]
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        got = f"{device!r} ({reason(error)[:100]})"
        expected = "a device that PyTorch finds here, such as 'cpu'"
        raise ArgumentError("device", expected=expected, got=got) from error


def check_layer_input(
    argument: str, x: object, *, dim: int | None = None, ndim: int | None = None, like: Tensor | None = None
) -> Tensor:
    """Return ``x`` after checking that it is a tensor of floating-point tokens.

    ``dim`` is the size of the last axis, ``ndim`` the number of axes, ``like`` a tensor on the same device.
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        got = type(x).__name__ if not isinstance(x, Tensor) else str(x.layout)
        raise ArgumentError(argument, expected="a dense tensor of tokens (batch, n, d)", got=got)
    shape, expected = f"shape {tuple(x.shape)}", ""
    if like is not None and x.device != like.device:
        expected, shape = f"a tensor on {like.device}, as the weights", str(x.device)
    elif not x.is_floating_point() or x.ndim < 1 or (ndim is not None and x.ndim != ndim):
        expected = f"floating-point numbers, {'tokens (..., d)' if ndim is None else f'{ndim} axes'}"
        shape = f"{x.dtype}, {shape}"
    elif dim is not None and x.shape[-1] != dim:
        expected = f"tokens of {dim} numbers (last axis)"
    if expected:
        raise ArgumentError(argument, expected=expected, got=shape)
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


def refuse_where(wrong: Tensor, name: str, expected: str, got: str, remedy: str = "") -> None:
    """Raise an error about the argument ``name`` if any entry of ``wrong`` is True, also inside vmap."""
    require(
        wrong,
        torch.logical_not,
        lambda _: ArgumentError(name, expected=expected, got=got, remedy=remedy),
        f"{name}: expected {expected}",
    )


def look(t: Tensor, at: Callable[[Tensor], object]) -> None:
    """Call ``at`` with an ordinary tensor that has the values of ``t``, also inside torch.func transforms.

    Tensors that ``at`` makes stay valid after the transform. Inside torch.func.vmap, ``at`` gets the values
    of all members, stacked along a first axis.
    """
    _Look.apply(t.detach(), at)  # type: ignore[no-untyped-call]


class _Look(torch.autograd.Function):
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
