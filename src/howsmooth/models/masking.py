"""The mask that a layer was handed, as the set of keys that each query sees, and its name."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.errors import CaptureError
from howsmooth.models.recording import AttentionLayer

__all__ = ["describe_mask", "visible_keys"]


def visible_keys(layer: AttentionLayer, mask: Tensor | None, n: int) -> Bool[Tensor, "n n"] | None:
    """Which keys (columns) each query (row) sees, from the mask of one sequence; None if there was no mask.

    Raises
    ------
    CaptureError
        If the mask is a bias (finite numbers added to the scores), differs between heads or hides all
        keys from some query.

    """
    if mask is None:
        return None
    if mask.ndim > 4 or any(size not in (1, n) for size in mask.shape[-2:]):
        raise CaptureError(
            f"{layer} is given a mask of shape {tuple(mask.shape)} for {n} tokens, which is not captured."
        )
    if mask.dtype == torch.bool:
        visible = mask
    else:
        visible = mask == 0
        # What is at least half the most negative number cannot be told from it once scores are added.
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((visible | hidden).all()):
            raise CaptureError(
                f"{layer} adds finite numbers to its scores (a position bias), which is not captured."
            )
    visible = visible.broadcast_to(*visible.shape[:-2], n, n).reshape(-1, n, n)
    if not bool((visible == visible[:1]).all()):
        raise CaptureError(f"{layer} masks its heads differently, which is not captured.")
    visible = visible[0]
    if not bool(visible.any(dim=-1).all()):
        raise CaptureError(
            f"{layer} hides every key from some token (padding). "
            "Measure sequences without padding, one length at a time."
        )
    return visible


def describe_mask(
    visible: Bool[Tensor, "n n"] | None, n: int
) -> tuple[bool, Bool[Tensor, "n n"] | None, str]:
    """Return whether a mask is causal, what it hides besides the later tokens, and a phrase for it.

    At n = 1 nothing is hidden; transformers hands over a mask there only to layers that are causal.
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
