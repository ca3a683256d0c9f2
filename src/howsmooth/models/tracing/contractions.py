"""Products of two tensors (``@``, ``bmm``, ``baddbmm``, ``einsum``), written with a label for each axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.models.tracing.axis_tracking import Axis, Factor
from howsmooth.models.tracing.score_provenance import Opaque, Operand, Scores

__all__ = ["PRODUCTS", "Contraction", "contraction_of", "product_scores", "two"]

_PLAIN = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
_PLAIN |= {torch.bmm, Tensor.bmm, torch.mm, Tensor.mm}
_WITH_BIAS = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm, Tensor.baddbmm_, Tensor.addmm_}
PRODUCTS = frozenset({*_PLAIN, *_WITH_BIAS, torch.einsum})
_ROLES = {"batch1": "left", "mat1": "left", "batch2": "right", "mat2": "right"}


@dataclass(frozen=True, slots=True)
class Contraction:
    """A product ``beta * bias + alpha * left · right`` of two tensors, with a label for each axis as in
    ``einsum``.

    A label of both tensors that is missing in the result is summed over.
    """

    left: Tensor
    right: Tensor
    left_labels: tuple[Any, ...]
    right_labels: tuple[Any, ...]
    labels: tuple[Any, ...]  # of the result
    bias: Tensor | None = None
    beta: float = 1.0
    alpha: float = 1.0


def two(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the two tensor arguments of a binary torch function such as ``mul``."""
    rest = [*args[1:], *(kwargs[name] for name in ("other", "mat2") if name in kwargs)]
    return (args[0] if args else kwargs.get("input")), (rest[0] if rest else None)


def contraction_of(func: Any, args: Any, kwargs: Any) -> Contraction | None:
    """Describe the product of two tensors that a torch function computes, or return None if it
    computes none.
    """
    if func is torch.einsum:
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        if not isinstance(args[0], str) or len(operands) != 2:
            return None
        return _einsum(args[0], *operands)
    bias, beta, alpha = None, 1.0, 1.0
    if func in _WITH_BIAS:
        given = dict(zip(("input", "left", "right"), args, strict=False))
        given |= {_ROLES.get(name, name): value for name, value in kwargs.items()}
        bias, left, right = given.get("input"), given.get("left"), given.get("right")
        if func in (Tensor.baddbmm_, Tensor.addmm_) and isinstance(bias, Tensor):
            bias = bias.clone()  # the function overwrites it with the result
        beta, alpha = float(given.get("beta", 1.0)), float(given.get("alpha", 1.0))
    else:
        left, right = two(args, kwargs)
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or min(left.ndim, right.ndim) < 2:
        return None
    rank = max(left.ndim, right.ndim)
    lead = tuple(range(rank - 2))
    return Contraction(
        left, right,
        (*lead[rank - left.ndim :], "m", "c"), (*lead[rank - right.ndim :], "c", "n"), (*lead, "m", "n"),
        bias, beta, alpha,
    )  # fmt: skip


def _einsum(equation: str, left: Tensor, right: Tensor) -> Contraction | None:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    if not arrow:
        letters = [c for c in inputs if c.isalpha()]
        output = ("..." if "..." in inputs else "") + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    # The number of axes that the dots of each term stand for.
    hidden = [
        tensor.ndim - len(term.replace("...", "")) for term, tensor in zip(terms, (left, right), strict=True)
    ]
    longest = max([0] + [count for term, count in zip(terms, hidden, strict=True) if "..." in term])

    def labels(term: str, count: int) -> tuple[Any, ...]:
        before, dots, after = term.partition("...")
        return (*before, *(range(longest - count, longest) if dots else ()), *after)

    written = labels(terms[0], hidden[0]), labels(terms[1], hidden[1]), labels(output, longest)
    if any(len(set(term)) != len(term) for term in written) or any(
        len(term) != tensor.ndim for term, tensor in zip(written, (left, right), strict=False)
    ):
        return None
    # A label of one operand only that is missing in the result would be a sum before the product.
    alone = set(written[0]) ^ set(written[1])
    return None if alone - set(written[2]) else Contraction(left, right, *written)


def product_scores(c: Contraction) -> Scores | Opaque | None:
    """Describe a product of two tensors as attention scores, or return None if the product cannot be
    attention scores.

    A product with a parameter, for example, is a linear layer.
    """
    if _is_parameter(c.left) or _is_parameter(c.right):
        return None
    # Scores are a product with exactly one label that is summed over.
    shared = [label for label in c.left_labels if label in c.right_labels and label not in c.labels]
    if len(shared) != 1 or not c.left.is_floating_point():
        return None
    contracted = Factor(c.left.shape[c.left_labels.index(shared[0])])
    sizes: dict[Any, int] = {}
    for labels, tensor in ((c.left_labels, c.left), (c.right_labels, c.right)):
        for label, size in zip(labels, tensor.shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
            if size == 0:
                return None
    axes: dict[Any, Axis] = {label: (Factor(sizes[label]),) if sizes[label] > 1 else () for label in c.labels}
    axes[shared[0]] = (contracted,)

    def operand(labels: tuple[Any, ...], tensor: Tensor) -> Operand:
        own = zip(labels, tensor.shape, strict=True)
        return Operand(
            tensor, tuple(axes[label] if size > 1 or label == shared[0] else () for label, size in own)
        )

    scores = Scores(
        axes=tuple(axes[label] for label in c.labels),
        left=operand(c.left_labels, c.left),
        right=operand(c.right_labels, c.right),
        contracted=contracted,
        eps=max(torch.finfo(t.dtype).eps for t in (c.left, c.right)),
        scale=c.alpha,
    )
    return scores if c.bias is None or c.beta == 0 else scores.plus(c.bias, c.beta)


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one, so that a product with it is a
    linear layer.
    """
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
