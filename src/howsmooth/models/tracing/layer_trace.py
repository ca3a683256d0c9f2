"""The trace of a run of one layer: its module calls, their tokens, and its softmax attentions."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from howsmooth.errors import CaptureError
from howsmooth.models.tracing.softmax_tracer import SoftmaxCall

__all__ = [
    "AttentionLayer",
    "LayerTrace",
    "ModuleCall",
    "bound_arguments",
    "first_tokens",
    "is_linear",
    "is_norm",
    "output_of",
]


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module, with copies of its input and output if they are needed later."""

    name: str
    module: nn.Module
    inputs: Tensor | None = None
    output: Tensor | None = None
    alone: bool = False  # whether its only argument is a tensor with as many entries as the heads


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """An attention module of a model, with the whole Transformer layer that contains it (``root``)."""

    index: int  # in the order of the forward pass
    name: str  # path of the attention module
    module: nn.Module
    root_name: str  # path of the layer
    root: nn.Module
    heads: int
    causal: bool

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name or 'the model itself'}, {type(self.module).__name__})"


@dataclass(eq=False)
class LayerTrace:
    """The trace of a run of one layer on one sequence: its module calls and softmaxes, in order."""

    layer: AttentionLayer
    x: Tensor  # (1, n, d): the tokens that the attention module is given
    softmaxes: list[SoftmaxCall] = field(default_factory=list)
    before: list[ModuleCall] = field(
        default_factory=list
    )  # calls that ended before the attention module started
    inside: list[ModuleCall] = field(
        default_factory=list
    )  # calls that ended between its start and its last softmax
    after: list[ModuleCall] = field(default_factory=list)  # calls that ended after its last softmax
    last_norm: ModuleCall | None = None  # the last norm before the attention module, anywhere in the model
    output: Tensor | None = None  # of the layer
    arguments: dict[str, Any] = field(default_factory=dict)  # of the attention module, by name


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is ``nn.Linear``, or the ``Conv1D`` of transformers, a linear map with
    transposed weight.
    """
    return isinstance(module, nn.Linear | Conv1D)


def is_norm(module: nn.Module) -> bool:
    """Return whether the module seems to be a norm layer over the last axis, judged by its class and its
    weight.
    """
    weight = getattr(module, "weight", None)
    # A module with children is no norm: an attention module may have "norm" in its name.
    alone = "norm" in type(module).__name__.lower() and next(module.children(), None) is None
    named = isinstance(module, nn.LayerNorm | nn.RMSNorm) or alone
    return named and (weight is None or weight.ndim == 1)


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module call by parameter name, in the order of the signature."""
    try:
        bound = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError:
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    return {**bound, **bound.pop("kwargs", {})} if isinstance(bound.get("kwargs"), dict) else bound


def first_tokens(arguments: dict[str, Any]) -> Tensor | None:
    """Return the first floating-point tensor among the arguments of a module, which is assumed to be the
    tokens. Return None if there is no such tensor.
    """
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


def output_of(softmax: SoftmaxCall) -> Tensor:
    """Return the output of a softmax attention; raise CaptureError if it was not computed."""
    if softmax.output is None:
        raise CaptureError(f"A softmax was not computed: {softmax.obstacle or 'it was only looked at'}.")
    return softmax.output
