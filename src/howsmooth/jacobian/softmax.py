"""The derivative of softmax attention with respect to queries, keys and values (theory §2).

With s = q kᵀ (the scale is folded into q), S = c tanh(s/c) or s, D the derivative of the cap, or 1, P the row
softmax and O = P v: dS = P∘D∘(dq kᵀ + q dkᵀ) and dO_i = Σ_j dS_ij (v_j − O_i) + Σ_j P_ij dv_j. Nothing here
knows tokens or projections.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention.core import attention_scores, cap_slope, row_blocks, weighted_values
from howsmooth.jacobian.moments import Moments, moment_columns
from howsmooth.jacobian.operands import Operands

__all__ = [
    "Sink",
    "SoftmaxDerivative",
    "WeightedSoftmaxDerivative",
    "largest_score",
    "rounding_of",
    "softmax_derivative",
]


@dataclass(frozen=True, eq=False)
class Sink:
    """One further key of each head, which has no value and does not move.

    Shifting all keys shifts its own, which is zero, and the softmax forgets a shift of all of them only.

    Parameters
    ----------
    p
        Its probability in each row (b, *rows).
    k
        Its shifted key (b, key_dim).
    away
        Its value less the output O, which is −O: formed by itself, since next to a sink that takes nearly all
        of a row O is far smaller than what values are shifted by; (b, *rows, value_dim).

    """

    p: Float[Tensor, "b *rows"]
    k: Float[Tensor, "b key_dim"]
    away: Float[Tensor, "b *rows value_dim"]

    @classmethod
    def at(cls, operands: Operands, p: Tensor, output: Tensor) -> Sink:
        """Return the sink of all heads from its probabilities and the outputs O, rows in any shape."""
        heads = operands.heads
        return cls(p, -operands.key_shift.reshape(heads, -1), -output)

    def to(self, dtype: torch.dtype) -> Sink:
        """Return the same in another dtype."""
        return Sink(*(t.to(dtype) for t in vars(self).values()))

    def select(self, rows: Tensor) -> Sink:
        """Return that of some rows of the axis b."""
        return Sink(*(t[rows] for t in vars(self).values()))


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
        cap: Σ_j P_ij (v_j − O_i) is zero, so the derivative does not change, and centring them spares digits.
    p
        Attention probabilities (b, m, n).
    mean
        The outputs O, shifted as the values are, (b, m, value_dim).
    slope
        P∘D, (b, m, n); P itself where the scores have no cap.
    sink
        One further key of each head, where there is one that counts.
    moments
        What the proof of its rounding needs to know of P, in float64.

    """

    q: Float[Tensor, "b m key_dim"]
    k: Float[Tensor, "b n key_dim"]
    v: Float[Tensor, "b n value_dim"]
    p: Float[Tensor, "b m n"]
    mean: Float[Tensor, "b m value_dim"]
    slope: Float[Tensor, "b m n"]
    sink: Sink | None = None
    moments: Moments | None = None

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Estimate the relative error of the derivative's norm by rounding in the products, of each member.

        dS has entries up to max|q| max|k| times a unit tangent, of which the softmax keeps a difference
        of order one: with that factor κ the errors measured stay below eps (2 + κ / 100), over
        saturated and unsaturated, causal and unmasked heads with κ up to 2000. Where it is to be proved, see
        :mod:`howsmooth.jacobian.proved`.
        """
        return rounding_of(largest_score(self.q, self.k, batch), self.q.dtype)

    def product(
        self,
        dq: Float[Tensor, "b m key_dim"],
        dk: Float[Tensor, "b n key_dim"],
        dv: Float[Tensor, "b n value_dim"],
    ) -> Float[Tensor, "b m value_dim"]:
        """Return dO for tangents of the scaled queries, the keys and the values."""
        ds = torch.baddbmm(torch.bmm(dq, self.k.mT), self.q, dk.mT).mul_(self.slope)
        out = torch.baddbmm(torch.bmm(ds, self.v), self.p, dv)
        out.addcmul_(ds.sum(dim=-1, keepdim=True), self.mean, value=-1)
        if self.sink is not None:
            moved = torch.bmm(dq, self.sink.k[..., None]).mul_(self.sink.p[..., None])
            out.addcmul_(moved, self.sink.away)
        return out

    def adjoint(
        self, do: Float[Tensor, "b m value_dim"]
    ) -> tuple[Float[Tensor, "b m key_dim"], Float[Tensor, "b n key_dim"], Float[Tensor, "b n value_dim"]]:
        """Return the adjoint's (scaled queries, keys, values) parts for a cotangent of the output."""
        ds = torch.bmm(do, self.v.mT)
        ds.sub_((do * self.mean).sum(dim=-1, keepdim=True)).mul_(self.slope)
        dq = torch.bmm(ds, self.k)
        if self.sink is not None:
            moved = (do * self.sink.away).sum(dim=-1, keepdim=True).mul_(self.sink.p[..., None])
            dq.addcmul_(moved, self.sink.k[:, None])
        return dq, torch.bmm(ds.mT, self.q), torch.bmm(self.p.mT, do)

    def select(self, rows: Tensor) -> SoftmaxDerivative:
        """Return the derivative of some rows of the axis b."""
        p = self.p[rows]
        slope = p if self.slope is self.p else self.slope[rows]
        sink = None if self.sink is None else self.sink.select(rows)
        return SoftmaxDerivative(self.q[rows], self.k[rows], self.v[rows], p, self.mean[rows], slope, sink)


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
    operands: Operands, visible: Bool[Tensor, "m n"] | None, dtype: torch.dtype
) -> SoftmaxDerivative:
    """Return the derivative at float64 queries, keys and values, for products in ``dtype``.

    Probabilities are formed in float64 in blocks, and kept rounded: of all of them there is one copy only.
    """
    q, k, score_keys, v = (t.flatten(0, 1) for t in (operands.q, operands.k, operands.score_keys, operands.v))
    heads, group, m, _ = q.shape
    n, kv_heads, features = k.shape[1], operands.k.shape[1], operands.features
    table = v if dtype != torch.float64 else torch.cat((v, moment_columns(operands)), dim=-1)
    p = q.new_empty((heads, group, m, n), dtype=dtype)
    slope = p if features.softcap is None else torch.empty_like(p)
    averages = q.new_empty((heads, group, m, table.shape[-1]))
    total, sink_p = q.new_ones((heads, group, m)), q.new_zeros((heads, group, m))
    for some, all_rows in row_blocks(heads, group, m, n, q.device):
        members = torch.arange(heads, device=q.device)[some]
        for rows in all_rows:
            part = features.block(members // kv_heads, members % kv_heads, rows, slice(n))
            seen = None if visible is None else visible[rows]
            scores = attention_scores(q[some, :, rows], score_keys[some], 1.0, seen, None, part)
            every = torch.softmax(part.with_sinks(scores), dim=-1)
            exact = every[..., :n]
            p[some, :, rows] = exact.to(dtype)
            averages[some, :, rows] = weighted_values(exact, table[some])
            if features.sinks is not None:
                total[some, :, rows], sink_p[some, :, rows] = exact.sum(dim=-1), every[..., n]
            if features.softcap is not None:
                uncapped = q[some, :, rows] @ k[some, None].mT
                slope[some, :, rows] = (exact * cap_slope(uncapped, features.softcap)).to(dtype)
    q, rounded, averages, total, sink_p = (t.flatten(1, 2) for t in (q, p, averages, total, sink_p))
    mean, sink = averages[..., : v.shape[-1]], None
    if features.sinks is not None:
        output = operands.outputs(mean, total)
        mean, sink = output - operands.value_shift.flatten(0, 1), Sink.at(operands, sink_p, output).to(dtype)
    moments = None
    if dtype == torch.float64:
        moments = Moments.of(operands, averages[..., v.shape[-1] :], mean, total, sink_p, rounded)
    q, k, v, mean = (t.to(dtype) for t in (q, k, v, mean))
    slope = rounded if features.softcap is None else slope.flatten(1, 2)
    return SoftmaxDerivative(q, k, v, rounded, mean, slope, sink, moments)


def largest_score(q: Tensor, k: Tensor, batch: int) -> Float[Tensor, " batch"]:
    """max|q| max|k| of each member, float64 on the CPU."""
    longest_q, longest_k = (
        torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64).flatten(1).amax(dim=-1).view(batch, -1)
        for t in (q, k)
    )
    kappa: Tensor = (longest_q * longest_k).amax(dim=-1).cpu()
    return kappa


def rounding_of(kappa: Float[Tensor, " batch"], dtype: torch.dtype) -> Float[Tensor, " batch"]:
    """Relative error of a derivative's norm by rounding in ``dtype``, at scores of size ``kappa``."""
    return torch.finfo(dtype).eps * (32.0 + kappa / 25.0)
