"""The derivative of softmax attention with respect to queries, keys and values (theory §2).

With s = q kᵀ (the scale is folded into q), S = c tanh(s/c) or s, and D the derivative of the cap, or 1:
dS = D∘(dq kᵀ + q dkᵀ). With P the row softmax dP = P∘(dS − rowsum(P∘dS)) and dO = dP v + P dv. Nothing here
knows tokens or projections.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from howsmooth.attention.core import ScoreFeatures, attention_scores, cap_slope, row_blocks, weighted_values

__all__ = [
    "SoftmaxDerivative",
    "WeightedSoftmaxDerivative",
    "largest_score",
    "rounding_of",
    "softmax_derivative",
    "stacked",
]


@dataclass(frozen=True)
class SoftmaxDerivative:
    """Derivative of attention at one point, its probabilities P kept in memory (n² a head).

    Axes: b = batch member times key/value head, m = n times the query heads that share it.

    Parameters
    ----------
    q
        Scaled queries (b, m, key_dim).
    k, v
        Keys and values (b, n, ·). Both may be shifted by a constant vector a head, the keys only without a
        cap: rows of dP sum to zero, so the derivative does not change, and centring them spares digits.
    p
        Attention probabilities (b, m, n).
    mean
        P v, (b, m, value_dim).
    slope
        P∘D, (b, m, n); P itself where the scores have no cap.

    """

    q: Float[Tensor, "b m key_dim"]
    k: Float[Tensor, "b n key_dim"]
    v: Float[Tensor, "b n value_dim"]
    p: Float[Tensor, "b m n"]
    mean: Float[Tensor, "b m value_dim"]
    slope: Float[Tensor, "b m n"]

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Relative error of the derivative's norm that rounding in the products may cause, each member.

        dS has entries up to max|q| max|k| times a unit tangent, of which the softmax keeps a difference
        of order one: with that factor κ the errors measured stay below eps (2 + κ / 100), over
        saturated and unsaturated, causal and unmasked heads with κ up to 2000.
        """
        return rounding_of(largest_score(self.q, self.k, batch), self.q.dtype)

    def product(
        self,
        dq: Float[Tensor, "b m key_dim"],
        dk: Float[Tensor, "b n key_dim"],
        dv: Float[Tensor, "b n value_dim"],
    ) -> Float[Tensor, "b m value_dim"]:
        """Return dO for tangents of the scaled queries, the keys and the values."""
        ds = torch.baddbmm(torch.bmm(dq, self.k.mT), self.q, dk.mT)
        ds.mul_(self.slope)
        dp = torch.addcmul(ds, self.p, ds.sum(dim=-1, keepdim=True), value=-1)
        return torch.baddbmm(torch.bmm(dp, self.v), self.p, dv)

    def adjoint(
        self, do: Float[Tensor, "b m value_dim"]
    ) -> tuple[Float[Tensor, "b m key_dim"], Float[Tensor, "b n key_dim"], Float[Tensor, "b n value_dim"]]:
        """Return the adjoint's (scaled queries, keys, values) parts for a cotangent of the output."""
        # rowsum(P∘(dO vᵀ)) = rowsum(dO∘(P v)): one product of size n × value_dim less.
        ds = torch.bmm(do, self.v.mT)
        ds.sub_((do * self.mean).sum(dim=-1, keepdim=True)).mul_(self.slope)
        return torch.bmm(ds, self.k), torch.bmm(ds.mT, self.q), torch.bmm(self.p.mT, do)

    def select(self, rows: Tensor) -> SoftmaxDerivative:
        """Return the derivative of some rows of the axis b."""
        p = self.p[rows]
        slope = p if self.slope is self.p else self.slope[rows]
        return SoftmaxDerivative(self.q[rows], self.k[rows], self.v[rows], p, self.mean[rows], slope)


@dataclass(frozen=True)
class WeightedSoftmaxDerivative:
    """Derivative of attention on a measure with weights a_i, between the weighted norms (Definition C.4).

    Tangents and images are multiplied by the root of their atom's weight: with dq̃_i = √a_i dq_i and so on,
    dÕ_i = Σ_j T_ij (v_j − O_i) + Σ_j P̃_ij dṽ_j, T = P∘D∘(dq̃ kᵀ) + P̃∘D∘(q dk̃ᵀ), P̃_ij = √(a_i/a_j) P_ij. Every
    number in it is formed from logarithms, so that no weight is too small. Derivation:
    docs/theory/mean-field.md.

    Parameters
    ----------
    q, k, v, mean, slope
        As for :class:`SoftmaxDerivative`, P_ij ∝ a_j e^{S_ij}.
    tilted, tilted_slope
        P̃ and P̃∘D, (b, m, n).
    log_range
        Largest |log a_j|: what its rounding does to exponents is allowed for.

    """

    q: Float[Tensor, "b m key_dim"]
    k: Float[Tensor, "b n key_dim"]
    v: Float[Tensor, "b n value_dim"]
    slope: Float[Tensor, "b m n"]
    tilted: Float[Tensor, "b m n"]
    tilted_slope: Float[Tensor, "b m n"]
    mean: Float[Tensor, "b m value_dim"]
    log_range: float

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Relative error of the derivative's norm that rounding may cause, each member.

        That of :class:`SoftmaxDerivative`, and that of the exponents: a small P_ij counts here where a_j is
        small too, and its logarithm is a float64 number of size κ + ``log_range``. Against 60 digits, errors
        measured stay below (κ + log_range) eps, over weights down to e^-1400 and κ up to 14,000.
        """
        kappa = largest_score(self.q, self.k, batch)
        exponents = 4.0 * torch.finfo(torch.float64).eps * (kappa + self.log_range)
        return rounding_of(kappa, self.q.dtype) + exponents

    def product(
        self,
        dq: Float[Tensor, "b m key_dim"],
        dk: Float[Tensor, "b n key_dim"],
        dv: Float[Tensor, "b n value_dim"],
    ) -> Float[Tensor, "b m value_dim"]:
        """Return dÕ for weighted tangents of the scaled queries, the keys and the values."""
        t = torch.bmm(dq, self.k.mT).mul_(self.slope)
        t.addcmul_(torch.bmm(self.q, dk.mT), self.tilted_slope)
        do = torch.addcmul(torch.bmm(t, self.v), t.sum(dim=-1, keepdim=True), self.mean, value=-1)
        return torch.baddbmm(do, self.tilted, dv)

    def adjoint(
        self, do: Float[Tensor, "b m value_dim"]
    ) -> tuple[Float[Tensor, "b m key_dim"], Float[Tensor, "b n key_dim"], Float[Tensor, "b n value_dim"]]:
        """Return the adjoint's (scaled queries, keys, values) parts for a weighted cotangent."""
        w = torch.bmm(do, self.v.mT).sub_((do * self.mean).sum(dim=-1, keepdim=True))
        dk = torch.bmm((w * self.tilted_slope).mT, self.q)
        return torch.bmm(w.mul_(self.slope), self.k), dk, torch.bmm(self.tilted.mT, do)

    def select(self, rows: Tensor) -> WeightedSoftmaxDerivative:
        """Return the derivative of some rows of the axis b."""
        return replace(
            self,
            q=self.q[rows],
            k=self.k[rows],
            v=self.v[rows],
            slope=self.slope[rows],
            tilted=(tilted := self.tilted[rows]),
            tilted_slope=tilted if self.tilted_slope is self.tilted else self.tilted_slope[rows],
            mean=self.mean[rows],
        )


def softmax_derivative(
    q: Float[Tensor, "batch kv_heads group m key_dim"],
    k: Float[Tensor, "batch kv_heads n key_dim"],
    v: Float[Tensor, "batch kv_heads n value_dim"],
    scale: float,
    visible: Bool[Tensor, "m n"] | None,
    features: ScoreFeatures,
    dtype: torch.dtype,
) -> SoftmaxDerivative:
    """Return the derivative at float64 queries, keys and values, for products in ``dtype``.

    Probabilities are formed in float64 in blocks, and kept rounded: of all of them there is one copy only.
    """
    kv_heads, group, m, n = k.shape[1], q.shape[2], q.shape[3], k.shape[2]
    queries, keys, values = stacked(q, k, v, scale, features)
    q, k, heads = q.flatten(0, 1), k.flatten(0, 1), k.shape[0] * kv_heads
    p = q.new_empty((heads, group, m, keys.shape[1]), dtype=dtype)
    slope = p if features.softcap is None else torch.empty_like(p)
    mean = q.new_empty((heads, group, m, values.shape[-1]))
    for some, all_rows in row_blocks(heads, group, m, n, q.device):
        members = torch.arange(heads, device=q.device)[some]
        for rows in all_rows:
            part = features.block(members // kv_heads, members % kv_heads, rows, slice(n))
            seen = None if visible is None else visible[rows]
            scores = attention_scores(q[some, :, rows], k[some], scale, seen, None, part)
            exact = torch.softmax(part.with_sinks(scores), dim=-1)
            p[some, :, rows] = exact.to(dtype)
            mean[some, :, rows] = weighted_values(exact, values[some])
            if features.softcap is not None:
                uncapped = queries.reshape(q.shape)[some, :, rows] @ keys[some, None].mT
                slope[some, :, rows] = (exact * cap_slope(uncapped, features.softcap)).to(dtype)
    rounded = p.flatten(1, 2)
    slope = rounded if features.softcap is None else slope.flatten(1, 2)
    queries, keys, values, mean = (t.to(dtype) for t in (queries, keys, values, mean.flatten(1, 2)))
    return SoftmaxDerivative(queries, keys, values, rounded, mean, slope)


def stacked(
    q: Float[Tensor, "batch kv_heads group m key_dim"],
    k: Float[Tensor, "batch kv_heads n key_dim"],
    v: Float[Tensor, "batch kv_heads n value_dim"],
    scale: float,
    features: ScoreFeatures,
) -> tuple[
    Float[Tensor, "b rows key_dim"], Float[Tensor, "b keys key_dim"], Float[Tensor, "b keys value_dim"]
]:
    """Scaled queries (b, m, ·), and keys and values (b, n, ·) centred, b = batch member times key head.

    A sink is one more key and value, zero before it is shifted with the others. With a cap the keys stay:
    their shift would be multiplied by its derivative, which differs in a row.
    """
    q, k, v = (scale * q).flatten(2, 3).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    # The tokens' mean, without the sink's zero: where its part is small, what is common must be gone.
    key_shift, value_shift = k.mean(dim=1, keepdim=True), v.mean(dim=1, keepdim=True)
    if features.sinks is not None:
        k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
    return q, k if features.softcap is not None else k - key_shift, v - value_shift


def largest_score(q: Tensor, k: Tensor, batch: int) -> Float[Tensor, " batch"]:
    """max|q| max|k| of each member, float64 on the CPU."""
    longest_q, longest_k = (
        torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64).amax(dim=-1).view(batch, -1) for t in (q, k)
    )
    kappa: Tensor = (longest_q * longest_k).amax(dim=-1).cpu()
    return kappa


def rounding_of(kappa: Float[Tensor, " batch"], dtype: torch.dtype) -> Float[Tensor, " batch"]:
    """Relative error of a derivative's norm by rounding in ``dtype``, at scores of size ``kappa``."""
    return torch.finfo(dtype).eps * (32.0 + kappa / 25.0)
