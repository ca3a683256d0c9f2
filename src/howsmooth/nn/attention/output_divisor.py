"""Division of the output of an attention layer by its Lipschitz bound, differentiable in the weights.

This divisor is the layer's Lipschitz bound over the constant that it shall have, rounded outwards. The
gradient comes from an expression of the weights, which is evaluated in the backward pass only. Derivation:
documentation page "Enforce: layers with a constant that is proved", section "Division by the bound".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from howsmooth.errors import HowsmoothError
from howsmooth.nn.checks import look

__all__ = ["CachedNumber", "divided", "is_far_from_zero", "log_value"]

# Float32 ends near e^88, and its accuracy near e^-87; weights have about the square root of their products.
_FAR = 25.0

LogExpression = Callable[[Mapping[str, Tensor]], Tensor]
"""A function from weights to the logarithm of a bound, a scalar with a graph."""


class CachedNumber:
    """A number that is computed from weights and cached until a weight changes.

    ``far`` says whether the number is far from zero. Weights are compared with a copy, because PyTorch's
    version counters miss changes through ``.data``.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._weights: tuple[Tensor, ...] = ()
        self._value = 0.0
        self.far = False
        self._number = torch.zeros((), dtype=torch.float64)

    def __call__(self, weights: Mapping[str, Tensor], key: object, compute: Callable[[], float]) -> float:
        """Return the number, which is computed again if a weight or ``key`` has changed."""
        tensors = [weight.detach() for weight in weights.values()]
        if not self._fits(tensors, key) or not all(map(torch.equal, tensors, self._weights)):
            self._value = compute()
            self.far = is_far_from_zero(self._value)
            self._key, self._weights = key, ()
            for tensor in tensors:
                # A tensor made within a function transform, such as torch.func.jacrev, dies with it.
                look(tensor, self._keep)
        return self._value

    def _keep(self, weight: Tensor) -> None:
        self._weights += (weight.clone(),)
        self._number = torch.tensor(self._value, dtype=torch.float64)

    def _fits(self, tensors: Sequence[Tensor], key: object) -> bool:
        kinds, kept = ([(t.dtype, t.device) for t in each] for each in (tensors, self._weights))
        return key == self._key and kinds == kept

    def recorded(self, weights: Mapping[str, Tensor], key: object) -> Tensor:
        """Return the number of the last call as a tensor, which torch.export and torch.compile can record.

        The graph asserts at each run that no weight has changed since then. HowsmoothError is raised if no
        number was computed for this key and for weights of this dtype and device.
        """
        tensors = [weight.detach() for weight in weights.values()]
        if not self._fits(tensors, key):
            raise HowsmoothError("a graph needs the divisor first: call model.eval() after moving the model")
        for now, before in zip(tensors, self._weights, strict=True):
            words = "a weight has changed since the divisor of the layer was computed; call model.eval()"
            torch._assert_async((now == before).all(), words)
        return self._number


def is_far_from_zero(log: float) -> bool:
    """Return whether products of numbers as large or small as e^log may leave the range of float32."""
    return abs(log) > _FAR


def log_value(expression: LogExpression, weights: Mapping[str, Tensor]) -> float:
    """Return the logarithm of the Lipschitz bound of a layer as a float, or inf if its computation fails."""
    try:
        with torch.no_grad():
            value = float(expression(weights).detach())
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return math.inf
    return math.inf if math.isnan(value) else value


def divided(
    log_divisor: float, weights: Mapping[str, Tensor], expression: LogExpression, like: Tensor
) -> Tensor:
    """Return e^(−log_divisor), differentiable in the weights, with the dtype and device of ``like``.

    Only the backward pass calls ``expression``, log_divisor up to rounding and an additive constant.
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
    """1/divisor, whose gradient is −1/divisor times the gradient of log divisor."""

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
            # The expression is differentiated here, in the backward pass, and its graph is freed at once.
            at, pull, *_ = torch.func.vjp(log, *tensors)
            found = pull(torch.ones_like(at))
        factor = -(gradient * output).double()
        slopes = [(factor.to(g.device) * g.double()).to(g.dtype) for g in found]
        return None, None, None, None, *slopes

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, None]:
        # All members share the weights.
        if any(dim is not None for dim in in_dims):
            raise NotImplementedError("torch.func.vmap over the weights of an attention with a constant")
        result: Tensor = _Inverse.apply(*arguments)  # type: ignore[no-untyped-call]
        return result, None
