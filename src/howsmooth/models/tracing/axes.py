"""Which axis of a tensor is which, through reshapes and permutations.

Attention code merges, splits and swaps the axes of its scores on the way from ``q @ k.T`` to ``p @ v``.
To read the operands in the arrangement of the last product, each axis is written as a product of
factors: a reshape regroups them, splitting where it must, and a permutation reorders them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

__all__ = ["Axes", "Axis", "Factor", "arrange", "broadcast", "leaves", "regroup"]


class Factor:
    """A factor of the length of an axis. Splitting it is final: all who hold it see its parts."""

    __slots__ = ("parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Factor, Factor] | None = None

    def split(self, first: int) -> tuple[Factor, Factor]:
        """Split into an outer part of length ``first`` and the rest."""
        self.parts = Factor(first), Factor(self.size // first)
        return self.parts


Axis = tuple[Factor, ...]  # outermost factor first; an axis of length one has none
Axes = tuple[Axis, ...]


def leaves(axis: Axis) -> Axis:
    """Return the factors of an axis as far as they have been split."""
    found: list[Factor] = []
    for factor in axis:
        found += (factor,) if factor.parts is None else leaves(factor.parts)
    return tuple(found)


def regroup(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Axes after a reshape to ``shape``, or None where that cuts across two axes."""
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
    """Axes of the result, and those of a tensor of ``shape``, where it meets a tensor with ``axes``."""
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
    """View of the tensor with one axis for each target: of length one where it has none of its factors.

    None if it has factors that no target has. Repeated where it has some of a target's factors.
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
