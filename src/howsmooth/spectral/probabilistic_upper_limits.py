"""Upper limits of the norm of a linear map J that hold with a given probability, from Lanczos steps
with a random start.

The start b is Gaussian and independent of J, so the squared cosine between b and the leading right
singular vector is Beta(1/2, (N−1)/2) distributed, and exceeds its δ-quantile x_δ with probability
1 − δ. On that event the limit below holds, for every number of steps at once. All are pure
functions of float64 arrays. Derivations: documentation page "The spectral norm, with an interval".
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float
from scipy import special
from scipy.linalg import lapack

from howsmooth.rounding import U, above, gamma, up

__all__ = ["a_posteriori_upper", "ritz_values", "rounded_upper", "start_quantile"]


# Newton's iteration for the logarithm of a distance ends with a step of this size. It comes from above, so
# that to end early only widens an interval.
_NEWTON = 2.0**-40


def start_quantile(dimension: int, confidence: float) -> float:
    """Return the (1 − confidence)-quantile of the squared cosine between a Gaussian start vector and a fixed
    direction.

    A Gaussian start in R^N, N = ``dimension``, has a squared cosine of at least x_δ with any fixed direction,
    with probability ``confidence`` = 1 − δ. The result x_δ is the δ-quantile of Beta(1/2, (N−1)/2), or 1 in
    dimension 1.
    """
    if dimension == 1:
        return 1.0
    return float(special.betaincinv(0.5, (dimension - 1) / 2, 1.0 - confidence))


def ritz_values(diagonal: Float[np.ndarray, " k"], off: Float[np.ndarray, " k_1"]) -> Float[np.ndarray, " k"]:
    """Return the eigenvalues of a symmetric tridiagonal matrix in ascending order.

    LAPACK's root-free QR is called directly, because SciPy's checks would take most of the time: the function
    is called at every step of every member.
    """
    if len(diagonal) == 1:
        return diagonal.copy()
    values, info = lapack.dsterf(diagonal, off)
    if info:
        raise np.linalg.LinAlgError(f"dsterf has ended with {info}")
    return np.asarray(values)


def a_posteriori_upper(
    theta: Float[np.ndarray, "*members k"],
    log_off_diagonals: float | Float[np.ndarray, "*members"],
    quantile: float | Float[np.ndarray, "*members"],
) -> float | Float[np.ndarray, "*members"]:
    """Return an upper limit of the largest eigenvalue of JᵀJ for each map J, computed from the Ritz values of
    a Lanczos run.

    The k-th Lanczos vector is p_k(JᵀJ) v_1 with p_k(t) = Π (t − θ_i) / Π β_j, and has norm 1. So
    |p_k(λ_1)| √x_δ ≤ 1 with the stated confidence, and λ_1 is at most the root t > θ_1 of
    Σ log(t − θ_i) − Σ log β_j = −½ log x_δ (van Dorsselaer, Hochstenbach, van der Vorst 2000).

    ``theta`` are the k Ritz values of each member. ``log_off_diagonals`` is Σ_j log β_j over the k
    off-diagonals of the tridiagonal matrix, the residual one included; −inf after a breakdown, where the
    limit is θ_1 itself. ``quantile`` is x_δ from :func:`start_quantile`: one number for all members, or one
    for each.
    """
    theta = np.sort(theta, axis=-1)
    top, gaps = theta[..., -1], theta[..., -1:] - theta[..., :-1]
    open_ended = np.isfinite(log_off_diagonals)
    target = np.where(open_ended, log_off_diagonals, 0.0) - 0.5 * np.log(quantile)
    # In s = log(t − θ_1) the function is increasing and convex, and it is non-negative at
    # s = target / k: Newton's iteration from there decreases to the root and never passes it.
    s = target / theta.shape[-1]
    moving = np.ones_like(open_ended)
    for _ in range(200):
        distance = np.exp(s)[..., None]
        apart = distance + gaps
        step = (s + np.log(apart).sum(axis=-1) - target) / (1.0 + (distance / apart).sum(axis=-1))
        # A member whose iteration has converged does not change any more, so it does not depend on others.
        s = s - np.where(moving, step, 0.0)
        moving = moving & (step > _NEWTON * np.maximum(1.0, np.abs(s)))
        if not moving.any():
            break
    upper: float | np.ndarray = np.where(open_ended, top + np.exp(s), top)[()]
    return upper


# The share of the start's component along the leading direction that rounding may have made; the polynomial
# of the a-posteriori limit is given the rest.
_SHARE = 0.25
# LAPACK's eigenvalues of a tridiagonal matrix T of k rows are off by at most k times so many roundings of
# ‖T‖.
_EIGENVALUE = 8


def rounded_upper(
    diagonal: Float[np.ndarray, " k"],
    off: Float[np.ndarray, " k"],
    quantile: float,
    error: float,
    taken: float,
    rtol: float,
) -> tuple[float, float, bool]:
    """Return the largest Ritz value of a Lanczos run on JᵀJ, and an upper limit of the largest eigenvalue
    that covers rounding errors.

    The third value is True if rounding decides the limit, so that further steps would not improve it.

    Let A = JᵀJ be exact and F the matrix of rounding errors with AV = VT + γ_k v_{k+1} e_kᵀ + F. On the event
    of :func:`start_quantile` the limit holds for any vectors v_j of length one: λ_1 is at most the
    largest t > θ_1 with √x_δ ≤ γ_k [(t − T)⁻¹]_1k + ‖(t − T)⁻¹ e_1‖ ‖F‖. Proof: documentation page "Rounding,
    proved".

    ``diagonal`` and ``off`` are the entries of T of one member, the residual off-diagonal γ_k among them,
    and ``quantile`` is x_δ. ``error`` bounds the rounding error of a product with J or its adjoint, relative
    to the length of the vector; ``taken`` is the Frobenius norm of what reorthogonalisation has subtracted
    from the vectors. A limit that gives an interval far narrower than ``rtol`` is not refined.
    """
    k = len(diagonal)
    theta = ritz_values(diagonal, off[:-1])
    top = max(float(theta[-1]), 0.0)
    with np.errstate(divide="ignore"):
        logs = float(np.log(off).sum())
    # The lengths of vectors are rounded, too, and so is the quantile.
    least = math.sqrt(quantile) / up(1.0)
    first = max(float(a_posteriori_upper(theta, logs, ((1 - _SHARE) * least) ** 2)), top)

    def rounding(t: float) -> float:
        """Bound the norm of the rounding errors in the Lanczos recurrence for ‖JᵀJ‖ <= ``t``."""
        return taken + math.sqrt(k) * (error * (2 * math.sqrt(t) + error) + gamma(16) * t)

    allowed = _SHARE * least
    reach = rounding(2 * first) / allowed
    if reach >= first:
        # The rounding error is so large that only t − θ_1 ≥ t/2 is used.
        wide = (16 * math.sqrt(k) * error / allowed) ** 2
        return top, max(2 * first, 8 * taken / allowed, wide, 8 * math.sqrt(k) * error**2 / allowed), False
    second = top + reach
    if k > 1 and second > first + 0.125 * rtol * top:
        # ‖(t − T)⁻¹ e_1‖ is small if the start has a small component along the leading Ritz vector.
        unit = np.zeros(k)
        unit[0] = 1.0
        for _ in range(4):
            *_, solved, failed = lapack.dptsv(second - diagonal, -off[:-1], unit)
            if failed:
                break
            # What is solved has entries of t − T off by 5 u relative (Higham 2002, Theorem 9.14, where
            # |L| |D| |Lᵀ| = |t − T|, of norm at most 3 t), and by u t where t is added: 16 u t in all.
            gap = max(second - top, 16 * U * second)
            length = float(np.linalg.norm(solved)) * (1 + up(16 * U * second / gap))
            second = top + reach * min(1.0, gap * length)
    settled = bool(second > first and first - top <= 0.125 * rtol * top)
    return top, above(max(first, second), k * _EIGENVALUE), settled
