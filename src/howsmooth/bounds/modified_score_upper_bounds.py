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
from howsmooth.bounds.attention_parameters import SiteLike, spectral_norm
from howsmooth.bounds.ball_upper_bounds import log, upper
from howsmooth.bounds.bilinear_score_norms import BilinearScoreNorms
from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_length, check_radius
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

    For one head with values V x + b_v the bound is σ_q ρ + ‖V‖ (max_j Σ_{i sees j} r_i)^{1/2}. σ_q and σ_k
    bound the gradients of a score s_ij in the tokens x_i and x_j on the ball, ρ = ‖V‖R, or max(‖V‖R, |b_v|)
    with a sink, bounds how far values are apart, and with β = σ_k ρ / ‖V‖

        r_i = min{(1 + β) max(1, (1 + 2β)² / 8β), (1 + β)² P̄_i},

    where P̄_i bounds a weight of row i; r_i = 1 if the row sees one key. Heads are combined as in
    :func:`gram_upper_bound`. Where scores are plain, ``best`` takes Theorem A, which is sharper.

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
        smooth &= math.isfinite(sizes.own) and math.isfinite(sizes.other)
        logs.append(log(_of_head(f, h, n, sizes)))
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
    """Bounds on the scores and values of one head on the ball of radius R.

    Attributes
    ----------
    own, other
        σ_q and σ_k: bounds on the gradients of a score in the token of its query and of its key.
    spread
        Bound on the difference of two scores of a row, without the additive bias.
    value
        ‖V‖.
    reach
        ρ: all values, and the zero value of a sink, lie in a ball of this radius.

    """

    own: float
    other: float
    spread: float
    value: float
    reach: float

    @classmethod
    def of(cls, f: SelfAttention, h: int, n: int, R: float) -> _Sizes:
        group = h // (f.heads // f.kv_heads)
        value = spectral_norm(f.value[group])
        reach = value * R
        if f.sinks is not None and f.value_bias is not None:
            reach = max(reach, _length(f.value_bias[group]))
        ways = []
        if f.query_norm is None and f.key_norm is None:
            ways += _of_bilinear_scores(f, h, n, R)
        if not ways or f.rotary is not None:
            ways.append(_of_lengths(f, h, n, R))
        own, other, size, spread = (min(sizes) for sizes in zip(*ways, strict=True))
        if f.softcap is not None:
            spread = min(spread, 2.0 * f.softcap * math.tanh(size / f.softcap) * (1 + _MARGIN))
        return cls(own, other, spread, value, reach)


def _is_relative(f: SelfAttention) -> bool:
    """Return whether the attention stays the same if one number is added to all scores of a query. A soft cap
    or a sink prevents this.
    """
    return f.softcap is None and f.sinks is None


_ScoreSizes = tuple[float, float, float, float]
"""σ_q, σ_k, and bounds on a score and on the difference of two scores of a row, without their constants."""


def _of_bilinear_scores(f: SelfAttention, h: int, n: int, R: float) -> list[_ScoreSizes]:
    """Bound the scores of a head without norm layers for queries and keys, and bound the gradients of the
    scores. The result is a list of one tuple. The list is empty if there are too many tokens for rotary
    positions.
    """
    group = h // (f.heads // f.kv_heads)
    Q, K = f.query[h], f.key[group]
    b_q, b_k = (None if b is None else b[i] for b, i in ((f.query_bias, h), (f.key_bias, group)))
    if f.rotary is None:
        norms: BilinearScoreNorms | None = BilinearScoreNorms.without_positions(Q, K, b_q, b_k)
    else:
        norms = BilinearScoreNorms.with_rotary_positions(f.rotary, Q, K, b_q, b_k, _seen(f, n))
    if norms is None:
        return []
    tokens, of_query, of_key, biases = (
        abs(f.scale) * norm for norm in (norms.tokens, norms.query_bias, norms.key_bias, norms.biases)
    )
    # Without positions the bias of keys adds one number to all scores of a row.
    cancels = f.rotary is None
    own = tokens * R + (0.0 if cancels and _is_relative(f) else of_key)
    other = tokens * R + of_query
    size = other * R + of_key * R + biases
    return [(own, other, size, 2.0 * (other * R if cancels else size))]


def _of_lengths(f: SelfAttention, h: int, n: int, R: float) -> _ScoreSizes:
    """Bound the scores of a head and their gradients from the norms of its queries and keys."""
    turn = abs(f.scale) * (1.0 if f.rotary is None else _turn(f, n) ** 2)
    query = _Projected.of(f.query, f.query_bias, f.query_norm, h, R)
    key = _Projected.of(f.key, f.key_bias, f.key_norm, h // (f.heads // f.kv_heads), R)
    own, other = turn * query.slope * key.size, turn * query.size * key.slope
    size = turn * query.size * key.size
    spread = 2.0 * size
    if f.rotary is None and f.key_norm is None and _is_relative(f):
        own, spread = turn * query.slope * key.slope * R, 2.0 * turn * query.size * key.slope * R
    return own, other, size, spread


@dataclass(frozen=True)
class _Projected:
    """Bounds on the queries or the keys of one head: on their norm and on the norm of their derivative."""

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
        if norm is None:
            slope = spectral_norm(W)
            return cls(slope * R + (0.0 if b is None else _length(b)), slope)
        if norm.centred:
            W, b = W - W.mean(dim=0), None if b is None else b - b.mean()
        slope, shift = spectral_norm(W), 0.0 if b is None else _length(b)
        gain = float(norm.weight[mine].abs().max()) * (1 + _MARGIN)
        # |N(y)| = √d |y| / √(|y|² + dε) grows with |y|, and its derivative is at most √d / √(|y|² + dε).
        longest, shortest = slope * R + shift, max(0.0, (1 - _MARGIN) * shift - slope * R)
        root = math.sqrt(norm.d)
        length = math.hypot(longest, root * math.sqrt(norm.eps))
        size = 0.0 if longest == 0 else gain * root * longest / length
        added = 0.0 if norm.bias is None else _length(norm.bias[mine])
        below = math.hypot(shortest, root * math.sqrt(norm.eps))
        steep = math.inf if below == 0 else gain * root * slope / below
        return cls((size + added) * (1 + _MARGIN), steep * (1 + _MARGIN))


def _of_head(f: SelfAttention, h: int, n: int, sizes: _Sizes) -> float:
    """Bound the Lipschitz constant of one head X ↦ softmax(scores) V X, without its output map."""
    if sizes.value == 0.0:
        return 0.0
    beta = sizes.other * sizes.reach / sizes.value
    free = (1 + beta) * max(1.0, (1 + 2 * beta) ** 2 / (8 * beta) if beta > 0.5 else 1.0)
    sees_more, columns = f.sinks is not None, torch.zeros(n, dtype=torch.float64)
    bias = None if f.score_bias is None else f.score_bias[h if len(f.score_bias) > 1 else 0]
    for (rows, keys), block in mask_blocks(_seen(f, n)):
        counts = block.sum(dim=1)
        if bias is None:
            others = (counts - 1).double()
        else:
            # Σ_l e^{b_il − max_j b_ij} over the other keys
            seen = bias[rows, keys].masked_fill(~block, -math.inf)
            terms = torch.exp(seen - seen.amax(dim=1, keepdim=True)).sum(dim=1)
            others = (terms - 1.0).clamp_min(0.0)
        weight = 1.0 / (1.0 + math.exp(-sizes.spread) * others * (1 - _MARGIN))
        of_rows = torch.clamp((1 + beta) ** 2 * weight, max=free)
        if f.sinks is None:
            of_rows = torch.where(counts == 1, 1.0, of_rows)
        sees_more |= bool((counts > 1).any())
        columns[keys] += of_rows @ block.double()
    own = sizes.own * sizes.reach if sees_more else 0.0
    return (own + sizes.value * math.sqrt(float(columns.max()))) * (1 + n * _MARGIN)


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


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector)) * (1 + _MARGIN)
