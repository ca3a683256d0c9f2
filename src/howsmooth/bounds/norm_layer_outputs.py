"""The set of outputs of a norm layer.

A norm layer computes N(x) = √d Γ u + β with u = h/s in the unit ball, mean-zero for LayerNorm (Definition 2.3
of Castin et al., 2024). So its outputs lie in an ellipsoid for all inputs. Derivation: documentation page
"Norm layers: radius, ellipsoid, absorption".
"""

from __future__ import annotations

import math

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm
from howsmooth.bounds.attention_parameters import SiteLike, opened, remembered
from howsmooth.errors import ArgumentError
from howsmooth.rounding import above

__all__ = ["checked_norm", "ellipsoid", "norm_radius"]


def ellipsoid(norm: object) -> tuple[Tensor, Tensor]:
    """Return the centre and the axes of the ellipsoid that contains all outputs of a norm layer, in float64.

    The outputs are centre + axes @ u with |u| <= 1: the centre is β, and the axes are √d Γ H (d, d), where H
    subtracts the mean for LayerNorm. ``norm`` may be a captured site.
    """
    norm = checked_norm(norm)
    gain = norm.weight.detach().to("cpu", torch.float64)
    centre = torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().to("cpu", torch.float64)
    axes = torch.diag(math.sqrt(norm.d) * gain)
    if norm.centred:
        axes = axes - axes.sum(dim=1, keepdim=True) / norm.d
    return centre, axes


def norm_radius(norm: object) -> float:
    """Return the radius of the smallest ball around 0 that contains all outputs of a norm layer, rounded up.

    R² = max over |u| <= 1 of |β + D u|² with D = √d Γ H is a trust-region problem. For every λ above
    λ_max(DᵀD), λ + |β|² + βᵀD (λ I − DᵀD)⁻¹ Dᵀβ is an upper bound, and the least of these bounds is R².

    Parameters
    ----------
    norm
        A LayerNorm or RMSNorm, or a captured site whose tokens are outputs of one; else ArgumentError is
        raised.

    """
    return _radius(*ellipsoid(norm))


@remembered
def _radius(centre: Tensor, axes: Tensor) -> float:
    squares, directions = torch.linalg.eigh(axes.mT @ axes)
    largest = float(squares[-1])
    # Of the eigenvalues, a multiple of the order d, and of sums over d terms in the dual function
    roundings = 8 * len(axes) ** 2
    shift = float(centre @ centre)
    weights = (directions.mT @ (axes.mT @ centre)).square()
    total = float(weights.sum())
    if largest == 0.0 or total == 0.0:
        return above(math.sqrt(largest + shift), roundings)
    gaps = largest - squares
    scale = max(largest, math.sqrt(total))

    def dual(log_excess: float) -> float:
        excess = scale * math.exp(log_excess)
        return largest + excess + shift + float((weights / (gaps + excess)).sum())

    # The best λ exceeds λ_max(DᵀD) by at most |Dᵀβ|. An excess below e⁻⁴⁰ of the scale changes no digit.
    found = minimize_scalar(dual, bounds=(-40.0, 1.0), method="bounded", options={"xatol": 1e-10})
    return above(math.sqrt(float(found.fun)), roundings)


def checked_norm(norm: object) -> LayerNorm | RMSNorm:
    """Return a given norm layer, or the norm layer of a captured site. Raise ArgumentError for all else."""
    found = norm if isinstance(norm, LayerNorm | RMSNorm) else opened(norm)[2]
    if isinstance(found, LayerNorm | RMSNorm):
        return found
    remedy = "Pass site.norm of a captured site, or hs.LayerNorm(weight, bias, eps) for a PyTorch module."
    if isinstance(norm, SiteLike):
        remedy = "In a pre-norm model, capture with scope 'attention' instead of 'block'."
    raise ArgumentError(
        "norm",
        expected="a LayerNorm or RMSNorm of howsmooth, or a site whose tokens come out of a norm layer",
        got=repr(norm) if isinstance(norm, SiteLike) else type(norm).__name__,
        remedy=remedy,
    )
