"""A run of one layer of a model by itself, with a trace of its module calls, tokens and softmaxes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from howsmooth.errors import CaptureError
from howsmooth.models.identification.self_attention_module import SelfAttentionModule
from howsmooth.models.tolerance import relative_error
from howsmooth.models.tracing.attention_hooks import intercept_softmaxes
from howsmooth.models.tracing.layer_trace import (
    LayerTrace,
    ModuleCall,
    bound_arguments,
    first_tokens,
    is_linear,
    is_norm,
)
from howsmooth.models.tracing.module_call_tracer import TracedLayer
from howsmooth.models.tracing.module_replay import ModuleReplay
from howsmooth.models.tracing.softmax_tracer import SoftmaxCall

__all__ = ["trace_layer", "whole_layer"]

# Largest relative difference of tokens that are computed again: rounding is far below it, and the tokens of
# another call of the same module are far above.
_SAME = 1e-2


def whole_layer(traced_layer: TracedLayer, batch: int) -> ModuleReplay:
    """Return the recorded call of the whole layer that contains an attention module, so that the layer can be
    run again.

    If the model has no list of layers, the call is the call of the whole model.

    Raises
    ------
    CaptureError
        If the call cannot be repeated: it takes no tensor, or its arguments were changed in place.

    """
    call = traced_layer.calls[0]
    given = [v for v in call.arguments().values() if isinstance(v, Tensor)]
    floating = [v for v in given if v.is_floating_point()]
    if not given or not call.unchanged():
        why = "changes its arguments in place" if given else "takes no tensor"
        raise CaptureError(
            f"{traced_layer.layer} lies in {type(call.module).__name__} {call.name}, which {why}."
        )
    return ModuleReplay(call, (floating or given)[0], batch)


def trace_layer(
    self_attention: SelfAttentionModule, traced_layer: TracedLayer, layer: ModuleReplay
) -> LayerTrace:
    """Run the layer that contains a self-attention module on one sequence, and record the module calls and
    softmaxes of the layer.

    Raises
    ------
    CaptureError
        If the layer does not call its attention module when it runs by itself.

    """
    trace = LayerTrace(
        self_attention.layer,
        self_attention.alone.tokens().clone(),
        arguments=self_attention.alone.named_arguments(),
        last_norm=_norm_before(self_attention, traced_layer),
    )
    tracer = _LayerTracer(self_attention, trace)
    layer = layer.of_first_sequence()
    with (
        tracer.hooked(layer.module),
        intercept_softmaxes(layer.module, tracer.on_softmax, implementation=self_attention.implementation),
    ):
        output = layer(layer.x)
    if not trace.softmaxes:
        raise CaptureError(f"{self_attention.layer} was not reached when its layer ran by itself.")
    first = output[0] if isinstance(output, tuple | list) and output else output
    trace.output = _flat(first) if isinstance(first, Tensor) else None
    return trace


def _norm_before(self_attention: SelfAttentionModule, traced_layer: TracedLayer) -> ModuleCall | None:
    """Return the last call of a norm layer before the attention module, for the first sequence of
    the batch.
    """
    norm = next((c.last_norm for c in traced_layer.calls if c.module is self_attention.replay.module), None)
    if norm is None or norm.inputs is None or norm.output is None:
        return None
    inputs, output = (self_attention.replay.rows(t)[:1] for t in (norm.inputs, norm.output))
    return ModuleCall(norm.name, norm.module, inputs, output)


class _LayerTracer:
    """The forward hooks with which :func:`trace_layer` records module calls and softmaxes in a LayerTrace."""

    def __init__(self, self_attention: SelfAttentionModule, trace: LayerTrace) -> None:
        self.self_attention = self_attention
        self.trace = trace
        self.calls: list[ModuleCall] = []
        self.inside: int | None = (
            None  # how many calls had ended when the attention module began; None before
        )
        self.ended = False

    @contextmanager
    def hooked(self, root: nn.Module) -> Iterator[None]:
        prefix = self.self_attention.layer.root_name
        with ExitStack() as stack:
            for name, module in root.named_modules():
                if module is self.self_attention.replay.module:
                    starts = module.register_forward_pre_hook(self._attention_starts, with_kwargs=True)
                    stack.enter_context(starts)
                    stack.enter_context(module.register_forward_hook(self._attention_ends))
                ended = partial(self._ended, f"{prefix}.{name}".strip("."))
                stack.enter_context(module.register_forward_hook(ended, with_kwargs=True))
            yield

    def _attention_starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A layer may call its attention module several times: the call with the tokens of the forward pass
        # is traced.
        tokens = self.self_attention.alone.x
        given = (*args, *kwargs.values())
        same = [v for v in given if isinstance(v, Tensor) and v.shape == tokens.shape]
        again = next((v for v in same if relative_error(v, tokens) < _SAME), None)
        if self.inside is None and again is not None:
            self.trace.x = _flat(again)  # the later values were computed from exactly these tokens
            self.inside = len(self.calls)
            self.trace.before = list(self.calls)

    def _attention_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self.ended = self.ended or self.inside is not None

    def on_softmax(self, softmax: SoftmaxCall) -> None:
        if self.inside is None or self.ended:
            return
        self.trace.softmaxes.append(softmax)
        if len(self.trace.softmaxes) == len(self.self_attention.softmaxes):
            self.trace.inside = self.calls[self.inside :]

    def _ended(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        tokens = first_tokens(bound_arguments(module, args, kwargs))
        first = output[0] if isinstance(output, tuple | list) and output else output
        inputs = kept = None
        after = self.inside is not None and len(self.trace.softmaxes) == len(self.self_attention.softmaxes)
        given = sum(v is not None for v in (*args, *kwargs.values()))
        heads = self.trace.softmaxes[0].output if after else None
        alone = given == 1 and tokens is not None and heads is not None and tokens.numel() == heads.numel()
        is_attention = module is self.self_attention.replay.module or isinstance(
            module, nn.MultiheadAttention
        )
        if is_linear(module) or is_norm(module):
            inputs = None if tokens is None else _flat(tokens)
            kept = _flat(output) if isinstance(output, Tensor) else None
        elif isinstance(first, Tensor) and (
            is_attention or alone or first.shape[-1:] == self.trace.x.shape[-1:]
        ):
            # Outputs are kept of the attention module, of modules whose output may be added to the tokens
            # (experts, say), and of modules that may contain the output projection.
            kept = _flat(first)
            inputs = None if tokens is None or is_attention else _flat(tokens)
        call = ModuleCall(name, module, inputs, kept, alone)
        self.calls.append(call)
        if after:
            self.trace.after.append(call)


def _flat(t: Tensor) -> Tensor:
    """Return a copy of the tokens (..., d) of one sequence, reshaped to (1, n, d)."""
    return t.reshape(1, -1, t.shape[-1]).clone() if t.ndim > 0 else t.clone()
