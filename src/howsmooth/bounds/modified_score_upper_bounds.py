"""An upper bound on a ball for softmax attention whose scores have rotary positions, norms, biases, caps or
sinks.

The norms are those of queries and keys, the biases are added to the scores, and every mask is allowed. Proof:
documentation page "Bounds for the scores of today's models".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.attention.masks import Visibility
from howsmooth.bounds.attention_parameters import SiteLike, log_spectral_norm, unit
from howsmooth.bounds.ball_upper_bounds import log, log_product, log_sum, upper
from howsmooth.bounds.bilinear_score_norms import BilinearScoreNorms
from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_length, check_radius, exp
from howsmooth.bounds.masked_ball_upper_bounds import mask_blocks
from howsmooth.bounds.multi_head_upper_bounds import log_quadratic_form
from howsmooth.errors import ArgumentError

__all__ = ["any_scores_ball_upper_bound"]

_SOURCE = 'howsmooth documentation, "Bounds for the scores of today\'s models", Theorem S'
# Norms of vectors and sums of a few of them are rounded up by this relative error.
_MARGIN = 1e-12


def any_scores_ball_upper_bound(attention: object, length: object, radius: object) -> Bound:
    """Bound Lip(f on B_R^n) of softmax attention with any mask, score bias, soft cap, query and key norms, or
    rotary positions.

    For one head with values V x + b_v the bound is max_i σ_q E_i + (max_j Σ_{i sees j} r_i)^{1/2}. σ_q and
    σ_k bound the gradients of a score s_ij in the tokens x_i and x_j on the ball, and E_i and F_i the mean
    and the root mean square of the distances of values from their mean. Without a sink both are ‖V‖R, and

        r_i = min{(‖V‖ + σ_k F_i)² P̄_i, (‖V‖ + σ_k E_i) max_{p ≤ P̄_i} p (‖V‖ + 2 σ_k ‖V‖R (1 − p))},

    where P̄_i bounds a weight of row i; r_i = ‖V‖² if the row sees one key. A sink of a large score makes E_i,
    F_i and r_i smaller, as the documentation page says. Heads are combined as in :func:`gram_upper_bound`.
    Where scores are plain, ``best`` takes Theorem A, which is sharper.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.SelfAttention` or a captured site of one.
    length
        Number n >= 1 of tokens.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip(f on B_R^n). Hypothesis: norms of queries and keys have ε > 0, or vectors that stay
        away from zero on the ball.

    Raises
    ------
    ArgumentError
        If ``attention`` is no self-attention, or length or radius do not fit.

    References
    ----------
    Documentation page "Bounds for the scores of today's models", Theorem S.

    """
    f = _self_attention(attention)
    n, R = check_length(length), check_radius(radius)
    f.check_length(n)
    f = f.to(dtype=torch.float64, device="cpu")
    logs, smooth = [], True
    for h in range(f.heads):
        sizes = _Sizes.of(f, h, n, R)
        smooth &= sizes.own < math.inf and sizes.other < math.inf
        logs.append(_of_head(f, h, n, sizes))
    outputs = (torch.eye(f.heads * f.value_dim, dtype=torch.float64) if f.output is None else f.output).split(
        f.value_dim, dim=1
    )
    return upper(
        "any_scores_ball_upper_bound",
        Quantity.MASKED if _seen(f, n).triangle else Quantity.GLOBAL,
        _SOURCE,
        log_quadratic_form(list(outputs), logs),
        Hypothesis("norms of queries and keys have ε > 0, or vectors away from zero", smooth),
    )


def _self_attention(attention: object) -> SelfAttention:
    f = attention.map if isinstance(attention, SiteLike) else attention
    if isinstance(f, SelfAttention):
        return f
    raise ArgumentError("attention", expected="a SelfAttention or a site of one", got=type(f).__name__)


def _seen(f: SelfAttention, n: int) -> Visibility:
    return Visibility(n, f.causal, f.window, f.mask)


@dataclass(frozen=True)
class _Sizes:
    """Bounds on the scores and values of one head on the ball of radius R. All but ``size`` and ``spread``
    are logarithms, since products of large and small weights may leave the range of float64.

    Attributes
    ----------
    own, other
        log σ_q and log σ_k: bounds on the gradients of a score in the token of its query and of its key.
    size, spread
        Bounds on a score and on the difference of two scores of a row, without the additive bias.
    value, reach, shift
        log ‖V‖, log ‖V‖R and log |b_v|, the last −inf without a sink, where b_v changes no derivative.

    """

    own: float
    other: float
    size: float
    spread: float
    value: float
    reach: float
    shift: float

    @classmethod
    def of(cls, f: SelfAttention, h: int, n: int, R: float) -> _Sizes:
        group = h // (f.heads // f.kv_heads)
        value, shift = log_spectral_norm(f.value[group]), -math.inf
        if f.sinks is not None and f.value_bias is not None:
            shift = log_spectral_norm(f.value_bias[group, None])
        ways = []
        if f.query_norm is None and f.key_norm is None:
            ways += _of_bilinear_scores(f, h, n, R)
        if not ways or f.rotary is not None:
            ways.append(_of_lengths(f, h, n, R))
        own, other, *logs = (min(sizes) for sizes in zip(*ways, strict=True))
        size, spread = (exp(one) * (1 + _MARGIN) for one in logs)
        if f.softcap is not None:
            size = min(size, f.softcap * math.tanh(size / f.softcap) * (1 + _MARGIN))
            spread = min(spread, 2.0 * size)
        return cls(own, other, size, spread, value, value + math.log(R), shift)


def _is_relative(f: SelfAttention) -> bool:
    """Return whether the attention stays the same if one number is added to all scores of a query. A soft cap
    or a sink prevents this.
    """
    return f.softcap is None and f.sinks is None


_ScoreSizes = tuple[float, float, float, float]
"""Logarithms of σ_q, σ_k, and of bounds on a score and on the difference of two scores of a row, without
their constants."""


def _of_bilinear_scores(f: SelfAttention, h: int, n: int, R: float) -> list[_ScoreSizes]:
    """Bound the scores of a head without norm layers for queries and keys, and bound the gradients of the
    scores. The result is a list of one tuple. The list is empty if there are too many tokens for rotary
    positions.
    """
    group = h // (f.heads // f.kv_heads)
    Q, K = f.query[h], f.key[group]
    b_q, b_k = (None if b is None else b[i] for b, i in ((f.query_bias, h), (f.key_bias, group)))
    # The norms are linear in each of these four, which are divided by their largest entries.
    logs = [-math.inf if t is None else log(float(t.abs().max())) for t in (Q, K, b_q, b_k)]
    Q, K = unit(Q), unit(K)
    b_q, b_k = (None if b is None else unit(b) for b in (b_q, b_k))
    if f.rotary is None:
        norms: BilinearScoreNorms | None = BilinearScoreNorms.without_positions(Q, K, b_q, b_k)
    else:
        norms = BilinearScoreNorms.with_rotary_positions(f.rotary, Q, K, b_q, b_k, _seen(f, n))
    if norms is None:
        return []
    q, k, shift_q, shift_k = logs
    scale, log_R = log(abs(f.scale)), math.log(R)
    tokens = log_product(scale, q, k, log(norms.tokens), log_R)
    of_query = log_product(scale, k, shift_q, log(norms.query_bias))
    of_key = log_product(scale, q, shift_k, log(norms.key_bias))
    biases = log_product(scale, shift_q, shift_k, log(norms.biases))
    # Without positions the bias of keys adds one number to all scores of a row.
    cancels = f.rotary is None
    own = tokens if cancels and _is_relative(f) else log_sum(tokens, of_key)
    other = log_sum(tokens, of_query)
    size = log_sum(other + log_R, of_key + log_R, biases)
    return [(own, other, size, math.log(2) + (other + log_R if cancels else size))]


def _of_lengths(f: SelfAttention, h: int, n: int, R: float) -> _ScoreSizes:
    """Bound the scores of a head and their gradients from the norms of its queries and keys."""
    turn = log(abs(f.scale)) + (0.0 if f.rotary is None else 2 * math.log(_turn(f, n)))
    query = _Projected.of(f.query, f.query_bias, f.query_norm, h, R)
    key = _Projected.of(f.key, f.key_bias, f.key_norm, h // (f.heads // f.kv_heads), R)
    own, other = log_product(turn, query.slope, key.size), log_product(turn, query.size, key.slope)
    size = log_product(turn, query.size, key.size)
    spread = size
    if f.rotary is None and f.key_norm is None and _is_relative(f):
        own = log_product(turn, query.slope, key.slope, math.log(R))
        spread = log_product(turn, query.size, key.slope, math.log(R))
    return own, other, size, math.log(2) + spread


@dataclass(frozen=True)
class _Projected:
    """Logarithms of bounds on the queries or the keys of one head: on their norm and on the norm of their
    derivative.
    """

    size: float
    slope: float

    @classmethod
    def of(
        cls,
        weight: Float[Tensor, "heads key_dim d"],
        bias: Float[Tensor, "heads key_dim"] | None,
        norm: LayerNorm | RMSNorm | None,
        h: int,
        R: float,
    ) -> _Projected:
        width = weight.shape[1]
        if norm is None or norm.d == width:
            W, b = weight[h], None if bias is None else bias[h]
            mine = slice(0, width)
        else:  # one norm of all heads
            W, b = weight.flatten(0, 1), None if bias is None else bias.flatten()
            mine = slice(h * width, (h + 1) * width)
        if norm is not None and norm.centred:
            W, b = W - W.mean(dim=0), None if b is None else b - b.mean()
        slope, shift = log_spectral_norm(W), -math.inf if b is None else log_spectral_norm(b[None])
        longest = log_sum(slope + math.log(R), shift)
        if norm is None:
            return cls(longest, slope)
        gain = log(float(norm.weight[mine].abs().max()) * math.sqrt(norm.d)) + _MARGIN
        # |N(y)| = √d |y| / √(|y|² + dε) grows with |y|, and its derivative is at most √d / √(|y|² + dε).
        part = slope + math.log(R) - shift
        shortest = max(0.0, -math.expm1(part) - _MARGIN) if part < 0 else 0.0
        root = log(norm.d * norm.eps)
        length, below = (0.5 * log_sum(2 * one, root) for one in (longest, shift + log(shortest)))
        size = log_product(gain, longest, -length) if longest > -math.inf else -math.inf
        added = -math.inf if norm.bias is None else log_spectral_norm(norm.bias[mine][None])
        steep = math.inf if below == -math.inf else log_product(gain, slope, -below)
        return cls(log_sum(size, added) + _MARGIN, steep + _MARGIN)


def _of_head(f: SelfAttention, h: int, n: int, sizes: _Sizes) -> float:
    """Return the logarithm of a bound on the Lipschitz constant of one head X ↦ softmax(scores) V X, without
    its output map.
    """
    value, reach, shift, other = sizes.value, sizes.reach, sizes.shift, sizes.other
    if value == shift == -math.inf:
        return -math.inf
    if math.inf in (sizes.own, other):
        return math.inf
    ball = max(reach, shift)
    sink = None if f.sinks is None else float(f.sinks[h])
    columns, top, mean = torch.zeros(n, dtype=torch.float64), -math.inf, -math.inf
    bias = None if f.score_bias is None else f.score_bias[h if len(f.score_bias) > 1 else 0]
    for (rows, keys), block in mask_blocks(_seen(f, n)):
        counts = block.sum(dim=1)
        # Σ_l e^{b_il − max_j b_ij} over the keys that i sees, and that maximum
        terms, largest = counts.double(), torch.zeros(len(counts), dtype=torch.float64)
        if bias is not None:
            seen = bias[rows, keys].masked_fill(~block, -math.inf)
            largest = seen.amax(dim=1)
            terms = torch.exp(seen - largest[:, None]).sum(dim=1)
        all_keys = torch.zeros_like(terms)
        inverse = torch.log((terms - 1.0).clamp_min(0.0) * (1 - _MARGIN)) - sizes.spread
        if sink is not None:
            high = sizes.size + largest
            slack = _MARGIN * (abs(sink) + sizes.size + largest.abs())
            inverse = _sum(inverse, sink - high - slack)
            all_keys = -_sum(0.0, sink - high - terms.log() - slack)
        weight = -_sum(0.0, inverse)
        middle = torch.clamp(_largest_share(all_keys, 1.0, reach, shift), max=all_keys / 2 + ball)
        square = torch.clamp(_largest_share(all_keys, 0.5, reach, shift), max=ball)
        by_weight = weight + 2 * _sum(all_keys / 2 + value, other + square)
        free = _largest_share(weight, 1.0, value, other + log_sum(reach, ball))
        log_rows = torch.minimum(by_weight, free + _sum(all_keys + value, other + middle))
        alone = (counts == 1) & (sink is None)
        log_rows = torch.where(alone, 2 * value, log_rows)
        mean = max(mean, float(middle.masked_fill(alone, -math.inf).max()))
        peak = max(top, float(log_rows.max()))
        if peak > -math.inf:
            columns *= math.exp(top - peak)
            columns[keys] += torch.exp(log_rows - peak) @ block.double()
            top = peak
    return log_sum(log_product(sizes.own, mean), 0.5 * (top + log(float(columns.max())))) + (n + 8) * _MARGIN


def _largest_share(limit: Tensor, power: float, a: float, b: float) -> Tensor:
    """Return the maximum over s <= limit of s^power (a + (1 − s) b). All numbers are logarithms."""
    if b == -math.inf:
        return power * limit + a
    share = torch.clamp(limit, max=math.log(power / (power + 1)) + log_sum(a, b) - b)
    return power * share + _sum(a, b + torch.log(-torch.expm1(share)))


def _sum(one: Tensor | float, other: Tensor) -> Tensor:
    """Return the logarithm of a sum from the logarithms of its two terms."""
    return torch.logaddexp(torch.as_tensor(one, dtype=torch.float64), other)


def _turn(f: SelfAttention, n: int) -> float:
    """Return the largest factor by which rotary position embedding increases the norm of a query or key, for
    n tokens.
    """
    assert f.rotary is not None
    half = f.rotary.rot_dim // 2
    cos, sin = f.rotary.cos[:n], f.rotary.sin[:n]
    pairs = torch.stack((cos[:, :half], -sin[:, :half], sin[:, half:], cos[:, half:]), dim=-1)
    largest = float(torch.linalg.matrix_norm(pairs.unflatten(-1, (2, 2)), 2).max()) * (1 + _MARGIN)
    return max(largest, 1.0) if f.rotary.rot_dim < f.key_dim else largest
