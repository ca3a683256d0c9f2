"""How the atoms of a measure stand in a softmax: with their weights, and from their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention.visibility import Visibility
from howsmooth.errors import ArgumentError

__all__ = ["EarlierAtoms", "Weighting"]


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

    def visibility(self, *, causal: bool) -> Visibility | EarlierAtoms:
        """Return which atoms each atom sees: all, or under a causal map those of no later position.

        Raises
        ------
        ArgumentError
            If the map is causal and there are no positions.

        """
        if not causal:
            return Visibility(self.n)
        if self.positions is None:
            raise ArgumentError(
                "measure",
                expected="atoms with positions, for a causal map",
                got="a measure without positions",
                remedy="Give positions in [0, 1]; DiscreteMeasure.sequence(X) puts tokens in their order.",
            )
        return EarlierAtoms(self.positions)


@dataclass(frozen=True, eq=False)
class EarlierAtoms:
    """Which atoms an atom sees under a causal map: those of no later position (Definition 2.6)."""

    positions: Float[Tensor, " n"]

    def keys(self, rows: slice) -> slice:
        """Return the range of all atoms: positions need not be in order."""
        return slice(0, self.positions.shape[0])

    def block(
        self, rows: slice, keys: slice, device: torch.device | None = None
    ) -> Bool[Tensor, "rows keys"]:
        """Return which of the atoms ``keys`` the atoms ``rows`` see."""
        return self.positions[None, keys] <= self.positions[rows, None]

    def whole(self, device: torch.device | None = None) -> Bool[Tensor, "n n"]:
        """Return what all atoms see of all."""
        return self.block(slice(None), slice(None))
