"""The keep contract: the numbers that stay, against those that the code gave when the contract was written.

The judge is ``golden.json``. A step that cuts, moves or redesigns code leaves every number as it is; how each
kind is compared stands in ``numbers.py``.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType

import pytest

from tests.keep.cases import CASES
from tests.keep.names import NAMES, PLACES
from tests.keep.numbers import AtLeast, AtMost, Close, Interval, Kind, as_number
from tests.keep.write import merged, read

GOLDEN = read()


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_stay(name: str) -> None:
    golden = GOLDEN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {key: as_number(value) for key, value in CASES[name]().items()}
    assert found.keys() == golden.keys()
    wrong = {key: number.differs(golden[key]) for key, number in found.items()}
    assert not any(wrong.values()), "\n".join(f"{name}: {key}: {why}" for key, why in wrong.items() if why)


def test_every_golden_number_has_a_case() -> None:
    assert GOLDEN.keys() == CASES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_name_stays(name: str) -> None:
    """A name is there where users see it, or where it is to stand (the second of two, from then on the
    only one)."""
    assert any(_is_there(place) for place in name.split(" | ")), f"{name} is gone"


@pytest.mark.parametrize("place", PLACES)
def test_nothing_else_is_public(place: str) -> None:
    module = import_module(place.replace("hs", "howsmooth", 1))
    stays = {name.rsplit(".", 1)[1] for name in NAMES}
    public = {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)}
    assert not public - stays, "a new public name replaces one, or names.py says why it is there"


def _is_there(path: str) -> bool:
    """Whether ``hs.bounds.best`` can be had as a user would, module by module."""
    module, *parts = path.replace("hs.", "howsmooth.", 1).split(".")
    found = import_module(module)
    for part in parts:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


# ---------------------------------------------------------------- the contract itself


@pytest.mark.parametrize(
    ("number", "golden", "fits"),
    [
        (Close(1 + 1e-10), 1.0, True),
        (Close(1 + 1e-8), 1.0, False),
        (Close(float("nan")), 1.0, False),
        (Close(float("inf")), float("inf"), True),
        (Interval(1.0, 1.1, 1.2), [1.0, 1.1, 1.2], True),
        (Interval(1.0, 1.1 + 1e-8, 1.2), [1.0, 1.1, 1.2], False),
        (Interval(1.0, 1.15, 1.2, None), [1.1, 1.15, 1.2], True),
        (Interval(1.0, 1.05, 1.09, None), [1.1, 1.15, 1.2], False),
        (Interval(0.0, 1.15, 2.0, None), [1.1, 1.15, 1.2], False),
        (Interval(1.0, 0.9, 1.2, None), [1.0, 1.1, 1.2], False),
        (AtLeast(1.2, 1.3), 1.0, True),
        (AtLeast(1.2, 1.1), 1.0, False),
        (AtLeast(0.99, 1.3), 1.0, False),
        (AtMost(0.8, 0.7), 1.0, True),
        (AtMost(0.8, 0.9), 1.0, False),
        (AtMost(1.01, 0.7), 1.0, False),
    ],
)
def test_numbers_are_compared_as_they_say(number: Kind, golden: object, fits: bool) -> None:
    assert (number.differs(golden) == "") == fits  # type: ignore[arg-type]


def test_writing_changes_no_number_that_stands() -> None:
    old, new = {"a": {"x": 1.0, "y": 2.0}}, {"a": {"x": 9.0, "z": 3.0}, "b": {"x": 4.0}}
    assert merged(old, new, set()) == {"a": {"x": 1.0, "y": 2.0, "z": 3.0}, "b": {"x": 4.0}}
    assert merged(old, new, {"a:x"})["a"] == {"x": 9.0, "y": 2.0, "z": 3.0}
    assert merged(old, new, {"a"})["a"] == {"x": 9.0, "z": 3.0}
