"""One small layer of every kind of hs.nn, and inputs that it takes: what tests of all of them walk over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs

LENGTH, DIM, RADIUS = 4, 6, 1.5


@dataclass(frozen=True)
class Layer:
    """How to build a layer, and the shape of an input without its batch."""

    build: Callable[..., nn.Module]
    shape: tuple[int, ...] = (LENGTH, DIM)
    #: Whether it takes sequences of any length.
    any_length: bool = True
    #: Whether it takes tokens of any dimension.
    any_dim: bool = False


def _attention(name: str, **own: Any) -> Layer:
    def build(**settings: Any) -> nn.Module:
        given = {"length": LENGTH, "radius": RADIUS, "constant": 1.0} | own | settings
        return getattr(hs.nn, name)(DIM, 2, **given)

    return Layer(build, any_length=False)


ATTENTION = {
    "SoftmaxAttention": _attention("SoftmaxAttention"),
    "QueryKeyNormAttention": _attention("QueryKeyNormAttention"),
    "L2Attention": _attention("L2Attention"),
    "CosineAttention": _attention("CosineAttention", temperature=1.5, gain=0.5, eps=0.25),
    "SinkhornAttention": _attention("SinkhornAttention"),
    "LipschitzNormAttention": _attention("LipschitzNormAttention"),
    "SigmoidAttention": _attention("SigmoidAttention", shift=-1.0),
}
"""Layers with the interface of torch.nn.MultiheadAttention."""

PARTS = {
    "OrthogonalLinear": Layer(lambda **f: hs.nn.OrthogonalLinear(DIM, 4, **f)),
    "SpectralLinear": Layer(lambda **f: hs.nn.SpectralLinear(DIM, 8, bias=False, iterations=2, **f)),
    "CenterNorm": Layer(lambda **f: hs.nn.CenterNorm(DIM, scaled=True, **f)),
    "LipschitzLayerNorm": Layer(lambda **f: hs.nn.LipschitzLayerNorm(DIM, floor=0.5, **f)),
    "LipschitzRMSNorm": Layer(lambda **f: hs.nn.LipschitzRMSNorm(DIM, **f)),
    "GroupSort": Layer(lambda: hs.nn.GroupSort(3), any_dim=True),
    "MaxMin": Layer(lambda: hs.nn.MaxMin(), any_dim=True),
    "Patches": Layer(lambda: hs.nn.Patches(2), shape=(3, 4, 4), any_dim=True),
    "AddPositions": Layer(lambda **f: hs.nn.AddPositions(LENGTH, DIM, **f), any_length=False),
    "PrependToken": Layer(lambda **f: hs.nn.PrependToken(DIM, **f)),
    "TakeToken": Layer(lambda: hs.nn.TakeToken(-1), any_dim=True),
    "MeanPool": Layer(lambda: hs.nn.MeanPool(), any_dim=True),
    "ClipTokens": Layer(lambda: hs.nn.ClipTokens(1.25), any_dim=True),
    "Residual": Layer(lambda: hs.nn.Residual(hs.nn.MaxMin()), any_dim=True),
    "AverageResidual": Layer(
        lambda **f: hs.nn.AverageResidual(hs.nn.OrthogonalLinear(DIM, DIM, **f), 0.25, learnable=True, **f)
    ),
    "SelfAttentionBlock": Layer(
        lambda **f: hs.nn.SelfAttentionBlock(ATTENTION["SoftmaxAttention"].build(**f)), any_length=False
    ),
}
"""The rest: maps of tensors."""

LAYERS = ATTENTION | PARTS


def names() -> set[str]:
    """The layers that hs.nn has."""
    # What watches training brings transformers, which takes seconds to import.
    others = ("LipschitzMonitor", "MonitorCallback", "lightning_callback", "penalty")
    found = {name: getattr(hs.nn, name) for name in hs.nn.__all__ if name not in others}
    return {
        name
        for name, one in found.items()
        if isinstance(one, type)
        and issubclass(one, hs.nn.LipschitzModule)
        and not getattr(one, "__abstractmethods__", None)
    }


def inputs(layer: Layer, *, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tokens within the radius."""
    x = torch.randn(batch, *layer.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if len(layer.shape) == 2:
        x = x * (0.9 * RADIUS / torch.linalg.vector_norm(x, dim=-1, keepdim=True))
    return x.to(dtype)


def tokens_of(output: Any) -> Tensor:
    """The tokens of an output, which attention gives with its weights."""
    return output[0] if isinstance(output, tuple) else output
