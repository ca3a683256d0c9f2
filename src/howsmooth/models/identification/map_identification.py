"""What a recorded layer computes, found by comparing values and never from names, shapes or model types.

Each reading is a hypothesis ("these columns of that linear map are the queries") that the recorded numbers
confirm or refute; ``verification`` then tests the whole on inputs that the recording did not see. There are
three, from the most to the least that is known: every parameter, the softmax alone, the module as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from howsmooth.attention import SelfAttention, SoftmaxCore, StagedAttention
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models.identification.module_map import OwnerLayer, ReplayedAttention, Tail
from howsmooth.models.identification.output_projection import Output, given, heads_of
from howsmooth.models.identification.projection_fit import (
    multihead_parameters,
    read_projections,
    weight_and_bias,
)
from howsmooth.models.identification.self_attention_module import Owner
from howsmooth.models.tracing.layer_trace import LayerRecord, ModuleCall, is_linear, output_of
from howsmooth.models.tracing.mask_and_bias import (
    HIDDEN,
    Masking,
    describe_mask,
    order_and_window,
    split_mask,
)
from howsmooth.models.tracing.softmax_tracer import CoreCall

__all__ = ["CapturedMap", "Hypothesis", "Path", "hypotheses"]

Path = Literal["closed form", "autodiff"]
CapturedMap = SelfAttention | StagedAttention | ReplayedAttention


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A hypothesis of what the layer computes."""

    map: CapturedMap
    path: Path
    reason: str
    masking: str
    condition: float  # bound on the absolute scores, for tolerances


def hypotheses(record: LayerRecord, owner: Owner, output: Output) -> Iterator[Hypothesis | CaptureError]:
    """Yield what the layer may compute, or why it is not that, from the most to the least explicit.

    Raises
    ------
    CaptureError
        If the layer cannot be captured at all.

    """
    masking, causal = _masking(record, owner)
    condition = max(_condition(core) for core in record.cores)
    reason = owner.obstacle
    if not reason:
        try:
            attention = _explicit(record, output, causal=causal)
            yield Hypothesis(attention, "closed form", "every parameter is known", masking, condition)
            reason = "as a map with these parameters it was not confirmed"
        except (CaptureError, ArgumentError) as error:
            yield CaptureError(str(error))
            reason = str(error)
        try:
            staged = _staged(record, owner, output, causal=causal)
            known = f"the softmax in closed form, the rest differentiated by PyTorch: {reason}"
            yield Hypothesis(staged, "closed form", known, masking, condition)
        except (CaptureError, ArgumentError) as error:
            yield CaptureError(str(error))
            reason = str(error)
    replayed = _replayed(record, owner, output, causal=causal)
    yield Hypothesis(
        replayed, "autodiff", f"differentiated by PyTorch as it is: {reason}", masking, condition
    )


# ---------------------------------------------------------------- the three readings


def _explicit(record: LayerRecord, output: Output, *, causal: bool) -> SelfAttention:
    """Read every parameter; ``causal`` is asked for one token, whose mask hides nothing."""
    layer, n = record.layer, record.x.shape[1]
    if len(record.cores) > 1:
        raise CaptureError(f"{layer} has {len(record.cores)} softmaxes.")
    projection = output.projection
    module = layer.owner if isinstance(layer.owner, nn.MultiheadAttention) else None
    core = _of_one_sequence(record.cores[0])
    if core is None or core.query is None or core.key is None:
        raise CaptureError(f"The softmax of {layer} acts on windows of the tokens.")
    queries, keys = core.query.shape[2], core.key.shape[2]
    if not queries == keys == n:
        raise CaptureError(f"{layer} is given {n} tokens and attends from {queries} to {keys}.")
    visible, bias = split_mask(layer, core.mask)
    seen = _described(core, _common(layer, visible, n), n)
    if module is not None:
        projections, weight, output_bias = multihead_parameters(module, core)
    elif projection is not None:
        projections = read_projections(record, core)
        weight, output_bias = weight_and_bias(_matrix(record, projection))
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
        scale=core.scale * projections.factor,
        causal=causal if n == 1 else seen.causal,
        window=seen.window,
        mask=seen.mask,
        rotary=projections.rotary,
        query_norm=projections.query_norm,
        key_norm=projections.key_norm,
        score_bias=None if bias is None else _by_head(bias, n).clone().to(record.x.dtype),
        softcap=core.softcap,
        sinks=None if core.sinks is None else core.sinks.detach().to(record.x.dtype).clone(),
    )


def _staged(record: LayerRecord, owner: Owner, output: Output, *, causal: bool) -> StagedAttention:
    """Take the softmaxes out of the module."""
    cores = []
    for core in record.cores:
        visible, bias = split_mask(record.layer, core.mask)
        bias = None if bias is None else bias.to(record.x.dtype)
        sinks = None if core.sinks is None else core.sinks.detach().to(record.x.dtype).clone()
        rules = None if visible is None else order_and_window(visible)  # which need no n² numbers
        ordered, window = (False, None) if rules is None else (rules.causal, rules.window)
        mask = visible if rules is None else None
        cores.append(SoftmaxCore(core.scale, core.causal or ordered, mask, bias, core.softcap, sinks, window))
    return StagedAttention(
        OwnerLayer.of(owner.alone, _tail(owner, output), owner.implementation),
        tuple(cores),
        d=record.x.shape[-1],
        d_out=_width(output.call.output, output.call),
        heads=_heads(record),
        n=record.x.shape[1],
        causal=causal,
        dtype=record.x.dtype,
        device=record.x.device,
        description=type(owner.alone.module).__name__,
    )


def _replayed(record: LayerRecord, owner: Owner, output: Output, *, causal: bool) -> ReplayedAttention:
    """Take the module as it is."""
    layer = OwnerLayer.of(owner.alone, _tail(owner, output), owner.implementation)

    def replayed(part: OwnerLayer, width: int, within: ReplayedAttention | None) -> ReplayedAttention:
        return ReplayedAttention(
            part,
            d=record.x.shape[-1],
            d_out=width,
            heads=_heads(record),
            n=record.x.shape[1],
            causal=causal,
            inner=within,
        )

    heads, projection = None, output.projection
    if projection is not None:
        width = _width(projection.inputs, projection)
        inner = Tail(width=width) if output.outside else Tail(module=_path(owner, projection), of_input=True)
        heads = replayed(OwnerLayer(layer.call, inner, layer.implementation), width, None)
    return replayed(layer, _width(output.call.output, output.call), heads)


def _matrix(record: LayerRecord, projection: ModuleCall) -> nn.Module:
    """Return the linear map that the output projection is, or may come down to."""
    heads, parts = heads_of(record), set(projection.module.modules())
    for call in record.after:
        if heads is not None and call.module in parts and is_linear(call.module) and given(call, heads):
            return call.module
    kind = type(projection.module).__name__
    raise CaptureError(f"The output projection {projection.name} ({kind}) of {record.layer} is not a matrix.")


def _tail(owner: Owner, output: Output) -> Tail:
    """Return what lies between the last softmax of an owner and the output of its attention."""
    if output.outside:
        module = copy.deepcopy(output.call.module).requires_grad_(requires_grad=False)
        return Tail(module, width=_width(output.call.inputs, output.call))
    return Tail(module=_path(owner, output.projection) if output.call is output.projection else None)


def _path(owner: Owner, call: ModuleCall | None) -> str | None:
    modules = owner.alone.module.named_modules()
    return next((name for name, m in modules if call is not None and m is call.module), None)


# ---------------------------------------------------------------- shapes and masks


def _width(tokens: Tensor | None, call: ModuleCall) -> int:
    if tokens is None:
        raise CaptureError(f"{call.name} gives out no tensor.")
    return tokens.shape[-1]


def _heads(record: LayerRecord) -> int:
    shape = output_of(record.cores[0]).shape
    return shape[-3] if len(shape) > 2 else 1


def _of_one_sequence(core: CoreCall) -> CoreCall | None:
    """Return the core with operands (1, heads, n, dim); None if it has further axes."""
    operands = {name: getattr(core, name) for name in ("query", "key", "value", "output")}
    if any(t is None or t.ndim < 3 or t.shape[:-3].numel() != 1 for t in operands.values()):
        return None
    return replace(core, **{name: t.reshape(1, *t.shape[-3:]) for name, t in operands.items()})


def _common(layer: object, visible: Tensor | None, n: int) -> Tensor | None:
    """Return the mask (n, n) that all heads have in common."""
    if visible is None:
        return None
    each = _by_head(visible, n)
    if len(each) > 1 and not bool((each == each[:1]).all()):
        raise CaptureError(f"{layer} masks its heads differently.")
    return each[0]


def _described(core: CoreCall, visible: Tensor | None, n: int) -> Masking:
    """Describe the mask that all heads have in common, with the order of the tokens."""
    if not core.causal:
        return describe_mask(visible, n)
    if visible is None:
        return Masking(True, None, None, "causal")
    return describe_mask(visible.tril(), n)


def _by_head(scores: Tensor, n: int) -> Tensor:
    """Return a mask or a bias as (heads or 1, n, n)."""
    return scores.broadcast_to(*scores.shape[:-2], n, n).reshape(-1, n, n)


def _masking(record: LayerRecord, owner: Owner) -> tuple[str, bool]:
    """Return the mask in words, and whether it is causal."""
    found: list[tuple[str, bool]] = []
    for core in record.cores:
        shape = output_of(core).shape
        m, n = shape[-2], core.value.shape[-2]
        if core.obstacle:
            found.append(_masking_of_weights(core))
            continue
        visible, _ = split_mask(record.layer, core.mask)
        if shape[:-3].numel() > 1:
            found.append((f"windows of {m} tokens", False))
            continue
        if m != n:
            found.append((f"{m} queries see {n} keys", False))
            continue
        each = None if visible is None else _by_head(visible, n)
        if each is not None and len(each) > 1 and not bool((each == each[:1]).all()):
            found.append(("a mask of its own for each head", core.causal or not bool(each.triu(1).any())))
            continue
        seen = None if each is None else each[0]
        if n == 1 and (core.mask is not None or getattr(owner.repeated.module, "is_causal", False) is True):
            seen = torch.ones(1, 1, dtype=torch.bool, device=core.value.device)
        masking = _described(core, seen, n)
        found.append((masking.words, masking.causal))
    words = ", ".join(dict.fromkeys(words for words, _ in found))
    return words, all(causal for _, causal in found)


def _masking_of_weights(core: CoreCall) -> tuple[str, bool]:
    """Say what is seen of a core whose operands are not read: which weights are not zero."""
    p = core.probabilities
    if p is None or p.shape[-1] != p.shape[-2]:
        return "not read", False
    n = p.shape[-1]
    masking = describe_mask((p != 0).reshape(-1, n, n).any(dim=0), n)
    return masking.words, masking.causal


def _condition(core: CoreCall) -> float:
    """Return a bound on the absolute scores."""
    if core.query is None or core.key is None or core.obstacle:
        return 100.0  # not read; scores of this size are common
    longest = [float(t.norm(dim=-1).max()) for t in (core.query, core.key)]
    largest = 0.0
    if core.mask is not None and core.mask.dtype != torch.bool:
        largest = (
            float(core.mask[core.mask > HIDDEN].abs().max()) if bool((core.mask > HIDDEN).any()) else 0.0
        )
    return abs(core.scale) * longest[0] * longest[1] + largest
