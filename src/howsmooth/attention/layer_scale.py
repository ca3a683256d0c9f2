"""Layer scale: multiplication of each channel of the tokens by a learned factor (Touvron et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import TokenMap, as_parameter

__all__ = ["LayerScale"]


class LayerScale(TokenMap):
    """The map X ↦ λ∘X that multiplies each channel by a factor, as in CaiT, BEiT and DINOv2.

    The scaled residual α∘X + λ∘f(X) is ``Compose(LayerScale(α), Residual(Compose(LayerScale(λ / α), f)))``.

    Parameters
    ----------
    weight
        The factors λ, (d,).

    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = as_parameter("weight", weight, ("d",))

    @property
    def d(self) -> int:
        """Dimension of the tokens, which is the number of channels."""
        return self.weight.shape[0]

    @property
    def d_out(self) -> int:
        """Dimension of the output tokens, which is the number of channels."""
        return self.d

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the factors of the channels."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the factors of the channels."""
        return self.weight.device

    def __repr__(self) -> str:
        return f"LayerScale(d={self.d})"

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        return "layer scale"

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> LayerScale:
        """Return the map with its factors converted to another dtype or device."""
        return LayerScale(self.weight.to(dtype=dtype, device=device))

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        return self.weight * x
