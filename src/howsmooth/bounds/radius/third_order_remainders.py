"""Bounds on the Taylor remainder of each layer on a ball, for the third-order expansion of the margin.

The displacement of a token at the input of a stage is Δ = G δ + e, e = ½ Q[δ, δ] + x, x in an ellipsoid. A
remainder turns ε and the ellipsoids ``errors`` (n, d, d) of x into ``shape``, ellipsoids that contain S_j,
S = F(X + Δ) − F(X) − DF Δ − ½ D²F[Gδ, Gδ], and ``margin``, a bound on |½ eᵀ M e + a · T − c[δ, δ, δ]|, with
T = F(X + Δ) − F(X) − DF Δ − ½ D²F[Δ, Δ] and c the cubic form ``cubic`` of the stage.

Proofs: documentation page "A proved radius for a whole network".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.ellipsoid_arithmetic import (
    balls,
    ellipsoid_image,
    ellipsoid_sum,
    enclosing,
    gram,
    mixture,
    product,
    scaled,
)
from howsmooth.bounds.radius.packed_quadratic_forms import Pairs
from howsmooth.bounds.radius.second_order_remainders import (
    AttentionRemainder,
    GatedFeedForwardRemainder,
    Left,
    Moved,
    NormRemainder,
    PathMoments,
    Remainder,
    TokenwiseRemainder,
    Truncated,
    centred_values,
    cosine_beyond,
    gated_rest,
    inverse_length,
    mean_square,
    neuron_bounds,
    spread_shape,
)
from howsmooth.bounds.radius.spectral_norm_bounds import each_form_norm, form_norm
from howsmooth.bounds.radius.transformer_layers import Attention, FeedForward, GatedFeedForward, Map, Norm
from howsmooth.rounding import largest_eigenvalues_by_squaring
from howsmooth.rounding.rounded_tensor import exact, plain

# So many outputs of attention are expanded at once.
_OUTPUTS = 16
# An ellipsoid has the form of an earlier one if this factor encloses it in that, taken to the same trace.
_UNEVEN = 1.15
# The least eigenvalue of an ellipsoid that is taken: a share of the largest, and that of a point.
_FLOOR, _LEAST = 1e-6, 1e-200

__all__ = [
    "CubicAttention", "CubicFeedForward", "CubicGatedFeedForward", "CubicNorm", "Expansion",
    "cubic_remainder_of",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Expansion:
    """The input tokens of a layer as a second-order polynomial in δ, and the gradient of the margin at the
    layer's output.

    ``u`` (n, d), ``tangents`` G (n, d, k), ``forms`` Q (n, d, p). ``given`` says that the tokens are the
    input of the network, which has no forms and no errors. ``check`` is called between the steps of long
    computations, and may raise to end them.
    """

    u: Tensor
    tangents: Tensor
    forms: Tensor
    pairs: Pairs
    adjoint: Tensor
    given: bool = False
    check: Callable[[], None] = lambda: None

    def token(self, j: int) -> Expansion:
        """Return the expansion of one of the tokens."""
        every = (self.u, self.tangents, self.forms, self.adjoint)
        u, tangents, forms, adjoint = (part[j : j + 1] for part in every)
        return Expansion(u, tangents, forms, self.pairs, adjoint, self.given, self.check)


class CubicNorm(NormRemainder):
    """Bounds on the Taylor remainder of a norm layer, for the third-order expansion of the margin."""

    def __init__(self, norm: Norm, at: Expansion) -> None:
        super().__init__(norm, at.u, at.tangents, at.adjoint)
        curved = self._orthogonal(at.forms / 2)
        functionals = torch.einsum("nfd,ndp->nfp", self.functionals, self._relative(at.forms / 2))
        self.along_form, self.across_form = each_form_norm(functionals, at.pairs).unbind(1)
        self.form, self.curved = form_norm(curved, at.pairs) + self.share * self.along_form, gram(curved)
        direction, w, b = self.direction, self._relative(at.tangents), norm.scaled(at.adjoint)
        along, own = torch.einsum("nd,ndk->nk", direction, w), torch.einsum("nd,ndk->nk", b, w)
        square, y = at.pairs.packed(w.mT @ w), at.pairs.square(along)
        radial = torch.einsum("nd,nd->n", direction, b)[:, None] * along
        self.cubic = own.T @ (1.5 * y - 0.5 * square) + radial.T @ (1.5 * square - 2.5 * y)

    def _moved(self, epsilon: float, errors: Tensor) -> Moved:
        at, square = super()._moved(epsilon, errors), epsilon**2
        rest = ellipsoid_sum(square**2 * self.curved, at.rest)
        forms = (self.form, self.along_form, self.across_form)
        return Moved(rest, *(square * form + e for form, e in zip(forms, at[1:], strict=True)))

    def _left(self, epsilon: float, errors: Tensor) -> Left:
        at = self._moved(epsilon, errors)
        (y, v), p, q = self._total(epsilon, at), epsilon * self.along, at.along
        second, third = inverse_length(y, v)
        longer = at.size * (2 * epsilon * self.size + at.size)  # bounds |v|² − |a|²
        factors = q + second, y + second, longer / 2 + cosine_beyond(y, v)
        margin = at.across * torch.maximum(y**2, v**2 / 2) + self.own * (q * v**2 + p * longer)
        margin = margin + epsilon * self.across * (q * (2 * p + q) + longer / 2)
        fourth = (1.5 * y**2 + 0.375 * v**2) * v**2 / (1 - y) ** 4
        return self._bounds(epsilon, at, factors, (third, fourth, margin))


class CubicFeedForward(Remainder):
    """Bounds on the third-order Taylor remainder of a feed-forward layer, computed neuron by neuron.

    The preactivations change by z = K δ + y, y = ½ W₁ Q[δ, δ] + W₁ x. The cubic part of W₂ φ is bounded by
    the Gram matrix of the cubic forms (K δ) · (½ φ'' W₁ Q + φ'''/6 (K δ)²). Each factor of the other products
    lies in an ellipsoid over the neurons; the product lies in that of the entrywise product of the matrices.
    """

    def __init__(self, layer: FeedForward, at: Expansion) -> None:
        self.layer, self.z = layer, layer.preactivations(at.u)
        pairs = at.pairs
        K = layer.up @ at.tangents
        self.linear = gram(K)
        self.bend, self.twist = layer.activation.derivative(2, self.z), layer.activation.derivative(3, self.z)
        self.adjoint = adjoint = at.adjoint @ layer.down
        self.cubic = at.u.new_zeros(pairs.k, len(pairs.i))
        mixed = []
        self.squared = enclosing(ellipsoid_image(layer.up, gram(at.forms / 2)))
        bent = scaled(self.bend, self.squared)
        for j, Q in enumerate(at.forms):
            at.check()
            squares = pairs.square(K[j])
            # The Gram matrix of φ'' W₁Q/2 + φ'''/6 (K δ)², term by term. The inner products of packed squares
            # are squares.
            bend, twist = self.bend[j, :, None], (self.twist[j] / 6)[:, None]
            crossed = bend * (layer.up @ (Q @ squares.mT) / 2) * twist.mT
            product_of_rows = K[j] @ K[j].mT
            both = twist * (product_of_rows * product_of_rows) * twist.mT
            mixed.append(enclosing(crossed + crossed.mT + both + bent[j]))
            self.cubic += (K[j] * (adjoint[j] * self.twist[j] / 6)[:, None]).T @ squares
        self.third = ellipsoid_image(layer.down, product(self.linear, torch.stack(mixed)))

    def _left(self, epsilon: float, errors: Tensor) -> Left:
        linear, squared = epsilon**2 * self.linear, epsilon**4 * self.squared
        error = enclosing(ellipsoid_image(self.layer.up, errors))
        y = ellipsoid_sum(squared, error)
        z = ellipsoid_sum(linear, y)
        bend, twist, fourth = self.bend, self.twist, self.layer.activation.derivative(4, self.z)
        cut = Truncated(self.layer.activation, self.z, (linear, y, z), cubic=True)
        both = cut.terms(
            (cut.from_second, bend / 2, (y, y)),
            (~cut.from_second, bend / 2, (linear, linear)),
            (~cut.from_third, twist / 6, (linear, linear, linear)),
            (cut.from_third, twist / 2, (linear, linear, y)),
            (cut.from_third, twist / 2, (linear, y, y)),
            (cut.from_third, twist / 6, (y, y, y)),
            (cut.from_fourth, fourth / 24, (z, z, z, z)),
        )
        products = both + cut.terms(
            (cut.from_second, bend, (linear, error)), (~cut.from_second, bend, (linear, squared))
        )
        beyond = both + cut.terms((~cut.from_second, bend, (linear, y)))
        third = epsilon**6 * self.third
        return neuron_bounds(self.layer, self.adjoint, products, beyond, cut.rest, third, moved=cut.moved)


class CubicGatedFeedForward(GatedFeedForwardRemainder):
    """Bounds on the third-order Taylor remainder of a gated feed-forward layer, computed neuron by neuron.

    z changes by p + y and v by q + w, p and q linear in δ. All products are bounded by entrywise products of
    ellipsoids; the cubic form is (v φ⁽³⁾/6) p³ + (φ''/2) p² q, combined with the adjoint.
    """

    def __init__(self, layer: GatedFeedForward, at: Expansion) -> None:
        super().__init__(layer, at.u, at.tangents, at.adjoint)
        pairs, forms = at.pairs, gram(at.forms / 2)
        self.squared, self.squared_v = (
            enclosing(ellipsoid_image(matrix, forms)) for matrix in (layer.gate, layer.up)
        )
        self.cubic = at.u.new_zeros(pairs.k, len(pairs.i))
        dz, dv = layer.gate @ at.tangents, layer.up @ at.tangents
        at.check()
        for j in range(len(at.u)):
            by_z = dz[j] * (self.adjoint[j] * self.twist[j] / 6)[:, None]
            by_v = dv[j] * (self.adjoint[j] * self.twist_v[j] / 2)[:, None]
            self.cubic += (by_z + by_v).T @ pairs.square(dz[j])

    def _left(self, epsilon: float, errors: Tensor) -> Left:
        layer = self.layer
        p, q = epsilon**2 * self.linear, epsilon**2 * self.linear_v
        y = ellipsoid_sum(epsilon**4 * self.squared, enclosing(ellipsoid_image(layer.gate, errors)))
        w = ellipsoid_sum(epsilon**4 * self.squared_v, enclosing(ellipsoid_image(layer.up, errors)))
        z, v = ellipsoid_sum(p, y), ellipsoid_sum(q, w)
        rest = gated_rest(layer, self.z, self.v, z, v)
        second = ((self.bend / 2, product(y, y)), (self.mixed, product(y, w)))
        crossed = ((self.bend, product(p, y)), (self.mixed, product(p, w)), (self.mixed, product(y, q)))
        cubes = ((self.twist / 6, product(z, z, z)), (self.twist_v / 2, product(z, z, v)))
        # Δz³ − p³ and Δz² Δv − p² q
        beyond = (
            (self.twist / 2, product(p, p, y)),
            (self.twist / 2, product(p, y, y)),
            (self.twist / 6, product(y, y, y)),
            (self.twist_v / 2, product(p, p, w)),
            (self.twist_v, product(p, y, v)),
            (self.twist_v / 2, product(y, y, v)),
        )
        products = (*second, *crossed, *cubes)
        return neuron_bounds(layer, self.adjoint, products, (*second, *beyond), rest)


class CubicAttention(AttentionRemainder):
    """Bounds on the third-order Taylor remainder of attention, computed for each query and each head.

    A score changes by t = ℓ + c with ℓ linear in δ and c = ½ ℓ(Q) + b + ℓ(x), b = dq·dk; a value by
    dv = v₁ + v₂, v₂ = ½ V Q + V x. With h(s) = E_{P_s}[v + s dv], P_s ∝ P e^{st}, the cubic part and the part
    linear in δ and in the remainder of one source are bounded as tensors; the rest by moments, with
    P_s ≤ e^{sτ} P where τ bounds the centred scores.
    """

    def __init__(self, attention: Attention, at: Expansion) -> None:
        super().__init__(attention, at.u, at.tangents, at.adjoint)
        tensors = _Tensors(attention, at, self.errors.out)
        own, scores, dq, dk, dv = tensors.own, tensors.scores, tensors.dq, tensors.dk, tensors.dv
        P, pairs = self.weights, at.pairs
        root = P.sqrt()
        moves = (plain(dq) != 0).any(3).any(2).any(0)
        if at.given:
            q2, k2, v2 = (part.new_zeros(*part.shape[:3], len(pairs.i)) for part in (dq, dk, dv))
        else:
            q2, k2, v2 = (part / 2 for part in attention.tangents(at.forms))
        self.query_form = form_norm(q2, pairs)
        self.each_key_form = form_norm(k2, pairs)
        self.key_form = mean_square(P, self.each_key_form)
        curved = attention.score_changes(own, q2, k2)
        bilinear = scores.new_zeros(*scores.shape[:3], len(pairs.i))
        for h in range(len(P)):
            for i in moves.nonzero()[:, 0].tolist():
                bilinear[h, i] = pairs.packed(dq[h, i].T @ dk[h])
        bilinear = own.centred(bilinear)
        self.curved_deviation = form_norm(root[..., None] * curved, pairs)
        self.bilinear_deviation = form_norm(root[..., None] * bilinear, pairs)
        both = curved + bilinear
        self.form_deviation = form_norm(root[..., None] * both, pairs)
        self.form = each_form_norm(both, pairs)
        bent = mixture(P, ellipsoid_image(attention.value_weight[:, None], gram(at.forms / 2)))
        self.value_form = ellipsoid_image(attention.output[:, None], bent)
        w = self.errors.by_head
        c = own.centred(w @ own.v.mT)
        dc = own.centred(torch.einsum("hie,hjek->hijk", w, dv))
        dc2 = own.centred(torch.einsum("hie,hjep->hijp", w, v2))
        self.pulled_form = form_norm(root[..., None] * dc2, pairs)
        squares = pairs.square(scores)
        mean = torch.einsum("hij,hijp->hip", own.weights, squares)[:, :, None]
        weighted = own.weights[..., None]
        first = bilinear + (squares - mean) / 2
        second = bilinear + squares / 6 - mean / 2
        self.cubic = torch.einsum("hijk,hijp->kp", weighted * dc, first)
        self.cubic += torch.einsum("hijk,hijp->kp", weighted * c[..., None] * scores, second)
        # A row of the first layer whose own token stands still is bounded well enough by moments alone.
        self.exact = moves if at.given else torch.ones_like(moves)
        size = attention.output.shape[1]
        self.third = torch.zeros(P.shape[1], size, size, dtype=P.dtype)
        self.crossed = None if at.given else _Crossed(tensors)
        for i in self.exact.nonzero()[:, 0].tolist():
            forms = curved[:, i] + bilinear[:, i]
            self.third[i] = tensors.cubic(i, forms, squares[:, i], mean[:, i], q2, k2)

    def _left(self, epsilon: float, errors: Tensor) -> Left:
        P, square, of = self.weights, epsilon**2, self.errors(errors)
        # Queries and keys: the first order and the rest. All that is named without "each" is a deviation.
        dq1, dk1 = epsilon * self.query, epsilon * self.key
        dq2, dk2 = square * self.query_form + of.query, square * self.key_form + of.key
        longer = dq1 * dk2 + dq2 * dk1 + dq2 * dk2  # dq·dk beyond the second order
        each1, each2 = epsilon * self.each_key, square * self.each_key_form + of.each_key
        each1 = each1[:, None] + torch.einsum("hij,hj->hi", P, each1)[..., None]
        each2 = each2[:, None] + torch.einsum("hij,hj->hi", P, each2)[..., None]
        each_longer = dq1[..., None] * each2 + dq2[..., None] * (each1 + each2)
        linear, of_error = epsilon * self.score_deviation, of.score_deviation
        c = square * self.form_deviation + of_error + longer
        each_c = square * self.form + of.score + each_longer
        tau = torch.where(self.seen, epsilon * self.score + each_c, 0.0).amax(2)
        each_linear = epsilon * torch.where(self.seen, self.score, 0.0).amax(2)
        largest_c = torch.where(self.seen, each_c, 0.0).amax(2)
        cc, of_v, of_v1, of_v2 = self._beyond_cubic(
            (linear, epsilon * self.score, each_linear), (c, each_c, largest_c), tau
        )
        v1, v2 = square * self.value, ellipsoid_sum(square**2 * self.value_form, of.value)
        known = ellipsoid_sum(
            spread_shape(self.spread, dq2 * dk2 + each_linear * longer + cc + of_v),
            spread_shape(v1, longer + of_v1),
            spread_shape(v2, c + of_v2),
        )
        known = ellipsoid_sum(*known, epsilon**6 * self.third)
        if self.crossed is not None:
            known = ellipsoid_sum(known, *self.crossed(epsilon, errors))
        rough_v, rough_dv = PathMoments(linear + c, tau).rest(3)
        # Only the input of the network has such rows: without forms and errors, values change by v₁ alone.
        rough = ellipsoid_sum(
            spread_shape(self.spread, longer + each_linear * c + largest_c * c / 2 + rough_v),
            spread_shape(v1, c + rough_dv),
        )
        shape = torch.where(self.exact[:, None, None], known, ellipsoid_sum(*rough))
        b = square * self.bilinear_deviation + longer
        e = square * self.curved_deviation + of_error
        dc1, dc2 = epsilon * self.pulled, square * self.pulled_form + of.pulled
        margin = dc1 * longer + dc2 * (b + e) + self.largest * linear * longer
        margin = margin + torch.minimum(self.deviation * cc, self.largest * c**2 / 2)
        margin = margin + of_v * self.deviation + of_v1 * dc1 + of_v2 * dc2
        return Left(shape, (margin + self.deviation * dq2 * dk2).sum())

    def _beyond_cubic(
        self, linear: tuple[Tensor, Tensor, Tensor], c: tuple[Tensor, Tensor, Tensor], tau: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Bound what is left of h(1) after its quadratic polynomial and ½ κ(v₁, ℓ, ℓ) + κ(v, ℓ, ℓ, ℓ)/6.

        ``linear`` and ``c`` bound the two parts of the scores' changes: their deviations, each one centred,
        and the largest of these. The first factor times the deviation of v bounds ½ κ(v, c, c). The others,
        times the deviations of v, v₁ and v₂, bound the rest.
        """

        def at_most(largest: Tensor, each: Tensor) -> Tensor:
            return torch.minimum(largest, mean_square(self.weights, each))

        def mean_of_squares(start: Tensor, growth: Tensor) -> Tensor:  # of start + λ growth, 0 ≤ λ ≤ 1
            return start * (start + growth) + growth**2 / 3

        (sd, each, largest), (sd_c, each_c, largest_c) = linear, c
        of_v, of_dv = PathMoments(sd + sd_c, tau).rest(4)
        # κ(v, t, t, t) − κ(v, ℓ, ℓ, ℓ) is 3 ∫ κ(v, c, u, u) dλ, u = ℓ + λ c; |u² − Var u| ≤ max(u², Var u).
        cuu = mean_of_squares(*(torch.maximum(a, b[..., None]) for a, b in ((each, sd), (each_c, sd_c))))
        cuu = at_most(sd_c * mean_of_squares(largest, largest_c), each_c * cuu)
        of_v = of_v + cuu / 2 + sd_c * mean_of_squares(sd, sd_c)
        of_v1 = of_dv + at_most(sd_c * (largest + largest_c / 2), each_c * (each + each_c / 2))
        of_v2 = of_dv + at_most(tau * (sd + sd_c), (each + each_c) ** 2) / 2
        return at_most(largest_c * sd_c, each_c**2) / 2, of_v, of_v1, of_v2


class _Crossed:
    """Bounds on D²F[Gδ, x], for |δ| ≤ ε and errors x of the tokens in ellipsoids.

    With x = B z for the root B of an ellipsoid B Bᵀ, it is a tensor times δ ⊗ z, and lies in the ellipsoid of
    its Gram matrix. Roots are kept as long as later ellipsoids have about the same form.
    """

    def __init__(self, tensors: _Tensors) -> None:
        self.tensors = tensors
        self._taken: _Root | None = None

    def __call__(self, epsilon: float, errors: Tensor) -> list[Tensor]:
        """Return ellipsoids (rows, d_out, d_out) for tokens with errors in ellipsoids (n, d, d)."""
        rows, size = self.tensors.scores.shape[1], self.tensors.out.shape[1]
        if not bool(errors.isfinite().all()):
            return [errors.new_full((rows, size, size), torch.inf)]
        traces = errors.diagonal(dim1=1, dim2=2).sum(1)
        taken = self._taken
        if taken is None or bool((taken.squares(errors) > _UNEVEN * taken.share * traces).any()):
            self._taken = None  # the memory is used again
            self._taken = taken = self._take(errors, traces)
        beside = taken.lengths * (taken.slack * traces.sqrt())[:, None]  # of x − B C x
        apart = (epsilon**2 * taken.squares(errors))[:, None, None, None] * taken.shapes
        return [*apart, balls(epsilon * beside.sum(0), size)]

    def _take(self, errors: Tensor, traces: Tensor) -> _Root:
        values, vectors = torch.linalg.eigh((errors + errors.mT) / 2)
        values = values.clamp_min(0) + _FLOOR * values[:, -1:].clamp_min(_LEAST)
        root, inverse = vectors * values.sqrt()[:, None], vectors.mT / values.sqrt()[..., None]
        left = exact(root) @ exact(inverse) - torch.eye(values.shape[1], dtype=values.dtype)
        rows, size = self.tensors.scores.shape[1], self.tensors.out.shape[1]
        shapes = errors.new_empty(len(errors), rows, size, size)
        lengths = errors.new_empty(len(errors), rows)
        for i in range(rows):
            self.tensors.at.check()
            for j, (shape, length) in enumerate(self.tensors.crossed(i, root)):
                shapes[j, i], lengths[j, i] = shape, length
        found = _Root(inverse, torch.linalg.vector_norm(left, dim=(1, 2)), shapes, lengths, traces)
        return found._replace(share=torch.where(traces > 0, found.squares(errors) / traces, 0.0))


class _Root(NamedTuple):
    """A computed inverse C of the root B, a bound on I − B C, the ellipsoids for B z, |z| ≤ 1, bounds on
    D²F[Gδ, z], and the bound on |z|² for the ellipsoid of B divided by its trace.
    """

    inverse: Tensor
    slack: Tensor
    shapes: Tensor
    lengths: Tensor
    share: Tensor

    def squares(self, errors: Tensor) -> Tensor:
        """Bound |z|², z = C x, by the largest eigenvalue of C U Cᵀ or of what differs from its mean."""
        images = ellipsoid_image(self.inverse, errors)
        mean = images.diagonal(dim1=1, dim2=2).mean(1)
        apart = images - mean[:, None, None] * torch.eye(images.shape[1], dtype=images.dtype)
        whole = largest_eigenvalues_by_squaring(images)
        return torch.minimum(whole, mean + largest_eigenvalues_by_squaring(apart))


class _Tensors:
    """Ellipsoids that contain the cubic term of attention in the change δ of the network's input, and the
    mixed second derivatives along δ and along errors of the tokens.

    The mixed derivative is D²F[Gδ, x], where x is the error of the tokens' second-order expansion in δ.
    """

    def __init__(self, attention: Attention, at: Expansion, out: Tensor) -> None:
        self.attention, self.at, self.out = attention, at, out
        self.own = attention.softmax(at.u)
        self.dq, self.dk, self.dv = attention.tangents(at.tangents)
        self.scores = attention.score_changes(self.own, self.dq, self.dk)
        self.spread = centred_values(attention, self.own)
        self.values = torch.einsum("hod,ndk->hnok", out, at.tangents)

    def cubic(self, i: int, forms: Tensor, squares: Tensor, mean: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
        """Return the ellipsoid (d_out, d_out) of the cubic term of query i for |δ| ≤ 1, a Gram matrix."""
        P, score, pairs = self.own.weights[:, i], self.scores[:, i], self.at.pairs
        weighted = P[..., None] * self.spread[:, i]  # (H, n, d_out)
        left = torch.cat([P[..., None, None] * self.values, weighted[..., None] * score[:, :, None]])
        right = torch.cat([forms + (squares - mean) / 2, forms + squares / 6 - mean / 2])
        left, right = left.flatten(0, 1), right.flatten(0, 1)
        if not self.at.given:
            keys = torch.einsum("hjo,hjek->heok", weighted, self.dk)
            left = torch.cat([left, keys.flatten(0, 1)])
            right = torch.cat([right, q2[:, i].flatten(0, 1)])
            query, scored = self.dq[:, i].flatten(0, 1), P[..., None] * score / 2
        found = left.new_empty(pairs.k, left.shape[1], len(pairs.i))
        for start in range(0, left.shape[1], _OUTPUTS):
            self.at.check()
            some = slice(start, start + _OUTPUTS)
            own = torch.einsum("aok,ap->kop", left[:, some], right)
            if not self.at.given:
                values = torch.einsum("hod,ndp->hnop", self.out[:, some], self.at.forms)
                own += torch.einsum("ak,aop->kop", scored.flatten(0, 1), values.flatten(0, 1))
                curved = torch.einsum("hjo,hjep->heop", weighted[..., some], k2)
                own += torch.einsum("ak,aop->kop", query, curved.flatten(0, 1))
            found[:, some] = own
        self.at.check()
        # A sum of products for each variable has fewer terms, and a smaller rounding error, than one product.
        return gram(found).sum(0)

    def crossed(self, i: int, roots: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each token j an ellipsoid (d_out, d_out) that contains D²F[Gδ, B_j z] in row i for all
        |δ| ≤ 1, |z| ≤ 1, of a Gram matrix, and a bound on D²F[Gδ, z].
        """
        attention, own = self.attention, self.own
        query_maps, key_maps = attention.query_maps(), attention.key_maps(own.k.shape[1])
        P, v, score = own.weights[:, i], self.spread[:, i], self.scores[:, i]
        values = self.values - torch.einsum("hj,hjok->hok", P, self.values)[:, None]
        moved = v[..., None] * score[:, :, None]
        slope = P[..., None, None] * (values + moved - torch.einsum("hj,hjok->hok", P, moved)[:, None])
        by_key = torch.einsum("he,hjed->hjd", own.q[:, i], key_maps)
        keys = torch.einsum("hek,hjed->hjkd", self.dq[:, i], key_maps)
        weighted, scored = P[..., None] * v, P[..., None] * score
        query = torch.einsum("hjok,hje->hoke", slope, own.k)
        query += torch.einsum("hjo,hjek->hoke", weighted, self.dk)
        by_query = torch.einsum("hoke,hed->okd", query, query_maps[:, i])
        for j, root in enumerate(roots):
            turned = torch.einsum("hok,hd->okd", slope[:, j], by_key[:, j])
            turned += torch.einsum("ho,hkd->okd", weighted[:, j], keys[:, j])
            turned += torch.einsum("hk,hod->okd", scored[:, j], self.out)
            if j == int(attention.rows[i]):
                turned += by_query
            yield gram((turned @ root).flatten(1)), torch.linalg.vector_norm(turned)


def cubic_remainder_of(stage: Map, at: Expansion) -> Remainder:
    """Return the object that bounds the third-order Taylor remainder of a layer."""
    if isinstance(stage, Attention):
        return CubicAttention(stage, at)
    if isinstance(stage, Norm):
        return CubicNorm(stage, at)
    each = [at.token(j) for j in range(len(at.u))]
    if isinstance(stage, FeedForward):
        return TokenwiseRemainder([CubicFeedForward(stage, one) for one in each])
    return TokenwiseRemainder([CubicGatedFeedForward(stage, one) for one in each])
