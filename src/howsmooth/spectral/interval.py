"""Upper limits of ‖J‖ that a Golub–Kahan run from a random start certifies, with their confidence.

The start b is Gaussian and independent of J, so the squared cosine between b and the leading right
singular vector is Beta(1/2, (N−1)/2) distributed, and exceeds its δ-quantile x_δ with probability
1 − δ. On that event both limits below hold, for every number of steps at once. All are pure
functions of float64 arrays. Derivations: docs/theory/spectral-norm.md.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy import special
from scipy.linalg import lapack

__all__ = ["a_posteriori_upper", "a_priori_upper", "ritz_values", "start_quantile"]


def start_quantile(dimension: int, confidence: float) -> float:
    """Return x_δ, the δ-quantile of Beta(1/2, (N−1)/2), δ = 1 − confidence, N = dimension.

    A Gaussian start in R^N has a squared cosine of at least x_δ with any fixed direction, with
    probability ``confidence``. In dimension 1 it is 1.
    """
    if dimension == 1:
        return 1.0
    return float(special.betaincinv(0.5, (dimension - 1) / 2, 1.0 - confidence))


def a_priori_upper(sigma: float, steps: int, quantile: float) -> float:
    """Return σ̂ cosh(arccosh(1/√x_δ) / (2k − 1)), which ‖J‖ exceeds with probability at most δ.

    Needs nothing but the leading Ritz value σ̂ of k steps; sharpens Kuczyński and Woźniakowski (1992).
    """
    return sigma * float(np.cosh(np.arccosh(1.0 / np.sqrt(quantile)) / (2 * steps - 1)))


def ritz_values(diagonal: Float[np.ndarray, " k"], off: Float[np.ndarray, " k_1"]) -> Float[np.ndarray, " k"]:
    """Return the eigenvalues of a symmetric tridiagonal matrix in ascending order.

    LAPACK's root-free QR, called by itself: SciPy's checks would take most of the time, at every step of
    every member.
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
    """Return the upper limit of λ_max(JᵀJ) of each member from the Lanczos polynomial of its very run.

    The k-th Lanczos vector is p_k(JᵀJ) v_1 with p_k(t) = Π (t − θ_i) / Π β_j, and has norm 1. So
    |p_k(λ_1)| √x_δ ≤ 1 with the stated confidence, and λ_1 is at most the root t > θ_1 of
    Σ log(t − θ_i) − Σ log β_j = −½ log x_δ (van Dorsselaer, Hochstenbach, van der Vorst 2000).

    Parameters
    ----------
    theta
        All k Ritz values of JᵀJ.
    log_off_diagonals
        Σ_j log β_j over the k off-diagonals of the tridiagonal matrix, the residual one included;
        −inf after a breakdown, where the limit is θ_1 itself.
    quantile
        x_δ from :func:`start_quantile`, one or one a member.

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
        # A member that has arrived stays, whatever the others do.
        s = s - np.where(moving, step, 0.0)
        moving = moving & (step > 1e-12 * np.maximum(1.0, np.abs(s)))
        if not moving.any():
            break
    upper: float | np.ndarray = np.where(open_ended, top + np.exp(s), top)[()]
    return upper
