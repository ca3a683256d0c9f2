"""Workers for a study: processes of this machine, or a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from howsmooth.study.plan import Execution

__all__ = ["available_cores", "opened_executor", "threads_each", "workers_of"]


@contextmanager
def opened_executor(
    kind: str | None, *, workers: int | None = None, scheduler: str | None = None
) -> Iterator[Executor | None]:
    """Start workers, and end them; after an error those that are at work too.

    Parameters
    ----------
    kind
        ``processes`` or ``dask``; ``None`` for no workers.
    workers
        How many processes; by default one a CPU core.
    scheduler
        Address of a Dask scheduler, such as ``tcp://10.0.0.1:8786``.

    Yields
    ------
    Executor or None

    Raises
    ------
    ArgumentError
        If these do not fit together, or Dask is not installed.
    WorkerError
        If the scheduler cannot be reached, or has no workers.

    """
    how = Execution(executor=kind, workers=workers, scheduler=scheduler)  # refuses what does not go together
    if how.executor is None:
        yield None
    elif how.scheduler is not None:
        from howsmooth.study.cluster import connected_cluster

        with connected_cluster(how.scheduler) as cluster:
            yield cluster
    else:
        with _processes(how.workers or available_cores()) as pool:
            yield pool


@contextmanager
def _processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    # Forked processes would inherit PyTorch's threads in a state that nobody knows, and no GPU.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin)
    try:
        yield pool
    except BaseException:
        # Nobody waits for what is still at work; the processes are the pool's own business otherwise.
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _begin() -> None:
    """Begin a worker: Ctrl-C is the affair of the process that it works for, and so is its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def available_cores() -> int:
    """Return how many CPU cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def workers_of(executor: Executor | None) -> int:
    """Return how many tasks an executor carries out at a time; 1 without one."""
    if isinstance(executor, ProcessPoolExecutor):
        return int(getattr(executor, "_max_workers"))  # noqa: B009 - not in the type stubs
    return max(1, int(getattr(executor, "workers", 1)))


def threads_each(executor: Executor | None, asked: int | None) -> int | None:
    """Return how many CPU threads each worker should use; ``None`` for what it has.

    Parameters
    ----------
    executor
        The workers. Those of this machine share its cores out among them.
    asked
        What was asked for, if anything.

    """
    if asked is None and isinstance(executor, ProcessPoolExecutor):
        return max(1, available_cores() // workers_of(executor))
    return asked
