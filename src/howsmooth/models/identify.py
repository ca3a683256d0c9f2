"""What a recorded layer computes, found by comparing values and never from names, shapes or model types.

Each reading is a hypothesis ("these columns of that linear map are the queries") that the recorded
numbers confirm or refute; ``replay`` then tests the whole on inputs that the recording did not see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.errors import CaptureError, NonFiniteError
from howsmooth.models.blocks import Block, read_block, token_norm
from howsmooth.models.masking import describe_mask, visible_keys
from howsmooth.models.projections import read_projections, rows, weight_and_bias
from howsmooth.models.recording import AttentionCall, AttentionLayer, LayerRecord, ModuleCall, is_linear

__all__ = ["Structure", "identify"]

#: Keywords of attention functions that change nothing in a single pass without cache or dropout. The mask
#: that comes with the call holds the window already, and whether it is causal.
_WITHOUT_EFFECT = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_attentions", "output_hidden_states", "position_ids", "return_dict",
    "sliding_window", "use_cache",
})  # fmt: skip

#: What some keywords mean, for the message that refuses them.
_MEANING = {
    "dropout": "dropout",
    "position_bias": "a position bias",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "soft-capped scores",
}


@dataclass(frozen=True, eq=False)
class Structure:
    """What a layer computes, and the modules at which its values can be read again."""

    layer: AttentionLayer
    attention: SelfAttention
    masking: str
    condition: float  # bound on the absolute scores, for tolerances
    output: nn.Module  # the output projection
    block: Block
    norm: LayerNorm | RMSNorm | None  # whose outputs the tokens are


def identify(record: LayerRecord) -> Structure:
    """Read a recorded layer.

    Raises
    ------
    CaptureError
        If the layer does something between its input and its output projection that is not captured;
        the message names the layer, its class and what it does.
    NonFiniteError
        If its input or its output holds NaN or infinity.

    """
    layer, call = record.layer, record.call
    if call is None:
        raise CaptureError(f"{layer} did not call its attention.")
    _refuse_unknown_keywords(layer, call)
    n, queries, keys = record.x.shape[1], call.query.shape[2], call.key.shape[2]
    if not queries == keys == n:
        raise CaptureError(
            f"{layer} is given {n} tokens and attends from {queries} to {keys}: cross-attention, a key/value "
            "cache or pooled tokens, which are not captured."
        )
    causal, mask, masking = describe_mask(visible_keys(layer, call.mask, n), n)
    if not bool(torch.isfinite(record.x).all() and torch.isfinite(call.output).all()):
        raise NonFiniteError(
            "inputs",
            expected=f"finite activations in {layer}",
            got="NaN or infinity",
            remedy="Check the model's weights.",
        )
    projections = read_projections(record, call)
    output = _output_projection(record, call)
    weight, bias = weight_and_bias(output.module)
    attention = SelfAttention(
        projections.query.weight,
        projections.key.weight,
        projections.value.weight,
        weight.clone(),
        query_bias=projections.query.bias,
        key_bias=projections.key.bias,
        value_bias=projections.value.bias,
        output_bias=None if bias is None else bias.clone(),
        scale=call.scaling,
        causal=causal,
        mask=mask,
        rotary=projections.rotary,
    )
    longest = [float(t.norm(dim=-1).max()) for t in (call.query, call.key)]
    return Structure(
        layer=layer,
        attention=attention,
        masking=masking,
        condition=abs(call.scaling) * longest[0] * longest[1],
        output=output.module,
        block=read_block(record, attention, output),
        norm=token_norm(record),
    )


def _refuse_unknown_keywords(layer: AttentionLayer, call: AttentionCall) -> None:
    for name, value in call.keywords.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if isinstance(value, bool | int | float | str | tuple | list | dict) and not value:
            continue  # switched off
        meaning = f"{_MEANING[name]} ({name})" if name in _MEANING else f"the keyword {name}"
        raise CaptureError(f"{layer} hands {meaning} to its attention, which is not captured.")


def _output_projection(record: LayerRecord, call: AttentionCall) -> ModuleCall:
    """Find the first linear map after the attention; its input must equal the concatenated heads."""
    heads = rows(call.output.flatten(2))
    unclear = f"The output projection of {record.layer} cannot be identified:"
    between: list[str] = []
    for c in record.after:
        if not is_linear(c.module):
            between.append(f"{c.name.rsplit('.', 1)[-1]} ({type(c.module).__name__})")
            continue
        if c.inputs is not None and torch.equal(rows(c.inputs), heads):
            return c
        reason = f"{', '.join(between)} lies" if between else "something that is no module of its own lies"
        raise CaptureError(
            f"{unclear} {c.name} is the next linear map, but it is not given the concatenated heads; "
            f"{reason} between."
        )
    raise CaptureError(f"{unclear} no linear map follows its attention.")
