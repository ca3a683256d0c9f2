"""Stores of earlier versions: read as they are, brought to the present one when written, wholly or not."""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from howsmooth.errors import StoreError
from howsmooth.study import publish as publishing
from howsmooth.study import schema
from howsmooth.study.publish import publish
from howsmooth.study.run import run
from howsmooth.study.schema import MEASUREMENTS
from howsmooth.study.store import STORE_NAME, Store
from tests._study import make_plan, make_tools, rows_of

# As howsmooth 0.1 made it; never to be changed.
VERSION_1 = """
CREATE TABLE studies (
    id INTEGER PRIMARY KEY CHECK (id = 1), created TEXT NOT NULL, seed INTEGER NOT NULL,
    dtype TEXT NOT NULL, rtol REAL NOT NULL, confidence REAL NOT NULL,
    max_iterations INTEGER NOT NULL, method TEXT NOT NULL, windows TEXT NOT NULL,
    special_tokens TEXT NOT NULL);
CREATE TABLE models (
    label TEXT PRIMARY KEY, name TEXT NOT NULL, random_init INTEGER NOT NULL, as_decoder INTEGER NOT NULL,
    source TEXT NOT NULL, layers INTEGER NOT NULL, heads INTEGER NOT NULL, max_length INTEGER);
CREATE TABLE texts (
    name TEXT PRIMARY KEY, digest TEXT NOT NULL, source TEXT NOT NULL, characters INTEGER NOT NULL);
CREATE TABLE inputs (
    model TEXT NOT NULL REFERENCES models (label), text TEXT NOT NULL REFERENCES texts (name),
    fingerprint TEXT NOT NULL, tokenizer_source TEXT NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (model, text));
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, started TEXT NOT NULL, finished TEXT, command TEXT NOT NULL,
    device TEXT NOT NULL, environment TEXT NOT NULL);
CREATE TABLE measurements (
    model TEXT NOT NULL, layer INTEGER NOT NULL, head INTEGER, scope TEXT NOT NULL,
    causal INTEGER NOT NULL, text TEXT NOT NULL, sample INTEGER NOT NULL, n INTEGER NOT NULL,
    radius_mean REAL NOT NULL, radius_max REAL NOT NULL, lipschitz REAL NOT NULL, lower REAL NOT NULL,
    upper REAL NOT NULL, confidence REAL NOT NULL, converged INTEGER NOT NULL,
    iterations INTEGER NOT NULL, seconds REAL NOT NULL, seed INTEGER NOT NULL, dtype TEXT NOT NULL,
    method TEXT NOT NULL, masking TEXT NOT NULL, site TEXT NOT NULL, start INTEGER NOT NULL,
    run INTEGER NOT NULL REFERENCES runs (id),
    FOREIGN KEY (model, text) REFERENCES inputs (model, text));
CREATE UNIQUE INDEX one_row_a_measurement ON measurements
    (model, text, scope, layer, ifnull(head, -1), n, sample);
"""

# As it was made from the store's second version on; never to be changed.
VERSION_2 = """
CREATE TABLE studies (
    id INTEGER PRIMARY KEY CHECK (id = 1), created TEXT NOT NULL, seed INTEGER NOT NULL,
    dtype TEXT NOT NULL, rtol REAL NOT NULL, confidence REAL NOT NULL,
    max_iterations INTEGER NOT NULL, method TEXT NOT NULL, windows TEXT NOT NULL,
    special_tokens TEXT NOT NULL, seal TEXT);
CREATE TABLE models (
    label TEXT PRIMARY KEY, name TEXT NOT NULL, random_init INTEGER NOT NULL, as_decoder INTEGER NOT NULL,
    source TEXT NOT NULL, layers INTEGER NOT NULL, heads INTEGER NOT NULL, max_length INTEGER,
    seal TEXT);
CREATE TABLE texts (
    name TEXT PRIMARY KEY, digest TEXT NOT NULL, source TEXT NOT NULL, characters INTEGER NOT NULL,
    seal TEXT);
CREATE TABLE inputs (
    model TEXT NOT NULL REFERENCES models (label), text TEXT NOT NULL REFERENCES texts (name),
    fingerprint TEXT NOT NULL, tokenizer_source TEXT NOT NULL, tokens INTEGER NOT NULL, seal TEXT,
    PRIMARY KEY (model, text));
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, started TEXT NOT NULL, finished TEXT, command TEXT NOT NULL,
    device TEXT NOT NULL, environment TEXT NOT NULL, token TEXT, worked REAL, seal TEXT);
CREATE TABLE measurements (
    model TEXT NOT NULL, layer INTEGER NOT NULL, head INTEGER, scope TEXT NOT NULL,
    causal INTEGER NOT NULL, text TEXT NOT NULL, sample INTEGER NOT NULL, n INTEGER NOT NULL,
    radius_mean REAL NOT NULL, radius_max REAL NOT NULL, lipschitz REAL NOT NULL, lower REAL NOT NULL,
    upper REAL NOT NULL, confidence REAL NOT NULL, converged INTEGER NOT NULL,
    iterations INTEGER NOT NULL, seconds REAL NOT NULL, seed INTEGER NOT NULL, dtype TEXT NOT NULL,
    method TEXT NOT NULL, masking TEXT NOT NULL, site TEXT NOT NULL, start INTEGER NOT NULL,
    run INTEGER NOT NULL REFERENCES runs (id), seal TEXT,
    FOREIGN KEY (model, text) REFERENCES inputs (model, text));
CREATE UNIQUE INDEX one_row_a_measurement ON measurements
    (model, text, scope, layer, ifnull(head, -1), n, sample);
CREATE TABLE failures (
    id INTEGER PRIMARY KEY, model TEXT NOT NULL, text TEXT, scope TEXT, layer INTEGER, head INTEGER,
    n INTEGER, sample INTEGER, happened TEXT NOT NULL, kind TEXT NOT NULL, error TEXT NOT NULL,
    detail TEXT NOT NULL, resolved TEXT, run INTEGER NOT NULL REFERENCES runs (id), seal TEXT);
"""
# What the third version added to it; never to be changed.
VERSION_3 = f"""{VERSION_2}
ALTER TABLE failures ADD COLUMN what TEXT NOT NULL DEFAULT 'measurement';
CREATE TABLE sequences (
        model TEXT NOT NULL, text TEXT NOT NULL, n INTEGER NOT NULL, sample INTEGER NOT NULL,
        start INTEGER NOT NULL, place INTEGER, tokens TEXT NOT NULL, seal TEXT,
        PRIMARY KEY (model, text, n, sample), FOREIGN KEY (model, text) REFERENCES inputs (model, text));
CREATE TABLE sensitivities (
                model TEXT NOT NULL, text TEXT NOT NULL, scope TEXT NOT NULL, layer INTEGER NOT NULL,
        head INTEGER, n INTEGER NOT NULL, sample INTEGER NOT NULL, input_energy TEXT NOT NULL,
        output_energy TEXT NOT NULL, run INTEGER NOT NULL REFERENCES runs (id), seal TEXT,
        FOREIGN KEY (model, text, n, sample) REFERENCES sequences (model, text, n, sample));
CREATE UNIQUE INDEX one_row_a_sensitivity ON sensitivities
        (model, text, scope, layer, ifnull(head, -1), n, sample);
CREATE TABLE bounds (
                model TEXT NOT NULL, text TEXT NOT NULL, scope TEXT NOT NULL, layer INTEGER NOT NULL,
        head INTEGER, n INTEGER NOT NULL, sample INTEGER NOT NULL, start INTEGER NOT NULL, radius REAL
        NOT NULL,
        name TEXT NOT NULL, side TEXT NOT NULL, quantity TEXT NOT NULL, value REAL, log_value REAL,
                holds INTEGER NOT NULL, source TEXT NOT NULL, run INTEGER NOT NULL REFERENCES runs (id),
        seal TEXT, FOREIGN KEY (model, text) REFERENCES inputs (model, text));
CREATE UNIQUE INDEX one_row_a_bound ON bounds
        (model, text, scope, layer, ifnull(head, -1), n, sample, name, side);
CREATE TABLE published (
        model TEXT NOT NULL, text TEXT NOT NULL, layer INTEGER NOT NULL, n INTEGER NOT NULL,
        sample INTEGER NOT NULL, quantity TEXT NOT NULL, items TEXT NOT NULL, lipschitz REAL NOT NULL,
        lower REAL, upper REAL, settled INTEGER NOT NULL, steps INTEGER NOT NULL, radius_mean REAL NOT NULL,
                start INTEGER NOT NULL, seed INTEGER NOT NULL, map TEXT NOT NULL, run INTEGER NOT NULL
        REFERENCES runs (id), seal TEXT, FOREIGN KEY (model, text) REFERENCES inputs (model, text));
CREATE UNIQUE INDEX one_row_a_published_value ON published
        (model, text, layer, n, sample, quantity, items);
"""
TABLES = ("studies", "models", "texts", "inputs", "runs", "measurements", "failures")
TABLES_3 = (*TABLES, "sequences", "sensitivities", "bounds", "published")


def as_version_3(folder: Path) -> pd.DataFrame:
    """Turn a store of today into one of version 3, row by row, sealed as then; returns its measurements."""
    return _rewritten(folder, VERSION_3, TABLES_3, 3)


def as_version_2(folder: Path) -> pd.DataFrame:
    """Turn a store of today into one of version 2, row by row, sealed as then; returns its measurements."""
    return _rewritten(folder, VERSION_2, TABLES, 2)


def as_version_1(folder: Path) -> pd.DataFrame:
    """Turn a store of today into one of version 1, row by row; returns its measurements."""
    return _rewritten(folder, VERSION_1, TABLES[:-1], 1)


def _rewritten(folder: Path, statements: str, tables: tuple[str, ...], version: int) -> pd.DataFrame:
    path = folder / STORE_NAME
    with Store.open(folder, write=False) as store:
        table = store.measurements()
    new = sqlite3.connect(path)
    old = sqlite3.connect(folder / "old.sqlite")
    old.executescript(statements)
    for name in tables:
        names = [row[1] for row in old.execute(f"PRAGMA table_info({name})")]
        columns = ", ".join(names)
        marks = ", ".join("?" * len(names))
        old.executemany(
            f"INSERT INTO {name} ({columns}) VALUES ({marks})", new.execute(f"SELECT {columns} FROM {name}")
        )
        if version >= 2:
            sealed = ", ".join(sorted(set(names) - {"id", "seal"}))
            old.create_function("seal", -1, seal)
            old.execute(f"UPDATE {name} SET seal = seal({sealed})")
    old.execute(f"PRAGMA application_id = {MEASUREMENTS.application_id}")
    old.execute(f"PRAGMA user_version = {version}")
    old.commit()
    old.close()
    new.close()
    (folder / "old.sqlite").replace(path)
    return table


def seal(*values: object) -> str:
    """The digest that version 2 gave to a row."""
    plain = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    return hashlib.blake2b(repr(plain).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@pytest.fixture(params=[1, 2, 3])
def earlier(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, pd.DataFrame, int]:
    run(make_plan(scopes=("attention", "head")), tmp_path, make_tools()[0])
    return tmp_path, (as_version_1, as_version_2, as_version_3)[request.param - 1](tmp_path), request.param


Earlier = tuple[Path, pd.DataFrame, int]


def version_of(folder: Path) -> int:
    connection = sqlite3.connect(folder / STORE_NAME)
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    connection.close()
    return int(found)


def test_a_store_of_an_earlier_version_is_read_and_left_as_it_is(earlier: Earlier) -> None:
    folder, table, version = earlier
    before = (folder / STORE_NAME).read_bytes()
    with Store.open(folder, write=False) as store:
        contents = store.contents()
    pd.testing.assert_frame_equal(contents.measurements, table)
    assert contents.failures.empty
    assert len(contents.runs) == 1
    for name in ("sensitivities", "bounds", "published"):
        assert getattr(contents, name).empty == (version < 3 or name == "published")
    assert contents.texts["kind"].tolist() == ["text"]
    assert (folder / STORE_NAME).read_bytes() == before
    assert version_of(folder) == version


def test_a_store_of_an_earlier_version_is_continued(
    earlier: Earlier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "draw_all", lambda *_: [])
    folder, table, version = earlier
    before = rows_of(folder)
    tools, _ = make_tools()
    outcome = run(make_plan(scopes=("attention", "head"), samples=6), folder, tools)
    assert (outcome.measured, outcome.kept) == (27, len(table))
    assert before < rows_of(folder)
    assert version_of(folder) == 4
    with Store.open(folder, write=False) as store:
        runs = store.runs()
    assert runs["token"].nunique() == 2
    assert runs["worked"].isna().tolist() == [version == 1, False]
    assert publish(folder, lambda *_: None).contents.measurements.shape[0] == len(table) + 27


def test_copies_of_a_store_get_the_same_tokens(earlier: Earlier, tmp_path: Path) -> None:
    folder, *_ = earlier
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / STORE_NAME).write_bytes((folder / STORE_NAME).read_bytes())
    tokens = []
    for one in (folder, copy):
        Store.open(one).close()
        with Store.open(one, write=False) as store:
            tokens.append(store.runs()["token"].tolist())
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("stop", [0, 4, 8, 11, 14, 99])
def test_a_migration_that_stops_halfway_changes_nothing(
    earlier: Earlier, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    folder, table, version = earlier
    before, content = rows_of(folder), (folder / STORE_NAME).read_bytes()
    statements = [one for earlier in (1, 2, 3)[version - 1 :] for one in MEASUREMENTS.migrations[earlier]]
    broken = {version: (*statements[:stop], "SELECT * FROM nothing_of_that_name")}
    halting = replace(MEASUREMENTS, migrations=broken)
    monkeypatch.setattr(Store, "_schema", halting)
    with pytest.raises(StoreError, match="no such table: nothing_of_that_name"):
        Store.open(folder)
    monkeypatch.undo()
    assert (folder / STORE_NAME).read_bytes() == content
    Store.open(folder).close()
    assert version_of(folder) == 4
    assert rows_of(folder) == before
    assert len(before) == len(table)


@pytest.mark.parametrize("write", [False, True])
def test_damage_to_an_earlier_store_is_not_sealed_as_if_it_were_whole(tmp_path: Path, write: bool) -> None:
    run(make_plan(), tmp_path, make_tools()[0])
    as_version_2(tmp_path)
    with sqlite3.connect(tmp_path / STORE_NAME) as connection:
        connection.execute("UPDATE measurements SET lipschitz = 7 WHERE rowid = 3")
    connection.close()
    before = (tmp_path / STORE_NAME).read_bytes()
    with pytest.raises(StoreError, match="row 3 of measurements is not what was written"):
        Store.open(tmp_path, write=write)
    with sqlite3.connect(tmp_path / STORE_NAME) as connection:
        connection.execute("ALTER TABLE runs RENAME COLUMN worked TO walked")
    connection.close()
    with pytest.raises(StoreError, match="its tables are not those that were made"):
        Store.open(tmp_path, write=write)
    (tmp_path / STORE_NAME).write_bytes(before)
    assert version_of(tmp_path) == 2


def test_a_migrated_store_has_the_tables_of_a_new_one(earlier: Earlier, tmp_path: Path) -> None:
    folder, *_ = earlier
    Store.open(folder).close()
    Store.open(folder).close()  # what a migration made is accepted as what it should be
    Store.open(tmp_path / "new").close()

    def columns(folder: Path) -> dict[str, set[tuple[str, str, int]]]:
        with sqlite3.connect(folder / STORE_NAME) as connection:
            names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master ORDER BY name")]
            found = {
                name: {(row[1], row[2], row[3]) for row in connection.execute(f"PRAGMA table_info('{name}')")}
                for name in names
            }
        connection.close()
        return found

    assert columns(folder) == columns(tmp_path / "new")


def test_a_changed_value_is_seen_where_sqlite_sees_nothing(tmp_path: Path) -> None:
    run(make_plan(), tmp_path, make_tools()[0])
    for table, column in (("measurements", "lipschitz"), ("runs", "command"), ("inputs", "tokens")):
        path = tmp_path / STORE_NAME
        whole = path.read_bytes()
        with sqlite3.connect(path) as connection:
            connection.execute(f"UPDATE {table} SET {column} = 7 WHERE rowid = 1")
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        connection.close()
        with pytest.raises(StoreError, match=f"is damaged .row 1 of {table} is not what was written"):
            Store.open(tmp_path)
        path.write_bytes(whole)
        Store.open(tmp_path).close()


def test_the_number_of_the_version_is_the_last_of_the_migrations() -> None:
    assert max(MEASUREMENTS.migrations) + 1 == MEASUREMENTS.version == schema.SCHEMA_VERSION
