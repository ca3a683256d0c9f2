"""The store: every kind of row goes in and comes back, once; and what is no store, or damaged, is said."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pandas as pd
import pytest

import howsmooth as hs
from howsmooth.cli import main
from howsmooth.errors import StoreError
from howsmooth.study.records import (
    KEY_COLUMNS,
    KINDS,
    Bounding,
    Failure,
    Measurement,
    PublishedValue,
    Row,
    SequenceRecord,
)
from howsmooth.study.store import STORE_NAME, Store
from howsmooth.study.store_file import _check_seals
from tests._study import contents_of

# What a text may hold: nothing of it may change, or end what stands around it.
HOSTILE = (
    " <script>alert(1)</script>\n",
    "</",
    "\u202e\u2028\0\x1b",
    "",
    "'; DROP TABLE runs; --",
    "x" * 10**6,
)
FLOATS = (0.5, float("inf"), float("-inf"), 5e-324, 1.0, -(2.0**80), 1 / 3, 0.0)
NAMES = (*HOSTILE[:5], "Größe 漢字 🙂", "None", "0")
CHOICES: dict[Any, tuple[Any, ...]] = {
    int: (0, 1, -1, 2**63 - 1, -(2**63), 2**53 + 1, 7, 8),
    float: FLOATS,
    bool: (True, False),
    str: NAMES,
    tuple[str, ...]: ((), NAMES, ("a",)),
    tuple[float, ...]: ((), FLOATS, (0.5,)),
}
PLAIN = {
    int: 3, float: 0.5, bool: True, str: "words", tuple[str, ...]: ("a",), tuple[float, ...]: (0.5,),
}  # fmt: skip
OTHER = {
    int: 5, float: 2.5, bool: False, str: "other", tuple[str, ...]: (), tuple[float, ...]: (0.1, 0.2),
}  # fmt: skip


def type_of(kind: type[Row], name: str) -> tuple[Any, bool]:
    """The type of a field, and whether it may be ``None``."""
    hint = get_type_hints(kind)[name]
    return (get_args(hint)[0], True) if type(None) in get_args(hint) else (hint, False)


def hostile(kind: type[Row], place: int) -> Any:
    """One of eight rows with different keys and the oddest values, some of them missing."""
    values: dict[str, Any] = {}
    for shift, name in enumerate(kind.columns()):
        one, nullable = type_of(kind, name)
        choices = CHOICES[one]
        missing = nullable and (place + shift) % 3 == 0
        values[name] = None if missing else choices[(place + shift) % len(choices)]
    return kind(**values)


PLACE = {
    "model": "m", "text": "t", "scope": "attention", "layer": 0, "head": None, "n": 4, "sample": 0,
    "start": 8, "what": "measurements",
}  # fmt: skip


def made(kind: type[Row], **changes: Any) -> Any:
    """A row at one place, without all that it may be without but for the changes."""
    types = {name: type_of(kind, name) for name in kind.columns()}
    values = {name: None if nullable else PLAIN[one] for name, (one, nullable) in types.items()}
    return kind(**(values | {name: PLACE[name] for name in types if name in PLACE} | changes))


row, bounding, published, failure = (
    partial(made, kind) for kind in (Measurement, Bounding, PublishedValue, Failure)
)


def sequence(tokens: tuple[str, ...] = HOSTILE[:4], **changes: Any) -> SequenceRecord:
    return made(SequenceRecord, **({"place": 40} | changes), tokens=tokens)


def energies(output: tuple[float, ...] = (1 / 3, 0.0, 2 / 3, 1e-300)) -> dict[str, Any]:
    return {"input_energy": (0.5, 0.25, 0.25, 0.0), "output_energy": output}


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path) as store:
        yield store


# ---- every kind of row


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.table)
def test_every_field_of_every_kind_goes_in_and_comes_back(tmp_path: Path, kind: type[Row]) -> None:
    given = [hostile(kind, place) for place in range(8)]
    with Store.open(tmp_path) as store:
        store.add(given, 7)
    with Store.open(tmp_path, write=False) as store:
        assert store.rows(kind) == [(one, 7) for one in given]
        table = store.table(kind)
        assert list(table.columns) == [*kind.columns(), "run"]
        for place, (one, _) in enumerate(store.rows(kind)):
            for name in kind.columns():
                value, wanted, there = getattr(one, name), getattr(given[place], name), table[name][place]
                assert type(value) is type(wanted)
                same = there == (list(wanted) if isinstance(wanted, tuple) else wanted)
                assert pd.isna(there) if wanted is None else same


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.table)
def test_under_a_second_key_a_row_is_refused_stays_or_replaces(store: Store, kind: type[Row]) -> None:
    first = made(kind)
    rest = {n: OTHER[type_of(kind, n)[0]] for n in kind.columns() if n not in kind.key}
    again = replace(first, **rest)
    beside = [replace(first, **{name: OTHER[type_of(kind, name)[0]]}) for name in kind.key]
    store.add([first, *beside], 1)  # all of them differ in one column of the key
    if kind.again == "refuse":
        third = replace(first, **{name: PLAIN[type_of(kind, name)[0]] for name in kind.key})
        other = replace(third, **{kind.key[0]: _third(kind)})
        with pytest.raises(sqlite3.IntegrityError):
            store.add([other, again], 2)
        assert len(store.rows(kind)) == 1 + len(beside)  # it took its batch with it
    else:
        store.add([again], 2)
        expected = (again, 2) if kind.again == "replace" else (first, 1)
        assert expected in store.rows(kind)
        assert len(store.rows(kind)) == 1 + len(beside)


def _third(kind: type[Row]) -> Any:
    return {int: 99, str: "third", float: 99.0}[type_of(kind, kind.key[0])[0]]


def test_every_column_of_every_table_is_sealed(store: Store) -> None:
    # A failure elsewhere: a row in its place would end it.
    store.add([made(kind) for kind in KINDS if kind is not Failure] + [failure(model="other")], 1)
    connection = store._connection
    for kind in KINDS:
        for name in (*kind.columns(), "run", "seal"):
            connection.execute("BEGIN")
            connection.execute(f"UPDATE {kind.table} SET {name} = 'changed'")
            with pytest.raises(StoreError, match=f"row 1 of {kind.table} was changed after it was written"):
                _check_seals(connection, store.path)
            connection.execute("ROLLBACK")
    _check_seals(connection, store.path)


# ---- writing


def test_a_transaction_holds_all_or_nothing(store: Store) -> None:
    store.add([row(n=9)], 1)

    def counts(stop: type[BaseException] | None = None) -> tuple[int, int]:
        with contextlib.suppress(KeyboardInterrupt), store.transaction():
            store.add([row()], 1)
            store.add([bounding()], 1)
            if stop:
                raise stop
        return store.count(Measurement), store.count(Bounding)

    assert counts(KeyboardInterrupt) == (1, 0)
    assert counts() == (2, 1)


def test_keys_are_those_of_the_rows_asked_for(store: Store) -> None:
    heads = [row(), row(head=0, scope="head"), row(head=1, scope="head"), row(model="other", n=5)]
    store.add([*heads, published(model="other", n=6, start=30)], 1)
    assert store.keys(Measurement, KEY_COLUMNS, model="m", text="t") == {
        ("attention", 0, None, 4, 0), ("head", 0, 0, 4, 0), ("head", 0, 1, 4, 0),
    }  # fmt: skip
    assert store.keys(Measurement, ("model", "n"), head=None) == {("m", 4), ("other", 5)}
    assert store.keys(Measurement, KEY_COLUMNS, model="none") == frozenset()
    # Wherever a sequence was used, it is taken.
    assert store.sequences("m", "t") == {(4, 0): 8}
    assert store.sequences("other", "t") == {(5, 0): 8, (6, 0): 30}


def test_each_kind_of_work_has_an_identity_of_its_own(store: Store) -> None:
    measure = {"seed": 0, "output": None, "rtol": 2.0}
    store.check("measure", measure)  # nothing was begun
    store.begin("measure", measure)
    store.begin("figure", {"seed": 5})
    store.begin("measure", {"seed": 9})  # the first one stays
    assert store.identity("measure") == measure
    assert (store.identity("figure"), store.identity("other")) == ({"seed": 5}, {})
    store.check("measure", measure)
    for name, value, made, remedy in (
        ("seed", 1, "with --seed 0, not 1", ", or repeat --seed 0"),
        ("output", "logits", "with --output its default, not logits", ", or leave --output out"),
        ("rtol", None, "with --rtol 2, not its default", ", or repeat --rtol 2"),
    ):
        changed = {key: one for key, one in (measure | {name: value}).items() if one is not None}
        with pytest.raises(StoreError) as refusal:
            store.check("measure", changed)
        said = f"{store.path} belongs to another study: it was made {made}. Choose another --out{remedy}."
        assert str(refusal.value) == said


def test_a_failure_is_over_when_that_which_failed_is_there_and_nothing_else(store: Store) -> None:
    kinds = ("measurements", "bounds", "published")
    store.add([failure(what=what) for what in kinds], 1)
    store.add([failure(n=5, what="published"), failure(model="other")], 1)
    # Those that reach further, up to a model that could not be loaded.
    store.add([failure(sample=None), failure(text=None, scope=None, layer=None, n=None, sample=None)], 1)

    def left() -> list[tuple[str, str, int | None, int | None]]:
        return [(one.what, one.model, one.n, one.sample) for one, _ in store.rows(Failure)]

    store.add([row(n=5, layer=1, scope="head", head=0, text="another")], 1)
    assert len(left()) == 6  # of the model alone
    store.add([row()], 1)
    rest = [("bounds", "m", 4, 0), ("published", "m", 4, 0), ("published", "m", 5, 0)]
    assert left() == [*rest, ("measurements", "other", 4, 0)]
    store.add([bounding(), published()], 1)
    assert left() == [("published", "m", 5, 0), ("measurements", "other", 4, 0)]
    store.add([failure(n=5, what="published", error="Again.", happened="2027")], 2)
    assert [(one.error, run) for one, run in store.rows(Failure)] == [("words", 1), ("Again.", 2)]


# ---- tables of all that there is


def test_sensitivities_come_with_their_words_and_their_measurement(store: Store, tmp_path: Path) -> None:
    zeros = energies((0.0,) * 4)
    heads = [row(scope="head", head=head, converged=head == 1, **zeros) for head in (0, 1)]
    store.add([row(**energies()), row(sample=1), sequence()], 1)
    store.add([*heads, sequence(tokens=("kept", "is", "the", "first"))], 1)
    six = row(n=6, input_energy=(1.0,) + (0.0,) * 5, output_energy=(0.0,) * 6)
    store.add([six, sequence(tokens=HOSTILE, n=6, place=None)], 1)
    table = contents_of(tmp_path).sensitivities
    assert set(table.columns) >= {*Measurement.columns(), *SequenceRecord.columns()}
    assert table["n"].tolist() == [4, 6, 4, 4]
    assert table["tokens"].tolist() == [list(HOSTILE[:4]), list(HOSTILE), *[list(HOSTILE[:4])] * 2]
    assert table["place"].isna().tolist() == [False, True, False, False]
    assert table["converged"].tolist() == [True, True, False, True]
    assert table["output_energy"][0] == [1 / 3, 0.0, 2 / 3, 1e-300]


def test_contents_are_in_order_and_say_what_is_missing(store: Store, tmp_path: Path) -> None:
    refused = bounding(name="joint", side="upper", holds=False, source="too dear")
    endless, below, *finite = (
        bounding(name=name, side=side, value=value, log_value=log_value)
        for name, side, value, log_value in (
            ("theorem_3_5", "upper", float("inf"), 1e4),
            ("theorem_3_7", "lower", 0.0, float("-inf")),
            ("ball_upper_bound", "upper", 7.5, 2.0149),
            ("theorem_3_7", "upper", 7.5, 2.0149),
        )
    )
    store.add([refused, endless, finite[0], below, finite[1]], 1)
    store.add([row(n=n) for n in (8, 4)] + [row(head=1, scope="head")], 1)
    right = published(quantity="corrected", items="", lower=2.9, upper=3.1)
    store.add([right, published(quantity="as published", items="output", settled=False)], 1)
    store.begin("measure", {"seed": 0})
    contents = contents_of(tmp_path)
    assert set(contents.bounds.columns) == {*Bounding.columns(), "run"}
    order = ["theorem_3_7", "ball_upper_bound", "theorem_3_7", "theorem_3_5", "joint"]
    assert contents.bounds["name"].tolist() == order
    assert contents.bounds["log_value"].isna().tolist() == [False] * 4 + [True]
    assert contents.measurements["n"].tolist() == [4, 8, 4]
    assert contents.measurements["head"].isna().tolist() == [True, True, False]
    assert list(contents.published.columns) == [*PublishedValue.columns(), "run"]
    assert contents.published["lower"].isna().tolist() == [False, True]
    assert set(contents.study) == {"created", "seed"}


# ---- the file


def changed(path: Path, command: str) -> None:
    """Let another program change a store with a row."""
    with Store.open(path.parent) as store:
        store.add([row()], 1)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(command)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda path: path.write_text("this is no database, " * 100), "not a database"),
    "folder": (Path.mkdir, "is not a file"),
    "other": (
        lambda path: sqlite3.connect(path).execute("CREATE TABLE a (b)"),
        "is not a store of howsmooth",
    ),
    "row": (
        lambda path: changed(path, "UPDATE measurements SET lipschitz = 9"),
        "row 1 of measurements was changed after it was written",
    ),
    "tables": (
        lambda path: changed(path, "ALTER TABLE runs ADD COLUMN more TEXT"),
        "its tables are not those of this version of howsmooth",
    ),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    path, (spoil, words) = tmp_path / STORE_NAME, BAD_FILES[kind]
    spoil(path)
    before = path.read_bytes() if path.is_file() else b""
    for write in (True, False):
        with pytest.raises(StoreError, match=words) as refusal:
            Store.open(tmp_path, write=write)
        assert "--out" not in str(refusal.value)  # a program reads stores, too
        assert str(path) in str(refusal.value)
        assert (path.read_bytes() if path.is_file() else b"") == before


def test_where_no_store_can_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    for folder, words in (
        (path, "out: expected a folder, got the file"),
        (path / "below", "out: expected a writable folder"),
        # Nobody can write there, not even the superuser.
        *(
            [(Path("/proc/howsmooth"), "expected a writable folder")]
            if Path("/proc/version").exists()
            else []
        ),
    ):
        with pytest.raises(StoreError, match=words):
            Store.open(folder)
    with pytest.raises(StoreError, match="which has none"):
        Store.open(tmp_path, write=False)
    (tmp_path / STORE_NAME).touch()  # one that was not begun
    assert not Store.exists(tmp_path)
    with Store.open(tmp_path) as store:
        assert store.count(Measurement) == 0


def test_a_full_disk_is_said_and_loses_nothing(store: Store) -> None:
    store.add([row()], 1)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match=r"database or disk is full\. Make room on the disk"):
        store.add([row(sample=sample) for sample in range(1, 500)], 1)
    store._connection.execute("PRAGMA max_page_count = 100000")
    assert store.count(Measurement) == 1
    store.add([row(sample=sample) for sample in range(1, 500)], 1)
    assert store.count(Measurement) == 500


def test_every_table_of_a_study_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = "measure builtin-encoder --lengths 4,8 --samples 2 --layers 0 --bounds none --quiet --out"
    assert main([*arguments.split(), str(folder)]) == 0
    tables = hs.read(str(folder))
    rows = tables["measurements"]
    assert list(rows["n"].value_counts()) == [2, 2]
    assert (rows["lower"] <= rows["upper"]).all()
    assert (tables["models"]["stored"].to_list(), rows["computed"].unique()) == (["float16"], ["float32"])
    assert "failures" not in tables
    assert len(rows.merge(tables["runs"], left_on="run", right_on="id")) == 4
    assert {str(table["run"].dtype) for table in tables.values() if "run" in table} == {"Int64"}
    assert {table["model"].dtype for table in tables.values() if "model" in table} == {rows["model"].dtype}
    assert set(hs.read(folder / STORE_NAME)) == set(tables)
    assert max(map(len, repr(rows).splitlines())) <= 80


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(StoreError) as refused:
            hs.read(path)
        return str(refused.value)

    assert "--out" in refusal(tmp_path)
    assert list(tmp_path.iterdir()) == []
    table = tmp_path / "profile.csv"
    table.touch()
    assert f"Read {table} with pandas" in refusal(tmp_path)
    assert "expected the output folder" in refusal(table)
    (tmp_path / "figure-1").mkdir()
    (tmp_path / "figure-1" / STORE_NAME).touch()
    assert f"Give a folder in it, such as {tmp_path / 'figure-1'}." in refusal(tmp_path)
