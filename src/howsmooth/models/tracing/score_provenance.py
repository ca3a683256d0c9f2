"""The origin of a tensor of attention scores: the product of queries and keys, and all later operations.

:class:`Scores` describes a tensor between ``q @ k.T`` and the softmax. Each operation of the attention code
(a scaling, mask, bias, cap or sink) gives another :class:`Scores`. :func:`read_operands` turns the last of
them into queries, keys, scale and mask, with axes ordered as in the product with the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from howsmooth.models.tracing.axis_tracking import Axes, Axis, Factor, arrange, broadcast, leaves

__all__ = [
    "SEVERAL_PRODUCTS",
    "Opaque",
    "Operand",
    "Scores",
    "SoftmaxOperands",
    "Unreadable",
    "all_true",
    "read_operands",
]

_CUT = "its scores are reshaped across their axes"
SEVERAL_PRODUCTS = "its scores are a sum of several products of the tokens"


class Unreadable(Exception):  # noqa: N818
    """The exception for a tensor that was not computed like the scores of a softmax attention; its message
    says why.
    """


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor from which scores were computed, with a description of its axes."""

    tensor: Tensor
    axes: Axes


@dataclass(frozen=True, slots=True)
class _Bias:
    """A tensor that was multiplied by a number and added to the scores."""

    operand: Operand
    coefficient: float


@dataclass(frozen=True, slots=True)
class _Factor:
    """A tensor by which the scores were multiplied, or divided if ``inverse`` is True."""

    operand: Operand
    inverse: bool


@dataclass(frozen=True, slots=True)
class _Sinks:
    """The scores of attention sinks, a column that is appended before the softmax and removed after it."""

    operand: Operand
    joined: Axis  # the axis of the keys with the column
    keys: Axis  # the axis of the keys without it
    first: bool  # the column comes before the keys


@dataclass(frozen=True, slots=True)
class Opaque:
    """A marker for a tensor that was computed from scores by an operation that does not occur in softmax
    attention.
    """

    reason: str  # one phrase
    probabilities: bool = False  # whether it has been through a softmax
    mixed: bool = False  # whether its numbers have been mixed or changed, not only moved


@dataclass(frozen=True, slots=True)
class Scores:
    """A record of how a tensor of attention scores was computed from queries and keys.

    The tensor is ``cap(scale · left · rightᵀ · factors) + biases``, with hidden entries.

    ``cap`` is ``cap · tanh(· )``. Each method returns the description of the tensor after one more operation,
    or :class:`Opaque` if softmax attention has no such operation.
    """

    axes: Axes
    left: Operand
    right: Operand
    contracted: Factor
    eps: float  # machine epsilon of the coarsest dtype that the scores were converted to
    scale: float = 1.0
    factors: tuple[_Factor, ...] = ()
    cap: float | None = None
    biases: tuple[_Bias, ...] = ()
    hidden: tuple[Operand, ...] = ()  # boolean tensors, True where the key is hidden
    sinks: _Sinks | None = None
    approximate: bool = False  # an operation was ignored that should change nothing; every row is checked

    def moved(self, axes: Axes | None) -> Scores | Opaque:
        """Return the record of attention scores after a reshape or permutation to the given axes.

        The result is Opaque if the axes are unknown.
        """
        return Opaque(_CUT) if axes is None else replace(self, axes=axes)

    def rounded(self, dtype: torch.dtype) -> Scores:
        """Return the record of attention scores after a conversion to another dtype."""
        return replace(self, eps=max(self.eps, torch.finfo(dtype).eps))

    def unchanged(self) -> Scores:
        """Return the record of attention scores, marked as approximate, after an operation that should not
        change them.

        Such an operation is assumed, but not known, to leave the scores as they are.
        """
        return replace(self, approximate=True)

    def times(self, number: float) -> Scores | Opaque:
        """Return the record of attention scores after a multiplication by a number."""
        if self.sinks is not None:
            return Opaque("its scores are scaled together with their sinks")
        biases = tuple(replace(bias, coefficient=bias.coefficient * number) for bias in self.biases)
        if self.cap is None:
            # number * (scale * product + biases); with a cap, the number multiplies the cap instead
            return replace(self, scale=self.scale * number, biases=biases)
        if number <= 0:
            return Opaque("its capped scores are multiplied by a number that is not positive")
        return replace(self, cap=self.cap * number, biases=biases)

    def times_tensor(self, tensor: Tensor, *, inverse: bool) -> Scores | Opaque:
        """Return the record of attention scores after a multiplication by a tensor, or a division if
        ``inverse`` is True.
        """
        if self.cap is not None or self.sinks is not None:
            return Opaque("its scores are multiplied by a tensor after a cap or sinks")
        axes, own = broadcast(self.axes, tensor.shape)
        # The product distributes over the biases: each is multiplied now, the factors are applied later.
        biases = []
        for bias in self.biases:
            aligned = arrange(bias.operand.tensor, bias.operand.axes, axes)
            if aligned is None:
                return Opaque(_CUT)
            product = aligned / tensor if inverse else aligned * tensor
            biases.append(_Bias(Operand(product, broadcast(axes, product.shape)[1]), bias.coefficient))
        factors = (*self.factors, _Factor(Operand(tensor, own), inverse))
        return replace(self, axes=axes, biases=tuple(biases), factors=factors)

    def plus(self, tensor: Tensor, coefficient: float = 1.0) -> Scores | Opaque:
        """Return the record of attention scores after the addition of ``coefficient`` times a tensor."""
        axes, own = broadcast(self.axes, tensor.shape)
        bias = _Bias(Operand(tensor, own), coefficient)
        if self.sinks is not None:
            if _shares(bias.operand, self.sinks.joined):
                return Opaque("its scores and sinks are added to together")
            return self  # it adds one number to all scores of a row and to its sink: the softmax is the same
        return replace(self, axes=axes, biases=(*self.biases, bias))

    def capped(self) -> Scores | Opaque:
        """Return the record of attention scores after a hyperbolic tangent, which is a soft cap."""
        if self.biases or self.hidden or self.cap is not None or self.sinks is not None:
            return Opaque("its scores are capped after a bias or mask")
        return replace(self, cap=1.0)

    def hiding(self, pairs: Tensor) -> Scores | Opaque:
        """Return the record of attention scores after masking, where True in ``pairs`` marks the hidden
        entries.
        """
        if self.sinks is not None:
            return Opaque("its scores and sinks are masked together")
        axes, own = broadcast(self.axes, pairs.shape)
        return replace(self, axes=axes, hidden=(*self.hidden, Operand(pairs, own)))

    def joined(self, column: Tensor, dim: int, *, first: bool) -> Scores | Opaque:
        """Return the record of attention scores after a column of attention sinks was appended."""
        if column.ndim != len(self.axes) or column.shape[dim] != 1 or self.sinks is not None:
            return Opaque("its scores are joined to other scores")
        keys = self.axes[dim]
        joined = (Factor(math.prod(factor.size for factor in keys) + 1),)
        _, own = broadcast(self.axes, column.shape)
        axes = (*self.axes[:dim], joined, *self.axes[dim + 1 :])
        return replace(self, axes=axes, sinks=_Sinks(Operand(column, own), joined, keys, first))


@dataclass(frozen=True, slots=True)
class SoftmaxOperands:
    """The queries, keys, scale, mask, soft cap and sinks of a softmax attention."""

    query: Tensor
    key: Tensor
    scale: float
    mask: Tensor | None
    softcap: float | None
    sinks: Tensor | None


def all_true(condition: Tensor) -> bool:
    """Return True if all entries of a boolean tensor are True.

    Inside ``torch.vmap``, which hides the values, the answer is always True.
    """
    try:
        return bool(condition.all())
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        return True


def read_operands(scores: Scores, lead: Sequence[Axis], rows: Axis, keys: Axis) -> SoftmaxOperands:
    """Return the queries, keys, mask and other operands of a softmax attention.

    Their axes are in the order (*lead, rows, keys).

    Parameters
    ----------
    scores
        The description of the argument of the softmax.
    lead
        The leading axes; the last of them is the axis of the heads.
    rows
        The axis of the queries.
    keys
        The axis of the keys, over which the softmax runs.

    Raises
    ------
    Unreadable
        If the scores do not come from a softmax attention.

    """
    left, right = scores.left, scores.right
    # The code may compute k @ q.T: the operand that varies along the rows holds the queries.
    if _shares(left, keys) or _shares(right, rows):
        left, right = right, left
    if _shares(left, keys) or _shares(right, rows):
        raise Unreadable("its keys differ from query to query")
    query = _arranged(left, (*lead, rows, (scores.contracted,)))
    key = _arranged(right, (*lead, keys, (scores.contracted,)))
    # A factor that is constant along the keys belongs to the queries, one constant along the rows to the
    # keys.
    for factor in scores.factors:
        if not _shares(factor.operand, keys):
            query = _scaled(query, _arranged(factor.operand, (*lead, rows, ())), factor.inverse)
        elif not _shares(factor.operand, rows):
            key = _scaled(key, _arranged(factor.operand, (*lead, keys, ())), factor.inverse)
        elif not _zero_or_one(factor.operand.tensor):
            raise Unreadable("its scores are multiplied by numbers of their own for every pair of tokens")
    # The cap is stored as cap * tanh(scale * ...), a SoftmaxCall has softcap * tanh(scale * ... / softcap).
    scale = scores.scale if scores.cap is None else scores.scale * scores.cap
    return SoftmaxOperands(
        query, key, scale, _mask(scores, lead, rows, keys), scores.cap, _sinks(scores, lead, rows)
    )


def _arranged(operand: Operand, target: Sequence[Axis]) -> Tensor:
    tensor = arrange(operand.tensor, operand.axes, target)
    if tensor is None:
        raise Unreadable(_CUT)
    return tensor


def _shares(operand: Operand, axis: Axis) -> bool:
    own = {id(factor) for part in operand.axes for factor in leaves(part)}
    return any(id(factor) in own for factor in leaves(axis))


def _scaled(tensor: Tensor, factor: Tensor, inverse: bool) -> Tensor:
    factor = factor.to(tensor.dtype)
    return tensor / factor if inverse else tensor * factor


def _zero_or_one(tensor: Tensor) -> bool:
    return all_true((tensor == 0) | (tensor == 1))


def _mask(scores: Scores, lead: Sequence[Axis], rows: Axis, keys: Axis) -> Tensor | None:
    """Return the mask of a softmax attention, which is boolean, or additive if the scores have biases.

    Hidden entries are -inf in an additive mask.
    """
    target = (*lead, rows, keys)
    total: Tensor | None = None
    for bias in scores.biases:
        # A bias that is the same for all keys of a row does not change the softmax.
        if scores.sinks is None and not _shares(bias.operand, keys):
            continue
        tensor = _arranged(bias.operand, target)
        # Masks are added in the dtype of the scores, as the model adds them.
        tensor = tensor.to(torch.promote_types(tensor.dtype, scores.left.tensor.dtype))
        tensor = tensor if bias.coefficient == 1 else bias.coefficient * tensor
        total = tensor if total is None else total + tensor
    hidden: Tensor | None = None
    for operand in scores.hidden:
        pairs = _arranged(operand, target)
        hidden = pairs if hidden is None else hidden | pairs
    if hidden is None or total is None:
        return total if hidden is None else ~hidden
    return torch.where(hidden, torch.full((), -math.inf, dtype=total.dtype, device=total.device), total)


def _sinks(scores: Scores, lead: Sequence[Axis], rows: Axis) -> Tensor | None:
    """Return the scores (heads,) of the attention sinks, or None if there are none."""
    if scores.sinks is None:
        return None
    column = _arranged(scores.sinks.operand, (*lead, rows, ()))
    heads = column[(0,) * (len(lead) - 1)][:, 0, 0]
    if not all_true(column == heads[:, None, None]):
        raise Unreadable("its sinks differ from query to query")
    return heads.expand(math.prod(factor.size for factor in lead[-1]))
