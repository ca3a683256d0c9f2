"""Conversion of PyTorch's Transformer encoder layers to sequences of modules with known Lipschitz
constants.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.softmax import SoftmaxAttention
from howsmooth.nn.certificates.module_propagation import REWRITINGS
from howsmooth.nn.parts.residual import Residual
from howsmooth.nn.parts.self_attention_layer import SelfAttentionBlock

__all__ = ["encoder_layer"]

_ACTIVATIONS = {nn.functional.relu: nn.ReLU, nn.functional.gelu: nn.GELU}


def encoder_layer(layer: nn.Module, length: int) -> nn.Sequential | str:
    """Convert PyTorch's TransformerEncoderLayer to a Sequential of modules with known Lipschitz constants.

    Masks and dropout are left out. The modules are the layer's own, except that an attention of PyTorch is
    copied. They keep the names that they have in the layer. If the layer cannot be rewritten, the function
    returns a string with the reason.
    """
    assert isinstance(layer, nn.TransformerEncoderLayer)
    own: nn.Module = layer.self_attn
    known = isinstance(own, LipschitzAttention) or type(own) is nn.MultiheadAttention
    if not known or "forward" in vars(own):
        return (
            "has an attention that is neither an unchanged torch.nn.MultiheadAttention nor a layer of hs.nn, "
            "such as hs.nn.SoftmaxAttention.from_torch makes of one"
        )
    if not own.batch_first:
        return "expects the batch on the second axis: build it with batch_first=True"
    if isinstance(own, nn.MultiheadAttention) and layer.training and own.dropout > 0:
        return "drops attention weights at random in training mode: call model.eval() first"
    activation = layer.activation
    if not isinstance(activation, nn.Module):
        made = _ACTIVATIONS.get(activation)
        if made is None:
            return "has an activation that is neither relu, gelu nor a module"
        activation = made()
    if isinstance(own, nn.MultiheadAttention):
        weight = own.out_proj.weight
        # The copy draws initial weights, which are then overwritten; the caller's random state stays.
        with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
            own = SoftmaxAttention.from_torch(own, length=length)
    assert isinstance(own, LipschitzAttention)
    attend = [("self_attn", SelfAttentionBlock(own))]
    feed = [("linear1", layer.linear1), ("activation", activation), ("linear2", layer.linear2)]
    # Pre-norm: each residual branch begins with its norm layer. Post-norm: norm layers follow the sums.
    if layer.norm_first:
        return _sequence(
            ("attention", _residual(("norm1", layer.norm1), *attend)),
            ("feed_forward", _residual(("norm2", layer.norm2), *feed)),
        )
    return _sequence(
        ("attention", _residual(*attend)),
        ("norm1", layer.norm1),
        ("feed_forward", _residual(*feed)),
        ("norm2", layer.norm2),
    )


def _residual(*parts: tuple[str, nn.Module]) -> nn.Module:
    return Residual(_sequence(*parts))


def _sequence(*parts: tuple[str, nn.Module]) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


REWRITINGS[nn.TransformerEncoderLayer] = encoder_layer
