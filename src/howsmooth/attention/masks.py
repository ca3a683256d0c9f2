"""Attention masks (causal order, window, boolean matrix) that are computed one block at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.errors import ArgumentError

__all__ = ["Visibility", "check_seen", "check_window"]


@dataclass(frozen=True, eq=False)
class Visibility:
    """An attention mask. It is given by causal order, a window, a boolean matrix or a combination of them, or
    by the positions of the atoms of a measure.

    ``n`` is the number of keys; ``causal``, ``window`` and ``mask`` are those of
    :class:`~howsmooth.attention.SelfAttention`. The query of row i has position i + ``offset``, by which
    causal order and window are decided. With ``positions`` s_j, which need not be sorted, atom i sees the
    atoms j with s_j <= s_i (Definition 2.6); no other rule may be given beside them.
    """

    n: int
    causal: bool = False
    window: int | None = None
    mask: Bool[Tensor, "m n_keys"] | None = None
    offset: int = 0
    positions: Float[Tensor, " n"] | None = None

    @property
    def triangle(self) -> bool | None:
        """True if the mask is the causal order of tokens alone, False if nothing is masked, and None for any
        other mask.
        """
        others = self.window, self.mask, self.positions
        return self.causal if all(rule is None for rule in others) else None

    def whole(self, device: torch.device | None = None) -> Bool[Tensor, "m n"] | None:
        """Return the whole mask, True where the query sees the key. Return None if nothing is masked."""
        queries = self.n if self.mask is None else self.mask.shape[0]
        return self.block(slice(0, queries), slice(0, self.n), device)

    def all_see(self, rows: slice) -> bool:
        """Return True if causal order and window let every query in ``rows`` see at least one key."""
        return self.window is None or rows.stop + self.offset < self.n + self.window

    def keys(self, rows: slice) -> slice:
        """Return the range of keys that at least one query of ``rows`` sees by causal order and window."""
        return self._between(rows.start, rows.stop - 1)

    def shared_keys(self, rows: slice) -> slice:
        """Return the range of keys that every query of ``rows`` sees by causal order and window."""
        return self._between(rows.stop - 1, rows.start)

    def _between(self, first: int, last: int) -> slice:
        """Return the keys from the first one that query ``first`` sees to the last one that ``last`` sees."""
        start, stop = 0, self.n
        if self.causal:
            stop = min(stop, last + self.offset + 1)
        if self.window is not None:
            start = max(start, first + self.offset - self.window + 1)
            stop = min(stop, last + self.offset + self.window)
        return slice(min(start, stop), stop)

    def block(
        self, rows: slice, keys: slice, device: torch.device | None = None
    ) -> Bool[Tensor, "rows keys"] | None:
        """Return the mask for ranges of queries and keys, True where a query sees a key. Return None if every
        query sees all of these keys.
        """
        if self.positions is not None:
            return self.positions[None, keys] <= self.positions[rows, None]
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
        return slice(rows.start + self.offset, rows.stop + self.offset)


def check_seen(mask: Bool[Tensor, "*lead m n"], causal: bool, window: int | None) -> None:
    """Raise ArgumentError if a mask hides all keys from some query."""
    rules = Visibility(max(mask.shape[-2:]), causal, window).whole(mask.device)
    blind = torch.nonzero(~(mask if rules is None else mask & rules).any(dim=-1))
    if len(blind):
        raise ArgumentError(
            "mask",
            expected="at least one visible key for every query",
            got=f"query {int(blind[0, -1])} sees none",
            remedy="Remove such tokens (padding) from X.",
        )


def check_window(window: object) -> int | None:
    """Return ``window`` after checking that it is None or a whole number >= 1."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ArgumentError(
            "window",
            expected="a whole number >= 1 of keys, the query's own among them, or None",
            got=repr(window),
        )
    return window
