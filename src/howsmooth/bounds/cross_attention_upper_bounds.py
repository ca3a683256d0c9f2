"""Upper bounds on the Lipschitz constant of cross-attention with respect to its tokens, its memory, or both.

Proof: documentation page "Bounds for cross-attention".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention import CrossAttention
from howsmooth.bounds.attention_parameters import log_size, log_spectral_norm, spectral_norm, unit
from howsmooth.bounds.ball_upper_bounds import log, upper
from howsmooth.bounds.bound import Bound, Quantity, check_length, check_radius, exp
from howsmooth.bounds.multi_head_upper_bounds import log_quadratic_form
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.roundoff import UNDERFLOW, U
from howsmooth.scopes import SIDES

__all__ = ["cross_attention_ball_upper_bound", "cross_attention_upper_bound"]

_SOURCE = 'howsmooth documentation, "Bounds for cross-attention", Theorem X, {}'
# Norms of vectors and sums of a few of them are rounded up by this relative error.
_MARGIN = 1e-12
# Slopes of scores from which on squares are avoided
_STEEP = 1e100


def cross_attention_upper_bound(
    attention: object, x: Tensor | None = None, memory: Tensor | None = None, *, side: str | None = None
) -> Bound:
    """Bound the Lipschitz constant of cross-attention at given tokens x_i and a given memory y_j.

    In the queries' tokens the Jacobian has one block for each query, A_i = scale Σ_h W_h Cov_i(v, k) Q_h,
    and the bound is the largest ‖A_i‖, so it is sharp up to rounding. In the memory, one head has the bound
    (max_j Σ_i P_ij β_i²)^{1/2} with β_i² = λ_max(V Vᵀ + scale² |Kᵀ q_i|² Cov_i(v)), and heads are combined as
    in :func:`gram_upper_bound`. In both together it is the root of the sum of both squares.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.CrossAttention`, or a captured site of one.
    x, memory
        Tokens (m, d) and memory (n, d_memory); None for those of the site.
    side
        ``"queries"``, ``"memory"`` or ``"joint"``: which sequence moves. Default: the side of the site, or
        ``"joint"``.

    Returns
    -------
    Bound
        Upper bound on the spectral norm of the Jacobian; it includes the rounding of the weights.

    Raises
    ------
    ArgumentError
        If ``attention`` is no cross-attention given by its matrices, has a soft cap, or an argument does not
        fit.
    NonFiniteError
        If an entry of x or the memory is NaN or infinite, or a score is out of range.

    References
    ----------
    Documentation page "Bounds for cross-attention", Theorem X.

    """
    f, side = _checked(attention, side)
    x = getattr(attention, "queries", None) if x is None else x
    memory = getattr(attention, "memory", None) if memory is None else memory
    for name, tokens, d in (("x", x, f.d), ("memory", memory, f.d_memory)):
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] != d or not len(tokens):
            got = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ArgumentError(name, expected=f"tokens of shape (rows, {d})", got=got)
        if not bool(torch.isfinite(tokens).all()):
            raise NonFiniteError(name, expected="finite numbers", got="NaN or infinity")
    assert isinstance(x, Tensor)
    assert isinstance(memory, Tensor)
    f.check_lengths(len(x), len(memory))
    x, memory = (t.detach().to(dtype=torch.float64, device="cpu") for t in (x, memory))
    heads = [_HeadAt.of(f, h, x, memory) for h in range(f.heads)]
    queries = _largest_block(f, heads, len(x)) if side != "memory" else 0.0
    of_memory = log_quadratic_form(_outputs(f), [log(head.memory_norm()) for head in heads])
    return _bound("cross_attention_upper_bound", Quantity.LOCAL, side, log(queries), of_memory)


def cross_attention_ball_upper_bound(
    attention: object, length: object, radius: object, memory_radius: object, *, side: str | None = None
) -> Bound:
    """Bound the Lipschitz constant of cross-attention on all tokens |x_i| <= R_x and all memories |y_j| <=
    R_y.

    In the queries' tokens it is at most |scale| R_y² max_z |V z| |Qᵀ K z| over unit vectors z for one head.
    This depends neither on R_x nor on the numbers of tokens. In the memory it is at most ‖V‖ (m φ(γ))^{1/2}
    with γ = |scale| R_y (‖Kᵀ Q‖ R_x + |Kᵀ b_q|) and φ(γ) = max_{1/2 <= p <= 1} p + 4 γ² p² (1 − p), for every
    number of memory tokens. In both together it is at most the root of the sum of both squares.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.CrossAttention`, or a captured site of one.
    length
        Number m >= 1 of queries.
    radius, memory_radius
        Largest norms R_x > 0 of a token x_i and R_y > 0 of a memory token y_j.
    side
        As for :func:`cross_attention_upper_bound`.

    Returns
    -------
    Bound
        Upper bound on the Lipschitz constant, in Frobenius norms.

    Raises
    ------
    ArgumentError
        If ``attention`` is no cross-attention given by its matrices, has a soft cap, or an argument does not
        fit.

    References
    ----------
    Documentation page "Bounds for cross-attention", Theorem X.

    """
    f, side = _checked(attention, side)
    m, R_x, R_y = check_length(length), check_radius(radius), check_radius(memory_radius)
    outputs, scale, group = _outputs(f), abs(f.scale), f.heads // f.kv_heads
    of_queries, of_memory, left, right = [], [], [], []
    # Divided by their largest entries, so that products neither overflow nor underflow
    Qs, keys, values, whole = unit(f.query), unit(f.key), unit(f.value), unit(torch.cat(outputs, dim=1))
    size = log(scale) + log_size(f.query) + log_size(f.key) + math.log(R_y)
    for h in range(f.heads):
        Q, K, V = Qs[h], keys[h // group], values[h // group]
        scores = K.mT @ Q
        shift = 0.0 if f.query_bias is None else scale * _length(f.key[h // group].mT @ f.query_bias[h])
        of_queries.append(size + math.log(R_y) + log_size(f.value) + log(_largest_product(V, scores.mT)))
        gamma = exp(size + math.log(R_x) + log_spectral_norm(scores)) + shift * R_y
        of_memory.append(log_spectral_norm(f.value[h // group]) + 0.5 * (math.log(m) + log(_heaviest(gamma))))
        left.append(whole.split(f.value_dim, dim=1)[h] @ V)
        right.append(scores)
    stacked = log_spectral_norm(torch.cat(left, dim=1)) + log_spectral_norm(torch.cat(right))
    stacked += log_size(f.value) + log_size(torch.cat(outputs, dim=1))
    queries = min(log_quadratic_form(outputs, of_queries), size + math.log(R_y) + stacked)
    name = "cross_attention_ball_upper_bound"
    return _bound(name, Quantity.CROSS, side, queries, log_quadratic_form(outputs, of_memory))


def _checked(attention: object, side: str | None) -> tuple[CrossAttention, str]:
    """Check the attention and ``side``, and return both, with the attention in float64 on the CPU."""
    f = attention if isinstance(attention, CrossAttention) else getattr(attention, "attention", attention)
    if not isinstance(f, CrossAttention):
        raise ArgumentError(
            "attention",
            expected="a CrossAttention, or a site of one, given by its matrices",
            got=type(f).__name__,
            remedy="local_lipschitz measures any captured cross-attention at given tokens.",
        )
    if f.softcap is not None:
        raise ArgumentError(
            "attention",
            expected="scores ⟨q_i, k_j⟩ with a mask or bias: these bounds cannot use any others",
            got="soft-capped scores",
            remedy="local_lipschitz measures such attention at given tokens.",
        )
    side = getattr(attention, "side", "joint") if side is None else side
    if side not in SIDES:
        raise ArgumentError("side", expected=f"one of {', '.join(SIDES)}", got=repr(side))
    return f.to(dtype=torch.float64, device="cpu"), side


def _bound(name: str, quantity: Quantity, side: str, queries: float, memory: float) -> Bound:
    """Return the bound for ``side`` (tokens, memory or both), given the logarithms of the bounds for tokens
    and for memory.
    """
    logs = {"queries": [queries], "memory": [memory], "joint": [queries, memory]}[side]
    largest = max(logs)
    total = largest
    if math.isfinite(largest):
        total += 0.5 * math.log(math.fsum(math.exp(2 * (one - largest)) for one in logs))
    return upper(name, quantity, _SOURCE.format(side), total + _MARGIN)


def _outputs(f: CrossAttention) -> list[Tensor]:
    width = f.heads * f.value_dim
    output = torch.eye(width, dtype=torch.float64) if f.output is None else f.output
    return list(output.split(f.value_dim, dim=1))


# ---------------------------------------------------------------- at given tokens


@dataclass(frozen=True, eq=False)
class _HeadAt:
    """One head at given tokens and a given memory, with bounds on the rounding errors of its tensors.

    Keys and values are centred; covariances do not change by that.
    """

    Q: Tensor  # (key_dim, d)
    W: Tensor  # (d_out, value_dim)
    V: Tensor  # (value_dim, d_memory)
    scale: float
    p: Tensor  # (m, n)
    k: Tensor  # (n, key_dim)
    v: Tensor  # (n, value_dim)
    slopes: Tensor  # (m,): bounds on |scale| |Kᵀ q_i|
    eta: Tensor  # (m,): bounds on the relative errors of the weights of a row, and of sums with them
    key_off: float  # bound on the error of a key, relative to the largest of the centred keys
    value_off: float

    @classmethod
    def of(cls, f: CrossAttention, h: int, x: Tensor, memory: Tensor) -> _HeadAt:
        g = h // (f.heads // f.kv_heads)
        n = len(memory)
        q, k, v = (t[i] for t, i in zip(f.projections(x, memory), (h, g, g), strict=True))
        bias = None if f.score_bias is None else f.score_bias[h if len(f.score_bias) > 1 else 0]

        def off(t: Tensor, weight: Tensor, b: Tensor | None) -> Tensor:
            size = float(torch.linalg.matrix_norm(weight)) * torch.linalg.vector_norm(t, dim=-1)
            found: Tensor = (t.shape[-1] + 3) * U * (size + (0.0 if b is None else _length(b))) * (1 + 1e-6)
            return found

        q_off = off(x, f.query[h], None if f.query_bias is None else f.query_bias[h])
        k_off = float(off(memory, f.key[g], None if f.key_bias is None else f.key_bias[g]).max())
        v_off = float(off(memory, f.value[g], None if f.value_bias is None else f.value_bias[g]).max())
        q_size, k_size = torch.linalg.vector_norm(q, dim=-1), float(torch.linalg.vector_norm(k, dim=-1).max())
        score = abs(f.scale) * q_size * k_size
        moved = abs(f.scale) * (q_off * (k_size + k_off) + q_size * k_off) + (f.key_dim + 8) * U * score
        if bias is not None:
            moved = moved + 8 * U * bias.abs().amax(dim=-1)
        scores = f.scale * q @ k.mT + (0.0 if bias is None else bias)
        if not bool(torch.isfinite(scores).all()):
            raise NonFiniteError("x", expected="scores below the largest float64", got="larger ones")
        if f.mask is not None:
            scores = scores.masked_fill(~f.mask, -math.inf)
        K_size = float(torch.linalg.matrix_norm(f.key[g]))
        exact = torch.linalg.vector_norm(q @ f.key[g], dim=-1) * (1 + _MARGIN)
        slopes = abs(f.scale) * (exact + K_size * (q_off + (f.key_dim + 3) * U * q_size))
        k, v = k - k.mean(dim=0), v - v.mean(dim=0)
        terms = n + f.key_dim + f.value_dim * f.heads + 40
        eta = torch.expm1(2 * moved) + 4 * terms * U
        return cls(
            f.query[h], _outputs(f)[h], f.value[g], f.scale, torch.softmax(scores, dim=-1), k, v, slopes, eta,
            2 * k_off, 2 * v_off,
        )  # fmt: skip

    @property
    def k_size(self) -> float:
        return float(torch.linalg.vector_norm(self.k, dim=-1).max()) * (1 + _MARGIN) + self.key_off

    @property
    def v_size(self) -> float:
        return float(torch.linalg.vector_norm(self.v, dim=-1).max()) * (1 + _MARGIN) + self.value_off

    def covariance(self, i: int, of: Tensor) -> Tensor:
        """Return the covariance of the values with given vectors t_j under the attention weights of query i.

        It is Σ_j P_ij (v_j − o_i) t_jᵀ, where P_ij are the attention weights, v_j the values and o_i their
        weighted mean.
        """
        p = self.p[i, :, None]
        found: Tensor = (p * (self.v - (p * self.v).sum(dim=0))).mT @ of
        return found

    def memory_norm(self) -> float:
        """Return an upper bound on the norm of the derivative of the head's output with respect to the
        memory. The output map of the head is left out.

        The bound is (max_j Σ_i P_ij β_i²)^{1/2} with β_i² = ‖V Vᵀ + s_i² C_i‖. Here C_i is the covariance of
        the values under row i of P, and s_i is ``slopes`` of row i.
        """
        if float(self.slopes.max()) > _STEEP:
            return self._steep_memory_norm()
        values, sums = self.V @ self.V.mT, torch.zeros(len(self.k), dtype=torch.float64)
        for i, (slope, eta) in enumerate(zip(self.slopes.tolist(), self.eta.tolist(), strict=True)):
            spread = spectral_norm(values + slope**2 * self.covariance(i, self.v))
            error = (3 * eta + eta**2) * self.v_size**2 + 4 * self.value_off * self.v_size
            sums += self.p[i] * (1 + eta) * (spread * (1 + _MARGIN) + slope**2 * error)
        return math.sqrt(float(sums.max()) * (1 + len(self.p) * U) + len(self.p) * UNDERFLOW) * (1 + _MARGIN)

    def _steep_memory_norm(self) -> float:
        """Return :meth:`memory_norm` for slopes whose squares leave the range of float64, a little larger:
        β_i is at most ‖V‖ + s_i ‖C_i‖^{1/2}.
        """
        size, largest = float(torch.linalg.matrix_norm(self.V)), 0.0
        for i, (slope, eta) in enumerate(zip(self.slopes.tolist(), self.eta.tolist(), strict=True)):
            error = (3 * eta + eta**2) * self.v_size**2 + 4 * self.value_off * self.v_size
            spread = float(torch.linalg.matrix_norm(self.covariance(i, self.v))) + error
            row = (size + slope * math.sqrt(spread)) * math.sqrt(1 + eta)
            if not math.isfinite(row):
                return math.inf
            largest = max(largest, row)
        columns = float(self.p.sum(dim=0).max())
        return largest * math.sqrt(columns) * (1 + _MARGIN)


def _largest_block(f: CrossAttention, heads: list[_HeadAt], m: int) -> float:
    """Return an upper bound on the largest norm of the derivative of an output token with respect to the
    query token at the same position.

    For token i the derivative is A_i = scale · Σ_h W_h C_i^h Q_h, where C_i^h is the covariance of the values
    and the keys. The bound covers rounding errors.
    """
    W, largest = torch.cat([head.W for head in heads], dim=1), 0.0
    frobenius = torch.linalg.matrix_norm
    sizes = [abs(f.scale) * float(frobenius(head.W) * frobenius(head.Q)) for head in heads]
    for i in range(m):
        block = f.scale * W @ torch.cat([head.covariance(i, head.k) @ head.Q for head in heads])
        error = 0.0
        for size, head in zip(sizes, heads, strict=True):
            eta = float(head.eta[i])
            of_weights = (4 * eta + eta**2) * head.v_size * head.k_size
            error += size * (of_weights + 2 * (head.value_off * head.k_size + head.key_off * head.v_size))
        if float(frobenius(block)) + error > largest:  # ‖A‖ is at most the Frobenius norm
            largest = max(largest, spectral_norm(block) + error)
    return largest * (1 + _MARGIN)


# ---------------------------------------------------------------- on a ball


def _largest_product(left: Tensor, right: Tensor) -> float:
    """Return an upper bound on the maximum of |left z| |right z| over all unit vectors z, for matrices
    ``left`` and ``right``.

    For every t > 0 it is at most half the norm of t leftᵀ left + rightᵀ right / t.
    """
    a, b = spectral_norm(left), spectral_norm(right)
    if a == 0.0 or b == 0.0:
        return 0.0
    grams = (left / a).mT @ (left / a), (right / b).mT @ (right / b)
    weights = (2.0 ** torch.linspace(-3, 3, 25)).tolist()
    halves = [0.5 * spectral_norm(t * grams[0] + grams[1] / t) for t in weights]
    return a * b * min(1.0, *halves) * (1 + _MARGIN)


def _heaviest(gamma: float) -> float:
    """Return an upper bound on φ(γ), the maximum over 1/2 <= p <= 1 of p + 4 γ² p² (1 − p)."""
    if gamma <= 0.5:
        return 1.0
    p = min(1.0, (1 + math.sqrt(1 + 0.75 / (gamma * gamma))) / 3)
    return (p + 4 * gamma * gamma * p**2 * (1 - p)) * (1 + _MARGIN)


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector)) * (1 + _MARGIN)
