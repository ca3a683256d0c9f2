"""Start worker processes for a study on this machine, or connect to the workers of a Dask cluster."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

import torch

from howsmooth.memory import memory_budget
from howsmooth.study.execution_options import Execution
from howsmooth.study.worker_processes import available_cores, worker_processes

__all__ = ["memory_each", "opened_executor", "threads_each", "workers_left", "workers_of"]


@contextmanager
def opened_executor(how: Execution) -> Iterator[Executor | None]:
    """Yield an executor for the workers that the user asked for, and close it at the end of the context.

    Yield None if the user asked for no workers.

    After an error, workers that are still busy are stopped too.

    Raises
    ------
    ArgumentError
        If Dask is asked for and not installed.
    WorkerError
        If the Dask scheduler cannot be reached, or has no workers.

    """
    if how.executor is None:
        yield None
    elif how.executor == "dask":
        from howsmooth.study.dask_cluster import connected_cluster

        workers = how.workers or (available_cores() if how.scheduler is None else 1)
        with connected_cluster(how.scheduler, workers) as cluster:
            yield cluster
    else:
        with worker_processes(how.workers or available_cores()) as pool:
            yield pool


def workers_of(executor: Executor | None) -> int:
    """Return how many tasks an executor runs at the same time; 1 without an executor."""
    if isinstance(executor, ProcessPoolExecutor):
        return int(getattr(executor, "_max_workers"))  # noqa: B009 - not in the type stubs
    return max(1, int(getattr(executor, "workers", 1)))


def workers_left(executor: Executor) -> int:
    """Return how many workers an executor has now. A pool of processes fails when it loses one."""
    present = getattr(executor, "present", None)
    return workers_of(executor) if present is None else present()


def threads_each(executor: Executor | None, asked: int | None) -> int | None:
    """Return how many CPU threads each worker should use; ``None`` leaves the number unchanged.

    It is the number that the user asked for, if any; else processes of this machine share its cores equally.
    """
    if asked is None and isinstance(executor, ProcessPoolExecutor):
        return max(1, available_cores() // workers_of(executor))
    return asked


def memory_each(executor: Executor | None, asked: int | None, device: str) -> int | None:
    """Return how many bytes one task may use; ``None`` stands for half of the memory that is free then.

    It is the number that the user asked for, if any; else processes of this machine share half of the free
    memory of the device equally.
    """
    if asked is None and isinstance(executor, ProcessPoolExecutor):
        return max(1, memory_budget(None, torch.device(device)) // workers_of(executor))
    return asked
