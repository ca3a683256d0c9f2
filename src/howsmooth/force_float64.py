"""A torch function mode that makes the code of a float64 module compute in float64 throughout, even where it
casts to a narrower dtype.

Model code converts to float32 in norms, softmaxes and rotary positions. In a float64 model this rounds in the
middle of the computation, so that finite differences and Jacobians disagree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutDowncast"]

_WIDENED = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}
_METHODS = {Tensor.float: Tensor.double, Tensor.half: Tensor.double, Tensor.bfloat16: Tensor.double}
_NAMES = {"Float", "Half", "BFloat16"}
# A view under another dtype reinterprets the bits and converts nothing.
_REINTERPRETING = {Tensor.view}


class WithoutDowncast(TorchFunctionMode):
    """A torch function mode that turns every conversion to a narrower floating dtype into a conversion to
    float64.

    The mode is for modules whose parameters are float64. It changes ``float()``, ``half()``, ``bfloat16()``,
    ``type()``, ``type_as()``, all forms of ``to()``, and dtypes among the arguments of any torch function
    (``softmax(..., dtype=torch.float32)``, ``torch.arange(..., dtype=torch.float32)``). Autocast needs no
    rule, since it does not change float64 tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METHODS:
            return _METHODS[func](*args, **kwargs)
        if func is Tensor.to or func is Tensor.type_as:
            args, kwargs = _like_wide_tensors(args, kwargs)
            if func is Tensor.type_as:
                func = Tensor.to
        if func not in _REINTERPRETING:
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDENED.get(value, value)
    if isinstance(value, str) and value.startswith("torch.") and value.endswith("Tensor"):
        kind = value.rsplit(".", 1)[1].removesuffix("Tensor")
        return value.replace(kind, "Double") if kind in _NAMES else value
    return value


def _like_wide_tensors(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """In ``tensor.to(other)`` name the device and dtype of ``other``, or float64 if that is narrower."""
    given = args[1] if len(args) > 1 else kwargs.get("tensor", kwargs.get("other"))
    if not isinstance(given, Tensor):
        return args, kwargs
    rest = {name: value for name, value in kwargs.items() if name not in ("tensor", "other")}
    return (args[0], given.device, _WIDENED.get(given.dtype, given.dtype), *args[2:]), rest
