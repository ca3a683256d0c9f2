"""Bounds on the Taylor remainder of each layer on a ball, for the second-order expansion of the margin.

There is one class for each kind of stage. The displacement of a token at the input of a stage is Δ = G δ + e,
|δ| ≤ ε, e in an ellipsoid. A remainder is made once for all ε. It then turns ε and the ellipsoids (n, d, d)
of e into two things: ``shape``, ellipsoids that contain R_j for each token j of the output, R = F(X + Δ) −
F(X) − DF Δ; and ``margin``, a bound on |½ eᵀ M e + a · (R − ½ D²F[Δ, Δ])|, where a is the adjoint of the
output and M = a · D²F.

Proofs: documentation page "A proved radius for a whole network".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.ellipsoid_arithmetic import (
    balls,
    ellipsoid_image,
    ellipsoid_sum,
    enclosing,
    gram,
    half_widths,
    mixture,
    product,
    radii,
    weighted_images,
)
from howsmooth.bounds.radius.spectral_norm_bounds import spectral_norm, weighted_norm
from howsmooth.bounds.radius.transformer_layers import (
    Attention,
    FeedForward,
    GatedFeedForward,
    Map,
    Norm,
    Softmax,
)
from howsmooth.rounding import INFLATION
from howsmooth.rounding.rounded_tensor import lower, upper

# A displacement beyond this share of a token's length counts as the whole length.
NEARLY_ONE = 1 - 1e-6
# Bounds the rounding error of log(1 − t) and of what is subtracted from it, divided by t.
_CANCELLED = 2.0**-45

__all__ = [
    "NEARLY_ONE", "AttentionErrors", "AttentionRemainder", "FeedForwardRemainder",
    "GatedFeedForwardRemainder", "Left", "NormRemainder", "Reached", "TokenwiseRemainder", "gated_rest",
    "largest_weights", "mean_square", "norm_shape", "product_shape", "pulled_product", "remainder_of",
    "spread_shape", "value_covariance", "value_shapes",
]  # fmt: skip


class Left(NamedTuple):
    """Bounds on the Taylor remainder of one layer: ellipsoids that contain it, and its effect on
    the margin.
    """

    shape: Tensor
    margin: Tensor


def norm_shape(norm: Norm, bound: Tensor) -> Tensor:
    """Return for each token the ellipsoid of all vectors √d · gain ∘ w with |w| ≤ ``bound``, for the gain of
    a norm layer.
    """
    factor = norm.scaled(torch.eye(len(norm.gain), dtype=bound.dtype))
    return bound.square()[:, None, None] * enclosing(factor.square())


class NormRemainder:
    """Bounds on the Taylor remainder of a norm layer, for the second-order expansion of the margin.

    The relative displacement t = |Δh|/r of each token must be less than 1. R = √d gain ∘ w, |w| ≤ (2/√3)
    (−ln(1 − t) − t), and the part beyond the second order is at most |√d gain ∘ a| (3/2) (−ln(1 − t) − t −
    t²/2).
    """

    def __init__(self, norm: Norm, u: Tensor, tangents: Tensor, adjoint: Tensor) -> None:
        self.norm = norm
        self.r = lower(norm.direction_and_length(u)[1][:, 0]).clamp_min(0)
        self.size = spectral_norm(norm.centre(tangents))
        self.centre = norm.centre(torch.eye(u.shape[1], dtype=u.dtype)[None])[0]
        self.adjoint = torch.linalg.vector_norm(norm.scaled(adjoint), dim=1)

    def __call__(self, epsilon: float, errors: Tensor) -> Left:
        """Bound the Taylor remainder of the norm layer for all changes |δ| ≤ ``epsilon`` of the network's
        input, and for all errors of the layer's input in the ellipsoids ``errors``.

        The tokens at the layer's input change by G δ + e, where G is ``tangents`` and e an error. The bounds
        are infinite where a token could be displaced by its whole length.
        """
        e = radii(errors, self.centre) / self.r
        t = (epsilon * self.size / self.r + e) * INFLATION
        inside = t.clamp_max(NEARLY_ONE)
        # Where t is small, both differences are small beside their terms and their rounding errors.
        second = -torch.log1p(-inside) - inside + _CANCELLED * inside
        third = second - inside**2 / 2
        margin = self.adjoint * (1.5 * third + e**2 / math.sqrt(3))
        shape = norm_shape(self.norm, 2 / math.sqrt(3) * second)
        return Left(shape, torch.where(t < NEARLY_ONE, margin, torch.inf).sum())


class TokenwiseRemainder:
    """Bounds on the Taylor remainder of a layer that acts on each token separately, collected from bounds for
    the single tokens.

    The matrices of one token over all neurons fit into a processor's cache, the matrices of all tokens do
    not.
    """

    def __init__(self, each: Sequence[Callable[[float, Tensor], Left]]) -> None:
        self.each = each

    def __call__(self, epsilon: float, errors: Tensor) -> Left:
        """Bound the Taylor remainder of the layer for all changes |δ| ≤ ``epsilon`` of the network's input,
        and for all errors of the layer's input in the ellipsoids ``errors``, one for each token.
        """
        found = [one(epsilon, error[None]) for one, error in zip(self.each, errors, strict=True)]
        return Left(
            torch.cat([left.shape for left in found]), torch.stack([left.margin for left in found]).sum()
        )


class FeedForwardRemainder:
    """Bounds on the Taylor remainder of a feed-forward layer, computed neuron by neuron.

    The preactivations change by z = K δ + y, K = W₁ G, y = W₁ e. Each lies in an ellipsoid over the neurons,
    and a product of changes in the ellipsoid of the entrywise product of their matrices.
    """

    def __init__(self, layer: FeedForward, u: Tensor, tangents: Tensor, adjoint: Tensor) -> None:
        self.layer, self.z = layer, layer.preactivations(u)
        K = layer.up @ tangents
        square, k = K @ K.mT, K.shape[2]
        # δδᵀ is the sum of |δ|²/k times the identity and of a matrix of norm |δ|² √(1 − 1/k).
        trace = square.diagonal(dim1=1, dim2=2)
        trace = trace[:, :, None] * trace[:, None] / k
        bend, rest = layer.activation.derivative(2, self.z), (square * square - trace) * (1 - 1 / k)
        self.quadratic = ellipsoid_sum(
            *(weighted_images(layer.down, [(bend / 2, enclosing(part))]) for part in (trace / k, rest))
        )
        self.linear = gram(K)
        self.bend, self.twist = layer.activation.derivative(2, self.z), layer.activation.derivative(3, self.z)
        self.adjoint = adjoint @ layer.down

    def __call__(self, epsilon: float, errors: Tensor) -> Left:
        """Bound the Taylor remainder of the feed-forward layer for all changes |δ| ≤ ``epsilon`` of the
        network's input, and for all errors of the layer's input in the ellipsoids ``errors``.

        The tokens at the layer's input change by G δ + e, where G is ``tangents`` and e an error.
        """
        # Ellipsoid matrices are squares of lengths: ε² belongs to changes linear in δ, ε⁴ to quadratic ones.
        linear = epsilon**2 * self.linear
        y = enclosing(ellipsoid_image(self.layer.up, errors))
        z = ellipsoid_sum(linear, y)
        beyond = ((self.bend / 2, product(y, y)), (self.twist / 6, product(z, z, z)))
        change = z.diagonal(dim1=1, dim2=2).sqrt()
        fourth = self.layer.activation.beyond(3, self.z, change)
        crossed = (self.bend, product(linear, y))
        shape = product_shape(self.layer, (crossed, *beyond), fourth, epsilon**4 * self.quadratic)
        margin = (self.adjoint.abs() * fourth).sum(1)
        for factor, matrix in beyond:
            margin = margin + pulled_product(self.adjoint * factor, matrix)
        return Left(shape, upper(margin.sum()))


class GatedFeedForwardRemainder:
    """Bounds on the Taylor remainder of a gated feed-forward layer, computed neuron by neuron.

    With z and v changed by Δz = K δ + y and Δv, φ(z) v leaves out v (φ(z + Δz) − φ − φ' Δz) +
    Δv (φ(z + Δz) − φ). Each of the changes lies in an ellipsoid over the neurons.
    """

    def __init__(self, layer: GatedFeedForward, u: Tensor, tangents: Tensor, adjoint: Tensor) -> None:
        self.layer = layer
        self.z, self.v = layer.preactivations(u)
        dz, dv = layer.gate @ tangents, layer.up @ tangents
        self.linear, self.linear_v = gram(dz), gram(dv)
        self.bend, self.mixed = layer.bends(u)
        self.twist = layer.activation.derivative(3, self.z) * self.v
        self.twist_v = layer.activation.derivative(2, self.z)
        self.adjoint = adjoint @ layer.down

    def __call__(self, epsilon: float, errors: Tensor) -> Left:
        """Bound the Taylor remainder of the gated layer for all changes |δ| ≤ ``epsilon`` of the network's
        input, and for all errors of the layer's input in the ellipsoids ``errors``.

        The tokens at the layer's input change by G δ + e, where G is ``tangents`` and e an error.
        """
        layer = self.layer
        y, w = enclosing(ellipsoid_image(layer.gate, errors)), enclosing(ellipsoid_image(layer.up, errors))
        z, v = ellipsoid_sum(epsilon**2 * self.linear, y), ellipsoid_sum(epsilon**2 * self.linear_v, w)
        third = ((self.twist / 6, product(z, z, z)), (self.twist_v / 2, product(z, z, v)))
        rest = gated_rest(layer, self.z, self.v, z, v)
        shape = product_shape(
            layer, ((self.bend / 2, product(z, z)), (self.mixed, product(z, v)), *third), rest
        )
        margin = (self.adjoint.abs() * rest).sum(1)
        for factor, matrix in ((self.bend / 2, product(y, y)), (self.mixed, product(y, w)), *third):
            margin = margin + pulled_product(self.adjoint * factor, matrix)
        return Left(shape, upper(margin.sum()))


def gated_rest(layer: GatedFeedForward, z: Tensor, v: Tensor, dz: Tensor, dv: Tensor) -> Tensor:
    """Bound, for each neuron of a gated layer, the error of the third-order Taylor polynomial of its output
    φ(z) v.

    The changes of z and v lie in the ellipsoids ``dz`` and ``dv`` (n, m, m).
    """
    of_z, of_v = (shape.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt() for shape in (dz, dv))
    return upper(v.abs()) * layer.activation.beyond(3, z, of_z) + of_v * layer.activation.beyond(2, z, of_z)


def product_shape(
    layer: FeedForward | GatedFeedForward,
    products: tuple[tuple[Tensor, Tensor], ...],
    rest: Tensor,
    *outputs: Tensor,
) -> Tensor:
    """Return ellipsoids that contain the changes of a feed-forward layer's outputs, given ellipsoids of the
    changes in its neurons.

    The ellipsoids contain W₂ (Σ factor ∘ w + r) + v for w in ellipsoids (n, m, m), |r| ≤ ``rest`` entry by
    entry, and v in each of the ellipsoids ``outputs`` (n, d_out, d_out).
    """
    size = torch.linalg.vector_norm(rest, dim=1)
    beyond = size.square()[:, None, None] * gram(layer.down)
    return ellipsoid_sum(weighted_images(layer.down, products), beyond, *outputs)


def pulled_product(combination: Tensor, matrix: Tensor) -> Tensor:
    """Bound the inner product of a given vector with every point of an ellipsoid, for each of n tokens."""
    return half_widths(matrix, combination[:, None])[:, 0]


def mean_square(weights: Tensor, values: Tensor) -> Tensor:
    """Return for each query the root mean square of given values, weighted by its attention weights.

    ``values`` has the shape (heads, n) or (heads, rows, n).
    """
    if values.ndim == 2:
        return torch.einsum("hij,hj->hi", weights, values.square()).sqrt()
    return torch.einsum("hij,hij->hi", weights, values.square()).sqrt()


class Reached(NamedTuple):
    """Bounds on the changes of the queries, keys, scores and values of attention that errors of the tokens
    cause.

    ``query`` (H, rows) and ``each_key`` (H, n) bound the changes of queries and keys, ``key`` (H, rows) the
    root mean square of the latter, ``score`` (H, rows, n) the changes of centred scores, and ``pulled``
    (H, rows) the deviation of the values along the adjoint. ``value`` (H, rows, d_out, d_out) contains
    Cov(V e, x) for scores x of deviation 1.
    """

    query: Tensor
    each_key: Tensor
    key: Tensor
    score: Tensor
    pulled: Tensor
    value: Tensor


class AttentionErrors:
    """A function that bounds the effect of token errors, given as ellipsoids, in an attention layer."""

    def __init__(self, attention: Attention, own: Softmax, adjoint: Tensor) -> None:
        self.attention, self.weights = attention, largest_weights(attention, own)
        self.out = attention.output @ attention.value_weight
        w = torch.einsum("hoe,io->hie", attention.output, adjoint)
        self.by_key = torch.einsum("hie,hjed->hjid", own.q, attention.key_maps(own.k.shape[1]))
        self.by_value = torch.einsum("hie,hed->hid", w, attention.value_weight)
        keys = own.k[:, None] - torch.einsum("hij,hje->hie", own.weights, own.k)[:, :, None]
        self.by_query = torch.einsum("hije,hied->hijd", keys, attention.query_maps())

    def __call__(self, errors: Tensor) -> Reached:
        """Bound the effect of token errors on the queries, keys, scores and values of an attention layer.

        ``errors`` has one ellipsoid for each token.
        """
        P, attention, rows = self.weights, self.attention, errors[self.attention.rows]
        each_key = radii(errors, attention.key_maps(len(errors)))
        key = half_widths(errors, self.by_key).mT
        key = key + torch.einsum("hij,hij->hi", P, key)[..., None]
        value = half_widths(errors, self.by_value[:, None]).mT
        return Reached(
            query=radii(rows, attention.query_maps()),
            each_key=each_key,
            key=mean_square(P, each_key),
            score=key + half_widths(rows, self.by_query),
            pulled=mean_square(P, value),
            value=mixture(P, ellipsoid_image(self.out[:, None], errors)),
        )


def spread_shape(covariance: Tensor, factor: Tensor) -> Tensor:
    """Return ellipsoids that contain the covariances of values with scores of deviation at most ``factor``,
    given the ellipsoids for scores of deviation at most 1.

    The matrix of each ellipsoid is multiplied by the square of ``factor``.
    """
    return covariance * factor.square()[..., None, None]


class AttentionRemainder:
    """Bounds on the Taylor remainder of attention, computed for each query and each head.

    A score changes by t = ℓ + b, linear and bilinear. With h(s) = E_{P_s}[v + s dv], P_s ∝ P e^{st}, the
    remainder is Cov(v, b) + ∫ (1 − s) (2 Cov_s(dv, t) + κ_s(v + s dv, t, t)) ds, κ the third cumulant.
    P_s ≤ e^{sτ} P where τ bounds the centred scores, so that every moment is bounded by one at s = 0.
    """

    def __init__(self, attention: Attention, u: Tensor, tangents: Tensor, adjoint: Tensor) -> None:
        at = attention.softmax(u)
        P = largest_weights(attention, at)
        root = P.sqrt()
        self.weights, self.seen = P, P > 0
        dq, dk, dv = attention.tangents(tangents)
        changes = attention.score_changes(at, dq, dk)
        self.score = torch.linalg.vector_norm(changes, dim=3)
        self.score_deviation = spectral_norm(root[..., None] * changes)
        self.query = spectral_norm(dq)
        self.key = weighted_norm(P, dk)
        self.each_key = spectral_norm(dk)
        self.errors = AttentionErrors(attention, at, adjoint)
        self.value = value_shapes(P, torch.einsum("hod,ndk->hnok", self.errors.out, tangents))
        self.spread = value_covariance(attention, at)
        w = torch.einsum("hoe,io->hie", attention.output, adjoint)
        c = at.centred(w @ at.v.mT)
        self.largest = (c.abs() * self.seen).amax(2)
        self.deviation = torch.linalg.vector_norm(root * c, dim=2)
        dc = at.centred(torch.einsum("hie,hjek->hijk", w, dv))
        self.pulled = spectral_norm(root[..., None] * dc)

    def __call__(self, epsilon: float, errors: Tensor) -> Left:
        """Bound the Taylor remainder of attention for all changes |δ| ≤ ``epsilon`` of the network's input,
        and for all errors of the layer's input in the ellipsoids ``errors``.

        The tokens at the layer's input change by G δ + e, where G is ``tangents`` and e an error.
        """
        P, of = self.weights, self.errors(errors)
        dq = epsilon * self.query + of.query
        dk = epsilon * self.key + of.key
        each_key = epsilon * self.each_key + of.each_key
        mean_key = torch.einsum("hij,hj->hi", P, each_key)
        bilinear = dq * dk  # bounds the deviation of b
        of_error = mean_square(P, of.score)
        linear = epsilon * self.score_deviation + of_error
        t = linear + bilinear
        each = epsilon * self.score + of.score + dq[..., None] * (each_key[:, None] + mean_key[..., None])
        tau = torch.where(self.seen, each, 0.0).amax(2)
        grown = torch.exp(tau)
        farthest = tau + grown * t**2  # bounds |t_j − E_s t|
        small = tau.clamp_min(1e-2)
        second = 2 * (torch.expm1(small) - small) / small**2
        third = 6 * (torch.expm1(small) - small - small**2 / 2) / small**3
        dv = ellipsoid_sum(epsilon**2 * self.value, of.value)
        shape = ellipsoid_sum(
            spread_shape(self.spread, bilinear + second / 2 * farthest * t),
            spread_shape(dv, second * (t + farthest * t / 2)),
        )
        dc = epsilon * self.pulled + of.pulled
        margin = dc * bilinear + self.largest * bilinear * (linear + bilinear / 2)
        fourth = (self.deviation + dc) * (farthest**2 * t + 3 * grown * t**3)
        margin = margin + third / 6 * (3 * dc * farthest * t + fourth)
        margin = margin + of.pulled * of_error + self.largest * of_error**2 / 2
        margin = margin + self.deviation * of.query * of.key
        return Left(ellipsoid_sum(*shape), margin.sum())


def largest_weights(attention: Attention, own: Softmax) -> Tensor:
    """Return upper bounds on the attention weights, which are zero for keys that a query does not see."""
    P = upper(own.weights)
    return P if attention.visible is None else P * attention.visible[attention.rows]


def value_covariance(attention: Attention, own: Softmax) -> Tensor:
    """Return an upper bound on the covariance matrix of the projected values under the attention weights of
    each query.

    It is Σ_j P_j v̄_j v̄_jᵀ (H, rows, d_out, d_out) of the values after the output map. It contains Cov(v, x)
    for scores x of deviation 1.
    """
    images = (attention.output @ own.v.mT).mT[:, None].expand(-1, own.weights.shape[1], -1, -1)
    centred = own.centred(images)
    root = largest_weights(attention, own).sqrt()[..., None] * centred
    return gram(root.mT)


def value_shapes(weights: Tensor, changes: Tensor) -> Tensor:
    """Return ellipsoids that contain the covariances of the changes of the values with all scores of
    deviation at most 1, for changes |δ| ≤ 1 of the network's input.

    The ellipsoids contain Cov(V δ, x) for all such scores x, and have the shape (H, rows, d_out, d_out). They
    are Σ_j P_j V_j V_jᵀ, or the ball of :func:`weighted_norm` where its trace is smaller.
    """
    apart = mixture(weights, gram(changes))
    joint = balls(weighted_norm(weights, changes), changes.shape[2])
    smaller = joint.diagonal(dim1=2, dim2=3).sum(-1) < apart.diagonal(dim1=2, dim2=3).sum(-1)
    return torch.where(smaller[..., None, None], joint, apart)


def remainder_of(
    stage: Map, u: Tensor, tangents: Tensor, adjoint: Tensor
) -> AttentionRemainder | NormRemainder | TokenwiseRemainder:
    """Return the object that bounds the second-order Taylor remainder of a layer at tokens u (n, d)."""
    if isinstance(stage, Attention):
        return AttentionRemainder(stage, u, tangents, adjoint)
    if isinstance(stage, Norm):
        return NormRemainder(stage, u, tangents, adjoint)
    every = [slice(j, j + 1) for j in range(len(u))]
    if isinstance(stage, FeedForward):
        return TokenwiseRemainder([FeedForwardRemainder(stage, u[j], tangents[j], adjoint[j]) for j in every])
    return TokenwiseRemainder(
        [GatedFeedForwardRemainder(stage, u[j], tangents[j], adjoint[j]) for j in every]
    )
