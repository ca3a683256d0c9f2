from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.study.input_sequences import arrange, draw_distinct
from howsmooth.texts import load_text
from tests._shared import shared_data

PROTOCOL = range(2, 101, 2)


def assert_disjoint(places: dict[tuple[int, int], int], tokens: int) -> None:
    covered = Counter(token for (n, _), start in places.items() for token in range(start, start + n))
    assert set(covered.values()) <= {1}
    assert not covered or (min(covered) >= 0 and max(covered) < tokens)


@given(
    st.sets(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(0, 2000),
    st.integers(0, 2**63 - 1),
)
def test_sequences_of_all_lengths_are_disjoint_if_the_text_has_room_at_all(
    lengths: set[int], samples: int, spare: int, seed: int
) -> None:
    tokens = samples * sum(lengths) + spare
    places = arrange(tokens, lengths, samples, seed)
    assert set(places) == {(n, sample) for n in lengths for sample in range(samples)}
    assert_disjoint(places, tokens)
    assert places == arrange(tokens, sorted(lengths), samples, seed)


@given(
    st.sets(st.integers(1, 30), min_size=1, max_size=6),
    st.sets(st.integers(1, 60), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 600),
    st.integers(0, 2**63 - 1),
)
def test_what_is_held_stays_and_what_is_added_shares_no_token_with_it(
    first: set[int], then: set[int], samples: int, more: int, spare: int, seed: int
) -> None:
    tokens = samples * sum(first) + spare
    held = arrange(tokens, first, samples, seed)
    try:
        places = arrange(tokens, then, more, seed, held)
    except ValueError:
        room = max((size for _, size in free(held, tokens)), default=0)
        assert more * sum(then) > spare or room < sum(then) * more  # never if one free place holds them all
        return
    assert {window: places[window] for window in places if window in held} == {
        window: start for window, start in held.items() if window in places
    }
    assert_disjoint(held | places, tokens)


def free(held: dict[tuple[int, int], int], tokens: int) -> list[tuple[int, int]]:
    taken = {token for (n, _), start in held.items() for token in range(start, start + n)}
    gaps: list[tuple[int, int]] = []
    for token in range(tokens):
        if token in taken:
            continue
        if gaps and sum(gaps[-1]) == token:
            gaps[-1] = (gaps[-1][0], gaps[-1][1] + 1)
        else:
            gaps.append((token, 1))
    return gaps


@given(st.integers(0, 2**63 - 1), st.data())
def test_an_interrupted_arrangement_goes_on_as_if_it_had_not_been(seed: int, data: st.DataObject) -> None:
    whole = arrange(300, (2, 3, 5, 8), 4, seed)
    kept = data.draw(st.sets(st.sampled_from(sorted(whole))))
    assert arrange(300, (2, 3, 5, 8), 4, seed, {window: whole[window] for window in kept}) == whole


def test_on_a_long_text_every_place_is_about_equally_likely() -> None:
    found = Counter(
        start for seed in range(6000) for (n, _), start in arrange(100, (2,), 1, seed).items() if n == 2
    )
    assert set(found) == set(range(99))
    chi_square = sum((times - 6000 / 99) ** 2 / (6000 / 99) for times in found.values())
    assert chi_square < 150  # 98 degrees of freedom: exceeded once in 2000


def test_what_fits_in_one_way_only_is_found_to_fit() -> None:
    """Free are 4 and 6 places, for windows of 4, 3 and 3: the 4 must not go where the others have to."""
    for seed in range(50):
        places = arrange(14, (3, 4), 2, seed, {(4, 1): 4})
        assert places[4, 0] == 0
        assert {places[3, 0], places[3, 1]} == {8, 11}


@pytest.mark.parametrize("samples", [12, 14])
def test_a_short_text_leaves_room_for_what_is_added(samples: int) -> None:
    """As much as Alice has for the tokenizer of BERT: 36703 tokens, of which the protocol takes 25500."""
    held = arrange(36703, PROTOCOL, 10, 3)
    assert_disjoint(held | arrange(36703, PROTOCOL, samples, 3, held), 36703)
    assert_disjoint(held | arrange(36703, (150, 200, 300), 10, 3, held), 36703)


@pytest.mark.parametrize("tokenizer", ["bert", "gpt2"])
def test_the_usual_plan_fits_into_the_usual_text(tokenizer: str) -> None:
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer

    content = load_text("alice").content
    if tokenizer == "bert":
        tokens = BertWordPieceTokenizer(str(shared_data("bert_uncased_vocab", "vocab.txt"))).encode(
            content, add_special_tokens=False
        )
    else:
        tokens = ByteLevelBPETokenizer(
            str(shared_data("gpt2_bpe", "vocab.json")), str(shared_data("gpt2_bpe", "merges.txt"))
        ).encode(content)
    assert_disjoint(arrange(len(tokens.ids), PROTOCOL, 10, 0), len(tokens.ids))


def test_arrangements_of_this_version_are_those_of_every_version() -> None:
    # A continued store relies on it.
    assert draw_distinct(5, 142, random.Random(12345)) == [59, 2, 117, 44, 54]
    first = arrange(400, (2, 5), 2, 12345)
    assert first == {(5, 1): 48, (5, 0): 74, (2, 1): 177, (2, 0): 229}
    added = {(2, 2): 127, (5, 2): 115, (7, 0): 120, (7, 1): 0, (7, 2): 259}
    assert arrange(400, (2, 5, 7), 3, 12345, first) == first | added
    with pytest.raises(ValueError, match="6 windows of 30 tokens do not fit"):
        arrange(29, (4, 6), 3, 0)


@given(st.integers(1, 30), st.integers(0, 2**63 - 1), st.data())
def test_more_samples_keep_the_earlier_ones(count: int, seed: int, data: st.DataObject) -> None:
    few = data.draw(st.integers(0, count))
    drawn = draw_distinct(count, count, random.Random(seed))
    assert drawn[:few] == draw_distinct(few, count, random.Random(seed))
    assert sorted(drawn) == list(range(count))


def test_every_number_can_be_drawn_and_all_about_equally_often() -> None:
    draws = 4000
    found = Counter(number for seed in range(draws) for number in draw_distinct(3, 10, random.Random(seed)))
    assert set(found) == set(range(10))
    expected = draws * 3 / 10
    chi_square = sum((times - expected) ** 2 / expected for times in found.values())
    assert chi_square < 30  # nine degrees of freedom: exceeded once in 2000
