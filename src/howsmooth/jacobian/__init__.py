"""Jacobians of token maps as linear operators: in closed form, or by automatic differentiation."""

from howsmooth.jacobian.autodiff import AutodiffJacobian, weighted_autodiff_jacobian
from howsmooth.jacobian.closed_form import (
    closed_form_jacobian,
    has_closed_form,
    in_double,
    runs_members_alone,
)
from howsmooth.jacobian.frozen import frozen_derivatives

__all__ = [
    "AutodiffJacobian",
    "closed_form_jacobian",
    "frozen_derivatives",
    "has_closed_form",
    "in_double",
    "runs_members_alone",
    "weighted_autodiff_jacobian",
]
