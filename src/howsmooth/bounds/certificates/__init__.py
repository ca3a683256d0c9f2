"""Certificates: upper bounds on ‖D_X f‖ at given tokens, proved including all floating-point rounding."""

from howsmooth.bounds.certificates.certificate import Certificate
from howsmooth.bounds.certificates.joint import certificate_cheap, certificate_joint, certificate_n
from howsmooth.bounds.certificates.rows import certificate_r

__all__ = ["Certificate", "certificate_cheap", "certificate_joint", "certificate_n", "certificate_r"]
