"""Upper bounds on the change of the output of attention if the keys or values have errors of bounded size.

They hold for errors of any size, not to first order only. Proofs: documentation page "Errors in queries, keys
and values".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.scaled_dot_product import cap_slope
from howsmooth.bounds.attention_parameters import SiteLike, as_matrix
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import (
    LARGEST,
    UNDERFLOW,
    above,
    below,
    gamma,
    largest_eigenvalues_by_squaring,
    limit_in_digits,
    shrink,
    spectral_norm_above,
)

__all__ = ["OutputErrorBound", "kv_error_upper_bound"]

_SOURCE = 'howsmooth documentation, "Errors in queries, keys and values", {}'
# Roundings that a sum or product of numbers >= 0 has at most, for up to a million keys
_ROUNDINGS = 9_000_000
_ENTRIES = 1 << 22  # entries of the largest tensor of a block of rows
_STEPS = 5  # of the search for the largest ratio
_MOST_TAU = 300.0  # change of a score above which a bound uses the distances of the values alone


@dataclass(frozen=True, eq=False)
class OutputErrorBound:
    """An upper bound on the change of the output of attention for all errors of keys and values of a given
    size.

    Attributes
    ----------
    value
        Upper bound on the Frobenius norm of the change of the output.
    tokens
        Upper bounds on the Euclidean norm of the change of each output token, float64, shape (n,).
    source
        The theorem, with the documentation page that proves it.

    """

    value: float
    tokens: Float64[Tensor, " n"]
    source: str

    def __repr__(self) -> str:
        limit = limit_in_digits(self.value, 6, upper=True)
        return f"OutputErrorBound(‖change of the output‖ ≤ {limit}; {self.source})"


def kv_error_upper_bound(
    attention: object,
    X: object = None,
    *,
    keys: object = None,
    values: object = None,
) -> OutputErrorBound:
    """Bound the change of the output of attention if the errors of keys and values have at most the given
    size.

    The bound holds for every pattern of errors of this size, with the queries unchanged, and includes the
    rounding of float64. Keys and values are those that the scores are formed from, after biases, norm layers
    and rotary positions, as in the KV cache of transformers. For errors of the values alone, and one head
    without output projection, the largest change of each output token is equal to the bound.

    Parameters
    ----------
    attention
        A captured site, or a :class:`~howsmooth.attention.SelfAttention` with any mask and score features.
    X
        The tokens (n, d) of one sequence, a tensor, an array or nested lists; None for the tokens of the
        site.
    keys, values
        The size of the errors, not negative; None for no error. A number, or an array that broadcasts to
        (kv_heads, n), limits the Euclidean norm of the error of each key or value. One with three axes
        that broadcasts to (kv_heads, n, dim) limits the absolute error of each entry; one number for each
        channel has shape (kv_heads, 1, dim).

    Returns
    -------
    OutputErrorBound
        Upper bounds for the whole output and for each output token.

    Raises
    ------
    ArgumentError
        If ``attention`` is no map of this kind, or another argument does not fit.
    NonFiniteError
        If ``X``, a size or a score is not finite, or larger than 2^200.

    """
    f, x = _checked(attention, X)
    n = len(x)
    q, k, v = f.projections(x)
    key_errors = _Errors.of("keys", keys, k)
    value_errors = _Errors.of("values", values, v)
    scores = q.abs() @ k.abs().repeat_interleave(f.heads // f.kv_heads, dim=0).mT
    if not all(bool((t.abs() <= LARGEST).all()) for t in (q, k, v, scores)):
        raise NonFiniteError(
            "X",
            expected="queries, keys, values and scores below 2^200 in float64",
            got="larger ones",
            remedy="Rescale the tokens or the parameters.",
        )
    width = f.value_dim
    total = torch.zeros(n, dtype=torch.float64)
    for h in range(f.heads):
        head = _Head(f, h, q[h], k, v)
        given = (key_errors, value_errors)
        if not any(bool(one.norms[head.g].any()) for one in given if one is not None):
            continue
        changes = torch.cat(
            [head.changes(rows, key_errors, value_errors) for rows in _row_blocks(n, n * width)]
        )
        # Heads that are concatenated are orthogonal parts of the output.
        total = torch.hypot(total, changes) if f.output is None else total + changes
    tokens = above(total, _ROUNDINGS)
    name = "Theorem K" if keys is not None and values is None else "Theorem V"
    if keys is not None and values is not None:
        name = "Theorem KV"
    value = above(float(torch.linalg.vector_norm(tokens)), _ROUNDINGS)
    return OutputErrorBound(value, tokens, _SOURCE.format(name))


def _checked(attention: object, X: object) -> tuple[SelfAttention, Float64[Tensor, "n d"]]:
    f: object = attention
    if not isinstance(f, SelfAttention) and isinstance(attention, SiteLike):
        f = attention.map
        X = attention.x[0] if X is None and len(attention.x) == 1 else X
    if not isinstance(f, SelfAttention):
        scope = getattr(attention, "scope", None)
        raise ArgumentError(
            "attention",
            expected="a SelfAttention, or a site whose map is one",
            got=type(attention).__name__ if scope is None else f"scope {scope!r}: {type(f).__name__}",
            remedy="Capture with scope 'attention', 'heads' or 'head'; its projections must be known.",
        )
    x = as_matrix("X", X, ("n", f.d), what="tokens", remedy="Give the tokens of one sequence.")
    f = f.to(dtype=torch.float64, device="cpu")
    f.check_length(len(x))
    return f, x


def _row_blocks(n: int, width: int) -> list[slice]:
    step = max(1, _ENTRIES // width)
    return [slice(i, min(n, i + step)) for i in range(0, n, step)]


@dataclass(frozen=True, eq=False)
class _Errors:
    """Limits on the errors of keys or values. ``norms`` limits the norm of each error; ``entries`` limits the
    single entries of each error, or is None.
    """

    norms: Float64[Tensor, "kv_heads n"]
    entries: Float64[Tensor, "kv_heads n dim"] | None

    @classmethod
    def of(cls, name: str, size: object, like: Float64[Tensor, "kv_heads n dim"]) -> _Errors | None:
        """Check the limits that the user gave for errors of keys or values, and convert them to _Errors."""
        if size is None:
            return None
        heads, n, dim = like.shape
        expected = f"numbers >= 0 that broadcast to ({heads}, {n}), or with three axes to {(heads, n, dim)}"
        try:
            given = torch.as_tensor(size, dtype=torch.float64, device="cpu").detach()
            shape = (heads, n, dim) if given.ndim == 3 else (heads, n)
            given = given.broadcast_to(shape)
        except (TypeError, ValueError, RuntimeError):
            got = f"shape {tuple(size.shape)}" if isinstance(size, Tensor) else repr(size)
            raise ArgumentError(name, expected=expected, got=got) from None
        if not bool((given <= LARGEST).all()):
            raise NonFiniteError(name, expected="numbers up to 2^200", got="NaN or a larger number")
        if bool((given < 0).any()):
            raise ArgumentError(name, expected=expected, got=f"{float(given.min()):g}")
        if given.ndim == 2:
            return cls(given, None)
        return cls(above(torch.linalg.vector_norm(given, dim=-1), _ROUNDINGS), given)


@dataclass(frozen=True, eq=False)
class _Weights:
    """Lower and upper bounds on the attention weights of some queries."""

    #: Upper bounds on the weights P_ij.
    upper: Float64[Tensor, "rows n"]
    #: Lower bounds on the weight of the sink, zero without one.
    sink: Float64[Tensor, " rows"]
    #: A number c such that c · ``upper`` is a lower bound on the weights, up to underflow; zero if none is.
    shrink: Float64[Tensor, " rows"]
    #: The keys that each query sees.
    visible: Bool[Tensor, "rows n"]
    #: The scores before the soft cap.
    raw: Float64[Tensor, "rows n"]

    def lowest_sum(self, tau: Float64[Tensor, "rows n"]) -> Float64[Tensor, " rows"]:
        """Return for each query i a lower bound on Σ_j P_ij e^{−τ_ij} plus the weight of the sink. P_ij are
        the attention weights and τ_ij = ``tau`` the changes of the scores.

        The result is zero where no positive bound is known.
        """
        sums = self.shrink * below((self.upper * torch.exp(-tau)).sum(dim=1), _ROUNDINGS) + self.sink
        # For larger changes of the scores, underflow would not be negligible.
        return torch.where((tau.amax(dim=1) < _MOST_TAU) & (self.shrink > 0), sums, 0.0)

    def moved(self, tau: Float64[Tensor, "rows n"]) -> Float64[Tensor, "rows n"]:
        """Return upper bounds on the attention weights if each score changes by at most ``tau``."""
        low = self.shrink[:, None] * self.upper * torch.exp(-tau)
        others = (self.lowest_sum(tau)[:, None] - above(low, _ROUNDINGS)).clamp_min(0.0)
        high = above(self.upper * torch.exp(tau.clamp_max(_MOST_TAU)), _ROUNDINGS)
        return torch.where(others > 0, high / (high + others), 1.0).masked_fill(~self.visible, 0.0)


class _Head:
    """One attention head at given tokens, with bounds on the effect of key and value errors on its output."""

    def __init__(
        self,
        f: SelfAttention,
        h: int,
        q: Float64[Tensor, "n key_dim"],
        k: Float64[Tensor, "kv_heads n key_dim"],
        v: Float64[Tensor, "kv_heads n value_dim"],
    ) -> None:
        self.g = h // (f.heads // f.kv_heads)
        self.f, self.q, self.k, self.v = f, q, k[self.g], v[self.g]
        n, width = self.v.shape
        visible = f.visible_keys(n)
        self.visible = torch.ones(n, n, dtype=torch.bool) if visible is None else visible
        bias = f.score_bias
        self.bias = None if bias is None else bias[0 if bias.shape[0] == 1 else h]
        self.sink = -torch.inf if f.sinks is None else float(f.sinks[h])
        whole = torch.eye(width, dtype=torch.float64) if f.output is None else f.output
        self.output = whole if f.output is None else whole[:, h * width : (h + 1) * width]
        self.factor = shrink(self.output)  # products with it are not shorter than with the output matrix
        self.norm = spectral_norm_above(self.output)

    def changes(self, rows: slice, keys: _Errors | None, values: _Errors | None) -> Float64[Tensor, " rows"]:
        """Bound how much key and value errors change the output of this head, for each token of the given
        rows.
        """
        weights = self._weights(rows)
        p, found = weights.upper, torch.zeros(len(weights.upper), dtype=torch.float64)
        if keys is not None:
            tau = self._score_changes(rows, keys, weights.raw)
            found = self._by_keys(weights, tau)
            p = weights.moved(tau)
        return found if values is None else found + self._by_values(p, values)

    def _weights(self, rows: slice) -> _Weights:
        f, visible = self.f, self.visible[rows]
        raw = f.scale * (self.q[rows] @ self.k.mT)
        size = abs(f.scale) * (self.q[rows].abs() @ self.k.abs().mT)
        scores = raw if f.softcap is None else f.softcap * torch.tanh(raw / f.softcap)
        if self.bias is not None:
            scores, size = scores + self.bias[rows], size + self.bias[rows].abs()
        size = (size + scores.abs()).masked_fill(~visible, 0.0).amax(dim=1)
        size = size if self.sink == -torch.inf else size.clamp_min(abs(self.sink))
        sink = scores.new_full((len(scores), 1), self.sink)
        every = torch.softmax(torch.cat((scores.masked_fill(~visible, -torch.inf), sink), dim=1), dim=1)
        n = scores.shape[1]
        # Errors of the scores of at most e change a weight by a factor of at most e^{2e}.
        slack = torch.expm1(2 * gamma(self.q.shape[1] + 20) * size) + gamma(2 * n + 40)
        lowered = (1 - 2 * slack).clamp_min(0.0)
        # Where scores are so large that nothing is known of the weights, each is at most 1.
        upper = torch.where(slack[:, None] < 1, every[:, :n] * (1 + slack[:, None]) + UNDERFLOW, 1.0)
        upper = upper.clamp_max(1.0).masked_fill(~visible, 0.0)
        return _Weights(upper, every[:, n] * lowered, lowered, visible, raw)

    def _score_changes(
        self, rows: slice, keys: _Errors, raw: Float64[Tensor, "rows n"]
    ) -> Float64[Tensor, "rows n"]:
        """Bound the effect of key errors on each attention score, after the soft cap."""
        q, cap = self.q[rows], self.f.softcap
        tau = torch.linalg.vector_norm(q, dim=1)[:, None] * keys.norms[self.g]
        if keys.entries is not None:
            tau = torch.minimum(tau, q.abs() @ keys.entries[self.g].mT)
        tau = above(abs(self.f.scale) * tau, _ROUNDINGS)
        if cap is not None:
            # The cap's slope is largest at the score nearest to zero, and no capped score exceeds the cap.
            lost = gamma(q.shape[1] + 4) * abs(self.f.scale) * (q.abs() @ self.k.abs().mT)
            nearest = (raw.abs() - tau - lost).clamp_min(0.0)
            tau = above(tau * cap_slope(nearest, cap), _ROUNDINGS).clamp_max(2 * cap)
        found: Tensor = tau
        return found

    def _by_keys(self, weights: _Weights, tau: Float64[Tensor, "rows n"]) -> Float64[Tensor, " rows"]:
        """Bound the change of the output of this head if each score changes by at most ``tau``.

        The result is the smallest of three bounds: by the triangle inequality, by a covariance of the values,
        and by the distance of the values from the output.
        """
        values, p = self.v @ self.factor.mT, weights.upper
        means = p @ values
        z = values[None] - means[:, None]
        # The computed differences z of values and outputs have errors of at most ``lost`` in norm.
        lengths = above(torch.linalg.vector_norm(self.v.abs() @ self.factor.abs().mT, dim=1), _ROUNDINGS)
        relative = (1 - weights.shrink) + gamma(2 * len(values) + 2 * self.v.shape[1] + 20)
        lost = relative * (p @ lengths + lengths.amax())
        distances = above(torch.linalg.vector_norm(z, dim=-1), _ROUNDINGS) + lost[:, None]
        hull = distances.masked_fill(~weights.visible, 0.0).amax(dim=1)
        if self.sink > -torch.inf:  # the value of the sink is zero
            hull = torch.maximum(hull, above(torch.linalg.vector_norm(means, dim=1), _ROUNDINGS) + lost)
        lowest = weights.lowest_sum(tau)
        small = torch.where((lowest > 0)[:, None], tau, 0.0)
        triangle = _largest_ratio(weights, distances, small, lowest)
        grown = above(p * torch.expm1(small), _ROUNDINGS)
        mass = grown.sum(dim=1)
        covariance = (grown[..., None] * z).mT @ z
        spread = (mass * largest_eigenvalues_by_squaring(covariance, squarings=2)).sqrt() + mass * lost
        known = torch.minimum(triangle, spread / lowest)
        found: Tensor = above(torch.where(lowest > 0, torch.minimum(known, hull), hull), _ROUNDINGS)
        return found

    def _by_values(self, p: Float64[Tensor, "rows n"], values: _Errors) -> Float64[Tensor, " rows"]:
        """Bound the effect of value errors on the output of this head if the attention weights are at most
        ``p``.
        """
        found = self.norm * (p @ values.norms[self.g])
        if values.entries is not None:
            mean = p @ values.entries[self.g]
            found = torch.minimum(found, self.norm * torch.linalg.vector_norm(mean, dim=1))
            found = torch.minimum(found, torch.linalg.vector_norm(mean @ self.output.abs().mT, dim=1))
        return above(found, _ROUNDINGS)


def _largest_ratio(
    weights: _Weights,
    distances: Float64[Tensor, "rows n"],
    tau: Float64[Tensor, "rows n"],
    lowest: Float64[Tensor, " rows"],
) -> Float64[Tensor, " rows"]:
    """Bound the change of each attention output if each score changes by at most the entry of ``tau`` for its
    query and key.

    For each row the bound is max Σ_j P_j |e_j − 1| r_j / (Σ_j P_j e_j + sink) over e^{−τ_j} ≤ e_j ≤ e^{τ_j},
    with attention weights P_j and distances r_j. The maximum λ solves max_e Σ_j P_j (|e_j − 1| r_j − λ e_j) =
    λ sink, and the left side is largest at one of the two ends for each j. Dinkelbach's iteration approaches
    λ from below; its last residual, divided by the smallest denominator, is added.
    """
    p, c = weights.upper, weights.shrink
    up, down = torch.expm1(tau), -torch.expm1(-tau)
    ratio = torch.zeros(len(p), dtype=torch.float64)
    for _ in range(_STEPS):
        rises = up * distances - (c * ratio)[:, None] * (1 + up) >= (
            down * distances - (c * ratio)[:, None] * (1 - down)
        )
        numerator = (p * torch.where(rises, up, down) * distances).sum(dim=1)
        denominator = c * (p * torch.where(rises, 1 + up, 1 - down)).sum(dim=1) + weights.sink
        ratio = torch.where(denominator > 0, numerator / denominator, 0.0)
    at = (c * ratio)[:, None]
    terms = torch.maximum(up * distances - at * (1 + up), down * distances - at * (1 - down))
    residual = (p * terms).sum(dim=1) - ratio * weights.sink
    sizes = (p * (up * distances + at * (1 + up))).sum(dim=1) + ratio * weights.sink
    cancelled = gamma(p.shape[1] + 20) * sizes
    return above(ratio, _ROUNDINGS) + (residual.clamp_min(0.0) + cancelled) / lowest
