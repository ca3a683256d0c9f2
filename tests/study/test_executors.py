"""A study on workers: the same rows as without, whatever happens to them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import howsmooth as hs
from howsmooth.errors import ArgumentError, HowsmoothError, ModelError, NonFiniteError, WorkerError
from howsmooth.study import runner
from howsmooth.study.execution_options import Execution
from howsmooth.study.executors import are_worth_it, memory_each, processes_of, threads_each
from howsmooth.study.measurement_run import _most_bytes
from howsmooth.study.plans import Plan
from howsmooth.study.runner import _sendable
from howsmooth.study.study_preparation import Models
from howsmooth.study.worker_processes import prepared_processes
from tests._spread import FOLDER, dies_once_after_five, noted, spread_tools
from tests._study import Heard, Tools, contents_of, make_plan, make_tools, rows_of, run, words

LENGTHS = tuple(range(1, 9))


PLAN = make_plan(lengths=LENGTHS, scopes=("attention", "head"))


@pytest.fixture(autouse=True)
def no_models_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of this process are workers that keep the models of the test before."""
    monkeypatch.setattr(runner, "_kept", (None, None))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the plan gives without workers: rows, bounds, sensitivities and words."""
    out = tmp_path_factory.mktemp("whole")
    run(PLAN, out, make_tools()[0])
    return everything(out)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ThreadPoolExecutor]:
    """Let threads take the place of processes, and tell which were opened."""
    pools: list[ThreadPoolExecutor] = []

    @contextmanager
    def worker_processes(count: int) -> Iterator[Executor]:
        with ThreadPoolExecutor(count) as pool:
            pools.append(pool)
            pool.workers = count  # type: ignore[attr-defined]
            yield pool

    monkeypatch.setattr("howsmooth.study.measurement_run.worker_processes", worker_processes)
    return pools


def everything(out: Path) -> Any:
    contents = contents_of(out)
    bounds, shares = (
        {
            tuple(map(str, row))
            for row in table.drop(columns=["run", "seconds"], errors="ignore").itertuples(index=False)
        }
        for table in (contents.bounds, contents.sensitivities)
    )
    return rows_of(out), bounds, shares


def failing(layer: int = 1, n: int = 4) -> Tools:
    """Stand-ins whose estimate fails at one layer and length."""
    tools = make_tools()[0]

    def measure(function: Any, x: torch.Tensor, **options: Any) -> Any:
        if (function.layer, x.shape[1]) == (layer, n):
            raise NonFiniteError("X", expected="finite values", got="nan")
        return tools.measure(function, x, **options)

    return replace(tools, measure=measure)


class Sent(Executor):
    """An executor of somebody else's, which says nothing about itself, as if on another machine."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        sent = pickle.dumps((fn, args))
        assert words(100).encode() not in sent  # the text stays here
        return self._pool.submit(_called, sent)


def _called(sent: bytes) -> Any:
    function, arguments = pickle.loads(sent)
    return function(*arguments)


@pytest.mark.parametrize("executor", [ThreadPoolExecutor(3), Sent()], ids=["threads", "foreign"])
def test_workers_give_the_same_store(
    executor: Executor, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_BETWEEN_TELLING", 0.0)
    heard = Heard()
    outcome = run(PLAN, tmp_path / "out", make_tools()[0], executor=executor, listener=heard)
    assert everything(tmp_path / "out") == whole
    assert outcome.measured == len(whole[0])
    counts = [int(said.split(" of ")[0]) for _, _, said in heard.told if not said.endswith("bounds")]
    assert counts == sorted(counts)
    assert counts[-1] == len(whole[0])
    assert heard.told[-1][0] == pytest.approx(heard.told[-1][1])


def test_a_large_study_is_measured_in_processes_by_itself(
    tmp_path: Path, whole: Any, opened: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("howsmooth.study.executors.WORTH", len(whole[0]) + 1)
    run(PLAN, tmp_path / "small", make_tools()[0], processes=3)
    assert not opened
    monkeypatch.setattr("howsmooth.study.executors.WORTH", len(whole[0]))
    run(PLAN, tmp_path / "out", make_tools()[0], processes=3)
    assert [pool._max_workers for pool in opened] == [3]
    assert everything(tmp_path / "out") == whole
    run(replace(PLAN, samples=PLAN.samples + 1), tmp_path / "out", make_tools()[0], processes=3)
    assert len(opened) == 1  # little is left


@pytest.mark.parametrize("fails", [False, True])
def test_workers_of_a_new_study_load_its_first_model_at_once(
    fails: bool, tmp_path: Path, whole: Any, opened: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load_first = runner._load_first

    def load(plan: Plan, spec: Any, threads: int | None) -> None:
        loaded.append(spec.name)
        if fails:
            raise ModelError("only the process that checks the model says this")
        load_first(plan, spec, threads)
        assert runner._kept[1]._key == (spec, "")  # type: ignore[union-attr]

    monkeypatch.setattr("howsmooth.study.measurement_run._most_bytes", lambda _: 0.0)
    monkeypatch.setattr(runner, "_load_first", load)
    for worth, folder in ((len(whole[0]), "out"), (len(whole[0]) + 1, "small")):
        monkeypatch.setattr("howsmooth.study.executors.WORTH", worth)
        monkeypatch.setattr("howsmooth.study.measurement_run.WORTH", worth)
        run(PLAN, tmp_path / folder, make_tools()[0], processes=3)
        assert everything(tmp_path / folder) == whole
    assert loaded == [PLAN.models[0].name] * 6
    assert len(opened) == 2
    assert opened[1]._shutdown  # there was too little to do
    run(replace(PLAN, samples=PLAN.samples + 1), tmp_path / "out", make_tools()[0], processes=3)
    assert len(opened) == 2  # the store may have most of it already


def test_the_bytes_of_a_model_are_known_before_it_is_loaded() -> None:
    plan = Plan(models=["builtin-encoder"])
    models = Models(plan)
    models.load(plan.models[0], "")
    assert models.bytes <= _most_bytes(plan) < 1.1 * models.bytes
    assert _most_bytes(replace(plan, dtype="float64")) == 2 * _most_bytes(plan)
    assert _most_bytes(Plan(models=["owner/name"])) == np.inf
    assert _most_bytes(Plan(models=["builtin-encoder"], random_init=True)) == np.inf


@pytest.mark.parametrize(
    ("changed", "how", "expected"),
    [
        ({}, {}, 16),
        ({"layers": "0"}, {}, 8),
        ({"samples": 1, "layers": "0,1"}, {}, 1),
        ({"device": "cuda"}, {}, 1),
        ({}, {"threads": 2}, 1),
        ({}, {"executor": "dask"}, 1),
    ],
)
def test_how_many_processes_are_prepared(
    changed: dict[str, Any], how: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr("howsmooth.study.worker_processes.available_cores", lambda: 16)
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: begun.append(True))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    usual = {"models": ("one",), "lengths": tuple(range(2, 100, 2)), "samples": 10}
    plan, execution = Plan(**usual | changed), Execution(**how)
    assert prepared_processes(plan.constants, plan.device, execution) == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert prepared_processes(plan.constants, plan.device, execution) == expected
    assert len(begun) == (expected > 1)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes by forking")
def test_a_process_that_dies_ends_the_run_and_what_came_is_kept(
    tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    tools, context = spread_tools(dies_once_after_five), multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(1, mp_context=context) as executor,
        pytest.raises(WorkerError, match=r"the workers were lost.*run the same"),
    ):
        run(PLAN, tmp_path / "out", tools, executor=executor, threads=1)
    before = rows_of(tmp_path / "out")
    assert before
    assert before < whole[0]
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        outcome = run(PLAN, tmp_path / "out", tools, executor=executor, threads=1)
    assert everything(tmp_path / "out") == whole
    assert (outcome.measured, outcome.failed) == (len(whole[0]) - len(before), 0)
    # The one that died and another one; neither is this process.
    assert len(noted(tmp_path).keys() - {os.getpid()}) == len(noted(tmp_path)) == 2


def test_failures_on_workers_are_recorded_as_they_are_here(tmp_path: Path) -> None:
    named = ["model", "text", "scope", "layer", "head", "n", "sample", "kind", "error", "what"]
    with ThreadPoolExecutor(1) as executor:
        found = []
        for name, workers in (("here", None), ("there", executor)):
            outcome = run(make_plan(), tmp_path / name, failing(), executor=workers, keep_going=True)
            table = contents_of(tmp_path / name).failures.sort_values("sample", ignore_index=True)
            found.append(
                (outcome.failed, outcome.first_failure, table[named].to_csv(), rows_of(tmp_path / name))
            )
        assert found[0] == found[1]
        assert found[0][0] == 5
        with pytest.raises(NonFiniteError, match="finite values"):
            run(make_plan(), tmp_path / "a", failing(), executor=executor)
        # Of the batch that failed, what came before is kept.
        assert {(row[3], row[5]) for row in rows_of(tmp_path / "a")} >= {(0, 2), (1, 2), (2, 2), (0, 4)}
        for name in ("a", "there"):
            run(make_plan(), tmp_path / name, make_tools()[0], executor=executor)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "there")
    assert len(rows_of(tmp_path / "a")) == 45


def test_a_model_that_no_worker_can_load_is_one_failure(tmp_path: Path) -> None:
    tools = make_tools()[0]

    def load(name: str, **options: Any) -> Any:
        """Load for the checks before the run, and not for a worker."""
        if threading.current_thread() is threading.main_thread():
            return tools.load_model(name, **options)
        raise ModelError("model: it went away.")

    with ThreadPoolExecutor(1) as executor:
        changed = replace(tools, load_model=load)
        outcome = run(make_plan(), tmp_path, changed, executor=executor, keep_going=True)
    assert (outcome.measured, outcome.failed) == (0, 1)
    assert "went away" in outcome.first_failure


class Gone(Executor):
    """Carries out some tasks, and then its workers are lost, or it can send nothing more."""

    def __init__(self, tasks: int, error: Exception) -> None:
        self._left, self._error = tasks, error

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._left -= 1
        if self._left < 0 and isinstance(self._error, BrokenExecutor):
            raise self._error
        future: Future[Any] = Future()
        if self._left < 0:
            future.set_exception(self._error)
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def test_workers_that_are_gone_end_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Gone(0, RuntimeError("no\nway"))
    outcome = run(make_plan(), tmp_path / "on", make_tools()[0], executor=nothing, keep_going=True)
    assert (outcome.measured, outcome.failed) == (0, 15)
    assert outcome.first_failure == "RuntimeError: no way"
    with pytest.raises(WorkerError, match="RuntimeError: no"):
        run(make_plan(), tmp_path / "off", make_tools()[0], executor=nothing)
    lost = r"the workers were lost .all are gone.*run the same command again"
    gone = Gone(1, BrokenExecutor("all are gone"))
    with pytest.raises(WorkerError, match=lost):
        run(make_plan(), tmp_path / "gone", make_tools()[0], executor=gone)
    versions = itertools.count(1)
    monkeypatch.setattr(runner, "version", lambda name: f"0.0.{next(versions)}")
    with pytest.raises(WorkerError, match="a worker has howsmooth 0"):
        run(make_plan(), tmp_path / "other", make_tools()[0], executor=ThreadPoolExecutor(1))


def test_threads_of_one_worker_do_one_task_at_a_time(tmp_path: Path) -> None:
    """As those of a Dask worker, they share the settings of PyTorch and the model."""
    inside, most = 0, 0

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.005)
            inside -= 1
            return function(*arguments, **options)

        return watched

    tools = make_tools()[0]
    shared = replace(
        tools, capture=alone(tools.capture), measure=alone(tools.measure), bound=alone(tools.bound)
    )
    with ThreadPoolExecutor(4) as executor:
        run(make_plan(), tmp_path, shared, executor=executor)
    assert most == 1


def test_attention_in_closed_form_leaves_the_settings_of_the_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What threads do at the same time must not choose an attention kernel for all of them."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a setting of the whole process")

    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 3, 6, generator=generator) for _ in range(3)]
    attention = hs.SelfAttention(*parts, torch.randn(6, 6, generator=generator), causal=True)
    x = torch.randn(2, 40, 6, generator=generator)
    monkeypatch.setattr("torch.nn.attention.sdpa_kernel", refuse)
    monkeypatch.setattr("howsmooth.attention.scaled_dot_product.sdpa_kernel", refuse)
    monkeypatch.setattr("torch.manual_seed", refuse)
    assert bool(hs.local_lipschitz(attention, x).converged.all())


@pytest.mark.parametrize(
    "error",
    [ArgumentError("a", expected="b", got="c", remedy="d"), NonFiniteError("x", expected="y", got="z")],
)
def test_errors_travel_between_processes(error: HowsmoothError) -> None:
    assert _sendable(error) is error
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))

    class Odd(Exception):  # noqa: N818
        def __init__(self, left: int, right: int) -> None:
            super().__init__(f"{left} and {right}")

    found = _sendable(Odd(1, 2))  # which pickle cannot make again
    assert isinstance(found, WorkerError)
    assert str(found) == "Odd: 1 and 2"


def test_processes_share_out_the_memory_and_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.study.executors.memory_budget", lambda *_: 1000)
    monkeypatch.setattr("howsmooth.study.executors.available_cores", lambda: 9)
    several, threads = ProcessPoolExecutor(4), ThreadPoolExecutor(4)
    assert memory_each(processes_of(several), None, "cpu") == 250
    assert memory_each(4, 70, "cpu") == 70
    assert memory_each(processes_of(threads), None, "cpu") is None
    assert memory_each(processes_of(None), None, "cpu") is None
    assert (threads_each(several, None), threads_each(several, 5)) == (2, 5)
    assert threads_each(threads, None) is threads_each(None, None) is None
    monkeypatch.setattr("howsmooth.study.executors.free_memory", lambda _: 8 << 30)
    assert are_worth_it(2, 1000, 1 << 30)
    assert not are_worth_it(2, 1000, 2 << 30)
    assert not are_worth_it(1, 1000, 0)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("ray", {}, "executor: expected one of processes, dask, got 'ray'"),
        (None, {"workers": 2}, "workers: expected it together with the executor processes"),
        ("processes", {"workers": 0}, "workers: expected a number of at least 1, got 0"),
        ("processes", {"workers": 5000}, "workers: expected a number of at most 1024, got 5000"),
        ("processes", {"scheduler": "tcp://x:1"}, "scheduler: expected it together with the executor dask"),
        ("dask", {"scheduler": "tcp://x:99999"}, "scheduler: expected the address that dask scheduler"),
    ],
)
def test_what_does_not_fit_together_is_refused(kind: Any, options: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Execution(executor=kind, **options)
