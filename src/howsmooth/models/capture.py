"""The function ``capture``, which returns the attention layers of a model as maps, each with its tokens for a
given input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models.as_called import as_called
from howsmooth.models.captured_layer import CrossSite, Site
from howsmooth.models.float32_weights import weights_in_memory
from howsmooth.models.identification.cross_attention_layer import OneSequence, read_cross_layer
from howsmooth.models.identification.layer_identification import VerifiedLayer, indices_of, read_layer
from howsmooth.models.identification.non_softmax_layers import NO_SOFTMAX, NonSoftmaxTracer
from howsmooth.models.identification.self_attention_module import CrossAttention
from howsmooth.models.loading.load import LoadedModel
from howsmooth.models.model_call import ModelCall
from howsmooth.models.padded_sequences import (
    Padding,
    check_one_sequence,
    one_by_one,
    padding_of,
    reproduces,
    without_padding,
)
from howsmooth.models.tracing.attention_recorder import AttentionLayer, trace_forward_pass
from howsmooth.models.whole_model_map import ModelParts
from howsmooth.plain_modules import unwrapped
from howsmooth.scopes import CROSS_SCOPE, MODEL_SCOPES, OUTPUTS, SCOPE_MEANINGS, SIDES

__all__ = ["capture", "checked_selection", "model_parts", "module_of", "self_attention_layers"]

_Indices = tuple[int, ...] | slice | None


def capture(
    model: nn.Module | LoadedModel,
    inputs: Tensor | Mapping[str, Any],
    layers: int | str | slice | Sequence[int] | None = None,
    scope: str = "attention",
    heads: int | str | slice | Sequence[int] | None = None,
    *,
    side: str | None = None,
    output: str = "hidden",
    last_token: bool = False,
) -> list[Site]:
    """Run a model on inputs and return its attention layers as maps, each with the tokens to which the model
    applied it.

    In the scopes ``"span"`` and ``"model"`` the map is a whole part of the model instead, one for all layers.

    The model runs in evaluation mode (no dropout), without gradients and without a cache; afterwards its
    settings are restored. Where these settings can matter, one run more shows whether the model gives the
    same as it is called; a cache that matters stays on. Then each attention runs by itself. Its structure is
    found by comparing numbers, and its map is compared with the layer's own output, at these tokens and at
    changed ones. So every map that is returned agrees with the model to float precision, including the mask.

    Parameters
    ----------
    model
        Any PyTorch module that computes softmax attention: a transformers model, a model from
        :func:`~howsmooth.models.load_model`, ``torch.nn.TransformerEncoder``, or your own module, also inside
        of ``torch.compile``, ``DataParallel`` or PEFT's ``PeftModel``. A model in bfloat16 or float16 is
        captured in float32, one layer at a time, with the results of ``model.float()``; ``Site.stored`` says
        so.
    inputs
        Token ids (batch, n), or a dict of the model's inputs; for a module that is not a transformers model,
        its first argument or a dict of its arguments by name. A dict may have numbers, words, True, False and
        None beside tensors, such as ``use_cache=False``. An encoder-decoder without
        ``decoder_input_ids`` gets the same tokens in its decoder. Sequences that are padded according to
        ``attention_mask`` (or torch's ``key_padding_mask``) are captured one by one, without the padding.
    layers
        Which layers: an index, a list or range of indices, or a slice. Layers are counted in the order of
        the model's softmaxes, and negative indices from the end. ``"all"`` or None, the default, means all
        layers of self-attention; cross-attention is left out then, and refused if asked for by index; in
        scope ``"cross-attention"`` it is the other way round. In scope ``"span"`` a pair: the first and the
        last layer, whose blocks are included.
    scope
        Which part of a layer the map is: ``"head"``, ``"heads"``, ``"attention"``, ``"residual"`` or
        ``"block"``; or ``"span"``, from the input of one block to the output of another, or ``"model"``,
        from the embeddings to ``output`` (see :class:`Site`); or ``"cross-attention"``, attention whose keys
        and values come from another sequence than its queries, the memory (see :class:`CrossSite`).
    heads
        Which heads, given like ``layers``, in scope ``"head"`` only; all heads by default.
    side
        In scope ``"cross-attention"``, which sequence varies: ``"queries"``, the tokens of the queries at a
        fixed memory; ``"memory"``, the memory at fixed queries; or ``"joint"``, both, the default. In scope
        ``"model"`` of an encoder-decoder, where it has no default: ``"queries"``, from the decoder's
        embeddings at fixed tokens of the encoder, or ``"memory"``, from the encoder's embeddings.
    output
        In scope ``"model"``: ``"hidden"`` for the last hidden state of all tokens, ``"logits"``, or
        ``"margin"``, the largest logit minus the second largest (of the last token, if each has logits). Of
        a module that transformers does not know, the first tensor that it returns stands for its hidden
        state, and for its logits unless it names some.
    last_token
        In the scopes ``"span"`` and ``"model"``: whether the map's output is that of the last token alone.

    Returns
    -------
    list of Site
        One site for each layer, in the given order; in scope ``"head"`` one for each layer and head; in scope
        ``"cross-attention"`` one for each sequence and layer, with padding of the memory as a mask; in the
        scopes ``"span"`` and ``"model"`` one site, and no sequence may be padded. If a
        sequence is padded, the list has these sites for each sequence (``Site.sequence``), real tokens only.

    Raises
    ------
    ArgumentError
        If an argument is not of the kind described above.
    CaptureError
        If a layer computes something that is not recognised, or its verification fails; the message names
        the obstacle. A map that was not verified is never returned. Also if the model as it is called gives
        other outputs than as it is measured: in training mode, with a cache, in half precision.

    """
    module = module_of(model)
    if scope not in SCOPE_MEANINGS:
        raise ArgumentError("scope", expected=f"one of {', '.join(SCOPE_MEANINGS)}", got=repr(scope))
    sites = _captured(module, inputs, layers, scope, heads, side, output, last_token)
    # The weights of a loaded model may be stored in its file in another dtype than in memory.
    return [replace(site, stored=model.stored) for site in sites] if isinstance(model, LoadedModel) else sites


def _captured(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    layers: int | str | slice | Sequence[int] | None,
    scope: str,
    heads: int | str | slice | Sequence[int] | None,
    side: str | None,
    output: str,
    last_token: bool,
) -> list[Site]:
    if side not in (None, *SIDES) or (side is not None and scope not in (CROSS_SCOPE, "model")):
        got = repr(side) if scope in (CROSS_SCOPE, "model") else f"{side!r} with scope {scope!r}"
        expected = f"one of {', '.join(SIDES)}, with scope {CROSS_SCOPE!r}, or 'model' of an encoder-decoder"
        raise ArgumentError("side", expected=expected, got=got)
    if scope in MODEL_SCOPES:
        return [_part(model, inputs, layers, scope, heads, output, last_token, side)]
    for name, value, usual in (("output", output, "hidden"), ("last_token", last_token, False)):
        if value != usual:
            got = f"{value!r} with scope {scope!r}"
            raise ArgumentError(name, expected=f"{usual!r} unless scope is 'model'", got=got)
    if heads is not None and scope != "head":
        raise ArgumentError(
            "heads", expected="None unless scope is 'head'", got=f"{heads!r} with scope {scope!r}"
        )
    wanted, chosen = checked_selection("layers", layers), checked_selection("heads", heads)
    record = _traced(wanted) if scope != CROSS_SCOPE else ()
    with as_called(model, inputs, record) as given:
        if scope == CROSS_SCOPE:
            return list(_cross_sites(given, wanted, side or "joint"))
        if (padding := padding_of(given)) is not None:
            return _captured_without_padding(padding, wanted, scope, chosen)
        return [site for layer in _verified(given, wanted) for site in layer.sites(scope, chosen)]


def _cross_sites(given: ModelCall, wanted: _Indices, side: str) -> Iterator[CrossSite]:
    if padding_of(given) is not None and given.named.get("decoder_input_ids") is given.named.get(
        "input_ids", given
    ):
        raise ArgumentError(
            "inputs",
            expected="decoder_input_ids without padding, if the encoder's tokens are padded",
            got="the same padded tokens for both",
            remedy="Give decoder_input_ids, or sequences of one length.",
        )
    for number, one in enumerate(one_by_one(given)):
        seen, kept = trace_forward_pass(one, _traced(wanted))
        if not seen:
            raise CaptureError(_nothing_seen(one))
        found = False
        for index in indices_of(wanted, len(seen), "layer"):
            traced_layer = kept.pop(index)
            with weights_in_memory(*traced_layer.owners):
                try:
                    layer = read_cross_layer(traced_layer)
                except OneSequence:
                    if wanted is not None:
                        raise
                    continue
                found = True
                yield layer.site(side, number if given.batch > 1 else None)
        if not found:
            raise CaptureError(f"{given.kind} has no cross-attention.")


def _part(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    layers: object,
    scope: str,
    heads: object,
    output: object,
    last_token: bool,
    side: str | None,
) -> Site:
    if heads is not None:
        got = f"{heads!r} with scope {scope!r}"
        raise ArgumentError("heads", expected="None unless scope is 'head'", got=got)
    if scope == "model" and layers not in (None, "all"):
        got = f"{layers!r} with scope 'model'"
        raise ArgumentError(
            "layers",
            expected="None: a model is taken with all its layers",
            got=got,
            remedy="scope='span' takes a range of layers, such as layers=(2, 5).",
        )
    if output not in OUTPUTS or (scope == "span" and output != "hidden"):
        expected = f"one of {', '.join(OUTPUTS)}" if scope == "model" else "'hidden' unless scope is 'model'"
        raise ArgumentError("output", expected=expected, got=repr(output))
    with model_parts(model, inputs, side) as parts:
        if scope == "model":
            return parts.whole(str(output), last_token=last_token)
        first, last = _ends(layers, len(parts.layers))
        return parts.span(first, last, last_token=last_token)


@contextmanager
def model_parts(
    model: nn.Module, inputs: Tensor | Mapping[str, Any], side: str | None = None, *, padded: bool = False
) -> Iterator[ModelParts]:
    """Return a context manager that yields a :class:`ModelParts`, which captures parts of a model, such as a
    range of its blocks, as maps.

    The arguments are those of :func:`capture`. With ``padded``, one sequence may have padding, which stays.
    """
    with as_called(model, inputs) as given:
        yield ModelParts(given, side, padded=padded)


def _ends(layers: object, count: int) -> tuple[int, int]:
    if layers in (None, "all"):
        return 0, count - 1
    pair = (layers, layers) if isinstance(layers, int) else layers
    expected = f"a pair of layers from {-count} to {count - 1}, the first and the last of the span"
    if (
        not isinstance(pair, Sequence)
        or len(pair) != 2
        or not all(isinstance(one, int) and not isinstance(one, bool) for one in pair)
        or not all(-count <= one < count for one in pair)
        or pair[0] % count > pair[1] % count
    ):
        raise ArgumentError("layers", expected=expected, got=repr(layers))
    return pair[0] % count, pair[1] % count


def module_of(model: object) -> nn.Module:
    """Return the PyTorch module inside a :class:`LoadedModel`, torch.compile or another wrapper, any other
    module unchanged. Raise ArgumentError for anything else.
    """
    module = model.model if isinstance(model, LoadedModel) else model
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            "model",
            expected="a transformers PreTrainedModel, what load_model returns, or another torch.nn.Module",
            got=type(model).__name__,
            remedy="Give the model that was exported."
            if isinstance(model, torch.export.ExportedProgram)
            else "To load one by its name, use howsmooth.models.load_model.",
        )
    return unwrapped(module)


def _captured_without_padding(padding: Padding, wanted: _Indices, scope: str, heads: _Indices) -> list[Site]:
    _, traced_layer = trace_forward_pass(padding.whole, _traced(wanted))
    sites: list[Site] = []
    for sequence in range(padding.whole.batch):
        moved: AttentionLayer | None = None
        for given in without_padding(padding, sequence):
            found: list[Site] = []
            moved = None
            for layer in _verified(given, wanted):
                index = layer.self_attention.layer.index
                if index not in traced_layer or not reproduces(layer, traced_layer[index], padding, sequence):
                    moved = layer.self_attention.layer
                    break
                found += [replace(site, sequence=sequence) for site in layer.sites(scope, heads)]
            if moved is None:
                sites += found
                break
        if moved is not None:
            raise CaptureError(
                f"The tokens of {moved} in sequence {sequence} are not the same without the padding, nor "
                "with the positions of the real tokens: the model lets padding, or positions that it "
                "counts itself, into them. Measure sequences of one length at a time."
            )
    return sites


def self_attention_layers(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    layers: int | str | slice | Sequence[int] | None = None,
) -> Iterator[tuple[int, VerifiedLayer | CaptureError]]:
    """Run a model on one sequence, and yield the index and the verified map of each self-attention layer.

    In place of a layer that cannot be captured, the error that says why is yielded. A layer is valid until
    the next one is asked for: the weights of a half-precision model are widened for that time only. Arguments
    and errors are those of :func:`capture`; the inputs are one sequence without padding.
    """
    wanted = checked_selection("layers", layers)
    with as_called(model, inputs, _traced(wanted)) as given:
        check_one_sequence(given)
        yield from _layers(given, wanted)


def _verified(given: ModelCall, wanted: _Indices) -> Iterator[VerifiedLayer]:
    for _, layer in _layers(given, wanted):
        if isinstance(layer, CaptureError):
            raise layer
        yield layer


def _layers(given: ModelCall, wanted: _Indices) -> Iterator[tuple[int, VerifiedLayer | CaptureError]]:
    """Yield each selected layer, verified or with its error; without ``wanted``, none of cross-attention."""
    seen, kept = given.record or trace_forward_pass(given, _traced(wanted))
    if not seen:
        raise CaptureError(_nothing_seen(given))
    indices = indices_of(wanted, len(seen), "layer")
    crossed: list[CrossAttention] = []
    for index in indices:
        traced_layer = kept.pop(index)  # frees the arguments of the layer as soon as it is verified
        with weights_in_memory(*traced_layer.owners):
            layer: VerifiedLayer | CaptureError
            try:
                layer = read_layer(traced_layer)
            except CrossAttention as error:
                if wanted is None:
                    crossed.append(error)
                    continue
                layer = error
            except CaptureError as error:
                layer = error
            yield index % len(seen), layer
    if len(crossed) == len(indices):
        raise CaptureError(f"{given.kind} has no self-attention that is captured: {crossed[0]}")


def _nothing_seen(given: ModelCall) -> str:
    none = f"No softmax attention of {given.kind} was seen"
    tracer = NonSoftmaxTracer(most=4)
    with tracer.watching(given.model):
        trace_forward_pass(given, ())
    other = next(tracer.find(given.batch), None)
    if other is not None:
        return (
            f"{none}. Its layer {other.name} ({other.module}) mixes tokens with {NO_SOFTMAX}, which has no "
            "scope. Measure it with "
            f"hs.local_lipschitz(model.get_submodule({other.name!r}), x) at its tokens x (..., n, d), or the "
            "whole model with scope 'model'."
        )
    classes = sorted(
        {type(m).__name__ for m in given.model.modules() if "attention" in type(m).__name__.lower()}
    )
    named = ", ".join(classes) if classes else "no module with attention in its name"
    return (
        f"{none} ({named}): it has none, or a fused kernel computes it (load the model with "
        "attn_implementation='sdpa' then)."
    )


def _traced(wanted: _Indices) -> Sequence[int] | None:
    """Return the layers to trace, None for all: before the run, a slice cannot be resolved."""
    return None if isinstance(wanted, slice) else wanted


def checked_selection(argument: str, given: object) -> _Indices:
    """Check a selection of layers or heads, and return it as a tuple, a slice, or None for all."""
    expected = f'an index, a list of {argument[:-1]} indices, a slice, or "all"'
    if given is None or given == "all":
        return None
    if isinstance(given, slice):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return (given,)
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
