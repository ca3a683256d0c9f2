"""The mode in which a model is measured: without dropout, cache or gradients. All settings are restored
afterwards.

A measurement must not change the model. The settings that are changed here (evaluation mode, attention
implementation, caches, random state) are restored when the context ends, also after exceptions.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from howsmooth.models.float32_weights import device_of
from howsmooth.plain_modules import eager, fast_path, wrapped_parts

__all__ = [
    "configs", "implementation", "measurement_mode", "nested_configs", "own_attention", "quiet",
    "set_permanently",
]  # fmt: skip

_numbers = itertools.count()


@contextlib.contextmanager
def measurement_mode(model: nn.Module, keep: Collection[str] = ()) -> Iterator[None]:
    """Return a context manager in which a model runs in evaluation mode, without gradients, caches or
    autocast. At the end, all settings and the random state are restored.

    ``keep`` names settings that stay as they are: "training", "cache", "fast path" or "precision".

    Compiled code is not run, and parts of the model stand in it without the wrappers of ``torch.compile``.
    PyTorch's fast path for its own encoder layers is disabled too, because it computes their attention in one
    fused operation. Mixed precision of accelerate (``bf16=True`` in the ``Trainer``) is undone, because it
    puts autocast inside ``model.forward``.

    Gradients are disabled by ``no_grad`` and not by ``inference_mode``, whose tensors cannot be
    differentiated afterwards. The training flags are set one by one and not by ``model.eval()``, because
    modules may override that method with lasting effects, and because a user may have frozen only some
    modules.
    """
    changes: list[tuple[Any, str, Any]] = [*wrapped_parts(model)]
    device = device_of(model)
    devices = [device] if device.type == "cuda" else []
    for module in model.modules():
        if "training" not in keep:
            changes.append((module, "training", False))
        # accelerate puts a ``forward`` that switches autocast on in place of the model's own, which it keeps.
        forward = vars(module).get("forward")
        forward = forward if "precision" in keep else vars(module).get("_original_forward", forward)
        if forward is not None:
            own = getattr(forward, "_torchdynamo_orig_callable", forward)  # without torch.compile
            changes.append((module, "forward", own))
    for config in configs(model):
        if "cache" not in keep and getattr(config, "use_cache", False):
            changes.append((config, "use_cache", False))
        # transformers' grouped matrix product of experts does not support float64.
        float64 = any(p.dtype == torch.float64 for p in model.parameters())
        if hasattr(config, "_experts_implementation_internal") and float64:
            changes.append((config, "_experts_implementation_internal", "eager"))
    with (
        _changed(changes),
        eager(),
        contextlib.nullcontext() if "fast path" in keep else fast_path(False),
        torch.inference_mode(mode=False),
        torch.no_grad(),
        contextlib.nullcontext() if "precision" in keep else torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices),
    ):
        yield


def set_permanently(model: nn.Module, attention: str | None = None) -> None:
    """Put a model into evaluation mode in place, without a key/value cache and without gradients of its
    weights.

    ``attention`` is the name of the attention implementation to set; with None it stays as it is.
    """
    for module in model.modules():
        module.training = False
    for config in configs(model):
        if hasattr(config, "use_cache"):
            config.use_cache = False
        if hasattr(config, "_experts_implementation_internal"):
            # transformers' grouped matrix product of experts has no forward mode.
            config._experts_implementation_internal = "eager"
        if attention is not None:
            config._attn_implementation_internal = attention
    model.requires_grad_(requires_grad=False)


@contextlib.contextmanager
def _changed(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Return a context manager that sets attributes (object, name, value), and restores them at its end."""
    before = [(target, name, getattr(target, name)) for target, name, _ in changes]
    try:
        for target, name, value in changes:
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in before:
            setattr(target, name, value)


@contextlib.contextmanager
def own_attention(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Return a context manager in which a transformers model computes its attention with ``function``.

    The mask builder of the eager implementation is registered with it, so that ``function`` gets the complete
    mask; without a mask builder, transformers passes None and the mask is lost without a warning. Each
    context registers a new name, so that captures may run in parallel.
    """
    name = f"howsmooth_{next(_numbers)}"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, eager_mask)
    try:
        with _changed([(config, "_attn_implementation_internal", name) for config in configs(model)]):
            yield
    finally:
        # The interfaces have a public method to register a name, but none to remove it.
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def implementation(model: nn.Module) -> str:
    """Return the name of a transformers model's attention implementation, such as "sdpa". Return "" for
    others.
    """
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def configs(model: nn.Module) -> list[Any]:
    """Return the transformers configurations of all modules of the model, each configuration once."""
    own = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
    every = {id(part): part for config in own.values() for part in nested_configs(config)}
    return [config for config in every.values() if hasattr(config, "_attn_implementation_internal")]


def nested_configs(config: Any) -> list[Any]:
    """Return a configuration and, recursively, all configurations inside it."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for one in inner if one is not None for part in nested_configs(one))]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context manager that silences warnings, transformers' progress bars and the Hub client."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    try:
        transformers_logging.set_verbosity(transformers_logging.CRITICAL)
        transformers_logging.disable_progress_bar()
        hub.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        hub.setLevel(hub_level)
