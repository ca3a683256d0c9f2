"""Which of a test's parameters run by default."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def others_slow(every: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Return all parameters of a test, marked ``slow`` but for those chosen for their variety."""
    every = list(every)
    missing = [value for value in chosen if value not in every]
    assert not missing, f"not among the parameters: {missing}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in chosen else pytest.mark.slow,
        )
        for value in every
    ]


def pairs(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return all pairs, marked ``slow`` but for one of each of ``first`` with those of ``second`` in turn."""
    first, second = list(first), list(second)
    return others_slow(itertools.product(first, second), list(zip(first, itertools.cycle(second))))
