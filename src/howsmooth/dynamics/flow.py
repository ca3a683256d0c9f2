"""The flow of tokens or of a measure through attention: the solution of dX/dt = f(X) with attention f as
velocity.

Derivations: documentation page "Flows: tokens, measures and Gaussians through depth".
"""

from __future__ import annotations

import contextlib

import torch

from howsmooth.dynamics.arguments import check_plan, check_times
from howsmooth.dynamics.flow_equations import System, system_of
from howsmooth.dynamics.integrate import ORDERS, FlowStates, Integration, Status, integrate
from howsmooth.dynamics.trajectory import Trajectory
from howsmooth.dynamics.velocity_fields import Velocity, as_field
from howsmooth.errors import NonFiniteError

__all__ = ["flow"]

# Two fixed-step runs confirm a blow-up only if their blow-up times differ by at most this fraction of the
# time from the start.
_APART = 0.25


def flow(
    field: object,
    start: object,
    times: object,
    *,
    method: object = "dopri5",
    step: object = None,
    rtol: object = None,
    atol: object = None,
    estimate_error: bool = False,
    max_steps: int = 100_000,
) -> Trajectory:
    """Integrate tokens or a measure along a velocity field, such as attention, and return the states at the
    given times.

    This integrates x_i' = f(X)_i.

    Parameters
    ----------
    field
        A map of this library with d_out = d, such as attention, which is the velocity at all times;
        :class:`Layers`, :class:`Sphere` or another field of this module; or a function of the time t and the
        tokens x that returns velocities of the shape of x.
    start
        Tokens (n, d) or (batch, n, d) in float32 or float64, a :class:`~howsmooth.measures.DiscreteMeasure`
        or a :class:`~howsmooth.measures.Gaussian`.
    times
        At least two increasing times, as a tensor or a sequence. ``start`` is the state at the first one. The
        velocity of a map is per unit of time; each of ``Layers`` lasts one unit, from time 0, unless they
        have another ``total_time``.
    method
        An integrator that chooses its steps ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun") or
        one with a fixed step ("euler", "midpoint", "heun2", "heun3", "rk4" by the 3/8 rule, or "residual",
        the layers X + h f(X) with step size h).
    step
        The step of a method with a fixed step, in units of time, at most the smallest difference of two
        times. "residual" with ``Layers`` takes one step per layer. None for the other methods.
    rtol, atol
        The relative and absolute error of a step that a method which chooses its steps accepts. Default: 1e-7
        and 1e-9 in float64, 1e-4 and 1e-6 in float32. None for a method with a fixed step.
    estimate_error
        Whether to estimate the error of the last state, by a second run with half the step or a tenth of the
        tolerances.
    max_steps
        The largest number of steps between two times.

    Returns
    -------
    Trajectory
        The states and the status of the flow: whether it reached all times, and if not, why and when it
        ended.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value, a shape does not fit the field, the times do not increase or
        lie outside those of ``Layers``, or a step or tolerance is given to a method without it; the message
        names the argument.
    NonFiniteError
        If the start, or the velocity at the start, contains NaN or infinity.

    Notes
    -----
    A flow that is continued from a returned state gives exactly the same states as one flow over all times.
    The states have gradients if ``start`` requires them. The memory is O(n d) for each returned state, plus
    about ten more states.

    References
    ----------
    Castin, Ablin, Peyré, ICML 2024, section 2. For the flow and its clusters: Geshkovski et al. 2023.
    Documentation page "Flows: tokens, measures and Gaussians through depth".

    """
    velocity = as_field(field)
    system = system_of(velocity, start)
    moments = check_times(times, velocity)
    plan = check_plan(velocity, moments, system.start.dtype, method, step, rtol, atol, max_steps)

    with contextlib.nullcontext() if system.start.requires_grad else torch.no_grad():
        _check_first_velocity(system, moments)
        run = integrate(system, system.start, moments, plan)
        second: FlowStates | None = None
        blows_up = run.status == "blew up" and plan.method != "residual"
        # A second, finer run estimates the error, and confirms or rejects a blow-up.
        if estimate_error or blows_up:
            with torch.no_grad():
                second = integrate(system, system.start.detach(), moments, plan.refined())
    status, reason, blow_up = _ending(plan, run, second if blows_up else None, moments[0])
    kept = len(run.states)
    if blow_up is not None:
        # States from the beginning of the interval on may lie beyond the true blow-up.
        kept = max(1, sum(time < blow_up[0] for time in moments[:kept]))
    error = _error(system, plan, run, second, kept) if second is not None and estimate_error else None
    return Trajectory(
        times=torch.tensor(moments[:kept], dtype=torch.float64),
        states=system.states(run.states[:kept]),
        status=status,
        reason=reason,
        blow_up=blow_up,
        error=error,
        drift=run.drift,
        evaluations=1 + run.evaluations + (0 if second is None else second.evaluations),
        method=plan.method,
        step=plan.step,
        rtol=plan.rtol if plan.adaptive else None,
        atol=plan.atol if plan.adaptive else None,
        field=velocity.describe(),
    )


def _ending(
    plan: Integration, run: FlowStates, second: FlowStates | None, origin: float
) -> tuple[Status, str, tuple[float, float] | None]:
    """Return the status, the reason and the interval of a blow-up, by a more accurate integration."""
    if run.status == "finished" or run.ended is None:
        return "finished", "", None
    lower, upper = run.ended
    if run.status == "stopped":
        return "stopped", f"{run.reason}, at t = {lower:.6g}", None
    if second is not None:
        if second.status != "blew up" or second.ended is None:
            return (
                "stopped",
                f"{run.reason} at t = {lower:.6g}, but not in a second, finer run: take a smaller step or "
                "smaller tolerances",
                None,
            )
        apart = abs(sum(run.ended) - sum(second.ended)) / 2
        if not plan.adaptive and apart > _APART * max(lower - origin, second.ended[0] - origin):
            return (
                "stopped",
                f"{run.reason} at t = {lower:.6g}, with half the step at t = {second.ended[0]:.6g}: the step "
                "is too large",
                None,
            )
        margin = 2 * apart + (plan.rtol * (upper - origin) if plan.step is None else plan.step)
        lower = max(origin, min(lower, second.ended[0]) - margin)
        upper = max(upper, second.ended[1]) + margin
    return "blew up", f"{run.reason}, between t = {lower:.10g} and {upper:.10g}", (lower, upper)


def _error(system: System, plan: Integration, run: FlowStates, second: FlowStates, kept: int) -> float:
    """Estimate the error of the last of ``kept`` states by Richardson extrapolation."""
    last = min(kept, len(second.states)) - 1
    difference = system.distance(run.states[last].detach(), second.states[last])
    if plan.adaptive:
        return difference / (1 - 0.1)
    return difference / (1 - 0.5 ** ORDERS[plan.method])


def _check_first_velocity(system: System, moments: list[float]) -> None:
    end = min([s for s in system.switches if s > moments[0]] + [moments[1]])
    first: Velocity = system.velocity(moments[0], end)
    with torch.no_grad():
        t = torch.tensor(moments[0], dtype=torch.float64, device=system.start.device)
        v = first(t, system.start.detach())
    if not bool(torch.isfinite(v).all()):
        raise NonFiniteError(
            "start",
            expected="tokens at which the velocity is finite",
            got="a velocity with NaN or infinity",
            remedy="The scores overflow, or the field is not defined there.",
        )
