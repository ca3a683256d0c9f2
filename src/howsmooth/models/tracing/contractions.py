"""Products of two tensors (``@``, ``bmm``, ``baddbmm``, ``einsum``), written with a label for each axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from howsmooth.models.tracing.axis_tracking import Axis, Factor, Operand
from howsmooth.models.tracing.score_provenance import Scores

__all__ = ["PRODUCTS", "Contraction", "Labelled", "contraction_of", "product_scores"]

_PLAIN = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
_PLAIN |= {torch.bmm, Tensor.bmm, torch.mm, Tensor.mm}
_IN_PLACE = {Tensor.baddbmm_, Tensor.addmm_}
_WITH_BIAS = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm, *_IN_PLACE}
PRODUCTS = frozenset({*_PLAIN, *_WITH_BIAS, torch.einsum})
_ROLES = {"batch1": "left", "mat1": "left", "batch2": "right", "mat2": "right", "other": "right"}

Labels = tuple[Any, ...]  # a label for each axis, as in ``einsum``


class Labelled(NamedTuple):
    """A factor of a product."""

    tensor: Tensor
    labels: Labels

    def operand(self, axes: Mapping[Any, Axis]) -> Operand:
        """Return the tensor with its axes, given those of the labels; it may be shorter than they are."""
        sizes = zip(self.labels, self.tensor.shape, strict=True)
        return Operand(self.tensor, tuple(axes[label] if size > 1 else () for label, size in sizes))


@dataclass(frozen=True, slots=True)
class Contraction:
    """A product ``beta * bias + alpha * left · right`` of two tensors. A label of both that is missing in the
    result is summed over.
    """

    left: Labelled
    right: Labelled
    labels: Labels  # of the result
    bias: Tensor | None = None
    beta: float = 1.0
    alpha: float = 1.0

    def axes(self, known: Mapping[Any, Axis]) -> dict[Any, Axis]:
        """Return the axis of each label; those that are not known have a factor of their own."""
        axes = dict(known)
        for tensor, labels in (self.left, self.right):
            for label, size in zip(labels, tensor.shape, strict=True):
                axes[label] = axes.get(label) or ((Factor(size),) if size > 1 else ())
        return axes


def contraction_of(func: Any, args: Any, kwargs: Any) -> Contraction | None:
    """Describe the product of two tensors that a torch function computes, or return None if it
    computes none.
    """
    if func is torch.einsum:
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        return _einsum(args[0], *operands) if isinstance(args[0], str) and len(operands) == 2 else None
    biased = func in _WITH_BIAS
    names = ("input", "left", "right") if biased else ("left", "right")
    given = dict(zip(names, args, strict=False))
    given |= {_ROLES.get(name, name): value for name, value in kwargs.items()}
    bias = given.get("input") if biased else None
    left, right = given.get("left", given.get("input")), given.get("right")
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or min(left.ndim, right.ndim) < 2:
        return None
    if func in _IN_PLACE and isinstance(bias, Tensor):
        bias = bias.clone()  # the function overwrites it with the result
    rank = max(left.ndim, right.ndim)
    lead = tuple(range(rank - 2))
    return Contraction(
        Labelled(left, (*lead[rank - left.ndim :], "m", "c")),
        Labelled(right, (*lead[rank - right.ndim :], "c", "n")),
        (*lead, "m", "n"),
        bias,
        float(given.get("beta", 1.0)),
        float(given.get("alpha", 1.0)),
    )


def _einsum(equation: str, left: Tensor, right: Tensor) -> Contraction | None:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    if not arrow:
        once = sorted(c for c in set(inputs) if c.isalpha() and inputs.count(c) == 1)
        output = "".join(("..." if "..." in inputs else "", *once))
    # The number of axes that the dots of each term stand for.
    hidden = [
        tensor.ndim - len(term.replace("...", "")) for term, tensor in zip(terms, (left, right), strict=True)
    ]
    longest = max(0, *hidden)

    def labels(term: str, count: int) -> Labels:
        before, dots, after = term.partition("...")
        return (*before, *(range(longest - count, longest) if dots else ()), *after)

    one, other, result = labels(terms[0], hidden[0]), labels(terms[1], hidden[1]), labels(output, longest)
    if any(len(set(term)) != len(term) for term in (one, other, result)):
        return None
    # A label of one operand only that is missing in the result would be a sum before the product.
    if (set(one) ^ set(other)) - set(result) or (len(one), len(other)) != (left.ndim, right.ndim):
        return None
    return Contraction(Labelled(left, one), Labelled(right, other), result)


def product_scores(c: Contraction) -> Scores | None:
    """Describe a product of two tensors as attention scores, or return None if the product cannot be
    attention scores, as in a linear layer.
    """
    left, right = c.left.tensor, c.right.tensor
    if any(isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter) for t in (left, right)):
        return None  # the product with a parameter or a view of one is a linear layer
    # Scores are a product with exactly one label that is summed over.
    summed = [label for label in c.left.labels if label in c.right.labels and label not in c.labels]
    if len(summed) != 1 or not left.is_floating_point() or 0 in (*left.shape, *right.shape):
        return None
    axes = c.axes({})
    scores = Scores(
        axes=tuple(axes[label] for label in c.labels),
        left=c.left.operand(axes),
        right=c.right.operand(axes),
        contracted=axes[summed[0]],
        eps=max(torch.finfo(t.dtype).eps for t in (left, right)),
        scale=c.alpha,
    )
    return scores if c.bias is None or c.beta == 0 else scores.plus(c.bias, c.beta)
