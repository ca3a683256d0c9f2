"""The derivative of softmax attention with respect to queries, keys and values, with the attention
probabilities P kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.scaled_dot_product import attention_scores, cap_slope, row_blocks, weighted_values
from howsmooth.errors import NonFiniteError
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.key_value_moments import Deviations, moment_columns
from howsmooth.jacobian.softmax_tile import OfKeys, OfOutputs, OfQueries, OfValues, Tile

__all__ = [
    "Sink", "SoftmaxDerivative", "largest_score", "outputs_and_sink", "rounding_of", "softmax_derivative",
    "weighted_softmax_derivative",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Sink:
    """An attention sink: one further key of each head, with value zero and a constant score.

    The other keys are shifted by a constant vector. The softmax forgets a shift only if all keys have it, so
    the sink's zero key is shifted too, to ``k``. ``p`` is the probability of the sink in each row of queries,
    and ``away`` its value less the output O, which is −O. That is kept by itself: if the sink takes nearly
    all of a row, O is far smaller than the shift of the values, and a difference of shifted values would be
    rounding only.
    """

    p: Float[Tensor, "b *rows"]
    k: Float[Tensor, "b key_dim"]
    away: Float[Tensor, "b *rows value_dim"]

    def each(self, one: Callable[[Tensor], Tensor]) -> Sink:
        """Return a copy of the sinks, with the function ``one`` applied to every tensor."""
        return Sink(one(self.p), one(self.k), one(self.away))

    def of_rows(self, heads: slice, rows: slice) -> Sink:
        """Return the sinks for a block of queries, from tensors with the axes (b, group, m)."""
        return Sink(self.p[heads, :, rows], self.k[heads], self.away[heads, :, rows])

    def add_tangent(self, out: Tensor, dq: Tensor) -> None:
        """Add the contribution of the sinks to the tangents ``out`` of the attention outputs."""
        out.addcmul_((dq @ self._keys(dq).mT).mul_(self.p[..., None]), self.away)

    def add_adjoint(self, out: Tensor, do: Tensor) -> None:
        """Add the contribution of the sinks to the cotangents ``out`` of the queries."""
        moved = (do * self.away).sum(dim=-1, keepdim=True).mul_(self.p[..., None])
        out.addcmul_(moved, self._keys(out))

    def _keys(self, rows: Tensor) -> Tensor:
        return self.k.view(len(self.k), *(1,) * (rows.ndim - 2), -1)


@dataclass(frozen=True, eq=False)
class SoftmaxDerivative(Tile):
    """The derivative of softmax attention with all probabilities kept in memory.

    Axes: b = batch member times key/value head, m = number of query rows, n for each query head that shares
    the key head. At a measure, tangents and cotangents are multiplied by the square roots of the weights
    (documentation page "The local constant of mean-field attention").

    ``mean`` are the outputs O, shifted as the values are. ``moments`` under P in float64, for the proof of
    the rounding error, are None in float32 and at measures. ``log_range`` is the largest |log a_j| at a
    measure, whose rounding is an error in the exponents.
    """

    mean: OfOutputs
    sink: Sink | None = None
    moments: Deviations | None = None
    log_range: float | None = None

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Estimate, for each sequence, the relative rounding error of the norm of the attention Jacobian.

        Entries of dS are as large as κ = max|q| max|k| for a unit tangent, and the softmax keeps differences
        of order one. Measured errors stay below eps (2 + κ / 100), for saturated and unsaturated, causal and
        unmasked heads with κ up to 2000. Proved bounds are in :mod:`howsmooth.jacobian.rounding_bounds`.

        At a measure a small P_ij counts if a_j is small too, and its logarithm is a float64 number of size
        κ + ``log_range``. Compared with 60 digits, measured errors of the exponents stay below
        (κ + log_range) eps, for weights down to e^-1400 and κ up to 14,000.
        """
        kappa = largest_score(self.q, self.k, batch)
        found = rounding_of(kappa, self.q.dtype)
        if self.log_range is None:
            return found
        return found + 4.0 * torch.finfo(torch.float64).eps * (kappa + self.log_range)

    def product(self, dq: OfQueries, dk: OfKeys, dv: OfValues) -> OfOutputs:
        """Return the tangent of the outputs, given tangents of the scaled queries, keys and values."""
        out, total = self.tangent(dq, dk, dv)
        # Σ_j T_ij (v_j − O_i), with the sum of T taken once instead of n differences.
        out.addcmul_(total, self.mean, value=-1)
        if self.sink is not None:
            self.sink.add_tangent(out, dq)
        return out

    def adjoint(self, do: OfOutputs) -> tuple[OfQueries, OfKeys, OfValues]:
        """Return cotangents of the scaled queries, keys and values, given a cotangent of the outputs."""
        # Σ_j P_ij ⟨do_i, v_j⟩ is ⟨do_i, O_i⟩, so no sum over n² numbers is needed.
        of_queries, of_keys = self.scores_adjoint(do, (do * self.mean).sum(dim=-1, keepdim=True))
        dq = torch.bmm(of_queries, self.k)
        if self.sink is not None:
            self.sink.add_adjoint(dq, do)
        return dq, torch.bmm(of_keys.mT, self.q), torch.bmm(self.p.mT, do)

    def to(self, dtype: torch.dtype) -> SoftmaxDerivative:
        """Return the derivative in another dtype, without proved bounds on rounding errors."""
        return self if dtype == self.q.dtype else self._each(lambda t: t.to(dtype))

    def select(self, rows: Tensor) -> SoftmaxDerivative:
        """Return the derivative of the heads with the indices ``rows`` along the first axis."""
        return self._each(lambda t: t[rows])

    def _each(self, one: Callable[[Tensor], Tensor]) -> SoftmaxDerivative:
        q, k, v, p, mean = (one(t) for t in (self.q, self.k, self.v, self.p, self.mean))
        # Without a cap P∘D is the tensor P itself, and stays so; and P̃∘D is P∘D, but at measures.
        slope = p if self.slope is self.p else one(self.slope)
        of_keys = slope if self.slope_of_keys is self.slope else None
        if of_keys is None:
            of_keys = p if self.slope_of_keys is self.p else one(self.slope_of_keys)
        sink = None if self.sink is None else self.sink.each(one)
        return SoftmaxDerivative(q, k, v, p, slope, of_keys, mean, sink, log_range=self.log_range)


def softmax_derivative(
    operands: Operands, visible: Bool[Tensor, "m n"] | None, dtype: torch.dtype
) -> SoftmaxDerivative:
    """Return the derivative of softmax attention at float64 queries, keys and values. Probabilities are
    formed in float64, one block of rows after the other; they and the products are in ``dtype``.
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
        for rows in all_rows:
            part = features.block(some, kv_heads, rows, slice(n))
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
    mean, sink = outputs_and_sink(operands, averages[..., : v.shape[-1]], total, sink_p, dtype)
    moments = None
    if dtype == torch.float64:
        moments = Deviations.of(operands, averages[..., v.shape[-1] :], mean, total, sink_p, rounded)
    q, k, v, mean = (t.to(dtype) for t in (q, k, v, mean))
    slope = rounded if features.softcap is None else slope.flatten(1, 2)
    return SoftmaxDerivative(q, k, v, rounded, slope, slope, mean, sink, moments)


def weighted_softmax_derivative(
    operands: Operands, visible: Bool[Tensor, "m n"] | None, weighting: Weighting, dtype: torch.dtype
) -> SoftmaxDerivative:
    """Return the derivative of softmax attention at a measure, from the float64 queries, keys and values of
    its atoms. Products are in ``dtype``; weights enter as logarithms, so that none is too small.

    Raise NonFiniteError if an entry √(a_i/a_j) P_ij is out of the range of ``dtype``.
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
    return SoftmaxDerivative(q, k, v, tilted, slope, tilted_slope, mean, log_range=log_range)


def outputs_and_sink(
    operands: Operands,
    averages: Float[Tensor, "b *rows value_dim"],
    total: Float[Tensor, "b *rows"],
    sink_p: Float[Tensor, "b *rows"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "b *rows value_dim"], Sink | None]:
    """Return the attention outputs minus the mean of the values, and the sinks in ``dtype``. ``averages`` is
    P times the values after this mean is subtracted, ``total`` is Σ_j P_ij, and ``sink_p`` is the probability
    of the sinks.
    """
    if operands.features.sinks is None:
        return averages, None
    heads = operands.heads
    shift = operands.value_shift.reshape(heads, *(1,) * (averages.ndim - 2), -1)
    output = averages + total[..., None] * shift
    sink = Sink(sink_p, -operands.key_shift.reshape(heads, -1), -output)
    return output - shift, sink.each(lambda t: t.to(dtype))


def largest_score(q: Tensor, k: Tensor, batch: int) -> Float[Tensor, " batch"]:
    """Return a bound κ on the scores of each sequence: the largest max|q| max|k| of a head (float64, CPU)."""
    longest_q, longest_k = (
        torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64).flatten(1).amax(dim=-1).view(batch, -1)
        for t in (q, k)
    )
    kappa: Tensor = (longest_q * longest_k).amax(dim=-1).cpu()
    return kappa


def rounding_of(kappa: Float[Tensor, " batch"], dtype: torch.dtype) -> Float[Tensor, " batch"]:
    """Estimate the relative rounding error of the norm of an attention Jacobian in ``dtype``, if no absolute
    score exceeds ``kappa``.
    """
    return torch.finfo(dtype).eps * (32.0 + kappa / 25.0)
