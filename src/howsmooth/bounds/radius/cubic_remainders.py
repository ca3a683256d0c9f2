"""What the Taylor expansion of one stage leaves out beyond the second order, bounded on a ball.

The displacement of a token at the input of a stage is Δ = G δ + e, e = ½ Q[δ, δ] + x. A remainder turns ε and
bounds of earlier remainders into ``vector``, bounds on |S_j| with S = F(X + Δ) − F(X) − DF Δ − ½ D²F[Gδ, Gδ],
and ``margin``, a bound on |½ eᵀ M e + a · T − c[δ, δ, δ]|, with T = F(X + Δ) − F(X) − DF Δ − ½ D²F[Δ, Δ] and
c the cubic form ``cubic`` of the stage.

Proofs: documentation page "A proved radius for a whole network".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.bounds.radius.errors import Ellipsoid, Reach, Source, reached
from howsmooth.bounds.radius.norms import (
    each_form_norm,
    form_norm,
    largest_eigenvalue,
    spectral_norm,
    weighted_norm,
)
from howsmooth.bounds.radius.pairs import Pairs
from howsmooth.bounds.radius.remainders import Left, product_norm, pulled_product, sum_of_ellipsoids
from howsmooth.bounds.radius.stages import Attention, FeedForward, Norm, Softmax

__all__ = ["CubicAttention", "CubicFeedForward", "CubicNorm", "Expansion", "cubic_remainder_of"]


@dataclass(frozen=True, eq=False)
class Expansion:
    """The tokens at the input of a stage, as a polynomial in δ, and the adjoint of its output.

    ``u`` (n, d), ``tangents`` G (n, d, k), ``forms`` Q (n, d, p), ``sources`` of the errors x.
    """

    u: Tensor
    tangents: Tensor
    forms: Tensor
    pairs: Pairs
    sources: list[Source]
    adjoint: Tensor


class CubicNorm:
    """Remainder of a norm layer.

    Along a ray, h/|h| has Taylor coefficients of norm at most 1/√3, 1/2 and 1 in the orders 2, 3 and above.
    """

    def __init__(self, norm: Norm, at: Expansion) -> None:
        direction, r = norm.direction_and_length(at.u)
        self.r = r[:, 0]
        w = norm.centre(at.tangents)
        self.linear = spectral_norm(w) / self.r
        self.form = form_norm(norm.centre(at.forms), at.pairs) / 2 / self.r
        centre = norm.centre(torch.eye(at.u.shape[1], dtype=at.u.dtype)[None])[0]
        self.error = reached(at.sources, centre, by_row=False)
        self.gain = math.sqrt(at.u.shape[1]) * norm.gain.abs().max()
        b = norm.scaled(at.adjoint)
        self.adjoint = torch.linalg.vector_norm(b, dim=1)
        along = torch.einsum("nd,ndk->nk", direction, w) / r
        own = torch.einsum("nd,ndk->nk", b, w) / r
        square = at.pairs.packed(w.mT @ w) / r**2
        y = at.pairs.square(along)
        radial = torch.einsum("nd,nd->n", direction, b)[:, None] * along
        self.cubic = own.T @ (1.5 * y - 0.5 * square) + radial.T @ (1.5 * square - 2.5 * y)

    def __call__(self, epsilon: float, remainders: list[Tensor]) -> Left:
        """Return the bounds for |δ| ≤ ε; infinite where a token could be displaced by its whole length."""
        e = epsilon**2 * self.form + self.error(remainders) / self.r
        linear = epsilon * self.linear
        t = linear + e
        inside = t.clamp_max(1 - 1e-12)
        fourth = inside**4 / (1 - inside)
        vector = self.gain * ((2 * linear * e + e**2) / math.sqrt(3) + inside**3 / 2 + fourth)
        margin = self.adjoint * (e**2 / math.sqrt(3) + (t**3 - linear**3) / 2 + fourth)
        return Left(torch.where(t < 1, vector, torch.inf), torch.where(t < 1, margin, torch.inf).sum())


class CubicFeedForward:
    """Remainder of a feed-forward layer, neuron by neuron.

    The preactivations change by z = K δ + y, y = ½ W₁ Q[δ, δ] + W₁ x. The cubic part of W₂ φ, and its part
    that is linear in δ and in the remainder of one source, are bounded by Gram matrices over the neurons.
    For the rest, |w|, w = D y, is bounded entry by entry and by the norms of D W₁ Q and D W₁ J.
    """

    def __init__(self, layer: FeedForward, at: Expansion) -> None:
        self.layer, self.z = layer, layer.preactivations(at.u)
        activation, pairs = layer.activation, at.pairs
        self.K = layer.up @ at.tangents
        self.rows = torch.linalg.vector_norm(self.K, dim=2)
        self.error = reached(at.sources, layer.up, by_row=True)
        self.bend, self.twist = activation.second(self.z), activation.third(self.z)
        weights = at.adjoint @ layer.down
        self.adjoint = weights
        self.down = spectral_norm(layer.down)
        self.cubic = torch.zeros(pairs.k, len(pairs.i), dtype=at.u.dtype)
        forms, thirds, squared = [], [], []
        for K, Q, bend, twist, weight in zip(self.K, at.forms, self.bend, self.twist, weights, strict=True):
            squares, own = pairs.square(K), layer.up @ Q / 2
            forms.append(each_form_norm(own, pairs))
            squared.append(own @ own.T)
            mixed = bend[:, None] * own + (twist / 6)[:, None] * squares
            gram = layer.down @ ((K @ K.T) * (mixed @ mixed.T)) @ layer.down.T
            thirds.append(largest_eigenvalue(gram).clamp_min(0).sqrt())
            self.cubic += (K * (weight * twist / 6)[:, None]).T @ squares
        self.forms, self.third, self.squared = torch.stack(forms), torch.stack(thirds), torch.stack(squared)
        self.ellipsoid = Ellipsoid(at.sources, layer.up)

    def __call__(self, epsilon: float, remainders: list[Tensor]) -> Left:
        """Return the bounds for |δ| ≤ ε."""
        change = epsilon * self.rows + epsilon**2 * self.forms + self.error(remainders)
        vector, margin = self._rest(epsilon, remainders, change)
        return Left(epsilon**3 * self.third + vector, margin.sum())

    def _rest(self, epsilon: float, remainders: list[Tensor], change: Tensor) -> tuple[Tensor, Tensor]:
        """Bound the part of W₂ φ(z + Δz) of order four and more, or that contains the error x.

        The second bound is for the adjoint's combination of it, without the part linear in both δ and x.

        Each factor of a product of changes lies in an ellipsoid over the neurons; the product lies in the
        ellipsoid of the entrywise product of their matrices.
        """
        activation = self.layer.activation
        error = self.ellipsoid(remainders)
        linear = epsilon**2 * (self.K @ self.K.mT)
        y = epsilon**4 * self.squared
        vector = torch.zeros(len(y), dtype=y.dtype)
        if error is not None:
            error = self.layer.up @ error @ self.layer.up.T
            y = sum_of_ellipsoids(y, error)
            vector += product_norm(self.layer, self.bend, linear * error)
        z = sum_of_ellipsoids(linear, y)
        margin = torch.zeros_like(vector)
        for factor, matrix in (
            (self.bend / 2, y * y),
            (self.twist / 2, linear * linear * y),
            (self.twist / 2, linear * y * y),
            (self.twist / 6, y * y * y),
            (activation.fourth(self.z) / 24, z * z * z * z),
        ):
            vector += product_norm(self.layer, factor, matrix)
            margin += pulled_product(self.adjoint * factor, matrix)
        change = torch.minimum(change, z.diagonal(dim1=1, dim2=2).sqrt())
        fifth = activation.largest_fifth(self.z, change) / 120 * change**5
        vector += self.down * torch.linalg.vector_norm(fifth, dim=1)
        return vector, margin + (self.adjoint.abs() * fifth).sum(1)


class CubicAttention:
    """Remainder of attention, row by row and head by head.

    A score changes by t = ℓ + c with ℓ linear in δ and c = ½ ℓ(Q) + b + ℓ(x), b = dq·dk; a value by
    dv = v₁ + v₂, v₂ = ½ V Q + V x. With h(s) = E_{P_s}[v + s dv], P_s ∝ P e^{st}, the cubic part and the part
    linear in δ and in the remainder of one source are bounded as tensors; the rest by moments, with
    P_s ≤ e^{sτ} P where τ bounds the centred scores.
    """

    def __init__(self, attention: Attention, at: Expansion) -> None:
        own = attention.softmax(at.u)
        P, root = own.weights, own.weights.sqrt()
        pairs = at.pairs
        self.weights, self.seen, self.rows = P, P > 0, attention.rows
        dq, dk, dv = attention.tangents(at.tangents)
        q2, k2, v2 = (part / 2 for part in attention.tangents(at.forms))
        scores = attention.score_changes(own, dq, dk)
        self.score = torch.linalg.vector_norm(scores, dim=3)
        self.score_deviation = spectral_norm(root[..., None] * scores)
        self.query, self.query_form = spectral_norm(dq), form_norm(q2, pairs)
        self.key, self.key_form = weighted_norm(P, dk), _mean_square(P, form_norm(k2, pairs))
        self.each_key, self.each_key_form = spectral_norm(dk), form_norm(k2, pairs)
        curved = attention.score_changes(own, q2, k2)
        products = [[pairs.packed(dq[h, i].T @ dk[h]) for i in range(P.shape[1])] for h in range(len(P))]
        bilinear = own.centred(torch.stack([torch.stack(row) for row in products]))
        self.curved_deviation = form_norm(root[..., None] * curved, pairs)
        self.bilinear_deviation = form_norm(root[..., None] * bilinear, pairs)
        both = curved + bilinear
        self.form_deviation = form_norm(root[..., None] * both, pairs)
        self.form = each_form_norm(both, pairs)
        out = attention.output @ attention.value_weight
        self.value = weighted_norm(P, torch.einsum("hod,ndk->hnok", out, at.tangents))
        value_forms = torch.einsum("hod,ndp->hnop", out, at.forms) / 2
        self.value_form = _mean_square(P, form_norm(value_forms, pairs))
        spread = own.centred((attention.output @ own.v.mT).mT[:, None].expand(-1, P.shape[1], -1, -1))
        self.spread = spectral_norm(root[..., None] * spread)
        w = torch.einsum("hoe,io->hie", attention.output, at.adjoint)
        c = own.centred(w @ own.v.mT)
        self.largest = (c.abs() * self.seen).amax(2)
        self.deviation = (P * c.square()).sum(2).sqrt()
        dc = own.centred(torch.einsum("hie,hjek->hijk", w, dv))
        self.pulled = spectral_norm(root[..., None] * dc)
        dc2 = own.centred(torch.einsum("hie,hjep->hijp", w, v2))
        self.pulled_form = form_norm(root[..., None] * dc2, pairs)
        squares = pairs.square(scores)
        mean = torch.einsum("hij,hijp->hip", P, squares)[:, :, None]
        weighted = P[..., None]
        first = bilinear + (squares - mean) / 2
        second = bilinear + squares / 6 - mean / 2
        self.cubic = torch.einsum("hijk,hijp->kp", weighted * dc, first)
        self.cubic += torch.einsum("hijk,hijp->kp", weighted * c[..., None] * scores, second)
        self._errors(attention, at, own, out, w)
        tensors = _Tensors(attention, at, own, scores, spread, out)
        # A row of the first layer whose own token stands still is bounded well enough by moments alone.
        moved = self.query.sum(0) > 0 if not at.sources else torch.ones(P.shape[1], dtype=torch.bool)
        self.exact = moved
        self.third = torch.zeros(P.shape[1], dtype=P.dtype)
        for i in moved.nonzero()[:, 0].tolist():
            forms = curved[:, i] + bilinear[:, i]
            self.third[i] = tensors.cubic(i, forms, squares[:, i], mean[:, i], q2, k2, value_forms)
        self.crossed = Reach(tensors.crossed())

    def _errors(self, attention: Attention, at: Expansion, own: Softmax, out: Tensor, w: Tensor) -> None:
        """Measure how errors of the tokens reach queries, keys, values and scores."""
        P, sources = own.weights, at.sources
        identity = torch.eye(at.u.shape[1], dtype=P.dtype)
        self.error = reached(sources, identity, by_row=False)
        self.query_norm = spectral_norm(attention.query)
        self.key_norm = spectral_norm(attention.key)
        self.value_norm = spectral_norm(out)
        by_key = torch.einsum("hie,hed->hid", own.q, attention.key).flatten(0, 1)
        self.key_errors = reached(sources, by_key, by_row=True)
        by_value = torch.einsum("hie,hed->hid", w, attention.value_weight).flatten(0, 1)
        self.value_errors = reached(sources, by_value, by_row=True)
        keys = own.k[:, None] - torch.einsum("hij,hje->hie", P, own.k)[:, :, None]
        by_query = torch.einsum("hije,hed->ihjd", keys, attention.query).flatten(1, 2)
        full = torch.zeros(len(at.u), *by_query.shape[1:], dtype=P.dtype)
        full[attention.rows] = by_query
        self.query_errors = reached(sources, full, by_row=True)

    def __call__(self, epsilon: float, remainders: list[Tensor]) -> Left:
        """Return the bounds for |δ| ≤ ε."""
        P = self.weights
        heads, rows, n = P.shape
        square = epsilon**2
        zero = torch.zeros(n, dtype=P.dtype)
        eta = self.error(remainders) + zero
        key = (self.key_errors(remainders) + zero[:, None].expand(-1, heads * rows)).T.reshape(P.shape)
        key = key + torch.einsum("hij,hij->hi", P, key)[..., None]
        query = (self.query_errors(remainders) + zero[:, None].expand(-1, heads * n))[self.rows]
        score_error = key + query.unflatten(1, (heads, n)).transpose(0, 1)
        value = (self.value_errors(remainders) + zero[:, None].expand(-1, heads * rows)).T.reshape(P.shape)
        all_eta = torch.einsum("hij,j->hi", P, eta.square()).sqrt()
        # Queries and keys: the first order and the rest. All that is named without "each" is a deviation.
        dq1, dk1 = epsilon * self.query, epsilon * self.key
        dq2 = square * self.query_form + self.query_norm[:, None] * eta[self.rows]
        dk2 = square * self.key_form + self.key_norm[:, None] * all_eta
        longer = dq1 * dk2 + dq2 * dk1 + dq2 * dk2  # dq·dk beyond the second order
        each1 = epsilon * self.each_key
        each2 = square * self.each_key_form + self.key_norm[:, None] * eta
        each1 = each1[:, None] + torch.einsum("hij,hj->hi", P, each1)[..., None]
        each2 = each2[:, None] + torch.einsum("hij,hj->hi", P, each2)[..., None]
        each_longer = dq1[..., None] * each2 + dq2[..., None] * (each1 + each2)
        linear, of_error = epsilon * self.score_deviation, _mean_square(P, score_error)
        c = square * self.form_deviation + of_error + longer
        each_c = square * self.form + score_error + each_longer
        each = epsilon * self.score + each_c
        tau = torch.where(self.seen, each, 0.0).amax(2)
        each_linear = epsilon * torch.where(self.seen, self.score, 0.0).amax(2)
        of = _Moments(linear, c, tau)
        v1 = epsilon * self.value
        v2 = square * self.value_form + self.value_norm[:, None] * all_eta
        rest = self.spread * dq2 * dk2 + v1 * longer + v2 * c
        each_c = torch.where(self.seen, each_c, 0.0).amax(2)
        rest = rest + self.spread * (each_linear * longer + each_c * c / 2)
        rest = rest + of.beyond_third_order(self.spread, v1, v2)
        # where the cubic part is not known as a tensor
        known = rest.sum(0) + epsilon**3 * self.third + epsilon * (self.crossed(remainders) + zero[:rows])
        moments = of.third_order(self.spread, v1, v2)
        moments = moments + self.spread * (longer + each_linear * c + each_c * c / 2) + v1 * c + v2 * of.t
        vector = torch.where(self.exact, known, moments.sum(0))
        b = square * self.bilinear_deviation + longer
        e = square * self.curved_deviation + of_error
        dc1, dc2 = epsilon * self.pulled, square * self.pulled_form + _mean_square(P, value)
        margin = dc1 * longer + dc2 * b + self.largest * (linear * longer + e * b + b**2 / 2)
        margin = margin + of.beyond_third_order(self.deviation, dc1, dc2)
        margin = margin + dc2 * e + self.largest * e**2 / 2 + self.deviation * dq2 * dk2
        return Left(vector, margin.sum())


class _Moments:
    """Bounds on the derivatives of h(s) = E_{P_s}[v + s dv], from deviations under P.

    The scores change by t = ℓ + c; ``linear`` and ``c`` bound their deviations and ``tau`` the centred t.
    """

    def __init__(self, linear: Tensor, c: Tensor, tau: Tensor) -> None:
        self.linear, self.c, self.tau, self.t = linear, c, tau, linear + c
        self.grown = torch.exp(tau)
        self.farthest = tau + self.grown * self.t**2  # bounds |t_j − E_s t|
        small = tau.clamp_min(0.05)
        # ∫ (1 − s)² / 2 e^{sτ} ds and ∫ (1 − s)³ / 6 e^{sτ} ds
        self.third = (torch.expm1(small) - small - small**2 / 2) / small**3
        self.fourth = (torch.expm1(small) - small - small**2 / 2 - small**3 / 6) / small**4

    def third_order(self, spread: Tensor, v1: Tensor, v2: Tensor) -> Tensor:
        """Bound ∫ (1 − s)² / 2 h'''(s) ds, h''' = 3 κ(dv, t, t) + κ(v + s dv, t, t, t)."""
        dv, t, far = v1 + v2, self.t, self.farthest
        return self.third * (3 * dv * far * t + (spread + dv) * (far**2 * t + 3 * self.grown * t**3))

    def beyond_third_order(self, spread: Tensor, v1: Tensor, v2: Tensor) -> Tensor:
        """Bound the same without ½ κ(v₁, ℓ, ℓ) + κ(v, ℓ, ℓ, ℓ)/6 at s = 0."""
        c, t, tau, far, dv = self.c, self.t, self.tau, self.farthest, v1 + v2
        at_zero = (v2 * tau * t + 2 * v1 * c * tau) / 2 + spread * c * (tau**2 / 2 + 1.5 * t**2)
        fourth = 4 * dv * (far**2 * t + 3 * self.grown * t**3)
        fourth = fourth + (spread + dv) * far * t * (far**2 + 10 * self.grown * t**2)
        return at_zero + self.fourth * fourth


class _Tensors:
    """The cubic part of attention as a tensor, and its part linear in δ and in an error."""

    def __init__(
        self, attention: Attention, at: Expansion, own: Softmax, scores: Tensor, spread: Tensor, out: Tensor
    ) -> None:
        self.attention, self.at, self.own, self.scores, self.spread = attention, at, own, scores, spread
        self.dq, self.dk, _ = attention.tangents(at.tangents)
        self.values = torch.einsum("hod,ndk->hnok", out, at.tangents)
        self.out = out

    def cubic(
        self, i: int, forms: Tensor, squares: Tensor, mean: Tensor, q2: Tensor, k2: Tensor, v2: Tensor
    ) -> Tensor:
        """Bound the cubic part of row i for |δ| ≤ 1, by the Gram matrix of its outputs."""
        P, v, score = self.own.weights[:, i], self.spread[:, i], self.scores[:, i]
        weighted = P[..., None] * v  # (H, n, d_out)
        first = (forms + (squares - mean) / 2).flatten(0, 1)
        second = (forms + squares / 6 - mean / 2).flatten(0, 1)
        query, scored = self.dq[:, i].flatten(0, 1).mT, (P[..., None] * score).flatten(0, 1).mT
        outputs, pairs = v.shape[2], self.at.pairs
        found = torch.empty(outputs, pairs.k, len(pairs.i), dtype=v.dtype)
        for o in range(outputs):
            value = (P[..., None] * self.values[:, :, o]).flatten(0, 1)
            found[o] = value.mT @ first
            found[o] += (weighted[..., o, None] * score).flatten(0, 1).mT @ second
            if self.at.sources:
                found[o] += scored @ v2[:, :, o].flatten(0, 1)
                curved = torch.stack([w @ k.flatten(1) for w, k in zip(weighted[..., o], k2, strict=True)])
                found[o] += query @ curved.unflatten(1, k2.shape[2:]).flatten(0, 1)
                keys = torch.einsum("hj,hjek->hek", weighted[..., o], self.dk)
                found[o] += keys.flatten(0, 1).mT @ q2[:, i].flatten(0, 1)
        return spectral_norm(found.flatten(1))

    def crossed(self) -> list[Tensor]:
        """Bound |D²F[Gδ, J r]| for unit vectors δ and r, for each row and each token of each source."""
        sources, attention, own = self.at.sources, self.attention, self.own
        if not sources:
            return []
        found: list[list[Tensor]] = [[] for _ in sources]
        for i in range(own.weights.shape[1]):
            P, v, score = own.weights[:, i], self.spread[:, i], self.scores[:, i]
            values = self.values - torch.einsum("hj,hjok->hok", P, self.values)[:, None]
            moved = v[..., None] * score[:, :, None]
            slope = P[..., None, None] * (values + moved - torch.einsum("hj,hjok->hok", P, moved)[:, None])
            by_key = torch.einsum("he,hed->hd", own.q[:, i], attention.key)
            turned = torch.einsum("hjok,hd->okjd", slope, by_key)
            keys = torch.einsum("hek,hed->hkd", self.dq[:, i], attention.key)
            turned += torch.einsum("hjo,hkd->okjd", P[..., None] * v, keys)
            turned += torch.einsum("hjk,hod->okjd", P[..., None] * score, self.out)
            query = torch.einsum("hjok,hje->hoke", slope, own.k)
            query += torch.einsum("hjo,hjek->hoke", P[..., None] * v, self.dk)
            turned[:, :, int(attention.rows[i])] += torch.einsum("hoke,hed->okd", query, attention.query)
            for source, rows in zip(sources, found, strict=True):
                J = source.jacobian
                if source.alone:
                    tensor = torch.einsum("okjd,jdl->jokl", turned, J)
                else:
                    tensor = torch.einsum("okjd,jdnl->nokl", turned, J)
                rows.append(spectral_norm(tensor.flatten(2)))
        return [torch.stack(rows) for rows in found]


def cubic_remainder_of(
    stage: Attention | FeedForward | Norm, at: Expansion
) -> CubicAttention | CubicFeedForward | CubicNorm:
    """Return the remainder of the map of a stage."""
    if isinstance(stage, Attention):
        return CubicAttention(stage, at)
    if isinstance(stage, FeedForward):
        return CubicFeedForward(stage, at)
    return CubicNorm(stage, at)


def _mean_square(weights: Tensor, values: Tensor) -> Tensor:
    """Return (Σ_j w_ij values²)^½ for values (heads, n) or (heads, rows, n)."""
    if values.ndim == 2:
        return torch.einsum("hij,hj->hi", weights, values.square()).sqrt()
    return torch.einsum("hij,hij->hi", weights, values.square()).sqrt()
