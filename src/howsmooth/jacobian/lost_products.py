"""Whether a product with a Jacobian is zero only because numbers underflow inside the map."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["underflows"]


def underflows(y: Tensor, x: Tensor, u: Tensor) -> bool:
    """Return True if numbers become zero in the product (∂y/∂x)ᵀu although their exact values are not.

    The product is computed along the autograd graph of ``y``, which is kept. Each of its steps is linear.
    Where a step returns zeros, it is repeated with numbers multiplied by a power of two, which shows whether
    they remain zero.
    """
    found: list[bool] = []
    seen: set[Any] = set()
    left, hooks = [y.grad_fn], []
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [parent for parent, _ in node.next_functions]
            hooks.append(node.register_hook(_Watch(node, found)))
    try:
        torch.autograd.grad(y, x, u, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return bool(found)


class _Watch:
    """A hook of one step of an autograd graph, which appends to ``found`` if numbers underflow in it."""

    def __init__(self, node: Any, found: list[bool]) -> None:
        self._node = node
        self._found = found

    def __call__(self, made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
        numbers = [g for g in given if g is not None and g.numel()]
        largest = max((float(g.abs().max()) for g in numbers), default=0.0)
        if self._found or not 0.0 < largest < math.inf or all(m is None or bool(m.all()) for m in made):
            return
        exponent = math.frexp(torch.finfo(numbers[0].dtype).max)[1] * 3 // 4 - math.frexp(largest)[1]
        again: Any = given
        for part in (exponent // 2, exponent - exponent // 2):  # the whole may be no number of the dtype
            again = tuple(g if g is None else g * 2.0**part for g in again)
        with contextlib.suppress(Exception):  # some steps cannot be called alone
            again = self._node(*again)
            pairs = zip(again if isinstance(again, tuple) else (again,), made, strict=True)
            if any(bool(((m == 0) & (a != 0)).any()) for a, m in pairs if a is not None and m is not None):
                self._found.append(True)
