"""All cases of the keep contract."""

from __future__ import annotations

from tests.keep import cases_bounds, cases_maps, cases_models
from tests.keep.numbers import CASES

__all__ = ["CASES", "cases_bounds", "cases_maps", "cases_models"]
