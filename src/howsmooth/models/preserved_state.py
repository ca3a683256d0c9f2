"""A context in which a model can run between two training steps without changing the training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["preserved_state"]


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Return a context manager that restores, to the last bit, the buffers of a model and the random states
    of Python, NumPy and all CUDA devices. Some modules write buffers even in evaluation mode.

    What ``measurement_mode`` changes, it restores itself.
    """
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that others use
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    dtype = torch.get_default_dtype()
    buffers = _Buffers(model)
    try:
        yield
    finally:
        buffers.restore()
        torch.set_default_dtype(dtype)
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(legacy)  # noqa: NPY002
        random.setstate(python)


class _Buffers:
    """Copies of the buffers of a model, with the modules that hold them."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}
        for _, table in self._tables:
            for buffer in table.values():
                if buffer is not None and id(buffer) not in self._copies:
                    self._copies[id(buffer)] = (buffer, buffer.detach().clone(), buffer._version)

    def restore(self) -> None:
        """Restore the buffers that have been written to or replaced since they were copied."""
        for buffer, copy, version in self._copies.values():
            # PyTorch counts in-place changes, but not those of batch norm; ``.data`` keeps this copy itself
            # from being counted.
            if buffer._version != version or not (buffer.is_meta or torch.equal(buffer, copy)):
                with torch.no_grad():
                    buffer.data.copy_(copy)
        for module, table in self._tables:
            if any(module._buffers.get(name) is not buffer for name, buffer in table.items()):
                module._buffers.update(table)
