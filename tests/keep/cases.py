"""All cases of the keep contract."""

from __future__ import annotations

from tests.keep import cases_maps
from tests.keep.numbers import CASES

__all__ = ["CASES", "cases_maps"]
