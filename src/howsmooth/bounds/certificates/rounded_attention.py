"""The attention weights, values and queries of heads in float64, with proved bounds on their rounding.

The Jacobian of one head, before its output map, is

    (J E)_i = Σ_j [ P_ij V e_j + M_ij w_ij ⟨y_ij, e_j⟩ ] + F_i Q e_i,
    w_ij = v_j − o_i,  y_ij = Kᵀ T_jᵀ q_i,  F_i = s Σ_j M_ij w_ij (k_j − c_i)ᵀ T'_i,

where q_i = s R_i N(Q x_i + b_q), s is the scale of the scores, R_i the rotary map at position i and N the
norm of queries, if there are any. T'_i and T_j are the derivatives of R_i N and of its like for keys. M_ij is
P_ij times the derivative of the soft cap. c_i is any vector without a cap and sinks, and zero with one. The
rounded weights, values and queries define an operator J̃ of the same form, and ``error`` bounds ‖J − J̃‖,
where J is the Jacobian in exact arithmetic. After a norm layer, whose output is x_j = g ∘ u_j + β with
u_j = h_j / s_j, the columns of token j are multiplied by g and by 1/s_j. Derivation: documentation page
"Certificates at given tokens".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, Rotary, SelfAttention
from howsmooth.errors import NonFiniteError
from howsmooth.rounding import (
    LARGEST,
    U,
    above,
    absolute_norms_above,
    along_entries,
    below,
    entries_of,
    gamma,
    known_to,
    plain,
    shrink,
    spectral_norm_above,
    up,
)

__all__ = ["AfterNorm", "HeadAt", "HeadsAt", "heads_at", "row_blocks", "shortest_lengths"]

_BLOCK = 1 << 18  # number of entries in a block of rows, which fit into a cache


@dataclass(frozen=True, eq=False)
class HeadAt:
    """One attention head at given tokens, in float64."""

    P: Float[Tensor, "n n"]  # the attention weights
    moving: Float[Tensor, "n n"]  # M, the weights times the derivative of the soft cap, if there is one
    v: Float[Tensor, "n value_dim"]  # values for the scaled V, of centred tokens if there are no sinks
    o: Float[Tensor, "n value_dim"]  # their averages o_i = Σ_j P_ij v_j
    q: Float[Tensor, "n key_dim"]  # queries after norm, rotary positions and the scale s
    # The derivatives T_j of norm and rotary positions of the keys; None where they are the identity.
    turns: Float[Tensor, "n key_dim key_dim"] | None
    F: Float[Tensor, "n value_dim key_dim"]  # the factors F_i of the diagonal blocks F_i Q
    # The projection matrices without rounding error; V is divided by a power of two.
    V: Float[Tensor, "value_dim d"]
    K: Float[Tensor, "key_dim d"]
    Q: Float[Tensor, "key_dim d"]
    error: float  # an upper bound on ‖J − J̃‖

    @property
    def turn_norm(self) -> float:
        """An upper bound on ‖T_j‖ for all keys j, which also holds for the absolute values of its entries."""
        return 1.0 if self.turns is None else float(absolute_norms_above(self.turns).amax())


@dataclass(frozen=True, eq=False)
class HeadsAt:
    """All heads of an attention at given tokens, with their output maps W_h.

    V and W are divided by powers of two; certificates must be multiplied by 2 ** ``exponent``.
    """

    heads: tuple[HeadAt, ...]
    W: tuple[Float[Tensor, "d_out value_dim"], ...]
    exponent: int

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.heads[0].P.shape[0]

    @cached_property
    def outer(self) -> Float[Tensor, "rows m"]:
        """The output maps of all heads side by side, or a smaller triangular matrix that bounds them."""
        return shrink(torch.cat(self.W, dim=1))


def row_blocks(n: int, width: int) -> list[slice]:
    """Return slices that cut n rows into blocks with a bounded number of entries.

    Each row has ``width`` entries.
    """
    step = max(1, min(n, _BLOCK // max(1, width)))
    return [slice(start, min(n, start + step)) for start in range(0, n, step)]


def heads_at(f: SelfAttention, x: Float[Tensor, "n d"], norm: LayerNorm | RMSNorm | None = None) -> HeadsAt:
    """Return the attention weights, values and queries of all heads of ``f`` at tokens ``x``.

    ``f`` must be in float64 on the CPU, and ``x`` in float64. With a ``norm`` they are those at norm(x), and
    the norm of their Jacobian bounds that of ``f`` after the norm. NonFiniteError is raised if queries, keys,
    values, scores or derivatives of norms overflow or exceed 2^200.
    """
    n = x.shape[0]
    after = None if norm is None else AfterNorm.of(norm, x)
    x = x if after is None else after.t
    output = torch.eye(f.heads * f.value_dim, dtype=x.dtype) if f.output is None else f.output
    value, up_v = _scaled(f.value)
    output, up_w = _scaled(output)
    visible = f.visible_keys(n)
    visible = torch.ones(n, n, dtype=torch.bool) if visible is None else visible
    group = f.heads // f.kv_heads
    bias = torch.zeros(f.kv_heads, f.value_dim, dtype=x.dtype) if f.value_bias is None else f.value_bias
    bias = torch.ldexp(bias, torch.tensor(-up_v))
    heads = tuple(
        _head_at(f, h, value[h // group], bias[h // group], visible, x, after) for h in range(f.heads)
    )
    return HeadsAt(heads, output.split(f.value_dim, dim=1), up_v + up_w)


def _scaled(t: Tensor) -> tuple[Tensor, int]:
    """Return the tensor times a power of two, with largest entry in [1/2, 1), and the exponent."""
    largest = float(t.abs().amax())
    if largest == 0:
        return t, 0
    exponent = math.frexp(largest)[1]
    return torch.ldexp(t, torch.tensor(-exponent)), exponent


def _head_at(
    f: SelfAttention,
    h: int,
    V: Float[Tensor, "value_dim d"],
    value_bias: Float[Tensor, " value_dim"],
    visible: Bool[Tensor, "n n"],
    x: Float[Tensor, "n d"],
    after: AfterNorm | None,
) -> HeadAt:
    n, g = x.shape[0], h // (f.heads // f.kv_heads)
    Q, K = f.query[h], f.key[g]
    # A vector that is added to all values, or to all keys, changes nothing unless a sink has the value zero,
    # a cap or a sink compares with the scores, or keys are normed or rotated. So tokens are centred there,
    # which makes rounding errors smaller.
    difference = x - x.mean(dim=0)
    errors = torch.zeros_like(x) if after is None else after.errors
    given, centred = known_to(x, errors), known_to(difference, 2 * U * difference.abs() + errors)
    relative = f.softcap is None and f.sinks is None
    shifted_keys = relative and f.rotary is None and f.key_norm is None
    q = _Projected.of(given, Q, None if f.query_bias is None else f.query_bias[h], f.query_norm, f.rotary)
    q = replace(q, t=f.scale * q.t)
    keys = _Projected.of(
        centred if shifted_keys else given,
        K,
        None if shifted_keys or f.key_bias is None else f.key_bias[g],
        f.key_norm,
        f.rotary,
    )
    values = _Projected.of(
        centred if f.sinks is None else given, V, None if f.sinks is None else value_bias, None, None
    )
    for layer, part in ((f.query_norm, q), (f.key_norm, keys)):
        if layer is not None and part.turns is not None and not bool((part.turns.abs() <= LARGEST).all()):
            raise NonFiniteError(
                "X",
                expected="queries and keys at which the derivatives of their norms are below 2^200",
                got=f"one at or near zero, or too large to be squared, with eps = {layer.eps:g}",
                remedy="Use norms with a larger eps, or other tokens.",
            )
    scores = q.t @ keys.t.mT
    sizes = (plain(part).abs() + entries_of(part) for part in (q.t, keys.t, values.t, scores))
    for numbers in (*sizes, Q, K):
        if not bool((numbers.abs() <= LARGEST).all()):
            raise NonFiniteError(
                "X",
                expected="queries, keys, values and scores below 2^200 in float64",
                got="larger ones",
                remedy="Rescale the tokens or the parameters.",
            )

    weights, moving = _weights(f, h, scores, visible)
    means = weights @ values.t
    P, M, v, o, k = map(plain, (weights, moving, values.t, means, keys.t))
    d_P, d_M = entries_of(weights), entries_of(moving)
    c = P @ k if relative else torch.zeros_like(k)
    w_norm, key_norm = torch.empty_like(P), torch.empty_like(P)
    F = torch.empty(n, V.shape[0], Q.shape[0], dtype=x.dtype)
    for rows in row_blocks(n, n * max(Q.shape[0], V.shape[0])):
        w = v[None] - o[rows, None]
        kappa = k[None] - c[rows, None]
        w_norm[rows] = torch.linalg.vector_norm(w, dim=-1)
        key_norm[rows] = torch.linalg.vector_norm(kappa, dim=-1)
        F[rows] = (M[rows, :, None] * w).mT @ kappa
    F = f.scale * F
    F_norm = torch.linalg.matrix_norm(F)
    if q.turns is not None:
        F = F @ q.turns

    # Errors |M w pᵀ − M̂ ŵ p̂ᵀ| with p_ij = T_jᵀ q_i, and |M w κᵀ − M̂ ŵ κ̂ᵀ|, for each pair of tokens, where
    # hats are rounded numbers.
    d_w = _norms(entries_of(values.t))[None] + _norms(entries_of(means))[:, None] + 2 * U * w_norm
    d_kappa = _norms(entries_of(keys.t))[None] + 2 * U * key_norm
    q_norm, dq_norm = _norms(plain(q.t))[:, None], _norms(entries_of(q.t))[:, None]

    def product_error(a: Tensor, d_a: Tensor) -> Tensor:
        return d_M * (w_norm + d_w) * (a + d_a) + M * d_w * (a + d_a) + M * w_norm * d_a

    d_p = dq_norm * keys.slope + (q_norm + dq_norm) * keys.slope_error
    rank_one = product_error(q_norm * keys.slope, d_p)
    d_F = (product_error(key_norm, d_kappa) + gamma(n + 8) * M * w_norm * key_norm).sum(dim=1)
    rounding = gamma(2 * Q.shape[0] + 8)
    turn = 1.0 if q.turns is None else absolute_norms_above(q.turns)
    d_F = abs(f.scale) * q.slope * d_F + F_norm * (q.slope_error + rounding * (turn + q.slope))
    added = torch.tensor(0.0, dtype=x.dtype)
    if after is not None:
        blocks = (P, M * w_norm * q_norm * keys.slope, torch.linalg.matrix_norm(F))
        for size, error, factor in zip(blocks, (d_P, rank_one, d_F), (V, K, Q), strict=True):
            added = added + after.rounding(size + error, factor)
        d_P, rank_one, d_F = d_P * after.columns, rank_one * after.columns, d_F * after.columns
        P, M, F = P * after.columns, M * after.columns, F * after.columns[:, None, None]
        V, K, Q = (after.on_tokens(factor) for factor in (V, K, Q))
    V_norm, K_norm, Q_norm = (spectral_norm_above(t) for t in (V, K, Q))
    total = added + d_P.norm() * V_norm + rank_one.norm() * K_norm + d_F.amax() * Q_norm
    return HeadAt(P, M, v, o, plain(q.t), keys.turns, F, V, K, Q, float(up(total)))


def _weights(
    f: SelfAttention, h: int, scores: Float[Tensor, "n n"], visible: Bool[Tensor, "n n"]
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """Return the weights, and the weights times the derivative of the soft cap."""
    slope, count = None, len(visible)
    if f.softcap is not None:
        scores = scores / f.softcap
        # The derivative of the cap has itself a derivative of at most one.
        slope = along_entries(lambda t: (1 - torch.tanh(t)) * (1 + torch.tanh(t)), 1.0, scores)
        scores = torch.tanh(scores) * f.softcap
    if f.score_bias is not None:
        scores = scores + known_to(f.score_bias[h if len(f.score_bias) > 1 else 0])
    if f.sinks is not None:
        # The sink is one more key, which all queries see.
        scores = torch.cat((scores, known_to(f.sinks[h].to(scores.dtype).expand(count, 1))), dim=1)
        visible = torch.nn.functional.pad(visible, (0, 1), value=True)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), 1)[:, :count]
    return weights, weights if slope is None else weights * slope


@dataclass(frozen=True, eq=False)
class _Projected:
    """The queries, keys or values of a head and their derivatives, with bounds on rounding errors."""

    t: Float[Tensor, "n k"]  # the vectors R_i N(W x_i + b)
    turns: Float[Tensor, "n k k"] | None  # derivatives of R_i N as rounded, None for the identity
    slope: Float[Tensor, " n"]  # bounds on the norms of the exact and the rounded derivatives
    slope_error: Float[Tensor, " n"]  # bounds on how far these are apart

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "n d"],
        weight: Float[Tensor, "k d"],
        bias: Float[Tensor, " k"] | None,
        layer: LayerNorm | RMSNorm | None,
        rotary: Rotary | None,
    ) -> _Projected:
        n, k = len(x), len(weight)
        t: Tensor = x @ known_to(weight).mT
        turns: Tensor | None = None
        if bias is not None:
            t = t + known_to(bias)
        slope, slope_error = torch.ones(n, dtype=x.dtype), torch.zeros(n, dtype=x.dtype)
        if layer is not None:
            t, turns, slope, slope_error = _normed(layer, t)
        if rotary is None:
            return cls(t, turns, slope, slope_error)
        eye = torch.eye(k, dtype=x.dtype)
        maps = rotary.rotate(eye[:, None].expand(k, n, k)).permute(1, 2, 0)
        turn = absolute_norms_above(maps)
        if turns is None:
            turns = maps
        else:
            slope_error = turn * slope_error + gamma(2 * k) * turn * torch.linalg.matrix_norm(turns)
            turns = maps @ turns
        return cls(rotary.rotate(t), turns, turn * slope, slope_error)


def _normed(
    layer: LayerNorm | RMSNorm, vectors: Float[Tensor, "n k"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the normed vectors, their derivatives, and bounds on these and on their errors."""
    a, k = plain(vectors), vectors.shape[1]
    y, length = layer.direction_and_length(a)
    moved, shortest = shortest_lengths(layer, vectors)
    gain = above(math.sqrt(k) * float(layer.weight.abs().amax()), 2)
    t = math.sqrt(k) * layer.weight * (y / length)
    eye = torch.eye(k, dtype=a.dtype)
    outer = (eye - 1 / k if layer.centred else eye) - (y / length)[:, :, None] * (y / length)[:, None, :]
    turns = math.sqrt(k) * layer.weight[:, None] * (outer / length[..., None])
    added = 0.0
    if layer.bias is not None:
        t, added = t + layer.bias, float(layer.bias.norm())
    # y ↦ y / √(|y|² + kε) has a derivative of at most 1/length and a second derivative of at most 6/length².
    rounding = gamma(k + 20)
    d_t = gain / shortest * moved + rounding * (gain + added)
    d_turns = 6 * gain / shortest.square() * moved + 3 * rounding * gain / shortest
    return known_to(t, d_t[:, None]), turns, gain / shortest + d_turns, d_turns


def shortest_lengths(
    layer: LayerNorm | RMSNorm, vectors: Float[Tensor, "n k"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return bounds on the rounding errors of the vectors that a norm layer normalises, and lower bounds on
    the lengths by which it divides them.
    """
    a, k = plain(vectors), vectors.shape[1]
    _, length = layer.direction_and_length(a)
    moved = _norms(entries_of(vectors)) + 2 * gamma(k + 3) * _norms(a)
    # The length √(|y|² + kε) changes by no more than y. It has this value at least, between ŷ and y.
    shortest = (length[:, 0] * (1 - gamma(k + 10)) - moved).clamp_min(math.sqrt(k * layer.eps))
    return moved, below(shortest, 8).clamp_min(torch.finfo(a.dtype).tiny)


@dataclass(frozen=True, eq=False)
class AfterNorm:
    """The tokens t_j = g ∘ u_j + β after a norm layer, with bounds on their rounding errors."""

    t: Float[Tensor, "n d"]
    errors: Float[Tensor, "n d"]
    gain: Float[Tensor, " d"]  # g, the gains of the layer times √d
    columns: Float[Tensor, " n"]  # upper bounds on 1/s_j: the derivative of u_j has norm at most 1/s_j
    centred: bool  # whether the layer subtracts the mean of a token

    @classmethod
    def of(cls, norm: LayerNorm | RMSNorm, x: Float[Tensor, "n d"]) -> AfterNorm:
        """Apply the norm layer to tokens. Raise NonFiniteError if one is too close to zero."""
        t, *_ = _normed(norm, known_to(x))
        _, shortest = shortest_lengths(norm, known_to(x))
        gain, columns = math.sqrt(norm.d) * norm.weight, above(1 / shortest, 1)
        if not bool(columns.amax() * gain.abs().amax().clamp_min(1) <= LARGEST):
            raise NonFiniteError(
                "X",
                expected="tokens at which the derivatives of the norm are below 2^200",
                got=f"one at or near zero, with eps = {norm.eps:g}",
                remedy="Use a norm with a larger eps, or other tokens.",
            )
        return cls(plain(t), entries_of(t), gain, columns, norm.centred)

    def on_tokens(self, matrix: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        """Multiply a matrix by D = diag(g) H, where H subtracts the mean if the layer does."""
        matrix = matrix * self.gain
        return matrix - matrix.mean(dim=1, keepdim=True) if self.centred else matrix

    def rounding(self, size: Tensor, matrix: Float[Tensor, "k d"]) -> Tensor:
        """Bound the error of ``matrix`` times blocks of norms ``size`` by the layer's derivative."""
        # There are d + 6 roundings of |W g| and of its mean, and two of 1/s_j.
        found: Tensor = (size * self.columns).norm() * (matrix * self.gain).norm()
        return 2 * gamma(len(self.gain) + 8) * found


def _norms(rows: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms
