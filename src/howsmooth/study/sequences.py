"""Sequences of a text: non-overlapping windows of its tokens, some of them picked by a seed.

The protocol of the paper's Section 5.1: a text is tokenised once, cut into consecutive windows of
n tokens, and some windows are picked at random. No special tokens are added.
"""

from __future__ import annotations

import random

__all__ = ["pick_windows", "windows_in"]


def windows_in(tokens: int, length: int) -> int:
    """How many non-overlapping windows of ``length`` tokens there are in ``tokens`` tokens."""
    return tokens // length


def pick_windows(tokens: int, length: int, samples: int, seed: int) -> tuple[int, ...]:
    """First tokens of ``samples`` different windows, in the order in which they were drawn.

    Parameters
    ----------
    tokens
        Number of tokens in the text.
    length
        Tokens in a window.
    samples
        Windows to pick, at most :func:`windows_in`.
    seed
        Of the draw. The same seed with more samples gives the same windows first.

    Returns
    -------
    tuple of int
        Multiples of ``length``, without repetition.

    Raises
    ------
    ValueError
        If there are fewer windows than samples.

    """
    count = windows_in(tokens, length)
    if samples > count:
        raise ValueError(f"{samples} windows of {length} tokens do not fit into {tokens} tokens")
    # The start of a Fisher-Yates shuffle, with the moved entries only. Of Python's generators,
    # `Random.random` alone is promised never to change, which a continued store relies on.
    generator = random.Random(seed)
    moved: dict[int, int] = {}
    picked = []
    for place in range(samples):
        other = place + int(generator.random() * (count - place))
        picked.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return tuple(window * length for window in picked)
