"""Upper bounds on the change of the output of attention if the keys or values have errors of bounded size.

They hold for errors of any size, not to first order only. Proofs: documentation page "Errors in queries, keys
and values".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.functional import pad

from howsmooth.attention import SelfAttention
from howsmooth.attention.scaled_dot_product import cap_slope
from howsmooth.bounds.attention_parameters import SiteLike, as_matrix
from howsmooth.bounds.certificates.rounded_attention import row_blocks
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import (
    LARGEST,
    STEP,
    entries_of,
    gamma,
    known_to,
    largest_eigenvalues_by_squaring,
    limit_in_digits,
    plain,
    shrink,
    spectral_norm_above,
)

__all__ = ["OutputErrorBound", "kv_error_upper_bound"]

_SOURCE = 'howsmooth documentation, "Errors in queries, keys and values", Theorem {}'
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
    given = (_sizes("keys", keys, k), _sizes("values", values, v))
    scores = q.abs() @ k.abs().repeat_interleave(f.heads // f.kv_heads, dim=0).mT
    if not all(bool((t.abs() <= LARGEST).all()) for t in (q, k, v, scores)):
        raise NonFiniteError(
            "X",
            expected="queries, keys, values and scores below 2^200 in float64",
            got="larger ones",
            remedy="Rescale the tokens or the parameters.",
        )
    total = torch.zeros(n, dtype=torch.float64)
    for h in range(f.heads):
        g = h // (f.heads // f.kv_heads)
        key_errors, value_errors = (None if one is None or not one[g].any() else one[g] for one in given)
        if key_errors is None and value_errors is None:
            continue
        changes = _Head(f, h, q[h], k[g], v[g], key_errors, value_errors).changes()
        # Heads that are concatenated are orthogonal parts of the output.
        total = torch.hypot(total, changes) if f.output is None else total + changes
    tokens = total * STEP
    name = "K" * (keys is not None) + "V" * (values is not None)
    value = float(torch.linalg.vector_norm(tokens)) * STEP
    return OutputErrorBound(value, tokens, _SOURCE.format(name or "V"))


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


def _sizes(name: str, size: object, like: Float64[Tensor, "kv_heads n dim"]) -> Tensor | None:
    """Convert to limits on the norms (kv_heads, n) or on the entries (kv_heads, n, dim) of errors."""
    if size is None:
        return None
    heads, n, dim = like.shape
    expected = f"numbers >= 0 that broadcast to ({heads}, {n}), or with three axes to {(heads, n, dim)}"
    try:
        given = torch.as_tensor(size, dtype=torch.float64, device="cpu").detach()
        given = given.broadcast_to((heads, n, dim) if given.ndim == 3 else (heads, n))
    except (TypeError, ValueError, RuntimeError):
        got = f"shape {tuple(size.shape)}" if isinstance(size, Tensor) else repr(size)
        raise ArgumentError(name, expected=expected, got=got) from None
    if not bool((given <= LARGEST).all()):
        raise NonFiniteError(name, expected="numbers up to 2^200", got="NaN or a larger number")
    if bool((given < 0).any()):
        raise ArgumentError(name, expected=expected, got=f"{float(given.min()):g}")
    return given


class _Head:
    """One head at given tokens. A sink is one more visible key, with the value zero and without errors."""

    def __init__(
        self,
        f: SelfAttention,
        h: int,
        q: Float64[Tensor, "n key_dim"],
        k: Float64[Tensor, "n key_dim"],
        v: Float64[Tensor, "n value_dim"],
        key_errors: Tensor | None,
        value_errors: Tensor | None,
    ) -> None:
        self.f, self.q, self.k = f, q, k
        self.key_errors, self.value_errors = key_errors, value_errors
        n, width = v.shape
        visible = f.visible_keys(n)
        self.visible = torch.ones(n, n, dtype=torch.bool) if visible is None else visible
        self.bias = None if f.score_bias is None else f.score_bias[h if len(f.score_bias) > 1 else 0]
        self.sink = None if f.sinks is None else f.sinks[h]
        eye = torch.eye(width, dtype=torch.float64)
        self.output = eye if f.output is None else f.output[:, h * width : (h + 1) * width]
        self.norm = spectral_norm_above(self.output)
        v = v if self.sink is None else pad(v, (0, 0, 0, 1))
        # Products with this factor are not shorter than with the output matrix.
        self.values = known_to(v) @ known_to(shrink(self.output)).mT

    def changes(self) -> Float64[Tensor, " n"]:
        n = len(self.q)
        return torch.cat([self._changes(rows) for rows in row_blocks(n, n * self.values.shape[1])])

    def _changes(self, rows: slice) -> Float64[Tensor, " rows"]:
        raw = self.f.scale * (known_to(self.q[rows]) @ known_to(self.k).mT)
        P, visible = self._weights(rows, raw)
        low = (plain(P) - entries_of(P)).clamp_min(0.0)
        high = (plain(P) + entries_of(P)).clamp_max(1.0)
        found = torch.zeros(len(high), dtype=torch.float64)
        if self.key_errors is not None:
            tau = self._score_changes(rows, raw)
            # A lower bound on Σ_j P_ij e^{−τ_ij}, and zero where underflow would not be negligible.
            fallen = low * torch.exp(-tau) * (tau.amax(dim=1, keepdim=True) < _MOST_TAU)
            lowest = fallen.sum(dim=1) / STEP
            found = self._by_keys(P, visible, low, high, tau, lowest)
            # From here on, upper bounds on the weights after the scores have changed.
            others = (lowest[:, None] - fallen * STEP).clamp_min(0.0)
            risen = high * torch.exp(tau.clamp_max(_MOST_TAU)) * STEP
            high = torch.where(others > 0, risen / (risen + others), 1.0).masked_fill(~visible, 0.0)
        return found if self.value_errors is None else found + self._by_values(high[:, : len(self.q)])

    def _weights(self, rows: slice, raw: Tensor) -> tuple[Float64[Tensor, "rows keys"], Tensor]:
        scores, visible, cap = raw, self.visible[rows], self.f.softcap
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        if self.bias is not None:
            scores = scores + known_to(self.bias[rows])
        if self.sink is not None:
            scores = torch.cat((scores, known_to(self.sink.expand(len(scores), 1))), dim=1)
            visible = pad(visible, (0, 1), value=True)
        return torch.softmax(scores.masked_fill(~visible, -torch.inf), 1), visible

    def _score_changes(self, rows: slice, raw: Tensor) -> Float64[Tensor, "rows keys"]:
        q, errors, cap = self.q[rows], self.key_errors, self.f.softcap
        assert errors is not None
        tau = torch.linalg.vector_norm(q, dim=1)[:, None] * _norms(errors)
        if errors.ndim == 2:
            tau = torch.minimum(tau, q.abs() @ errors.mT)
        tau = abs(self.f.scale) * tau * STEP
        if cap is not None:
            # The cap's slope is largest at the score nearest to zero, and no capped score exceeds the cap.
            nearest = (plain(raw).abs() - entries_of(raw) - tau).clamp_min(0.0)
            tau = (tau * cap_slope(nearest, cap) * STEP).clamp_max(2 * cap)
        return tau if self.sink is None else pad(tau, (0, 1))

    def _by_keys(
        self, P: Tensor, visible: Tensor, low: Tensor, high: Tensor, tau: Tensor, lowest: Tensor
    ) -> Float64[Tensor, " rows"]:
        """Bound the change of the output of this head if each score changes by at most ``tau``.

        The result is the smallest of three bounds: by the triangle inequality, by a covariance of the values,
        and by the distance of the values from the output. ``low`` and ``high`` are bounds on the weights P.
        """
        means = P @ self.values
        z = plain(self.values) - plain(means)[:, None]
        # The computed differences z of values and outputs have errors of at most ``lost`` in norm.
        lost = _norms(entries_of(self.values)) + _norms(entries_of(means))[:, None]
        distances = (torch.linalg.vector_norm(z, dim=-1) + lost) * STEP
        hull = distances.masked_fill(~visible, 0.0).amax(dim=1)
        tau = torch.where((lowest > 0)[:, None], tau, 0.0)
        triangle = _largest_ratio(low, high, distances, tau, lowest)
        grown = high * torch.expm1(tau) * STEP
        covariance = (grown[..., None] * z).mT @ z
        spread = grown.sum(dim=1) * largest_eigenvalues_by_squaring(covariance, squarings=2)
        spread = (spread.sqrt() + (grown * lost).sum(dim=1)) / lowest
        found = torch.where(lowest > 0, torch.minimum(torch.minimum(triangle, spread), hull), hull)
        return found * STEP

    def _by_values(self, weights: Float64[Tensor, "rows n"]) -> Float64[Tensor, " rows"]:
        errors = self.value_errors
        assert errors is not None
        found = self.norm * (weights @ _norms(errors))
        if errors.ndim == 2:
            mean = weights @ errors
            found = torch.minimum(found, self.norm * torch.linalg.vector_norm(mean, dim=1))
            found = torch.minimum(found, torch.linalg.vector_norm(mean @ self.output.abs().mT, dim=1))
        return found * STEP


def _norms(errors: Tensor) -> Float64[Tensor, " n"]:
    """Return limits on the norms of errors, given limits on their norms (n,) or on their entries (n, dim)."""
    return errors if errors.ndim == 1 else torch.linalg.vector_norm(errors, dim=-1) * STEP


def _largest_ratio(
    low: Float64[Tensor, "rows keys"],
    high: Float64[Tensor, "rows keys"],
    distances: Float64[Tensor, "rows keys"],
    tau: Float64[Tensor, "rows keys"],
    lowest: Float64[Tensor, " rows"],
) -> Float64[Tensor, " rows"]:
    """Bound the change of each attention output if no attention score changes by more than its entry in
    ``tau``.

    For each row the bound is max Σ_j P_j |e_j − 1| r_j / Σ_j P_j e_j over e^{−τ_j} ≤ e_j ≤ e^{τ_j}, with
    attention weights P_j and distances r_j. The maximum λ solves max_e Σ_j P_j (|e_j − 1| r_j − λ e_j) = 0,
    and the left side is largest at one of the two ends for each j. Dinkelbach's iteration approaches λ from
    below; its last residual, divided by the smallest denominator, is added.
    """
    rise, fall = torch.expm1(tau), -torch.expm1(-tau)
    above, below = high * rise * distances, high * fall * distances  # terms of the numerator at the ends
    most, least = low * (1 + rise), low * (1 - fall)  # and of the denominator
    ratio = torch.zeros(len(low), 1, dtype=torch.float64)
    for _ in range(_STEPS):
        rises = above - ratio * most >= below - ratio * least
        denominator = torch.where(rises, most, least).sum(dim=1, keepdim=True)
        ratio = torch.where(rises, above, below).sum(dim=1, keepdim=True) / denominator
        ratio = torch.where(denominator > 0, ratio, 0.0)
    residual = torch.maximum(above - ratio * most, below - ratio * least).sum(dim=1)
    cancelled = gamma(low.shape[1] + 20) * (above + ratio * most).sum(dim=1)
    return ratio[:, 0] * STEP + (residual.clamp_min(0.0) + cancelled) / lowest
