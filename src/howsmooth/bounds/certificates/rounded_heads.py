"""The float64 weights, values and queries of each head, with proved bounds on their rounding errors.

The Jacobian of one head, before its output map, is

    (J E)_i = Σ_j P_ij [ V e_j + w_ij ⟨y_ij, e_j⟩ ] + F_i Q e_i,
    w_ij = v_j − o_i,  y_ij = Kᵀ R_jᵀ q_i,  F_i = s Σ_j P_ij w_ij (k_j − c_i)ᵀ R_i  (any c_i),

where q_i = s R_i (Q x_i + b_q), s is the scale of the scores and R_i the rotary map at position i. The
rounded weights, values and queries define an operator J̃ of the same form, and ``error`` bounds ‖J − J̃‖,
where J is the Jacobian in exact arithmetic. Derivation: documentation page "Certificates at given tokens".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention import Rotary, SelfAttention
from howsmooth.bounds.certificates.eigenvalues import norm
from howsmooth.bounds.certificates.rounding import LARGEST
from howsmooth.errors import NonFiniteError
from howsmooth.roundoff import UNDERFLOW, U, gamma, up

__all__ = ["HeadAt", "HeadsAt", "heads_at", "row_blocks"]

_BLOCK = 1 << 22  # number of entries in a block of rows


@dataclass(frozen=True, eq=False)
class HeadAt:
    """One head at given tokens, in float64: attention weights, values, queries and projection matrices.

    Attributes
    ----------
    P
        Attention weights.
    v, o
        Values v_j and their averages o_i = Σ_j P_ij v_j, for centred tokens and the scaled V.
    q
        Queries q_i, multiplied by the scale s and rotated.
    F
        The factors F_i of the diagonal blocks F_i Q.
    V, K, Q
        The projection matrices without rounding error; V is divided by a power of two.
    error
        Upper bound on ‖J − J̃‖.

    """

    P: Float[Tensor, "n n"]
    v: Float[Tensor, "n value_dim"]
    o: Float[Tensor, "n value_dim"]
    q: Float[Tensor, "n key_dim"]
    F: Float[Tensor, "n value_dim key_dim"]
    V: Float[Tensor, "value_dim d"]
    K: Float[Tensor, "key_dim d"]
    Q: Float[Tensor, "key_dim d"]
    error: float


@dataclass(frozen=True, eq=False)
class HeadsAt:
    """All heads of an attention at given tokens, with their output maps W_h.

    V and W are divided by powers of two; certificates must be multiplied by 2 ** ``exponent``.
    """

    heads: tuple[HeadAt, ...]
    W: tuple[Float[Tensor, "d_out value_dim"], ...]
    rotary: Rotary | None
    exponent: int

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.heads[0].P.shape[0]

    @property
    def turn_norm(self) -> float:
        """Upper bound on how much rotary positions can lengthen a query or key.

        It comes from Frobenius norms of 2 × 2 blocks, and is about √2 for rotations.
        """
        return _turn_norm(self.rotary)

    def key_blocks(self, g: Float[Tensor, "n key_dim key_dim"]) -> Float[Tensor, "n key_dim key_dim"]:
        """Return R_jᵀ g_j R_j for a matrix g_j of each key j, where R_j is the rotary map of key j."""
        if self.rotary is None:
            return g
        turned = self.rotary.rotate_adjoint(g.movedim(0, -2)).movedim(
            -2, 0
        )  # rotates rows; the next line rotates columns
        return self.rotary.rotate_adjoint(turned.mT.movedim(0, -2)).movedim(-2, 0).mT


def row_blocks(n: int, width: int) -> list[slice]:
    """Return slices that cut n rows into blocks with a bounded number of entries.

    Each row has ``width`` entries.
    """
    step = max(1, min(n, _BLOCK // max(1, width)))
    return [slice(start, min(n, start + step)) for start in range(0, n, step)]


def heads_at(f: SelfAttention, x: Float[Tensor, "n d"]) -> HeadsAt:
    """Return the weights, values and queries of all heads of ``f`` at tokens ``x``.

    ``f`` must be in float64 on the CPU, and ``x`` in float64.

    Raises
    ------
    NonFiniteError
        If queries, keys, values or scores overflow or exceed 2^200.

    """
    n = x.shape[0]
    output = torch.eye(f.heads * f.value_dim, dtype=x.dtype) if f.output is None else f.output
    value, up_v = _scaled(f.value)
    output, up_w = _scaled(output)
    visible = f.visible_keys(n)
    visible = torch.ones(n, n, dtype=torch.bool) if visible is None else visible
    group = f.heads // f.kv_heads
    heads = tuple(_head_at(f, h, h // group, value, visible, x) for h in range(f.heads))
    return HeadsAt(heads, output.split(f.value_dim, dim=1), f.rotary, up_v + up_w)


def _scaled(t: Tensor) -> tuple[Tensor, int]:
    """Scale a tensor by a power of two so that its largest entry lies in [1/2, 1).

    The results are the scaled tensor and the exponent.
    """
    largest = float(t.abs().amax())
    if largest == 0:
        return t, 0
    exponent = math.frexp(largest)[1]
    return torch.ldexp(t, torch.tensor(-exponent)), exponent


def _turn_norm(rotary: Rotary | None) -> float:
    if rotary is None:
        return 1.0
    half = rotary.rot_dim // 2
    squares = rotary.cos.square() + rotary.sin.square()
    return max(1.0, math.sqrt(float((squares[:, :half] + squares[:, half:]).amax())) * (1 + 1e-12))


def _head_at(
    f: SelfAttention, h: int, g: int, value: Tensor, visible: Bool[Tensor, "n n"], x: Float[Tensor, "n d"]
) -> HeadAt:
    n, d = x.shape
    k = f.key_dim
    Q, K, V = f.query[h], f.key[g], value[g]
    # Only differences of values matter, and of keys if there are no rotary positions. So tokens are centred,
    # which makes rounding errors smaller.
    centred = x - x.mean(dim=0)
    q_bias = torch.zeros(k, dtype=x.dtype) if f.query_bias is None else f.query_bias[h]
    k_bias = torch.zeros(k, dtype=x.dtype)
    key_tokens = centred
    if f.rotary is not None:
        key_tokens = x
        if f.key_bias is not None:
            k_bias = f.key_bias[g]
    q, abs_q = _projected(x, Q, q_bias, f.rotary)
    keys, abs_k = _projected(key_tokens, K, k_bias, f.rotary)
    v, abs_v = _projected(centred, V, torch.zeros(V.shape[0], dtype=x.dtype), None)
    q, abs_q = f.scale * q, abs(f.scale) * abs_q
    for numbers in (abs_q, abs_k, abs_v, Q, K, abs_q @ abs_k.mT):
        if not bool((numbers.abs() <= LARGEST).all()):
            raise NonFiniteError(
                "X",
                expected="queries, keys, values and scores below 2^200 in float64",
                got="larger ones",
                remedy="Rescale the tokens or the parameters.",
            )
    d_q, d_k, d_v = (gamma(d + 10) * t for t in (abs_q, abs_k, abs_v))

    scores = (q @ keys.mT).masked_fill(~visible, -torch.inf)
    shifted = scores - scores.amax(dim=1, keepdim=True)
    weights = torch.exp(shifted)
    P = weights / weights.sum(dim=1, keepdim=True)
    d_scores = gamma(2 * d + k + 30) * (abs_q @ abs_k.mT) + 2 * U * shifted.abs()
    d_P = _weight_errors(P, d_scores.masked_fill(~visible, 0.0), visible)

    o = P @ v
    d_o = d_P @ v.abs() + (P + d_P) @ d_v + gamma(n + 4) * (P @ v.abs())
    c = P @ keys
    w_norm, key_norm = torch.empty_like(P), torch.empty_like(P)
    F = torch.empty(n, V.shape[0], k, dtype=x.dtype)
    for rows in row_blocks(n, n * max(k, V.shape[0])):
        w = v[None] - o[rows, None]
        kappa = keys[None] - c[rows, None]
        w_norm[rows] = torch.linalg.vector_norm(w, dim=-1)
        key_norm[rows] = torch.linalg.vector_norm(kappa, dim=-1)
        F[rows] = (P[rows, :, None] * w).mT @ kappa
    F = f.scale * F
    F_norm = torch.linalg.matrix_norm(F)
    if f.rotary is not None:
        F = f.rotary.rotate_adjoint(F.movedim(0, -2)).movedim(-2, 0)

    # Errors |P w qᵀ − P̂ ŵ q̂ᵀ| and |P w κᵀ − P̂ ŵ κ̂ᵀ| for each pair of tokens, where hats are rounded
    # numbers.
    turn = _turn_norm(f.rotary)
    d_w = _norms(d_v)[None] + _norms(d_o)[:, None] + 2 * U * w_norm
    d_kappa = _norms(d_k)[None] + 2 * U * key_norm
    q_norm, dq_norm = _norms(q)[:, None], _norms(d_q)[:, None]

    def product_error(a: Tensor, d_a: Tensor) -> Tensor:
        return d_P * (w_norm + d_w) * (a + d_a) + P * d_w * (a + d_a) + P * w_norm * d_a

    rank_one = turn * product_error(q_norm, dq_norm)
    d_F = (product_error(key_norm, d_kappa) + gamma(n + 8) * P * w_norm * key_norm).sum(dim=1)
    d_F = abs(f.scale) * turn * d_F + gamma(8) * turn * F_norm
    V_norm, K_norm, Q_norm = (float(norm(t[None]).upper) for t in (V, K, Q))
    error = d_P.norm() * V_norm + rank_one.norm() * K_norm + d_F.amax() * Q_norm
    return HeadAt(P, v, o, q, F, V, K, Q, float(up(error)))


def _projected(
    x: Float[Tensor, "n d"], weight: Float[Tensor, "k d"], bias: Float[Tensor, " k"], rotary: Rotary | None
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Return the queries (or keys) of the tokens, and sizes that bound their rounding errors.

    The sizes are the sums of the absolute values of the terms of each entry.
    """
    t = x @ weight.mT + bias
    size = x.abs() @ weight.abs().mT + bias.abs()
    if rotary is None:
        return t, size
    half = rotary.rot_dim // 2
    turned, rest = size[..., : rotary.rot_dim], size[..., rotary.rot_dim :]
    swapped = torch.cat((turned[..., half:], turned[..., :half]), dim=-1)
    n = len(x)
    return rotary.rotate(t), torch.cat(
        (turned * rotary.cos[:n].abs() + swapped * rotary.sin[:n].abs(), rest), dim=-1
    )


def _weight_errors(
    P: Float[Tensor, "n n"], d_scores: Float[Tensor, "n n"], visible: Bool[Tensor, "n n"]
) -> Float[Tensor, "n n"]:
    """Return upper bounds on the errors of the attention weights, from the errors of the scores.

    The errors are |P̂ − P| for the rounded weights P̂. If the scores of a row have errors of at most δ, a
    weight has an error of at most 2δ e^{2δ} P (1 − P), plus rounding. The weight in a row with one visible
    key is exact.
    """
    rounding = gamma(P.shape[0] + 20)
    moved = 2 * d_scores.amax(dim=1, keepdim=True)
    error = P * (moved * torch.exp(moved) * (1 - P + 4 * rounding) + rounding) + UNDERFLOW
    error = torch.where(moved > 1, 1.01, error)
    exact = ~visible | (visible.sum(dim=1, keepdim=True) == 1)
    return error.masked_fill(exact, 0.0)


def _norms(rows: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms
