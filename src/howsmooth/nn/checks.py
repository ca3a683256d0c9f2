"""Outward rounding of bounds, and checks of lengths, radii and tensors, for all layers with a constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from howsmooth.bounds import Bound, Quantity
from howsmooth.bounds.bound import check_length as check_whole_length
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = [
    "above",
    "check_ball",
    "check_length",
    "check_placement",
    "check_size",
    "check_tokens",
    "look_at",
    "norm_above",
    "root",
    "times",
    "upper",
]

# Relative margin for the rounding of a few products, quotients and sums of positive numbers. It is far above
# their rounding errors and far below the digits of a constant that matter.
_MARGIN = 1e-12
# A radius of zero is replaced by this one, because formulas divide by the radius or take its logarithm.
# Bounds on the larger ball hold on the smaller one, too.
_SMALLEST = 1e-100
# Larger integers are not exact in float64.
_LONGEST = 2**53


def above(value: float) -> float:
    """Return the value rounded up, so that it is at least the exact result of the computation."""
    return value * (1 + _MARGIN)


def times(factor: float, value: float) -> float:
    """Return the product, with 0 · ∞ = 0, because a map of constant zero has a single value."""
    return factor * value if factor and value else 0.0


def check_length(length: object) -> int:
    """Return the number of tokens, after checking that it is an integer from 1 to 2^53."""
    n = check_whole_length(length)
    if n > _LONGEST:
        raise ArgumentError(
            "length", expected=f"an integer number of tokens n <= {_LONGEST}", got="a larger number"
        )
    return n


def check_ball(radius: object) -> float:
    """Return the radius of a ball of tokens, after checking that it is a number >= 0 or infinity."""
    try:
        value = float(radius)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if isinstance(radius, bool) or not value >= 0:
        raise ArgumentError(
            "radius",
            expected="a number >= 0, the largest norm of a token, or math.inf for all tokens",
            got=repr(radius),
        )
    return max(value, _SMALLEST)


def check_size(argument: str, value: object, *, least: int = 1) -> int:
    """Return ``value``, after checking that it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(argument, expected=f"a whole number >= {least}", got=repr(value))
    return value


def check_placement(device: object, dtype: object) -> None:
    """Raise ArgumentError if the device does not exist or the dtype is no floating-point dtype."""
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
    """Return ``x``, after checking that it is a floating-point tensor of these sizes on the right device.

    Its device must be the device of ``like``, if that is given.
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


def look_at(t: Tensor, check: Callable[[Tensor], object]) -> None:
    """Call ``check`` with the values of a tensor, also within torch.func.vmap.

    Inside vmap, the values of a single member cannot be read in Python. There ``check`` gets the values of
    all members, stacked along a first axis.
    """
    _Look.apply(t.detach(), check)  # type: ignore[no-untyped-call]


class _Look(torch.autograd.Function):
    """An autograd function without a result, which runs a check and has a rule for torch.func.vmap."""

    @staticmethod
    def forward(t: Tensor, check: Callable[[Tensor], object]) -> Tensor:
        check(t)
        return t.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], t: Tensor, check: Callable[[Tensor], object]
    ) -> tuple[Tensor, None]:
        look_at(t.movedim(in_dims[0], 0), check)
        return t.new_empty(0), None


def root(t: Tensor, joined: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return √joined(|t|², 1) for tokens t (..., d), as (..., 1).

    ``joined`` is a homogeneous function of two numbers, such as + or max. Unlike |t|, the result is smooth at
    t = 0, with all derivatives, and squares never overflow, because t is scaled first.
    """
    # Dividing by the largest entry (at least 1) keeps squares in range; the factor s is restored at the end.
    s = t.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1.0)
    squares = (t / s).square().sum(dim=-1, keepdim=True)
    return s * joined(squares, s.square().reciprocal()).sqrt()


def norm_above(argument: str, matrix: Tensor) -> float:
    """Return an upper bound on the spectral norm of a matrix (m, k), in float64, including rounding.

    The computed singular values are exact for a matrix that differs from the given one by a small multiple of
    the machine epsilon times its norm (Golub and Van Loan, *Matrix Computations*, 8.6). The added slack is
    many times larger.

    Raises
    ------
    NonFiniteError
        If the matrix contains NaN or infinity.

    """
    a = matrix.detach().to(device="cpu", dtype=torch.float64)
    if not bool(torch.isfinite(a).all()):
        raise NonFiniteError(argument, expected="finite numbers", got="NaN or infinity")
    if a.numel() == 0:
        return 0.0
    slack = 16 * (a.shape[0] + a.shape[1]) * torch.finfo(torch.float64).eps
    return float(torch.linalg.matrix_norm(a, 2)) * (1 + slack)


def upper(name: str, source: str, constant: float, radius: float) -> Bound:
    """Return an upper bound on a Lipschitz constant as a Bound.

    The bound holds on the ball of this radius, or everywhere if the radius is infinite.
    """
    quantity = Quantity.EVERYWHERE if math.isinf(radius) else Quantity.GLOBAL
    return Bound.upper(name, quantity, source, formula=constant)
