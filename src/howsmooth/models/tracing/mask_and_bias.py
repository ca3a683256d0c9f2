"""What is added to the scores of a layer: which keys each query sees, a bias on those, and words for both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention.visibility import Visibility
from howsmooth.errors import CaptureError
from howsmooth.models.tracing.layer_trace import AttentionLayer

__all__ = ["HIDDEN", "Masking", "describe_mask", "hides_later_keys", "order_and_window", "split_mask"]

# Entries of a mask that are looked at together: a mask of a long sequence is not to be copied.
_ENTRIES = 1 << 22

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


class Masking(NamedTuple):
    """Which keys are seen: in order, in a window, by a further mask; and a phrase for it."""

    causal: bool
    window: int | None
    mask: Bool[Tensor, "n n"] | None
    words: str


def describe_mask(visible: Bool[Tensor, "n n"] | None, n: int) -> Masking:
    """Say what a mask does; the matrix is kept only if it is neither order nor window.

    At n = 1 nothing is hidden; a mask is handed over there only to layers that are causal.
    """
    if visible is None:
        return Masking(False, None, None, "none")
    rules = order_and_window(visible)
    if rules is None:
        causal = hides_later_keys(visible)
        words = "causal with a further mask" if causal else "a mask of its own"
        return Masking(causal, None, visible.clone(), words)
    if rules.window is None:
        return Masking(rules.causal, None, None, "causal" if rules.causal else "none")
    each_side = f"sliding window {rules.window - 1} to both sides"
    words = f"sliding window {rules.window}, causal" if rules.causal else each_side
    return Masking(rules.causal, rules.window, None, words)


def order_and_window(visible: Bool[Tensor, "*lead m n"]) -> Visibility | None:
    """Return the rules, without a mask, that show exactly these keys; None if there are none.

    Nor are there for masks that differ between leading axes, or are not square.
    """
    m, n = visible.shape[-2:]
    if m != n or visible.numel() != n * n:
        return None
    whole = visible.reshape(n, n)
    causal = hides_later_keys(whole)
    width = int(whole[-1 if causal else 0].sum())
    rules = Visibility(n, causal, width if 0 < width < n else None)
    for rows in _row_blocks(whole, n):
        expected = rules.block(rows, slice(0, n), visible.device)
        if not bool(whole[rows].all() if expected is None else torch.equal(whole[rows], expected)):
            return None
    return rules


def hides_later_keys(mask: Tensor) -> bool:
    """Whether a mask, boolean or additive, lets no query see a later key; always at n = 1."""
    n = mask.shape[-2]
    whole = mask.expand(*mask.shape[:-2], n, n)
    for rows in _row_blocks(mask, n):
        later = whole[..., rows, rows.start + 1 :]
        later = later if mask.dtype == torch.bool else (later < 0).logical_not()
        if bool(later.triu().any()):
            return False
    return True


def _row_blocks(mask: Tensor, n: int) -> Iterator[slice]:
    """Cut the rows of a mask into blocks of a bounded number of entries."""
    length = max(1, _ENTRIES // max(1, mask.shape[:-2].numel() * n))
    for start in range(0, n, length):
        yield slice(start, min(start + length, n))
