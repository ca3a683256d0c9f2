"""Which keys the queries see: causal order, a window, a mask, known block by block without n² of memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.errors import ArgumentError

__all__ = ["Visibility", "check_window"]


@dataclass(frozen=True, eq=False)
class Visibility:
    """Query i sees key j if every rule given allows it.

    Parameters
    ----------
    n
        Number of keys; queries are numbered as the keys are.
    causal
        j <= i.
    window
        w >= 1: |i − j| < w, so that a causal window holds w keys, the query's own among them.
    mask
        True where query (row) sees key (column).

    """

    n: int
    causal: bool = False
    window: int | None = None
    mask: Bool[Tensor, "m n_keys"] | None = None

    @property
    def triangle(self) -> bool | None:
        """False if every query sees every key, True if exactly those up to its own, else None."""
        return self.causal if self.window is None and self.mask is None else None

    def whole(self, device: torch.device | None = None) -> Bool[Tensor, "m n"] | None:
        """Return what all queries see of all keys; None if everything."""
        queries = self.n if self.mask is None else self.mask.shape[0]
        return self.block(slice(0, queries), slice(0, self.n), device)

    def keys(self, rows: slice) -> slice:
        """Return the smallest range that order and window leave to the queries ``rows``, the mask aside."""
        first, last = 0, self.n
        if self.causal:
            last = min(last, rows.stop)
        if self.window is not None:
            first = max(first, rows.start - self.window + 1)
            last = min(last, rows.stop + self.window - 1)
        return slice(min(first, last), last)

    def shared_keys(self, rows: slice) -> slice:
        """Return the keys that order and window leave to each of the queries ``rows``, the mask aside."""
        first, last = 0, self.n
        if self.causal:
            last = min(last, rows.start + 1)
        if self.window is not None:
            first = max(first, rows.stop - self.window)
            last = min(last, rows.start + self.window)
        return slice(min(first, last), last)

    def block(
        self, rows: slice, keys: slice, device: torch.device | None = None
    ) -> Bool[Tensor, "rows keys"] | None:
        """Return what the queries ``rows`` see of ``keys``; None if all of it."""
        after_all = not self.causal or keys.stop <= rows.start + 1
        near = self.window is None or max(rows.stop - keys.start, keys.stop - rows.start) <= self.window
        seen = None if self.mask is None else self.mask[rows, keys]
        if after_all and near:
            return seen
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)
        order = torch.ones((), dtype=torch.bool, device=device)
        if not after_all:
            order = j <= i
        if self.window is not None and not near:
            order = order & ((i - j).abs() < self.window)
        return order if seen is None else order & seen

    def clear(self, t: Float[Tensor, "*lead rows keys"], rows: slice, keys: slice) -> None:
        """Write 0 to ``t`` where the queries ``rows`` do not see ``keys``: as :meth:`block` tells."""
        diagonal = rows.start - keys.start  # j − i of the numbers in the block, for a query and its own key
        if self.causal and keys.stop > rows.start + 1:
            t.tril_(diagonal)
        if self.window is not None:
            if rows.stop - keys.start > self.window:
                t.triu_(diagonal - self.window + 1)
            if keys.stop - rows.start > self.window and not self.causal:
                t.tril_(diagonal + self.window - 1)
        if self.mask is not None:
            t.masked_fill_(~self.mask[rows, keys], 0.0)


def check_window(window: object) -> int | None:
    """Return the window of an attention, or None, after checking that it is a whole number >= 1."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ArgumentError(
            "window",
            expected="a whole number >= 1 of keys, the query's own among them, or None",
            got=repr(window),
        )
    return window
