"""Conversion of a half-precision model to float32, one layer at a time, so that it fits into memory.

Half precision carries no interval, so numbers are computed in float32 from the stored weights, which float32
holds exactly. A model that fits in memory only in half precision never stands there in float32 as a whole:
the weights of each layer are widened when its call begins, and the stored tensors are put back when it ends.
The results are those of ``model.float()``. Weights that accelerate keeps on a disk or on another device (a
model with a ``device_map``) are loaded for the same time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from howsmooth.watching import Call, watched

__all__ = [
    "HALF", "Place", "computing_dtype", "device_of", "fingerprint", "float32_layers", "has_weights",
    "places_of", "stored_dtype", "substituted", "weights_in_memory",
]  # fmt: skip

HALF = frozenset({torch.bfloat16, torch.float16})
"""The dtypes in which weights may be stored and nothing is computed."""

#: A tensor of a module: the table of parameters or of buffers that holds it, its name there, and the tensor.
Place = tuple[dict[str, Any], str, Tensor]


def stored_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which the weights of a module are stored. If there are several, return the first
    half precision among them or, if none is, the dtype of the first weight.
    """
    found = [p.dtype for p in module.parameters() if p.is_floating_point()]
    return next((dtype for dtype in found if dtype in HALF), found[0] if found else torch.float32)


def computing_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which a module is run: float32 for half-precision weights, else their dtype."""
    stored = stored_dtype(module)
    return torch.float32 if stored in HALF else stored


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model expects its inputs. It is the device of the first weight, or the one
    to which accelerate loads the weights for each call.
    """
    first = next((t for t in (*model.parameters(), *model.buffers())), None)
    if first is None or not first.is_meta:
        return torch.device("cpu") if first is None else first.device
    modules: Iterator[Any] = filter(_offloaded, model.modules())
    return torch.device(next((module._hf_hook.execution_device for module in modules), "meta"))


def has_weights(model: nn.Module) -> bool:
    """Return True if every weight of a model is in memory, or is loaded when its module runs."""
    missing = (m for m in model.modules() if any(p.is_meta for p in m.parameters(recurse=False)))
    return all(map(_offloaded, missing))


def fingerprint(
    model: nn.Module, *, settings: bool = True, without: Collection[str] = (), more: str = ""
) -> str:
    """Return a SHA-256 hash of the settings and the weights of a model, and of the text ``more``. Weights
    named in ``without`` are left out. If ``settings`` is False, only the transformers configuration and the
    weights are hashed with ``more``.

    Numbers that float32 holds exactly are hashed in float32, so that a model loaded in a wider dtype than its
    file has the same hash. Weights that accelerate keeps elsewhere are loaded one module at a time.
    """
    digest = hashlib.sha256()
    for part in _settings(model) if settings else [_written(model.config)]:
        digest.update(part.encode())
    modules = dict(model.named_modules())
    for key, tensor in sorted(model.state_dict().items()):
        if key in without:
            continue
        path, _, name = key.rpartition(".")
        with _loaded(modules[path]) if tensor.is_meta else nullcontext():
            stored = getattr(modules[path], name) if tensor.is_meta else tensor
            if stored.is_floating_point() and torch.equal(stored.float().to(stored.dtype), stored):
                stored = stored.float()
            digest.update(f"{key} {stored.dtype} {tuple(stored.shape)}".encode())
            digest.update(stored.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    digest.update(more.encode())
    return digest.hexdigest()


def _settings(model: nn.Module) -> Iterator[str]:
    """Yield what weights do not determine: classes, and attributes such as numbers or configurations."""
    configurations = set[int]()
    for path, module in model.named_modules():
        yield f"{path} {type(module).__module__}.{type(module).__qualname__}"
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or name in ("training", "name_or_path"):
                continue
            if name in ("forward", "to", "cuda") and hasattr(module, "_hf_hook"):
                continue  # what accelerate sets to load the weights of a module for each call
            parts = value if isinstance(value, tuple) else (value,)
            if all(isinstance(part, int | float | str) or part is None for part in parts):
                yield f"{name} {value!r}"
            elif callable(value) and hasattr(value, "__qualname__"):
                yield f"{name} {value.__module__}.{value.__qualname__}"
            elif hasattr(value, "to_diff_dict") and id(value) not in configurations:
                configurations.add(id(value))  # many modules have the same
                yield _written(value)


def _written(config: Any) -> str:
    """Return a configuration as text, without the entries that depend on how the model was loaded."""
    local = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")

    def kept(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: kept(part) for name, part in value.items() if name not in local}

    return json.dumps(kept(config.to_diff_dict()), sort_keys=True, default=str)


@contextmanager
def weights_in_memory(*modules: nn.Module) -> Iterator[None]:
    """Load the weights of some modules, and convert half precision to float32."""
    every = {id(part): part for module in modules for part in module.modules()}.values()
    with ExitStack() as stack:
        for part in filter(_offloaded, every):
            stack.enter_context(_loaded(part))
        # Loading replaces the parameters, so they are listed only after it.
        stack.enter_context(_widened(places_of(every)))
        yield


def _offloaded(module: nn.Module) -> bool:
    """Return True if a hook of accelerate loads the weights of a module for each call."""
    hook: Any = getattr(module, "_hf_hook", None)
    return any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,)))


@contextmanager
def _loaded(module: Any) -> Iterator[None]:
    """Keep the weights of a module in memory that accelerate would otherwise load for each call."""
    module._hf_hook.pre_forward(module)
    try:
        with _unhooked(module):
            yield
    finally:
        module._hf_hook.post_forward(module, None)


@contextmanager
def _unhooked(module: Any) -> Iterator[None]:
    """Disable the hook with which accelerate loads the weights of a module for each call."""
    hooked = module.forward
    module.forward = module._old_forward
    try:
        yield
    finally:
        module.forward = hooked


@contextmanager
def _widened(places: Iterable[Place]) -> Iterator[None]:
    """Replace half-precision parameters and buffers by float32 copies.

    Each module is given another tensor, and the stored tensor stays as it is: a change of its dtype, even for
    a moment, would make autograd forget the hooks by which data-parallel training reduces its gradient.
    """
    stored = [place for place in places if place[2].dtype in HALF]
    copies: dict[int, Tensor] = {}  # by id: a weight that two modules share is copied once
    for _, _, t in stored:
        if id(t) not in copies:
            copy = t.detach().float()
            copies[id(t)] = nn.Parameter(copy, False) if isinstance(t, nn.Parameter) else copy
    with substituted([(table, name, copies[id(t)]) for table, name, t in stored]):
        yield


@contextmanager
def substituted(places: Sequence[Place]) -> Iterator[None]:
    """Let modules have other tensors: each place is a table of a module, a name in it, and the tensor."""
    before = [(table, name, table[name]) for table, name, _ in places]
    try:
        for table, name, t in places:
            table[name] = t
        yield
    finally:
        for table, name, t in before:
            table[name] = t


def places_of(modules: Iterable[nn.Module]) -> Iterator[Place]:
    """Yield the parameters and buffers of some modules, without those of their children, as they are."""
    for module in modules:
        for table in (module._parameters, module._buffers):
            yield from ((table, name, t) for name, t in list(table.items()) if t is not None)


@contextmanager
def float32_layers(model: nn.Module) -> Iterator[None]:
    """Let each layer of a half-precision model run in float32. Leave any other model unchanged.

    The weights of the members of module lists, and of embedding tables, linear maps and attention outside of
    them, are widened during their calls. The few others are widened for the whole context, because the code
    around them may read their dtype, as vision models do to convert images.
    """
    if stored_dtype(model) not in HALF:
        yield
        return
    running: dict[int, list[ExitStack]] = {}

    def starts(call: Call) -> None:
        stack = ExitStack()
        running.setdefault(id(call.module), []).append(stack)
        stack.enter_context(weights_in_memory(call.module))
        given = call.args, call.kwargs
        call.args, call.kwargs = tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF else t, given)

    def ends(call: Call) -> None:
        running[id(call.module)].pop().close()

    layers = list(_layers(model))
    of_layers = {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    others = [place for place in places_of(model.modules()) if id(place[2]) not in of_layers]
    with _widened(others), ExitStack() as hooks:
        for part in filter(_offloaded, model.modules()):
            hooks.enter_context(_unhooked(part))
        try:
            with watched({str(i): layer for i, layer in enumerate(layers)}, starts, ends):
                yield
        finally:  # the weights go back also after a layer that raises an exception
            for stack in chain.from_iterable(running.values()):
                stack.close()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model that are converted or loaded as a whole. These are the members of module
    lists, or of the innermost list if lists are nested. Outside of lists, these are embeddings, linear maps,
    attention in the layout of torch.nn, and modules that accelerate loads.
    """
    if _in_torch_layout(module):
        return
    lists = nn.ModuleList | nn.ModuleDict
    for child in module.children():
        listed = isinstance(module, lists) and not isinstance(child, lists)
        whole = listed or isinstance(child, nn.Embedding | nn.Linear)
        if whole or _in_torch_layout(child) or _offloaded(child):
            yield child
        else:
            yield from _layers(child)


def _in_torch_layout(module: nn.Module) -> bool:
    """Return True for attention like nn.MultiheadAttention, which never calls its output projection."""
    return hasattr(module, "in_proj_weight")
