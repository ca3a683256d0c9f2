"""Sequences of a text: windows of its tokens, none overlapping another, picked by a seed.

A text is tokenised once, without special tokens, and windows of it are the sequences. They are
disjoint, those of different lengths as well, so that points of a study share no token. What a
study has measured stays where it is: sequences that are added find room between.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

__all__ = [
    "Sequences",
    "arrange",
    "bounded_lengths",
    "draw_distinct",
    "overlapping",
]

Sequences = Mapping[tuple[int, int], int]
"""First token of each sequence, by its length and the number of the sample."""

# Free places between windows have at least this many times the longest one, on average, or there are
# fewer of them: added sequences, and longer ones, must find room.
_ROOM = 8


def arrange(
    tokens: int,
    lengths: Iterable[int],
    samples: int,
    seed: int,
    held: Sequences | None = None,
    parts: Sequence[tuple[int, int]] | None = None,
) -> dict[tuple[int, int], int]:
    """Place all sequences of a study so that none overlaps another.

    On a text that is long enough each arrangement of the windows is equally likely. On a shorter one they
    stand in fewer runs without gaps, in random order.

    Parameters
    ----------
    tokens
        Number of tokens in the text.
    lengths, samples
        Tokens in a window, and how many windows of each length.
    seed
        Of the arrangement.
    held
        Sequences that were measured, of these or other lengths. They stay where they are. If they are a part
        of the arrangement that there would be without them, it is that one: an interrupted study goes on
        as if it had not been.
    parts
        Where windows can lie, as (first token, tokens), one after another; by default the whole text.

    Returns
    -------
    dict
        The first token of each (length, sample) with sample below ``samples``.

    Raises
    ------
    ValueError
        If they do not fit.

    """
    held = held or {}
    wanted = [(n, sample) for n in sorted(set(lengths)) for sample in range(samples)]
    missing = [window for window in wanted if window not in held]
    if not missing:
        return {window: held[window] for window in wanted}
    parts = [(0, tokens)] if parts is None else parts
    try:
        whole = _fill(parts, wanted, random.Random(seed))
    except ValueError:  # what is held may lie more tightly
        whole = {}
    if whole and all(whole.get(window) == start for window, start in held.items()):
        return whole
    placed = _fill(_gaps(parts, held), missing, random.Random(seed))
    return {window: held[window] if window in held else placed[window] for window in wanted}


def overlapping(windows: Iterable[tuple[int, int]]) -> int:
    """Count the windows, as (first token, tokens), that share a token with one before them in the text."""
    count = end = 0
    for start, n in sorted(windows):
        count += start < end
        end = max(end, start + n)
    return count


def draw_distinct(samples: int, count: int, seed: int) -> list[int]:
    """Draw different numbers below ``count``, in random order; with more samples the same come first."""
    return _distinct(samples, count, random.Random(seed))


def _distinct(samples: int, count: int, generator: random.Random) -> list[int]:
    """Draw different numbers below ``count``, in random order."""
    # The start of a Fisher-Yates shuffle, with the moved entries only. Of Python's generators,
    # `Random.random` alone is promised never to change, which a continued store relies on.
    moved: dict[int, int] = {}
    picked = []
    for place in range(samples):
        other = place + int(generator.random() * (count - place))
        picked.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return picked


def _gaps(parts: Sequence[tuple[int, int]], held: Sequences) -> list[tuple[int, int]]:
    """List the free places between windows, as (first token, tokens)."""
    gaps = []
    windows = sorted((start, n) for (n, _), start in held.items())
    for first, tokens in parts:
        end = first
        for start, n in windows:
            if not first <= start < first + tokens:
                continue
            if start > end:
                gaps.append((end, start - end))
            end = max(end, start + n)
        if end < first + tokens:
            gaps.append((end, first + tokens - end))
    return gaps


def _fill(
    gaps: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]], generator: random.Random
) -> dict[tuple[int, int], int]:
    """Place windows into free places."""
    longest_first = sorted(windows, key=lambda window: (-window[0], window[1]))
    # A random gap for each window uses room up that another needs; the tightest one wastes least.
    chosen = _choose(gaps, longest_first, generator) or _choose(gaps, longest_first, None)
    if chosen is None:
        raise ValueError(
            f"{len(windows)} windows of {sum(n for n, _ in windows)} tokens do not fit into what is free"
        )
    placed: dict[tuple[int, int], int] = {}
    for (start, room), inside in zip(gaps, chosen, strict=True):
        order = [inside[place] for place in _distinct(len(inside), len(inside), generator)]
        placed |= _lay_out(start, room, order, longest_first[0][0], generator)
    return placed


def _choose(
    gaps: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]], generator: random.Random | None
) -> list[list[tuple[int, int]]] | None:
    """Choose a gap for each window: at random, by the places it has there, or the tightest one."""
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
    """Lay windows out in one free place, in this order, with what is left over between runs of them."""
    spare = room - sum(n for n, _ in windows)
    runs = min(len(windows), spare // (_ROOM * longest))
    # Uniform among the ways to split `spare` into runs + 1 parts, the last one after the last run.
    cuts = [cut - index for index, cut in enumerate(sorted(_distinct(runs, spare + runs, generator)))]
    heads = {len(windows) * run // runs: run for run in range(runs)}
    placed = {}
    used = shift = 0
    for index, window in enumerate(windows):
        if index in heads:
            shift = cuts[heads[index]]
        placed[window] = start + shift + used
        used += window[0]
    return placed


def bounded_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Pick the lengths at which bounds are computed: the shortest, the median and the longest."""
    ordered = sorted(lengths)
    return tuple(sorted({ordered[0], ordered[len(ordered) // 2], ordered[-1]}))
