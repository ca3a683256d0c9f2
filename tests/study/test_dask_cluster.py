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
def test_workers_are_killed_in_the_middle_nothing_is_lost_and_nothing_twice(
    scheduler: str, tmp_path: Path, whole: set[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dies with what it had measured and not sent; then the other, so that a new one is awaited."""
    monkeypatch.setattr("howsmooth.study.runner._SILENCE", 0.5)
    notes = tmp_path / "notes"
    notes.mkdir()
    workers = [start_worker(scheduler, notes) for _ in range(2)]
    killed: list[bool] = []

    class Watching(Heard):
        def phase(self, words: str) -> None:
            super().phase(words)
            if words == "No worker is left; waiting for one that starts" and len(workers) == 2:
                workers.append(start_worker(scheduler, notes))

    def kill_the_other(words: str) -> None:
        if not killed and (notes / "died").exists():
            killed.append(True)
            for worker in workers[:2]:
                worker.kill()

    try:
        with Client(scheduler, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=120)
        with (
            opened_executor(Execution(executor="dask", scheduler=scheduler)) as executor,
            stand_ins_sent(dies_once_after_five),
        ):
            heard = Watching(kill_the_other)
            outcome = run(
                PLAN, tmp_path / "out", make_tools()[0], executor=executor, threads=1, listener=heard
            )
        codes = [worker.poll() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, None]
    assert rows_of(tmp_path / "out") == whole  # which fails if one is there twice
    assert (outcome.measured, outcome.failed) == (len(whole), 0)
    # What the killed ones had measured and not sent was measured again.
    assert sum(one.total() for one in noted(notes).values()) > outcome.measured


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
