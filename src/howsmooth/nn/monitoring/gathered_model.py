"""Access to a model inside the wrappers of distributed training, with whole parameters instead of shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from howsmooth.plain_modules import unwrapped

__all__ = ["gathered", "is_sharded", "without_wrappers"]


def without_wrappers(model: nn.Module) -> nn.Module:
    """Return the model inside of the wrappers of :func:`unwrapped` and FullyShardedDataParallel."""
    while _is_fsdp_wrapper(inner := unwrapped(model)):
        model = inner.module  # type: ignore[assignment]
    return inner


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP (``FullyShardedDataParallel`` or ``fully_shard``) shards parameters of
    the model.
    """
    return any(_is_fsdp_wrapper(m) for m in model.modules()) or any(
        hasattr(p, "full_tensor") for p in model.parameters()
    )


@contextmanager
def gathered(trained: nn.Module, model: nn.Module) -> Iterator[bool]:
    """Return a context manager in which a single process can run a model that several processes train.

    It yields True in the process that is to run the model, and False in all others. A model in
    DistributedDataParallel or FSDP is run by the first process only. Every process must enter the context of
    an FSDP model, because its parameters are gathered from all processes.

    Parameters
    ----------
    trained
        The model as it is trained, with its wrappers.
    model
        The plain model in it, or a module of the plain model.

    """
    sharded = is_sharded(trained)
    with ExitStack() as stack:
        first = True
        if sharded or _is_data_parallel(trained):
            first = torch.distributed.get_rank() == 0
        wrapper = next((m for m in trained.modules() if _is_fsdp_wrapper(m)), None)
        if wrapper is not None:
            of_all = {"recurse": True, "writeback": False, "rank0_only": True}
            stack.enter_context(type(wrapper).summon_full_params(trained, **of_all))  # type: ignore[attr-defined]
            stack.enter_context(_without_wrappers(model))
        elif sharded:
            stack.enter_context(_full_tensors(model, keep=first))
            stack.enter_context(_without_sharding_hooks(model))
        yield first


def _is_data_parallel(model: nn.Module) -> bool:
    while isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model._orig_mod  # type: ignore[assignment]
    return isinstance(model, DistributedDataParallel)


def _is_fsdp_wrapper(module: nn.Module) -> bool:
    # The class is known by its parts, because the import of torch.distributed.fsdp takes seconds.
    return hasattr(module, "_fsdp_wrapped_module") and hasattr(type(module), "summon_full_params")


@contextmanager
def _without_wrappers(model: nn.Module) -> Iterator[None]:
    """Return a context manager that replaces FullyShardedDataParallel wrappers by the modules inside them."""
    wrapped = [
        (module._modules, name, child)
        for module in model.modules()
        for name, child in module._modules.items()
        if child is not None and _is_fsdp_wrapper(child)
    ]
    try:
        for table, name, child in wrapped:
            table[name] = without_wrappers(child)
        yield
    finally:
        for table, name, child in wrapped:
            table[name] = child


@contextmanager
def _full_tensors(model: nn.Module, *, keep: bool) -> Iterator[None]:
    """Return a context manager that gathers the parameters of a model that ``fully_shard`` has sharded.

    The whole parameters are put into the model if ``keep`` is True. Every process must take part, also a
    process that does not keep them.
    """
    sharded: list[tuple[dict[str, Any], str, Any]] = [
        (module._parameters, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None and hasattr(p, "full_tensor")
    ]
    whole: dict[int, nn.Parameter] = {}  # by id: a parameter that two modules share is gathered once
    try:
        for table, name, p in sharded:
            if id(p) not in whole:
                full = p.detach().full_tensor()
                whole[id(p)] = nn.Parameter(full, p.requires_grad) if keep else p
            table[name] = whole[id(p)]
        yield
    finally:
        for table, name, p in sharded:
            table[name] = p


@contextmanager
def _without_sharding_hooks(model: nn.Module) -> Iterator[None]:
    """Return a context manager that removes the forward hooks by which ``fully_shard`` gathers and frees
    parameters.
    """
    tables: list[dict[int, Any]] = [
        table for module in model.modules() for table in (module._forward_pre_hooks, module._forward_hooks)
    ]
    before = [dict(table) for table in tables]
    try:
        for table, hooks in zip(tables, before, strict=True):
            for key, hook in hooks.items():
                if getattr(hook, "__module__", "").startswith("torch.distributed"):
                    del table[key]
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)  # in their order
