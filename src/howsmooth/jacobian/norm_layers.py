"""Jacobians of norm layers and layer scales, which act on each token separately."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.attention.multi_head_projections import in_heads
from howsmooth.errors import ArgumentError
from howsmooth.jacobian.rounding_bounds import norm_error, scale_error
from howsmooth.spectral import LinearOperator
from howsmooth.spectral.operator import ProductError

__all__ = ["NormJacobian", "ScaleJacobian", "query_and_key_norms"]


def query_and_key_norms(
    f: SelfAttention, x: Tensor, dtype: torch.dtype
) -> tuple[NormJacobian | None, NormJacobian | None]:
    """Return the Jacobians of the norm layers of queries and of keys in an attention layer, or None for a
    missing one. They act on a row for each pair of token and head, or for each token if the norm layer acts
    on all heads together.
    """

    def at(norm: LayerNorm | RMSNorm | None, weight: Tensor, bias: Tensor | None) -> NormJacobian | None:
        if norm is None:
            return None
        rows = in_heads(x, weight, bias).movedim(-3, -2).reshape(x.shape[0], -1, norm.d)
        return NormJacobian.at(norm, rows, dtype)

    return at(f.query_norm, f.query, f.query_bias), at(f.key_norm, f.key, f.key_bias)


class NormJacobian(LinearOperator):
    """The Jacobian of LayerNorm or RMSNorm at a batch of sequences, with one d × d matrix for each token.

    The matrix is (√d/s) Γ (H − h hᵀ/s²). Here h = H x is the token, which H centres in LayerNorm
    (``centred``) and leaves alone in RMSNorm, s² = |h|² + d eps, and Γ is the diagonal matrix of the gains.
    ``unit`` is h / s, (batch, n, d), and ``factor`` √d / s, (batch, n, 1).
    """

    def __init__(
        self, gain: Tensor, unit: Tensor, factor: Tensor, proved: ProductError | None = None, *, centred: bool
    ) -> None:
        batch, n, d = unit.shape
        super().__init__(batch, (n, d), (n, d), unit.dtype, unit.device, proved=proved)
        self.gain = gain
        self.unit = unit
        self.factor = factor
        self.centred = centred

    @classmethod
    def at(
        cls, f: LayerNorm | RMSNorm, x: Tensor, dtype: torch.dtype, off: Tensor | None = None
    ) -> NormJacobian:
        """Return the Jacobian of a float64 layer at float64 tokens, with products in ``dtype``.

        ``off`` (batch, n) bounds the distance of each token from its exact value, for a proof of the error.
        Raise ArgumentError if s is zero at a token, where the norm is not differentiable.
        """
        h, s = f.direction_and_length(x)
        if bool((s == 0).any()):
            raise ArgumentError(
                "x",
                expected="tokens at which the norm is differentiable",
                got="a token of zero length after centring, with eps = 0",
                remedy="Use a norm with eps > 0.",
            )
        proved = None if off is None or dtype != torch.float64 else norm_error(f, x, off)
        unit, factor = (h / s).to(dtype), (math.sqrt(f.d) / s).to(dtype)
        return cls(f.weight.to(dtype), unit, factor, proved, centred=f.centred)

    def _symmetric(self, e: Tensor) -> Tensor:
        """Multiply each token by (√d/s)(H − h hᵀ/s²), which is the Jacobian without the gains."""
        if self.centred:
            e = e - e.mean(dim=-1, keepdim=True)
        return self.factor * (e - self.unit * (self.unit * e).sum(dim=-1, keepdim=True))

    def _product(self, e: Tensor) -> Tensor:
        return self.gain * self._symmetric(e)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self._symmetric(self.gain * u)

    def to(self, dtype: torch.dtype) -> NormJacobian:
        """Return the Jacobian with products in another dtype, without proved bounds on rounding errors."""
        gain, unit, factor = (t.to(dtype) for t in (self.gain, self.unit, self.factor))
        return NormJacobian(gain, unit, factor, centred=self.centred)

    def select(self, members: Tensor) -> NormJacobian:
        """Return the Jacobians at the chosen sequences of the batch."""
        members = members.to(self.device)
        proved = None if self.proved is None else self.proved.select(members)
        return NormJacobian(self.gain, self.unit[members], self.factor[members], proved, centred=self.centred)


class ScaleJacobian(LinearOperator):
    """The Jacobian of a layer scale, which multiplies coordinate k of every token by ``weight[k]``."""

    def __init__(self, weight: Tensor, batch: int, n: int) -> None:
        shape = (n, weight.shape[0])
        proved = None if weight.dtype != torch.float64 else scale_error(weight, batch)
        super().__init__(batch, shape, shape, weight.dtype, weight.device, proved=proved)
        self.weight = weight

    def _product(self, e: Tensor) -> Tensor:
        return self.weight * e

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self.weight * u

    def select(self, members: Tensor) -> ScaleJacobian:
        """Return the Jacobians at the chosen sequences of the batch."""
        return ScaleJacobian(self.weight, len(members), self.in_shape[0])
