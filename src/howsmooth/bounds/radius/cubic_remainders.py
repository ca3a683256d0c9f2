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

from howsmooth.bounds.radius.errors import Source, reached
from howsmooth.bounds.radius.norms import (
    each_form_norm,
    form_norm,
    largest_eigenvalue,
    spectral_norm,
    weighted_norm,
)
from howsmooth.bounds.radius.pairs import Pairs
from howsmooth.bounds.radius.remainders import Left
from howsmooth.bounds.radius.stages import Attention, FeedForward, Norm

__all__ = ["CubicAttention", "CubicFeedForward", "CubicNorm", "Expansion"]


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

    The preactivations change by z = K δ + y, |y| ≤ ε² ½ ‖W₁ Q‖ + ξ. The cubic part of W₂ φ is bounded by the
    Gram matrix of the cubic forms (K δ) · (½ φ'' ½ W₁ Q + φ'''/6 (K δ)²), the rest neuron by neuron.
    """

    def __init__(self, layer: FeedForward, at: Expansion) -> None:
        self.layer, self.z = layer, layer.preactivations(at.u)
        activation, pairs = layer.activation, at.pairs
        self.K = layer.up @ at.tangents
        self.rows = torch.linalg.vector_norm(self.K, dim=2)
        self.error = reached(at.sources, layer.up, by_row=True)
        self.bend, self.twist = activation.second(self.z), activation.third(self.z)
        weights = at.adjoint @ layer.down
        self.adjoint = weights.abs()
        self.down = spectral_norm(layer.down)
        self.cubic = torch.zeros(pairs.k, len(pairs.i), dtype=at.u.dtype)
        forms, thirds = [], []
        for K, Q, bend, twist, weight in zip(self.K, at.forms, self.bend, self.twist, weights, strict=True):
            squares, own = pairs.square(K), layer.up @ Q / 2
            forms.append(each_form_norm(own, pairs))
            mixed = bend[:, None] * own + (twist / 6)[:, None] * squares
            gram = layer.down @ ((K @ K.T) * (mixed @ mixed.T)) @ layer.down.T
            thirds.append(largest_eigenvalue(gram).clamp_min(0).sqrt())
            self.cubic += (K * (weight * twist / 6)[:, None]).T @ squares
        self.forms, self.third = torch.stack(forms), torch.stack(thirds)

    def __call__(self, epsilon: float, remainders: list[Tensor]) -> Left:
        """Return the bounds for |δ| ≤ ε."""
        xi = self.error(remainders)
        linear = epsilon * self.rows
        y = epsilon**2 * self.forms + xi
        change = linear + y
        fourth = self.layer.activation.largest_fourth(self.z, change) / 24 * change**4
        longer = self.twist.abs() / 6 * (change**3 - linear**3)
        rest = self.bend.abs() * (linear * xi + y**2 / 2) + longer + fourth
        vector = epsilon**3 * self.third + self.down * torch.linalg.vector_norm(rest, dim=1)
        left = self.adjoint * (self.bend.abs() * y**2 / 2 + longer + fourth)
        return Left(vector, left.sum())


class CubicAttention:
    """Remainder of attention, row by row and head by head.

    A score changes by t = ℓ + c with ℓ linear in δ and c = ½ ℓ(Q) + dq·dk + the errors; a value by
    dv = v₁ + v₂, v₂ = ½ V Q + the errors. P_s ≤ e^{sτ} P as for the second order.
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
        bilinear = own.centred(
            torch.stack(
                [
                    torch.stack([pairs.packed(dq[h, i].T @ dk[h]) for i in range(P.shape[1])])
                    for h in range(len(P))
                ]
            )
        )
        self.curved_deviation = form_norm(root[..., None] * curved, pairs)
        self.bilinear_deviation = form_norm(root[..., None] * bilinear, pairs)
        both = curved + bilinear
        self.form_deviation = form_norm(root[..., None] * both, pairs)
        self.form = each_form_norm(both, pairs)
        self.each_bilinear = each_form_norm(bilinear, pairs)
        out = attention.output @ attention.value_weight
        self.value = weighted_norm(P, torch.einsum("hod,ndk->hnok", out, at.tangents))
        value_forms = form_norm(torch.einsum("hod,ndp->hnop", out, at.forms) / 2, pairs)
        self.value_form = _mean_square(P, value_forms)
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
        self.cubic = torch.zeros(pairs.k, len(pairs.i), dtype=P.dtype)
        identity = torch.eye(at.u.shape[1], dtype=P.dtype)
        sources = at.sources
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

        def deviation(values: Tensor) -> Tensor:
            return _mean_square(P, values)

        zero = torch.zeros(n, dtype=P.dtype)
        eta = self.error(remainders) + zero
        key = (self.key_errors(remainders) + zero[:, None].expand(-1, heads * rows)).T.reshape(P.shape)
        key = key + torch.einsum("hij,hij->hi", P, key)[..., None]
        query = (self.query_errors(remainders) + zero[:, None].expand(-1, heads * n))[self.rows]
        score_error = key + query.unflatten(1, (heads, n)).transpose(0, 1)
        value = (self.value_errors(remainders) + zero[:, None].expand(-1, heads * rows)).T.reshape(P.shape)
        value_error = deviation(value)
        all_eta = torch.einsum("hij,j->hi", P, eta.square()).sqrt()
        # queries and keys: first order, the rest
        dq1 = epsilon * self.query
        dq2 = square * self.query_form + self.query_norm[:, None] * eta[self.rows]
        dk1 = epsilon * self.key
        dk2 = square * self.key_form + self.key_norm[:, None] * all_eta
        longer = dq1 * dk2 + dq2 * dk1 + dq2 * dk2  # deviation of dq·dk beyond the second order
        each1 = epsilon * self.each_key
        each2 = square * self.each_key_form + self.key_norm[:, None] * eta
        each1 = each1[:, None] + torch.einsum("hij,hj->hi", P, each1)[..., None]
        each2 = each2[:, None] + torch.einsum("hij,hj->hi", P, each2)[..., None]
        each_longer = dq1[..., None] * each2 + dq2[..., None] * (each1 + each2)
        # scores
        linear = epsilon * self.score_deviation
        of_error = deviation(score_error)
        c = square * self.form_deviation + of_error + longer
        t = linear + c
        each_c = square * self.form + score_error + each_longer
        each = torch.where(self.seen, epsilon * self.score + each_c, 0.0)
        tau = each.amax(2)
        tau_linear = epsilon * torch.where(self.seen, self.score, 0.0).amax(2)
        tau_c = torch.where(self.seen, each_c, 0.0).amax(2)
        grown = torch.exp(tau)
        farthest = tau + grown * t**2
        small = tau.clamp_min(1e-3)
        third = (torch.expm1(small) - small - small**2 / 2) / small**3
        # values
        v1 = epsilon * self.value
        v2 = square * self.value_form + self.value_norm[:, None] * all_eta
        power = farthest**2 * t + 3 * grown * t**3  # bounds κ(·, t, t, t) for a unit deviation
        vector = self.spread * longer + v1 * c + v2 * t
        vector = vector + self.spread * (torch.minimum(tau_linear * c, tau_c * linear) + tau_c * c / 2)
        vector = vector + third * (3 * (v1 + v2) * farthest * t + (self.spread + v1 + v2) * power)
        # margin
        b = square * self.bilinear_deviation + longer
        e = square * self.curved_deviation + of_error
        dc2 = square * self.pulled_form + value_error
        dc = epsilon * self.pulled + dc2
        margin = dc * b + self.largest * b * (linear + e + b / 2)
        margin = margin + third * (3 * dc * farthest * t + (self.deviation + dc) * power)
        margin = margin + dc2 * e + self.largest * e**2 / 2 + self.deviation * dq2 * dk2
        return Left(vector.sum(0), margin.sum())


def _mean_square(weights: Tensor, values: Tensor) -> Tensor:
    """Return (Σ_j w_ij values²)^½ for values (heads, n) or (heads, rows, n)."""
    if values.ndim == 2:
        return torch.einsum("hij,hj->hi", weights, values.square()).sqrt()
    return torch.einsum("hij,hij->hi", weights, values.square()).sqrt()
