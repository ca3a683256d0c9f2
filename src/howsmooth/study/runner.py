"""Carry out the tasks of a study here or on an executor, write each result to the store, and tell how much
time is left.

The runner does not depend on what a task computes. An executor is an object with the interface of
``concurrent.futures.Executor``. It does not change results: a task carries its data and its seeds, and only
this process writes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Mapping
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from howsmooth.errors import HowsmoothError, WorkerError
from howsmooth.study.environment import environment
from howsmooth.study.executors import workers_left, workers_of
from howsmooth.study.plans import Plan
from howsmooth.study.progress_listener import Listener, Outcome
from howsmooth.study.store import Store
from howsmooth.study.study_preparation import Models
from howsmooth.study.tasks.task import Failed, Found, Task, Work
from howsmooth.words import RUN_AGAIN

__all__ = ["Means", "Runner", "TaskTimes"]

# After so many seconds without a result the workers are counted.
_SILENCE = 30.0

Step = tuple[Task, Found | None]
"""A task with one of its results; ``None`` instead of a result means that the task has ended."""

# Seconds between two reports of the progress, and so many times as many from the first result to the first.
_BETWEEN_TELLING = 0.2
_FIRST_TELLING = 10


# Below this number of tokens, the cost of the n² pairs of tokens does not dominate.
_SHORT = 64


@dataclass(frozen=True, eq=False)
class Means:
    """The means of carrying out tasks: listener, workers, threads, and whether to go on after failures.

    ``command`` is the command that the user typed, to be recorded with the run. With ``keep_going``, the run
    continues after a failure instead of raising it. The executor is not shut down; ``None`` runs the tasks in
    this process, one after another. ``threads`` are the CPU threads of PyTorch for each worker; ``None``
    leaves the number unchanged. ``models`` is an existing loader of models in this process.
    """

    listener: Listener = field(default_factory=Listener)
    command: str = ""
    keep_going: bool = False
    executor: Executor | None = None
    threads: int | None = None
    models: Models | None = None


class Runner:
    """Carries out the tasks of a study, and writes each result of a task to the store in one transaction.

    ``models`` is the loader of models in this process; ``None`` if tasks need no model. ``device`` is the
    device on which tasks compute.
    """

    def __init__(self, store: Store, means: Means, models: Models | None = None, device: str = "cpu") -> None:
        self._store = store
        self._means = means
        self._models = models
        self._device = device
        self._unusable: set[str] = set()
        self._number: int | None = None
        self._began = time.monotonic()
        self._first: float | None = None
        self.task_times = TaskTimes()
        self.outcome = Outcome()

    def carry_out(self, work: Work, *, seconds: float = math.inf) -> None:
        """Carry out the tasks of one kind, such as measuring constants, and store their results.

        ``seconds`` is the time that the tasks may take together. A task that is expected to exceed this time
        is not started, and is counted as left out.

        Raises
        ------
        WorkerError
            If the executor loses its workers.
        howsmooth.errors.HowsmoothError
            If a task fails and ``keep_going`` is false, after its other results were written; or if the
            store cannot be written.

        """
        self.outcome.kept[work.kind.table] += work.kept
        for failed in work.failed:
            self.fail(failed)
        left = deque(work.tasks)
        if left and seconds > 0:
            told = _WorkProgress(self._means.listener, work, self.task_times)
            until = time.monotonic() + seconds
            steps = (
                self._run_here(left, until)
                if self._means.executor is None
                else self._run_on_workers(left, until)
            )
            # If writing fails, or a failure ends the run, `closing` ends the generator, which cancels the
            # tasks that wait on workers.
            with closing(steps):
                for task, found in steps:
                    told.advance(task, 0 if found is None else self._write(task, found), ended=found is None)
        self.outcome.left_out += sum(task.size for task in left)

    def finish(self, began: float | None = None) -> Outcome:
        """Record that the run reached its end, and return its outcome.

        ``began`` is the time at which the checks before the run began.
        """
        # A run that wrote nothing has no number, and leaves no trace in the store.
        if self._number is not None:
            self._store.finish_run(self._number)
        self.outcome.seconds = time.monotonic() - (self._began if began is None else began)
        return self.outcome

    def fail(self, failed: Failed, *, ends: bool = True) -> None:
        """Record a failure in the store, and raise its error if the run must end.

        The run goes on if ``ends`` is false, or if the user asked to keep going.
        """
        self._store.add(failed.rows, self._run)
        self.outcome.failed += len(failed.rows)
        self.outcome.first_failure = self.outcome.first_failure or failed.rows[0].error
        if ends and not self._means.keep_going:
            raise failed.error

    @property
    def _run(self) -> int:
        """The number of the run. The run is recorded in the store at the first access."""
        if self._number is None:
            means = self._means
            made_with = environment(self._device, means.executor, means.threads)
            self._number = self._store.start_run(means.command, self._device, made_with)
        return self._number

    def _write(self, task: Task, found: Found) -> int:
        """Write the rows or the failure that a task has yielded; return how many results they contain."""
        if isinstance(found, Failed):
            unloaded = {row.model for row in found.rows if row.text is None}
            # A model that cannot be loaded fails all of its tasks; record this failure once.
            if not unloaded or not unloaded <= self._unusable:
                self._unusable |= unloaded
                self.fail(found, ends=task.essential)
            return 0
        now = time.monotonic()
        if self._first is None:
            # What comes before, such as loading the model, says nothing about the time of other rows.
            seconds = max((getattr(row, "seconds", 0.0) for row in found), default=0.0)
            self._first = now - task.count(found) * seconds
        self._store.add(found, self._run, worked=now - self._first)
        self.outcome.made[task.kind.table] += task.count(found)
        self.outcome.unsettled[task.kind.table] += sum(row.unsettled for row in found)
        return task.count(found)

    # ---- Tasks in this process, or on workers

    def _next(self, left: deque[Task], until: float) -> Task | None:
        """Remove and return the first task whose model can be used, or None if it would not end in time."""
        while left and left[0].model in self._unusable:
            left.popleft()
        if not left:
            return None
        late = time.monotonic() + (self.task_times.expect(left[0]) or 0.0) >= until
        return None if late else left.popleft()

    def _run_here(self, left: deque[Task], until: float) -> Generator[Step, None, None]:
        while (task := self._next(left, until)) is not None:
            began = time.monotonic()
            for found in task.packed().found(self._models):
                # The caller writes the step before the next one is computed, and the time includes writing.
                yield task, found
            self.task_times.learn(task.alike, task.n, task.size, time.monotonic() - began)
            yield task, None

    def _run_on_workers(self, left: deque[Task], until: float) -> Generator[Step, None, None]:
        executor = self._means.executor
        assert executor is not None
        workers = workers_of(executor)
        running: dict[Future[_Done], Task] = {}
        try:
            while True:
                # Submit two tasks for each worker, which keeps it busy. More are not submitted early,
                # because a waiting task can still be left out when time runs out.
                while len(running) < 2 * workers and (task := self._next(left, until)) is not None:
                    running[self._submitted(executor, task)] = task
                if not running:
                    return
                patience: float | None = _SILENCE
                while not (done := wait(running, timeout=patience, return_when=FIRST_COMPLETED).done):
                    if workers_left(executor) == 0:
                        self._means.listener.phase("No worker is left; waiting for one that starts")
                        patience = None  # this is said once
                # Process results in the order of the tasks, so that a failure does not discard results
                # of earlier tasks.
                for future in [future for future in running if future in done]:
                    task = running.pop(future)
                    results, seconds = _result(future, task)
                    for found in results:
                        yield task, found
                    if seconds is not None:
                        self.task_times.learn(task.alike, task.n, task.size, seconds)
                    yield task, None
        finally:
            # Tasks that have started cannot be cancelled. They run to their end, and their results are
            # dropped.
            for future in running:
                future.cancel()

    def _submitted(self, executor: Executor, task: Task) -> Future[_Done]:
        means = self._means
        try:
            return executor.submit(
                _worker_results, task.packed(), version("howsmooth"), means.keep_going, means.threads
            )
        except (BrokenExecutor, OSError) as error:
            raise _lost(error) from error


# ---- The time left


# Beside the key of its tasks, each time is kept with the kind of rows alone, the first entry of the key.
_ANY = object()

Rows = Mapping[tuple[tuple[Any, ...], int], int]
"""Numbers of rows, by the key of similar tasks (``alike``) and the length n."""


class TaskTimes:
    """A record of the times of finished tasks, which predicts the times of other tasks.

    Tasks are alike if they have the same kind of rows, model and scope; without such a task, all tasks with
    the same kind of rows count. The exponent of n is fitted to the nearest finished length and the next one
    that is at least twice as long or as short: times vary, so that lengths near to each other say little
    about the exponent. It is limited to the range from 0 to 2, and from 0 to 1 if both lengths are below 64.
    If there is no second such length, the exponent is 1 above 64 tokens, and 0 below.
    """

    def __init__(self) -> None:
        # Seconds and rows, by the tasks' `alike` and then by n.
        self._done: dict[tuple[Any, ...], dict[int, tuple[float, int]]] = defaultdict(dict)

    def learn(self, alike: tuple[Any, ...], n: int, rows: int, seconds: float) -> None:
        """Record how long some rows of length n took to compute, in tasks with the key ``alike``."""
        for key in (alike, (_ANY, alike[0])):
            before, others = self._done[key].get(n, (0.0, 0))
            self._done[key][n] = (before + seconds, others + rows)

    def expect(self, task: Task) -> float | None:
        """Predict the seconds that a task takes; ``None`` if no similar task is finished."""
        row = self.a_row(task.alike, task.n)
        return None if row is None else task.size * row

    def a_row(self, alike: tuple[Any, ...], n: int) -> float | None:
        """Predict the seconds of one row at length n; ``None`` if no similar task (``alike``) is finished."""
        seen = self._done.get(alike) or self._done.get((_ANY, alike[0]))
        if not seen:
            return None
        first, *others = sorted(seen, key=lambda one: abs(math.log(one / n)))
        near = [first, *(other for other in others if max(first, other) >= 2 * min(first, other))][:2]
        times = [seen[one][0] / seen[one][1] for one in near]
        if len(near) == 1 or min(times) <= 0:
            return times[0] * max(n, _SHORT) / max(near[0], _SHORT)
        exponent = math.log(times[1] / times[0]) / math.log(near[1] / near[0])
        steepest = 1.0 if max(near) < _SHORT else 2.0
        return float(times[0] * (n / near[0]) ** min(max(exponent, 0.0), steepest))

    def left(self, spent: float, done: Rows, left: Rows) -> float:
        """Predict the seconds that the rows ``left`` take, if the rows ``done`` took ``spent`` seconds."""

        def expected(rows: Rows) -> float:
            each = ((count, n, self.a_row(alike, n)) for (alike, n), count in rows.items())
            return float(sum(count * (max(n, _SHORT) if row is None else row) for count, n, row in each))

        return spent * expected(left) / max(expected(done), 1e-9)


class _WorkProgress:
    """Tells a listener how far the tasks of one kind are. The pace counts from the first result, before which
    a model is loaded.
    """

    def __init__(self, listener: Listener, work: Work, times: TaskTimes) -> None:
        self._listener, self._times = listener, times
        self._began = self._since = self._last = time.monotonic()
        self._rows = self._of_task = 0
        self._done: Counter[tuple[Any, int]] | None = None
        self._left: Counter[tuple[Any, int]] = Counter()
        for task in work.tasks:
            self._left[task.alike, task.n] += task.size
        self._planned = self._left.total()
        more = f" ({work.kept} more are in the store already)" if work.kept else ""
        listener.phase(f"Computing {self._planned} {work.words}{more}")

    def advance(self, task: Task, rows: int, *, ended: bool) -> None:
        """Report to the listener that a task has computed more rows, or that it has ended."""
        self._rows += rows
        # Rows that a task failed to compute are not left to do either.
        gone = task.size - self._of_task if ended else rows
        self._of_task = 0 if ended else self._of_task + rows
        self._left[task.alike, task.n] -= gone
        now, left = time.monotonic(), self._left.total()
        if self._done is None:
            self._since, self._last, self._done = now, now, Counter()
        else:
            self._done[task.alike, task.n] += gone
        steady = now - self._since >= _FIRST_TELLING * _BETWEEN_TELLING and self._done.total()
        if self._rows and (left <= 0 or (steady and now - self._last > _BETWEEN_TELLING)):
            self._last, spent = now, now - self._began
            rest = self._times.left(now - self._since, self._done, self._left) if left > 0 else 0.0
            self._listener.advance(spent, spent + rest, f"{self._rows} of {self._planned}, {task.words}")


# ---- Code that runs on a worker


_Done = tuple[list[Found], float | None]
"""What a worker process returns for a task: its results, and the seconds it took.

The seconds are None for the first task of a plan in a process. It also loads the model and starts PyTorch, so
that its time says nothing about other tasks.
"""

# Dask may run several tasks of a process in threads. They share PyTorch's settings and the loaded model, so
# only one of them runs at a time.
_ONE_AT_A_TIME = threading.Lock()
_kept: tuple[Plan | None, Models | None] = (None, None)


def _worker_results(task: Task, sent_by: str, keep_going: bool, threads: int | None) -> _Done:
    """Compute a task on a worker and return its results; the model stays loaded for the plan's next task."""
    global _kept
    here = version("howsmooth")
    if sent_by != here:
        raise WorkerError(
            f"a worker has howsmooth {here}, but the study runs with {sent_by}, so their results may "
            "differ. Install the same version on all machines."
        )
    with _ONE_AT_A_TIME:
        if threads is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        began = time.monotonic()
        steps: list[Found] = []
        plan = getattr(task, "plan", None)
        warm = plan == _kept[0]
        if not warm:
            _kept = (None, None)  # free the model of another plan before loading a new one
            _kept = (plan, None if plan is None else Models(plan))
        for found in task.found(_kept[1]):
            # The error travels back by pickle. The task ends here if the failure will end the run anyway.
            if isinstance(found, Failed):
                steps.append(Failed(found.rows, _sendable(found.error)))
                if task.essential and not keep_going:
                    break
            else:
                steps.append(found)
        return steps, time.monotonic() - began if warm else None


def _sendable(error: Exception) -> Exception:
    """Return an error that can be pickled: errors of howsmooth as they are, others as a WorkerError."""
    return error if isinstance(error, HowsmoothError) else WorkerError(f"{type(error).__name__}: {error}")


def _result(future: Future[_Done], task: Task) -> _Done:
    """Return what a worker computed for a task; an error of the worker becomes a failure of the task."""
    try:
        return future.result()
    except (BrokenExecutor, CancelledError) as error:
        raise _lost(error, task) from error
    except WorkerError:
        raise  # such as another version of howsmooth on the worker, with which every task would fail
    except Exception as error:
        lost = WorkerError(f"{type(error).__name__}: {error}")
        lost.__cause__ = error
        return [task.failed(lost)], None


def _lost(error: Exception, task: Task | None = None) -> WorkerError:
    where = f" during the task {task.words}" if task is not None else ""
    return WorkerError(
        f"the workers were lost{where} ({' '.join(str(error).split()) or type(error).__name__}). One may "
        "have run out of memory: try fewer workers or shorter lengths. Finished measurements are saved; "
        f"to continue, {RUN_AGAIN}."
    )
