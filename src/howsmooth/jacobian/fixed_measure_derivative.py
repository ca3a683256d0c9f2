"""The derivative of x ↦ Γ_μ(x) at the atoms of a fixed measure μ, where attention moves x to Γ_μ(x).

It is the term with δ_ij in the Jacobian: V C_i A for a head of softmax attention, where C_i is the covariance
of the atoms that x_i sees. It describes an atom that splits into two halves which move apart, while the
measure stays the same to first order. The derivation is on the documentation page "The local constant of
mean-field attention".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import Compose, LayerNorm, Residual, RMSNorm, SelfAttention, TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.compositions import layers
from howsmooth.attention.scaled_dot_product import attention_probabilities, cap_slope
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.norm_layers import NormJacobian
from howsmooth.jacobian.softmax_tile import derivative_in_own_query

__all__ = ["frozen_derivatives"]

# Number of entries in the largest tensor of a block of atoms.
_BLOCK = 1 << 22

# Log-weight of an atom without mass: the softmax gives it a weight of exactly 0.
_NO_MASS = -1e30

Rows = Callable[[slice], Tensor]


def frozen_derivatives(
    f: TokenMap, x: Float[Tensor, "n d"], weighting: Weighting
) -> Iterator[Float[Tensor, "block d_out d"]]:
    """Yield the derivatives of x ↦ Γ_μ(x) at the atoms of μ, for one block of atoms at a time. ``f`` is the
    map that moves x to Γ_μ(x); it and the atoms are float64.

    Raise ArgumentError if the map does not act on such a measure.
    """
    n = x.shape[0]
    rows = _rows(f, x, weighting)
    step = max(1, min(n, _BLOCK // (_width(f) * n + f.d * f.d_out)))
    for begin in range(0, n, step):
        yield rows(slice(begin, min(begin + step, n)))


def _width(f: TokenMap) -> int:
    """Return how many numbers are kept in memory for each pair of atoms while a block is computed."""
    attention = [
        one.heads * (one.key_dim + one.value_dim) for one in layers(f) if isinstance(one, SelfAttention)
    ]
    return max(attention, default=f.d + f.d_out)


def _rows(f: TokenMap, x: Tensor, weighting: Weighting) -> Rows:
    match f:
        case SelfAttention() if f.query_norm is None and f.key_norm is None:
            return _attention(f, x, weighting)
        case LayerNorm() | RMSNorm():
            # Each atom is a sequence of its own, whose products with the unit vectors are columns.
            at, unit = NormJacobian.at(f, x[:, None], x.dtype), torch.eye(f.d, dtype=x.dtype, device=x.device)
            numbers = torch.arange(len(x), device=x.device)
            return lambda rows: at.select(numbers[rows])._product(unit).mT
        case Residual():
            inner, eye = _rows(f.inner, x, weighting), torch.eye(f.d, dtype=x.dtype, device=x.device)
            return lambda rows: inner(rows) + eye
        case Compose():
            first = _rows(f.inner, x, weighting)
            second = _rows(f.outer, f.inner._forward(x, weighting), weighting)
            return lambda rows: second(rows) @ first(rows)
        case _:
            return _by_autodiff(f, x, weighting)


def _attention(f: SelfAttention, x: Tensor, weighting: Weighting) -> Rows:
    """Return a function that computes the derivatives at some atoms i as Σ_h W_h Cov_i(v, k) · scale Q_h.
    Head h has the output matrix W_h and the query matrix Q_h.

    Cov_i(v, k) is the covariance of values and keys under row i of P. If the scores have a cap with
    derivative D, Σ_j P_ij (v_j − O_i) D_ij k_jᵀ takes its place.
    """
    visible = f.visible_keys(x.shape[0], weighting)
    # Keys and values are centred, because covariances are products of differences.
    operands = Operands.of_tokens(f, x[None])
    q, k, v = operands.q[0], operands.k[0], operands.v[0]
    output = f.output
    if output is None:
        output = torch.eye(f.d_out, dtype=x.dtype, device=x.device)
    output = output.unflatten(1, (f.heads, f.value_dim))

    def derivatives(rows: slice) -> Tensor:
        seen = None if visible is None else visible[rows]
        p = attention_probabilities(q[..., rows, :], k, 1.0, seen, weighting.log_weights, f.features)
        slope = p if f.softcap is None else p * cap_slope(q[..., rows, :] @ k[:, None].mT, f.softcap)
        values, keys = (t[:, None].expand(-1, p.shape[1], -1, -1) for t in (v, k))
        spread = derivative_in_own_query(p, slope, values, keys).flatten(0, 1)
        moved = spread @ (f.scale * f.query)[:, None]
        return torch.einsum("ohv,hbvd->bod", output, moved)

    return derivatives


def _by_autodiff(f: TokenMap, x: Tensor, weighting: Weighting) -> Rows:
    """Add copies of the atoms without mass to the measure. Their images are Γ_μ at their places."""

    def derivatives(rows: slice) -> Tensor:
        probe = x[rows].detach().clone().requires_grad_()
        massless = torch.full_like(probe[:, 0], _NO_MASS, dtype=torch.float64)
        positions = weighting.positions
        if positions is not None:
            positions = torch.cat((positions, positions[rows]))
        extended = Weighting(torch.cat((weighting.log_weights, massless)), positions)
        with torch.enable_grad():
            image = f._forward(torch.cat((x, probe)), extended)[x.shape[0] :]
            # The image of a copy depends on no other copy, so the gradient of the sum over all copies gives
            # one row of the derivative of each.
            parts = [
                torch.autograd.grad(part.sum(), probe, retain_graph=True)[0] for part in image.unbind(-1)
            ]
        return torch.stack(parts, dim=1)

    return derivatives
