"""Read plan files, which describe studies in TOML.

Paths are relative to the plan file, so that a plan and its texts can be moved together.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from howsmooth.errors import ArgumentError, similar_name
from howsmooth.study.execution_options import Execution
from howsmooth.study.options import renamed
from howsmooth.study.plans import Plan

__all__ = ["KEYS", "Study", "read_plan"]

_OF_PLAN, _OF_EXECUTION = ({field.name for field in fields(one)} for one in (Plan, Execution))
_PLACES = ("models", "texts", "images", "tokens", "embeddings")

KEYS = tuple(field.name for one in (Plan, Execution) for field in fields(one))
"""The allowed keys of a plan file."""


class Study(NamedTuple):
    """The contents of a plan file: the plan of what to measure, and the options for carrying it out."""

    plan: Plan
    execution: Execution


def read_plan(path: str | os.PathLike[str], **typed: Any) -> Study:
    """Read a TOML plan file; return the plan of what to measure and the options for carrying it out.

    The keys of the file are in :data:`KEYS`, of which only ``models`` is required; ``typed`` are fields that
    replace them. The default of ``out`` is a folder beside the file, named like the file with ``-out`` in
    place of the suffix. If the file cannot be read, a key is unknown, or a value is not allowed, an
    ArgumentError names the key, and the file unless the value was ``typed``.
    """
    path = Path(path)
    with renamed(lambda name: name if name in typed else f"{path.name}: {name}" if name else path.name):
        values = _parsed(path)
        for key, value in values.items():
            if key not in KEYS:
                got, remedy = "an unknown key", similar_name(key, KEYS)
                if isinstance(value, dict):
                    got, remedy = "a table", f"Write the keys in no table: leave out [{key}]."
                raise ArgumentError(
                    key, expected=f"one of the keys {', '.join(KEYS)}", got=got, remedy=remedy
                )
        if "models" not in values:
            raise ArgumentError("models", expected="the names of the models", got="a file without this key")
        values = {key: _beside(path, one) if key in _PLACES else one for key, one in values.items()} | typed
        plan = Plan(**{key: value for key, value in values.items() if key in _OF_PLAN})
        how = Execution(**{key: value for key, value in values.items() if key in _OF_EXECUTION})
        if "out" not in typed:
            how = replace(how, out=path.parent / (how.out if "out" in values else f"{path.stem}-out"))
        return Study(plan, how)


def _beside(path: Path, value: Any) -> Any:
    """Replace the name of an input by its path if a file of this name is in the folder of the plan file."""
    if isinstance(value, list):
        return [_beside(path, one) for one in value]
    if isinstance(value, dict):
        return value | {key: _beside(path, name) for key, name in value.items() if key == "name"}
    try:
        candidate = path.parent / value
        return str(candidate) if value.strip() and candidate.exists() else value
    except (OSError, TypeError, ValueError):
        # The value is not a string, or not a valid file name: leave it to the option's own check.
        return value


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows add a byte order mark
    except FileNotFoundError:
        raise ArgumentError("", expected="a plan file in TOML", got=f"no such file: {path}") from None
    except OSError as error:
        got = f"{path} ({error.strerror or type(error).__name__})"
    except UnicodeDecodeError:
        got = f"{path}, which is not written in UTF-8"
    except RecursionError:
        got = f"{path}, which is nested too deeply"
    except ValueError as error:
        # The path is invalid, the TOML has a syntax error, or a number has thousands of digits.
        got = f"{path} ({error})"
    remedy = 'Write it in TOML: lines such as lengths = "2:100:2".' if path.suffix == ".json" else ""
    raise ArgumentError("plan", expected="a plan file in TOML", got=got, remedy=remedy)
