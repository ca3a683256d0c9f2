"""What is written down of a model's layers: modules called, their tokens, and their softmax cores."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from howsmooth.errors import CaptureError
from howsmooth.models.tracing.softmax_tracer import CoreCall

__all__ = [
    "AttentionLayer",
    "LayerRecord",
    "ModuleCall",
    "bound_arguments",
    "first_tokens",
    "is_linear",
    "is_norm",
    "output_of",
]


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module. Tensors are kept (as copies) of those only whose values tell something."""

    name: str
    module: nn.Module
    inputs: Tensor | None = None
    output: Tensor | None = None
    alone: bool = False  # whether the inputs are its only argument, as many numbers as the heads


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """Where a model computes attention: the module that does (owner), and the layer around that (root)."""

    index: int  # in the order of the model's pass
    name: str
    owner: nn.Module
    root_name: str
    root: nn.Module
    heads: int
    causal: bool

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name or 'the model itself'}, {type(self.owner).__name__})"


@dataclass(eq=False)
class LayerRecord:
    """What happened in one layer, run by itself on one sequence, in order."""

    layer: AttentionLayer
    x: Tensor  # (1, n, d): the tokens that the owner works on
    cores: list[CoreCall] = field(default_factory=list)
    before: list[ModuleCall] = field(default_factory=list)  # from the layer's start to the owner's
    inside: list[ModuleCall] = field(default_factory=list)  # from the owner's start to its last core
    after: list[ModuleCall] = field(default_factory=list)  # from there to the layer's end
    last_norm: ModuleCall | None = None  # the norm that ran last before the owner, anywhere in the model
    output: Tensor | None = None  # of the layer
    arguments: dict[str, Any] = field(default_factory=dict)  # of the owner, by name


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear map with a weight matrix, torch's or transformers' transposed one."""
    return isinstance(module, nn.Linear | Conv1D)


def is_norm(module: nn.Module) -> bool:
    """Whether the module looks like a norm over the last axis; what it computes is verified by value."""
    weight = getattr(module, "weight", None)
    # What has modules of its own, as attention with a norm in its name, is no norm.
    alone = "norm" in type(module).__name__.lower() and next(module.children(), None) is None
    named = isinstance(module, nn.LayerNorm | nn.RMSNorm) or alone
    return named and (weight is None or weight.ndim == 1)


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a module's call by parameter name, in the order of its signature."""
    try:
        bound = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError:
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    return {**bound, **bound.pop("kwargs", {})} if isinstance(bound.get("kwargs"), dict) else bound


def first_tokens(arguments: dict[str, Any]) -> Tensor | None:
    """Return the first floating-point tensor among a module's arguments: the tokens it works on."""
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


def output_of(core: CoreCall) -> Tensor:
    """Return the output of a core that was computed."""
    if core.output is None:
        raise CaptureError(f"A softmax was not computed: {core.obstacle or 'it was only looked at'}.")
    return core.output
