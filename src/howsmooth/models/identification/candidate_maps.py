"""Candidates for the map of a traced attention layer. They are found from recorded values, not names.

There are three hypotheses, from the most to the least explicit: a map whose every parameter is known; the
softmaxes in closed form inside the model's own code; the whole module, differentiated by PyTorch. Each fits
the numbers of the trace, and ``verification`` then tests it on tokens that the trace does not contain.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from howsmooth.attention import SelfAttention, StagedAttention
from howsmooth.attention.custom_code_attention import SoftmaxCore
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models.identification.layer_trace import LayerTrace, ModuleCall
from howsmooth.models.identification.output_projection import AttentionOutput, heads_of, is_given
from howsmooth.models.identification.qkv_projections import (
    multihead_parameters,
    read_projections,
    weight_and_bias,
)
from howsmooth.models.identification.replayed_attention import CopiedModule, ReplayedAttention, Tail
from howsmooth.models.identification.self_attention_module import SelfAttentionModule
from howsmooth.models.tracing.attention_recorder import AttentionLayer, is_linear, output_of
from howsmooth.models.tracing.mask_and_bias import (
    HIDDEN,
    Masking,
    describe_mask,
    order_and_window,
    split_mask,
)
from howsmooth.models.tracing.softmax_call import SoftmaxCall

__all__ = [
    "Candidate",
    "CapturedMap",
    "condition_of",
    "heads_in",
    "hypotheses",
    "norms_all_heads",
    "tail_of",
    "width_of",
]  # fmt: skip

_BY_HEAD = "a mask of its own for each head"

CapturedMap = SelfAttention | StagedAttention | ReplayedAttention


@dataclass(frozen=True, eq=False)
class Candidate:
    """A map that an attention layer may compute, before it is verified."""

    map: CapturedMap
    path: Literal["closed form", "autodiff"]  # how the Jacobian of the map is computed
    reason: str  # a phrase that says why the Jacobian is computed so
    masking: str  # the mask in words
    condition: float  # a bound on the absolute scores, for tolerances


def hypotheses(
    trace: LayerTrace, self_attention: SelfAttentionModule, output: AttentionOutput
) -> Iterator[Candidate | CaptureError]:
    """Yield the maps that an attention layer may compute, the map with the most known parameters first. Where
    a hypothesis does not fit the trace, yield an error that says why.
    """
    maskings = [_masking(trace.layer, softmax, self_attention) for softmax in trace.softmaxes]
    words = ", ".join(dict.fromkeys(masking.words for masking in maskings))
    causal = all(masking.causal for masking in maskings)
    condition = max(condition_of(softmax) for softmax in trace.softmaxes)
    reason = self_attention.obstacle
    if not reason:
        try:
            attention = _explicit(trace, output, maskings[0])
            yield Candidate(attention, "closed form", "every parameter is known", words, condition)
            reason = "as a map with these parameters it was not confirmed"
            if norms_all_heads(attention):
                reason = "a norm of its queries or keys acts on all heads together"
        except (CaptureError, ArgumentError) as error:
            yield CaptureError(str(error))
            reason = str(error)
    part = CopiedModule.of(
        self_attention.alone, tail_of(self_attention, output), self_attention.implementation
    )
    if not self_attention.obstacle:
        try:
            staged = _staged(trace, part, output, causal=causal)
            known = f"the softmax in closed form, the rest differentiated by PyTorch: {reason}"
            yield Candidate(staged, "closed form", known, words, condition)
        except (CaptureError, ArgumentError) as error:
            yield CaptureError(str(error))
            reason = str(error)
    replayed = _replayed(trace, self_attention, part, output, causal=causal)
    yield Candidate(replayed, "autodiff", f"differentiated by PyTorch as it is: {reason}", words, condition)


# ---------------------------------------------------------------- the three readings


def _explicit(trace: LayerTrace, output: AttentionOutput, masking: Masking) -> SelfAttention:
    """Read all weights and options of an attention layer from its trace."""
    layer, x, n = trace.layer, trace.x, trace.x.shape[1]
    if len(trace.softmaxes) > 1:
        raise CaptureError(f"{layer} has {len(trace.softmaxes)} softmaxes.")
    softmax = trace.softmaxes[0]
    operands = {name: getattr(softmax, name) for name in ("query", "key", "value", "output")}
    if any(t is None or t.ndim < 3 or t.shape[:-3].numel() != 1 for t in operands.values()):
        raise CaptureError(f"The softmax of {layer} acts on windows of the tokens.")
    operands = {name: t.reshape(1, *t.shape[-3:]) for name, t in operands.items()}
    softmax = replace(softmax, **operands)
    queries, keys = operands["query"].shape[2], operands["key"].shape[2]
    if not queries == keys == n:
        raise CaptureError(f"{layer} is given {n} tokens and attends from {queries} to {keys}.")
    if masking.words == _BY_HEAD:
        raise CaptureError(f"{layer} masks its heads differently.")
    if isinstance(layer.module, nn.MultiheadAttention):
        projections, weight, output_bias = multihead_parameters(layer.module, softmax)
    elif output.projection is not None:
        projections = read_projections(trace, softmax)
        weight, output_bias = weight_and_bias(_matrix_of(trace, output.projection))
    else:
        raise CaptureError(output.unclear)
    bias = split_mask(layer, softmax.mask)[1]
    return SelfAttention(
        projections.query.weight,
        projections.key.weight,
        projections.value.weight,
        weight.clone(),
        query_bias=projections.query.bias,
        key_bias=projections.key.bias,
        value_bias=projections.value.bias,
        output_bias=None if output_bias is None else output_bias.clone(),
        scale=softmax.scale * projections.factor,
        causal=masking.causal,
        window=masking.window,
        mask=masking.mask,
        rotary=projections.rotary,
        query_norm=projections.query_norm,
        key_norm=projections.key_norm,
        score_bias=None if bias is None else _by_head(bias, n).clone().to(x.dtype),
        softcap=softmax.softcap,
        sinks=_sinks(softmax, x.dtype),
    )


def _staged(
    trace: LayerTrace, part: CopiedModule, output: AttentionOutput, *, causal: bool
) -> StagedAttention:
    """Return a map that runs the copied attention module. Each softmax in it is replaced by a SoftmaxCore,
    which has a Jacobian in closed form.
    """
    cores, dtype = [], trace.x.dtype
    for softmax in trace.softmaxes:
        visible, bias = split_mask(trace.layer, softmax.mask)
        bias = None if bias is None else bias.to(dtype)
        rules = None if visible is None else order_and_window(visible)  # rules need no (n, n) matrix
        ordered, window = (False, None) if rules is None else (rules.causal, rules.window)
        mask, sinks = visible if rules is None else None, _sinks(softmax, dtype)
        cores.append(
            SoftmaxCore(softmax.scale, softmax.causal or ordered, mask, bias, softmax.softcap, sinks, window)
        )
    return StagedAttention(
        part,
        tuple(cores),
        d=trace.x.shape[-1],
        d_out=width_of(output.call.output, output.call),
        heads=heads_in(trace),
        n=trace.x.shape[1],
        causal=causal,
        dtype=dtype,
        device=trace.x.device,
        description=type(part.call.module).__name__,
    )


def _replayed(
    trace: LayerTrace,
    self_attention: SelfAttentionModule,
    part: CopiedModule,
    output: AttentionOutput,
    *,
    causal: bool,
) -> ReplayedAttention:
    """Return a map that runs the copied module unchanged, so that PyTorch differentiates all of it."""
    heads, inner, projection = heads_in(trace), None, output.projection
    if projection is not None:
        width = width_of(projection.inputs, projection)
        within = Tail(module=_path(self_attention, projection), of_input=True)
        tail = Tail(width=width) if output.outside else within
        before = CopiedModule(part.call, tail, part.implementation)
        inner = ReplayedAttention(before, d_out=width, heads=heads, causal=causal)
    width = width_of(output.call.output, output.call)
    return ReplayedAttention(part, d_out=width, heads=heads, causal=causal, inner=inner)


def _sinks(softmax: SoftmaxCall, dtype: torch.dtype) -> Tensor | None:
    return None if softmax.sinks is None else softmax.sinks.detach().to(dtype).clone()


def _matrix_of(trace: LayerTrace, projection: ModuleCall) -> nn.Module:
    """Return the linear module that multiplies the heads: the output projection, or a module inside it."""
    heads, parts = heads_of(trace), set(projection.module.modules())
    for call in trace.after:
        if heads is not None and call.module in parts and is_linear(call.module) and is_given(call, heads):
            return call.module
    kind = type(projection.module).__name__
    raise CaptureError(f"The output projection {projection.name} ({kind}) of {trace.layer} is not a matrix.")


def tail_of(self_attention: SelfAttentionModule, output: AttentionOutput) -> Tail:
    """Say which tensor in a run of the attention module is the attention output."""
    if output.outside:
        module = copy.deepcopy(output.call.module).requires_grad_(requires_grad=False)
        return Tail(module, width=width_of(output.call.inputs, output.call))
    return Tail(module=_path(self_attention, output.projection) if output.call is output.projection else None)


def _path(self_attention: SelfAttentionModule, call: ModuleCall | None) -> str | None:
    modules = self_attention.alone.module.named_modules()
    return next((name for name, m in modules if call is not None and m is call.module), None)


def norms_all_heads(f: CapturedMap) -> bool:
    """Return True if a norm of the queries or keys acts on all heads together, as in OLMo 2."""
    if not isinstance(f, SelfAttention):
        return False
    return any(norm is not None and norm.d != f.key_dim for norm in (f.query_norm, f.key_norm))


# ---------------------------------------------------------------- shapes and masks


def width_of(tokens: Tensor | None, call: ModuleCall) -> int:
    """Return the last dimension of ``tokens``. Raise CaptureError if the module call has no such tensor."""
    if tokens is None:
        raise CaptureError(f"{call.name} returns no tensor.")
    return tokens.shape[-1]


def heads_in(trace: LayerTrace) -> int:
    """Return the number of heads of the first softmax of a layer."""
    shape = output_of(trace.softmaxes[0]).shape
    return shape[-3] if len(shape) > 2 else 1


def _by_head(scores: Tensor, n: int) -> Tensor:
    """Return a mask or a score bias in the shape (heads, n, n), or (1, n, n) if all heads share it."""
    return scores.broadcast_to(*scores.shape[:-2], n, n).reshape(-1, n, n)


def _masking(layer: AttentionLayer, softmax: SoftmaxCall, self_attention: SelfAttentionModule) -> Masking:
    """Describe the mask of one softmax, in words and by rules."""
    if softmax.obstacle:  # the zeros of the attention weights show the mask
        p = softmax.probabilities
        if p is None or p.shape[-1] != p.shape[-2]:
            return Masking(False, None, None, "not read")
        n = p.shape[-1]
        return describe_mask((p != 0).reshape(-1, n, n).any(dim=0), n)
    shape = output_of(softmax).shape
    m, n = shape[-2], softmax.value.shape[-2]
    visible, _ = split_mask(layer, softmax.mask)
    if shape[:-3].numel() > 1:
        return Masking(False, None, None, f"windows of {m} tokens")
    if m != n:
        return Masking(False, None, None, f"{m} queries see {n} keys")
    given = softmax.mask is not None or getattr(self_attention.replay.module, "is_causal", False) is True
    if n == 1 and (given or softmax.causal):  # the mask of a single token hides nothing
        return Masking(True, None, None, "causal")
    if visible is None:
        return Masking(True, None, None, "causal") if softmax.causal else describe_mask(None, n)
    each = _by_head(visible, n)
    if len(each) > 1 and not bool((each == each[:1]).all()):
        return Masking(softmax.causal or not bool(each.triu(1).any()), None, None, _BY_HEAD)
    return describe_mask(each[0].tril() if softmax.causal else each[0], n)


def condition_of(softmax: SoftmaxCall) -> float:
    """Return an upper bound on the absolute scores of a softmax. Tolerances of comparisons grow with it.

    If the queries or keys are unknown, the result is 100, which is a guess and no bound.
    """
    if softmax.query is None or softmax.key is None or softmax.obstacle:
        return 100.0  # the scores are unknown; a hundred is a common size
    longest = [float(t.norm(dim=-1).max()) for t in (softmax.query, softmax.key)]
    mask, largest = softmax.mask, 0.0
    if mask is not None and mask.dtype != torch.bool and bool((mask > HIDDEN).any()):
        largest = float(mask[mask > HIDDEN].abs().max())
    return abs(softmax.scale) * longest[0] * longest[1] + largest
