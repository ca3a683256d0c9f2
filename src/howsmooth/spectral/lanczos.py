"""The largest singular value of each linear map J in a batch, with an interval, by the Lanczos method for
JᵀJ.

From a Gaussian start g, with v₁ = g / |g| and v₀ = 0, step k computes

    α_k = |J v_k|²
    z   = JᵀJ v_k − α_k v_k − γ_{k−1} v_{k−1},   made orthogonal to v₁, …, v_k
    γ_k = |z|
    v_{k+1} = z / γ_k

The α on the diagonal and the γ beside it are the tridiagonal matrix T_k = V_kᵀ JᵀJ V_k. The root of its
largest eigenvalue is a lower limit of ‖J‖, and :mod:`howsmooth.spectral.probabilistic_upper_limits` gives an
upper limit. Each step needs one pass over an operator that shares work between J and Jᵀ. The basis is used
only for reorthogonalisation and for the Ritz vector, so it may be kept in half precision, whose error enters
in second order. Derivation: documentation page "The spectral norm, with an interval".

:func:`_in_step` is the algorithm. :class:`_Run` has the vectors of one operator, and :class:`_Members` the
numbers: it computes the interval of each member from T_k, and ends the members whose interval is narrow
enough. The result of a member does not depend on the other members.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import linalg
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.rounding import above, gamma
from howsmooth.spectral.accurate_sums import row_lengths, squared_lengths
from howsmooth.spectral.float32_products import CheckedProducts
from howsmooth.spectral.krylov_basis import Basis
from howsmooth.spectral.leading_triplet import LeadingTriplet
from howsmooth.spectral.operator import LinearOperator, check_finite, checked_rounding, length_rounding
from howsmooth.spectral.probabilistic_upper_limits import (
    a_posteriori_upper,
    ritz_values,
    rounded_upper,
    start_quantile,
)
from howsmooth.spectral.scaling import PowersOfTwo, Scaled, in_range, times_power, unscaled
from howsmooth.threads import renew_threads

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


def lanczos(
    operator: LinearOperator,
    start: Float[Tensor, "batch *in_shape"],
    *,
    rtol: float,
    confidence: float,
    max_iterations: int,
    basis_dtype: torch.dtype | None = None,
    basis_bytes: int | None = None,
) -> LeadingTriplet:
    """Return the largest singular value of each map J in ``operator``, with an interval and singular vectors.

    Beside the basis, at most five vectors are in memory. The result of an operator whose products are checked
    by more accurate ones (``spectral.float32_products``) has the values of the
    latter.

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

    Raises
    ------
    ArgumentError
        If the basis cannot be kept in ``basis_dtype``, or ``basis_bytes`` has no room for two vectors.
    NonFiniteError
        If a product is not finite, rounding errors are as large as the product, or a singular value is beyond
        the range of float64.

    Notes
    -----
    Maps whose squares leave the range of the dtype are multiplied by powers of two, and their singular values
    divided by them.

    Where no bound on the errors of the products is proved, the interval is widened on both sides by
    ``operator.rounding``, and an off-diagonal entry below twice this level counts as zero: the Krylov space
    is exhausted. The upper limit is computed with the level in place of this entry, because an entry that
    floating-point numbers cannot distinguish from zero need not be zero.

    """
    settings = _Settings(rtol, confidence, max_iterations, basis_dtype, basis_bytes)
    run = _Run(operator, start, settings)
    return _in_step([run], _by_themselves)[0]


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
    """Return the largest singular values of several operators. Their Lanczos runs go in step, so that they
    can share products.

    The arguments are those of :func:`lanczos`; the shapes of the operators may differ. ``products`` returns
    ``operator.energy_product(vectors)`` of each operator that it is given, which has only the members that
    have not finished. ``sizes`` are the dimensions N of the input space of each member of each operator, if
    members are smaller than the input space: starts and products must be zero in the other coordinates.
    """
    settings = _Settings(rtol, confidence, max_iterations)
    of_each: Sequence[Sequence[int] | None] = sizes or [None] * len(operators)
    given = zip(operators, starts, of_each, strict=True)
    return _in_step([_Run(operator, start, settings, size) for operator, start, size in given], products)


def _in_step(runs: Sequence[_Run], products: Products) -> list[LeadingTriplet]:
    """Advance several Lanczos runs together, with one call of ``products`` for all products of a step."""
    while active := [run for run in runs if run.goes_on]:
        renew_threads()
        operators, vectors = zip(*(run.ask() for run in active), strict=True)
        answers = list(products(operators, vectors))
        del operators, vectors
        for run in active:
            run.take(answers)
    return [run.result() for run in runs]


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
    basis_dtype: torch.dtype | None = None
    basis_bytes: int | None = None


class _Run:
    """The vectors of a Lanczos run for each map J in a batch.

    Vectors are the rows of tensors (member, size); α and γ are (member,) in float64. Before step k the run
    holds z and γ_{k−1} of the last step, v_{k−1}, and the basis. A step is :meth:`ask`, which gives the
    operator and the vectors of the product that the step needs, and :meth:`take`, which goes on with this
    product.

    ``sizes`` are the dimensions of the members' input spaces, if they are smaller than the operator's.
    """

    def __init__(
        self,
        operator: LinearOperator,
        start: Float[Tensor, "batch *in_shape"],
        settings: _Settings,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._whole, self._start, self._settings = operator, start, settings
        self._sizes = np.array(sizes or [operator.in_size] * operator.batch)
        # The maps of all members, and of those that still run
        self._all = self._operator = operator.single if isinstance(operator, CheckedProducts) else operator
        dtype, rows = _basis_form(self._all, settings)
        # No member makes more steps than its input space has dimensions, or than the basis has room for.
        largest = int(self._sizes.max())
        steps_allowed = min(settings.max_iterations, largest, rows)
        self._members = _Members(self._all, settings, dtype, self._sizes, steps_allowed)
        self._basis = Basis(largest, dtype, operator.dtype)
        if self._members.proved is not None:
            self._basis.taken = torch.zeros(operator.batch, dtype=torch.float64)
        self._powers: PowersOfTwo | None = None
        self._z: Tensor | None = start.reshape(operator.batch, -1).clone()
        self._gamma = row_lengths(self._z)
        self._v = self._before = self._z[:0]
        self._right = start.new_empty(self._z.shape)
        # JᵀJ v for the Ritz vector v, as the recurrence has it, for the check of an operator's products. The
        # error of a basis with fewer digits would count as an error of the products.
        judged = isinstance(operator, CheckedProducts) and dtype == operator.dtype
        self._gram = torch.empty_like(self._right) if judged else None
        self._active = np.arange(operator.batch)  # the member in each row of the batch
        self._running = np.full(operator.batch, fill_value=True)  # whether the member in each row still runs
        self._k = 0

    @property
    def goes_on(self) -> bool:
        return bool(self._running.any())

    def ask(self) -> tuple[LinearOperator, Tensor]:
        assert self._z is not None
        # v_k is written over z, because a further vector may not fit in memory.
        self._v, self._z = self._z.mul_(inverse(self._gamma).to(self._z.dtype)[:, None]), None
        self._basis.append(self._v)
        return self._operator, self._v.view(-1, *self._operator.in_shape)

    def take(self, answers: list[tuple[Tensor, Tensor]]) -> None:
        # No other name may keep the product alive while the next vector is made: memory is short.
        alpha, z = answers.pop(0)
        z = z.reshape(len(z), -1)
        v, before = self._v, self._before
        self._k += 1
        if self._k == 1:
            alpha, z = self._scaled(alpha, z)
        z = torch.addcmul(z, alpha.to(z.dtype)[:, None], v, value=-1)
        if self._k > 1:
            z.addcmul_(self._gamma.to(z.dtype)[:, None], before, value=-1)
        # Orthogonal to all of the basis, since rounding errors would otherwise bring found directions back
        self._gamma = self._basis.orthogonalise_(z, [v] if self._k == 1 else [v, before])
        self._z, self._before = z, v
        entries = torch.stack((alpha, self._gamma)).cpu()  # one copy, because each copy waits for the device
        check_finite(entries)
        self._end_members(*entries.numpy())

    def _scaled(self, energy: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Answer the first step; maps whose squares leave the dtype are first scaled by powers of two."""
        # Lengths of J v in this range say that no number of the recurrence leaves it.
        if bool(((energy >= 2.0**-40) & (energy <= 2.0**40)).all()):
            return energy, z
        e = self._v.view(-1, *self._all.in_shape)
        powers, w = in_range(self._all, e, self._all.product(e))
        # Of what stays zero no size is known.
        powers = powers.among(w.flatten(1).any(dim=1).cpu().numpy())
        if not powers:
            return energy, z
        self._powers = powers
        self._all = self._operator = Scaled(self._all, self._powers)
        if self._members.proved is not None:
            self._members.proved = self._all.proved
        return squared_lengths(w.flatten(1)), self._all.adjoint_product(w).reshape(z.shape)

    def _end_members(self, alpha: np.ndarray, gamma: np.ndarray) -> None:
        """Bound members by row k of T, write the Ritz vectors of those that end, and drop them if many."""
        members, k, active = self._members, self._k, self._active
        members.diagonal[active, k - 1], members.off[active, k - 1] = alpha, gamma
        places = np.flatnonzero(self._running)
        some, taken = active[places], self._basis.taken
        members.bound(some, k, None if taken is None else taken.numpy()[places])
        done = members.finished(some, k)
        rows, ended = places[done], some[done]
        if len(rows):
            weights = members.ritz_vectors(ended, k)
            self._basis.combine(rows, weights, self._right, ended)
            if self._gram is not None and self._z is not None:
                for row, member, last in zip(
                    rows.tolist(), ended.tolist(), weights[:, -1].tolist(), strict=True
                ):
                    # JᵀJ V = V T + z e_kᵀ
                    square = float(members.sigma[member]) ** 2
                    torch.mul(self._right[member], square, out=self._gram[member])
                    self._gram[member].add_(self._z[row], alpha=last)
        self._running[rows] = False
        if self._running.any() and self._running.sum() <= _COMPACT_AT * len(active):
            kept = torch.as_tensor(np.flatnonzero(self._running), device=self._right.device)
            self._operator = self._operator.select(kept)
            assert self._z is not None
            self._z, self._before, self._gamma = self._z[kept], self._before[kept], self._gamma[kept]
            self._basis.keep(kept)
            self._active, self._running = active[self._running], self._running[self._running]

    def result(self) -> LeadingTriplet:
        # These hold more than four vectors; free them before the left directions are made.
        self._z = None
        self._v = self._before = self._right[:0]
        self._basis.blocks.clear()
        operator = self._all
        right = self._right.view(-1, *operator.in_shape)
        if isinstance(self._whole, CheckedProducts):
            found = self._triplet(None, right, right.new_zeros(len(right), *operator.out_shape))
            # Only the operator itself may keep the float32 products alive, for which memory may lack room.
            del operator
            self._all = self._operator = self._whole
            return self._checked(self._whole, found)
        image = operator.product(right)
        lengths = row_lengths(image.flatten(1))
        left = image * inverse(lengths).to(image.dtype).view(-1, *(1,) * (image.ndim - 1))
        return self._triplet(lengths, right, left)

    def _triplet(
        self, lengths: Float[Tensor, " member"] | None, right: Tensor, left: Tensor
    ) -> LeadingTriplet:
        """Undo the scaling. ``lengths`` are |J v|, or None if other products give the value."""
        limits, members = self._members.limits(self._all, lengths), self._members
        if self._powers:
            limits = unscaled(limits, self._powers.total, right.dtype)
        sigma, lower, upper = torch.from_numpy(limits)
        return LeadingTriplet(
            sigma=sigma,
            lower=lower,
            upper=upper,
            converged=upper - lower <= self._settings.rtol * sigma,
            broke_down=torch.from_numpy(members.broke_down),
            steps=torch.from_numpy(members.steps),
            right=right,
            left=left,
        )

    def _checked(self, operator: CheckedProducts, found: LeadingTriplet) -> LeadingTriplet:
        """Check float32 values by float64 products; measure members that become too wide again with these."""
        gram = self._gram
        if gram is not None:
            # In float64, because float32 has no number for the square of a small J
            gram = times_power(gram.double(), -2 * self._powers.total) if self._powers else gram
            gram = gram.view(found.right.shape)
        judged = operator.judged(found, gram, self._settings.rtol)
        # More steps would not help members that float32 took as finished. Members that used up their steps
        # are not measured again: float64 would stop there, too.
        stuck = torch.nonzero(~judged.converged & (found.converged | found.broke_down)).flatten()
        if not len(stuck) or operator.basis_bytes == 0:
            return judged
        chosen = stuck.to(operator.device)
        run = _Run(
            operator.exact.select(chosen),
            operator.lifted(self._start[chosen].double(), chosen),
            replace(self._settings, basis_dtype=None, basis_bytes=operator.basis_bytes),
            None if operator.exact.in_shape != operator.in_shape else self._sizes[stuck.numpy()].tolist(),
        )
        (again,) = _in_step([run], _by_themselves)
        for name, kept in vars(judged).items():
            kept[stuck.to(kept.device)] = getattr(again, name).to(kept.dtype)
        return judged


class _Members:
    """The tridiagonal matrix and the interval of each map J in a batch, and whether its run has ended.

    If the operator has proved bounds on the errors of its products (``operator.proved``), the interval
    contains ‖J‖ with all rounding. Otherwise an estimate of the relative error of the products widens it on
    both sides, and entries of T_k below this error count as zero.
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
        self.sigma, self.upper = np.zeros(count), np.zeros(count)
        self.steps = np.zeros(count, dtype=np.int64)
        self.converged, self.broke_down = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)

    def bound(self, some: Int[np.ndarray, " some"], k: int, taken: Float[np.ndarray, " some"] | None) -> None:
        """``taken`` bounds the squares that reorthogonalisation subtracted, for the proof of the rounding."""
        a, b = self.diagonal[some, :k], self.off[some, :k]
        complete = self._in_sizes[some] == k  # the Krylov space is the whole space
        if self.proved is None or taken is None:
            top, limit = _limits(a, b, self._quantile[some], self._level[some], complete)
            self.upper[some] = np.sqrt(limit) * (1 + self.slack[some])
            settled = complete
        else:
            errors = self.proved.rounding.numpy()[some]
            top, limit, settled = _proved_limits(a, b, self._quantile[some], errors, taken, self._rtol)
            errors = self.proved.total.numpy()[some]
            self.slack[some] = errors / np.sqrt(np.maximum(top, np.finfo(float).tiny))
            self._level[some] = 2.0 * self.slack[some] + gamma(16)
            self.upper[some] = above(np.sqrt(limit) + self.proved.model.numpy()[some], 4)
        self.sigma[some] = np.sqrt(top)
        # γ_k = 0 up to rounding: the Krylov space is invariant, and further steps would add only noise.
        self.broke_down[some] = complete | settled | (b[:, -1] <= self._level[some] * top)
        width = self.upper[some] - self.sigma[some] * (1 - self.slack[some])
        self.converged[some] = width <= self._rtol * self.sigma[some]

    def finished(self, some: Int[np.ndarray, " some"], k: int) -> Bool[np.ndarray, " some"]:
        """Return True where a run has converged or broken down, or has no steps left."""
        done: np.ndarray = self.converged[some] | self.broke_down[some] | (k == self._steps_allowed)
        self.steps[some[done]] = k
        return done

    def ritz_vectors(self, some: Int[np.ndarray, " some"], k: int) -> Float[np.ndarray, "some k"]:
        """Return the coefficients of the singular vectors in the Krylov basis."""
        return np.stack([_leading_vector(self.diagonal[member, :k], self.off[member, :k]) for member in some])

    def limits(
        self, operator: LinearOperator, lengths: Float[Tensor, " member"] | None
    ) -> Float[np.ndarray, "3 member"]:
        """Return values and limits. ``lengths`` are |J v|, or None if computed with more digits."""
        if self.proved is None or lengths is None:
            return np.stack((self.sigma, self.sigma * (1 - self.slack), self.upper))
        # |J v| of a unit vector v is a proved lower limit, whatever the recurrence did before.
        sigma = lengths.cpu().numpy()
        lower = np.maximum(sigma - self.proved.total.numpy(), 0.0) * (1 - length_rounding(operator))
        return np.stack((sigma, lower, np.maximum(np.minimum(self.upper, self.proved.size.numpy()), sigma)))


def _proved_limits(
    diagonal: Float[np.ndarray, "member k"],
    off: Float[np.ndarray, "member k"],
    quantile: Float[np.ndarray, " member"],
    errors: Float[np.ndarray, " member"],
    taken: Float[np.ndarray, " member"],
    rtol: float,
) -> tuple[Float[np.ndarray, " member"], Float[np.ndarray, " member"], Bool[np.ndarray, " member"]]:
    """Return the Ritz value, a limit of ‖JᵀJ‖ with all rounding, and whether rounding decides it."""
    found = []
    with np.errstate(over="ignore"):  # Where products are nothing but rounding errors, there is no limit.
        for a, b, x, error, lost in zip(diagonal, off, quantile, errors, taken, strict=True):
            # T is scaled to entries near one, so that squares of small entries do not underflow.
            unit = max(float(a.max()), float(b.max())) or 1.0
            relative = error / math.sqrt(unit), math.sqrt(lost) / unit
            top, limit, done = rounded_upper(a / unit, b / unit, x, *relative, rtol)
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
    """Return the Ritz value and its limit by ``a_posteriori_upper``."""
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
    """Return the leading eigenvector of a tridiagonal matrix; the last entry of ``off`` is outside."""
    unit, last = max(diagonal.max(), off[:-1].max(initial=0.0)) or 1.0, len(diagonal) - 1
    _, vectors = linalg.eigh_tridiagonal(
        diagonal / unit, off[:-1] / unit, select="i", select_range=(last, last)
    )
    leading: np.ndarray = vectors[:, 0]
    return leading


def _basis_form(operator: LinearOperator, settings: _Settings) -> tuple[torch.dtype, int]:
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


def inverse(lengths: Float[Tensor, " member"]) -> Float[Tensor, " member"]:
    """Return 1 / length for each of the given lengths, and zero for length zero."""
    return torch.where(lengths > 0, 1.0 / lengths, 0.0)
