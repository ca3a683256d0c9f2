"""All cases of the keep contract."""

from __future__ import annotations

from tests.keep import (
    cases_answers,
    cases_bounds,
    cases_functional,
    cases_maps,
    cases_measures,
    cases_models,
    cases_nn,
    cases_search,
)
from tests.keep.numbers import CASES

__all__ = [
    "CASES",
    "cases_answers",
    "cases_bounds",
    "cases_functional",
    "cases_maps",
    "cases_measures",
    "cases_models",
    "cases_nn",
    "cases_search",
]
