"""Bounds on the Taylor remainder of each layer on a ball, for the second-order expansion of the margin.

There is one class for each kind of stage. The displacement of a token at the input of a stage is Δ = G δ + e,
|δ| ≤ ε, e in an ellipsoid; G are the ``tangents``. A remainder is made once for all ε. It then turns ε and
the ellipsoids ``errors`` (n, d, d) of e into two things: ``shape``, ellipsoids that contain R_j for each
token j of the output, R = F(X + Δ) − F(X) − DF Δ; and ``margin``, a bound on
|½ eᵀ M e + a · (R − ½ D²F[Δ, Δ])|, where a is the adjoint of the output and M = a · D²F.

Proofs: documentation page "A proved radius for a whole network".
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    scaled,
    weighted_images,
    without_gram,
)
from howsmooth.bounds.radius.spectral_norm_bounds import spectral_norm, weighted_norm
from howsmooth.bounds.radius.transformer_layers import (
    Activation,
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
# A power of two, so that the shares of the line are exact.
_PANELS = 32
# Neurons whose outputs are shorter than this share of the longest count as if they were this long.
_SHORTEST = 1e-6

__all__ = [
    "NEARLY_ONE",
    "AttentionErrors",
    "AttentionRemainder",
    "FeedForwardRemainder",
    "GatedFeedForwardRemainder",
    "Left",
    "Moved",
    "NormRemainder",
    "PathMoments",
    "Remainder",
    "TokenwiseRemainder",
    "Truncated",
    "centred_values",
    "cosine_beyond",
    "gated_rest",
    "inverse_length",
    "mean_square",
    "neuron_bounds",
    "remainder_of",
    "spread_shape",
]  # fmt: skip


class Left(NamedTuple):
    """Bounds on what one layer leaves out: ellipsoids that contain it, and its effect on the margin."""

    shape: Tensor
    margin: Tensor


class Remainder(ABC):
    """Bounds on the Taylor remainder of one layer, as a function of ε and of the errors of its input."""

    #: In the third order, the cubic form (k, p) of the stage.
    cubic: Tensor | float = 0.0

    def __call__(self, epsilon: float, errors: Tensor) -> Left:
        """Bound the remainder for all |δ| ≤ ε and all errors of the layer's input in ellipsoids (n, d, d)."""
        return self._left(epsilon, errors)

    @abstractmethod
    def _left(self, epsilon: float, errors: Tensor) -> Left: ...


class Moved(NamedTuple):
    """Bounds on how tokens h move at a norm layer, by |h| (a + b), a linear in δ and b the rest.

    ``along`` bounds the component of b along h, ``across`` that along the adjoint behind the layer. For the
    parts orthogonal to h, ``size`` bounds that of b, which lies in the ellipsoids ``rest`` (n, d, d).
    """

    rest: Tensor
    size: Tensor
    along: Tensor
    across: Tensor


class NormRemainder(Remainder):
    """Bounds on the Taylor remainder of a norm layer, for the second-order expansion of the margin.

    Let h move by |h| (y u + v), with u along h and v orthogonal to it. What is beyond the linear part is
    √d gain ∘ (v x + u x'), with numbers x and x' that are bounded in closed form. |y| must be less than 1;
    the bounds on the margin are infinite where it may be more.
    """

    def __init__(self, norm: Norm, u: Tensor, tangents: Tensor, adjoint: Tensor) -> None:
        self.norm = norm
        self.gain = norm.scaled(torch.ones(1, u.shape[1], dtype=u.dtype))
        self.direction, self.r = norm.direction_and_length(u)
        b = norm.scaled(adjoint)
        own = (self.direction * b).sum(1)
        self.own, self.radial = upper(own.abs()), gram(self.direction[..., None])
        eye = torch.eye(u.shape[1], dtype=u.dtype).expand(*u.shape, -1)
        self.orthogonal = self._orthogonal(eye)
        self.functionals = torch.stack([self.direction, b - own[:, None] * self.direction], 1)
        # The token has √(d eps) as one more coordinate, in which v is its share of −y.
        self.share = math.sqrt(u.shape[1] * norm.eps) / lower(self.r[:, 0]).clamp_min(0)
        across = self._orthogonal(tangents)
        self.changes = gram(across)
        along = torch.einsum("nfd,ndk->nfk", self.functionals, self._relative(tangents))
        self.along, self.across = torch.linalg.vector_norm(along, dim=2).unbind(1)
        self.size = spectral_norm(across) + self.share * self.along

    def _relative(self, tangents: Tensor) -> Tensor:
        return self.norm.centre(tangents) / self.r[..., None]

    def _orthogonal(self, tangents: Tensor) -> Tensor:
        w = self._relative(tangents)
        return w - self.direction[..., None] * torch.einsum("nd,ndk->nk", self.direction, w)[:, None]

    def _moved(self, epsilon: float, errors: Tensor) -> Moved:
        rest = ellipsoid_image(self.orthogonal, errors)
        functionals = self.norm.centre(self.functionals.mT).mT / self.r[..., None]
        along, across = half_widths(errors, functionals).unbind(1)
        return Moved(rest, radii(rest) + self.share * along, along, across)

    def _total(self, epsilon: float, at: Moved) -> tuple[Tensor, Tensor]:
        """Bound |y| and |v|."""
        y = ((epsilon * self.along + at.along) * INFLATION).clamp_max(NEARLY_ONE)
        return y, (epsilon * self.size + at.size) * INFLATION

    def _bounds(
        self, epsilon: float, at: Moved, factors: tuple[Tensor, ...], beyond: tuple[Tensor, Tensor, Tensor]
    ) -> Left:
        """Bound a x + b x' + u x'' for numbers of at most the given ``factors``, a and b orthogonal to h, and
        the effect on the margin of v x + u x', |x| and |x'| at most the first two of ``beyond``. The third is
        added to it, with that of b by its second derivative.
        """
        parts = zip(factors, (epsilon**2 * self.changes, at.rest, self.radial), strict=True)
        shape = ellipsoid_sum(*(scaled(factor[:, None] * self.gain, part) for factor, part in parts))
        margin = (epsilon * self.across + at.across) * beyond[0] + self.own * (beyond[1] + at.size**2 / 2)
        margin = margin + at.across * at.along + beyond[2]
        return Left(shape, torch.where(self._total(epsilon, at)[0] < NEARLY_ONE, margin, torch.inf).sum())

    def _left(self, epsilon: float, errors: Tensor) -> Left:
        at = self._moved(epsilon, errors)
        y, v = self._total(epsilon, at)
        first = torch.maximum(y / (1 - y), y + v**2 / 2)
        second, _ = inverse_length(y, v)
        cosine = v**2 / (2 * (1 - y) ** 2)
        return self._bounds(epsilon, at, (first, first, cosine), (second, cosine_beyond(y, v), 0 * y))


def inverse_length(y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Bound the rest of 1/|u + y u + v| after its terms of order 1, and after those of order 2."""
    near = 1 - y
    third = torch.maximum(y**3 / near, 3 * y * v**2 / (2 * near**4)) + 3 * v**4 / (8 * near**5)
    return torch.maximum(y**2 / near, v**2 / (2 * near**3)), third


def cosine_beyond(y: Tensor, v: Tensor) -> Tensor:
    """Bound the rest of the cosine of the angle between u and u + y u + v after its terms of order 2."""
    return y * v**2 / (1 - y) ** 3 + 3 * v**4 / (8 * (1 - y) ** 4)


class TokenwiseRemainder(Remainder):
    """Bounds on the Taylor remainder of a layer that acts on each token separately, from those of the tokens.

    The matrices of one token over all neurons fit into a processor's cache, the matrices of all tokens do
    not.
    """

    def __init__(self, each: Sequence[Remainder]) -> None:
        self.each = each
        self.cubic = sum((one.cubic for one in each[1:]), each[0].cubic)

    def _left(self, epsilon: float, errors: Tensor) -> Left:
        found = [one(epsilon, error[None]) for one, error in zip(self.each, errors, strict=True)]
        shapes, margins = zip(*found, strict=True)
        return Left(torch.cat(shapes), torch.stack(margins).sum())


class FeedForwardRemainder(Remainder):
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
        rest = (square * square - trace) * (1 - 1 / k)
        self.linear = gram(K)
        self.bend, self.twist = layer.activation.derivative(2, self.z), layer.activation.derivative(3, self.z)
        self.quadratic = ellipsoid_sum(
            *(
                weighted_images(layer.down, layer.square, [(self.bend / 2, enclosing(part))])
                for part in (trace / k, rest)
            )
        )
        self.adjoint = adjoint @ layer.down

    def _left(self, epsilon: float, errors: Tensor) -> Left:
        # Ellipsoid matrices are squares of lengths: ε² belongs to changes linear in δ, ε⁴ to quadratic ones.
        linear = epsilon**2 * self.linear
        y = enclosing(ellipsoid_image(self.layer.up, errors))
        z = ellipsoid_sum(linear, y)
        cut = Truncated(self.layer.activation, self.z, (linear, y, z))
        bend, twist = self.bend, self.twist
        both = cut.terms(
            (cut.from_second, bend / 2, (y, y)),
            (~cut.from_second, bend / 2, (linear, linear)),
            (cut.from_third, twist / 6, (z, z, z)),
        )
        products = both + cut.terms((cut.from_second, bend, (linear, y)))
        beyond = both + cut.terms((~cut.from_second, bend, (linear, y)))
        quadratic = epsilon**4 * self.quadratic
        return neuron_bounds(self.layer, self.adjoint, products, beyond, cut.rest, quadratic, moved=cut.moved)


class GatedFeedForwardRemainder(Remainder):
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

    def _left(self, epsilon: float, errors: Tensor) -> Left:
        layer = self.layer
        y, w = enclosing(ellipsoid_image(layer.gate, errors)), enclosing(ellipsoid_image(layer.up, errors))
        z, v = ellipsoid_sum(epsilon**2 * self.linear, y), ellipsoid_sum(epsilon**2 * self.linear_v, w)
        third = ((self.twist / 6, product(z, z, z)), (self.twist_v / 2, product(z, z, v)))
        rest = gated_rest(layer, self.z, self.v, z, v)
        products = ((self.bend / 2, product(z, z)), (self.mixed, product(z, v)), *third)
        beyond = ((self.bend / 2, product(y, y)), (self.mixed, product(y, w)), *third)
        return neuron_bounds(layer, self.adjoint, products, beyond, rest)


def gated_rest(layer: GatedFeedForward, z: Tensor, v: Tensor, dz: Tensor, dv: Tensor) -> Tensor:
    """Bound the error of the third-order Taylor polynomial of φ(z) v for each neuron of a gated layer, whose
    z and v change within the ellipsoids ``dz`` and ``dv`` (n, m, m).
    """
    of_z, of_v = (shape.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt() for shape in (dz, dv))
    rests = layer.activation.rests(z, of_z).size
    return upper(v.abs()) * rests[2] + of_v * rests[1]


class Truncated:
    """The Taylor polynomials of the activations of a layer, each of the degree for which least is left out.

    The change z of a neuron is linear in δ, in the first of the given ellipsoids (n, m, m), or y, in the
    second; the third contains the sum. ``from_second`` to ``from_fourth`` (n, m) say which neurons have terms
    of these orders. The rest of each is at most ``rest``; ``moved`` is for :func:`neuron_bounds`.
    """

    def __init__(
        self,
        activation: Activation,
        z: Tensor,
        changes: tuple[Tensor, Tensor, Tensor],
        *,
        cubic: bool = False,
    ) -> None:
        """With ``cubic``, the cubes of the linear changes are known, and so is the fourth order."""
        linear, y, width = (found.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt() for found in changes)
        width = torch.minimum(width, linear + y)
        size, relative = activation.rests(z, width)
        bend, twist, fourth = (upper(activation.derivative(order, z).abs()) for order in (2, 3, 4))
        square, cube = bend * y**2 / 2, twist * width**3 / 6
        known = twist * linear**3 / 6 if cubic else torch.zeros_like(width)
        further = twist * (linear * y * width / 2 + y**3 / 6) if cubic else cube
        terms = [bend * linear * (y + linear / 2) + known, square + known, square + further]
        if cubic:
            terms.append(square + further + fourth * width**4 / 24)
        # Not all neurons reach the largest products at once: these count half. Any degrees are right.
        degree = torch.stack([rest + term / 2 for rest, term in zip(size, terms, strict=False)]).argmin(0)
        self.from_second, self.from_third, self.from_fourth = (degree >= least for least in (1, 2, 3))
        self.rest, relative = (found.gather(0, degree[None])[0] for found in (size, relative))
        self.moved = None if activation.kink else (changes[2], relative)

    @staticmethod
    def terms(*terms: tuple[Tensor, Tensor, tuple[Tensor, ...]]) -> list[tuple[Tensor, Tensor]]:
        """Return factors, 0 where a neuron does not have the term, and the ellipsoids of products."""
        return [(factor * has, product(*shapes)) for has, factor, shapes in terms if bool(has.any())]


def neuron_bounds(
    layer: FeedForward | GatedFeedForward,
    adjoint: Tensor,
    products: Sequence[tuple[Tensor, Tensor]],
    beyond: Sequence[tuple[Tensor, Tensor]],
    rest: Tensor,
    *outputs: Tensor,
    moved: tuple[Tensor, Tensor] | None = None,
) -> Left:
    """Return bounds for a feed-forward layer, given ellipsoids (n, m, m) of the changes in its neurons.

    The ellipsoids contain W₂ (Σ factor ∘ w + r) + v for w in the ellipsoids of ``products``, |r| ≤ ``rest``
    entry by entry, and v in each of the ellipsoids ``outputs`` (n, d_out, d_out). The effect on the margin is
    that of Σ factor ∘ w + r for w in the ellipsoids of ``beyond``, combined with ``adjoint`` (n, m). With
    ``moved``, an ellipsoid of changes z and factors, it is also known that |r| ≤ factor ∘ z².
    """
    size, lengths = upper(adjoint.abs()), torch.linalg.vector_norm(layer.down, dim=0)
    lengths = lengths.clamp_min(_SHORTEST * float(lengths.amax()) + _SHORTEST)
    margin = (size * rest).sum(1)
    diagonal = rest * (rest @ lengths)[:, None] / lengths
    if moved is not None:  # not all neurons move by their largest change at once
        squares, factor = product(moved[0], moved[0]), moved[1]
        margin = torch.minimum(margin, half_widths(squares, (size * factor)[:, None])[:, 0])
        jointly = factor * (squares @ (factor * lengths)[..., None])[..., 0] / lengths
        smaller = jointly @ lengths.square() < diagonal @ lengths.square()
        diagonal = torch.where(smaller[:, None], jointly, diagonal)
    of_rest = (torch.ones_like(rest), torch.diag_embed(diagonal))
    shape = ellipsoid_sum(weighted_images(layer.down, layer.square, [*products, of_rest]), *outputs)
    for factor, matrix in beyond:
        margin = margin + half_widths(matrix, (adjoint * factor)[:, None])[:, 0]
    return Left(shape, upper(margin.sum()))


def mean_square(weights: Tensor, values: Tensor) -> Tensor:
    """Return for each query the root mean square of values (heads, n) or (heads, rows, n), weighted by its
    attention weights.
    """
    each = "hj" if values.ndim == 2 else "hij"
    return torch.einsum(f"hij,{each}->hi", weights, values.square()).sqrt()


class Reached(NamedTuple):
    """Bounds on the changes of the queries, keys, scores and values of attention that errors of the tokens
    cause.

    ``query`` (H, rows) and ``each_key`` (H, n) bound the changes of queries and keys, ``key`` (H, rows) the
    root mean square of the latter, ``score`` (H, rows, n) the changes of centred scores, ``score_deviation``
    (H, rows) their deviation, and ``pulled`` that of the values along the adjoint. ``value`` (H, rows, d_out,
    d_out) contains Cov(V e, x) for scores x of deviation 1.
    """

    query: Tensor
    each_key: Tensor
    key: Tensor
    score: Tensor
    score_deviation: Tensor
    pulled: Tensor
    value: Tensor


class AttentionErrors:
    """A function that bounds the effect of token errors, given as ellipsoids, in an attention layer."""

    def __init__(self, attention: Attention, own: Softmax, adjoint: Tensor) -> None:
        self.attention = attention
        P = upper(own.weights)
        #: Upper bounds on the attention weights, zero for keys that a query does not see.
        self.weights = P if attention.visible is None else P * attention.visible[attention.rows]
        self.out = attention.output @ attention.value_weight
        self.by_head = w = torch.einsum("hoe,io->hie", attention.output, adjoint)
        self.by_key = torch.einsum("hie,hjed->hjid", own.q, attention.key_maps(own.k.shape[1]))
        self.by_value = torch.einsum("hie,hed->hid", w, attention.value_weight)
        keys = own.k[:, None] - torch.einsum("hij,hje->hie", own.weights, own.k)[:, :, None]
        self.by_query = torch.einsum("hije,hied->hijd", keys, attention.query_maps())

    def __call__(self, errors: Tensor) -> Reached:
        """Bound the effect of token errors in the given ellipsoids (n, d, d)."""
        P, attention, rows = self.weights, self.attention, errors[self.attention.rows]
        each_key = radii(errors, attention.key_maps(len(errors)))
        key = half_widths(errors, self.by_key).mT
        query = half_widths(rows, self.by_query)
        deviation = mean_square(P, key) + mean_square(P, query)  # a second moment is at least a variance
        key = key + torch.einsum("hij,hij->hi", P, key)[..., None]
        pulled = half_widths(errors, self.by_value[:, None]).mT
        value = mixture(P, ellipsoid_image(attention.value_weight[:, None], errors))
        return Reached(
            query=radii(rows, attention.query_maps()),
            each_key=each_key,
            key=mean_square(P, each_key),
            score=key + query,
            score_deviation=deviation,
            pulled=mean_square(P, pulled),
            value=ellipsoid_image(attention.output[:, None], value),
        )


def spread_shape(covariance: Tensor, factor: Tensor) -> Tensor:
    """Return the ellipsoids of covariances with scores of deviation ``factor``, given those for 1."""
    return covariance * factor.square()[..., None, None]


class AttentionRemainder(Remainder):
    """Bounds on the Taylor remainder of attention, computed for each query and each head.

    A score changes by t = ℓ + b, linear and bilinear. With h(s) = E_{P_s}[v + s dv], P_s ∝ P e^{st}, the
    remainder is Cov(v, b) + ∫ (1 − s) (2 Cov_s(dv, t) + κ_s(v + s dv, t, t)) ds, κ the third cumulant.
    P_s ≤ e^{sτ} P where τ bounds the centred scores, so that every moment is bounded by one at s = 0.
    """

    def __init__(self, attention: Attention, u: Tensor, tangents: Tensor, adjoint: Tensor) -> None:
        at = attention.softmax(u)
        self.errors = AttentionErrors(attention, at, adjoint)
        P = self.errors.weights
        root = P.sqrt()
        self.weights, self.seen = P, P > 0
        dq, dk, dv = attention.tangents(tangents)
        changes = attention.score_changes(at, dq, dk)
        self.score = torch.linalg.vector_norm(changes, dim=3)
        self.score_deviation = spectral_norm(root[..., None] * changes)
        self.query = spectral_norm(dq)
        self.key = weighted_norm(P, dk)
        self.each_key = spectral_norm(dk)
        values = torch.einsum("hod,ndk->hnok", self.errors.out, tangents)
        self.value = _value_shapes(P, values, torch.einsum("hij,hjok->hiok", at.weights, values))
        self.spread = gram((root[..., None] * centred_values(attention, at)).mT)
        w = self.errors.by_head
        c = at.centred(w @ at.v.mT)
        self.largest = (c.abs() * self.seen).amax(2)
        self.deviation = torch.linalg.vector_norm(root * c, dim=2)
        dc = at.centred(torch.einsum("hie,hjek->hijk", w, dv))
        self.pulled = spectral_norm(root[..., None] * dc)

    def _left(self, epsilon: float, errors: Tensor) -> Left:
        P, of = self.weights, self.errors(errors)
        dq = epsilon * self.query + of.query
        dk = epsilon * self.key + of.key
        each_key = epsilon * self.each_key + of.each_key
        mean_key = torch.einsum("hij,hj->hi", P, each_key)
        bilinear = dq * dk  # bounds the deviation of b
        of_error = of.score_deviation
        linear = epsilon * self.score_deviation + of_error
        t = linear + bilinear
        each = epsilon * self.score + of.score + dq[..., None] * (each_key[:, None] + mean_key[..., None])
        tau = torch.where(self.seen, each, 0.0).amax(2)
        moments = PathMoments(t, tau)
        of_v, of_dv = moments.rest(2)
        dv = ellipsoid_sum(epsilon**2 * self.value, of.value)
        shape = ellipsoid_sum(
            spread_shape(self.spread, bilinear + of_v),
            spread_shape(dv, of_dv),
        )
        dc = epsilon * self.pulled + of.pulled
        margin = dc * bilinear + self.largest * bilinear * (linear + bilinear / 2)
        of_v, of_dv = moments.rest(3)
        margin = margin + of_v * self.deviation + of_dv * dc
        margin = margin + of.pulled * of_error + self.largest * of_error**2 / 2
        margin = margin + self.deviation * of.query * of.key
        return Left(ellipsoid_sum(*shape), margin.sum())


class PathMoments:
    """Bounds on what one attention output leaves out as its scores and values change along a line.

    The path is h(s) = E_{P_s}[v + s dv], bounded from deviations under the attention weights P. The scores
    change by t; ``deviation`` bounds their deviation and ``tau`` the centred t.
    """

    def __init__(self, deviation: Tensor, tau: Tensor) -> None:
        self.deviation, self.tau = deviation, tau

    def rest(self, order: int) -> tuple[Tensor, Tensor]:
        """Bound what the Taylor polynomial of h(1) leaves out from the given order on, which is 2, 3 or 4.

        It is ∫ (1 − s)^(p−1)/(p − 1)! h⁽ᵖ⁾(s) ds, h⁽ᵖ⁾ = p κ(dv, t, …) + κ(v + s dv, t, …), with cumulants κ.
        The bound is the first factor times the deviation of v plus the second times that of dv. Both grow
        with s: on each of equal parts of the line they are taken at its end.
        """
        ends = torch.arange(1, _PANELS + 1, dtype=self.tau.dtype)[:, None, None] / _PANELS
        shares = ((1 + 1 / _PANELS - ends) ** order - (1 - ends) ** order) / math.factorial(order)
        grown = torch.exp(ends * self.tau)
        variance = grown * self.deviation**2
        far = self.tau + ends * variance  # bounds |t_j − E_s t|
        cumulants = {
            1: torch.ones_like(far),
            2: far,
            3: torch.maximum(far**2, 3 * variance),
            4: far * (torch.maximum(far**2, 6 * variance) + 4 * variance),
        }
        weights = shares * grown * self.deviation
        of_v = weights * cumulants[order]
        of_dv = weights * order * cumulants[order - 1] + ends * of_v
        return of_v.sum(0), of_dv.sum(0)


def centred_values(attention: Attention, own: Softmax) -> Tensor:
    """Return the values after the output map, minus their mean for each query (H, rows, n, d_out)."""
    images = (attention.output @ own.v.mT).mT[:, None].expand(-1, own.weights.shape[1], -1, -1)
    return own.centred(images)


def _value_shapes(weights: Tensor, changes: Tensor, means: Tensor) -> Tensor:
    """Return ellipsoids (H, rows, d_out, d_out) that contain Cov(V δ, x) for all scores x of deviation at
    most 1 and |δ| ≤ 1: Σ_j P_j V_j V_jᵀ − V̄ V̄ᵀ, or the ball of ``weighted_norm`` where its trace is smaller.
    """
    apart = without_gram(mixture(weights, gram(changes)), means)
    joint = balls(weighted_norm(weights, changes), changes.shape[2])
    smaller = joint.diagonal(dim1=2, dim2=3).sum(-1) < apart.diagonal(dim1=2, dim2=3).sum(-1)
    return torch.where(smaller[..., None, None], joint, apart)


def remainder_of(stage: Map, u: Tensor, tangents: Tensor, adjoint: Tensor) -> Remainder:
    """Return the object that bounds the second-order Taylor remainder of a layer at tokens u (n, d)."""
    if isinstance(stage, Attention):
        return AttentionRemainder(stage, u, tangents, adjoint)
    if isinstance(stage, Norm):
        return NormRemainder(stage, u, tangents, adjoint)
    each = [(u[j : j + 1], tangents[j : j + 1], adjoint[j : j + 1]) for j in range(len(u))]
    if isinstance(stage, FeedForward):
        return TokenwiseRemainder([FeedForwardRemainder(stage, *one) for one in each])
    return TokenwiseRemainder([GatedFeedForwardRemainder(stage, *one) for one in each])
