"""Finished units of work: whole or not at all, and refused when they are not as they were written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from howsmooth.errors import StoreError
from howsmooth.paper.row_cache import Row, kept_rows

KEY = {"model": "small", "n": 4, "head": None}
OTHER = {**KEY, "n": 8}


def never() -> list[Row]:
    raise AssertionError("the unit is kept")


def one() -> list[Row]:
    return [{"value": 1.5}]


def test_rows_come_back_as_they_were_under_their_key(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "units"
    rows = [{"value": 1.5, "log": float("inf")}, {"value": 0.1 + 0.2, "log": -1.0, "note": None}]
    assert kept_rows(folder, KEY, lambda: rows) == rows
    assert kept_rows(folder, dict(reversed(KEY.items())), never) == rows
    assert kept_rows(folder, OTHER, list) == []


@pytest.mark.parametrize("damage", ["1.5", "small", "rows", "truncated", "empty"])
def test_damage_is_refused_with_what_to_do(tmp_path: Path, damage: str) -> None:
    kept_rows(tmp_path, KEY, one)
    (path,) = tmp_path.iterdir()
    words = path.read_text()
    changes = {
        "1.5": words.replace("1.5", "1.6"),
        "small": words.replace("small", "large"),
        "rows": words.replace('"rows"', '"lines"'),
        "truncated": words[: len(words) // 2],
        "empty": "",
    }
    assert changes[damage] != words
    path.write_text(changes[damage])
    with pytest.raises(StoreError, match=r"is damaged.*Delete it"):
        kept_rows(tmp_path, KEY, never)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match=r"cannot be written.*run the same command again"):
            kept_rows(tmp_path, KEY, one)
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_cannot_be_written_whole_is_no_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stopped(self: Path, target: Path) -> Path:
        raise error

    expected = StoreError if isinstance(error, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stopped)
        with pytest.raises(expected, match="No space left on device" if expected is StoreError else None):
            kept_rows(tmp_path, KEY, lambda: [{"value": 1.0}])
    assert kept_rows(tmp_path, KEY, one) == [{"value": 1.5}]
