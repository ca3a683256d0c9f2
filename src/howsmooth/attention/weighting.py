"""How the atoms of a measure stand in a softmax: with their weights, and from their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.errors import ArgumentError

__all__ = ["Weighting"]


@dataclass(frozen=True, eq=False)
class Weighting:
    """Weights and positions of the n atoms of one measure, which all members of a batch of tokens share.

    Parameters
    ----------
    log_weights
        Natural logarithms of the weights a_j > 0, which sum to one (Definition C.4: P_ij ∝ a_j e^{S_ij}).
        Logarithms, because a weight such as e^-2000 is no float64.
    positions
        Positions s_j in [0, 1], or None: under a causal map the atom i sees the atoms j with s_j <= s_i, ties
        included (Definition 2.6). Other maps do not look at them.

    """

    log_weights: Float[Tensor, " n"]
    positions: Float[Tensor, " n"] | None = None

    @property
    def n(self) -> int:
        """Number of atoms."""
        return self.log_weights.shape[0]

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Weighting:
        """Return the same weighting with logarithms of another dtype, or on another device."""
        positions = None if self.positions is None else self.positions.to(device=device)
        return Weighting(self.log_weights.to(dtype=dtype, device=device), positions)

    def earlier(self, rows: slice = slice(None)) -> Bool[Tensor, "rows n"]:
        """Return which atoms (columns) each atom of ``rows`` sees under a causal map.

        Raises
        ------
        ArgumentError
            If there are no positions.

        """
        if self.positions is None:
            raise ArgumentError(
                "measure",
                expected="atoms with positions, for a causal map",
                got="a measure without positions",
                remedy="Give positions in [0, 1]; DiscreteMeasure.sequence(X) puts tokens in their order.",
            )
        return self.positions[None, :] <= self.positions[rows, None]
