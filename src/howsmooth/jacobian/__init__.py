"""Jacobians of token maps as linear operators: in closed form, or by automatic differentiation."""

from howsmooth.jacobian.autodiff import (
    AutodiffJacobian,
    allowance_for_rounding,
    moved_by_rounding,
    weighted_autodiff_jacobian,
)
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
from howsmooth.jacobian.padded import filled, joined

__all__ = [
    "AutodiffJacobian",
    "allowance_for_rounding",
    "cached_bytes",
    "closed_form_jacobian",
    "closed_form_jacobians",
    "energy_products_together",
    "filled",
    "frozen_derivatives",
    "has_closed_form",
    "in_double",
    "joined",
    "kernel_bytes",
    "moved_by_rounding",
    "runs_members_alone",
    "shares_products",
    "streamed_bytes",
    "weighted_autodiff_jacobian",
]
