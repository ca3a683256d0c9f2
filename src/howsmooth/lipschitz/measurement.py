"""Measurement of the largest singular values of Jacobians: in closed form, by autodiff, or at a measure.

Float32 products take half the time of float64 ones. So a float32 Jacobian is iterated, and the same in
float64 is around it and checks the result (:mod:`howsmooth.spectral.float32_products`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.batching import batches, bytes_without_basis, fewest_vectors, is_streamed, room_for_basis
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import AutodiffJacobian, closed_form_jacobian
from howsmooth.jacobian.autodiff import allowance_for_rounding, moved_by_rounding, weighted_autodiff_jacobian
from howsmooth.jacobian.closed_form import closed_form_jacobians, in_double
from howsmooth.jacobian.unequal_lengths import joined_jacobian
from howsmooth.lipschitz.singular_value_solver import Solver
from howsmooth.spectral import LeadingTriplet, LinearOperator
from howsmooth.spectral.float32_products import CheckedByAdjoint, CheckedProducts

__all__ = ["Part", "measured"]

# The share of the requested relative width that rounding errors may take on each side of the interval, if
# products with these errors are cheaper.
_ROUNDING_SHARE = 1 / 4

# The typical relative rounding error of float32 products without terms that cancel
_TYPICAL = 32.0 * torch.finfo(torch.float32).eps

Part = tuple[Sequence[int], LeadingTriplet]
"""The numbers of some members, and their leading triplets."""


def closed_forms(
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
        x = members[first][None]
        lengths = [[len(members[i]) for i in lot] for lot in lots]
        # No name keeps the Jacobians of one batch while those of the next are made.
        if is_streamed(double, x, budget):
            room = room_for_basis(double, x, budget)
            parts.append(
                ([first], solver.alone(_streamed(double, x, solver.rtol, budget), [first], basis_bytes=room))
            )
        else:
            parts += zip(lots, solver.together(_kept(double, members, lots), lots, lengths), strict=True)
    return parts


def _kept(
    double: TokenMap, members: Sequence[Tensor] | Tensor, lots: Sequence[Sequence[int]]
) -> list[LinearOperator]:
    """Return the Jacobians of one map with attention probabilities kept in memory, as one batched operator
    for each group of sequences.

    Each item of ``lots`` is a group, as indices of sequences sorted by length. Sequences of one length are
    linearised together.
    """
    dtype, exact = members[0].dtype, torch.float64
    groups = [
        [list(group) for _, group in itertools.groupby(lot, key=lambda i: members[i].shape[0])]
        for lot in lots
    ]
    xs = [torch.stack([members[i] for i in group]).double() for lot in groups for group in lot]
    found = iter(closed_form_jacobians(double, xs, (exact,) if dtype == exact else (dtype, exact)))
    operators: list[LinearOperator] = []
    for lot in groups:
        at = list(itertools.islice(found, len(lot)))
        whole = joined_jacobian([one[exact] for one in at])
        operators.append(
            whole if dtype == exact else CheckedProducts(joined_jacobian([one[dtype] for one in at]), whole)
        )
    return operators


def _streamed(double: TokenMap, x: Tensor, rtol: float, budget: int) -> LinearOperator:
    """Build the operator of one sequence with no n × n matrix; only one dtype is in memory at a time."""

    def made(dtype: torch.dtype, allowance: float | None = None) -> LinearOperator:
        return closed_form_jacobian(double, x.double(), dtype=dtype, streamed=True, allowance=allowance)

    if x.dtype == torch.float64:
        return made(x.dtype)
    # Measure again in float64 only if memory has room for the longer vectors.
    room = budget - bytes_without_basis(double, x.double())
    single = made(x.dtype, _ROUNDING_SHARE * rtol)
    return CheckedProducts(single, partial(made, torch.float64), room if room >= fewest_vectors(x) else 0)


def measured(
    f: Any,
    members: Sequence[Tensor] | Tensor,
    lead: Sequence[int] | None,
    weighting: Weighting | None,
    solver: Solver,
    budget: int,
    *,
    closed: bool,
    rows_are_tokens: bool,
) -> tuple[list[Part], bool]:
    """Measure the Lipschitz constant of a map at each input in ``members``. These are a batch of the shape
    ``lead``, or a list of sequences if ``lead`` is None.

    With a ``weighting``, the rows of the only member are the atoms of a measure. The Jacobian is in closed
    form if ``closed``, and else by automatic differentiation. Unless ``rows_are_tokens``, a map that acts on
    each row of its input by itself is refused. The second value is False if float32 results could not be
    checked in float64, as the ``budget`` of bytes has no room for it.
    """
    if closed and weighting is None:
        return closed_forms(in_double(f), members, solver, budget), True
    lots: list[tuple[Sequence[int], Tensor]]
    if isinstance(members, Tensor) and lead is not None:
        lots = [(range(len(members)), members.reshape(*lead, *members.shape[1:]))]
    else:
        # PyTorch differentiates one shape at a time, so that sequences of a list share no products.
        lots = [([i], one) for i, one in enumerate(members)]
    parts, checked = [], True
    for numbers, x in lots:
        start = solver.starts(numbers, members[numbers[0]].shape, x.dtype, x.device)
        operator: LinearOperator
        if weighting is None:
            # Other functions than the maps of this library may compute in float32 only.
            judging = isinstance(f, TokenMap) and x.dtype == torch.float32
            operator = jacobian = AutodiffJacobian(
                f, x, len(lead or ()), start=start, float64_bytes=budget if judging else 0.0
            )
            if not rows_are_tokens and jacobian.keeps_rows_apart():
                raise ArgumentError(
                    "batch_dims",
                    expected="0 or 1, as f acts on each row of x by itself",
                    got="None",
                    remedy=f"Say batch_dims=1 for {len(x)} vectors, each with a constant of its own, or "
                    f"batch_dims=0 for one sequence of {len(x)} tokens.",
                )
            if judging and jacobian.judged:
                finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
                rounding = (finer * jacobian.rounding).clamp_min(finer * _TYPICAL)
                # The float64 products judge what terms that cancel have lost.
                jacobian.rounding = torch.full_like(rounding, _TYPICAL)
                exact = AutodiffJacobian(f.to(dtype=torch.float64), x.double(), rounding=rounding)
                operator = CheckedByAdjoint(jacobian, exact)
            checked = checked and (jacobian.judged or not judging)
        elif not closed:
            operator = weighted_autodiff_jacobian(f.to(dtype=torch.float64), x, weighting)
        else:
            # No bound on the rounding errors is proved at measures. If terms cancel, the products change when
            # the atoms move by one unit of rounding; the change of one product estimates the error.
            points = itertools.chain((x,), moved_by_rounding(x))
            jacobians = (closed_form_jacobian(f, y[None], weighting=weighting) for y in points)
            operator = next(jacobians)
            image = operator.product(start)
            seen = allowance_for_rounding((at.product(start) for at in jacobians), image)
            operator.rounding = torch.maximum(operator.rounding, seen)
        parts.append((numbers, solver.alone(operator, numbers, start=start)))
    return parts, checked
