"""The function ``local_lipschitz``, which measures the local Lipschitz constant of any map at given tokens or
at a measure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import AbstractMeasure, check_measure, check_tokens
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import AutodiffJacobian, closed_form_jacobian
from howsmooth.jacobian.autodiff import allowance_for_rounding, moved_by_rounding, weighted_autodiff_jacobian
from howsmooth.jacobian.closed_form import has_closed_form, in_double
from howsmooth.lipschitz.arguments import check_arguments, check_batch_dims, checked_sequences
from howsmooth.lipschitz.mixed_precision import Part, solve_autodiff, solve_closed_forms
from howsmooth.lipschitz.singular_value_solver import Solver, independent_seeds, member_seeds, starts
from howsmooth.lipschitz_estimate import LipschitzEstimate, LipschitzEstimates, Method
from howsmooth.memory import memory_budget
from howsmooth.spectral import LeadingTriplet, LinearOperator, golub_kahan
from howsmooth.spectral.golub_kahan import TRIPLET_FIELDS

__all__ = ["local_lipschitz"]

_Estimate = TypeVar("_Estimate", LipschitzEstimate, LipschitzEstimates)


@overload
def local_lipschitz(
    f: Callable[[Tensor], Tensor],
    x: Tensor | AbstractMeasure,
    *,
    rtol: float = ...,
    confidence: float = ...,
    max_iterations: int = ...,
    seed: int | Sequence[int] = ...,
    method: str = ...,
    memory: int | None = ...,
    batch_dims: int | None = ...,
) -> LipschitzEstimate: ...


@overload
def local_lipschitz(
    f: Callable[[Tensor], Tensor],
    x: list[Tensor] | tuple[Tensor, ...],
    *,
    rtol: float = ...,
    confidence: float = ...,
    max_iterations: int = ...,
    seed: int | Sequence[int] = ...,
    method: str = ...,
    memory: int | None = ...,
    batch_dims: int | None = ...,
) -> LipschitzEstimates: ...


def local_lipschitz(
    f: Any,
    x: object,
    *,
    rtol: float = 1e-4,
    confidence: float = 0.999,
    max_iterations: int = 200,
    seed: int | Sequence[int] = 0,
    method: str = "auto",
    memory: int | None = None,
    batch_dims: int | None = None,
) -> LipschitzEstimate | LipschitzEstimates:
    """Measure the local Lipschitz constant ‖D_X f‖₂ of ``f`` at each input X in ``x``.

    The solver starts at a random vector. With the Jacobian J in closed form it is the Lanczos process on
    JᵀJ; with autodiff, and at measures, it is the Golub–Kahan bidiagonalisation of J. Members run together,
    and each member stops when its interval is narrower than ``rtol``.

    At a discrete measure Σ_i a_i δ_{x_i} the constant is the weighted norm sup |J E|_a / |E|_a of the
    mean-field map, with |E|_a² = Σ_i a_i |e_i|² (Lemma C.5). It says how far the image of the measure
    moves in W₂ if each atom moves as a whole. For atoms that may split, see
    :func:`howsmooth.measures.wasserstein_lipschitz`.

    Parameters
    ----------
    f
        A map of this library (closed form), or any differentiable PyTorch map of tokens (..., n, d) to a
        tensor with the same leading axes (autodiff). Members of the batch must be independent.
    x
        Tokens (..., n, d), float32 or float64, batched over the leading axes (see ``batch_dims`` for vectors
        and images); or a list or tuple of sequences of tokens (n_i, d) with lengths n_i that may differ,
        which share matrix products; or a measure with atoms, at which maps of this library are measured in
        float64.
    rtol
        Relative width of the interval at which a member has converged. Intervals contain all rounding errors,
        so float64 seldom reaches less than 1e-7.
    confidence
        Probability, over the random start, with which each interval holds.
    max_iterations
        Largest number of steps of the solver. Each step takes one product with J and one with Jᵀ.
    seed
        Seed of the random start, of which the lowest 64 bits count: one integer, or one for each member. From
        one integer, every member i derives a stream of random numbers of its own. The result of a member
        depends on its input and its stream, and not on the other members of the batch.
    method
        "closed form", "autodiff", or "auto": closed form where there is one, else autodiff.
    memory
        Number of bytes that the closed form may use; by default half of the free memory. If the n² attention
        probabilities of each head do not fit, every product computes them again in blocks, in memory O(n d).
        The results are the same up to rounding. By autodiff, the float32 results of the maps of this library
        are checked in float64 if that fits, and ``scope`` says if it did not; the rest ignores this limit.
    batch_dims
        Number of leading axes of ``x`` that count members; by default all but the last two, which are
        tokens (n, d). With 1, images (batch, channels, height, width) or vectors (batch, d) are measured one
        by one by any ``f`` that takes such batches; with 0, ``x`` is one member. ``batch_dims`` is required
        if ``x`` is a matrix and ``f`` is no map of this library and acts on each row separately: the rows may
        be separate vectors, or tokens of one sequence, whose constant is the largest constant of a row.

    Returns
    -------
    LipschitzEstimate or LipschitzEstimates
        Values, intervals, status and directions. The result is a LipschitzEstimates, with values of shape
        (len(x),), for a list or tuple, and otherwise a LipschitzEstimate.

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
    Section 3; at a measure: Definition C.4 and Lemma C.5. Interval: the documentation's pages "The spectral
    norm, with an interval" and "Rounding, proved".

    """
    settings = _Settings(rtol, confidence, max_iterations, seed, method, memory)
    if batch_dims is not None:
        check_batch_dims(batch_dims, f, x)
    if isinstance(x, AbstractMeasure):
        return _at_measure(f, x, settings)
    if isinstance(x, list | tuple):
        return _at_sequences(f, x, settings)
    check_arguments(f, x, rtol, confidence, max_iterations, batch_dims)
    assert isinstance(x, Tensor)
    return _at_batch(f, x, settings, batch_dims)


@dataclass(frozen=True)
class _Settings:
    """The arguments of :func:`local_lipschitz` that set the accuracy, the random seed and the method."""

    rtol: float
    confidence: float
    max_iterations: int
    seed: int | Sequence[int]
    method: str
    memory: int | None

    def solver(self, xs: Sequence[Tensor] | Tensor) -> Solver:
        """Return the singular value solver for sequences ``xs``."""
        seeds = independent_seeds(member_seeds(self.seed, len(xs)), xs)
        return Solver(self.rtol, self.confidence, self.max_iterations, seeds, [x.shape[0] for x in xs])

    def estimate(
        self, kind: type[_Estimate], found: Mapping[str, Any], method: Method, scope: str
    ) -> _Estimate:
        """Build the result of :func:`local_lipschitz` from the singular values and vectors found by the
        solver.

        ``found`` has the fields of a :class:`~howsmooth.spectral.LeadingTriplet`.
        """
        return kind(
            value=found["sigma"],
            lower=found["lower"],
            upper=found["upper"],
            confidence=self.confidence,
            converged=found["converged"],
            iterations=found["steps"],
            input_direction=found["right"],
            output_direction=found["left"],
            method=method,
            scope=scope,
            rtol=self.rtol,
            seed=self.seed if isinstance(self.seed, int) else tuple(self.seed),
        )


def _at_batch(
    f: Callable[[Tensor], Tensor],
    x: Float[Tensor, "..."],
    settings: _Settings,
    batch_dims: int | None,
) -> LipschitzEstimate:
    """Measure the local Lipschitz constant of the map ``f`` at each input of a batch. The leading axes of
    ``x`` are the axes of the batch.
    """
    method = _chosen_method(f, settings.method)
    if isinstance(f, TokenMap):
        check_tokens(x, f)
    # The solver sees one axis of members; the axes of the batch come back at the end.
    leading = x.ndim - 2 if batch_dims is None else batch_dims
    lead, x = x.shape[:leading], x.detach()
    flat = x.reshape(-1, *x.shape[leading:])
    solver = settings.solver(flat)
    if method == "autodiff":
        start = solver.starts_at(flat, range(len(flat)))
        operator = AutodiffJacobian(f, x, leading, start=start, float64_bytes=_float64_bytes(f, x, settings))
        if batch_dims is None and x.ndim == 2 and not isinstance(f, TokenMap) and operator.keeps_rows_apart():
            raise ArgumentError(
                "batch_dims",
                expected="0 or 1, as f acts on each row of x by itself",
                got="None",
                remedy=f"Say batch_dims=1 for {len(x)} vectors, each with a constant of its own, or "
                f"batch_dims=0 for one sequence of {len(x)} tokens.",
            )
        found, checked = _by_autodiff(f, operator, x, range(len(flat)), solver)
        parts = [found]
    else:
        assert isinstance(f, TokenMap)
        # Members of one length come back in the order in which they were given.
        budget = memory_budget(settings.memory, x.device)
        parts = [triplet for _, triplet in solve_closed_forms(in_double(f), flat, solver, budget)]
        checked = True
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in TRIPLET_FIELDS}
    shaped = {name: tensor.reshape((*lead, *tensor.shape[1:])) for name, tensor in joined.items()}
    return settings.estimate(LipschitzEstimate, shaped, method, _scope(f, checked=checked))


def _by_autodiff(
    f: Callable[[Tensor], Tensor],
    operator: AutodiffJacobian,
    x: Tensor,
    members: Sequence[int],
    solver: Solver,
) -> tuple[LeadingTriplet, bool]:
    """Measure the local Lipschitz constants of the map ``f`` by automatic differentiation.

    Return also whether a float32 map of this library was checked in float64, or needs no check.
    """
    if not isinstance(f, TokenMap) or x.dtype == torch.float64:
        return solver.golub_kahan(operator, members), True
    return solve_autodiff(f, operator, x, members, solver)


def _float64_bytes(f: Callable[[Tensor], Tensor], x: Tensor, settings: _Settings) -> float:
    """Return how many bytes the float64 Jacobian of ``f`` may use when a float32 result is checked with it.

    It is 0 for functions that are no map of this library: they may compute in float32 only.
    """
    return float(memory_budget(settings.memory, x.device)) if isinstance(f, TokenMap) else 0.0


def _at_sequences(
    f: Callable[[Tensor], Tensor], xs: Sequence[object], settings: _Settings
) -> LipschitzEstimates:
    """Measure the local Lipschitz constant of the map ``f`` at several sequences (n_i, d) of different
    lengths.
    """
    members = checked_sequences(f, xs, settings.rtol, settings.confidence, settings.max_iterations)
    method = _chosen_method(f, settings.method)
    lengths = [x.shape[0] for x in members]
    solver = settings.solver(members)
    if method == "autodiff":
        # PyTorch differentiates one shape at a time, so no products are shared.
        each = []
        for i, x in enumerate(members):
            start = solver.starts_at(x[None], [i])
            operator = AutodiffJacobian(f, x, start=start, float64_bytes=_float64_bytes(f, x, settings))
            each.append(_by_autodiff(f, operator, x, [i], solver))
        parts: list[Part] = [([i], found) for i, (found, _) in enumerate(each)]
        checked = all(one for _, one in each)
    else:
        assert isinstance(f, TokenMap)
        budget = memory_budget(settings.memory, members[0].device)
        parts = solve_closed_forms(in_double(f), members, solver, budget)
        checked = True
    # The batches hold the members by length; put them back in the given order.
    rows = {i: (found, row) for numbers, found in parts for row, i in enumerate(numbers)}
    ordered = [rows[i] for i in range(len(members))]
    found: dict[str, Any] = {
        name: [getattr(triplet, name)[row] for triplet, row in ordered] for name in TRIPLET_FIELDS
    }
    for name, values in found.items():
        # Directions have as many rows as the longest member of their batch; cut off the rows of padding.
        directions = name in ("right", "left")
        found[name] = (
            tuple(t[:n] for t, n in zip(values, lengths, strict=True)) if directions else torch.stack(values)
        )
    return settings.estimate(LipschitzEstimates, found, method, _scope(f, checked=checked))


def _at_measure(
    f: Callable[[Tensor], Tensor], measure: AbstractMeasure, settings: _Settings
) -> LipschitzEstimate:
    """Measure the local Lipschitz constant of the map ``f`` at a discrete measure.

    The computation is in float64, whatever the dtype of the atoms.
    """
    if not isinstance(f, TokenMap):
        raise ArgumentError(
            "f",
            expected="a map of howsmooth, which acts on measures",
            got=type(f).__name__,
            remedy="The constants of other maps are measured at tokens.",
        )
    check_measure(measure, f)
    points, weighting = measure.weighted_tokens()
    x, weighting = points.detach().double(), Weighting(weighting.log_weights.detach(), weighting.positions)
    check_arguments(f, x, settings.rtol, settings.confidence, settings.max_iterations)
    method = _chosen_method(f, settings.method)
    operator: LinearOperator
    if method == "closed form":
        operator = closed_form_jacobian(f, x[None], weighting=weighting)
    else:
        operator = weighted_autodiff_jacobian(f.to(dtype=torch.float64), x, weighting)
    start = starts(operator, independent_seeds(member_seeds(settings.seed, 1), [x]), [x.shape[0]])
    image = operator.product(start)
    if method == "closed form":
        # No bound on the rounding errors is proved at measures. If terms cancel, the products change when the
        # atoms move by one unit of rounding; the change of one product estimates the error.
        moved = (closed_form_jacobian(f, y[None], weighting=weighting) for y in moved_by_rounding(x))
        seen = allowance_for_rounding((at.product(start) for at in moved), image)
        operator.rounding = torch.maximum(operator.rounding, seen)
    found = golub_kahan(
        operator,
        start,
        rtol=settings.rtol,
        confidence=settings.confidence,
        max_iterations=settings.max_iterations,
        image=image,
    )
    fields = {name: getattr(found, name)[0] for name in TRIPLET_FIELDS}
    scope = f"{f.describe()}, at a measure of {x.shape[0]} atoms"
    return settings.estimate(LipschitzEstimate, fields, method, scope)


def _scope(f: Callable[[Tensor], Tensor], *, checked: bool = True) -> str:
    """Return the description of the measured map for the field ``scope`` of the result.

    A map of this library describes itself; any other function is described by its name. A result that was not
    checked in float64, for lack of memory, says so.
    """
    words = f.describe() if isinstance(f, TokenMap) else getattr(f, "__name__", type(f).__name__)
    return words if checked else f"{words}; not checked in float64, for lack of memory"


def _chosen_method(f: Callable[[Tensor], Tensor], method: str) -> Method:
    """Return "closed form" or "autodiff", the method by which the Jacobian of ``f`` is computed.

    The argument ``method`` is that of :func:`local_lipschitz`, with the additional choice "auto".
    """
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
