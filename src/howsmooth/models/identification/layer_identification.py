"""Identification and verification of one self-attention layer from a trace of the forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from howsmooth.attention import LayerNorm, Residual, RMSNorm, SelfAttention, TokenMap
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models.captured_layer import Site
from howsmooth.models.identification.candidate_maps import Candidate, hypotheses, norms_all_heads
from howsmooth.models.identification.layer_trace import (
    LayerTrace,
    recorded_trace,
    trace_layer,
    whole_layer,
)
from howsmooth.models.identification.norm_placement import Block, read_block, token_norm
from howsmooth.models.identification.output_projection import AttentionOutput, find_output
from howsmooth.models.identification.self_attention_module import (
    SelfAttentionModule,
    errors_of,
    find_self_attention,
)
from howsmooth.models.identification.verification import verify, verify_block
from howsmooth.models.tolerance import lowest_epsilon
from howsmooth.models.tracing.attention_recorder import TracedLayer
from howsmooth.models.tracing.module_replay import ModuleReplay

__all__ = ["VerifiedLayer", "indices_of", "read_layer"]


@dataclass(frozen=True, eq=False)
class VerifiedLayer:
    """A self-attention layer with its verified map."""

    self_attention: SelfAttentionModule
    output: AttentionOutput
    found: Candidate
    others: Iterator[Candidate]  # less explicit maps that are verified too
    block: Block
    norm: LayerNorm | RMSNorm | None  # the norm whose output is X
    call: ModuleReplay  # the call of the whole layer around the attention
    stored: torch.dtype

    @property
    def tokens(self) -> Tensor:
        """The tokens (batch, n, d) to which the model applies the attention."""
        return self.self_attention.replay.tokens()

    @cached_property
    def _by_head(self) -> Candidate:
        """A map that can be split into heads even if one norm acts on all heads together."""
        return next(self.others, self.found)

    def sites(self, scope: str, heads: Sequence[int] | slice | None = None) -> list[Site]:
        """Return the layer as a map in the given scope, such as ``block``, with its input tokens. In scope
        ``head``, return one map for each selected head.

        Raises
        ------
        ArgumentError
            If an index in ``heads`` is out of range.
        CaptureError
            If the layer has no such scope, or the verification of its block fails.

        """
        self_attention, found, place = self.self_attention, self.found, self.self_attention.layer
        if scope == "head" and norms_all_heads(found.map):
            found = self._by_head
        attention = found.map
        x = self.tokens.clone()
        norm = self.norm if _may_be_outputs(self.norm, x) else None
        maps: list[tuple[int | None, TokenMap]] = [(None, attention)]
        try:
            if scope == "head":
                maps = [(h, attention.head(h)) for h in indices_of(heads, attention.heads, "head")]
            elif scope == "heads":
                maps = [(None, attention.without_output())]
        except ArgumentError as error:
            if error.argument == "heads":
                raise
            raise CaptureError(f"{place} has no scope {scope!r}: {error}") from None
        if scope in ("attention", "residual") and self.output.obstacle:
            raise CaptureError(f"{place} has no scope {scope!r}: {self.output.obstacle}.")
        if scope == "residual":
            if attention.d != attention.d_out:
                raise CaptureError(f"{place} changes the dimension of its tokens, so it has no residual.")
            given = self.output.call.output
            if given is not None and given.shape[-2] != x.shape[1]:
                raise CaptureError(f"{place} changes the number of its tokens, so it has no residual.")
            maps = [(None, Residual(attention))]
        elif scope == "block":
            x = verify_block(self_attention, self.output, self.block, self.call, self.found.condition)
            norm = norm if self.block.pre_norm is None else None
            if self.block.map is not None:
                maps = [(None, self.block.map)]
        return [
            Site(
                name=place.name,
                layer=place.index,
                head=h,
                scope=scope,
                causal=attention.causal,
                masking=found.masking,
                layout=self.block.layout,
                path=found.path,
                path_reason=found.reason,
                x=x,
                map=f,
                norm=norm,
                stored=self.stored,
            )
            for h, f in maps
        ]


def read_layer(traced_layer: TracedLayer) -> VerifiedLayer:
    """Identify the map that a traced layer computes, and verify it.

    Raises
    ------
    CaptureError
        If the layer computes something that is not recognised, or the verification fails.

    """
    with errors_of(traced_layer.layer):
        self_attention = find_self_attention(traced_layer)
        call = whole_layer(traced_layer)
        trace = recorded_trace(self_attention, traced_layer)
        if trace is not None:
            with suppress(CaptureError):
                layer = _read(trace, self_attention, call, traced_layer.stored)
                if isinstance(layer.found.map, SelfAttention):
                    return layer
        # Modules may round otherwise when they run by themselves, so that their numbers do not fit together.
        trace = trace_layer(self_attention, traced_layer, call)
        return _read(trace, self_attention, call, traced_layer.stored)


def _read(
    trace: LayerTrace, self_attention: SelfAttentionModule, call: ModuleReplay, stored: torch.dtype
) -> VerifiedLayer:
    """Identify and verify the map of a layer, given a trace of the layer."""
    output = find_output(trace, self_attention)
    verified = _verified(trace, self_attention, output)
    found = next(verified)
    block = read_block(trace, found.map, output.call)
    return VerifiedLayer(self_attention, output, found, verified, block, token_norm(trace), call, stored)


def _verified(
    trace: LayerTrace, self_attention: SelfAttentionModule, output: AttentionOutput
) -> Iterator[Candidate]:
    """Yield the candidate maps that agree with the layer, the most explicit first. If none does, raise the
    last error.
    """
    refused: list[CaptureError] = []
    none = True
    for found in hypotheses(trace, self_attention, output):
        if isinstance(found, CaptureError):
            refused.append(found)
            continue
        try:
            verify(self_attention, output, found)
        except CaptureError as error:
            refused.append(error)
            continue
        none = False
        yield found
    if none:
        raise refused[-1]


def _may_be_outputs(norm: LayerNorm | RMSNorm | None, x: Tensor) -> bool:
    """Return True if there is a norm, and each token in ``x`` may be an output of it, up to rounding."""
    if norm is None:
        return False
    # transformers' norms compute in float32 for every dtype of the model, so that entries may be off by that.
    slack = 64.0 * lowest_epsilon(torch.float32)
    # An output of the norm is bias + gain∘u with |u| <= 1, where the gain includes √d.
    shift = (x if norm.bias is None else x - norm.bias).double()
    gain = math.sqrt(norm.d) * norm.weight.double().abs()
    outside = (shift.abs() - slack * (x.double().abs() + gain)).clamp(min=0.0)
    u = outside / gain  # 0/0 if gain and entry are zero; infinite if only the gain is
    return float(torch.linalg.vector_norm(u.nan_to_num(nan=0.0), dim=-1).max()) <= 1 + slack


def indices_of(given: Sequence[int] | slice | None, count: int, what: str) -> list[int]:
    """Convert a selection of layers or heads (None for all) to a list of distinct indices. Raise
    ArgumentError if an index is not from ``-count`` to ``count - 1``, or if a slice is empty.
    """
    if given is None:
        return list(range(count))
    if isinstance(given, slice):
        found = list(range(count))[given]
        if not found:
            raise ArgumentError(
                f"{what}s",
                expected=f"a slice with some of {count} {what}s in it",
                got=f"{given.start}:{given.stop}:{given.step}",
            )
        return found
    for index in given:
        if not -count <= index < count:
            raise ArgumentError(
                f"{what}s",
                expected=f"a list of {what} indices from {-count} to {count - 1}",
                got=str(index),
                remedy=f"The model has {count} {what}s, counted from 0.",
            )
    return list(dict.fromkeys(index % count for index in given))
