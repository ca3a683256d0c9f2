"""Lipschitz constants in mixed precision: a solver runs in float32, and its result is checked by products in
float64.

A run in float32 gives each member a direction v, a value and an interval. One product of the float64 Jacobian
with v gives the value |J v|, which is a lower limit without float32 rounding. The difference between the
float32 and the float64 JᵀJ v bounds to first order how far rounding moved the upper limit. Members whose
interval becomes too wide are measured again with float64 products.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.batching import batches, bytes_without_basis, fewest_vectors, is_streamed, room_for_basis
from howsmooth.jacobian import AutodiffJacobian, closed_form_jacobian
from howsmooth.jacobian.closed_form import closed_form_jacobians
from howsmooth.jacobian.padded_jacobian_batch import joined
from howsmooth.lipschitz.singular_value_solver import Solver
from howsmooth.spectral import LeadingTriplet, LinearOperator
from howsmooth.spectral.golub_kahan import TRIPLET_FIELDS
from howsmooth.spectral.operator import length_rounding

__all__ = ["Part", "check_in_float64", "solve_autodiff", "solve_closed_forms", "widen_by_rounding"]

# The share of the requested relative width that rounding errors may take on each side of the interval, if
# products with these errors are cheaper.
_ROUNDING_SHARE = 1 / 4

# The share of the requested relative width that rounding errors may take if only half of them is measured.
_NEGLIGIBLE = 1 / 20

Part = tuple[Sequence[int], LeadingTriplet]
"""The numbers of some members, and their leading triplets."""


def solve_closed_forms(
    double: TokenMap, members: Sequence[Tensor] | Tensor, solver: Solver, budget: int
) -> list[Part]:
    """Measure the Lipschitz constants of one map at several sequences (n_i, d), with a Jacobian in closed
    form.

    Sequences whose attention probabilities fit in memory are measured in batches, others one by one. The
    argument ``double`` is the map in float64, and ``budget`` the number of bytes that may be used.
    """
    parts: list[Part] = []
    for lots in batches(double, members, budget):
        first = lots[0][0]
        if is_streamed(double, members[first][None], budget):
            parts.append(([first], _streamed(double, members[first][None], [first], solver, budget)))
        else:
            parts += zip(lots, _cached(double, members, lots, solver), strict=True)
    return parts


def solve_autodiff(
    f: TokenMap, operator: AutodiffJacobian, x: Tensor, members: Sequence[int], solver: Solver
) -> tuple[LeadingTriplet, bool]:
    """Measure the Lipschitz constant of a map in float32 by automatic differentiation, and check the result
    in float64.

    Parameters
    ----------
    f, operator, x
        The map, its Jacobian, and the tokens (..., n, d), all in float32. If the Jacobian is not ``judged``,
        because memory has no room for the same in float64, nothing is checked in float64, and the interval
        allows for the rounding errors that are estimated in float32.
    members
        The numbers of the sequences in the solver.
    solver
        The solver, with the accuracy that is asked for.

    Returns
    -------
    LeadingTriplet, bool
        The result, and whether it was checked.

    """
    double = torch.finfo(torch.float64).eps / torch.finfo(x.dtype).eps
    if not operator.judged:
        return solver.golub_kahan(operator, members), False
    estimated, operator.rounding = operator.rounding, torch.full_like(operator.rounding, _typical_rounding(x))
    found = solver.golub_kahan(operator, members, judged=True)
    exact = AutodiffJacobian(
        f.to(dtype=torch.float64),
        x.double(),
        rounding=(estimated * double).clamp_min(_typical_rounding(x.double())),
    )
    judged = _checked_by_adjoint(exact, found, solver.rtol)
    if judged is None:
        judged = check_in_float64(operator, exact, found, members, solver)
    return judged, True


def _checked_by_adjoint(exact: LinearOperator, found: LeadingTriplet, rtol: float) -> LeadingTriplet | None:
    """Check the singular values from a float32 Golub–Kahan solver by one product with the adjoint of the
    float64 Jacobian. Return None if the rounding is too large for this check.

    With unit vectors u and v, ⟨v, Jᵀu⟩ is the value, and at most ‖J‖. The product Jᵀu in float32 shows the
    rounding of adjoint products. The products J v, which take longer by automatic differentiation, are
    assumed to be off by as much. That is accepted only if both together are negligible for the interval.
    """
    assert found.gram is not None
    right, left = _unit(found.right.double()), _unit(found.left.double())
    adjoint = exact.adjoint_product(left)
    sigma = torch.linalg.vecdot(right.flatten(1), adjoint.flatten(1)).cpu()
    # J v = σ u holds in the float32 recurrence, so that Jᵀu is JᵀJ v / σ.
    rounded = found.gram.double() / found.sigma.to(right)[:, None, None]
    defect = 2.0 * _norms(rounded - adjoint)
    if not bool((defect <= _NEGLIGIBLE * rtol * sigma).all()):
        return None
    judged = widen_by_rounding(replace(found, gram=None), sigma, defect, exact, rtol)
    return judged if bool(judged.converged.all()) else None


def _typical_rounding(x: Tensor) -> float:
    """Return the typical relative rounding error of a Jacobian–vector product in the dtype of ``x``, provided
    that no terms of the product cancel.
    """
    return 32.0 * torch.finfo(x.dtype).eps


def _cached(
    double: TokenMap, members: Sequence[Tensor] | Tensor, lots: Sequence[Sequence[int]], solver: Solver
) -> list[LeadingTriplet]:
    """Measure the Lipschitz constants of a map at some sequences, and keep the attention probabilities in
    memory.

    Float32 results are checked in float64.

    Products in float64 with the float32 directions give the values and show the effect of rounding: if terms
    of the Jacobian cancel, float32 loses more digits than any fixed multiple of epsilon would allow for.
    Sequences whose interval is too wide then, or that broke down at the rounding level of float32 (which
    happens with few distinct singular values), are measured again with float64 products.
    """
    dtype, exact = members[0].dtype, torch.float64
    jacobians = _jacobians(double, members, lots, (dtype, exact) if dtype != exact else (exact,))
    found = solver.together([at[dtype] for at in jacobians], lots, judged=dtype != exact)
    if dtype == exact:
        return found
    return [
        check_in_float64(at[dtype], at[exact], of_lot, numbers, solver)
        for at, of_lot, numbers in zip(jacobians, found, lots, strict=True)
    ]


def _jacobians(
    double: TokenMap,
    members: Sequence[Tensor] | Tensor,
    lots: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
) -> list[dict[torch.dtype, LinearOperator]]:
    """Return the Jacobians of one map at the sequences of each group, as one batched operator for each group
    and each dtype.

    Each item of ``lots`` is a group, as indices of sequences sorted by length. Sequences of one length are
    linearised together, and the Jacobians of a group become one batched operator. Each result is a dictionary
    from dtype to Jacobian.
    """
    groups = [
        [list(group) for _, group in itertools.groupby(lot, key=lambda i: members[i].shape[0])]
        for lot in lots
    ]
    xs = [torch.stack([members[i] for i in group]).double() for lot in groups for group in lot]
    found = iter(closed_form_jacobians(double, xs, dtypes))
    of_lots = [list(itertools.islice(found, len(lot))) for lot in groups]
    return [{dtype: joined([at[dtype] for at in lot]) for dtype in dtypes} for lot in of_lots]


def check_in_float64(
    operator: LinearOperator,
    exact: LinearOperator,
    found: LeadingTriplet,
    members: Sequence[int],
    solver: Solver,
) -> LeadingTriplet:
    """Check the singular values from a float32 solver by products with the float64 Jacobian, and return
    values and intervals from float64.

    The operator ``exact`` is the same as ``operator`` in float64, and ``members`` are the indices of its
    sequences in the solver.
    """
    right = _unit(found.right.double())
    image, gram = exact.gram_product(right)
    sigma = _norms(image)

    # The defect of the product that the recurrence in float32 stands for; without it, of σ̂² v, from which the
    # product is off by the residual of the Ritz vector.
    found_gram = found.gram
    if found_gram is None:
        found_gram = found.sigma.to(right).square().view(-1, 1, 1) * right
    defect = _defect(found_gram, gram, sigma)
    left = _unit(image).to(found.left.dtype)
    found = replace(found, left=left, gram=None)
    judged = widen_by_rounding(found, sigma, defect, exact, solver.rtol)
    # Where the residual is too large for that, compute JᵀJ v in float32, at the cost of one product.
    if not bool(judged.converged.all()):
        _, rounded = operator.energy_product(right.to(operator.dtype))
        defect = torch.where(judged.converged, defect, _defect(rounded, gram, sigma))
        judged = widen_by_rounding(found, sigma, defect, exact, solver.rtol)
    # Members that float32 took as finished but whose interval is too wide now. More steps in float32 would
    # not help them. Members that used up their steps are not measured again: float64 would stop there, too.
    ended = found.converged | found.broke_down | (found.steps < solver.max_iterations)
    stuck = torch.nonzero(~judged.converged & ended).flatten()
    if not len(stuck):
        return judged
    (again,) = solver.together([exact.select(stuck.to(exact.device))], [[members[i] for i in stuck.tolist()]])
    for name in TRIPLET_FIELDS:
        kept = getattr(judged, name)
        kept[stuck.to(kept.device)] = getattr(again, name).to(kept.dtype)
    return judged


def _streamed(
    double: TokenMap, x: Tensor, members: Sequence[int], solver: Solver, budget: int
) -> LeadingTriplet:
    """Measure the Lipschitz constant of a map at one sequence without keeping n × n matrices of attention
    probabilities in memory.

    The steps are as in :func:`_cached`. The operators in float32 and in float64 are not in memory at the
    same time.
    """

    def operator(dtype: torch.dtype, allowance: float | None = None) -> LinearOperator:
        return closed_form_jacobian(double, x.double(), dtype=dtype, streamed=True, allowance=allowance)

    basis_bytes = room_for_basis(double, x, budget)
    if x.dtype == torch.float64:
        return solver.lanczos(operator(x.dtype), members, basis_bytes)
    single = operator(x.dtype, _ROUNDING_SHARE * solver.rtol)
    found = solver.lanczos(single, members, basis_bytes, judged=True)
    right, rounded = _unit(found.right.double()), found.gram
    if rounded is None:
        _, rounded = single.gram_product(right.to(x.dtype))
    del single
    exact = operator(torch.float64)
    image, gram = exact.gram_product(right)
    sigma = _norms(image)
    found = replace(found, left=_unit(image).to(x.dtype), gram=None)
    judged = widen_by_rounding(found, sigma, _defect(rounded, gram, sigma), exact, solver.rtol)
    del image, gram, rounded, right
    # Measure again in float64, if that can help and memory has room for the longer vectors.
    stuck = ~judged.converged & (found.converged | found.broke_down)
    room = budget - bytes_without_basis(double, x.double())
    if not bool(stuck.any()) or room < fewest_vectors(x):
        return judged
    again = solver.lanczos(exact, members, room)
    return replace(again, right=again.right.to(x.dtype), left=again.left.to(x.dtype))


def widen_by_rounding(
    found: LeadingTriplet, sigma: Tensor, defect: Tensor, exact: LinearOperator, rtol: float
) -> LeadingTriplet:
    """Widen the intervals of singular values from a float32 solver by the possible rounding error.

    The value becomes σ = |J v|, computed in float64. The lower limit is proved where the float64 products
    are. The upper limit is an estimate to first order. It exceeds σ by four terms: the distance from the
    float32 value to its upper limit; the difference between the float32 and the float64 value; twice the
    defect, which is the most by which rounding of the float32 run moves σ; and a multiple of the rounding
    error of the float64 products.
    """
    # How far the float64 value itself may be off.
    error = exact.rounding * sigma if exact.proved is None else exact.proved.total
    upper = sigma + (found.upper - found.sigma) + (sigma - found.sigma).abs() + 2 * defect + 6 * error
    lower = (sigma - error).clamp_min(0.0) * (1 - length_rounding(exact))
    return replace(found, sigma=sigma, lower=lower, upper=upper, converged=upper - lower <= rtol * sigma)


def _defect(rounded: Tensor, exact: Tensor, sigma: Tensor) -> Tensor:
    """Return how much the rounding of float32 products may have changed a computed singular value.

    The vectors are JᵀJ v in float32 (``rounded``) and in float64 (``exact``). With their difference Δv the
    result is ‖Δv‖ / σ. A perturbation Δ of JᵀJ moves σ by vᵀΔv / 2σ to first order.
    """
    return _norms(rounded.double() - exact) / sigma.clamp_min(torch.finfo(torch.float64).tiny)


def _norms(t: Tensor) -> Tensor:
    """Return the Frobenius norm of each member of a batch, as a tensor on the CPU."""
    norms: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1).cpu()
    return norms


def _unit(t: Tensor) -> Tensor:
    """Divide each member of a batch by its Frobenius norm, and leave zeros unchanged."""
    length = t.flatten(1).norm(dim=1).view(-1, 1, 1)
    return torch.where(length > 0, t / length, t)
