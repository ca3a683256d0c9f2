"""Autograd functions whose results are sums over blocks of query rows, with derivatives of every order.

Such a function reads and returns tensors with a row for each query, for each key, or with an entry for each
score. A block contributes a summand to each result. Its derivatives are functions of the same kind: the
tangent of a sum is the sum of the tangents, and in reverse mode each block gets the cotangent of the result
to which it has added. So one autograd function suffices, whose derivatives are the same function of another
:class:`BlockMap`. It keeps only its input tensors between forward and backward.

Tensors end in five axes (lead, kv_heads, group, rows, columns), each of full length or of length 1. In front
of them are the axes that torch.func.vmap has added, outermost first. All tensors have the same number of
them, each of full length or of length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from howsmooth.attention.masks import Visibility

__all__ = ["BlockMap", "Flags", "Grid", "Part", "ScoreBlock", "Shape", "apply", "kept_whole", "reduced"]

# Kind of a tensor, by its last three axes: queries (group, rows, entries), keys (1, keys, entries), or scores
# (group or 1, rows or 1, keys or 1).
Part = Literal["queries", "keys", "scores"]
Shape = tuple[int, ...]
Flags = tuple[bool, ...]

# Number of scores of a block: few enough for the caches of a CPU, enough to keep another device busy.
_ENTRIES = {"cpu": 1 << 20}
_ENTRIES_ELSEWHERE = 1 << 26
# Fewest rows of a block. With fewer, products would read all keys from memory for little work.
_FEWEST_ROWS = 32


@dataclass(frozen=True)
class ScoreBlock:
    """A rectangular block of the scores (lead, kv_heads, group, m, n). The axis ``group`` is never cut."""

    lead: slice
    heads: slice
    rows: slice
    keys: slice

    def cut(self, t: Tensor, part: Part) -> Tensor:
        """Return a view of this block's part of a tensor of queries, keys or scores."""
        place: tuple[Any, ...] = (..., *self._place(t.shape, part))
        return t[place]

    def cut_shape(self, shape: Shape, part: Part) -> Shape:
        """Return the shape of this block's part of a tensor of shape ``shape``."""
        return (*shape[:-5], *(s.stop - s.start for s in self._place(shape, part)))

    def padded(self, t: Tensor, shape: Shape, part: Part) -> Tensor:
        """Return a tensor of shape ``shape`` that equals ``t`` on this block and is zero outside of it."""
        place = self._place(shape, part)
        around = [(s.start, size - s.stop) for s, size in zip(place, shape[-5:], strict=True)]
        return torch.nn.functional.pad(t, [size for pair in reversed(around) for size in pair])

    def _place(self, shape: Shape, part: Part) -> tuple[slice, ...]:
        """Return this block's slices of the last five axes of a tensor. Axes of length 1 are kept whole."""
        every = slice(None)
        by_part = {
            "queries": (self.rows, every),
            "keys": (self.keys, every),
            "scores": (self.rows, self.keys),
        }
        place = (self.lead, self.heads, every, *by_part[part])
        return tuple(
            slice(0, size) if size == 1 else slice(*some.indices(size)[:2])
            for some, size in zip(place, shape[-5:], strict=True)
        )


@dataclass(frozen=True, eq=False)
class Grid:
    """The rule by which attention scores (lead, kv_heads, group, m, n) are cut into blocks of query rows.
    ``visible`` has the rules of causal order and window, and the number n of keys.
    """

    lead: int
    kv_heads: int
    group: int
    m: int
    visible: Visibility

    def blocks(self, times: int, device: torch.device) -> Iterator[ScoreBlock]:
        """Yield the blocks in which at least one query sees a key.

        ``times`` is the product of the lengths of the axes that vmap has added, whose indices a block is
        computed for at once.
        """
        n, window = self.visible.n, self.visible.window
        entries = _ENTRIES.get(device.type, _ENTRIES_ELSEWHERE)
        longest = self.m
        if window is not None:
            longest = min(longest, max(window, 2 * _FEWEST_ROWS))
        elif self.visible.causal:
            # Half of a block on the diagonal is computed for nothing, so there are at least eight blocks.
            longest = min(longest, max(2 * _FEWEST_ROWS, -(-self.m // 8)))
        width = n if window is None else min(n, longest + 2 * window)
        length = max(
            min(longest, _FEWEST_ROWS), min(longest, entries // max(1, times * self.group * width)), 1
        )
        heads = max(1, min(self.kv_heads, entries // max(1, times * self.group * length * width)))
        lead = max(1, entries // max(1, times * self.group * length * width * self.kv_heads))
        for member in range(0, self.lead, lead):
            for head in range(0, self.kv_heads, heads):
                for row in range(0, self.m, length):
                    rows = slice(row, min(row + length, self.m))
                    keys = self.visible.keys(rows)
                    if keys.start < keys.stop:
                        yield ScoreBlock(slice(member, member + lead), slice(head, head + heads), rows, keys)


# Computes the summands of one block from its parts of the tensors, in the shapes that are given.
Compute = Callable[[ScoreBlock, tuple[Tensor, ...], tuple[Shape, ...]], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class BlockMap:
    """A function of tensors that is computed as a sum over blocks of query rows.

    ``inputs`` are the kinds of the input tensors, ``outputs`` the kinds and shapes of the results.
    ``compute`` computes the summands of one block of ``grid``, in pure operations that PyTorch can
    differentiate; unless ``closed_forward`` and ``closed_reverse`` are :meth:`forward`, with the shapes of
    the results, and :meth:`reverse` in closed form. ``extra`` are the lengths of the axes that vmap has
    added since the map was made, in front of the shapes of all results. A ``kernel`` computes all blocks at
    once, from tensors with five axes of which the first has its full length. Its ``kept`` further results
    have no derivatives, and are passed to every derivative after the tensors.
    """

    grid: Grid
    compute: Compute
    inputs: tuple[Part, ...]
    outputs: tuple[tuple[Part, Shape], ...]
    closed_forward: Callable[[Flags, tuple[Shape, ...]], BlockMap] | None = None
    closed_reverse: Callable[[Flags, Flags, tuple[Shape, ...]], BlockMap] | None = None
    extra: Shape = ()
    kernel: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None
    kept: int = 0

    def targets(self, block: ScoreBlock, extra: Shape = ()) -> tuple[Shape, ...]:
        """Return the shapes of one block's contributions to the results, with the axes ``extra`` in front."""
        return tuple((*extra, *self.extra, *block.cut_shape(shape, part)) for part, shape in self.outputs)

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute the results, and after them what a kernel keeps. Nothing is recorded for autograd."""
        device = tensors[0].device
        dtype = next(t.dtype for t in tensors if t.is_floating_point())
        wide = torch.promote_types(dtype, torch.float32)
        shapes = [(*self.extra, *shape) for _, shape in self.outputs]
        if self.kernel is not None:
            # A kernel has one leading axis, into which the axes of vmap are folded.
            front = (*torch.broadcast_shapes(*(t.shape[:-5] for t in tensors)), self.grid.lead)
            folded = (t.expand(*front, *t.shape[-4:]).flatten(0, len(front) - 1) for t in tensors)
            found = [t.unflatten(0, front) for t in self.kernel(tuple(folded))]
            kept = found[len(shapes) :]
            fitting = (reduced(t, s) for t, s in zip(found, shapes, strict=False))
            # Copies, so that an in-place change of a result does not change a tensor that is kept.
            return (*(t.to(dtype, copy=True) for t in fitting), *kept)
        results = tuple(torch.zeros(shape, dtype=wide, device=device) for shape in shapes)
        times = prod(torch.broadcast_shapes(*(t.shape[:-5] for t in tensors)))
        # Without autocast, which would choose another precision for the matrix products.
        with torch.autocast(device.type, enabled=False):
            for block in self.grid.blocks(times, device):
                parts = tuple(block.cut(t, part) for t, part in zip(tensors, self.inputs, strict=True))
                parts = tuple(t.to(wide) if t.is_floating_point() else t for t in parts)
                computed = self.compute(block, parts, self.targets(block))
                kinds = (part for part, _ in self.outputs)
                triples = zip(results, computed, kinds, strict=True)
                if kept_whole(results[0]):
                    results = tuple(r + block.padded(new, r.shape, part) for r, new, part in triples)
                else:
                    for r, new, part in triples:
                        block.cut(r, part).add_(new)
        return tuple(result.to(dtype) for result in results)

    def forward(self, moved: Flags) -> BlockMap:
        """Return the map from arguments and argument tangents to result tangents. ``moved`` marks the
        arguments that have a tangent.
        """
        shapes = tuple((*self.extra, *shape) for _, shape in self.outputs)
        if self.closed_forward is not None:
            return self.closed_forward(moved, shapes)
        count = len(moved)

        def compute(
            block: ScoreBlock, tensors: tuple[Tensor, ...], targets: tuple[Shape, ...]
        ) -> tuple[Tensor, ...]:
            at, tangents = tensors[:count], tensors[count:]
            points = [t for t, m in zip(at, moved, strict=True) if m]
            both = [torch.broadcast_tensors(*pair) for pair in zip(points, tangents, strict=True)]

            def of(*some: Tensor) -> tuple[Tensor, ...]:
                return self.compute(block, _merged(at, moved, some), targets)

            def pulled(*cotangents: Tensor) -> tuple[Tensor, ...]:
                return tuple(torch.func.vjp(of, *(p for p, _ in both))[1](cotangents))

            # The tangent is computed as the adjoint of the adjoint, because PyTorch cannot nest its forward
            # mode in a custom function's forward mode.
            start = tuple(
                torch.zeros(target, dtype=tangents[0].dtype, device=tangents[0].device) for target in targets
            )
            pull = torch.func.vjp(pulled, *start)[1]
            return tuple(pull(tuple(t for _, t in both)))

        inputs = (*self.inputs, *(part for part, m in zip(self.inputs, moved, strict=True) if m))
        outputs = tuple((part, shape) for (part, _), shape in zip(self.outputs, shapes, strict=True))
        return BlockMap(self.grid, compute, inputs, outputs)

    def reverse(self, wanted: Flags, given: Flags, shapes: tuple[Shape, ...]) -> BlockMap:
        """Return the map from arguments and result cotangents to argument cotangents. ``wanted`` marks the
        tensors, of shapes ``shapes``, whose cotangents are asked for, ``given`` the results that have a
        cotangent.
        """
        if self.closed_reverse is not None:
            return self.closed_reverse(wanted, given, shapes)
        count, axes = len(wanted), len(shapes[0])

        def compute(
            block: ScoreBlock, tensors: tuple[Tensor, ...], targets: tuple[Shape, ...]
        ) -> tuple[Tensor, ...]:
            at, cotangents = tensors[:count], tensors[count:]
            # Axes that vmap has added since: each index gets its own cotangents, so tensors are expanded.
            extra = targets[0][: len(targets[0]) - axes]
            inner = self.targets(block, extra)

            def of(*some: Tensor) -> tuple[Tensor, ...]:
                results = self.compute(block, _merged(at, wanted, some), inner)
                return tuple(r for r, g in zip(results, given, strict=True) if g)

            points = [t for t, w in zip(at, wanted, strict=True) if w]
            wide = (t.expand(s) for t, s in zip(points, targets, strict=True))
            pull = torch.func.vjp(of, *wide)[1]
            of_results = [shape for shape, g in zip(inner, given, strict=True) if g]
            return tuple(pull(tuple(c.expand(s) for c, s in zip(cotangents, of_results, strict=True))))

        inputs = (*self.inputs, *(part for (part, _), g in zip(self.outputs, given, strict=True) if g))
        sought = zip(self.inputs, shapes, wanted, strict=True)
        return BlockMap(self.grid, compute, inputs, tuple((part, shape) for part, shape, w in sought if w))


def _merged(tensors: tuple[Tensor, ...], which: Flags, some: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return ``tensors``, with the tensors in ``some`` in place of those that ``which`` marks."""
    others = iter(some)
    return tuple(next(others) if w else t for t, w in zip(tensors, which, strict=True))


def _old_vmap_level() -> int:
    """Return how many calls of the older vmap, that of ``torch.autograd.functional``, are active."""
    level: int = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level - 1


def kept_whole(t: Tensor) -> bool:
    """Return True if ``t`` must not be changed in place, because torch.compile or torch.func traces the
    operations on it. The traces of torch.func.linearize lose in-place changes of views.
    """
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.is_functorch_wrapped_tensor(t) or get_proxy_mode() is not None


def reduced(t: Tensor, shape: Shape) -> Tensor:
    """Sum ``t`` over axes where ``shape`` has length 1, and repeat ``t`` along its own axes of length 1."""
    return t.expand(torch.broadcast_shapes(t.shape, shape)).sum_to_size(shape)


class _OverBlocks(torch.autograd.Function):
    """The autograd function that evaluates a :class:`BlockMap` and whose derivatives are BlockMaps too."""

    @staticmethod
    def forward(function: BlockMap, *tensors: Tensor) -> tuple[Tensor, ...]:
        return function.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.function, *tensors = inputs
        kept = output[len(ctx.function.outputs) :]
        ctx.save_for_backward(*tensors, *kept)
        ctx.save_for_forward(*tensors, *kept)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, wanted = ctx.saved_tensors, tuple(ctx.needs_input_grad[1:])
        cotangents = cotangents[: len(ctx.function.outputs)]
        given = [c for c in cotangents if c is not None]
        if not given or not any(wanted):
            return (None,) * (1 + len(wanted))
        there = tuple(c is not None for c in cotangents)
        shapes = tuple(tuple(t.shape) for t in saved[: len(wanted)])
        found = iter(_apply(ctx.function.reverse(wanted, there, shapes), *saved, *given))
        return (None, *(next(found) if w else None for w in wanted))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        function = ctx.function.forward(tuple(t is not None for t in tangents))
        moved = (t for t in tangents if t is not None)
        # This must be the only operation here. PyTorch switches forward mode off inside ``jvp``, for outer
        # levels too, so any other operation would lose the tangents of those levels.
        return (*_apply(function, *ctx.saved_tensors, *moved), *(None,) * ctx.function.kept)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: BlockMap, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # The batch becomes one more axis in front of all tensors.
        dims = in_dims[1:]
        front = (t[None] if d is None else t.movedim(d, 0) for t, d in zip(tensors, dims, strict=True))
        function = replace(function, extra=(info.batch_size, *function.extra))
        return _apply(function, *front), (0,) * (len(function.outputs) + function.kept)


# PyTorch's ``apply`` has no annotation.
_apply_function: Callable[..., tuple[Tensor, ...]] = _OverBlocks.apply


def _apply(function: BlockMap, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Evaluate a BlockMap by its autograd function, also inside the older vmap of
    ``torch.autograd.functional`` and ``gradcheck``.

    That vmap wraps tensors that may require gradients, which an autograd function does not record. So its
    axes become axes in front before the function is applied, and are put back on its results.
    """
    if not any(map(torch._C._functorch.is_legacy_batchedtensor, tensors)):
        return _apply_function(function, *tensors)
    return _apply_in_old_vmap(_old_vmap_level(), function, *tensors)


def _apply_in_old_vmap(level: int, function: BlockMap, *tensors: Tensor) -> tuple[Tensor, ...]:
    if level == 0:
        return _apply(function, *tensors)
    # A tensor without an axis of this level gets one of length 1.
    front = tuple(torch._remove_batch_dim(t, level, 1, 0) for t in tensors)
    size = max(t.shape[0] for t in front)
    function = replace(function, extra=(size, *function.extra))
    found = _apply_in_old_vmap(level - 1, function, *front)
    return tuple(torch._add_batch_dim(t, 0, level) for t in found)


def apply(function: BlockMap, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Evaluate a BlockMap; PyTorch can differentiate the results in every mode and any number of times."""
    return _apply(function, *tensors)[: len(function.outputs)]
