"""The blocks J_ij = ∂y_i/∂x_j of the Jacobian of attention, as batched operators.

For a tangent e of token j ≠ i, one head moves its output at token i by ::

    P_ij V e + P_ij D_ij ⟨b_ij, e⟩ (v_j − O_i),    b_ij = (∂k_j/∂x_j)ᵀ q_i

so a block is a sum over heads of fixed matrices with weights P_ij, and of matrices of rank one. Blocks of the
diagonal have a further term, because the query of a token moves too:
Σ_l P_il D_il (v_l − O_i) k_lᵀ (∂q_i/∂x_i) e. No block is formed as a matrix. Derivation: documentation page
"Influence: the blocks of the Jacobian".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from howsmooth.attention import (
    Compose,
    LayerNorm,
    LayerScale,
    Residual,
    RMSNorm,
    Rotary,
    SelfAttention,
    TokenMap,
)
from howsmooth.attention.compositions import layers
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.closed_form import ComposedJacobian, ResidualJacobian, closed_form_jacobian
from howsmooth.jacobian.norm_layers import NormJacobian, query_and_key_norms
from howsmooth.jacobian.projections import LayerMatrices
from howsmooth.jacobian.softmax import softmax_derivative
from howsmooth.jacobian.softmax_tile import derivative_in_own_query
from howsmooth.spectral import LinearOperator

__all__ = ["DenseBlocks", "TokenBlocks", "token_blocks"]


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """The blocks J_ij = ∂y_i/∂x_j of a Jacobian at one sequence, for a group of pairs (i, j) at a time.

    ``weights`` are rough estimates of the norms of the blocks, zero if a block is zero. Off the diagonal it
    is the largest P_ij of all heads, without the norms of matrices and tokens.

    ``tile`` is a function of the tokens i and j of some pairs, a factor for each, and dtypes. For each dtype
    it returns the blocks of the pairs times the factors, as operators (1, d) -> (1, d_out). Either all pairs
    lie on the diagonal i = j, or none does. With the reciprocals of the weights as factors, the blocks stay
    in the range of the dtypes.
    """

    weights: Float[Tensor, "n n"]
    tile: Callable[[Tensor, Tensor, Tensor, Sequence[torch.dtype]], list[LinearOperator]]


def token_blocks(f: TokenMap, x: Float[Tensor, "n d"]) -> TokenBlocks | None:
    """Return the blocks J_ij = ∂y_i/∂x_j of the Jacobian of a float64 map at float64 tokens.

    The result is None unless the map is one layer of self-attention, with or without residuals, norm layers
    and layer scales around it, or consists of these without attention.
    """
    if _acts_on_tokens(f):
        return _diagonal(f, x)
    match f:
        case SelfAttention():
            attention = _AttentionBlocks(f, x)
            return TokenBlocks(attention.weights(), attention.tile)
        case Residual():
            inner = token_blocks(f.inner, x)
            return None if inner is None else _residual(inner)
        case Compose() if _acts_on_tokens(f.outer) or _acts_on_tokens(f.inner):
            image = f.inner._forward(x)
            outer, inner = token_blocks(f.outer, image), token_blocks(f.inner, x)
            if outer is None or inner is None:
                return None
            return _composed(outer, inner, mixes_last=_acts_on_tokens(f.inner))
        case _:
            return None


def _acts_on_tokens(f: TokenMap) -> bool:
    return all(isinstance(layer, LayerNorm | RMSNorm | LayerScale) for layer in layers(f))


class DenseBlocks(LinearOperator):
    """Blocks of a Jacobian that are given as matrices (pairs, d_out, d)."""

    def __init__(self, matrices: Float[Tensor, "pairs d_out d"]) -> None:
        pairs, d_out, d = matrices.shape
        super().__init__(pairs, (1, d), (1, d_out), matrices.dtype, matrices.device)
        self.matrices = matrices

    def _product(self, e: Tensor) -> Tensor:
        return e @ self.matrices.mT

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return u @ self.matrices

    def select(self, members: Tensor) -> DenseBlocks:
        """Return the blocks of the chosen pairs of tokens."""
        return DenseBlocks(self.matrices[members.to(self.device)])


# ---- norms, layer scales, residuals and compositions


def _diagonal(f: TokenMap, x: Float[Tensor, "n d"]) -> TokenBlocks:
    @cache
    def made(dtype: torch.dtype) -> LinearOperator:
        # Each token is a sequence of its own.
        return closed_form_jacobian(f, x[:, None], dtype=dtype)

    weights = torch.eye(len(x), dtype=torch.float64, device=x.device)
    return TokenBlocks(weights, lambda i, j, factor, dtypes: [made(dtype).select(i) for dtype in dtypes])


def _residual(inner: TokenBlocks) -> TokenBlocks:
    def tile(i: Tensor, j: Tensor, factor: Tensor, dtypes: Sequence[torch.dtype]) -> list[LinearOperator]:
        parts = inner.tile(i, j, factor, dtypes)
        # The weights of the diagonal are one, and so are the factors.
        return [ResidualJacobian(part) for part in parts] if bool((i == j).all()) else parts

    return TokenBlocks(inner.weights.fill_diagonal_(1.0), tile)


def _composed(outer: TokenBlocks, inner: TokenBlocks, *, mixes_last: bool) -> TokenBlocks:
    """Compose two maps, the inner or (unless ``mixes_last``) the outer of which acts on each token alone."""

    def tile(i: Tensor, j: Tensor, factor: Tensor, dtypes: Sequence[torch.dtype]) -> list[LinearOperator]:
        # The map that treats each token by itself acts at the input token, or at the output token.
        mixed, own = (i, j, factor), j if mixes_last else i
        alone = own, own, torch.ones_like(factor)
        last, first = (mixed, alone) if mixes_last else (alone, mixed)
        parts = zip(outer.tile(*last, dtypes), inner.tile(*first, dtypes), strict=True)
        return [ComposedJacobian(*pair) for pair in parts]

    return TokenBlocks(outer.weights if mixes_last else inner.weights, tile)


# ---- attention


class _AttentionBlocks:
    def __init__(self, f: SelfAttention, x: Float[Tensor, "n d"]) -> None:
        self._f, n = f, len(x)
        tokens = x[None]
        self._core = core = softmax_derivative(
            Operands.of_tokens(f, tokens), f.visible_keys(n), torch.float64
        )
        # The core has an axis of key heads, and one of the queries of all heads that share the key head.
        self._p, self._slope = core.p.view(f.heads, n, n), core.slope.view(f.heads, n, n)
        self._q, self._mean = core.q.view(f.heads, n, -1), core.mean.view(f.heads, n, -1)
        # The key head that each query head uses
        self._group = torch.arange(f.heads, device=f.device) // (f.heads // f.kv_heads)
        self._k, self._v = core.k[self._group], core.v[self._group]
        self._query_norm, self._key_norm = query_and_key_norms(f, tokens, torch.float64)
        self._projections: dict[torch.dtype, LayerMatrices] = {}

    def weights(self) -> Tensor:
        weights = self._p.amax(dim=0)
        # A token's own query moves its output unless one key has all the weight: by about the second weight.
        n = len(weights)
        spread = self._slope.topk(min(n, 2), dim=-1).values[..., -1].amax(dim=0)
        if self._core.sink is not None:
            spread = torch.ones_like(spread)
        return weights.diagonal_scatter(torch.maximum(weights.diagonal(), spread))

    def tile(
        self, i: Tensor, j: Tensor, factor: Tensor, dtypes: Sequence[torch.dtype]
    ) -> list[LinearOperator]:
        own = self._own_query(i, factor) if bool((i == j).all()) else None
        moved = (factor * self._slope[:, i, j])[..., None] * (self._v[:, j] - self._mean[:, i])
        owners, read = self._read(i, j)
        parts = ((factor * self._p[:, i, j]).mT, moved.transpose(0, 1), read)
        found: list[LinearOperator] = []
        for dtype in dtypes:
            if dtype not in self._projections:
                self._projections[dtype] = LayerMatrices.of(self._f, dtype, len(i))
            p, moved, read = (t.to(dtype).contiguous() for t in parts)
            digits = torch.finfo(dtype).eps / torch.finfo(torch.float64).eps
            rounding = digits * self._core.rounding(1).expand(len(i))
            query = None if own is None else _OwnQuery(own.matrices.to(dtype), own.placed.to(dtype))
            found.append(_AttentionTile(self._projections[dtype], p, moved, read, owners, query, rounding))
        return found

    def _read(self, i: Tensor, j: Tensor) -> tuple[Int[Tensor, " pairs"], Float[Tensor, "owners heads d"]]:
        """Return an index for each pair (i, j) into the distinct gradients b_ij of scores, and these."""
        f = self._f
        if f.rotary is None and f.key_norm is None:
            queries, owners = torch.unique_consecutive(i, return_inverse=True)
            t = self._q[:, queries].transpose(0, 1)
            return owners, torch.einsum("phk,hkd->phd", t, f.key[self._group])
        t, pairs, weight, n = self._q[:, i].transpose(0, 1), len(i), f.key, self._p.shape[1]
        owners = torch.arange(pairs, device=i.device)
        if f.key_norm is None or f.key_norm.d == f.key_dim:
            placed = _Placed.at(self._key_norm, f.rotary, n, j, self._group)
            return owners, torch.einsum("phk,hkd->phd", placed.adjoint(t), weight[self._group])
        # The norm mixes all key heads, so the cotangent of one score has entries in all of them.
        of_all = t.new_zeros(pairs, f.heads, f.kv_heads, f.key_dim)
        of_all[:, torch.arange(f.heads), self._group] = t
        placed = _Placed.at(self._key_norm, f.rotary, n, j.repeat_interleave(f.heads))
        rows = placed.adjoint(of_all.flatten(0, 1)).reshape(pairs, f.heads, -1)
        return owners, rows @ weight.flatten(0, 1)

    def _own_query(self, i: Tensor, factor: Tensor) -> _OwnQuery:
        n, heads, sink = self._p.shape[1], [], self._core.sink
        for head, (values, keys) in enumerate(zip(self._v, self._k, strict=True)):
            of_keys = self._p[head, i], self._slope[head, i], values, keys
            if sink is None:
                heads.append(derivative_in_own_query(*of_keys))
                continue
            of_sink, away = (t.view(self._f.heads, n, -1)[head, i] for t in (sink.p, sink.away))
            matrix = derivative_in_own_query(*of_keys, (of_sink, self._mean[head, i] + away))
            heads.append(matrix + (of_sink * away)[..., None] * sink.k[self._group[head]])
        matrices = torch.stack(heads, dim=1)
        matrices *= factor[:, None, None, None]
        return _OwnQuery(matrices, _Placed.at(self._query_norm, self._f.rotary, n, i))


@dataclass(frozen=True, eq=False)
class _Placed:
    """Derivatives of the norm and rotation that follow a query or key projection, at some tokens."""

    norm: NormJacobian | None
    rotary: Rotary | None

    @classmethod
    def at(
        cls,
        norm: NormJacobian | None,
        rotary: Rotary | None,
        n: int,
        tokens: Int[Tensor, " pairs"],
        heads: Int[Tensor, " heads"] | None = None,
    ) -> _Placed:
        """Rows of ``norm`` belong to all tokens, or to pairs of token and chosen head."""
        if norm is not None:
            unit, factor = (t.view(n, -1, t.shape[-1])[tokens] for t in (norm.unit, norm.factor))
            if heads is not None:
                unit, factor = unit[:, heads], factor[:, heads]
            norm = NormJacobian(norm.gain, unit, factor, centred=norm.centred)
        if rotary is not None:
            rotary = rotary.at(tokens)
        return cls(norm, rotary)

    def product(self, t: Float[Tensor, "pairs heads key_dim"]) -> Float[Tensor, "pairs heads key_dim"]:
        if self.norm is not None:
            t = self.norm.product(t.reshape(len(t), *self.norm.in_shape)).reshape(t.shape)
        return t if self.rotary is None else self.rotary.rotate(t.transpose(0, 1)).transpose(0, 1)

    def adjoint(self, t: Float[Tensor, "pairs heads key_dim"]) -> Float[Tensor, "pairs heads key_dim"]:
        if self.rotary is not None:
            t = self.rotary.rotate_adjoint(t.transpose(0, 1)).transpose(0, 1)
        if self.norm is None:
            return t
        return self.norm.adjoint_product(t.reshape(len(t), *self.norm.in_shape)).reshape(t.shape)

    def to(self, dtype: torch.dtype) -> _Placed:
        norm = None if self.norm is None else self.norm.to(dtype)
        return _Placed(norm, None if self.rotary is None else self.rotary.to(dtype=dtype))

    def select(self, members: Tensor) -> _Placed:
        norm = None if self.norm is None else self.norm.select(members)
        return _Placed(norm, None if self.rotary is None else self.rotary.at(members))


@dataclass(frozen=True, eq=False)
class _OwnQuery:
    """The derivative of the output of each head at a token with respect to the query of that token."""

    matrices: Float[Tensor, "pairs heads value_dim key_dim"]
    placed: _Placed

    def select(self, members: Tensor) -> _OwnQuery:
        return _OwnQuery(self.matrices[members], self.placed.select(members))

    def product(self, rows: Float[Tensor, "pairs rows"]) -> Float[Tensor, "pairs heads value_dim"]:
        heads, key_dim = self.matrices.shape[1], self.matrices.shape[3]
        return (self.matrices @ self.placed.product(rows.view(-1, heads, key_dim))[..., None])[..., 0]

    def adjoint(self, z: Float[Tensor, "pairs heads value_dim"]) -> Float[Tensor, "pairs rows"]:
        return self.placed.adjoint((self.matrices.mT @ z[..., None])[..., 0]).flatten(1)


class _AttentionTile(LinearOperator):
    """The blocks J_ij of the Jacobian of multi-head self-attention, for a group of pairs of tokens (i, j).

    For each head, ``p`` is P_ij and ``moved`` P_ij D_ij (v_j − O_i); ``read`` has the distinct vectors b_ij,
    and ``owners`` the index of each pair's. ``own`` is the further term of blocks on the diagonal.
    """

    def __init__(
        self,
        projection: LayerMatrices,
        p: Float[Tensor, "pairs heads"],
        moved: Float[Tensor, "pairs heads value_dim"],
        read: Float[Tensor, "owners heads d"],
        owners: Int[Tensor, " pairs"],
        own: _OwnQuery | None,
        rounding: Float[Tensor, " pairs"],
    ) -> None:
        f = projection.attention
        super().__init__(len(p), (1, f.d), (1, f.d_out), p.dtype, p.device, rounding)
        self.projection = projection
        self.p, self.moved, self.read, self.owners, self.own = p, moved, read, owners, own
        # Pairs that follow each other and have the same vectors b_ij share a product with them.
        runs, counts = torch.unique_consecutive(owners, return_counts=True)
        self._counts = counts.tolist() if 2 * len(runs) <= len(owners) else None
        self._b = read[runs] if self._counts else read[owners]

    def _product(self, e: Tensor) -> Tensor:
        return self.projection.out(self._heads(e[:, 0]).flatten(1))[:, None]

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self._heads_adjoint(self.projection.out_adjoint(u[:, 0]).view_as(self.moved))[:, None]

    def _energy_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        energy, through = self.projection.through(self._heads(e[:, 0]).flatten(1))
        return energy, self._heads_adjoint(through.view_as(self.moved))[:, None]

    def _heads(self, e: Float[Tensor, "pairs d"]) -> Float[Tensor, "pairs heads value_dim"]:
        f, (query, _, value) = self.projection.attention, self.projection.parts
        v = (e @ value.mT).view(len(e), f.kv_heads, 1, f.value_dim)
        p = self.p.view(len(e), f.kv_heads, -1, 1)
        z = torch.addcmul((p * v).view_as(self.moved), self._scores(e)[..., None], self.moved)
        return z if self.own is None else z + self.own.product(e @ query.mT)

    def _heads_adjoint(self, z: Float[Tensor, "pairs heads value_dim"]) -> Float[Tensor, "pairs d"]:
        f, (query, _, value) = self.projection.attention, self.projection.parts
        v = (self.p[..., None] * z).view(len(z), f.kv_heads, -1, f.value_dim).sum(dim=2)
        e = self._add_scores_adjoint(v.flatten(1) @ value, torch.linalg.vecdot(z, self.moved))
        return e if self.own is None else e.addmm_(self.own.adjoint(z), query)

    def _scores(self, e: Float[Tensor, "pairs d"]) -> Float[Tensor, "pairs heads"]:
        if self._counts is None:
            return (self._b @ e[..., None])[..., 0]
        return torch.cat([part @ b.mT for part, b in zip(e.split(self._counts), self._b, strict=True)])

    def _add_scores_adjoint(
        self, e: Float[Tensor, "pairs d"], scores: Float[Tensor, "pairs heads"]
    ) -> Float[Tensor, "pairs d"]:
        if self._counts is None:
            return torch.baddbmm(e[..., None], self._b.mT, scores[..., None])[..., 0]
        parts = zip(e.split(self._counts), scores.split(self._counts), self._b, strict=True)
        for part, s, b in parts:
            part.addmm_(s, b)
        return e

    def select(self, members: Tensor) -> _AttentionTile:
        members = members.to(self.device)
        own = None if self.own is None else self.own.select(members)
        p, moved, owners = (t[members] for t in (self.p, self.moved, self.owners))
        rounding = self.rounding[members.cpu()]
        return _AttentionTile(self.projection, p, moved, self.read, owners, own, rounding)
