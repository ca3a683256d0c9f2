"""Carry out the tasks of a study here or on an executor, and write each result to the store.

An executor is an object with the interface of ``concurrent.futures.Executor``. It does not change results: a
task carries its data and its seeds, and only this process writes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.metadata import version

import torch

from howsmooth.errors import HowsmoothError, WorkerError
from howsmooth.study.environment import environment
from howsmooth.study.executors import workers_left, workers_of
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.progress_listener import Listener, Outcome
from howsmooth.study.store import Store
from howsmooth.study.study_preparation import Models, placed
from howsmooth.study.tasks.task import Failed, Found, Task, Work
from howsmooth.threads import renew_threads
from howsmooth.words import RUN_AGAIN

__all__ = ["Means", "Runner", "load_early"]

# After so many seconds without a result the workers are counted.
_SILENCE = 30.0

Step = tuple[Task, Found | None]  # a task with one of its results, or None when it has ended

# Seconds between two reports of the progress, and from the first result to the first word on the time left.
_BETWEEN_TELLING = 0.2
_STEADY = 2.0


@dataclass(frozen=True, eq=False)
class Means:
    """How to carry out tasks: listener, workers, threads, and whether to go on after failures."""

    listener: Listener = field(default_factory=Listener)
    command: str = ""  #: The command that the user typed, to be recorded with the run.
    keep_going: bool = False  #: Whether the run continues after a failure instead of raising it.
    #: Who carries out the tasks, and is not shut down; None: this process, one after another.
    executor: Executor | None = None
    threads: int | None = None  #: CPU threads of PyTorch for each worker; None takes the fastest.
    models: Models | None = None  #: An existing loader of models in this process.
    processes: int = 1  #: How many processes may be started to carry out a study.


class Runner:
    """Carries out the tasks of a study, and writes each result of a task to the store in one transaction.

    With ``whole``, the number of tasks of a figure, the progress of all work is told by one count.
    """

    def __init__(
        self, store: Store, means: Means, models: Models | None = None, device: str = "cpu", whole: int = 0
    ) -> None:
        self._store, self._means, self._models, self._device = store, means, models, device
        self._whole, self._before = whole, 0
        self._unusable: set[str] = set()
        self._number: int | None = None
        self._began = time.monotonic()
        self.outcome = Outcome()

    def carry_out(self, work: Work) -> None:
        """Carry out tasks of one kind, and store their results. Lost workers raise WorkerError; without
        ``keep_going``, a failed task raises its error after its other results were written.
        """
        self.outcome.kept[work.kind.table] += work.kept
        for failed in work.failed:
            self.fail(failed)
        left = deque(work.tasks)
        if left:
            told = _WorkProgress(self._means.listener, work, self._before, self._whole)
            self._before += work.share
            steps = self._run_here(left) if self._means.executor is None else self._run_on_workers(left)
            # If writing fails, or a failure ends the run, `closing` ends the generator, which cancels the
            # tasks that wait on workers.
            with closing(steps):
                for task, found in steps:
                    told.advance(task, 0 if found is None else self._write(task, found), ended=found is None)

    def finish(self, began: float | None = None) -> Outcome:
        """Record the end of the run that started at time ``began``, and return the outcome of the run."""
        # A run that wrote nothing has no number, and leaves no trace in the store.
        if self._number is not None:
            self._store.finish_run(self._number)
        self.outcome.seconds = time.monotonic() - (self._began if began is None else began)
        return self.outcome

    def fail(self, failed: Failed, *, ends: bool = True) -> None:
        """Record a failure. Raise its error if it ``ends`` the run, unless the user asked to keep going."""
        self._store.add(failed.rows, self._run)
        self.outcome.failed += len(failed.rows)
        self.outcome.first_failure = self.outcome.first_failure or failed.rows[0].error
        if ends and not self._means.keep_going:
            raise failed.error

    @property
    def _run(self) -> int:
        if self._number is None:
            made_with = environment(self._device, self._means.executor, self._means.threads)
            self._number = self._store.start_run(self._means.command, self._device, made_with)
        return self._number

    def _write(self, task: Task, found: Found) -> int:
        """Write what a task has yielded, rows or a failure; return the number of results in it."""
        if isinstance(found, Failed):
            unloaded = {row.model for row in found.rows if row.text is None}
            # A model that cannot be loaded fails all of its tasks; record this failure once.
            if not unloaded or not unloaded <= self._unusable:
                self._unusable |= unloaded
                self.fail(found, ends=task.essential)
            return 0
        self._store.add(found, self._run)
        self.outcome.made[task.kind.table] += task.count(found)
        self.outcome.unsettled[task.kind.table] += sum(row.unsettled for row in found)
        return task.count(found)

    # ---- Tasks in this process, or on workers

    def _next(self, left: deque[Task]) -> Task | None:
        while left and left[0].model in self._unusable:
            left.popleft()
        return left.popleft() if left else None

    def _run_here(self, left: deque[Task]) -> Generator[Step, None, None]:
        while (task := self._next(left)) is not None:
            renew_threads()
            for found in task.packed().found(self._models):
                yield task, found
            yield task, None

    def _run_on_workers(self, left: deque[Task]) -> Generator[Step, None, None]:
        executor = self._means.executor
        assert executor is not None
        workers = workers_of(executor)
        running: dict[Future[list[Found]], Task] = {}
        try:
            while True:
                # Submit two tasks for each worker, which keeps it busy. More are not submitted early,
                # because a task whose model turns out to be unusable is left out.
                while len(running) < 2 * workers and (task := self._next(left)) is not None:
                    how = (version("howsmooth"), self._means.keep_going, self._means.threads)
                    try:
                        running[executor.submit(_worker_results, task.packed(), *how)] = task
                    except (BrokenExecutor, OSError) as error:
                        raise _lost(error) from error
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
                    for found in _result(future, task):
                        yield task, found
                    yield task, None
        finally:
            # Tasks that have started cannot be cancelled. They run to their end, and their results are
            # dropped.
            for future in running:
                future.cancel()


def load_early(executor: Executor, plan: Plan, threads: int | None) -> None:
    """Let workers load the first model of a plan, a trained one, before they get a task. Errors are ignored
    here; they are raised when the model is checked, or by the tasks.
    """
    with suppress(BrokenExecutor, OSError):
        for _ in range(workers_of(executor)):
            executor.submit(_load_first, plan, placed(plan.models[0]), threads)


# ---- Progress


class _WorkProgress:
    """Reports how many results of one kind are computed, and estimates the seconds left for the others."""

    def __init__(self, listener: Listener, work: Work, before: int, whole: int) -> None:
        self._listener, self._share, self._before, self._whole = listener, work.share, before, whole
        self._planned = sum(task.size for task in work.tasks)
        self._left = sum(task.work for task in work.tasks)
        self._made = self._gone = self._of_task = 0
        self._since: float | None = None
        self._last, self._paced = -math.inf, 0.0
        more = f" ({work.kept} more are in the store already)" if work.kept else ""
        if not whole:
            listener.phase(f"Computing {self._planned} {work.words}{more}")

    def advance(self, task: Task, results: int, *, ended: bool) -> None:
        # Results that a task failed to compute are not left to do either.
        gone = task.size - self._of_task if ended else results
        self._of_task = 0 if ended else self._of_task + results
        self._made, self._gone = self._made + results, self._gone + gone
        work = gone * task.work / task.size
        self._left -= work
        now = time.monotonic()
        if self._since is None:
            self._since = now
        else:
            self._paced += work
        spent, over = now - self._since, self._gone >= self._planned
        if over or now - self._last > _BETWEEN_TELLING:
            self._last = now
            if self._whole:
                done = min(self._before + self._share * self._gone / self._planned, self._whole)
                words = f"{math.floor(done)} of {self._whole} tasks, {task.words}"
                self._listener.advance(done, self._whole, words)
                return
            left = spent * self._left / self._paced if spent > _STEADY and self._paced else None
            words = f"{self._made} of {self._planned}, {task.words}"
            self._listener.advance(self._gone, self._planned, words, left)


# ---- Code that runs on a worker


# Dask may run several tasks of a process in threads. They share PyTorch's settings and the loaded model, so
# only one of them runs at a time.
_ONE_AT_A_TIME = threading.Lock()
_kept: tuple[Plan | None, Models | None] = (None, None)


def _worker_results(task: Task, sent_by: str, keep_going: bool, threads: int | None) -> list[Found]:
    """Compute a task on a worker and return its results; the model stays loaded for the plan's next task."""
    here = version("howsmooth")
    if sent_by != here:
        raise WorkerError(
            f"a worker has howsmooth {here}, but the study runs with {sent_by}, so their results may "
            "differ. Install the same version on all machines."
        )
    with _ONE_AT_A_TIME:
        steps: list[Found] = []
        for found in task.found(_worker_models(getattr(task, "plan", None), threads)):
            # The error travels back by pickle. The task ends here if the failure will end the run anyway.
            if isinstance(found, Failed):
                steps.append(Failed(found.rows, _sendable(found.error)))
                if task.essential and not keep_going:
                    break
            else:
                steps.append(found)
        return steps


def _worker_models(plan: Plan | None, threads: int | None) -> Models | None:
    """Return a worker's loader of the models of a plan, after setting the worker's number of threads."""
    global _kept
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if plan != _kept[0]:
        _kept = (None, None)  # free the model of another plan before loading a new one
        _kept = (plan, None if plan is None else Models(plan))
    return _kept[1]


def _load_first(plan: Plan, spec: ModelSpec, threads: int | None) -> None:
    with _ONE_AT_A_TIME:
        models = _worker_models(plan, threads)
        assert models is not None
        models.load(spec, "")


def _sendable(error: Exception) -> Exception:
    return error if isinstance(error, HowsmoothError) else WorkerError(f"{type(error).__name__}: {error}")


def _result(future: Future[list[Found]], task: Task) -> list[Found]:
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
        return [task.failed(lost)]


def _lost(error: Exception, task: Task | None = None) -> WorkerError:
    where = f" during the task {task.words}" if task is not None else ""
    return WorkerError(
        f"the workers were lost{where} ({' '.join(str(error).split()) or type(error).__name__}). One may "
        "have run out of memory: try fewer workers or shorter lengths. Finished measurements are saved; "
        f"to continue, {RUN_AGAIN}."
    )
