"""Capture of padded sequences. Each sequence runs without its padding, and is compared with the padded batch.

Padding is not part of the input, so that a site must not contain it. Whether the real tokens of a layer
change if the padding is removed depends on how the model counts positions and builds masks. It is decided by
comparing the numbers of both forward passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models.identification.layer_identification import VerifiedLayer
from howsmooth.models.model_call import ModelCall
from howsmooth.models.tolerance import lowest_epsilon, relative_error, tolerance
from howsmooth.models.tracing.attention_recorder import TracedLayer
from howsmooth.models.tracing.module_replay import ModuleReplay, first_tensor

__all__ = [
    "Padding",
    "check_one_sequence",
    "one_by_one",
    "padding_of",
    "reproduces",
    "without_padding",
]

#: Names of padding masks; whether a nonzero entry marks padding: it does in torch, not in transformers; and
#: the names of the tokens that the mask is about.
_PADDING = {
    "attention_mask": (False, ("input_ids", "inputs_embeds")),
    "key_padding_mask": (True, ("key",)),
    "src_key_padding_mask": (True, ("src",)),
}
#: Names of masks (n, n) between tokens.
_BETWEEN = frozenset({"attn_mask", "mask", "src_mask"})
#: Beginnings of the names of a decoder's inputs, whose tokens the padding mask says nothing about.
_DECODER = ("decoder_", "tgt")


@dataclass(frozen=True, eq=False)
class Padding:
    """The inputs of a padded forward pass, with a mask of the tokens that are real."""

    real: Bool[Tensor, "batch n"]  # True for real tokens, False for padding
    whole: ModelCall
    mask: str  # the name of the padding mask among the inputs


def padding_of(given: ModelCall) -> Padding | None:
    """Return which tokens of the inputs are padding. Return None if none is.

    Raises
    ------
    ArgumentError
        If a mask has not one number for each token, a sequence consists of padding only, or
        ``decoder_attention_mask`` marks padding.

    """
    other = given.named.get("decoder_attention_mask")
    if isinstance(other, Tensor) and other.ndim == 2 and not bool((other != 0).all()):
        raise ArgumentError(
            "decoder_attention_mask",
            expected="ones only",
            got="zeros (padding)",
            remedy="Give the decoder one sequence at a time, without padding.",
        )
    for name, (hides, of) in _PADDING.items():
        mask = given.named.get(name)
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            continue
        masked = next((given.named[one] for one in of if one in given.named), mask)
        n = masked.shape[:2].numel() // given.batch  # either axis may be the first
        if mask.shape not in ((given.batch, n), (n, n)) and masked is not mask:
            expected = f"shape {(given.batch, n)}, a number for each token"
            raise ArgumentError(name, expected=expected, got=f"shape {tuple(mask.shape)}")
        if mask.shape[0] != given.batch:
            continue
        real = (mask != 0) != hides
        if bool(real.all()):
            continue
        if not bool(real.any(dim=1).all()):
            raise ArgumentError(
                name, expected="a real token in every sequence", got="a sequence of nothing but padding"
            )
        named = dict(given.named)
        tokens = named.get("decoder_input_ids")
        known = inspect.signature(given.model.forward).parameters
        if tokens is not None and tokens is named.get("input_ids") and "decoder_attention_mask" in known:
            named["decoder_attention_mask"] = mask
        return Padding(real, replace(given, named=named), name)
    return None


def check_one_sequence(given: ModelCall) -> None:
    """Raise ArgumentError unless the inputs of a model are one sequence without padding."""
    if given.batch != 1 or padding_of(given) is not None:
        raise ArgumentError(
            "inputs",
            expected="one sequence without padding",
            got=f"{given.batch} sequences" if given.batch != 1 else "a padded sequence",
            remedy="Of a padded batch, take one sequence: ids[i][mask[i].bool()][None].",
        )


def without_padding(padding: Padding, sequence: int) -> Iterator[ModelCall]:
    """Yield the model inputs for one sequence of a padded batch, without its padding. If the model takes
    ``position_ids`` and was given none, yield the inputs again with the tokens' positions in the padded
    sequence.
    """
    real = padding.real[sequence]
    given = padding.whole.named
    masked = {id(value) for name, value in given.items() if not name.startswith(_DECODER)}
    whole = replace(padding, real=torch.ones_like(padding.real))
    cut: dict[int, Any] = {}  # by id: a tensor that is passed twice stays one tensor
    named = {
        name: cut.setdefault(
            id(value), _cut(name, value, padding if id(value) in masked else whole, sequence)
        )
        for name, value in given.items()
        # A two-dimensional mask of the decoder hides nothing here; others are cut like any tensor.
        if name != padding.mask and not (name == "decoder_attention_mask" and getattr(value, "ndim", 0) == 2)
    }
    if padding.mask == "attention_mask":
        named["attention_mask"] = torch.ones_like(padding.whole.named["attention_mask"][:1, real])
    alone = replace(padding.whole, named=named, batch=1)
    yield alone
    if "position_ids" in inspect.signature(alone.model.forward).parameters and "position_ids" not in named:
        yield replace(alone, named={**named, "position_ids": real.nonzero().reshape(1, -1)})


def one_by_one(given: ModelCall) -> list[ModelCall]:
    """Return the model inputs of each sequence of a batch separately. Padding is kept."""
    if given.batch == 1:
        return [given]
    first = next(iter(given.named.values()))
    whole = Padding(torch.ones(given.batch, first.shape[1], dtype=torch.bool), given, "")
    return [next(iter(without_padding(whole, i))) for i in range(given.batch)]


def _cut(name: str, value: Any, padding: Padding, sequence: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    real = padding.real[sequence]
    batch, n = padding.real.shape
    if name in _BETWEEN and value.ndim > 1 and value.shape[-2:] == (n, n):
        if value.ndim == 3:  # (batch * heads, n, n)
            value = value.unflatten(0, (batch, -1))[sequence]
        return value[..., real, :][..., real]
    if value.ndim > 1 and value.shape[:2] == (batch, n):
        return value[sequence : sequence + 1, real]
    if value.ndim > 2 and value.shape[:2] == (n, batch):
        return value[real, sequence : sequence + 1]
    return value[sequence : sequence + 1] if value.ndim and value.shape[0] == batch else value


def reproduces(layer: VerifiedLayer, traced_layer: TracedLayer, padding: Padding, sequence: int) -> bool:
    """Return True if a layer has the same tokens and outputs for a sequence with and without its padding.

    Raises
    ------
    CaptureError
        If the padded forward pass did not call the layer in the same way, or gave NaN or ∞ at real tokens.

    """
    alone = layer.self_attention.replay
    place = layer.self_attention.layer
    call = next((call for call in traced_layer.calls if call.name == alone.name), None)
    x = None if call is None else call.arguments().get(alone.x_name)
    if call is None or call.result is None or not isinstance(x, Tensor):
        raise CaptureError(f"{place} is not called in the same way for padded sequences.")
    whole = ModuleReplay(call, x, padding.whole.batch)
    own = first_tensor(alone(alone.x))
    pairs = ((whole.tokens(), alone.tokens()), (whole.rows(call.result), alone.rows(own)))
    # Rounding grows with depth, and float64 models may compute some steps in float32.
    allowed = (1 + place.index) * tolerance(lowest_epsilon(torch.float32), layer.found.condition)
    for padded, plain in pairs:
        rows = _real_rows(padded, padding.real, sequence, plain.shape[1])
        if rows is not None and not bool(rows.isfinite().all()):
            raise CaptureError(
                f"{place} gives NaN at real tokens if it is given padding, so that no map can be held "
                "against it. Give its sequences without padding, or load the model with "
                "attn_implementation='sdpa'."
            )
        if rows is None or rows.shape != plain[0].shape or not relative_error(rows, plain[0]) <= allowed:
            return False
    return True


def _real_rows(values: Tensor, real: Tensor, sequence: int, count: int) -> Tensor | None:
    if values.shape[1] == count:  # no padding in this sequence, or tokens of a decoder, which has none
        return values[sequence]
    if values.shape[1] == real.shape[1]:
        return values[sequence, real[sequence]]
    # The layer has fewer tokens than the mask (audio frames, say): real tokens are found by their number if
    # the padding is at the end.
    return values[sequence, :count] if bool(real[sequence, 0]) else None
