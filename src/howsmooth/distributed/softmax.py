"""The derivative of softmax attention with the rows of queries shared out, keys and values gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.core import ScoreFeatures
from howsmooth.attention.visibility import Visibility
from howsmooth.distributed.exchange import Exchange
from howsmooth.jacobian.operands import Operands
from howsmooth.jacobian.streamed import StreamedDerivative, streamed_derivative

__all__ = ["SharedSoftmax", "shared_softmax"]


@dataclass(frozen=True)
class _Heads:
    """Some key heads: the derivative at each range of this process's queries, and its own keys and values.

    Where keys are not kept, the derivatives hold none; ``own`` has this process's rows of keys and values.
    ``value_mean`` is what values were centred by.
    """

    heads: slice
    pieces: tuple[StreamedDerivative, ...]
    own: tuple[Float[Tensor, "b own key_dim"], Float[Tensor, "b own value_dim"]] | None
    own_exact: Float[Tensor, "b own key_dim"] | None
    value_mean: Float[Tensor, "b 1 value_dim"]


@dataclass(frozen=True)
class SharedSoftmax:
    """Derivative of attention at one sequence, its query rows shared among processes.

    It takes and gives this process's rows, with the doors of
    :class:`~howsmooth.jacobian.streamed.StreamedDerivative`. Tangents of keys and values are gathered from
    all processes, cotangents summed over them, some heads at a time; every process must call it alike.

    Parameters
    ----------
    k
        This process's keys, whose shape is looked at only.
    parts
        The derivative, some heads after the other.
    exchange
        Between the processes.
    group
        Query heads to a key head.
    kappa_rounding
        See ``rounding``.

    """

    k: Float[Tensor, "b own key_dim"]
    parts: tuple[_Heads, ...]
    exchange: Exchange
    group: int
    kappa_rounding: Float[Tensor, " batch"]

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Relative error of the derivative's norm that rounding may cause: the largest of all processes."""
        return self.kappa_rounding.expand(batch)

    def product(
        self,
        dq: Float[Tensor, "b rows key_dim"],
        dk: Float[Tensor, "b own key_dim"],
        dv: Float[Tensor, "b own value_dim"],
    ) -> Float[Tensor, "b rows value_dim"]:
        """Return dO of this process's rows, for its tangents of scaled queries, keys and values."""
        queries = self._by_row(dq)
        out = dv.new_empty(*queries.shape[:3], dv.shape[-1])
        for part in self.parts:
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
        """Return the adjoint's parts for this process's rows of tokens, summed over all rows of queries."""
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
        """Return the adjoint of ``through`` of the product; in one pass if all heads are taken at once.

        ``through`` mixes heads: where they come one after the other, the product is made first, then its
        adjoint.
        """
        if len(self.parts) > 1:
            do = self._by_row(self.product(dq, dk, dv))
            return self.adjoint(through(0, slice(0, self.exchange.own), do).flatten(1, 2))
        (part,) = self.parts
        tangents = self._by_row(dq)
        every_dk, every_dv = self.exchange.gather(dk, dv)
        queries = torch.empty_like(tangents)
        total: tuple[Tensor, Tensor] | None = None
        for piece, rows in self._pieces(part):

            def moved(member: int, some: slice, do: Tensor, first: int = rows.start) -> Tensor:
                return through(member, slice(some.start + first, some.stop + first), do)

            own = tangents[:, :, rows]
            cotangent, *others = piece.gram(own.flatten(1, 2), every_dk, every_dv, moved)
            queries[:, :, rows] = cotangent.view(own.shape)
            total = _added(total, others)
        del every_dk, every_dv
        return queries.flatten(1, 2), *self._scattered(total)

    def image(self) -> Float[Tensor, "kv_heads group own value_dim"]:
        """Return P v of this process's rows."""
        return torch.cat(
            [
                torch.cat([piece.mean for piece in part.pieces], dim=2) + part.value_mean[:, None]
                for part in self.parts
            ]
        )

    def select(self, rows: Tensor) -> SharedSoftmax:
        """Return the same: there is one member, all of whose heads are taken."""
        return self

    def _by_row(self, t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], self.group, self.exchange.own, t.shape[-1])

    def _scattered(self, parts: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        assert parts is not None  # every process holds rows
        return self.exchange.scatter_sum(*parts)

    def _pieces(self, part: _Heads) -> Iterator[tuple[StreamedDerivative, slice]]:
        """Yield the derivatives of some heads and the rows, of this process's, that each stands for."""
        pieces = part.pieces
        if part.own is not None:
            k, v = self.exchange.gather(*part.own)
            exact = None
            if part.own_exact is not None:
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
    """Return the derivative at this process's float64 queries, keys and values, for products in ``dtype``.

    Keys and values of all heads are kept whole if ``heads_together`` is their number; else those of so many
    heads are gathered anew at each use.
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
    # Processes gather together: if one of them forms scores in float64, all send the keys for it.
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
        if pieces:  # one copy of the keys serves all ranges
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
    if features.softcap is None and features.sinks is None:  # as Operands.of_heads shifts them
        own_exact = own_exact - every_k.mean(dim=1, keepdim=True)
    # Empty, not views of nothing, which would keep the whole alive.
    no_k, no_v = (t.new_empty(t.shape[0], 0, t.shape[2]) for t in own)
    bare = tuple(_with_keys(piece, no_k, no_v, k.new_empty(no_k.shape)) for piece in pieces)
    return _Heads(heads, bare, own, own_exact, value_mean)


def _added(total: tuple[Tensor, Tensor] | None, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    dk, dv = parts
    return (dk, dv) if total is None else (total[0].add_(dk), total[1].add_(dv))


def _with_keys(piece: StreamedDerivative, k: Tensor, v: Tensor, exact: Tensor | None) -> StreamedDerivative:
    """Return the derivative with these keys and values in place of its own; no float64 keys, its own stay."""
    keys = piece.exact
    if keys is not None and exact is not None:
        keys = (keys[0], exact)
    return replace(piece, k=k, v=v, exact=keys)
