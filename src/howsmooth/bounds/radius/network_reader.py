"""Read a network of known layers from the terms of a model's logits.

Nothing is known of the model but its operations. They are followed from the logits back to the tokens, and
grouped into maps (attention, feed-forward, norm, linear), whose sums are the nodes of a graph. An operation
that belongs to no map is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from howsmooth.bounds.radius.network_graph import (
    Affine,
    Node,
    NotReadError,
    Summand,
    careful_product,
    careful_sum,
    identity,
    linear,
    staged,
)
from howsmooth.bounds.radius.symbolic_terms import PLACES, Terms, constant, key_of, operand_entries
from howsmooth.bounds.radius.transformer_layers import (
    ACTIVATIONS,
    Attention,
    FeedForward,
    GatedFeedForward,
    Map,
    Norm,
)
from howsmooth.bounds.radius.transformer_network import Network

__all__ = ["read_network"]

Found = TypeVar("Found")

_CORES = {"weighted", "multiply"} | ACTIVATIONS.keys()
_POOLED = 0  # the only row after tokens were averaged
_TURNS = "turns queries and keys by different rotations"


class _Sum(NamedTuple):
    """Entries of one vector as sums of multiples of other entries, and of constants.

    The entry at ``place[i]`` has the summand ``factor[i]`` times the entry ``atom[i]``.
    """

    place: Tensor
    atom: Tensor
    factor: Tensor
    constant: Tensor

    def of(self, numbers: Iterable[int]) -> _Sum:
        """Return the summands with atoms of the given terms."""
        here = torch.isin(self.atom // PLACES, torch.tensor(sorted(numbers)))
        return self._replace(place=self.place[here], atom=self.atom[here], factor=self.factor[here])

    @property
    def numbers(self) -> list[int]:
        """The numbers of the terms of all atoms."""
        return [int(number) for number in (self.atom // PLACES).unique()]

    @property
    def linear(self) -> _Sum:
        """The sum without constants."""
        return self._replace(constant=torch.zeros_like(self.constant))

    def matrix(self, size: int, columns: Tensor) -> Tensor:
        """Return the matrix of the sum, with the given column for each summand."""
        found = torch.zeros(len(self.constant), size, dtype=torch.float64)
        found.index_put_((self.place, columns), self.factor, accumulate=True)
        return found

    def key(self, atoms: Tensor) -> tuple[Any, ...]:
        """Return what tells two sums apart, with other names for the atoms."""
        return key_of(self.place), key_of(atoms), key_of(self.factor)


class _Head(NamedTuple):
    """One head of an attention for one row: its maps, the queries and keys of which are turned, the tokens
    that the row sees, and what is added to their scores. The result is pooled if the query is a constant.
    """

    query: Affine
    key: Affine
    value: Affine
    pooled: bool
    row: int
    seen: tuple[int, ...]
    biases: Tensor


@dataclass(eq=False)
class _Rows:
    """What the rows of an attention see: for each row the keys, the biases of the scores (heads, keys), and
    for each token the rotation of its query and key.
    """

    seen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    biases: dict[int, Tensor] = field(default_factory=dict)
    turns: dict[int, Tensor | None] = field(default_factory=dict)


def read_network(
    terms: Terms, logits: Tensor, d: int, name: Callable[[int], str]
) -> tuple[Network, list[int]]:
    """Return the network that computes logits (classes,) from tokens (n, d), and the tokens that it reads;
    the logits do not depend on the others. Raise NotReadError if an operation belongs to no map.

    ``name`` tells the name of the module that made a term.
    """
    reader = _Reader(terms, d, name)
    readout = reader.readout(logits)
    if not reader.tokens.rows:
        raise NotReadError(0, "has logits that do not depend on the tokens")
    return staged(reader.tokens, *readout)


def _remembered(read: Callable[[_Reader, Tensor], Found]) -> Callable[[_Reader, Tensor], Found]:
    """Let a reader read each vector once."""

    def remembered(reader: _Reader, entries: Tensor) -> Found:
        name = read.__name__, key_of(entries)
        if name not in reader._known:
            reader._known[name] = read(reader, entries)
        found: Found = reader._known[name]
        return found

    return remembered


class _Reader:
    """Finds the nodes that compute the vectors of a model. Each vector is read once."""

    def __init__(self, terms: Terms, d: int, name: Callable[[int], str]) -> None:
        self.terms, self.name = terms, name
        self.tokens = Node("tokens", d)
        self._nodes: dict[tuple[Any, ...], Node] = {}
        self._affine: dict[tuple[Any, ...], Affine] = {}
        self._known: dict[tuple[str, bytes], Any] = {}
        self._scales: dict[Any, float] = {}
        self._rows: dict[tuple[Any, ...], _Rows] = {}
        # Sums that a norm or a linear map is given are nodes; others are part of the sums that they are in.
        self._apart: set[int] = set()
        for number in range(len(terms)):
            kind, *of = terms[number]
            if kind in ("norm", "linear", "total"):
                self._keep_apart(operand_entries(of[-1]))

    def _keep_apart(self, entries: Tensor) -> None:
        for number in (entries[entries >= 0] // PLACES).unique().tolist():
            kind, *of = self.terms[number]
            if kind == "add":
                self._apart.add(number)
            elif kind in ("times", "plus", "neg", "total"):
                self._keep_apart(operand_entries(of[0]))

    # ---- sums

    def _sum(self, entries: Tensor, opened: int = -1) -> _Sum:
        """Return entries as sums. The sum with the number ``opened`` is taken apart, too."""
        parts, fixed = [], torch.zeros(len(entries), dtype=torch.float64)
        if bool((entries < 0).any()):
            raise NotReadError(0, "computes with something that is not known")
        for number in (entries // PLACES).unique().tolist():
            here = (entries // PLACES == number).nonzero()[:, 0]
            at = entries[here] % PLACES
            kind, *of = self.terms[number]
            factor = torch.ones(len(here), dtype=torch.float64)
            below: list[Tensor] = []
            if kind == "times":
                factor = constant(of[1])[at]
                here, at, factor = (part[factor != 0] for part in (here, at, factor))
                below = [operand_entries(of[0])[at]] if len(at) else []
            elif kind == "plus":
                below = [operand_entries(of[0])[at]]
                fixed[here] += constant(of[1])[at]
            elif kind == "neg":
                below, factor = [operand_entries(of[0])[at]], -factor
            elif kind == "add" and (number == opened or number not in self._apart):
                below = [operand_entries(operand)[at] for operand in of]
            elif kind == "constant":
                fixed[here] += constant(of[0])[at]
            elif kind == "total":
                inner = self._sum(operand_entries(of[0]))
                every = [torch.full_like(inner.place, place) for place in here.tolist()]
                parts += [(place, inner.atom, inner.factor) for place in every]
                fixed[here] += inner.constant.sum()
                continue
            else:
                parts.append((here, entries[here], factor))
            for operand in below:
                inner = self._sum(operand)
                parts.append((here[inner.place], inner.atom, inner.factor * factor[inner.place]))
                fixed[here] += inner.constant * factor
        if not parts:
            empty = torch.empty(0, dtype=torch.int64)
            return _Sum(empty, empty, fixed[:0], fixed)
        place, atom, factor = (torch.cat(one) for one in zip(*parts, strict=True))
        order = atom.argsort(stable=True)
        order = order[place[order].argsort(stable=True)]
        place, atom, factor = place[order], atom[order], factor[order]
        new = torch.ones_like(place, dtype=torch.bool)
        new[1:] = (place[1:] != place[:-1]) | (atom[1:] != atom[:-1])
        if not bool(new.all()):
            group = new.cumsum(0) - 1
            factor = torch.zeros(int(new.sum())).double().index_add_(0, group, factor)
            place, atom = place[new], atom[new]
        return _Sum(place, atom, factor, fixed)

    # ---- nodes

    def node(self, entries: Tensor) -> tuple[Node, int]:
        """Return the node to which a vector belongs, and the token whose vector it is."""
        node, row = self._node(entries)
        node.rows.add(row)
        return node, row

    @_remembered
    def _node(self, entries: Tensor) -> tuple[Node, int]:
        d = self.tokens.length
        first = int(entries[0])
        number = first // PLACES if first >= 0 else 0
        if number == 0 and first % d == 0 and torch.equal(entries, torch.arange(first, first + d)):
            return self.tokens, first // d
        kind = self.terms[number][0]
        if kind == "norm" and torch.equal(entries, self.terms.whole(number)):
            return self._normed(number)
        same = bool((entries // PLACES == number).all())
        return self._summed(self._sum(entries, number if same and kind == "add" else -1))

    def _normed(self, number: int) -> tuple[Node, int]:
        _, centred, eps, gain, bias, operand = self.terms[number]
        source, row = self.node(operand_entries(operand))
        key = ("norm", source, centred, eps, gain, bias)

        def build(columns: Mapping[Node, int], width: int, *rows: list[int]) -> Map:
            return Norm(constant(gain), constant(bias), eps, centred)

        part = Summand(key, "norm", number, {source}, build)
        return self._named(key, len(constant(gain)), [part], [], source.pooled), row

    def _named(
        self, key: tuple[Any, ...], length: int, parts: list[Summand], added: list[Node], pooled: bool
    ) -> Node:
        if key not in self._nodes:
            name = self.name(parts[0].owner) if parts else ""
            serial = len(self._nodes) + 1
            self._nodes[key] = Node(name, length, serial, parts, added, pooled=pooled)
        return self._nodes[key]

    def _summed(self, found: _Sum) -> tuple[Node, int]:
        """Return the node of a sum: maps of other nodes, and other nodes themselves."""
        length, rows = len(found.constant), set[tuple[bool, int]]()
        parts, added, rest = list[Summand](), list[Node](), list[_Sum]()
        last = max(found.numbers, default=0)

        def use(part: Summand | None, pooled: bool, row: int) -> None:
            rows.add((pooled, row))
            if part is not None:
                parts.append(part)

        affine_numbers = [number for number in found.numbers if self.terms[number][0] == "linear"]
        cores = [number for number in found.numbers if self.terms[number][0] in _CORES]
        others = found.of([number for number in found.numbers if number not in {*affine_numbers, *cores}])
        if self._several_rows(others):
            if affine_numbers or cores:
                raise NotReadError(last, "combines vectors of several tokens beside other maps")
            part = self._mean(found)
            return self._named(part.key, length, [part], [], True), _POOLED
        for number in affine_numbers:
            one = found.of([number])
            inner = self._sum(operand_entries(self.terms[number][1]))
            kinds = {self.terms[i][0] for i in inner.numbers}
            if not kinds & _CORES or "linear" in kinds:
                rest.append(one)
                continue
            out = _Out(one, self.terms, inner.constant)
            first = len(parts)
            for core in self._cores(inner, out):
                use(*core)
            parts[first] = replace(parts[first], offsets=(out.bias,))
            outside = inner.of([i for i in inner.numbers if self.terms[i][0] not in _CORES])
            if len(outside.place):
                affine, pooled, row = self._affine_of(outside.linear, out)
                use(linear(affine, number), pooled, row)
        if cores:
            for core in self._cores(found.of(cores), None):
                use(*core)
        for number in others.numbers:
            one = others.of([number])
            whole = self._reference(number, one)
            plain = torch.equal(one.atom, whole) and torch.equal(one.place, torch.arange(length))
            if plain and bool((one.factor == 1).all()):
                node, row = self.node(whole)
                added.append(node)
                use(None, node.pooled, row)
            else:
                rest.append(one)
        for one in rest:
            affine, pooled, row = self._affine_of(one.linear)
            use(linear(affine, one.numbers[0]), pooled, row)
        if len(rows) != 1:
            why = "combines vectors of several tokens, by neither attention nor a mean"
            raise NotReadError(last, why if rows else "computes something that does not depend on the tokens")
        ((pooled, row),) = rows
        fixed = found.constant if bool(found.constant.any()) else None
        if not parts and len(added) == 1 and fixed is None:
            return added[0], row
        if not parts:
            parts.append(linear(identity(added.pop(), length), last))
        key = ("sum", tuple(part.key for part in parts), tuple(added), key_of(found.constant))
        if fixed is not None:
            parts[0] = replace(parts[0], offsets=(*parts[0].offsets, lambda: fixed))
        return self._named(key, length, parts, added, pooled), row

    def _reference(self, number: int, found: _Sum) -> Tensor:
        """Return the whole vector of a term that is a node of its own; for tokens, that of the first atom."""
        if number == 0:
            d = self.tokens.length
            first = int(found.of([0]).atom[0]) // d * d
            return torch.arange(first, first + d)
        kind = self.terms[number][0]
        if kind not in _CORES | {"norm", "add"}:
            known = ", ".join(name for name in ACTIVATIONS if name != "identity")
            why = f"computes '{kind}' as part of no attention, norm or activation ({known})"
            raise NotReadError(number, why)
        return self.terms.whole(number)

    def _vectors(self, found: _Sum) -> list[tuple[_Sum, Tensor]]:
        """Return the summands of each vector that is a node of its own, with this vector."""
        vectors = []
        for number in found.numbers:
            one = found.of([number])
            while len(one.place):
                whole = self._reference(number, one)
                inside = torch.isin(one.atom, whole)
                pick = {name: getattr(one, name) for name in ("place", "atom", "factor")}
                vectors.append((one._replace(**{k: t[inside] for k, t in pick.items()}), whole))
                one = one._replace(**{k: t[~inside] for k, t in pick.items()})
        return vectors

    def _several_rows(self, found: _Sum) -> bool:
        """Return whether vectors of several tokens are summed."""
        return len({self.node(whole)[1] for _, whole in self._vectors(found)}) > 1

    # ---- affine maps

    def _affine_of(self, found: _Sum, out: _Out | None = None) -> tuple[Affine, bool, int]:
        """Return a sum as an affine map of nodes, whether these are pooled, and the token."""
        made = list[tuple[Node, tuple[Any, ...], Callable[[], Tensor], Callable[[], Tensor] | None]]()
        rows = set()
        affine_numbers = [number for number in found.numbers if self.terms[number][0] == "linear"]
        for number in affine_numbers:
            node, row = self.node(operand_entries(self.terms[number][1]))
            own = _Out(found.of([number]), self.terms, None)
            made.append((node, own.key, own.weight, own.bias))
            rows.add((node.pooled, row))
        for one, whole in self._vectors(found.of([i for i in found.numbers if i not in affine_numbers])):
            node, row = self.node(whole)
            columns = one.atom - whole[0]
            made.append((node, one.key(columns), partial(one.matrix, len(whole), columns), None))
            rows.add((node.pooled, row))
        if len(rows) != 1:
            raise NotReadError(max(found.numbers, default=0), "combines vectors of several tokens")
        key = (key_of(found.constant), *(part[:2] for part in made), None if out is None else out.key)
        if key not in self._affine:
            of = {node: [weight() for one, _, weight, _ in made if one is node] for node, *_ in made}
            matrices = {node: careful_sum(*weights) for node, weights in of.items()}
            offset = careful_sum(found.constant, *(bias() for *_, bias in made if bias is not None))
            if out is not None:
                last = out.weight()
                matrices = {node: careful_product(last, matrix) for node, matrix in matrices.items()}
                offset = careful_product(last, offset)
            self._affine[key] = Affine(key, matrices, offset)
        return self._affine[key], *rows.pop()

    def _mean(self, found: _Sum) -> Summand:
        """Return a weighted mean of vectors of one node, whose entries may be multiplied. It is an attention
        with constant scores.
        """
        nodes, factors = set[Node](), dict[int, Tensor]()
        number = max(found.numbers)
        for one, whole in self._vectors(found):
            node, row = self.node(whole)
            order = one.place.argsort()
            whole_vector = torch.equal(one.atom[order], whole) and len(whole) == len(found.constant)
            if not whole_vector or row in factors or node.pooled:
                raise NotReadError(number, "combines tokens otherwise than by a mean")
            nodes.add(node)
            factors[row] = one.factor[order]
        rows = sorted(factors)
        each = torch.stack([factors[row] for row in rows])
        at = each[0].abs().argmax()
        shares, entries = each[:, at] / each[0, at], each[0]
        close = torch.allclose(shares[:, None] * entries, each, rtol=8e-16, atol=0.0)
        if len(nodes) != 1 or not close or not bool((shares > 0).all()):
            raise NotReadError(number, "combines tokens otherwise than by a mean")
        (node,), whole = nodes, shares.sum() * entries
        # A factor of 1/m may be off by its rounding.
        whole = torch.where((whole - 1).abs() < 4e-16, 1.0, whole)
        d, offset = node.length, found.constant

        def build(columns: Mapping[Node, int], width: int, before: list[int], after: list[int]) -> Map:
            value, none = (torch.zeros(1, rows, width).double() for rows in (d, 1))
            value[0, :, columns[node] : columns[node] + d] = torch.eye(d).double()
            rest = (value.new_zeros(1, d), torch.diag(whole)[None], offset, torch.tensor([0]))
            mean = Attention(none, none[..., 0], none, none[..., 0], value, *rest)
            scores = {_POOLED: shares.log()[None]}
            rows_of_mean = _Rows({_POOLED: tuple(rows)}, scores)
            places = {token: place for place, token in enumerate(before)}
            return _with_rows(mean, rows_of_mean, places, [_POOLED], {_POOLED: 0})

        key = ("mean", node, tuple(rows), key_of(each), key_of(offset))
        return Summand(key, "mean", number, {node}, build, mixes=True)

    # ---- maps that are not affine

    def _cores(self, found: _Sum, out: _Out | None) -> list[tuple[Summand, bool, int]]:
        """Return the maps whose results are the atoms of a sum, each followed by the linear map ``out``, with
        whether the results are pooled, and the token.
        """
        kinds: dict[str, list[int]] = {}
        for number in found.numbers:
            kind = self.terms[number][0]
            if kind in _CORES:
                kinds.setdefault(kind, []).append(number)
        parts = []
        for kind, numbers in kinds.items():
            own = found.of(numbers)
            if kind == "weighted":
                parts.append(self._attention(own, out, numbers))
            elif kind == "multiply":
                parts.append(self._gated(own, _Down(own, out)))
            else:
                up, pooled, row = self._affine_of(self._sum(self._operand(own.atom)))
                parts.append((_feed_forward(kind, up, _Down(own, out), numbers[0]), pooled, row))
        return parts

    def _operand(self, entries: Tensor) -> Tensor:
        """Return the entries to which functions of one variable are applied."""
        found = torch.empty_like(entries)
        for number in (entries // PLACES).unique().tolist():
            here = entries // PLACES == number
            found[here] = operand_entries(self.terms[number][1])[entries[here] % PLACES]
        return found

    def _only_kind(self, entries: Tensor) -> str:
        """Return the operation from which all entries come, or nothing."""
        found = self.terms.kinds(entries)
        return str(found.pop()) if len(found) == 1 else ""

    def _gated(self, own: _Sum, down: _Down) -> tuple[Summand, bool, int]:
        gate, up = torch.empty_like(own.atom), torch.empty_like(own.atom)
        kinds = set()
        for number in own.numbers:
            here = own.atom // PLACES == number
            of = [operand_entries(key)[own.atom[here] % PLACES] for key in self.terms[number][1:]]
            first_kinds = [self._only_kind(entries) for entries in of]
            if first_kinds[0] not in ACTIVATIONS:
                of, first_kinds = of[::-1], first_kinds[::-1]
            kinds.add(first_kinds[0] if first_kinds[0] in ACTIVATIONS else "identity")
            gate[here], up[here] = of
        number, kind = own.numbers[0], kinds.pop()
        if kinds:
            raise NotReadError(number, "has gates with different activations")
        if kind != "identity":
            gate = self._operand(gate)
        first, pooled, row = self._affine_of(self._sum(gate))
        second, other, same = self._affine_of(self._sum(up))
        if (other, same) != (pooled, row):
            raise NotReadError(number, "multiplies vectors of different tokens")

        def build(columns: Mapping[Node, int], width: int, *rows: list[int]) -> Map:
            gate, up = (affine.weight(columns, width) for affine in (first, second))
            back = down.weight()
            rest = (ACTIVATIONS[kind], back, back.new_zeros(len(back)))
            return GatedFeedForward(gate, first.offset, up, second.offset, *rest)

        key = ("gated", kind, first.key, second.key, down.key)
        sources = first.matrices.keys() | second.matrices.keys()
        return Summand(key, "feed-forward", number, set(sources), build), pooled, row

    def _attention(self, own: _Sum, out: _Out | None, numbers: list[int]) -> tuple[Summand, bool, int]:
        order = sorted(numbers, key=lambda number: int(own.of([number]).place.min()))
        every = [self._head(number) for number in order]
        heads = [head for head, _ in every]
        row, seen, pooled = heads[0].row, heads[0].seen, heads[0].pooled
        size = len(heads[0].value.offset)
        for head in heads:
            if (head.row, head.seen, head.pooled) != (row, seen, pooled):
                raise NotReadError(order[0], "has heads of different rows or masks, which are not read")
            if len(head.value.offset) != size or len(head.query.offset) != len(heads[0].query.offset):
                raise NotReadError(order[0], "has heads of different sizes")
        head_of = torch.tensor([order.index(number) for number in (own.atom // PLACES).tolist()])
        down = _Down(own, out, own.atom % PLACES + head_of * size, len(heads) * size)
        key = ("attention", down.key, *((h.query.key, h.key.key, h.value.key) for h in heads))
        rows = self._rows.setdefault(key, _Rows())
        biases = torch.stack([head.biases for head in heads])
        same = rows.seen.setdefault(row, seen) == seen
        if not same or not torch.equal(rows.biases.setdefault(row, biases), biases):
            raise NotReadError(order[0], "applies one attention twice to the same tokens, with other masks")
        for token, turn in (item for _, turns in every for item in turns.items()):
            if not _same(rows.turns.setdefault(token, turn), turn):
                raise NotReadError(order[0], _TURNS)
        sources = {node for head in heads for affine in head[:3] for node in affine.matrices}
        pools = pooled and not any(node.pooled for node in sources)

        def build(at: Mapping[Node, int], width: int, before: list[int], after: list[int]) -> Map:
            parts = list[Tensor]()  # weight and bias of queries, keys and values
            for every in zip(*(head[:3] for head in heads), strict=True):
                parts.append(torch.stack([one.weight(at, width) for one in every]))
                parts.append(torch.stack([one.offset for one in every]))
            back = down.weight()
            output = back.unflatten(1, (len(heads), -1)).movedim(1, 0).contiguous()
            parts += [output, back.new_zeros(len(back)), torch.arange(0)]
            attention = Attention(*parts)
            places = {token: place for place, token in enumerate(before)}
            if pools:
                return _with_rows(attention, rows, places, [_POOLED], {_POOLED: 0})
            return _with_rows(attention, rows, places, after, places)

        return Summand(key, "attention", order[0], sources, build, mixes=True), pooled, row

    def _head(self, number: int) -> tuple[_Head, dict[int, Tensor | None]]:
        """Return one head of an attention for one row, and the rotations of tokens."""
        _, weights_key, values_key = self.terms[number]
        if not weights_key:
            raise NotReadError(number, "has a row that sees no key")
        weights = operand_entries(weights_key)
        softmax = int(weights[0]) // PLACES
        kind, *of = self.terms[softmax]
        if kind != "softmax" or not torch.equal(weights, self.terms.whole(softmax)):
            raise NotReadError(number, "averages values with other weights than those of a softmax")
        scores = self._sum(operand_entries(of[0]))
        alone = torch.equal(scores.place, torch.arange(len(weights))) and bool((scores.factor == 1).all())
        turns: dict[int, Tensor | None] = {}
        query: Affine | None = None
        row, turn_of_row, of_tokens, biases = _POOLED, None, True, scores.constant
        if alone and self._only_kind(scores.atom) == "dot" and len(scores.numbers) == 1:
            asked = operand_entries(self.terms[scores.numbers[0]][1])
            fixed = self._sum(asked).constant
            if len(self._sum(asked).atom):
                query, of_tokens, row, turn_of_row = self._turned(asked)
                turns[row] = turn_of_row
            keys = [self.terms.keys[place] for place in (scores.atom % PLACES).tolist()]
        elif "dot" not in {self.terms[number][0] for number in scores.numbers}:
            # Each score is an affine function of one token: a key with one entry, and the query 1.
            fixed, keys = torch.ones(1).double(), list(operand_entries(of[0])[:, None])
            biases = torch.zeros_like(biases)
        else:
            raise NotReadError(softmax, "has scores that are more than products of queries and keys")
        seen, found, pooled = [], None, False
        for entries, value in zip(keys, operand_entries(values_key).view(len(weights), -1), strict=True):
            # A constant query is not turned, nor are scores that are no products.
            turned = (*self._once(entries), None) if query is None else self._turned(entries)
            key, pooled, token, turn = turned
            own, *other = self._once(value)
            same = query is None or pooled == of_tokens
            if other != [pooled, token] or found not in (None, (key.key, own.key)) or not same:
                raise NotReadError(number, "has keys and values that are not maps of the same tokens")
            if token == row and query is not None:
                query = self._scaled(query, key, turn_of_row, turn, softmax)
            turns[token] = turn
            found = key.key, own.key
            seen.append(token)
        if len(set(seen)) != len(seen):
            raise NotReadError(softmax, "sees a token twice")
        if query is None:
            if pooled:
                raise NotReadError(softmax, "has constant queries of what was pooled before")
            shapes = {node: (len(fixed), matrix.shape[1]) for node, matrix in key.matrices.items()}
            zeros = {node: torch.zeros(shape).double() for node, shape in shapes.items()}
            query, of_tokens = Affine(("constant", key_of(fixed)), zeros, fixed), True
        return _Head(query, key, own, of_tokens, row, tuple(seen), biases), turns

    def _scaled(
        self, query: Affine, key: Affine, turn: Tensor | None, other: Tensor | None, number: int
    ) -> Affine:
        """Return a query map times the factor by which the rotation of a query is that of the key."""
        if _same(turn, other):
            return query
        eye = torch.eye(len(query.offset)).double()
        turn, other = (eye if one is None else one for one in (turn, other))
        at = other.abs().argmax()
        factor = float(turn.flatten()[at] / other.flatten()[at]) if turn.shape == other.shape else 0.0
        # Two factors of one number may differ by their rounding. The weights may be wrong by so much.
        first = self._scales.setdefault((query.key, key.key), factor)
        if not (turn - first * other).norm() <= 8e-16 * turn.norm():
            raise NotReadError(number, _TURNS)
        matrices = {node: first * matrix for node, matrix in query.matrices.items()}
        return Affine(("scaled", first, query.key), matrices, first * query.offset)

    @_remembered
    def _once(self, entries: Tensor) -> tuple[Affine, bool, int]:
        """Return a vector as an affine map of a token, whether it is pooled, and the token."""
        return self._affine_of(self._sum(entries))

    @_remembered
    def _turned(self, entries: Tensor) -> tuple[Affine, bool, int, Tensor | None]:
        """Return a query or key as an affine map of a token, followed by a rotation or None."""
        found = self._sum(entries)
        atoms = found.atom.unique()
        if self._only_kind(atoms) == "linear":
            atoms = atoms[self.terms.order(atoms % PLACES)]
        columns = (found.atom[:, None] == atoms).long().argmax(1)
        fixed = bool(found.constant.any())
        if len(found.place) == len(found.place.unique()):
            plain = torch.equal(found.place, torch.arange(len(entries))) and not fixed
            uniform = plain and bool((found.factor == found.factor[0]).all())
            if not uniform or found.factor[0] == 1:
                return (*self._once(entries), None)
            return (*self._once(found.atom), found.factor[0] * torch.eye(len(entries)).double())
        if len(atoms) != len(entries) or fixed:
            raise NotReadError(found.numbers[-1], "has queries or keys that are no rotations of linear maps")
        return (*self._once(atoms), found.matrix(len(atoms), columns))

    # ---- logits

    def readout(self, logits: Tensor) -> tuple[dict[Node, dict[int, Tensor]], Tensor]:
        """Return the matrices by which logits are a sum over the rows of some nodes, and an offset."""
        found = self._sum(logits)
        matrices: dict[Node, dict[int, Tensor]] = {}

        def add(one: _Sum, before: Tensor | None) -> None:
            for picked, whole in self._vectors(one):
                node, row = self.node(whole)
                matrix = picked.matrix(len(whole), picked.atom - whole[0])
                plus(node, row, matrix if before is None else careful_product(before, matrix))

        def plus(node: Node, row: int, matrix: Tensor) -> None:
            rows = matrices.setdefault(node, {})
            rows[row] = careful_sum(rows[row], matrix) if row in rows else matrix

        affine_numbers = [number for number in found.numbers if self.terms[number][0] == "linear"]
        add(found.of([number for number in found.numbers if number not in affine_numbers]), None)
        offset = found.constant.clone()
        for number in affine_numbers:
            operand = operand_entries(self.terms[number][1])
            inner = self._sum(operand)
            out = _Out(found.of([number]), self.terms, inner.constant)
            if {self.terms[i][0] for i in inner.numbers} & (_CORES | {"linear"}):
                out = _Out(found.of([number]), self.terms, None)
                plus(*self.node(operand), out.weight())
            else:
                add(inner, out.weight())
            offset = careful_sum(offset, out.bias())
        return matrices, offset


class _Out:
    """The linear map of a vector to a sum, of which the terms give the rows."""

    def __init__(self, found: _Sum, terms: Terms, constants: Tensor | None) -> None:
        self.found, self._terms, self._constants = found, terms, constants
        self._at = found.atom % PLACES
        self.key = (*found.key(self._at), b"" if constants is None else key_of(constants))

    def _times(self, part: int) -> Tensor:
        if len(self.found.place) == len(self.found.constant) and bool((self.found.factor == 1).all()):
            order = self.found.place.argsort()
            if torch.equal(self.found.place[order], torch.arange(len(order))):
                return self._terms.weights(self._at[order])[part]
        unit, columns = self._at.unique(return_inverse=True)
        return careful_product(self.found.matrix(len(unit), columns), self._terms.weights(unit)[part])

    def weight(self) -> Tensor:
        """Return the matrix (outputs, inputs)."""
        return self._times(0)

    def bias(self) -> Tensor:
        """Return the bias, with what the map makes of constants in its input."""
        found = self._times(1)
        if self._constants is not None and bool(self._constants.any()):
            found = careful_sum(found, careful_product(self.weight(), self._constants))
        return found


class _Down:
    """The matrix that follows a map which is not affine: factors, and a linear map or none."""

    def __init__(
        self, found: _Sum, out: _Out | None, columns: Tensor | None = None, size: int | None = None
    ) -> None:
        self._found, self._out = found, out
        self._columns = torch.arange(len(found.place)) if columns is None else columns
        self._size = len(found.place) if size is None else size
        self.key = (found.key(self._columns), None if out is None else out.key)

    def weight(self) -> Tensor:
        """Return the matrix (outputs, entries)."""
        own = self._found.matrix(self._size, self._columns)
        if self._out is None:
            return own
        # Columns are taken and multiplied, which rounds once; a product of matrices would round more.
        found = own.new_zeros(len(self._out.found.constant), self._size)
        return found.index_add_(
            1, self._columns, self._out.weight()[:, self._found.place] * self._found.factor
        )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _feed_forward(kind: str, up: Affine, down: _Down, number: int) -> Summand:
    def build(columns: Mapping[Node, int], width: int, *rows: list[int]) -> Map:
        back = down.weight()
        activation, rest = ACTIVATIONS[kind], back.new_zeros(len(back))
        return FeedForward(up.weight(columns, width), up.offset, activation, back, rest)

    return Summand((kind, up.key, down.key), "feed-forward", number, set(up.matrices), build)


def _with_rows(
    attention: Attention, rows: _Rows, at: Mapping[int, int], after: list[int], row_at: Mapping[int, int]
) -> Attention:
    """Return an attention with what its rows see. ``at`` are the places of the tokens in the state, ``after``
    the rows to compute, and ``row_at`` the places whose queries they have.
    """
    n = len(at)
    visible, biases = torch.eye(n, dtype=torch.bool), torch.zeros(len(attention.query), n, n).double()
    for row, seen in rows.seen.items():
        places = [at[token] for token in seen]
        visible[row_at[row]] = False
        visible[row_at[row], places] = True
        biases[:, row_at[row], places] = rows.biases[row]
    turns = None
    if any(turn is not None for turn in rows.turns.values()):
        eye = torch.eye(attention.query.shape[1], dtype=torch.float64)
        every = [rows.turns.get(token) for token in at]
        turns = torch.stack([eye if turn is None else turn for turn in every])
    return replace(
        attention,
        rows=torch.tensor([row_at[row] for row in after]),
        visible=None if bool(visible[[row_at[row] for row in rows.seen]].all()) else visible,
        turns=turns,
        score_bias=biases if bool(biases.any()) else None,
    )
