"""Norms of the bilinear forms by which attention scores depend on tokens, with or without rotary positions.

The score of query i and key j is τ ⟨T_i (Q x_i + b_q), T_j (K x_j + b_k)⟩. With M = T_jᵀ T_i it consists of
the forms Kᵀ M Q, Kᵀ M b_q, b_kᵀ M Q and b_kᵀ M b_q. Rotary positions turn each pair of entries at a constant
speed, so M depends on the offset i − j alone. Derivation: documentation page "Bounds for the scores of
today's models".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import Rotary
from howsmooth.attention.masks import Visibility
from howsmooth.bounds.attention_parameters import log_spectral_norm
from howsmooth.bounds.bound import exp
from howsmooth.rounding import above, gamma, spectral_norm_above, up

__all__ = ["BilinearScoreNorms", "largest_spectral_norm"]

# The largest spectral norm of several matrices is overestimated by at most this.
_EXCESS = 1e-2
# Offsets whose matrices are formed at once.
_TOGETHER = 256
# Largest number of offsets: beyond it the matrices would take longer than all else of a bound.
_MOST = 1 << 14


class BilinearScoreNorms(NamedTuple):
    """Upper bounds on the norms of the bilinear forms that make up the scores of one head. They hold for all
    pairs of a query i and a key j.

    M is the matrix T_jᵀ T_i of the rotary positions of the pair, the identity without them. Weights
    (key_dim, d) and biases (key_dim,) must be float64 on the CPU.
    """

    tokens: float  #: Bound on ‖Kᵀ M Q‖₂.
    query_bias: float  #: Bound on |Kᵀ M b_q|.
    key_bias: float  #: Bound on |Qᵀ Mᵀ b_k|.
    biases: float  #: Bound on |⟨b_k, M b_q⟩|.

    @classmethod
    def without_positions(
        cls, query: Tensor, key: Tensor, query_bias: Tensor | None, key_bias: Tensor | None
    ) -> BilinearScoreNorms:
        """Bound the norms of the bilinear forms of a head without rotary positions."""
        b_q, b_k = _vector(query_bias, query), _vector(key_bias, key)
        pairs = ((key, query), (key, b_q[:, None]), (query, b_k[:, None]), (b_k[:, None], b_q[:, None]))
        return cls(*(exp(log_spectral_norm(one.mT, other)) for one, other in pairs))

    @classmethod
    def with_rotary_positions(
        cls,
        rotary: Rotary,
        query: Tensor,
        key: Tensor,
        query_bias: Tensor | None,
        key_bias: Tensor | None,
        seen: Visibility,
    ) -> BilinearScoreNorms | None:
        """Bound the norms of the bilinear forms of a head with rotary positions. Return None if ``seen``
        allows more than 16,384 offsets i − j of a query i and a key j, since this would take too long.

        The tables of the rotary embedding are fitted by rotations at a constant speed, and their distance
        from the fit is added to the bounds.
        """
        reach = seen.n if seen.window is None else min(seen.n, seen.window)
        offsets = torch.arange(0 if seen.causal else 1 - reach, reach, dtype=torch.float64)
        if len(offsets) > _MOST:
            return None
        rotations = _Rotations.fitted(rotary, seen.n, query.shape[0])
        b_q, b_k = _vector(query_bias, query), _vector(key_bias, key)
        # ‖Kᵀ M Q‖ = ‖R_K M R_Qᵀ‖ with the triangular factors of Kᵀ and Qᵀ.
        of_query, of_key = (torch.linalg.qr(weight.mT, mode="r").R for weight in (query, key))
        found = []
        for some in offsets.split(_TOGETHER):
            queries = rotations.turned(of_query.mT, some)
            bias = rotations.turned(b_q[:, None], some)
            vectors = (of_key @ bias, b_k @ queries, b_k @ bias)
            lengths = (float(torch.linalg.vector_norm(v.flatten(1), dim=1).max()) for v in vectors)
            found.append((largest_spectral_norm(of_key @ queries), *lengths))
        # M of a pair is off by so much: an angle by a few roundings of the largest one, a product by those of
        # its terms, and a triangular factor by those of Householder's method, a multiple of all its entries.
        turned = float(offsets.abs().max() * rotations.angles.abs().max())
        off = up(rotations.error + rotations.size * (gamma(8) * (1 + turned) + gamma(8 * query.numel())))
        q, k, size_q, size_k = map(spectral_norm_above, (query, key, b_q[:, None], b_k[:, None]))
        products = (k * q, k * size_q, q * size_k, size_k * size_q)
        largest = zip(map(max, zip(*found, strict=True)), products, strict=True)
        return cls(*(above(size + off * product, 4) for size, product in largest))


def _vector(bias: Tensor | None, weight: Tensor) -> Tensor:
    return weight.new_zeros(weight.shape[0]) if bias is None else bias


class _Rotations(NamedTuple):
    """Rotations by angles linear in the position, and their distance from the tables of an embedding."""

    #: For each pair of entries the angle from one position to the next, and the factor of its length.
    angles: Float[Tensor, " half"]
    scales: Float[Tensor, " half"]
    #: Bound on ‖T_jᵀ T_i‖ of the rotations.
    size: float
    #: Bound on the distance of T_jᵀ T_i between the tables and the rotations, over all i and j.
    error: float

    @classmethod
    def fitted(cls, rotary: Rotary, n: int, key_dim: int) -> _Rotations:
        """Fit rotations to the first n positions in the tables of a rotary embedding."""
        half = rotary.rot_dim // 2
        cos, sin = rotary.cos[:n].double(), rotary.sin[:n].double()
        # A block of T_i maps (t, u) to (t cos − u sin, u cos' + t sin'): a rotation if both tables agree.
        turns = torch.complex(cos[:, :half] + cos[:, half:], sin[:, :half] + sin[:, half:]) / 2
        phases = torch.from_numpy(np.unwrap(turns.angle().numpy(), axis=0))
        angles, scales = (phases[-1] - phases[0]) / max(1, n - 1), turns.abs().mean(dim=0)
        passed = torch.arange(n, dtype=torch.float64)[:, None] * angles
        fit = torch.polar(scales.expand(n, half), (phases - passed).mean(dim=0) + passed)
        apart = (
            cos.unflatten(1, (2, half)) - fit.real[:, None],
            sin.unflatten(1, (2, half)) - fit.imag[:, None],
        )
        error = float(torch.linalg.vector_norm(torch.cat(apart, dim=1), dim=1).max())
        largest = max(float(scales.max()), 1.0 if rotary.rot_dim < key_dim else 0.0)
        return cls(angles, scales, largest**2, (2 * largest + error) * error)

    def turned(
        self, columns: Float[Tensor, "key_dim r"], offsets: Float[Tensor, " m"]
    ) -> Float[Tensor, "m key_dim r"]:
        """Multiply a matrix from the left by the rotations T_jᵀ T_i, one for each given offset i − j."""
        half = len(self.angles)
        first, second, rest = columns[:half], columns[half : 2 * half], columns[2 * half :]
        turns = torch.polar(self.scales.square().expand(len(offsets), half), offsets[:, None] * self.angles)
        cos, sin = turns.real[..., None], turns.imag[..., None]
        rest = rest.expand(len(offsets), *rest.shape)
        return torch.cat((cos * first - sin * second, sin * first + cos * second, rest), dim=1)


def largest_spectral_norm(matrices: Float[Tensor, "m r s"]) -> float:
    """Return an upper bound on the largest spectral norm of several float64 matrices. It exceeds this norm by
    at most 1 %.

    With σ² the largest eigenvalue of a positive semidefinite matrix G of rank r, ‖G^p‖_F^(1/p) lies between
    σ² and σ² r^(1/2p). G is squared until the two are near each other, and each time matrices are dropped
    whose upper limit is below the largest lower limit.
    """
    size = float(matrices.abs().max())
    if size == 0.0:
        return 0.0
    matrices, rank = matrices / size, min(matrices.shape[1:])
    grams = matrices @ matrices.mT if matrices.shape[1] == rank else matrices.mT @ matrices
    logs, power, roundings = grams.new_zeros(len(grams)), 1.0, sum(matrices.shape[1:])
    while True:
        lengths = torch.linalg.matrix_norm(grams)
        # log σ² is at most this, and at least this less the slack.
        logs, slack = logs + lengths.log() / power, math.log(rank) / (2 * power)
        if slack <= 2 * _EXCESS:
            return size * above(math.exp(float(logs.max()) / 2), roundings)
        alive = logs >= logs.max() - slack
        logs, grams = logs[alive], grams[alive] / lengths[alive][:, None, None]
        # A product doubles the relative error of a power, which the root halves, and adds its own.
        grams, power, roundings = grams @ grams, 2 * power, roundings + 4 * rank + 16
