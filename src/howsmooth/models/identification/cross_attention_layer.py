"""Identification and verification of a cross-attention layer, whose queries come from one sequence and whose
keys and values come from another.

The module of such a layer is the innermost one with an argument that changes the queries of every softmax and
nothing else, and another argument, the memory, that changes keys and values and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from howsmooth.attention import CrossAttention, StagedCrossAttention
from howsmooth.attention.custom_code_attention import Core
from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError
from howsmooth.models.captured_layer import CrossSite
from howsmooth.models.identification.candidate_maps import (
    condition_of,
    heads_in,
    matrix_of,
    of_one_sequence,
    softmax_cores,
    tail_of,
    width_of,
)
from howsmooth.models.identification.isolated_layer_trace import trace_layer, whole_layer
from howsmooth.models.identification.output_projection import AttentionOutput, find_output
from howsmooth.models.identification.qkv_projections import (
    multihead_parameters,
    read_cross_projections,
    weight_and_bias,
)
from howsmooth.models.identification.replayed_attention import CopiedModule
from howsmooth.models.identification.self_attention_module import (
    RandomAttention,
    SelfAttentionModule,
    check_finite,
    first_line,
    has_weights_for,
    moved_operands,
    moved_tokens,
    obstacle_of,
    refuse_randomness,
    softmaxes_of,
)
from howsmooth.models.identification.verification import compare, model_values
from howsmooth.models.tolerance import precision, tolerance
from howsmooth.models.tracing.layer_trace import LayerTrace
from howsmooth.models.tracing.mask_and_bias import split_mask
from howsmooth.models.tracing.module_call_tracer import TracedCall, TracedLayer
from howsmooth.models.tracing.module_replay import ModuleReplay, token_arguments
from howsmooth.models.tracing.softmax_tracer import SoftmaxCall
from howsmooth.scopes import CROSS_SCOPE

__all__ = ["OneSequence", "VerifiedCrossLayer", "read_cross_layer"]

_QUERIES, _MEMORY = {"queries"}, {"keys", "values"}


class OneSequence(CaptureError):  # noqa: N818 - says what was found
    """The exception that is raised for a layer whose queries, keys and values come from the same tokens."""


@dataclass(frozen=True, eq=False)
class VerifiedCrossLayer:
    """A cross-attention layer whose map was identified and verified for one sequence of a batch."""

    module: SelfAttentionModule  # its call as a function of the queries' tokens, at the fixed memory
    map: CrossAttention | StagedCrossAttention
    reason: str  # a phrase that says how the map's Jacobian is computed
    masking: str  # the mask in words
    stored: torch.dtype

    def site(self, side: str, sequence: int | None) -> CrossSite:
        """Return the captured layer with its inputs, as a map of the query tokens, of the memory (the
        sequence that gives the keys and values), or of both.
        """
        x, memory = self.module.alone.tokens()[0].clone(), _memory_of(self.module.alone).clone()
        layer = self.module.layer
        return CrossSite(
            name=layer.name,
            layer=layer.index,
            head=None,
            scope=CROSS_SCOPE,
            causal=False,
            masking=self.masking,
            layout="",
            path="closed form",
            path_reason=self.reason,
            x=self.map.tokens(side, x, memory)[None],
            map=self.map.view(side, x, memory),
            norm=None,
            stored=self.stored,
            sequence=sequence,
            side=side,
            queries=x,
            memory=memory,
            attention=self.map,
        )


def read_cross_layer(traced_layer: TracedLayer, user: str) -> VerifiedCrossLayer:
    """Identify the map that a traced cross-attention layer computes for one sequence, and verify it.

    Parameters
    ----------
    traced_layer
        The layer, traced in a forward pass of one sequence.
    user
        The user's attention implementation.

    Raises
    ------
    OneSequence
        If the layer is self-attention.
    CaptureError
        If the layer computes something that is not recognised, or the verification fails.

    """
    try:
        return _read(traced_layer, user)
    except HowsmoothError:
        raise
    except Exception as error:  # a module may raise any error when it runs by itself
        raise CaptureError(f"{traced_layer.layer} cannot be run by itself: {first_line(error)}.") from error


def _read(traced_layer: TracedLayer, user: str) -> VerifiedCrossLayer:
    module = _find(traced_layer, user)
    root = whole_layer(traced_layer, 1)
    trace = trace_layer(module, traced_layer, root)
    output = find_output(trace, module, lambda: trace_layer(module, traced_layer, root))
    if output.obstacle:
        raise CaptureError(f"{module.layer} has no scope {CROSS_SCOPE!r}: {output.obstacle}.")
    refused: list[CaptureError] = []
    for found in _hypotheses(trace, module, output):
        if isinstance(found, CaptureError):
            refused.append(found)
            continue
        attention, reason = found
        try:
            _verify(module, output, attention, max(map(condition_of, trace.softmaxes)))
        except CaptureError as error:
            refused.append(error)
            continue
        return VerifiedCrossLayer(module, attention, reason, _masking(trace), traced_layer.stored)
    raise refused[-1]


def _memory_of(call: ModuleReplay) -> Tensor:
    """Return the memory (n, d_memory) of a module call for one sequence."""
    assert call.memory is not None
    return call.memory.reshape(-1, call.memory.shape[-1])


def _find(traced_layer: TracedLayer, implementation: str) -> SelfAttentionModule:
    """Find the module of a traced layer that takes the query tokens and the memory as arguments."""
    layer, reasons = traced_layer.layer, []
    for call in reversed(traced_layer.calls):
        if not call.unchanged():
            reasons.append(f"{call.name} ({type(call.module).__name__}) changes its arguments in place")
            continue
        arguments = [t for t in token_arguments(call) if has_weights_for(call, t)]
        roles: dict[str, Tensor] = {}
        for tokens in arguments:
            try:
                moved = _moved_by(traced_layer, call, tokens, implementation)
            except (RandomAttention, OneSequence):
                raise
            except Exception as error:  # a module may raise any error when it runs by itself
                reasons.append(first_line(error))
                continue
            for role, operands in (("queries", _QUERIES), ("memory", _MEMORY)):
                if moved and all(one == operands for one in moved):
                    roles.setdefault(role, tokens)
        if len(roles) == 2:
            return _module_of(traced_layer, call, roles, implementation)
    why = "; ".join(dict.fromkeys(reasons))[:300]
    raise CaptureError(
        f"{layer} is not captured with scope {CROSS_SCOPE!r}: no module of it has one argument that gives "
        f"its queries and another that gives its keys and values{f' ({why})' if why else ''}."
    )


def _moved_by(
    traced_layer: TracedLayer, call: TracedCall, tokens: Tensor, implementation: str
) -> list[set[str]]:
    """Return for each softmax in a module call which of its operands (queries, keys, values) change if the
    argument ``tokens`` of the call is changed.
    """
    replay = ModuleReplay(call, tokens, 1)
    way, before = _implementation_and_softmaxes(replay, implementation)
    if len(before) != traced_layer.softmaxes:
        return []  # this module contains several layers
    refuse_randomness(traced_layer.layer, before, softmaxes_of(replay, replay.x, way))
    after = softmaxes_of(replay, moved_tokens(replay.x), way)
    if len(after) != len(before):
        return []
    moved = [moved_operands(a, b) for a, b in zip(before, after, strict=True)]
    if all(one == _QUERIES | _MEMORY for one in moved):
        raise OneSequence(
            f"{traced_layer.layer} is self-attention: its queries, keys and values come from the same "
            "tokens. Capture it with scope 'attention'."
        )
    return moved


def _implementation_and_softmaxes(
    call: ModuleReplay, implementation: str
) -> tuple[str | None, list[SoftmaxCall]]:
    """Repeat a module call. The first result is the attention implementation, or None if the module does not
    use the attention interface of transformers. The second result is the list of the softmaxes in the call.
    """
    seen = softmaxes_of(call, call.x, implementation)
    if any(softmax.kind == "interface" for softmax in seen):
        return implementation, seen
    return None, softmaxes_of(call, call.x, None)


def _module_of(
    traced_layer: TracedLayer, call: TracedCall, roles: dict[str, Tensor], implementation: str
) -> SelfAttentionModule:
    """Return the cross-attention module of a layer with its call. Raise CaptureError if a setting of its
    softmaxes, such as the mask, depends on the tokens or on the memory.
    """
    layer = replace(traced_layer.layer, name=call.name, module=call.module)
    replay = ModuleReplay(call, roles["queries"], 1, roles["memory"])
    way, before = _implementation_and_softmaxes(replay, implementation)
    check_finite(layer, replay.x, before)
    other = replay.with_memory(moved_tokens(roles["memory"]))
    for after in (softmaxes_of(replay, moved_tokens(replay.x), way), softmaxes_of(other, other.x, way)):
        obstacle = obstacle_of(layer, before, after)
        if obstacle:
            raise CaptureError(f"{layer} is not captured with scope {CROSS_SCOPE!r}: {obstacle}.")
    return SelfAttentionModule(layer, replay, replay, before, way, "")


# ---------------------------------------------------------------- the readings


def _hypotheses(
    trace: LayerTrace, module: SelfAttentionModule, output: AttentionOutput
) -> Iterator[tuple[CrossAttention | StagedCrossAttention, str] | CaptureError]:
    """Yield candidates for the map of a layer, each with a phrase that says how its Jacobian is computed. In
    place of an impossible candidate, yield the error that says why it is impossible.
    """
    try:
        yield _explicit(trace, module, output), "every parameter is known"
        reason = "as a map with these parameters it was not confirmed"
    except (CaptureError, ArgumentError) as error:
        yield CaptureError(str(error))
        reason = str(error)
    try:
        known = f"the softmax in closed form, the rest differentiated by PyTorch: {reason}"
        yield _staged(trace, module, output), known
    except (CaptureError, ArgumentError) as error:
        yield CaptureError(str(error))


def _explicit(trace: LayerTrace, module: SelfAttentionModule, output: AttentionOutput) -> CrossAttention:
    """Read all weights and options of a layer, and return it as a CrossAttention."""
    layer = trace.layer
    if len(trace.softmaxes) > 1:
        raise CaptureError(f"{layer} has {len(trace.softmaxes)} softmaxes.")
    softmax = of_one_sequence(trace.softmaxes[0])
    if softmax is None or softmax.query is None or softmax.key is None:
        raise CaptureError(f"The softmax of {layer} acts on windows of the tokens.")
    memory = _memory_of(module.alone)
    m, n = softmax.query.shape[2], softmax.key.shape[2]
    if (m, n) != (trace.x.shape[1], len(memory)) or softmax.sinks is not None or softmax.causal:
        raise CaptureError(f"{layer} attends from {m} to {n} tokens, with rules that were not recognised.")
    visible, bias = split_mask(layer, softmax.mask)
    if isinstance(layer.module, nn.MultiheadAttention):
        projections, weight, output_bias = multihead_parameters(layer.module, softmax)
    elif output.projection is not None:
        projections = read_cross_projections(trace, memory[None], softmax)
        weight, output_bias = weight_and_bias(matrix_of(trace, output.projection))
    else:
        raise CaptureError(output.unclear)
    masks = None if visible is None else _by_head(visible, m, n)
    if masks is not None and not bool((masks == masks[:1]).all()):
        raise CaptureError(f"{layer} masks its heads differently.")
    return CrossAttention(
        projections.query.weight,
        projections.key.weight,
        projections.value.weight,
        weight.clone(),
        query_bias=projections.query.bias,
        key_bias=projections.key.bias,
        value_bias=projections.value.bias,
        output_bias=None if output_bias is None else output_bias.clone(),
        scale=softmax.scale * projections.factor,
        mask=None if masks is None else masks[0].clone(),
        score_bias=None if bias is None else _by_head(bias, m, n).clone().to(trace.x.dtype),
        softcap=softmax.softcap,
    )


def _by_head(scores: Tensor, m: int, n: int) -> Tensor:
    """Return a mask or a score bias in the shape (heads, m, n), or (1, m, n) if all heads share it."""
    return scores.broadcast_to(*scores.shape[:-2], m, n).reshape(-1, m, n)


def _staged(trace: LayerTrace, module: SelfAttentionModule, output: AttentionOutput) -> StagedCrossAttention:
    """Return a map that runs a copy of the module with a SoftmaxCore in place of each softmax."""
    copied = CopiedModule.of(module.alone, tail_of(module, output), module.implementation)
    memory = _memory_of(module.alone)
    return StagedCrossAttention(
        _CopiedCrossModule(copied),
        tuple(softmax_cores(trace)),
        d=trace.x.shape[-1],
        d_memory=memory.shape[-1],
        d_out=width_of(output.call.output, output.call),
        heads=heads_in(trace),
        m=trace.x.shape[1],
        n=len(memory),
        dtype=trace.x.dtype,
        device=trace.x.device,
        description=type(module.alone.module).__name__,
    )


class _CopiedCrossModule:
    """A copy of an attention module as a function of the query tokens and the memory."""

    def __init__(self, copied: CopiedModule) -> None:
        self.copied = copied

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> _CopiedCrossModule:
        return _CopiedCrossModule(self.copied.to(dtype=dtype, device=device))

    def run(self, x: Tensor, memory: Tensor, core: Core) -> Tensor:
        one = self.copied
        return CopiedModule(one.call.with_memory(memory), one.tail, one.implementation).run(x, core)


def _masking(trace: LayerTrace) -> str:
    """Describe in words which memory tokens are hidden from the queries of a cross-attention layer."""
    found = []
    for softmax in trace.softmaxes:
        visible, _ = split_mask(trace.layer, softmax.mask)
        if visible is None:
            found.append("none")
            continue
        rows = visible.reshape(-1, visible.shape[-1])
        alike = bool((rows == rows[:1]).all())
        hidden = int((~rows[0]).sum())
        found.append(f"{hidden} of {rows.shape[1]} memory tokens hidden" if alike else "a mask of its own")
    return ", ".join(dict.fromkeys(found))


# ---------------------------------------------------------------- the verification


def _verify(
    module: SelfAttentionModule,
    output: AttentionOutput,
    attention: CrossAttention | StagedCrossAttention,
    condition: float,
) -> None:
    """Raise CaptureError unless a map agrees with the model, at the captured sequences and at other
    sequences.
    """
    call, memory = module.alone, _memory_of(module.alone)
    for of_queries, of_memory in ((False, False), (True, False), (False, True), (True, True)):
        y = moved_tokens(memory) if of_memory else memory
        at = call.with_memory(y)
        x = moved_tokens(call.x) if of_queries else call.x
        own = model_values(replace(module, replay=at, alone=at), output, x)
        eps = precision(own.x.dtype, downcast=own.downcast)
        # On changed tokens queries and keys may each have grown by a factor of two.
        tol = tolerance(eps, condition * 2.0 ** (of_queries + of_memory))
        changed = " and ".join(
            name for name, is_so in (("tokens", of_queries), ("memory", of_memory)) if is_so
        )
        what = f"its attention{f' on other {changed}' if changed else ''}"
        compare(module.layer, what, attention(own.x, y[None]), own.attention, tol)
