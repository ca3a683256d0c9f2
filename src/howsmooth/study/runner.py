"""The runner: tasks are carried out here or by an executor, and what comes is written as it comes.

It knows nothing of what a task computes. An executor is one in the sense of ``concurrent.futures``; results
do not depend on it, since a task travels with its data and its seeds, and one process writes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Generator
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

import torch

from howsmooth.errors import HowsmoothError, WorkerError
from howsmooth.study.environment import environment
from howsmooth.study.executors import workers_of
from howsmooth.study.pace import Pace
from howsmooth.study.plan import Plan
from howsmooth.study.progress import Listener, Outcome, Silent
from howsmooth.study.store import Store
from howsmooth.study.subjects import Models
from howsmooth.study.tasks.task import Failed, Found, Task, Work

__all__ = ["Means", "Runner"]

Step = tuple[Task, Found | None]
"""A task and something that came of it; ``None`` when nothing more will."""

_BETWEEN_TELLING = 0.2


@dataclass(frozen=True, eq=False)
class Means:
    """How tasks are carried out.

    Attributes
    ----------
    listener
        Whoever is told how far the work is.
    command
        To be recorded as the origin of the rows.
    keep_going
        Go on with the rest after a failure, instead of raising it.
    executor
        Where tasks are carried out; it is not shut down. ``None`` for here, one after the other.
    threads
        CPU threads of PyTorch for each task of the executor; ``None`` leaves what its workers have.
    models
        What loads models in this process, if that is there already.

    """

    listener: Listener = field(default_factory=Silent)
    command: str = ""
    keep_going: bool = False
    executor: Executor | None = None
    threads: int | None = None
    models: Models | None = None


class Runner:
    """Carries out work and writes what comes of it, one transaction a step.

    Parameters
    ----------
    store
        Open for writing.
    means
        How.
    models
        Those that this process has loaded; ``None`` if tasks need none.
    device
        Where tasks compute.

    """

    def __init__(self, store: Store, means: Means, models: Models | None = None, device: str = "cpu") -> None:
        self._store = store
        self._means = means
        self._models = models
        self._device = device
        self._unusable: set[str] = set()
        self._number: int | None = None
        self._began = time.monotonic()
        self.pace = Pace()
        self.outcome = Outcome()

    def carry_out(self, work: Work, *, seconds: float = math.inf) -> None:
        """Carry out the tasks of some work, in order.

        Parameters
        ----------
        work
            What is left to do.
        seconds
            How long the tasks may take together: before one that would exceed it they end, and what is left
            out is counted.

        Raises
        ------
        WorkerError
            If the workers of the executor are lost.
        howsmooth.errors.HowsmoothError
            If a task fails and the run is not to keep going, after what was found has been written; or if the
            store cannot be written.

        """
        self.outcome.kept[work.kind.table] += work.kept
        for failed in work.failed:
            self.fail(failed)
        left = deque(work.tasks)
        if left and seconds > 0:
            told = _Told(self._means.listener, work, self.pace, workers_of(self._means.executor))
            until = time.monotonic() + seconds
            steps = self._here(left, until) if self._means.executor is None else self._spread(left, until)
            with closing(steps):
                for task, found in steps:
                    told.advance(task, 0 if found is None else self._write(task, found), ended=found is None)
        self.outcome.left_out += sum(task.size for task in left)

    def finish(self) -> Outcome:
        """Record that all was tried that was asked for, and return what was done."""
        if self._number is not None:
            self._store.finish_run(self._number)
        self.outcome.seconds = time.monotonic() - self._began
        return self.outcome

    def fail(self, failed: Failed, *, ends: bool = True) -> None:
        """Record a failure, and raise it if it ends the run."""
        self._store.add(failed.rows, self._run)
        self.outcome.failed += len(failed.rows)
        self.outcome.first_failure = self.outcome.first_failure or failed.rows[0].error
        if ends and not self._means.keep_going:
            raise failed.error

    @property
    def _run(self) -> int:
        """The number of the run, which begins when there is something to write."""
        if self._number is None:
            means = self._means
            made_with = environment(self._device, means.executor, means.threads)
            self._number = self._store.start_run(means.command, self._device, made_with)
        return self._number

    def _write(self, task: Task, found: Found) -> int:
        """Write one step of a task, and count the rows that were asked for."""
        if isinstance(found, Failed):
            unloaded = {row.model for row in found.rows if row.text is None}
            # Where tasks run at the same time, another one may have told it.
            if not unloaded or not unloaded <= self._unusable:
                self._unusable |= unloaded
                self.fail(found, ends=task.essential)
            return 0
        self._store.add(found, self._run, worked=time.monotonic() - self._began)
        self.outcome.made[task.kind.table] += task.count(found)
        self.outcome.unsettled[task.kind.table] += sum(row.unsettled for row in found)
        return task.count(found)

    # ---- here, or on workers

    def _next(self, left: deque[Task], until: float) -> Task | None:
        """Take the next task, if there is one whose model can be used and whose time there is."""
        while left and left[0].model in self._unusable:
            left.popleft()
        if not left:
            return None
        late = time.monotonic() + (self.pace.expect(left[0]) or 0.0) >= until
        return None if late else left.popleft()

    def _here(self, left: deque[Task], until: float) -> Generator[Step, None, None]:
        while (task := self._next(left, until)) is not None:
            began = time.monotonic()
            for found in task.packed().found(self._models):
                yield task, found
            self.pace.learn(task.alike, task.n, task.size, time.monotonic() - began)
            yield task, None

    def _spread(self, left: deque[Task], until: float) -> Generator[Step, None, None]:
        executor = self._means.executor
        assert executor is not None
        workers = workers_of(executor)
        running: dict[Future[_Done], Task] = {}
        try:
            while True:
                # As many tasks as keep workers busy, and no more: those that wait can still be left out.
                while len(running) < 2 * workers and (task := self._next(left, until)) is not None:
                    running[self._submitted(executor, task)] = task
                if not running:
                    return
                done = wait(running, return_when=FIRST_COMPLETED).done
                # In the order of the tasks, so that a failure does not lose what came before it.
                for future in [future for future in running if future in done]:
                    task = running.pop(future)
                    result = _result(future, task)
                    for found in result.found:
                        yield task, found
                    self.pace.learn(task.alike, task.n, task.size, result.seconds)
                    yield task, None
        finally:
            for future in running:
                future.cancel()

    def _submitted(self, executor: Executor, task: Task) -> Future[_Done]:
        means = self._means
        try:
            return executor.submit(
                _carried, task.packed(), version("howsmooth"), means.keep_going, means.threads
            )
        except (BrokenExecutor, OSError) as error:
            raise _lost(error) from error


class _Told:
    """Tells a listener how far some work is, and how much time is left."""

    def __init__(self, listener: Listener, work: Work, pace: Pace, workers: int) -> None:
        self._listener = listener
        self._pace = pace
        self._workers = workers
        self._began = self._last = time.monotonic()
        # Of each task the rows that it made so far.
        self._made = {id(task): (task, 0) for task in work.tasks}
        self._done, self._planned = 0, sum(task.size for task in work.tasks)
        more = f" ({work.kept} more are in the store already)" if work.kept else ""
        listener.phase(f"Computing {self._planned} {work.words}{more}")

    def advance(self, task: Task, rows: int, *, ended: bool) -> None:
        """Tell that a task made rows, or that it ended."""
        self._done += rows
        if ended:
            del self._made[id(task)]
        else:
            self._made[id(task)] = (task, self._made[id(task)][1] + rows)
        now = time.monotonic()
        # What is left is summed over all tasks, which may be many.
        if self._done and (now - self._last > _BETWEEN_TELLING or not self._made):
            self._last, spent = now, now - self._began
            left = self._pace.expect_all(
                (one, 1 - min(made / one.size, 1)) for one, made in self._made.values()
            )
            total = spent * self._planned / self._done if left is None else spent + left / self._workers
            self._listener.advance(spent, total, f"{self._done} of {self._planned}, {task.words}")


# ---- on the side of the worker


@dataclass(frozen=True, eq=False)
class _Done:
    """What came of a task on a worker, and how long it took."""

    found: list[Found]
    seconds: float


# The tasks of one process, be they in several threads, change PyTorch's settings and share its models.
_ONE_AT_A_TIME = threading.Lock()
_kept: tuple[Plan | None, Models | None] = (None, None)


def _carried(task: Task, sent_by: str, keep_going: bool, threads: int | None) -> _Done:
    """Carry a task out in a worker, with the models that it keeps for the next one of the same plan."""
    here = version("howsmooth")
    if sent_by != here:
        raise WorkerError(
            f"a worker has howsmooth {here}, and the study is run by {sent_by}: what they "
            "measure need not agree. Install the same version on all machines."
        )
    with _ONE_AT_A_TIME:
        if threads is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        began = time.monotonic()
        steps: list[Found] = []
        for found in task.found(_models_for(getattr(task, "plan", None))):
            failed = isinstance(found, Failed)
            steps.append(Failed(found.rows, _sendable(found.error)) if isinstance(found, Failed) else found)
            if failed and task.essential and not keep_going:
                break
        return _Done(steps, time.monotonic() - began)


def _models_for(plan: Plan | None) -> Models | None:
    global _kept
    if plan != _kept[0]:
        _kept = (None, None)  # let go of another plan's model before there is a new one
        _kept = (plan, None if plan is None else Models(plan))
    return _kept[1]


def _sendable(error: Exception) -> Exception:
    """Return an error of ours, or one of another library in words: those need not survive the journey."""
    return error if isinstance(error, HowsmoothError) else WorkerError(f"{type(error).__name__}: {error}")


def _result(future: Future[_Done], task: Task) -> _Done:
    """Return what came of a task; what the worker or the executor raised itself is a failure of the task."""
    try:
        return future.result()
    except (BrokenExecutor, CancelledError) as error:
        raise _lost(error, task) from error
    except WorkerError:
        raise
    except Exception as error:
        lost = WorkerError(f"{type(error).__name__}: {error}")
        lost.__cause__ = error
        return _Done([task.failed(lost)], 0.0)


def _lost(error: Exception, task: Task | None = None) -> WorkerError:
    where = f" while one had {task.words}" if task is not None else ""
    return WorkerError(
        f"the workers were lost{where} ({' '.join(str(error).split()) or type(error).__name__}). One may "
        "have run out of memory: try fewer workers or shorter --lengths. What was measured is kept: run the "
        "same again."
    )
