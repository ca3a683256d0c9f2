"""Certificates: upper bounds on ‖D_X f‖ at given tokens, with a proof that covers floating-point rounding."""

from howsmooth.bounds.certificates.certificate import Certificate
from howsmooth.bounds.certificates.jacobian_parts import (
    certificate_frobenius,
    certificate_heads,
    certificate_parts,
)
from howsmooth.bounds.certificates.jacobian_rows import certificate_rows

__all__ = [
    "Certificate",
    "certificate_frobenius",
    "certificate_heads",
    "certificate_parts",
    "certificate_rows",
]
