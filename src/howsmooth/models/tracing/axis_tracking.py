"""Tracking of the axes of a tensor through reshapes and permutations.

Attention code merges, splits and swaps the axes of its scores between ``q @ k.T`` and ``p @ v``. To bring
queries and keys into the arrangement of ``p @ v``, the length of each axis is written as a product of
factors. A reshape regroups the factors and splits them where necessary; a permutation reorders them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

__all__ = ["Axes", "Axis", "Factor", "arrange", "broadcast", "leaves", "regroup"]


class Factor:
    """A factor of the length of an axis; for example, the length heads · head_dim has the factors heads and
    head_dim.

    A split changes the factor in place, so that every tensor whose axes contain it sees the two parts.
    """

    __slots__ = ("parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Factor, Factor] | None = None

    def split(self, first: int) -> tuple[Factor, Factor]:
        """Split this factor of the length of an axis into an outer factor ``first`` and an inner factor.

        Both are returned.
        """
        self.parts = Factor(first), Factor(self.size // first)
        return self.parts


Axis = tuple[Factor, ...]  # outermost factor first; an axis of length one has no factors
Axes = tuple[Axis, ...]


def leaves(axis: Axis) -> Axis:
    """Return the smallest known factors of the length of an axis. A factor that was split is replaced,
    recursively, by its two parts.
    """
    found: list[Factor] = []
    for factor in axis:
        found += (factor,) if factor.parts is None else leaves(factor.parts)
    return tuple(found)


def regroup(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Return the axes of a tensor after a reshape, or None if the axes cannot be tracked through it.

    They cannot if the old and the new lengths do not divide one another.
    """
    waiting = [factor for axis in axes for factor in leaves(axis)]
    result: list[Axis] = []
    for size in shape:
        group: list[Factor] = []
        missing = size
        while missing > 1:
            if not waiting:
                return None
            factor = waiting.pop(0)
            if missing % factor.size:
                if factor.size % missing:
                    return None
                factor, rest = factor.split(missing)
                waiting.insert(0, rest)
            group.append(factor)
            missing //= factor.size
        result.append(tuple(group))
    return None if waiting else tuple(result)


def broadcast(axes: Axes, shape: Sequence[int]) -> tuple[Axes, Axes]:
    """Broadcast the given axes of one tensor with the shape of another tensor. The first result is the axes
    of the broadcast tensor, and the second is the axes of the other tensor.
    """
    rank = max(len(axes), len(shape))
    mine = ((),) * (rank - len(axes)) + axes
    sizes = [1] * (rank - len(shape)) + list(shape)
    result: list[Axis] = []
    theirs: list[Axis] = []
    for axis, size in zip(mine, sizes, strict=True):
        grown = axis or ((Factor(size),) if size > 1 else ())
        result.append(grown)
        theirs.append(grown if size > 1 else ())
    return tuple(result), tuple(theirs[rank - len(shape) :])


def arrange(tensor: Tensor, axes: Axes, target: Sequence[Axis]) -> Tensor | None:
    """Permute and reshape a tensor such that it has the given axes.

    An axis has length one if the tensor has none of the target's factors; if it has only some of them, the
    tensor is repeated along the others. None if the tensor has a factor that is in no target axis.
    """
    own = [factor for axis in axes for factor in leaves(axis)]
    wanted = [leaves(axis) for axis in target]
    order = [factor for axis in wanted for factor in axis if factor in own]
    if len(order) != len(own):
        return None
    shape = [prod(f.size for f in axis) if any(f in own for f in axis) else 1 for axis in wanted]
    if order == own and prod(shape) == tensor.numel():
        return tensor if list(tensor.shape) == shape else tensor.reshape(shape)
    tensor = tensor.reshape([f.size for f in own]).permute([own.index(f) for f in order])
    kept = [axis for axis in wanted if any(f in own for f in axis)]
    tensor = tensor.reshape([f.size if f in own else 1 for axis in kept for f in axis])
    tensor = tensor.expand([f.size for axis in kept for f in axis])
    return tensor.reshape(shape)
