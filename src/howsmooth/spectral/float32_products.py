"""Operators with products in float32. What a solver finds with them is checked by float64 products.

A run in float32 gives each member a direction v, a value and an interval. One product of the float64 operator
with v gives the value |J v|, which is a lower limit without float32 rounding. The difference between the
float32 and the float64 JᵀJ v bounds to first order how far rounding moved the upper limit. Members whose
interval becomes too wide are measured again with float64 products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth.spectral.leading_triplet import LeadingTriplet
from howsmooth.spectral.operator import LinearOperator, length_rounding

__all__ = ["CheckedByAdjoint", "CheckedProducts"]

# The share of the requested relative width that rounding errors may take if only half of them is measured.
_NEGLIGIBLE = 1 / 20


class CheckedProducts(LinearOperator):
    """A float32 operator. What a solver finds with it is checked by products of the same maps in float64.

    ``single`` is the operator whose products a solver iterates, and ``exact`` that of float64 products; or a
    function that makes it, where memory has no room for both: then ``single`` is given up before.
    ``basis_bytes`` are the bytes for the basis of a run with float64 products, where float32 has lost too
    many digits: None without a limit, and 0 for no such run.
    """

    def __init__(
        self,
        single: LinearOperator,
        exact: LinearOperator | Callable[[], LinearOperator],
        basis_bytes: int | None = None,
    ) -> None:
        shapes = single.in_shape, single.out_shape
        super().__init__(single.batch, *shapes, single.dtype, single.device, single.rounding)
        self._single: LinearOperator | None = single
        self._exact = exact
        self.basis_bytes = basis_bytes

    @property
    def single(self) -> LinearOperator:
        """The operator with float32 products."""
        assert self._single is not None
        return self._single

    @property
    def exact(self) -> LinearOperator:
        """The operator with float64 products."""
        if not isinstance(self._exact, LinearOperator):
            self._single = None
            self._exact = self._exact()
        return self._exact

    def _product(self, e: Tensor) -> Tensor:
        return self.single.product(e)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self.single.adjoint_product(u)

    def lifted(self, e: Tensor, members: Tensor | None = None) -> Tensor:
        """Convert inputs of the float32 operator to inputs of the float64 operator, which may use other
        coordinates. If ``members`` is given, ``e`` has the inputs of these members alone.
        """
        return e

    def judged(self, found: LeadingTriplet, gram: Tensor | None, rtol: float) -> LeadingTriplet:
        """Check the float32 results ``found`` by float64 products, and return their values and intervals.

        The argument ``gram`` is JᵀJ v for the right vectors v, as computed from the recurrence of the solver.
        Its difference from the exact product is the rounding error of all steps. If it is None, it is
        computed by one product, which shows the error of that product alone.
        """
        given, rounded = found.right, gram
        if rounded is None:
            _, rounded = self.single.energy_product(given)
        found = replace(found, right=self.lifted(given))
        exact, right = self.exact, _unit(found.right.double())
        image, product = exact.gram_product(right)
        sigma = _norms(image)
        found = replace(found, left=_unit(image).to(found.left.dtype))
        defect = self._defect(rounded, product, sigma)
        judged = self._widened(found, sigma, defect, rtol)
        # Where the error of all steps is too large, that of one product may do.
        if gram is not None and self._single is not None and not bool(judged.converged.all()):
            _, rounded = self._single.energy_product(_unit(given))
            defect = torch.where(judged.converged, defect, self._defect(rounded, product, sigma))
            judged = self._widened(found, sigma, defect, rtol)
        return judged

    def _defect(self, rounded: Tensor, product: Tensor, sigma: Tensor) -> Tensor:
        """Return how much the rounding of float32 products may have changed a computed singular value.

        The vectors are JᵀJ v in float32 (``rounded``) and in float64 (``product``). With their difference Δv
        the result is ‖Δv‖ / σ. A perturbation Δ of JᵀJ moves σ by vᵀΔv / 2σ to first order.
        """
        return _norms(self.lifted(rounded).double() - product) / sigma.clamp_min(
            torch.finfo(torch.float64).tiny
        )

    def _widened(self, found: LeadingTriplet, sigma: Tensor, defect: Tensor, rtol: float) -> LeadingTriplet:
        """Widen the intervals of singular values from a float32 run by the possible rounding error.

        The value becomes σ = |J v|, computed in float64. The lower limit is proved where the float64 products
        are. The upper limit is an estimate to first order. It exceeds σ by four terms: the distance from the
        float32 value to its upper limit; the difference between the float32 and the float64 value; twice the
        defect, which is the most by which rounding of the float32 run moves σ; and a multiple of the rounding
        error of the float64 products.
        """
        exact = self.exact
        # How far the float64 value itself may be off.
        error = exact.rounding * sigma if exact.proved is None else exact.proved.total
        upper = sigma + (found.upper - found.sigma) + (sigma - found.sigma).abs() + 2 * defect + 6 * error
        lower = (sigma - error).clamp_min(0.0) * (1 - length_rounding(exact))
        return replace(found, sigma=sigma, lower=lower, upper=upper, converged=upper - lower <= rtol * sigma)


class CheckedByAdjoint(CheckedProducts):
    """Checked products for Jacobians by automatic differentiation. In float64 a product J v takes longer than
    Jᵀu there, so J v is computed only where rounding is not negligible.

    With unit vectors u and v, ⟨v, Jᵀu⟩ is the value, and at most ‖J‖. The product Jᵀu in float32 shows the
    rounding of adjoint products. The products J v are assumed to be off by as much. That is accepted only if
    both together are negligible for the interval.
    """

    def judged(self, found: LeadingTriplet, gram: Tensor | None, rtol: float) -> LeadingTriplet:
        """Check the float32 results ``found`` by float64 products, and return their values and intervals."""
        if gram is not None:
            image = self.single.product(found.right)
            right, left = _unit(found.right.double()), _unit(image.double())
            adjoint = self.exact.adjoint_product(left)
            sigma = torch.linalg.vecdot(right.flatten(1), adjoint.flatten(1)).cpu()
            rounded = gram.double() / _norms(image.double()).to(gram.device).view(-1, *(1,) * (gram.ndim - 1))
            defect = 2.0 * _norms(rounded - adjoint)
            if bool((defect <= _NEGLIGIBLE * rtol * sigma).all()):
                judged = self._widened(replace(found, left=left.to(image.dtype)), sigma, defect, rtol)
                if bool(judged.converged.all()):
                    return judged
        return super().judged(found, gram, rtol)


def _norms(t: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1).cpu()
    return norms


def _unit(t: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(t.flatten(1), dim=1).view(-1, *(1,) * (t.ndim - 1))
    return torch.where(length > 0, t / length, t)
