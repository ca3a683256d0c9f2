"""Attention maps: functions of the tokens whose Lipschitz constants this library measures and bounds.

``scaled_dot_product`` computes softmax attention from queries, keys and values. ``self_attention`` adds the
projections, and ``custom_code_attention`` arbitrary PyTorch code before and after the softmax.
``norm_layers`` and ``compositions`` build residual connections and pre-norm and post-norm blocks.
"""

from howsmooth.attention.compositions import Compose, Residual
from howsmooth.attention.custom_code_attention import StagedAttention
from howsmooth.attention.l2_attention import L2Attention
from howsmooth.attention.map import TokenMap
from howsmooth.attention.norm_layers import LayerNorm, LayerScale, RMSNorm
from howsmooth.attention.rotary import Rotary
from howsmooth.attention.self_attention import SelfAttention
from howsmooth.attention.sinkhorn_attention import SinkhornAttention

__all__ = [
    "Compose",
    "L2Attention",
    "LayerNorm",
    "LayerScale",
    "RMSNorm",
    "Residual",
    "Rotary",
    "SelfAttention",
    "SinkhornAttention",
    "StagedAttention",
    "TokenMap",
]
