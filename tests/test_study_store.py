from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from howsmooth.errors import StoreError
from howsmooth.study.plan import Identity
from howsmooth.study.store import COLUMNS, STORE_NAME, Measurement, ModelRecord, Store, TextRecord

MODEL = ModelRecord("m", "m", False, False, "Here.", 2, 4, None)
TEXT = TextRecord("t", "0" * 64, "There.", 100)
IDENTITY = Identity(seed=0, dtype="float32", rtol=1e-4, confidence=0.999, max_iterations=200)


def row(**changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "model": "m", "layer": 0, "head": None, "scope": "attention", "causal": False, "text": "t",
        "sample": 0, "n": 4, "radius_mean": 1.0, "radius_max": 2.0, "lipschitz": 3.0, "lower": 2.9,
        "upper": 3.1, "confidence": 0.999, "converged": True, "iterations": 9, "seconds": 0.1,
        "seed": 2**63 - 1, "dtype": "float32", "method": "closed form", "masking": "none",
        "site": "layer.0", "start": 8,
    }  # fmt: skip
    return Measurement(**(values | changes))


def opened(folder: Path) -> tuple[Store, int]:
    store = Store.open(folder)
    store.check(IDENTITY)
    store.add_study(IDENTITY)
    store.add_input(MODEL, TEXT, "f", tokenizer_source="Words.", tokens=30)
    return store, store.start_run("command", "cpu", {})


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    store, run = opened(tmp_path)
    rows = [row(), row(head=0, scope="head"), row(head=1, scope="head", converged=False, causal=True)]
    with store:
        store.add(rows, run)
        assert store.known("m", "t") == {
            ("attention", 0, None, 4, 0),
            ("head", 0, 0, 4, 0),
            ("head", 0, 1, 4, 0),
        }
        assert store.known("m", "other") == frozenset()
        table = store.measurements()
    assert set(COLUMNS) <= set(table.columns)
    assert table["seed"].tolist() == [2**63 - 1] * 3
    assert table["converged"].tolist() == [True, True, False]
    assert table["head"].isna().tolist() == [True, False, False]


@pytest.mark.parametrize("head", [None, 0])
def test_a_row_twice_is_impossible_and_takes_its_batch_with_it(tmp_path: Path, head: int | None) -> None:
    store, run = opened(tmp_path)
    with store:
        store.add([row(head=head)], run)
        with pytest.raises(sqlite3.IntegrityError):
            store.add([row(head=head, sample=1), row(head=head)], run)
        assert len(store.measurements()) == 1


def test_an_interrupted_batch_leaves_nothing(tmp_path: Path) -> None:
    store, run = opened(tmp_path)

    class Interrupting(list[Measurement]):
        def __iter__(self) -> Any:
            yield row()
            raise KeyboardInterrupt

    with store:
        with pytest.raises(KeyboardInterrupt):
            store.add(Interrupting(), run)
        store.add([row()], run)
        assert len(store.measurements()) == 1


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path: Path) -> None:
    store, run = opened(tmp_path)
    with store:
        with pytest.raises(StoreError, match="in use by another howsmooth process"):
            Store.open(tmp_path)
        store.add([row()], run)
        with Store.open(tmp_path, write=False) as reader:
            assert len(reader.measurements()) == 1
    Store.open(tmp_path).close()


def make_text(path: Path) -> None:
    path.write_text("this is no database, " * 100)


def make_other(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE holidays (day TEXT)")
    connection.close()


def make_newer(path: Path) -> None:
    Store.open(path.parent).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def make_damaged(path: Path) -> None:
    store, run = opened(path.parent)
    with store:
        store.add([row(sample=sample) for sample in range(2000)], run)
    content = bytearray(path.read_bytes())
    content[4096 * 5 : 4096 * 12] = os.urandom(4096 * 7)
    path.write_bytes(content)


def make_cut(path: Path) -> None:
    store, run = opened(path.parent)
    with store:
        store.add([row(sample=sample) for sample in range(2000)], run)
    os.truncate(path, path.stat().st_size // 2)


def make_folder(path: Path) -> None:
    path.mkdir()


BAD_FILES = {
    make_text: "not a database",
    make_other: "is not a store of howsmooth",
    make_newer: "schema version 99",
    make_damaged: "is damaged|malformed",
    make_cut: "is damaged|malformed",
    make_folder: "is not a file",
}


@pytest.mark.parametrize("make", BAD_FILES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("write", [True, False])
def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path, make: Any, write: bool) -> None:
    path = tmp_path / STORE_NAME
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreError, match=BAD_FILES[make]) as refusal:
        Store.open(tmp_path, write=write)
    assert str(path) in str(refusal.value)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_an_empty_file_is_a_store_that_was_not_begun(tmp_path: Path) -> None:
    (tmp_path / STORE_NAME).touch()
    with Store.open(tmp_path) as store:
        assert store.measurements().empty


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(StoreError, match="out: expected a folder, got the file"):
        Store.open(path)
    with pytest.raises(StoreError, match="out: expected a writable folder"):
        Store.open(path / "below")


def test_no_store_to_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="which has none"):
        Store.open(tmp_path, write=False)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="writable folder"):
        Store.open(tmp_path)


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="this system has no /proc")
def test_a_place_where_nobody_can_write() -> None:
    with pytest.raises(StoreError, match=r"out: expected a writable folder, got /proc/howsmooth"):
        Store.open(Path("/proc/howsmooth"))


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    store, run = opened(tmp_path)
    with store:
        store.add([row()], run)
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match=r"database or disk is full\. Make room on the disk"):
            store.add([row(sample=sample) for sample in range(1, 500)], run)
        store._connection.execute("PRAGMA max_page_count = 100000")
        assert len(store.measurements()) == 1
        store.add([row(sample=sample) for sample in range(1, 500)], run)
        assert len(store.measurements()) == 500
