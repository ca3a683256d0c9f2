from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.study.plan import derive_seed
from howsmooth.study.sequences import pick_windows, windows_in


@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 30), st.data())
def test_windows_never_overlap_and_lie_within_the_text(
    n: int, count: int, rest: int, data: st.DataObject
) -> None:
    tokens = n * count + rest % n
    samples = data.draw(st.integers(0, count))
    starts = pick_windows(tokens, n, samples, data.draw(st.integers(0, 2**63 - 1)))
    assert len(starts) == samples
    covered = Counter(token for start in starts for token in range(start, start + n))
    assert set(covered.values()) <= {1}
    assert not covered or (min(covered) >= 0 and max(covered) < tokens)


@given(st.integers(1, 30), st.integers(0, 2**63 - 1), st.data())
def test_more_samples_keep_the_earlier_ones(count: int, seed: int, data: st.DataObject) -> None:
    few = data.draw(st.integers(0, count))
    assert pick_windows(count * 5, 5, count, seed)[:few] == pick_windows(count * 5, 5, few, seed)


def test_every_window_can_be_drawn_and_all_about_equally_often() -> None:
    draws = 4000
    found = Counter(start for seed in range(draws) for start in pick_windows(80, 8, 3, seed))
    assert set(found) == set(range(0, 80, 8))
    expected = draws * 3 / 10
    chi_square = sum((times - expected) ** 2 / expected for times in found.values())
    assert chi_square < 30  # nine degrees of freedom: exceeded once in 2000


def test_windows_of_this_version_are_those_of_every_version() -> None:
    # A continued store relies on it.
    assert pick_windows(1000, 7, 5, 12345) == (413, 14, 819, 308, 378)


def test_asking_for_too_many_is_an_error() -> None:
    assert windows_in(20, 7) == 2
    with pytest.raises(ValueError, match="3 windows of 7"):
        pick_windows(20, 7, 3, 0)


@given(
    st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text(max_size=5)), max_size=4)
)
def test_seeds_fit_where_they_are_used(axes: dict[str, str | int | None]) -> None:
    seed = derive_seed(**axes)
    assert 0 <= seed < 2**63
    assert seed == derive_seed(**dict(reversed(list(axes.items()))))


def test_seeds_depend_on_every_axis() -> None:
    base = {
        "seed": 0,
        "model": "a",
        "text": "b",
        "n": 2,
        "sample": 0,
        "layer": 1,
        "head": None,
        "scope": "head",
    }
    seeds = {derive_seed(**base)} | {
        derive_seed(**(base | {axis: "other" if isinstance(value, str) else 17}))
        for axis, value in base.items()
    }
    assert len(seeds) == len(base) + 1
    assert derive_seed(n=2) != derive_seed(sample=2)
    assert derive_seed(n=0) == 2106219345448108407
