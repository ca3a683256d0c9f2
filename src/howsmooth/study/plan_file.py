"""Plan files: a study written down in TOML, every key checked.

Paths in a plan file are relative to the file, so that a plan and its texts can be moved together.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from howsmooth.errors import ArgumentError
from howsmooth.memory import parse_bytes
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.ranges import Ranges

__all__ = ["KEYS", "MODEL_KEYS", "Study", "read_plan"]

KEYS = {
    "models": "names, or tables with the keys name, random_init, as_decoder, layers, heads and lengths",
    "texts": "names or paths",
    "lengths": "numbers of tokens, as with --lengths",
    "samples": "sequences a length",
    "scopes": "what is called attention",
    "layers": "as with --layers",
    "heads": "as with --heads, for the scope head",
    "rtol": "relative width of the interval to reach",
    "confidence": "probability that an interval holds the constant",
    "max_iterations": "Golub-Kahan steps at most",
    "seed": "from which all randomness derives",
    "bounds": "whether bounds are computed beside the constants",
    "as_published": "items of the published code, or all, to be measured beside the constants",
    "device": "such as cpu or cuda",
    "dtype": "float32 or float64",
    "threads": "CPU threads",
    "memory": "bytes that one measurement may use, such as 8GiB",
    "out": "folder of the store, tables, figures and report",
}
"""The keys of a plan file, and what they mean."""

MODEL_KEYS = ("name", "random_init", "as_decoder", "layers", "heads", "lengths")
"""The keys of a model that is written as a table; the last three stand in place of those of the plan."""

_RANGES = ("lengths", "layers", "heads")
_NUMBERS = {
    "samples": int,
    "max_iterations": int,
    "seed": int,
    "threads": int,
    "rtol": float,
    "confidence": float,
}
# Where an error names the option of the command line, or the thing itself.
_KEY_OF = {
    "scope": "scopes",
    "text": "texts",
    "model": "models",
    "max-iterations": "max_iterations",
    "as-published": "as_published",
}


@dataclass(frozen=True)
class Study:
    """What a plan file asks for.

    Attributes
    ----------
    plan
        What to measure.
    out
        The folder of the study.
    threads
        CPU threads, ``None`` for what PyTorch chooses.
    as_published
        Items of the published code, in the words of ``howsmooth measure --as-published``; empty for none.

    """

    plan: Plan
    out: Path
    threads: int | None
    as_published: str = ""


def read_plan(path: Path) -> Study:
    """Read a plan file.

    Parameters
    ----------
    path
        A TOML file; see :data:`KEYS`. Only ``models`` must be there. Without ``out``, the folder is beside
        the file and has its name, with ``-out`` for the ending.

    Raises
    ------
    ArgumentError
        If the file cannot be read, a key is not known, or a value is not possible; the key is named.

    """
    values = _parsed(path)
    unknown = next((key for key in values if key not in KEYS), None)
    if unknown is not None:
        raise _error(
            path, unknown, expected=f"one of the keys {', '.join(KEYS)}", got="a key of that name", near=KEYS
        )
    plain: dict[str, Any] = {
        key: _number(path, key, values[key], kind) for key, kind in _NUMBERS.items() if key in values
    }
    plain |= {key: _words(path, key, values[key]) for key in ("device", "dtype") if key in values}
    if "memory" in values:
        plain["memory"] = _bytes(path, values["memory"])
    if "bounds" in values:
        plain["bounds"] = _flag(path, "bounds", values["bounds"])
    as_published = ""
    if "as_published" in values:
        entries = _list(path, "as_published", values["as_published"])
        as_published = ",".join(_words(path, "as_published", entry) for entry in entries)
    threads = plain.pop("threads", None)
    if threads is not None and threads < 1:
        raise _error(path, "threads", expected="at least 1", got=str(threads))
    out = _words(path, "out", values["out"]) if "out" in values else f"{path.stem}-out"
    if "models" not in values:
        raise _error(path, "models", expected="at least one model", got="no such key")
    for key in ("texts", "scopes"):
        if key in values:
            plain[key] = tuple(_words(path, key, entry) for entry in _list(path, key, values[key]))
    if "texts" in plain:
        plain["texts"] = tuple(_beside(path, text) for text in plain["texts"])
    try:
        plain |= {key: Ranges.parse(_range(path, key, values[key]), key) for key in _RANGES if key in values}
        if "lengths" in plain:
            plain["lengths"] = plain["lengths"].values()
        models = tuple(_model(path, entry) for entry in _list(path, "models", values["models"]))
        plan = Plan(models=models, **plain)
        _check_published(as_published, plan)
        return Study(plan, path.parent / out, threads, as_published)
    except ArgumentError as error:
        remedy = "" if "--" in error.remedy else error.remedy
        key = _KEY_OF.get(error.argument, error.argument)
        if key.startswith(f"{path.name}: "):
            raise
        raise _error(path, key, expected=error.expected, got=error.got, remedy=remedy) from error


def _check_published(items: str, plan: Plan) -> None:
    if not items:
        return
    # It brings the models; a plan without it can be read without.
    from howsmooth.published import parse_items

    parse_items(items)
    if "attention" not in plan.scopes:
        raise ArgumentError(
            "as_published",
            expected="the scope attention beside it, that of the corrected quantity",
            got=", ".join(plan.scopes),
        )


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        got = f"{path} ({error.strerror or type(error).__name__})"
    except UnicodeDecodeError:
        got = f"{path}, which is not written in UTF-8"
    except RecursionError:
        got = f"{path}, which is nested too deeply"
    except ValueError as error:
        # Of a name that no file system takes, of the syntax, or of a number of thousands of digits.
        got = f"{path} ({error})"
    raise ArgumentError("plan", expected="a plan file in TOML", got=got)


def _error(
    path: Path,
    key: str,
    *,
    expected: str,
    got: str,
    remedy: str = "",
    near: Mapping[str, str] | Sequence[str] = (),
) -> ArgumentError:
    close = difflib.get_close_matches(key, list(near), 1)
    return ArgumentError(
        f"{path.name}: {key}", expected=expected, got=got, remedy=f"Is {close[0]} meant?" if close else remedy
    )


def _model(path: Path, entry: object) -> ModelSpec:
    if isinstance(entry, str):
        return ModelSpec(_beside(path, _words(path, "models", entry)))
    if not isinstance(entry, dict):
        raise _error(path, "models", expected="names or tables with a name", got=_shown(entry))
    unknown = next((key for key in entry if key not in MODEL_KEYS), None)
    if unknown is not None:
        wanted = f"one of the keys {', '.join(MODEL_KEYS)}"
        raise _error(path, f"models: {unknown}", expected=wanted, got="a key of that name")
    if "name" not in entry:
        raise _error(path, "models: name", expected="a name in every table", got="none")
    random_init = _flag(path, "models: random_init", entry.get("random_init", False))
    as_decoder = _flag(path, "models: as_decoder", entry.get("as_decoder", False))
    name = _words(path, "models: name", entry["name"])
    axes: dict[str, Any] = {
        key: Ranges.parse(_range(path, f"models: {key}", entry[key]), f"models: {key}")
        for key in _RANGES
        if key in entry
    }
    if "lengths" in axes:
        axes["lengths"] = axes["lengths"].values()
    return ModelSpec(
        name if random_init else _beside(path, name),
        random_init=random_init,
        as_decoder=as_decoder,
        **axes,
    )


def _flag(path: Path, key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _error(path, key, expected="true or false", got=_shown(value))
    return value


def _bytes(path: Path, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    try:
        return parse_bytes(_words(path, "memory", value))
    except ArgumentError as error:
        raise _error(path, "memory", expected=error.expected, got=error.got) from None


def _list(path: Path, key: str, value: object) -> list[object]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _error(path, key, expected=f"a list of {KEYS[key]}", got=_shown(value))
    return value


def _words(path: Path, key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _error(path, key, expected="words between quotes", got=_shown(value))
    return value


def _number(path: Path, key: str, value: object, kind: type[int] | type[float]) -> Any:
    # true is an integer to Python.
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        wanted = "a whole number" if kind is int else "a number"
        raise _error(path, key, expected=wanted, got=_shown(value))
    try:
        return kind(value)
    except OverflowError:
        raise _error(path, key, expected="a finite number", got=_shown(value)) from None


def _range(path: Path, key: str, value: object) -> str:
    """Bring a number, words, or a list of both to the grammar of ranges."""
    parts = value if isinstance(value, list) and value else [value]
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise _error(
                path, key, expected='a number, words such as "2:100:2", or a list', got=_shown(value)
            )
    return ",".join(str(part) for part in parts)


def _beside(path: Path, name: str) -> str:
    """Take a name as a path beside the plan if there is something of that name."""
    try:
        candidate = path.parent / name
        return str(candidate) if candidate.exists() else name
    except OSError:
        return name


def _shown(value: object) -> str:
    written = repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."
