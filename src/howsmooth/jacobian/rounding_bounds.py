"""Proved bounds on the rounding errors of Jacobians in closed form and of their products in float64.

The bounds follow a map from its tokens on, part by part. At each part, ``off`` bounds the distance of each
computed token from its exact value. The part's Jacobian is formed at the computed tokens and compared with
the exact Jacobian at the exact tokens; then its products round. Both errors are bounded in the spectral norm,
by norms of matrices and by moments under the attention probabilities, so nothing of the size of a Jacobian is
formed. Each bound is of first order in the errors, times a factor that covers the higher orders. The
derivation is on the documentation page "Rounding, proved".

The tensors of ``howsmooth.rounding`` that carry their own errors would follow the map as well. But they bound
one sequence, not a batch, and the errors of n × n weights cost three products where these formulas take norms
of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import Compose, LayerNorm, LayerScale, Residual, RMSNorm, SelfAttention, TokenMap
from howsmooth.attention.multi_head_projections import in_heads
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.key_value_moments import Deviations
from howsmooth.rounding import LOST, MatrixNorms, U, above, gamma, up
from howsmooth.spectral.operator import ProductError

__all__ = ["AttentionRounding", "composed_error", "image_off", "norm_error", "residual_error", "scale_error"]

# Largest relative error for which the bounds hold; for a larger error they are infinite.
_LARGEST = 0.1
# Smallest positive float64 number: a number that underflows has an error of at most half of it.
_SMALLEST = 2.0**-1074
# A probability below e^-760 is zero in float64.
_NEGLIGIBLE = 760.0

_Norm = LayerNorm | RMSNorm

Off = Float[Tensor, "batch n"]
"""Upper bound of the distance of each computed token from its exact value."""


# ---- parts that act on tokens one by one, and what is made of parts


def norm_error(f: _Norm, x: Float[Tensor, "batch n d"], off: Off) -> ProductError:
    """Return bounds on the rounding errors of products with the Jacobian of LayerNorm or RMSNorm.

    The tokens ``x`` are known up to errors of at most ``off``.
    """
    slope, turned = _norm_slopes(f, x, off)
    bounds = (slope * turned, slope * (3 * gamma(f.d + 8)), slope * (1 + turned))
    return ProductError(*(_covered(t, turned).amax(dim=1).cpu() for t in bounds))


def _norm_slopes(f: _Norm, x: Tensor, off: Off) -> tuple[Off, Off]:
    """Bound (√d/s) max|γ|, the norm of a norm layer's derivative, and the derivative's relative error."""
    s = f.direction_and_length(x)[1].squeeze(-1)
    moved = off + _centring(f, x)
    # Relative error of s; that of h/s is as large. The last term is for squares of entries that underflow.
    length = moved / s + gamma(f.d + 8) + f.d * _SMALLEST / s.square()
    gain = float(f.weight.abs().amax())
    return math.sqrt(f.d) * gain / s, 6 * length


def _centring(f: _Norm, x: Tensor) -> Off:
    """Return a bound on the rounding error of the mean that LayerNorm subtracts. It is zero for RMSNorm."""
    size: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return gamma(f.d + 4) * size if f.centred else torch.zeros_like(size)


def scale_error(weight: Float[Tensor, " d"], batch: int) -> ProductError:
    """Return bounds on the rounding errors of products with the Jacobian of a layer scale."""
    size = weight.abs().amax().cpu().expand(batch)
    return ProductError(torch.zeros_like(size), U * size, size)


def residual_error(inner: ProductError) -> ProductError:
    """Return bounds on the rounding errors of products with the Jacobian I + J of a residual connection,
    given the bounds ``inner`` for J.
    """
    size = up(1 + inner.size)
    return ProductError(inner.model, up(inner.rounding + 2 * U * (size + inner.rounding)), size)


def composed_error(outer: ProductError, inner: ProductError) -> ProductError:
    """Return bounds on the rounding errors of products with the Jacobian of a composition of two maps, given
    the bounds for each map.
    """
    model = outer.model * inner.size + outer.size * inner.model
    # The bound holds for both orders of the factors, as the adjoint applies them in the other order.
    rounding = outer.rounding * inner.size + outer.size * inner.rounding + 2 * outer.rounding * inner.rounding
    return ProductError(up(model), up(rounding), up(outer.size * inner.size))


def image_off(
    f: TokenMap, x: Float[Tensor, "batch n d"], off: Off, norms: MatrixNorms, image: Tensor | None = None
) -> Off:
    """Return a bound on the error of each token of the output f(x). The output is computed in float64 from
    tokens whose errors are at most ``off``.

    ``image`` is the computed f(x), if the caller has it.
    """
    match f:
        case LayerNorm() | RMSNorm():
            slope, turned = _norm_slopes(f, x, off)
            size = math.sqrt(f.d) * f.weight.abs().amax() + (0.0 if f.bias is None else f.bias.norm())
            # Twice the slope and the rounding, so that the bound covers the rotation and the scale that
            # follow a norm of queries or keys.
            found = 2 * slope * (off + _centring(f, x)) + 2 * gamma(f.d + 12) * size
            return _covered(found, turned)
        case LayerScale():
            largest: Tensor = f.weight.abs().amax()
            length: Tensor = torch.linalg.vector_norm(x, dim=-1)
            return up(largest * (off + U * length))
        case Residual():
            length = torch.linalg.vector_norm(f._forward(x) if image is None else image, dim=-1)
            return up(off + image_off(f.inner, x, off, norms) + 2 * U * length)
        case Compose():
            middle = f.inner._forward(x)
            return image_off(f.outer, middle, image_off(f.inner, x, off, norms, middle), norms)
        case SelfAttention():
            return AttentionRounding(f, x, off, Operands.of_tokens(f, x), norms).image_off()
    raise AssertionError(type(f))  # pragma: no cover - closed forms only


def _covered(error: Tensor, relative: Tensor) -> Tensor:
    """Round up so that terms of higher order are covered; infinite where the analysis does not hold."""
    return torch.where(relative < _LARGEST, up(error * (1 + 4 * relative)), math.inf)


# ---- attention


@dataclass(frozen=True)
class _Rows:
    """Bounds on the errors of each token's queries, keys or values, and of their derivative."""

    off: Float[Tensor, "batch *rows"]  # of the error of each row
    size: Float[Tensor, "batch kv_heads"]  # of the norm of the derivative
    slip: Float[Tensor, "batch kv_heads"]  # of the rounding of its product with a tangent of length one
    model: Float[Tensor, "batch kv_heads"]  # of its own error in the spectral norm; zero without a norm

    def times(self, factor: float) -> _Rows:
        slip = self.slip + gamma(8) * self.size
        return _Rows(factor * self.off, factor * self.size, factor * slip, factor * self.model)


class AttentionRounding:
    """Bounds on the rounding errors of a float64 attention layer and of its Jacobian at inexact tokens."""

    def __init__(self, f: SelfAttention, x: Tensor, off: Off, operands: Operands, norms: MatrixNorms) -> None:
        self.f = f
        self.x = x
        self.off = off
        self.at = operands
        self.norms = norms
        norms.learn(f.query.reshape(f.kv_heads, -1, f.d), f.key, f.value)
        self.batch, self.n = x.shape[:2]
        # Relative rounding error of a product with a projection or its adjoint, by its longest sum.
        rows = f.heads * (f.key_dim + f.value_dim) + f.kv_heads * (f.key_dim + f.value_dim)
        self.rounding = 2 * gamma(max(f.d, f.d_out, rows) + 6)  # doubled for rotations and scales
        length = torch.linalg.vector_norm(x, dim=-1)
        self.length = length
        self.centred = torch.linalg.vector_norm(x - x.mean(dim=-2, keepdim=True), dim=-1)
        self.mean_length = torch.linalg.vector_norm(x.mean(dim=-2), dim=-1)[:, None]

    # ---- rows of queries, keys and values

    @cached_property
    def queries(self) -> _Rows:
        """Bounds on the rounding errors of the scaled queries."""
        f = self.f
        rows = self._rows(f.query, f.query_bias, f.query_norm, self.off, self.length)
        rows = rows.times(_turn(f) * abs(f.scale))
        return replace(rows, off=rows.off.unflatten(1, (f.kv_heads, -1)))

    def keys(self, *, shifted: bool) -> _Rows:
        """Return bounds on the rounding errors of keys or, if ``shifted``, of keys minus their mean."""
        f = self.f
        if f.key_norm is None and f.rotary is None and shifted and f.softcap is None:
            return self._centred(f.key)
        # Unshifted keys may be the sum of the shift and the shifted keys, whose lengths both count.
        longest = self.length + self.centred + self.mean_length
        rows = self._rows(f.key, f.key_bias, f.key_norm, self.off, longest).times(_turn(f))
        return replace(rows, off=rows.off + 4 * U * torch.linalg.vector_norm(self.at.whole_keys, dim=-1))

    def values(self, *, shifted: bool) -> _Rows:
        """Return bounds on the rounding errors of values or, if ``shifted``, of values minus their mean."""
        if shifted:
            return self._centred(self.f.value)
        return self._rows(self.f.value, self.f.value_bias, None, self.off, self.length)

    def _centred(self, weight: Tensor) -> _Rows:
        return self._rows(weight, None, None, self.off + 2 * U * self.centred, self.centred)

    def _rows(
        self, weight: Tensor, bias: Tensor | None, norm: _Norm | None, off: Tensor, length: Tensor
    ) -> _Rows:
        """Bound the rounding errors of W x + b, followed by ``norm`` if it is given, for each head and token
        x. Rotations and scales are left out; ``off`` and ``length`` are as in :meth:`_projected`.
        """
        heads, dim, d = weight.shape
        grouped = weight.reshape(self.f.kv_heads, -1, d)
        off = self._projected(weight, bias, off, length)
        if norm is not None and norm.d != dim:  # over all heads side by side
            grouped = weight.reshape(1, -1, d)
        size, slip = (
            bound.expand(self.batch, self.f.kv_heads)
            for bound in (self.norms.spectral(grouped), self.rounding * self.norms.absolute(grouped))
        )
        if norm is None:
            return _Rows(off, size, slip, torch.zeros_like(size))
        raw = in_heads(self.x, weight, bias).movedim(-3, -2).reshape(self.batch, -1, norm.d)
        rows = off.transpose(1, 2).flatten(1, 2) if norm.d == dim else off.square().sum(dim=1).sqrt()
        of_norm = norm_error(norm, raw, rows)
        after = image_off(norm, raw, rows, self.norms).view(self.batch, self.n, -1).transpose(1, 2)
        factor, lost, model = (
            t.to(size.device)[:, None] for t in (of_norm.size, of_norm.rounding, of_norm.model)
        )
        after = after.expand(-1, heads, -1)
        return _Rows(after, factor * size, factor * slip + lost * (size + slip), model * size)

    def _projected(
        self, weight: Tensor, bias: Tensor | None, off: Tensor, length: Tensor
    ) -> Float[Tensor, "batch heads n"]:
        """Bound the error of W x + b. ``off`` bounds that of each token x, and ``length`` its length."""
        beside = torch.zeros_like(weight[:, 0, 0]) if bias is None else bias.norm(dim=-1)
        summed = self.norms.absolute(weight)[:, None] * length[:, None] + beside[:, None]
        return self.norms.spectral(weight)[:, None] * off[:, None] + self.rounding * summed

    # ---- probabilities

    def score_off(self) -> Float[Tensor, "batch kv_heads group n"]:
        """Return a bound on the rounding errors of each query's scores of non-negligible probability."""
        f, at = self.f, self.at
        q, keys = torch.linalg.vector_norm(at.q, dim=-1), self.keys(shifted=f.sinks is None)
        longest = torch.linalg.vector_norm(at.score_keys, dim=-1).amax(dim=-1)[..., None, None]
        off = keys.off.amax(dim=-1)[..., None, None]
        moved = self.queries.off
        found: Tensor = moved * (longest + off) + q * off + gamma(f.key_dim + 30) * q * longest
        added = torch.zeros_like(found[:1, :, :, :1])
        if f.score_bias is not None:
            added = added + self._largest_bias(2 * float((q * longest).amax()) + _NEGLIGIBLE)
        if f.sinks is not None:
            added = added + f.sinks.abs().unflatten(0, (f.kv_heads, -1))[..., None]
        return up(found + gamma(12) * added)

    def _largest_bias(self, reach: float) -> Tensor:
        """Return the largest absolute score bias of each query over keys of non-negligible probability.

        ``reach`` bounds the difference of two scores of a row without bias, plus the range of exponents.
        """
        f = self.f
        assert f.score_bias is not None
        bias, visible = f.score_bias, f.visible_keys(self.n)
        if visible is not None:
            bias = bias.masked_fill(~visible, -math.inf)
        near = bias >= bias.amax(dim=-1, keepdim=True) - reach
        largest = f.score_bias.abs().masked_fill(~near, 0.0).amax(dim=-1).expand(f.heads, -1)
        grouped: Tensor = largest.unflatten(0, (f.kv_heads, -1))
        return grouped

    # ---- the bounds

    def image_off(self) -> Off:
        """Return a bound on the float64 error of each output token, computed from inexact tokens."""
        f, at = self.f, self.at
        # The map itself forms scores from keys with their mean, but its Jacobian does not.
        keys = self.keys(shifted=False).off.amax(dim=-1)[..., None, None]
        shift = torch.linalg.vector_norm(at.key_shift, dim=-1)[..., None]
        q = torch.linalg.vector_norm(at.q, dim=-1)
        unshifted = q * keys + (self.queries.off + gamma(f.key_dim + 12) * q) * (shift + keys)
        relative = torch.expm1(2 * (self.score_off() + unshifted)) + gamma(self.n + 30)
        rows = self.values(shifted=False)
        largest = torch.linalg.vector_norm(at.whole_values, dim=-1).amax(dim=-1)[..., None, None]
        spread = 2 * torch.linalg.vector_norm(at.v, dim=-1).amax(dim=-1)[..., None, None]
        if f.sinks is not None:
            spread = spread + largest
        off = rows.off.amax(dim=-1)[..., None, None]
        heads = relative * spread + off + gamma(self.n + 12) * (largest + off)
        heads = heads.flatten(1, 2).square().sum(dim=1).sqrt()
        if f.output is not None:
            whole = math.sqrt(f.heads) * largest.amax(dim=1)[:, 0]
            summed = self.norms.absolute(f.output) * whole
            summed = summed + (0.0 if f.output_bias is None else f.output_bias.norm())
            heads = self.norms.spectral(f.output) * heads + self.rounding * summed
        return _covered(heads, relative.flatten(1, 2).amax(dim=1))

    def product_error(self, moments: Deviations, mean: Float[Tensor, "b m value_dim"]) -> ProductError:
        """Return bounds on the rounding errors of products with the Jacobian of the layer. ``mean`` are the
        outputs of the heads, minus the shift of the values.

        The derivative is the sum of three maps: from the tangents of queries, of keys and of values. Each is
        bounded by moments of P for each key head, and then multiplied by the bounds of its projection.
        """
        f, at = self.f, self.at
        queries, keys, values = self.queries, self.keys(shifted=True), self.values(shifted=True)
        scores = self.score_off().flatten(0, 1).flatten(1)
        # Relative error of a probability: its score and its denominator may each be wrong by ``scores``.
        relative = torch.expm1(2 * scores) + gamma(self.n + 30)
        slope = relative
        if f.softcap is not None:
            largest = _longest(at.q) * _longest(at.k) / f.softcap
            slope = relative + torch.expm1(2 * scores / f.softcap) + gamma(30) * (1 + largest)[:, None]
        total, sink = moments.total, moments.sink
        root = total.sqrt()
        q = torch.linalg.vector_norm(at.q, dim=-1).flatten(0, 1).flatten(1)
        q_off = queries.off.flatten(0, 1).flatten(1)
        k, k_off = _longest(at.k)[:, None], keys.off.flatten(0, 1).amax(dim=-1)[:, None]
        v, v_off = _longest(at.v)[:, None], values.off.flatten(0, 1).amax(dim=-1)[:, None]
        m = torch.linalg.vector_norm(mean, dim=-1)
        summed = gamma(self.n + 12)
        if f.sinks is None:
            shift = shift_off = output = output_off = torch.zeros_like(m)
            key_shift = torch.zeros_like(k)
            mean_off = relative * moments.values + v_off + summed * v
        else:
            shift = at.value_shift.norm(dim=-1).flatten(0, 1)
            shift_off = self._shift_off(f.value, f.value_bias)
            key_shift = at.key_shift.norm(dim=-1).flatten(0, 1)
            k_off = k_off + self._shift_off(f.key, f.key_bias) + 4 * U * key_shift
            output = total * (v + shift)
            output_off = total * ((relative + summed) * (v + shift) + v_off + shift_off)
            mean_off = output_off + shift_off + 2 * U * (m + shift)
        away = v_off + mean_off  # error of v_j − O_i
        # Relative rounding error of the sums of products as they are computed, with Σ dS v and O Σ dS apart.
        made = gamma(max(self.n, q.shape[1]) + 2 * f.key_dim + f.value_dim + 30)
        # Error of Σ_j P_ij (v_j − O_i), which is zero in exact arithmetic. It multiplies the keys.
        rest = total * (4 * summed * (v + shift) + 2 * U * m) + summed * output
        norm = torch.linalg.vector_norm

        def heads(t: Tensor) -> Tensor:
            return up(t * (1 + slope.amax(dim=-1))).reshape(self.batch, f.kv_heads)

        # For the tangents of queries, keys and values: ``models`` bound the error of the derivative as a
        # matrix, ``losses`` the rounding of its products, and ``sizes`` its norm.
        of_q = slope * moments.values * moments.keys
        of_q = of_q + (root * away + sink.sqrt() * output_off) * moments.keys
        of_q = of_q + root * moments.values * k_off + rest * (k + key_shift)
        # Σ_j P_ij² |v_j − O_i|² is at most the largest weight times Σ_j P_ij |v_j − O_i|².
        moved = moments.squares.sqrt() * moments.values
        of_k = q * (slope * moved + moments.squares * away) + moved * q_off
        of_v = torch.minimum(2 * scores, relative * moments.squares) + summed * moments.squares
        models = (heads(of_q.amax(dim=-1)), heads(norm(of_k, dim=-1)), heads(norm(of_v, dim=-1)))
        losses = (
            heads(made * (total * k * (v + m) + sink * key_shift * output).amax(dim=-1)),
            heads(made * norm(q * moments.squares * (v + m), dim=-1)),
            heads(made * moments.spread),
        )
        sizes = (
            heads((moments.values * moments.keys).amax(dim=-1)),
            heads(norm(q * moved, dim=-1)),
            heads(moments.spread),
        )
        model = rounding = whole = torch.zeros_like(sizes[0])
        for rows, off, lost, size in zip((queries, keys, values), models, losses, sizes, strict=True):
            whole = whole + (size + off) * rows.size
            model = model + off * rows.size + (size + off) * rows.model
            rounding = rounding + lost * rows.size + (size + off + lost) * rows.slip
        model, rounding, whole = (norm(t, dim=-1) for t in (model, rounding, whole))
        if f.output is not None:
            size, slip = self.norms.spectral(f.output), self.rounding * self.norms.absolute(f.output)
            model, rounding, whole = size * model, size * rounding + slip * (whole + rounding), size * whole
        large = (1 + k.amax()) * (1 + v.amax()) * (1 + q.amax()) * (1 + whole)
        if bool(f.value.any()) and (f.output is None or bool(f.output.any())):
            # The lengths above miss squares that underflow, unless the layer is zero altogether.
            model, whole = (t + LOST * self.n * large for t in (model, whole))
        relative = slope.reshape(self.batch, -1).amax(dim=-1)
        return ProductError(*(_covered(t, relative).cpu() for t in (model, rounding, whole)))

    def _shift_off(self, weight: Tensor, bias: Tensor | None) -> Float[Tensor, "b 1"]:
        """Bound the error of W x̄ + b. Any vector may be the shift, so the mean x̄ itself counts as exact."""
        none = torch.zeros_like(self.mean_length)
        return self._projected(weight, bias, none, self.mean_length).flatten(0, 1)


def _turn(f: SelfAttention) -> float:
    """Return an upper bound, at least 1, on the spectral norms of the rotations of rotary positions."""
    if f.rotary is None:
        return 1.0
    half = f.rotary.rot_dim // 2
    squares = f.rotary.cos.square() + f.rotary.sin.square()
    return above(max(1.0, math.sqrt(float((squares[:, :half] + squares[:, half:]).amax()))), 4)


def _longest(rows: Tensor) -> Float[Tensor, " b"]:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1).flatten(0, 1).flatten(1)
    return lengths.amax(dim=-1)
