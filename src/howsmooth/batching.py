"""Which members are measured together, and which without their probabilities, in a memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import (
    cached_bytes,
    has_closed_form,
    kernel_bytes,
    runs_members_alone,
    streamed_bytes,
)
from howsmooth.memory import memory_budget

__all__ = [
    "Footprint",
    "batches",
    "beside_the_basis",
    "fewest_vectors",
    "footprint",
    "is_streamed",
    "room_for_basis",
]

# Members are measured together as long as two Krylov bases of this many steps fit in this many bytes; more
# members would only leave a processor's caches. Other devices may take a share of the budget for them.
_EXPECTED_STEPS = 32
_BASIS_BYTES = 1 << 30
_BASIS_SHARE = 1 / 8
# Sequences of unequal lengths are joined at one length as long as the bytes of probabilities and bases that
# fill the shorter ones up are no more than what a step works through while another length's operations start.
_FILLED_BYTES = {"cpu": 1 << 22}
_FILLED_ELSEWHERE = 1 << 29
# Length from which several heads' probabilities cost a CPU as much to read as to form tile by tile, or more;
# those of one head up to a third less (docs/benchmarks.md).
_STREAMED_FROM = 1024
# Of a Krylov basis kept in half precision: fewer vectors would seldom reach anything.
_FEWEST_VECTORS = 16


@dataclass(frozen=True)
class Footprint:
    """How :func:`howsmooth.local_lipschitz` would measure one sequence.

    Attributes
    ----------
    streamed
        Whether probabilities are formed anew in each product.
    size
        Bytes beside the solver's basis; 0 where that is not known.

    """

    streamed: bool
    size: int


def footprint(
    f: object,
    tokens: tuple[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    memory: int | None = None,
) -> Footprint:
    """Tell beforehand how one sequence would be measured, and in what memory.

    Parameters
    ----------
    f, memory
        As for :func:`howsmooth.local_lipschitz`.
    tokens
        (n, d).
    dtype, device
        Of the tokens.

    """
    if not isinstance(f, TokenMap) or not has_closed_form(f):
        return Footprint(streamed=False, size=0)
    x = torch.empty((), dtype=dtype, device=device).expand(1, *tokens)
    if is_streamed(f, x, memory_budget(memory, device)):
        size = max(beside_the_basis(f, x), beside_the_basis(f, _widened(x)))
        return Footprint(streamed=True, size=size)
    return Footprint(streamed=False, size=cached_bytes(f, tokens[0], dtype))


@dataclass(frozen=True)
class _Lot:
    """Members that are joined at the length of the last, the longest."""

    count: int = 0
    probabilities: int = 0  # bytes of the last, and of its basis
    basis: int = 0
    own: int = 0  # bytes of all at lengths of their own
    members: list[int] = field(default_factory=list)  # shared with the lot that has one more

    def with_one(self, probabilities: int, basis: int) -> _Lot:
        """Return it with one more member, whose number is not yet among them."""
        return _Lot(self.count + 1, probabilities, basis, self.own + probabilities + basis, self.members)

    @property
    def all_probabilities(self) -> int:
        return self.count * self.probabilities

    @property
    def all_bases(self) -> int:
        return self.count * self.basis

    @property
    def filled(self) -> int:
        """Bytes that fill members up."""
        return self.all_probabilities + self.all_bases - self.own


def batches(double: TokenMap, members: Sequence[Tensor] | Tensor, budget: int) -> Iterator[list[list[int]]]:
    """Cut the numbers of members (n_i, d), from short to long, into those that are measured together.

    Of these, those that are to be joined at one length are in one list.
    """
    device = members[0].device
    on_cpu = device.type == "cpu"
    most_basis = _BASIS_BYTES if on_cpu else max(_BASIS_BYTES, int(_BASIS_SHARE * budget))
    most_filled = _FILLED_BYTES.get(device.type, _FILLED_ELSEWHERE)
    lots: list[_Lot] = []
    for i in sorted(range(len(members)), key=lambda i: members[i].shape[0]):
        if runs_members_alone(double) or is_streamed(double, members[i][None], budget):
            if lots:
                yield [lot.members for lot in lots]
            yield [[i]]
            lots = []
            continue
        n, dtype = members[i].shape[0], members[i].dtype
        basis = n * (double.d + double.d_out) * dtype.itemsize * _EXPECTED_STEPS
        one = cached_bytes(double, n, dtype), basis
        longer = _with_one(lots, one, most_filled)
        full = (
            sum(lot.all_probabilities for lot in longer) > budget
            or sum(lot.all_bases for lot in longer) > most_basis
        )
        if lots and full:
            yield [lot.members for lot in lots]
            longer = _with_one([], one, most_filled)
        lots = longer
        lots[-1].members.append(i)
    if lots:
        yield [lot.members for lot in lots]


def _with_one(lots: list[_Lot], one: tuple[int, int], most_filled: int) -> list[_Lot]:
    """Return the lots with one more member, in the last of them where that is worth filling up."""
    if lots and (joined := lots[-1].with_one(*one)).filled <= most_filled:
        return [*lots[:-1], joined]
    return [*lots, _Lot().with_one(*one)]


def is_streamed(double: TokenMap, x: Tensor, budget: int) -> bool:
    """Tell whether probabilities are formed anew in each product: they do not fit, or that is faster."""
    one = cached_bytes(double, x.shape[1], x.dtype)
    if one > budget:
        return True
    faster = x.device.type == "cpu" and x.shape[1] >= _STREAMED_FROM and not runs_members_alone(double)
    return faster and one > 0 and _least_streamed(double, x) <= budget


def room_for_basis(double: TokenMap, x: Tensor, budget: int) -> int:
    """Return what the budget leaves for the Krylov basis of one member of x that is streamed.

    Raises
    ------
    ArgumentError
        If it is too small for this length.

    """
    least = min(_least_streamed(double, x), cached_bytes(double, x.shape[-2], x.dtype))
    if budget < least:
        gib = f"{least / 2**30:.3g} GiB"
        dtype = str(x.dtype).removeprefix("torch.")
        raise ArgumentError(
            "memory",
            expected=f"at least {least} bytes ({gib}) for {x.shape[-2]} tokens in {dtype}",
            got=f"{budget} bytes",
            remedy="Measure a shorter sequence or one head alone, or free memory.",
        )
    return budget - beside_the_basis(double, x)


def beside_the_basis(double: TokenMap, x: Tensor) -> int:
    """Bytes for one member in the dtype of x: its operator, five vectors of the solver, the tokens."""
    n = x.shape[-2]
    vectors = 6 * n * max(double.d, double.d_out) * x.itemsize
    kernels = kernel_bytes(double, n, x.dtype, x.device)
    return streamed_bytes(double, n, x.dtype, x.device) + kernels + vectors


def fewest_vectors(x: Tensor) -> int:
    """Bytes of the smallest basis that is worth a try, for one member of x."""
    return _FEWEST_VECTORS * x.shape[-2] * x.shape[-1] * torch.float16.itemsize


def _least_streamed(double: TokenMap, x: Tensor) -> int:
    """Bytes for one member in the dtype of x with a small basis, and then for the verdict in float64."""
    return max(beside_the_basis(double, x) + fewest_vectors(x), beside_the_basis(double, _widened(x)))


def _widened(x: Tensor) -> Tensor:
    """Return what has the sizes of x in float64, and no numbers."""
    return x.new_empty((), dtype=torch.float64).expand(x.shape)
