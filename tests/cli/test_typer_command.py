"""Commands made of dataclasses of options: what is typed is what Python and a plan file give."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import pytest
import typer
from pydantic import Field, PlainValidator

from howsmooth.cli.typer_command import command
from howsmooth.errors import ArgumentError
from howsmooth.study.options import (
    HOW,
    Integer,
    Real,
    Selection,
    Told,
    Word,
    Words,
    described,
    options,
    some_of,
    token_counts,
)
from howsmooth.study.plans import Memory
from howsmooth.study.ranges import ALL


@options
class Work:
    """Some work."""

    source: Annotated[Word, Told(positional=True), "Where from."]
    names: Annotated[Words, Told(flag="name", several=True), "Names."] = ()
    most_steps: Annotated[Integer, Field(ge=0, le=9), HOW, "Steps."] = 7
    share: Annotated[Annotated[Real, Field(gt=0, allow_inf_nan=False)] | None, "Share."] = 0.5
    layers: Annotated[Selection, "Layers."] = ALL
    lengths: Annotated[tuple[int, ...], PlainValidator(token_counts(2)), "Lengths."] = (2, 4)
    kind: Annotated[Literal["a", "bee"], Told(elsewhere=(("sea", "It is wet."),)), "Kind."] = "a"
    fast: Annotated[bool, "Fast."] = False
    items: Annotated[str, PlainValidator(some_of("one", "two")), "Items."] = ""
    memory: Memory = None


@options
class Shown:
    """How it is shown."""

    json: Annotated[bool, "As JSON."] = False


def typed(*line: str) -> list[Any]:
    """What a command gets of a line."""
    got: list[Any] = []

    @command("An example.")
    def whole_plan(plan: Work, shown: Shown) -> int:
        got.extend([plan, shown.json])
        return 0

    app = typer.Typer()
    app.command()(whole_plan)
    app(args=list(line), standalone_mode=False)
    return got


LINE = (
    "there --name x --name y --most-steps 0 --share 2 --layers 0,-1 --lengths 8,2:4:2 --kind bee --fast "
    "--items one,two --memory 1kB"
)


def test_a_line_gives_what_python_gives() -> None:
    plan, json = typed(*LINE.split())
    assert not json
    given: list[Any] = ["there", ["x", "y"], np.int64(0), 2, [0, "-1"], [2, 4, 8], "bee", True]
    given += [["one", "two"], 1000]
    assert plan == Work(*given)
    assert (plan.lengths, type(plan.most_steps)) == ((2, 4, 8), int)
    assert described(plan) == {
        "source": "there", "names": ["x", "y"], "most_steps": 0, "share": 2.0, "layers": "0,-1",
        "lengths": [2, 4, 8], "kind": "bee", "fast": True, "items": "one,two", "memory": 1000,
    }  # fmt: skip


def test_what_is_left_out_has_its_default() -> None:
    assert typed("there", "--json") == [Work("there"), True]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("there --most-steps 10", "most-steps: expected a number of at most 9, got 10."),
        ("there --share nan", "share: expected a finite number > 0, got nan."),
        ("there --lengths 1,2", "lengths: expected numbers of at least 2, got 1."),
        ("there --layers x", "layers: expected numbers and start:stop:step ranges"),
        ("there --kind be", "kind: expected one of a, bee, got 'be'. Is bee meant?"),
        ("there --kind sea", "kind: expected one of a, bee, got 'sea'. It is wet."),
        ("there --name x --name x", "name: expected each only once, got 'x' twice."),
        ("there --items one,six", "items: expected all, or some of one, two, got 'six'."),
        ("there --memory much", "memory: expected a number of bytes"),
    ],
)
def test_a_refusal_names_the_option_as_it_is_typed(line: str, sentence: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        typed(*line.split())
    assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", None), ("source", 3), ("names", [1]), ("most_steps", True), ("most_steps", 1.0),
        ("share", "1"), ("share", 10**400), ("layers", [1.5]), ("kind", ["a"]), ("kind", "\udce9"),
        ("fast", 1), ("memory", 0), ("memory", True), ("items", [1]), ("other", 1),
    ],
)  # fmt: skip
def test_python_and_plan_files_are_refused_what_is_of_another_type(field: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{field}: expected"):
        Work(**({"source": "there"} | {field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "size"),
    [("1000", 1000), ("8GiB", 8 << 30), ("500 MB", 500_000_000), ("1.5kib", 1536), (" 2 TB ", 2 * 10**12)]
    + [(words, None) for words in ("", "8 Gi", "-1GB", "0", "eight", "1e9", "8GiB and more")],
)
def test_bytes_are_written_as_people_write_them(words: str, size: int | None) -> None:
    if size is not None:
        assert Work("there", memory=words).memory == size  # type: ignore[arg-type]
        return
    with pytest.raises(ArgumentError, match="memory: expected a number of "):
        Work("there", memory=words)  # type: ignore[arg-type]


def test_the_docstring_says_what_the_help_says() -> None:
    assert "most_steps\n    Steps." in (Work.__doc__ or "")
