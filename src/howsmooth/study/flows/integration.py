"""Integrate a flow from one frame to the next, and measure how perturbations of its start grow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from howsmooth.dynamics import Layers, Rescaled, Sphere, Trajectory, flow, growth
from howsmooth.errors import NonFiniteError
from howsmooth.measures import Gaussian
from howsmooth.study.flows.flow_plan import FIXED_STEP, FlowPlan
from howsmooth.study.flows.flow_system import System
from howsmooth.study.flows.frames import frame_row, gaussian_of, tokens_of
from howsmooth.study.records import Ending, FrameRow, GrowthRow

__all__ = ["Integration"]

_TOKENS, _MEASURE = "tokens", "Gaussian measure"


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
        """The stored state (frame) of the flow at time 0, with the initial tokens."""
        x, d = self.system.x, self.system.x.shape[1]
        if not self.plan.closure:
            return frame_row(0, 0.0, x)
        covariance = self.system.radius**2 * torch.eye(d, dtype=torch.float64)
        return frame_row(0, 0.0, x, (torch.zeros(d, dtype=torch.float64), covariance))

    def after(self, frame: FrameRow) -> FrameRow | Ending:
        """Integrate a flow from a stored state (frame) to the next; return that, or the reason why it ended.

        The step from the start is computed only once.

        Raises
        ------
        howsmooth.errors.HowsmoothError
            If the flow is impossible, which the step from the start reveals.

        """
        return self._first if frame.place == 0 else self._moved(frame)

    @cached_property
    def _first(self) -> FrameRow | Ending:
        return self._moved(self.start)

    def growth(self, times: Sequence[float]) -> list[GrowthRow]:
        """Measure how far perturbations of the initial tokens grow up to some times, with a fixed step."""
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
        return frame_row(place, self.grid.times[place], x, gaussian, evaluations, seconds)

    @cached_property
    def _field(self) -> object:
        maps = self.system.maps
        if self.plan.rescale:
            return Rescaled(maps[0])
        field = maps[0] if self.system.layers is None else Layers(maps)
        return Sphere(field, self.system.radius) if self.plan.sphere else field

    def _to_next_frame(self, what: str, field: object, state: Any, place: int) -> Trajectory | Ending:
        """Integrate the flow from one stored time to the next; return the path, or why the flow ended."""
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
