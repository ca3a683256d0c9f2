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

from howsmooth.bounds.radius.errors import Ellipsoid, Source, reached
from howsmooth.bounds.radius.norms import largest_eigenvalue, spectral_norm, weighted_norm
from howsmooth.bounds.radius.stages import Attention, FeedForward, Norm, Softmax

__all__ = [
    "AttentionRemainder",
    "FeedForwardRemainder",
    "Left",
    "NormRemainder",
    "product_norm",
    "pulled_product",
    "remainder_of",
    "sum_of_ellipsoids",
]


class Left(NamedTuple):
    """Bounds on a remainder: its norm at each token of the output, and its effect on the margin."""

    vector: Tensor
    margin: Tensor


class NormRemainder:
    """Remainder of a norm layer, with the relative displacement t = |Δh|/r < 1.

    |R| ≤ √d max|gain| (2/√3) (−ln(1 − t) − t), and the part beyond the second order is at most
    |√d gain ∘ a| (3/2) (−ln(1 − t) − t − t²/2).
    """

    def __init__(
        self, norm: Norm, u: Tensor, tangents: Tensor, sources: list[Source], adjoint: Tensor
    ) -> None:
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

    The preactivations change by z = K δ + x, K = W₁ G, x = W₁ e. Each lies in an ellipsoid over the neurons,
    and a product of changes in the ellipsoid of the entrywise product of their matrices.
    """

    def __init__(
        self, layer: FeedForward, u: Tensor, tangents: Tensor, sources: list[Source], adjoint: Tensor
    ) -> None:
        self.layer, self.z = layer, layer.preactivations(u)
        K = layer.up @ tangents
        self.linear = K @ K.mT
        self.error = reached(sources, layer.up, by_row=True)
        self.ellipsoid = Ellipsoid(sources, layer.up)
        self.bend, self.twist = layer.activation.second(self.z), layer.activation.third(self.z)
        self.adjoint = adjoint @ layer.down
        self.down = spectral_norm(layer.down)
        self.square = self._square(K.shape[2])

    def _square(self, k: int) -> Tensor:
        """Bound |W₂ (φ'' ∘ (K δ)²)| for |δ| ≤ 1, with δδᵀ as a vector; and with its trace taken apart."""
        B = self.layer.down * self.bend[:, None]
        gram = B @ self.linear.square() @ B.mT
        trace = (B @ self.linear.diagonal(dim1=1, dim2=2)[..., None])[..., 0]
        whole = largest_eigenvalue(gram).clamp_min(0).sqrt()
        rest = gram - trace[:, :, None] * trace[:, None] / k
        apart = largest_eigenvalue(rest).clamp_min(0).sqrt() * math.sqrt(1 - 1 / k)
        return torch.minimum(whole, apart + torch.linalg.vector_norm(trace, dim=1) / k)

    def __call__(self, epsilon: float, remainders: list[Tensor]) -> Left:
        """Return the bounds for |δ| ≤ ε."""
        linear = z = epsilon**2 * self.linear
        change = epsilon * self.linear.diagonal(dim1=1, dim2=2).sqrt() + self.error(remainders)
        error = self.ellipsoid(remainders)
        vector, margin = epsilon**2 / 2 * self.square, torch.zeros_like(self.square)
        if error is not None:
            error = self.layer.up @ error @ self.layer.up.T
            z = sum_of_ellipsoids(linear, error)
            vector = vector + product_norm(self.layer, self.bend, linear * error)
            vector = vector + product_norm(self.layer, self.bend / 2, error * error)
            margin = margin + pulled_product(self.adjoint * self.bend / 2, error * error)
        vector = vector + product_norm(self.layer, self.twist / 6, z * z * z)
        margin = margin + pulled_product(self.adjoint * self.twist / 6, z * z * z)
        change = torch.minimum(change, z.diagonal(dim1=1, dim2=2).sqrt())
        fourth = self.layer.activation.largest_fourth(self.z, change) / 24 * change**4
        vector = vector + self.down * torch.linalg.vector_norm(fourth, dim=1)
        margin = margin + (self.adjoint.abs() * fourth).sum(1)
        return Left(vector, margin.sum())


def product_norm(layer: FeedForward, factor: Tensor, matrix: Tensor) -> Tensor:
    """Bound |W₂ (factor ∘ w)| for w in the ellipsoids with matrices (n, m, m), token by token."""
    B = layer.down * factor[:, None]
    return largest_eigenvalue(B @ matrix @ B.mT).clamp_min(0).sqrt()


def pulled_product(combination: Tensor, matrix: Tensor) -> Tensor:
    """Bound |⟨combination, w⟩| for w in the ellipsoids with matrices (n, m, m), token by token."""
    return torch.einsum("nk,nkl,nl->n", combination, matrix, combination).clamp_min(0).sqrt()


def sum_of_ellipsoids(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix of an ellipsoid that contains the sum of two, from theirs; the smallest trace."""
    a, b = (m.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()[..., None, None] for m in (left, right))
    a, b = a.clamp_min(1e-150), b.clamp_min(1e-150)
    return (a + b) * (left / a + right / b)


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
        spread = at.centred(
            torch.einsum("hoe,hje->hjo", attention.output, at.v)[:, None].expand(-1, P.shape[1], -1, -1)
        )
        self.spread = spectral_norm(root[..., None] * spread)
        w = torch.einsum("hoe,io->hie", attention.output, adjoint)
        c = at.centred(w @ at.v.mT)
        self.largest = (c.abs() * self.seen).amax(2)
        self.deviation = (P * c.square()).sum(2).sqrt()
        dc = at.centred(torch.einsum("hie,hjek->hijk", w, dv))
        self.pulled = spectral_norm(root[..., None] * dc)
        self._errors(attention, at, out, w, sources)

    def _errors(
        self, attention: Attention, at: Softmax, out: Tensor, w: Tensor, sources: list[Source]
    ) -> None:
        """Measure how errors of the tokens reach queries, keys, values and scores."""
        n = self.weights.shape[2]
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


def remainder_of(
    stage: Attention | FeedForward | Norm, u: Tensor, tangents: Tensor, sources: list[Source], adjoint: Tensor
) -> AttentionRemainder | FeedForwardRemainder | NormRemainder:
    """Return the remainder of the map of a stage at tokens u (n, d)."""
    if isinstance(stage, Attention):
        return AttentionRemainder(stage, u, tangents, sources, adjoint)
    if isinstance(stage, FeedForward):
        return FeedForwardRemainder(stage, u, tangents, sources, adjoint)
    return NormRemainder(stage, u, tangents, sources, adjoint)
