"""Splitting of an attention mask into hidden keys and finite numbers that are added to the scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention.masks import Visibility
from howsmooth.errors import CaptureError

__all__ = ["HIDDEN", "Masking", "describe_mask", "hides_later_keys", "order_and_window", "split_mask"]

# Number of entries of a mask that are compared at a time, so that a large mask is not copied as a whole.
_ENTRIES = 1 << 22

# A number below this, added to a score, counts as hiding the key: models write -1e4, -1e9 or the most
# negative number. The weight of the key is then exactly zero unless scores differ by hundreds, which the
# verification of the captured map would notice.
HIDDEN = -1e3


def split_mask(
    layer: object, mask: Tensor | None
) -> tuple[Bool[Tensor, "*lead m n"] | None, Float[Tensor, "*lead m n"] | None]:
    """Split an attention mask into a boolean mask and the finite numbers that it adds to the scores.

    The first is True where the query sees the key, and None if every query sees all keys; the numbers are
    None if they are all zero. CaptureError is raised if some query sees no key.
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
    """The rules by which an attention hides keys from queries, and a phrase that states them."""

    causal: bool  # queries see no later keys
    window: int | None  # number of keys in a sliding window
    mask: Bool[Tensor, "n n"] | None  # a mask that the two rules above do not describe, True where visible
    words: str


def describe_mask(visible: Bool[Tensor, "n n"] | None, n: int) -> Masking:
    """Describe a mask by rules, such as causal order. If no rules fit, keep the mask itself.

    For n = 1 every mask counts as causal, since it hides nothing: pass None if the layer is not causal.
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
    """Return the causal order and the window that together give exactly this mask. Return None if there are
    none, if the mask differs between heads or sequences, or if it is not square.
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
    """Return True if no query sees a later key under this mask, which may be boolean or additive."""
    n = mask.shape[-2]
    whole = mask.expand(*mask.shape[:-2], n, n)
    for rows in _row_blocks(mask, n):
        later = whole[..., rows, rows.start + 1 :]
        later = later if mask.dtype == torch.bool else (later < 0).logical_not()
        if bool(later.triu().any()):
            return False
    return True


def _row_blocks(mask: Tensor, n: int) -> Iterator[slice]:
    length = max(1, _ENTRIES // max(1, mask.shape[:-2].numel() * n))
    for start in range(0, n, length):
        yield slice(start, min(start + length, n))
