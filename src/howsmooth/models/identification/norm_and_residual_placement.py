"""Determination of where a traced layer has its residual connection and its norm layers around the attention.

Let X be the input of the attention, A its output and H the input of the norm whose output is X. The sum of
residual and attention is α∘B + λ∘C with B = H or X, and C = A or N₂(A) for a norm N₂ with input A. It is
searched among the inputs and outputs of the later module calls of the layer. A sum that fits these numbers is
only a hypothesis: ``verification`` compares it with the layer again, on other tokens, at ``Block.value_at``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from howsmooth.attention import Compose, LayerNorm, RMSNorm, TokenMap
from howsmooth.models.identification.layer_trace import LayerTrace, ModuleCall
from howsmooth.models.identification.residual_sums import (
    Factors,
    Target,
    ValueLocation,
    adds_up,
    find_sums,
    is_sum,
    like,
    plain_sums,
    same,
    scaled_sum,
)
from howsmooth.models.tolerance import precision, relative_error, tolerance
from howsmooth.models.tracing.recorder import is_norm

__all__ = [
    "Block", "FoundSum", "ValueLocation", "later_calls", "norm_map", "plain_sums_of", "read_block", "sums_of",
    "token_norm",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Block:
    """The attention half of a Transformer layer: the attention with its residual connection and norm layers.

    ``map`` is None if no sum of residual and attention was found; ``obstacle`` then says why. Otherwise
    ``map`` at the input H of ``pre_norm`` (at X if ``pre_norm`` is None) is the value found at ``value_at``.
    """

    #: ``post-norm``, ``pre-norm``, ``sandwich norms`` (H + N₂(A(N(H)))), ``norm of the branch`` (X + N₂(A)),
    #: ``parallel`` (pre-norm, with another branch added at once), ``no norm``; followed, after a comma, by
    #: ``layer scale``, ``scaled residual`` or ``residual after the norm`` (N(H) + A(N(H))). Empty if unknown.
    layout: str
    map: TokenMap | None
    obstacle: str
    pre_norm: nn.Module | None = None  # the norm before the attention, with input H; None if H is X itself
    next_norm: nn.Module | None = (
        None  # the norm whose input is the sum, or whose output is the block's value
    )
    value_at: ValueLocation | None = None


def read_block(trace: LayerTrace, attention: TokenMap, output: ModuleCall) -> Block:
    """Find the residual connection and the norm layers around the attention of a traced layer.

    Parameters
    ----------
    trace
        The layer's module calls and tokens.
    attention
        The map of the attention with its output projection.
    output
        The call whose output is the output of the attention: the call of the output projection or of a module
        around it. It is one of ``trace.after``.
    """
    branch = None if output.output is None else like(output.output, trace.x)
    if branch is None or attention.d_out != attention.d:
        return Block("", None, "its tokens change their dimension")
    later = later_calls(trace, output)
    for found in sums_of(trace, output):
        after = None if found.branch_norm is None else norm_map(found.branch_norm)
        if found.branch_norm is not None and after is None:
            return Block("", None, _no_norm(found.branch_norm))
        f = attention if after is None else Compose(after, attention)
        return _arranged(trace, f, found, later)
    _, x, hidden = _norm_before(trace)
    return Block("", None, _obstacle(later, branch, hidden, x))


@dataclass(frozen=True, eq=False)
class FoundSum:
    """A weighted sum of the residual and the attention output that equals one of the tensors of the layer up
    to rounding.
    """

    target: Target  # where the sum was found
    total: Factors  # the factors α and λ
    of_hidden: bool  # whether the residual is H, not X
    branch_norm: ModuleCall | None  # the norm N₂ between the attention and the sum
    pre: ModuleCall | None  # the norm whose output is X


def sums_of(trace: LayerTrace, output: ModuleCall) -> Iterator[FoundSum]:
    """Yield the ways in which a layer may add the output of a module to the residual stream, starting with
    the simplest.

    Each sum equals one of the tensors recorded in the trace.
    """
    branch = None if output.output is None else like(output.output, trace.x)
    if branch is None:
        return
    later = later_calls(trace, output)
    pre, x, hidden = _norm_before(trace)
    bases = [x] if hidden is None else [hidden, x]
    branches: list[tuple[Tensor, ModuleCall | None]] = [(branch, None), *_norms_of(branch, later)]
    for target, base, (_, branch_norm), total in find_sums(trace, later, bases, branches):
        yield FoundSum(target, total, base is hidden, branch_norm, pre)


def plain_sums_of(trace: LayerTrace, output: ModuleCall) -> Iterator[object]:
    """Yield the ways in which a layer adds the output of a module, as it is or after a norm, to any tensor of
    the layer that was there before.
    """
    branch = None if output.output is None else like(output.output, trace.x)
    branch = output.output if branch is None else branch
    if branch is None:
        return
    later = later_calls(trace, output)
    there = [t for c in (*trace.before, *trace.inside) for t in (c.inputs, c.output) if t is not None]
    there = list({id(t): t for t in (trace.x, *there, *trace.given)}.values())
    bases = [base for t in there if (base := like(t, branch)) is not None]
    branches: list[tuple[Tensor, ModuleCall | None]] = [(branch, None), *_norms_of(branch, later)]
    yield from plain_sums(trace, later, bases, branches)
    yield from (found for found in sums_of(trace, output) if found.total.branch is None)


def _arranged(trace: LayerTrace, branch: TokenMap, found: FoundSum, later: list[ModuleCall]) -> Block:
    """Return the attention half of a layer as a map, given the sum of residual and attention that
    was found.
    """
    target, pre, total = found.target, found.pre, found.total
    call, reading = target.call, target.reading
    following = call if call is not None and is_norm(call.module) else None
    next_norm = None if following is None else following.module
    if found.of_hidden and pre is not None:
        norm = norm_map(pre)
        if norm is None:
            return Block("", None, _no_norm(pre))
        layout = "sandwich norms" if found.branch_norm is not None else "pre-norm"
        if target.less is not None and _in_parallel(trace, found, later):
            layout = "parallel"
        layout += total.layout_suffix
        return Block(layout, total.around(Compose(branch, norm)), "", pre.module, next_norm, reading)
    side = "output" if following is None else _residual_side(trace, following, later)
    if following is not None and side == "output":
        norm = norm_map(following)
        if norm is None:
            return Block("", None, _no_norm(following))
        block = Compose(norm, total.around(branch))
        at = ValueLocation(following.module, "output")
        return Block("post-norm" + total.layout_suffix, block, "", None, following.module, at)
    if following is not None and side is None:
        return Block("", None, f"what is added to the output of {following.name} was not recognised")
    if pre is not None:
        norm = norm_map(pre)
        if norm is None:
            return Block("", None, _no_norm(pre))
        layout = ("sandwich norms" if found.branch_norm is not None else "pre-norm") + total.layout_suffix
        block = Compose(total.around(branch), norm)
        return Block(layout + ", residual after the norm", block, "", pre.module, next_norm, reading)
    layout = "no norm" if following is None else "pre-norm"
    layout = layout if found.branch_norm is None else "norm of the branch"
    return Block(layout + total.layout_suffix, total.around(branch), "", None, next_norm, reading)


def _residual_side(
    trace: LayerTrace, following: ModuleCall, later: list[ModuleCall]
) -> Literal["input", "output"] | None:
    """Determine whether the next residual connection of a layer (around its MLP) starts before or after the
    norm layer that follows the attention.

    The result is "input" if it starts before, "output" if it starts after, and None if neither is found.
    "output" means a post-norm layer, and "input" a pre-norm layer that lacks its first norm, such as the
    first layer of ModernBERT: in both, X + A is the input of the next norm.
    """
    rest = later[_index(later, following) + 1 :]
    ends = [c.inputs for c in rest if is_norm(c.module)] + [trace.output]
    sums = [s for end in ends if end is not None and (s := like(end, trace.x)) is not None]
    outputs = [c.output for c in rest if c.output is not None]
    branches = [b for output in outputs if (b := like(output, trace.x)) is not None]
    readings: list[tuple[Literal["input", "output"], Tensor | None]] = [
        ("output", following.output),
        ("input", following.inputs),
    ]
    if trace.output is not None and same(following.output, trace.output):
        return "output"
    for scaled in (False, True):
        for side, tokens in readings:
            value = None if tokens is None else like(tokens, trace.x)
            if value is None:
                continue
            for total in sums:
                at = Target(total, ValueLocation(following.module, side), None)
                for branch in branches:
                    plain = is_sum(at, value, branch, Factors())
                    if plain or (scaled and scaled_sum(trace, at, value, branch) is not None):
                        return side
    return None


def _in_parallel(trace: LayerTrace, found: FoundSum, later: list[ModuleCall]) -> bool:
    """Return True if another module of the layer (a parallel MLP) has the same input as the attention."""
    pre = found.pre
    given = [] if pre is None else [t for t in (pre.output, pre.inputs) if t is not None]
    others = [c for c in (*trace.before, *later) if c.inputs is not None and c is not pre]
    module = trace.layer.module
    return any(
        same(c.inputs, tokens)
        for c in others
        if all(m is not module for m in c.module.modules())
        for tokens in given
    )


def _norms_of(branch: Tensor, later: list[ModuleCall]) -> Iterator[tuple[Tensor, ModuleCall]]:
    """Yield the norm layers that are applied to the attention output, each with the tokens that it
    returns.
    """
    for call in later:
        if is_norm(call.module) and call.inputs is not None and call.output is not None:
            tokens, value = like(call.inputs, branch), like(call.output, branch)
            if tokens is not None and value is not None and torch.equal(tokens, branch):
                yield value, call


def _obstacle(later: list[ModuleCall], branch: Tensor, hidden: Tensor | None, x: Tensor) -> str:
    """Return a phrase that says why no sum of residual and attention was found in a layer."""
    following = next((c for c in later if is_norm(c.module) and c.inputs is not None), None)
    if following is None or following.inputs is None:
        return "no norm follows its attention, and its output is not the sum of residual and attention"
    target = like(following.inputs, x)
    what = "is not X + attention(X)" if hidden is None else "is not H + attention(norm(H))"
    if target is not None and adds_up([branch], target):
        what = "is the attention's output alone, and the sum with the residual was not found"
    elif target is not None and hidden is not None and adds_up([hidden], target):
        what = "is the layer's own input: the attention is parallel to what follows, or too small beside it"
    return f"the input of its next norm ({following.name}) {what}"


# ---------------------------------------------------------------- calls and tensors


def _norm_before(trace: LayerTrace) -> tuple[ModuleCall | None, Tensor, Tensor | None]:
    """Find the norm layer that computes the input X of the attention.

    Return its call, output and input; without such a norm layer, return (None, X, None).
    """
    x = trace.x
    given = [
        (c, tokens, hidden)
        for c in reversed(trace.before)
        if is_norm(c.module) and c.inputs is not None and c.output is not None
        if (tokens := like(c.output, x)) is not None and (hidden := like(c.inputs, x)) is not None
    ]
    # The layer ran by itself, so that its norm may round differently than in the forward pass that gave X.
    allowed = tolerance(precision(x.dtype))
    exact = next((one for one in given if torch.equal(one[1], x)), None)
    near = next((one for one in given if relative_error(one[1], x) <= allowed), None)
    return exact or near or (None, x, None)


def later_calls(trace: LayerTrace, output: ModuleCall) -> list[ModuleCall]:
    """Return all module calls in the trace of a layer that ended later than a given call."""
    index = next((i for i, c in enumerate(trace.after) if c is output or c.module is output.module), -1)
    return trace.after[index + 1 :]


def _index(calls: list[ModuleCall], call: ModuleCall) -> int:
    return next(i for i, other in enumerate(calls) if other is call)


# ---------------------------------------------------------------- norms


def _no_norm(call: ModuleCall) -> str:
    return f"{call.name} ({type(call.module).__name__}) computes neither LayerNorm nor RMSNorm"


def token_norm(trace: LayerTrace) -> LayerNorm | RMSNorm | None:
    """Return the norm layer whose output is the input X of the attention. The norm layer is returned as a
    map, or as None if it is unknown.
    """
    call = trace.last_norm
    return norm_map(call) if call is not None and same(call.output, trace.x) else None


def norm_map(call: ModuleCall) -> LayerNorm | RMSNorm | None:
    """Return the LayerNorm or RMSNorm map that reproduces the output of a module call, or None if neither
    does.
    """
    module, x, y = call.module, call.inputs, call.output
    if x is None or y is None or y.shape != x.shape:
        return None
    own = [p.detach().clone() for p in module.parameters()]
    if len(own) > 2 or any(p.shape != x.shape[-1:] or p.dtype != x.dtype for p in own):
        return None
    one = x.new_ones(x.shape[-1])
    hypotheses: list[LayerNorm | RMSNorm] = []
    for eps in _eps_of(module, x):
        gains = (own[0], 1 + own[0]) if own else (one,)  # Gemma and Nemotron store the gain minus one
        for gain in gains:
            hypotheses.append(LayerNorm(gain, own[1] if len(own) == 2 else None, eps))
            if len(own) < 2:
                hypotheses.append(RMSNorm(gain, eps))
    errors = [relative_error(norm(x), y) for norm in hypotheses]
    best = min(range(len(hypotheses)), key=errors.__getitem__)
    # transformers' RMSNorm classes compute in float32 for every dtype of the model.
    eps_used = precision(x.dtype, downcast=not isinstance(module, nn.LayerNorm))
    return hypotheses[best] if errors[best] <= tolerance(eps_used) else None


def _eps_of(module: nn.Module, x: Tensor) -> tuple[float, ...]:
    names = ("eps", "variance_epsilon", "epsilon")
    eps = next((value for name in names if (value := getattr(module, name, None)) is not None), None)
    if eps is not None:
        return (float(eps),)
    if isinstance(module, nn.RMSNorm):  # torch's default
        return (torch.finfo(x.dtype).eps,)
    return (1e-5, 1e-6, 1e-8, 1e-12)  # the usual constants: OLMo writes its own in the code
