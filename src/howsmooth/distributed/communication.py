"""Communication, through torch.distributed, between processes that each hold a part of one long sequence.

No other module imports torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from howsmooth.distributed.token_partition import RowShares
from howsmooth.errors import ArgumentError

__all__ = ["Collectives", "Exchange", "ProcessGroupCollectives"]


@runtime_checkable
class Collectives(Protocol):
    """The interface of the three collective operations that the processes of a group use to communicate."""

    @property
    def rank(self) -> int:
        """The number of this process within its group."""

    @property
    def world(self) -> int:
        """The number of processes in the group."""

    def all_gather(self, out: Tensor, t: Tensor) -> None:
        """Collect the tensors ``t`` of all processes in ``out`` (world, ...), in the order of the process
        ranks.
        """

    def reduce_scatter(self, out: Tensor, t: Tensor) -> None:
        """Sum the tensors ``t`` over all processes, and write this process's part of the sum to ``out``.

        Every process passes a tensor ``t`` with one part for each process, and gets the sum of the parts
        ``t[rank]`` for its own rank.
        """

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the (small) Python objects that all processes pass, in the order of the process ranks."""


class ProcessGroupCollectives:
    """The collective operations of a torch.distributed group, with any backend such as gloo or NCCL.

    Parameters
    ----------
    group
        A process group, or None for all processes.

    Raises
    ------
    ArgumentError
        If torch.distributed has not been started, or this process is not in the group.

    """

    def __init__(self, group: object) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "group",
                expected="a group of processes",
                got="none: torch.distributed has not been started",
                remedy="Start the program with torchrun and call torch.distributed.init_process_group first.",
            )
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            raise ArgumentError(
                "group",
                expected="a process group of torch.distributed, or None",
                got=type(group).__name__,
                remedy="torch.distributed.new_group makes one.",
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        if self.rank < 0:
            raise ArgumentError(
                "group", expected="a group that this process belongs to", got="one without it"
            )

    def all_gather(self, out: Tensor, t: Tensor) -> None:
        """Collect the tensors ``t`` of all processes in ``out`` (world, ...), in the order of the process
        ranks.
        """
        _newest("all_gather_single", "all_gather_into_tensor")(out.flatten(), t.flatten(), group=self.group)

    def reduce_scatter(self, out: Tensor, t: Tensor) -> None:
        """Sum the tensors ``t`` over all processes, and write this process's part of the sum to ``out``.

        Every process passes a tensor ``t`` with one part for each process, and gets the sum of the parts
        ``t[rank]`` for its own rank.
        """
        _newest("reduce_scatter_single", "reduce_scatter_tensor")(
            out.flatten(), t.flatten(), group=self.group
        )

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the (small) Python objects that all processes pass, in the order of the process ranks."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values


def _newest(*names: str) -> Callable[..., Any]:
    """Return the function of torch.distributed with the first of the given names that the installed version
    has.

    PyTorch 2.13 renamed two functions.
    """
    found: Callable[..., Any] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found


class Exchange:
    """Communication between processes that each hold some rows (tokens) of one long sequence."""

    def __init__(self, collectives: Collectives, shares: RowShares, device: torch.device) -> None:
        self.collectives = collectives
        self.shares = shares
        self.device = device
        self.ranges = shares.ranges(collectives.rank)
        self.own = shares.count(collectives.rank)

    def gather(
        self, first: Float[Tensor, "b own dim_1"], second: Float[Tensor, "b own dim_2"]
    ) -> tuple[Float[Tensor, "b n dim_1"], Float[Tensor, "b n dim_2"]]:
        """Assemble the rows of two tensors for the whole sequence, from the rows that each process holds."""
        # Both tensors travel in one message. Collectives need equal shapes, so shorter shares are padded.
        b, own, width = first.shape[0], first.shape[1], first.shape[2]
        sent = first.new_zeros(b, self.shares.longest, width + second.shape[2])
        sent[:, :own, :width] = first
        sent[:, :own, width:] = second
        received = sent.new_empty(self.shares.world, *sent.shape)
        self.collectives.all_gather(received, sent)
        whole = sent.new_empty(b, self.shares.n, sent.shape[2])
        for rank, place, part in self._places():
            whole[:, part] = received[rank, :, place]
        return whole[..., :width], whole[..., width:]

    def scatter_sum(
        self, first: Float[Tensor, "b n dim_1"], second: Float[Tensor, "b n dim_2"]
    ) -> tuple[Float[Tensor, "b own dim_1"], Float[Tensor, "b own dim_2"]]:
        """Sum two tensors over all processes, and return the rows of the sums that this process holds.

        This is the adjoint of :meth:`gather`.
        """
        b, width = first.shape[0], first.shape[2]
        sent = first.new_zeros(self.shares.world, b, self.shares.longest, width + second.shape[2])
        for rank, place, part in self._places():
            sent[rank, :, place, :width] = first[:, part]
            sent[rank, :, place, width:] = second[:, part]
        summed = torch.empty_like(sent[0])
        self.collectives.reduce_scatter(summed, sent)
        return summed[:, : self.own, :width], summed[:, : self.own, width:]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of a small tensor over all processes, with bitwise equal results in all processes.

        The processes decide by these numbers when to stop. If the numbers differed by rounding, one process
        could stop while the others wait for it.
        """
        return self._all(values).sum(dim=0)

    def largest(self, values: Tensor) -> Tensor:
        """Return the entrywise maximum of a small tensor over all processes."""
        return self._all(values).amax(dim=0)

    def _all(self, values: Tensor) -> Tensor:
        sent = values.to(self.device).contiguous()
        received = sent.new_empty(self.shares.world, *sent.shape)
        self.collectives.all_gather(received, sent)
        return received.to(values.device)

    def _places(self) -> list[tuple[int, slice, slice]]:
        """Return, for each range of rows, its position among the rows of the process that holds it, and its
        position in the whole sequence.

        There is one triple (rank, rows of the process, rows of the sequence) for each range of rows of each
        process.
        """
        places = []
        for rank in range(self.shares.world):
            first = 0
            for part in self.shares.ranges(rank):
                length = part.stop - part.start
                places.append((rank, slice(first, first + length), part))
                first += length
        return places
