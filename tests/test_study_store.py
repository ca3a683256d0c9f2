from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from howsmooth.errors import StoreError
from howsmooth.study.plan import Identity
from howsmooth.study.records import BOUND_COLUMNS, PUBLISHED_COLUMNS, SENSITIVITY_COLUMNS
from howsmooth.study.store import (
    COLUMNS,
    STORE_NAME,
    Bounding,
    Contents,
    Failure,
    Measurement,
    ModelRecord,
    PublishedValue,
    Sensitivity,
    SequenceRecord,
    Store,
    TextRecord,
)

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


def bounding(**changes: Any) -> Bounding:
    values: dict[str, Any] = {
        "model": "m", "text": "t", "scope": "attention", "layer": 0, "head": None, "n": 4, "sample": 0,
        "start": 8, "radius": 2.0, "name": "theorem_a", "side": "upper", "quantity": "Lip(f on B_R^n)",
        "value": 7.5, "log_value": 2.0149, "holds": True, "source": "Theorem A",
    }  # fmt: skip
    return Bounding(**(values | changes))


def published(**changes: Any) -> PublishedValue:
    values: dict[str, Any] = {
        "model": "m", "text": "t", "layer": 0, "n": 4, "sample": 0, "quantity": "corrected", "items": "",
        "lipschitz": 3.0, "lower": 2.9, "upper": 3.1, "settled": True, "steps": 9, "radius_mean": 1.0,
        "start": 8, "seed": 2**63 - 1, "map": "a map",
    }  # fmt: skip
    return PublishedValue(**(values | changes))


# What a text may hold: nothing of it may change, or end what stands around it.
HOSTILE = (
    " <script>alert(1)</script>\n",
    "</",
    "\u202e\u2028\0\x1b",
    "",
    "'; DROP TABLE runs; --",
    "x" * 10**6,
)


def sequence(tokens: tuple[str, ...] = HOSTILE[:4], **changes: Any) -> SequenceRecord:
    values: dict[str, Any] = {"model": "m", "text": "t", "n": 4, "sample": 0, "start": 8, "place": 40}
    return SequenceRecord(**(values | changes), tokens=tokens)


def sensitivity(**changes: Any) -> Sensitivity:
    values: dict[str, Any] = {
        "model": "m", "text": "t", "scope": "attention", "layer": 0, "head": None, "n": 4, "sample": 0,
        "input_energy": (0.5, 0.25, 0.25, 0.0), "output_energy": (1 / 3, 0.0, 2 / 3, 1e-300),
    }  # fmt: skip
    return Sensitivity(**(values | changes))


def contents_of(folder: Path) -> Contents:
    with Store.open(folder, write=False) as store:
        return store.contents()


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


def test_sensitivities_come_back_with_their_words_and_their_measurement(tmp_path: Path) -> None:
    store, run = opened(tmp_path)
    heads = [row(scope="head", head=head, converged=head == 1) for head in (0, 1)]
    shares = [sensitivity(scope="head", head=head, output_energy=(0.0,) * 4) for head in (0, 1)]
    long = sequence(tokens=HOSTILE, n=6, place=None)
    six = sensitivity(n=6, input_energy=(1.0,) + (0.0,) * 5, output_energy=(0.0,) * 6)
    with store:
        store.add([row()], run, sensitivities=[sensitivity()], sequences=[sequence()])
        store.add(
            heads, run, sensitivities=shares, sequences=[sequence(tokens=("kept", "is", "the", "first"))]
        )
        store.add([row(n=6, sample=0)], run, sensitivities=[six], sequences=[long])
    table = contents_of(tmp_path).sensitivities
    assert list(table.columns) == list(SENSITIVITY_COLUMNS)
    assert table["n"].tolist() == [4, 6, 4, 4]
    assert table["tokens"].tolist() == [list(HOSTILE[:4]), list(HOSTILE), *[list(HOSTILE[:4])] * 2]
    assert table["place"].isna().tolist() == [False, True, False, False]
    assert table["converged"].tolist() == [True, True, False, True]
    assert table["input_energy"][0] == [0.5, 0.25, 0.25, 0.0]
    assert table["output_energy"][0] == [0.3333333, 0.0, 0.6666667, 1e-300]
    assert table["output_energy"][2] == [0.0] * 4
    assert set(table["start"]) == {8}


def test_a_sensitivity_without_its_measurement_takes_the_batch_with_it(tmp_path: Path) -> None:
    store, run = opened(tmp_path)
    with store:
        with pytest.raises(sqlite3.IntegrityError):  # its words are missing
            store.add([row()], run, sensitivities=[sensitivity()])
        assert store.measurements().empty
        store.add([row()], run, sensitivities=[sensitivity()], sequences=[sequence()])
        with pytest.raises(sqlite3.IntegrityError):
            store.add([row(sample=1)], run, sensitivities=[sensitivity()], sequences=[sequence()])
        assert len(store.measurements()) == len(store.sensitivities()) == 1


def test_bounds_come_back_with_what_does_not_hold_and_what_overflows(tmp_path: Path) -> None:
    store, run = opened(tmp_path)
    refused = bounding(name="joint", value=None, log_value=None, holds=False, source="too dear")
    endless = bounding(name="theorem_3_5", value=float("inf"), log_value=1e4)
    below = bounding(name="theorem_3_7", side="lower", value=0.0, log_value=float("-inf"))
    both = bounding(name="theorem_3_7")
    with store:
        store.add_bounds([refused, endless, bounding(), below, both], run, worked=3.0)
        assert store.bounded("m", "t") == {("attention", 0, None, 4, 0)}
        assert store.bounded("m", "other") == frozenset()
        with pytest.raises(sqlite3.IntegrityError):
            store.add_bounds([bounding(n=5), bounding()], run)
        assert len(store.bounds()) == 5
    contents = contents_of(tmp_path)
    table = contents.bounds
    assert list(table.columns) == list(BOUND_COLUMNS)
    found = table.set_index(["name", "side"])
    assert found.loc[("theorem_3_5", "upper"), "value"] == float("inf")
    assert found.loc[("theorem_3_5", "upper"), "log_value"] == 1e4
    assert found.loc[("theorem_3_7", "lower"), "value"] == 0.0
    assert pd.isna(found.loc[("joint", "upper"), "value"])
    assert table["holds"].tolist() == [True] * 4 + [False]
    assert table["name"].iloc[-1] == "joint"
    assert contents.runs["worked"].tolist() == [3.0]


def test_published_values_come_back_as_they_went_in(tmp_path: Path) -> None:
    store, run = opened(tmp_path)
    rows = [
        published(),
        published(quantity="as published", items="output", lower=None, upper=None, settled=False),
    ]
    with store:
        store.add_published(rows, run)
        assert store.known_published("m", "t") == {
            (0, 4, 0, "corrected", ""),
            (0, 4, 0, "as published", "output"),
        }
        assert store.sequences("m", "t") == {(4, 0): 8}
        with pytest.raises(sqlite3.IntegrityError):
            store.add_published([published(n=5), published()], run)
    table = contents_of(tmp_path).published
    assert list(table.columns) == [*PUBLISHED_COLUMNS, "run"]
    assert table["quantity"].tolist() == ["corrected", "as published"]
    assert table["lower"].isna().tolist() == [False, True]
    assert table["settled"].tolist() == [True, False]
    assert table["seed"].tolist() == [2**63 - 1] * 2


def test_a_failure_is_over_when_that_which_failed_is_there_and_nothing_else(tmp_path: Path) -> None:
    store, run = opened(tmp_path)
    place: dict[str, Any] = {
        "model": "m", "text": "t", "scope": "attention", "layer": 0, "head": None, "n": 4, "sample": 0,
        "kind": "ModelError", "error": "No.", "detail": "",
    }  # fmt: skip
    with store:
        store.fail([Failure(**place, what=what) for what in ("measurement", "bounds", "published")], run)
        store.fail([Failure(**(place | {"n": 5}), what="published")], run)

        def left() -> list[str]:
            table = store.failures()
            return [str(what) for what in table[table["resolved"].isna()]["what"]]

        store.add([row()], run)
        assert left() == ["bounds", "published", "published"]
        store.add_bounds([bounding()], run)
        store.add_published([published()], run)
        assert left() == ["published"]
        store.add_published([published(n=5)], run)
        assert left() == []


@pytest.mark.parametrize("table", ["sequences", "sensitivities", "bounds", "published"])
def test_every_table_is_sealed(tmp_path: Path, table: str) -> None:
    store, run = opened(tmp_path)
    with store:
        store.add([row()], run, sensitivities=[sensitivity()], sequences=[sequence()])
        store.add_bounds([bounding()], run)
        store.add_published([published()], run)
    with sqlite3.connect(tmp_path / STORE_NAME) as connection:
        assert connection.execute(f"UPDATE {table} SET n = 9").rowcount == 1
    connection.close()
    with pytest.raises(StoreError, match=f"row 1 of {table} is not what was written"):
        Store.open(tmp_path)
