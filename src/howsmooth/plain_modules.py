"""Run PyTorch modules by their own Python code, without wrappers, compiled code and fused kernels."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = ["eager", "fast_path", "running_module", "unwrapped", "wrapped_parts"]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers: torch.compile, DataParallel, DistributedDataParallel, and PeftModel.

    A pass through the wrappers would wait for other processes, or compile the model again. A PeftModel that
    puts prompts before the tokens is no wrapper.
    """
    inner: Any = None
    if isinstance(module, DataParallel | DistributedDataParallel):
        inner = module.module
    elif hasattr(module, "_orig_mod"):
        inner = module._orig_mod
    elif hasattr(module, "get_base_model") and hasattr(module, "peft_config"):
        base: Any = module
        # Adapters are modules inside of the model. Without any, this is the model that gets the prompts.
        inner = None if base.get_base_model() is base.base_model else base.get_base_model()
    return unwrapped(inner) if isinstance(inner, nn.Module) else module


def wrapped_parts(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return for each wrapped part of a model its parent module, its name there, and the module inside the
    wrapper. A wrapper with hooks of its own does more than the module inside, and is left out.
    """
    parts = ((parent, *item) for parent in model.modules() for item in parent._modules.items())
    return [
        (parent, name, unwrapped(part))
        for parent, name, part in parts
        if part is not None and unwrapped(part) is not part
        if not (part._forward_hooks or part._forward_pre_hooks)
    ]


def eager() -> AbstractContextManager[Any]:
    """Return a context manager in which compiled modules and functions run their Python code."""
    # Without a compiled module, the compiler need not be imported, which takes seconds.
    known = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if known else nullcontext()


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    """Return a context manager that allows or forbids PyTorch's fast path for whole encoder layers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def running_module(modules: Container[nn.Module]) -> nn.Module | None:
    """Return the innermost of the modules whose code is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and own in modules:
            return own
        frame = frame.f_back
    return None
