"""The graph of a network, and its arrangement as stages.

A node is a vector of each token: a sum of maps of other nodes, and of other nodes themselves. Each map
becomes a stage, in an order in which each node comes after those that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.transformer_layers import ACTIVATIONS, Attention, FeedForward, Map, Norm
from howsmooth.bounds.radius.transformer_network import Network, Stage

__all__ = [
    "Affine", "Node", "NotReadError", "Summand", "careful_product", "careful_sum", "identity", "linear",
    "staged",
]  # fmt: skip

_CANCELS = "adds maps that nearly cancel, which would leave roundings alone"


class NotReadError(Exception):
    """An operation that belongs to no map, with the number of its term."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


def careful_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a matrix by a matrix or vector. The result is wrong by at most 2⁻⁵¹ of its Frobenius norm.
    Raise NotReadError if sums cancel, so that it could be wrong by more.
    """
    if b.ndim == 1:
        return torch.tensor([math.fsum(_parts(row, b)) for row in a], dtype=torch.float64)
    found = a @ b
    summands = int(((a != 0).double() @ (b != 0).double()).max())
    if summands > 1 and summands * float((a.abs() @ b.abs()).norm()) > 4 * float(found.norm()):
        raise NotReadError(0, _CANCELS)
    return found


def _parts(a: Tensor, b: Tensor) -> list[float]:
    """Return numbers whose sum is the inner product of two vectors, exactly (Dekker)."""
    high = [(2.0**27 + 1) * t - ((2.0**27 + 1) * t - t) for t in (a, b)]
    low = [t - h for t, h in zip((a, b), high, strict=True)]
    whole = a * b
    rest = high[0] * high[1] - whole + high[0] * low[1] + low[0] * high[1] + low[0] * low[1]
    return [*whole.tolist(), *rest.tolist()]


def careful_sum(*parts: Tensor) -> Tensor:
    """Add tensors, each of which is wrong by at most 2⁻⁵¹ of its size; so is the result, up to a factor of 2.
    The size is the norm, for a vector of m constants with √m. Raise NotReadError if the sums cancel, so that
    it could be wrong by more.
    """
    parts = tuple(part for part in parts if bool(part.any())) or parts[:1]
    found = torch.stack(parts).sum(0)
    size = float(found.norm()) + (math.sqrt(len(found)) if found.ndim == 1 else 0.0)
    if len(parts) > 1 and sum(float(part.norm()) for part in parts) > 2 * size:
        raise NotReadError(0, _CANCELS)
    return found


@dataclass(eq=False)
class Node:
    """Vectors of all tokens that one part of the model computes: a sum of maps and of other nodes.

    ``rows`` are the tokens whose vectors are needed, ``length`` is their length.
    """

    name: str
    length: int
    serial: int = 0
    parts: list[Summand] = field(default_factory=list)
    added: list[Node] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    pooled: bool = False


class Affine(NamedTuple):
    """An affine map of nodes, with a matrix for each node."""

    key: tuple[Any, ...]
    matrices: dict[Node, Tensor]
    offset: Tensor

    def weight(self, columns: Mapping[Node, int], width: int) -> Tensor:
        """Return the matrix that acts on a state which has each node at the given column."""
        if len(self.matrices) == 1:
            ((_, only),) = self.matrices.items()
            if only.shape[1] == width:
                return only
        found = self.offset.new_zeros(len(self.offset), width)
        for node, matrix in self.matrices.items():
            found[:, columns[node] : columns[node] + matrix.shape[1]] += matrix
        return found


Build = Callable[[Mapping[Node, int], int, list[int], list[int]], Map]


@dataclass(eq=False)
class Summand:
    """A map of nodes, whose output is a summand of a node.

    ``build`` makes it, given the columns of the nodes in its input, their number, and the tokens of which the
    input and the output consist. ``mixes`` says that it is an attention.
    """

    key: tuple[Any, ...]
    kind: str
    owner: int
    sources: set[Node]
    build: Build
    mixes: bool = False
    offsets: tuple[Callable[[], Tensor], ...] = ()  # what is added to its output


def identity(node: Node, length: int) -> Affine:
    """Return the map that leaves a node as it is."""
    eye = torch.eye(length, dtype=torch.float64)
    return Affine(("identity", node), {node: eye}, eye.new_zeros(length))


def linear(affine: Affine, number: int) -> Summand:
    """Return an affine map as a feed-forward layer without activation, made by the term ``number``."""

    def build(columns: Mapping[Node, int], width: int, *rows: list[int]) -> Map:
        weight, size = affine.weight(columns, width), len(affine.offset)
        eye = torch.eye(size, dtype=torch.float64)
        return FeedForward(weight, affine.offset, ACTIVATIONS["identity"], eye, eye.new_zeros(size))

    return Summand(("linear", affine.key), "linear", number, set(affine.matrices), build)


class _Step(NamedTuple):
    """A map to be made a stage, the node that is added to its output, and the node that is then complete."""

    part: Summand
    added: Node | None
    result: Node


def _serial(node: Node) -> int:
    return node.serial


def _ordered(ends: Iterable[Node]) -> list[Node]:
    """Return all nodes but the tokens, each after those that it needs."""
    found: dict[Node, None] = {}
    waiting: list[tuple[Node, bool]] = [(end, False) for end in ends]
    while waiting:
        node, ready = waiting.pop()
        if node in found:
            continue
        sources = (source for part in node.parts for source in sorted(part.sources, key=_serial))
        needed = [*node.added, *sources]
        if ready or all(one in found for one in needed):
            found[node] = None
        else:
            waiting.append((node, True))
            waiting += [(one, False) for one in reversed(needed) if one not in found]
    return [node for node in found if node.parts]


def _steps(order: list[Node]) -> list[_Step]:
    steps = []
    for node in order:
        first, others = (node.added[0], node.added[1:]) if node.added else (None, [])
        parts = list(node.parts)
        parts += [linear(identity(one, node.length), parts[0].owner) for one in others]
        for part in parts[:-1]:
            so_far = Node(node.name, node.length, rows=node.rows, pooled=node.pooled)
            steps.append(_Step(part, first, so_far))
            first = so_far
        steps.append(_Step(parts[-1], first, node))
    return steps


def staged(
    tokens: Node, matrices: Mapping[Node, Mapping[int, Tensor]], offset: Tensor
) -> tuple[Network, list[int]]:
    """Arrange the nodes as stages, each of which computes one map on a state that holds what is needed."""
    steps = _steps(_ordered(matrices))
    if not steps:  # a linear readout of the tokens alone
        same = Node("", tokens.length, 1)
        steps = [_Step(linear(identity(tokens, tokens.length), 0), None, same)]
        matrices = {same: matrices[tokens]}
    rows = sorted(tokens.rows)
    reads, state, width = rows, {tokens: 0}, tokens.length
    stages, names = list[Stage](), dict[str, int]()
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
        name = first = f"{step.result.name}.{part.kind}".lstrip(".")
        names[first] = names.get(first, 0) + 1
        if names[first] > 1:
            name = f"{first} {names[first]}"
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
            readout[:, rows.index(row), state[node] : state[node] + node.length] = matrix
    return Network(tuple(stages), readout, offset), reads


def _shifted(layer: Map, offset: Tensor) -> Map:
    """Return a layer with something added to its output."""
    name = {Norm: "bias", Attention: "output_bias"}.get(type(layer), "down_bias")
    shifted: Any = {name: careful_sum(getattr(layer, name), offset)}
    return replace(layer, **shifted)
