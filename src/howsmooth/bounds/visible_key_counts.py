"""Counts of the keys that each query sees under a mask, and sums over the queries that see the same key.

If row i of a block matrix has a squared norm of at most r_i and is zero in the columns j that i does not see,
the norm of the matrix is at most √(max_j Σ_{i sees j} r_i) (documentation page "Enforce: layers with a
constant that is proved", section "Masks").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import wrightomega
from torch import Tensor

from howsmooth.bounds.bound import check_length
from howsmooth.errors import ArgumentError
from howsmooth.rounding import spectral_norms_above

__all__ = ["VisibleRows", "visible_rows"]


@dataclass(frozen=True, eq=False)
class VisibleRows:
    """The number of keys that each query sees under an attention mask."""

    #: "none", "causal", "any" for all boolean masks, "additive" for all numbers added to the scores too, or
    #: "given".
    kind: str
    length: int
    #: Number of visible keys, float64, one entry for each kind of row; queries that see equally many keys
    #: share one. For "any" they are 1 and 2, of bounds whose rows are largest for one key or two.
    counts: Tensor
    #: The solution Φ of Φ e^{Φ+1} = m − 1 for a row that sees m keys, its own among them. Φ is 0 if m = 1,
    #: and ∞ if the row may not see its own token.
    phi: Tensor
    #: The mask (n, n), True where query (row) sees key (column), if it was given.
    seen: Tensor | None = None

    @property
    def free(self) -> bool:
        """Whether arbitrary numbers may be added to the scores, so that the weights may be arbitrary."""
        return self.kind == "additive"

    @property
    def several(self) -> bool:
        """Whether some query sees more than one key."""
        return bool((self.counts > 1).any())

    def heaviest(self, rows: Tensor) -> Tensor:
        """Return the largest sum of numbers r_i >= 0 over the queries i that see the same key. ``rows`` (...,
        kinds) has one r_i for all queries that see equally many keys.
        """
        if self.kind == "causal":  # every row sees the first token
            return rows.sum(dim=-1)
        if self.seen is None:
            return self.length * rows.amax(dim=-1)
        return (rows @ self.seen.to(rows.dtype)).amax(dim=-1)

    @property
    def most_keys(self) -> Tensor:
        """The largest number of keys that a query sees."""
        return torch.tensor(self.length, dtype=torch.float64) if self.kind == "any" else self.counts.max()

    @property
    def norm(self) -> Tensor:
        """An upper bound on the spectral norm of the mask as a matrix that is 1 for visible keys, else 0.

        For n tokens it is n without a mask, and 1/(2 sin(π/(4n + 2))) for the causal mask.
        """
        if self.seen is not None:
            return spectral_norms_above(self.seen.double())
        n = self.length
        found = 0.5 / math.sin(math.pi / (4 * n + 2)) if self.kind == "causal" else n
        return torch.tensor(found, dtype=torch.float64)


def visible_rows(length: object, mask: str | Tensor) -> VisibleRows:
    """Count how many keys each row of a mask sees, for n = ``length`` tokens.

    ``mask`` is "none", "causal", "any" or "additive", or a boolean tensor (n, n), True where query (row) sees
    key (column). ArgumentError is raised for others, and if a query sees no key.
    """
    n, kind, seen = check_length(length), "given", None
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (n, n):
        seen = mask.cpu()
        counts, own = seen.numpy().sum(axis=1, dtype=float), seen.numpy().diagonal()
        if not counts.all():
            raise ArgumentError(
                "mask",
                expected="a key for every query",
                got=f"none for query {int(counts.argmin())}",
                remedy="Let this query see its own token.",
            )
    elif isinstance(mask, str) and mask in ("none", "causal", "any", "additive"):
        kind = mask
        every = {"causal": np.arange(1.0, n + 1), "any": np.arange(1.0, min(n, 2) + 1)}
        counts, own = every.get(kind, np.array([float(n)])), np.array(kind in ("none", "causal"))
    else:
        raise ArgumentError(
            "mask",
            expected=f"'none', 'causal', 'any', 'additive' or a boolean tensor ({n}, {n})",
            got=f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask),
        )
    # NumPy is used because tensors have no readable values within PyTorch's function transforms.
    with np.errstate(divide="ignore"):
        phi = np.where(own, wrightomega(np.log(counts - 1) - 1.0), np.inf)
    phi[counts <= 1] = 0.0
    return VisibleRows(kind, n, torch.from_numpy(counts), torch.from_numpy(phi), seen)
