"""The words of a sequence: its tokens as pieces of the text that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pieces"]


def pieces(content: str, places: Sequence[int], first: int, n: int) -> list[str]:
    """Cut the text of a sequence into one piece a token.

    Parameters
    ----------
    content
        The text.
    places
        Where in it each of its tokens begins, in letters.
    first, n
        The sequence.

    Returns
    -------
    list of str
        Together they are the text from the first token to the one after the last, so that what a tokenizer
        drops between two tokens, such as a space, stands with the first of them. Where several tokens make
        one letter, the first has it and the others are empty.

    """
    ends = [len(content)]
    for place in reversed(places[first : first + n + 1]):
        ends.append(min(ends[-1], place))
    cuts = ends[::-1]
    if first + n < len(places):
        cuts.pop()  # beyond the next token
    found = []
    done = cuts[0]
    for index in range(n):
        end = next((cut for cut in cuts[index + 1 :] if cut > cuts[index]), cuts[-1])
        found.append(content[done:end])
        done = max(done, end)
    return found
