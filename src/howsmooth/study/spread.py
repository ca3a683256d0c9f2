"""Carry tasks out, here or on the workers of an executor; what comes goes to the one who writes the store.

The executor is one in the sense of ``concurrent.futures``: threads, processes, a Dask cluster. Results do not
depend on it: a task carries the seeds' axes with it, and its measurements are batched as they are without.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

import torch

from howsmooth.errors import WorkerError
from howsmooth.memory import memory_budget
from howsmooth.study.executors import Processes, Threads
from howsmooth.study.failure_log import FailureLog
from howsmooth.study.plan import Plan
from howsmooth.study.prepare import Models
from howsmooth.study.tools import Tools
from howsmooth.study.work import Task
from howsmooth.study.workers import Carry, Job, Piece, carry_out, packed, stop

__all__ = ["Means", "carried"]

One = TypeVar("One", bound=Task)

# Tasks that are with an executor which does not say how many workers it has.
_IN_FLIGHT = 64


@dataclass(frozen=True, eq=False)
class Means:
    """With what tasks are carried out.

    Attributes
    ----------
    plan, tools, models, failed, keep_going
        Those of the run.
    executor
        Where; ``None`` for here, one after the other.
    threads
        CPU threads of PyTorch for each task of an executor; ``None`` leaves what the workers have.

    """

    plan: Plan
    tools: Tools
    models: Models
    failed: FailureLog
    keep_going: bool
    executor: Executor | None = None
    threads: int | None = None


def carried(
    carry: Carry,
    tasks: Iterable[One],
    means: Means,
    *,
    alone: bool = False,
) -> Generator[tuple[One, Any | None], None, None]:
    """Carry out tasks; close the iterator to give up what is under way.

    Parameters
    ----------
    carry
        What carries out one.
    tasks
        All of them.
    means
        With what.
    alone
        Whether a task changes what all threads of a process share.

    Yields
    ------
    tuple
        A task, and something found in it that is to be written together; then the same task and ``None``,
        when nothing more comes of it.

    Raises
    ------
    WorkerError
        If workers are lost for good, or, without ``keep_going``, twice in the same task.

    """
    if means.executor is not None:
        yield from _spread(carry, tasks, means, means.executor, alone)
        return
    for task in tasks:
        for found in carry(means.plan, task, means.tools, means.models, means.failed):
            yield task, found
        yield task, None


def _spread(
    carry: Carry, tasks: Iterable[One], means: Means, executor: Executor, alone: bool
) -> Generator[tuple[One, Any | None], None, None]:
    run, here, plan = secrets.token_hex(8), version("howsmooth"), _with_memory_shared(means.plan, executor)
    waiting, lost = deque(tasks), deque[One]()
    running: dict[Future[Piece], One] = {}
    second: One | None = None

    def submit(task: One) -> None:
        job = Job(
            run=run,
            version=here,
            plan=plan,
            task=packed(task),
            tools=means.tools,
            carry=carry,
            keep_going=means.keep_going,
            alone=alone,
            threads=means.threads,
        )
        try:
            running[executor.submit(carry_out, job)] = task
        except BrokenExecutor as error:
            raise WorkerError(
                f"the workers are gone ({error}). What was measured is kept: run the same again, with new "
                "ones."
            ) from error

    try:
        while waiting or lost or running:
            if lost and not running:
                # What was under way when a worker was lost runs again by itself: a second loss has one cause.
                second = lost.popleft()
                submit(second)
            while waiting and not lost and len(running) < _most_in_flight(executor):
                task = waiting.popleft()
                if task.subject.model.label in means.failed.unusable:
                    yield task, None
                else:
                    submit(task)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                try:
                    piece = future.result()
                except BrokenExecutor as error:
                    if task is not second:
                        lost.append(task)
                        continue
                    _add(means.failed, task, _lost_twice(task, error))
                except CancelledError as error:
                    raise WorkerError(
                        "the connection to the workers was lost. What was measured is kept: run the same "
                        "again."
                    ) from error
                except Exception as error:
                    # Of the executor: those of a task come in its piece.
                    _add(means.failed, task, WorkerError(f"{type(error).__name__}: {error}"))
                else:
                    for found in piece.found:
                        yield task, found
                    means.failed.adopt(piece.failures, piece.unusable)
                    if piece.error is not None:
                        raise piece.error
                yield task, None
    finally:
        stop(run)
        for future in running:
            future.cancel()


def _with_memory_shared(plan: Plan, executor: Executor) -> Plan:
    """Share the usual memory of one measurement out among workers that use the same one."""
    if plan.memory is not None or not isinstance(executor, Threads | Processes):
        return plan
    return replace(plan, memory=max(1, memory_budget(None, torch.device(plan.device)) // executor.workers))


def _most_in_flight(executor: Executor) -> int:
    """As many tasks as keep workers busy, and no more: those that wait can still be left out."""
    workers = getattr(executor, "workers", None)
    return 2 * max(1, workers) if isinstance(workers, int) else _IN_FLIGHT


def _lost_twice(task: Task, error: BrokenExecutor) -> WorkerError:
    lost = WorkerError(
        f"a worker process ended while it measured {task.subject.model.label} at {task.n} tokens, and again "
        "when it measured that alone. It may have run out of memory: try shorter --lengths, or a larger "
        "machine."
    )
    lost.__cause__ = error
    return lost


def _add(failed: FailureLog, task: Task, error: Exception) -> None:
    """Record that a task failed as a whole."""
    subject = task.subject
    where = (subject.model.label, subject.text.name)
    failed.add(error, *where, scope=task.scope, n=task.n, samples=list(task.starts), what=task.what)
