"""The flow x' = Γ_μ(x) of tokens and of measures through attention.

Derivations, and the rates at which integrators, layers and particles converge: docs/theory/flows.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from howsmooth.dynamics.arguments import check_plan, check_times
from howsmooth.dynamics.fields import Velocity, as_field
from howsmooth.dynamics.integrate import ORDERS, Plan, Run, Status, integrate
from howsmooth.dynamics.states import System, system_of
from howsmooth.dynamics.trajectory import State, Trajectory
from howsmooth.errors import NonFiniteError

__all__ = ["flow"]

# Two runs with a step whose blow-ups lie further apart than this part of the time to them tell of none.
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
    on_progress: Callable[[float, State], None] | None = None,
) -> Trajectory:
    """Let tokens or a measure flow along a velocity, x' = f(X)_x, and keep the states at given times.

    Parameters
    ----------
    field
        The velocity: a map of this library with d_out = d (any attention, masked or not, behind a norm layer
        or not), :class:`Layers` of maps in sequence, :class:`Sphere` of one of these, or a callable (t, x).
    start
        Tokens (n, d) or (batch, n, d), in the dtype of the map; a
        :class:`~howsmooth.measures.DiscreteMeasure`, whose weights and positions stay as they are; or a
        :class:`~howsmooth.measures.Gaussian`, which remains one, under unmasked attention. Members of a
        batch share the steps of adaptive methods.
    times
        Increasing times, at least two. At the first the state is ``start``.
    method
        An integrator of torchdiffeq: "dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun", which
        choose their steps, or "euler", "midpoint", "heun2", "heun3", "rk4" (the 3/8 rule) with ``step``. Or
        "residual": x ← x + h f(X), residual layers with step size h; under :class:`Layers` one a layer,
        without ``step``; on a :class:`Sphere` each followed by the projection on it.
    step
        Step of the methods that do not choose it, at most the least distance of two times. Where it does not
        divide such a distance (or a layer's time), shorter steps of equal length are taken; residual layers
        are not shortened but refused.
    rtol, atol
        Tolerances of adaptive methods, held for every token alone; by default 1e-7 and 1e-9 in float64,
        1e-4 and 1e-6 in float32.
    estimate_error
        Estimate the error of the last state by a second run, at half the step or a tenth of the tolerances.
    max_steps
        Steps allowed between two times.
    on_progress
        Called as ``on_progress(time, state)`` whenever an output time has been reached.

    Returns
    -------
    Trajectory
        The states, whether all times were reached, and if not, why and when it ended.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.
    NonFiniteError
        If the start, or the velocity there, is not finite.

    Notes
    -----
    A flow that is continued from a state gives exactly the states of one that was not interrupted. Gradients
    are kept if the start asks for them; memory is that of the states, O(n d) each, and of some ten more.

    References
    ----------
    Castin, Ablin, Peyré, ICML 2024, section 2; Geshkovski et al. 2023, for the flow and its clusters.
    This library: docs/theory/flows.md.

    """
    velocity = as_field(field)
    system = system_of(velocity, start)
    moments = check_times(times, velocity)
    plan = check_plan(velocity, moments, system.start.dtype, method, step, rtol, atol, max_steps)

    def tell(time: float, y: Tensor) -> None:
        if on_progress is not None:
            on_progress(time, system.state(y))

    with contextlib.nullcontext() if system.start.requires_grad else torch.no_grad():
        _check_first_velocity(system, moments)
        run = integrate(system, system.start, moments, plan, tell)
        second: Run | None = None
        blows_up = run.status == "blew up" and plan.method != "residual"
        if estimate_error or blows_up:
            with torch.no_grad():
                second = integrate(system, system.start.detach(), moments, plan.refined())
    status, reason, blow_up = _ending(plan, run, second if blows_up else None, moments[0])
    kept = len(run.states)
    if blow_up is not None:
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
    plan: Plan, run: Run, second: Run | None, origin: float
) -> tuple[Status, str, tuple[float, float] | None]:
    """Return status, reason and the interval of a blow-up, from the run and a finer one."""
    if run.status == "finished" or run.ended is None:
        return "finished", "", None
    lower, upper = run.ended
    if run.status == "stopped":
        return "stopped", f"{run.reason}, at t = {lower:.6g}", None
    if second is not None:
        if second.status != "blew up" or second.ended is None:
            return "stopped", f"{run.reason} at t = {lower:.6g}, which a finer run does not: refine it", None
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


def _error(system: System, plan: Plan, run: Run, second: Run, kept: int) -> float:
    """Estimate the error of the last state kept, from that of a finer run (Richardson's extrapolation)."""
    last = min(kept, len(second.states)) - 1
    difference = system.distance(run.states[last].detach(), second.states[last])
    if plan.adaptive:
        return difference / (1 - 0.1)
    return difference / (1 - 0.5 ** ORDERS[plan.method])


def _check_first_velocity(system: System, moments: list[float]) -> None:
    """Raise NonFiniteError unless the velocity at the start is finite."""
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
