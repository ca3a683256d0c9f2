"""Define the tasks of a flow: to compute its frames, and to measure the growth of perturbations.

A frame is computed from the stored numbers of the previous frame. So an interrupted flow gives, bit for bit,
the same frames as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from howsmooth.study.flows.frames import ending, frame_at
from howsmooth.study.flows.integration import Integration
from howsmooth.study.records import Ending, FrameRow, GrowthRow
from howsmooth.study.store import Store
from howsmooth.study.subjects import Models
from howsmooth.study.tasks.task import Found, Task, Work

__all__ = ["FramesTask", "GrowthTask", "frames_left", "growth_left"]

_GROWTHS = 10


@dataclass(frozen=True, eq=False)
class _FlowTask(Task):
    """The base class of the tasks of a flow, which run in the process that holds the store.

    Attributes
    ----------
    flow
        The integration.
    store
        The store, which has at least the start of the flow.
    rows
        The number of missing rows.

    """

    flow: Integration
    store: Store
    rows: int

    @property
    def model(self) -> str:
        """The name of the system in results."""
        return self.flow.system.label

    @property
    def size(self) -> int:
        """The number of rows that the task computes: one for each frame or time that the store lacks."""
        return self.rows

    @property
    def n(self) -> int:  # type: ignore[override]
        """The number of tokens of the flow."""
        return int(self.flow.system.x.shape[0])


class FramesTask(_FlowTask):
    """The task of computing the states of a flow (frames) that follow the last one in the store.

    Each frame is written as soon as it is computed.
    """

    kind = FrameRow

    def found(self, models: Models | None) -> Iterator[Found]:
        """Continue the flow from its last stored state (frame), and yield the next frames one by one.

        The last result is the frame at the last time, or the reason why the flow ended before.
        """
        frame = frame_at(self.store, self.store.count(FrameRow) - 1)
        while frame.place < len(self.flow.grid.times) - 1:
            following = self.flow.after(frame)
            if isinstance(following, Ending):
                # Delete frames beyond the end of the flow. If the process is killed before the ending is
                # written, the next run finds the same ending again.
                self.store.delete_rows(FrameRow, "place > 0 AND time >= ?", following.lower)
                yield [following]
                return
            yield [following]
            frame = following


class GrowthTask(_FlowTask):
    """The task of measuring how far perturbations of the initial tokens have grown, at some times."""

    kind = GrowthRow

    def found(self, models: Models | None) -> Iterator[Found]:
        """Measure how far perturbations of the initial tokens have grown; yield the rows of all times."""
        times = sorted(time for (time,) in self.store.keys(FrameRow, ("time",)))
        last = len(times) - 1
        yield self.flow.growth([times[round(k * last / (self.rows - 1))] for k in range(self.rows)])


def frames_left(flow: Integration, store: Store) -> Work:
    """Return the task of computing the frames that a store does not have; no task if the flow has ended."""
    kept = store.count(FrameRow) - 1
    missing = len(flow.grid.times) - 1 - kept
    tasks = [FramesTask(flow, store, missing)] if missing and ending(store) is None else []
    return Work(FrameRow, "frames", tasks, kept)


def growth_left(flow: Integration, store: Store) -> Work:
    """Return the task of measuring the growth of perturbations, if the store does not have it."""
    last = store.count(FrameRow) - 1
    asked = flow.plan.growth and last > 0 and not store.count(GrowthRow)
    tasks = [GrowthTask(flow, store, min(_GROWTHS, last) + 1)] if asked else []
    return Work(GrowthRow, "growths of perturbations", tasks, store.count(GrowthRow))
