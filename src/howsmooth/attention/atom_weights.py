"""Weights and positions of the atoms of a measure, as softmax attention uses them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.masks import Visibility
from howsmooth.errors import ArgumentError

__all__ = ["Weighting"]


@dataclass(frozen=True, eq=False)
class Weighting:
    """The weights and positions of the n atoms of a discrete measure on which attention acts.

    ``log_weights`` (n,) are the natural logarithms of the weights a_j > 0, which sum to one (Definition C.4:
    P_ij ∝ a_j e^{S_ij}): a weight such as e^-2000 underflows float64. ``positions`` s_j in [0, 1], (n,), or
    None: under a causal map atom i sees the atoms j with s_j <= s_i, ties included (Definition 2.6). Other
    maps ignore them.
    """

    log_weights: Float[Tensor, " n"]
    positions: Float[Tensor, " n"] | None = None

    @property
    def n(self) -> int:
        """Number of atoms of the measure."""
        return self.log_weights.shape[0]

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Weighting:
        """Return the same atoms with their log-weights in another dtype, or on another device."""
        positions = None if self.positions is None else self.positions.to(device=device)
        return Weighting(self.log_weights.to(dtype=dtype, device=device), positions)

    def visibility(self, *, causal: bool) -> Visibility:
        """Return the mask between the atoms. In causal order, no atom sees an atom at a later position.

        Raise ArgumentError if the map is causal and there are no positions.
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
        return Visibility(self.n, positions=self.positions)
