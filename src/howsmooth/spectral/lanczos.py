"""The largest singular value of each linear map J in a batch, with an interval, by the Lanczos method for
JᵀJ.

Lanczos is Golub–Kahan bidiagonalisation without the left vectors: from a Gaussian start, k steps give V_k
with V_kᵀ JᵀJ V_k = T_k tridiagonal, and T_k = B_kᵀB_k for the bidiagonal matrix B_k. So the same interval
holds (:mod:`howsmooth.spectral.probabilistic_upper_limits`), and each step needs one pass over an operator
that shares work between J and Jᵀ. The basis is used only for reorthogonalisation and for the Ritz vector, so
it may be kept in half precision, whose error enters in second order. Derivation and measurements:
documentation page "The spectral norm, with an interval".

:func:`_run` is the algorithm. Each step makes a row of T_k (:mod:`howsmooth.spectral.lanczos_recurrence`),
computes the interval of each member from T_k (:meth:`_Members.bound`), and ends the members whose interval is
narrow enough (:meth:`_Members.finished`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import linalg
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.spectral.accurate_sums import row_lengths
from howsmooth.spectral.golub_kahan import LeadingTriplet
from howsmooth.spectral.krylov_basis import Basis
from howsmooth.spectral.lanczos_recurrence import Recurrence, inverse
from howsmooth.spectral.operator import LinearOperator, check_finite, checked_rounding, length_rounding
from howsmooth.spectral.probabilistic_upper_limits import (
    a_posteriori_upper,
    ritz_values,
    rounded_upper,
    start_quantile,
)

__all__ = ["lanczos", "lanczos_together"]

# The basis is kept in the precision of the operator if memory has room for this many of its vectors.
_EXPECTED_STEPS = 64
# For smaller tolerances, the rounding of a basis in half precision would be too large a part of the interval.
_LEAST_HALF = 2e-5
# Finished members are dropped from the batch when at most this share of it still runs. They are not dropped
# one by one, because dropping copies the basis.
_COMPACT_AT = 0.75

Products = Callable[[Sequence[LinearOperator], Sequence[Tensor]], Sequence[tuple[Tensor, Tensor]]]
"""A function that returns the ``energy_product`` of each operator with its vectors."""
_Run = Generator[tuple[LinearOperator, Tensor], tuple[Tensor, Tensor], LeadingTriplet]
"""A run of the algorithm that yields requests for energy products and returns its triplet."""


def lanczos(
    operator: LinearOperator,
    start: Float[Tensor, "batch *in_shape"],
    *,
    rtol: float,
    confidence: float,
    max_iterations: int,
    basis_dtype: torch.dtype | None = None,
    basis_bytes: int | None = None,
    judged: bool = False,
) -> LeadingTriplet:
    """Compute the largest singular value of each map J in ``operator``, with an interval and singular
    vectors, from products with JᵀJ.

    The result is that of :func:`howsmooth.spectral.golub_kahan`, with less than half of the memory, or a
    quarter with a basis in half precision. Beside the basis, at most five vectors are in memory.

    Parameters
    ----------
    operator
        The batch of maps.
    start
        Gaussian vectors, drawn independently of the operator. The interval holds only for such starts.
    rtol
        A member stops when upper − lower <= rtol · σ̂.
    confidence
        Probability, over the start, with which each member's interval holds.
    max_iterations
        Largest number of steps. Each step takes one product with JᵀJ.
    basis_dtype
        Dtype of the basis: the dtype of the operator, float32 or float16. The default is the operator's dtype
        if ``basis_bytes`` has room for 64 vectors of it, and otherwise float16, or float32 for ``rtol`` below
        2e-5.
    basis_bytes
        Bytes for the basis. Members that need more steps than fit into them stop with the interval reached
        so far. They have made fewer than ``max_iterations`` steps, and neither converged nor broke down.
    judged
        Whether the caller computes J v again with more digits. Then the result has the field ``gram`` if the
        basis has all digits, and its ``left`` is zero.

    Raises
    ------
    ArgumentError
        If the basis cannot be kept in ``basis_dtype``, or ``basis_bytes`` has no room for two vectors.
    NonFiniteError
        If a product is not finite, or rounding errors are as large as the product.

    """
    settings = _Settings(rtol, confidence, max_iterations, judged, basis_dtype, basis_bytes)
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
    judged: bool = False,
) -> list[LeadingTriplet]:
    """Compute the largest singular values of several operators in the same Lanczos steps, so that they can
    share products.

    Parameters
    ----------
    operators, starts
        As for :func:`lanczos`; their shapes may differ.
    rtol, confidence, max_iterations, judged
        As for :func:`lanczos`.
    products
        A function of operators and their vectors that returns ``operator.energy_product(vectors)`` of each.
        The operators that it is given have only the members that have not finished.
    sizes
        Dimension N of the input space of each member of each operator, if members are smaller than the
        input space of their operator. Starts and products must be zero in the other coordinates.

    """
    of_each = sizes or [[operator.in_size] * operator.batch for operator in operators]
    settings = _Settings(rtol, confidence, max_iterations, judged)
    runs = [
        _run(operator, start, settings, size)
        for operator, start, size in zip(operators, starts, of_each, strict=True)
    ]
    return _in_lockstep(runs, products)


def _in_lockstep(runs: Sequence[_Run], products: Products) -> list[LeadingTriplet]:
    """Advance several Lanczos runs together, such that one call of ``products`` computes all products of a
    step.
    """
    found: dict[int, LeadingTriplet] = {}
    answers: dict[int, tuple[Tensor, Tensor] | None] = dict.fromkeys(range(len(runs)))
    while answers:
        asked: dict[int, tuple[LinearOperator, Tensor]] = {}
        for i in list(answers):
            try:
                # No name may keep an answer alive while the run makes its next vectors: memory is short.
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
    """The arguments of :func:`lanczos` that set the accuracy and the memory limit."""

    rtol: float
    confidence: float
    max_iterations: int
    judged: bool
    basis_dtype: torch.dtype | None = None
    basis_bytes: int | None = None


def _run(
    operator: LinearOperator, start: Tensor, settings: _Settings, sizes: Sequence[int] | None = None
) -> _Run:
    """Run Lanczos on JᵀJ until the interval for the norm of each map J in the batch is narrow enough.

    This is a generator, which asks its caller for the products.

    ``sizes`` are the dimensions of the members' input spaces, if they are smaller than the operator's.
    """
    # No member makes more steps than its input space has dimensions, or than the basis has room for.
    dtype, rows = _basis_form(operator, settings)
    in_sizes = np.array(sizes or [operator.in_size] * operator.batch)
    largest = int(in_sizes.max())
    steps_allowed = min(settings.max_iterations, largest, rows)
    members = _Members(operator, settings, dtype, in_sizes, steps_allowed)
    basis = Basis(largest, dtype, operator.dtype)
    if members.proved is not None:
        basis.taken = torch.zeros(operator.batch, dtype=torch.float64)
    recurrence = Recurrence(operator, start, basis)
    right = start.new_empty(operator.batch, operator.in_size)
    # The error of a basis with fewer digits would count as an error of the products.
    gram = torch.empty_like(right) if settings.judged and dtype == operator.dtype else None

    active = np.arange(operator.batch)  # the member in each row of the batch
    running = np.ones(operator.batch, dtype=bool)  # whether the member in each row still runs
    for k in range(1, steps_allowed + 1):
        # Make row k of T.
        alpha, gamma = yield from recurrence.step()
        entries = torch.stack((alpha, gamma)).cpu()  # one copy, because each copy waits for the device
        check_finite(entries)
        if k == 1:
            members.units = recurrence.units
        members.diagonal[active, k - 1], members.off[active, k - 1] = entries.numpy()
        # Compute the intervals of the running members, and write the Ritz vectors of members that end.
        places = np.flatnonzero(running)
        some = active[places]
        members.bound(some, k, None if basis.taken is None else basis.taken.numpy()[places])
        done = members.finished(some, k)
        rows, ended = places[done], some[done]
        if len(rows):
            weights = members.ritz_vectors(ended, k)
            basis.combine(rows, weights, right, ended)
            if gram is not None:
                last = weights[:, -1] * members.units[ended] ** 2
                for row, member, rest in zip(rows.tolist(), ended.tolist(), last.tolist(), strict=True):
                    # JᵀJ V = V T + z e_kᵀ
                    torch.mul(right[member], float(members.sigma[member]) ** 2, out=gram[member])
                    recurrence.add_rest_(gram[member], row, rest)
        running[rows] = False
        # Drop the members that have ended.
        if not running.any():
            break
        if running.sum() <= _COMPACT_AT * len(active):
            recurrence.keep(torch.as_tensor(np.flatnonzero(running), device=right.device))
            active, running = active[running], running[running]

    # These hold more than four vectors; free them before the left directions are made.
    del basis, recurrence, alpha, gamma
    if settings.judged:
        left, lengths = right.new_zeros(operator.batch, operator.out_size), None
    else:
        image = operator.product(right.view(len(right), *operator.in_shape)).reshape(len(right), -1)
        lengths = row_lengths(image)
        left = image * inverse(lengths).to(image.dtype)[:, None]
    found = members.triplet(operator, right, left, lengths)
    return found if gram is None else replace(found, gram=gram.view(found.right.shape))


class _Members:
    """The state of a Lanczos run for each map J in a batch: tridiagonal matrix, interval for ‖J‖, and whether
    the run has ended.

    Rounding is treated in one of two ways. If the operator has proved bounds on the errors of its products
    (``operator.proved``), the interval contains ‖J‖ with all rounding errors included. Otherwise an estimate
    of the relative error of the products widens the interval on both sides, and entries of T_k below this
    error count as zero.

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
        in_sizes: Int[np.ndarray, " member"],
        steps_allowed: int,
    ) -> None:
        count = operator.batch
        self._rtol = settings.rtol
        self._steps_allowed = steps_allowed
        self._in_sizes = in_sizes
        # Maps of equal dimension share the computation.
        distinct, places = np.unique(in_sizes, return_inverse=True)
        found = [start_quantile(size, settings.confidence) for size in distinct.tolist()]
        self._quantile = np.array(found)[places]
        self.slack = checked_rounding(operator).copy()
        # The proof needs a basis with all digits of the operator.
        own_digits = dtype == operator.dtype
        self.proved = operator.proved if own_digits else None
        if not own_digits:
            # The error of the basis enters in second order: "The spectral norm" derives it.
            self.slack += torch.finfo(dtype).eps ** 2
        # Entries of T below this share of the leading Ritz value count as zero: J and Jᵀ round once each.
        self._level = 2.0 * self.slack
        self.diagonal, self.off = np.zeros((count, steps_allowed)), np.zeros((count, steps_allowed))
        self.units = np.ones(count)
        self.sigma, self.upper = np.zeros(count), np.zeros(count)
        self.steps = np.zeros(count, dtype=np.int64)
        self.converged, self.broke_down = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)

    def bound(self, some: Int[np.ndarray, " some"], k: int, taken: Float[np.ndarray, " some"] | None) -> None:
        """Compute the largest singular values of some maps after Lanczos step k, with upper limits, and
        decide which intervals are narrow enough.

        ``taken`` bounds the sum of squares of the components that reorthogonalisation has subtracted from the
        vectors of each member. The proof of the rounding errors needs it.
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
        # γ_k = 0 up to rounding: the Krylov space is invariant, and further steps would add only noise.
        self.broke_down[some] = complete | settled | (b[:, -1] <= self._level[some] * top)
        width = self.upper[some] - self.sigma[some] * (1 - self.slack[some])
        self.converged[some] = width <= self._rtol * self.sigma[some]

    def finished(self, some: Int[np.ndarray, " some"], k: int) -> Bool[np.ndarray, " some"]:
        """Decide for each map whose index is in ``some`` whether its Lanczos run ends at step ``k``. The
        result is True where it ends.

        A run ends when it has converged or broken down, or has no steps left; its number of steps is stored.
        """
        done: np.ndarray = self.converged[some] | self.broke_down[some] | (k == self._steps_allowed)
        self.steps[some[done]] = k
        return done

    def ritz_vectors(self, some: Int[np.ndarray, " some"], k: int) -> Float[np.ndarray, "some k"]:
        """Return the leading eigenvector of the tridiagonal matrix for each map in ``some``. Its entries are
        the coefficients of the map's singular vector in the Krylov basis.
        """
        return np.stack([_leading_vector(self.diagonal[member, :k], self.off[member, :k]) for member in some])

    def triplet(
        self,
        operator: LinearOperator,
        right: Float[Tensor, "member in_size"],
        left: Float[Tensor, "member out_size"],
        lengths: Float[Tensor, " member"] | None,
    ) -> LeadingTriplet:
        """Return the result of the Lanczos run: the largest singular value of each map, with its interval and
        singular vectors.

        The argument ``right`` contains unit vectors v, ``left`` the unit vectors along J v, and ``lengths``
        the norms |J v|. The last two are None if the caller computes them with more digits.
        """
        sigma, upper, converged = self.sigma, self.upper, self.converged
        lower = sigma * (1 - self.slack)
        if self.proved is not None and lengths is not None:
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


def _proved_limits(
    diagonal: Float[np.ndarray, "member k"],
    off: Float[np.ndarray, "member k"],
    quantile: Float[np.ndarray, " member"],
    errors: Float[np.ndarray, " member"],
    taken: Float[np.ndarray, " member"],
    rtol: float,
) -> tuple[Float[np.ndarray, " member"], Float[np.ndarray, " member"], Bool[np.ndarray, " member"]]:
    """Return for each map J of a batch the largest Ritz value, and an upper limit of ‖JᵀJ‖ that also covers
    rounding errors.

    The third value says for which maps rounding decides the limit.
    """
    found = []
    for a, b, x, error, lost in zip(diagonal, off, quantile, errors, taken, strict=True):
        # T is scaled to entries near one, so that squares of small entries do not underflow.
        unit = max(float(a.max()), float(b.max())) or 1.0
        root = math.sqrt(unit)
        top, limit, done = rounded_upper(a / unit, b / unit, x, error / root, math.sqrt(lost) / unit, rtol)
        found.append((unit * top, unit * limit, done))
    tops, limits, settled = zip(*found, strict=True)
    return np.array(tops), np.array(limits), np.array(settled)


def _limits(
    diagonal: Float[np.ndarray, "member k"],
    off: Float[np.ndarray, "member k"],
    quantile: Float[np.ndarray, " member"],
    level: Float[np.ndarray, " member"],
    complete: Bool[np.ndarray, " member"],
) -> tuple[Float[np.ndarray, " member"], Float[np.ndarray, " member"]]:
    """Return for each map J of a batch the largest Ritz value and an upper limit of the largest eigenvalue of
    JᵀJ.

    The limit is that of :func:`~howsmooth.spectral.probabilistic_upper_limits.a_posteriori_upper`.
    """
    # Scaled to entries near one, so that products and squares stay in range.
    largest = np.maximum(diagonal.max(axis=1), off[:, :-1].max(axis=1, initial=0.0))
    unit = np.where(largest == 0.0, 1.0, largest)[:, None]
    scaled, off = diagonal / unit, off / unit
    theta = np.stack([ritz_values(*parts) for parts in zip(scaled, off[:, :-1], strict=True)])
    top = np.maximum(theta[:, -1], 0.0)
    # An entry γ that cannot be told from zero counts as the rounding error, which only raises the limit.
    least = np.where(largest == 0.0, 1.0, level * top)
    logs = np.where(complete, -np.inf, np.log(np.maximum(off, least[:, None])).sum(axis=1))
    return largest * top, largest * a_posteriori_upper(theta, logs, quantile)


def _leading_vector(
    diagonal: Float[np.ndarray, " k"], off: Float[np.ndarray, " k"]
) -> Float[np.ndarray, " k"]:
    """Return the eigenvector of a symmetric tridiagonal matrix for its largest eigenvalue.

    The last entry of ``off`` is not part of the matrix.
    """
    unit, last = max(diagonal.max(), off[:-1].max(initial=0.0)) or 1.0, len(diagonal) - 1
    _, vectors = linalg.eigh_tridiagonal(
        diagonal / unit, off[:-1] / unit, select="i", select_range=(last, last)
    )
    leading: np.ndarray = vectors[:, 0]
    return leading


def _basis_form(operator: LinearOperator, settings: _Settings) -> tuple[torch.dtype, int]:
    """Return the dtype of the Krylov basis and the number of its vectors that fit into memory."""
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
