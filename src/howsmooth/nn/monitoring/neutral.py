"""Looking at a model in training so that training does not notice: what is touched is put back bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from howsmooth.models.measurement_mode import measurement_mode

__all__ = ["unmarked", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of several devices and of ``torch.compile``: it has the weights.

    A pass through the wrappers would wait for the other processes, or compile anew.
    """
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


@contextmanager
def unmarked(model: nn.Module) -> Iterator[None]:
    """Within the context the model may run; afterwards training goes on as if it had not.

    ``measurement_mode`` sets evaluation mode module by module, disables gradients, and restores PyTorch's
    random state on the CPU and on the model's device. This context also restores the random states of Python,
    NumPy and every other CUDA device, and buffers, which some modules write to even in evaluation mode.
    """
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that others use
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    dtype = torch.get_default_dtype()
    buffers = _Buffers(model)
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if _is_compiled(m)]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        with measurement_mode(model):
            yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        buffers.restore()
        torch.set_default_dtype(dtype)
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(legacy)  # noqa: NPY002
        random.setstate(python)


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


class _Buffers:
    """The buffers of a model, and which modules they hang in."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}
        for _, table in self._tables:
            for buffer in table.values():
                if buffer is not None and id(buffer) not in self._copies:
                    self._copies[id(buffer)] = (buffer, buffer.detach().clone(), buffer._version)

    def restore(self) -> None:
        """Put back what was written to, and what was replaced."""
        for buffer, copy, version in self._copies.values():
            if buffer._version != version:
                with torch.no_grad():
                    buffer.data.copy_(copy)
        for module, table in self._tables:
            if any(module._buffers.get(name) is not buffer for name, buffer in table.items()):
                module._buffers.update(table)
