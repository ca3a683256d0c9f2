"""Attention and its first and second derivatives, written as sums over blocks of query rows
(:class:`BlockMap`).

Each function below builds a :class:`BlockMap`. Its inputs are the tensors x of :class:`Scores` by name, then
the further results of the kernel for the value (``kept``), if there are kernels, and then tangents and
cotangents. In the formulas U is a cotangent of the output O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from howsmooth.functional.blockwise_autograd import Block, BlockMap, Flags, Part, Shape, reduced
from howsmooth.functional.fused_attention import KEPT, Kept, Kernels
from howsmooth.functional.softmax_attention import PARTS, Scores, adjoint, output, second, tangent, weights

__all__ = ["attention_map"]

Tensors = tuple[Tensor, ...]
Shapes = tuple[Shape, ...]
Names = tuple[str, ...]
_Item = TypeVar("_Item")


def attention_map(scores: Scores, shape: Shape, kernels: Kernels | None = None) -> BlockMap:
    """Return attention as a :class:`BlockMap`, a function that is computed as a sum over blocks of query
    rows.

    It maps the tensors named in ``scores.names`` to the output O = (P∘M) v, of shape ``shape``.

    With ``kernels``, they compute the map and its first and second derivatives, except derivatives in masks
    and biases. All else is computed block by block.
    """

    def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
        x = dict(zip(scores.names, tensors, strict=True))
        return (reduced(output(weights(scores, block, x)), targets[0]),)

    def forward(moved: Flags, shapes: Shapes) -> BlockMap:
        return _tangent_map(scores, _chosen(scores.names, moved), shapes[0], kernels)

    def reverse(wanted: Flags, given: Flags, shapes: Shapes) -> BlockMap:
        which = _chosen(scores.names, wanted)
        return _adjoint_map(scores, dict(zip(which, _chosen(shapes, wanted), strict=True)), kernels)

    def kernel(tensors: Tensors) -> Tensors:
        assert kernels is not None
        mean, lse = kernels.value(dict(zip(scores.names, tensors, strict=True)))
        return mean, mean, lse

    parts = tuple(PARTS[name] for name in scores.names)
    value = BlockMap(scores.grid, compute, parts, (("queries", shape),), forward, reverse)
    return value if kernels is None else replace(value, kernel=kernel, kept=len(KEPT))


def _tangent_map(scores: Scores, moved: Names, shape: Shape, kernels: Kernels | None) -> BlockMap:
    """Return the forward-mode derivative of attention as a :class:`BlockMap`, a sum over blocks of query
    rows.

    It maps the tensors x, and tangents dx of the tensors named in ``moved``, to the tangent dO of the output.
    """
    given = _Inputs(scores, kernels, moved)

    def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
        x, _, d = given.named(tensors)
        return (reduced(tangent(weights(scores, block, x), d), targets[0]),)

    def reverse(wanted: Flags, _: Flags, shapes: Shapes) -> BlockMap:
        """Return the reverse-mode derivative of the forward-mode derivative of attention, as a
        :class:`BlockMap`.

        It maps x, dx and a cotangent U of the output to the gradients of ⟨U, dO⟩ in x and in dx.
        """
        of_x, of_d = given.chosen(wanted)
        both = _Inputs(scores, kernels, (*moved, "u"))

        def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
            x, _, d = both.named(tensors)
            at, u = weights(scores, block, x), d.pop("u")
            found = _in_order(second(at, u, d, None, of_x), of_x) if of_x else ()
            found += _in_order(adjoint(at, u, of_d), of_d) if of_d else ()
            return tuple(reduced(t, target) for t, target in zip(found, targets, strict=True))

        def kernel(kernels: Kernels, tensors: Tensors) -> Tensors:
            x, kept, d = both.named(tensors)
            u = d.pop("u")
            found = _in_order(kernels.second(x, kept, u, d, None, of_x), of_x) if of_x else ()
            return found + (_in_order(kernels.adjoint(x, kept, u, of_d), of_d) if of_d else ())

        # The gradient in x is the tangent of the adjoint along dx, with dU = 0; that in dx is the adjoint.
        names = (*of_x, *of_d)
        outputs = tuple((PARTS[name], s) for name, s in zip(names, _chosen(shapes, wanted), strict=True))
        return BlockMap(scores.grid, compute, both.parts, outputs, kernel=both.run_by(kernel, names))

    def kernel(kernels: Kernels, tensors: Tensors) -> Tensors:
        return (kernels.tangent(*given.named(tensors)),)

    return BlockMap(
        scores.grid,
        compute,
        given.parts,
        (("queries", shape),),
        closed_reverse=reverse,
        kernel=given.run_by(kernel),
    )


def _adjoint_map(scores: Scores, which: Mapping[str, Shape], kernels: Kernels | None) -> BlockMap:
    """Return the reverse-mode derivative of attention as a :class:`BlockMap`, a sum over blocks of query
    rows.

    It maps the tensors x and a cotangent U of the output to the cotangents of the tensors named in ``which``.
    """
    given = _Inputs(scores, kernels, ("u",))

    def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
        x, _, d = given.named(tensors)
        found = adjoint(weights(scores, block, x), d["u"], tuple(which))
        return tuple(reduced(found[name], target) for name, target in zip(which, targets, strict=True))

    def kernel(kernels: Kernels, tensors: Tensors) -> Tensors:
        x, kept, d = given.named(tensors)
        return _in_order(kernels.adjoint(x, kept, d["u"], tuple(which)), tuple(which))

    def forward(moved: Flags, shapes: Shapes) -> BlockMap:
        """Return the forward-mode derivative of the reverse-mode derivative of attention, as a
        :class:`BlockMap`.

        It maps x, U and their tangents dx and dU to the tangents of the cotangents.
        """
        of_x, of_u = given.chosen(moved)
        tangents = (*of_x, *(f"d{name}" for name in of_u))
        both = _Inputs(scores, kernels, ("u", *tangents))

        def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
            x, _, d = both.named(tensors)
            u, du = d.pop("u"), d.pop("du", None)
            found = second(weights(scores, block, x), u, d, du, tuple(which))
            return tuple(reduced(found[name], target) for name, target in zip(which, targets, strict=True))

        def kernel(kernels: Kernels, tensors: Tensors) -> Tensors:
            x, kept, d = both.named(tensors)
            u, du = d.pop("u"), d.pop("du", None)
            return _in_order(kernels.second(x, kept, u, d, du, tuple(which)), tuple(which))

        outputs = tuple((PARTS[name], s) for name, s in zip(which, shapes, strict=True))
        return BlockMap(scores.grid, compute, both.parts, outputs, kernel=both.run_by(kernel, tuple(which)))

    def reverse(wanted: Flags, there: Flags, shapes: Shapes) -> BlockMap:
        """Return the reverse-mode derivative of the reverse-mode derivative of attention, as a
        :class:`BlockMap`.

        The BlockMap takes the tensors x of attention, the output's cotangent U, and a tensor W for each
        cotangent that the adjoint returns. Its results are the gradients of ⟨W, cotangents⟩ in x and in U.

        ⟨W, cotangents⟩ is ⟨U, dO⟩ for the tangents dx = W, so the gradients are those of the tangent map.
        """
        of_x, of_u = given.chosen(wanted)
        both = _Inputs(scores, kernels, ("u", *_chosen(tuple(which), there)))

        def compute(block: Block, tensors: Tensors, targets: Shapes) -> Tensors:
            x, _, d = both.named(tensors)
            u = d.pop("u")
            at = weights(scores, block, x)
            found = _in_order(second(at, u, d, None, of_x), of_x) if of_x else ()
            found += (tangent(at, d),) if of_u else ()
            return tuple(reduced(t, target) for t, target in zip(found, targets, strict=True))

        def kernel(kernels: Kernels, tensors: Tensors) -> Tensors:
            x, kept, d = both.named(tensors)
            u = d.pop("u")
            found = _in_order(kernels.second(x, kept, u, d, None, of_x), of_x) if of_x else ()
            return found + ((kernels.tangent(x, kept, d),) if of_u else ())

        # Likewise the gradient in x is the tangent of the adjoint along W, and that in U is dO along W.
        outputs = tuple(zip(_chosen(given.parts, wanted), _chosen(shapes, wanted), strict=True))
        return BlockMap(scores.grid, compute, both.parts, outputs, kernel=both.run_by(kernel, of_x))

    outputs = tuple((PARTS[name], shape) for name, shape in which.items())
    return BlockMap(
        scores.grid,
        compute,
        given.parts,
        outputs,
        forward,
        reverse,
        kernel=given.run_by(kernel, tuple(which)),
    )


@dataclass(frozen=True)
class _Inputs:
    """The names of the tensors that a derivative of attention takes, and how each of them is cut into blocks
    of query rows.

    They are the tensors x of attention, then tensors that a Triton kernel kept, then tangents or cotangents.

    ``more`` names the further tensors: a tangent has the name of its tensor, ``u`` is the cotangent of the
    output and ``du`` the tangent of ``u``.
    """

    scores: Scores
    kernels: Kernels | None
    more: Names

    @property
    def kept(self) -> Names:
        return () if self.kernels is None else KEPT

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return for each input of a derivative of attention whether it has one row per query, one row per
        key, or the axes of the scores.
        """
        names = (*self.scores.names, *self.kept, *self.more)
        return tuple(PARTS.get(name, "queries") for name in names)

    def named(self, tensors: Tensors) -> tuple[dict[str, Tensor], Kept, dict[str, Tensor]]:
        """Divide the inputs of a derivative of attention into arguments of attention, tensors saved by a
        Triton kernel, and tangents or cotangents.

        The first and the last are returned by name.
        """
        count, kept = len(self.scores.names), len(self.kept)
        x = dict(zip(self.scores.names, tensors[:count], strict=True))
        more = dict(zip(self.more, tensors[count + kept :], strict=True))
        return x, tensors[count : count + kept], more

    def chosen(self, flags: Flags) -> tuple[Names, Names]:
        """Return the names of the inputs for which ``flags`` is True, as two tuples.

        The first tuple has the names of arguments x of attention, the second the names of tangents and
        cotangents (``more``).
        """
        count = len(self.scores.names)
        more = flags[count + len(self.kept) :]
        return _chosen(self.scores.names, flags[:count]), _chosen(self.more, more)

    def run_by(
        self, kernel: Callable[[Kernels, Tensors], Tensors], results: Names = ()
    ) -> Callable[[Tensors], Tensors] | None:
        """Return the function ``kernel``, which runs a Triton kernel, as a function of the tensors only.
        Return None if no Triton kernel can compute this derivative.

        The result is None without Triton kernels, and for tangents or cotangents of a mask or bias.
        """
        if self.kernels is None or {"mask", "bias"} & {*self.more, *results}:
            return None
        return partial(kernel, self.kernels)


def _chosen(items: Iterable[_Item], flags: Flags) -> tuple[_Item, ...]:
    return tuple(item for item, flag in zip(items, flags, strict=True) if flag)


def _in_order(found: Mapping[str, Tensor], names: Names) -> Tensors:
    return tuple(found[name] for name in names)
