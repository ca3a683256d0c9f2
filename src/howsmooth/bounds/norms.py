"""The norm layer before an attention: the ellipsoid and ball that its outputs lie in, and its absorption.

N(x) = √d Γ u + β with u = h/s in the unit ball, mean-zero for LayerNorm (Definition 2.3). So the tokens that
an attention sees after a norm layer lie in an ellipsoid whatever the model is given, and the gain Γ and the
shift β can be moved into the attention's parameters. Derivation: docs/theory/norms-and-radius.md.
"""

from __future__ import annotations

import math

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.attention.plain_scores import require_formula
from howsmooth.bounds.parameters import SiteLike
from howsmooth.errors import ArgumentError

__all__ = ["absorb_norm", "ellipsoid", "norm_radius"]

# Relative allowance for rounding in the eigenvalues and in the dual function.
_MARGIN = 1e-10


def ellipsoid(norm: object) -> tuple[Tensor, Tensor]:
    """Return centre and half-axes of the ellipsoid in which the outputs of a norm layer lie.

    Parameters
    ----------
    norm
        A LayerNorm or RMSNorm of dimension d, or a captured site whose tokens come out of one.

    Returns
    -------
    centre, axes
        β (d,) and the matrix √d Γ H (d, d), float64, with H the centring for LayerNorm and the identity for
        RMSNorm: the outputs are centre + axes @ u with |u| <= 1 (Definition 2.3 of Castin et al., 2024).

    """
    norm = _checked(norm)
    gain = norm.weight.detach().to("cpu", torch.float64)
    centre = torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().to("cpu", torch.float64)
    axes = torch.diag(math.sqrt(norm.d) * gain)
    if norm.centred:
        axes = axes - axes.sum(dim=1, keepdim=True) / norm.d
    return centre, axes


def norm_radius(norm: object) -> float:
    """Return the radius R of the smallest centred ball that holds all outputs of a norm layer, rounded up.

    Takes a norm layer, or a captured site whose tokens come out of one.

    R² = max over |u| <= 1 of |β + D u|², D = √d Γ H, is a trust-region problem. For every λ above
    λ_max(DᵀD), λ + |β|² + βᵀD (λ I − DᵀD)⁻¹ Dᵀβ is an upper bound, and the least of them is R².

    Raises
    ------
    ArgumentError
        If ``norm`` is no norm layer, and no site with one.

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

    # The minimiser has an excess of at most |Dᵀβ|; below e⁻⁴⁰ of the scale nothing is left to gain.
    found = minimize_scalar(dual, bounds=(-40.0, 1.0), method="bounded", options={"xatol": 1e-10})
    return math.sqrt(float(found.fun)) * (1 + _MARGIN)


def absorb_norm(attention: object, norm: object = None) -> SelfAttention:
    """Move the gain and the shift of a norm layer into the attention that follows it.

    With u_i = h_i/s_i the normalised tokens, attention(N(X)) = absorbed(u): queries, keys and values are
    applied to √d Γ H u + β. In the paper's notation A' = d ΓAΓ, V' = √d VΓ, b' = √d Γ(Aβ + b),
    b_v' = Vβ + b_v, each restricted to mean-zero vectors for LayerNorm; the tokens of the absorbed
    attention lie in the unit ball.

    Parameters
    ----------
    attention
        A SelfAttention on tokens of dimension d with any heads, mask, biases, rotary positions and scores; or
        a captured site of one.
    norm
        The LayerNorm or RMSNorm that gives its tokens; by default that of the site.

    Returns
    -------
    SelfAttention
        In float64, on the CPU.

    Raises
    ------
    ArgumentError
        If the attention is not given by its matrices, its tokens come out of no norm layer, or the two do not
        fit together.

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
    """Return the attention of a site, or say why there is no such thing."""
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
                got=f"{norm!r}, whose do not",
                remedy="In a pre-norm model the input of a whole block does not; take scope 'attention'.",
            )
        norm = norm.norm
    if isinstance(norm, LayerNorm | RMSNorm):
        return norm
    raise ArgumentError(
        "norm",
        expected="a howsmooth LayerNorm or RMSNorm",
        got=type(norm).__name__,
        remedy="A captured site carries its own as site.norm; a module's is hs.LayerNorm(weight, bias, eps).",
    )
