"""Influences that should not be there: of another packed document, of padding, or of the future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.words import counted

__all__ = ["Leaks", "forbidden"]

_PRINTED = 10


@dataclass(frozen=True, eq=False, repr=False)
class Leaks:
    """The influences that should be zero and are not; true if there is one.

    An influence is zero only if every number of its block ∂y_i/∂x_j is 0.0, as under a mask, without
    a tolerance. Where ``lower`` of a leak is zero, rounding may be all of it. The block is the derivative at
    these tokens, as it was computed: a weight that underflows to zero lets nothing through, nor does a choice
    without a derivative, such as that of experts.
    """

    #: A row for each leak, the largest first: the columns of :attr:`Influence.table
    #: <howsmooth.Influence.table>` and ``from``, which is ``document`` (another one), ``padding`` or
    #: ``future``.
    table: pd.DataFrame
    #: Number of influences that should be zero.
    checked: int
    #: A description of the measured map.
    scope: str

    def __bool__(self) -> bool:
        return len(self.table) > 0

    def __repr__(self) -> str:
        if not self:
            return (
                f"No leak: of {counted(self.checked, 'influence')} that should be zero, each is exactly zero "
                f"at these tokens; {self.scope}"
            )
        kinds = ", ".join(f"{count} from {kind}" for kind, count in self.table["from"].value_counts().items())
        most = "" if len(self.table) <= _PRINTED else f"; the largest {_PRINTED}"
        return (
            f"{counted(len(self.table), 'leak')} among {counted(self.checked, 'influence')} that should be "
            f"zero: {kinds}; {self.scope}{most}:\n{self.table.head(_PRINTED)!r}"
        )

    def raise_if_any(self) -> None:
        """Raise AssertionError with the leaks, for tests of training code."""
        if self:
            raise AssertionError(repr(self))


def forbidden(
    documents: Tensor | Sequence[int | None] | None, outputs: Sequence[int], n: int, *, causal: bool
) -> np.ndarray:
    """Return for each output and input token whose the influence would be: a kind of leak, or ""."""
    number = np.asarray(_numbers(documents, n))
    i, j = np.asarray(outputs)[:, None], np.arange(n)
    conditions = [number[i] < 0, number[j] < 0, number[i] != number[j], causal & (j > i)]
    kinds = np.select(np.broadcast_arrays(*conditions), ["", "padding", "document", "future"], "")
    if not kinds.astype(bool).any():
        expected = "several documents or padding, unless causal"
        raise ArgumentError("documents", expected=expected, got="no influence that should be zero")
    return kinds


def _numbers(documents: Tensor | Sequence[int | None] | None, n: int) -> list[int]:
    """Check the numbers of documents; those of padding become −1."""
    if documents is None:
        return [0] * n
    given = documents.tolist() if isinstance(documents, Tensor) else list(documents)
    given = given[0] if len(given) == 1 and isinstance(given[0], list) else given
    expected = f"{n} numbers of documents, one a token, with None or -1 for padding"
    if len(given) != n:
        raise ArgumentError("documents", expected=expected, got=f"{len(given)}")
    for one in given:
        if isinstance(one, bool) or not (one is None or isinstance(one, int | np.integer)):
            raise ArgumentError("documents", expected=expected, got=repr(one))
    return [-1 if one is None else max(int(one), -1) for one in given]
