"""Read a network of known layers from the terms of a model's logits.

Nothing is known of the model but its operations. They are followed from the logits back to the tokens, and
grouped into maps (attention, feed-forward, norm, linear) whose sums are the nodes of a graph; the nodes, in an
order in which each comes after what it needs, are the stages of the network. An operation that belongs to no
map is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.symbolic_terms import PLACES, Terms, constant, entries_of, key_of
from howsmooth.bounds.radius.transformer_layers import (
    ACTIVATIONS,
    Attention,
    FeedForward,
    GatedFeedForward,
    Map,
    Norm,
)
from howsmooth.bounds.radius.transformer_network import Network, Stage

__all__ = ["NotReadError", "read_network"]

_CORES = {"weighted", "multiply"} | ACTIVATIONS.keys()
_POOLED = 0  # the only row after tokens were averaged


class NotReadError(Exception):
    """An operation that belongs to no map, with the number of its term."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


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

    def matrix(self, size: int, columns: Tensor) -> Tensor:
        """Return the matrix of the sum, with the given column for each summand."""
        found = torch.zeros(len(self.constant), size, dtype=torch.float64)
        found.index_put_((self.place, columns), self.factor, accumulate=True)
        return found

    def key(self, atoms: Tensor) -> tuple[Any, ...]:
        """Return what tells two sums apart, with other names for the atoms."""
        return key_of(self.place), key_of(atoms), self.factor.numpy().tobytes()


@dataclass(eq=False)
class _Node:
    """Vectors of all tokens that one part of the model computes: a sum of maps and of other nodes.

    ``rows`` are the tokens whose vectors are needed, ``length`` is their length.
    """

    name: str
    length: int
    serial: int = 0
    parts: list[_Part] = field(default_factory=list)
    added: list[_Node] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    pooled: bool = False


class _Affine(NamedTuple):
    """An affine map of nodes, with a matrix for each node."""

    key: tuple[Any, ...]
    matrices: dict[_Node, Tensor]
    offset: Tensor

    def weight(self, columns: Mapping[_Node, int], width: int) -> Tensor:
        """Return the matrix that acts on a state which has each node at the given column."""
        if len(self.matrices) == 1:
            ((_, only),) = self.matrices.items()
            if only.shape[1] == width:
                return only
        found = self.offset.new_zeros(len(self.offset), width)
        for node, matrix in self.matrices.items():
            found[:, columns[node] : columns[node] + matrix.shape[1]] += matrix
        return found


Build = Callable[[Mapping[_Node, int], int, list[int], list[int]], Map]


@dataclass(eq=False)
class _Part:
    """A map of nodes, whose output is a summand of a node.

    ``build`` makes it, given the columns of the nodes in its input, their number, and the tokens of which the
    input and the output consist. ``mixes`` says that it is an attention.
    """

    key: tuple[Any, ...]
    kind: str
    owner: int
    sources: set[_Node]
    build: Build
    mixes: bool = False
    offsets: tuple[Callable[[], Tensor], ...] = ()  # what is added to its output


class _Head(NamedTuple):
    """One head of an attention: its maps, the queries and keys of which are turned. The result is pooled if
    the query is a constant.
    """

    query: _Affine
    key: _Affine
    value: _Affine
    pooled: bool


@dataclass(eq=False)
class _Rows:
    """What the rows of an attention see: for each row the keys, the biases of the scores (heads, keys), and
    for each token the rotation of its query and key.
    """

    seen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    biases: dict[int, Tensor] = field(default_factory=dict)
    turns: dict[int, Tensor] = field(default_factory=dict)


def read_network(
    terms: Terms, logits: Tensor, d: int, name: Callable[[int], str]
) -> tuple[Network, list[int]]:
    """Return the network that computes logits (classes,) from tokens (n, d), and the tokens that it reads;
    the logits do not depend on the others.

    ``name`` tells the name of the module that made a term.

    Raises
    ------
    NotReadError
        If an operation belongs to no map.

    """
    reader = _Reader(terms, d, name)
    readout = reader.readout(logits)
    if not reader.tokens.rows:
        raise NotReadError(0, "has logits that do not depend on the tokens")
    return _staged(reader.tokens, *readout)


class _Reader:
    """Finds the nodes that compute the vectors of a model. Each vector is read once."""

    def __init__(self, terms: Terms, d: int, name: Callable[[int], str]) -> None:
        self.terms, self.name = terms, name
        self.tokens = _Node("tokens", d)
        self._nodes: dict[tuple[Any, ...], _Node] = {}
        self._found: dict[bytes, tuple[_Node, int]] = {}
        self._affine: dict[tuple[Any, ...], _Affine] = {}
        self._heads: dict[bytes, tuple[_Affine, bool, int]] = {}
        self._turns: dict[bytes, tuple[_Affine, bool, int, Tensor | None]] = {}
        self._scales: dict[Any, float] = {}
        self._rows: dict[tuple[Any, ...], _Rows] = {}
        # Sums that a norm or a linear map is given are nodes; others are part of the sums that they are in.
        self._apart: set[int] = set()
        for number in range(len(terms)):
            kind, *of = terms[number]
            if kind in ("norm", "linear", "total"):
                self._keep_apart(entries_of(of[-1]))

    def _keep_apart(self, entries: Tensor) -> None:
        for number in (entries[entries >= 0] // PLACES).unique().tolist():
            kind, *of = self.terms[number]
            if kind == "add":
                self._apart.add(number)
            elif kind in ("times", "plus", "neg", "total"):
                self._keep_apart(entries_of(of[0]))

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
                below = [entries_of(of[0])[at]] if len(at) else []
            elif kind == "plus":
                below = [entries_of(of[0])[at]]
                fixed[here] += constant(of[1])[at]
            elif kind == "neg":
                below, factor = [entries_of(of[0])[at]], -factor
            elif kind == "add" and (number == opened or number not in self._apart):
                below = [entries_of(operand)[at] for operand in of]
            elif kind == "constant":
                fixed[here] += constant(of[0])[at]
            elif kind == "total":
                inner = self._sum(entries_of(of[0]))
                for place in here.tolist():
                    parts.append((torch.full_like(inner.place, place), inner.atom, inner.factor))
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

    def node(self, entries: Tensor) -> tuple[_Node, int]:
        """Return the node to which a vector belongs, and the token whose vector it is."""
        key = key_of(entries)
        if key not in self._found:
            self._found[key] = self._node(entries)
        node, row = self._found[key]
        node.rows.add(row)
        return node, row

    def _node(self, entries: Tensor) -> tuple[_Node, int]:
        d = self.tokens.length
        first = int(entries[0])
        number = first // PLACES if first >= 0 else 0
        if number == 0 and first % d == 0 and torch.equal(entries, torch.arange(first, first + d)):
            return self.tokens, first // d
        kind, *of = self.terms[number]
        if kind == "norm" and torch.equal(entries, self.terms.whole(number)):
            return self._normed(number)
        same = bool((entries // PLACES == number).all())
        return self._summed(self._sum(entries, number if same and kind == "add" else -1))

    def _normed(self, number: int) -> tuple[_Node, int]:
        _, centred, eps, gain, bias, operand = self.terms[number]
        source, row = self.node(entries_of(operand))
        key = ("norm", source, centred, eps, gain, bias)

        def build(columns: Mapping[_Node, int], width: int, *rows: list[int]) -> Map:
            return Norm(constant(gain), constant(bias), eps, centred)

        part = _Part(key, "norm", number, {source}, build)
        return self._named(key, len(constant(gain)), [part], [], source.pooled), row

    def _named(
        self, key: tuple[Any, ...], length: int, parts: list[_Part], added: list[_Node], pooled: bool
    ) -> _Node:
        if key not in self._nodes:
            name = self.name(parts[0].owner) if parts else ""
            serial = len(self._nodes) + 1
            self._nodes[key] = _Node(name, length, serial, parts, added, pooled=pooled)
        return self._nodes[key]

    def _summed(self, found: _Sum) -> tuple[_Node, int]:
        """Return the node of a sum: maps of other nodes, and other nodes themselves."""
        length, rows = len(found.constant), set[tuple[bool, int]]()
        parts, added, rest = list[_Part](), list[_Node](), list[_Sum]()
        last = max(found.numbers, default=0)

        def use(part: _Part | None, pooled: bool, row: int) -> None:
            rows.add((pooled, row))
            if part is not None:
                parts.append(part)

        linear = [number for number in found.numbers if self.terms[number][0] == "linear"]
        cores = [number for number in found.numbers if self.terms[number][0] in _CORES]
        others = found.of([number for number in found.numbers if number not in {*linear, *cores}])
        if self._several_rows(others):
            if linear or cores:
                raise NotReadError(last, "combines vectors of several tokens beside other maps")
            part = self._mean(found)
            return self._named(part.key, length, [part], [], True), _POOLED
        for number in linear:
            one = found.of([number])
            inner = self._sum(entries_of(self.terms[number][1]))
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
                affine, pooled, row = self._affine_of(
                    outside._replace(constant=torch.zeros_like(inner.constant)), out
                )
                use(_linear(affine, number), pooled, row)
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
            affine, pooled, row = self._affine_of(
                one._replace(constant=torch.zeros_like(found.constant)), None
            )
            use(_linear(affine, one.numbers[0]), pooled, row)
        if len(rows) != 1:
            why = "combines vectors of several tokens, by neither attention nor a mean"
            raise NotReadError(last, why if rows else "computes something that does not depend on the tokens")
        ((pooled, row),) = rows
        fixed = found.constant if bool(found.constant.any()) else None
        if not parts and len(added) == 1 and fixed is None:
            return added[0], row
        if not parts:
            parts.append(_linear(_identity(added.pop(), length), last))
        key = ("sum", tuple(part.key for part in parts), tuple(added), found.constant.numpy().tobytes())
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

    def _blocks(self, found: _Sum) -> tuple[tuple[Any, ...], list[_Block], int]:
        """Return a sum as matrices that act on nodes, with a key and the token."""
        keys: list[Any] = [found.constant.numpy().tobytes()]
        blocks, rows = list[_Block](), set()
        linear = [number for number in found.numbers if self.terms[number][0] == "linear"]
        for number in linear:
            node, row = self.node(entries_of(self.terms[number][1]))
            out = _Out(found.of([number]), self.terms, None)
            blocks.append(_Block(node, out.weight, out.bias))
            keys.append((node, out.key))
            rows.add((node.pooled, row))
        for one, whole in self._vectors(found.of([i for i in found.numbers if i not in linear])):
            node, row = self.node(whole)
            columns = one.atom - whole[0]
            blocks.append(_Block(node, partial(one.matrix, len(whole), columns), None))
            keys.append((node, one.key(columns)))
            rows.add((node.pooled, row))
        if len(rows) != 1:
            raise NotReadError(max(found.numbers, default=0), "combines vectors of several tokens")
        ((_, row),) = rows
        return tuple(keys), blocks, row

    def _affine_of(self, found: _Sum, out: _Out | None) -> tuple[_Affine, bool, int]:
        """Return a sum as an affine map of nodes, whether these are pooled, and the token."""
        keys, blocks, row = self._blocks(found)
        key = (keys, None if out is None else out.key)
        if key not in self._affine:
            matrices, offset = dict[_Node, Tensor](), found.constant.clone()
            for block in blocks:
                matrix = block.weight()
                matrices[block.node] = matrices[block.node] + matrix if block.node in matrices else matrix
                if block.bias is not None:
                    offset += block.bias()
            if out is not None:
                weight = out.weight()
                matrices = {node: weight @ matrix for node, matrix in matrices.items()}
                offset = weight @ offset
            self._affine[key] = _Affine(key, matrices, offset)
        return self._affine[key], blocks[0].node.pooled, row

    def _mean(self, found: _Sum) -> _Part:
        """Return a weighted mean of vectors of one node, whose entries may be multiplied, as an attention whose
        scores are constants.
        """
        nodes, factors = set[_Node](), dict[int, Tensor]()
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
        (node,), total = nodes, shares.sum() * entries
        # A factor of 1/m may be off by its rounding.
        total = torch.where((total - 1).abs() < 4e-16, 1.0, total)
        d, offset = node.length, found.constant

        def build(columns: Mapping[_Node, int], width: int, before: list[int], after: list[int]) -> Map:
            n, value, none = len(before), torch.zeros(1, d, width).double(), torch.zeros(1, 1, width).double()
            value[0, :, columns[node] : columns[node] + d] = torch.eye(d).double()
            rest = (value.new_zeros(1, d), torch.diag(total)[None], offset, torch.tensor([0]))
            mean = Attention(none, none[..., 0], none, none[..., 0], value, *rest)
            scores = {_POOLED: shares.log()[None]}
            rows_of_mean = _Rows({_POOLED: tuple(rows)}, scores)
            places = {token: place for place, token in enumerate(before)}
            return _with_rows(mean, rows_of_mean, places, [_POOLED], {_POOLED: 0})

        key = ("mean", node, tuple(rows), key_of(each), key_of(offset))
        return _Part(key, "mean", number, {node}, build, mixes=True)

    # ---- maps that are not affine

    def _cores(self, found: _Sum, out: _Out | None) -> list[tuple[_Part, bool, int]]:
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
            down = _Down(own, out)
            if kind == "weighted":
                parts.append(self._attention(own, down, numbers))
            elif kind == "multiply":
                parts.append(self._gated(own, down))
            else:
                up, pooled, row = self._affine_of(self._sum(self._operand(own.atom)), None)
                parts.append((_feed_forward(kind, up, down, numbers[0]), pooled, row))
        return parts

    def _operand(self, entries: Tensor) -> Tensor:
        """Return the entries to which functions of one variable are applied."""
        found = torch.empty_like(entries)
        for number in (entries // PLACES).unique().tolist():
            here = entries // PLACES == number
            found[here] = entries_of(self.terms[number][1])[entries[here] % PLACES]
        return found

    def _only_kind(self, entries: Tensor) -> str:
        """Return the operation from which all entries come, or nothing."""
        found = {self.terms[number][0] for number in (entries // PLACES).unique().tolist() if number >= 0}
        return found.pop() if len(found) == 1 else ""

    def _gated(self, own: _Sum, down: _Down) -> tuple[_Part, bool, int]:
        gate, up = torch.empty_like(own.atom), torch.empty_like(own.atom)
        kinds = set()
        for number in own.numbers:
            here = own.atom // PLACES == number
            of = [entries_of(key)[own.atom[here] % PLACES] for key in self.terms[number][1:]]
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
        first, pooled, row = self._affine_of(self._sum(gate), None)
        second, other, same = self._affine_of(self._sum(up), None)
        if (other, same) != (pooled, row):
            raise NotReadError(number, "multiplies vectors of different tokens")

        def build(columns: Mapping[_Node, int], width: int, *rows: list[int]) -> Map:
            both = (first.weight(columns, width), first.offset, second.weight(columns, width), second.offset)
            gate, gate_bias, up, up_bias = both
            return GatedFeedForward(
                gate, gate_bias, up, up_bias, ACTIVATIONS[kind], down.weight(), down.offset()
            )

        key = ("gated", kind, first.key, second.key, down.key)
        sources = first.matrices.keys() | second.matrices.keys()
        return _Part(key, "feed-forward", number, set(sources), build), pooled, row

    def _attention(self, own: _Sum, down: _Down, numbers: list[int]) -> tuple[_Part, bool, int]:
        heads, at_row, seen, turns, biases = list[_Head](), None, None, {}, []
        order = sorted(numbers, key=lambda number: int(own.of([number]).place.min()))
        for number in order:
            head, row, keys, of_row, turned = self._head(number)
            if (at_row, seen) not in ((None, None), (row, keys)):
                raise NotReadError(number, "has heads of different rows or masks, which are not read")
            at_row, seen = row, keys
            heads.append(head)
            biases.append(of_row)
            for token, turn in turned.items():
                if token in turns and not _same(turns[token], turn):
                    raise NotReadError(number, "turns queries and keys by different rotations")
                turns[token] = turn
        assert at_row is not None and seen is not None
        columns = torch.empty_like(own.atom)
        sizes = [len(head.value.offset) for head in heads]
        shapes = {(len(head.query.offset), size) for head, size in zip(heads, sizes, strict=True)}
        if len(shapes) != 1:
            raise NotReadError(order[0], "has heads of different sizes")
        for place, number in enumerate(order):
            here = own.atom // PLACES == number
            columns[here] = own.atom[here] % PLACES + place * sizes[0]
        down = down.on(columns, len(heads) * sizes[0])
        key = ("attention", down.key, *((h.query.key, h.key.key, h.value.key) for h in heads))
        rows = self._rows.setdefault(key, _Rows())
        rows.seen[at_row] = seen
        rows.biases[at_row] = torch.stack(biases)
        for token, turn in turns.items():
            if token in rows.turns and not _same(rows.turns[token], turn):
                raise NotReadError(order[0], "turns queries and keys by different rotations")
            rows.turns[token] = turn
        sources = {node for head in heads for affine in head[:3] for node in affine.matrices}

        def build(at: Mapping[_Node, int], width: int, before: list[int], after: list[int]) -> Map:
            maps = []
            for part in ("query", "key", "value"):
                every = [getattr(head, part) for head in heads]
                maps.append(torch.stack([affine.weight(at, width) for affine in every]))
                maps.append(torch.stack([affine.offset for affine in every]))
            output = down.weight().unflatten(1, (len(heads), -1)).movedim(1, 0).contiguous()
            attention = Attention(*maps, output, down.offset(), torch.arange(0))
            places = {token: place for place, token in enumerate(before)}
            if heads[0].pooled and not any(node.pooled for node in sources):
                return _with_rows(attention, rows, places, [_POOLED], {_POOLED: 0})
            return _with_rows(attention, rows, places, after, places)

        part = _Part(key, "attention", order[0], sources, build, mixes=True)
        return part, heads[0].pooled, at_row

    def _head(self, number: int) -> tuple[_Head, int, tuple[int, ...], Tensor, dict[int, Tensor | None]]:
        """Return one head of an attention, its row, the tokens that this row sees, the biases of its scores
        and the rotations.
        """
        _, weights_key, values_key = self.terms[number]
        weights = entries_of(weights_key)
        softmax = int(weights[0]) // PLACES
        kind, *of = self.terms[softmax]
        if kind != "softmax" or not torch.equal(weights, self.terms.whole(softmax)):
            raise NotReadError(number, "averages values with other weights than those of a softmax")
        scores = self._sum(entries_of(of[0]))
        alone = torch.equal(scores.place, torch.arange(len(weights))) and bool((scores.factor == 1).all())
        turns: dict[int, Tensor | None] = {}
        query: _Affine | None = None
        row, turn_of_row, of_tokens, biases = _POOLED, None, True, scores.constant
        if alone and self._only_kind(scores.atom) == "dot" and len(scores.numbers) == 1:
            asked = entries_of(self.terms[scores.numbers[0]][1])
            fixed = self._sum(asked).constant
            if len(self._sum(asked).atom):
                query, of_tokens, row, turn_of_row = self._turned(asked)
                turns[row] = turn_of_row
            keys = [self.terms.keys[place] for place in (scores.atom % PLACES).tolist()]
        elif "dot" not in {self.terms[number][0] for number in scores.numbers}:
            # Each score is an affine function of one token: a key with one entry, and the query 1.
            fixed, keys = torch.ones(1).double(), list(entries_of(of[0])[:, None])
            biases = torch.zeros_like(biases)
        else:
            raise NotReadError(softmax, "has scores that are more than products of queries and keys")
        seen, found, pooled = [], None, False
        for entries, value in zip(keys, entries_of(values_key).view(len(weights), -1), strict=True):
            key, pooled, token, turn = self._turned(entries)
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
            zeros = {
                node: torch.zeros(len(fixed), matrix.shape[1]).double()
                for node, matrix in key.matrices.items()
            }
            query, of_tokens = _Affine(("constant", key_of(fixed)), zeros, fixed), True
        return _Head(query, key, own, of_tokens), row, tuple(seen), biases, turns

    def _scaled(
        self, query: _Affine, key: _Affine, turn: Tensor | None, other: Tensor | None, number: int
    ) -> _Affine:
        """Return a query map times the factor by which the rotation of a query is that of the key."""
        if _same(turn, other):
            return query
        eye = torch.eye(len(query.offset)).double()
        turn, other = (eye if one is None else one for one in (turn, other))
        at = other.abs().argmax()
        factor = float(turn.flatten()[at] / other.flatten()[at]) if turn.shape == other.shape else 0.0
        # Two factors of one number may differ by their rounding.
        first = self._scales.setdefault((query.key, key.key), factor)
        # The weights may be wrong by so much.
        close = (turn - first * other).abs().max() <= 8e-16 * turn.abs().max()
        if abs(factor - first) > 8e-16 * abs(first) or not close:
            raise NotReadError(number, "turns queries and keys by different rotations")
        matrices = {node: first * matrix for node, matrix in query.matrices.items()}
        return _Affine(("scaled", first, query.key), matrices, first * query.offset)

    def _once(self, entries: Tensor) -> tuple[_Affine, bool, int]:
        """Return a vector as an affine map of a token, whether it is pooled, and the token."""
        name = key_of(entries)
        if name not in self._heads:
            self._heads[name] = self._affine_of(self._sum(entries), None)
        return self._heads[name]

    def _turned(self, entries: Tensor) -> tuple[_Affine, bool, int, Tensor | None]:
        """Return a query or key as an affine map of a token, followed by a rotation or None."""
        name = key_of(entries)
        if name not in self._turns:
            self._turns[name] = self._rotated(entries)
        return self._turns[name]

    def _rotated(self, entries: Tensor) -> tuple[_Affine, bool, int, Tensor | None]:
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

    def readout(self, logits: Tensor) -> tuple[dict[_Node, dict[int, Tensor]], Tensor]:
        """Return the matrices by which logits are a sum over the rows of some nodes, and an offset."""
        found = self._sum(logits)
        matrices: dict[_Node, dict[int, Tensor]] = {}

        def add(one: _Sum, before: Tensor | None) -> None:
            for picked, whole in self._vectors(one):
                node, row = self.node(whole)
                matrix = picked.matrix(len(whole), picked.atom - whole[0])
                plus(node, row, matrix if before is None else before @ matrix)

        def plus(node: _Node, row: int, matrix: Tensor) -> None:
            rows = matrices.setdefault(node, {})
            rows[row] = rows[row] + matrix if row in rows else matrix

        linear = [number for number in found.numbers if self.terms[number][0] == "linear"]
        add(found.of([number for number in found.numbers if number not in linear]), None)
        offset = found.constant.clone()
        for number in linear:
            operand = entries_of(self.terms[number][1])
            inner = self._sum(operand)
            out = _Out(found.of([number]), self.terms, inner.constant)
            if {self.terms[i][0] for i in inner.numbers} & (_CORES | {"linear"}):
                out = _Out(found.of([number]), self.terms, None)
                plus(*self.node(operand), out.weight())
            else:
                add(inner, out.weight())
            offset += out.bias()
        return matrices, offset


class _Block(NamedTuple):
    """A matrix that acts on a node, and a bias that comes with it."""

    node: _Node
    weight: Callable[[], Tensor]
    bias: Callable[[], Tensor] | None


class _Out:
    """The linear map of a vector to a sum, of which the terms give the rows."""

    def __init__(self, found: _Sum, terms: Terms, constants: Tensor | None) -> None:
        self.found, self._terms, self._constants = found, terms, constants
        self._at = found.atom % PLACES
        self.key = (*found.key(self._at), b"" if constants is None else constants.numpy().tobytes())

    def _times(self, part: int) -> Tensor:
        if len(self.found.place) == len(self.found.constant) and bool((self.found.factor == 1).all()):
            order = self.found.place.argsort()
            if torch.equal(self.found.place[order], torch.arange(len(order))):
                return self._terms.weights(self._at[order])[part]
        unit, columns = self._at.unique(return_inverse=True)
        return self.found.matrix(len(unit), columns) @ self._terms.weights(unit)[part]

    def weight(self) -> Tensor:
        """Return the matrix (outputs, inputs)."""
        return self._times(0)

    def bias(self) -> Tensor:
        """Return the bias, with what the map makes of constants in its input."""
        found = self._times(1)
        if self._constants is not None and bool(self._constants.any()):
            found = found + self.weight() @ self._constants
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

    def on(self, columns: Tensor, size: int) -> _Down:
        """Return the same matrix with other columns for the atoms."""
        return _Down(self._found, self._out, columns, size)

    def weight(self) -> Tensor:
        """Return the matrix (outputs, entries)."""
        own = self._found.matrix(self._size, self._columns)
        if self._out is None:
            return own
        # Each column of ``own`` has one entry: columns are taken and multiplied, which rounds once.
        found = own.new_zeros(len(self._out.found.constant), self._size)
        found[:, self._columns] = self._out.weight()[:, self._found.place] * self._found.factor
        return found

    def offset(self) -> Tensor:
        """Return zeros (outputs,)."""
        return torch.zeros_like((self._found if self._out is None else self._out.found).constant)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _feed_forward(kind: str, up: _Affine, down: _Down, number: int) -> _Part:
    def build(columns: Mapping[_Node, int], width: int, *rows: list[int]) -> Map:
        return FeedForward(
            up.weight(columns, width), up.offset, ACTIVATIONS[kind], down.weight(), down.offset()
        )

    return _Part((kind, up.key, down.key), "feed-forward", number, set(up.matrices), build)


def _linear(affine: _Affine, number: int) -> _Part:
    def build(columns: Mapping[_Node, int], width: int, *rows: list[int]) -> Map:
        weight, size = affine.weight(columns, width), len(affine.offset)
        eye = torch.eye(size, dtype=torch.float64)
        return FeedForward(weight, affine.offset, ACTIVATIONS["identity"], eye, eye.new_zeros(size))

    return _Part(("linear", affine.key), "linear", number, set(affine.matrices), build)


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


# ---- from the graph to the stages


class _Step(NamedTuple):
    """A map to be made a stage, the node that is added to its output, and the node that is then complete."""

    part: _Part
    added: _Node | None
    result: _Node


def _serial(node: _Node) -> int:
    return node.serial


def _identity(node: _Node, length: int) -> _Affine:
    eye = torch.eye(length, dtype=torch.float64)
    return _Affine(("identity", node), {node: eye}, eye.new_zeros(length))


def _ordered(ends: Iterable[_Node]) -> list[_Node]:
    """Return all nodes but the tokens, each after those that it needs."""
    found: dict[_Node, None] = {}
    waiting: list[tuple[_Node, bool]] = [(end, False) for end in ends]
    while waiting:
        node, ready = waiting.pop()
        if node in found:
            continue
        needed = [
            *node.added,
            *(source for part in node.parts for source in sorted(part.sources, key=_serial)),
        ]
        if ready or all(one in found for one in needed):
            found[node] = None
        else:
            waiting.append((node, True))
            waiting += [(one, False) for one in reversed(needed) if one not in found]
    return [node for node in found if node.parts]


def _steps(order: list[_Node]) -> list[_Step]:
    steps = []
    for node in order:
        first, *others = node.added or [None]
        parts = list(node.parts)
        for one in others:
            parts.append(_linear(_identity(one, node.length), parts[0].owner))
        for part in parts[:-1]:
            so_far = _Node(node.name, node.length, rows=node.rows, pooled=node.pooled)
            steps.append(_Step(part, first, so_far))
            first = so_far
        steps.append(_Step(parts[-1], first, node))
    return steps


def _staged(
    tokens: _Node, matrices: Mapping[_Node, Mapping[int, Tensor]], offset: Tensor
) -> tuple[Network, list[int]]:
    """Arrange the nodes as stages, each of which computes one map on a state that holds what is needed."""
    steps = _steps(_ordered(matrices))
    rows = sorted(tokens.rows)
    reads, state, width = rows, {tokens: 0}, tokens.length
    stages, names = list[Stage](), set[str]()
    needed = [set(matrices)]
    for step in reversed(steps):
        before = needed[-1] - {step.result} | step.part.sources
        needed.append(before | ({step.added} if step.added is not None else set()))
    for step, later in zip(steps, reversed(needed[:-1]), strict=True):
        part, after = step.part, rows
        if part.mixes:
            others = {node for node in later if node.pooled == step.result.pooled}
            pools = step.result.pooled and not all(node.pooled for node in part.sources)
            if pools and later != {step.result}:
                raise NotReadError(part.owner, "goes on with single tokens beside what they are pooled to")
            after = sorted(set().union(*(node.rows for node in others)))
        sources = sorted(state[node] for node in part.sources)
        end = max(state[node] + node.length for node in part.sources)
        branch = slice(sources[0], end)
        columns = {node: state[node] - branch.start for node in part.sources}
        layer = part.build(columns, end - branch.start, rows, after)
        for offset_of in part.offsets:
            layer = _shifted(layer, offset_of())
        added = step.added
        residual = None if added is None else slice(state[added], state[added] + added.length)
        keep = later != {step.result}
        name = f"{step.result.name}.{part.kind}".lstrip(".")
        while name in names:
            name += "'"
        names.add(name)
        whole = slice(None) if (branch.start, branch.stop) == (0, width) else branch
        if residual is not None and (residual.start, residual.stop) == (0, width):
            residual = slice(None)
        stages.append(Stage(name, layer, whole, residual, keep))
        state = {**state, step.result: width} if keep else {step.result: 0}
        width = width + step.result.length if keep else step.result.length
        rows = after
    readout = torch.zeros(len(offset), len(rows), width, dtype=torch.float64)
    for node, blocks in matrices.items():
        for row, matrix in blocks.items():
            readout[:, rows.index(row), state[node] : state[node] + node.length] += matrix
    return Network(tuple(stages), readout, offset), reads


def _shifted(layer: Map, offset: Tensor) -> Map:
    """Return a layer with something added to its output."""
    match layer:
        case FeedForward() | GatedFeedForward():
            return replace(layer, down_bias=layer.down_bias + offset)
        case Attention():
            return replace(layer, output_bias=layer.output_bias + offset)
        case Norm():
            return replace(layer, bias=layer.bias + offset)
