"""Influences that should not be there: of another packed document, of padding, or of the future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.words import counted

__all__ = ["Leaks", "forbidden"]


@dataclass(frozen=True, eq=False, repr=False)
class Leaks:
    """The influences that must be zero and are not; true if there is one.

    An influence is zero only if every number of its block ∂y_i/∂x_j is 0.0, as under a mask. The block is
    the derivative at these tokens, as it was computed: a weight that underflows lets nothing through, nor
    does a choice without a derivative, such as that of experts. If ``lower`` is zero, it may be rounding.
    """

    #: A row for each leak, the largest first, as in :attr:`Influence.table <howsmooth.Influence.table>`;
    #: ``from`` is ``document`` (another one), ``padding`` or ``future``.
    table: pd.DataFrame
    #: Number of influences that must be zero.
    checked: int
    #: The measured map in words.
    scope: str

    def __bool__(self) -> bool:
        return len(self.table) > 0

    def __repr__(self) -> str:
        few, count = self.table.head(10), counted(self.checked, "influence")
        if not self:
            return f"No leak: {count} must be zero, and each is exactly, at these tokens; {self.scope}"
        kinds = ", ".join(f"{times} from {one}" for one, times in self.table["from"].value_counts().items())
        return f"{len(self.table)} leaks of {count} that must be zero ({kinds}); {self.scope}\n{few!r}"

    def raise_if_any(self) -> None:
        """Raise AssertionError with the leaks, for tests of training code."""
        if self:
            raise AssertionError(repr(self))


def forbidden(documents: Any, outputs: Sequence[int], n: int, *, causal: bool) -> np.ndarray:
    """Return for each output and input token what its influence would be: a kind of leak, or ""."""
    listed = documents.flatten().tolist() if isinstance(documents, Tensor) else documents
    if listed is not None and not hasattr(listed, "__len__"):
        raise ArgumentError("documents", expected=f"{n} whole numbers or None", got=repr(listed))
    if not isinstance(causal, (bool, np.bool_)):
        raise ArgumentError("causal", expected="True or False", got=repr(causal))
    number = np.array([-1 if one is None else one for one in ([0] * n if listed is None else listed)])
    if number.shape != (n,) or number.dtype.kind != "i":
        expected = f"{n} whole numbers, one a token, with None or -1 for padding"
        raise ArgumentError("documents", expected=expected, got=f"{number.dtype} of shape {number.shape}")
    i, j = np.asarray(outputs)[:, None], np.arange(n)
    conditions = [number[i] < 0, number[j] < 0, number[i] != number[j], causal & (j > i)]
    kinds = np.select(np.broadcast_arrays(*conditions), ["", "padding", "document", "future"], "")
    if not kinds.astype(bool).any():
        expected = "several, or padding, unless causal" if n > 1 else "several tokens: one alone cannot leak"
        raise ArgumentError("documents", expected=expected, got="neither" if n > 1 else "one token")
    return kinds
