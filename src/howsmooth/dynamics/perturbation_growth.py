"""The growth of small perturbations of the start of a flow, measured by the norm of the Jacobian of its flow
map.

For X' = f(t, X) the flow map Φ_t maps X(0) to X(t). ‖D_X Φ_t‖₂ is the factor by which the flow amplifies the
worst small perturbation of X(0) until time t, that is, the local Lipschitz constant of all layers up to t. It
is at most the product of the local constants of the steps. Derivations: documentation page "Growth along a
flow, clusters, rescaled tokens".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.dynamics.arguments import check_plan, check_times
from howsmooth.dynamics.flow_equations import Tokens, system_of
from howsmooth.dynamics.integrate import FIXED, ORDERS
from howsmooth.dynamics.linearised_flow import LinearisedFlow
from howsmooth.dynamics.rescaled_tokens import Rescaled
from howsmooth.dynamics.velocity_fields import Field, Layers, MapField, Sphere, as_field
from howsmooth.errors import ArgumentError, NonFiniteError, check_whole
from howsmooth.jacobian.autodiff import allowance_for_rounding, moved_by_rounding
from howsmooth.results.result import Result
from howsmooth.rounding import interval_in_digits
from howsmooth.spectral import LeadingTriplet, LinearOperator, lanczos

if TYPE_CHECKING:
    import pandas as pd

    from howsmooth.results.curves import Curve

__all__ = ["Growth", "growth"]

_KEPT_BYTES = 1 << 30
# lanczos raises an error for an operator with this relative rounding error or more.
_NO_DIGIT = 0.1
# Relative width of the intervals for the velocity's local constants. A wide interval is enough here: the
# error of the values is of the order of its square, and their integral is not a strict bound anyway.
_RATE = 1e-2


@dataclass(frozen=True)
class Growth(Result):
    """The factor by which a flow amplifies small perturbations of its start, for each time.

    The growth is the norm ‖D_X Φ‖₂ of the Jacobian of the flow map Φ.

    Attributes
    ----------
    times
        The times, (frames,). At the first time, the start, the growth is 1.
    value, lower, upper
        The leading singular value of the method's flow map up to each time, float64, (frames,), and an
        interval that contains it with probability at least ``confidence`` for each time. The interval allows
        for rounding.
    confidence, converged, iterations, rtol, seed
        As for :func:`howsmooth.local_lipschitz`.
    product
        Product of the upper limits of the local constants of all steps up to each time, (frames,). It is at
        least the growth, with probability at least ``confidence`` for all frames together.
    exponential
        exp(∫‖J‖dt), (frames,), where ‖J‖ is the local constant of the velocity along the trajectory: the
        bound on the growth if only ‖J‖ is known for each layer. It exceeds the product, which also accounts
        for the parts of J that rotate or contract. The integral is computed with the method's quadrature
        weights, so this number is not a strict bound.
    discretisation_error
        Estimate of the discretisation error of ``value``, (frames,), from the growth with half the step. None
        if it was not requested.
    input_direction, output_direction
        Unit vectors (frames, n, d): the perturbation of the start that grows most until each time, and the
        direction of the resulting change. At the first time they are zero. For a measure, their rows are √a_i
        e_i, where e_i is the displacement of the atom with weight a_i.
    states
        The tokens or atoms at each time, (frames, n, d), float64.
    step_times, step_value, step_lower, step_upper
        Start time of each step, (steps,), and the local constant of the step's map with its interval.
    step_rate
        ∫‖J‖dt over each step, (steps,).
    method, step, steps
        The method, its largest step, and the number of steps.

    """

    NAME: ClassVar[str] = "growth"
    TITLE: ClassVar[str] = "Growth along a flow"
    AXIS: ClassVar[str] = "time"

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
    def table(self) -> pd.DataFrame:
        """A table of the growth factors with their intervals and bounds, one row for each time.

        Its columns are ``time``, ``value``, ``lower``, ``upper``, ``converged``, ``iterations``, ``product``
        and ``exponential``.
        """
        import pandas as pd  # takes half a second, which measuring alone does not need

        names = ("value", "lower", "upper", "converged", "iterations", "product", "exponential")
        return pd.DataFrame({"time": self.times} | {name: getattr(self, name).numpy() for name in names})

    def _curves(self) -> list[Curve]:
        from howsmooth.results.curves import DASHED, Curve

        looks = (("product", "product of the steps", "#e07b00"), ("exponential", "exp(∫‖J‖dt)", "#7f7f7f"))
        table = self.table
        return super()._curves() + [
            Curve(table["time"], table[name], label, colour, dashes=DASHED) for name, label, colour in looks
        ]

    @property
    def steps(self) -> int:
        """The number of time steps that the integration took."""
        return len(self.step_times)

    @property
    def remedy(self) -> str:
        """Advice on what to do if some interval is too wide, or an empty string if none is."""
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
            f"Growth({float(self.value[-1]):.6g} in "
            f"{interval_in_digits(float(self.lower[-1]), float(self.upper[-1]))} at "
            f"{100 * self.confidence:.6g} % confidence until "
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
    """Measure the largest factor by which a flow amplifies a small perturbation of its start.

    The flow map of a fixed-step method is differentiated step by step. Its leading singular value is computed
    by the Lanczos method with an interval, as in :func:`howsmooth.local_lipschitz`. All
    computations are in float64.

    Parameters
    ----------
    field, start, times
        As for :func:`flow`, for one sequence of tokens (n, d) or one discrete measure. Perturbations e_i of a
        measure's atoms are measured in the norm (Σ_i a_i |e_i|²)^½. On a :class:`Sphere` only perturbations
        tangent to the sphere count, and tokens are projected onto the sphere after each step.
    method, step, max_steps
        As for :func:`flow`. The method must have a fixed step, because a method that adapts its steps to the
        tokens is not differentiable.
    rtol, confidence, max_iterations, seed
        As for :func:`howsmooth.local_lipschitz`, at each time. The product of the steps' constants is a bound
        with probability at least ``confidence`` for all steps together.
    estimate_error
        Whether to measure the growth with half the step, too. For residual :class:`Layers` there is no
        discretisation error to estimate.
    kept_bytes
        Bytes for Jacobians of the velocity, which take n² numbers per head each. Jacobians that do not fit
        are computed again at each product.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value; the message names the argument.
    NonFiniteError
        If the flow leaves the range of float64, or rounding errors are as large as its Jacobian.
    DerivativeError
        If the field cannot be differentiated.

    """
    check_accuracy(rtol, confidence, "float64")
    check_whole("max_iterations", max_iterations)
    check_whole("seed", seed, least=0)
    if method not in FIXED:
        raise ArgumentError(
            "method",
            expected=f"one of {', '.join(FIXED)}",
            got=repr(method),
            remedy="A method that adapts its steps to the tokens is not differentiable.",
        )
    velocity = as_field(field)
    system = _in_double(velocity, start)
    t = check_times(times, velocity)
    plan = check_plan(velocity, t, torch.float64, method, step, None, None, max_steps)

    def solve(
        operator: LinearOperator, index: int, confidence: float = confidence, rtol: float = rtol
    ) -> LeadingTriplet:
        return lanczos(
            operator,
            _start_vector(operator, seed, index),
            rtol=rtol,
            confidence=confidence,
            max_iterations=max_iterations,
        )

    # One linearised trajectory serves the growth at all times and the constants of all steps.
    trajectory = LinearisedFlow(system, t, plan, kept_bytes)
    # The risk is divided among the steps, so that all their intervals hold together with ``confidence``.
    each = 1 - (1 - confidence) / len(trajectory.steps)
    check_accuracy(rtol, each, "float64")
    found = _along(trajectory, t, solve)
    # Random starts are numbered: first the frames, then for each step the step itself and its stages.
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
        # The second run has its own points, so its Jacobians are computed, not kept from the first.
        halved = _along(LinearisedFlow(system, t, plan.refined(), kept_bytes), t, solve)
        error = (_values(halved, "sigma", 1.0) - _values(found, "sigma", 1.0)).abs()
        # Richardson extrapolation: halving the step divides the error by 2^order.
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
    """Return the leading singular value and vectors of the flow map for each time after the first."""
    rounding = _rounding(trajectory, times)
    for time, relative in zip(times, rounding, strict=True):
        if not float(relative) < _NO_DIGIT:
            raise NonFiniteError(
                "times",
                expected="times up to which rounding leaves at least one correct digit of the growth",
                got=f"t = {time:g}, where the growth may be wrong by a factor of {1 + float(relative):.2g}",
                remedy="End earlier: the scores become too large, or the flow amplifies rounding errors.",
            )
    return [solve(trajectory.until(frame, rounding[frame]), frame) for frame in range(1, len(times))]


def _rate(trajectory: LinearisedFlow, i: int, solve: Solve, index: int) -> float:
    """Integrate the field's constant over step ``i``; random starts are numbered from ``index`` on."""
    stages = enumerate(zip(trajectory.rates(i), trajectory.tableau.b, strict=True), start=index + 1)
    local = [weight * float(solve(stage, s).sigma) for s, (stage, weight) in stages if weight]
    return trajectory.steps[i].length * sum(local)


def _rounding(trajectory: LinearisedFlow, times: list[float]) -> list[Tensor]:
    """Bound the relative rounding error of the computed growth of perturbations, for each time.

    It has two parts. First, the rounding errors of the products add up over the steps. Second, a computed
    trajectory is the exact trajectory of a slightly different start, and the flow may amplify that
    difference. So the product with one direction is also computed from starts moved by one machine epsilon,
    and the resulting change is allowed for as in :class:`~howsmooth.jacobian.AutodiffJacobian`.
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
    """Return the flow map's derivative times ``e`` for each time, and the sum of the steps' roundings."""
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
    state = int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0])
    # manual_seed takes signed 64-bit numbers.
    generator = torch.Generator().manual_seed(state - 2**64 * (state >= 2**63))
    drawn = torch.randn(operator.batch, *operator.in_shape, generator=generator, dtype=torch.float64)
    return drawn.to(device=operator.device, dtype=operator.dtype)


# ---- checks of arguments


def _in_double(field: Field, start: object) -> Tokens:
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
    return Tokens(exact, exact.project(system.start.detach().double()), system.weighting)


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
                expected="float64 tokens, because the velocity is a function that cannot be converted",
                got="float32",
                remedy="Write the function for float64 and give start.double().",
            )
