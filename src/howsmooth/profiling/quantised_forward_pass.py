"""Forward passes of a model with some keys and values quantised, as if they came from a quantised
KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from howsmooth.errors import CaptureError
from howsmooth.models.key_value_perturbations import LogitsOfModel
from howsmooth.profiling.quantisers import absmax_steps, rounded

__all__ = ["of_head", "simulated_kl"]

Place = tuple[int, int, str]
"""A layer, a key/value head, and "K" or "V"."""


def simulated_kl(
    whole: LogitsOfModel, bits: Mapping[Place, int], kv_heads: Mapping[int, int], quantiser: str
) -> float:
    """Return the KL divergence of the predictions of a model when the keys or values of some heads are
    quantised.

    Layers are quantised in the order in which the model computes them, so the keys and values of a layer
    come from the quantised layers before it, as with a quantised KV cache.

    Parameters
    ----------
    whole
        The model on its input.
    bits
        The number of bits for each place (layer, key/value head, "K" or "V"); all others stay exact.
    kv_heads
        The number of key/value heads of each layer that has a place.
    quantiser
        The quantiser.

    Raises
    ------
    CaptureError
        If the number of heads of keys at a softmax is no multiple of the layer's number in ``kv_heads``.

    """

    def change(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        chosen = [(head, operand, count) for (at, head, operand), count in bits.items() if at == layer]
        if not chosen:
            return None
        other = {
            operand: t.clone(memory_format=torch.contiguous_format)
            for operand, t in (("K", keys), ("V", values))
        }
        for head, operand, count in chosen:
            part = of_head(other[operand], layer, head, kv_heads[layer])
            part.copy_(rounded(part, absmax_steps(part, count, quantiser)))
        return other["K"], other["V"]

    return whole.mean_kl(change)


def of_head(t: Tensor, layer: int, head: int, kv_heads: int) -> Tensor:
    """Return a view of the part of keys or values (*lead, heads, n, dim) that belongs to one head.

    Some models repeat the keys of a head for each query head before their softmax, and some have one axis
    for the sequences of a batch and the heads.
    """
    heads = t.view(-1, *t.shape[-2:])
    copies, rest = divmod(len(heads), kv_heads)
    if rest or not copies:
        raise CaptureError(
            f"The softmax of layer {layer} has {len(heads)} heads of keys, where its map has {kv_heads}."
        )
    return heads[head * copies : (head + 1) * copies]
