"""Jacobians of token maps as linear operators: in closed form, or by automatic differentiation."""

from howsmooth.jacobian.autodiff import AutodiffJacobian
from howsmooth.jacobian.closed_form import closed_form_jacobian, has_closed_form

__all__ = ["AutodiffJacobian", "closed_form_jacobian", "has_closed_form"]
