"""The Wasserstein distance W₂ between two Gaussians (Bures distance), with a proved lower and upper limit.

The distance is given by the Bures formula, which is evaluated without cancellation. The upper limit is the
cost of a coupling, and the lower limit comes from a pair of quadratic potentials. Both limits hold even if
the coupling and the potentials are not optimal. Derivation: documentation page "Maps on measures", section
"Why the interval of a distance holds".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from howsmooth.measures.gaussian import Gaussian
from howsmooth.measures.presolve import NEGLIGIBLE, in_units
from howsmooth.measures.transport_problem import EPSILON

__all__ = ["GaussianAnswer", "between_gaussians"]

# For the transport map, this fraction of their size is added to the covariances, and the map's eigenvalues
# are kept between _STEEPEST and 1 / _STEEPEST. If a covariance is singular, each of the two lowers the lower
# limit by about 1e-8.
_RIDGE = 1e-16
_STEEPEST = 1e-8


@dataclass(frozen=True)
class GaussianAnswer:
    """The computed distance W₂ between two Gaussians, with a lower and an upper limit and its derivatives.

    The distance is in units of ``2**exponent``. The derivatives by means and covariances are in the units of
    the means and covariances.
    """

    value: float
    lower: float
    upper: float
    exponent: int
    by_means: tuple[Float[ndarray, " d"], Float[ndarray, " d"]]
    by_covariances: tuple[Float[ndarray, "d d"], Float[ndarray, "d d"]]
    #: Whether the derivatives by covariances exist: no covariance is singular, and the distance is positive.
    regular: bool

    def in_units(self, scaled: float) -> float:
        """Multiply a distance between scaled Gaussians by 2^exponent, so that it has the units of the given
        Gaussians.
        """
        return in_units(scaled, self.exponent)

    @property
    def noise(self) -> float:
        """The size below which a distance W₂ between scaled Gaussians counts as a rounding error of their
        covariance matrices.
        """
        d = len(self.by_means[0])
        return min(d * math.sqrt(8 * EPSILON), NEGLIGIBLE)


def between_gaussians(mu: Gaussian, nu: Gaussian) -> GaussianAnswer:
    """Compute the distance W₂ between two Gaussians N(α, Σ) and N(β, Τ), with a lower and an upper limit and
    its derivatives.

    The formula is W₂² = |α − β|² + min over orthogonal U of |Σ^{1/2} − Τ^{1/2} U|².
    """
    means = [measure.mean.detach().double().cpu().numpy() for measure in (mu, nu)]
    covariances = [measure.covariance.detach().double().cpu().numpy() for measure in (mu, nu)]
    # Halves are subtracted because the difference of the means could overflow.
    size = max(*(math.sqrt(np.abs(c).max()) for c in covariances), np.abs(means[0] / 2 - means[1] / 2).max())
    # Scaling by powers of two rounds nothing and keeps squares in range.
    exponent = math.frexp(size)[1] + 1 if size > 0 else 0
    moved = np.ldexp(means[0], -exponent) - np.ldexp(means[1], -exponent)
    one, other = (np.ldexp(c, -2 * exponent) for c in covariances)
    shift = float(np.linalg.norm(moved))
    spectra = [_Spectrum(*np.linalg.eigh(c)) for c in (one, other)]
    roots = [spectrum.root() for spectrum in spectra]
    # The best U is the orthogonal polar factor of Τ^{1/2} Σ^{1/2}. The difference of the roots does not
    # cancel for close covariances, unlike the traces in the usual formula.
    left, _, right = np.linalg.svd(roots[1].T @ roots[0])
    apart = float(np.linalg.norm(roots[0] - roots[1] @ (left @ right)))
    slacks = [spectrum.slack for spectrum in spectra]
    value = math.hypot(shift, apart)
    # Rounding of the two square roots, and of the distance between them.
    slack = math.fsum(slacks) + 4 * len(one) * EPSILON * value
    values, vectors = _map(*spectra)
    lower = math.sqrt(shift**2 + _below(one, other, values, vectors)) - slack
    regular = value > 0 and all(spectrum.least > 0 for spectrum in spectra)
    steep = 0.5 / value if value > 0 else 0.0
    slope = 2 * steep * moved
    return GaussianAnswer(
        value=value,
        lower=max(lower, shift * (1 - 4 * len(one) * EPSILON), 0.0),
        upper=value + slack,
        exponent=exponent,
        by_means=(slope, -slope),
        # The derivative of W₂² by the first covariance is I − T, by the second I − T⁻¹.
        by_covariances=(
            np.ldexp(steep * ((vectors * (1 - values)) @ vectors.T), -exponent),
            np.ldexp(steep * ((vectors * (1 - 1 / values)) @ vectors.T), -exponent),
        ),
        regular=regular,
    )


@dataclass(frozen=True)
class _Spectrum:
    values: Float[ndarray, " d"]
    vectors: Float[ndarray, "d d"]

    @property
    def error(self) -> float:
        """Upper bound on the rounding error of each computed eigenvalue of the covariance matrix."""
        return 8 * len(self.values) * EPSILON * float(np.abs(self.values).max())

    @property
    def least(self) -> float:
        """The smallest eigenvalue minus its rounding error, or zero if the covariance may be singular."""
        return max(float(self.values[0]) - self.error, 0.0)

    @property
    def slack(self) -> float:
        """Upper bound on the error of a distance W₂ that is caused by rounding errors of the eigenvalues of
        the covariance matrix.

        The square roots of two covariances differ by at most the root of the trace norm of their difference,
        and by at most the size of the difference over twice the least root. For singular covariances only the
        first bound applies, so their roots have half of the digits.
        """
        d = len(self.values)
        slack = math.sqrt(d * self.error)
        return (
            min(slack, math.sqrt(d) * self.error / (2 * math.sqrt(self.least))) if self.least > 0 else slack
        )

    def root(self) -> Float[ndarray, "d d"]:
        root: ndarray = (self.vectors * np.sqrt(np.maximum(self.values, 0.0))) @ self.vectors.T
        return root


def _map(one: _Spectrum, other: _Spectrum) -> tuple[ndarray, ndarray]:
    """Return the eigenvalues and eigenvectors of the optimal transport map from one centred Gaussian to
    another.

    The map T > 0 transports covariance ``one`` to covariance ``other``. A small multiple of the identity is
    added to the covariances first. The eigenvalues are clipped, because directions in which a covariance is
    zero give no reliable eigenvalue of T.
    """
    ridge = _RIDGE * max(one.values.sum(), other.values.sum()) or 1.0
    roots, others = (np.sqrt(np.maximum(side.values, 0.0) + ridge) for side in (one, other))
    # T = other^{1/2} U one^{-1/2}, U the orthogonal factor of other^{1/2} one^{1/2}.
    left, _, right = np.linalg.svd(others[:, None] * (other.vectors.T @ one.vectors) * roots)
    transport = other.vectors @ (others[:, None] * (left @ right) / roots) @ one.vectors.T
    values, vectors = np.linalg.eigh((transport + transport.T) / 2)
    return np.clip(values, _STEEPEST, 1 / _STEEPEST), vectors


def _below(one: ndarray, other: ndarray, values: ndarray, vectors: ndarray) -> float:
    """Return a lower bound on the squared distance W₂² between two centred Gaussians.

    T is the matrix with the eigenvalues ``values`` and the eigenvectors ``vectors``. The bound is tr (I − T)
    one + tr (I − T⁻¹) other, less a bound on its rounding. It holds for any T > 0, because 2⟨x, y⟩ <= xᵀTx +
    yᵀT⁻¹y. It is summed over the eigenvectors q of T as Σ (t − 1)(qᵀ other q / t − qᵀ one q). For close
    Gaussians both factors of each term are small, so nothing cancels.
    """
    d = len(one)
    sizes, errors = [], []
    for covariance in (one, other):
        images = covariance @ vectors
        sizes.append(np.sum(vectors * images, axis=0))
        lengths = np.linalg.norm(images, axis=0) + d * EPSILON * np.linalg.norm(covariance)
        errors.append(8 * d * EPSILON * lengths)
    terms = (values - 1) * (sizes[1] / values - sizes[0])
    rounding = np.abs(values - 1) * (errors[1] / values + errors[0])
    return max(math.fsum(terms) - math.fsum(rounding), 0.0)
