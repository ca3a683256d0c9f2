"""Lanczos on JᵀJ with one basis, for operators so large that stored vectors dominate the memory.

It is Golub–Kahan in the form that needs no left vectors: from a Gaussian start, k steps give V_k with
V_kᵀ JᵀJ V_k = T_k tridiagonal, whose entries are those of B_kᵀB_k. So the same interval holds
(:mod:`howsmooth.spectral.interval`), and one pass over an operator that shares work between J and Jᵀ is
enough for a step. The basis serves reorthogonalisation and the Ritz vector only: it may be kept in half
precision, whose error enters in second order. Derivation and measurements: the documentation's page "The
spectral norm, with an interval".

:func:`_run` is the algorithm: the recurrence makes a row of T_k (:mod:`howsmooth.spectral.recurrence`), T_k
gives each member's interval (:meth:`_Members.bound`), and members whose interval is narrow enough leave
(:meth:`_Members.finished`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy import linalg
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.spectral.basis import Basis, Reduction, norms, reduced
from howsmooth.spectral.checks import check_finite, checked_rounding
from howsmooth.spectral.golub_kahan import LeadingTriplet
from howsmooth.spectral.interval import a_posteriori_upper, ritz_values, rounded_upper, start_quantile
from howsmooth.spectral.operator import LinearOperator, length_rounding
from howsmooth.spectral.recurrence import Recurrence, inverse

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
    settings = _Settings(rtol, confidence, max_iterations, basis_dtype, basis_bytes, reduce)
    return _in_lockstep([_run(operator, start, settings)], _by_themselves)[0]


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
    settings = _Settings(rtol, confidence, max_iterations)
    runs = [
        _run(operator, start, settings, size)
        for operator, start, size in zip(operators, starts, of_each, strict=True)
    ]
    return _in_lockstep(runs, products)


def _in_lockstep(runs: Sequence[_Run], products: Products) -> list[LeadingTriplet]:
    """Compute the products that the runs ask for, step by step for all runs, until the last run ends."""
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


@dataclass(frozen=True)
class _Settings:
    """The arguments of :func:`lanczos`, whose docstring says what they mean."""

    rtol: float
    confidence: float
    max_iterations: int
    basis_dtype: torch.dtype | None = None
    basis_bytes: int | None = None
    reduce: Reduction | None = None


def _run(
    operator: LinearOperator, start: Tensor, settings: _Settings, sizes: Sequence[int] | None = None
) -> _Run:
    """Run the recurrence until each member's interval is narrow enough; yield a request for each product."""
    dtype, rows = _basis_form(operator, settings)
    in_sizes = _in_sizes(operator, start, sizes, settings.reduce)
    largest = int(in_sizes.max())
    steps_allowed = min(settings.max_iterations, largest, rows)
    members = _Members(operator, settings, dtype, in_sizes, steps_allowed)
    basis = Basis(largest, dtype, operator.dtype, settings.reduce)
    if members.proved is not None:
        basis.taken = torch.zeros(operator.batch, dtype=torch.float64)
    recurrence = Recurrence(operator, start, basis)
    right = start.new_empty(operator.batch, operator.in_size)

    active = np.arange(operator.batch)  # the member in each row of the batch
    running = np.ones(operator.batch, dtype=bool)  # whether the member in each row still runs
    for k in range(1, steps_allowed + 1):
        alpha, gamma = yield from recurrence.step()
        entries = torch.stack((alpha, gamma)).cpu()  # one copy, since other devices are waited for
        check_finite(entries)
        if k == 1:
            members.units = recurrence.units
        members.diagonal[active, k - 1], members.off[active, k - 1] = entries.numpy()
        places = np.flatnonzero(running)
        some = active[places]
        members.bound(some, k, None if basis.taken is None else basis.taken.numpy()[places])
        done = members.finished(some, k)
        for row, member in zip(places[done].tolist(), some[done].tolist(), strict=True):
            basis.combine(row, members.ritz_vector(member, k), out=right[member])
        running[places[done]] = False
        if not running.any():
            break
        if running.sum() <= _COMPACT_AT * len(active):
            recurrence.keep(torch.as_tensor(np.flatnonzero(running), device=right.device))
            active, running = active[running], running[running]

    # More than four vectors, which are let go of before the left directions are made.
    del basis, recurrence, alpha, gamma
    left, lengths = _left(operator, right, settings.reduce)
    return members.triplet(operator, right, left, lengths)


class _Members:
    """The tridiagonal matrix T_k, the interval and the state of each member, as arrays over all members.

    Rounding enters in one of two ways. Where the operator proves how far its products are off
    (``operator.proved``), the interval contains ‖J‖ with all rounding enclosed. Elsewhere an estimate of the
    relative rounding of the products widens the interval on both sides, and is the level below which an entry
    of T_k counts as zero.

    Parameters
    ----------
    operator, settings
        The arguments of the run.
    dtype
        The dtype of the basis.
    in_sizes
        The dimension of each member's input space.
    steps_allowed
        The number of steps after which all members end.

    """

    def __init__(
        self,
        operator: LinearOperator,
        settings: _Settings,
        dtype: torch.dtype,
        in_sizes: np.ndarray,
        steps_allowed: int,
    ) -> None:
        count = operator.batch
        self._rtol = settings.rtol
        self._steps_allowed = steps_allowed
        self._in_sizes = in_sizes
        self._quantile = _quantiles(in_sizes, settings.confidence)
        self.slack = checked_rounding(operator).copy()
        # What a basis of fewer digits takes from the vectors is not small enough for a proof; and processes
        # that share a sequence must decide alike.
        own_digits = dtype == operator.dtype
        self.proved = operator.proved if own_digits and settings.reduce is None else None
        if not own_digits:
            # The error of the basis enters in second order: "The spectral norm" derives it.
            self.slack += torch.finfo(dtype).eps ** 2
        # Both J and Jᵀ round, so what the products cannot tell from zero is twice as large as for one.
        self._level = 2.0 * self.slack
        self.diagonal, self.off = np.zeros((count, steps_allowed)), np.zeros((count, steps_allowed))
        self.units = np.ones(count)
        self.sigma, self.upper = np.zeros(count), np.zeros(count)
        self.steps = np.zeros(count, dtype=np.int64)
        self.converged, self.broke_down = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)

    def bound(self, some: np.ndarray, k: int, taken: np.ndarray | None) -> None:
        """Set σ̂, the upper limit and the state of some members from k rows of their tridiagonal matrices T.

        ``taken`` bounds the sums of squares that reorthogonalisation took from their vectors; the proof of
        rounding needs it.
        """
        a, b, units = self.diagonal[some, :k], self.off[some, :k], self.units[some]
        complete = self._in_sizes[some] == k  # the Krylov space is the whole space
        if self.proved is None or taken is None:
            top, limit = _limits(a, b, self._quantile[some], self._level[some], complete)
            self.upper[some] = units * np.sqrt(limit) * (1 + self.slack[some])
            settled = complete
        else:
            errors = self.proved.rounding.numpy()[some] / units
            top, limit, settled = _proved_limits(a, b, self._quantile[some], errors, taken, self._rtol)
            errors = self.proved.total.numpy()[some] / units
            self.slack[some] = errors / np.sqrt(np.maximum(top, np.finfo(float).tiny))
            self._level[some] = 2.0 * self.slack[some] + 2.0**-49
            self.upper[some] = (units * np.sqrt(limit) + self.proved.model.numpy()[some]) * (1 + 2.0**-50)
        self.sigma[some] = units * np.sqrt(top)
        self.broke_down[some] = complete | settled | (b[:, -1] <= self._level[some] * top)
        width = self.upper[some] - self.sigma[some] * (1 - self.slack[some])
        self.converged[some] = width <= self._rtol * self.sigma[some]

    def finished(self, some: np.ndarray, k: int) -> np.ndarray:
        """Return which of some members end with step k, and note the step."""
        done: np.ndarray = self.converged[some] | self.broke_down[some] | (k == self._steps_allowed)
        self.steps[some[done]] = k
        return done

    def ritz_vector(self, member: int, k: int) -> np.ndarray:
        """Return the leading eigenvector of a member's tridiagonal matrix T_k."""
        return _leading_vector(self.diagonal[member, :k], self.off[member, :k])

    def triplet(
        self, operator: LinearOperator, right: Tensor, left: Tensor, lengths: Tensor
    ) -> LeadingTriplet:
        """Return the result of a run, from the right and left singular vectors and the lengths |J right|."""
        sigma, upper, converged = self.sigma, self.upper, self.converged
        lower = sigma * (1 - self.slack)
        if self.proved is not None:
            # |J v| of a unit vector v is a proved lower limit, whatever the recurrence did before.
            sigma = lengths.cpu().numpy()
            lower = np.maximum(sigma - self.proved.total.numpy(), 0.0) * (1 - length_rounding(operator))
            upper = np.maximum(np.minimum(upper, self.proved.size.numpy()), sigma)
            converged = upper - lower <= self._rtol * sigma
        return LeadingTriplet(
            sigma=torch.from_numpy(sigma),
            lower=torch.from_numpy(lower),
            upper=torch.from_numpy(upper),
            converged=torch.from_numpy(converged),
            broke_down=torch.from_numpy(self.broke_down),
            steps=torch.from_numpy(self.steps),
            right=right.view(len(right), *operator.in_shape),
            left=left.view(len(left), *operator.out_shape),
        )


def _in_sizes(
    operator: LinearOperator, start: Tensor, sizes: Sequence[int] | None, reduce: Reduction | None
) -> np.ndarray:
    """Return the dimension of each member's input space, summed over all processes."""
    own = start.new_tensor(sizes or [operator.in_size] * operator.batch, dtype=torch.float64)
    dimensions: np.ndarray = reduced(own, reduce).cpu().numpy().astype(np.int64)
    return dimensions


def _quantiles(in_sizes: np.ndarray, confidence: float) -> np.ndarray:
    """Return the quantile x_δ of :func:`start_quantile` for each member."""
    distinct, places = np.unique(in_sizes, return_inverse=True)
    return np.array([start_quantile(size, confidence) for size in distinct.tolist()])[places]


def _left(operator: LinearOperator, right: Tensor, reduce: Reduction | None) -> tuple[Tensor, Tensor]:
    """Return the unit vectors along J v, v = ``right``, and the lengths |J v|; zero vectors if J v = 0."""
    image = operator.product(right.view(len(right), *operator.in_shape)).reshape(len(right), -1)
    lengths = norms(image, reduce)
    return image * inverse(lengths).to(image.dtype)[:, None], lengths


def _proved_limits(
    diagonal: np.ndarray,
    off: np.ndarray,
    quantile: np.ndarray,
    errors: np.ndarray,
    taken: np.ndarray,
    rtol: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return leading Ritz values, proved upper limits of λ_max(JᵀJ), and whether rounding decides them."""
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


def _basis_form(operator: LinearOperator, settings: _Settings) -> tuple[torch.dtype, int]:
    """Return the dtype of the basis, and how many vectors it may hold."""
    dtype, memory = settings.basis_dtype, settings.basis_bytes
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
        small = torch.float16 if settings.rtol >= _LEAST_HALF else torch.float32
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
