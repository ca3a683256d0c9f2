"""How a recorded layer arranges residual connection and norm around its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth.attention import Compose, LayerNorm, Residual, RMSNorm, SelfAttention, TokenMap
from howsmooth.models.recording import LayerRecord, ModuleCall, is_linear, is_norm
from howsmooth.models.tolerance import one_operation, precision, relative_error, tolerance

__all__ = ["Block", "read_block", "token_norm"]


@dataclass(frozen=True, eq=False)
class Block:
    """The layout of a layer up to the input of what follows its attention.

    ``map`` is None if the layout is not one of the two; ``obstacle`` then says why.
    """

    layout: str  # "post-norm", "pre-norm" or ""
    map: TokenMap | None
    obstacle: str
    pre_norm: nn.Module | None = None  # pre-norm: its input is the layer's input H; None: H is X itself
    next_norm: nn.Module | None = None  # post-norm: its output is the block's; pre-norm: its input is


def read_block(record: LayerRecord, attention: SelfAttention, output: ModuleCall) -> Block:
    """Tell the layout from the sums that the recorded numbers confirm.

    With X the attention's input, A its output and H the input of a norm that gave X: post-norm if the
    next norm is given X + A and the layer carries on from its output, pre-norm if it is given H + A.

    Parameters
    ----------
    record
        The layer.
    attention
        Its attention as a map, with output projection.
    output
        The call of its output projection, a member of ``record.after``.

    """
    x, branch = record.x, output.output
    later = record.after[record.after.index(output) + 1 :]
    following = next((c for c in later if is_norm(c.module) and c.inputs is not None), None)
    if following is None or following.inputs is None or branch is None:
        return Block("", None, "no norm follows its attention")
    target = following.inputs
    if branch.shape != x.shape or target.shape != x.shape:
        return Block("", None, "its tokens change their dimension")
    tol = one_operation(precision(x.dtype))

    def is_next(value: Tensor) -> bool:
        return relative_error(value, target) <= tol

    pre = next((c for c in reversed(record.before) if is_norm(c.module) and _equal(c.output, x)), None)
    if pre is None:
        if not is_next(x + branch):
            return Block("", None, f"the input of its next norm ({following.name}) is not X + attention(X)")
        return _without_pre_norm(record, attention, following)
    hidden = pre.inputs
    if hidden is None or hidden.shape != x.shape or not is_next(hidden + branch):
        what = "is not H + attention(norm(H))"
        if is_next(branch):
            what = "is the attention's output alone (sandwich norms)"
        elif hidden is not None and hidden.shape == x.shape and is_next(hidden):
            what = "is the layer's own input (attention in parallel to what follows)"
        return Block("", None, f"the input of its next norm ({following.name}) {what}")
    norm = _norm_map(pre)
    if norm is None:
        return Block("", None, _no_norm(pre))
    return Block("pre-norm", Residual(Compose(attention, norm)), "", pre.module, following.module)


def _without_pre_norm(record: LayerRecord, attention: SelfAttention, following: ModuleCall) -> Block:
    """Tell post-norm from a pre-norm layer without its first norm, as the first layer of ModernBERT.

    Both give X + A to the next norm. What the layer later adds its second branch to decides: the
    norm's output (post-norm), or the norm's input.
    """
    tol = one_operation(precision(record.x.dtype))
    later = record.after[record.after.index(following) + 1 :]
    branches = [c.output for c in later if is_linear(c.module) and c.output is not None]
    sums = [c.inputs for c in later if is_norm(c.module) and c.inputs is not None]
    sums += [record.output] if record.output is not None else []

    def carries_on(value: Tensor | None) -> bool:
        return value is not None and any(
            b.shape == value.shape == s.shape and relative_error(value + b, s) <= tol
            for b in branches
            for s in sums
        )

    if carries_on(following.output):
        norm = _norm_map(following)
        if norm is None:
            return Block("", None, _no_norm(following))
        return Block("post-norm", Compose(norm, Residual(attention)), "", None, following.module)
    if carries_on(following.inputs):
        return Block("pre-norm", Residual(attention), "", None, following.module)
    return Block("", None, f"what is added to the output of {following.name} was not recognised")


def _equal(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and torch.equal(a, b)


def _no_norm(call: ModuleCall) -> str:
    return f"{call.name} ({type(call.module).__name__}) computes neither LayerNorm nor RMSNorm"


def token_norm(record: LayerRecord) -> LayerNorm | RMSNorm | None:
    """Return the norm whose outputs the attention's tokens are, or None if no norm gave them."""
    call = record.last_norm
    return _norm_map(call) if call is not None and _equal(call.output, record.x) else None


def _norm_map(call: ModuleCall) -> LayerNorm | RMSNorm | None:
    """Return the norm as a map, with the gain that it really applies; None if it is none that is known."""
    module, x, y = call.module, call.inputs, call.output
    stored, shift = getattr(module, "weight", None), getattr(module, "bias", None)
    if x is None or y is None or y.shape != x.shape:
        return None
    gain = x.new_ones(x.shape[-1]) if stored is None else stored.detach().clone()
    bias = None if shift is None else shift.detach().clone()
    if any(t is not None and (t.shape != x.shape[-1:] or t.dtype != x.dtype) for t in (gain, bias)):
        return None
    names = ("eps", "variance_epsilon", "epsilon")
    eps = next((value for name in names if (value := getattr(module, name, None)) is not None), None)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)  # as torch.nn.RMSNorm without eps
    hypotheses: list[LayerNorm | RMSNorm] = [LayerNorm(gain, bias, eps)]
    if bias is None:
        hypotheses += [RMSNorm(gain, eps), RMSNorm(1 + gain, eps)]  # Gemma stores the gain minus one
    errors = [relative_error(norm(x), y) for norm in hypotheses]
    best = min(range(len(hypotheses)), key=errors.__getitem__)
    # transformers' RMSNorm classes compute in float32 whatever the dtype of the model.
    eps_used = precision(x.dtype, downcast=not isinstance(module, nn.LayerNorm))
    return hypotheses[best] if errors[best] <= tolerance(eps_used) else None
