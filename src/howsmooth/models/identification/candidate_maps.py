"""Candidates for the map that a traced attention layer computes. They are derived from the tensors of the
layer, not from names of modules.

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
from howsmooth.models.tracing.mask_and_bias import (
    HIDDEN,
    Masking,
    describe_mask,
    order_and_window,
    split_mask,
)
from howsmooth.models.tracing.recorder import is_linear, output_of
from howsmooth.models.tracing.softmax_tracer import SoftmaxCall

__all__ = [
    "CapturedMap",
    "Hypothesis",
    "Path",
    "condition_of",
    "heads_in",
    "hypotheses",
    "norms_all_heads",
    "tail_of",
    "width_of",
]

Path = Literal["closed form", "autodiff"]
CapturedMap = SelfAttention | StagedAttention | ReplayedAttention


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A candidate for the map that an attention layer computes, which is not verified yet. It also says how
    the Jacobian of the map is computed.
    """

    map: CapturedMap
    path: Path  # how the Jacobian of the map is computed
    reason: str  # a phrase that says why the Jacobian is computed so
    masking: str  # the mask in words
    condition: float  # a bound on the absolute scores, for tolerances


def hypotheses(
    trace: LayerTrace, self_attention: SelfAttentionModule, output: AttentionOutput
) -> Iterator[Hypothesis | CaptureError]:
    """Yield candidates for the map that an attention layer computes. The candidates with the most known
    parameters come first.

    Every parameter of the first map is known; the last map runs the module as it is. If a hypothesis does not
    fit the trace, the error that says why is yielded in place of the hypothesis.

    Raises
    ------
    CaptureError
        If no hypothesis is possible.

    """
    masking, causal = _masking(trace, self_attention)
    condition = max(condition_of(softmax) for softmax in trace.softmaxes)
    reason = self_attention.obstacle
    if not reason:
        try:
            attention = _explicit(trace, output, causal=causal)
            yield Hypothesis(attention, "closed form", "every parameter is known", masking, condition)
            reason = "as a map with these parameters it was not confirmed"
            if norms_all_heads(attention):
                reason = "a norm of its queries or keys acts on all heads together"
        except (CaptureError, ArgumentError) as error:
            yield CaptureError(str(error))
            reason = str(error)
        try:
            staged = _staged(trace, self_attention, output, causal=causal)
            known = f"the softmax in closed form, the rest differentiated by PyTorch: {reason}"
            yield Hypothesis(staged, "closed form", known, masking, condition)
        except (CaptureError, ArgumentError) as error:
            yield CaptureError(str(error))
            reason = str(error)
    replayed = _replayed(trace, self_attention, output, causal=causal)
    yield Hypothesis(
        replayed, "autodiff", f"differentiated by PyTorch as it is: {reason}", masking, condition
    )


# ---------------------------------------------------------------- the three readings


def _explicit(trace: LayerTrace, output: AttentionOutput, *, causal: bool) -> SelfAttention:
    """Read all weights and options of an attention layer, and return it as a SelfAttention.

    ``causal`` is used for a single token, whose mask does not show whether the layer is causal.
    """
    layer, n = trace.layer, trace.x.shape[1]
    if len(trace.softmaxes) > 1:
        raise CaptureError(f"{layer} has {len(trace.softmaxes)} softmaxes.")
    projection = output.projection
    module = layer.module if isinstance(layer.module, nn.MultiheadAttention) else None
    softmax = trace.softmaxes[0]
    operands = {name: getattr(softmax, name) for name in ("query", "key", "value", "output")}
    if any(t is None or t.ndim < 3 or t.shape[:-3].numel() != 1 for t in operands.values()):
        raise CaptureError(f"The softmax of {layer} acts on windows of the tokens.")
    operands = {name: t.reshape(1, *t.shape[-3:]) for name, t in operands.items()}
    softmax = replace(softmax, **operands)
    queries, keys = operands["query"].shape[2], operands["key"].shape[2]
    if not queries == keys == n:
        raise CaptureError(f"{layer} is given {n} tokens and attends from {queries} to {keys}.")
    visible, bias = split_mask(layer, softmax.mask)
    seen = _described(softmax, _common(layer, visible, n), n)
    if module is not None:
        projections, weight, output_bias = multihead_parameters(module, softmax)
    elif projection is not None:
        projections = read_projections(trace, softmax)
        weight, output_bias = weight_and_bias(_matrix_of(trace, projection))
    else:
        raise CaptureError(output.unclear)
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
        causal=causal if n == 1 else seen.causal,
        window=seen.window,
        mask=seen.mask,
        rotary=projections.rotary,
        query_norm=projections.query_norm,
        key_norm=projections.key_norm,
        score_bias=None if bias is None else _by_head(bias, n).clone().to(trace.x.dtype),
        softcap=softmax.softcap,
        sinks=None if softmax.sinks is None else softmax.sinks.detach().to(trace.x.dtype).clone(),
    )


def _staged(
    trace: LayerTrace, self_attention: SelfAttentionModule, output: AttentionOutput, *, causal: bool
) -> StagedAttention:
    """Return a map that runs a copy of the attention module with a SoftmaxCore in place of each softmax.

    The Jacobian of a SoftmaxCore has a closed form.
    """
    cores = []
    for softmax in trace.softmaxes:
        visible, bias = split_mask(trace.layer, softmax.mask)
        bias = None if bias is None else bias.to(trace.x.dtype)
        sinks = None if softmax.sinks is None else softmax.sinks.detach().to(trace.x.dtype).clone()
        rules = None if visible is None else order_and_window(visible)  # rules need no (n, n) matrix
        ordered, window = (False, None) if rules is None else (rules.causal, rules.window)
        mask = visible if rules is None else None
        cores.append(
            SoftmaxCore(softmax.scale, softmax.causal or ordered, mask, bias, softmax.softcap, sinks, window)
        )
    return StagedAttention(
        CopiedModule.of(self_attention.alone, tail_of(self_attention, output), self_attention.implementation),
        tuple(cores),
        d=trace.x.shape[-1],
        d_out=width_of(output.call.output, output.call),
        heads=heads_in(trace),
        n=trace.x.shape[1],
        causal=causal,
        dtype=trace.x.dtype,
        device=trace.x.device,
        description=type(self_attention.alone.module).__name__,
    )


def _replayed(
    trace: LayerTrace, self_attention: SelfAttentionModule, output: AttentionOutput, *, causal: bool
) -> ReplayedAttention:
    """Return a map that runs an unchanged copy of the attention module and is differentiated by PyTorch."""
    layer = CopiedModule.of(
        self_attention.alone, tail_of(self_attention, output), self_attention.implementation
    )

    def replayed(part: CopiedModule, width: int, within: ReplayedAttention | None) -> ReplayedAttention:
        return ReplayedAttention(part, d_out=width, heads=heads_in(trace), causal=causal, inner=within)

    heads, projection = None, output.projection
    if projection is not None:
        width = width_of(projection.inputs, projection)
        inner = (
            Tail(width=width)
            if output.outside
            else Tail(module=_path(self_attention, projection), of_input=True)
        )
        heads = replayed(CopiedModule(layer.call, inner, layer.implementation), width, None)
    return replayed(layer, width_of(output.call.output, output.call), heads)


def _matrix_of(trace: LayerTrace, projection: ModuleCall) -> nn.Module:
    """Return the linear layer that is applied to the concatenated heads. It is the output projection, or a
    module inside the output projection.
    """
    heads, parts = heads_of(trace), set(projection.module.modules())
    for call in trace.after:
        if heads is not None and call.module in parts and is_linear(call.module) and is_given(call, heads):
            return call.module
    kind = type(projection.module).__name__
    raise CaptureError(f"The output projection {projection.name} ({kind}) of {trace.layer} is not a matrix.")


def tail_of(self_attention: SelfAttentionModule, output: AttentionOutput) -> Tail:
    """Return a description of which tensor is the attention output: the value that the attention module
    returns, or the output of a projection inside or outside of the module.
    """
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
    """Return the dimension of the tokens that a module call takes or returns."""
    if tokens is None:
        raise CaptureError(f"{call.name} returns no tensor.")
    return tokens.shape[-1]


def heads_in(trace: LayerTrace) -> int:
    """Return the number of heads of the first softmax of a layer."""
    shape = output_of(trace.softmaxes[0]).shape
    return shape[-3] if len(shape) > 2 else 1


def _common(layer: object, visible: Tensor | None, n: int) -> Tensor | None:
    """Return the attention mask (n, n) that all heads share; raise CaptureError if the masks of the heads
    differ.
    """
    if visible is None:
        return None
    each = _by_head(visible, n)
    if len(each) > 1 and not bool((each == each[:1]).all()):
        raise CaptureError(f"{layer} masks its heads differently.")
    return each[0]


def _described(softmax: SoftmaxCall, visible: Tensor | None, n: int) -> Masking:
    """Describe the mask of a softmax call, combined with the causal order if the call has the ``causal``
    flag.
    """
    if not softmax.causal:
        return describe_mask(visible, n)
    if visible is None:
        return Masking(True, None, None, "causal")
    return describe_mask(visible.tril(), n)


def _by_head(scores: Tensor, n: int) -> Tensor:
    """Return a mask or a score bias in the shape (heads, n, n), or (1, n, n) if all heads share it."""
    return scores.broadcast_to(*scores.shape[:-2], n, n).reshape(-1, n, n)


def _masking(trace: LayerTrace, self_attention: SelfAttentionModule) -> tuple[str, bool]:
    """Describe the masks of a layer in words, and return whether the layer is causal."""
    found: list[tuple[str, bool]] = []
    for softmax in trace.softmaxes:
        shape = output_of(softmax).shape
        m, n = shape[-2], softmax.value.shape[-2]
        if softmax.obstacle:
            found.append(_masking_of_weights(softmax))
            continue
        visible, _ = split_mask(trace.layer, softmax.mask)
        if shape[:-3].numel() > 1:
            found.append((f"windows of {m} tokens", False))
            continue
        if m != n:
            found.append((f"{m} queries see {n} keys", False))
            continue
        each = None if visible is None else _by_head(visible, n)
        if each is not None and len(each) > 1 and not bool((each == each[:1]).all()):
            found.append(("a mask of its own for each head", softmax.causal or not bool(each.triu(1).any())))
            continue
        seen = None if each is None else each[0]
        if n == 1 and (
            softmax.mask is not None or getattr(self_attention.replay.module, "is_causal", False) is True
        ):
            seen = torch.ones(1, 1, dtype=torch.bool, device=softmax.value.device)
        masking = _described(softmax, seen, n)
        found.append((masking.words, masking.causal))
    words = ", ".join(dict.fromkeys(words for words, _ in found))
    return words, all(causal for _, causal in found)


def _masking_of_weights(softmax: SoftmaxCall) -> tuple[str, bool]:
    """Describe in words the mask that the zeros of the attention weights show, and return whether it is
    causal.
    """
    p = softmax.probabilities
    if p is None or p.shape[-1] != p.shape[-2]:
        return "not read", False
    n = p.shape[-1]
    masking = describe_mask((p != 0).reshape(-1, n, n).any(dim=0), n)
    return masking.words, masking.causal


def condition_of(softmax: SoftmaxCall) -> float:
    """Return an upper bound on the absolute attention scores, which determines the tolerance of comparisons.

    If the queries or keys are unknown, the result is 100, which is a guess and no bound.
    """
    if softmax.query is None or softmax.key is None or softmax.obstacle:
        return 100.0  # the scores are unknown; a hundred is a common size
    longest = [float(t.norm(dim=-1).max()) for t in (softmax.query, softmax.key)]
    largest = 0.0
    if softmax.mask is not None and softmax.mask.dtype != torch.bool:
        largest = (
            float(softmax.mask[softmax.mask > HIDDEN].abs().max())
            if bool((softmax.mask > HIDDEN).any())
            else 0.0
        )
    return abs(softmax.scale) * longest[0] * longest[1] + largest
