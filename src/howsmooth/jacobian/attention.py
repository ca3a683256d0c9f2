"""The Jacobian of multi-head self-attention, with attention probabilities that are kept in memory or
recomputed tile by tile.

Both operators project tangents of tokens to those of queries, keys and values, apply the derivative of the
softmax to each head, and project the heads to the output. They differ in that derivative, and in how many
projected tensors are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.atom_weights import Weighting
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.fused_softmax import fused
from howsmooth.jacobian.norm_layers import NormJacobian, query_and_key_norms
from howsmooth.jacobian.projections import LayerMatrices
from howsmooth.jacobian.rounding_bounds import AttentionRounding
from howsmooth.jacobian.softmax import SoftmaxDerivative, softmax_derivative, weighted_softmax_derivative
from howsmooth.jacobian.streamed_softmax import StreamedDerivative, streamed_derivative
from howsmooth.rounding import MatrixNorms
from howsmooth.spectral import LinearOperator
from howsmooth.spectral.operator import ProductError

__all__ = ["AttentionJacobian", "StreamedAttentionJacobian", "attention_jacobians"]

Norms = tuple[NormJacobian | None, NormJacobian | None]
"""Jacobians of the norm of the queries and of the norm of the keys, where the layer has them."""


class _MultiHeadJacobian(LinearOperator):
    def __init__(
        self,
        core: SoftmaxDerivative | StreamedDerivative,
        projection: LayerMatrices,
        norms: Norms,
        proved: ProductError | None = None,
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
        kv_heads = self.projection.attention.kv_heads
        heads = torch.arange(kv_heads, device=self.device)
        rows = (members.to(self.device)[:, None] * kv_heads + heads).flatten()
        query_norm, key_norm = (None if norm is None else norm.select(members) for norm in self.norms)
        proved = None if self.proved is None else self.proved.select(members)
        return type(self)(self.core.select(rows), self.projection, (query_norm, key_norm), proved)

    def _to_heads(self, part: int, rows: Float[Tensor, "batch n rows"]) -> Float[Tensor, "b m width"]:
        """Return the tangents of queries (``part`` 0), keys (1) or values (2), after norm and rotation."""
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
        """Apply the transpose of :meth:`_to_heads`. The result is written to ``out`` if that is given."""
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
        return _side_by_side(do.view(self.batch, -1, self.in_shape[0], do.shape[-1]), out)

    def _separated(self, heads: Float[Tensor, "batch n d_heads"]) -> Float[Tensor, "b m value_dim"]:
        f, (b, n, _) = self.projection.attention, heads.shape
        do = heads.view(b, n, f.heads, f.value_dim).transpose(1, 2)
        return do.reshape(b * f.kv_heads, -1, f.value_dim)


def _side_by_side(
    heads: Float[Tensor, "batch heads n width"], out: Float[Tensor, "batch n rows"] | None
) -> Float[Tensor, "batch n rows"]:
    rows = heads.transpose(1, 2)
    if out is None:
        return rows.flatten(2)
    out.unflatten(-1, rows.shape[2:]).copy_(rows)
    return out


class AttentionJacobian(_MultiHeadJacobian):
    """The Jacobian of multi-head self-attention, with the n × n probabilities of each head in memory."""

    core: SoftmaxDerivative

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
        """Return the tangents of the outputs of all heads, given the tangents of their queries, keys and
        values side by side. The result is written to ``out`` if it is given.
        """
        parts = rows.split(self.projection.sizes, dim=-1)
        do = self.core.product(*(self._to_heads(i, t) for i, t in enumerate(parts)))
        return self._concatenated(do, out)

    def heads_adjoint(
        self, heads: Float[Tensor, "batch n d_heads"], out: Float[Tensor, "batch n rows"] | None = None
    ) -> Float[Tensor, "batch n rows"]:
        """Return the cotangents of the queries, keys and values of all heads side by side, given the
        cotangents of the heads' outputs. The result is written to ``out`` if it is given.
        """
        sizes = self.projection.sizes
        if out is None:
            out = heads.new_empty(*heads.shape[:2], sum(sizes))
        parts = self.core.adjoint(self._separated(heads))
        for i, (part, rows) in enumerate(zip(parts, out.split(sizes, dim=-1), strict=True)):
            self._from_heads(i, part, rows)
        return out


class StreamedAttentionJacobian(_MultiHeadJacobian):
    """The Jacobian of multi-head self-attention without an n × n matrix in memory.

    Queries, keys and values are projected one after the other, so that few tensors with n rows of all heads
    are in memory at a time.
    """

    core: StreamedDerivative

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
        query, key, value = self.projection.parts
        return self._to_heads(0, e @ query.mT), self._to_heads(1, e @ key.mT), self._to_heads(2, e @ value.mT)

    def _cotangent(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        query, key, value = self.projection.parts
        out = self._from_heads(0, dq).flatten(0, 1) @ query
        out.addmm_(self._from_heads(1, dk).flatten(0, 1), key)
        out.addmm_(self._from_heads(2, dv).flatten(0, 1), value)
        return out.view(self.batch, *self.in_shape)


def attention_jacobians(
    f: SelfAttention,
    x: Float[Tensor, "batch n d"],
    made: Mapping[torch.dtype, Callable[[SelfAttention], LayerMatrices]],
    off: Float[Tensor, "batch n"] | None,
    norms: MatrixNorms,
    weighting: Weighting | None = None,
    *,
    streamed: bool = False,
    allowance: float | None = None,
) -> list[LinearOperator]:
    """Return the Jacobian of a float64 layer at float64 tokens, as one operator for each dtype in ``made``.

    The tokens may be the atoms of a measure of this weighting. ``off`` is an upper bound of the distance of
    each token from its exact value, or None if no error is to be proved; ``norms``, for that proof, holds
    norms of the layer's matrices. ``streamed`` and ``allowance`` are as for ``closed_form_jacobian``.
    """
    visibility, operands = f.visibility(x.shape[1], weighting), Operands.of_tokens(f, x)
    streamed = streamed and weighting is None
    visible = None if streamed else visibility.whole(f.device)
    # The derivative in float64 holds all other dtypes, so that scores are formed once.
    exact: SoftmaxDerivative | None = None
    if not streamed and weighting is None and torch.float64 in made:
        exact = softmax_derivative(operands, visible, torch.float64)

    def kept(dtype: torch.dtype) -> SoftmaxDerivative:
        if weighting is not None:
            return weighted_softmax_derivative(operands, visible, weighting, dtype)
        return softmax_derivative(operands, visible, dtype) if exact is None else exact.to(dtype)

    found: list[LinearOperator] = []
    for dtype, matrices in made.items():
        core = streamed_derivative(operands, visibility, dtype) if streamed else kept(dtype)
        proved = None
        if off is not None and core.moments is not None:
            mean = core.mean.flatten(1, -2)
            proved = AttentionRounding(f, x, off, operands, norms).product_error(core.moments, mean)
        parts = matrices(f), query_and_key_norms(f, x, dtype), proved
        if isinstance(core, StreamedDerivative):
            found.append(StreamedAttentionJacobian(fused(core, allowance), *parts))
        else:
            found.append(AttentionJacobian(core, *parts))
    return found
