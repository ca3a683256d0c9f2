"""The trace of one layer: its module calls, tokens and softmaxes in a run on one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from howsmooth.errors import CaptureError
from howsmooth.models.tolerance import relative_error
from howsmooth.models.tracing.attention_hooks import intercept_softmaxes
from howsmooth.models.tracing.attention_recorder import (
    AttentionLayer,
    TracedLayer,
    is_linear,
    is_norm,
    output_of,
)
from howsmooth.models.tracing.module_replay import ModuleReplay
from howsmooth.models.tracing.softmax_call import SoftmaxCall
from howsmooth.watching import Call, watched

if TYPE_CHECKING:
    from howsmooth.models.identification.self_attention_module import SelfAttentionModule

__all__ = ["LayerTrace", "ModuleCall", "recorded_trace", "trace_layer", "whole_layer"]

# Largest relative difference of tokens that are computed again: rounding is far below it, and the tokens of
# another call of the same module are far above.
_SAME = 1e-2


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A completed call of a module. Its input and output, each (1, n, d), are kept if they are needed."""

    name: str
    module: nn.Module
    inputs: Tensor | None = None
    output: Tensor | None = None
    alone: bool = False  # whether its only argument is a tensor with as many entries as the heads

    def __str__(self) -> str:
        return f"{self.name.rsplit('.', 1)[-1]} ({type(self.module).__name__})"


@dataclass(eq=False)
class LayerTrace:
    """The module calls and softmaxes of one layer in a run on one sequence, in order."""

    layer: AttentionLayer
    x: Tensor  # (1, n, d): the tokens that the attention module is given
    softmaxes: list[SoftmaxCall] = field(default_factory=list)
    before: list[ModuleCall] = field(default_factory=list)  # before the attention module began
    inside: list[ModuleCall] = field(default_factory=list)  # between its beginning and its last softmax
    after: list[ModuleCall] = field(default_factory=list)  # after its last softmax
    last_norm: ModuleCall | None = None  # the last norm before the attention module, anywhere in the model
    output: Tensor | None = None  # of the layer
    arguments: dict[str, Any] = field(default_factory=dict)  # of the attention module, by name
    given: list[Tensor] = field(default_factory=list)  # the tensors that calls in the layer were given


def whole_layer(traced_layer: TracedLayer) -> ModuleReplay:
    """Return the recorded call of the layer that contains an attention module, or of the whole model if it
    has no list of layers. Raise CaptureError if the call cannot be repeated.
    """
    call = traced_layer.calls[0]
    given = [v for v in call.arguments().values() if isinstance(v, Tensor)]
    floating = [v for v in given if v.is_floating_point()]
    if not given or not call.unchanged():
        why = "changes its arguments in place" if given else "takes no tensor"
        raise CaptureError(
            f"{traced_layer.layer} lies in {type(call.module).__name__} {call.name}, which {why}."
        )
    return ModuleReplay(call, (floating or given)[0], traced_layer.model.batch)


def recorded_trace(self_attention: SelfAttentionModule, traced_layer: TracedLayer) -> LayerTrace | None:
    """Build the trace of the layer around a self-attention module from what was recorded in the model's
    forward pass. Return None if nothing usable was recorded.
    """
    if not traced_layer.events or not all(event.unchanged() for event in traced_layer.events):
        return None
    tracer = _Tracer(self_attention, traced_layer, copies=False)
    for event in traced_layer.events:
        getattr(tracer, event.kind)(event.what)
    # The same softmaxes, as they are read from the attention module by itself.
    own, seen = self_attention.softmaxes, tracer.trace.softmaxes
    if [output_of(one).shape for one in own] != [output_of(one).shape for one in seen]:
        return None
    tracer.trace.softmaxes = [replace(a, output=b.output) for a, b in zip(own, seen, strict=True)]
    return tracer.ended(traced_layer.calls[0].output)


def trace_layer(
    self_attention: SelfAttentionModule, traced_layer: TracedLayer, layer: ModuleReplay
) -> LayerTrace:
    """Run the layer around a self-attention module on one sequence, and return the trace. Raise CaptureError
    if the layer, when it runs by itself, does not call the attention module.
    """
    tracer = _Tracer(self_attention, traced_layer, copies=True)
    layer = layer.of_first_sequence()
    prefix = self_attention.layer.root_name
    inside = {f"{prefix}.{name}".strip("."): m for name, m in layer.module.named_modules()}
    with (
        watched(inside, tracer.starts, tracer.ends),
        intercept_softmaxes(layer.module, tracer.softmax, implementation=self_attention.implementation),
    ):
        output = layer(layer.x)
    if not tracer.trace.softmaxes:
        raise CaptureError(f"{self_attention.layer} was not reached when its layer ran by itself.")
    return tracer.ended(output)


class _Tracer:
    """Collects the trace of a layer, while the layer runs or from the record of an earlier run."""

    def __init__(
        self, self_attention: SelfAttentionModule, traced_layer: TracedLayer, *, copies: bool
    ) -> None:
        self.alone, self.module = self_attention.alone, self_attention.replay.module
        self.count, self.copies = len(self_attention.softmaxes), copies
        self.trace = LayerTrace(
            self_attention.layer,
            self.alone.tokens().clone(),
            arguments=self.alone.named_arguments(),
            last_norm=_norm_before(self_attention, traced_layer),
        )
        self._ended: list[ModuleCall] = []
        self._attention: Call | None = None  # the call of the attention module, once it has begun
        self._runs = False  # whether it has not ended

    def starts(self, call: Call) -> None:
        """Note that a module call begins."""
        given = (*call.args, *call.kwargs.values())
        self.trace.given += [t for t in given if isinstance(t, Tensor) and t.is_floating_point()]
        if call.module is not self.module or self._attention is not None:
            return
        # A layer may call its attention module several times: the call with the recorded tokens is traced.
        same = [v for v in given if isinstance(v, Tensor) and v.shape == self.alone.x.shape]
        again = next((v for v in same if relative_error(v, self.alone.x) < _SAME), None)
        if again is not None:
            self.trace.x = _flat(again).clone()  # the later values were computed from exactly these tokens
            self._attention, self._runs = call, True
            self.trace.before = list(self._ended)

    def softmax(self, softmax: SoftmaxCall) -> None:
        """Add a softmax attention to the trace."""
        if self._runs and len(self.trace.softmaxes) < self.count:
            self.trace.softmaxes.append(softmax)
            if len(self.trace.softmaxes) == self.count:
                self.trace.inside = self._ended[len(self.trace.before) :]

    def ends(self, call: Call) -> None:
        """Add a completed module call to the trace."""
        self._runs = self._runs and call is not self._attention
        after = len(self.trace.softmaxes) == self.count
        self._ended.append(self._call(call, self.trace.softmaxes[0].output if after else None))
        if after:
            self.trace.after.append(self._ended[-1])

    def ended(self, output: Any) -> LayerTrace:
        """Complete the trace with the output of the layer, and return it."""
        first = _first(output)
        self.trace.output = _flat(first).clone() if isinstance(first, Tensor) else None
        return self.trace

    def _call(self, call: Call, heads: Tensor | None) -> ModuleCall:
        """Describe a module call, and keep only the tokens that the identification may need."""
        module, output, tokens = call.module, call.output, call.inputs
        first = _first(output)
        given = sum(v is not None for v in (*call.args, *call.kwargs.values()))
        alone = given == 1 and tokens is not None and heads is not None and tokens.numel() == heads.numel()
        is_attention = module is self.module or isinstance(module, nn.MultiheadAttention)
        if is_linear(module) or is_norm(module):
            kept = output if isinstance(output, Tensor) else None
        elif isinstance(first, Tensor) and (
            is_attention or alone or first.shape[-1:] == self.trace.x.shape[-1:]
        ):
            # Outputs are kept of the attention module, of modules whose output may be added to the tokens
            # (experts, say), and of modules that may contain the output projection.
            kept, tokens = first, None if is_attention else tokens
        else:
            kept = tokens = None
        return ModuleCall(call.name, module, self._kept(tokens), self._kept(kept), alone)

    def _kept(self, tokens: Tensor | None) -> Tensor | None:
        if tokens is None:
            return None
        return _flat(tokens).clone() if self.copies else _flat(tokens)


def _norm_before(self_attention: SelfAttentionModule, traced_layer: TracedLayer) -> ModuleCall | None:
    """Return the call of the last norm before the attention module, for the first sequence of the batch."""
    replay = self_attention.replay
    norm = next((c.last_norm for c in traced_layer.calls if c.module is replay.module), None)
    if norm is None or norm.inputs is None:
        return None
    inputs, output = (replay.rows(t)[:1] for t in (norm.inputs, norm.output))
    return ModuleCall(norm.name, norm.module, inputs, output)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


def _flat(t: Tensor) -> Tensor:
    """Return the tokens (..., d) of one sequence, reshaped to (1, n, d)."""
    return t.reshape(1, -1, t.shape[-1]) if t.ndim > 0 else t
