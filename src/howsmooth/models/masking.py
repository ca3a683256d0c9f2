"""What is added to the scores of a layer: which keys each query sees, a bias on those, and words for both."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.errors import CaptureError
from howsmooth.models.recording import AttentionLayer

__all__ = ["HIDDEN", "describe_mask", "split_mask"]

# A key whose score is lowered by so much has a weight of exactly zero, unless scores differ by hundreds:
# models write -1e4, -1e9 or the most negative number for a key that is hidden. Verified by value.
HIDDEN = -1e3


def split_mask(
    layer: AttentionLayer, mask: Tensor | None
) -> tuple[Bool[Tensor, "*lead m n"] | None, Float[Tensor, "*lead m n"] | None]:
    """Return which keys are seen (None: all), and the finite numbers added to their scores (None: zeros).

    Raises
    ------
    CaptureError
        If all keys are hidden from some query.

    """
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        visible, bias = mask, None
    else:
        visible = mask > HIDDEN
        bias = torch.where(visible, mask, 0.0)
        bias = bias.clone() if bool(bias.any()) else None
    if not bool(visible.any(dim=-1).all()):
        raise CaptureError(
            f"{layer} hides every key from some token (padding). "
            "Leave such tokens out, or say which they are in a two-dimensional attention_mask."
        )
    return None if bool(visible.all()) else visible.clone(), bias


def describe_mask(
    visible: Bool[Tensor, "n n"] | None, n: int
) -> tuple[bool, Bool[Tensor, "n n"] | None, str]:
    """Return whether a mask is causal, what it hides besides the later tokens, and a phrase for it.

    At n = 1 nothing is hidden; a mask is handed over there only to layers that are causal.
    """
    if visible is None:
        return False, None, "none"
    positions = torch.arange(n, device=visible.device)
    back = positions[:, None] - positions[None, :]  # how far the key lies behind the query
    if n > 1 and bool(visible.all()):
        return False, None, "none"
    causal = not bool((visible & (back < 0)).any())
    if causal:
        if bool((visible == (back >= 0)).all()):
            return True, None, "causal"
        window = int(visible.sum(dim=-1).max())
        if bool((visible == ((back >= 0) & (back < window))).all()):
            return True, visible.clone(), f"sliding window {window}, causal"
        return True, visible.clone(), "causal with a further mask"
    reach = int(torch.where(visible, back.abs(), 0).max())
    if bool((visible == (back.abs() <= reach)).all()):
        return False, visible.clone(), f"sliding window {reach} to both sides"
    return False, visible.clone(), "a mask of its own"
