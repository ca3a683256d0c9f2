"""Checks whether numbers inside a map overflow or underflow, while the map is evaluated or while a product
with its Jacobian is computed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["overflows", "underflows", "values_out_of_range"]

_aten = torch.ops.aten
# Steps whose results are bilinear in the two tensors at these places. A result of them that has underflowed
# is no derivative, but is the coefficient of one if it is a factor of the next of them.
_BILINEAR = {_aten.mul.Tensor: 0, _aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1}
_BILINEAR |= {_aten.baddbmm.default: 1, _aten.dot.default: 0, _aten.mv.default: 0}
# Steps whose results are finite for finite numbers, but for overflow.
_FINITE = {*_BILINEAR, _aten.add.Tensor, _aten.sum.default, _aten.sum.dim_IntList, _aten.exp.default}
_FINITE |= {_aten.mean.default, _aten.mean.dim, _aten.linalg_vector_norm.default, _aten.var.correction}
_FINITE |= {_aten.pow.Tensor_Scalar, _aten.square.default, _aten.sub.Tensor}
# The steps of an autograd graph that multiply, and what they keep of their factors.
_FACTORS = ("_saved_self", "_saved_other", "_saved_mat1", "_saved_mat2", "_saved_batch1", "_saved_batch2")
_MULTIPLY = ("MulBackward", "MmBackward", "BmmBackward", "AddmmBackward", "BaddbmmBackward", "PowBackward")
# Digits that a value may lose by underflow, as a multiple of the machine epsilon
_LOST = 64.0


def underflows(y: Tensor, x: Tensor, u: Tensor, digits: bool = False) -> bool:
    """Return True if some number underflows to zero while (∂y/∂x)ᵀu is computed. With ``digits``, also return
    True if a number falls below the smallest normal number, where it loses digits.

    Each step of the autograd graph of ``y``, which is kept, is linear. Where one returns zeros, it is
    repeated with numbers multiplied by a power of two, which shows whether they remain zero.
    """
    found: list[bool] = []

    def watch(node: Any, made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
        if not found and _lost_in(node, made, given, digits=digits):
            found.append(True)

    hooks = [node.register_hook(partial(watch, node)) for node in _nodes(y)]
    try:
        torch.autograd.grad(y, x, u, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return bool(found)


def overflows(f: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return True if some number overflows while the map ``f`` is evaluated at ``x``, such as the square of a
    large entry in a norm.
    """
    seen, y = _evaluated(f, x)
    return y is not None and seen.overflow


def values_out_of_range(f: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return True if the derivative of ``f`` at ``x`` uses numbers that have overflowed, or products that
    have lost digits by underflow.
    """
    seen, y = _evaluated(f, x)
    if y is None or seen.overflow or not seen.lost:
        return y is not None and seen.overflow
    lost = {_storage(t) for t in seen.lost}
    for node in _nodes(y):
        if node.name().startswith(_MULTIPLY):
            factors = (getattr(node, name, None) for name in _FACTORS)
            if any(isinstance(t, Tensor) and _storage(t) in lost for t in factors):
                return True
    return False


def _evaluated(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[_Values, Tensor | None]:
    """Evaluate ``f`` and note overflow and underflow; the output is None if the evaluation fails."""
    seen, y = _Values(), None
    with contextlib.suppress(Exception), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), seen:
        y = f(x.detach().requires_grad_())
    return seen, y


def _nodes(y: Tensor) -> Iterator[Any]:
    seen: set[Any] = set()
    left = [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [parent for parent, _ in node.next_functions]
            yield node


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


class _Values(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.overflow: bool = False
        self.lost: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Norms and fused attention also return what their backward pass needs.
        made = result[0] if isinstance(result, tuple) else result
        if not isinstance(made, Tensor) or not made.is_floating_point() or not made.numel():
            return result
        first = _BILINEAR.get(func)
        if func in _FINITE and not self.overflow:
            # Sums of masks may well be −inf.
            infinite = made.isposinf() if first is None else made.isinf()
            given = [a for a in args if isinstance(a, Tensor | float)]
            self.overflow = bool(infinite.any()) and all(math.isfinite(_largest(a)) for a in given)
        lost = first is not None and _digits_lost(args[first : first + 2], made, func, alone=not first)
        if lost or (self.lost and _is_tiny(made) and self._made_of_lost(args)):
            self.lost.append(made)
        return result

    def _made_of_lost(self, args: Sequence[Any]) -> bool:
        lost = {_storage(t) for t in self.lost}
        return any(isinstance(a, Tensor) and _storage(a) in lost for a in args)


def _is_tiny(t: Tensor) -> bool:
    limits = torch.finfo(t.dtype)
    return float(t.abs().max()) * limits.eps < limits.tiny * _LOST


def _digits_lost(factors: Sequence[Any], made: Tensor, product: Any, *, alone: bool) -> bool:
    """Tell if a product lost digits; with an addend, only if the result is zero."""
    if not _is_tiny(made) or (bool(made.any()) and not alone):
        return False
    if any(isinstance(t, Tensor) and not t.is_floating_point() for t in factors):
        return False
    sizes = [_largest(t) for t in factors]
    if not all(0.0 < size < math.inf for size in sizes):
        return False
    exponents = [-math.frexp(size)[1] for size in sizes]
    if not alone:
        product = _aten.mm.default if made.ndim == 2 else _aten.bmm.default
    exact = product(*(_times(t, k) for t, k in zip(factors, exponents, strict=True)))
    lost = (exact - _times(made, sum(exponents))).abs().max()
    return bool(lost > _LOST * torch.finfo(made.dtype).eps * exact.abs().max())


def _largest(t: Tensor | float) -> float:
    if not isinstance(t, Tensor):
        return abs(t)
    return float(t.abs().max()) if t.numel() else 0.0


def _times(t: Any, exponent: int) -> Any:
    for part in (exponent // 2, exponent - exponent // 2):  # the whole may be no number of the dtype
        t = t * 2.0**part
    return t


def _lost_in(
    node: Any, made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...], *, digits: bool
) -> bool:
    """Return True if a step of the autograd graph underflows to zero or, with ``digits``, loses digits."""
    numbers = [g for g in given if g is not None and g.numel()]
    largest = max((float(g.abs().max()) for g in numbers), default=0.0)
    results = [m for m in made if m is not None and m.numel()]
    if not 0.0 < largest < math.inf:
        return False
    if digits and any(0.0 < float(m.abs().max()) < torch.finfo(m.dtype).tiny for m in results):
        return True
    if all(bool(m.all()) for m in results):
        return False
    exponent = math.frexp(torch.finfo(numbers[0].dtype).max)[1] * 3 // 4 - math.frexp(largest)[1]
    again: Any = tuple(g if g is None else _times(g, exponent) for g in given)
    with contextlib.suppress(Exception):  # some steps cannot be called alone
        again = node(*again)
        pairs = zip(again if isinstance(again, tuple) else (again,), made, strict=True)
        return any(bool(((m == 0) & (a != 0)).any()) for a, m in pairs if a is not None and m is not None)
    return False
