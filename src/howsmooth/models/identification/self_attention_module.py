"""Detection of the self-attention module of a layer and of its token argument, by running the module on
changed tokens.

The self-attention module is the innermost module around the softmaxes with an argument X such that queries,
keys and values of every softmax change if X changes. Names and shapes decide nothing: a layer of
cross-attention may have as many keys as queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from howsmooth.errors import CaptureError, NonFiniteError
from howsmooth.models.tracing.attention_hooks import intercept_softmaxes
from howsmooth.models.tracing.layer_trace import AttentionLayer
from howsmooth.models.tracing.mask_and_bias import split_mask
from howsmooth.models.tracing.module_call_tracer import TracedCall, TracedLayer
from howsmooth.models.tracing.module_replay import ModuleReplay, token_arguments
from howsmooth.models.tracing.softmax_tracer import SoftmaxCall

__all__ = [
    "CrossAttention",
    "RandomAttention",
    "SelfAttentionModule",
    "check_finite",
    "find_self_attention",
    "first_line",
    "has_weights_for",
    "moved_operands",
    "moved_tokens",
    "obstacle_of",
    "refuse_randomness",
    "softmaxes_of",
]


_ALL = {"queries", "keys", "values"}
# Largest norm of a moved token, relative to the largest norm of a token; below one, to allow for rounding.
_WITHIN = 0.9


class CrossAttention(CaptureError):  # noqa: N818 - says what was found
    """The exception for a layer whose queries and keys come from different tokens."""


class RandomAttention(CaptureError):  # noqa: N818 - says what was found
    """The exception for a layer whose output differs between two runs on the same tokens."""


@dataclass(frozen=True, eq=False)
class SelfAttentionModule:
    """The self-attention module of one layer, with a recorded call of the module that can be repeated."""

    layer: AttentionLayer
    replay: ModuleReplay  # the call for all sequences
    alone: ModuleReplay  # the call for the first sequence alone
    softmaxes: list[SoftmaxCall]  # its softmax attentions for the first sequence
    #: The user's attention implementation if the module uses transformers' interface, else None.
    implementation: str | None
    #: Why the softmaxes are no fixed functions of queries, keys and values, in a phrase; "" if they are.
    obstacle: str


def find_self_attention(traced_layer: TracedLayer, batch: int, implementation: str) -> SelfAttentionModule:
    """Find the module of a traced layer whose queries, keys and values come from the same tokens.

    Parameters
    ----------
    traced_layer
        The layer, with the module calls around its softmaxes.
    batch
        The number of sequences in the forward pass.
    implementation
        The user's attention implementation.

    Raises
    ------
    CrossAttention
        If no module of the layer has an argument that changes queries, keys and values.
    CaptureError
        If the layer cannot be run by itself, or which keys a query sees depends on the tokens.
    NonFiniteError
        If its input or its output contains NaN or infinity.

    """
    reasons: list[str] = []
    partly = mixed = False
    for call in reversed(traced_layer.calls):
        if not call.unchanged():
            reasons.append(f"{call.name} ({type(call.module).__name__}) changes its arguments in place")
            continue
        for x in token_arguments(call):
            if not has_weights_for(call, x):
                continue
            try:
                replay = ModuleReplay(call, x, batch)
                alone = replay.of_first_sequence()
                before = softmaxes_of(alone, alone.x, implementation)
                way = implementation if any(softmax.kind == "interface" for softmax in before) else None
                if way is None:
                    before = softmaxes_of(alone, alone.x, None)
                if len(before) != traced_layer.softmaxes:
                    continue  # this module contains several layers
                refuse_randomness(traced_layer.layer, before, softmaxes_of(alone, alone.x, way))
                after = softmaxes_of(alone, moved_tokens(alone.x), way)
            except RandomAttention:
                raise
            except Exception as error:  # a module may raise any error when it runs by itself
                reasons.append(first_line(error))
                continue
            if len(after) != len(before):
                reasons.append("it computes another number of softmaxes for other tokens")
                continue
            check_finite(traced_layer.layer, alone.x, before)
            moved = [moved_operands(a, b) for a, b in zip(before, after, strict=True)]
            if all(m == _ALL for m in moved):
                layer = replace(traced_layer.layer, name=call.name, module=call.module)
                _refuse_chosen_masks(layer, traced_layer, call, x, batch, way)
                return SelfAttentionModule(
                    layer, replay, alone, before, way, obstacle_of(layer, before, after)
                )
            partly = partly or any(moved)
            mixed = mixed or _ALL in moved
    layer = traced_layer.layer
    if mixed:
        raise CrossAttention(
            f"{layer} mixes two streams of tokens (cross-attention between them): one of its softmaxes takes "
            "queries, keys and values from the one, another from both, which is not captured."
        )
    if not partly and not reasons:
        reasons = ["none of its arguments holds tokens (..., n, d) that a matrix of it acts on"]
    if partly:
        raise CrossAttention(
            f"{layer} is cross-attention: no single argument of it, or of the modules around it up to its "
            "layer, gives queries, keys and values alike. Capture it with scope 'cross-attention'."
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
    """Raise an error if the attention mask of a layer depends on the values of its tokens."""
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
        before = softmaxes_of(whole, whole.x, implementation)
        after = softmaxes_of(whole, moved_tokens(whole.x), implementation)
    except Exception:  # the layer runs again when it is traced; the error is reported there
        return
    for a, b in zip(before, after, strict=False):
        _refuse_sparsity(layer, a, b)


def has_weights_for(call: TracedCall, x: Tensor) -> bool:
    """Return True if a module has a weight matrix for tokens of the dimension of ``x``.

    A module without such a matrix is given queries, keys and values, not tokens.
    """
    return any(p.ndim >= 2 and x.shape[-1] in p.shape for p in call.module.parameters())


def moved_tokens(x: Tensor, first: int = 0) -> Tensor:
    """Return tokens plus random noise of about the same size, drawn with a fixed seed.

    Tokens before index ``first``, counted along the axis before the last, do not change. No token gets a
    larger norm than the largest norm in ``x``, because a layer may refuse tokens outside a ball.
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


def softmaxes_of(call: ModuleReplay, x: Tensor, implementation: str | None) -> list[SoftmaxCall]:
    """Repeat a module call with tokens ``x``, and return the softmax attentions that it computes."""
    seen: list[SoftmaxCall] = []
    with intercept_softmaxes(
        call.module, lambda softmax: seen.append(softmax), implementation=implementation
    ):
        call(x)
    return seen


def moved_operands(a: SoftmaxCall, b: SoftmaxCall) -> set[str]:
    """Return which operands ("queries", "keys" or "values") differ between two softmax calls.

    If queries and keys could not be read, both count as different where the probabilities differ.
    """
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


def refuse_randomness(layer: AttentionLayer, first: list[SoftmaxCall], second: list[SoftmaxCall]) -> None:
    """Raise RandomAttention if two runs on the same tokens differ, for example because keys are sampled at
    random.
    """
    pairs = [(a.output, b.output) for a, b in zip(first, second, strict=False)]
    if len(first) != len(second) or not all(a is b or _alike(a, b) for a, b in pairs):
        raise RandomAttention(
            f"{layer} gives another output for the same tokens, in evaluation mode: it draws something at "
            "random, as data-dependent sparsity with sampled keys does, and is not captured."
        )


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if two outputs agree up to the rounding of a GPU that sums in a different order in each
    run.

    NaN counts as zero here; outputs with NaN are refused later.
    """
    if a is None or b is None or a.shape != b.shape:
        return False
    a, b = a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
    return bool(((a - b).abs() <= 1e-3 * a.abs().amax()).all())


def obstacle_of(layer: AttentionLayer, before: list[SoftmaxCall], after: list[SoftmaxCall]) -> str:
    """Compare the softmaxes of a layer in two runs on different tokens. Return a phrase that says why they
    are not the same functions of their queries, keys and values in both runs, or "" if they are.

    Raises
    ------
    CaptureError
        If the tokens determine which keys a query sees.

    """
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
    hidden = [None if m is None else ~m if m.dtype == torch.bool else m < -1e3 for m in (a.mask, b.mask)]
    if _differ(hidden[0], hidden[1]):
        raise CaptureError(
            f"{layer} uses data-dependent sparsity: which keys a query sees changes with the tokens. "
            "Its map has jumps, and is not captured."
        )


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def check_finite(layer: AttentionLayer, x: Tensor, softmaxes: list[SoftmaxCall]) -> None:
    """Raise NonFiniteError if the tokens or the outputs of softmaxes are not finite."""
    values = [x, *(softmax.output for softmax in softmaxes if softmax.output is not None)]
    if not all(bool(torch.isfinite(t).all()) for t in values):
        for softmax in softmaxes:
            if not softmax.obstacle:
                split_mask(layer, softmax.mask)  # raises if a token sees no key, which explains the NaN
        raise NonFiniteError(
            "inputs",
            expected=f"finite activations in {layer}",
            got="NaN or infinity",
            remedy="Check the model's weights.",
        )
