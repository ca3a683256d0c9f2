"""Place the sequences of a study in a text, as windows of tokens that do not overlap.

A seed determines where the windows lie. The windows of all lengths are disjoint, so no two points of a study
share a token. Windows that were measured keep their places when more are added.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

__all__ = ["Sequences", "arrange", "draw_distinct"]

Sequences = Mapping[tuple[int, int], int]
"""The index of the first token of each sequence, by (length, sample)."""

# The free gaps between windows are on average at least this many times as long as the longest window, or
# there are fewer gaps. So sequences that are added later, even longer ones, find room.
_ROOM = 8


def arrange(
    tokens: int,
    lengths: Iterable[int],
    samples: int,
    seed: int,
    held: Sequences | None = None,
    parts: Sequence[tuple[int, int]] | None = None,
) -> dict[tuple[int, int], int]:
    """Choose where ``samples`` sequences of each length begin in a text of so many tokens, so that no two
    overlap; return the first token of each by (length, sample). If they do not fit, ValueError is raised.

    If the text is long enough, all arrangements of the windows are equally likely. In a shorter text, the
    windows form fewer runs without gaps, in random order. Windows that were measured before (``held``), of
    these or other lengths, keep their places; if the arrangement of the seed contains them all, it is used,
    so that a study that was interrupted continues with the same windows. ``parts`` are the parts of the text
    where windows may lie, as (first token, number of tokens), in order; by default the whole text.
    """
    held = held or {}
    wanted = [(n, sample) for n in sorted(set(lengths)) for sample in range(samples)]
    missing = [window for window in wanted if window not in held]
    if not missing:
        return {window: held[window] for window in wanted}
    parts = [(0, tokens)] if parts is None else parts
    # First arrange all windows as if none was held: a study that was interrupted gets its arrangement again.
    # Otherwise the held windows stay, and the missing ones go into the gaps between them.
    try:
        whole = _fill(parts, wanted, random.Random(seed))
    except ValueError:  # the held windows may lie more tightly than a new arrangement
        whole = {}
    if whole and all(whole.get(window) == start for window, start in held.items()):
        return whole
    placed = _fill(_gaps(parts, held), missing, random.Random(seed))
    return {window: held[window] if window in held else placed[window] for window in wanted}


def draw_distinct(samples: int, count: int, generator: random.Random) -> list[int]:
    """Draw ``samples`` distinct whole numbers from 0 to ``count`` − 1, in random order.

    A larger ``samples`` with a generator of the same seed begins with the same numbers.
    """
    # The first steps of a Fisher-Yates shuffle that stores only the moved entries. Python guarantees only for
    # `Random.random` that a seed gives the same numbers in all versions, which continued studies need.
    moved: dict[int, int] = {}
    picked = []
    for place in range(samples):
        other = place + int(generator.random() * (count - place))
        picked.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return picked


def _gaps(parts: Sequence[tuple[int, int]], held: Sequences) -> list[tuple[int, int]]:
    """Return the gaps between windows in parts of a text, each as (first token, number of tokens)."""
    gaps = []
    windows = sorted((start, n) for (n, _), start in held.items())
    for first, tokens in parts:
        end = first
        inside = [(start, n) for start, n in windows if first <= start < first + tokens]
        for start, n in [*inside, (first + tokens, 0)]:
            if start > end:
                gaps.append((end, start - end))
            end = max(end, start + n)
    return gaps


def _fill(
    gaps: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]], generator: random.Random
) -> dict[tuple[int, int], int]:
    # Long windows are placed first, because they find room in the fewest places.
    longest_first = sorted(windows, key=lambda window: (-window[0], window[1]))
    # Random gaps can use up room that a later window needs. Then take the tightest gap for each window.
    chosen = _choose(gaps, longest_first, generator) or _choose(gaps, longest_first, None)
    if chosen is None:
        needed, free = sum(n for n, _ in windows), [size for _, size in gaps]
        raise ValueError(
            f"{len(windows)} windows of {needed} tokens do not fit into {sum(free)} free tokens, in pieces "
            f"of at most {max(free, default=0)}"
        )
    placed: dict[tuple[int, int], int] = {}
    for (start, room), inside in zip(gaps, chosen, strict=True):
        order = [inside[place] for place in draw_distinct(len(inside), len(inside), generator)]
        placed |= _lay_out(start, room, order, longest_first[0][0], generator)
    return placed


def _choose(
    gaps: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]], generator: random.Random | None
) -> list[list[tuple[int, int]]] | None:
    """Choose a gap for each window, or None if one fits nowhere; at random by its places, or the tightest
    without a generator.
    """
    inside: list[list[tuple[int, int]]] = [[] for _ in gaps]
    room = np.array([size for _, size in gaps], dtype=np.int64)
    for window in windows:
        places = np.maximum(room - window[0] + 1, 0)
        total = int(places.sum())
        if total == 0:
            return None
        if generator is None:
            gap = int(np.where(places > 0, room, np.iinfo(np.int64).max).argmin())
        else:
            gap = int(np.searchsorted(places.cumsum(), int(generator.random() * total), side="right"))
        inside[gap].append(window)
        room[gap] -= window[0]
    return inside


def _lay_out(
    start: int, room: int, windows: Sequence[tuple[int, int]], longest: int, generator: random.Random
) -> dict[tuple[int, int], int]:
    """Place windows in one gap, in a few groups, with the spare tokens at random between them."""
    spare = room - sum(n for n, _ in windows)
    runs = min(len(windows), spare // (_ROOM * longest))
    # Split `spare` into runs + 1 parts, uniformly among all ways; the last part lies after the last run.
    cuts = [cut - index for index, cut in enumerate(sorted(draw_distinct(runs, spare + runs, generator)))]
    # The index of the first window of each run, with the number of the run.
    heads = {len(windows) * run // runs: run for run in range(runs)}
    placed = {}
    used = shift = 0
    for index, window in enumerate(windows):
        if index in heads:
            shift = cuts[heads[index]]
        placed[window] = start + shift + used
        used += window[0]
    return placed
