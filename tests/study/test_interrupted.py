"""What can happen to a study of a week, done for real: kills, full disks, damage, two at once.

What ends a process happens to one of its own: a fork of this one, which has imported all it needs. Afterwards
no row is lost, none is there twice, and whoever refuses says why in one sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from howsmooth.cli import main
from howsmooth.errors import StoreError
from howsmooth.study.store import STORE_NAME, Store
from howsmooth.study.store_file import locked
from tests._forked import begun, ended
from tests._study import (
    contents_of,
    installed,
    make_plan,
    make_tools,
    published_of,
    published_stand_ins,
    rows_of,
    run,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, signals and limits of Linux")

ROOT = Path(__file__).resolve().parents[2]
PLAN = """
models = ["small"]
texts = ["prose"]
lengths = [1, 2, 3, 4, 5, 6, 7, 8]
samples = 5
scopes = ["attention", "head", "block"]
bounds = "none"
as_published = "all"
out = "out"
"""
CONSTANTS = 8 * 5 * (3 + 6 + 3)
TOTAL = CONSTANTS + 8 * 5 * 3 * 4


def type_study(folder: Path, *more: str, pause: float = 0.0) -> tuple[int, str, str]:
    """Type ``howsmooth measure --plan``, with stand-ins for models; an estimate takes ``pause``."""
    out, err = io.StringIO(), io.StringIO()
    tools = make_tools(before_measure=lambda calls: time.sleep(pause))[0]
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        installed(tools),
        published_stand_ins(),
    ):
        code = main(["measure", "--plan", str(folder / "plan.toml"), *more])
    return code, out.getvalue(), err.getvalue()


def told(work: Callable[[], tuple[int, str, str]], folder: Path) -> tuple[int, str, str]:
    """Do some work in a process of its own, and return what it returns."""
    path = folder / "told"
    assert ended(begun(lambda: path.write_text(repr(work())))) == 0
    found: tuple[int, str, str] = eval(path.read_text())
    return found


def refusal(err: str) -> str:
    """The one sentence of a refusal."""
    last = err.splitlines()[-1]
    assert last.startswith("error: "), err
    assert err.count("error: ") == 1
    return last


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[Any, ...]]:
    """What the plan gives if nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    plan = make_plan(lengths=tuple(range(1, 9)), scopes=("attention", "head", "block"), bounds="none")
    run(plan, folder / "by-itself", make_tools()[0])
    (folder / "plan.toml").write_text(PLAN)
    code, _, err = type_study(folder)
    assert code == 0, err
    found = kept(folder)
    assert len(found) == TOTAL
    assert found > rows_of(folder / "by-itself")
    return found


def kept(folder: Path) -> set[tuple[Any, ...]]:
    """Read the store as it was left; before the first write there is none."""
    out = folder / "out"
    try:
        return rows_of(out) | published_of(out) if Store.exists(out) else set()
    except StoreError as error:
        if "is empty" not in str(error):
            raise
        return set()


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_killed_at_random_moments_no_row_is_lost_and_none_is_twice(
    study: Path, whole: set[tuple[Any, ...]]
) -> None:
    generator, before, hits = random.Random(), set[tuple[Any, ...]](), 0
    for _ in range(3):
        process = begun(lambda: type_study(study, pause=0.002))
        until((study / "out").exists)
        time.sleep(generator.uniform(0.0, 0.3))
        os.kill(process, signal.SIGKILL)
        hits += ended(process) == -signal.SIGKILL
        after = kept(study)
        assert before <= after <= whole
        before = after
    code, out, err = type_study(study)
    assert (code, kept(study)) == (0, whole), err
    # Where constants have a scope, published values have a layer.
    published = {row for row in whole - before if isinstance(row[2], int)}
    assert f"{len(whole - before - published)} measurements made" in out
    assert (f"{len(published)} published values" in out) is bool(published)
    assert hits >= 1


def test_a_reader_takes_back_what_a_killed_writer_left_half_written(study: Path) -> None:
    def die() -> NoReturn:
        store = Store.open(study / "out")
        store._connection.execute("PRAGMA cache_size = 1")
        store._connection.execute("BEGIN IMMEDIATE")
        store._connection.execute("UPDATE measurements SET lipschitz = 0, site = hex(randomblob(2000))")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    run(make_plan(bounds="none"), study / "out", make_tools()[0])
    before = rows_of(study / "out")
    assert ended(begun(die)) == -signal.SIGKILL
    journal = study / "out" / f"{STORE_NAME}-journal"
    assert journal.stat().st_size > 0
    assert rows_of(study / "out") == before


def test_a_file_that_may_not_grow(study: Path, whole: set[tuple[Any, ...]]) -> None:
    def limited() -> tuple[int, str, str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return type_study(study)

    code, _, err = told(limited, study)
    assert code == 2
    assert "run the same command again. Rows already written are kept." in refusal(err)
    rows = kept(study)
    assert 0 < len(rows) < TOTAL
    assert rows < whole
    assert told(limited, study)[0] == 2
    assert kept(study) >= rows
    assert type_study(study)[0] == 0
    assert kept(study) == whole


def test_a_folder_that_may_only_be_read(study: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    notes = tmp_path_factory.mktemp("notes")
    (study / "plan.toml").write_text(PLAN.replace('as_published = "all"', ""))
    out = study / "out"
    assert type_study(study)[0] == 0
    before = kept(study)

    def humbly(*more: str) -> tuple[int, str, str]:
        def work() -> tuple[int, str, str]:
            # Give up what lets the superuser write anywhere.
            header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            assert os.geteuid() or ctypes.CDLL(None).capset(header, none) == 0
            return type_study(study, *more)

        return told(work, notes)

    for folder in (out, study):
        folder.chmod(0o555)
    try:
        code, _, err = humbly()
        assert code == 2
        assert str(out) in refusal(err)
        code, said, err = humbly("--dry-run")
        assert code == 0, err
        assert "Left to measure: 0 measurements" in said
        code, _, err = humbly("--out", str(study / "new"))
        assert code == 2
        assert f"expected a writable folder, got {study / 'new'} (Permission denied)" in refusal(err)
    finally:
        for folder in (out, study):
            folder.chmod(0o755)
    assert kept(study) == before


def test_two_processes_on_one_store(study: Path, whole: set[tuple[Any, ...]]) -> None:
    first = begun(lambda: type_study(study, pause=0.5))
    until(lambda: kept(study))
    code, _, err = type_study(study)
    assert code == 2
    assert "is in use by another howsmooth process. Wait until it ends" in refusal(err)
    code, out, _ = type_study(study, "--dry-run")
    assert code == 0
    assert "are already in" in out
    os.kill(first, signal.SIGKILL)
    ended(first)
    assert type_study(study)[0] == 0  # the lock went with its owner
    assert kept(study) == whole


def test_looking_never_keeps_a_writer_out(study: Path) -> None:
    """A reader takes the lock for a moment to roll back; a run that begins right then waits for it."""
    lock = locked(study / "out")
    process = begun(lambda: (study / "told").write_text(repr(type_study(study))))
    time.sleep(0.2)
    lock.release()
    assert ended(process) == 0
    code, _, err = eval((study / "told").read_text())
    assert code == 0, err


def test_a_damaged_store_is_refused_or_whole(tmp_path: Path) -> None:
    """It is refused in one sentence, or all that it says is what was written."""
    run(make_plan(), tmp_path, make_tools()[0])
    path, generator = tmp_path / STORE_NAME, random.Random(1)
    content, whole = path.read_bytes(), contents_of(tmp_path)
    refused, count = 0, 12
    for trial in range(3 * count):
        place, damaged = generator.randrange(len(content)), bytearray(content)
        if trial % 3 == 0:
            del damaged[place:]
        elif trial % 3 == 1:
            damaged[place] ^= 1 << generator.randrange(8)
        else:
            damaged[place : place + 512] = bytes(len(damaged[place : place + 512]))
        path.write_bytes(damaged)
        for write in (False, True):
            try:
                with Store.open(tmp_path, write=write) as store:
                    found = store.contents()
            except StoreError:
                refused += 1
                continue
            if damaged:  # an empty file is a store that was not begun
                for name, table in vars(found).items():
                    there = getattr(whole, name)
                    same = table == there if name == "study" else table.equals(there)
                    assert same, (name, trial % 3, place)
        if path.read_bytes() != damaged:
            assert not damaged, (trial % 3, place)
    assert refused > count
