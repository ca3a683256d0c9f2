"""The largest singular value of each linear map in a batch, with an interval, by Golub–Kahan
bidiagonalisation.

From a Gaussian start b in the input space, with v₁ = b / |b| and β₀ = 0, step k computes

    α_k u_k     = J v_k − β_{k−1} u_{k−1},   made orthogonal to u₁, …, u_{k−1}
    β_k v_{k+1} = Jᵀu_k − α_k v_k,           made orthogonal to v₁, …, v_k

so that J V_k = U_k B_k with orthonormal columns of V_k and U_k, and B_k upper bidiagonal with α on the
diagonal and β above it. The largest singular value σ̂ of B_k is a lower limit of ‖J‖, and
:mod:`howsmooth.spectral.probabilistic_upper_limits` gives an upper limit. Each member
of the batch stops when its interval is narrow enough, and its result does not depend on the other members.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import linalg
from torch import Tensor

from howsmooth.spectral.accurate_sums import PIECE, inner_products, squared_lengths
from howsmooth.spectral.operator import LinearOperator, check_finite, checked_rounding
from howsmooth.spectral.probabilistic_upper_limits import a_posteriori_upper, ritz_values, start_quantile
from howsmooth.spectral.scaling import PowersOfTwo, Scaled, in_range, shifted, unscaled

__all__ = ["TRIPLET_FIELDS", "LeadingTriplet", "golub_kahan"]

_FIRST_CAPACITY = 16
# Finished members are dropped from the batch when at most this share of it still runs. They are not dropped
# one by one, because dropping copies the bases.
_COMPACT_AT = 0.75


@dataclass(frozen=True)
class LeadingTriplet:
    """The largest singular value of each linear map in a batch, an interval that contains it, and its
    singular vectors.

    ``sigma``, ``lower`` and ``upper`` are float64, with lower <= sigma <= upper. ``converged`` says whether
    upper − lower <= rtol · sigma. ``broke_down`` says whether the Krylov space was exhausted, or rounding
    allows no narrower interval. ``right`` and ``left`` are unit vectors in the input and output space;
    ``left`` is zero for a map that is zero.

    ``gram`` is JᵀJ v for v = ``right``, as computed from the recurrence of the solver. It is present only if
    the caller asked for it in order to check the result by more accurate products. Its difference from the
    exact product is the rounding error of all steps.
    """

    sigma: Float[Tensor, " batch"]
    lower: Float[Tensor, " batch"]
    upper: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]
    broke_down: Bool[Tensor, " batch"]
    steps: Int[Tensor, " batch"]
    right: Float[Tensor, "batch *in_shape"]
    left: Float[Tensor, "batch *out_shape"]
    gram: Float[Tensor, "batch *in_shape"] | None = None


TRIPLET_FIELDS = tuple(name for name in LeadingTriplet.__annotations__ if name != "gram")
"""The names of the fields of a triplet that every result has."""


class _Basis:
    """The orthonormal vectors of all previous steps of a Golub–Kahan bidiagonalisation, for each map of a
    batch.

    The axis of steps comes first, so that the newest row is contiguous over the batch. Products are made
    member by member, because a batched matrix-vector product takes several times as long.
    """

    def __init__(self, members: int, size: int, like: Tensor) -> None:
        self.rows = like.new_empty(min(_FIRST_CAPACITY, size + 1), members, size)
        self.count = 0

    def append(self, row: Tensor, length: Tensor) -> Tensor:
        """Normalise the rows (one for each map of the batch), add them to the basis, and return them.

        The argument ``length`` holds the lengths of the rows (member, size). A row of zero length gives zero.
        """
        capacity, members, size = self.rows.shape
        if self.count == capacity:
            grown = self.rows.new_empty(min(2 * capacity, size + 1), members, size)
            grown[:capacity] = self.rows
            self.rows = grown
        self.count += 1
        return torch.mul(row, _inverse(length)[:, None], out=self.rows[self.count - 1])

    def keep(self, members: Tensor) -> None:
        """Restrict the basis to the given maps of the batch."""
        kept = self.rows.new_empty(self.rows.shape[0], len(members), self.rows.shape[2])
        kept[: self.count] = self.rows[: self.count, members]
        self.rows = kept

    def orthogonalise_(self, w: Tensor) -> Tensor:
        """Orthogonalise the vector of each map, a row of w (member, size), against the basis vectors of this
        map, in place.

        Their projection is subtracted a second time if needed.
        """
        if self.count == 0:
            return w
        length: Callable[[Tensor], Tensor] = _length
        products: Callable[[Tensor, Tensor], Tensor] = inner_products
        if w.shape[1] <= PIECE:
            length, products = torch.linalg.vector_norm, torch.mv
        for member, vector in enumerate(w):
            rows = self.rows[: self.count, member]
            for _ in range(2):
                before = length(vector)
                vector.addmv_(rows.mT, products(rows, vector), alpha=-1)
                # A second projection is needed only if the first one removed much of the vector (Daniel,
                # Gragg, Kaufman, Stewart 1976).
                if float(length(vector)) > 0.7 * float(before):
                    break
        return w

    def combine(self, member: int, weights: np.ndarray) -> Tensor:
        """Return the linear combination Σ_k weights_k v_k of the basis vectors v_k of one map."""
        rows = self.rows[: len(weights), member]
        return torch.as_tensor(weights, dtype=rows.dtype, device=rows.device) @ rows


def golub_kahan(
    operator: LinearOperator,
    start: Float[Tensor, "batch *in_shape"],
    *,
    rtol: float,
    confidence: float,
    max_iterations: int,
    judged: bool = False,
    image: Float[Tensor, "batch *out_shape"] | None = None,
) -> LeadingTriplet:
    """Return the largest singular value of each map in ``operator``, with an interval and singular vectors.

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
        Largest number of steps. Each step takes one product and one adjoint product.
    judged
        Whether the caller judges the result, so that it has the field ``gram``.
    image
        The product of the operator with ``start``, if it is known. The first step then takes no product.

    Raises
    ------
    NonFiniteError
        If a product is not finite, rounding errors are as large as the product, or a singular value is beyond
        the range of float64.

    Notes
    -----
    Maps whose squares leave the range of the dtype are multiplied by powers of two, and their singular values
    divided by them.

    The interval is widened on both sides by ``operator.rounding``, which is also the level below which a
    bidiagonal entry counts as zero. At a breakdown an entry vanishes, because the Krylov space is exhausted.
    The upper limit is computed with the rounding level in place of this entry, because an entry that
    floating-point numbers cannot distinguish from zero need not be zero.

    """
    slack = checked_rounding(operator)
    quantile = start_quantile(operator.in_size, confidence)
    total = operator.batch
    # After as many steps, the vectors v fill the input space, or the vectors u the output space.
    steps_allowed = min(max_iterations, operator.in_size, operator.out_size + 1)

    sigma, upper = np.zeros(total), np.zeros(total)
    steps = np.zeros(total, dtype=np.int64)
    converged, broke_down = np.zeros(total, dtype=bool), np.zeros(total, dtype=bool)
    right = start.new_zeros(total, operator.in_size)
    left = start.new_zeros(total, operator.out_size)
    gram = torch.empty_like(right) if judged else None

    alphas = np.zeros((total, steps_allowed))
    betas = np.zeros((total, steps_allowed))
    active = np.arange(total)  # the member in each row of the batch
    running = np.ones(total, dtype=bool)  # whether the member in each row still runs

    z = start.reshape(total, -1)
    beta = _lengths(z)
    v_basis = _Basis(total, operator.in_size, z)
    u_basis = _Basis(total, operator.out_size, z)
    u: Tensor | None = None
    powers = PowersOfTwo.ones(total)

    for k in range(1, steps_allowed + 1):
        # α_k and u_k from J v_k − β_{k−1} u_{k−1}
        v = v_basis.append(z, beta)
        e = v.view(len(active), *operator.in_shape)
        if k == 1 and image is not None:
            w = (image.reshape(total, -1) * _inverse(beta)[:, None]).view(image.shape)
        else:
            w = operator.product(e)
        if k == 1:
            powers, w = in_range(operator, e, w)
            operator = Scaled(operator, powers) if powers else operator
        w = w.reshape(len(active), -1)
        if u is not None:
            w = torch.addcmul(w, beta[:, None], u, value=-1)
        w = u_basis.orthogonalise_(w)
        alpha = _lengths(w)
        check_finite(alpha)
        largest = np.maximum(alphas[active].max(axis=1), betas[active].max(axis=1))
        floor = torch.as_tensor(slack[active] * largest, dtype=alpha.dtype, device=alpha.device)
        alpha = torch.where(alpha <= floor, torch.zeros_like(alpha), alpha)
        u = u_basis.append(w, alpha)

        # β_k and, in the next step, v_{k+1} from Jᵀu_k − α_k v_k
        z = operator.adjoint_product(u.view(len(active), *operator.out_shape)).reshape(len(active), -1)
        z = v_basis.orthogonalise_(torch.addcmul(z, alpha[:, None], v, value=-1))
        beta = _lengths(z)
        check_finite(beta)
        alphas[active, k - 1] = alpha.double().cpu().numpy()
        betas[active, k - 1] = beta.double().cpu().numpy()

        # The interval of each running member, and the directions of the members that end
        for row in np.flatnonzero(running).tolist():
            member = active[row]
            a, b = alphas[member, :k], betas[member, :k]
            complete = k == operator.in_size
            broke_down[member] = complete or a[-1] * b[-1] <= slack[member] * max(a.max(), b.max()) ** 2
            sigma[member], upper[member] = _limits(a, b, quantile, slack[member], complete=complete)
            lower = sigma[member] * (1 - slack[member])
            converged[member] = upper[member] - lower <= rtol * sigma[member]
            if converged[member] or broke_down[member] or k == steps_allowed:
                running[row] = False
                steps[member] = k
                left_weights, right_weights = _leading_pair(a, b)
                right[member] = v_basis.combine(row, right_weights)
                left[member] = u_basis.combine(row, left_weights)
                if gram is not None:
                    # J V = U B and Jᵀ U = V Bᵀ + z e_kᵀ
                    torch.mul(right[member], float(sigma[member]) ** 2, out=gram[member])
                    gram[member].add_(z[row], alpha=float(a[-1] * right_weights[-1]))
        if not running.any():
            break
        # Drop the members that have ended
        if running.sum() <= _COMPACT_AT * len(active):
            keep = torch.as_tensor(np.flatnonzero(running), device=z.device)
            active, running = active[running], running[running]
            operator = operator.select(keep)
            z, u, beta = z[keep], u[keep], beta[keep]
            v_basis.keep(keep)
            u_basis.keep(keep)

    lower = sigma * (1 - slack)
    if powers:
        # JᵀJ v in float64, because float32 has no number for the square of a small J
        gram = None if gram is None else shifted(gram.double(), -2 * powers.total)
        sigma, lower, upper = unscaled(np.stack((sigma, lower, upper)), powers.total, start.dtype)
        converged = upper - lower <= rtol * sigma
    return LeadingTriplet(
        sigma=torch.from_numpy(sigma),
        lower=torch.from_numpy(lower),
        upper=torch.from_numpy(upper),
        converged=torch.from_numpy(converged),
        broke_down=torch.from_numpy(broke_down),
        steps=torch.from_numpy(steps),
        right=right.view(total, *operator.in_shape),
        left=left.view(total, *operator.out_shape),
        gram=None if gram is None else gram.view(total, *operator.in_shape),
    )


def _limits(
    alphas: Float[np.ndarray, " k"],
    betas: Float[np.ndarray, " k"],
    quantile: float,
    slack: float,
    *,
    complete: bool,
) -> tuple[float, float]:
    """Return the largest singular value of the bidiagonal matrix of one map J, and an upper limit of ‖J‖.

    The limit is a posteriori, and widened by rounding. The argument ``complete`` says whether the Krylov
    space is the whole input space; then this singular value is ‖J‖ up to rounding.
    """
    # Entries are scaled to be near one, so that squares and products stay in range.
    unit = max(alphas.max(), betas[:-1].max(initial=0.0))
    if unit == 0.0:
        return 0.0, 0.0
    theta = ritz_values(*_tridiagonal(alphas / unit, betas / unit))
    top = max(float(theta[-1]), 0.0)
    if complete:
        logs = -np.inf
    else:
        # Only the last product α_j β_j can be below the rounding level; otherwise the member would have
        # ended.
        products = alphas * betas / unit**2
        logs = float(np.log(np.maximum(products, slack * top)).sum())
    limit = float(a_posteriori_upper(theta, logs, quantile))
    return unit * float(np.sqrt(top)), unit * float(np.sqrt(limit)) * (1 + slack)


def _tridiagonal(
    alphas: Float[np.ndarray, " k"], betas: Float[np.ndarray, " k"]
) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k_1"]]:
    """Return the diagonal and the off-diagonal of BᵀB, given the entries of the upper bidiagonal matrix B."""
    diagonal = alphas**2
    diagonal[1:] += betas[:-1] ** 2
    return diagonal, alphas[:-1] * betas[:-1]


def _leading_pair(
    alphas: Float[np.ndarray, " k"], betas: Float[np.ndarray, " k"]
) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Return the left and right singular vectors of an upper bidiagonal matrix B for its largest singular
    value.
    """
    unit, last = max(alphas.max(), betas[:-1].max(initial=0.0)) or 1.0, len(alphas) - 1
    alphas, betas = alphas / unit, betas / unit
    _, vectors = linalg.eigh_tridiagonal(*_tridiagonal(alphas, betas), select="i", select_range=(last, last))
    right = vectors[:, 0]
    left = alphas * right
    left[:-1] += betas[:-1] * right[1:]
    return left / (np.linalg.norm(left) or 1.0), right


def _inverse(lengths: Tensor) -> Tensor:
    """Return 1 / length for each length, and 0 for the length 0."""
    return torch.where(lengths > 0, 1.0 / lengths, torch.zeros_like(lengths))


def _lengths(x: Tensor) -> Tensor:
    """Return the Euclidean norm of each row of a matrix (member, size), in the dtype of the matrix."""
    if x.shape[1] > PIECE:
        return squared_lengths(x).sqrt().to(x.dtype)
    lengths: Tensor = torch.linalg.vector_norm(x, dim=1)
    return lengths


def _length(x: Tensor) -> Tensor:
    return _lengths(x[None])[0]
