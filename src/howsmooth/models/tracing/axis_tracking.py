"""Tracking of the axes of a tensor through reshapes and permutations.

Attention code merges, splits and swaps the axes of its scores between ``q @ k.T`` and ``p @ v``. To bring
queries and keys into the arrangement of ``p @ v``, the length of each axis is written as a product of
factors. A reshape regroups the factors and splits them where necessary; a permutation reorders them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

__all__ = ["Axes", "Axis", "Factor", "Operand", "Unreadable", "broadcast", "leaves", "length", "regroup"]


class Unreadable(Exception):  # noqa: N818
    """The error for a tensor that is not computed as attention scores are. Its message says why."""


class Factor:
    """A factor of an axis length. For example, the length heads · head_dim has the factors heads and
    head_dim.

    A split fills ``parts`` in place, so that every tensor whose axes contain the factor sees its parts.
    """

    __slots__ = ("parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Factor, ...] | None = None


Axis = tuple[Factor, ...]  # outermost factor first
Axes = tuple[Axis, ...]


def leaves(axis: Axis) -> Axis:
    """Return the factors of an axis length that have not been split further, without factors equal to 1."""
    found: list[Factor] = []
    for factor in axis:
        if factor.parts is not None:
            found += leaves(factor.parts)
        elif factor.size > 1:
            found.append(factor)
    return tuple(found)


def length(axis: Axis) -> int:
    """Return the length of an axis."""
    return prod(factor.size for factor in axis)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor, and the axes to which it is broadcast: along each axis it has the full length or length 1."""

    tensor: Tensor
    axes: Axes

    def factors(self) -> list[Factor]:
        """Return the factors of the axes along which the tensor has a length greater than 1."""
        sizes = zip(self.axes, self.tensor.shape, strict=True)
        return [factor for axis, size in sizes if size > 1 for factor in leaves(axis)]

    def shares(self, axis: Axis) -> bool:
        """Return True if the tensor varies along the axis or along a factor of it."""
        return not set(self.factors()).isdisjoint(leaves(axis))

    def arranged(self, target: Sequence[Axis]) -> Tensor:
        """Permute and reshape the tensor so that it has the ``target`` axes.

        An axis has length one if the tensor has none of the target's factors; if it has only some of them,
        the tensor is repeated along the others. Unreadable is raised if a factor is in no target axis.
        """
        own = self.factors()
        kept = [axis if any(f in own for f in axis) else () for axis in map(leaves, target)]
        order = [factor for axis in kept for factor in axis if factor in own]
        if len(order) != len(own):
            raise Unreadable("its scores are reshaped across their axes")
        shape = [length(axis) for axis in kept]
        tensor = self.tensor
        if order == own and prod(shape) == tensor.numel():
            return tensor if list(tensor.shape) == shape else tensor.reshape(shape)
        tensor = tensor.reshape([f.size for f in own]).permute([own.index(f) for f in order])
        tensor = tensor.reshape([f.size if f in own else 1 for axis in kept for f in axis])
        return tensor.expand([f.size for axis in kept for f in axis]).reshape(shape)


def regroup(axes: Axes, shape: Sequence[int]) -> Axes:
    """Return the axes of a tensor after a reshape. Raise Unreadable if the old and new lengths cannot be
    split into common factors.
    """
    waiting = [factor for axis in axes for factor in leaves(axis)]
    result: list[Axis] = []
    for size in shape:
        group: list[Factor] = []
        missing = size
        while missing > 1 and waiting:
            factor = waiting.pop(0)
            if missing % factor.size:
                if factor.size % missing:
                    break
                factor.parts = Factor(missing), Factor(factor.size // missing)
                factor, rest = factor.parts
                waiting.insert(0, rest)
            group.append(factor)
            missing //= factor.size
        if missing > 1:
            raise Unreadable("its scores are reshaped across their axes")
        result.append(tuple(group))
    return tuple(result)


def broadcast(axes: Axes, other: Tensor) -> tuple[Axes, Operand]:
    """Broadcast a tensor of given axes with the tensor ``other``. Return the axes of the result, and
    ``other`` as an Operand on these axes.
    """
    rank = max(len(axes), other.ndim)
    mine = ((),) * (rank - len(axes)) + axes
    sizes = [1] * (rank - other.ndim) + list(other.shape)
    result = tuple(
        axis if length(axis) > 1 else (Factor(size),) for axis, size in zip(mine, sizes, strict=True)
    )
    return result, Operand(other, result[rank - other.ndim :])
