"""The derivative of softmax attention with respect to queries, keys and values, with the probabilities P kept
in memory.

The formulas, which all variants of this derivative share, stand in the docstring of
:mod:`howsmooth.jacobian`. This module knows neither tokens nor projections.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.scaled_dot_product import attention_scores, cap_slope, row_blocks, weighted_values
from howsmooth.errors import NonFiniteError
from howsmooth.jacobian.centred_queries_keys_values import Operands
from howsmooth.jacobian.key_value_moments import Moments, moment_columns

__all__ = [
    "Sink",
    "SoftmaxDerivative",
    "WeightedSoftmaxDerivative",
    "largest_score",
    "rounding_of",
    "softmax_derivative",
    "weighted_softmax_derivative",
]


@dataclass(frozen=True, eq=False)
class Sink:
    """An attention sink, which is an additional key of each head with value zero and a constant score.

    The other keys are shifted by a constant vector. The softmax forgets a shift only if all keys have it, so
    the sink's zero key is shifted too.

    Parameters
    ----------
    p
        The probability of the sink in each row of queries, (b, *rows).
    k
        The shifted key of the sink, (b, key_dim).
    away
        The value of the sink less the output O of each row, which is −O, (b, *rows, value_dim). It is kept
        by itself: if the sink takes nearly all of a row, O is far smaller than the shift of the values, and
        a difference of shifted values would be rounding only.

    """

    p: Float[Tensor, "b *rows"]
    k: Float[Tensor, "b key_dim"]
    away: Float[Tensor, "b *rows value_dim"]

    @classmethod
    def at(cls, operands: Operands, p: Tensor, output: Tensor) -> Sink:
        """Return the attention sinks of all heads, given the probabilities of the sinks and the attention
        outputs.

        The outputs are averages of the values before centring.
        """
        heads = operands.heads
        return cls(p, -operands.key_shift.reshape(heads, -1), -output)

    def to(self, dtype: torch.dtype) -> Sink:
        """Return the attention sinks converted to another dtype."""
        return Sink(*(t.to(dtype) for t in vars(self).values()))

    def select(self, rows: Tensor) -> Sink:
        """Return the attention sinks of the chosen heads.

        The heads are given by indices ``rows`` of the axis b (input of the batch times key head).
        """
        return Sink(*(t[rows] for t in vars(self).values()))


@dataclass(frozen=True)
class SoftmaxDerivative:
    """The derivative of softmax attention with respect to queries, keys and values, with all probabilities
    kept in memory.

    Axes: b = batch member times key/value head, m = number of query rows, n for each query head that shares
    the key head.

    Parameters
    ----------
    q
        Scaled queries (b, m, key_dim).
    k, v
        Keys (b, n, key_dim) and values (b, n, value_dim), each less a constant vector of its head (for keys
        only if the scores have no cap). The derivative does not change by these shifts, because
        Σ_j P_ij (v_j − O_i) = 0, and smaller numbers lose fewer digits.
    p
        Attention probabilities P (b, m, n).
    mean
        Outputs O (b, m, value_dim), shifted as the values are.
    slope
        P∘D (b, m, n), D the derivative of the cap; the tensor ``p`` itself if the scores have no cap.
    sink
        One further key of each head, or None.
    moments
        Moments under P in float64, for the proof of the rounding error; None in float32.

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
        """Estimate, for each sequence, the relative rounding error of the norm of the attention Jacobian when
        the norm is computed with this derivative.

        Entries of dS are as large as κ = max|q| max|k| for a unit tangent, and the softmax keeps differences
        of order one. Measured errors stay below eps (2 + κ / 100), for saturated and unsaturated, causal and
        unmasked heads with κ up to 2000. Proved bounds are in :mod:`howsmooth.jacobian.rounding_bounds`.
        """
        return rounding_of(largest_score(self.q, self.k, batch), self.q.dtype)

    def product(
        self,
        dq: Float[Tensor, "b m key_dim"],
        dk: Float[Tensor, "b n key_dim"],
        dv: Float[Tensor, "b n value_dim"],
    ) -> Float[Tensor, "b m value_dim"]:
        """Return the tangent of the outputs of softmax attention, for tangents of the scaled queries, keys
        and values.
        """
        ds = torch.baddbmm(torch.bmm(dq, self.k.mT), self.q, dk.mT).mul_(self.slope)
        out = torch.baddbmm(torch.bmm(ds, self.v), self.p, dv)
        # Σ_j dS_ij (v_j − O_i), with the sum of dS taken once instead of n differences.
        out.addcmul_(ds.sum(dim=-1, keepdim=True), self.mean, value=-1)
        if self.sink is not None:
            moved = torch.bmm(dq, self.sink.k[..., None]).mul_(self.sink.p[..., None])
            out.addcmul_(moved, self.sink.away)
        return out

    def adjoint(
        self, do: Float[Tensor, "b m value_dim"]
    ) -> tuple[Float[Tensor, "b m key_dim"], Float[Tensor, "b n key_dim"], Float[Tensor, "b n value_dim"]]:
        """Return the cotangents of the scaled queries, keys and values of softmax attention, for a cotangent
        of its outputs.
        """
        ds = torch.bmm(do, self.v.mT)
        # Σ_j P_ij ⟨do_i, v_j⟩ is ⟨do_i, O_i⟩, so no sum over n² numbers is needed.
        ds.sub_((do * self.mean).sum(dim=-1, keepdim=True)).mul_(self.slope)
        dq = torch.bmm(ds, self.k)
        if self.sink is not None:
            moved = (do * self.sink.away).sum(dim=-1, keepdim=True).mul_(self.sink.p[..., None])
            dq.addcmul_(moved, self.sink.k[:, None])
        return dq, torch.bmm(ds.mT, self.q), torch.bmm(self.p.mT, do)

    def to(self, dtype: torch.dtype) -> SoftmaxDerivative:
        """Return the derivative of softmax attention converted to ``dtype``. A conversion to another dtype
        drops the proved rounding bounds.
        """
        if dtype == self.q.dtype:
            return self
        p = self.p.to(dtype)
        slope = p if self.slope is self.p else self.slope.to(dtype)
        sink = None if self.sink is None else self.sink.to(dtype)
        q, k, v, mean = (t.to(dtype) for t in (self.q, self.k, self.v, self.mean))
        return SoftmaxDerivative(q, k, v, p, mean, slope, sink)

    def select(self, rows: Tensor) -> SoftmaxDerivative:
        """Return the derivative of softmax attention for the chosen heads.

        The heads are given by indices ``rows`` of the axis b (input of the batch times key head).
        """
        p = self.p[rows]
        slope = p if self.slope is self.p else self.slope[rows]
        sink = None if self.sink is None else self.sink.select(rows)
        return SoftmaxDerivative(self.q[rows], self.k[rows], self.v[rows], p, self.mean[rows], slope, sink)


@dataclass(frozen=True)
class WeightedSoftmaxDerivative:
    """The derivative of softmax attention at a discrete measure, for tangents scaled by the square roots of
    the weights of the atoms.

    The atoms have weights a_i, and squared norms are weighted by a_i (Definition C.4).

    Tangents and images are multiplied by the square root of the weight of their atom. With dq̃_i = √a_i dq_i,
    and dk̃, dṽ, dÕ likewise, dÕ_i = Σ_j T_ij (v_j − O_i) + Σ_j P̃_ij dṽ_j, where P̃_ij = √(a_i/a_j) P_ij and
    T = P∘D∘(dq̃ kᵀ) + P̃∘D∘(q dk̃ᵀ). All of these numbers are formed from logarithms, so that no weight is too
    small. The derivation is on the documentation page "The local constant of mean-field attention".

    Parameters
    ----------
    q, k, v, mean, slope
        As for :class:`SoftmaxDerivative`, with P_ij ∝ a_j e^{S_ij}.
    tilted, tilted_slope
        P̃ and P̃∘D, each (b, m, n).
    log_range
        Largest |log a_j|. Its rounding is an error in the exponents, which :meth:`rounding` allows for.

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
        """Estimate, for each measure, the relative rounding error of the weighted norm of the Jacobian when
        the norm is computed with this derivative.

        It is the error of :class:`SoftmaxDerivative` and an error of the exponents: a small P_ij counts here
        if a_j is small too, and its logarithm is a float64 number of size κ + ``log_range``. Compared with 60
        digits, measured errors stay below (κ + log_range) eps, for weights down to e^-1400 and κ up to
        14,000.
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
        """Return the tangent of the attention outputs at the atoms of a measure, for tangents of the scaled
        queries, keys and values.

        All tangents are multiplied by the square roots of the atoms' weights, as in √a_i dO_i.
        """
        t = torch.bmm(dq, self.k.mT).mul_(self.slope)
        t.addcmul_(torch.bmm(self.q, dk.mT), self.tilted_slope)
        do = torch.addcmul(torch.bmm(t, self.v), t.sum(dim=-1, keepdim=True), self.mean, value=-1)
        return torch.baddbmm(do, self.tilted, dv)

    def adjoint(
        self, do: Float[Tensor, "b m value_dim"]
    ) -> tuple[Float[Tensor, "b m key_dim"], Float[Tensor, "b n key_dim"], Float[Tensor, "b n value_dim"]]:
        """Return the cotangents of the scaled queries, keys and values at the atoms of a measure, for a
        cotangent of the attention outputs.

        All cotangents are weighted as the tangents of :meth:`product` are.
        """
        w = torch.bmm(do, self.v.mT).sub_((do * self.mean).sum(dim=-1, keepdim=True))
        dk = torch.bmm((w * self.tilted_slope).mT, self.q)
        return torch.bmm(w.mul_(self.slope), self.k), dk, torch.bmm(self.tilted.mT, do)

    def select(self, rows: Tensor) -> WeightedSoftmaxDerivative:
        """Return the derivative of softmax attention at a measure for the chosen heads.

        The heads are given by indices ``rows`` of the axis b (input of the batch times key head).
        """
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
    """Return the derivative of softmax attention at given queries, keys and values, as an object with
    products in ``dtype``.

    The queries, keys and values in ``operands`` are float64.

    Probabilities are formed in float64, one block of rows after the other, and stored in ``dtype``: all n²
    of them are in memory once.
    """
    q, k, score_keys, v = (t.flatten(0, 1) for t in (operands.q, operands.k, operands.score_keys, operands.v))
    heads, group, m, _ = q.shape
    n, kv_heads, features = k.shape[1], operands.k.shape[1], operands.features
    # The columns of the table are averaged under P: the values, whose averages are the outputs, and in
    # float64 the columns that the proof of the rounding error needs.
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
            # A sink is a last column of the scores; its probability is taken off again.
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


def weighted_softmax_derivative(
    operands: Operands, visible: Bool[Tensor, "m n"] | None, weighting: Weighting, dtype: torch.dtype
) -> WeightedSoftmaxDerivative:
    """Return the derivative of softmax attention at a discrete measure, as an object with products in
    ``dtype``.

    The queries, keys and values in ``operands`` are float64.

    Raises
    ------
    NonFiniteError
        If an entry √(a_i/a_j) P_ij is out of the range of ``dtype``.

    """
    # The keys are centred: their common shift adds a constant to each row of scores, which the softmax
    # forgets, and smaller scores lose fewer digits.
    features = operands.features
    scores = attention_scores(operands.q, operands.k, 1.0, visible, weighting.log_weights, features)
    log_p = torch.log_softmax(scores, dim=-1)
    half = weighting.log_weights / 2
    tilted = (log_p + (half[:, None] - half)).exp().flatten(2, 3).flatten(0, 1).to(dtype)
    if not bool(torch.isfinite(tilted).all()):
        largest = float((log_p + (half[:, None] - half)).max())
        raise NonFiniteError(
            "f",
            expected=f"weighted probabilities √(a_i/a_j) P_ij in the range of {dtype}",
            got=f"one of about exp({largest:.6g})",
            remedy="The constant is of that size. Take smaller tokens or weights nearer to each other.",
        )
    p = log_p.exp().flatten(2, 3).flatten(0, 1)
    q, k, v = operands.q.flatten(2, 3).flatten(0, 1), operands.k.flatten(0, 1), operands.v.flatten(0, 1)
    log_range = float(weighting.log_weights.abs().max())
    mean, slope, tilted_slope = p @ v, p, tilted
    if features.softcap is not None:
        factor = cap_slope(q @ k.mT, features.softcap)
        slope, tilted_slope = p * factor, (tilted * factor).to(dtype)
    q, k, v, slope, mean = (t.to(dtype) for t in (q, k, v, slope, mean))
    return WeightedSoftmaxDerivative(q, k, v, slope, tilted, tilted_slope, mean, log_range)


def largest_score(q: Tensor, k: Tensor, batch: int) -> Float[Tensor, " batch"]:
    """Return an upper bound on the absolute attention scores of each sequence of a batch.

    It is κ = max|q| max|k|, the largest over the heads, in float64 on the CPU.
    """
    longest_q, longest_k = (
        torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64).flatten(1).amax(dim=-1).view(batch, -1)
        for t in (q, k)
    )
    kappa: Tensor = (longest_q * longest_k).amax(dim=-1).cpu()
    return kappa


def rounding_of(kappa: Float[Tensor, " batch"], dtype: torch.dtype) -> Float[Tensor, " batch"]:
    """Estimate the relative error of the norm ‖J‖ of the Jacobian of attention if products with J are
    computed in ``dtype``.

    The absolute scores are at most ``kappa``.
    """
    return torch.finfo(dtype).eps * (32.0 + kappa / 25.0)
