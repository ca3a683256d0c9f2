"""Identification and verification of a cross-attention layer, whose queries come from one sequence and whose
keys and values come from another.

The module of such a layer is the innermost one with an argument that changes the queries of every softmax and
nothing else, and another argument, the memory, that changes keys and values and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from howsmooth.attention.custom_code_attention import Core
from howsmooth.errors import CaptureError
from howsmooth.models.captured_layer import CrossSite
from howsmooth.models.identification.candidate_maps import condition_of, heads_in, tail_of, width_of
from howsmooth.models.identification.layer_trace import LayerTrace, trace_layer, whole_layer
from howsmooth.models.identification.output_projection import AttentionOutput, find_output
from howsmooth.models.identification.replayed_attention import CopiedModule, ReplayedAttention
from howsmooth.models.identification.self_attention_module import (
    MEMORY,
    QUERIES,
    SelfAttentionModule,
    attention_run,
    check_finite_outputs,
    errors_of,
    moved_tokens,
    obstacle_of,
    tried_arguments,
)
from howsmooth.models.identification.verification import check_same_output, own_values
from howsmooth.models.tolerance import lowest_epsilon, tolerance
from howsmooth.models.tracing.attention_recorder import TracedLayer
from howsmooth.models.tracing.mask_and_bias import split_mask
from howsmooth.models.tracing.module_replay import ModuleReplay
from howsmooth.scopes import CROSS_SCOPE

__all__ = ["OneSequence", "VerifiedCrossLayer", "read_cross_layer"]


class OneSequence(CaptureError):  # noqa: N818 - says what was found
    """The error for a layer whose queries, keys and values all come from the same tokens."""


class _OneArgument(CopiedModule):
    """A copied cross-attention module as a function of its query tokens, of its memory, or of both,
    concatenated along the token axis. A sequence that is not an argument is held fixed.

    If the dimensions of the two sequences differ, rows of the shorter ones end with zeros, which are ignored.
    """

    def __init__(self, copied: CopiedModule, side: str) -> None:
        super().__init__(copied.call, copied.tail, copied.implementation)
        self.side = side

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> _OneArgument:
        return _OneArgument(super().to(dtype=dtype, device=device), self.side)

    @property
    def x(self) -> Tensor:
        """The argument as it was captured: the query tokens, the memory, or both."""
        x, memory = self.call.tokens()[0], _memory_of(self.call)
        if self.side != "joint":
            return (x if self.side == "queries" else memory).clone()
        width = max(x.shape[1], memory.shape[1])
        return torch.cat([pad(t, (0, width - t.shape[1])) for t in (x, memory)])

    def describe(self) -> str:
        kind = type(self.call.module).__name__
        return f"the model's own cross-attention {kind}, as {_OF_SIDE[self.side]}"

    def run(self, x: Tensor, core: Core | None = None) -> Tensor:
        own, memory = self.call.tokens()[0], _memory_of(self.call)
        if self.side == "queries":
            own = x
        elif self.side == "memory":
            memory = x
        else:
            own, memory = x[: len(own), : own.shape[1]], x[len(own) :, : memory.shape[1]]
        return CopiedModule(self.call.with_memory(memory), self.tail, self.implementation).run(own, core)


_OF_SIDE = {
    "queries": "a function of its queries' tokens at a fixed memory",
    "memory": "a function of its memory at fixed queries",
    "joint": "a function of its queries' tokens and its memory",
}


@dataclass(frozen=True, eq=False)
class VerifiedCrossLayer:
    """A cross-attention layer, copied from the model and verified for one sequence of a batch."""

    module: SelfAttentionModule  # its call as a function of the queries' tokens, at the fixed memory
    copied: CopiedModule
    heads: int
    d_out: int
    masking: str  # the mask in words
    biased: bool  # whether scores have a bias
    stored: torch.dtype

    def map(self, side: str) -> tuple[ReplayedAttention, Tensor]:
        """Return the layer as a map of one side, and the tokens (n, d) of this side. The side is "queries",
        "memory" (the sequence that gives the keys and values) or "joint" (both).
        """
        part = _OneArgument(self.copied, side)
        return ReplayedAttention(part, d_out=self.d_out, heads=self.heads, causal=False), part.x

    def site(self, side: str, sequence: int | None) -> CrossSite:
        """Return the layer as a map of ``side``, as in :meth:`map`, together with the captured inputs."""
        layer = self.module.layer
        f, z = self.map(side)
        return CrossSite(
            name=layer.name,
            layer=layer.index,
            head=None,
            scope=CROSS_SCOPE,
            causal=False,
            masking=self.masking,
            layout="",
            path="autodiff",
            path_reason="differentiated by PyTorch as it is",
            x=z[None],
            map=f,
            norm=None,
            stored=self.stored,
            sequence=sequence,
            side=side,
            queries=self.module.alone.tokens()[0].clone(),
            memory=_memory_of(self.module.alone).clone(),
        )


def read_cross_layer(traced_layer: TracedLayer) -> VerifiedCrossLayer:
    """Copy a cross-attention layer that was traced on one sequence, and verify the copy.

    Raises
    ------
    OneSequence
        If the layer is self-attention.
    CaptureError
        If the layer computes something that is not recognised, or the verification fails.

    """
    with errors_of(traced_layer.layer):
        module = _find(traced_layer)
        trace = trace_layer(module, traced_layer, whole_layer(traced_layer))
        output = find_output(trace, module)
        if output.obstacle:
            raise CaptureError(f"{module.layer} has no scope {CROSS_SCOPE!r}: {output.obstacle}.")
        copied = CopiedModule.of(module.alone, tail_of(module, output), module.implementation)
        width = width_of(output.call.output, output.call)
        biased = any(split_mask(trace.layer, softmax.mask)[1] is not None for softmax in trace.softmaxes)
        heads, masking = heads_in(trace), _masking(trace)
        found = VerifiedCrossLayer(module, copied, heads, width, masking, biased, traced_layer.stored)
        _verify(found, output, max(map(condition_of, trace.softmaxes)))
        return found


def _memory_of(call: ModuleReplay) -> Tensor:
    """Return the tokens (n, d_memory) from which a recorded module call computes its keys and values."""
    assert call.memory is not None
    return call.memory.reshape(-1, call.memory.shape[-1])


def _find(traced_layer: TracedLayer) -> SelfAttentionModule:
    """Find the module of a traced layer that takes the query tokens and the key tokens as two arguments."""
    layer, reasons = traced_layer.layer, list[str]()
    roles: dict[int, dict[str, SelfAttentionModule]] = {}
    for tried in tried_arguments(traced_layer, reasons):
        if all(one == QUERIES | MEMORY for one in tried.moved):
            raise OneSequence(
                f"{layer} is self-attention: its queries, keys and values come from the same tokens. Capture "
                "it with scope 'attention'."
            )
        own = roles.setdefault(id(tried.call), {})
        for role, operands in (("queries", QUERIES), ("memory", MEMORY)):
            if tried.moved and all(one == operands for one in tried.moved):
                own.setdefault(role, tried)
        if len(own) == 2:
            return _with_memory(own["queries"], own["memory"].replay.x)
    why = "; ".join(dict.fromkeys(reasons))[:300]
    raise CaptureError(
        f"{layer} is not captured with scope {CROSS_SCOPE!r}: no module of it has one argument that gives "
        f"its queries and another that gives its keys and values{f' ({why})' if why else ''}."
    )


def _with_memory(found: SelfAttentionModule, memory: Tensor) -> SelfAttentionModule:
    """Return a cross-attention module whose recorded call can also be repeated with other tokens for keys and
    values. Raise CaptureError if the values of the tokens decide which keys a query sees.
    """
    replay, before = ModuleReplay(found.call, found.replay.x, 1, memory), found.softmaxes
    check_finite_outputs(found.layer, replay.x, before)
    _, moved = attention_run(replay.with_memory(moved_tokens(memory)), replay.x, found.implementation)
    for after in (found.after, moved):
        obstacle_of(found.layer, before, after)
    return replace(found, replay=replay, alone=replay)


def _masking(trace: LayerTrace) -> str:
    """Describe in words which keys the masks of a cross-attention layer hide."""
    found = []
    for softmax in trace.softmaxes:
        visible, _ = split_mask(trace.layer, softmax.mask)
        if visible is None:
            found.append("none")
            continue
        rows = visible.reshape(-1, visible.shape[-1])
        alike = bool((rows == rows[:1]).all())
        hidden = int((~rows[0]).sum())
        found.append(f"{hidden} of {rows.shape[1]} memory tokens hidden" if alike else "a mask of its own")
    return ", ".join(dict.fromkeys(found))


# ---------------------------------------------------------------- the verification


def _verify(found: VerifiedCrossLayer, output: AttentionOutput, condition: float) -> None:
    """Raise CaptureError unless the copy agrees with the model, on the captured sequences and on others."""
    module = found.module
    call, memory = module.alone, _memory_of(module.alone)
    for of_queries, of_memory in ((False, False), (True, False), (False, True), (True, True)):
        y = moved_tokens(memory) if of_memory else memory
        at = call.with_memory(y)
        x = moved_tokens(call.x) if of_queries else call.x
        own = own_values(at, output, x)
        eps = lowest_epsilon(own.x.dtype, downcast=own.downcast)
        # On changed tokens queries and keys may each have grown by a factor of two.
        tol = tolerance(eps, condition * 2.0 ** (of_queries + of_memory))
        changed = " and ".join(
            name for name, is_so in (("tokens", of_queries), ("memory", of_memory)) if is_so
        )
        what = f"its attention{f' on other {changed}' if changed else ''}"
        copied = CopiedModule(found.copied.call.with_memory(y), found.copied.tail, module.implementation)
        check_same_output(module.layer, what, copied.run(own.x[0], None)[None], own.attention, tol)
