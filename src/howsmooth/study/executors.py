"""Workers for a study: threads or processes of this machine, or a Dask cluster.

Each is an executor in the sense of ``concurrent.futures`` that says how many ``workers`` it has.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from howsmooth.errors import ArgumentError

__all__ = ["EXECUTORS", "Processes", "Threads", "available_cores", "opened_executor", "threads_each"]

EXECUTORS = ("threads", "processes", "dask")
"""The kinds of workers."""

_MOST_WORKERS = 1024


class Threads(ThreadPoolExecutor):
    """Threads of this process, which share one copy of a model."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, thread_name_prefix="howsmooth")
        self.workers = workers


class Processes(Executor):
    """Processes of this machine, each with models of its own; those that end are replaced.

    Parameters
    ----------
    workers
        How many.

    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # Forked processes would inherit PyTorch's threads in a state that nobody knows, and no GPU.
        self._context = multiprocessing.get_context("spawn")
        # Nothing is ever sent: a worker reads that the other end was closed, by us or by our death.
        self._reader, self._writer = self._context.Pipe(duplex=False)
        self._pool = self._new()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a worker call a function; after the loss of one, there are new ones."""
        with _interrupts_held():
            try:
                return self._pool.submit(fn, *args, **kwargs)
            except BrokenProcessPool:
                self._pool.shutdown(wait=True)
                self._pool = self._new()
                return self._pool.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers; those that are at work are waited for if ``wait``, and else ended too."""
        if wait:
            self._pool.shutdown(wait=True, cancel_futures=cancel_futures)
            self._writer.close()
        else:
            self._writer.close()
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self.workers, mp_context=self._context, initializer=_begin, initargs=(self._reader,)
        )


def _begin(alive: Connection) -> None:
    """Begin a worker: Ctrl-C is the affair of the process that it works for, and so is its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: Connection) -> None:
    """Wait until the process that the worker works for closes its end, or dies, and end at once."""
    try:
        alive.recv()
    except (EOFError, OSError):
        os._exit(1)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while a worker starts: it inherits that, and would else end with a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def available_cores() -> int:
    """Return how many CPU cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def threads_each(executor: Executor | None, asked: int | None) -> int | None:
    """Return how many CPU threads each worker should use; ``None`` for what it has.

    Parameters
    ----------
    executor
        The workers. Those of this machine share its cores out among them.
    asked
        What was asked for, if anything.

    """
    if asked is None and isinstance(executor, Threads | Processes):
        return max(1, available_cores() // executor.workers)
    return asked


@contextmanager
def opened_executor(
    kind: str | None, *, workers: int | None = None, scheduler: str | None = None
) -> Iterator[Executor | None]:
    """Start workers, and end them; after an error those that are at work too.

    Parameters
    ----------
    kind
        Of :data:`EXECUTORS`; ``None`` for no workers.
    workers
        How many threads or processes; by default one a CPU core.
    scheduler
        Address of a Dask scheduler, such as ``tcp://10.0.0.1:8786``.

    Yields
    ------
    Executor or None
        It says in ``workers`` how many there are.

    Raises
    ------
    ArgumentError
        If these do not fit together, or Dask is not installed.
    WorkerError
        If the scheduler cannot be reached, or has no workers.

    """
    _check(kind, workers, scheduler)
    if kind is None:
        yield None
        return
    if kind == "dask":
        from howsmooth.study.cluster import connected_cluster

        assert scheduler is not None
        with connected_cluster(scheduler) as cluster:
            yield cluster
        return
    count = workers or available_cores()
    executor = Threads(count) if kind == "threads" else Processes(count)
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def _check(kind: str | None, workers: int | None, scheduler: str | None) -> None:
    if kind is not None and kind not in EXECUTORS:
        raise ArgumentError("executor", expected=f"one of {', '.join(EXECUTORS)}", got=repr(kind))
    if workers is not None:
        if kind not in ("threads", "processes"):
            raise ArgumentError(
                "workers",
                expected="--executor threads or --executor processes beside it",
                got=f"--executor {kind}" if kind else "no --executor",
                remedy="The workers of a Dask cluster are started beside its scheduler." if kind else "",
            )
        if not 1 <= workers <= _MOST_WORKERS:
            raise ArgumentError("workers", expected=f"a number from 1 to {_MOST_WORKERS}", got=str(workers))
    if scheduler is not None and kind != "dask":
        raise ArgumentError(
            "scheduler",
            expected="--executor dask beside it",
            got=f"--executor {kind}" if kind else "no --executor",
        )
    if kind == "dask" and scheduler is None:
        raise ArgumentError(
            "scheduler",
            expected="the address of a Dask scheduler",
            got="none",
            remedy="Start one with dask scheduler, and workers with dask worker ADDRESS.",
        )
