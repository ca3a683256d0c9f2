"""Run a flow: compute its states (frames) one after another, then the growth of perturbations.

A frame is computed from the stored numbers of the previous frame. So an interrupted flow gives, bit for bit,
the same frames as an uninterrupted one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.dynamics import Layers, Rescaled, Sphere, Trajectory, flow, growth
from howsmooth.errors import NonFiniteError, StoreError
from howsmooth.measures import Gaussian
from howsmooth.study.flows.flow_plan import FIXED_STEP, FlowPlan
from howsmooth.study.flows.flow_system import System
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.records import FLOW, Ending, FrameRow, GrowthRow, Row
from howsmooth.study.runner import Means, Runner
from howsmooth.study.store import Store
from howsmooth.study.study_preparation import Models
from howsmooth.study.tasks.task import Found, Task, Work

__all__ = ["Integration", "ending", "frames", "gaussian_of", "run_flow", "tokens_of"]

_TOKENS, _MEASURE = "tokens", "Gaussian measure"
_GROWTHS = 10


def run_flow(
    plan: FlowPlan, system: System, folder: str | os.PathLike[str], means: Means | None = None
) -> tuple[Outcome, Ending | None]:
    """Compute the states (frames) of a flow that the store in ``folder`` lacks, and write them there.

    Folder and store are created after all checks have passed. The outcome does not count the start as a
    frame. The second result is the reason why the flow ended early, or None.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the flow is impossible, before anything is stored; or if the store holds another flow.

    """
    began = time.monotonic()
    integration = Integration(plan, system)
    with Store.open(folder, late=True) as store:
        identity = plan.settings() | system.identity()
        store.check(FLOW, identity)
        new = not store.count(FrameRow)
        if new:
            integration.after(integration.start)  # an impossible flow raises here, before a store is created
        store.begin(FLOW, identity)
        if new:
            store.add([integration.start])
        runner = Runner(store, means or Means())

        def carry_out(kind: type[Row], words: str, size: int, kept: int, steps: Iterator[Found]) -> None:
            task = FlowTask(kind, system.label, len(system.x), size, steps)
            runner.carry_out(Work(kind, words, [task] if size else [], kept))

        kept = store.count(FrameRow) - 1
        missing = 0 if ending(store) else len(integration.grid.times) - 1 - kept
        carry_out(FrameRow, "frames", missing, kept, _frames(integration, store))
        # If the flow ended early, frames beyond that time were deleted, so count again.
        last = store.count(FrameRow) - 1
        runner.outcome.made[FrameRow.table] = max(0, last - kept)
        grown = store.count(GrowthRow)
        size = min(_GROWTHS, last) + 1 if plan.growth and last and not grown else 0
        carry_out(GrowthRow, "growths of perturbations", size, grown, _growths(integration, store, size))
        return runner.finish(began), ending(store)


@dataclass(frozen=True, eq=False)
class FlowTask(Task):
    """A task that computes the states of a flow at its output times, or the growth of perturbations of the
    flow. It runs in the process that writes the store.
    """

    kind: type[Row]
    model: str
    n: int
    size: int
    steps: Iterator[Found]

    def found(self, models: Models | None) -> Iterator[Found]:
        """Yield lists of the missing rows. The runner writes each list before the next list is computed."""
        return self.steps


def _frames(integration: Integration, store: Store) -> Iterator[Found]:
    """Continue the flow from its last stored frame, and yield the next frames one by one.

    The last result is the frame at the last time, or the reason why the flow ended before.
    """
    frame = frame_at(store, store.count(FrameRow) - 1)
    while frame.place < len(integration.grid.times) - 1:
        following = integration.after(frame)
        if isinstance(following, Ending):
            # Delete frames beyond the end of the flow. If the process is killed before the ending is
            # written, the next run finds the same ending again.
            store.delete_rows(FrameRow, "place > 0 AND time >= ?", following.lower)
            yield [following]
            return
        yield [following]
        frame = following


def _growths(integration: Integration, store: Store, size: int) -> Iterator[Found]:
    times = sorted(time for (time,) in store.keys(FrameRow, ("time",)))
    yield integration.growth([times[round(k * (len(times) - 1) / (size - 1))] for k in range(size)])


# ---- From one frame to the next


class Integration:
    """The integration of a flow from one stored state (frame) to the next.

    Raises
    ------
    ArgumentError
        If the times do not fit the system.

    """

    def __init__(self, plan: FlowPlan, system: System) -> None:
        self.plan = plan
        self.system = system
        self.grid = plan.grid(system.layers)

    @cached_property
    def start(self) -> FrameRow:
        """The frame at time 0, with the initial tokens."""
        x, d = self.system.x, self.system.x.shape[1]
        if not self.plan.closure:
            return _frame_row(0, 0.0, x)
        covariance = self.system.radius**2 * torch.eye(d, dtype=torch.float64)
        return _frame_row(0, 0.0, x, (torch.zeros(d, dtype=torch.float64), covariance))

    def after(self, frame: FrameRow) -> FrameRow | Ending:
        """Integrate from one frame to the next; return the next frame, or the reason why the flow ended.

        The integration from the frame at time 0 is computed only once.

        Raises
        ------
        howsmooth.errors.HowsmoothError
            If the flow is impossible, which the integration from the frame at time 0 reveals.

        """
        return self._first if frame.place == 0 else self._moved(frame)

    @cached_property
    def _first(self) -> FrameRow | Ending:
        return self._moved(self.start)

    def growth(self, times: Sequence[float]) -> list[GrowthRow]:
        """Measure how much perturbations of the initial tokens have grown at some times.

        The flow is integrated with a fixed step.
        """
        fixed = self.plan.method in FIXED_STEP
        found = growth(
            self._field,
            self.system.x,
            times,
            method=self.plan.method if fixed else "rk4",
            step=self.grid.step if fixed else self.grid.times[1],
            seed=self.plan.seed,
        )
        measured = ("value", "lower", "upper", "converged", "product", "exponential")
        columns = {name: getattr(found, name).tolist() for name in measured}
        error = found.discretisation_error
        return [
            GrowthRow(
                time=time,
                confidence=found.confidence,
                discretisation_error=None if error is None else float(error[k]),
                method=found.method,
                step=found.step,
                **{name: values[k] for name, values in columns.items()},
            )
            for k, time in enumerate(found.times.tolist())
        ]

    def _moved(self, frame: FrameRow) -> FrameRow | Ending:
        began = time.perf_counter()
        tokens = self._to_next_frame(_TOKENS, self._field, tokens_of(frame), frame.place)
        if isinstance(tokens, Ending):
            return tokens
        gaussian = gaussian_of(frame)
        evaluations = int(tokens.evaluations)
        if gaussian is not None:
            moved = self._to_next_frame(_MEASURE, self.system.maps[0], Gaussian(*gaussian), frame.place)
            if isinstance(moved, Ending):
                return moved
            last: Any = moved.final
            gaussian = (last.mean, last.covariance)
            evaluations += int(moved.evaluations)
        place, x = frame.place + 1, torch.as_tensor(tokens.final)
        seconds = time.perf_counter() - began
        return _frame_row(place, self.grid.times[place], x, gaussian, evaluations, seconds)

    @cached_property
    def _field(self) -> object:
        maps = self.system.maps
        if self.plan.rescale:
            return Rescaled(maps[0])
        field = maps[0] if self.system.layers is None else Layers(maps)
        return Sphere(field, self.system.radius) if self.plan.sphere else field

    def _to_next_frame(self, what: str, field: object, state: Any, place: int) -> Trajectory | Ending:
        """Integrate from one stored time to the next; return the trajectory, or why the flow ended early."""
        times = self.grid.times[place : place + 2]
        try:
            trajectory = self._flow(field, state, times)
            if trajectory.status == "finished":
                return trajectory
            # Integrate again from the start: to locate the time of blow-up, `flow` compares with a finer
            # integration, which needs the whole path.
            gaussian = gaussian_of(self.start)
            whole = self.system.x if what == _TOKENS or gaussian is None else Gaussian(*gaussian)
            trajectory = self._flow(field, whole, self.grid.times[: place + 2])
        except NonFiniteError:
            if place == 0:
                raise
            reason = f"the velocity is not finite at t = {times[0]:.10g}"
            return Ending("blew up", what, reason, *times)
        lower, upper = trajectory.blow_up or times
        return Ending(trajectory.status, what, trajectory.reason, float(lower), float(upper))

    def _flow(self, field: object, state: Any, times: Sequence[float]) -> Trajectory:
        step = self.grid.step
        rtol = self.plan.rtol if step is None else None
        return flow(field, state, times, method=self.plan.method, step=step, rtol=rtol)


# ---- Frames as rows of the store


def frames(store: Store) -> list[FrameRow]:
    """Return all frames of a store in the order of time; raise StoreError if one is missing."""
    return [frame_at(store, place) for place in range(store.count(FrameRow))]


def frame_at(store: Store, place: int) -> FrameRow:
    """Read the frame with a given index from a store; raise StoreError if it is missing."""
    for row, _ in store.rows(FrameRow, place=place):
        return row
    raise StoreError(f"{store.path} is damaged (frame {place} is missing). Choose another output folder.")


def ending(store: Store) -> Ending | None:
    """Return the reason why the flow ended early; None if it did not."""
    return next((row for row, _ in store.rows(Ending)), None)


def tokens_of(frame: FrameRow) -> Float64[Tensor, "n d"]:
    """Return the tokens of a frame, as a tensor of shape (n, d)."""
    return _tensor(frame.x, frame.n, frame.d)


def gaussian_of(frame: FrameRow) -> tuple[Float64[Tensor, " d"], Float64[Tensor, "d d"]] | None:
    """Return the mean and the covariance of the Gaussian in a frame; None if the flow has no Gaussian."""
    if frame.mean is None or frame.covariance is None:
        return None
    return _tensor(frame.mean, frame.d), _tensor(frame.covariance, frame.d, frame.d)


def _frame_row(
    place: int,
    time: float,
    x: Float64[Tensor, "n d"],
    gaussian: tuple[Tensor, Tensor] | None = None,
    evaluations: int = 0,
    seconds: float = 0.0,
) -> FrameRow:
    mean, covariance = (None, None) if gaussian is None else map(_bytes, gaussian)
    n, d = x.shape
    return FrameRow(place, time, n, d, _bytes(x), mean, covariance, evaluations, seconds)


def _bytes(x: Tensor) -> bytes:
    # Write little-endian bytes on every machine.
    return x.detach().cpu().contiguous().numpy().astype("<f8").tobytes()


def _tensor(content: bytes, *shape: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype="<f8").astype(np.float64).reshape(shape))
