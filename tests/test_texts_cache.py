from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from howsmooth.texts import cache
from howsmooth.texts.python_docs import library_files, python_docs

from .test_texts import SENTENCE


class Work:
    """Counts how often it is done."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> tuple[str, str]:
        self.times += 1
        return f"text {self.times}", "source \N{GREEK SMALL LETTER ALPHA}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    chosen = tmp_path / "cache"
    monkeypatch.setenv("HOWSMOOTH_CACHE", str(chosen))
    return chosen


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.py"
    path.write_text("one")
    return path


def test_work_is_done_once_for_the_same_files(folder: Path, file: Path) -> None:
    work = Work()
    first = cache.kept("words", [file], work)
    assert cache.kept("words", [file], work) == first == ("text 1", "source \N{GREEK SMALL LETTER ALPHA}")
    assert work.times == 1
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # and nothing half-written


def _write_more_at_the_same_time(path: Path) -> None:
    before = path.stat()
    path.write_text("longer")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [_write_more_at_the_same_time, _touch])
def test_a_changed_file_is_read_again(folder: Path, file: Path, change: Callable[[Path], object]) -> None:
    work = Work()
    cache.kept("words", [file], work)
    change(file)
    assert cache.kept("words", [file], work)[0] == "text 2"


def test_another_file_is_another_text(folder: Path, file: Path, tmp_path: Path) -> None:
    work = Work()
    cache.kept("words", [file], work)
    (tmp_path / "b.py").write_text("two")
    assert cache.kept("words", [file, tmp_path / "b.py"], work)[0] == "text 2"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _change_a_word(path: Path) -> None:
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "first": "text 9"}))


def _no_object(path: Path) -> None:
    path.write_text("[1]")


@pytest.mark.parametrize("damage", [_cut, _change_a_word, _no_object])
def test_what_is_not_as_it_was_written_is_made_again(
    folder: Path, file: Path, damage: Callable[[Path], None]
) -> None:
    work = Work()
    cache.kept("words", [file], work)
    (path,) = folder.iterdir()
    damage(path)
    assert cache.kept("words", [file], work)[0] == "text 2"
    assert cache.kept("words", [file], work)[0] == "text 2"


def test_without_a_place_to_write_the_work_is_done(folder: Path, file: Path) -> None:
    folder.write_text("a file where the folder should be")
    work = Work()
    assert [cache.kept("words", [file], work)[0] for _ in range(2)] == ["text 1", "text 2"]


def test_a_missing_file_is_for_the_work_to_notice(folder: Path, tmp_path: Path) -> None:
    assert cache.kept("words", [tmp_path / "none"], Work())[0] == "text 1"
    assert not folder.exists()


def test_set_to_nothing_it_keeps_nothing(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("HOWSMOOTH_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    work = Work()
    assert [cache.kept("words", [file], work)[0] for _ in range(2)] == ["text 1", "text 2"]
    assert not (tmp_path / "home").exists()


@pytest.mark.skipif("sys.platform == 'win32'")
def test_it_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOWSMOOTH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "howsmooth"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_folder() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "howsmooth"


def test_python_docs_follows_its_sources(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "lib"
    root.mkdir()
    many = "".join(
        f"It is the name of number word{'x' * (i % 50)}{chr(97 + i % 26)} and {SENTENCE} " for i in range(900)
    )
    (root / "a.py").write_text(f'"""{many}"""')
    before, _ = python_docs(root)
    assert python_docs(root)[0] == before
    (root / "b.py").write_text('"""This is one of the sentences that came to it later on."""')
    assert len(library_files(root)) == 2
    assert "came to it later on" in python_docs(root)[0]
