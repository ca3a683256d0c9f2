"""A recorder of a running model. It notes the softmax attentions and the module calls that enclose them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError, reason
from howsmooth.models.float32_weights import float32_layers
from howsmooth.models.model_call import ModelCall
from howsmooth.models.tracing.attention_hooks import intercept_softmaxes
from howsmooth.models.tracing.mask_and_bias import hides_later_keys
from howsmooth.models.tracing.module_replay import first_tensor
from howsmooth.models.tracing.softmax_call import SoftmaxCall
from howsmooth.models.tracing.softmax_tracer import SoftmaxTracer
from howsmooth.watching import Call, StopForward, watched

__all__ = [
    "AttentionLayer", "Event", "Recorder", "TracedLayer", "attention_layers", "is_linear", "is_norm",
    "output_of", "own_copies", "run_once", "run_with_attention", "trace_forward_pass",
]  # fmt: skip


# How many bytes of activations a record refers to. Layers beyond it run again when they are read.
_MOST = 1 << 28


def is_linear(module: nn.Module) -> bool:
    """Return True if a module is ``nn.Linear``, or transformers' ``Conv1D``, whose weight is transposed."""
    return isinstance(module, nn.Linear | Conv1D)


def is_norm(module: nn.Module) -> bool:
    """Return True if a module looks like a norm layer over the last axis, by its class and its weight."""
    weight = getattr(module, "weight", None)
    # A module with children is no norm: an attention module may have "norm" in its name.
    alone = "norm" in type(module).__name__.lower() and next(module.children(), None) is None
    named = isinstance(module, nn.LayerNorm | nn.RMSNorm) or alone
    return named and (weight is None or weight.ndim == 1)


def output_of(softmax: SoftmaxCall) -> Tensor:
    """Return the output of a softmax attention. Raise CaptureError if it was not computed."""
    if softmax.output is None:
        raise CaptureError(f"A softmax was not computed: {softmax.obstacle or 'it was only looked at'}.")
    return softmax.output


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """An attention module of a model, with the Transformer layer (``root``) that contains it."""

    index: int  # in the order of the forward pass
    name: str  # path of the attention module
    module: nn.Module
    root_name: str  # path of the layer
    root: nn.Module
    heads: int
    causal: bool

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name or 'the model itself'}, {type(self.module).__name__})"


class Event(NamedTuple):
    """The start or end of a module call, or a softmax attention, with the tensors that go in or come out."""

    kind: Literal["starts", "softmax", "ends"]
    what: Any  # the Call or the SoftmaxCall
    tensors: list[Tensor]
    versions: list[int]  # PyTorch's version counters of the tensors

    def unchanged(self) -> bool:
        """Return True if no tensor was changed in place after the event, by PyTorch's version counters."""
        return self.versions == list(map(_version, self.tensors))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # tensors of inference mode have no counter


@dataclass(eq=False)
class TracedLayer:
    """One attention layer of a forward pass, with the module calls that enclose its softmaxes.

    ``calls`` begins with the call of the whole layer and ends with the innermost module around the softmaxes.
    """

    layer: AttentionLayer
    calls: list[Call]
    model: ModelCall  # in which it ran
    softmaxes: int = 1  # how many of them ran in the innermost call
    #: What happened in the first of ``calls``, in order; empty if that took too much memory.
    events: list[Event] = field(default_factory=list)

    @property
    def stored(self) -> torch.dtype:
        """The dtype in which the weights of the model are stored."""
        return self.model.stored

    @property
    def owners(self) -> list[nn.Module]:
        """The modules whose weights determine the layer's map, and the norms before it."""
        norms = [call.last_norm.module for call in self.calls if call.last_norm is not None]
        return [self.layer.root, *(call.module for call in self.calls), *norms]


def run_once(call: ModelCall) -> Any:
    """Run the model once, and return its output. Return None if a watcher ended the run early.

    A model with weights in half precision runs in float32.

    Raises
    ------
    ArgumentError
        If the model itself raises an exception; the message names the shapes of the inputs.

    """
    model, inputs = call.model, call.named
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
    """Copy the floating-point inputs of a model, because the model may change them in place. A tensor that is
    passed twice stays one tensor.
    """
    copies: dict[int, Tensor] = {}
    for value in inputs.values():
        if isinstance(value, Tensor) and value.is_floating_point() and id(value) not in copies:
            copies[id(value)] = value.clone()
    return {name: copies.get(id(value), value) for name, value in inputs.items()}


def attention_layers(call: ModelCall) -> list[AttentionLayer]:
    """Run the model once and list its attention layers in order, including cross-attention."""
    return trace_forward_pass(call, ())[0]


def trace_forward_pass(
    call: ModelCall,
    wanted: Sequence[int] | None,
    on_layer: Callable[[AttentionLayer], None] = lambda layer: None,
) -> tuple[list[AttentionLayer], dict[int, TracedLayer]]:
    """Run a model once, and record its attention layers with the module calls that enclose their softmaxes.

    The run uses the user's own attention implementation and replaces nothing.

    Parameters
    ----------
    call
        The model and its arguments.
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
    recorder = Recorder(call, wanted, on_layer)
    recorder.run()
    return recorder.layers, recorder.kept


def run_with_attention(
    call: ModelCall, attend: Callable[[AttentionLayer, SoftmaxCall], Tensor | None]
) -> Any:
    """Run the model once and return its output. The callback ``attend`` may replace the outputs of softmax
    attentions.

    ``attend`` is called with each layer, counted as by :func:`trace_forward_pass`, and with each softmax
    attention of the layer. A tensor that ``attend`` returns replaces the output of this attention.
    """
    recorder = Recorder(call, ())

    def on_softmax(softmax: SoftmaxCall) -> Tensor | None:
        recorder.on_softmax(softmax)
        return attend(recorder.layers[-1], softmax)

    # The masks are those of the eager implementation: it has a mask wherever keys are hidden.
    interface = "eager" if isinstance(call.model, PreTrainedModel) else None
    with recorder.watching(), intercept_softmaxes(call.model, on_softmax, implementation=interface):
        return run_once(call)


class Recorder:
    """The attention layers that a run has reached, and the module calls that are still running.

    The arguments are those of :func:`trace_forward_pass`. A ``whole`` run does not stop after the last wanted
    layer.
    """

    def __init__(
        self,
        call: ModelCall,
        wanted: Sequence[int] | None,
        on_layer: Callable[[AttentionLayer], None] = lambda layer: None,
        *,
        whole: bool = False,
    ) -> None:
        self.call = call
        self.wanted = wanted
        self.on_layer = on_layer
        self.from_end = max((-i for i in wanted or () if i < 0), default=0)
        # The index of the last wanted layer, after which the pass stops; None if it must run to its end.
        self.last = None if whole or wanted is None or self.from_end else max(wanted, default=-1)
        self.stack: list[tuple[Call, int]] = []  # with the number of events before it
        self.layers: list[AttentionLayer] = []
        self.kept: dict[int, TracedLayer] = {}
        self.newest_kept: deque[int] = deque()  # layers that a negative index may mean
        self.last_norm: Call | None = None
        self.newest: tuple[Call, TracedLayer] | None = None
        self.events: list[Event] = []  # outside of the layers that have ended
        self.complete_from = 0  # events of calls that began before this number are missing
        self.room = _MOST if call.batch == 1 and wanted != () else 0
        self.roots: dict[int, list[TracedLayer]] = {}  # the layers in each of their first calls, by its id

    def run(self) -> Any:
        """Run the model once, and return its output, or None if the pass stops early."""
        with self.watching(), SoftmaxTracer(self.on_softmax):
            return run_once(self.call)

    def watching(self) -> Any:
        """Return a context manager in which this recorder observes the calls of all modules of the model."""
        return watched(dict(self.call.model.named_modules()), self._starts, self._ends)

    def _starts(self, call: Call) -> None:
        call.last_norm = self.last_norm
        self.stack.append((call, len(self.events)))
        self._note("starts", call, call.args, call.kwargs)

    def _note(self, kind: Literal["starts", "softmax", "ends"], what: Any, *given: Any) -> None:
        tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
        if kind == "ends":
            self.room -= sum(t.nbytes for t in tensors)
        if self.room > 0:
            self.events.append(Event(kind, what, tensors, list(map(_version, tensors))))

    def _ends(self, call: Call) -> None:
        began, top = 0, None
        # If a module raised an exception that the model caught, its call is still on the stack.
        while self.stack and top is not call:
            top, began = self.stack.pop()
        self._note("ends", call, call.output)
        if id(call) in self.roots:
            for layer in self.roots.pop(id(call)):
                if self.room > 0 and began >= self.complete_from:
                    layer.events = self.events[began:]
            del self.events[began:]
            self.complete_from = began
        if is_norm(call.module) and isinstance(call.output, Tensor) and call.inputs is not None:
            # Without the norm before it: the record would hold the outputs of all norms of the model.
            self.last_norm = replace(call, last_norm=None)
        if call.kept:
            with suppress(CaptureError):  # it returns no tensor
                call.result = first_tensor(call.output).clone()  # the model may change it later
        ended = None if self.last is None else self.kept.get(self.last)
        if ended is not None and ended.calls[0] is call:
            raise StopForward

    def on_softmax(self, softmax: SoftmaxCall) -> None:
        """Record a softmax attention, with the modules in which it runs.

        The first softmax in a call of a module starts the record of an attention layer.
        """
        if not self.stack:
            return
        self._note("softmax", softmax, softmax.output)
        innermost = self.stack[-1][0]
        if self.newest is not None and self.newest[0] is innermost:
            self.newest[1].softmaxes += 1
            return
        root = enclosing_layer(innermost.name)
        starts = (
            i
            for i, (call, _) in enumerate(self.stack)
            if call.name == root
            or isinstance(call.module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        )
        calls = [call for call, _ in self.stack[max(starts, default=0) :]]
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
        traced_layer = TracedLayer(layer, calls, self.call)
        self.newest = (innermost, traced_layer)
        self.roots.setdefault(id(calls[0]), []).append(traced_layer)
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
    """Return the path of the smallest Transformer layer that contains a module. Return "" if none does.

    A layer is a numbered entry of a module list.

    For ``encoder.layer.3.attention.self`` the path is ``encoder.layer.3``.
    """
    match = re.match(r"(.*\.)?\d+(?=\.|$)", name)
    return match.group(0) if match else ""


def _causal(softmax: SoftmaxCall) -> bool:
    """Return True if a softmax attention is causal: no query sees a later key.

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
