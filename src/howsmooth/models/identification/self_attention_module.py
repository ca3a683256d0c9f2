"""Detection of the self-attention module of a layer and of its token argument, by running the module on
changed tokens.

The self-attention module is the innermost module around the softmaxes with an argument X such that queries,
keys and values of every softmax change if X changes. Names and shapes decide nothing: a layer of
cross-attention may have as many keys as queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from howsmooth.errors import CaptureError, HowsmoothError, NonFiniteError
from howsmooth.models.finite_weights import naming_weights
from howsmooth.models.tracing.attention_hooks import intercept_softmaxes
from howsmooth.models.tracing.attention_recorder import AttentionLayer, TracedLayer
from howsmooth.models.tracing.mask_and_bias import split_mask
from howsmooth.models.tracing.module_replay import ModuleReplay, first_tensor, token_arguments
from howsmooth.models.tracing.softmax_call import SoftmaxCall
from howsmooth.watching import Call

__all__ = [
    "MEMORY", "QUERIES", "CrossAttention", "SelfAttentionModule", "attention_run", "check_finite_outputs",
    "detached", "errors_of", "find_self_attention", "kept_tensors", "moved_tokens", "obstacle_of",
    "tried_arguments",
]  # fmt: skip

#: The operands of a softmax that come from the tokens of the queries, and from the memory.
QUERIES, MEMORY = {"queries"}, {"keys", "values"}
_EVERY = QUERIES | MEMORY
# Largest norm of a moved token, relative to the largest norm of a token; below one, to allow for rounding.
_WITHIN = 0.9


class CrossAttention(CaptureError):  # noqa: N818 - says what was found
    """The error for a layer whose queries and keys come from different tokens."""


class _Stateful(CaptureError):  # noqa: N818 - says what was found
    """The error for a layer that draws random numbers, or reads keys or values from a stored tensor."""


@dataclass(frozen=True, eq=False)
class SelfAttentionModule:
    """A module that contains the softmaxes of a layer, and a recorded call of this module. The call can be
    repeated with other tokens in place of one argument.
    """

    layer: AttentionLayer
    call: Call
    replay: ModuleReplay  # the call for all sequences
    alone: ModuleReplay  # the call for the first sequence alone
    softmaxes: list[SoftmaxCall]  # in the call for the first sequence, repeated with its own tokens
    after: list[SoftmaxCall]  # and with moved tokens
    #: The user's attention implementation if the module uses transformers' interface, else None.
    implementation: str | None
    moved: list[set[str]]  # for each softmax, which of its operands the argument moves
    #: Why the softmaxes are no fixed functions of queries, keys and values, in a phrase; "" if they are.
    obstacle: str = ""


def find_self_attention(traced_layer: TracedLayer) -> SelfAttentionModule:
    """Find the module of a traced layer whose queries, keys and values come from the same tokens. Raise
    CrossAttention if no argument changes all of them, NonFiniteError if its input or output is NaN or
    infinite, and CaptureError if it cannot be run by itself, or which keys a query sees depends on the
    tokens.
    """
    layer, reasons = traced_layer.layer, list[str]()
    tries = list[SelfAttentionModule]()
    for tried in tried_arguments(traced_layer, reasons):
        check_finite_outputs(layer, tried.alone.x, tried.softmaxes)
        tries.append(tried)
        if all(m == _EVERY for m in tried.moved):
            found: SelfAttentionModule | None = tried
            break
    else:
        found = _with_still_operands(tries)
    if found is not None:
        _refuse_chosen_masks(traced_layer, found)
        return replace(found, obstacle=obstacle_of(found.layer, found.softmaxes, found.after))
    if any(_EVERY in tried.moved for tried in tries):
        raise CrossAttention(
            f"{layer} mixes two streams of tokens (cross-attention between them): one of its softmaxes takes "
            "queries, keys and values from the one, another from both, which is not captured."
        )
    if any(any(tried.moved) for tried in tries):
        raise CrossAttention(
            f"{layer} is cross-attention: no single argument of it, or of the modules around it up to its "
            "layer, gives queries, keys and values alike. Capture it with scope 'cross-attention'."
        )
    reasons = reasons or ["none of its arguments holds tokens (..., n, d) that a matrix of it acts on"]
    raise CaptureError(f"{layer} cannot be run by itself: {'; '.join(dict.fromkeys(reasons))[:300]}.")


def _with_still_operands(tries: Sequence[SelfAttentionModule]) -> SelfAttentionModule | None:
    """Return the module whose tokens change all operands but those that no tokens change, such as values of
    zero weights; None if there is none. Raise CaptureError if it may as well be one of cross-attention.
    """
    softmaxes = tries[0].softmaxes if tries else []
    square = (a.output is not None and a.output.shape[-2] == a.value.shape[-2] for a in softmaxes)
    if not tries or not all(square):
        return None

    def fits(tried: SelfAttentionModule, i: int) -> bool:
        # Tokens or their positions change both queries and keys; what changes one of both may be a sequence.
        others = [one for one in tries if one is not tried and not _of_both(one.moved[i])]
        still, own = _EVERY.difference(*(one.moved[i] for one in others)), tried.moved[i]
        return own | still == _EVERY and (_of_both(own) or all(one.call is not tried.call for one in others))

    for tried in tries:
        if all(fits(tried, i) for i in range(len(softmaxes))):
            return tried
    if still := _EVERY.difference(*(m for tried in tries for m in tried.moved)):
        raise CaptureError(
            f"{tries[0].layer} may be self-attention or cross-attention: no tokens change its "
            f"{' and '.join(sorted(still))}, as with weights that are zero."
        )
    return None


def _of_both(moved: set[str]) -> bool:
    return bool(moved & QUERIES and moved & MEMORY)


def tried_arguments(traced_layer: TracedLayer, reasons: list[str]) -> Iterator[SelfAttentionModule]:
    """Run each module around a layer's softmaxes, the innermost first, with one argument changed at a time.
    Yield each module with the operands of the softmaxes that changed. Add to ``reasons`` why an argument
    cannot be tried.
    """
    layer = traced_layer.layer
    for call in reversed(traced_layer.calls):
        if not call.unchanged():
            reasons.append(f"{call.name} ({type(call.module).__name__}) changes its arguments in place")
            continue
        for x in token_arguments(call):
            # A module without a matrix for them is given queries, keys and values, not tokens.
            if not any(p.ndim >= 2 and x.shape[-1] in p.shape for p in call.module.parameters()):
                continue
            try:
                replay = ModuleReplay(call, x, traced_layer.model.batch)
                alone = replay.of_first_sequence()
                owned = kept_tensors(call.module)
                way, returned, before = _repeated(alone, traced_layer.model.implementation)
                if len(before) != traced_layer.softmaxes:
                    continue  # this module contains several layers
                _refuse_cache(layer, owned, before)
                _refuse_randomness(layer, alone, returned, before, way)
                _, after = attention_run(alone, moved_tokens(alone.x), way)
            except _Stateful:
                raise
            except Exception as error:  # a module may raise any error when it runs by itself
                reasons.append(_first_line(error))
                continue
            if len(after) != len(before):
                reasons.append("it computes another number of softmaxes for other tokens")
                continue
            moved = [_moved(a, b) for a, b in zip(before, after, strict=True)]
            own = replace(layer, name=call.name, module=call.module)
            yield SelfAttentionModule(own, call, replay, alone, before, after, way, moved)


def attention_run(call: ModuleReplay, x: Tensor, implementation: str | None) -> tuple[Any, list[SoftmaxCall]]:
    """Repeat a module call with tokens ``x``. Return the output of the module and the softmaxes in it."""
    seen: list[SoftmaxCall] = []
    with intercept_softmaxes(call.module, seen.append, implementation=implementation):
        returned = call(x)
    return returned, seen


def _repeated(call: ModuleReplay, implementation: str) -> tuple[str | None, Any, list[SoftmaxCall]]:
    """Return ``implementation`` (None without transformers' interface), the output, and the softmaxes."""
    returned, seen = attention_run(call, call.x, implementation)
    if any(softmax.kind == "interface" for softmax in seen):
        return implementation, returned, seen
    if any(getattr(module, "config", None) is not None for module in call.module.modules()):
        # Some modules choose their code by the name of the implementation.
        returned, seen = attention_run(call, call.x, None)
    return None, returned, seen


def _refuse_chosen_masks(traced_layer: TracedLayer, tried: SelfAttentionModule) -> None:
    root, call = traced_layer.calls[0], tried.call
    given = [t for t in tree_leaves((root.args, root.kwargs)) if isinstance(t, Tensor)]
    made = [
        t
        for t in tree_leaves((call.args, call.kwargs))
        if isinstance(t, Tensor)
        and t is not tried.replay.x
        and t.ndim > 1
        and all(_differ(t, other) for other in given)
    ]
    tokens = next(token_arguments(root), None)
    if call is root or not made or tokens is None:
        return
    try:
        whole = ModuleReplay(root, tokens, tried.replay.batch).of_first_sequence()
        runs = [attention_run(whole, t, tried.implementation)[1] for t in (whole.x, moved_tokens(whole.x))]
    except Exception:  # the layer runs again when it is traced; the error is reported there
        return
    for a, b in zip(*runs, strict=False):
        _refuse_sparsity(tried.layer, a, b)


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


def _moved(a: SoftmaxCall, b: SoftmaxCall) -> set[str]:
    """Return the operands that differ; unread queries and keys differ if probabilities (or outputs) do."""
    found = {"values"} if _differ(a.value, b.value) else set()
    if a.query is not None and a.key is not None:
        found |= {"queries"} if _differ(a.query, b.query) else set()
        return found | ({"keys"} if _differ(a.key, b.key) else set())
    pairs = (a.output, b.output) if a.probabilities is None else (a.probabilities, b.probabilities)
    return found | ({"queries", "keys"} if _differ(*pairs) else set())


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    if a is b:
        return False
    if a is None or b is None:
        return True
    return a.shape != b.shape or not torch.equal(a, b)


def _refuse_randomness(
    layer: AttentionLayer,
    call: ModuleReplay,
    returned: Any,
    softmaxes: list[SoftmaxCall],
    implementation: str | None,
) -> None:
    own = call.output
    try:
        same = own is not None and _alike(own, first_tensor(returned))
    except CaptureError:  # it returns no tensor
        same = False
    if same:
        return
    # The output alone may differ for other reasons, such as a cache that the first call has filled.
    _, again = attention_run(call, call.x, implementation)
    pairs = [(a.output, b.output) for a, b in zip(softmaxes, again, strict=False)]
    if len(softmaxes) != len(again) or not all(a is b or _alike(a, b) for a, b in pairs):
        raise _Stateful(
            f"{layer} gives another output for the same tokens, in evaluation mode: it draws something at "
            "random, as data-dependent sparsity with sampled keys does, and is not captured."
        )


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if two outputs agree up to the rounding of a GPU; NaN, refused later, is zero here."""
    if a is None or b is None or a.shape != b.shape:
        return False
    a, b = a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
    return bool(((a - b).abs() <= 1e-3 * a.abs().amax()).all())


def kept_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a module stores besides its parameters, by name."""
    return {
        f"{path}.{name}".strip("."): tensor
        for path, part in module.named_modules()
        for name, tensor in (*vars(part).items(), *part._buffers.items())
        if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
    }


def detached(module: nn.Module) -> dict[int, Tensor]:
    """Return detached copies of the tensors that a module stores besides its parameters, as a ``memo`` for
    ``copy.deepcopy``. Without it, deepcopy refuses tensors with a graph.
    """
    return {id(tensor): tensor.detach().clone() for tensor in kept_tensors(module).values()}


def _refuse_cache(layer: AttentionLayer, owned: dict[str, Tensor], softmaxes: list[SoftmaxCall]) -> None:
    own = {tensor.untyped_storage().data_ptr(): name for name, tensor in owned.items()}
    operands = [t for softmax in softmaxes for t in (softmax.key, softmax.value) if t is not None]
    found = [own[p] for t in operands if (p := t.untyped_storage().data_ptr()) in own]
    if found:
        names = " and ".join(dict.fromkeys(found))
        raise _Stateful(
            f"{layer} writes its keys and values into a tensor that it keeps ({names}) and reads them from "
            "there, so that it has a state. Switch this cache off for the measurement: let the module attend "
            "to the keys and values that it has just computed."
        )


def obstacle_of(layer: AttentionLayer, before: list[SoftmaxCall], after: list[SoftmaxCall]) -> str:
    """Compare the softmaxes of a layer in two runs on different tokens. Return "" if both runs compute them
    alike from queries, keys and values, else a phrase that says why not. Raise CaptureError if the tokens
    determine which keys a query sees.
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


@contextmanager
def errors_of(layer: AttentionLayer) -> Iterator[None]:
    """Return a context manager that turns errors of a layer's own code into CaptureErrors."""
    try:
        with naming_weights(layer.module, layer.name):
            yield
    except HowsmoothError:
        raise
    except Exception as error:
        raise CaptureError(f"{layer} cannot be run by itself: {_first_line(error)}.") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def check_finite_outputs(layer: AttentionLayer, x: Tensor, softmaxes: list[SoftmaxCall]) -> None:
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
