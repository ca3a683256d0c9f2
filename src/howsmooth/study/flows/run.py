"""Carry out a flow frame by frame, and keep each when it is finished.

Every frame begins from the one before as it is kept, so that a flow that was interrupted gives, bit for bit,
what one that was not would have given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from howsmooth.errors import NonFiniteError, StoreError
from howsmooth.study.flows.opening import System
from howsmooth.study.flows.plan import FIXED_STEP, FlowPlan, Grid
from howsmooth.study.flows.store import Ending, FlowStore, Frame

__all__ = ["FlowOutcome", "FlowProgress", "FlowTools", "flow_tools", "run_flow"]

TOKENS = "tokens"
_GROWTHS = 10


@dataclass(frozen=True)
class FlowTools:
    """The functions that a flow is carried out with; their signatures are those of the library's own.

    Attributes
    ----------
    flow
        As :func:`howsmooth.dynamics.flow`.
    layers, sphere
        As :class:`howsmooth.dynamics.Layers` and :class:`howsmooth.dynamics.Sphere`.
    rescaled
        As :class:`howsmooth.dynamics.Rescaled`.
    gaussian
        As :class:`howsmooth.measures.Gaussian`.
    growth
        As :func:`howsmooth.dynamics.growth`.

    """

    flow: Callable[..., Any]
    layers: Callable[..., Any]
    sphere: Callable[..., Any]
    rescaled: Callable[..., Any]
    gaussian: Callable[..., Any]
    growth: Callable[..., Any]


def flow_tools() -> FlowTools:
    """Return the library's own functions."""
    from howsmooth.dynamics import Layers, Rescaled, Sphere, flow, growth
    from howsmooth.measures import Gaussian

    return FlowTools(flow, Layers, Sphere, Rescaled, Gaussian, growth)


@dataclass(frozen=True)
class FlowProgress:
    """How far a flow is: ``done`` of ``planned`` frames, ``kept`` of which were there, until which time."""

    done: int
    planned: int
    kept: int
    time: float


@dataclass(frozen=True)
class FlowOutcome:
    """What a run did.

    Attributes
    ----------
    made, kept
        Frames after the start that this process made, and that were there.
    ending
        Why the flow ended early; ``None`` if it did not.
    seconds
        Wall time.

    """

    made: int
    kept: int
    ending: Ending | None
    seconds: float


def run_flow(
    plan: FlowPlan,
    system: System,
    folder: Path,
    tools: FlowTools,
    *,
    command: str = "",
    environment: Mapping[str, str] | None = None,
    on_progress: Callable[[FlowProgress], None] = lambda progress: None,
    on_part: Callable[[str], None] = lambda words: None,
) -> FlowOutcome:
    """Make the frames that the store in ``folder`` does not have.

    Parameters
    ----------
    plan
        What to integrate, and how.
    system
        As :func:`~howsmooth.study.flows.opening.open_system` gives it for this plan.
    folder
        Of the store; made, with the store, once every check has passed.
    tools
        What to integrate with, usually :func:`flow_tools`.
    command, environment
        To be recorded.
    on_progress
        Told before the first frame and after each.
    on_part
        Told what begins when all frames are made.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the flow is impossible, before anything is kept; or if the store belongs to another one.

    """
    began = time.perf_counter()
    work = _Work(plan, system, plan.grid(system.layers), tools)
    identity = plan.settings() | system.identity()
    first = None
    if FlowStore.exists(folder):
        with FlowStore.open(folder, write=False) as there:
            there.check(identity)
    else:
        # What is impossible is refused by the first frame, before there is a store.
        first = work.after(work.start())
    with FlowStore.open(folder) as store:
        store.check(identity)
        store.begin(identity, work.start())
        kept, planned = store.count() - 1, len(work.grid.times) - 1
        if kept > planned:
            raise StoreError(f"{store.path} is damaged (it has too many frames). Choose another --out.")
        if kept < planned and store.ending() is None:
            number = store.start_run(command, environment or {})
            frame = store.last()
            on_progress(FlowProgress(frame.place, planned, kept, frame.time))
            while frame.place < planned:
                following = first if first is not None and frame.place == 0 else work.after(frame)
                if isinstance(following, Ending):
                    store.end(following)
                    break
                store.add(following, number)
                frame = following
                on_progress(FlowProgress(frame.place, planned, kept, frame.time))
        made = max(0, store.count() - 1 - kept)
        if plan.growth and store.count() > 1 and store.growth().empty:
            on_part("Measuring the growth of perturbations")
            rows = work.growth([store.frame(place).time for place in range(store.count())])
            store.add_growth(rows, store.start_run(command, environment or {}))
        return FlowOutcome(made, kept, store.ending(), time.perf_counter() - began)


@dataclass(frozen=True, eq=False)
class _Work:
    """A flow that is carried out."""

    plan: FlowPlan
    system: System
    grid: Grid
    tools: FlowTools

    def start(self) -> Frame:
        """Return the first frame."""
        x = self.system.x
        if not self.plan.closure:
            return Frame(0, 0.0, x)
        d = x.shape[1]
        covariance = self.system.radius**2 * torch.eye(d, dtype=torch.float64)
        return Frame(0, 0.0, x, torch.zeros(d, dtype=torch.float64), covariance)

    def after(self, frame: Frame) -> Frame | Ending:
        """Integrate from one frame to the next."""
        began = time.perf_counter()
        tokens = self._stretch(TOKENS, self._field, frame.x, frame.place)
        if isinstance(tokens, Ending):
            return tokens
        mean = covariance = None
        evaluations = int(tokens.evaluations)
        if frame.mean is not None:
            measure = self.tools.gaussian(frame.mean, frame.covariance)
            moved = self._stretch("Gaussian measure", self.system.maps[0], measure, frame.place)
            if isinstance(moved, Ending):
                return moved
            mean, covariance = moved.states[-1].mean, moved.states[-1].covariance
            evaluations += int(moved.evaluations)
        return Frame(
            frame.place + 1,
            self.grid.times[frame.place + 1],
            tokens.states[-1],
            mean,
            covariance,
            evaluations,
            time.perf_counter() - began,
        )

    @cached_property
    def _field(self) -> object:
        maps = self.system.maps
        if self.plan.rescale:
            return self.tools.rescaled(maps[0])
        field: object = maps[0] if self.system.layers is None else self.tools.layers(maps)
        return self.tools.sphere(field, self.system.radius) if self.plan.sphere else field

    def growth(self, times: Sequence[float]) -> list[dict[str, Any]]:
        """Measure the growth of perturbations of the start until some of the times, the last among them."""
        last = len(times) - 1
        count = min(_GROWTHS, last)
        chosen = [times[round(k * last / count)] for k in range(count + 1)]
        fixed = self.plan.method in FIXED_STEP
        step = self.grid.step if fixed else self.grid.times[1]
        found = self.tools.growth(
            self._field,
            self.system.x,
            chosen,
            method=self.plan.method if fixed else "rk4",
            step=step,
            seed=self.plan.seed,
        )
        error = found.discretisation_error
        return [
            {
                "time": float(found.times[k]),
                "value": float(found.value[k]),
                "lower": float(found.lower[k]),
                "upper": float(found.upper[k]),
                "confidence": float(found.confidence),
                "converged": bool(found.converged[k]),
                "product": float(found.product[k]),
                "exponential": float(found.exponential[k]),
                "discretisation_error": None if error is None else float(error[k]),
                "method": str(found.method),
                "step": float(found.step),
            }
            for k in range(len(chosen))
        ]

    def _stretch(self, what: str, field: object, start: object, place: int) -> Any:
        """Integrate from the time of one frame to that of the next; say why, if there is no next one."""
        times = self.grid.times[place : place + 2]
        try:
            trajectory = self._flow(field, start, times)
            if trajectory.status == "finished":
                return trajectory
            # All over again: when it ends must be compared with a finer flow from the very start.
            first = self.start()
            whole = first.x if what == TOKENS else self.tools.gaussian(first.mean, first.covariance)
            trajectory = self._flow(field, whole, self.grid.times[: place + 2])
        except NonFiniteError:
            if place == 0:
                raise
            reason = f"the velocity is not finite at t = {times[0]:.10g}"
            return Ending("blew up", what, reason, *times)
        lower, upper = trajectory.blow_up or times
        return Ending(str(trajectory.status), what, str(trajectory.reason), float(lower), float(upper))

    def _flow(self, field: object, start: object, times: Sequence[float]) -> Any:
        step = self.grid.step
        how = {"rtol": self.plan.rtol} if step is None else {"step": step}
        return self.tools.flow(field, start, times, method=self.plan.method, **how)
