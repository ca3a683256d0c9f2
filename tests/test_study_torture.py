"""What can happen to a study of a week, done for real: kills, full disks, damage, two at once, clocks.

Each happens to a process of its own. Afterwards no row is lost, none is there twice, and whoever refuses
says why in one sentence.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from howsmooth.errors import StoreError
from howsmooth.study.run import run
from howsmooth.study.schema import MEASUREMENTS, locked
from howsmooth.study.store import STORE_NAME, Store
from tests._study import make_plan, make_tools, published_of, rows_of
from tests.test_study_migration import as_version_1

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")

ROOT = Path(__file__).resolve().parents[1]
PLAN = """
models = ["small"]
texts = ["prose"]
lengths = [1, 2, 3, 4, 5, 6, 7, 8]
samples = 5
scopes = ["attention", "head", "block"]
as_published = "all"
out = "out"
"""
TOTAL = 8 * 5 * (3 + 6 + 3) + 8 * 5 * 3 * 4

# `howsmooth study`, with stand-ins for models that take no time, and no figures.
CHILD = """
import sys, time
from tests._study import make_tools, published_modules
sys.modules |= published_modules()
import howsmooth.study.publish, howsmooth.study.published_run, howsmooth.study.tools, howsmooth.texts
from howsmooth.cli import main
pause, arguments = float(sys.argv[1]), sys.argv[2:]
howsmooth.study.publish.draw_all = lambda *_: []
howsmooth.study.published_tables.draw_published = lambda *_: []
tools = make_tools(before_measure=lambda calls: time.sleep(pause))[0]
howsmooth.study.tools.default_tools = lambda: tools
howsmooth.texts.load_text = tools.load_text  # what --status takes
print("ready", flush=True)
sys.exit(main(["study", *arguments]))
"""


def start(
    folder: Path, *more: str, pause: float = 0.0, prefix: tuple[str, ...] = (), **options: Any
) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", CHILD, str(pause), str(folder / "plan.toml"), "--resume", *more],
        env=environment | options.pop("environment", {}),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(folder: Path, *more: str, **options: Any) -> tuple[int, str, str]:
    process = start(folder, *more, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def ready(process: subprocess.Popen[str]) -> None:
    """Wait until all is imported, and the command begins."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()


def refusal(err: str) -> str:
    """The one sentence of a refusal."""
    assert "Traceback" not in err
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
    plan = make_plan(lengths=tuple(range(1, 9)), scopes=("attention", "head", "block"))
    run(plan, folder / "by-itself", make_tools()[0])
    (folder / "plan.toml").write_text(PLAN)
    assert finish(folder)[0] == 0
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


def kill_and_go_on(study: Path, whole: set[tuple[Any, ...]], delays: list[float]) -> int:
    """Kill a run after each delay, and end it undisturbed; returns how many kills hit it at work."""
    before: set[tuple[Any, ...]] = set()
    hits = 0
    for delay in delays:
        process = start(study)
        ready(process)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        hits += process.returncode == -signal.SIGKILL
        after = kept(study)
        assert before <= after <= whole
        before = after
    code, out, err = finish(study)
    assert (code, kept(study)) == (0, whole), err
    published = {
        row for row in whole - before if isinstance(row[2], int)
    }  # a layer, where others have a scope
    assert f"{len(whole - before - published)} measurements made" in out
    assert f"{len(published)} published values" in out
    return hits


def test_killed_at_random_moments_no_row_is_lost_and_none_is_twice(
    study: Path, whole: set[tuple[Any, ...]]
) -> None:
    generator = random.Random()
    assert kill_and_go_on(study, whole, [generator.uniform(0.0, 0.9) for _ in range(3)]) >= 1


@pytest.mark.slow
def test_killed_at_fifty_random_moments(study: Path, whole: set[tuple[Any, ...]]) -> None:
    generator = random.Random()
    hits = 0
    for _ in range(10):
        shutil.rmtree(study / "out", ignore_errors=True)
        hits += kill_and_go_on(study, whole, [generator.uniform(0.0, 0.9) for _ in range(5)])
    assert hits >= 25


@pytest.mark.slow
def test_killed_while_a_store_of_version_1_is_migrated(study: Path, whole: set[tuple[Any, ...]]) -> None:
    """The kill comes from within, before the last statements of the migration."""
    child = """
import os, signal, sqlite3, sys
from pathlib import Path
from howsmooth.study import schema
from howsmooth.study.store import Store
statements, stop = schema.MEASUREMENTS.migrations[1], int(sys.argv[2])
class Deadly(tuple):
    def __iter__(self):
        for place, statement in enumerate(statements):
            if place == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            yield statement
schema.MEASUREMENTS.migrations[1] = Deadly()
Store.open(Path(sys.argv[1]))
"""
    (study / "plan.toml").write_text(PLAN.replace('as_published = "all"', ""))
    whole = {row for row in whole if row[2] in ("attention", "head", "block")}
    assert finish(study)[0] == 0
    as_version_1(study / "out")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", child, str(study / "out"), "9"], env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert kept(study) == whole
    code, out, _ = finish(study)
    assert code == 0
    assert "0 measurements made" in out
    assert kept(study) == whole


def test_a_reader_takes_back_what_a_killed_writer_left_half_written(study: Path) -> None:
    child = """
import os, signal, sys
from pathlib import Path
from howsmooth.study.store import Store
store = Store.open(Path(sys.argv[1]))
store._connection.execute("PRAGMA cache_size = 1")
store._connection.execute("BEGIN IMMEDIATE")
store._connection.execute("UPDATE measurements SET lipschitz = 0, site = hex(randomblob(2000))")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert finish(study)[0] == 0
    before = kept(study)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", child, str(study / "out")]
    assert subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    journal = study / "out" / f"{STORE_NAME}-journal"
    assert journal.exists()
    assert journal.stat().st_size > 0
    assert kept(study) == before


# ---- no room


def limited() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


@pytest.mark.slow
def test_a_file_that_may_not_grow(study: Path, whole: set[tuple[Any, ...]]) -> None:
    code, _, err = finish(study, preexec_fn=limited)
    assert code == 2
    assert "Make room on the disk and run the same command again. Rows already written are kept." in refusal(
        err
    )
    rows = kept(study)
    assert 0 < len(rows) < TOTAL
    assert rows < whole
    assert finish(study, preexec_fn=limited)[0] == 2
    assert kept(study) >= rows
    assert finish(study)[0] == 0
    assert kept(study) == whole


@pytest.fixture
def small_disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="howsmooth-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("no small disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


def test_a_full_disk(small_disk: Path, study: Path, whole: set[tuple[Any, ...]]) -> None:
    (study / "plan.toml").write_text(PLAN.replace('out = "out"', f'out = "{small_disk / "out"}"'))
    code, _, err = finish(study)
    assert code == 2
    assert "Make room on the disk" in refusal(err)
    rows = kept(small_disk)
    assert 0 < len(rows) < TOTAL
    assert rows < whole
    assert finish(study)[0] == 2
    assert kept(small_disk) >= rows
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert finish(study)[0] == 0
    assert kept(small_disk) == whole


# ---- no right


def test_a_folder_that_may_only_be_read(study: Path, whole: set[tuple[Any, ...]]) -> None:
    """The superuser may write anywhere, so that under him the study gives up what makes him one."""
    humble = ("setpriv", "--inh-caps=-all", "--bounding-set=-all") if os.geteuid() == 0 else ()
    if humble and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not here")
    assert finish(study)[0] == 0
    folders = [study / "out", study]
    for folder in folders:
        folder.chmod(0o555)
    try:
        code, _, err = finish(study, prefix=humble)
        assert code == 2
        assert f"{study / 'out'}" in refusal(err)
        code, out, err = finish(study, "--status", prefix=humble)
        assert code == 0, err
        assert "All is measured." in out
        code, _, err = finish(study, "--out", str(study / "new"), prefix=humble)
        assert code == 2
        assert f"expected a writable folder, got {study / 'new'} (Permission denied)" in refusal(err)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert kept(study) == whole


# ---- two at once


def test_two_processes_on_one_store(study: Path, whole: set[tuple[Any, ...]]) -> None:
    first = start(study, pause=0.5)
    ready(first)
    limit = time.monotonic() + 60
    while not kept(study) and time.monotonic() < limit:
        time.sleep(0.02)
    code, _, err = finish(study)
    assert code == 2
    assert "is in use by another howsmooth process. Wait until it ends" in refusal(err)
    code, out, _ = finish(study, "--status")
    assert code == 0
    assert "Running since 20" in out
    first.kill()
    first.communicate()
    assert finish(study)[0] == 0
    assert kept(study) == whole


@pytest.mark.slow
def test_of_two_that_begin_together_one_works(study: Path, whole: set[tuple[Any, ...]]) -> None:
    both = [start(study, pause=0.02) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    codes = [process.returncode for process in both]
    # On a slow machine the second may come when the first has ended.
    assert 0 in codes
    assert all(
        code == 0 or "is in use by another" in refusal(err) for code, err in zip(codes, said, strict=True)
    )
    assert kept(study) == whole


@pytest.mark.slow
def test_looking_never_keeps_a_writer_out(study: Path) -> None:
    """The status takes the lock for a moment; a run that begins right then waits for it."""
    assert finish(study)[0] == 0
    lock = locked(study / "out", MEASUREMENTS)
    process = start(study)
    ready(process)
    time.sleep(0.2)
    lock.release()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


# ---- damage


def damaged_copies(content: bytes, generator: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    for _ in range(count):
        place = generator.randrange(len(content))
        yield f"cut at {place}", content[:place]
        flipped = bytearray(content)
        flipped[place] ^= 1 << generator.randrange(8)
        yield f"bit flipped in byte {place}", bytes(flipped)
        start = generator.randrange(len(content))
        wiped = bytearray(content)
        wiped[start : start + 512] = bytes(len(wiped[start : start + 512]))
        yield f"512 bytes wiped from {start}", bytes(wiped)


def tortured(folder: Path, count: int, seed: int) -> None:
    """A damaged store is refused in one sentence, or all that it says is what was written."""
    run(make_plan(), folder, make_tools()[0])
    path = folder / STORE_NAME
    content = path.read_bytes()
    with Store.open(folder, write=False) as store:
        whole = store.contents()
    refused = 0
    for what, damaged in damaged_copies(content, random.Random(seed), count):
        path.write_bytes(damaged)
        for write in (False, True):
            try:
                with Store.open(folder, write=write) as store:
                    found = store.contents()
            except StoreError:
                refused += 1
                continue
            if damaged:  # an empty file is a store that was not begun
                for name, table in vars(found).items():
                    there = getattr(whole, name)
                    assert table == there if name == "study" else table.equals(there), (what, name)
        if path.read_bytes() != damaged:
            assert not damaged, what
    assert refused > count


def test_a_damaged_store_is_refused_or_whole(tmp_path: Path) -> None:
    tortured(tmp_path, 60, seed=1)


@pytest.mark.slow
def test_a_store_damaged_in_thousands_of_ways(tmp_path: Path) -> None:
    tortured(tmp_path, 3000, seed=random.Random().randrange(2**32))


@pytest.mark.slow
def test_a_study_does_not_go_on_with_a_damaged_store(study: Path) -> None:
    assert finish(study)[0] == 0
    path = study / "out" / STORE_NAME
    os.truncate(path, path.stat().st_size // 2)
    before = path.read_bytes()
    for more in ((), ("--status",)):
        code, _, err = finish(study, *more)
        assert code == 2
        assert str(path) in refusal(err)
    assert path.read_bytes() == before


# ---- a clock that jumps

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>
static long jump(void) {
    static long calls = 0;
    static const long jumps[] = {0, -400000000L, 90000L, -3600L, 500000000L, -86400L};
    return jumps[(calls++ / 3) % 6];
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *) = 0;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (!code && clock == CLOCK_REALTIME) now->tv_sec += jump();
    return code;
}
"""


@pytest.mark.slow
def test_a_clock_that_jumps_moves_nothing(study: Path, tmp_path: Path, whole: set[tuple[Any, ...]]) -> None:
    """Every call of the system's clock is off by days or years, forth and back; that of durations is not."""
    if shutil.which("cc") is None or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler to make a clock with")
    library = tmp_path / "clock.so"
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "clock.c"), "-ldl"], check=True
    )
    jumping = {"LD_PRELOAD": str(library)}
    probe = "import time; times = [time.time() for _ in range(40)]; print(max(times) - min(times) > 1e8)"
    told = subprocess.run(
        [sys.executable, "-c", probe], env=os.environ | jumping, capture_output=True, text=True
    )
    assert told.stdout == "True\n"
    process = start(study, pause=0.02, environment=jumping)
    ready(process)
    time.sleep(0.7)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert kept(study) <= whole
    code, _, err = finish(study, "--status", environment=jumping)
    assert code == 0, err
    code, _, err = finish(study, environment=jumping)
    assert code == 0, err
    assert kept(study) == whole
    with Store.open(study / "out", write=False) as store:
        contents = store.contents()
    assert (contents.measurements["seconds"] >= 0).all()
    assert contents.runs["worked"].between(0, 120).all()
