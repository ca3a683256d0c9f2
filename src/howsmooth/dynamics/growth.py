"""How a flow of tokens spreads perturbations: the largest singular value of its flow map, with an interval.

For X' = f(t, X) the flow map Φ_t sends X(0) to X(t), and ‖D_X Φ_t‖₂ is the factor by which the worst small
perturbation of X(0) has grown at t: the local Lipschitz constant of all the depth up to t. It is at most the
product of the local constants of the steps. Derivations: docs/theory/growth.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.accuracy import check_accuracy
from howsmooth.dynamics.arguments import check_plan, check_times
from howsmooth.dynamics.fields import Field, Layers, MapField, Sphere, as_field
from howsmooth.dynamics.integrate import FIXED, ORDERS
from howsmooth.dynamics.linearised import LinearisedFlow
from howsmooth.dynamics.rescaled import Rescaled
from howsmooth.dynamics.states import Tokens, system_of
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.jacobian import allowance_for_rounding, moved_by_rounding
from howsmooth.spectral import LeadingTriplet, LinearOperator, golub_kahan

__all__ = ["Growth", "growth"]

_KEPT_BYTES = 1 << 30
# The relative rounding from which on golub_kahan refuses an operator.
_NO_DIGIT = 0.1
# Width of the intervals of the velocity's local constants: the values are right to its square, and their
# integral is no bound.
_RATE = 1e-2


@dataclass(frozen=True)
class Growth:
    """The growth ‖D_X Φ‖₂ of a flow from the first time to each time, beside what its steps allow.

    Attributes
    ----------
    times
        (frames,); the first is the start, where the growth is 1.
    value, lower, upper
        The leading singular value of the flow map of the method up to each time, float64, (frames,), and an
        interval that holds it with probability at least ``confidence`` each, rounding included.
    confidence, converged, iterations, rtol, seed
        As for :func:`howsmooth.local_lipschitz`.
    product
        Product of the upper limits of the steps' own local constants up to each time, (frames,): at least
        the growth, with probability at least ``confidence`` for all frames together.
    exponential
        exp(∫‖J‖dt) with ‖J‖ the local constant of the velocity along the trajectory, (frames,): what bounds
        the growth if of each layer only ‖J‖ is known. It exceeds the product, in which the parts of J that
        turn and shrink count too. The integral is the method's own quadrature, so this is no strict bound.
    discretisation_error
        Estimate of what the step changes in ``value``, (frames,): from the growth at half the step. None if
        it was not asked for.
    input_direction, output_direction
        Unit vectors (frames, n, d): the perturbation of the start that grows most until each time, and where
        the flow carries it. At the first time they are zero: nothing has happened yet. Of a measure they hold
        √a_i e_i, e_i the displacement of the atom of weight a_i.
    states
        (frames, n, d), float64.
    step_times, step_value, step_lower, step_upper
        Start of each step, (steps,), and the local constant of the step's map there, with its interval.
    step_rate
        ∫‖J‖dt over each step, (steps,).
    method, step, steps
        The method, the largest step, how many were made.

    """

    times: Float[Tensor, " frames"]
    value: Float[Tensor, " frames"]
    lower: Float[Tensor, " frames"]
    upper: Float[Tensor, " frames"]
    confidence: float
    converged: Bool[Tensor, " frames"]
    iterations: Int[Tensor, " frames"]
    product: Float[Tensor, " frames"]
    exponential: Float[Tensor, " frames"]
    discretisation_error: Float[Tensor, " frames"] | None
    input_direction: Float[Tensor, "frames n d"]
    output_direction: Float[Tensor, "frames n d"]
    states: Float[Tensor, "frames n d"]
    step_times: Float[Tensor, " steps"]
    step_value: Float[Tensor, " steps"]
    step_lower: Float[Tensor, " steps"]
    step_upper: Float[Tensor, " steps"]
    step_rate: Float[Tensor, " steps"]
    method: str
    step: float
    rtol: float
    seed: int

    @property
    def steps(self) -> int:
        """How many steps the method made."""
        return len(self.step_times)

    @property
    def remedy(self) -> str:
        """What to do about times that did not converge; empty if all did."""
        missed = int((~self.converged).sum())
        if not missed:
            return ""
        return (
            f"{missed} of {len(self.times)} times did not reach rtol = {self.rtol:g}: raise max_iterations "
            "or loosen rtol. Their intervals hold all the same."
        )

    def __repr__(self) -> str:
        error = self.discretisation_error
        discretised = "not estimated" if error is None else f"about {float(error[-1]):.1e}"
        status = "converged" if bool(self.converged.all()) else "NOT converged"
        return (
            f"Growth({float(self.value[-1]):.6g} in [{float(self.lower[-1]):.6g}, "
            f"{float(self.upper[-1]):.6g}] at {self.confidence:.4%} confidence until "
            f"t = {float(self.times[-1]):g}, {status}; product of the steps' constants "
            f"{float(self.product[-1]):.6g}; {self.steps} steps of {self.method}, "
            f"discretisation error {discretised})"
        )


def growth(
    field: object,
    start: object,
    times: object,
    *,
    method: str = "rk4",
    step: float | None = None,
    rtol: float = 1e-4,
    confidence: float = 0.999,
    max_iterations: int = 200,
    seed: int = 0,
    estimate_error: bool = True,
    max_steps: int = 100_000,
    kept_bytes: int = _KEPT_BYTES,
) -> Growth:
    """Measure how much a flow has spread the worst small perturbation of its start.

    The flow map of a fixed-step method is differentiated step by step, and its leading singular value found
    by the same Golub–Kahan bidiagonalisation, with the same interval, as :func:`howsmooth.local_lipschitz`.
    All is computed in float64.

    Parameters
    ----------
    field, start, times
        As for :func:`flow`, of one sequence of tokens (n, d) or of a discrete measure, whose perturbations
        e_i are measured in the norm (Σ_i a_i |e_i|²)^½. On a :class:`Sphere` only perturbations along it
        count, and tokens are put back on it after each step.
    method, step, max_steps
        As for :func:`flow`: a method with a fixed step, "rk4" by default. One that chooses its steps by the
        tokens has no derivative.
    rtol, confidence, max_iterations, seed
        As for :func:`howsmooth.local_lipschitz`, at each time. The product of the steps' constants holds
        with ``confidence`` as a whole.
    estimate_error
        Measure the growth at half the step too. Residual :class:`Layers` are not halved: they are what they
        are.
    kept_bytes
        Jacobians of the velocity (n² numbers a head each) are kept in memory up to this; what is beyond
        it is made anew at each product.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.
    NonFiniteError
        If the flow leaves the range of float64 on the way, or rounding leaves its Jacobian no digit.
    DerivativeError
        If the field cannot be differentiated.

    """
    _check_solver(rtol, confidence, max_iterations, seed)
    if method not in FIXED:
        raise ArgumentError(
            "method",
            expected=f"one of {', '.join(FIXED)}",
            got=repr(method),
            remedy="A method that chooses its steps by the tokens has no derivative.",
        )
    velocity = as_field(field)
    system = _in_double(velocity, start)
    t = check_times(times, velocity)
    plan = check_plan(velocity, t, torch.float64, method, step, None, None, max_steps)

    def solve(
        operator: LinearOperator, index: int, confidence: float = confidence, rtol: float = rtol
    ) -> LeadingTriplet:
        return golub_kahan(
            operator,
            _start_vector(operator, seed, index),
            rtol=rtol,
            confidence=confidence,
            max_iterations=max_iterations,
        )

    trajectory = LinearisedFlow(system, t, plan, kept_bytes)
    each = 1 - (1 - confidence) / len(trajectory.steps)
    check_accuracy(rtol, each, "float64")
    found = _along(trajectory, t, solve)
    stages = len(trajectory.tableau.b) + 1
    by_step = [solve(trajectory.step(i), len(t) + i * stages, each) for i in range(len(trajectory.steps))]
    rates = torch.tensor(
        [
            _rate(trajectory, i, partial(solve, rtol=_RATE), len(t) + i * stages)
            for i in range(len(trajectory.steps))
        ],
        dtype=torch.float64,
    )
    error = None
    layers = velocity.field if isinstance(velocity, Sphere) else velocity
    if estimate_error and not (method == "residual" and isinstance(layers, Layers)):
        halved = _along(LinearisedFlow(system, t, plan.refined(), kept_bytes), t, solve)
        error = (_values(halved, "sigma", 1.0) - _values(found, "sigma", 1.0)).abs()
        error = error / (1 - 0.5 ** ORDERS[method])

    def up_to(logs: Tensor) -> Tensor:
        total = torch.cat((logs.new_zeros(1), logs.cumsum(0)))
        return total[torch.tensor(trajectory.steps_until)].exp()

    step_upper = _values(by_step, "upper")
    zero = torch.zeros_like(system.start)[None]
    return Growth(
        times=torch.tensor(t, dtype=torch.float64),
        value=_values(found, "sigma", 1.0),
        lower=_values(found, "lower", 1.0),
        upper=_values(found, "upper", 1.0),
        confidence=confidence,
        converged=torch.tensor([True, *(bool(one.converged) for one in found)]),
        iterations=torch.tensor([0, *(int(one.steps) for one in found)]),
        product=up_to(step_upper.log()),
        exponential=up_to(rates),
        discretisation_error=error,
        input_direction=torch.cat([zero, *(one.right for one in found)]),
        output_direction=torch.cat([zero, *(one.left for one in found)]),
        states=torch.stack(trajectory.states),
        step_times=torch.tensor([one.begin for one in trajectory.steps], dtype=torch.float64),
        step_value=_values(by_step, "sigma"),
        step_lower=_values(by_step, "lower"),
        step_upper=step_upper,
        step_rate=rates,
        method=method,
        step=plan.step if plan.step is not None else t[-1] - t[0],
        rtol=rtol,
        seed=seed,
    )


Solve = Callable[[LinearOperator, int], LeadingTriplet]


def _along(trajectory: LinearisedFlow, times: list[float], solve: Solve) -> list[LeadingTriplet]:
    """Solve for the flow map up to each time but the first."""
    rounding = _rounding(trajectory, times)
    for time, relative in zip(times, rounding, strict=True):
        if not float(relative) < _NO_DIGIT:
            raise NonFiniteError(
                "times",
                expected="times until which rounding leaves the growth a digit",
                got=f"t = {time:g}, where it may be off by a factor of {1 + float(relative):.2g}",
                remedy="End earlier: the scores are too large by then, or the flow spreads rounding itself.",
            )
    return [solve(trajectory.until(frame, rounding[frame]), frame) for frame in range(1, len(times))]


def _rate(trajectory: LinearisedFlow, i: int, solve: Solve, index: int) -> float:
    """Integrate the local constant of the velocity over step ``i``; starts are numbered after ``index``."""
    stages = enumerate(zip(trajectory.rates(i), trajectory.tableau.b, strict=True), start=index + 1)
    local = [weight * float(solve(stage, s).sigma) for s, (stage, weight) in stages if weight]
    return trajectory.steps[i].length * sum(local)


def _rounding(trajectory: LinearisedFlow, times: list[float]) -> list[Tensor]:
    """Return the relative error of the growth up to each time that rounding may cause.

    The products' own errors add up over the steps. And a computed trajectory is a true one of a start off by
    rounding, which the flow may spread: so a product is taken at starts moved by one machine epsilon too, and
    what that changes is allowed for as in :class:`~howsmooth.jacobian.AutodiffJacobian`.
    """
    system = trajectory.system
    x = system.start
    generator = torch.Generator().manual_seed(1)
    e = torch.randn(1, *x.shape, generator=generator, dtype=torch.float64).to(x)
    beside = [Tokens(system.field, moved, system.weighting) for moved in moved_by_rounding(x)]
    moved = [_products(LinearisedFlow(start, times, trajectory.plan, 0), e) for start in beside]
    found: list[Tensor] = []
    for (product, own), *others in zip(_products(trajectory, e), *moved, strict=True):
        found.append(own + allowance_for_rounding([other for other, _ in others], product))
    return found


def _products(trajectory: LinearisedFlow, e: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the product with e of the flow map up to each time, and the rounding of all products in it."""
    rounding = torch.zeros(1, dtype=torch.float64)
    frames = [(e, rounding)]
    for first, last in pairwise(trajectory.steps_until):
        for i in range(first, last):
            step = trajectory.step(i)
            e, rounding = step.product(e), rounding + step.rounding
        frames.append((e, rounding))
    return frames


def _values(found: Sequence[LeadingTriplet], name: str, first: float | None = None) -> Tensor:
    numbers = [float(getattr(one, name)) for one in found]
    return torch.tensor(numbers if first is None else [first, *numbers], dtype=torch.float64)


def _start_vector(operator: LinearOperator, seed: int, index: int) -> Tensor:
    """Return a Gaussian start of its own stream, whatever else is measured."""
    state = int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0])
    generator = torch.Generator().manual_seed(state - 2**64 * (state >= 2**63))
    drawn = torch.randn(operator.batch, *operator.in_shape, generator=generator, dtype=torch.float64)
    return drawn.to(device=operator.device, dtype=operator.dtype)


# ---- checks of arguments


def _in_double(field: Field, start: object) -> Tokens:
    """Return field and start in float64, after checking that they fit."""
    system = system_of(field, start)
    if not isinstance(system, Tokens) or system.start.ndim != 2:
        got = f"shape {tuple(start.shape)}" if isinstance(start, Tensor) else type(start).__name__
        raise ArgumentError(
            "start",
            expected="tokens (n, d) or a discrete measure",
            got=got,
            remedy="Measure one sequence at a time.",
        )
    exact = field if system.start.dtype == torch.float64 else _field_in_double(field)
    return Tokens(exact, exact.settle(system.start.detach().double()), system.weighting)


def _field_in_double(field: Field) -> Field:
    match field:
        case MapField():
            return MapField(field.map.to(dtype=torch.float64))
        case Layers():
            return Layers([f.to(dtype=torch.float64) for f in field.maps], field.total_time)
        case Rescaled():
            return Rescaled(field.attention.to(dtype=torch.float64))
        case Sphere():
            return Sphere(_field_in_double(field.field), field.radius)
        case _:
            raise ArgumentError(
                "start",
                expected="float64 tokens, where the velocity is a function",
                got="float32",
                remedy="Write the function for float64 and give start.double().",
            )


def _check_solver(rtol: float, confidence: float, max_iterations: object, seed: object) -> None:
    check_accuracy(rtol, confidence, "float64")
    for name, number, least in (("max_iterations", max_iterations, 1), ("seed", seed, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ArgumentError(name, expected=f"an integer >= {least}", got=repr(number))
