"""Define options: annotated fields of dataclasses, set from Python, plan files or the command line.

pydantic checks the fields by their types. A string in the annotation is the help, and :class:`Told` is what
else the command line shows. A refusal is an ArgumentError that names the field.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from numbers import Number
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, PlainValidator, ValidationError

from howsmooth.errors import ArgumentError, HowsmoothError, similar_name
from howsmooth.study.ranges import Ranges

__all__ = [
    "HOW", "LATER", "OUTPUT", "WHAT", "Folder", "Integer", "Real",
    "Selection", "Told", "Word", "Words", "described", "in_words", "listed", "once", "options", "options_of",
    "renamed", "shown", "some_of", "token_counts", "word",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Told:
    """How the command line presents an option. Several ``Told`` of one option are merged, field by field."""

    metavar: str = ""  #: The placeholder for the value; by default the choices, or the name of the type.
    panel: str = ""  #: The heading above it; by default that of its dataclass, ``PANEL``.
    flag: str = ""  #: The name on the command line, if it differs from the name of the field.
    short: str = ""  #: A short name, such as ``-q``.
    positional: bool = False  #: Whether it is an argument without a name.
    several: bool = False  #: Whether it may be repeated.
    #: Words that belong elsewhere, each with the remedy to show in the error.
    elsewhere: tuple[tuple[str, str], ...] = ()
    help: str = ""


WHAT = "What to measure"
HOW = Told(panel="How to measure")
OUTPUT = Told(panel="Output")

LATER: Any = None
"""The default of a field for which ``__post_init__`` chooses a value."""

_MOST_SHOWN = 60

# What was expected, by the kind of error of pydantic; of the other kinds its own words are taken.
_EXPECTED = {
    "missing": "a value",
    "int_type": "a whole number",
    "float_type": "a finite number",
    "bool_type": "true or false",
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
    "greater_than": "a finite number > {gt}",
    "finite_number": "a finite number",
    "byte_size": "a number of bytes such as 8GiB or 500MB",
    "byte_size_unit": "a number of bytes such as 8GiB or 500MB",
}


_Plan = TypeVar("_Plan", bound=type)


@dataclass_transform(frozen_default=True)
def options(cls: _Plan) -> _Plan:
    """Make a class a frozen dataclass whose fields are options.

    A field takes what a user may write, such as a number, a string such as ``"2:100:2"``, or a list, and
    holds the parsed value, whose type is the annotation. The docstring gets the help of the fields.
    """
    names = inspect.get_annotations(cls)
    strict = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=strict)(cls)
    told = [f"{name}\n    {option.help}" for name, option in options_of(made).items() if name in names]
    made.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Attributes", "-" * 10, *told])
    check = made.__init__

    @wraps(check)
    def checked(self: Any, *given: Any, **named: Any) -> None:
        try:
            check(self, *given, **named)
        except ValidationError as error:
            raise _refusal(made, error) from error

    made.__init__ = checked
    # Run-time type checkers leave the constructor alone: annotations are the types of parsed values.
    made.__no_type_check__ = True
    return made  # type: ignore[no-any-return]


def options_of(cls: Any) -> dict[str, Told]:
    """Return the options of a dataclass by field name. A field without help text is not an option."""
    found = {}
    for name, field in cls.__pydantic_fields__.items():
        told = [vars(one) for one in field.metadata if isinstance(one, Told)]
        told += [{"help": one} for one in field.metadata if isinstance(one, str)]
        found[name] = Told(**{key: value for one in told for key, value in one.items() if value})
    return {name: one for name, one in found.items() if one.help}


def described(plan: Any) -> dict[str, Any]:
    """Return the fields of a plan as a dictionary of values that JSON can hold."""
    return {field.name: _plain(getattr(plan, field.name)) for field in dataclasses.fields(plan)}


def _plain(value: Any) -> Any:
    if isinstance(value, Ranges):
        return value.text
    if dataclasses.is_dataclass(value):
        return described(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def in_words(value: Any) -> str:
    """Return the value of a field as a user would write it."""
    plain = _plain(value)
    return ",".join(map(str, plain)) if isinstance(plain, list) else str(plain)


@contextmanager
def renamed(name: Callable[[str], str]) -> Iterator[None]:
    """In an ArgumentError of the ``with`` block, replace the argument's name by the one the user knows."""
    try:
        yield
    except ArgumentError as error:
        again = {"expected": error.expected, "got": error.got, "remedy": error.remedy}
        raise type(error)(name(error.argument), **again) from error


def shown(value: object) -> str:
    """Return the repr of a value for an error message, shortened to 60 characters."""
    written = repr(value)
    return written if len(written) <= _MOST_SHOWN else f"{written[: _MOST_SHOWN - 3]}..."


def _refusal(cls: type, error: ValidationError) -> HowsmoothError:
    first = error.errors(include_url=False)[0]
    kind, context, value = first["type"], first.get("ctx", {}), first["input"]
    if isinstance(told := context.get("error"), HowsmoothError):
        return told
    names = [field.name for field in dataclasses.fields(cls)]
    place = first["loc"][0] if first["loc"] else ""
    name = names[place] if isinstance(place, int) and place < len(names) else str(place)
    got, remedy = shown(value), ""
    expected = _EXPECTED.get(kind, "").format(**context)
    if kind == "missing":
        got = "none"
    elif kind == "unexpected_keyword_argument":
        expected, got, remedy = f"one of {', '.join(names)}", "an unknown name", similar_name(name, names)
    elif kind in ("literal_error", "string_unicode"):
        choices = re.findall(r"'(.*?)'", context.get("expected", ""))
        expected = f"one of {', '.join(choices)}" if choices else "plain words"
        remedy = dict(options_of(cls)[name].elsewhere).get(str(value)) or similar_name(str(value), choices)
    expected = expected or first["msg"].removeprefix("Input should be ")
    return ArgumentError(name, expected=expected, got=got, remedy=remedy)


# ---- Types of fields


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, Number) and hasattr(value, "item") else value


def listed(value: Any) -> tuple[Any, ...]:
    """Return the members of a list, or a single value, as a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def once(values: tuple[Any, ...], info: Any) -> tuple[Any, ...]:
    """Return the values; raise ArgumentError if one of them occurs twice."""
    doubled = next((each for each in values if values.count(each) > 1), None)
    if doubled is not None:
        raise ArgumentError(info.field_name, expected="each only once", got=f"{str(doubled)!r} twice")
    return values


def word(value: Any, info: Any) -> str:
    """Return a string, or the path of a path object; raise ArgumentError if it is empty or something else."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ArgumentError(info.field_name, expected="a non-empty string", got=shown(value))
    return str(value)


def token_counts(least: int = 1) -> Callable[[Any, Any], tuple[int, ...]]:
    """Return a parser of numbers of at least ``least``, such as ``"2:100:2"``, ``[2, 4]`` or 8."""

    def read(value: Any, info: Any) -> tuple[int, ...]:
        if isinstance(value, list | tuple) and not value:
            return ()
        found = Ranges.parse(value, info.field_name).values()
        if found[0] < least:
            raise ArgumentError(info.field_name, expected=f"numbers of at least {least}", got=str(found[0]))
        return found

    return read


def some_of(*choices: str, also: str = "", elsewhere: Mapping[str, str] = {}) -> Callable[[Any, Any], str]:
    """Return a parser for some of the words ``choices``, or "all". It takes a list or a string with commas,
    and returns a string with commas.

    Words that match the regular expression ``also`` are taken too.
    ``elsewhere`` has words that belong to another command, each with the remedy to show in the error.
    """

    def read(value: Any, info: Any) -> str:
        if value == "":  # the empty selection
            return ""
        given = value if isinstance(value, list | tuple) else word(value, info).split(",")
        found = once(tuple(word(each, info).strip() for each in given), info)
        known = [*choices, *(each for each in found if re.fullmatch(also, each))]
        unknown = next((each for each in found if each not in known and found != ("all",)), None)
        if unknown is not None:
            expected = f"all, or some of {', '.join(choices)}"
            remedy = elsewhere.get(unknown, "")
            raise ArgumentError(info.field_name, expected=expected, got=repr(unknown), remedy=remedy)
        return ",".join(found)

    return read


def _words(value: Any, info: Any) -> tuple[str, ...]:
    return once(tuple(word(each, info) for each in listed(value)), info)


Integer = Annotated[int, BeforeValidator(_item)]
Real = Annotated[float, BeforeValidator(_item)]
Word = Annotated[str, PlainValidator(word)]
Words = Annotated[tuple[str, ...], PlainValidator(_words), Told(several=True)]
Folder = Annotated[Path, PlainValidator(lambda value, info: Path(word(value, info))), Told("FOLDER")]
Selection = Annotated[
    Ranges,
    PlainValidator(lambda value, info: Ranges.parse(value, info.field_name)),
    Told("RANGES"),
]
