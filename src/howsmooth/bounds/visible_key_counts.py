"""Counts of the keys that each query sees under a mask, and sums over the queries that see the same key.

If row i of a block matrix has a squared norm of at most r_i and is zero in the columns j that i does not see,
the norm of the matrix is at most √(max_j Σ_{i sees j} r_i) (documentation page "Enforce: layers with a
constant that is proved", section "Masks").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool
from scipy.special import wrightomega
from torch import Tensor

from howsmooth.bounds.bound import check_length
from howsmooth.errors import ArgumentError
from howsmooth.rounding import spectral_norms_above

__all__ = ["Mask", "VisibleRows", "any_boolean_mask", "visible_rows"]

Mask = Literal["none", "causal", "any"] | Tensor


@dataclass(frozen=True, eq=False)
class VisibleRows:
    """The number of keys that each query sees under an attention mask.

    Queries that see equally many keys can share one entry.

    Attributes
    ----------
    counts
        Number of visible keys, float64, one entry for each kind of row.
    own
        Whether the row sees its own token, one entry for each kind of row.
    free
        True if arbitrary numbers may be added to the scores, so that the weights may be arbitrary.
    seen
        The mask (..., n, n), True where query (row) sees key (column), if it was given as a tensor.
    length
        Number n of tokens.
    kind
        "none", "causal", "any" or "given".
    phi
        The solution Φ of Φ e^{Φ+1} = m − 1 for a row that sees m keys, its own among them. Φ is 0 if m = 1,
        and ∞ if the row does not see its own token. None if it was not computed.

    """

    counts: Tensor
    own: Tensor
    free: bool
    seen: Tensor | None
    length: int
    kind: str
    phi: Tensor | None = None

    def heaviest(self, rows: Tensor) -> Tensor:
        """Return max_j Σ_i r_i for given numbers r_i of the queries, where i runs over the queries that see
        key j.

        ``rows`` has one number r_i >= 0 for each kind of row.
        """
        if self.kind == "causal":  # every row sees the first token
            return rows.sum()
        if self.seen is None:
            return self.length * rows.max()
        return (self.seen.to(rows.dtype).mT @ rows[..., None]).max()

    @property
    def most_keys(self) -> Tensor:
        """The largest number of keys that a query sees."""
        return torch.tensor(self.length, dtype=torch.float64) if self.kind == "any" else self.counts.max()

    @property
    def norm(self) -> Tensor:
        """An upper bound on the spectral norm of the 0/1 matrix of the mask, with entries 1 for visible keys.

        For n tokens it is n without a mask, and 1/(2 sin(π/(4n + 2))) for the causal mask.
        """
        if self.kind == "causal":
            return torch.tensor(0.5 / math.sin(math.pi / (4 * self.length + 2)), dtype=torch.float64)
        if self.seen is None:
            return torch.tensor(self.length, dtype=torch.float64)
        return spectral_norms_above(self.seen.double()).max()


def visible_rows(length: object, mask: Mask) -> VisibleRows:
    """Count how many keys each row of a mask sees, as a :class:`VisibleRows`.

    Parameters
    ----------
    length
        Number n >= 1 of tokens.
    mask
        "none"; "causal", each token sees the tokens up to its own; a boolean tensor (..., n, n), True where
        query (row) sees key (column), with several masks for the worst of them; or "any", for all boolean
        masks and all numbers added to the scores.

    Raises
    ------
    ArgumentError
        If the mask is none of these, or a query sees no key.

    """
    n = check_length(length)
    if isinstance(mask, Tensor):
        return _given(n, mask)
    if mask not in ("none", "causal", "any"):
        raise ArgumentError(
            "mask",
            expected="'none', 'causal', 'any' or a boolean tensor (..., n, n)",
            got=repr(mask),
        )
    counts = np.arange(1.0, n + 1) if mask == "causal" else np.array([float(n)])
    return _rows(counts, np.full(counts.shape, mask != "any"), None, n, mask)


def any_boolean_mask(length: int) -> VisibleRows:
    """Return counts for every boolean mask, of bounds whose rows are largest for one key or two.

    The masks may differ between heads. The result has only these two kinds of row.
    """
    counts = torch.tensor([1.0, 2.0] if length > 1 else [1.0], dtype=torch.float64)
    return VisibleRows(counts, torch.zeros_like(counts, dtype=torch.bool), False, None, length, "any")


def _given(n: int, mask: Tensor) -> VisibleRows:
    if mask.dtype != torch.bool or mask.shape[-2:] != (n, n):
        raise ArgumentError(
            "mask",
            expected=f"a boolean tensor (..., {n}, {n}), True where query (row) sees key (column)",
            got=f"{mask.dtype} of shape {tuple(mask.shape)}",
        )
    seen = mask.cpu().numpy()
    counts = seen.sum(axis=-1, dtype=float)
    if not counts.all():
        raise ArgumentError(
            "mask",
            expected="a key for every query",
            got=f"none for query {int(np.argwhere(counts == 0)[0, -1])}",
            remedy="Let this query see its own token.",
        )
    return _rows(counts, seen.diagonal(axis1=-2, axis2=-1), mask.cpu(), n, "given")


def _rows(
    counts: np.ndarray, own: np.ndarray, seen: Bool[Tensor, "*batch n n"] | None, n: int, kind: str
) -> VisibleRows:
    # NumPy is used because tensors have no readable values within PyTorch's function transforms.
    with np.errstate(divide="ignore"):
        phi = np.where(own, wrightomega(np.log(counts - 1) - 1.0), np.inf)
    phi[counts <= 1] = 0.0
    # Copies, because PyTorch warns of arrays that are read-only, as a diagonal is.
    m, sees_itself, of_row = (torch.from_numpy(np.array(array)) for array in (counts, own, phi))
    return VisibleRows(m, sees_itself, kind == "any", seen, n, kind, of_row)
