"""The set of outputs of a norm layer, and attention with a preceding norm layer absorbed into its matrices.

A norm layer computes N(x) = √d Γ u + β with u = h/s in the unit ball, mean-zero for LayerNorm (Definition 2.3
of Castin et al., 2024). So its outputs lie in an ellipsoid for all inputs, and its gain Γ and shift β can be
moved into the parameters of the attention that follows. Derivation: documentation page "Norm layers: radius,
ellipsoid, absorption".
"""

from __future__ import annotations

import math

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.attention.theorem_preconditions import require_formula
from howsmooth.bounds.attention_parameters import SiteLike
from howsmooth.errors import ArgumentError

__all__ = ["absorb_norm", "ellipsoid", "norm_radius"]

# Radii are rounded up by this relative error of the eigenvalues and of the dual function.
_MARGIN = 1e-10


def ellipsoid(norm: object) -> tuple[Tensor, Tensor]:
    """Return the centre and the axes of the ellipsoid that contains all outputs of a norm layer.

    Parameters
    ----------
    norm
        A LayerNorm or RMSNorm of dimension d, or a captured site whose tokens are outputs of a norm layer.

    Returns
    -------
    centre, axes
        β (d,) and the matrix √d Γ H (d, d), both float64, where H subtracts the mean for LayerNorm and is the
        identity for RMSNorm. The outputs are centre + axes @ u with |u| <= 1.

    Raises
    ------
    ArgumentError
        If ``norm`` is neither a norm layer nor a site with one.

    """
    norm = _checked(norm)
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
        A LayerNorm or RMSNorm, or a captured site whose tokens are outputs of a norm layer.

    Raises
    ------
    ArgumentError
        If ``norm`` is neither a norm layer nor a site with one.

    """
    centre, axes = ellipsoid(norm)
    squares, directions = torch.linalg.eigh(axes.mT @ axes)
    largest = float(squares[-1])
    shift = float(centre @ centre)
    weights = (directions.mT @ (axes.mT @ centre)).square()
    total = float(weights.sum())
    if largest == 0.0 or total == 0.0:
        return math.sqrt(largest + shift) * (1 + _MARGIN)
    gaps = largest - squares
    scale = max(largest, math.sqrt(total))

    def dual(log_excess: float) -> float:
        excess = scale * math.exp(log_excess)
        return largest + excess + shift + float((weights / (gaps + excess)).sum())

    # The best λ exceeds λ_max(DᵀD) by at most |Dᵀβ|. An excess below e⁻⁴⁰ of the scale changes no digit.
    found = minimize_scalar(dual, bounds=(-40.0, 1.0), method="bounded", options={"xatol": 1e-10})
    return math.sqrt(float(found.fun)) * (1 + _MARGIN)


def absorb_norm(attention: object, norm: object = None) -> SelfAttention:
    """Return an attention with the gain and the shift of the preceding norm layer multiplied into its
    matrices.

    The absorbed attention of the normalised tokens u_i = h_i/s_i, which lie in the unit ball, equals
    attention(N(X)). In the paper's notation its parameters are A' = d ΓAΓ, V' = √d VΓ, b' = √d Γ(Aβ + b) and
    b_v' = Vβ + b_v, for LayerNorm restricted to mean-zero vectors.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.SelfAttention` on tokens of dimension d, with any heads, mask, biases,
        positions and scores; or a captured site whose map is a SelfAttention.
    norm
        The LayerNorm or RMSNorm before the attention; by default the norm layer of the site.

    Returns
    -------
    SelfAttention
        The absorbed attention, in float64 on the CPU.

    Raises
    ------
    ArgumentError
        If the attention is not a SelfAttention, there is no norm layer, or their dimensions differ.

    """
    if isinstance(attention, SiteLike) and not isinstance(attention, SelfAttention):
        norm = attention if norm is None else norm
        attention = _map_of(attention)
    if not isinstance(attention, SelfAttention):
        raise ArgumentError(
            "attention", expected="a SelfAttention or a captured site", got=type(attention).__name__
        )
    centre, axes = ellipsoid(norm)
    if centre.shape[0] != attention.d:
        raise ArgumentError(
            "norm", expected=f"a norm of tokens of dimension {attention.d}", got=f"{centre.shape[0]}"
        )
    f = attention.to(dtype=torch.float64, device="cpu")

    def shifted(weight: Tensor, bias: Tensor | None) -> Tensor:
        moved = weight @ centre
        return moved if bias is None else moved + bias

    return f._rebuilt(
        query=f.query @ axes,
        key=f.key @ axes,
        value=f.value @ axes,
        query_bias=shifted(f.query, f.query_bias),
        key_bias=shifted(f.key, f.key_bias),
        value_bias=shifted(f.value, f.value_bias),
    )


def _map_of(site: SiteLike) -> object:
    """Return the attention of a captured layer of a model, without the tokens of the layer.

    Raise ArgumentError if the site has another map.
    """
    if isinstance(site.map, SelfAttention):
        return site.map
    require_formula(site.map, "absorbed parameters")
    raise ArgumentError(
        "attention",
        expected="a site whose map is attention alone",
        got=f"scope {getattr(site, 'scope', '?')!r}",
        remedy="Capture with scope 'attention', 'heads' or 'head'.",
    )


def _checked(norm: object) -> LayerNorm | RMSNorm:
    if isinstance(norm, SiteLike) and not isinstance(norm, LayerNorm | RMSNorm):
        if norm.norm is None:
            raise ArgumentError(
                "norm",
                expected="a site whose tokens come out of a norm layer",
                got=f"{norm!r}, whose tokens do not",
                remedy="In a pre-norm model, capture with scope 'attention' instead of 'block'.",
            )
        norm = norm.norm
    if isinstance(norm, LayerNorm | RMSNorm):
        return norm
    raise ArgumentError(
        "norm",
        expected="a howsmooth LayerNorm or RMSNorm",
        got=type(norm).__name__,
        remedy="Pass site.norm of a captured site, or hs.LayerNorm(weight, bias, eps) for a PyTorch module.",
    )
