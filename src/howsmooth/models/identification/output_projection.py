"""Search for the module call that returns the attention output of a layer, and for the output projection.

The attention output is what the attention module returns. If the module returns the heads alone, it is what
the next module makes of them; if it returns a sum with its own input, it is the output of the module that is
given the heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth.errors import CaptureError
from howsmooth.models.identification.layer_trace import LayerTrace, ModuleCall
from howsmooth.models.identification.norm_placement import (
    adds_up_with_a_residual,
    has_residual,
    later_calls,
)
from howsmooth.models.identification.self_attention_module import SelfAttentionModule, moved_tokens
from howsmooth.models.tolerance import lowest_epsilon, relative_error, tolerance
from howsmooth.models.tracing.attention_hooks import intercept_softmaxes
from howsmooth.models.tracing.attention_recorder import is_linear, output_of
from howsmooth.models.tracing.module_replay import first_tensor
from howsmooth.models.tracing.softmax_call import SoftmaxCall

__all__ = ["AttentionOutput", "find_output", "heads_of", "is_given"]


@dataclass(frozen=True, eq=False)
class AttentionOutput:
    """The module call that returns the attention output of a layer, and the call of the output projection."""

    #: The call whose output is the output of the attention.
    call: ModuleCall
    #: The call of the output projection, whose only argument are the concatenated heads; None if unknown.
    projection: ModuleCall | None
    #: Why the projection is unknown; "" if it is known.
    unclear: str
    #: Whether ``call`` is outside the attention module: its input is what the attention module returns.
    outside: bool = False
    #: Why the output of ``call`` is not the output of the attention after all; "" if it is.
    obstacle: str = ""


def find_output(trace: LayerTrace, self_attention: SelfAttentionModule) -> AttentionOutput:
    """Find the module calls of a layer that return the attention output and the output projection. Raise
    CaptureError if there is no projection and the attention module's own output cannot stand for the
    attention.
    """
    module = self_attention.replay.module
    own = next((c for c in trace.after if c.module is module and c.output is not None), None)
    projection, unclear = _projection(trace)
    if projection is None:
        if own is None:
            raise CaptureError(f"{unclear} Nor does its module give out tokens.")
        if _gives_out_heads(trace, own):
            following = next((c for c in trace.after if is_given(c, own.output)), None)
            if following is None:
                between = _what_lies_between(trace, own, outside=False)
                return AttentionOutput(own, None, unclear, obstacle=between)
            call = _outermost(trace, following)
            return AttentionOutput(call, None, unclear, True, _what_lies_between(trace, call, outside=True))
        if _adds_its_input(self_attention):
            raise CaptureError(
                f"{unclear} Its module's own output holds a residual (a part of the input, beside the "
                "attention), so that it cannot stand for the attention."
            )
        return AttentionOutput(own, None, unclear)
    if not _holds(module, projection.module):
        between = _what_lies_between(trace, projection, outside=True)
        return AttentionOutput(projection, projection, "", True, between)
    if own is not None and _alike(own.output, projection.output):
        return AttentionOutput(own, projection, "")
    between = _what_lies_between(trace, projection, outside=False)
    if own is not None and between and _is_the_branch(trace, self_attention, own):
        return AttentionOutput(own, projection, "")
    return AttentionOutput(projection, projection, "", obstacle=between)


def _what_lies_between(trace: LayerTrace, call: ModuleCall, *, outside: bool) -> str:
    """Return "" if a layer adds a module's output unchanged to the residual. Otherwise return an error
    message that names what lies between.
    """
    around = (c for c in trace.after if c is not call and _holds(c.module, trace.layer.module))
    returned = any(_alike(t, call.output) for t in (trace.output, *(c.output for c in around)))
    if (returned or adds_up_with_a_residual(trace, call)) and (not outside or _by_token(call)):
        return ""
    names = ", ".join(map(str, later_calls(trace, call)[:3]))
    between = f"what lies between ({names}, ...)" if names else "what lies between"
    return (
        f"the output of {call.name} ({type(call.module).__name__}) is neither what its attention module "
        f"returns nor added as it is to a residual, and {between} "
        "was not recognised. The scopes 'head' and 'heads' do not need it; for the others put it into the "
        "module that is given the heads"
    )


def _by_token(call: ModuleCall) -> bool:
    """Return True if a module acts on each token alone: it repeats its output for input shaped (1, n, d)."""
    if call.inputs is None or call.output is None:
        return False
    again, own = (t.flatten() for t in (first_tensor(call.module(call.inputs)), call.output))
    return again.shape == own.shape and relative_error(again, own) <= tolerance(lowest_epsilon(again.dtype))


def heads_of(trace: LayerTrace) -> Tensor | None:
    """Return the heads' outputs, concatenated to (n, heads * dim), or None if attention acts in windows."""
    heads = output_of(trace.softmaxes[0])
    if heads.ndim < 3 or heads.shape[:-3].numel() != 1:
        return None
    return heads.reshape(heads.shape[-3:]).movedim(0, 1).flatten(1)


def is_given(call: ModuleCall, tokens: Tensor | None) -> bool:
    """Return True if the called module has a weight matrix, and ``tokens`` were its only input."""
    matrix = is_linear(call.module) or (call.alone and any(p.ndim > 1 for p in call.module.parameters()))
    if not matrix or call.inputs is None or tokens is None:
        return False
    return call.inputs.shape[-1] == tokens.shape[-1] and _alike(call.inputs, tokens)


def _gives_out_heads(trace: LayerTrace, own: ModuleCall) -> bool:
    """Return True if the entries of the attention module's output are those of its heads, in any order."""
    heads, output = output_of(trace.softmaxes[-1]).flatten(), own.output
    if output is None or output.numel() != heads.numel() or len(trace.softmaxes) > 1:
        return False
    return torch.equal(output.flatten().sort().values, heads.sort().values)


def _outermost(trace: LayerTrace, call: ModuleCall) -> ModuleCall:
    """Return the call of the outermost module that contains the called module and has the same input."""
    return [c for c in trace.after if _holds(c.module, call.module) and is_given(c, call.inputs)][-1]


def _projection(trace: LayerTrace) -> tuple[ModuleCall | None, str]:
    """Return the call of the output projection and "". If there is none, return None and the reason."""
    unclear = f"The output projection of {trace.layer} cannot be identified:"
    if len(trace.softmaxes) > 1:
        return None, f"{unclear} it has {len(trace.softmaxes)} softmaxes."
    heads = heads_of(trace)
    if heads is None:
        return None, f"{unclear} its softmax acts on windows of the tokens."
    first = next((c for c in trace.after if is_given(c, heads)), None)
    if first is not None:
        return _outermost(trace, first), ""
    following = next((c for c in trace.after if is_linear(c.module)), None)
    if following is None:
        return None, f"{unclear} no linear map follows its attention."
    between = ", ".join(map(str, trace.after[: trace.after.index(following)]))
    return None, (
        f"{unclear} {following.name} is the next linear map, but it is not given the concatenated heads; "
        f"{between or 'something that is no module of its own'} lies between."
    )


def _holds(module: nn.Module, other: nn.Module) -> bool:
    return any(m is other for m in module.modules())


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if two tensors have bitwise equal entries in the same order."""
    if a is None or b is None:
        return False
    return a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten())


def _is_the_branch(trace: LayerTrace, self_attention: SelfAttentionModule, own: ModuleCall) -> bool:
    """Return True if the attention module returns the attention output alone, without the residual."""
    # A residual has the dimension of X, unless the attention module is a whole layer.
    same = own.output is None or own.output.shape[-1] == trace.x.shape[-1]
    if not same and self_attention.replay.module is not trace.layer.root:
        return True
    return not _adds_its_input(self_attention) or has_residual(trace, own)


def _adds_its_input(self_attention: SelfAttentionModule) -> bool:
    """Return True if the output of the attention module depends on the tokens even when its softmaxes return
    0.
    """

    def silent(softmax: SoftmaxCall) -> Tensor:
        return torch.zeros_like(output_of(softmax))

    alone, outputs = self_attention.alone, []
    for x in (alone.x, moved_tokens(alone.x)):
        with intercept_softmaxes(alone.module, silent, implementation=self_attention.implementation):
            outputs.append(first_tensor(alone(x)).nan_to_num(nan=0.0))
    return not torch.equal(*outputs)
