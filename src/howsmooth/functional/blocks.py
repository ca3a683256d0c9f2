"""Functions that are a sum over blocks of query rows, and their derivatives of every kind and order.

Such a function reads tensors of queries, of keys and of scores, and writes such tensors; a block writes its
own rows, and adds its part to what the blocks share. Its derivatives, forward and reverse, are functions of
the same kind: the tangent of a sum is the sum of tangents, and every block gets the cotangent of what it
added to. So one autograd function whose derivatives are itself, applied to another ``BlockMap``, has
derivatives of every order, and what is kept between forward and backward are the tensors alone.

Tensors end in five axes (lead, kv_heads, group, rows, columns), each of full length or 1. In front stand
the axes that torch.func.vmap has brought, outermost first: all tensors have as many, of full length or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from howsmooth.attention.visibility import Visibility

__all__ = ["Block", "BlockMap", "Flags", "Grid", "Part", "Shape", "apply", "kept_whole", "reduced"]

# What a tensor's last axes but one are: queries (group, rows, entries), keys (1, keys, entries), or scores
# (group or 1, rows or 1, keys or 1).
Part = Literal["queries", "keys", "scores"]
Shape = tuple[int, ...]
Flags = tuple[bool, ...]

# Scores that are formed at a time: what stays in a processor's caches, or keeps an accelerator busy.
_ENTRIES = {"cpu": 1 << 20}
_ENTRIES_ELSEWHERE = 1 << 26
# With fewer rows at a time, products would read the keys from memory for little work.
_FEWEST_ROWS = 32


@dataclass(frozen=True)
class Block:
    """Some query rows, and the keys that they see, of some heads of some members of the leading axis."""

    lead: slice
    heads: slice
    rows: slice
    keys: slice

    def cut(self, t: Tensor, part: Part) -> Tensor:
        """Return what of a tensor belongs to this block: a view."""
        place: tuple[Any, ...] = (..., *self._place(t.shape, part))
        return t[place]

    def cut_shape(self, shape: Shape, part: Part) -> Shape:
        """Return the shape of what :meth:`cut` gives for a tensor of this shape."""
        return (*shape[:-5], *(s.stop - s.start for s in self._place(shape, part)))

    def padded(self, t: Tensor, shape: Shape, part: Part) -> Tensor:
        """Return a tensor of this shape, zero outside this block."""
        place = self._place(shape, part)
        around = [(s.start, size - s.stop) for s, size in zip(place, shape[-5:], strict=True)]
        return torch.nn.functional.pad(t, [size for pair in reversed(around) for size in pair])

    def _place(self, shape: Shape, part: Part) -> tuple[slice, ...]:
        """Where this block is in the last five axes; all of an axis of length 1."""
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
    """How the scores (lead, kv_heads, group, m, n) of an attention are cut into blocks."""

    lead: int
    kv_heads: int
    group: int
    m: int
    visible: Visibility

    def blocks(self, times: int, device: torch.device) -> Iterator[Block]:
        """Cut into blocks of some 10⁵ to 10⁷ scores, ``times`` of which are formed side by side."""
        n, window = self.visible.n, self.visible.window
        entries = _ENTRIES.get(device.type, _ENTRIES_ELSEWHERE)
        longest = self.m
        if window is not None:
            longest = min(longest, max(window, 2 * _FEWEST_ROWS))
        elif self.visible.causal:
            # Half of a block on the diagonal is work for nothing.
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
                        yield Block(slice(member, member + lead), slice(head, head + heads), rows, keys)


# What one block computes of its parts of the tensors, reduced to the shapes that it is given.
Compute = Callable[[Block, tuple[Tensor, ...], tuple[Shape, ...]], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class BlockMap:
    """A function of tensors that is a sum over blocks.

    Parameters
    ----------
    grid
        The blocks.
    compute
        What a block computes; pure, in operations that PyTorch differentiates.
    inputs
        What each tensor is.
    outputs
        What each result is, and its shape.
    closed_forward, closed_reverse
        ``forward`` and ``reverse`` in closed form; where there is none PyTorch differentiates ``compute``.
        The first is called with the shapes of the results.
    extra
        Axes that vmap has brought since the map was made: in front of the shapes of all results.
    kernel
        What computes all blocks at once, of tensors with five axes, the first of full length; None to go
        block by block.
    kept
        How many more results the kernel has behind ``outputs``: they have no derivatives, and every
        derivative gets them behind the tensors.

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

    def targets(self, block: Block, extra: Shape = ()) -> tuple[Shape, ...]:
        """Return the shapes of a block's results, behind ``extra`` axes."""
        return tuple((*extra, *self.extra, *block.cut_shape(shape, part)) for part, shape in self.outputs)

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the results, and what is kept; nothing in here is differentiated."""
        device = tensors[0].device
        dtype = next(t.dtype for t in tensors if t.is_floating_point())
        wide = torch.promote_types(dtype, torch.float32)
        shapes = [(*self.extra, *shape) for _, shape in self.outputs]
        if self.kernel is not None:
            front = (*torch.broadcast_shapes(*(t.shape[:-5] for t in tensors)), self.grid.lead)
            folded = (t.expand(*front, *t.shape[-4:]).flatten(0, len(front) - 1) for t in tensors)
            found = [t.unflatten(0, front) for t in self.kernel(tuple(folded))]
            kept = found[len(shapes) :]
            fitting = (reduced(t, s) for t, s in zip(found, shapes, strict=False))
            # Copies, so that who changes a result in place changes nothing that is kept.
            return (*(t.to(dtype, copy=True) for t in fitting), *kept)
        results = tuple(torch.zeros(shape, dtype=wide, device=device) for shape in shapes)
        times = prod(torch.broadcast_shapes(*(t.shape[:-5] for t in tensors)))
        # Products are made in the precision of the tensors, whatever precision autocast would choose.
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
        """Return the map (tensors, tangents of those that are ``moved``) ↦ tangents of the results."""
        shapes = tuple((*self.extra, *shape) for _, shape in self.outputs)
        if self.closed_forward is not None:
            return self.closed_forward(moved, shapes)
        count = len(moved)

        def compute(
            block: Block, tensors: tuple[Tensor, ...], targets: tuple[Shape, ...]
        ) -> tuple[Tensor, ...]:
            at, tangents = tensors[:count], tensors[count:]
            points = [t for t, m in zip(at, moved, strict=True) if m]
            both = [torch.broadcast_tensors(*pair) for pair in zip(points, tangents, strict=True)]

            def of(*some: Tensor) -> tuple[Tensor, ...]:
                return self.compute(block, _merged(at, moved, some), targets)

            def pulled(*cotangents: Tensor) -> tuple[Tensor, ...]:
                return tuple(torch.func.vjp(of, *(p for p, _ in both))[1](cotangents))

            # The adjoint of the adjoint: PyTorch has no forward mode within its own forward mode.
            start = tuple(
                torch.zeros(target, dtype=tangents[0].dtype, device=tangents[0].device) for target in targets
            )
            pull = torch.func.vjp(pulled, *start)[1]
            return tuple(pull(tuple(t for _, t in both)))

        inputs = (*self.inputs, *(part for part, m in zip(self.inputs, moved, strict=True) if m))
        outputs = tuple((part, shape) for (part, _), shape in zip(self.outputs, shapes, strict=True))
        return BlockMap(self.grid, compute, inputs, outputs)

    def reverse(self, wanted: Flags, given: Flags, shapes: tuple[Shape, ...]) -> BlockMap:
        """Return the map (tensors, the cotangents ``given``) ↦ cotangents of the tensors ``wanted``.

        ``shapes`` are those of the tensors.
        """
        if self.closed_reverse is not None:
            return self.closed_reverse(wanted, given, shapes)
        count, axes = len(wanted), len(shapes[0])

        def compute(
            block: Block, tensors: tuple[Tensor, ...], targets: tuple[Shape, ...]
        ) -> tuple[Tensor, ...]:
            at, cotangents = tensors[:count], tensors[count:]
            # What vmap has put in front since: every member gets cotangents of its own.
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
    """Put ``some`` in the places of ``tensors`` that ``which`` marks."""
    others = iter(some)
    return tuple(next(others) if w else t for t, w in zip(tensors, which, strict=True))


def kept_whole(t: Tensor) -> bool:
    """Tell whether a new tensor may not be changed in place.

    torch.func differentiates what is done with it; linearize records that, and loses changes of views.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(t) or get_proxy_mode() is not None


def reduced(t: Tensor, shape: Shape) -> Tensor:
    """Return a tensor summed over axes where ``shape`` has 1, repeated over those where it has 1 itself."""
    return t.expand(torch.broadcast_shapes(t.shape, shape)).sum_to_size(shape)


class _OverBlocks(torch.autograd.Function):
    """A BlockMap in PyTorch's autograd and in torch.func."""

    @staticmethod
    def forward(function: BlockMap, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        return function.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep the tensors, and what the function keeps."""
        ctx.function, *tensors = inputs
        kept = output[len(ctx.function.outputs) :]
        ctx.save_for_backward(*tensors, *kept)
        ctx.save_for_forward(*tensors, *kept)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Apply the reverse derivative, which is differentiable in turn."""
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
        """Apply the forward derivative, which is differentiable in turn."""
        function = ctx.function.forward(tuple(t is not None for t in tangents))
        moved = (t for t in tangents if t is not None)
        # Nothing but this call: PyTorch switches forward mode off in here, and at the levels outside too,
        # where other operations would lose their tangents.
        return (*_apply(function, *ctx.saved_tensors, *moved), *(None,) * ctx.function.kept)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: BlockMap, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Put the new axis in front of all."""
        dims = in_dims[1:]
        front = (t[None] if d is None else t.movedim(d, 0) for t, d in zip(tensors, dims, strict=True))
        function = replace(function, extra=(info.batch_size, *function.extra))
        return _apply(function, *front), (0,) * (len(function.outputs) + function.kept)


# Annotated, which PyTorch's own is not.
_apply: Callable[..., tuple[Tensor, ...]] = _OverBlocks.apply


def apply(function: BlockMap, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the results of a BlockMap, differentiable in every mode and to every order."""
    return _apply(function, *tensors)[: len(function.outputs)]
