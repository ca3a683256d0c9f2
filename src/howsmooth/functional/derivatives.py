"""Attention and its first and second derivatives as sums over blocks of query rows (:class:`BlockMap`).

Such a map takes the tensors of :class:`Scores` by name, then what a kernel for the value has kept, then
further tensors by name: a tangent has the name of its tensor, ``u`` is a cotangent U of the output, and
``du`` a tangent of ``u``. Its results are of these kinds, with the name of a tensor for the last two:

- ``value``: the output O;
- ``tangent``: the tangent of O;
- ``adjoint``: the cotangent of a tensor;
- ``second``: the tangent of that cotangent or, without ``du``, the gradient of ⟨U, tangent⟩ in the tensor.

Each derivative of such a map is a map of the same sort, up to the second. PyTorch differentiates those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor

from howsmooth.functional.blockwise_autograd import BlockMap, Flags, Part, ScoreBlock, Shape, reduced
from howsmooth.functional.fused_attention import KEPT, KernelRows
from howsmooth.functional.scores import PARTS, Scores, rows_of
from howsmooth.jacobian.softmax_tile import WholeRows

__all__ = ["attention_map"]

Tensors = tuple[Tensor, ...]
Names = tuple[str, ...]
Results = tuple[tuple[str, str], ...]
_Item = TypeVar("_Item")


def attention_map(scores: Scores, shape: Shape, *, kernels: bool = False) -> BlockMap:
    """Return attention as a map of the tensors in ``scores.names`` to the output, which has shape ``shape``.

    If ``kernels`` is True, Triton kernels compute the map and its first two derivatives, except those in
    masks and biases. All else is computed block by block.
    """
    return _map(scores, kernels, (), (("value", ""),), (("queries", shape),))


def _map(
    scores: Scores, kernels: bool, more: Names, results: Results, outputs: tuple[tuple[Part, Shape], ...]
) -> BlockMap:
    first = len(scores.names)
    value = results == (("value", ""),)
    tangent = results == (("tangent", ""),) and "u" not in more
    adjoint = more == ("u",)  # Results of a second derivative may be adjoints, too, but of more tensors.
    kept = KEPT if kernels else ()
    names = (*scores.names, *(() if value else kept), *more)
    parts = tuple(PARTS.get(name, "queries") for name in names)

    def evaluated(at: WholeRows | KernelRows, tensors: Tensors) -> list[Tensor]:
        d = dict(zip(more, tensors[len(names) - len(more) :], strict=True))
        u, du = d.pop("u", None), d.pop("du", None)
        found: dict[tuple[str, str], Tensor] = {}
        for kind in dict.fromkeys(kind for kind, _ in results):
            which = tuple(name for of, name in results if of == kind)
            if kind == "value":
                found[kind, ""] = at.value()
            elif kind == "tangent":
                found[kind, ""] = at.tangent(d)
            else:
                assert u is not None
                some = at.adjoint(u, which) if kind == "adjoint" else at.second(u, d, du, which)
                found |= {(kind, name): t for name, t in some.items()}
        return [found[result] for result in results]

    def compute(block: ScoreBlock, tensors: Tensors, targets: tuple[Shape, ...]) -> Tensors:
        at = rows_of(scores, block, dict(zip(scores.names, tensors, strict=False)))
        return tuple(reduced(t, target) for t, target in zip(evaluated(at, tensors), targets, strict=True))

    def kernel(tensors: Tensors) -> Tensors:
        x = dict(zip(scores.names, tensors, strict=False))
        if value:
            at = KernelRows.of_value(scores, x)
            return (at.value(), *at.kept)
        at = KernelRows(scores, x, tensors[first : first + len(kept)])
        return tuple(evaluated(at, tensors))

    def forward(moved: Flags, shapes: tuple[Shape, ...]) -> BlockMap:
        of_x, of_more = chosen(moved)
        same = tuple((part, shape) for (part, _), shape in zip(outputs, shapes, strict=True))
        if value:
            return _map(scores, kernels, of_x, (("tangent", ""),), same)
        second = tuple(("second", name) for _, name in results)
        return _map(scores, kernels, ("u", *of_x, *(f"d{name}" for name in of_more)), second, same)

    def reverse(wanted: Flags, given: Flags, shapes: tuple[Shape, ...]) -> BlockMap:
        of_x, of_more = chosen(wanted)
        if value:
            inputs: Names = ("u",)
            found: Results = tuple(("adjoint", name) for name in of_x)
        elif tangent:
            # The gradient in x is the tangent of the adjoint along dx, with dU = 0; that in dx the adjoint.
            inputs = (*more, "u")
            found = tuple(("second", name) for name in of_x) + tuple(("adjoint", name) for name in of_more)
        else:
            # ⟨W, cotangents⟩ is ⟨U, dO⟩ for the tangents dx = W: its gradients are those of the tangent.
            inputs = ("u", *(name for _, name in _chosen(results, given)))
            found = tuple(("second", name) for name in of_x) + tuple(("tangent", "") for _ in of_more)
        sought = tuple(zip(_chosen(parts, wanted), _chosen(shapes, wanted), strict=True))
        return _map(scores, kernels, inputs, found, sought)

    def chosen(flags: Flags) -> tuple[Names, Names]:
        """Return the names that ``flags`` marks: first those in ``scores.names``, then those in ``more``."""
        return _chosen(names[:first], flags[:first]), _chosen(more, flags[len(names) - len(more) :])

    # There are no kernels for tangents and cotangents of a mask or bias.
    fused = kernels and not {"mask", "bias"} & {*more, *(name for _, name in results)}
    return BlockMap(
        scores.grid,
        compute,
        parts,
        outputs,
        forward if value or adjoint else None,
        reverse if value or tangent or adjoint else None,
        kernel=kernel if fused else None,
        kept=len(kept) if value else 0,
    )


def _chosen(items: Iterable[_Item], flags: Flags) -> tuple[_Item, ...]:
    return tuple(item for item, flag in zip(items, flags, strict=True) if flag)
