"""Commands made of dataclasses of options: what is typed is what Python and a plan file give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from howsmooth.cli.typer_command import command
from howsmooth.errors import ArgumentError
from howsmooth.study.options import (
    HOW,
    Options,
    choice,
    flag,
    number,
    option,
    path,
    selection,
    several,
    size,
    some_of,
    token_counts,
    whole,
    words,
)
from howsmooth.study.ranges import Ranges


@dataclass(frozen=True)
class Work(Options):
    """Some work."""

    source: str = option(..., words(), "Where from.", positional=True)
    names: tuple[str, ...] = option((), several(words()), "Names.", flag="name")
    most_steps: int = option(7, whole(0, 9), "Steps.", panel=HOW)
    share: float = option(0.5, number(positive=True), "Share.")
    radius: float | str = option("auto", number(positive=True, among=("auto",)), "Radius.")
    layers: Ranges = option("all", selection(), "Layers.")
    lengths: tuple[int, ...] = option("2,4", token_counts(2), "Lengths.")
    kind: str = option("a", choice("a", "b"), "Kind.")
    fast: bool = option(False, flag(), "Fast.")
    items: str = option("", some_of("one", "two", "three", elsewhere={}), "Items.")
    memory: int | None = option(None, size(), "Memory.")
    out: Path = option("here", path(), "Folder.")


def typed(*line: str, **options: Any) -> list[Any]:
    """What a command gets of a line."""
    got: list[Any] = []

    @command("An example.", **options)
    def whole_plan(plan: Work, json: Annotated[bool, typer.Option("--json")] = False) -> int:
        got.extend([plan, json])
        return 0

    app = typer.Typer()
    app.command()(whole_plan)
    app(args=list(line), standalone_mode=False)
    return got


LINE = (
    "there --name x --name y --most-steps 0 --share 2 --radius 3 --layers 0,-1 --lengths 8,2:4:2 --kind b "
    "--fast --items one,two --memory 1kB --out far"
)


def test_a_line_gives_what_python_gives() -> None:
    plan, json = typed(*LINE.split())
    assert not json
    assert plan == Work(
        "there", ["x", "y"], 0, 2, 3.0, [0, "-1"], [2, 4, 8], "b", True, ["one", "two"], 1000, Path("far")
    )
    assert plan.lengths == (2, 4, 8)
    assert plan.described() | {"out": ""} == {
        "source": "there", "names": ["x", "y"], "most_steps": 0, "share": 2.0, "radius": 3.0,
        "layers": "0,-1", "lengths": [2, 4, 8], "kind": "b", "fast": True, "items": "one,two",
        "memory": 1000, "out": "",
    }  # fmt: skip


def test_what_is_left_out_has_its_default_and_a_command_may_have_another() -> None:
    assert typed("there", "--json") == [Work("there"), True]
    assert typed("there", out="far", most_steps=0)[0] == Work("there", most_steps=0, out=Path("far"))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("there --most-steps 10", "most-steps: expected a number from 0 to 9, got 10."),
        ("there --share nan", "share: expected a finite number > 0, got nan."),
        ("there --radius b", "radius: expected a finite number > 0, or auto, got 'b'."),
        ("there --lengths 1,2", "lengths: expected numbers of at least 2, got 1."),
        ("there --kind c", "kind: expected one of a, b, got 'c'."),
        ("there --name x --name x", "name: expected each only once, got 'x' twice."),
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
        ("share", "1"), ("share", 10**400), ("layers", [1.5]), ("kind", ["a"]), ("fast", 1), ("out", 3),
        ("memory", 0), ("items", [1]),
    ],
)  # fmt: skip
def test_python_and_plan_files_are_refused_what_is_of_another_type(field: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{field}: expected"):
        Work(**({"source": "there"} | {field: value}))  # type: ignore[arg-type]


def test_the_docstring_says_what_the_help_says() -> None:
    assert "most_steps\n    Steps." in (Work.__doc__ or "")
