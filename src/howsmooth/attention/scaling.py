"""Layer scale: a factor for each channel, on a branch or on the residual (Touvron et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.attention.map import TokenMap, as_parameter
from howsmooth.attention.weighting import Weighting

__all__ = ["LayerScale"]


class LayerScale(TokenMap):
    """X ↦ λ∘X, channel by channel, as after the attention of CaiT, BEiT and DINOv2.

    A scaled residual α∘X + λ∘f(X) is ``Compose(LayerScale(α), Residual(Compose(LayerScale(λ / α), f)))``.

    Parameters
    ----------
    weight
        The factors λ, (d,).

    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = as_parameter("weight", weight, ("d",))

    @property
    def d(self) -> int:
        """Dimension of a token."""
        return self.weight.shape[0]

    @property
    def d_out(self) -> int:
        """Dimension of a token."""
        return self.d

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the factors."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the factors."""
        return self.weight.device

    def __repr__(self) -> str:
        return f"LayerScale(d={self.d})"

    def describe(self) -> str:
        """Return one phrase that says what the map is."""
        return "layer scale"

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> LayerScale:
        """Return the same map with factors of another dtype or on another device."""
        return LayerScale(self.weight.to(dtype=dtype, device=device))

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        return self.weight * x
