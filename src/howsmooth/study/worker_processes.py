"""Start worker processes on this machine. This module imports nothing heavy."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from howsmooth.study.execution_options import Execution

__all__ = ["WORTH", "available_cores", "prepared_processes", "worker_processes"]

WORTH = 200
"""From so many constants on, processes take less time than threads, with the time to start them."""

_EACH = 60  # constants that each process should have


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no sched_getaffinity
        return os.cpu_count() or 1


def prepared_processes(constants: int, device: str, how: Execution) -> int:
    """Return the number of processes that measure ``constants`` constants fastest; 1 means this process
    alone. If there are several, start to import what they need in the background.

    Processes with a thread each do not wait for each other, whatever else the machine does. Who sets a number
    of threads means this process.
    """
    if how.executor is not None or how.threads is not None or "OMP_NUM_THREADS" in os.environ:
        return 1
    if constants < WORTH or device != "cpu":
        return 1
    processes = min(available_cores(), constants // _EACH)
    if processes > 1 and _context().get_start_method() == "forkserver":
        forkserver.ensure_running()
    return processes


@contextmanager
def worker_processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of worker processes, which ends with the ``with`` block. After an error, busy processes
    are stopped too.
    """
    pool = ProcessPoolExecutor(workers, mp_context=_context(), initializer=_set_up)
    try:
        yield pool
    except BaseException:
        # Nobody waits for the results of busy workers. The pool has no public method for this in Python 3.11
        # to 3.13.
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _context() -> BaseContext:
    # Not forks of this process, which would inherit PyTorch's threads in an undefined state, and no GPU
    way = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(way)
    if way == "forkserver":
        context.set_forkserver_preload(["howsmooth.study.worker_imports"])
    return context


def _set_up() -> None:
    """Set up a worker process: it ignores Ctrl-C, and exits when the process that started it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A killed parent cannot stop its workers, which would compute on for nobody. `os._exit` ends the process
    # from this thread, whatever the main thread does.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
