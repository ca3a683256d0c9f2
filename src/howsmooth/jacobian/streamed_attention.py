"""Jacobian of self-attention at sequences too long for their attention probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from howsmooth.attention import Rotary, SelfAttention
from howsmooth.attention.visibility import Visibility
from howsmooth.jacobian.fused import fused
from howsmooth.jacobian.norms import NormJacobian, norm_jacobian
from howsmooth.jacobian.operands import Operands
from howsmooth.jacobian.proved import attention_error
from howsmooth.jacobian.streamed import Through, streamed_derivative
from howsmooth.roundoff import MatrixNorms
from howsmooth.spectral import LinearOperator, ProductError

__all__ = ["StreamedAttentionJacobian"]


@dataclass(frozen=True)
class _Weights:
    """Projections as matrices in the dtype of the products, the scale in the queries'."""

    attention: SelfAttention
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None
    rotary: Rotary | None

    @classmethod
    def of(cls, f: SelfAttention, dtype: torch.dtype) -> _Weights:
        """Return those of float64 attention."""
        query, key, value = (t.flatten(0, 1).to(dtype) for t in (f.scale * f.query, f.key, f.value))
        output = None if f.output is None else f.output.to(dtype)
        return cls(f, query, key, value, output, None if f.rotary is None else f.rotary.to(dtype=dtype))


@runtime_checkable
class StreamedCore(Protocol):
    """What the operator needs of a softmax's derivative; its arguments are those of StreamedDerivative."""

    @property
    def k(self) -> Tensor:
        """Keys (b, n, key_dim)."""

    def rounding(self, batch: int) -> Tensor: ...
    def product(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor: ...
    def adjoint(self, do: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...
    def gram(self, dq: Tensor, dk: Tensor, dv: Tensor, through: Through) -> tuple[Tensor, Tensor, Tensor]: ...
    def select(self, rows: Tensor) -> StreamedCore: ...


_Norms = tuple[NormJacobian | None, NormJacobian | None]
"""Of queries, of keys."""


class StreamedAttentionJacobian(LinearOperator):
    """Jacobian of multi-head self-attention in memory O(n d): JᵀJ in one pass over blocks of query rows.

    Projections are made one after the other, so that of their results, n rows of all heads each, few are
    alive at a time.
    """

    def __init__(
        self, weights: _Weights, core: StreamedCore, norms: _Norms, proved: ProductError | None = None
    ) -> None:
        f = weights.attention
        n, batch = core.k.shape[1], core.k.shape[0] // f.kv_heads
        query = weights.query
        rounding = sum((norm.rounding for norm in norms if norm is not None), core.rounding(batch))
        super().__init__(batch, (n, f.d), (n, f.d_out), query.dtype, query.device, rounding, proved)
        self.weights = weights
        self.core = core
        self.norms = norms

    @classmethod
    def at(
        cls,
        f: SelfAttention,
        x: Tensor,
        dtype: torch.dtype,
        core: Callable[[Tensor, Tensor, Tensor], StreamedCore] | None = None,
        *,
        off: Tensor | None = None,
        norms: MatrixNorms | None = None,
        allowance: float | None = None,
    ) -> StreamedAttentionJacobian:
        """Linearise float64 attention at float64 tokens (batch, n, d).

        ``core`` makes the derivative from queries, keys and values, in place of that of these tokens alone.
        ``off`` bounds how far each token may be from where exact arithmetic has it; ``norms`` keeps norms of
        matrices.
        ``allowance`` is what relative rounding its products may have.
        """
        of_rows = (
            norm_jacobian(f.query_norm, x, f.query, f.query_bias, dtype),
            norm_jacobian(f.key_norm, x, f.key, f.key_bias, dtype),
        )
        if core is not None:
            q, k, v = f.projections(x)
            return cls(_Weights.of(f, dtype), core(q, k, v), of_rows)
        visibility = f.visibility(x.shape[1])
        assert isinstance(visibility, Visibility)  # that of tokens
        operands = Operands.of_tokens(f, x)
        derivative, proved = streamed_derivative(operands, visibility, dtype), None
        if off is not None and derivative.moments is not None:
            mean = derivative.mean.flatten(1, 2)
            proved = attention_error(f, x, off, operands, derivative.moments, mean, norms or MatrixNorms())
        return cls(_Weights.of(f, dtype), fused(derivative, allowance), of_rows, proved)

    def _product(self, e: Tensor) -> Tensor:
        return self._image(self.core.product(*self._tangents(e)))

    def _adjoint_product(self, u: Tensor) -> Tensor:
        f, (b, n, _) = self.weights.attention, u.shape
        heads = u if self.weights.output is None else u @ self.weights.output
        do = heads.view(b, n, f.heads, f.value_dim).transpose(1, 2).reshape(b * f.kv_heads, -1, f.value_dim)
        return self._cotangent(*self.core.adjoint(do))

    def _gram_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        image = e.new_empty(self.batch, *self.out_shape)

        def through(member: int, rows: slice, do: Tensor) -> Tensor:
            heads = do.flatten(0, 1).transpose(0, 1).flatten(1)
            if self.weights.output is None:
                image[member, rows] = heads
                return do
            u = torch.matmul(heads, self.weights.output.mT, out=image[member, rows])
            back = (u @ self.weights.output).view(heads.shape[0], *do.shape[:2], do.shape[3])
            return back.permute(1, 2, 0, 3).contiguous()

        parts = self.core.gram(*self._tangents(e), through)
        return image, self._cotangent(*parts)

    def select(self, members: Tensor) -> StreamedAttentionJacobian:
        """Return the operator of some members."""
        kv_heads = self.weights.attention.kv_heads
        members = members.to(self.device)
        rows = (members[:, None] * kv_heads + torch.arange(kv_heads, device=self.device)).flatten()
        query_norm, key_norm = (None if norm is None else norm.select(members) for norm in self.norms)
        proved = None if self.proved is None else self.proved.select(members)
        return StreamedAttentionJacobian(self.weights, self.core.select(rows), (query_norm, key_norm), proved)

    def _tangents(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of scaled queries, keys and values, (batch · kv_heads, ·, ·)."""
        f, w = self.weights.attention, self.weights
        query_norm, key_norm = self.norms
        return (
            self._projected(e, w.query, f.heads, query_norm, turned=True),
            self._projected(e, w.key, f.kv_heads, key_norm, turned=True),
            self._projected(e, w.value, f.kv_heads, None, turned=False),
        )

    def _projected(
        self, e: Tensor, weight: Tensor, heads: int, norm: NormJacobian | None, *, turned: bool
    ) -> Tensor:
        b, n, d = e.shape
        rows = (e.view(b * n, d) @ weight.mT).view(b, n, -1)
        if norm is not None:
            rows = norm.product(rows.reshape(b, *norm.in_shape)).reshape(rows.shape)
        rows = rows.view(b, n, heads, -1).transpose(1, 2)
        if turned and self.weights.rotary is not None:
            rows = self.weights.rotary.rotate(rows)
        return rows.reshape(b * self.weights.attention.kv_heads, -1, rows.shape[-1])

    def _cotangent(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """Return the cotangent of the tokens."""
        w = self.weights
        query_norm, key_norm = self.norms
        out = self._back(dq, query_norm, turned=True) @ w.query
        out.addmm_(self._back(dk, key_norm, turned=True), w.key)
        out.addmm_(self._back(dv, None, turned=False), w.value)
        return out.view(self.batch, *self.in_shape)

    def _back(self, part: Tensor, norm: NormJacobian | None, *, turned: bool) -> Tensor:
        """Return cotangents of queries, keys or values as rows (batch · n, ·) of all heads."""
        n = self.in_shape[0]
        part = part.reshape(self.batch, -1, n, part.shape[-1])
        if turned and self.weights.rotary is not None:
            part = self.weights.rotary.rotate_adjoint(part)
        rows = part.transpose(1, 2).reshape(self.batch, n, -1)
        if norm is not None:
            rows = norm.adjoint_product(rows.reshape(self.batch, *norm.in_shape)).reshape(rows.shape)
        return rows.flatten(0, 1)

    def _image(self, do: Tensor) -> Tensor:
        f = self.weights.attention
        heads = do.view(self.batch, f.heads, -1, f.value_dim).transpose(1, 2).flatten(2)
        return heads if self.weights.output is None else heads @ self.weights.output.mT
