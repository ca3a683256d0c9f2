"""Load a text by its name or path, and record its origin."""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import os
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from howsmooth.errors import ArgumentError, TextError

__all__ = ["TEXTS", "Text", "load_text"]

#: The names of known texts; every other string is a path.
TEXTS = ("alice", "ag_news")


@dataclass(frozen=True)
class Text:
    """A text on which models are measured, with its origin and a hash of its content.

    Parameters
    ----------
    name
        Short name of the text; for a file, the file's name without suffix.
    content
        The characters of the text.
    source
        A phrase with a full stop that says where the text comes from, and in which version.
    special_tokens
        Whether a model is to read the text with the special tokens of its tokenizer.

    Attributes
    ----------
    digest : str
        SHA-256 of the content in UTF-8, hexadecimal.

    """

    name: str
    content: str = field(repr=False)
    source: str
    special_tokens: bool = False
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        if not self.content.strip():
            blank = "has only white space" if self.content else "is empty"
            raise TextError(f"text {self.name!r} {blank}: there is nothing to measure on. Give another file.")
        object.__setattr__(self, "digest", hashlib.sha256(self.content.encode("utf-8")).hexdigest())


def load_text(name: str | os.PathLike[str]) -> Text:
    """Load a text by its name or its path.

    Parameters
    ----------
    name
        ``"alice"`` is *Alice's Adventures in Wonderland*, a file of this package. ``"ag_news"`` is the test
        split of AG_NEWS, loaded with the package datasets. ``"-"`` is standard input, which is read once
        and kept. Every other string is the path of a text file
        (UTF-8), or of a ``.csv`` file in the format of AG_NEWS (label, title, description; no header). If a
        file is called ``alice``, write ``./alice`` to load it.

    Returns
    -------
    Text
        The content with its digest and its origin.

    Raises
    ------
    ArgumentError
        If `name` is empty.
    TextError
        If the file cannot be found or read, is empty, or is not UTF-8 text.

    """
    if not os.fspath(name).strip():
        raise ArgumentError("text", expected="a name or a path", got="an empty string", remedy=_choices())
    if name == "-":
        return _standard_input()
    if name == "alice":
        return _alice()
    if name == "ag_news":
        return _ag_news()
    return _from_path(Path(name).expanduser())


def _choices() -> str:
    return f"Use one of {', '.join(TEXTS)}, the path of a .txt or .csv file, or - for standard input."


def _alice() -> Text:
    content = Path(__file__).with_name("alice.txt").read_text("ascii")
    source = "Alice's Adventures in Wonderland (Lewis Carroll, 1865), as it ships with howsmooth."
    return Text("alice", content, source)


def _ag_news() -> Text:
    remedy = (
        "Run `pip install datasets` with a network connection, or give the path of AG_NEWS's test.csv "
        "(label, title, description) as the text."
    )
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise TextError(
            f"text 'ag_news' is read through the package datasets, which is not installed. {remedy}"
        ) from None
    try:
        rows: list[str] = list(datasets.load_dataset("fancyzhx/ag_news", split="test")["text"])
    except Exception as error:  # the loader's network and cache errors have no common base
        reason = " ".join(str(error).split())[:200]
        raise TextError(
            f"text 'ag_news': the package datasets could not load it ({reason}). {remedy}"
        ) from error
    source = f"AG_NEWS, test split, {len(rows)} items, through datasets {datasets.__version__}."
    return Text("ag_news", "\n".join(rows) + "\n", source)


@cache
def _standard_input() -> Text:
    content = _decoded(sys.stdin.buffer.read(), "standard input")
    return Text("stdin", content, "standard input.")


def _from_path(path: Path) -> Text:
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except OSError as error:  # such as a name that is too long
        reason = error.strerror or type(error).__name__
        raise TextError(f"text {_short(str(path))} cannot be read: {reason}. {_choices()}") from None
    except ValueError:
        raise TextError(f"text {_short(str(path))} is not a valid file name. {_choices()}") from None
    if path.is_dir():
        raise TextError(f"text {str(path)!r} is a folder. Give the path of the file itself.")
    if not path.exists():
        raise TextError(f"text {str(path)!r} is neither a known name nor a file. {_choices()}")
    content = _read(path)
    if path.suffix.lower() == ".csv":
        rows = _news_rows(path, content)
        items = "".join(f"{row}\n" for row in rows)
        return Text(path.stem, items, f"{len(rows)} news items of the local file {path.name}.")
    return Text(path.stem, content, f"the local file {path.name}.")


def _short(words: str) -> str:
    return repr(words if len(words) <= 80 else f"{words[:77]}...")


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TextError(f"text {str(path)!r} cannot be read: {reason}. Give a readable file.") from None
    return _decoded(raw, repr(str(path)))


def _decoded(raw: bytes, where: str) -> str:
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        content = "\0"  # reported below, like a file that contains NUL
    if "\0" in content:
        raise TextError(f"text {where} is not UTF-8 text (binary, or another encoding). Convert it to UTF-8.")
    return content.replace("\r\n", "\n").replace("\r", "\n")


def _news_rows(path: Path, content: str) -> list[str]:
    """Return the articles of an AG_NEWS file, each with its title and description joined by a space.

    The usual loaders of AG_NEWS join them in the same way.
    """
    rows: list[str] = []
    reader = csv.reader(io.StringIO(content, newline=""), skipinitialspace=True)
    try:
        for row in reader:
            if row and len(row) != 3:
                raise TextError(
                    f"text {str(path)!r}, line {reader.line_num}: expected three columns (label, title, "
                    f"description) as in AG_NEWS, got {len(row)}. Give a plain .txt file instead."
                )
            if row:
                rows.append(f"{row[1]} {row[2]}")
    except csv.Error as error:
        raise TextError(
            f"text {str(path)!r}, line {reader.line_num}: not a readable csv ({error}). "
            "Give a plain .txt file instead."
        ) from None
    return rows
