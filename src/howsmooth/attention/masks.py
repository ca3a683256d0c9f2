"""Attention masks (causal order, window, boolean matrix) that are computed one block at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.errors import ArgumentError

__all__ = ["Visibility", "check_window"]


@dataclass(frozen=True, eq=False)
class Visibility:
    """An attention mask given by causal order, a window, a boolean matrix, or a combination of them.

    Parameters
    ----------
    n
        Number of keys.
    causal
        If True, the query at position i sees only keys j <= i.
    window
        Width w >= 1: the query at position i sees only keys j with |i − j| < w. A causal window holds w keys,
        the query's own among them.
    mask
        Boolean matrix, True where the query (row) may see the key (column).
    offset
        Position of the first query among the keys. The query of row i has position i + offset, by which
        causal order and window are decided.

    """

    n: int
    causal: bool = False
    window: int | None = None
    mask: Bool[Tensor, "m n_keys"] | None = None
    offset: int = 0

    @property
    def triangle(self) -> bool | None:
        """True if the mask is the causal order alone, False if nothing is masked, and None if the mask has a
        window or a boolean matrix.
        """
        return self.causal if self.window is None and self.mask is None else None

    def whole(self, device: torch.device | None = None) -> Bool[Tensor, "m n"] | None:
        """Return the whole mask, True where the query sees the key, or None if nothing is masked."""
        queries = self.n if self.mask is None else self.mask.shape[0]
        return self.block(slice(0, queries), slice(0, self.n), device)

    def all_see(self, rows: slice) -> bool:
        """Return True if the causal order and the window leave at least one visible key to every query in
        ``rows``.
        """
        return self.window is None or rows.stop + self.offset < self.n + self.window

    def keys(self, rows: slice) -> slice:
        """Return the range of keys that at least one of the given queries may attend to.

        The queries are ``rows``. Causal order and window are obeyed; a boolean mask is ignored.
        """
        first, last, at = 0, self.n, self._positions(rows)
        if self.causal:
            last = min(last, at.stop)
        if self.window is not None:
            first = max(first, at.start - self.window + 1)
            last = min(last, at.stop + self.window - 1)
        return slice(min(first, last), last)

    def shared_keys(self, rows: slice) -> slice:
        """Return the range of keys that every one of the given queries may attend to.

        The queries are ``rows``. Causal order and window are obeyed; a boolean mask is ignored.
        """
        first, last, at = 0, self.n, self._positions(rows)
        if self.causal:
            last = min(last, at.start + 1)
        if self.window is not None:
            first = max(first, at.stop - self.window)
            last = min(last, at.start + self.window)
        return slice(min(first, last), last)

    def block(
        self, rows: slice, keys: slice, device: torch.device | None = None
    ) -> Bool[Tensor, "rows keys"] | None:
        """Return the part of the mask for some queries and some keys, or None if it hides none of these keys.

        The mask is True where a query of ``rows`` sees a key of ``keys``.
        """
        # Order and window are compared only where they cut through the block.
        at = self._positions(rows)
        after_all = not self.causal or keys.stop <= at.start + 1
        near = self.window is None or max(at.stop - keys.start, keys.stop - at.start) <= self.window
        seen = None if self.mask is None else self.mask[rows, keys]
        if after_all and near:
            return seen
        i = torch.arange(at.start, at.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)
        order = torch.ones((), dtype=torch.bool, device=device)
        if not after_all:
            order = j <= i
        if self.window is not None and not near:
            order = order & ((i - j).abs() < self.window)
        return order if seen is None else order & seen

    def clear(self, t: Float[Tensor, "*lead rows keys"], rows: slice, keys: slice) -> None:
        """Set the entries of ``t`` (..., rows, keys) to zero where the query does not see the key."""
        at = self._positions(rows)
        diagonal = at.start - keys.start  # offset of the diagonal on which a query meets its own key
        if self.causal and keys.stop > at.start + 1:
            t.tril_(diagonal)
        if self.window is not None:
            if at.stop - keys.start > self.window:
                t.triu_(diagonal - self.window + 1)
            if keys.stop - at.start > self.window and not self.causal:
                t.tril_(diagonal + self.window - 1)
        if self.mask is not None:
            t.masked_fill_(~self.mask[rows, keys], 0.0)

    def _positions(self, rows: slice) -> slice:
        """Convert a range of queries to the range of the keys that have the same positions."""
        return slice(rows.start + self.offset, rows.stop + self.offset)


def check_window(window: object) -> int | None:
    """Return ``window`` after checking that it is None or a whole number >= 1."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ArgumentError(
            "window",
            expected="a whole number >= 1 of keys, the query's own among them, or None",
            got=repr(window),
        )
    return window
