"""Batched Golub–Kahan bidiagonalisation, reorthogonalised, until the interval around ‖J‖ is narrow.

From a Gaussian start b on the input side, k steps give orthonormal V_k, U_k and an upper bidiagonal
B_k with J V_k = U_k B_k. Its largest singular value σ̂ is a lower limit of ‖J‖, and
:mod:`howsmooth.spectral.interval` gives the upper one. Each member of the batch stops at its own
step; what it returns does not depend on the others.
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
from howsmooth.spectral.checks import check_finite, checked_rounding
from howsmooth.spectral.interval import a_posteriori_upper, ritz_values, start_quantile
from howsmooth.spectral.operator import LinearOperator

__all__ = ["LeadingTriplet", "golub_kahan"]

_FIRST_CAPACITY = 16
# Finished members are dropped from the batch once this share of it still runs: dropping copies the bases.
_COMPACT_AT = 0.75


@dataclass(frozen=True)
class LeadingTriplet:
    """The leading singular value of each map of a batch, an interval for it, and its singular vectors.

    ``sigma``, ``lower`` and ``upper`` are float64; lower <= sigma <= upper. ``converged`` says that
    upper − lower <= rtol · sigma, ``broke_down`` that the Krylov space was exhausted, or that rounding
    allows no narrower interval. ``right`` and ``left`` are unit vectors in the input and output space
    (``left`` is zero where the operator is).
    """

    sigma: Float[Tensor, " batch"]
    lower: Float[Tensor, " batch"]
    upper: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]
    broke_down: Bool[Tensor, " batch"]
    steps: Int[Tensor, " batch"]
    right: Float[Tensor, "batch *in_shape"]
    left: Float[Tensor, "batch *out_shape"]


class _Basis:
    """Orthonormal vectors, the rows (step, member, size), to which each step adds one for each member.

    Steps come first so that the newest row is contiguous over the batch. Members are multiplied one by
    one: a batched matrix-vector product runs several times slower than the same vectors in turn.
    """

    def __init__(self, members: int, size: int, like: Tensor) -> None:
        self.rows = like.new_empty(min(_FIRST_CAPACITY, size + 1), members, size)
        self.count = 0

    def append(self, row: Tensor, length: Tensor) -> Tensor:
        """Append row / length (member, size) to the basis, zero where the length is zero, and return it."""
        capacity, members, size = self.rows.shape
        if self.count == capacity:
            grown = self.rows.new_empty(min(2 * capacity, size + 1), members, size)
            grown[:capacity] = self.rows
            self.rows = grown
        self.count += 1
        inverse = torch.where(length > 0, 1.0 / length, torch.zeros_like(length))
        return torch.mul(row, inverse[:, None], out=self.rows[self.count - 1])

    def keep(self, members: Tensor) -> None:
        """Keep the vectors of the given members of the batch, and drop those of all others."""
        kept = self.rows.new_empty(self.rows.shape[0], len(members), self.rows.shape[2])
        kept[: self.count] = self.rows[: self.count, members]
        self.rows = kept

    def orthogonalise_(self, w: Tensor) -> Tensor:
        """Subtract from w (member, size), in place, its projection on the basis; repeat where needed."""
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
                # Daniel, Gragg, Kaufman, Stewart (1976): again only after a large loss of length.
                if float(length(vector)) > 0.7 * float(before):
                    break
        return w

    def combine(self, member: int, weights: np.ndarray) -> Tensor:
        """Return Σ_k weights_k row_k with the rows of one member's basis."""
        rows = self.rows[: len(weights), member]
        return torch.as_tensor(weights, dtype=rows.dtype, device=rows.device) @ rows


def golub_kahan(
    operator: LinearOperator,
    start: Float[Tensor, "batch *in_shape"],
    *,
    rtol: float,
    confidence: float,
    max_iterations: int,
) -> LeadingTriplet:
    """Return the leading singular triplet of each member of ``operator``.

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
        Steps at most; each is one product and one adjoint product.

    Raises
    ------
    NonFiniteError
        If a product is not finite, or rounding leaves it no digit.

    Notes
    -----
    The interval is widened on both sides by ``operator.rounding``, which is also the level below which
    a bidiagonal entry counts as zero. At a breakdown the Krylov space is exhausted. The entry that
    vanished is then replaced by the rounding level, which keeps the limit honest: what floating point
    cannot tell from zero, the interval does not take for zero.

    """
    slack = checked_rounding(operator)
    quantile = start_quantile(operator.in_size, confidence)
    total = operator.batch
    steps_allowed = min(max_iterations, operator.in_size, operator.out_size + 1)

    sigma, upper = np.zeros(total), np.zeros(total)
    steps = np.zeros(total, dtype=np.int64)
    converged, broke_down = np.zeros(total, dtype=bool), np.zeros(total, dtype=bool)
    right = start.new_zeros(total, operator.in_size)
    left = start.new_zeros(total, operator.out_size)

    alphas = np.zeros((total, steps_allowed))
    betas = np.zeros((total, steps_allowed))
    active = np.arange(total)  # the member in each row of the batch, and whether it still runs
    running = np.ones(total, dtype=bool)

    z = start.reshape(total, -1)
    beta = _lengths(z)
    v_basis = _Basis(total, operator.in_size, z)
    u_basis = _Basis(total, operator.out_size, z)
    u: Tensor | None = None

    for k in range(1, steps_allowed + 1):
        v = v_basis.append(z, beta)
        w = operator.product(v.view(len(active), *operator.in_shape)).reshape(len(active), -1)
        if u is not None:
            w = torch.addcmul(w, beta[:, None], u, value=-1)
        w = u_basis.orthogonalise_(w)
        alpha = _lengths(w)
        check_finite(alpha)
        largest = np.maximum(alphas[active].max(axis=1), betas[active].max(axis=1))
        alpha = _zero_below(alpha, slack[active] * largest)
        u = u_basis.append(w, alpha)

        z = operator.adjoint_product(u.view(len(active), *operator.out_shape)).reshape(len(active), -1)
        z = v_basis.orthogonalise_(torch.addcmul(z, alpha[:, None], v, value=-1))
        beta = _lengths(z)
        check_finite(beta)
        alphas[active, k - 1] = alpha.double().cpu().numpy()
        betas[active, k - 1] = beta.double().cpu().numpy()

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
        if not running.any():
            break
        if running.sum() <= _COMPACT_AT * len(active):
            keep = torch.as_tensor(np.flatnonzero(running), device=z.device)
            active, running = active[running], running[running]
            operator = operator.select(keep)
            z, u, beta = z[keep], u[keep], beta[keep]
            v_basis.keep(keep)
            u_basis.keep(keep)

    return LeadingTriplet(
        sigma=torch.from_numpy(sigma),
        lower=torch.from_numpy(sigma * (1 - slack)),
        upper=torch.from_numpy(upper),
        converged=torch.from_numpy(converged),
        broke_down=torch.from_numpy(broke_down),
        steps=torch.from_numpy(steps),
        right=right.view(total, *operator.in_shape),
        left=left.view(total, *operator.out_shape),
    )


def _limits(
    alphas: np.ndarray, betas: np.ndarray, quantile: float, slack: float, *, complete: bool
) -> tuple[float, float]:
    """Return σ̂ and the a-posteriori upper limit of ‖J‖, widened by rounding, for one member."""
    unit = max(alphas.max(), betas[:-1].max(initial=0.0))
    if unit == 0.0:
        return 0.0, 0.0
    theta = ritz_values(*_tridiagonal(alphas / unit, betas / unit))
    top = max(float(theta[-1]), 0.0)
    if complete:
        logs = -np.inf
    else:
        # No product α_j β_j of a running member is below the rounding level except the last.
        products = alphas * betas / unit**2
        logs = float(np.log(np.maximum(products, slack * top)).sum())
    limit = float(a_posteriori_upper(theta, logs, quantile))
    return unit * float(np.sqrt(top)), unit * float(np.sqrt(limit)) * (1 + slack)


def _tridiagonal(alphas: np.ndarray, betas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the diagonal and the off-diagonal of BᵀB, for an upper bidiagonal matrix B."""
    diagonal = alphas**2
    diagonal[1:] += betas[:-1] ** 2
    return diagonal, alphas[:-1] * betas[:-1]


def _leading_pair(alphas: np.ndarray, betas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the leading left and right singular vectors of a bidiagonal B; the left one is zero if B is."""
    unit, last = max(alphas.max(), betas[:-1].max(initial=0.0)) or 1.0, len(alphas) - 1
    alphas, betas = alphas / unit, betas / unit
    _, vectors = linalg.eigh_tridiagonal(*_tridiagonal(alphas, betas), select="i", select_range=(last, last))
    right = vectors[:, 0]
    left = alphas * right
    left[:-1] += betas[:-1] * right[1:]
    return left / (np.linalg.norm(left) or 1.0), right


def _lengths(x: Tensor) -> Tensor:
    """Return the lengths of the rows (member, size), in their dtype."""
    if x.shape[1] > PIECE:
        return squared_lengths(x).sqrt().to(x.dtype)
    lengths: Tensor = torch.linalg.vector_norm(x, dim=1)
    return lengths


def _length(x: Tensor) -> Tensor:
    return _lengths(x[None])[0]


def _zero_below(values: Tensor, floor: np.ndarray) -> Tensor:
    threshold = torch.as_tensor(floor, dtype=values.dtype, device=values.device)
    return torch.where(values <= threshold, torch.zeros_like(values), values)
