"""Products of two tensors (``@``, ``bmm``, ``baddbmm``, ``einsum``), written with a label for each axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.models.tracing.axis_tracking import Axes, Factor, Operand
from howsmooth.models.tracing.score_provenance import ScoreRecord

__all__ = ["PRODUCTS", "Contraction", "contraction_of", "product_scores"]

_PLAIN = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
_PLAIN |= {torch.bmm, Tensor.bmm, torch.mm, Tensor.mm}
_IN_PLACE = {Tensor.baddbmm_, Tensor.addmm_}
_WITH_BIAS = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm, *_IN_PLACE}
PRODUCTS = frozenset({*_PLAIN, *_WITH_BIAS, torch.einsum})
_ROLES = {"batch1": "left", "mat1": "left", "batch2": "right", "mat2": "right", "other": "right"}

Labels = tuple[Any, ...]  # a label for each axis, as in ``einsum``


@dataclass(frozen=True, slots=True)
class Contraction:
    """A product ``beta * bias + alpha * left · right`` of two tensors. It sums over each axis that both
    tensors have and the result lacks.
    """

    left: Operand
    right: Operand
    axes: Axes  # of the result
    bias: Tensor | None = None
    beta: float = 1.0
    alpha: float = 1.0


def _labelled(left: Tensor, right: Tensor, terms: tuple[Labels, Labels, Labels], *rest: Any) -> Contraction:
    """Return the product of two tensors. ``terms`` labels the axes of both and of the result."""
    sizes: dict[Any, int] = {}
    for labels, tensor in zip(terms, (left, right), strict=False):
        for label, size in zip(labels, tensor.shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    axes = {label: (Factor(size),) for label, size in sizes.items()}
    one, other, result = (tuple(axes[label] for label in term) for term in terms)
    return Contraction(Operand(left, one), Operand(right, other), result, *rest)


def contraction_of(func: Any, args: Any, kwargs: Any) -> Contraction | None:
    """Describe the product of two tensors that a torch function computes, or return None if there is none."""
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
    labels = (*lead[rank - left.ndim :], "m", "c"), (*lead[rank - right.ndim :], "c", "n"), (*lead, "m", "n")
    return _labelled(left, right, labels, bias, float(given.get("beta", 1.0)), float(given.get("alpha", 1.0)))


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
    return _labelled(left, right, (one, other, result))


def product_scores(c: Contraction) -> ScoreRecord | None:
    """Describe a product as attention scores. Return None for others, such as that of a linear layer."""
    left, right = c.left.tensor, c.right.tensor
    if any(isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter) for t in (left, right)):
        return None  # the product with a parameter or a view of one is a linear layer
    # Scores are a product with exactly one axis that is summed over.
    summed = [axis for axis in c.left.axes if axis in c.right.axes and axis not in c.axes]
    if len(summed) != 1 or not left.is_floating_point() or 0 in (*left.shape, *right.shape):
        return None
    eps = max(torch.finfo(t.dtype).eps for t in (left, right))
    scores = ScoreRecord(c.axes, c.left, c.right, contracted=summed[0], eps=eps, scale=c.alpha)
    return scores if c.bias is None or c.beta == 0 else scores.plus(c.bias, c.beta)
