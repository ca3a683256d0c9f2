"""Attention and its derivatives as functions over blocks: which tensors go in, and which come out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import Tensor

from howsmooth.functional.blocks import Block, BlockMap, Flags, Shape, reduced
from howsmooth.functional.softmax import PARTS, Scores, adjoint, over_keys, second, tangent, weights

__all__ = ["attention_map"]

Tensors = tuple[Tensor, ...]
Shapes = tuple[Shape, ...]
_Item = TypeVar("_Item")


def attention_map(scores: Scores, shape: Shape) -> BlockMap:
    """Return O = P v as a function of the tensors ``scores.names``; ``shape`` is that of O."""

    def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
        x = dict(zip(scores.names, tensors, strict=True))
        return (reduced(over_keys(weights(scores, block, x).p, x["v"]), targets[0]),)

    def forward(moved: Flags, shapes: Shapes) -> BlockMap:
        return _tangent_map(scores, _chosen(scores.names, moved), shapes[0])

    def reverse(wanted: Flags, given: Flags, shapes: Shapes) -> BlockMap:
        which = _chosen(scores.names, wanted)
        return _adjoint_map(scores, dict(zip(which, _chosen(shapes, wanted), strict=True)))

    parts = tuple(PARTS[name] for name in scores.names)
    return BlockMap(scores.grid, compute, parts, (("queries", shape),), forward, reverse)


def _tangent_map(scores: Scores, moved: tuple[str, ...], shape: Shape) -> BlockMap:
    """(x, dx) ↦ dO, with tangents of the tensors ``moved``."""
    count = len(scores.names)

    def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
        x = dict(zip(scores.names, tensors[:count], strict=True))
        d = dict(zip(moved, tensors[count:], strict=True))
        return (reduced(tangent(weights(scores, block, x), d), targets[0]),)

    def reverse(wanted: Flags, given: Flags, shapes: Shapes) -> BlockMap:
        """(x, dx, U) ↦ derivatives of ⟨U, dO⟩ in x and in dx."""
        of_x = _chosen(scores.names, wanted[:count])
        of_d = _chosen(moved, wanted[count:])

        def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
            x = dict(zip(scores.names, tensors[:count], strict=True))
            d = dict(zip(moved, tensors[count:-1], strict=True))
            at, u = weights(scores, block, x), tensors[-1]
            found = _in_order(second(at, u, d, None, of_x), of_x) if of_x else ()
            found += _in_order(adjoint(at, u, of_d), of_d) if of_d else ()
            return tuple(reduced(t, target) for t, target in zip(found, targets, strict=True))

        inputs = tuple(PARTS[name] for name in (*scores.names, *moved))
        outputs = zip((*of_x, *of_d), _chosen(shapes, wanted), strict=True)
        return BlockMap(
            scores.grid, compute, (*inputs, "queries"), tuple((PARTS[name], s) for name, s in outputs)
        )

    inputs = tuple(PARTS[name] for name in (*scores.names, *moved))
    return BlockMap(scores.grid, compute, inputs, (("queries", shape),), closed_reverse=reverse)


def _adjoint_map(scores: Scores, which: Mapping[str, Shape]) -> BlockMap:
    """(x, U) ↦ cotangents of the tensors ``which``, in these shapes."""
    names = (*scores.names, "u")
    parts = tuple("queries" if name == "u" else PARTS[name] for name in names)
    count = len(names)

    def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
        x = dict(zip(scores.names, tensors[:-1], strict=True))
        found = adjoint(weights(scores, block, x), tensors[-1], tuple(which))
        return tuple(reduced(found[name], target) for name, target in zip(which, targets, strict=True))

    def forward(moved: Flags, shapes: Shapes) -> BlockMap:
        """(x, U, dx, dU) ↦ tangents of the cotangents."""
        tangents = _chosen(names, moved)

        def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
            x = dict(zip(names, tensors[:count], strict=True))
            d = dict(zip(tangents, tensors[count:], strict=True))
            u, du = x.pop("u"), d.pop("u", None)
            found = second(weights(scores, block, x), u, d, du, tuple(which))
            return tuple(reduced(found[name], target) for name, target in zip(which, targets, strict=True))

        inputs = (*parts, *_chosen(parts, moved))
        outputs = tuple((PARTS[name], s) for name, s in zip(which, shapes, strict=True))
        return BlockMap(scores.grid, compute, inputs, outputs)

    def reverse(wanted: Flags, given: Flags, shapes: Shapes) -> BlockMap:
        """(x, U, W) ↦ derivatives of ⟨W, cotangents⟩ in x and in U: as ⟨U, dO⟩ with dx = W."""
        of_x, of_u = _chosen(scores.names, wanted[:-1]), wanted[-1]
        cotangents = _chosen(tuple(which), given)

        def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
            x = dict(zip(names, tensors[:count], strict=True))
            d = dict(zip(cotangents, tensors[count:], strict=True))
            u = x.pop("u")
            at = weights(scores, block, x)
            found = _in_order(second(at, u, d, None, of_x), of_x) if of_x else ()
            found += (tangent(at, d),) if of_u else ()
            return tuple(reduced(t, target) for t, target in zip(found, targets, strict=True))

        inputs = (*parts, *(PARTS[name] for name in cotangents))
        outputs = tuple(zip(_chosen(parts, wanted), _chosen(shapes, wanted), strict=True))
        return BlockMap(scores.grid, compute, inputs, outputs)

    outputs = tuple((PARTS[name], shape) for name, shape in which.items())
    return BlockMap(scores.grid, compute, parts, outputs, forward, reverse)


def _chosen(items: Iterable[_Item], flags: Flags) -> tuple[_Item, ...]:
    return tuple(item for item, flag in zip(items, flags, strict=True) if flag)


def _in_order(found: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensors:
    return tuple(found[name] for name in names)
