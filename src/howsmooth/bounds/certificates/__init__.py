"""Certificates: upper bounds on ‖D_X f‖ at given tokens, with a proof that covers floating-point rounding."""

from howsmooth.bounds.certificates.block_row_certificate import certificate_rows
from howsmooth.bounds.certificates.certificate import Certificate
from howsmooth.bounds.certificates.three_part_certificate import (
    certificate_frobenius,
    certificate_heads,
    certificate_parts,
)

__all__ = [
    "Certificate",
    "certificate_frobenius",
    "certificate_heads",
    "certificate_parts",
    "certificate_rows",
]
