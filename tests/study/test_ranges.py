from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.errors import ArgumentError
from howsmooth.study.ranges import Ranges

starts = st.integers(1, 200)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("2:100:2", tuple(range(2, 101, 2))),
        ("2:99:2", tuple(range(2, 99, 2))),
        ("8", (8,)),
        ("3:5", (3, 4, 5)),
        (" 8, 4 ,8,16 ", (4, 8, 16)),
        ("1,10:30:10,2", (1, 2, 10, 20, 30)),
    ],
)
def test_lengths_are_sorted_unique_and_include_the_stop(text: str, values: tuple[int, ...]) -> None:
    assert Ranges.parse(text, "lengths").values() == values


@given(st.lists(st.tuples(starts, st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=5))
def test_values_are_the_union_of_what_is_written(spans: list[tuple[int, int, int]]) -> None:
    text = ",".join(f"{start}:{start + more}:{step}" for start, more, step in spans)
    by_hand = {
        n for start, more, step in spans for n in range(start, start + more + 1) if (n - start) % step == 0
    }
    assert Ranges.parse(text, "lengths").values() == tuple(sorted(by_hand))


@given(st.integers(1, 40), st.data())
def test_negative_indices_count_from_the_end(count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(-count, count - 1))
    assert Ranges.parse(str(index), "layers").resolve(count, "m", "layers") == (list(range(count))[index],)


def test_all_and_ranges_to_the_last() -> None:
    assert Ranges.parse("all", "layers").resolve(4, "m", "layers") == (0, 1, 2, 3)
    assert Ranges.parse("1:-1", "layers").resolve(4, "m", "layers") == (1, 2, 3)
    assert Ranges.parse("0:3:2,-1", "layers").resolve(4, "m", "layers") == (0, 2, 3)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_in_one_sentence(text: str) -> None:
    # Anything but an ArgumentError of this argument fails the test.
    with contextlib.suppress(ArgumentError):
        values = Ranges.parse(text, "lengths").values()
        assert values == tuple(sorted(set(values)))
        assert values[0] >= 1


@pytest.mark.parametrize(
    "text", ["", "a", "1:2:3:4", "1:", ":4", "5:1", "1:5:0", "1:5:-1", "0", "-3", "0:4", "all", "1;2",
             "1:1000000", "9999999999999999999999"]
)  # fmt: skip
def test_impossible_lengths_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="lengths"):
        Ranges.parse(text, "lengths").values()


@pytest.mark.parametrize("text", ["4", "-5", "0:4", "3:1", "-1:0"])
def test_layers_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="layers"):
        Ranges.parse(text, "layers").resolve(4, "m", "layers")


def test_the_refusal_says_how_many_there_are() -> None:
    with pytest.raises(ArgumentError, match=r"layers of bert, which has 4: 0 to 3, -4 to -1, got 6 in '0,6'"):
        Ranges.parse("0,6", "layers").resolve(4, "bert", "layers")
