"""The number that a layer is divided by: its bound, with a gradient, for the weights as they are.

The value is that of ``howsmooth.bounds``, rounded outwards. The gradient is that of an expression of the
weights, which is evaluated only where a backward pass asks for it. Derivation: docs/theory/enforce.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Remembered", "divided", "log_value"]


class Remembered:
    """A number that belongs to weights: computed anew whenever one of them is not what it was.

    Weights are compared entry by entry with a copy, since PyTorch's version counters do not see changes
    through ``.data``.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._weights: tuple[Tensor, ...] = ()
        self._value = 0.0

    def __call__(self, weights: Mapping[str, Tensor], key: object, compute: Callable[[], float]) -> float:
        """Return the number for these weights and this key."""
        tensors = tuple(weight.detach() for weight in weights.values())
        same = key == self._key and len(tensors) == len(self._weights)
        if not same or not all(map(_same, tensors, self._weights)):
            self._value = compute()
            self._key, self._weights = key, tuple(tensor.clone() for tensor in tensors)
        return self._value


def _same(now: Tensor, before: Tensor) -> bool:
    alike = now.dtype == before.dtype and now.device == before.device
    return alike and torch.equal(now, before)


LogExpression = Callable[[Mapping[str, Tensor]], Tensor]
"""The logarithm of a bound as an expression of the weights: a number with a graph."""


def log_value(expression: LogExpression, weights: Mapping[str, Tensor]) -> float:
    """Return the value of the logarithm of a bound; infinite where products of the weights overflow."""
    try:
        with torch.no_grad():
            value = float(expression(weights).detach())
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return math.inf
    return math.inf if math.isnan(value) else value


def divided(
    log_divisor: float, weights: Mapping[str, Tensor], expression: LogExpression, like: Tensor
) -> Tensor:
    """Return 1/divisor, a number of the dtype and on the device of ``like``, differentiable in the weights.

    Parameters
    ----------
    log_divisor
        Its value, as a logarithm.
    weights
        The weights that it depends on.
    expression
        From weights to the logarithm of the divisor, but for rounding and a constant; called by a backward
        pass alone.
    like
        A tensor of the dtype and device wanted.

    """
    value = torch.tensor(-log_divisor, dtype=torch.float64).exp().to(like)
    names = [name for name, weight in weights.items() if weight.requires_grad]
    if not names or not torch.is_grad_enabled():
        return value
    inverse: Tensor = _Inverse.apply(  # type: ignore[no-untyped-call]
        value, dict(weights), tuple(names), expression, *(weights[n] for n in names)
    )
    return inverse


class _Inverse(torch.autograd.Function):
    """1/divisor, whose derivative in a weight is −(1/divisor) times that of the logarithm."""

    @staticmethod
    def forward(
        value: Tensor,
        weights: Mapping[str, Tensor],
        names: Sequence[str],
        expression: LogExpression,
        *inputs: Tensor,
    ) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weights, ctx.names, ctx.expression, *tensors = inputs
        ctx.others = {name: weight for name, weight in weights.items() if name not in ctx.names}
        ctx.save_for_backward(output, *tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        output, *tensors = ctx.saved_tensors

        def log(*given: Tensor) -> Tensor:
            result: Tensor = ctx.expression({**ctx.others, **dict(zip(ctx.names, given, strict=True))})
            return result

        with torch.enable_grad():
            at, pull, *_ = torch.func.vjp(log, *tensors)
            found = pull(torch.ones_like(at))
        factor = -(gradient * output).double()
        return (
            None,
            None,
            None,
            None,
            *((factor.to(g.device) * g.double()).to(g.dtype) for g in found),
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, None]:
        """Weights are the same for all members of a batch."""
        if any(dim is not None for dim in in_dims):
            raise NotImplementedError("torch.func.vmap over the weights of an attention with a constant")
        result: Tensor = _Inverse.apply(*arguments)  # type: ignore[no-untyped-call]
        return result, None
