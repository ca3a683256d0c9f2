"""Copies of a layer that share its parameters.

A penalty runs the copy, so that the layer itself does not change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from howsmooth.errors import ArgumentError
from howsmooth.plain_modules import unwrapped

__all__ = ["drawing_nothing", "replica"]

_HALF = (torch.float16, torch.bfloat16)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def replica(layer: nn.Module, name: str) -> nn.Module:
    """Return a copy of the layer that shares its parameters but no other state with the original.

    The copy is in evaluation mode, so it has no dropout. It has its own buffers and attributes. It has none
    of the layer's hooks, except hooks that compute a weight (``torch.nn.utils.weight_norm``). Half-precision
    parameters are converted to float32.

    Raises
    ------
    ArgumentError
        If the layer is scripted, or its ``forward`` was replaced on the instance.

    """
    copies: dict[int, nn.Module] = {}
    buffers: dict[int, Tensor] = {}
    for path, module in layer.named_modules():
        if unwrapped(module) is not module:
            continue  # the module inside takes its place below
        obstacle = _obstacle(module)
        if obstacle:
            where = f"{name}.{path}" if path else name
            raise ArgumentError(
                "layers",
                expected="layers in plain Python",
                got=f"{where} ({type(module).__name__}), {obstacle}",
                remedy="Attach the penalty to the module before it is wrapped.",
            )
        # The modules are copied by hand, because copy.deepcopy would copy the parameters, too.
        copy = module.__new__(type(module))
        copy.__dict__ = module.__dict__.copy()
        copy.__dict__["_parameters"] = {
            key: None if p is None else _single(p) for key, p in module._parameters.items()
        }
        copy.__dict__["_buffers"] = {
            key: None if b is None else buffers.setdefault(id(b), _single(b.detach().clone()))
            for key, b in module._buffers.items()
        }
        for key in _HOOKS:
            copy.__dict__[key] = OrderedDict()
        copy.__dict__["_forward_pre_hooks"] = OrderedDict(
            (key, hook)
            for key, hook in module._forward_pre_hooks.items()
            if isinstance(hook, WeightNorm | SpectralNorm)
        )
        copy.__dict__["_compiled_call_impl"] = None
        copy.training = False
        copies[id(module)] = copy
    for module in layer.modules():
        if (within := unwrapped(module)) is not module:
            copies[id(module)] = copies[id(within)]
    for module in layer.modules():
        if unwrapped(module) is not module:
            continue
        # The copies refer to each other as the originals do, shared modules included.
        children = {key: None if c is None else copies[id(c)] for key, c in module._modules.items()}
        copies[id(module)].__dict__["_modules"] = children
    return copies[id(layer)]


@contextmanager
def drawing_nothing(name: str, device: torch.device) -> Iterator[None]:
    """Return a context manager that raises ArgumentError if code inside it draws random numbers.

    The random state is restored at the end.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        before = _random_state(devices)
        yield
        after = _random_state(devices)
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise ArgumentError(
            "layers",
            expected="layers that draw no random numbers in evaluation mode",
            got=f"{name}, which draws random numbers",
            remedy="Leave the layer out: dropout that ignores evaluation mode has no singular value.",
        )


def _random_state(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _obstacle(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted"
    if "forward" in module.__dict__:
        return "whose forward was replaced on the object"
    return ""


def _single(t: Tensor) -> Tensor:
    return t.float() if t.dtype in _HALF else t
