"""A context in which a model can run between two training steps without changing the training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

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
    tables = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    own = {id(t): t for _, table in tables for t in table.values() if t is not None}
    copies = [(t, t.detach().clone(), t._version) for t in own.values()]
    try:
        yield
    finally:
        for buffer, copy, written in copies:
            # PyTorch counts in-place changes, but not those of batch norm; ``.data`` keeps this copy itself
            # from being counted.
            if buffer._version != written or not (buffer.is_meta or torch.equal(buffer, copy)):
                with torch.no_grad():
                    buffer.data.copy_(copy)
        for module, table in tables:
            if any(module._buffers.get(name) is not buffer for name, buffer in table.items()):
                module._buffers.update(table)
        torch.set_default_dtype(dtype)
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(legacy)  # noqa: NPY002
        random.setstate(python)
