"""The origin of attention scores: the product of queries and keys, and all operations after it.

:class:`ScoreRecord` describes a tensor between ``q @ k.T`` and ``p @ v``. Each operation of the attention
code (a scaling, mask, bias, cap, sink or the softmax) gives another one. :func:`read_operands` turns the last
of them into queries, keys, scale and mask, with axes ordered as in the product with the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from howsmooth.models.tracing.axis_tracking import (
    Axes,
    Axis,
    Factor,
    Operand,
    Unreadable,
    broadcast,
    leaves,
    length,
)
from howsmooth.models.tracing.softmax_call import SoftmaxCall, all_true

__all__ = ["Opaque", "ScoreRecord", "read_operands"]


@dataclass(frozen=True, slots=True)
class Opaque:
    """Describes a tensor computed from attention scores by an operation foreign to softmax attention."""

    reason: str  # one phrase
    probabilities: bool = False  # whether it has been through a softmax
    mixed: bool = False  # whether its numbers have been mixed or changed, not only moved


@dataclass(frozen=True, slots=True)
class _Sinks:
    """The column of attention-sink scores, which is appended before the softmax and removed after it."""

    operand: Operand
    joined: Axis  # the axis of the keys with the column
    keys: Axis  # the axis of the keys without it
    first: bool  # the column comes before the keys


@dataclass(frozen=True, slots=True)
class ScoreRecord:
    """Describes how a tensor was computed from queries and keys. The tensor holds attention scores or, after
    the softmax, attention weights.

    The scores are ``cap · tanh(scale · left · rightᵀ · factors) + biases``, with hidden entries. Each method
    returns the record of the tensor after one more operation, and raises Unreadable if softmax attention has
    no such operation.
    """

    axes: Axes
    left: Operand
    right: Operand
    contracted: Axis
    eps: float  # machine epsilon of the coarsest dtype that the scores were converted to
    scale: float = 1.0
    factors: tuple[tuple[Operand, bool], ...] = ()  # True for a divisor
    cap: float | None = None
    biases: tuple[Operand, ...] = ()
    hidden: tuple[Operand, ...] = ()  # boolean tensors, True where the key is hidden
    sinks: _Sinks | None = None
    approximate: bool = False  # an operation was ignored that should change nothing; every row is checked
    keys: Axis | None = None  # of the softmax, without the column of the sinks; None before it

    @property
    def probabilities(self) -> bool:
        """True if the tensor holds attention weights."""
        return self.keys is not None

    def unreadable(self, what: str) -> Unreadable:
        """Return an error which says that softmax attention does not have the operation ``what``."""
        return Unreadable(f"its {'probabilities' if self.probabilities else 'scores'} {what}")

    def before_softmax(self, what: str) -> ScoreRecord:
        """Return this record if its tensor holds scores. Raise Unreadable if it holds attention weights."""
        if self.probabilities:
            raise self.unreadable(what)
        return self

    def rounded(self, dtype: torch.dtype) -> ScoreRecord:
        """Return a record of the same tensor after its conversion to another dtype."""
        return replace(self, eps=max(self.eps, torch.finfo(dtype).eps))

    def times(self, number: float) -> ScoreRecord:
        """Return a record of the scores multiplied by a number."""
        if self.sinks is not None:
            raise Unreadable("its scores are scaled together with their sinks")
        biases = tuple(Operand(bias.tensor * number, bias.axes) for bias in self.biases)
        if self.cap is None:
            # number * (scale * product + biases); with a cap, the number multiplies the cap instead
            return replace(self, scale=self.scale * number, biases=biases)
        if number <= 0:
            raise Unreadable("its capped scores are multiplied by a number that is not positive")
        return replace(self, cap=self.cap * number, biases=biases)

    def times_tensor(self, tensor: Tensor, *, inverse: bool) -> ScoreRecord:
        """Return a record of the scores multiplied by a tensor, or divided by it if ``inverse`` is set."""
        if self.cap is not None or self.sinks is not None:
            raise Unreadable("its scores are multiplied by a tensor after a cap or sinks")
        axes, factor = broadcast(self.axes, tensor)
        # The product distributes over the biases: each is multiplied now, the factors are applied later.
        aligned = (bias.arranged(axes) for bias in self.biases)
        products = (bias / tensor if inverse else bias * tensor for bias in aligned)
        biases = tuple(broadcast(axes, product)[1] for product in products)
        return replace(self, axes=axes, biases=biases, factors=(*self.factors, (factor, inverse)))

    def plus(self, tensor: Tensor, coefficient: float = 1.0) -> ScoreRecord:
        """Return a record of the scores plus ``coefficient`` times a tensor."""
        # Masks are added in the dtype of the scores, as the model adds them.
        tensor = tensor.to(torch.promote_types(tensor.dtype, self.left.tensor.dtype))
        axes, bias = broadcast(self.axes, tensor)
        if self.sinks is not None:
            if bias.shares(self.sinks.joined):
                raise Unreadable("its scores and sinks are added to together")
            return self  # it adds one number to all scores of a row and to its sink: the softmax is the same
        if coefficient != 1:
            bias = Operand(coefficient * tensor, bias.axes)
        return replace(self, axes=axes, biases=(*self.biases, bias))

    def capped(self) -> ScoreRecord:
        """Return a record of the hyperbolic tangent of the scores, which is a soft cap."""
        if self.biases or self.hidden or self.cap is not None or self.sinks is not None:
            raise Unreadable("its scores are capped after a bias or mask")
        return replace(self, cap=1.0)

    def hiding(self, pairs: Tensor) -> ScoreRecord:
        """Return a record of the masked scores. Entries that are True in ``pairs`` are hidden."""
        if self.sinks is not None:
            raise Unreadable("its scores and sinks are masked together")
        axes, hidden = broadcast(self.axes, pairs)
        return replace(self, axes=axes, hidden=(*self.hidden, hidden))

    def joined(self, column: Tensor, dim: int, *, first: bool) -> ScoreRecord:
        """Return a record of the scores joined with a column of attention-sink scores."""
        if column.ndim != len(self.axes) or column.shape[dim] != 1 or self.sinks is not None:
            raise Unreadable("its scores are joined to other scores")
        keys = self.axes[dim]
        joined = (Factor(length(keys) + 1),)
        sinks = _Sinks(broadcast(self.axes, column)[1], joined, keys, first)
        return replace(self, axes=(*self.axes[:dim], joined, *self.axes[dim + 1 :]), sinks=sinks)

    def softmax(self, dim: int, dtype: torch.dtype) -> ScoreRecord | Opaque:
        """Return a record of the attention weights: the softmax of the scores along the axis ``dim``."""
        keys = self.axes[dim]
        if self.sinks is not None:
            # The softmax must run over the axis that holds keys and sinks.
            if leaves(keys) != self.sinks.joined:
                return Opaque("its softmax does not run over its scores and sinks", probabilities=True)
            keys = self.sinks.keys
        return replace(self.rounded(dtype), keys=keys)

    def cut(self, tensor: Tensor, result: Tensor) -> ScoreRecord:
        """Return a record of the attention weights without the sinks' column. Refuse all other slices."""
        # The index is not read: the shape and the memory offset of the result tell which column was cut off.
        if self.probabilities and self.sinks is not None and result.ndim == tensor.ndim:
            for dim in (i for i, axis in enumerate(self.axes) if leaves(axis) == self.sinks.joined):
                shape = [size - (i == dim) for i, size in enumerate(tensor.shape)]
                start = tensor.stride(dim) if self.sinks.first else 0  # without the first column, one later
                if list(result.shape) == shape and result.storage_offset() - tensor.storage_offset() == start:
                    axes = (*self.axes[:dim], self.sinks.keys, *self.axes[dim + 1 :])
                    return replace(self, axes=axes)
        raise self.unreadable("are indexed")


def read_operands(scores: ScoreRecord, lead: Sequence[Axis], rows: Axis, call: SoftmaxCall) -> SoftmaxCall:
    """Return a copy of the softmax ``call`` with the queries, keys, mask and other operands of its scores.

    Their axes are in the order (*lead, rows, keys), in which ``lead`` ends with the axis of the heads. Raises
    Unreadable if the scores do not come from a softmax attention.
    """
    keys = scores.keys
    assert keys is not None
    left, right = scores.left, scores.right
    # The code may compute k @ q.T: the operand that varies along the rows holds the queries.
    if left.shares(keys) or right.shares(rows):
        left, right = right, left
    if left.shares(keys) or right.shares(rows):
        raise Unreadable("its keys differ from query to query")
    query = left.arranged((*lead, rows, scores.contracted))
    key = right.arranged((*lead, keys, scores.contracted))
    # A factor that is constant along the keys belongs to the queries, one constant along the rows to the
    # keys.
    for factor, inverse in scores.factors:
        if not factor.shares(keys):
            query = _scaled(query, factor.arranged((*lead, rows, ())), inverse)
        elif not factor.shares(rows):
            key = _scaled(key, factor.arranged((*lead, keys, ())), inverse)
        elif not all_true((factor.tensor == 0) | (factor.tensor == 1)):
            raise Unreadable("its scores are multiplied by numbers of their own for every pair of tokens")
    sizes = [length(axis) for axis in lead]
    kv_heads = max(key.shape[-3], call.value.shape[-3])
    return replace(
        call,
        query=query.expand(*sizes, *query.shape[-2:]),
        key=key.expand(*sizes[:-1], kv_heads, *key.shape[-2:]),
        value=call.value.expand(*sizes[:-1], kv_heads, *call.value.shape[-2:]),
        # The cap is kept as cap * tanh(scale * ...), a SoftmaxCall has softcap * tanh(scale * ... / softcap).
        scale=scores.scale if scores.cap is None else scores.scale * scores.cap,
        mask=_mask(scores, (*lead, rows, keys)),
        softcap=scores.cap,
        sinks=_sinks(scores.sinks, lead, rows),
    )


def _scaled(tensor: Tensor, factor: Tensor, inverse: bool) -> Tensor:
    factor = factor.to(tensor.dtype)
    return tensor / factor if inverse else tensor * factor


def _mask(scores: ScoreRecord, target: Sequence[Axis]) -> Tensor | None:
    """Return the mask of the scores: boolean or, if there are biases, additive with −∞ at hidden entries."""
    # A bias that is the same for all keys of a row does not change the softmax.
    biases = [b.arranged(target) for b in scores.biases if scores.sinks is not None or b.shares(target[-1])]
    hidden = [pairs.arranged(target) for pairs in scores.hidden]
    total = reduce(torch.add, biases) if biases else None
    visible = ~reduce(torch.logical_or, hidden) if hidden else None
    if total is None or visible is None:
        return visible if total is None else total
    return torch.where(visible, total, -math.inf)


def _sinks(sinks: _Sinks | None, lead: Sequence[Axis], rows: Axis) -> Tensor | None:
    if sinks is None:
        return None
    column = sinks.operand.arranged((*lead, rows, ()))
    heads = column[(0,) * (len(lead) - 1)][:, 0, 0]
    if not all_true(column == heads[:, None, None]):
        raise Unreadable("its sinks differ from query to query")
    return heads.expand(length(lead[-1]))
