"""How much the output of an attention layer changes with each entry of its keys and values.

The formulas and their proofs stand on the documentation page "Errors in queries, keys and values".
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.scaled_dot_product import row_blocks
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.closed_form import in_double
from howsmooth.jacobian.softmax import softmax_derivative

__all__ = ["entry_sensitivities"]


def entry_sensitivities(
    f: SelfAttention, x: Float[Tensor, "n d"]
) -> tuple[Float64[Tensor, "kv_heads n key_dim"], Float64[Tensor, "kv_heads n value_dim"]]:
    """Return for each entry of a layer's keys, and of its values, the norm of the derivative of the layer's
    output with respect to this entry, in float64.

    The keys and values are those that the scores are formed from, after biases, norm layers and rotary
    positions. In key j the Gram matrix of the derivative is Σ_i Σ_gh ⟨u^g_ij, u^h_ij⟩ q^g_i (q^h_i)ᵀ with
    u^g_ij = P^g_ij D^g_ij W_g (v_j − O^g_i), where D is the derivative of the soft cap; only its diagonal is
    formed. The heads g and h that share a key head have the output matrices W_g and W_h, of which one
    triangular factor takes the place.
    """
    double = in_double(f)
    assert isinstance(double, SelfAttention)
    n, group = len(x), f.heads // f.kv_heads
    operands = Operands.of_tokens(double, x.detach().double()[None])
    at = softmax_derivative(operands, double.visible_keys(n), torch.float64)
    width = f.heads * f.value_dim
    output = torch.eye(width, dtype=double.dtype, device=f.device) if f.output is None else double.output
    assert output is not None
    # (b, d_out, G value_dim) → (b, r, G, value_dim) with r = min(d_out, G value_dim), for b key heads that G
    # query heads share.
    whole = output.unflatten(1, (f.kv_heads, -1)).movedim(1, 0)
    factor = torch.linalg.qr(whole, mode="r").R if whole.shape[1] > whole.shape[2] else whole
    factor = factor.unflatten(2, (group, f.value_dim))
    q, p, slope, mean = (t.unflatten(1, (group, n)) for t in (at.q, at.p, at.slope, at.mean))
    squares = q.new_zeros(f.kv_heads, n, f.key_dim)
    for b in range(f.kv_heads):
        c = q[b][:, None] * q[b][None]
        values = torch.einsum("nv,rgv->gnr", at.v[b], factor[b])
        means = torch.einsum("gnv,rgv->gnr", mean[b], factor[b])
        for rows in row_blocks(1, group * values.shape[-1], n, n, q.device)[0][1]:
            u = (values[:, None] - means[:, rows, None]) * slope[b, :, rows, :, None]
            inner = torch.einsum("gijr,hijr->ghij", u, u)
            squares[b] += torch.einsum("ghij,ghik->jk", inner, c[:, :, rows])
    attended = torch.einsum("bgij,bhij->bghj", p, p)
    outputs = torch.einsum("brgv,brhw->bghvw", factor, factor)
    of_values = torch.einsum("bghj,bghvw->bjvw", attended, outputs).diagonal(dim1=-2, dim2=-1)
    return squares.clamp_min(0.0).sqrt().cpu(), of_values.clamp_min(0.0).sqrt().cpu()
