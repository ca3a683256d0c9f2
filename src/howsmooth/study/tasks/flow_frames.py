"""Define the tasks of a flow: to compute its states (frames), and to measure how perturbations grow.

A frame is computed from the stored numbers of the previous frame. So an interrupted flow gives, bit for bit,
the same frames as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from howsmooth.study.flows.frames import ending, frame_at
from howsmooth.study.flows.integration import Integration
from howsmooth.study.measured_models import Models
from howsmooth.study.records import Ending, FrameRow, GrowthRow, Row
from howsmooth.study.store import Store
from howsmooth.study.tasks.task import Found, Task, Work

__all__ = ["FlowTask", "frames_left", "growth_left"]

_GROWTHS = 10


@dataclass(frozen=True, eq=False)
class FlowTask(Task):
    """A task that computes rows of a flow, always in the process that opened the store.

    The function ``steps`` yields the rows.
    """

    kind: type[Row]
    model: str
    n: int
    size: int
    steps: Callable[[], Iterator[Found]]

    def found(self, models: Models | None) -> Iterator[Found]:
        """Compute the rows that the store lacks, and yield them in lists that are each written at once."""
        return self.steps()


def frames_left(flow: Integration, store: Store) -> Work:
    """Return the task of computing the flow's states that a store lacks; no task if the flow has ended.

    The store has at least the start of the flow. Each frame is written as soon as it is computed.
    """
    kept = store.count(FrameRow) - 1
    missing = len(flow.grid.times) - 1 - kept
    asked = missing and ending(store) is None
    return Work(FrameRow, "frames", [_task(flow, store, FrameRow, missing, _frames)] if asked else [], kept)


def growth_left(flow: Integration, store: Store) -> Work:
    """Return the task of measuring the growth of perturbations, if the store lacks its result."""
    last, kept = store.count(FrameRow) - 1, store.count(GrowthRow)
    asked = flow.plan.growth and last > 0 and not kept
    tasks = [_task(flow, store, GrowthRow, min(_GROWTHS, last) + 1, _growths)] if asked else []
    return Work(GrowthRow, "growths of perturbations", tasks, kept)


def _task(
    flow: Integration,
    store: Store,
    kind: type[Row],
    size: int,
    steps: Callable[[Integration, Store, int], Iterator[Found]],
) -> FlowTask:
    system = flow.system
    return FlowTask(kind, system.label, int(system.x.shape[0]), size, partial(steps, flow, store, size))


def _frames(flow: Integration, store: Store, size: int) -> Iterator[Found]:
    """Continue the flow from its last stored state (frame), and yield the next frames one by one.

    The last result is the frame at the last time, or the reason why the flow ended before.
    """
    frame = frame_at(store, store.count(FrameRow) - 1)
    while frame.place < len(flow.grid.times) - 1:
        following = flow.after(frame)
        if isinstance(following, Ending):
            # Delete frames beyond the end of the flow. If the process is killed before the ending is
            # written, the next run finds the same ending again.
            store.delete_rows(FrameRow, "place > 0 AND time >= ?", following.lower)
            yield [following]
            return
        yield [following]
        frame = following


def _growths(flow: Integration, store: Store, size: int) -> Iterator[Found]:
    """Measure how far perturbations of the initial tokens have grown; yield the rows of all times."""
    times = sorted(time for (time,) in store.keys(FrameRow, ("time",)))
    last = len(times) - 1
    yield flow.growth([times[round(k * last / (size - 1))] for k in range(size)])
