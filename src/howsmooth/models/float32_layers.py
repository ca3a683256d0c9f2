"""Run a model whose weights are stored in half precision in float32, one layer at a time.

Half precision carries no interval, so numbers are computed in float32 from the stored weights, which float32
holds exactly. A model that fits in memory only in half precision never stands there in float32 as a whole:
the weights of each layer are widened when its call begins, and the stored tensors are put back when it ends.
The results are those of ``model.float()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

__all__ = ["HALF", "computing_dtype", "float32_layers", "in_float32", "stored_dtype"]

HALF = frozenset({torch.bfloat16, torch.float16})
"""The dtypes in which weights may be stored and nothing is computed."""


def stored_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which a module's weights are stored.

    If weights differ in dtype, it is a half precision if any weight has one, else the dtype of the first.
    """
    found = [p.dtype for p in module.parameters() if p.is_floating_point()]
    return next((dtype for dtype in found if dtype in HALF), found[0] if found else torch.float32)


def computing_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which a module is run: float32 if its weights are in half precision.

    Otherwise it is the dtype of the weights.
    """
    stored = stored_dtype(module)
    return torch.float32 if stored in HALF else stored


@contextmanager
def in_float32(*modules: nn.Module) -> Iterator[None]:
    """Hold the half-precision weights and buffers of some modules in float32 within the context."""
    with _widened(chain.from_iterable((*m.parameters(), *m.buffers()) for m in modules)):
        yield


@contextmanager
def _widened(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Convert half-precision tensors to float32 within the context, and restore them at its end."""
    stored = [(t, t.data) for t in {id(t): t for t in tensors}.values() if t.dtype in HALF]
    try:
        for t, data in stored:
            t.data = data.float()
        yield
    finally:
        for t, data in stored:
            t.data = data


@contextmanager
def float32_layers(model: nn.Module) -> Iterator[None]:
    """Within the context, run each layer of a half-precision model in float32; leave other models alone.

    The weights of the members of module lists, of embedding tables and of linear maps outside of them are
    widened during their calls. The few others are widened for the whole context, because the code around
    them may read their dtype, as vision models do to convert images.
    """
    if stored_dtype(model) not in HALF:
        yield
        return
    running: dict[int, list[ExitStack]] = {}

    def starts(module: nn.Module, args: Any, kwargs: Any) -> Any:
        stack = ExitStack()
        running.setdefault(id(module), []).append(stack)
        stack.enter_context(in_float32(module))
        return tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF else t, (args, kwargs))

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        running[id(module)].pop().close()

    layers = list(_layers(model))
    of_layers = {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    others = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in of_layers]
    with _widened(others), ExitStack() as hooks:
        try:
            for layer in layers:
                before = layer.register_forward_pre_hook(starts, prepend=True, with_kwargs=True)
                hooks.enter_context(before)
                # The weights go back also after a layer that raises an exception.
                hooks.enter_context(layer.register_forward_hook(ends, always_call=True))
            yield
        finally:
            for stack in chain.from_iterable(running.values()):
                stack.close()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model: entries of module lists, and any other embeddings and linear maps."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or isinstance(child, nn.Embedding | nn.Linear):
            yield child
        else:
            yield from _layers(child)
