"""A context in which a model can run between two training steps without any effect on the training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from howsmooth.models.measurement_mode import measurement_mode
from howsmooth.nn.monitoring.gathered_model import put

__all__ = ["preserved_state"]


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Return a context manager that restores the state of the model and all random states at its end, to the
    last bit.

    ``measurement_mode`` sets evaluation mode in each module, disables gradients, and restores PyTorch's
    random states on the CPU and on the model's device. This context manager also restores the random states
    of Python, NumPy and all other CUDA devices, and the buffers, because some modules write to buffers even
    in evaluation mode.
    """
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that others use
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    dtype = torch.get_default_dtype()
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = {id(b): b for _, table in tables for b in table.values() if b is not None}
    copies = [(b, b.detach().clone(), b._version) for b in buffers.values()]
    compiled = [vars(m) for m in model.modules() if getattr(m, "_compiled_call_impl", None) is not None]
    try:
        # Without its compiled call, a module runs its plain forward and compiles nothing.
        with put([(fields, "_compiled_call_impl", None) for fields in compiled]), measurement_mode(model):
            yield
    finally:
        for buffer, copy, version in copies:
            # PyTorch counts in-place changes; ``.data`` keeps this copy itself from being counted.
            if buffer._version != version:
                with torch.no_grad():
                    buffer.data.copy_(copy)
        for table, before in tables:
            if any(table.get(name) is not buffer for name, buffer in before.items()):
                table.update(before)
        torch.set_default_dtype(dtype)
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(legacy)  # noqa: NPY002
        random.setstate(python)
