"""Texts by name, path or standard input, read as they are, and refused in a sentence."""

from __future__ import annotations

import hashlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from howsmooth import texts
from howsmooth.errors import ArgumentError, TextError
from howsmooth.texts import TEXTS, load_text
from howsmooth.texts.loaders import _standard_input
from tests._shared import shared_data


def test_alice_is_the_whole_novel_and_nothing_else() -> None:
    text = load_text("alice")
    assert text.name == "alice"
    assert "Lewis Carroll, 1865" in text.source
    words = text.content.split()
    assert words[:6] == ["[Alice's", "Adventures", "in", "Wonderland", "by", "Lewis"]
    assert words[-4:] == ["the", "happy", "summer", "days."]
    numerals = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")
    assert re.findall(r"CHAPTER (\w+)", text.content) == list(numerals)
    assert text.content.isascii()
    assert not re.search(r"gutenberg|licen[cs]e|copyright|\be-?book|https?:", text.content, re.IGNORECASE)
    readme = (Path(texts.__file__).parent / "README.md").read_text("utf-8")
    assert text.digest in readme
    assert f"{len(text.content):,} characters" in readme
    # It is the text that others measure on.
    assert text.content == load_text(shared_data("alice", "carroll-alice.txt")).content


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_bytes("\ufeffÉtude.\r\nTwo.\rThree.\n".encode())
    text = load_text(str(path))
    assert (text.name, text.content) == ("story", "Étude.\nTwo.\nThree.\n")
    assert text.digest == hashlib.sha256("Étude.\nTwo.\nThree.\n".encode()).hexdigest()
    assert "story.txt" in text.source
    assert load_text(path) == text
    assert "Three" not in repr(text)


def test_a_hyphen_is_standard_input_which_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"One.\r\nTwo.\n")))
    _standard_input.cache_clear()
    text = load_text("-")
    assert (text.name, text.content) == ("stdin", "One.\nTwo.\n")
    assert load_text("-") == text
    _standard_input.cache_clear()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(TextError, match="text standard input is not UTF-8 text"):
        load_text("-")


def test_news_rows_join_title_and_description(tmp_path: Path) -> None:
    path = tmp_path / "test.csv"
    path.write_text('"3","A ""title""","First,\nand more."\n"1","B","Second."\n\n', encoding="utf-8")
    text = load_text(path)
    assert text.content == 'A "title" First,\nand more.\nB Second.\n'
    assert "2 news items" in text.source


def _write(content: bytes, name: str = "a.txt") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_write(b""), "'a' is empty: there is nothing"),
        (_write(b" \n\t"), "'a' has only white space: there is nothing"),
        (_write(b"a\0b"), "is not UTF-8 text"),
        (_write("Étude".encode("latin-1")), "is not UTF-8 text"),
        (_write(b"", "a.csv"), "'a' is empty: there is nothing"),
        (_write(b"1,a,b\n1,a\n", "a.csv"), r"line 2: expected three columns .*, got 2\. Give a plain"),
        (_write(b"1,a," + b"x" * 200_000, "a.csv"), r"line 1: not a readable csv"),
        (lambda folder: folder, r"is a folder\. Give the path of the file itself"),
        (
            lambda folder: folder / "none.txt",
            r"neither a known name nor a file\. Use one of alice, ag_news, the path",
        ),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(TextError, match=message):
        load_text(make(tmp_path))


@pytest.mark.parametrize("name", ["", "  "])
def test_no_name_is_an_argument_error(name: str) -> None:
    with pytest.raises(ArgumentError, match="text: expected a name or a path, got an empty string"):
        load_text(name)


def test_ag_news_comes_from_datasets_and_equals_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "test.csv").write_text("1,A,first\n2,B,second\n")
    datasets = Mock(__version__="4.0")
    datasets.load_dataset.return_value = {"text": ["A first", "B second"]}
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    assert load_text("ag_news").digest == load_text(tmp_path / "test.csv").digest
    datasets.load_dataset.assert_called_once_with("fancyzhx/ag_news", split="test")
    datasets.load_dataset.side_effect = ConnectionError("no route\nto host")
    with pytest.raises(TextError, match=r"could not load it \(no route to host\)\. Run .* or give the path"):
        load_text("ag_news")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TextError, match=r"not installed\. Run `pip install datasets`.* or give the path"):
        load_text("ag_news")
    assert TEXTS == ("alice", "ag_news")
    news = load_text(shared_data("ag_news", "test.csv"))
    assert news.content.count("\n") == 7600
    assert news.content.startswith("Fears for T N pension after talks Unions representing workers")
