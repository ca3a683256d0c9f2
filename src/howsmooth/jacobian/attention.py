"""The Jacobian of multi-head self-attention, with attention probabilities that are kept in memory or
recomputed tile by tile.

Both operators project tangents of tokens to tangents of queries, keys and values, apply the derivative of the
softmax to each head, and project the heads to the output. They differ in that derivative, and in how many
projected tensors are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.masks import Visibility
from howsmooth.jacobian.centred_queries_keys_values import Operands
from howsmooth.jacobian.fused_softmax import fused
from howsmooth.jacobian.norm_layers import NormJacobian, norm_jacobian
from howsmooth.jacobian.projections import Projection, Projections
from howsmooth.jacobian.rounding_bounds import attention_error
from howsmooth.jacobian.softmax import (
    SoftmaxDerivative,
    WeightedSoftmaxDerivative,
    softmax_derivative,
    weighted_softmax_derivative,
)
from howsmooth.jacobian.streamed_softmax import Through, streamed_derivative
from howsmooth.rounding import MatrixNorms
from howsmooth.spectral import LinearOperator
from howsmooth.spectral.operator import ProductError

__all__ = ["AttentionJacobian", "StreamedAttentionJacobian"]

Norms = tuple[NormJacobian | None, NormJacobian | None]
"""Jacobians of the norm of the queries and of the norm of the keys, where the layer has them."""


@runtime_checkable
class Core(Protocol):
    """The interface of the derivative of softmax attention in all heads of a layer, with respect to queries,
    keys and values.

    Arguments and results are those of :class:`~howsmooth.jacobian.softmax.SoftmaxDerivative`.
    """

    @property
    def k(self) -> Tensor:
        """The keys of the layer, of shape (b, n, key_dim), where the axis b runs over the key heads of all
        sequences in the batch.
        """

    def rounding(self, batch: int) -> Tensor: ...
    def product(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor: ...
    def adjoint(self, do: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...
    def select(self, rows: Tensor) -> Self: ...


@runtime_checkable
class StreamedCore(Core, Protocol):
    """The interface of a derivative J of softmax attention that also computes products with Jᵀ T J, where T
    is a linear map that acts on the outputs of each token separately.

    The method ``gram`` computes these products.

    The arguments are those of :class:`~howsmooth.jacobian.streamed_softmax.StreamedDerivative`.
    """

    def gram(self, dq: Tensor, dk: Tensor, dv: Tensor, through: Through) -> tuple[Tensor, Tensor, Tensor]: ...


_Core = TypeVar("_Core", bound=Core)


class _MultiHeadJacobian(LinearOperator, Generic[_Core]):
    """Base class of the Jacobians of multi-head attention, which contain projections, norm layers and the
    derivative of the softmax.
    """

    def __init__(
        self, projection: Projection, core: _Core, norms: Norms, proved: ProductError | None = None
    ) -> None:
        f, weight = projection.attention, projection.weight
        batch, n = core.k.shape[0] // f.kv_heads, core.k.shape[1]
        rounding = sum((norm.rounding for norm in norms if norm is not None), core.rounding(batch))
        # The columns of the matrix are the coordinates of a token, of which there may be fewer than d.
        shapes = (n, weight.shape[-1]), (n, f.d_out)
        super().__init__(batch, *shapes, weight.dtype, weight.device, rounding, proved)
        self.projection = projection
        self.core = core
        self.norms = norms

    def select(self, members: Tensor) -> Self:
        """Return the Jacobians of attention at the chosen sequences of the batch."""
        kv_heads = self.projection.attention.kv_heads
        heads = torch.arange(kv_heads, device=self.device)
        rows = (members.to(self.device)[:, None] * kv_heads + heads).flatten()
        query_norm, key_norm = (None if norm is None else norm.select(members) for norm in self.norms)
        proved = None if self.proved is None else self.proved.select(members)
        return type(self)(self.projection, self.core.select(rows), (query_norm, key_norm), proved)

    def _to_heads(self, part: int, rows: Float[Tensor, "batch n rows"]) -> Float[Tensor, "b m width"]:
        """Split the projected tangents of the queries, keys or values of all heads into one matrix for each
        key head.

        The argument ``part`` is 0 for queries, 1 for keys and 2 for values. Each row of ``rows`` holds the
        projected tangents of one token in all heads. The derivatives of the norm layer and the rotation,
        which follow the projection, are applied here.
        """
        f, (b, n, _) = self.projection.attention, rows.shape
        heads, norm = (f.heads, f.kv_heads, f.kv_heads)[part], (*self.norms, None)[part]
        # Queries and keys may be normed and are then rotated; values are neither.
        if norm is not None:
            rows = norm.product(rows.reshape(b, *norm.in_shape))
        rows = rows.reshape(b, n, heads, -1).transpose(1, 2)
        if part < 2 and self.projection.rotary is not None:
            rows = self.projection.rotary.rotate(rows)
        # Successive query heads share a key head, so their rows come to lie in one matrix.
        return rows.reshape(b * f.kv_heads, -1, rows.shape[-1])

    def _from_heads(
        self, part: int, heads: Float[Tensor, "b m width"], out: Float[Tensor, "batch n rows"] | None = None
    ) -> Float[Tensor, "batch n rows"]:
        """Apply the transpose of :meth:`_to_heads`: join the matrices of all key heads to one matrix, in
        which each token has one row.

        The result is written to ``out`` if it is given.
        """
        (n, _), norm = self.in_shape, (*self.norms, None)[part]
        heads = heads.reshape(self.batch, -1, n, heads.shape[-1])
        if part < 2 and self.projection.rotary is not None:
            heads = self.projection.rotary.rotate_adjoint(heads)
        if norm is not None:
            rows = heads.transpose(1, 2).reshape(self.batch, *norm.in_shape)
            heads = norm.adjoint_product(rows).view(self.batch, n, -1, heads.shape[-1]).transpose(1, 2)
        return _side_by_side(heads, out)

    def _concatenated(
        self, do: Float[Tensor, "b m value_dim"], out: Float[Tensor, "batch n d_heads"] | None = None
    ) -> Float[Tensor, "batch n d_heads"]:
        """Concatenate the outputs of all heads of an attention layer to one matrix, in which each token has
        one row.

        The result is written to ``out`` if it is given.
        """
        return _side_by_side(do.view(self.batch, -1, self.in_shape[0], do.shape[-1]), out)

    def _separated(self, heads: Float[Tensor, "batch n d_heads"]) -> Float[Tensor, "b m value_dim"]:
        """Split the concatenated outputs of all heads into one matrix for each key head."""
        f, (b, n, _) = self.projection.attention, heads.shape
        do = heads.view(b, n, f.heads, f.value_dim).transpose(1, 2)
        return do.reshape(b * f.kv_heads, -1, f.value_dim)


def _side_by_side(
    heads: Float[Tensor, "batch heads n width"], out: Float[Tensor, "batch n rows"] | None
) -> Float[Tensor, "batch n rows"]:
    """Concatenate the rows of all heads for each token; the result is written to ``out`` if it is given."""
    rows = heads.transpose(1, 2)
    if out is None:
        return rows.flatten(2)
    out.unflatten(-1, rows.shape[2:]).copy_(rows)
    return out


def _norms(f: SelfAttention, x: Tensor, dtype: torch.dtype) -> Norms:
    return (
        norm_jacobian(f.query_norm, x, f.query, f.query_bias, dtype),
        norm_jacobian(f.key_norm, x, f.key, f.key_bias, dtype),
    )


class AttentionJacobian(_MultiHeadJacobian[SoftmaxDerivative | WeightedSoftmaxDerivative]):
    """The Jacobian of multi-head self-attention at n tokens, with all attention probabilities kept in memory.

    They are n² numbers for each head.
    """

    @classmethod
    def at(
        cls,
        f: SelfAttention,
        x: Float[Tensor, "batch n d"],
        off: Float[Tensor, "batch n"] | None,
        weighting: Weighting | None,
        projections: Sequence[Projections],
        norms: MatrixNorms,
    ) -> list[LinearOperator]:
        """Return the Jacobian of a float64 attention layer at float64 tokens, as one operator for each
        requested dtype.

        There is one operator for each item of ``projections``.

        Parameters
        ----------
        f, x
            The layer and its tokens.
        off
            Upper bound of |x̂ − x| of each token, x̂ the exact token; None if no error is to be proved.
        weighting
            The weights of a measure whose atoms the tokens are, or None.
        projections
            The projections of the map in each dtype.
        norms
            Norms of the layer's matrices, for the proof of the error.

        """
        visible = f.visible_keys(x.shape[1], weighting)
        operands = Operands.of_tokens(f, x)
        # The derivative in float64 holds all other dtypes, so that scores are formed once.
        double = any(made.dtype == torch.float64 for made in projections) and weighting is None
        exact = softmax_derivative(operands, visible, torch.float64) if double else None

        def in_dtype(made: Projections) -> AttentionJacobian:
            if weighting is not None:
                weighted = weighted_softmax_derivative(operands, visible, weighting, made.dtype)
                return cls(made.of(f), weighted, _norms(f, x, made.dtype))
            core = (
                softmax_derivative(operands, visible, made.dtype) if exact is None else exact.to(made.dtype)
            )
            proved = None
            if off is not None and core.moments is not None:
                proved = attention_error(f, x, off, operands, core.moments, core.mean, norms)
            return cls(made.of(f), core, _norms(f, x, made.dtype), proved)

        return [in_dtype(made) for made in projections]

    def _product(self, e: Tensor) -> Tensor:
        return self.projection.out(self.heads(self.projection.into(e)))

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self.projection.into_adjoint(self.heads_adjoint(self.projection.out_adjoint(u)))

    def _energy_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        energy, through = self.projection.through(self.heads(self.projection.into(e)))
        return energy.sum(dim=1), self.projection.into_adjoint(self.heads_adjoint(through))

    def heads(
        self, rows: Float[Tensor, "batch n rows"], out: Float[Tensor, "batch n d_heads"] | None = None
    ) -> Float[Tensor, "batch n d_heads"]:
        """Return the tangents of the outputs of all heads, given the concatenated tangents of their queries,
        keys and values.

        The result is written to ``out`` if that is given.
        """
        parts = rows.split(self.projection.sizes, dim=-1)
        do = self.core.product(*(self._to_heads(i, t) for i, t in enumerate(parts)))
        return self._concatenated(do, out)

    def heads_adjoint(
        self, heads: Float[Tensor, "batch n d_heads"], out: Float[Tensor, "batch n rows"] | None = None
    ) -> Float[Tensor, "batch n rows"]:
        """Return the concatenated cotangents of queries, keys and values of all heads, given the cotangents
        of the head outputs.

        The result is written to ``out`` if that is given.
        """
        sizes = self.projection.sizes
        if out is None:
            out = heads.new_empty(*heads.shape[:2], sum(sizes))
        parts = self.core.adjoint(self._separated(heads))
        for i, (part, rows) in enumerate(zip(parts, out.split(sizes, dim=-1), strict=True)):
            self._from_heads(i, part, rows)
        return out


class StreamedAttentionJacobian(_MultiHeadJacobian[StreamedCore]):
    """The Jacobian of multi-head self-attention at n tokens, as an operator that keeps no n × n matrix in
    memory.

    Queries, keys and values are projected one after the other, so that few tensors with n rows of all heads
    are in memory at a time.
    """

    @classmethod
    def at(
        cls,
        f: SelfAttention,
        x: Float[Tensor, "batch n d"],
        dtype: torch.dtype,
        *,
        off: Float[Tensor, "batch n"] | None = None,
        norms: MatrixNorms | None = None,
        allowance: float | None = None,
    ) -> StreamedAttentionJacobian:
        """Return the Jacobian of a float64 attention layer at float64 tokens as an operator that keeps no n ×
        n matrix.

        Parameters
        ----------
        f, x, dtype
            The layer, its tokens, and the dtype of the products.
        off, norms
            As for :meth:`AttentionJacobian.at`.
        allowance
            Relative rounding error that the products may have.

        """
        projection, of_rows = Projection.of(f, dtype, x.shape[0] * x.shape[1]), _norms(f, x, dtype)
        visibility = f.visibility(x.shape[1])
        assert isinstance(visibility, Visibility)  # the visibility of measures has another type
        operands = Operands.of_tokens(f, x)
        derivative, proved = streamed_derivative(operands, visibility, dtype), None
        if off is not None and derivative.moments is not None:
            mean = derivative.mean.flatten(1, 2)
            proved = attention_error(f, x, off, operands, derivative.moments, mean, norms or MatrixNorms())
        return cls(projection, fused(derivative, allowance), of_rows, proved)

    def _product(self, e: Tensor) -> Tensor:
        return self.projection.out(self._concatenated(self.core.product(*self._tangents(e))))

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self._cotangent(*self.core.adjoint(self._separated(self.projection.out_adjoint(u))))

    def _gram_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        image, output = e.new_empty(self.batch, *self.out_shape), self.projection.output

        def through(member: int, rows: slice, do: Tensor) -> Tensor:
            # do is (heads, group, rows, value_dim); the output projection mixes all heads of a row.
            heads = do.flatten(0, 1).transpose(0, 1).flatten(1)
            if output is None:
                image[member, rows] = heads
                return do
            u = torch.matmul(heads, output.mT, out=image[member, rows])
            back = (u @ output).view(heads.shape[0], *do.shape[:2], do.shape[3])
            return back.permute(1, 2, 0, 3).contiguous()

        return image, self._cotangent(*self.core.gram(*self._tangents(e), through))

    def _tangents(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tangents of the scaled queries, keys and values of all heads, for the tangents ``e`` of
        the tokens.
        """
        query, key, value = self.projection.parts
        return self._to_heads(0, e @ query.mT), self._to_heads(1, e @ key.mT), self._to_heads(2, e @ value.mT)

    def _cotangent(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """Return the cotangent of the tokens, from the cotangents of the scaled queries, keys and values of
        all heads.
        """
        query, key, value = self.projection.parts
        out = self._from_heads(0, dq).flatten(0, 1) @ query
        out.addmm_(self._from_heads(1, dk).flatten(0, 1), key)
        out.addmm_(self._from_heads(2, dv).flatten(0, 1), value)
        return out.view(self.batch, *self.in_shape)
