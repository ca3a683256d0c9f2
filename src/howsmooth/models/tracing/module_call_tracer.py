"""A tracer that runs a model once and records the module calls that enclose each of its softmax attentions.

The forward pass runs the user's own attention implementation and replaces nothing. Arguments and outputs are
kept only for the layers that were asked for.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from howsmooth.errors import ArgumentError, HowsmoothError, reason
from howsmooth.models.float32_weights import float32_layers, stored_dtype
from howsmooth.models.tracing.attention_hooks import intercept_softmaxes
from howsmooth.models.tracing.layer_trace import (
    AttentionLayer,
    ModuleCall,
    bound_arguments,
    first_tokens,
    is_norm,
    output_of,
)
from howsmooth.models.tracing.mask_and_bias import hides_later_keys
from howsmooth.models.tracing.softmax_tracer import SoftmaxCall, SoftmaxTracer

__all__ = [
    "StopForward",
    "TracedCall",
    "TracedLayer",
    "attention_layers",
    "own_copies",
    "run",
    "run_with_attention",
    "trace_forward_pass",
]


@dataclass(eq=False)
class TracedCall:
    """A module call during a forward pass, with its arguments."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    last_norm: ModuleCall | None = None  # the last norm that ended before this call began
    versions: dict[int, int] = field(default_factory=dict)  # PyTorch's version counters, by id of the tensor
    kept: bool = False  # whether keep() was called
    output: Any = None

    def keep(self) -> None:
        """Copy the floating-point arguments of the module call, because the model may change them in place
        later.

        Only the first one, and those with at most three axes, are copied. Version counters of all arguments
        are stored.
        """
        if self.kept:
            return
        self.kept = True
        x = first_tokens(self.arguments())
        copies: dict[int, Tensor] = {}  # by id: a tensor that is passed twice is copied once

        def copied(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            if not floating or not (value is x or value.ndim <= 3):
                return value
            if id(value) not in copies:
                copies[id(value)] = value.clone()
            return copies[id(value)]

        self.args = tuple(map(copied, self.args))
        self.kwargs = {name: copied(value) for name, value in self.kwargs.items()}
        self.versions = {id(v): v._version for v in self._tensors()}

    def unchanged(self) -> bool:
        """Return True if no stored argument of the module call was changed in place after :meth:`keep`, as
        the version counters of PyTorch tell.
        """
        return all(self.versions.get(id(v), v._version) == v._version for v in self._tensors())

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the module call by parameter name."""
        return bound_arguments(self.module, self.args, self.kwargs)

    def _tensors(self) -> list[Tensor]:
        # Tensors of inference mode have no version counter; the forward pass itself creates none.
        given = (*self.args, *self.kwargs.values())
        return [v for v in given if isinstance(v, Tensor) and not v.is_inference()]


@dataclass(eq=False)
class TracedLayer:
    """One attention layer of a forward pass, with the module calls that enclose its softmaxes.

    ``calls`` begins with the call of the whole layer and ends with the innermost module around the softmaxes.
    """

    layer: AttentionLayer
    calls: list[TracedCall]
    stored: torch.dtype  # the dtype of the model's weights
    softmaxes: int = 1  # how many of them ran in the innermost call

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose weights are read to determine the map that the attention layer computes.

        They are the modules of the calls, and the norm layers before them.
        """
        norms = [call.last_norm.module for call in self.calls if call.last_norm is not None]
        return [self.layer.root, *(call.module for call in self.calls), *norms]


class StopForward(BaseException):
    """The exception that ends a forward pass early, when all layers of interest have run.

    It is a BaseException, so that no model catches it with ``except Exception``.
    """


def run(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run the model once and return its output, or None if a tracer ended the forward pass early.

    A model with weights in half precision runs in float32.

    Raises
    ------
    ArgumentError
        If the model itself raises an exception; the message names the shapes of the inputs.

    """
    # If hidden states are asked for, transformers adds hooks to the modules and never removes them.
    config = getattr(model, "config", None)
    asked = [name for name in ("output_hidden_states", "output_attentions") if getattr(config, name, False)]
    try:
        with float32_layers(model):
            return model(**own_copies(inputs), **dict.fromkeys(asked, False))
    except StopForward:
        return None
    except HowsmoothError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{k} {tuple(v.shape)}" for k, v in inputs.items() if isinstance(v, Tensor))
        raise ArgumentError(
            "inputs",
            expected=f"inputs that {type(model).__name__} accepts",
            got=f"{shapes}, for which it raises {type(error).__name__}: {reason(error)}",
            remedy="Run the model on them once by hand.",
        ) from error


def own_copies(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a model with copies of the floating-point tensors, which the model may change in
    place. A tensor that is passed twice stays one tensor.
    """
    copies: dict[int, Tensor] = {}
    for value in inputs.values():
        if isinstance(value, Tensor) and value.is_floating_point() and id(value) not in copies:
            copies[id(value)] = value.clone()
    return {name: copies.get(id(value), value) for name, value in inputs.items()}


def attention_layers(model: nn.Module, inputs: Mapping[str, Any]) -> list[AttentionLayer]:
    """Run the model once and list its attention layers in order, including cross-attention."""
    return trace_forward_pass(model, inputs, ())[0]


def trace_forward_pass(
    model: nn.Module,
    inputs: Mapping[str, Any],
    wanted: Sequence[int] | None,
    on_layer: Callable[[AttentionLayer], None] = lambda layer: None,
) -> tuple[list[AttentionLayer], dict[int, TracedLayer]]:
    """Run a model once, and record its attention layers with the module calls that enclose their softmaxes.

    Parameters
    ----------
    model, inputs
        The model and its arguments by name.
    wanted
        Indices of the layers whose calls are kept, in the order of the forward pass, negative from the end;
        None keeps all. The pass stops after the last wanted layer unless an index is negative.
    on_layer
        Called with each layer when its first softmax runs.

    Returns
    -------
    tuple
        All layers that ran, in order, and the wanted ones with their calls, by index.

    """
    tracer = _ForwardTracer(model, wanted, on_layer)
    with tracer.hooked(), SoftmaxTracer(tracer.on_softmax):
        run(model, inputs)
    return tracer.layers, tracer.kept


def run_with_attention(
    model: nn.Module, inputs: Mapping[str, Any], attend: Callable[[int, SoftmaxCall], Tensor | None]
) -> Any:
    """Run the model once, and let the callback ``attend`` replace the outputs of softmax attentions. Return
    the output of the model.

    ``attend`` is called with the index of each layer, counted as by :func:`trace_forward_pass`, and with each
    softmax attention of the layer. A tensor that ``attend`` returns replaces the output of this attention.
    """
    tracer = _ForwardTracer(model, (), lambda layer: None)

    def on_softmax(softmax: SoftmaxCall) -> Tensor | None:
        tracer.on_softmax(softmax)
        return attend(len(tracer.layers) - 1, softmax)

    # The masks are those of the eager implementation: it has a mask wherever keys are hidden.
    interface = "eager" if isinstance(model, PreTrainedModel) else None
    with tracer.hooked(), intercept_softmaxes(model, on_softmax, implementation=interface):
        return run(model, inputs)


class _ForwardTracer:
    """The forward hooks of :func:`trace_forward_pass`, with the attention layers that they have found."""

    def __init__(
        self, model: nn.Module, wanted: Sequence[int] | None, on_layer: Callable[[AttentionLayer], None]
    ) -> None:
        self.model = model
        self.stored = stored_dtype(model)
        self.wanted = wanted
        self.on_layer = on_layer
        self.from_end = max((-i for i in wanted or () if i < 0), default=0)
        # The index of the last wanted layer, after which the pass stops; None if it must run to its end.
        self.last = None if wanted is None or self.from_end else max(wanted, default=-1)
        self.stack: list[TracedCall] = []
        self.layers: list[AttentionLayer] = []
        self.kept: dict[int, TracedLayer] = {}
        self.newest_kept: deque[int] = deque()  # layers that a negative index may mean
        self.last_norm: ModuleCall | None = None
        self.newest: tuple[TracedCall, TracedLayer] | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Return a context manager that registers forward hooks on all modules of the model."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                starts = partial(self._starts, name)
                stack.enter_context(module.register_forward_pre_hook(starts, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(self._ends, with_kwargs=True))
            yield

    def _starts(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stack.append(TracedCall(name, module, args, kwargs, self.last_norm))

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # If a module raised an exception that the model caught, its call is still on the stack.
        while self.stack and self.stack[-1].module is not module:
            self.stack.pop()
        if not self.stack:
            return
        call = self.stack.pop()
        if is_norm(module) and isinstance(output, Tensor):
            tokens = first_tokens(call.arguments())
            if tokens is not None:
                self.last_norm = ModuleCall(call.name, module, tokens, output)
        if call.kept:
            call.output = output
            ended = None if self.last is None else self.kept.get(self.last)
            if ended is not None and ended.calls[0] is call:
                raise StopForward

    def on_softmax(self, softmax: SoftmaxCall) -> None:
        """Record a softmax attention, with the modules in which it runs.

        The first softmax in a call of a module starts the record of an attention layer.
        """
        if not self.stack:
            return
        innermost = self.stack[-1]
        if self.newest is not None and self.newest[0] is innermost:
            self.newest[1].softmaxes += 1
            return
        root = enclosing_layer(innermost.name)
        starts = (
            i
            for i, call in enumerate(self.stack)
            if call.name == root
            or isinstance(call.module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        )
        calls = self.stack[max(starts, default=0) :]
        layer = AttentionLayer(
            index=len(self.layers),
            name=innermost.name,
            module=innermost.module,
            root_name=calls[0].name,
            root=calls[0].module,
            heads=output_of(softmax).shape[-3],
            causal=_causal(softmax),
        )
        self.layers.append(layer)
        self.on_layer(layer)
        traced_layer = TracedLayer(layer, calls, self.stored)
        self.newest = (innermost, traced_layer)
        if self._is_wanted(layer.index):
            for call in calls:
                call.keep()
            self.kept[layer.index] = traced_layer

    def _is_wanted(self, index: int) -> bool:
        if self.wanted is None or index in self.wanted:
            return True
        if not self.from_end:
            return False
        self.newest_kept.append(index)
        if len(self.newest_kept) > self.from_end:
            self.kept.pop(self.newest_kept.popleft(), None)
        return True


def enclosing_layer(name: str) -> str:
    """Return the path of the smallest Transformer layer that contains a module, or "" if there is none.

    A layer is a numbered entry of a module list.

    For ``encoder.layer.3.attention.self`` the path is ``encoder.layer.3``.
    """
    match = re.match(r"(.*\.)?\d+(?=\.|$)", name)
    return match.group(0) if match else ""


def _causal(softmax: SoftmaxCall) -> bool:
    """Return True if a softmax attention is causal, so that no query sees a later key.

    It is judged by the mask and, without a mask, by the probabilities.
    """
    p = softmax.probabilities
    m, n = output_of(softmax).shape[-2], softmax.value.shape[-2]
    if p is not None:
        m, n = p.shape[-2:]
    if m != n:
        return False
    if softmax.causal:
        return True
    if softmax.mask is None:
        return p is not None and n > 1 and not bool(p.triu(1).any())
    return softmax.mask.shape[-2] == n and hides_later_keys(softmax.mask)
