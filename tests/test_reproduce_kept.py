"""Finished units of work: whole or not at all, and refused when they are not as they were written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from howsmooth.errors import StoreError
from howsmooth.reproduce.kept import Kept

KEY = {"model": "small", "n": 4, "head": None}
OTHER = {**KEY, "n": 8}


def test_rows_come_back_with_their_key_in_the_order_asked_for(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "new" / "units")
    assert not kept.has(KEY)
    kept.add(OTHER, [{"value": 2.5}])
    kept.add(KEY, [{"value": 1.5, "log": float("inf")}, {"value": 0.1 + 0.2, "log": -1.0}])
    assert kept.has(KEY)
    assert kept.has(dict(reversed(KEY.items())))
    table = Kept(tmp_path / "new" / "units").table([KEY, OTHER])
    assert table["n"].tolist() == [4, 4, 8]
    assert table["value"].tolist() == [1.5, 0.1 + 0.2, 2.5]
    assert table["log"].tolist()[:2] == [float("inf"), -1.0]


def test_another_key_is_another_unit(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.add(KEY, [{"value": 1.0}])
    assert not kept.has(OTHER)
    with pytest.raises(StoreError, match=r"is missing.*Run the same command again"):
        kept.table([OTHER])


@pytest.mark.parametrize("damage", ["1.5", "small", "rows", "truncated", "empty"])
def test_damage_is_refused_with_what_to_do(tmp_path: Path, damage: str) -> None:
    kept = Kept(tmp_path)
    kept.add(KEY, [{"value": 1.5}])
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
        kept.table([KEY])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match=r"cannot be written.*run the same command again"):
            Kept(tmp_path).add(KEY, [{"value": 1.0}])
    finally:
        tmp_path.chmod(0o700)


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    kept = Kept(tmp_path)
    with pytest.raises(StoreError, match="No space left on device"):
        kept.add(KEY, [{"value": 1.0}])
    assert not kept.has(KEY)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_write_is_no_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Kept(tmp_path).add(KEY, [{"value": 1.0}])
    kept = Kept(tmp_path)
    assert not kept.has(KEY)
    kept.add(KEY, [{"value": 2.0}])
    assert kept.table([KEY])["value"].tolist() == [2.0]


def test_a_unit_is_plain_json(tmp_path: Path) -> None:
    Kept(tmp_path).add(KEY, [{"value": 1.0}])
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["key"] == KEY
