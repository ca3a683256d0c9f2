"""Heads sliced along the wrong axis of a fused, transposed weight, as in the published adversarial data.

GPT-2 keeps queries, keys and values in one ``Conv1D`` weight of shape (d, 3d), the transpose of what a
linear layer has: token rows multiply it from the left. Head h of the queries is a block of *columns* of the
query part. The published code takes the block of *rows* with the same numbers: a matrix of the same shape
(k, d), but of other numbers, so that the eigenvector of its A is no eigenvector of the head's.
"""

from __future__ import annotations

from torch import Tensor, nn

from howsmooth.attention import SelfAttention
from howsmooth.attention.plain_scores import require_plain_scores
from howsmooth.errors import ArgumentError

__all__ = ["has_fused_weight", "wrong_slices"]


def has_fused_weight(attention: nn.Module) -> bool:
    """Tell whether a model's attention module keeps queries, keys and values in one transposed weight.

    Only then does the published code slice as :func:`wrong_slices` does.
    """
    for part in attention.children():
        weight = getattr(part, "weight", None)
        # By the class's name: transformers is imported in another room.
        if type(part).__name__ == "Conv1D" and isinstance(weight, Tensor):
            d, width = weight.shape
            if width == 3 * d:
                return True
    return False


def wrong_slices(attention: SelfAttention) -> SelfAttention:
    """Return the attention with the matrices that slicing along the wrong axis gives for its heads.

    With W_Q (d, d) the query part of the fused weight, as it multiplies token rows from the left, head h is
    given W_Q[hk:(h+1)k, :] in place of W_Q[:, hk:(h+1)k]ᵀ; keys and values alike. Masks, biases and output
    stay. Its worst-case tokens, ``adversarial.two_cluster(wrong_slices(attention), n, R)``, are those of the
    published figure; they are to be measured on the attention itself.

    Raises
    ------
    ArgumentError
        If heads are grouped, or have not d dimensions in all: only then do the slices have the right shape.

    """
    f = attention
    require_plain_scores(f, "the published slices")
    if f.kv_heads != f.heads or f.heads * f.key_dim != f.d or f.value_dim != f.key_dim:
        raise ArgumentError(
            "attention",
            expected="heads of d dimensions in all, as many for keys and values as for queries",
            got=f"{f.heads} heads of {f.key_dim} over {f.kv_heads} of {f.value_dim}, d = {f.d}",
            remedy="The slices of the published code exist for models such as GPT-2 only.",
        )

    def sliced(weight: Tensor) -> Tensor:
        return weight.reshape(f.d, f.d).mT.reshape(weight.shape).contiguous()

    return SelfAttention(
        sliced(f.query),
        sliced(f.key),
        sliced(f.value),
        f.output,
        query_bias=f.query_bias,
        key_bias=f.key_bias,
        value_bias=f.value_bias,
        output_bias=f.output_bias,
        scale=f.scale,
        causal=f.causal,
        window=f.window,
        mask=f.mask,
        rotary=f.rotary,
    )
