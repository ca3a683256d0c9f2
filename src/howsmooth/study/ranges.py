"""Parse ranges of lengths, layers and heads, such as ``2:100:2`` or ``0,6``.

A selection is a comma-separated list of numbers and of ranges ``start:stop:step``. The stop is included, so
``2:100:2`` is 2, 4, ..., 100 and ``0:4`` is 0, 1, 2, 3, 4. Negative numbers count layers and heads from the
end, and ``all`` selects every layer or head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from howsmooth.errors import ArgumentError

__all__ = ["ALL", "Ranges"]

_ITEM = re.compile(r"(?P<start>-?\d+)(?::(?P<stop>-?\d+)(?::(?P<step>-?\d+))?)?")
_GRAMMAR = "numbers and start:stop:step ranges (the stop is included), separated by commas"
_NOT_EMPTY = "ranges that are not empty (start up to stop)"
_MOST_VALUES = 100_000
_MOST_DIGITS = 9


@dataclass(frozen=True)
class Ranges:
    """A selection of lengths, layers or heads as a user gave it, such as ``2:100:2``, ``0,6`` or ``all``.
    What cannot be read or does not exist raises an ArgumentError that names ``argument``.

    ``items`` are triples (start, stop, step) with the stop included, none for ``all``.
    """

    text: str
    argument: str = field(compare=False)
    items: tuple[tuple[int, int, int], ...]

    @classmethod
    def parse(cls, value: Any, argument: str) -> Ranges:
        """Read a number, a string such as ``2:100:2``, or a list of both; return a ``Ranges`` unchanged."""
        if isinstance(value, Ranges):
            return value
        words = isinstance(value, str) or not isinstance(value, Sequence)
        parts = [value] if words or not value else value
        if any(isinstance(part, bool) or not isinstance(part, int | str) for part in parts):
            raise ArgumentError(
                argument, expected='a number, a string such as "2:100:2", or a list', got=repr(value)[:60]
            )
        text = ",".join(str(part) for part in parts)
        if text.strip() == "all":
            return cls("all", argument, ())
        items = []
        for part in text.split(","):
            match = _ITEM.fullmatch(part.strip())
            if match is None or any(len(number) > _MOST_DIGITS for number in part.split(":")):
                got = repr(text) if match is None else f"a number of more than {_MOST_DIGITS} digits"
                raise ArgumentError(argument, expected=f"{_GRAMMAR}, such as 2:100:2 or 0,6", got=got)
            start = int(match["start"])
            stop, step = int(match["stop"] or start), int(match["step"] or 1)
            if step < 1:
                raise ArgumentError(argument, expected="ranges with a step of at least 1", got=repr(text))
            if start > stop and (start < 0) == (stop < 0):
                raise ArgumentError(argument, expected=_NOT_EMPTY, got=repr(text))
            items.append((start, stop, step))
        return cls(text.strip(), argument, tuple(items))

    def values(self) -> tuple[int, ...]:
        """Return the numbers of a selection of lengths, sorted and without duplicates."""
        if not self.items:
            raise self._refused(_GRAMMAR)
        chosen = self._expand(self.items)
        if chosen[0] < 1:
            raise self._refused("numbers of at least 1")
        return chosen

    def resolve(self, count: int, owner: str, things: str) -> tuple[int, ...]:
        """Return the sorted indices of the selected layers or heads (``things``) among all ``count``."""
        if not self.items:
            return tuple(range(count))
        items = []
        for start, stop, step in self.items:
            for index in (start, stop):
                if not -count <= index < count:
                    expected = f"{things} of {owner}, which has {count}: 0 to {count - 1}, -{count} to -1"
                    got = f"{index} in {self.text!r}" if str(index) != self.text else str(index)
                    raise ArgumentError(self.argument, expected=expected, got=got)
            items.append((start % count, stop % count, step))
        return self._expand(items)

    def _expand(self, items: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
        spans = [range(start, stop + 1, step) for start, stop, step in items]
        if not all(spans):
            raise self._refused(_NOT_EMPTY)
        if sum(map(len, spans)) > _MOST_VALUES:
            raise self._refused(f"at most {_MOST_VALUES} numbers")
        return tuple(sorted(set().union(*spans)))

    def _refused(self, expected: str) -> ArgumentError:
        return ArgumentError(self.argument, expected=expected, got=repr(self.text))


ALL = Ranges("all", "", ())
"""Every layer or head."""
