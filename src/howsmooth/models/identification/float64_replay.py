"""Float64 replays that stay in float64.

Model code converts to float32 of its own accord, in norms, softmaxes and rotary positions. In a float64
model that rounds in the middle of the computation: finite differences and Jacobians then disagree.
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
# A view under another dtype reads the same bits anew: it is no conversion.
_REINTERPRETING = {Tensor.view}


class WithoutDowncast(TorchFunctionMode):
    """Let every conversion to a narrower floating type go to float64 instead, while the mode is on.

    For modules whose parameters are float64. It sees ``float()``, ``half()``, ``bfloat16()``, ``type()``,
    ``type_as()``, ``to()`` in all its forms, and dtypes among the arguments of any function of torch
    (``softmax(..., dtype=torch.float32)``, ``torch.arange(..., dtype=torch.float32)``). Autocast needs
    nothing: it leaves float64 tensors alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch with wider dtypes."""
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
    """Arguments of ``to`` where the dtype of another tensor is asked for, with that dtype widened."""
    given = args[1] if len(args) > 1 else kwargs.get("tensor", kwargs.get("other"))
    if not isinstance(given, Tensor):
        return args, kwargs
    rest = {name: value for name, value in kwargs.items() if name not in ("tensor", "other")}
    return (args[0], given.device, _WIDENED.get(given.dtype, given.dtype), *args[2:]), rest
