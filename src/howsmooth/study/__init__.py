"""Studies: a plan, a store that survives interruption, exponents, figures and a report."""

from __future__ import annotations
