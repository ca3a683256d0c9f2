"""The derivative of softmax attention at one long sequence whose query rows are divided among processes.

Each process has some of the queries, and the processes exchange keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.masks import Visibility
from howsmooth.attention.scaled_dot_product import ScoreFeatures
from howsmooth.distributed.communication import Exchange
from howsmooth.jacobian.centred_queries_keys_values import Operands
from howsmooth.jacobian.streamed_softmax import StreamedDerivative, streamed_derivative

__all__ = ["SharedSoftmax", "shared_softmax"]


@dataclass(frozen=True)
class _Heads:
    """The derivative of softmax attention for some of the key heads, at the query rows of this process.

    It has one part for each range of these query rows.

    If keys and values are not kept, the derivatives hold none. Then ``own`` has this process's rows of the
    keys and values, and ``own_exact`` its float64 keys if any process needs them. ``value_mean`` is the mean
    that was subtracted from the values.
    """

    heads: slice
    pieces: tuple[StreamedDerivative, ...]
    own: tuple[Float[Tensor, "b own key_dim"], Float[Tensor, "b own value_dim"]] | None
    own_exact: Float[Tensor, "b own key_dim"] | None
    value_mean: Float[Tensor, "b 1 value_dim"]


@dataclass(frozen=True)
class SharedSoftmax:
    """The derivative of softmax attention at one long sequence whose query rows are divided among processes.

    The class has the methods of :class:`~howsmooth.jacobian.streamed_softmax.StreamedDerivative`, for the
    rows of this process. Tangents of keys and values are gathered from all processes, and their cotangents
    are summed over processes, for some heads at a time.

    All processes must call the same methods in the same order.

    Parameters
    ----------
    k
        This process's keys; only their shape is used.
    parts
        The derivatives of groups of heads, in the order of the heads.
    exchange
        The communication between the processes.
    group
        Number of query heads for each key head.
    kappa_rounding
        The relative error that ``rounding`` returns.

    """

    k: Float[Tensor, "b own key_dim"]
    parts: tuple[_Heads, ...]
    exchange: Exchange
    group: int
    kappa_rounding: Float[Tensor, " batch"]

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Estimate the relative rounding error of the norm of the Jacobian when the norm is computed with
        this derivative. The result is the largest estimate of all processes.
        """
        return self.kappa_rounding.expand(batch)

    def product(
        self,
        dq: Float[Tensor, "b rows key_dim"],
        dk: Float[Tensor, "b own key_dim"],
        dv: Float[Tensor, "b own value_dim"],
    ) -> Float[Tensor, "b rows value_dim"]:
        """Return this process's rows of the tangent of the attention output, for tangents of its scaled
        queries, keys and values.
        """
        queries = self._by_row(dq)
        out = dv.new_empty(*queries.shape[:3], dv.shape[-1])
        for part in self.parts:
            # Tangents of keys and values of all processes act on the query rows of this process.
            every_dk, every_dv = self.exchange.gather(dk[part.heads], dv[part.heads])
            for piece, rows in self._pieces(part):
                own = queries[part.heads, :, rows]
                image = piece.product(own.flatten(1, 2), every_dk, every_dv)
                out[part.heads, :, rows] = image.view(*own.shape[:3], -1)
        return out.flatten(1, 2)

    def adjoint(
        self, do: Float[Tensor, "b rows value_dim"]
    ) -> tuple[
        Float[Tensor, "b rows key_dim"], Float[Tensor, "b own key_dim"], Float[Tensor, "b own value_dim"]
    ]:
        """Return the cotangents of this process's queries, keys and values, for a cotangent of its rows of
        the attention output.
        """
        outputs = self._by_row(do)
        queries = do.new_empty(*outputs.shape[:3], self.k.shape[-1])
        keys, values = [], []
        for part in self.parts:
            total: tuple[Tensor, Tensor] | None = None
            for piece, rows in self._pieces(part):
                own = outputs[part.heads, :, rows]
                dq, *others = piece.adjoint(own.flatten(1, 2))
                queries[part.heads, :, rows] = dq.view(*own.shape[:3], -1)
                total = _added(total, others)
            # The query rows of this process contribute to the keys and values of all processes.
            dk, dv = self._scattered(total)
            keys.append(dk)
            values.append(dv)
        return queries.flatten(1, 2), torch.cat(keys), torch.cat(values)

    def gram(
        self,
        dq: Float[Tensor, "b rows key_dim"],
        dk: Float[Tensor, "b own key_dim"],
        dv: Float[Tensor, "b own value_dim"],
        through: Callable[[int, slice, Tensor], Tensor],
    ) -> tuple[
        Float[Tensor, "b rows key_dim"], Float[Tensor, "b own key_dim"], Float[Tensor, "b own value_dim"]
    ]:
        """Apply the derivative J of softmax attention, then a linear map T of the attention output, and then
        the transpose of J.

        The result is Jᵀ(T(J(dq, dk, dv))) for this process's rows, where T is ``through``.

        If all heads are gathered at once, this takes one pass over the tiles. ``through`` mixes heads, so if
        heads are taken in turn, the product of all heads is computed before the adjoint.
        """
        if len(self.parts) > 1:
            do = self._by_row(self.product(dq, dk, dv))
            return self.adjoint(through(0, slice(0, self.exchange.own), do).flatten(1, 2))
        # All heads at once: each tile of probabilities serves J and its adjoint.
        (part,) = self.parts
        tangents = self._by_row(dq)
        every_dk, every_dv = self.exchange.gather(dk, dv)
        queries = torch.empty_like(tangents)
        total: tuple[Tensor, Tensor] | None = None
        for piece, rows in self._pieces(part):
            # The piece counts rows from its own first row, while ``through`` counts all rows of the process.
            # The default argument binds the offset of this iteration.
            def moved(member: int, some: slice, do: Tensor, first: int = rows.start) -> Tensor:
                return through(member, slice(some.start + first, some.stop + first), do)

            own = tangents[:, :, rows]
            cotangent, *others = piece.gram(own.flatten(1, 2), every_dk, every_dv, moved)
            queries[:, :, rows] = cotangent.view(own.shape)
            total = _added(total, others)
        del every_dk, every_dv
        return queries.flatten(1, 2), *self._scattered(total)

    def image(self) -> Float[Tensor, "kv_heads group own value_dim"]:
        """Return this process's rows of the attention output."""
        return torch.cat(
            [
                torch.cat([piece.mean for piece in part.pieces], dim=2) + part.value_mean[:, None]
                for part in self.parts
            ]
        )

    def select(self, rows: Tensor) -> SharedSoftmax:
        """Return this derivative unchanged, because it belongs to a single sequence and not to a batch."""
        return self

    def _by_row(self, t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], self.group, self.exchange.own, t.shape[-1])

    def _scattered(self, parts: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        assert parts is not None  # every process holds rows
        return self.exchange.scatter_sum(*parts)

    def _pieces(self, part: _Heads) -> Iterator[tuple[StreamedDerivative, slice]]:
        """Yield the derivative of softmax attention for each range of query rows that this process holds.

        Each derivative is for the heads of ``part``, and comes with the place of its rows among the rows of
        this process. Keys and values that were not kept are gathered first.
        """
        pieces = part.pieces
        if part.own is not None:
            # Keys and values were not kept: gather them for the time of this iteration.
            k, v = self.exchange.gather(*part.own)
            exact = None
            if part.own_exact is not None:
                # The second tensor of this gather is empty.
                exact, _ = self.exchange.gather(part.own_exact, part.own_exact[..., :0])
            pieces = tuple(_with_keys(piece, k, v, exact) for piece in pieces)
        first = 0
        for piece in pieces:
            length = piece.q.shape[2]
            yield piece, slice(first, first + length)
            first += length


def shared_softmax(
    q: Float[Tensor, "kv_heads group own key_dim"],
    k: Float[Tensor, "kv_heads own key_dim"],
    v: Float[Tensor, "kv_heads own value_dim"],
    scale: float,
    visibility: Visibility,
    features: ScoreFeatures,
    dtype: torch.dtype,
    exchange: Exchange,
    heads_together: int,
) -> SharedSoftmax:
    """Return the derivative of softmax attention at a sequence whose tokens are divided among processes, as
    an object whose products are computed in ``dtype``.

    The arguments are this process's queries, keys and values, in float64.

    If ``heads_together`` is the number of all key heads, the gathered keys and values are kept. Otherwise
    each use gathers them again, for ``heads_together`` heads at a time.
    """
    kv_heads, group = q.shape[:2]
    parts = [
        _some_heads(
            slice(first, min(first + heads_together, kv_heads)),
            q,
            k,
            v,
            scale,
            visibility,
            features,
            dtype,
            exchange,
            keep=heads_together >= kv_heads,
        )
        for first in range(0, kv_heads, heads_together)
    ]
    pieces = [piece for part in parts for piece in part.pieces]
    rounding = torch.stack([piece.rounding(1) for piece in pieces]).amax(dim=0)
    # All processes must take part in a gather: if one of them computes scores in float64, all must send their
    # float64 keys.
    wanted = torch.tensor([float(piece.exact is not None) for piece in pieces]).amax()
    if not bool(exchange.largest(wanted)):
        parts = [replace(part, own_exact=None) for part in parts]
    return SharedSoftmax(k, tuple(parts), exchange, group, exchange.largest(rounding))


def _some_heads(
    heads: slice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    visibility: Visibility,
    features: ScoreFeatures,
    dtype: torch.dtype,
    exchange: Exchange,
    *,
    keep: bool,
) -> _Heads:
    of_heads = replace(features, sinks=None if features.sinks is None else features.sinks[heads])
    every_k, every_v = exchange.gather(k[heads], v[heads])
    pieces: list[StreamedDerivative] = []
    begun = 0
    for part in exchange.ranges:
        length = part.stop - part.start
        own_q = q[None, heads, :, begun : begun + length]
        operands = Operands.of_heads(own_q, every_k[None], every_v[None], scale, of_heads)
        piece = streamed_derivative(operands, visibility, dtype, first_row=part.start)
        if pieces:  # all ranges share one copy of the keys
            exact = next((one.exact[1] for one in pieces if one.exact is not None), None)
            piece = _with_keys(piece, pieces[0].k, pieces[0].v, exact)
        pieces.append(piece)
        begun += length
    value_mean = every_v.mean(dim=1, keepdim=True)
    if keep:
        return _Heads(heads, tuple(pieces), None, None, value_mean)
    rows = exchange.shares.rows(exchange.collectives.rank).to(k.device)
    own = (pieces[0].k[:, rows], pieces[0].v[:, rows])
    own_exact = k[heads]
    if features.softcap is None and features.sinks is None:  # Operands.of_heads centres keys here, too
        own_exact = own_exact - every_k.mean(dim=1, keepdim=True)
    # New empty tensors; empty views would keep the memory of all gathered keys alive.
    no_k, no_v = (t.new_empty(t.shape[0], 0, t.shape[2]) for t in own)
    bare = tuple(_with_keys(piece, no_k, no_v, k.new_empty(no_k.shape)) for piece in pieces)
    return _Heads(heads, bare, own, own_exact, value_mean)


def _added(total: tuple[Tensor, Tensor] | None, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    dk, dv = parts
    return (dk, dv) if total is None else (total[0].add_(dk), total[1].add_(dv))


def _with_keys(piece: StreamedDerivative, k: Tensor, v: Tensor, exact: Tensor | None) -> StreamedDerivative:
    """Return a copy of a derivative of softmax attention in which ``k`` and ``v`` replace the keys and
    values.

    If the derivative holds float64 keys, ``exact`` replaces them.
    """
    keys = piece.exact
    if keys is not None and exact is not None:
        keys = (keys[0], exact)
    return replace(piece, k=k, v=v, exact=keys)
