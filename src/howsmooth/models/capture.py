"""``capture``: the attention layers of a model as maps, at the tokens that a given input produces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth.attention import LayerNorm, Residual, RMSNorm, TokenMap
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models.blocks import Block, read_block, token_norm
from howsmooth.models.borrow import borrowed, implementation
from howsmooth.models.given import ModelInputs, model_inputs
from howsmooth.models.identify import Hypothesis, Output, find_output, hypotheses
from howsmooth.models.load import LoadedModel
from howsmooth.models.owners import CrossAttention, Owner, find_owner
from howsmooth.models.passes import Passed, Wanted, forward_pass
from howsmooth.models.records import record_layer, whole_layer
from howsmooth.models.repeated import Repeated
from howsmooth.models.site import SCOPES, Site
from howsmooth.models.tolerance import precision
from howsmooth.models.verify import verify, verify_block

__all__ = ["capture"]


def capture(
    model: nn.Module | LoadedModel,
    inputs: Tensor | Mapping[str, Tensor],
    layers: Sequence[int] | None = None,
    scope: str = "attention",
    heads: Sequence[int] | None = None,
) -> list[Site]:
    """Run a model on inputs and return its attention layers as maps, each with the tokens it was applied to.

    The model runs once, in evaluation mode (no dropout), without gradients and without a cache, and is left
    as it was found. Then each layer is run by itself: its structure is found by comparing the numbers that
    flow through it, and each map is held against the model's own output at these tokens and at changed ones,
    so that a map that is returned is the model's own to float precision, its mask included.

    Parameters
    ----------
    model
        Any PyTorch module in float32 or float64 that computes softmax attention: a transformers model, what
        :func:`~howsmooth.models.load_model` returns, ``torch.nn.TransformerEncoder``, or one of your own.
    inputs
        Token ids (batch, n), or a dict of the model's inputs; for a module that is not of transformers
        its first argument, or a dict of its arguments by name. An encoder-decoder that is given no
        ``decoder_input_ids`` gets the same tokens. Sequences that an ``attention_mask`` shows to be padded
        are measured one by one, without the padding.
    layers
        Which layers, counted in the order of the model's softmaxes, negative from the end; by default all of
        self-attention (cross-attention is left out; asked for by its index, it is refused).
    scope
        What to call attention: ``"head"``, ``"heads"``, ``"attention"``, ``"residual"`` or ``"block"``
        (see :class:`Site`).
    heads
        Which heads, in scope ``"head"`` only; all by default.

    Returns
    -------
    list of Site
        One for each layer, in the order asked for; in scope ``"head"`` one for each layer and head; of padded
        sequences one for each sequence besides.

    Raises
    ------
    ArgumentError
        If an argument is not of the kind described above.
    CaptureError
        If a layer does something that is not recognised, or fails its verification; the message says
        what lies in the way. Nothing is ever returned that was not verified.

    """
    if isinstance(model, LoadedModel):
        model = model.model
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            "model",
            expected="a transformers PreTrainedModel, what load_model returns, or another torch.nn.Module",
            got=type(model).__name__,
            remedy="To load one by its name, use howsmooth.models.load_model.",
        )
    if scope not in SCOPES:
        raise ArgumentError("scope", expected=f"one of {', '.join(SCOPES)}", got=repr(scope))
    if heads is not None and scope != "head":
        raise ArgumentError(
            "heads", expected="None unless scope is 'head'", got=f"{heads!r} with scope {scope!r}"
        )
    wanted = Wanted(None if layers is None else _checked("layers", layers))
    heads = None if heads is None else _checked("heads", heads)
    given = model_inputs(model, inputs)
    with borrowed(model):
        return _captured(model, given, wanted, scope, heads)


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer whose map was verified."""

    owner: Owner
    output: Output
    found: Hypothesis
    block: Block
    norm: LayerNorm | RMSNorm | None
    call: Repeated  # of the layer around the owner
    passed: Passed


def _captured(
    model: nn.Module, given: ModelInputs, wanted: Wanted, scope: str, heads: Sequence[int] | None
) -> list[Site]:
    """Capture sequences of one length without padding."""
    seen, kept = forward_pass(model, (), given.named, wanted)
    if not seen:
        raise CaptureError(_nothing_seen(model))
    indices = (
        list(range(len(seen))) if wanted.indices is None else _indices(wanted.indices, len(seen), "layer")
    )
    sites: list[Site] = []
    for index in indices:
        try:
            sites += _sites(_read(kept[index], given.batch, implementation(model)), scope, heads)
        except CrossAttention:
            if wanted.indices is not None:
                raise
        # Whatever the layer was given is not needed any more.
        kept.pop(index, None)
    if not sites:
        raise CaptureError(f"{type(model).__name__} has cross-attention only, which is not captured.")
    return sites


def _read(passed: Passed, batch: int, user: str) -> _Layer:
    """Find out what a layer computes, and prove it."""
    owner = find_owner(passed, batch, user)
    call = whole_layer(passed, batch)
    record = record_layer(owner, passed, call)
    output = find_output(record, owner)
    refused: list[CaptureError] = []
    for found in hypotheses(record, owner, output):
        if isinstance(found, CaptureError):
            refused.append(found)
            continue
        try:
            verify(owner, output, found)
        except CaptureError as error:
            refused.append(error)
            continue
        block = read_block(record, found.map, output.call)
        return _Layer(owner, output, found, block, token_norm(record), call, passed)
    raise refused[-1]


def _sites(layer: _Layer, scope: str, heads: Sequence[int] | None) -> list[Site]:
    owner, attention, place = layer.owner, layer.found.map, layer.owner.layer
    x = owner.repeated.tokens().clone()
    norm = layer.norm if _gives(layer.norm, x) else None
    maps: list[tuple[int | None, TokenMap]] = [(None, attention)]
    try:
        if scope == "head":
            maps = [(h, attention.head(h)) for h in _indices(heads, attention.heads, "head")]
        elif scope == "heads":
            maps = [(None, attention.without_output())]
    except ArgumentError as error:
        if error.argument == "heads":
            raise
        raise CaptureError(f"{place} has no scope {scope!r}: {error}") from None
    if scope == "residual":
        if attention.d != attention.d_out:
            raise CaptureError(f"{place} changes the dimension of its tokens, so it has no residual.")
        maps = [(None, Residual(attention))]
    elif scope == "block":
        x = verify_block(owner, layer.output, layer.block, layer.call, layer.found.condition)
        norm = norm if layer.block.pre_norm is None else None
        if layer.block.map is not None:
            maps = [(None, layer.block.map)]
    return [
        Site(
            name=place.name,
            layer=place.index,
            head=h,
            scope=scope,
            causal=attention.causal,
            masking=layer.found.masking,
            layout=layer.block.layout,
            path=layer.found.path,
            path_reason=layer.found.reason,
            x=x,
            map=f,
            norm=norm,
        )
        for h, f in maps
    ]


def _nothing_seen(model: nn.Module) -> str:
    classes = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    named = ", ".join(classes) if classes else "no module with attention in its name"
    return (
        f"No softmax attention of {type(model).__name__} was seen ({named}): its layers are linear or "
        "state-space mixers, convolutions, or a fused kernel computes them (load the model with "
        "attn_implementation='sdpa' then)."
    )


def _gives(norm: LayerNorm | RMSNorm | None, x: Tensor) -> bool:
    """Whether all tokens can be outputs of the norm: it was identified on one of the sequences only."""
    if norm is None:
        return False
    # transformers' norms compute in float32 whatever the dtype of the model; every entry may be off by that.
    slack = 64.0 * precision(torch.float32)
    shift = (x if norm.bias is None else x - norm.bias).double()
    gain = math.sqrt(norm.d) * norm.weight.double().abs()
    outside = (shift.abs() - slack * (x.double().abs() + gain)).clamp(min=0.0)
    u = outside / gain  # 0/0 where both are zero, infinite where a zero gain gives no zero
    return float(torch.linalg.vector_norm(u.nan_to_num(nan=0.0), dim=-1).max()) <= 1 + slack


def _checked(argument: str, given: object) -> tuple[int, ...]:
    """Check a list of indices as far as that can be done before their number is known."""
    expected = f"a list of {argument[:-1]} indices"
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ArgumentError(argument, expected=expected, got=repr(given))
    if not given:
        raise ArgumentError(
            argument, expected=expected, got="an empty list", remedy=f"None means every {argument[:-1]}."
        )
    for index in given:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ArgumentError(argument, expected=expected, got=repr(index))
    return tuple(given)


def _indices(given: Sequence[int] | None, count: int, what: str) -> list[int]:
    """Return indices into ``count`` things as non-negative, each once."""
    if given is None:
        return list(range(count))
    for index in given:
        if not -count <= index < count:
            raise ArgumentError(
                f"{what}s",
                expected=f"a list of {what} indices from {-count} to {count - 1}",
                got=str(index),
                remedy=f"The model has {count} {what}s, counted from 0.",
            )
    return list(dict.fromkeys(index % count for index in given))
