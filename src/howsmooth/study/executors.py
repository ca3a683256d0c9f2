"""Choose who carries out the tasks of a study: this process, several processes, or a Dask cluster."""

from __future__ import annotations

from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch

from howsmooth.memory import SHARE, free_memory, memory_budget
from howsmooth.study.execution_options import Execution
from howsmooth.study.worker_processes import WORTH, available_cores, worker_processes

__all__ = [
    "are_worth_it", "memory_each", "opened_executor", "processes_of", "threads_each", "workers_left",
    "workers_of",
]  # fmt: skip

# Bytes of a process without a model
_PROCESS = 600 << 20


def opened_executor(how: Execution) -> AbstractContextManager[Executor | None]:
    """Return a context manager. It yields an executor for the workers that the user asked for, or None for
    this process alone. ArgumentError is raised if Dask is missing, WorkerError if its scheduler does not
    answer or lacks workers.
    """
    if how.executor is None:
        return nullcontext()
    if how.executor == "dask":
        from howsmooth.study.dask_cluster import connected_cluster

        workers = how.workers or (available_cores() if how.scheduler is None else 1)
        return connected_cluster(how.scheduler, workers)
    return worker_processes(how.workers or available_cores())


def are_worth_it(processes: int, constants: int, model: float) -> bool:
    """Return True if several processes are faster than one, and fit into half of the free memory."""
    fit = processes * (model + _PROCESS) <= SHARE * free_memory(torch.device("cpu"))
    return processes > 1 and constants >= WORTH and fit


def workers_of(executor: Executor | None) -> int:
    """Return how many tasks an executor runs at the same time; 1 without an executor."""
    if isinstance(executor, ProcessPoolExecutor):
        return int(getattr(executor, "_max_workers"))  # noqa: B009 - not in the type stubs
    return max(1, int(getattr(executor, "workers", 1)))


def workers_left(executor: Executor) -> int:
    """Return how many workers an executor has now. A pool of processes keeps all of them, or fails."""
    present = getattr(executor, "present", None)
    return workers_of(executor) if present is None else present()


def processes_of(executor: Executor | None) -> int:
    """Return how many processes on this machine an executor has; 1 if it is not a pool of processes."""
    return workers_of(executor) if isinstance(executor, ProcessPoolExecutor) else 1


def threads_each(executor: Executor | None, asked: int | None) -> int | None:
    """Return how many CPU threads each worker should use; None leaves the number unchanged."""
    if asked is None and isinstance(executor, ProcessPoolExecutor):
        return max(1, available_cores() // workers_of(executor))
    return asked


def memory_each(processes: int, asked: int | None, device: str) -> int | None:
    """Return how many bytes a task may use, or None for the default. Several processes share the memory."""
    if asked is None and processes > 1:
        return max(1, memory_budget(None, torch.device(device)) // processes)
    return asked
