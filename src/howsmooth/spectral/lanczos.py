"""Lanczos on JᵀJ with one basis, for operators so large that the vectors decide what fits in memory.

It is Golub–Kahan in the form that needs no left vectors: from a Gaussian start, k steps give V_k with
V_kᵀ JᵀJ V_k = T_k tridiagonal, whose entries are those of B_kᵀB_k. So the same interval holds
(:mod:`howsmooth.spectral.interval`), and one pass over an operator that shares work between J and Jᵀ is
enough for a step. The basis serves reorthogonalisation and the Ritz vector only: it may be kept in half
precision, whose error enters in second order. Derivation and measurements: docs/theory/spectral-norm.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from scipy import linalg
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.spectral.basis import Basis, Reduction, norms, reduced
from howsmooth.spectral.golub_kahan import LeadingTriplet
from howsmooth.spectral.interval import a_posteriori_upper, ritz_values, rounded_upper, start_quantile
from howsmooth.spectral.operator import LinearOperator, length_rounding
from howsmooth.spectral.refusals import check_finite, checked_rounding

__all__ = ["lanczos", "lanczos_together"]

# A basis in the operator's own precision is preferred while this many vectors of it fit.
_EXPECTED_STEPS = 64
# Below this tolerance what half precision adds to the interval would be too much of it.
_LEAST_HALF = 2e-5
# Finished members are dropped from the batch once this share of it still runs: dropping copies the basis.
_COMPACT_AT = 0.75

Products = Callable[[Sequence[LinearOperator], Sequence[Tensor]], Sequence[tuple[Tensor, Tensor]]]
"""``energy_product`` of each of some operators with its vectors."""
_Run = Generator[tuple[LinearOperator, Tensor], tuple[Tensor, Tensor], LeadingTriplet]
"""A run that asks for energy products and ends with its triplet."""


def lanczos(
    operator: LinearOperator,
    start: Float[Tensor, "batch *in_shape"],
    *,
    rtol: float,
    confidence: float,
    max_iterations: int,
    basis_dtype: torch.dtype | None = None,
    basis_bytes: int | None = None,
    reduce: Reduction | None = None,
) -> LeadingTriplet:
    """Return the leading singular triplet of each member of ``operator``, from products with JᵀJ.

    It does what :func:`howsmooth.spectral.golub_kahan` does with less than half of the memory (a quarter
    with a basis in half precision), by :meth:`~howsmooth.spectral.LinearOperator.gram_product`. Five vectors
    are alive beside the basis, at most.

    Parameters
    ----------
    operator
        The batch of maps.
    start
        Gaussian vectors, drawn independently of the operator; nothing else keeps the interval.
    rtol
        A member stops when upper − lower <= rtol · σ̂.
    confidence
        Probability, over the start, with which each member's interval holds.
    max_iterations
        Steps at most, each one product with JᵀJ.
    basis_dtype
        What the basis is kept in: the operator's dtype, float32 or float16. By default the operator's, if
        ``basis_bytes`` has room for 64 vectors of it, else float16, or float32 where ``rtol`` is below 2e-5.
    basis_bytes
        Memory for the basis. Members that need more steps than fit stop unconverged, with the interval
        reached: fewer than ``max_iterations`` steps, neither converged nor broken down.
    reduce
        Sum over processes of a float64 tensor, where each holds some coordinates of every vector; the
        operator and the start are then of this process's coordinates. All get the same numbers, and their
        own coordinates of the directions. The basis is of one dtype in all, and as many vectors fit.

    Raises
    ------
    ArgumentError
        If the basis cannot be kept in ``basis_dtype``, or ``basis_bytes`` holds no two vectors.
    NonFiniteError
        If a product is not finite, or rounding leaves it no digit.

    """
    run = _run(operator, start, None, rtol, confidence, max_iterations, basis_dtype, basis_bytes, reduce)
    return _in_lockstep([run], _by_themselves)[0]


def lanczos_together(
    operators: Sequence[LinearOperator],
    starts: Sequence[Tensor],
    *,
    rtol: float,
    confidence: float,
    max_iterations: int,
    products: Products,
    sizes: Sequence[Sequence[int]] | None = None,
) -> list[LeadingTriplet]:
    """Run :func:`lanczos` on several operators step by step together, so that they can share products.

    Parameters
    ----------
    operators, starts
        As for :func:`lanczos`; their shapes may differ.
    rtol, confidence, max_iterations
        As for :func:`lanczos`.
    products
        Returns ``operator.energy_product(vectors)`` of each of some operators, those of members that have
        not finished, and vectors.
    sizes
        Dimension N of the input space of each member of each operator, where that is less than the operator's
        own: starts and products are zero in all other coordinates.

    """
    of_each = sizes or [[operator.in_size] * operator.batch for operator in operators]
    runs = [
        _run(operator, start, size, rtol, confidence, max_iterations, None, None, None)
        for operator, start, size in zip(operators, starts, of_each, strict=True)
    ]
    return _in_lockstep(runs, products)


def _in_lockstep(runs: Sequence[_Run], products: Products) -> list[LeadingTriplet]:
    """Answer the requests of all runs that go on, until none does."""
    found: dict[int, LeadingTriplet] = {}
    answers: dict[int, tuple[Tensor, Tensor] | None] = dict.fromkeys(range(len(runs)))
    while answers:
        asked: dict[int, tuple[LinearOperator, Tensor]] = {}
        for i in list(answers):
            try:
                answer = answers.pop(i)
                asked[i] = next(runs[i]) if answer is None else runs[i].send(answer)
            except StopIteration as end:
                found[i] = end.value
            del answer
        if asked:
            operators, vectors = zip(*asked.values(), strict=True)
            answers = dict(zip(asked, products(operators, vectors), strict=True))
            del vectors
    return [found[i] for i in range(len(runs))]


def _by_themselves(
    operators: Sequence[LinearOperator], vectors: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    return [operator.energy_product(v) for operator, v in zip(operators, vectors, strict=True)]


def _run(
    operator: LinearOperator,
    start: Tensor,
    sizes: Sequence[int] | None,
    rtol: float,
    confidence: float,
    max_iterations: int,
    basis_dtype: torch.dtype | None,
    basis_bytes: int | None,
    reduce: Reduction | None,
) -> _Run:
    """Do as :func:`lanczos` says, asking for the products."""
    slack = checked_rounding(operator).copy()
    total = operator.batch
    in_sizes = _in_sizes(operator, start, sizes, reduce)
    dtype, rows = _basis_form(operator, rtol, basis_dtype, basis_bytes)
    # What a basis of fewer digits takes from the vectors is not small enough for a proof; and processes that
    # share a sequence must decide alike.
    proved = operator.proved if dtype == operator.dtype and reduce is None else None
    if dtype != operator.dtype:
        # Second order: docs/theory/spectral-norm.md.
        slack += torch.finfo(dtype).eps ** 2
    # Both J and Jᵀ round, so what the products cannot tell from zero is twice as large as for one of them.
    level = 2.0 * slack
    largest = int(in_sizes.max())
    quantile = _quantiles(in_sizes, confidence)
    steps_allowed = min(max_iterations, largest, rows)

    sigma, upper = np.zeros(total), np.zeros(total)
    steps = np.zeros(total, dtype=np.int64)
    converged, broke_down = np.zeros(total, dtype=bool), np.zeros(total, dtype=bool)
    right = start.new_empty(total, operator.in_size)

    diagonal, off = np.zeros((total, steps_allowed)), np.zeros((total, steps_allowed))
    active = np.arange(total)  # the member in each row of the batch, and whether it still runs
    running = np.ones(total, dtype=bool)
    whole = operator
    factors: Tensor | None = None  # powers of two that bring the maps near to one
    units = np.ones(total)

    basis = Basis(largest, dtype, operator.dtype, reduce)
    if proved is not None:
        basis.taken = torch.zeros(total, dtype=torch.float64)
    z = start.reshape(total, -1).clone()
    gamma = norms(z, reduce)
    before: Tensor | None = None

    for k in range(1, steps_allowed + 1):
        v = z.mul_(_inverse(gamma).to(z.dtype)[:, None])
        del z  # or the last one would stay while the next is made
        basis.append(v)
        if k == 1:
            w, z = _gram(operator, v, factors)
            if (factors := _factors(w, reduce)) is not None:
                w, z = _gram(operator, v, factors)
                units = 1.0 / factors.cpu().numpy()
            alpha = norms(w, reduce).square()
            del w
        else:
            alpha, z = yield from _energy(operator, v, factors)
            alpha = reduced(alpha, reduce)
        z = torch.addcmul(z, alpha.to(z.dtype)[:, None], v, value=-1)
        if before is not None:
            z.addcmul_(gamma.to(z.dtype)[:, None], before, value=-1)
        gamma = basis.orthogonalise_(z, [v] if before is None else [v, before])
        before = v
        entries = torch.stack((alpha, gamma)).cpu()  # together: other devices are waited for once
        check_finite(entries)
        diagonal[active, k - 1], off[active, k - 1] = entries.numpy()

        places = np.flatnonzero(running)
        members = active[places]
        a, b, complete = diagonal[members, :k], off[members, :k], in_sizes[members] == k
        if proved is None or basis.taken is None:
            top, limit = _limits(a, b, quantile[members], level[members], complete)
            settled = complete
        else:
            errors = proved.rounding.numpy()[members] / units[members]
            taken = basis.taken.numpy()[places]
            top, limit, settled = _proved_limits(a, b, quantile[members], errors, taken, rtol)
            errors = proved.total.numpy()[members] / units[members]
            slack[members] = errors / np.sqrt(np.maximum(top, np.finfo(float).tiny))
            level[members] = 2.0 * slack[members] + 2.0**-49
        broke_down[members] = complete | settled | (b[:, -1] <= level[members] * top)
        sigma[members] = units[members] * np.sqrt(top)
        upper[members] = units[members] * np.sqrt(limit)
        if proved is None:
            upper[members] *= 1 + slack[members]
        else:
            upper[members] += proved.model.numpy()[members]
            upper[members] *= 1 + 2.0**-50
        lower = sigma[members] * (1 - slack[members])
        converged[members] = upper[members] - lower <= rtol * sigma[members]
        done = converged[members] | broke_down[members] | (k == steps_allowed)
        for row, member in zip(places[done].tolist(), members[done].tolist(), strict=True):
            basis.combine(row, _leading_vector(diagonal[member, :k], off[member, :k]), out=right[member])
        running[places[done]], steps[members[done]] = False, k
        if not running.any():
            break
        if running.sum() <= _COMPACT_AT * len(active):
            keep = torch.as_tensor(np.flatnonzero(running), device=z.device)
            active, running = active[running], running[running]
            operator = operator.select(keep)
            z, before, gamma = z[keep], before[keep], gamma[keep]
            factors = None if factors is None else factors[keep]
            basis.keep(keep)

    del basis, before, v  # more than four vectors, while the left directions are made
    left, lengths = _left(whole, right, reduce)
    lower = sigma * (1 - slack)
    if proved is not None:
        # What a vector's image has been seen to have, ‖J‖ has; all else is widths.
        sigma = lengths.cpu().numpy()
        lower = np.maximum(sigma - proved.total.numpy(), 0.0) * (1 - length_rounding(whole))
        upper = np.maximum(np.minimum(upper, proved.size.numpy()), sigma)
        converged = upper - lower <= rtol * sigma
    return LeadingTriplet(
        sigma=torch.from_numpy(sigma),
        lower=torch.from_numpy(lower),
        upper=torch.from_numpy(upper),
        converged=torch.from_numpy(converged),
        broke_down=torch.from_numpy(broke_down),
        steps=torch.from_numpy(steps),
        right=right.view(total, *whole.in_shape),
        left=left.view(total, *whole.out_shape),
    )


def _in_sizes(
    operator: LinearOperator, start: Tensor, sizes: Sequence[int] | None, reduce: Reduction | None
) -> np.ndarray:
    """Dimension of the input space of each member, of all processes together."""
    own = start.new_tensor(sizes or [operator.in_size] * operator.batch, dtype=torch.float64)
    dimensions: np.ndarray = reduced(own, reduce).cpu().numpy().astype(np.int64)
    return dimensions


def _quantiles(in_sizes: np.ndarray, confidence: float) -> np.ndarray:
    """Return x_δ of each member."""
    distinct, places = np.unique(in_sizes, return_inverse=True)
    return np.array([start_quantile(size, confidence) for size in distinct.tolist()])[places]


def _gram(operator: LinearOperator, v: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return J v and JᵀJ v as rows (member, size), J times its factor."""
    shape = (len(v), *operator.in_shape)
    if factors is None:
        w, z = operator.gram_product(v.view(shape))
        return w.reshape(len(v), -1), z.reshape(len(v), -1)
    factors = factors[:, None].to(v.dtype)
    w, z = operator.gram_product((factors * v).view(shape))
    return w.reshape(len(v), -1), factors * z.reshape(len(v), -1)


def _energy(
    operator: LinearOperator, v: Tensor, factors: Tensor | None
) -> Generator[tuple[LinearOperator, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Ask for |J v|² and JᵀJ v, and return them as rows (member, size), J times its factor."""
    shape = (len(v), *operator.in_shape)
    if factors is None:
        energy, z = yield operator, v.view(shape)
        return energy, z.reshape(len(v), -1)
    factors = factors[:, None].to(v.dtype)
    energy, z = yield operator, (factors * v).view(shape)
    return energy, factors * z.reshape(len(v), -1)


def _factors(w: Tensor, reduce: Reduction | None) -> Tensor | None:
    """Powers of two that keep ‖J‖⁴ in the range of float32; None where it is there already."""
    largest = reduced(torch.linalg.vector_norm(w, ord=math.inf, dim=1).double(), reduce)
    exponents = torch.log2(largest).round()
    near = (largest == 0) | ~torch.isfinite(largest) | (exponents.abs() <= 20)
    return None if bool(near.all()) else torch.exp2(torch.where(near, 0.0, -exponents))


def _left(operator: LinearOperator, right: Tensor, reduce: Reduction | None) -> tuple[Tensor, Tensor]:
    """Return unit vectors along J v, zero where that is, and its length."""
    image = operator.product(right.view(len(right), *operator.in_shape)).reshape(len(right), -1)
    lengths = norms(image, reduce)
    return image * _inverse(lengths).to(image.dtype)[:, None], lengths


def _proved_limits(
    diagonal: np.ndarray,
    off: np.ndarray,
    quantile: np.ndarray,
    errors: np.ndarray,
    taken: np.ndarray,
    rtol: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return leading Ritz values, proved upper limits of λ_max(JᵀJ), and whether rounding decides these."""
    found = []
    for a, b, x, error, lost in zip(diagonal, off, quantile, errors, taken, strict=True):
        # Squares of what is small enough to be lost are not lost: T is brought near to one.
        unit = max(float(a.max()), float(b.max())) or 1.0
        root = math.sqrt(unit)
        top, limit, done = rounded_upper(a / unit, b / unit, x, error / root, math.sqrt(lost) / unit, rtol)
        found.append((unit * top, unit * limit, done))
    tops, limits, settled = zip(*found, strict=True)
    return np.array(tops), np.array(limits), np.array(settled)


def _limits(
    diagonal: np.ndarray, off: np.ndarray, quantile: np.ndarray, level: np.ndarray, complete: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the leading Ritz value and the a-posteriori upper limit of λ_max(JᵀJ) of each member."""
    largest = np.maximum(diagonal.max(axis=1), off[:, :-1].max(axis=1, initial=0.0))
    unit = np.where(largest == 0.0, 1.0, largest)[:, None]
    scaled, off = diagonal / unit, off / unit
    theta = np.stack([ritz_values(*parts) for parts in zip(scaled, off[:, :-1], strict=True)])
    top = np.maximum(theta[:, -1], 0.0)
    least = np.where(largest == 0.0, 1.0, level * top)
    logs = np.where(complete, -np.inf, np.log(np.maximum(off, least[:, None])).sum(axis=1))
    return largest * top, largest * a_posteriori_upper(theta, logs, quantile)


def _leading_vector(diagonal: np.ndarray, off: np.ndarray) -> np.ndarray:
    unit, last = max(diagonal.max(), off[:-1].max(initial=0.0)) or 1.0, len(diagonal) - 1
    _, vectors = linalg.eigh_tridiagonal(
        diagonal / unit, off[:-1] / unit, select="i", select_range=(last, last)
    )
    leading: np.ndarray = vectors[:, 0]
    return leading


def _basis_form(
    operator: LinearOperator, rtol: float, dtype: torch.dtype | None, memory: int | None
) -> tuple[torch.dtype, int]:
    """Return what the basis is kept in and how many vectors it may hold."""
    if dtype not in (None, operator.dtype, torch.float32, torch.float16):
        raise ArgumentError(
            "basis_dtype",
            expected=f"{operator.dtype}, float32 or float16",
            got=str(dtype),
            remedy="bfloat16 keeps too few digits for the orthogonality that the interval needs.",
        )
    entries = operator.batch * operator.in_size
    if memory is None:
        return dtype or operator.dtype, sys.maxsize
    if dtype is None:
        roomy = memory >= _EXPECTED_STEPS * entries * operator.dtype.itemsize
        small = torch.float16 if rtol >= _LEAST_HALF else torch.float32
        dtype = operator.dtype if roomy else small
    rows = memory // (entries * dtype.itemsize)
    if rows < 2:
        raise ArgumentError(
            "basis_bytes",
            expected=f"room for two vectors, {2 * entries * dtype.itemsize} bytes",
            got=f"{memory}",
            remedy="Give more memory, or measure fewer tokens.",
        )
    return dtype, rows


def _inverse(lengths: Tensor) -> Tensor:
    """1 / length, zero where the length is zero."""
    return torch.where(lengths > 0, 1.0 / lengths, 0.0)
