"""A device that is not the CPU, pretended: memory of the CPU under the rules of an accelerator.

A tensor on it says that it is elsewhere, and no operation takes it together with one on the CPU: the slips
that a test on the CPU cannot see, and that where there is no accelerator nothing else would. Kernels,
memory, time and rounding of a true device are not pretended.

It is a backend in Python, as PyTorch has them at hand for tests (``torch.utils.backend_registration``):
tensors are wrappers, and what one of them takes part in comes to `_carried_out`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "pretended"
DEVICE = torch.device("cpu")  # once it is set up, the pretended one

# As on an accelerator, the first take tensors from two places, the others their indices from the CPU.
_BETWEEN_DEVICES = ("aten::copy_", "aten::_to_copy")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


class _Backend(_DummyBackendModule):  # type: ignore[misc]
    """What PyTorch asks of a backend beside its operations."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


class _Elsewhere(torch.Tensor):
    """A tensor on the pretended device; `there` has its numbers."""

    there: torch.Tensor

    @staticmethod
    def __new__(cls, there: torch.Tensor) -> _Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            there.size(),
            strides=there.stride(),
            storage_offset=there.storage_offset(),
            dtype=there.dtype,
            device=DEVICE,
        )
        made.there = there
        return made

    def tolist(self) -> Any:
        return self.there.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor on the pretended device has no array: copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {})


def _is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _carried_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry an operation out on the CPU, and put what it gives where it belongs."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    operation = func._schema.name
    has_elsewhere = any(isinstance(leaf, _Elsewhere) for leaf in leaves)
    if has_elsewhere and operation not in _BETWEEN_DEVICES:
        _check_one_device(operation, (args[0], *args[2:]) if operation in _INDEXED else leaves)
    here_args, here_kwargs = pytree.tree_unflatten([_here(leaf) for leaf in leaves], structure)
    if operation == "aten::_efficientzerotensor":
        return _Elsewhere(torch.zeros(*here_args, dtype=kwargs.get("dtype")))
    found = func(*here_args, **here_kwargs)
    if operation == "aten::copy_":
        return args[0]
    wanted = kwargs.get("device")
    if not (_is_pretended(wanted) if wanted is not None else has_elsewhere):
        return found
    found = pytree.tree_map_only(torch.Tensor, _Elsewhere, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if has_elsewhere else found


def _check_one_device(operation: str, together: Sequence[Any]) -> None:
    for tensor in together:
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, _Elsewhere) and tensor.dim() > 0:
            raise RuntimeError(
                f"{operation}: expected all tensors on one device, "
                f"got one on {DEVICE} and one of shape {tuple(tensor.shape)} on {tensor.device}"
            )


def _here(leaf: Any) -> Any:
    """Return what stands for it on the CPU."""
    if isinstance(leaf, _Elsewhere):
        leaf = leaf.there
    if isinstance(leaf, torch.Tensor) and leaf._is_zerotensor():  # zeros without memory, as tangents are
        return torch.zeros_like(leaf, device="cpu")
    if isinstance(leaf, torch.device) and leaf.type == NAME:
        return torch.device("cpu")
    return leaf


class _Operations(TorchDispatchMode):
    """Operations that make a tensor there from none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        elsewhere = any(isinstance(leaf, _Elsewhere) for leaf in pytree.tree_leaves((args, kwargs)))
        if elsewhere or _is_pretended(kwargs.get("device")):
            return _carried_out(func, args, kwargs)
        return func(*args, **kwargs)


class _FromData(TorchFunctionMode):
    """What makes a tensor of Python's numbers, which PyTorch carries out without asking a backend."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FROM_DATA and _is_pretended(kwargs.get("device")) and not isinstance(args[0], _Elsewhere):
            kwargs["device"] = "cpu"
            return func(*args, **kwargs).to(DEVICE)
        if func is torch.Tensor.new_tensor and isinstance(args[0], _Elsewhere):
            device = kwargs.pop("device", None) or DEVICE
            return torch.tensor(args[1], **{"dtype": args[0].dtype, **kwargs}).to(device)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], list):
            return args[0][torch.tensor(args[1])]
        return func(*args, **kwargs)


@contextmanager
def pretended() -> Iterator[torch.device]:
    """Set the device up, for good, and let this thread and those started meanwhile use it."""
    global DEVICE  # PyTorch registers it once in a process
    if DEVICE.type != NAME:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
        DEVICE = torch.device(NAME, 0)
    run = threading.Thread.run

    def run_with_device(thread: threading.Thread) -> None:
        with _Operations(), _FromData():
            run(thread)

    with _Operations(), _FromData():
        threading.Thread.run = run_with_device  # type: ignore[method-assign]
        try:
            yield DEVICE
        finally:
            threading.Thread.run = run  # type: ignore[method-assign]
