"""Detection of the output projection of a layer and of the tensor that is the attention output.

The attention output is what the attention module returns, unless the module returns a sum with a residual, or
the heads alone. Then it is the output of the projection; but only if the layer adds that output unchanged to
a residual, which is tested by running the layer with another output of the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from howsmooth.errors import CaptureError
from howsmooth.models.identification.norm_and_residual_placement import later_calls, sums_of
from howsmooth.models.identification.qkv_projections import rows
from howsmooth.models.identification.residual_sums import adds_up, find_sums, like
from howsmooth.models.identification.self_attention_module import SelfAttentionModule, moved_tokens
from howsmooth.models.tolerance import precision, relative_error, tolerance
from howsmooth.models.tracing.attention_hooks import intercept_softmaxes
from howsmooth.models.tracing.layer_trace import LayerTrace, ModuleCall, is_linear, is_norm, output_of
from howsmooth.models.tracing.module_replay import first_tensor
from howsmooth.models.tracing.softmax_tracer import SoftmaxCall

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


def find_output(
    trace: LayerTrace, self_attention: SelfAttentionModule, again: Callable[[], LayerTrace]
) -> AttentionOutput:
    """Find the module call that returns the attention output of a layer, and the call of the output
    projection.

    ``again`` runs the layer once more and returns its trace.

    Raises
    ------
    CaptureError
        If no projection is found, and the attention module returns no tokens or adds its input to the
        attention.

    """
    projection, unclear = _projection(trace)
    own = next((c for c in trace.after if c.module is self_attention.replay.module), None)
    if own is not None and own.output is None:
        own = None
    if projection is None:
        if own is None:
            raise CaptureError(f"{unclear} Nor does its module give out tokens.")
        if _gives_out_heads(trace, own):
            following = next((c for c in trace.after if is_given(c, own.output)), None)
            if following is not None:
                return _outside(trace, self_attention, again, _outermost(trace, following), None, unclear)
            shows = _reaches_residual(trace, own, again, _possible_sums_outside(trace, self_attention, own))
            return AttentionOutput(own, None, unclear, obstacle="" if shows else _obstacle(trace, own))
        if _adds_its_input(self_attention):
            raise CaptureError(
                f"{unclear} Its module's own output holds a residual (a part of the input, beside the "
                "attention), so that it cannot stand for the attention."
            )
        return AttentionOutput(own, None, unclear)
    if not _holds(self_attention.replay.module, projection.module):
        return _outside(trace, self_attention, again, projection, projection, "")
    if own is not None and _alike(own.output, projection.output):
        return AttentionOutput(own, projection, "")
    shows = _reaches_residual(
        trace, projection, again, _possible_sums_inside(trace, self_attention, projection)
    )
    if own is not None and not shows and _is_the_branch(trace, self_attention, own):
        return AttentionOutput(own, projection, "")
    return AttentionOutput(projection, projection, "", obstacle="" if shows else _obstacle(trace, projection))


def _outside(
    trace: LayerTrace,
    self_attention: SelfAttentionModule,
    again: Callable[[], LayerTrace],
    call: ModuleCall,
    projection: ModuleCall | None,
    unclear: str,
) -> AttentionOutput:
    """Describe the attention output if a module outside the attention module computes it.

    The description names an obstacle if the layer does not add the output of ``call`` to a residual.
    """
    shows = _reaches_residual(
        trace, call, again, _possible_sums_outside(trace, self_attention, call)
    ) and _by_token(call)
    return AttentionOutput(call, projection, unclear, True, "" if shows else _obstacle(trace, call))


def _by_token(call: ModuleCall) -> bool:
    """Return True if a module reproduces its recorded output when it runs again on its recorded input in the
    shape (1, n, d).
    """
    if call.inputs is None or call.output is None:
        return False
    again = first_tensor(call.module(call.inputs))
    allowed = tolerance(precision(again.dtype))
    return again.numel() == call.output.numel() and relative_error(rows(again), rows(call.output)) <= allowed


def _obstacle(trace: LayerTrace, call: ModuleCall) -> str:
    """Return an error message that says that the output of a module is not added to any known residual."""
    following = later_calls(trace, call)[:3]
    names = ", ".join(f"{c.name.rsplit('.', 1)[-1]} ({type(c.module).__name__})" for c in following)
    between = f"what lies between ({names}, ...)" if names else "what lies between"
    return (
        f"the output of {call.name} ({type(call.module).__name__}) is neither what its attention module "
        f"returns nor added as it is to a residual, and {between} "
        "was not recognised. The scopes 'head' and 'heads' do not need it; for the others put it into the "
        "module that is given the heads"
    )


# ---------------------------------------------------------------- the projection


def heads_of(trace: LayerTrace) -> Tensor | None:
    """Return the concatenated heads (n, heads * dim), or None if the attention acts within windows
    of tokens.
    """
    heads = output_of(trace.softmaxes[0])
    if heads.ndim < 3 or heads.shape[:-3].numel() != 1:
        return None
    return heads.reshape(heads.shape[-3:]).movedim(0, 1).flatten(1)


def is_given(call: ModuleCall, tokens: Tensor | None) -> bool:
    """Return True if the called module has a weight matrix and its only input was ``tokens``."""
    matrix = is_linear(call.module) or (call.alone and any(p.ndim > 1 for p in call.module.parameters()))
    if not matrix or call.inputs is None or tokens is None:
        return False
    return call.inputs.shape[-1] == tokens.shape[-1] and _alike(call.inputs, tokens)


def _gives_out_heads(trace: LayerTrace, own: ModuleCall) -> bool:
    """Return True if the attention module returns the entries of its heads unchanged, in any order."""
    heads, output = output_of(trace.softmaxes[-1]).flatten(), own.output
    if output is None or output.numel() != heads.numel() or len(trace.softmaxes) > 1:
        return False
    return torch.equal(output.flatten().sort().values, heads.sort().values)


def _outermost(trace: LayerTrace, call: ModuleCall) -> ModuleCall:
    """Return the call of the outermost module that wraps a called module and receives the same input."""
    around = [c for c in trace.after if _holds(c.module, call.module) and is_given(c, call.inputs)]
    return around[-1]


def _projection(trace: LayerTrace) -> tuple[ModuleCall | None, str]:
    """Find the call of the output projection of a layer. The first result is the call, or None if it was not
    found; the second is an error message, or "" if the call was found.
    """
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
    before = trace.after[: trace.after.index(following)]
    between = ", ".join(f"{c.name.rsplit('.', 1)[-1]} ({type(c.module).__name__})" for c in before)
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


# ---------------------------------------------------------------- what follows it


@dataclass(frozen=True)
class _PossibleSum:
    """A tensor in the trace of a layer that may be the sum of a residual and the output of a module call."""

    index: int | None  # index in ``trace.after`` of the call with that tensor; None for the layer's output
    side: Literal["input", "output"]  # whether it is the input or the output of that call
    branch: int  # index in ``trace.after`` of the call whose output is added to the residual

    def seen(self, trace: LayerTrace) -> Tensor | None:
        if self.index is None:
            return trace.output
        call = trace.after[self.index]
        return call.inputs if self.side == "input" else call.output


def _reaches_residual(
    trace: LayerTrace, projection: ModuleCall, again: Callable[[], LayerTrace], sums: Iterable[_PossibleSum]
) -> bool:
    """Return True if a layer adds the output of a projection to its residual. This is tested by changing the
    output of the projection.

    The layer runs once more with another output of the projection, and one of the possible sums must then
    change by the same amount.
    """
    sums = list(sums)
    if not sums:
        return False
    changed: list[Tensor] = []

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) and output else output
        if changed or not isinstance(value, Tensor):
            return None
        changed.append(moved_tokens(value))
        return (changed[0], *output[1:]) if isinstance(output, tuple) else changed[0]

    with projection.module.register_forward_hook(change):
        other = again()
    if not changed or [c.module for c in other.after] != [c.module for c in trace.after]:
        return False
    for one in sums:
        branches = trace.after[one.branch].output, other.after[one.branch].output
        values = [*branches, one.seen(trace), one.seen(other)]
        before, after, a, b = (None if t is None else t.flatten() for t in values)
        if before is None or after is None or a is None or b is None:
            continue
        if before.shape == a.shape and adds_up([a, after, -before], b):
            return True
    return False


def _possible_sums_outside(
    trace: LayerTrace, self_attention: SelfAttentionModule, projection: ModuleCall
) -> Iterator[_PossibleSum]:
    """Yield tensors that may be the sum of the residual and the output of a projection outside the attention
    module.

    A norm may lie between the output of the projection and the sum.
    """
    first = trace.after.index(projection)
    norms = [
        i for i, c in enumerate(trace.after) if is_norm(c.module) and _alike(c.inputs, projection.output)
    ]
    for branch in (first, *norms):
        for index, call in enumerate(trace.after):
            # The input of this call is the output alone, not a sum.
            if index <= branch or _alike(call.inputs, trace.after[branch].output):
                continue
            if _holds(call.module, self_attention.replay.module):
                yield _PossibleSum(index, "output", branch)
            elif is_linear(call.module) or is_norm(call.module):
                yield _PossibleSum(index, "input", branch)
        yield _PossibleSum(None, "output", branch)


def _possible_sums_inside(
    trace: LayerTrace, self_attention: SelfAttentionModule, projection: ModuleCall
) -> Iterator[_PossibleSum]:
    """Yield tensors that may be the sum of the residual and the output of a projection inside the attention
    module.

    The residual is X, its norm's input or another argument of the module. Anything that the attention module
    computes itself and adds is a part of its attention.
    """
    branch, module, root = projection.output, self_attention.replay.module, trace.layer.root
    first = trace.after.index(projection)
    if branch is None:
        return
    values = [trace.x, *(c.inputs for c in trace.before if is_norm(c.module)), *trace.arguments.values()]
    if module is root and branch.shape[-1] != trace.x.shape[-1]:
        # If the attention of a whole layer has another dimension than X, so has its residual.
        values += [c.output for c in (*trace.before, *trace.inside) if is_norm(c.module)]
    bases = [t for v in values if isinstance(v, Tensor) and (t := like(v, branch)) is not None]
    for target, _, _, total in find_sums(trace, later_calls(trace, projection), bases, [(branch, None)]):
        beside = (
            target.reading.less is not None and module is not root and _holds(module, target.reading.less)
        )
        if total.branch is None and not beside:
            index = None if target.call is None else trace.after.index(target.call)
            yield _PossibleSum(index, target.reading.side, first)


def _is_the_branch(trace: LayerTrace, self_attention: SelfAttentionModule, own: ModuleCall) -> bool:
    """Return True if the attention module returns the attention output alone, without the residual."""
    if own.output is None:
        return False
    # A residual has the dimension of X, unless the attention module is a whole layer.
    if own.output.shape[-1] != trace.x.shape[-1] and self_attention.replay.module is not trace.layer.root:
        return True
    return not _adds_its_input(self_attention) or next(sums_of(trace, own), None) is not None


def _adds_its_input(self_attention: SelfAttentionModule) -> bool:
    """Return True if the output of the attention module still depends on the tokens when all of its softmax
    attentions return zero.
    """

    def silent(softmax: SoftmaxCall) -> Tensor:
        return torch.zeros_like(output_of(softmax))

    outputs = []
    for x in (self_attention.alone.x, moved_tokens(self_attention.alone.x)):
        with intercept_softmaxes(
            self_attention.alone.module, silent, implementation=self_attention.implementation
        ):
            outputs.append(first_tensor(self_attention.alone(x)).nan_to_num(nan=0.0))
    return not torch.equal(*outputs)
