"""Which module and which of its arguments make a softmax core self-attention, found by moving the tokens.

The innermost module around a core whose queries, keys and values all move with one of its arguments owns
the core, and that argument is X. Names, shapes and lengths decide nothing: a layer of cross-attention may
have as many keys as queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from howsmooth.errors import CaptureError, NonFiniteError
from howsmooth.models.tracing.attention_hooks import intercept_softmaxes
from howsmooth.models.tracing.forward_trace import TracedCall, TracedLayer
from howsmooth.models.tracing.layer_trace import AttentionLayer
from howsmooth.models.tracing.mask_and_bias import split_mask
from howsmooth.models.tracing.module_replay import ModuleReplay, token_arguments
from howsmooth.models.tracing.softmax_tracer import SoftmaxCall

__all__ = ["CrossAttention", "SelfAttentionModule", "find_self_attention", "first_line", "moved_tokens"]


_ALL = {"queries", "keys", "values"}
# Length of the longest moved token, of that of the longest token: less than all of it, for rounding.
_WITHIN = 0.9


class CrossAttention(CaptureError):  # noqa: N818 - says what was found
    """The layer is no self-attention: its queries, or its keys and values, come from elsewhere."""


class _RandomAttention(CaptureError):  # noqa: N818 - says what was found
    """The layer gives another output for the same tokens."""


@dataclass(frozen=True, eq=False)
class SelfAttentionModule:
    """The call that owns the cores of one layer."""

    layer: AttentionLayer
    replay: ModuleReplay  # on all sequences
    alone: ModuleReplay  # on the first
    softmaxes: list[SoftmaxCall]  # there
    #: The user's attention implementation if the module goes through transformers' interface, or None.
    implementation: str | None
    #: Why the cores cannot be taken as constant functions of queries, keys and values; "" if they can.
    obstacle: str


def find_self_attention(traced_layer: TracedLayer, batch: int, implementation: str) -> SelfAttentionModule:
    """Find the owner of a layer's cores.

    Raises
    ------
    CrossAttention
        If no module of the layer has an argument that moves queries, keys and values.
    CaptureError
        If the layer cannot be run by itself, or chooses keys by the tokens.
    NonFiniteError
        If its input or its output holds NaN or infinity.

    """
    reasons: list[str] = []
    partly = mixed = False
    for call in reversed(traced_layer.calls):
        if not call.unchanged():
            reasons.append(f"{call.name} ({type(call.module).__name__}) changes its arguments in place")
            continue
        for x in token_arguments(call):
            if not _has_weights_for(call, x):
                continue
            try:
                replay = ModuleReplay(call, x, batch)
                alone = replay.of_first_sequence()
                before = _cores(alone, alone.x, implementation)
                way = implementation if any(softmax.kind == "interface" for softmax in before) else None
                if way is None:
                    before = _cores(alone, alone.x, None)
                if len(before) != traced_layer.softmaxes:
                    continue  # of a module around several layers
                _refuse_randomness(traced_layer.layer, before, _cores(alone, alone.x, way))
                after = _cores(alone, moved_tokens(alone.x), way)
            except _RandomAttention:
                raise
            except Exception as error:  # whatever a model's module raises when it runs by itself
                reasons.append(first_line(error))
                continue
            if len(after) != len(before):
                reasons.append("it computes another number of softmaxes for other tokens")
                continue
            _check_finite(traced_layer.layer, alone.x, before)
            moved = [_moved(a, b) for a, b in zip(before, after, strict=True)]
            if all(m == _ALL for m in moved):
                layer = replace(traced_layer.layer, name=call.name, module=call.module)
                _refuse_chosen_masks(layer, traced_layer, call, x, batch, way)
                return SelfAttentionModule(layer, replay, alone, before, way, _obstacle(layer, before, after))
            partly = partly or any(moved)
            mixed = mixed or _ALL in moved
    layer = traced_layer.layer
    if mixed:
        raise CrossAttention(
            f"{layer} mixes two streams of tokens (cross-attention between them): one of its softmaxes takes "
            "queries, keys and values from the one, another from both. Only self-attention is captured."
        )
    if not partly and not reasons:
        reasons = ["none of its arguments holds tokens (..., n, d) that a matrix of it acts on"]
    if partly:
        raise CrossAttention(
            f"{layer} is cross-attention: no single argument of it, or of the modules around it up to its "
            "layer, gives queries, keys and values alike. Only self-attention is captured."
        )
    raise CaptureError(f"{layer} cannot be run by itself: {'; '.join(dict.fromkeys(reasons))[:300]}.")


def _refuse_chosen_masks(
    layer: AttentionLayer,
    traced_layer: TracedLayer,
    call: TracedCall,
    x: Tensor,
    batch: int,
    implementation: str | None,
) -> None:
    """Refuse a mask that a module around the owner makes of the tokens, and hands to it as an argument."""
    root = traced_layer.calls[0]
    given = [t for t in tree_leaves((root.args, root.kwargs)) if isinstance(t, Tensor)]
    made = [
        t
        for t in tree_leaves((call.args, call.kwargs))
        if isinstance(t, Tensor) and t is not x and t.ndim > 1 and all(_differ(t, other) for other in given)
    ]
    tokens = next(token_arguments(root), None)
    if call is root or not made or tokens is None:
        return
    try:
        whole = ModuleReplay(root, tokens, batch).of_first_sequence()
        before = _cores(whole, whole.x, implementation)
        after = _cores(whole, moved_tokens(whole.x), implementation)
    except Exception:  # the layer is run once more for its record, which says what is wrong
        return
    for a, b in zip(before, after, strict=False):
        _refuse_sparsity(layer, a, b)


def _has_weights_for(call: TracedCall, x: Tensor) -> bool:
    """Whether the module has a matrix that may act on such tokens.

    A module without one is given queries, keys and values, side by side perhaps: these are not the tokens.
    """
    return any(p.ndim >= 2 and x.shape[-1] in p.shape for p in call.module.parameters())


def moved_tokens(x: Tensor, first: int = 0) -> Tensor:
    """Return tokens moved by about their own size, with the same numbers every time.

    Tokens before ``first``, counted along the axis before the last, stay. None becomes longer than the
    longest is: a layer may refuse tokens beyond a radius, and those it was given lie within it.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x)
    noise[..., :first, :] = 0.0
    moved = x + noise * x.square().mean().sqrt().clamp(min=torch.finfo(x.dtype).tiny)
    longest, reached = (torch.linalg.vector_norm(t, dim=-1).max() for t in (x, moved[..., first:, :]))
    moved[..., first:, :] *= torch.where(
        (longest > 0) & (reached > longest), _WITHIN * longest / reached, 1.0
    )
    return moved


def _cores(call: ModuleReplay, x: Tensor, implementation: str | None) -> list[SoftmaxCall]:
    seen: list[SoftmaxCall] = []
    with intercept_softmaxes(
        call.module, lambda softmax: seen.append(softmax), implementation=implementation
    ):
        call(x)
    return seen


def _moved(a: SoftmaxCall, b: SoftmaxCall) -> set[str]:
    """Tell which operands differ; where queries and keys cannot be read, the probabilities speak for both."""
    found = {"values"} if _differ(a.value, b.value) else set()
    if a.query is not None and a.key is not None:
        found |= {"queries"} if _differ(a.query, b.query) else set()
        return found | ({"keys"} if _differ(a.key, b.key) else set())
    return found | ({"queries", "keys"} if _differ(a.probabilities, b.probabilities) else set())


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    if a is b:
        return False
    if a is None or b is None:
        return True
    return a.shape != b.shape or not torch.equal(a, b)


def _refuse_randomness(layer: AttentionLayer, first: list[SoftmaxCall], second: list[SoftmaxCall]) -> None:
    """Refuse a layer that draws at random which keys it looks at, as ProbSparse attention does."""
    pairs = [(a.output, b.output) for a, b in zip(first, second, strict=False)]
    if len(first) != len(second) or not all(a is b or _alike(a, b) for a, b in pairs):
        raise _RandomAttention(
            f"{layer} gives another output for the same tokens, in evaluation mode: it draws something at "
            "random, as data-dependent sparsity with sampled keys does, and is not captured."
        )


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two runs gave the same, but for the order of sums on a GPU; NaN is refused elsewhere."""
    if a is None or b is None or a.shape != b.shape:
        return False
    a, b = a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
    return bool(((a - b).abs() <= 1e-3 * a.abs().amax()).all())


def _obstacle(layer: AttentionLayer, before: list[SoftmaxCall], after: list[SoftmaxCall]) -> str:
    for a, b in zip(before, after, strict=True):
        reason = a.obstacle or b.obstacle
        if "sparsity" in reason:
            raise CaptureError(f"{layer} uses {reason}, which is not captured.")
        if reason:
            return reason
        if (a.scale, a.softcap) != (b.scale, b.softcap):
            return "the factor of its scores depends on the tokens"
        if _differ(a.sinks, b.sinks):
            return "its sinks depend on the tokens"
        _refuse_sparsity(layer, a, b)
        if _differ(a.mask, b.mask) or a.causal != b.causal:
            return "its scores have a bias that depends on the tokens"
    return ""


def _refuse_sparsity(layer: AttentionLayer, a: SoftmaxCall, b: SoftmaxCall) -> None:
    if a.mask is b.mask:
        return
    hidden = [None if m is None else _hidden(m) for m in (a.mask, b.mask)]
    if _differ(hidden[0], hidden[1]):
        raise CaptureError(
            f"{layer} uses data-dependent sparsity: which keys a query sees changes with the tokens. "
            "Its map has jumps, and is not captured."
        )


def _hidden(mask: Tensor) -> Tensor:
    return mask.logical_not() if mask.dtype == torch.bool else mask < -1e3


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _check_finite(layer: AttentionLayer, x: Tensor, softmaxes: list[SoftmaxCall]) -> None:
    values = [x, *(softmax.output for softmax in softmaxes if softmax.output is not None)]
    if not all(bool(torch.isfinite(t).all()) for t in values):
        for softmax in softmaxes:
            if not softmax.obstacle:
                split_mask(layer, softmax.mask)  # a token that sees no key has NaN for its output
        raise NonFiniteError(
            "inputs",
            expected=f"finite activations in {layer}",
            got="NaN or infinity",
            remedy="Check the model's weights.",
        )
