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
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import Compose, LayerNorm, LayerScale, Residual, RMSNorm, SelfAttention, TokenMap
from howsmooth.jacobian.centred_queries_keys_values import Operands
from howsmooth.jacobian.key_value_moments import Moments
from howsmooth.rounding import LOST, MatrixNorms, U, above, gamma, up
from howsmooth.spectral.operator import ProductError

__all__ = [
    "attention_error",
    "composed_error",
    "image_off",
    "norm_error",
    "provable",
    "residual_error",
    "scale_error",
]

# Largest relative error for which the bounds hold; for a larger error they are infinite.
_LARGEST = 0.1
# Smallest positive float64 number: a number that underflows has an error of at most half of it.
_SMALLEST = 2.0**-1074
# A probability below e^-760 is zero in float64.
_NEGLIGIBLE = 760.0

Off = Float[Tensor, "batch n"]
"""Upper bound of the distance of each computed token from its exact value."""


def provable(f: TokenMap) -> bool:
    """Return True if proved bounds on the rounding errors of the Jacobian of the map ``f`` are available.

    They are available for all maps with a closed form, except StagedAttention.
    """
    match f:
        case Residual():
            return provable(f.inner)
        case Compose():
            return provable(f.outer) and provable(f.inner)
        case _:
            return isinstance(f, SelfAttention | LayerNorm | RMSNorm | LayerScale)


# ---- parts that act on tokens one by one, and what is made of parts


def norm_error(f: LayerNorm | RMSNorm, x: Float[Tensor, "batch n d"], off: Off) -> ProductError:
    """Return bounds on the rounding errors of products with the Jacobian of LayerNorm or RMSNorm.

    The tokens ``x`` are known up to errors of at most ``off``.
    """
    slope, turned = _norm_slopes(f, x, off)
    bounds = (slope * turned, slope * (3 * gamma(f.d + 8)), slope * (1 + turned))
    return ProductError(*(_covered(t, turned).amax(dim=1).cpu() for t in bounds))


def _norm_slopes(f: LayerNorm | RMSNorm, x: Tensor, off: Off) -> tuple[Off, Off]:
    """Return, for each token, a bound on the norm of the Jacobian of a norm layer, and a bound on the
    relative error of this Jacobian.

    The first bound is (√d/s) max|γ|, where γ are the gains.
    """
    s = f.direction_and_length(x)[1].squeeze(-1)
    moved = off + _centring(f, x)
    # Relative error of s; that of h/s is as large. The last term is for squares of entries that underflow.
    length = moved / s + gamma(f.d + 8) + f.d * _SMALLEST / s.square()
    gain = float(f.weight.abs().amax())
    return math.sqrt(f.d) * gain / s, 6 * length


def _centring(f: LayerNorm | RMSNorm, x: Tensor) -> Off:
    """Return a bound on the rounding error of subtracting the mean of each token in LayerNorm, and zero for
    RMSNorm.
    """
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
    """Return a bound on the error of each token of the output f(x), which is computed in float64 from tokens
    that are wrong by at most ``off``.

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
            return _Attention(f, x, off, Operands.of_tokens(f, x), norms).image_off()
    raise AssertionError(type(f))  # pragma: no cover - closed forms only


def _covered(error: Tensor, relative: Tensor) -> Tensor:
    """Round up an error bound so that it covers terms of higher order; return infinity where the relative
    error exceeds 0.1.

    For a ``relative`` error above 0.1 the analysis does not hold.
    """
    return torch.where(relative < _LARGEST, up(error * (1 + 4 * relative)), math.inf)


# ---- attention


def attention_error(
    f: SelfAttention,
    x: Float[Tensor, "batch n d"],
    off: Off,
    operands: Operands,
    moments: Moments,
    mean: Float[Tensor, "b m value_dim"],
    norms: MatrixNorms,
) -> ProductError:
    """Return bounds on the rounding errors of products with the Jacobian of an attention layer.

    Parameters
    ----------
    f, x
        The layer in float64, and the computed tokens.
    off
        Upper bound of the error of each token.
    operands, moments, mean
        Queries, keys and values; moments under P; and the outputs, shifted as the values are.
    norms
        Norms of the layer's matrices.

    """
    return _Attention(f, x, off, operands, norms).product_error(moments, mean)


@dataclass(frozen=True)
class _Rows:
    """Bounds on the rounding errors of the queries, keys or values of each token and of their derivative with
    respect to the tokens.

    Parameters
    ----------
    off
        Bound of the error of each row.
    size
        Bound of the norm of the derivative, for each key head.
    slip
        Bound of the rounding error of a product with the derivative, divided by the length of the tangent.
    model
        Bound of the error of the derivative itself, in the spectral norm; zero unless there is a norm layer.
    """

    off: Float[Tensor, "batch kv_heads *rows"]
    size: Float[Tensor, "batch kv_heads"]
    slip: Float[Tensor, "batch kv_heads"]
    model: Float[Tensor, "batch kv_heads"]


class _Attention:
    """Bounds on the rounding errors of one attention layer and of its Jacobian at given tokens."""

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
        """Bounds on the rounding errors of the scaled queries of an attention layer."""
        f = self.f
        scale = abs(f.scale)
        grouped = f.query.reshape(f.kv_heads, -1, f.d)
        off = scale * self._projected(f.query, f.query_bias, self.off, self.length)
        size = scale * self.norms.spectral(grouped).expand(self.batch, -1)
        slip = scale * self.rounding * self.norms.absolute(grouped).expand(self.batch, -1)
        model = torch.zeros_like(size)
        if f.query_norm is not None:
            raw = self._projected(f.query, f.query_bias, self.off, self.length)
            off, size, slip, model = self._normed(f.query_norm, f.query, f.query_bias, raw, size, slip, scale)
            off = scale * off
        turn = _turn(f)
        off = turn * off.unflatten(1, (f.kv_heads, -1))
        return _Rows(off, turn * size, turn * (slip + gamma(8) * size), turn * model)

    def keys(self, *, shifted: bool) -> _Rows:
        """Return bounds on the rounding errors of the keys of an attention layer, from which their mean is
        subtracted if ``shifted`` is True.
        """
        f = self.f
        size = self.norms.spectral(f.key).expand(self.batch, -1)
        slip = self.rounding * self.norms.absolute(f.key).expand(self.batch, -1)
        model = torch.zeros_like(size)
        if f.key_norm is None and f.rotary is None and shifted and f.softcap is None:
            off = self._projected(f.key, None, self.off + 2 * U * self.centred, self.centred)
            return _Rows(off, size, slip, model)
        # Unshifted keys may be the sum of the shift and the shifted keys, whose lengths both count.
        off = self._projected(f.key, f.key_bias, self.off, self.length + self.centred + self.mean_length)
        if f.key_norm is not None:
            off, size, slip, model = self._normed(f.key_norm, f.key, f.key_bias, off, size, slip, 1.0)
        turn = _turn(f)
        off = turn * off + 4 * U * torch.linalg.vector_norm(self.at.whole_keys, dim=-1)
        return _Rows(off, turn * size, turn * (slip + gamma(8) * size), turn * model)

    def values(self, *, shifted: bool) -> _Rows:
        """Return bounds on the rounding errors of the values of an attention layer, from which their mean is
        subtracted if ``shifted`` is True.
        """
        f = self.f
        size = self.norms.spectral(f.value).expand(self.batch, -1)
        slip = self.rounding * self.norms.absolute(f.value).expand(self.batch, -1)
        if shifted:
            off = self._projected(f.value, None, self.off + 2 * U * self.centred, self.centred)
        else:
            off = self._projected(f.value, f.value_bias, self.off, self.length)
        return _Rows(off, size, slip, torch.zeros_like(size))

    def _projected(
        self, weight: Tensor, bias: Tensor | None, off: Tensor, length: Tensor
    ) -> Float[Tensor, "batch heads n"]:
        """Return a bound on the rounding error of W x + b for each head and token x, where W is ``weight``
        and b is ``bias``.

        ``off`` bounds the error of each token x, and ``length`` its length.
        """
        beside = torch.zeros_like(weight[:, 0, 0]) if bias is None else bias.norm(dim=-1)
        summed = self.norms.absolute(weight)[:, None] * length[:, None] + beside[:, None]
        return self.norms.spectral(weight)[:, None] * off[:, None] + self.rounding * summed

    def _normed(
        self,
        norm: LayerNorm | RMSNorm,
        weight: Tensor,
        bias: Tensor | None,
        off: Tensor,
        size: Tensor,
        slip: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return bounds on the rounding errors of queries or keys after their norm layer.

        They are ``off``, ``size``, ``slip`` and ``model`` of :class:`_Rows`.

        The norm layer is over each head, or over all heads side by side. ``off``, ``size`` and ``slip`` are
        the bounds before it; ``scale`` multiplies the tangents.
        """
        heads, dim, _ = weight.shape
        raw = self.x @ weight.flatten(0, 1).mT
        if bias is not None:
            raw = raw + bias.flatten()
        if norm.d == dim:
            raw, rows = raw.unflatten(-1, (heads, dim)).flatten(1, 2), off.transpose(1, 2).flatten(1, 2)
        else:
            rows = off.square().sum(dim=1).sqrt()
            whole = weight.reshape(1, -1, weight.shape[-1])
            size = scale * self.norms.spectral(whole).expand_as(size)
            slip = scale * (self.rounding * self.norms.absolute(whole)).expand_as(slip)
        of_norm = norm_error(norm, raw, rows)
        after = image_off(norm, raw, rows, self.norms)
        after = after.view(self.batch, self.n, -1).transpose(1, 2).expand(-1, heads, -1)
        factor, lost, model = (
            t.to(size.device)[:, None] for t in (of_norm.size, of_norm.rounding, of_norm.model)
        )
        return after, factor * size, factor * slip + lost * (size + slip), model * size

    # ---- probabilities

    def score_off(self) -> Float[Tensor, "batch kv_heads group n"]:
        """Return a bound on the rounding error of the attention scores of each query.

        Scores of negligible probability are left out.
        """
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
        """Return the largest absolute score bias of each query.

        Keys of negligible probability are left out.

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
        """Return a bound on the error of each output token of an attention layer, which is computed in
        float64 from inexact tokens.
        """
        f, at = self.f, self.at
        relative = torch.expm1(2 * (self.score_off() + self._unshifted())) + gamma(self.n + 30)
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

    def _unshifted(self) -> Tensor:
        """Return a bound on the additional rounding errors of the scores if the mean of the keys is not
        subtracted.

        They add to the errors of :meth:`score_off`. The map itself forms scores from uncentred keys, but
        its Jacobian does not.
        """
        keys = self.keys(shifted=False).off.amax(dim=-1)[..., None, None]
        shift = torch.linalg.vector_norm(self.at.key_shift, dim=-1)[..., None]
        q = torch.linalg.vector_norm(self.at.q, dim=-1)
        found: Tensor = q * keys + (self.queries.off + gamma(self.f.key_dim + 12) * q) * (shift + keys)
        return found

    def product_error(self, moments: Moments, mean: Float[Tensor, "b m value_dim"]) -> ProductError:
        """Return bounds on the rounding errors of products with the Jacobian of an attention layer.

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
        """Return a bound on the rounding error of W x̄ + b, the projection of the mean token x̄.

        The mean token itself counts as exact, because any vector may serve as the shift.
        """
        none = torch.zeros_like(self.mean_length)
        return self._projected(weight, bias, none, self.mean_length).flatten(0, 1)


def _turn(f: SelfAttention) -> float:
    """Return an upper bound, at least 1, on the spectral norms of the rotations of rotary position
    embeddings.
    """
    if f.rotary is None:
        return 1.0
    half = f.rotary.rot_dim // 2
    squares = f.rotary.cos.square() + f.rotary.sin.square()
    return above(max(1.0, math.sqrt(float((squares[:, :half] + squares[:, half:]).amax()))), 4)


def _longest(rows: Tensor) -> Float[Tensor, " b"]:
    """Return, for each sequence and key head, the largest norm of a row of the tensor ``rows`` (batch,
    kv_heads, …, dim).
    """
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1).flatten(0, 1).flatten(1)
    return lengths.amax(dim=-1)
