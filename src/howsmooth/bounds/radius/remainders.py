"""What the Taylor expansion of one stage leaves out, bounded on a ball: one class for each kind of stage.

The displacement of a token at the input of a stage is Δ = G δ + e, |δ| ≤ ε. A remainder is made once for all
ε. It then turns ε and the bounds of earlier remainders into two things: ``vector``, bounds on |R_j| for each
token j of the output, R = F(X + Δ) − F(X) − DF Δ; and ``margin``, a bound on
½ |eᵀ M e| + |a · (R − ½ D²F[Δ, Δ])|, where a is the adjoint of the output and M = a · D²F.

Proofs: documentation page "A proved radius for a whole network".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.errors import Source, reached
from howsmooth.bounds.radius.norms import largest_eigenvalue, spectral_norm, weighted_norm
from howsmooth.bounds.radius.stages import Attention, FeedForward, Norm

__all__ = ["AttentionRemainder", "FeedForwardRemainder", "Left", "NormRemainder"]


class Left(NamedTuple):
    """Bounds on a remainder: its norm at each token of the output, and its effect on the margin."""

    vector: Tensor
    margin: Tensor


class NormRemainder:
    """Remainder of a norm layer, with the relative displacement t = |Δh|/r < 1.

    |R| ≤ √d max|gain| (2/√3) (−ln(1 − t) − t), and the part beyond the second order is at most
    |√d gain ∘ a| (3/2) (−ln(1 − t) − t − t²/2).
    """

    def __init__(self, norm: Norm, u: Tensor, tangents: Tensor, sources: list[Source], adjoint: Tensor) -> None:
        self.r = norm.direction_and_length(u)[1][:, 0]
        self.size = spectral_norm(norm.centre(tangents))
        centre = torch.eye(u.shape[1], dtype=u.dtype)
        self.error = reached(sources, norm.centre(centre[None])[0], by_row=False)
        self.gain = math.sqrt(u.shape[1]) * norm.gain.abs().max()
        self.adjoint = torch.linalg.vector_norm(norm.scaled(adjoint), dim=1)

    def __call__(self, epsilon: float, remainders: list[Tensor]) -> Left:
        """Return the bounds for |δ| ≤ ε; infinite where a token could be displaced by its whole length."""
        e = self.error(remainders) / self.r
        t = epsilon * self.size / self.r + e
        inside = t.clamp_max(1 - 1e-12)
        second = -torch.log1p(-inside) - inside
        third = second - inside**2 / 2
        vector = self.gain * (2 / math.sqrt(3)) * second
        margin = self.adjoint * (1.5 * third + e**2 / math.sqrt(3))
        return Left(torch.where(t < 1, vector, torch.inf), torch.where(t < 1, margin, torch.inf).sum())


class FeedForwardRemainder:
    """Remainder of a feed-forward layer, neuron by neuron.

    With K = W₁ G, the changes of the preactivations are K δ + W₁ e, the second entry bounded by ξ. The
    quadratic term in δ is bounded by the Gram matrix of the squares (K δ)², the rest by the supremum of
    |φ'''| on the interval of each neuron.
    """

    def __init__(
        self, layer: FeedForward, u: Tensor, tangents: Tensor, sources: list[Source], adjoint: Tensor
    ) -> None:
        self.layer, self.z = layer, layer.preactivations(u)
        self.K = layer.up @ tangents
        self.rows = torch.linalg.vector_norm(self.K, dim=2)
        self.whole = spectral_norm(self.K)
        self.error = reached(sources, layer.up, by_row=True)
        self.bend = layer.activation.second(self.z)
        self.adjoint = (adjoint @ layer.down).abs()
        self.down = spectral_norm(layer.down)
        self.square = self._square()

    def _square(self) -> Tensor:
        """Bound |W₂ (φ'' ∘ (K δ)²)| for |δ| ≤ 1, with δδᵀ as a vector; and with its trace taken apart."""
        k = self.K.shape[2]
        found = []
        for bend, K, rows in zip(self.bend, self.K, self.rows, strict=True):
            B = self.layer.down * bend
            gram = B @ (K @ K.T).square() @ B.T
            trace = B @ rows.square()
            whole = largest_eigenvalue(gram).sqrt()
            traceless = largest_eigenvalue(gram - torch.outer(trace, trace) / k).clamp_min(0).sqrt()
            found.append(torch.minimum(whole, traceless * math.sqrt(1 - 1 / k) + trace.norm() / k))
        return torch.stack(found)

    def __call__(self, epsilon: float, remainders: list[Tensor]) -> Left:
        """Return the bounds for |δ| ≤ ε."""
        xi = self.error(remainders)
        linear = epsilon * self.rows
        change = linear + xi
        third = self.layer.activation.largest_third(self.z, change) / 6
        cubic = third * change**2
        # |R − ½ W₂(φ'' ∘ (Kδ)²)| ≤ ‖W₂‖ |rest|, rest_k ≤ |φ''| (|Kδ| ξ + ξ²/2) + φ'''/6 |z|³
        crossed = self.bend.abs() * (linear * xi + xi**2 / 2) + cubic * xi
        own = torch.minimum(
            torch.linalg.vector_norm(cubic * linear, dim=1), cubic.amax(1) * self.whole * epsilon
        )
        vector = epsilon**2 / 2 * self.square + self.down * (torch.linalg.vector_norm(crossed, dim=1) + own)
        # Σ_k α_k φ'''/6 |z_k|³ ≤ (ε ‖√ω K‖ + |√ω ξ|)², ω = α φ'''/6 |z|
        weight = (self.adjoint * third * change).sqrt()
        quadratic = epsilon * spectral_norm(weight[..., None] * self.K)
        quadratic = quadratic + torch.linalg.vector_norm(weight * xi, dim=1)
        margin = quadratic**2 + (self.adjoint * self.bend.abs() * xi**2).sum(1) / 2
        return Left(vector, margin.sum())


class AttentionRemainder:
    """Remainder of attention, row by row and head by head.

    A score changes by t = ℓ + b, linear and bilinear. With h(s) = E_{P_s}[v + s dv], P_s ∝ P e^{st}, the
    remainder is Cov(v, b) + ∫ (1 − s) (2 Cov_s(dv, t) + κ_s(v + s dv, t, t)) ds, κ the third cumulant.
    P_s ≤ e^{sτ} P where τ bounds the centred scores, so that every moment is bounded by one at s = 0.
    """

    def __init__(
        self, attention: Attention, u: Tensor, tangents: Tensor, sources: list[Source], adjoint: Tensor
    ) -> None:
        at = attention.softmax(u)
        P, root = at.weights, at.weights.sqrt()
        self.weights, self.seen = P, P > 0
        dq, dk, dv = attention.tangents(tangents)
        changes = attention.score_changes(at, dq, dk)
        self.score = torch.linalg.vector_norm(changes, dim=3)
        self.score_deviation = spectral_norm(root[..., None] * changes)
        self.query = spectral_norm(dq)
        self.key = weighted_norm(P, dk)
        self.each_key = spectral_norm(dk)
        out = attention.output @ attention.value_weight  # (H, d_out, d)
        self.value = weighted_norm(P, torch.einsum("hod,ndk->hnok", out, tangents))
        spread = at.centred(torch.einsum("hoe,hje->hjo", attention.output, at.v)[:, None].expand(-1, P.shape[1], -1, -1))
        self.spread = spectral_norm(root[..., None] * spread)
        w = torch.einsum("hoe,io->hie", attention.output, adjoint)
        c = at.centred(w @ at.v.mT)
        self.largest = (c.abs() * self.seen).amax(2)
        self.deviation = (P * c.square()).sum(2).sqrt()
        dc = at.centred(torch.einsum("hie,hjek->hijk", w, dv))
        self.pulled = spectral_norm(root[..., None] * dc)
        self._errors(attention, at, out, w, sources)

    def _errors(self, attention: Attention, at: object, out: Tensor, w: Tensor, sources: list[Source]) -> None:
        """Measure how errors of the tokens reach queries, keys, values and scores."""
        heads, rows, n = self.weights.shape
        identity = torch.eye(attention.key.shape[2], dtype=w.dtype)
        self.error = reached(sources, identity, by_row=False)
        self.rows = attention.rows
        self.query_norm = spectral_norm(attention.query)
        self.key_norm = spectral_norm(attention.key)
        self.value_norm = spectral_norm(out)
        by_key = torch.einsum("hie,hed->hid", at.q, attention.key).flatten(0, 1)
        self.key_errors = reached(sources, by_key, by_row=True)
        by_value = torch.einsum("hie,hed->hid", w, attention.value_weight).flatten(0, 1)
        self.value_errors = reached(sources, by_value, by_row=True)
        keys = at.k[:, None] - torch.einsum("hij,hje->hie", at.weights, at.k)[:, :, None]
        by_query = torch.einsum("hije,hed->ihjd", keys, attention.query).flatten(1, 2)
        full = torch.zeros(n, *by_query.shape[1:], dtype=w.dtype)
        full[attention.rows] = by_query
        self.query_errors = reached(sources, full, by_row=True)

    def __call__(self, epsilon: float, remainders: list[Tensor]) -> Left:
        """Return the bounds for |δ| ≤ ε."""
        P = self.weights
        heads, rows, n = P.shape

        def deviation(values: Tensor) -> Tensor:
            return torch.einsum("hij,hij->hi", P, values.square()).sqrt()

        zero = torch.zeros(n, dtype=P.dtype)
        eta = self.error(remainders) + zero
        key = (self.key_errors(remainders) + zero[:, None].expand(-1, heads * rows)).T.reshape(P.shape)
        key = key + torch.einsum("hij,hij->hi", P, key)[..., None]
        query = (self.query_errors(remainders) + zero[:, None].expand(-1, heads * n))[self.rows]
        score_error = key + query.unflatten(1, (heads, n)).transpose(0, 1)
        value = (self.value_errors(remainders) + zero[:, None].expand(-1, heads * rows)).T.reshape(P.shape)
        value_error = deviation(value)
        all_eta = torch.einsum("hij,j->hi", P, eta.square()).sqrt()
        dq_error = self.query_norm[:, None] * eta[self.rows]
        dq = epsilon * self.query + dq_error
        key_error = self.key_norm[:, None] * all_eta
        dk = epsilon * self.key + key_error
        each_key = epsilon * self.each_key + self.key_norm[:, None] * eta
        mean_key = torch.einsum("hij,hj->hi", P, each_key)
        bilinear = dq * dk  # bounds the deviation of b
        linear = epsilon * self.score_deviation + deviation(score_error)
        t = linear + bilinear
        each = epsilon * self.score + score_error + dq[..., None] * (each_key[:, None] + mean_key[..., None])
        tau = torch.where(self.seen, each, 0.0).amax(2)
        grown = torch.exp(tau)
        farthest = tau + grown * t**2  # bounds |t_j − E_s t|
        small = tau.clamp_min(1e-3)
        second = 2 * (torch.expm1(small) - small) / small**2
        third = 6 * (torch.expm1(small) - small - small**2 / 2) / small**3
        dv = epsilon * self.value + self.value_norm[:, None] * all_eta
        vector = self.spread * bilinear + second * dv * t + second / 2 * (self.spread + dv) * farthest * t
        dc = epsilon * self.pulled + value_error
        margin = dc * bilinear + self.largest * bilinear * (linear + bilinear / 2)
        fourth = (self.deviation + dc) * (farthest**2 * t + 3 * grown * t**3)
        margin = margin + third / 6 * (3 * dc * farthest * t + fourth)
        of_error = deviation(score_error)
        margin = margin + value_error * of_error + self.largest * of_error**2 / 2
        margin = margin + self.deviation * dq_error * key_error
        return Left(vector.sum(0), margin.sum())
