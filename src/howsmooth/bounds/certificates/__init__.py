"""The certificate: an upper bound on ‖D_X f‖ at given tokens, with a proof that covers all rounding."""

from howsmooth.bounds.certificates.certificate_at_tokens import Certificate, certificate

__all__ = ["Certificate", "certificate"]
