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

#: A table of a module, or its own fields; a name in it, and the value that it has for a while.
_Entry = tuple[dict[str, Any], str, Any]


def without_wrappers(model: nn.Module) -> nn.Module:
    """Return the model inside FullyShardedDataParallel and the wrappers that :func:`unwrapped` removes."""
    while _is_fsdp_wrapper(inner := unwrapped(model)):
        model = inner.module  # type: ignore[assignment]
    return inner


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``FullyShardedDataParallel`` or ``fully_shard`` shards parameters of the model."""
    return any(map(_is_fsdp_wrapper, model.modules())) or any(map(_is_shard, model.parameters()))


@contextmanager
def gathered(trained: nn.Module, model: nn.Module) -> Iterator[bool]:
    """Return a context manager in which a single process can run a model that several processes train.

    It yields True in the process that is to run the model, and False in all others. A model in
    DistributedDataParallel or FSDP is run by the first process only. Every process must enter the context of
    an FSDP model, because its parameters are gathered from all processes. ``trained`` is the model with its
    wrappers, ``model`` the plain model in it, or a module of the plain model.
    """
    sharded = is_sharded(trained)
    outer = trained._orig_mod if hasattr(trained, "_orig_mod") else trained
    several = sharded or isinstance(outer, DistributedDataParallel)
    first = not several or torch.distributed.get_rank() == 0
    wrapper = next(filter(_is_fsdp_wrapper, trained.modules()), None)
    with ExitStack() as stack:
        if wrapper is not None:
            whole: Any = type(wrapper).summon_full_params  # type: ignore[attr-defined]
            stack.enter_context(whole(trained, recurse=True, writeback=False, rank0_only=True))
            stack.enter_context(_put(list(_inside_wrappers(model))))
        elif sharded:
            stack.enter_context(
                _put([*_whole_parameters(model, keep=first), *_without_sharding_hooks(model)])
            )
        yield first


@contextmanager
def _put(entries: list[_Entry]) -> Iterator[None]:
    """Replace values in the dictionaries of modules while the context lasts, then restore them."""
    before = [(table, name, table[name]) for table, name, _ in entries]
    try:
        for table, name, value in entries:
            table[name] = value
        yield
    finally:
        for table, name, value in before:
            table[name] = value


def _is_shard(p: nn.Parameter | None) -> bool:
    return hasattr(p, "full_tensor")


def _is_fsdp_wrapper(module: nn.Module | None) -> bool:
    # The class is known by its parts, because the import of torch.distributed.fsdp takes seconds.
    return hasattr(module, "_fsdp_wrapped_module") and hasattr(type(module), "summon_full_params")


def _inside_wrappers(model: nn.Module) -> Iterator[_Entry]:
    for module in model.modules():
        for name, child in module._modules.items():
            if child is not None and _is_fsdp_wrapper(child):
                yield module._modules, name, without_wrappers(child)


def _whole_parameters(model: nn.Module, *, keep: bool) -> Iterator[_Entry]:
    """Gather sharded parameters; yield whole ones in place of the shards only if ``keep``."""
    whole: dict[int, nn.Parameter] = {}  # by id: a parameter that two modules share is gathered once
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None or not _is_shard(p):
                continue
            if id(p) not in whole:
                full = p.detach().full_tensor()  # type: ignore[attr-defined]
                whole[id(p)] = nn.Parameter(full, p.requires_grad) if keep else p
            yield module._parameters, name, whole[id(p)]


def _without_sharding_hooks(model: nn.Module) -> Iterator[_Entry]:
    """Yield replacements of each module's hooks by the same hooks without those of ``fully_shard``."""
    for module in model.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = vars(module)[name]
            homes = {key: getattr(hook, "__module__", "") for key, hook in hooks.items()}
            others = {
                key: hooks[key] for key, home in homes.items() if not home.startswith("torch.distributed")
            }
            yield vars(module), name, type(hooks)(others)
