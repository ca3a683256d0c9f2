"""An upper bound on the Lipschitz constant on a ball, for softmax attention with rotary positions, normalised
queries or keys, score biases, caps or sinks.

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
from howsmooth.bounds.attention_parameters import log_size, log_spectral_norm, normalised, opened
from howsmooth.bounds.attention_parameters import norm as spectral_norm
from howsmooth.bounds.ball_upper_bounds import mask_blocks
from howsmooth.bounds.bilinear_score_norms import BilinearScoreNorms
from howsmooth.bounds.bound import Quantity, check_length, check_radius, exp
from howsmooth.bounds.bound_problem import Problem
from howsmooth.bounds.catalogue import OURS, Condition, statement
from howsmooth.bounds.log_numbers import Log, maximum, minimum
from howsmooth.bounds.multi_head_bounds import quadratic_form
from howsmooth.errors import ArgumentError
from howsmooth.rounding import above, below, gamma, log_above, spectral_norms_above

__all__ = ["any_scores_ball_upper_bound"]

_ZERO = Log(-math.inf)
_MOST_TOKENS = 2**20


def on_ball_with_scores(attention: object, length: object, radius: object) -> Problem:
    """Return the problem of bounding attention with any scores for n tokens in a ball.

    Other Parameters
    ----------------
    attention
        A :class:`~howsmooth.attention.SelfAttention` or a captured site of one.

    """
    f = opened(attention)[0]
    if not isinstance(f, SelfAttention):
        raise ArgumentError("attention", expected="a SelfAttention or a site of one", got=type(f).__name__)
    n = check_length(length)
    f.check_length(n)
    return Problem(f, None, n, check_radius(radius))


def _quantity(p: Problem) -> Quantity:
    return Quantity.MASKED if _seen(_attention(p), p.n).triangle else Quantity.GLOBAL


@statement(
    on_ball_with_scores,
    heads="any",
    quantity=_quantity,
    source=f'{OURS}"Bounds for the scores of today\'s models", Theorem S',
    needs=(
        Condition(
            "norms of queries and keys have ε > 0, or vectors away from zero",
            lambda p: all(sizes.smooth for sizes in p.once(_sizes_of_heads)),
        ),
    ),
    listed=lambda p: not p.plain,
)
def any_scores_ball_upper_bound(p: Problem) -> Log:
    """Bound Lip(f on B_R^n) of softmax attention with any mask, score bias, soft cap, query and key norms, or
    rotary positions.

    For one head with values V x + b_v the bound is max_i σ_q E_i + (max_j Σ_{i sees j} r_i)^{1/2}. σ_q and
    σ_k bound the gradients of a score s_ij in the tokens x_i and x_j on the ball, and E_i and F_i the mean
    and the root mean square of the distances of values from their mean. Without a sink both are ‖V‖R, and

        r_i = min{(‖V‖ + σ_k F_i)² P̄_i, (‖V‖ + σ_k E_i) max_{p ≤ P̄_i} p (‖V‖ + 2 σ_k ‖V‖R (1 − p))},

    where P̄_i bounds a weight of row i; r_i = ‖V‖² if the row sees one key. A sink of a large score makes E_i,
    F_i and r_i smaller, as the documentation page says. Heads are combined as in :func:`gram_upper_bound`.
    Where scores are plain, ``best`` takes Theorem A, which is sharper.
    """
    f = _attention(p)
    if p.n > _MOST_TOKENS:
        raise ArgumentError(
            "length",
            expected=f"at most {_MOST_TOKENS} tokens, since the time of this bound grows with their square",
            got=f"{p.n:.6g}" if p.n < 1e300 else "more than 1e300",
            remedy="Take mean_field_upper_bound, which holds for every length, if its hypotheses do.",
        )
    width = f.heads * f.value_dim
    output = torch.eye(width, dtype=torch.float64) if f.output is None else f.output
    bounds = [_of_head(f, h, p.n, sizes) for h, sizes in enumerate(p.once(_sizes_of_heads))]
    return quadratic_form(bounds, output.split(f.value_dim, dim=1))


def _attention(p: Problem) -> SelfAttention:
    assert isinstance(p.attention, SelfAttention)
    return p.attention.to(dtype=torch.float64, device="cpu")


def _seen(f: SelfAttention, n: int) -> Visibility:
    return Visibility(n, f.causal, f.window, f.mask)


def _group(f: SelfAttention, h: int) -> int:
    return h // (f.heads // f.kv_heads)


@dataclass(frozen=True)
class _Sizes:
    """Bounds on the scores and values of one head on the ball of radius R."""

    #: σ_q and σ_k: bounds on the gradients of a score in the token of its query and of its key.
    own: Log
    other: Log
    #: Bounds on a score and on the difference of two scores of a row, without the additive bias.
    size: float
    spread: float
    #: ‖V‖, ‖V‖R and |b_v|, the last zero without a sink, where b_v changes no derivative.
    value: Log
    reach: Log
    shift: Log

    @classmethod
    def of(cls, f: SelfAttention, h: int, n: int, R: Log) -> _Sizes:
        value, shift = spectral_norm(f.value[_group(f, h)]), _ZERO
        if f.sinks is not None and f.value_bias is not None:
            shift = spectral_norm(f.value_bias[_group(f, h), None])
        ways = []
        if f.query_norm is None and f.key_norm is None:
            ways += _of_bilinear_scores(f, h, n, R)
        if not ways or f.rotary is not None:
            ways.append(_of_lengths(f, h, n, R))
        own, other, *logs = (minimum(*sizes) for sizes in zip(*ways, strict=True))
        size, spread = (exp(log_above(float(one.log))) for one in logs)
        if f.softcap is not None:
            size = min(size, above(f.softcap * math.tanh(size / f.softcap), 16))
            spread = min(spread, 2.0 * size)
        return cls(own, other, size, spread, value, value * R, shift)

    @property
    def smooth(self) -> bool:
        return bool(maximum(self.own, self.other).log < math.inf)


def _sizes_of_heads(p: Problem) -> list[_Sizes]:
    f = _attention(p)
    return [_Sizes.of(f, h, p.n, Log.of(p.radius)) for h in range(f.heads)]


def _is_relative(f: SelfAttention) -> bool:
    """Whether one number added to all scores of a query changes nothing: no soft cap, no sink."""
    return f.softcap is None and f.sinks is None


_ScoreSizes = tuple[Log, Log, Log, Log]
"""σ_q, σ_k, and bounds on a score and on the difference of two scores of a row, without their constants."""


def _of_bilinear_scores(f: SelfAttention, h: int, n: int, R: Log) -> list[_ScoreSizes]:
    """Return no bound for rotary positions of too many tokens."""
    group = _group(f, h)
    biases = (None if b is None else b[i] for b, i in ((f.query_bias, h), (f.key_bias, group)))
    # The norms are linear in each of these four, which are divided by their largest entries.
    parts = f.query[h], f.key[group], *biases
    q, k, shift_q, shift_k = (_ZERO if t is None else Log(log_size(t)) for t in parts)
    Q, K, b_q, b_k = (
        torch.zeros(f.key_dim, dtype=torch.float64) if t is None else normalised(t) for t in parts
    )
    if f.rotary is None:
        norms: BilinearScoreNorms | None = BilinearScoreNorms.without_positions(Q, K, b_q, b_k)
    else:
        norms = BilinearScoreNorms.with_rotary_positions(f.rotary, Q, K, b_q, b_k, _seen(f, n))
    if norms is None:
        return []
    scale = Log.of(abs(f.scale))
    tokens = scale * q * k * norms.tokens * R
    of_query, of_key = scale * k * shift_q * norms.query_bias, scale * q * shift_k * norms.key_bias
    # Without positions the bias of keys adds one number to all scores of a row.
    cancels = f.rotary is None
    own = tokens if cancels and _is_relative(f) else tokens + of_key
    other = tokens + of_query
    size = (other + of_key) * R + scale * shift_q * shift_k * norms.biases
    return [(own, other, size, 2 * (other * R if cancels else size))]


def _of_lengths(f: SelfAttention, h: int, n: int, R: Log) -> _ScoreSizes:
    """Bound the scores of a head and their gradients from the norms of its queries and keys."""
    turn = Log.of(abs(f.scale)) * (1.0 if f.rotary is None else _turn(f, n) ** 2)
    query, query_slope = _projected(f.query, f.query_bias, f.query_norm, h, R)
    key, key_slope = _projected(f.key, f.key_bias, f.key_norm, _group(f, h), R)
    own, other, size = turn * query_slope * key, turn * query * key_slope, turn * query * key
    if f.rotary is None and f.key_norm is None and _is_relative(f):
        return turn * query_slope * key_slope * R, other, size, 2 * (other * R)
    return own, other, size, 2 * size


def _projected(
    weight: Float[Tensor, "heads key_dim d"],
    bias: Float[Tensor, "heads key_dim"] | None,
    norm: LayerNorm | RMSNorm | None,
    h: int,
    R: Log,
) -> tuple[Log, Log]:
    """Bound the norms of the queries or keys of one head, and of their derivatives with respect to tokens."""
    bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias
    width = weight.shape[1]
    W, b, mine = weight[h], bias[h, :, None], slice(0, width)
    if norm is not None and norm.d != width:  # one norm of all heads
        W, b, mine = weight.flatten(0, 1), bias.flatten()[:, None], slice(h * width, (h + 1) * width)
    off = _ZERO
    if norm is not None and norm.centred:
        # A computed mean makes no vector shorter than the mean; the lower limit has to allow for its error.
        off = spectral_norm(b) * gamma(len(b) + 1)
        W, b = W - W.mean(dim=0), b - b.mean()
    slope, shift = spectral_norm(W), spectral_norm(b)
    longest = slope * R + shift
    if norm is None:
        return longest, slope
    gain = Log.of(float(norm.weight[mine].abs().max())) * Log.of(norm.d) ** 0.5
    # |N(y)| = √d |y| / √(|y|² + dε) grows with |y|, and its derivative is at most √d / √(|y|² + dε).
    least_shift = Log(log_spectral_norm(b, upper=False))
    share = (slope * R + off) / least_shift
    shortest = least_shift * below(max(0.0, 1 - exp(log_above(float(share.log)))), 1)
    length, least = ((one**2 + norm.d * norm.eps) ** 0.5 for one in (longest, shortest))
    added = _ZERO if norm.bias is None else spectral_norm(norm.bias[mine][None])
    steep = Log(math.inf) if bool(torch.isneginf(least.log)) else gain * slope / least
    return gain * longest / length + added, steep


def _of_head(f: SelfAttention, h: int, n: int, sizes: _Sizes) -> Log:
    value, reach, shift, other = sizes.value, sizes.reach, sizes.shift, sizes.other
    ball = maximum(reach, shift)
    if bool(torch.isneginf(maximum(value, shift).log)):
        return _ZERO
    if not sizes.smooth:
        return Log(math.inf)
    sink = None if f.sinks is None else float(f.sinks[h])
    columns, top, mean = torch.zeros(n, dtype=torch.float64), -math.inf, _ZERO
    bias = None if f.score_bias is None else f.score_bias[h if len(f.score_bias) > 1 else 0]
    for (rows, keys), block in mask_blocks(_seen(f, n)):
        counts = block.sum(dim=1)
        # Σ_l e^{b_il − max_j b_ij} over the keys that i sees, and that maximum
        terms, largest = counts.double(), torch.zeros(len(counts), dtype=torch.float64)
        if bias is not None:
            seen = bias[rows, keys].masked_fill(~block, -math.inf)
            largest = seen.amax(dim=1)
            terms = torch.exp(seen - largest[:, None]).sum(dim=1)
        all_keys = Log(torch.zeros_like(terms))
        # Counts are exact, sums of powers are not.
        least = terms if bias is None else below(terms, n + 16)
        inverse = Log.of((least - 1.0).clamp_min(0.0)) * Log(-sizes.spread)
        if sink is not None:
            over = sink - sizes.size - largest
            over = over - gamma(8) * (abs(sink) + sizes.size + largest.abs())
            inverse = inverse + Log(over)
            all_keys = 1 / (1 + Log(over - terms.log()))
        weight = 1 / (1 + inverse)
        middle = minimum(_largest_share(all_keys, 1.0, reach, shift), all_keys**0.5 * ball)
        square = minimum(_largest_share(all_keys, 0.5, reach, shift), ball)
        by_weight = weight * (all_keys**0.5 * value + other * square) ** 2
        free = _largest_share(weight, 1.0, value, other * (reach + ball))
        alone = (counts == 1) & (sink is None)
        log_rows = minimum(by_weight, free * (all_keys * value + other * middle)).log
        log_rows = torch.where(alone, 2 * value.log, log_rows)
        mean = maximum(mean, Log(middle.log.masked_fill(alone, -math.inf).max()))
        peak = max(top, float(log_rows.max()))
        if peak > -math.inf:
            columns *= math.exp(top - peak)
            columns[keys] += torch.exp(log_rows - peak) @ block.double()
            top = peak
    found = sizes.own * mean + (Log(top) * Log.of(columns.max())) ** 0.5
    return found * Log(gamma(4 * n + 64))


def _largest_share(limit: Log, power: float, a: Log, b: Log) -> Log:
    """Return the largest value of s^power (a + (1 − s) b) for 0 <= s <= ``limit``."""
    if bool(torch.isneginf(b.log)):
        return limit**power * a
    share = minimum(limit, power / (power + 1) * (a + b) / b)
    return share**power * (a + b * Log(torch.log(-torch.expm1(share.log))))


def _turn(f: SelfAttention, n: int) -> float:
    """Return the largest factor by which the rotations of n tokens lengthen a query or key."""
    assert f.rotary is not None
    half = f.rotary.rot_dim // 2
    cos, sin = f.rotary.cos[:n], f.rotary.sin[:n]
    pairs = torch.stack((cos[:, :half], -sin[:, :half], sin[:, half:], cos[:, half:]), dim=-1)
    largest = float(spectral_norms_above(pairs.unflatten(-1, (2, 2))).max())
    return max(largest, 1.0) if f.rotary.rot_dim < f.key_dim else largest
