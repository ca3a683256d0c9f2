from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.errors import ArgumentError
from howsmooth.study.ranges import Ranges

starts = st.integers(1, 200)


@given(st.lists(st.tuples(starts, st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=5))
def test_values_are_the_union_of_what_is_written(spans: list[tuple[int, int, int]]) -> None:
    text = ",".join(f"{start}:{start + more}:{step}" for start, more, step in spans)
    by_hand = {
        n for start, more, step in spans for n in range(start, start + more + 1) if (n - start) % step == 0
    }
    assert Ranges.parse(f" {text} ", "lengths").values() == tuple(sorted(by_hand))


@given(st.integers(1, 40), st.data())
def test_negative_indices_count_from_the_end(count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(-count, count - 1))
    assert Ranges.parse(str(index), "layers").resolve(count, "m", "layers") == (list(range(count))[index],)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("all", (0, 1, 2, 3)), ("1:-1", (1, 2, 3)), ("0:3:2,-1", (0, 2, 3)), ("4", None), ("-5", None),
     ("0:4", None), ("3:1", None), ("-1:0", None)],
)  # fmt: skip
def test_layers_are_those_of_the_model(text: str, layers: tuple[int, ...] | None) -> None:
    found = Ranges.parse(text, "layers")
    if layers is not None:
        assert found.resolve(4, "m", "layers") == layers
        return
    with pytest.raises(ArgumentError, match=r"layers of m, which has 4: 0 to 3, -4 to -1, got|3:1|-1:0"):
        found.resolve(4, "m", "layers")


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
