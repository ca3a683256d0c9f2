"""Norm layers with a known Lipschitz constant, which never divide by a norm that can be zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from howsmooth.attention import LayerNorm, RMSNorm
from howsmooth.bounds import norm_radius
from howsmooth.errors import check_number, check_whole
from howsmooth.nn.checks import Placement, check_layer_input, check_placement, norm_above
from howsmooth.nn.lipschitz_module import TokenModule
from howsmooth.rounding import above

__all__ = ["CenterNorm", "LipschitzLayerNorm", "LipschitzRMSNorm", "norm_with_one"]


class _LipschitzNorm(TokenModule):
    """The base class of norm layers x ↦ Γ φ(Hx) + β with Lipschitz constant ‖ΓH‖ ≤ 1.

    H is the identity or subtracts the mean, φ is a function that subclasses define, β is the learned shift,
    and Γ is the diagonal matrix of the gain that is applied, gain / max(1, max |gain|). ``dim`` is the
    dimension of a token.
    """

    _source = 'norm layers, howsmooth documentation, "Enforce"'
    _shown: ClassVar[tuple[str, ...]] = ("dim",)
    centred: bool
    shift: nn.Parameter | None

    def __init__(self, dim: int, placed: Placement) -> None:
        super().__init__()
        check_placement(**placed)
        self.dim = check_whole("dim", dim)
        self.gain = nn.Parameter(torch.ones(dim, **placed))
        zeros = torch.zeros(dim, **placed)
        self.register_parameter("shift", nn.Parameter(zeros) if self.centred else None)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the norm layer to each token of x (..., dim)."""
        check_layer_input("x", x, dim=self.dim, like=self.gain)
        h = x - x.mean(dim=-1, keepdim=True) if self.centred else x
        u = self._shorten(h) * self._gain()
        return u if self.shift is None else u + self.shift

    def _reach(self, length: int, radius: float) -> float:
        reach = above(self._longest(radius), 8)
        if math.isinf(reach):
            return math.inf
        # norm_radius takes outputs β + √d ΓH u with |u| ≤ 1. Here |u| ≤ reach, so the gain is scaled.
        gain = self._gain().detach().to("cpu", torch.float64) * (reach / math.sqrt(self.dim))
        if not self.centred:
            return norm_radius(RMSNorm(gain))
        shift = None if self.shift is None else self.shift.detach().to("cpu", torch.float64)
        return norm_radius(LayerNorm(gain, shift))

    def _shorten(self, h: Tensor) -> Tensor:
        return h

    def _longest(self, radius: float) -> float:
        return radius

    def _gain(self) -> Tensor:
        # Dividing by the largest gain, if that is above one, keeps the constant at most 1 during training.
        return self.gain / self.gain.abs().amax(dim=0).clamp(min=1.0)

    def _constant(self, length: int, radius: float) -> float:
        gain = self._gain().detach().to("cpu", torch.float64)
        if not self.centred:
            return norm_above("gain", gain.abs().amax()[None, None])
        # The norm of ΓH, computed from the matrix.
        centre = torch.eye(self.dim, dtype=torch.float64) - 1 / self.dim
        # Entries round by 3 u, in the spectral norm by 3 u √d times as much as the largest.
        return above(norm_above("gain", gain[:, None] * centre), 4 * self.dim)


class CenterNorm(_LipschitzNorm):
    """A norm layer that subtracts the mean of each token but does not divide by a norm.

    The layer is x ↦ ΓHx + β = γ ∘ (x − mean(x)) + β with |γ| ≤ 1, and its constant is ‖ΓH‖ ≤ 1. H = I − 11ᵀ/d
    is a projection. LipsFormer (Qi et al. 2023) also multiplies by d/(d−1). With ``scaled`` the layer does
    so, too, and its constant is larger by this factor. Gain and shift are learned; the gain that is applied
    is gain / max(1, max |gain|).
    """

    centred = True

    def __init__(self, dim: int, *, scaled: bool = False, **placed: Unpack[Placement]) -> None:
        super().__init__(dim, placed)
        if scaled:
            check_whole("dim", dim, least=2)
        self._factor = dim / (dim - 1) if scaled else 1.0

    def _constant(self, length: int, radius: float) -> float:
        return above(self._factor * super()._constant(length, radius), 8)

    def _shorten(self, h: Tensor) -> Tensor:
        return h if self._factor == 1.0 else self._factor * h

    def _longest(self, radius: float) -> float:
        return self._factor * radius


class _SmoothedNorm(_LipschitzNorm):
    """Base class of norm layers that scale long tokens down and hardly change short tokens.

    Without gain and shift, the layer maps h = x or h = x − mean(x) to r h / √(|h|² + r²), where r is
    ``floor``. It equals a usual norm layer with dε = r², times r/√d.
    """

    _shown = ("dim", "floor")

    def __init__(self, dim: int, *, floor: float = 1.0, **placed: Unpack[Placement]) -> None:
        super().__init__(dim, placed)
        self.floor = check_number("floor", floor)

    def _shorten(self, h: Tensor) -> Tensor:
        return h / norm_with_one(h / self.floor, lambda squares, one: squares + one)

    def _longest(self, radius: float) -> float:
        if math.isinf(radius):
            return self.floor
        # r R / √(R² + r²), written so that neither squares nor products overflow.
        return min(radius, self.floor) / math.hypot(1.0, min(radius, self.floor) / max(radius, self.floor))


class LipschitzLayerNorm(_SmoothedNorm):
    """A LayerNorm of Lipschitz constant at most 1, whose output before the shift has norm at most ``floor``.

    N(x) = γ ∘ r h/√(|h|² + r²) + β, where h = x − mean(x) and r is the floor. This is LayerNorm with ε =
    r²/d, times r/√d. Long tokens get a norm near r, and short centred tokens hardly change. The constant of
    LayerNorm itself is about max|γ|/√ε, which is 316 for its default settings. Gain and shift are learned;
    the gain that is applied is gain / max(1, max |gain|).
    """

    centred = True


class LipschitzRMSNorm(_SmoothedNorm):
    """A :class:`LipschitzLayerNorm` that neither subtracts the mean of a token nor adds a shift."""

    centred = False


def norm_with_one(t: Tensor, joined: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a smoothed norm of each token, such as √(|t|² + 1), which is never zero.

    For tokens t (..., d), the result is √joined(|t|², 1), with shape (..., 1). ``joined`` is a homogeneous
    function of two numbers, such as + or max. Unlike |t|, the result is smooth at t = 0, with all
    derivatives, and squares never overflow, because t is scaled first.
    """
    # Dividing by the largest entry (at least 1) keeps squares in range; the factor s is restored at the end.
    s = t.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1.0)
    squares = (t / s).square().sum(dim=-1, keepdim=True)
    return s * joined(squares, s.square().reciprocal()).sqrt()
