"""Integration of the differential equation of a flow by torchdiffeq, with a check of the state before every
step.

Each interval between two output times or switches of the field is integrated separately, from its first state
alone. Therefore a flow that is continued from one of its states gives the same numbers as an uninterrupted
flow, and the states before a blow-up are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torchdiffeq import odeint

from howsmooth.dynamics.flow_equations import System
from howsmooth.dynamics.velocity_fields import Velocity

__all__ = ["ADAPTIVE", "FIXED", "ORDERS", "FlowStates", "Integration", "Status", "integrate"]

ADAPTIVE = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")
FIXED = ("euler", "midpoint", "heun2", "heun3", "rk4", "residual")
ORDERS = {"euler": 1, "residual": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4}

Status = Literal["finished", "blew up", "stopped"]

# A run counts as a blow-up if its state has grown by the factor _GROWN and its size divided by its speed is
# at most the fraction _SUDDEN of the requested time.
_GROWN = 1e3
_SUDDEN = 1e-8
# Numbers above the largest float raised to this power will soon overflow, as their squares nearly do.
_LARGE_POWER = 0.4


@dataclass(frozen=True)
class Integration:
    """The settings of an integration: the method, and its fixed step size or the tolerances of its adaptive
    steps.
    """

    method: str
    step: float | None
    rtol: float
    atol: float
    max_steps: int

    @property
    def adaptive(self) -> bool:
        """True if the integration method chooses its own step sizes."""
        return self.method in ADAPTIVE

    def refined(self) -> Integration:
        """Return more accurate settings: half the step size, or a tenth of the tolerances."""
        if self.step is not None:
            return replace(self, step=self.step / 2, max_steps=2 * self.max_steps)
        return replace(self, rtol=self.rtol / 10, atol=self.atol / 10, max_steps=4 * self.max_steps)

    def steps(self, length: float) -> int:
        """Return the number of equal steps of a fixed step size in a time interval of the given length."""
        assert self.step is not None
        # A length that is a multiple of the step up to rounding must not take one step more.
        return max(1, math.ceil(length / self.step - 1e-6))


@dataclass
class FlowStates:
    """The result of the integration of a flow: the states at the times that were reached, and why the
    integration ended.
    """

    states: list[Tensor]
    evaluations: int = 0
    drift: float | None = None
    status: Status = "finished"
    reason: str = ""
    # The time of the last finite state, and the first time without a finite state.
    ended: tuple[float, float] | None = None


class _EndedError(Exception):
    def __init__(self, status: Status, reason: str, lower: float, upper: float) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason
        self.lower = lower
        self.upper = upper


class _SmallerStepError(Exception):
    """The exception after which a time step is repeated with a smaller step size, because its result was NaN
    or infinite.
    """


@dataclass
class _CheckedVelocity:
    """The velocity of a flow as a function for torchdiffeq, with a check of the state before each step."""

    velocity: Velocity
    finite: Callable[[Tensor], bool]
    plan: Integration
    span: float
    initial: float
    time: float
    state: Tensor
    evaluations: int = 0
    steps: int = 0
    # Length of the last step that was tried.
    tried: float | None = None

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.evaluations += 1
        return self.velocity(t, y)

    def callback_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        time, step = float(t0), float(dt)
        if not self.finite(y0):
            # An adaptive method can accept a step that overflows, if its tolerance overflows, too.
            raise _SmallerStepError if self.plan.adaptive else self.overflow(self.time, time)
        self.steps += 1
        if self.steps > self.plan.max_steps:
            raise _EndedError(
                "stopped",
                f"{self.plan.max_steps} steps did not reach the next output time",
                time,
                time + step,
            )
        self.time, self.state = time, y0
        if not self.plan.adaptive:
            return
        if step == 0:
            raise _SmallerStepError
        if not time + step > time:
            raise self.exhausted()
        self.tried = step

    def overflow(self, lower: float, upper: float) -> _EndedError:
        return _EndedError("blew up", f"the numbers left the range of {_name(self.state)}", lower, upper)

    def exhausted(self) -> _EndedError:
        lower = self.time
        upper = lower + max(self.tried or 0.0, 4 * math.ulp(lower))
        # A state that is huge, or that grows faster than the time resolution allows, blows up. A bounded
        # state means that the velocity itself is the problem.
        size, speed = _size(self.state), _size(self(torch.tensor(lower), self.state))
        if size > torch.finfo(self.state.dtype).max ** _LARGE_POWER:
            return self.overflow(lower, upper)
        if size > _GROWN * self.initial and size <= _SUDDEN * self.span * speed:
            return _EndedError(
                "blew up", "the state grows beyond every bound within a finite time", lower, upper
            )
        return _EndedError(
            "stopped",
            "no step is small enough, though the state is bounded: the velocity jumps, is not finite, or "
            "has rounding errors above the tolerance",
            lower,
            upper,
        )


def integrate(system: System, start: Tensor, times: list[float], plan: Integration) -> FlowStates:
    """Integrate a flow to the last time, or until it blows up, and return the state at each time."""
    run = FlowStates([start], drift=system.drift(start))
    span, initial = times[-1] - times[0], _size(start)
    y = start
    for begin, end in pairwise(times):
        inner = [s for s in system.switches if begin < s < end]
        for left, right in pairwise([begin, *inner, end]):
            # The integrator starts anew at each output time and each switch, from the state alone.
            watch = _CheckedVelocity(
                system.velocity(left, right), system.finite, plan, span, initial, left, y
            )
            try:
                y = _layers(system, watch, left, right) if plan.method == "residual" else _ode(watch, right)
                if not system.finite(y):
                    raise watch.overflow(watch.time, right)
            except _EndedError as ended:
                run.status, run.reason = ended.status, ended.reason
                run.ended = (ended.lower, ended.upper)
                return run
            finally:
                run.evaluations += watch.evaluations
            drift = system.drift(y)
            if drift is not None and plan.method != "residual":
                run.drift = max(drift, run.drift or 0.0)
            reached = system.project(y)
            y = system.restart(reached)
        run.states.append(reached)
    return run


def _layers(system: System, watch: _CheckedVelocity, begin: float, end: float) -> Tensor:
    """Apply layers y ↦ y + h v(y), each followed by the flow's projection, over one time interval."""
    count = watch.plan.steps(end - begin)
    h = (end - begin) / count
    watch.velocity = system.layer(begin, end)
    y = watch.state
    for i in range(count):
        t = torch.tensor(begin + i * h, dtype=torch.float64, device=y.device)
        watch.callback_step(t, y, torch.tensor(h))
        y = system.project(y + h * watch(t, y))
    return y


def _ode(watch: _CheckedVelocity, end: float) -> Tensor:
    """Integrate by torchdiffeq; where a trial step overflows, resume with a smaller step."""
    first: float | None = None
    while True:
        begin, y = watch.time, watch.state
        t = torch.tensor([begin, end], dtype=torch.float64, device=y.device)
        options: dict[str, object]
        if watch.plan.adaptive:
            # ``step_t`` makes a step end at the output time, so that the state there is not interpolated.
            options = {"step_t": t[1:], "norm": _largest_token}
            if first is not None:
                options["first_step"] = first
        else:
            grid = torch.linspace(begin, end, watch.plan.steps(end - begin) + 1, dtype=t.dtype).to(t.device)
            # Fixed methods take equal steps that end exactly at the output time.
            options = {"grid_constructor": lambda func, y0, t, grid=grid: grid}
        try:
            solution = odeint(
                watch,
                y,
                t,
                rtol=watch.plan.rtol,
                atol=watch.plan.atol,
                method=watch.plan.method,
                options=options,
            )
        except _SmallerStepError:
            # A trial step overflowed: resume at the last good state with a step a tenth as long.
            first = (end - begin) * 1e-3 if watch.tried is None else min(watch.tried, end - begin) / 10
            size, speed = _size(watch.state), _size(watch(t[0], watch.state))
            # A step that changes the state by less than its rounding cannot make progress.
            still = first * speed <= torch.finfo(y.dtype).eps * size / 8
            if still or not watch.time + first > watch.time:
                raise watch.exhausted() from None
            watch.tried = first
            continue
        reached: Tensor = solution[-1]
        return reached


@torch.no_grad()
def _largest_token(error: Tensor) -> Tensor:
    """Return the largest root mean square error of a token. The mean over tokens would hide one token."""
    return error.detach().square().mean(dim=-1).max().sqrt()


def _size(y: Tensor) -> float:
    return float(y.detach().abs().max())


def _name(y: Tensor) -> str:
    return str(y.dtype).removeprefix("torch.")
