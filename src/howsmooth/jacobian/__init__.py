"""Jacobians of token maps as linear operators: in closed form, or by automatic differentiation."""

from howsmooth.jacobian.autodiff import AutodiffJacobian, weighted_autodiff_jacobian
from howsmooth.jacobian.closed_form import (
    closed_form_jacobian,
    closed_form_jacobians,
    has_closed_form,
    in_double,
    runs_members_alone,
)
from howsmooth.jacobian.footprint import cached_bytes, kernel_bytes, streamed_bytes
from howsmooth.jacobian.frozen import frozen_derivatives
from howsmooth.jacobian.packed import energy_products_together, shares_products

__all__ = [
    "AutodiffJacobian",
    "cached_bytes",
    "closed_form_jacobian",
    "closed_form_jacobians",
    "energy_products_together",
    "frozen_derivatives",
    "has_closed_form",
    "in_double",
    "kernel_bytes",
    "runs_members_alone",
    "shares_products",
    "streamed_bytes",
    "weighted_autodiff_jacobian",
]
