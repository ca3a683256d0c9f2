"""The local Lipschitz constant ‖D_X f‖₂ of a map at given tokens or at a measure, with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.accuracy import check_accuracy
from howsmooth.attention import AbstractMeasure, TokenMap, Weighting
from howsmooth.attention.map import check_measure, check_tokens
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.jacobian import (
    AutodiffJacobian,
    closed_form_jacobian,
    has_closed_form,
    in_double,
    runs_members_alone,
    weighted_autodiff_jacobian,
)
from howsmooth.spectral import LeadingTriplet, LinearOperator, Scaled, golub_kahan

__all__ = ["LipschitzEstimate", "local_lipschitz"]

Method = Literal["closed form", "autodiff"]

# Members are measured together as long as the two Krylov bases of this many steps fit in this many
# bytes; more members would only leave the processor's caches.
_EXPECTED_STEPS = 32
_BASIS_BYTES = 1 << 30


@dataclass(frozen=True)
class LipschitzEstimate:
    """The local Lipschitz constant of each member of a batch, with its interval.

    Attributes
    ----------
    value
        The best estimate, and up to rounding a lower limit, float64, shape (...): the leading Ritz value;
        for the closed form in float32, ‖J v‖ in float64 along the direction v that was found.
    lower, upper
        Interval that holds ‖D_X f‖₂ with probability at least ``confidence``, for each member, over the
        random start; widened for rounding. lower <= value <= upper.
    confidence
        See ``upper``.
    converged
        upper − lower <= rtol · value. Where false, the value is a lower limit and nothing more.
    iterations
        Golub–Kahan steps, each one product with the Jacobian and one with its adjoint.
    input_direction, output_direction
        Unit vectors (Frobenius norm) in input and output space, (..., n, d) and (..., n, d_out): the
        perturbation of X that moves the output most, and where it moves it. Where singular values are
        repeated (symmetric inputs) they are one choice of many. The output direction is zero where the
        constant is. At a measure they hold √a_i e_i, e_i the displacement of atom i, of weight a_i.
    method
        "closed form" or "autodiff".
    scope
        What was measured, in words: the map with its masks, residuals and norms.
    rtol, seed
        As asked for.

    """

    value: Float[Tensor, "*batch"]
    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]
    confidence: float
    converged: Bool[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    input_direction: Float[Tensor, "*batch _in _d_in"]
    output_direction: Tensor
    method: Method
    scope: str
    rtol: float
    seed: int | tuple[int, ...]

    @property
    def remedy(self) -> str:
        """What to do about members that did not converge; empty if all did."""
        missed = int((~self.converged).sum())
        if not missed:
            return ""
        steps = int(self.iterations[~self.converged].max())
        return (
            f"{missed} of {self.converged.numel()} members did not reach rtol = {self.rtol:g} within {steps} "
            "iterations: raise max_iterations, loosen rtol, or measure in float64. Their intervals hold all "
            "the same."
        )

    def __repr__(self) -> str:
        if self.value.ndim == 0:
            status = "converged" if bool(self.converged) else "NOT converged"
            return (
                f"LipschitzEstimate({float(self.value):.6g} in [{float(self.lower):.6g}, "
                f"{float(self.upper):.6g}] at {self.confidence:.4%} confidence, {status} in "
                f"{int(self.iterations)} iterations; {self.scope}; {self.method})"
            )
        return (
            f"LipschitzEstimate(shape {tuple(self.value.shape)}, {int(self.converged.sum())} of "
            f"{self.converged.numel()} converged; {self.scope}; {self.method})"
        )


def local_lipschitz(
    f: Callable[[Tensor], Tensor],
    x: Tensor | AbstractMeasure,
    *,
    rtol: float = 1e-4,
    confidence: float = 0.999,
    max_iterations: int = 200,
    seed: int | Sequence[int] = 0,
    method: str = "auto",
) -> LipschitzEstimate:
    """Measure the local Lipschitz constant ‖D_X f‖₂ of ``f`` at each member of ``x``.

    Batched Golub–Kahan bidiagonalisation of the Jacobian from a random start; each member stops when
    its own interval is narrower than ``rtol``.

    At a discrete measure Σ_i a_i δ_{x_i} it is the weighted norm sup |J E|_a / |E|_a of the mean-field map,
    |E|_a² = Σ_i a_i |e_i|² (Lemma C.5): how far the image moves in W₂ where the atoms move whole. Where they
    may split, see :func:`howsmooth.measures.wasserstein_lipschitz`.

    Parameters
    ----------
    f
        A map of this library (closed form), or any differentiable PyTorch map of tokens (..., n, d) to a
        tensor with the same leading axes (autodiff). Members of the batch must be independent.
    x
        Tokens (..., n, d), float32 or float64, batched over the leading axes; or a measure with atoms, at
        which a map of this library is measured, in float64.
    rtol
        Relative width of the interval at which a member has converged.
    confidence
        Probability, over the random start, with which each interval holds.
    max_iterations
        Golub–Kahan steps at most.
    seed
        Seed of the random start: one for all members, or one a member. A member's result depends on its
        own input and seed, not on the batch it stands in; with one seed, member i uses its own stream i.
    method
        "closed form", "autodiff", or "auto": closed form where there is one, else autodiff.

    Returns
    -------
    LipschitzEstimate
        With value, interval, status and directions.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.
    NonFiniteError
        If ``x``, f(x) or a product is not finite, or the constant itself is beyond float64's range.
    DerivativeError
        If ``f`` cannot be differentiated, or its two derivatives disagree.

    References
    ----------
    Definition of the local constant: Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024,
    Section 3; at a measure: Definition C.4 and Lemma C.5. Interval: docs/theory/spectral-norm.md.

    """
    if isinstance(x, AbstractMeasure):
        return _at_measure(f, x, rtol, confidence, max_iterations, seed, method)
    _check_arguments(f, x, rtol, confidence, max_iterations)
    chosen = _chosen_method(f, method)
    if isinstance(f, TokenMap):
        check_tokens(x, f)
    lead = x.shape[:-2]
    seeds = _member_seeds(seed, max(1, lead.numel()))
    x = x.detach()

    def solve(operator: LinearOperator, members: Sequence[int]) -> LeadingTriplet:
        start = _starts(operator, [seeds[i] for i in members])
        return golub_kahan(operator, start, rtol=rtol, confidence=confidence, max_iterations=max_iterations)

    if chosen == "autodiff":
        parts = [solve(AutodiffJacobian(f, x), range(len(seeds)))]
    else:
        assert isinstance(f, TokenMap)
        flat, double = x.reshape(-1, *x.shape[-2:]), in_double(f)
        together = 1 if runs_members_alone(f) else _members_together(x.shape[-2] * (f.d + f.d_out), x.dtype)
        parts = [
            _closed_form(double, flat[i : i + together], range(i, min(i + together, len(flat))), solve, rtol)
            for i in range(0, len(flat), together)
        ]
    joined = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in LeadingTriplet.__annotations__
    }
    shaped = {name: tensor.reshape((*lead, *tensor.shape[1:])) for name, tensor in joined.items()}
    return LipschitzEstimate(
        value=shaped["sigma"],
        lower=shaped["lower"],
        upper=shaped["upper"],
        confidence=confidence,
        converged=shaped["converged"],
        iterations=shaped["steps"],
        input_direction=shaped["right"],
        output_direction=shaped["left"],
        method=chosen,
        scope=f.describe() if isinstance(f, TokenMap) else getattr(f, "__name__", type(f).__name__),
        rtol=rtol,
        seed=seed if isinstance(seed, int) else tuple(seed),
    )


def _at_measure(
    f: Callable[[Tensor], Tensor],
    measure: AbstractMeasure,
    rtol: float,
    confidence: float,
    max_iterations: int,
    seed: int | Sequence[int],
    method: str,
) -> LipschitzEstimate:
    """Measure the weighted norm at a discrete measure, in float64 whatever the dtype of its atoms."""
    if not isinstance(f, TokenMap):
        raise ArgumentError(
            "f",
            expected="a map of howsmooth, which acts on measures",
            got=type(f).__name__,
            remedy="Of other maps the constant is measured at tokens.",
        )
    check_measure(measure, f)
    points, weighting = measure.weighted_tokens()
    x, weighting = points.detach().double(), Weighting(weighting.log_weights.detach(), weighting.positions)
    _check_arguments(f, x, rtol, confidence, max_iterations)
    chosen = _chosen_method(f, method)
    operator: LinearOperator
    if chosen == "closed form":
        operator = closed_form_jacobian(f, x[None], weighting=weighting)
    else:
        operator = weighted_autodiff_jacobian(f.to(dtype=torch.float64), x, weighting)
    start = _starts(operator, _member_seeds(seed, 1))
    # The constant may be e^350, whose square overflows: near one, it does not.
    size = float(operator.product(start).abs().max())
    factor = 2.0 ** -max(-1000, round(math.log2(size))) if 0 < size < math.inf else 1.0
    found = golub_kahan(
        Scaled(operator, factor), start, rtol=rtol, confidence=confidence, max_iterations=max_iterations
    )
    if not math.isfinite(float(found.sigma) / factor):
        log = math.log(float(found.sigma)) - math.log(factor)
        raise NonFiniteError("f", expected="a constant in the range of float64", got=f"exp({log:.6g})")
    return LipschitzEstimate(
        value=(found.sigma / factor)[0],
        lower=(found.lower / factor)[0],
        upper=(found.upper / factor)[0],
        confidence=confidence,
        converged=found.converged[0],
        iterations=found.steps[0],
        input_direction=found.right[0],
        output_direction=found.left[0],
        method=chosen,
        scope=f"{f.describe()}, at a measure of {x.shape[0]} atoms",
        rtol=rtol,
        seed=seed if isinstance(seed, int) else tuple(seed),
    )


def _closed_form(
    double: TokenMap,
    x: Tensor,
    members: range,
    solve: Callable[[LinearOperator, Sequence[int]], LeadingTriplet],
    rtol: float,
) -> LeadingTriplet:
    """Solve with products in the dtype of x; for float32, with a verdict and if need be a run in float64.

    Float64 products along the float32 directions give the value, and show what rounding did: where the
    factors of the Jacobian cancel, float32 loses digits that no constant times epsilon foresees. Members
    that this leaves too wide, or that broke down at float32's rounding level (few distinct singular
    values), are measured again with float64 products.
    """
    operator = closed_form_jacobian(double, x.double(), dtype=x.dtype)
    found = solve(operator, members)
    if x.dtype == torch.float64:
        return found
    exact = closed_form_jacobian(double, x.double())
    right, left = (_unit(t.double()) for t in (found.right, found.left))
    image = exact.product(right)
    defect = _norms(operator.product(right.to(x.dtype)).double() - image)
    defect += _norms(operator.adjoint_product(left.to(x.dtype)).double() - exact.adjoint_product(left))
    sigma = _norms(image)
    # To first order rounding moves σ by uᵀ(ΔJ)v, at most the defects; twice that is allowed for, beside
    # the width of the float32 interval and what the float64 value moved.
    upper = sigma + (found.upper - found.sigma) + (sigma - found.sigma).abs() + 2 * defect
    lower = sigma * (1 - exact.rounding)
    converged = upper - lower <= rtol * sigma
    judged = replace(found, sigma=sigma, lower=lower, upper=upper, converged=converged)
    stuck = torch.nonzero(~converged & (found.converged | found.broke_down)).flatten()
    if not len(stuck):
        return judged
    again = solve(exact.select(stuck.to(x.device)), [members[i] for i in stuck.tolist()])
    for name in LeadingTriplet.__annotations__:
        kept = getattr(judged, name)
        kept[stuck.to(kept.device)] = getattr(again, name).to(kept.dtype)
    return judged


def _norms(t: Tensor) -> Tensor:
    """Frobenius norm of each member, on the CPU."""
    norms: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1).cpu()
    return norms


def _unit(t: Tensor) -> Tensor:
    """Return each member divided by its norm; zero stays zero."""
    length = t.flatten(1).norm(dim=1).view(-1, 1, 1)
    return torch.where(length > 0, t / length, t)


def _check_arguments(
    f: Callable[[Tensor], Tensor], x: Tensor, rtol: float, confidence: float, max_iterations: int
) -> None:
    if not callable(f):
        raise ArgumentError("f", expected="a map of tokens, callable", got=type(f).__name__)
    if not isinstance(x, Tensor):
        raise ArgumentError(
            "x", expected="a tensor (..., n, d)", got=type(x).__name__, remedy="Use torch.as_tensor."
        )
    if x.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            "x",
            expected="float32 or float64",
            got=str(x.dtype),
            remedy="Convert map and tokens, for instance with .float(): half precision carries no interval.",
        )
    if x.ndim < 2 or x.numel() == 0:
        raise ArgumentError(
            "x",
            expected="tokens (..., n, d), none of the sizes zero",
            got=f"shape {tuple(x.shape)}",
            remedy="For one token write x[None, :].",
        )
    if not bool(torch.isfinite(x).all()):
        raise NonFiniteError("x", expected="finite numbers", got="NaN or infinity")
    check_accuracy(rtol, confidence, str(x.dtype).removeprefix("torch."))
    if isinstance(max_iterations, bool) or not isinstance(max_iterations, int) or max_iterations < 1:
        raise ArgumentError("max_iterations", expected="an integer >= 1", got=repr(max_iterations))


def _chosen_method(f: Callable[[Tensor], Tensor], method: str) -> Method:
    match method, has_closed_form(f):
        case ("auto" | "closed form", True):
            return "closed form"
        case ("auto", False) | ("autodiff", _):
            return "autodiff"
        case ("closed form", False):
            remedy = f"{type(f).__name__} has no closed-form Jacobian; use 'autodiff'."
        case _:
            remedy = ""
    raise ArgumentError(
        "method", expected="'auto', 'closed form' or 'autodiff'", got=repr(method), remedy=remedy
    )


def _member_seeds(seed: int | Sequence[int], members: int) -> list[int]:
    """Return one generator seed a member, in 64 bits."""
    if isinstance(seed, int):
        # Multiples of the golden ratio of 2^64 keep the streams of neighbouring seeds apart.
        return [(seed + member * 0x9E3779B97F4A7C15) % 2**64 for member in range(members)]
    if len(seed) != members:
        raise ArgumentError("seed", expected=f"an integer, or {members} of them", got=f"{len(seed)} integers")
    return [int(s) % 2**64 for s in seed]


def _starts(operator: LinearOperator, seeds: Sequence[int]) -> Tensor:
    """Gaussian starts, one generator a member, drawn on the CPU so that every device has the same."""
    drawn = [
        torch.randn(
            operator.in_shape,
            generator=torch.Generator().manual_seed(seed - 2**64 * (seed >= 2**63)),
            dtype=torch.float64,
        )
        for seed in seeds
    ]
    return torch.stack(drawn).to(device=operator.device, dtype=operator.dtype)


def _members_together(basis_row: int, dtype: torch.dtype) -> int:
    return max(1, _BASIS_BYTES // (basis_row * dtype.itemsize * _EXPECTED_STEPS))
