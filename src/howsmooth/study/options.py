"""Options of a piece of work: each is written once, as a field of a dataclass.

A field says its type, its default, what its values are, and what people are told of it. From that come
the arguments in Python, the keys of a plan file (:mod:`howsmooth.study.plan_file`) and the options of the
command line (``howsmooth.cli.options``): all three hand what they were given to the dataclass, whose
fields read it in the same way.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from howsmooth.errors import ArgumentError
from howsmooth.study.ranges import Ranges

__all__ = [
    "HOW",
    "OUTPUT",
    "WHAT",
    "Kind",
    "Option",
    "Options",
    "check_keys",
    "choice",
    "flag",
    "from_table",
    "number",
    "option",
    "options_of",
    "path",
    "renamed",
    "selection",
    "several",
    "shown",
    "size",
    "some_of",
    "token_counts",
    "whole",
    "words",
]

WHAT = "What to measure"
HOW = "How to measure"
OUTPUT = "Output"

_MOST_SHOWN = 60


@dataclass(frozen=True)
class Kind:
    """What the values of an option are.

    Attributes
    ----------
    typed
        What a word on the command line is first taken for: ``str``, ``int``, ``float``, ``bool`` or ``Path``.
    read
        Gives the value of a field from the name of the argument and what was given for it, in Python, in
        a plan file or on the command line; raises ArgumentError.
    several
        Whether an option of the command line may be repeated.
    place
        Whether the words may name a file or a folder.

    """

    typed: type
    read: Callable[[str, Any], Any]
    several: bool = False
    place: bool = False


@dataclass(frozen=True)
class Option:
    """How the values of a field are read, and what people are told of it.

    Attributes
    ----------
    kind
        What the values are.
    help
        For the help of the command line.
    metavar
        What stands for the value in the help; empty for the name of its type.
    panel
        Heading in the help; empty for the one of the dataclass.
    flag
        Name on the command line where it is not that of the field.
    positional
        Whether it is an argument of the command line instead of an option.

    """

    kind: Kind
    help: str
    metavar: str = ""
    panel: str = ""
    flag: str = ""
    positional: bool = False


def option(default: Any, kind: Kind, help: str, **told: Any) -> Any:
    """Make a field of a dataclass that is an option.

    Parameters
    ----------
    default
        As a user would write it; ``...`` if there is none; ``None`` for what the dataclass then chooses.
    kind, help, **told
        As in :class:`Option`.

    """
    usual = dataclasses.MISSING if default is ... else default
    return dataclasses.field(default=usual, metadata={"option": Option(kind, help, **told)})


def options_of(plan: type[Options]) -> dict[str, Option]:
    """Return the options of a dataclass by the names of its fields."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(plan)}


@dataclass(frozen=True)
class Options:
    """Base of all dataclasses whose fields are options.

    A field takes what people write: a number, words such as ``"2:100:2"``, or a list; it holds the value
    that its annotation says.
    """

    # Annotations say what a field holds. What people write for it may be of another type, which a checker of
    # arguments at run time would refuse.
    __no_type_check__: ClassVar[bool] = True

    PANEL: ClassVar[str] = WHAT
    """Heading in the help of options that name none."""

    def __init_subclass__(cls) -> None:
        """Let the docstring say of each field what its help says."""
        told = [
            f"{name}\n    {field.metadata['option'].help}"
            for name, field in vars(cls).items()
            if isinstance(field, dataclasses.Field)
        ]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Attributes", "-" * 10, *told])

    def __post_init__(self) -> None:
        """Read every field, then refuse what does not go together.

        Raises
        ------
        ArgumentError
            If a value is impossible; it names the field.

        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                kind: Kind = field.metadata["option"].kind
                self._set(field.name, kind.read(field.name, value))
        self.check()

    def check(self) -> None:
        """Fill in what depends on other fields, and refuse values that do not go together."""

    def described(self) -> dict[str, Any]:
        """Return all fields as numbers, words, lists and dictionaries, as JSON has them."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def _set(self, name: str, value: object) -> None:
        # These dataclasses are frozen, and this is their construction.
        object.__setattr__(self, name, value)


_Plan = TypeVar("_Plan", bound=Options)


def from_table(plan: type[_Plan], table: Mapping[str, Any], within: str = "") -> _Plan:
    """Make a dataclass of options from the keys and values of a table.

    Parameters
    ----------
    plan
        The dataclass.
    table
        Values by the names of fields.
    within
        Where the table stands, named first in errors.

    Raises
    ------
    ArgumentError
        If a key is not known or missing, or a value is impossible; it names the key.

    """
    fields = dataclasses.fields(plan)
    with renamed(lambda name: f"{within}: {name}" if within else name):
        check_keys(table, [field.name for field in fields])
        for field in fields:
            if field.default is dataclasses.MISSING and field.name not in table:
                raise ArgumentError(field.name, expected=f"a {field.name} in every table", got="none")
        return plan(**table)


def check_keys(table: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a table with a key that is not known."""
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ArgumentError(
                key,
                expected=f"one of the keys {', '.join(known)}",
                got="a key of that name",
                remedy=f"Is {near[0]} meant?" if near else "",
            )


@contextmanager
def renamed(name: Callable[[str], str]) -> Iterator[None]:
    """Let errors name the argument as the user wrote it: ``name`` gives that from the name of the field."""
    try:
        yield
    except ArgumentError as error:
        again = {"expected": error.expected, "got": error.got, "remedy": error.remedy}
        raise type(error)(name(error.argument), **again) from error


def shown(value: object) -> str:
    """Write what was given, for an error."""
    written = repr(value)
    return written if len(written) <= _MOST_SHOWN else f"{written[: _MOST_SHOWN - 3]}..."


def _refuse(name: str, expected: str, value: object) -> ArgumentError:
    return ArgumentError(name, expected=expected, got=shown(value))


def _plain(value: Any) -> Any:
    """Bring the value of a field to what JSON has."""
    if isinstance(value, Options):
        return value.described()
    if isinstance(value, Ranges):
        return value.text
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


# ---- kinds of values


def whole(least: int, most: int | None = None) -> Kind:
    """Give the kind of whole numbers from ``least`` to ``most``."""

    def read(name: str, value: Any) -> int:
        # True is an integer to Python.
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _refuse(name, "a whole number", value)
        found = int(value)
        if found < least or (most is not None and found > most):
            limits = f"at least {least}" if most is None else f"a number from {least} to {most}"
            raise _refuse(name, limits, value)
        return found

    return Kind(int, read)


def number(*, positive: bool = False, among: Sequence[str] = ()) -> Kind:
    """Give the kind of numbers, only finite ones above zero if ``positive``; or one of some words."""
    wanted = "a finite number > 0" if positive else "a number"
    wanted += f", or {' or '.join(among)}" if among else ""

    def read(name: str, value: Any) -> float | str:
        if among and value in among:
            return str(value)
        given = _parsed(value) if among and isinstance(value, str) else value
        if isinstance(given, bool) or not isinstance(given, Real):
            raise _refuse(name, wanted, value)
        try:
            found = float(given)
        except OverflowError:
            raise _refuse(name, "a finite number", value) from None
        if positive and not (math.isfinite(found) and found > 0):
            raise _refuse(name, wanted, value)
        return found

    return Kind(str if among else float, read)


def _parsed(written: str) -> float | None:
    try:
        return float(written)
    except ValueError:
        return None


def flag() -> Kind:
    """Give the kind of what is true or false."""

    def read(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise _refuse(name, "true or false", value)
        return value

    return Kind(bool, read)


def words(*, place: bool = False) -> Kind:
    """Give the kind of words; with ``place`` they may name a file or a folder."""

    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise _refuse(name, "words", value)
        return str(value)

    return Kind(str, read, place=place)


def choice(*choices: str) -> Kind:
    """Give the kind of one of some words."""

    def read(name: str, value: Any) -> str:
        if value not in choices:
            raise _refuse(name, f"one of {', '.join(choices)}", value)
        return str(value)

    return Kind(str, read)


def path() -> Kind:
    """Give the kind of a file or a folder."""
    plain = words()

    def read(name: str, value: Any) -> Path:
        return value if isinstance(value, Path) else Path(plain.read(name, value))

    return Kind(Path, read, place=True)


def size() -> Kind:
    """Give the kind of numbers of bytes, such as ``"8GiB"``."""

    def read(name: str, value: Any) -> int:
        if not isinstance(value, str):
            return int(whole(1).read(name, value))
        # It brings PyTorch; the help can be read without.
        from howsmooth.memory import parse_bytes

        return parse_bytes(value)

    return Kind(str, read)


def selection() -> Kind:
    """Give the kind of a selection of layers or heads."""
    return Kind(str, Ranges.read)


def token_counts(least: int = 1) -> Kind:
    """Give the kind of numbers of tokens, each at least ``least``."""

    def read(name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, Sequence) and not value:
            return ()
        found = Ranges.read(name, value).values()
        if found[0] < least:
            raise ArgumentError(name, expected=f"numbers of at least {least}", got=str(found[0]))
        return found

    return Kind(str, read)


def several(one: Kind, *, once: bool = True) -> Kind:
    """Give the kind of several values, each only ``once``, or one alone."""

    def read(name: str, value: Any) -> tuple[Any, ...]:
        values = [one.read(name, each) for each in (value if isinstance(value, list | tuple) else [value])]
        doubled = next((each for each in values if values.count(each) > 1), None)
        if once and doubled is not None:
            raise ArgumentError(name, expected="each only once", got=f"{str(doubled)!r} twice")
        return tuple(values)

    return dataclasses.replace(one, read=read, several=True)


def some_of(*choices: str, elsewhere: Mapping[str, str]) -> Kind:
    """Give the kind of some words with commas between them, ``"all"``, or a list; held with commas.

    Parameters
    ----------
    *choices
        The words.
    elsewhere
        Words that could be looked for here, with what to do instead.

    """
    plain = words()

    def read(name: str, value: Any) -> str:
        if value == "":  # stands for none
            return ""
        given = value if isinstance(value, list | tuple) else plain.read(name, value).split(",")
        found = [plain.read(name, word).strip() for word in given]
        for word in found:
            if word not in choices and found != ["all"]:
                expected = f"all, or some of {', '.join(choices)}"
                remedy = elsewhere.get(word, "")
                raise ArgumentError(name, expected=expected, got=repr(word), remedy=remedy)
            if found.count(word) > 1:
                raise ArgumentError(name, expected="each item only once", got=f"{word!r} twice")
        return ",".join(found)

    return Kind(str, read)
