"""Division of sequences into batches for a measurement, and the choice whether attention probabilities are
kept in memory or recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from howsmooth.attention import Rotary, TokenMap
from howsmooth.errors import ArgumentError
from howsmooth.jacobian.closed_form import has_closed_form, runs_members_alone
from howsmooth.jacobian.memory_footprint import cached_bytes, kernel_bytes, streamed_bytes
from howsmooth.jacobian.unequal_lengths import shares_products
from howsmooth.memory import memory_budget

__all__ = [
    "Footprint", "are_measured_together", "batches", "bytes_without_basis", "fewest_vectors", "footprint",
    "is_streamed", "room_for_basis",
]  # fmt: skip

# A batch takes members as long as two Krylov bases of _EXPECTED_STEPS vectors each fit in _BASIS_BYTES. On
# a CPU, larger batches would not fit in its caches. Other devices may use the share _BASIS_SHARE of the
# budget if that is more.
_EXPECTED_STEPS = 32
_BASIS_BYTES = 1 << 30
_BASIS_SHARE = 1 / 8
# Sequences of different lengths are padded to one length as long as the padding of their probabilities and
# bases takes no more than this many bytes. A step works through so many bytes in the time that starting the
# operations of one more length would take.
_FILLED_BYTES = {"cpu": 1 << 22}
_FILLED_ELSEWHERE = 1 << 29
# From this length on, a CPU needs at least as long to read the probabilities of several heads from memory
# as to recompute them in tiles. For one head, reading takes up to a third less time (documentation page
# "Evidence").
_STREAMED_FROM = 1024
# The smallest Krylov basis, kept in half precision, that is worth trying: with fewer vectors the
# measurement would seldom converge.
_FEWEST_VECTORS = 16


class Footprint(NamedTuple):
    """The memory that the measurement of one sequence is predicted to take."""

    streamed: bool  # whether attention probabilities are recomputed in each product instead of being kept
    size: int  # bytes beside the solver's Krylov basis; 0 if that number is not known


def footprint(
    f: object,
    tokens: tuple[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    memory: int | None = None,
) -> Footprint:
    """Predict the memory that the measurement of one sequence takes, and decide whether attention
    probabilities are kept.

    ``tokens`` is the shape (n, d) of the sequence; ``f`` and ``memory`` are as for
    :func:`howsmooth.local_lipschitz`.
    """
    if not isinstance(f, TokenMap) or not has_closed_form(f):
        return Footprint(streamed=False, size=0)
    x = torch.empty((), dtype=dtype, device=device).expand(1, *tokens)
    if is_streamed(f, x, memory_budget(memory, device)):
        size = max(bytes_without_basis(f, x), bytes_without_basis(f, _widened(x)))
        return Footprint(streamed=True, size=size)
    return Footprint(streamed=False, size=cached_bytes(f, tokens[0], dtype))


def batches(double: TokenMap, members: Sequence[Tensor] | Tensor, budget: int) -> Iterator[list[list[int]]]:
    """Divide sequences into batches that are measured together, in order of increasing length.

    Each batch is a list of groups, which are lists of indices into ``members``. The sequences of a group are
    padded to the length of its last one.
    """
    device = members[0].device
    on_cpu = device.type == "cpu"
    most_basis = _BASIS_BYTES if on_cpu else max(_BASIS_BYTES, int(_BASIS_SHARE * budget))
    most_filled = _FILLED_BYTES.get(device.type, _FILLED_ELSEWHERE)
    groups: list[list[int]] = []
    # Bytes of probabilities and of Krylov bases: of all groups but the last, of the last member, and of all
    # members of the last group without padding.
    closed = last = own = np.zeros(2, dtype=np.int64)
    for i in sorted(range(len(members)), key=lambda i: members[i].shape[0]):
        if runs_members_alone(double) or is_streamed(double, members[i][None], budget):
            if groups:
                yield groups
            yield [[i]]
            groups = []
            continue
        n, dtype = members[i].shape[0], members[i].dtype
        basis = n * (double.d + double.d_out) * dtype.itemsize * _EXPECTED_STEPS
        one = np.array((cached_bytes(double, n, dtype), basis))
        # Whether the last group takes one more sequence, to whose length all others of it are padded
        joins = bool(groups) and (len(groups[-1]) * one - own).sum() <= most_filled
        if groups and not joins:
            closed, own = closed + len(groups[-1]) * last, 0 * own
        probabilities, bases = closed + (len(groups[-1]) + 1 if joins else 1) * one
        if groups and (probabilities > budget or bases > most_basis):
            yield groups
            groups, joins, closed, own = [], False, 0 * closed, 0 * own
        if joins:
            groups[-1].append(i)
        else:
            groups.append([i])
        last, own = one, own + one
    if groups:
        yield groups


def are_measured_together(f: object, g: object) -> bool:
    """Return True if the sequences of ``f`` and ``g`` can be measured in one batch with ``f``, whatever their
    lengths.

    This is the case if ``f`` equals ``g`` at all sequences that ``g`` takes, and if sequences of several
    lengths share matrix products in the Jacobian of ``f``. Both must be maps of this library with equal
    parameters, masks and settings. Tables of rotary positions may be longer in ``f`` than in ``g``.
    """
    return isinstance(f, TokenMap) and has_closed_form(f) and shares_products(f) and _covers(f, g)


def _covers(a: object, b: object) -> bool:
    """Return True if ``a`` equals ``b`` where ``b`` is defined: longer rotary tables cover shorter ones."""
    if type(a) is not type(b):
        return False
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        return alike and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))
    if isinstance(a, bool | int | float | str | torch.dtype):
        return a == b
    if isinstance(a, Rotary) and isinstance(b, Rotary):
        return _covers(a.cos[: b.n_max], b.cos) and _covers(a.sin[: b.n_max], b.sin)
    if isinstance(a, TokenMap):
        mine, others = vars(a), vars(b)
        return mine.keys() == others.keys() and all(_covers(mine[name], others[name]) for name in mine)
    return False  # what is not known here is not compared


def is_streamed(double: TokenMap, x: Tensor, budget: int) -> bool:
    """Return True if the attention probabilities at the sequence ``x`` are recomputed in each product with
    the Jacobian, and False if they are kept in memory.

    They are recomputed if they do not fit in memory, or if that is faster.
    """
    one = cached_bytes(double, x.shape[1], x.dtype)
    if one > budget:
        return True
    faster = x.device.type == "cpu" and x.shape[1] >= _STREAMED_FROM and not runs_members_alone(double)
    return faster and one > 0 and _least_streamed(double, x) <= budget


def room_for_basis(double: TokenMap, x: Tensor, budget: int) -> int:
    """Return how many bytes of the memory budget are left for the Krylov basis in the measurement of one
    sequence, whose attention probabilities are recomputed in each product. Raise ArgumentError if the budget
    is too small for this length.
    """
    least = min(_least_streamed(double, x), cached_bytes(double, x.shape[-2], x.dtype))
    if budget < least:
        gib = f"{least / 2**30:.3g} GiB"
        dtype = str(x.dtype).removeprefix("torch.")
        raise ArgumentError(
            "memory",
            expected=f"at least {least} bytes ({gib}) for {x.shape[-2]} tokens in {dtype}",
            got=f"{budget} bytes",
            remedy="Give a larger memory, or measure a shorter sequence or one head alone.",
        )
    return budget - bytes_without_basis(double, x)


def bytes_without_basis(double: TokenMap, x: Tensor) -> int:
    """Return the number of bytes that the measurement of one sequence takes, without the Krylov basis.

    They hold the sequence's Jacobian, five vectors of the solver and the tokens, in the dtype of x.
    """
    n = x.shape[-2]
    vectors = 6 * n * max(double.d, double.d_out) * x.itemsize
    kernels = kernel_bytes(double, n, x.dtype, x.device)
    return streamed_bytes(double, n, x.dtype, x.device) + kernels + vectors


def fewest_vectors(x: Tensor) -> int:
    """Return the number of bytes of the smallest Krylov basis with which one sequence is measured."""
    return _FEWEST_VECTORS * x.shape[-2] * x.shape[-1] * torch.float16.itemsize


def _least_streamed(double: TokenMap, x: Tensor) -> int:
    """Return the smallest number of bytes with which one sequence can be measured without keeping attention
    probabilities.

    The run in the dtype of x needs a small basis. The final check in float64 needs none, but wider numbers.
    """
    return max(bytes_without_basis(double, x) + fewest_vectors(x), bytes_without_basis(double, _widened(x)))


def _widened(x: Tensor) -> Tensor:
    """Return a float64 tensor of x's shape with strides zero, to predict memory in float64."""
    return x.new_empty((), dtype=torch.float64).expand(x.shape)
