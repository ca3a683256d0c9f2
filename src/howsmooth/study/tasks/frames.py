"""The tasks of a flow: its frames, each made from the one before, and the growth of perturbations along it.

A frame begins from the one before as it is kept, so that a flow that was interrupted gives, bit for bit, what
one that was not would have given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from howsmooth.study.flows.frames import count_frames, ending, frame_at
from howsmooth.study.flows.integration import Integration
from howsmooth.study.records import Ending, FrameRow, GrowthRow
from howsmooth.study.store import Store
from howsmooth.study.subjects import Models
from howsmooth.study.tasks.task import Found, Task, Work

__all__ = ["FramesTask", "GrowthTask", "frames_left", "growth_left"]

_GROWTHS = 10


@dataclass(frozen=True, eq=False)
class _FlowTask(Task):
    """What the tasks of a flow have in common: they are carried out here, where the store is.

    Attributes
    ----------
    flow
        What is integrated.
    store
        It has the start of the flow.
    rows
        How many of them are missing.

    """

    flow: Integration
    store: Store
    rows: int

    @property
    def model(self) -> str:
        """The name under which results stand."""
        return self.flow.system.label

    @property
    def size(self) -> int:
        """How many rows are missing."""
        return self.rows

    @property
    def n(self) -> int:  # type: ignore[override]
        """How many tokens flow."""
        return int(self.flow.system.x.shape[0])


class FramesTask(_FlowTask):
    """The frames after the last one that the store has; each is a step of its own."""

    kind = FrameRow

    def found(self, models: Models | None) -> Iterator[Found]:
        """Integrate frame by frame, until the last or until there is none."""
        frame = frame_at(self.store, count_frames(self.store) - 1)
        while frame.place < len(self.flow.grid.times) - 1:
            following = self.flow.after(frame)
            if isinstance(following, Ending):
                # Whoever is killed before the ending is written finds it again.
                self.store.take_back(FrameRow, "place > 0 AND time >= ?", following.lower)
                yield [following]
                return
            yield [following.row()]
            frame = following


class GrowthTask(_FlowTask):
    """How far perturbations of the start have grown, at some of the frames' times, the last among them."""

    kind = GrowthRow

    def found(self, models: Models | None) -> Iterator[Found]:
        """Measure all in one go."""
        times = sorted(time for (time,) in self.store.keys(FrameRow, ("time",)))
        last = len(times) - 1
        yield self.flow.growth([times[round(k * last / (self.rows - 1))] for k in range(self.rows)])


def frames_left(flow: Integration, store: Store) -> Work:
    """List the frames that a store does not have; none if the flow has ended."""
    kept = count_frames(store) - 1
    missing = len(flow.grid.times) - 1 - kept
    tasks = [FramesTask(flow, store, missing)] if missing and ending(store) is None else []
    return Work(FrameRow, "frames", tasks, kept)


def growth_left(flow: Integration, store: Store) -> Work:
    """List the growth along the frames of a store, if it was not measured."""
    last = count_frames(store) - 1
    asked = flow.plan.growth and last > 0 and not store.count(GrowthRow)
    tasks = [GrowthTask(flow, store, min(_GROWTHS, last) + 1)] if asked else []
    return Work(GrowthRow, "growths of perturbations", tasks, store.count(GrowthRow))
