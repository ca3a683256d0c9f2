"""A study on threads and processes: the same rows as without, whatever happens to the workers."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import howsmooth as hs
from howsmooth.errors import ArgumentError, HowsmoothError, NonFiniteError, WorkerError
from howsmooth.study.executors import Threads, opened_executor
from howsmooth.study.plan import ModelSpec
from howsmooth.study.progress import Progress
from howsmooth.study.run import run
from howsmooth.study.store import Store
from howsmooth.study.workers import _sendable
from tests._spread import (
    FOLDER,
    dies_once_at_five,
    dies_once_at_five_and_always_at_eight,
    fails_at_four,
    loads_once,
    noted,
    spread_tools,
)
from tests._study import make_plan, make_tools, rows_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

LENGTHS = tuple(range(1, 9))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where workers note what they do."""
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv(FOLDER, str(notes))
    return notes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the plan gives without workers: rows, bounds, sensitivities and words."""
    out = tmp_path_factory.mktemp("whole")
    run(make_plan(lengths=LENGTHS, scopes=("attention", "head")), out, make_tools()[0])
    return everything(out)


def everything(out: Path) -> Any:
    with Store.open(out, write=False) as store:
        contents = store.contents()
    bounds = contents.bounds.drop(columns=["run"])
    shares = contents.sensitivities.drop(columns=["run"])
    return (
        rows_of(out),
        {tuple(map(str, row)) for row in bounds.itertuples(index=False)},
        {tuple(map(str, row)) for row in shares.itertuples(index=False)},
    )


class Kept(Executor):
    """An executor of somebody else's: it says nothing about itself."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # As if sent to another machine.
        return self._pool.submit(_called, pickle.dumps((fn, args)))


def _called(sent: bytes) -> Any:
    function, arguments = pickle.loads(sent)
    return function(*arguments)


@pytest.mark.parametrize("executor", [Threads(3), Kept()], ids=["threads", "foreign"])
def test_workers_give_the_same_store(executor: Executor, tmp_path: Path, whole: Any) -> None:
    told: list[Progress] = []
    plan = make_plan(lengths=LENGTHS, scopes=("attention", "head"))
    outcome = run(plan, tmp_path / "out", spread_tools(), executor=executor, on_progress=told.append)
    assert everything(tmp_path / "out") == whole
    assert outcome.measured == len(whole[0])
    assert told[-1].cost_done == pytest.approx(told[-1].cost_planned)
    assert [one.done for one in told] == sorted(one.done for one in told)


def test_a_process_that_dies_is_replaced_and_the_store_is_the_same(
    tmp_path: Path, folder: Path, whole: Any
) -> None:
    plan = make_plan(lengths=LENGTHS, scopes=("attention", "head"))
    with opened_executor("processes", workers=1) as executor:
        outcome = run(
            plan, tmp_path / "out", spread_tools(measure=dies_once_at_five), executor=executor, threads=1
        )
    assert (folder / "died").exists()
    assert everything(tmp_path / "out") == whole
    assert (outcome.measured, outcome.failed) == (len(whole[0]), 0)
    # The one that died and the one in its place; neither is this process.
    assert len(noted(folder, "measured").keys() - {os.getpid()}) == 2
    assert os.getpid() not in noted(folder, "measured")


@pytest.mark.slow
def test_what_kills_every_process_fails_alone(tmp_path: Path, folder: Path, whole: Any) -> None:
    plan = make_plan(lengths=LENGTHS, scopes=("attention", "head"), bounds=False)
    tools = spread_tools(measure=dies_once_at_five_and_always_at_eight)
    with opened_executor("processes", workers=2) as executor:
        outcome = run(plan, tmp_path / "out", tools, executor=executor, threads=1, keep_going=True)
    assert (folder / "died").exists()
    assert rows_of(tmp_path / "out") == {row for row in whole[0] if row[5] != 8}
    # Of n = 8 the two scopes failed, each with five samples.
    assert (outcome.measured, outcome.failed) == (7 * 5 * (3 + 6), 2 * 5)
    with Store.open(tmp_path / "out", write=False) as store:
        failures = store.failures()
    assert set(failures["kind"]) == {"WorkerError"}
    assert set(failures["n"]) == {8}
    assert "memory" in outcome.first_failure


def test_failures_on_workers_are_recorded_as_they_are_here(tmp_path: Path) -> None:
    tools = spread_tools(measure=fails_at_four)
    outcomes = [
        run(make_plan(), tmp_path / name, tools, executor=executor, keep_going=True)
        for name, executor in (("here", None), ("there", Threads(2)))
    ]
    assert outcomes[0].failed == outcomes[1].failed == 5
    assert outcomes[0].first_failure == outcomes[1].first_failure
    assert failures_of(tmp_path / "here").equals(failures_of(tmp_path / "there"))
    assert rows_of(tmp_path / "here") == rows_of(tmp_path / "there")


def failures_of(folder: Path) -> pd.DataFrame:
    with Store.open(folder, write=False) as store:
        table = store.failures().sort_values("sample", ignore_index=True)
    return table[["model", "text", "scope", "layer", "head", "n", "sample", "kind", "error", "what"]]


def test_without_keep_going_a_failure_on_a_worker_ends_the_run(tmp_path: Path) -> None:
    tools = spread_tools(measure=fails_at_four)
    with pytest.raises(NonFiniteError, match="finite values"):
        run(make_plan(), tmp_path, tools, executor=Threads(1))
    # Of the batch that failed, what came before is kept.
    assert {(row[3], row[5]) for row in rows_of(tmp_path)} >= {(0, 2), (1, 2), (2, 2), (0, 4)}
    run(make_plan(), tmp_path, spread_tools(), executor=Threads(1))
    assert rows_of(tmp_path) == rows_of_plan(tmp_path / "whole")


def rows_of_plan(folder: Path) -> Any:
    run(make_plan(), folder, make_tools()[0])
    return rows_of(folder)


def test_a_model_that_no_worker_can_load_is_one_failure(tmp_path: Path, folder: Path) -> None:
    tools = spread_tools(load_model=loads_once)
    specs = (ModelSpec("small"),)
    outcome = run(make_plan(models=specs), tmp_path, tools, executor=Threads(1), keep_going=True)
    assert (outcome.measured, outcome.failed) == (0, 1)
    assert "went away" in outcome.first_failure


def test_interrupted_it_keeps_what_came_and_goes_on(tmp_path: Path, whole: Any) -> None:
    plan = make_plan(lengths=LENGTHS, scopes=("attention", "head"))

    def interrupt(progress: Progress) -> None:
        if progress.done >= 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), opened_executor("threads", workers=2) as executor:
        run(plan, tmp_path, spread_tools(), executor=executor, on_progress=interrupt)
    kept = rows_of(tmp_path)
    assert 60 <= len(kept) < len(whole[0])
    with opened_executor("threads", workers=2) as executor:
        outcome = run(plan, tmp_path, spread_tools(), executor=executor)
    assert outcome.measured == len(whole[0]) - len(kept)
    assert everything(tmp_path) == whole


def test_workers_that_are_gone_for_good_end_the_run_with_a_sentence(tmp_path: Path) -> None:
    executor = Gone()
    with pytest.raises(WorkerError, match="run the same again"):
        run(make_plan(bounds=False), tmp_path, spread_tools(), executor=executor)
    assert len(rows_of(tmp_path)) == 15


class Broken(Executor):
    """Cannot send anything."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("no\nway"))
        return future


def test_what_an_executor_fails_at_is_a_failure_of_the_task(tmp_path: Path) -> None:
    outcome = run(make_plan(), tmp_path / "on", spread_tools(), executor=Broken(), keep_going=True)
    assert (outcome.measured, outcome.failed) == (0, 15)
    assert outcome.first_failure == "RuntimeError: no way"
    with pytest.raises(WorkerError, match="RuntimeError: no"):
        run(make_plan(), tmp_path / "off", spread_tools(), executor=Broken())


class Gone(Executor):
    """Carries out one task, and then its workers are lost."""

    def __init__(self) -> None:
        self._calls = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._calls += 1
        if self._calls > 3:
            raise BrokenExecutor("all are gone")
        future: Future[Any] = Future()
        if self._calls == 1:
            future.set_result(fn(*args, **kwargs))
        else:
            future.set_exception(BrokenExecutor("one is gone"))
        return future


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.study.workers.version", lambda name: "0.0.1")
    with pytest.raises(WorkerError, match=r"a worker has howsmooth 0\.0\.1"):
        run(make_plan(), tmp_path, spread_tools(), executor=Threads(1))


def test_an_error_that_cannot_travel_comes_as_words() -> None:
    class Odd(Exception):  # noqa: N818
        def __init__(self, left: int, right: int) -> None:
            super().__init__(f"{left} and {right}")

    found = _sendable(Odd(1, 2))
    assert isinstance(found, WorkerError)
    assert str(found) == "Odd: 1 and 2"
    kept = NonFiniteError("x", expected="a", got="b", remedy="c")
    assert _sendable(kept) is kept


@pytest.mark.parametrize(
    "error",
    [ArgumentError("a", expected="b", got="c", remedy="d"), NonFiniteError("x", expected="y", got="z")],
)
def test_errors_travel_between_processes(error: HowsmoothError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_threads_do_one_at_a_time_what_they_share(tmp_path: Path) -> None:
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

    tools = spread_tools()
    assert tools.bound is not None
    # What is measured here is no attention in closed form, so that it may change settings too.
    shared = replace(
        tools, capture=alone(tools.capture), measure=alone(tools.measure), bound=alone(tools.bound)
    )
    run(make_plan(), tmp_path, shared, executor=Threads(4))
    assert most == 1
    assert rows_of(tmp_path) == rows_of_plan(tmp_path / "whole")


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
    monkeypatch.setattr("howsmooth.attention.core.sdpa_kernel", refuse)
    monkeypatch.setattr("torch.manual_seed", refuse)
    assert bool(hs.local_lipschitz(attention, x).converged.all())


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("ray", {}, "executor: expected one of threads, processes, dask, got 'ray'"),
        (None, {"workers": 2}, "workers: expected --executor threads or --executor processes beside it"),
        ("dask", {"workers": 2, "scheduler": "tcp://x:1"}, "are started beside its scheduler"),
        ("threads", {"workers": 0}, "workers: expected a number from 1 to 1024, got 0"),
        ("processes", {"workers": 5000}, "workers: expected a number from 1 to 1024, got 5000"),
        ("threads", {"scheduler": "tcp://x:1"}, "scheduler: expected --executor dask beside it"),
        ("dask", {}, "scheduler: expected the address of a Dask scheduler, got none"),
    ],
)
def test_what_does_not_fit_together_is_refused(kind: Any, options: Any, words: str) -> None:
    with pytest.raises(ArgumentError) as caught, opened_executor(kind, **options):
        pass
    assert words in str(caught.value)
