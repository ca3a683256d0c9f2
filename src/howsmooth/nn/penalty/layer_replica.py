"""Copies of a layer that share its parameters.

A penalty runs the copy, so that the layer itself does not change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from howsmooth.nn.checks import check
from howsmooth.plain_modules import unwrapped

__all__ = ["drawing_nothing", "replica", "single"]

_HOOKS = [key for key in vars(nn.Module()) if "_hooks" in key]


def replica(layer: nn.Module, name: str) -> nn.Module:
    """Return a copy of the layer that shares its parameters but no other state with the original.

    The copy is in evaluation mode, so it has no dropout. It has its own buffers and attributes. It has none
    of the layer's hooks, except hooks that compute a weight (``torch.nn.utils.weight_norm``). Half-precision
    parameters are converted to float32. ArgumentError is raised if the layer is scripted, or its ``forward``
    was replaced on the instance.
    """
    copies: dict[nn.Module, nn.Module] = {}
    buffers: dict[int, Tensor] = {}
    modules = {path: module for path, module in layer.named_modules() if unwrapped(module) is module}
    for path, module in modules.items():
        own = vars(module)
        scripted = isinstance(module, torch.jit.ScriptModule)
        what = "scripted" if scripted else "whose forward was replaced on the object"
        got = f"{'.'.join(filter(None, (name, path)))} ({type(module).__name__}), {what}"
        remedy = "Attach the penalty to the module before it is wrapped."
        check(not scripted and "forward" not in own, "layers", "layers in plain Python", got, remedy)
        # copy.deepcopy would copy the parameters, too, and fails for attributes with a graph.
        copy = copies[module] = module.__new__(type(module))
        new: dict[str, Any] = {key: OrderedDict() for key in _HOOKS}
        new["_forward_pre_hooks"].update(
            (key, hook)
            for key, hook in module._forward_pre_hooks.items()
            if isinstance(hook, WeightNorm | SpectralNorm)
        )
        new["_parameters"] = {key: p if p is None else single(p) for key, p in module._parameters.items()}
        new["_buffers"] = {
            key: b if b is None else buffers.setdefault(id(b), single(b.detach().clone()))
            for key, b in module._buffers.items()
        }
        vars(copy).update(own | new | {"_compiled_call_impl": None, "training": False})
    for module in modules.values():
        # The copies refer to each other as the originals do, shared modules included.
        children = module._modules.items()
        vars(copies[module])["_modules"] = {
            key: c if c is None else copies[unwrapped(c)] for key, c in children
        }
    return copies[unwrapped(layer)]


@contextmanager
def drawing_nothing(name: str, device: torch.device) -> Iterator[None]:
    """Return a context manager that raises ArgumentError if code inside it draws random numbers.

    The random state is restored at the end.
    """
    devices = [device] if device.type == "cuda" else []

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in devices)]

    with torch.random.fork_rng(devices):
        before = states()
        yield
        after = states()
    expected = "layers that draw no random numbers in evaluation mode"
    remedy = "Leave the layer out: dropout that ignores evaluation mode has no singular value."
    same = all(map(torch.equal, before, after))
    check(same, "layers", expected, f"{name}, which draws random numbers", remedy)


def single(t: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
