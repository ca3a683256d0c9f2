"""Define options once, as fields of dataclasses, for Python, plan files and the command line.

A field states its type, its default, its allowed values and its help text. From these come the arguments in
Python, the keys of a plan file (:mod:`howsmooth.study.plan_file`) and the options of the command line
(``howsmooth.cli.typer_command``). All three pass the raw values to the dataclass, which parses them in the
same way.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

from howsmooth.errors import ArgumentError, similar_name
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
    "number",
    "one_of",
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
    """The values that an option accepts: their type, and a function that checks and parses a raw value.

    Attributes
    ----------
    typed
        The type that the command line converts an argument to: ``str``, ``int``, ``float``, ``bool`` or
        ``Path``.
    read
        A function of the option's name and the raw value that returns the value of the field. The raw value
        comes from Python, a plan file or the command line. The function raises ArgumentError for a bad value.
    several
        Whether the option may be repeated on the command line.
    place
        Whether the value may be the name of a file or a folder.

    """

    typed: type
    read: Callable[[str, Any], Any]
    several: bool = False
    place: bool = False


@dataclass(frozen=True)
class Option:
    """The definition of one option: which values it accepts, and its help text.

    Attributes
    ----------
    kind
        The kind of values.
    help
        The help text on the command line.
    metavar
        The placeholder for the value in the help; empty for the name of the type.
    panel
        The heading of the option in the help; empty for the heading of its dataclass.
    flag
        The name on the command line, if it differs from the name of the field.
    short
        A short name on the command line, such as ``-q``.
    positional
        Whether it is a positional argument on the command line.

    """

    kind: Kind
    help: str
    metavar: str = ""
    panel: str = ""
    flag: str = ""
    short: str = ""
    positional: bool = False


def option(default: Any, kind: Kind, help: str, **told: Any) -> Any:
    """Define a dataclass field that is an option.

    Parameters
    ----------
    default
        The default, as a user would write it; ``...`` if the option is required; ``None`` if the dataclass
        chooses the value in ``check``.
    kind, help, **told
        The attributes of :class:`Option`.

    """
    usual = dataclasses.MISSING if default is ... else default
    return dataclasses.field(default=usual, metadata={"option": Option(kind, help, **told)})


def options_of(plan: type[Options]) -> dict[str, Option]:
    """Return the options of a dataclass, by field name."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(plan)}


@dataclass(frozen=True)
class Options:
    """The base class of dataclasses whose fields are options.

    A field accepts what a user may write, such as a number, a string such as ``"2:100:2"``, or a list. It
    stores the parsed value, whose type is the annotation.
    """

    # Annotations state the parsed type of a field. The raw value that the constructor takes may have another
    # type, so run-time type checkers must not check the constructor.
    __no_type_check__: ClassVar[bool] = True

    PANEL: ClassVar[str] = WHAT
    """The heading in the help for options without a heading of their own."""

    def __init_subclass__(cls) -> None:
        """Add the help text of each field to the docstring of the class."""
        told = [
            f"{name}\n    {field.metadata['option'].help}"
            for name, field in vars(cls).items()
            if isinstance(field, dataclasses.Field)
        ]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Attributes", "-" * 10, *told])

    def __post_init__(self) -> None:
        """Parse every field, then check that the values fit together.

        Raises
        ------
        ArgumentError
            If a value is not allowed; the error names the field.

        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                kind: Kind = field.metadata["option"].kind
                self._set(field.name, kind.read(field.name, value))
        self.check()

    def check(self) -> None:
        """Do nothing here. Subclasses set defaults that depend on other fields, and refuse contradictions."""

    def described(self) -> dict[str, Any]:
        """Return the value of each option by its name, converted to types that JSON has."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def _set(self, name: str, value: object) -> None:
        # The dataclasses are frozen; this method is called only while one is constructed.
        object.__setattr__(self, name, value)


def check_keys(table: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ArgumentError if a table of a plan file has an unknown key.

    Raises
    ------
    ArgumentError
        If a key is not in ``known``; the error suggests a similar key.

    """
    for key, value in table.items():
        if key not in known:
            got, remedy = "an unknown key", similar_name(key, known)
            if isinstance(value, Mapping):
                got, remedy = "a table", f"Write the keys in no table: leave out [{key}]."
            raise ArgumentError(key, expected=f"one of the keys {', '.join(known)}", got=got, remedy=remedy)


@contextmanager
def renamed(name: Callable[[str], str]) -> Iterator[None]:
    """Raise an ArgumentError of the ``with`` block again, with the argument's name as the user knows it.

    ``name`` turns the name of a field into, for example, the option on the command line.
    """
    try:
        yield
    except ArgumentError as error:
        again = {"expected": error.expected, "got": error.got, "remedy": error.remedy}
        raise type(error)(name(error.argument), **again) from error


def shown(value: object) -> str:
    """Return the repr of a value for an error message, shortened to 60 characters."""
    written = repr(value)
    return written if len(written) <= _MOST_SHOWN else f"{written[: _MOST_SHOWN - 3]}..."


def _refuse(name: str, expected: str, value: object) -> ArgumentError:
    return ArgumentError(name, expected=expected, got=shown(value))


def _plain(value: Any) -> Any:
    """Convert the value of a field to the types that JSON has."""
    if isinstance(value, Options):
        return value.described()
    if isinstance(value, Ranges):
        return value.text
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


# ---- Kinds of values


def whole(least: int, most: int | None = None) -> Kind:
    """Return the :class:`Kind` of an option that accepts whole numbers from ``least`` to ``most``."""

    def read(name: str, value: Any) -> int:
        # In Python, True is an instance of int.
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _refuse(name, "a whole number", value)
        found = int(value)
        if found < least or (most is not None and found > most):
            limits = f"at least {least}" if most is None else f"a number from {least} to {most}"
            raise _refuse(name, limits, value)
        return found

    return Kind(int, read)


def number(*, positive: bool = False, among: Sequence[str] = ()) -> Kind:
    """Return the :class:`Kind` of an option that accepts numbers.

    With ``positive``, they must be above zero and finite. The words ``among`` are accepted too.
    """
    wanted = "a finite number > 0" if positive else "a number"
    wanted += f", or {' or '.join(among)}" if among else ""

    def read(name: str, value: Any) -> float | str:
        if among and value in among:
            return str(value)
        given = value
        if among and isinstance(value, str):
            with suppress(ValueError):
                given = float(value)
        if isinstance(given, bool) or not isinstance(given, Real):
            raise _refuse(name, wanted, value)
        try:
            found = float(given)
        except OverflowError:
            raise _refuse(name, "a finite number", value) from None
        if positive and not 0 < found < math.inf:
            raise _refuse(name, wanted, value)
        return found

    return Kind(str if among else float, read)


def flag() -> Kind:
    """Return the :class:`Kind` of an option that is true or false."""

    def read(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise _refuse(name, "true or false", value)
        return value

    return Kind(bool, read)


def words(*, place: bool = False) -> Kind:
    """Return the :class:`Kind` of an option that accepts non-empty strings.

    With ``place``, a string may be the path of a file or folder, and path objects are accepted too.
    """

    def read(name: str, value: Any) -> str:
        value = os.fspath(value) if place and isinstance(value, os.PathLike) else value
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise _refuse(name, "a non-empty string", value)
        return str(value)

    return Kind(str, read, place=place)


def choice(*choices: str, elsewhere: Mapping[str, str] = {}) -> Kind:
    """Return the :class:`Kind` of an option that accepts one of the strings ``choices``.

    ``elsewhere`` has words that belong to another command, each with the remedy to show in the error.
    """

    def read(name: str, value: Any) -> str:
        if value not in choices:
            raise ArgumentError(
                name,
                expected=f"one of {', '.join(choices)}",
                got=shown(value),
                remedy=elsewhere.get(str(value)) or similar_name(str(value), choices),
            )
        return str(value)

    return Kind(str, read)


def path() -> Kind:
    """Return the :class:`Kind` of an option that accepts the path of a file or a folder."""
    plain = words(place=True)

    def read(name: str, value: Any) -> Path:
        return Path(plain.read(name, value))

    return Kind(Path, read, place=True)


def size() -> Kind:
    """Return the :class:`Kind` of an option that accepts a size in bytes, such as ``"8GiB"``."""

    def read(name: str, value: Any) -> int:
        if not isinstance(value, str):
            return int(whole(1).read(name, value))
        # Imported here because it imports PyTorch, which --help should not wait for.
        from howsmooth.memory import parse_bytes

        return parse_bytes(value)

    return Kind(str, read)


def selection() -> Kind:
    """Return the :class:`Kind` of an option that accepts layers or heads, such as ``"0,-1"``."""
    return Kind(str, lambda name, value: Ranges.parse(value, name))


def token_counts(least: int = 1) -> Kind:
    """Return the :class:`Kind` of an option that accepts sequence lengths of at least ``least`` tokens."""

    def read(name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, Sequence) and not value:
            return ()
        found = Ranges.parse(value, name).values()
        if found[0] < least:
            raise ArgumentError(name, expected=f"numbers of at least {least}", got=str(found[0]))
        return found

    return Kind(str, read)


def several(one: Kind, *, once: bool = True) -> Kind:
    """Return the :class:`Kind` of an option that accepts a list of values, each of the kind ``one``.

    With ``once``, a repeated value is refused.
    """

    def read(name: str, value: Any) -> tuple[Any, ...]:
        values = [one.read(name, each) for each in (value if isinstance(value, list | tuple) else [value])]
        doubled = next((each for each in values if values.count(each) > 1), None)
        if once and doubled is not None:
            raise ArgumentError(name, expected="each only once", got=f"{str(doubled)!r} twice")
        return tuple(values)

    return dataclasses.replace(one, read=read, several=True)


def one_of(kind: Kind) -> Kind:
    """Return the :class:`Kind` of an option that is refused, instead of cut to the last value, if it is
    repeated on the command line.
    """

    def read(name: str, value: Any) -> Any:
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) != 1:
            raise ArgumentError(name, expected="one value", got=", ".join(map(shown, values)))
        return kind.read(name, values[0])

    return dataclasses.replace(kind, read=read, several=True)


def some_of(*choices: str, elsewhere: Mapping[str, str]) -> Kind:
    """Return the :class:`Kind` of an option that accepts some of the strings ``choices``, or "all".

    The user gives a list or a comma-separated string. The field stores a comma-separated string.

    Parameters
    ----------
    *choices
        The allowed words.
    elsewhere
        Words that belong to another command, each with the remedy to show in the error.

    """
    plain = words()

    def read(name: str, value: Any) -> str:
        if value == "":  # the empty selection
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
