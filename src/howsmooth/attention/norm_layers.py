"""Norm layers (Definition 2.3 of Castin et al., 2024) and layer scale (Touvron et al., 2021)
as maps on tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import TokenMap, as_parameter
from howsmooth.errors import ArgumentError

__all__ = ["LayerNorm", "LayerScale", "RMSNorm"]


class _OfChannels(TokenMap):
    """Base class of maps that act on each token separately, with one ``weight`` for each channel."""

    weight: Tensor

    @property
    def d(self) -> int:
        """Dimension of the tokens, which is the number of channels."""
        return self.weight.shape[0]


class _Norm(_OfChannels):
    """Base class of the norm layers LayerNorm and RMSNorm, which act on each token separately.

    It maps a token x to N(x) = √d · h / √(|h|² + dε) ∘ γ + β, with gain γ (``weight``), bias β and ε =
    ``eps``. The vector h is x − mean(x) if ``centred`` (LayerNorm), else x (RMSNorm).
    """

    centred: bool

    def __init__(self, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> None:
        self.weight = as_parameter("weight", weight, ("d",))
        self.bias = None if bias is None else as_parameter("bias", bias, (self.d,), like=self.weight)
        self.eps = float(eps)
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ArgumentError("eps", expected="a finite number >= 0", got=str(eps))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(d={self.d}, eps={self.eps:g})"

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        return type(self).__name__

    def direction_and_length(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens h (..., n, d), centred for LayerNorm, and the lengths s = √(|h|² + dε) by which
        the norm divides them, (..., n, 1).
        """
        h = x - x.mean(dim=-1, keepdim=True) if self.centred else x
        return h, torch.sqrt((h * h).sum(dim=-1, keepdim=True) + self.d * self.eps)

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        h, s = self.direction_and_length(x)
        out = math.sqrt(self.d) * h / s * self.weight
        return out if self.bias is None else out + self.bias


class LayerNorm(_Norm):
    """The LayerNorm of each token, as a map of tokens.

    Parameters
    ----------
    weight, bias
        Gain γ and shift β, (d,); ``bias`` may be None.
    eps
        ε >= 0, added to the mean square under the root.

    """

    centred = True


class RMSNorm(_Norm):
    """The RMSNorm of each token, as a map of tokens.

    Parameters
    ----------
    weight
        Gain γ, (d,). For models that store γ − 1 (Gemma), pass 1 + weight.
    eps
        ε >= 0, added to the mean square under the root.

    """

    centred = False

    def __init__(self, weight: Tensor, eps: float = 1e-6) -> None:
        super().__init__(weight, None, eps)


class LayerScale(_OfChannels):
    """The map X ↦ λ∘X that multiplies each channel by a factor, as in CaiT, BEiT and DINOv2.

    The scaled residual α∘X + λ∘f(X) is ``Compose(LayerScale(α), Residual(Compose(LayerScale(λ / α), f)))``.

    Parameters
    ----------
    weight
        The factors λ, (d,).

    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = as_parameter("weight", weight, ("d",))

    def __repr__(self) -> str:
        return f"LayerScale(d={self.d})"

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        return "layer scale"

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        return self.weight * x
