"""A study on a Dask cluster; slowly one of two worker processes, one of them killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from distributed import Client, LocalCluster

from howsmooth.errors import ArgumentError, WorkerError
from howsmooth.study import runner
from howsmooth.study.execution_options import Execution
from howsmooth.study.executors import opened_executor, workers_of
from tests._spread import FOLDER, dies_once_after_five, noted, stand_ins_sent
from tests._study import Heard, make_plan, make_tools, rows_of, run


def refusal(error: type[Exception], **options: Any) -> str:
    with pytest.raises(error) as refused, opened_executor(Execution(executor="dask", **options)):
        pass
    return str(refused.value)


def test_a_cluster_that_cannot_be_used_is_refused(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("127.0.0.1", "nonsense://x", "tcp://host:"):
        expected = "scheduler: expected the address that dask scheduler prints"
        assert expected in refusal(ArgumentError, scheduler=address)
    monkeypatch.setattr("howsmooth.study.dask_cluster._PATIENCE", 0.5)
    assert "Start some with: dask worker" in refusal(WorkerError, scheduler=scheduler)
    assert "no Dask scheduler answers" in refusal(WorkerError, scheduler="tcp://127.0.0.1:9")

    def lost(client: Client, *_: object, **__: object) -> None:
        client.close()
        raise OSError("Timed out trying to connect")

    monkeypatch.setattr(Client, "wait_for_workers", lost)
    assert f"scheduler at {scheduler} went away." in refusal(WorkerError, scheduler=scheduler)
    monkeypatch.setattr("howsmooth.study.dask_cluster.Client", Mock(side_effect=OSError("no ports")))
    assert "can be started on this machine (no ports)" in refusal(WorkerError, workers=1)


pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

ROOT = Path(__file__).resolve().parents[2]
PLAN = make_plan(lengths=tuple(range(1, 9)), scopes=("attention", "head"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[object, ...]]:
    """What the plan gives without workers."""
    folder = tmp_path_factory.mktemp("whole")
    run(PLAN, folder, make_tools()[0])
    return rows_of(folder)


@pytest.fixture
def scheduler() -> Iterator[str]:
    """A scheduler in this process, without workers."""
    with LocalCluster(n_workers=0, dashboard_address=None, host="127.0.0.1") as cluster:
        yield cluster.scheduler_address


def test_a_cluster_gives_the_same_store(
    tmp_path: Path, whole: set[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is of this process, with two threads that share what the runner keeps."""
    monkeypatch.setattr(runner, "_kept", (None, None))
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        opened_executor(Execution(executor="dask", scheduler=cluster.scheduler_address)) as executor,
    ):
        assert workers_of(executor) == 1
        outcome = run(PLAN, tmp_path / "out", make_tools()[0], executor=executor)
    assert rows_of(tmp_path / "out") == whole
    assert (outcome.measured, outcome.failed) == (len(whole), 0)


def test_workers_on_this_machine_ignore_what_a_terminal_sends_to_all() -> None:
    """Each worker printed tracebacks of Ctrl-C before the command said what is saved."""
    with opened_executor(Execution(executor="dask", workers=1)) as executor:
        ignored = executor.submit(lambda: signal.getsignal(signal.SIGINT) == signal.SIG_IGN)
        assert ignored.result(timeout=60)


@pytest.mark.slow
def test_without_a_scheduler_a_cluster_of_so_many_workers_is_started_here(tmp_path: Path) -> None:
    """As a user does who writes executor and workers into a plan file, and starts nothing."""
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'models = ["builtin-decoder"]\nlengths = [4]\nsamples = 2\nlayers = [0]\nbounds = "none"\n'
        'executor = "dask"\nworkers = 2\n'
    )
    program = [sys.executable, "-m", "howsmooth.cli", "measure", "--plan", str(plan), "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(rows_of(tmp_path / "plan-out")) == 2


def start_worker(scheduler: str, notes: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        FOLDER: str(notes),
        "HOWSMOOTH_TEST_PAUSE": "0.02",
        "OMP_NUM_THREADS": "1",
    }
    words = ["-m", "dask", "worker", scheduler, "--no-nanny", "--nthreads", "1", "--no-dashboard"]
    return subprocess.Popen(
        [sys.executable, *words, "--local-directory", str(notes)],
        env=environment,
        cwd=notes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_worker_is_killed_in_the_middle_nothing_is_lost_and_nothing_twice(
    scheduler: str, tmp_path: Path, whole: set[tuple[object, ...]]
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    workers = [start_worker(scheduler, notes) for _ in range(2)]
    try:
        with Client(scheduler, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=120)
        with (
            opened_executor(Execution(executor="dask", scheduler=scheduler)) as executor,
            stand_ins_sent(dies_once_after_five),  # with what it had measured and not sent
        ):
            outcome = run(PLAN, tmp_path / "out", make_tools()[0], executor=executor, threads=1)
        codes = [worker.poll() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert sorted(codes, key=str) == [-signal.SIGKILL, None]
    assert rows_of(tmp_path / "out") == whole  # which fails if one is there twice
    assert (outcome.measured, outcome.failed) == (len(whole), 0)
    done = noted(notes)
    assert set(done) == {worker.pid for worker in workers}
    # What the killed one had measured and not sent was measured again by the other.
    assert sum(one.total() for one in done.values()) > outcome.measured


@pytest.mark.slow
def test_without_a_worker_left_the_run_says_so_and_goes_on_with_a_new_one(
    scheduler: str, tmp_path: Path, whole: set[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("howsmooth.study.runner._SILENCE", 0.5)
    workers = [start_worker(scheduler, tmp_path)]

    class Watching(Heard):
        def phase(self, words: str) -> None:
            super().phase(words)
            if words == "No worker is left; waiting for one that starts" and len(workers) == 1:
                workers.append(start_worker(scheduler, tmp_path))

    heard = Watching(lambda words: workers[0].kill())
    try:
        with (
            opened_executor(Execution(executor="dask", scheduler=scheduler)) as executor,
            stand_ins_sent(),
        ):
            run(PLAN, tmp_path / "out", make_tools()[0], executor=executor, listener=heard)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert len(workers) == 2
    assert rows_of(tmp_path / "out") == whole
