"""Connect to a Dask cluster, so that its workers can carry out a study. No other module imports Dask."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from howsmooth.errors import ArgumentError, WorkerError
from howsmooth.words import RUN_AGAIN

try:
    from distributed import Client
    from distributed.comm.addressing import get_address_host_port
except ImportError as error:
    expected = "processes, because Dask is not installed"
    remedy = "Install it, here and on the workers, with: pip install 'howsmooth[dask]'"
    raise ArgumentError("executor", expected=expected, got="dask", remedy=remedy) from error

__all__ = ["connected_cluster"]

_PATIENCE = 30.0


@contextmanager
def connected_cluster(scheduler: str | None, workers: int) -> Iterator[Executor]:
    """Connect to a Dask cluster, and yield an executor that runs tasks on its workers.

    The cluster at the address ``scheduler`` must have ``workers`` workers within half a minute, and it keeps
    running when the context ends. Without an address, a cluster of ``workers`` processes with one thread each
    is started here, and stopped at the end. The executor's ``workers`` is their number at the time of
    connection, and its ``present()`` returns it now. If a worker is lost, Dask gives its tasks to others; a
    task fails after four workers in a row were lost. A scheduler that does not answer, has fewer workers or
    went away raises WorkerError; an address without a port ArgumentError.
    """
    if scheduler is not None and not scheduler.startswith("inproc:"):  # one in this process has no port
        _check_address(scheduler)
    own = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 40}
    try:
        how = own if scheduler is None else {}
        client = Client(scheduler, timeout=_PATIENCE, set_as_default=False, **how)
    except (OSError, ValueError) as error:
        if scheduler is None:
            raise WorkerError(f"no Dask cluster can be started on this machine ({error}).") from error
        raise WorkerError(
            f"no Dask scheduler answers at {scheduler} ({error}). Start one with dask scheduler, which "
            "prints its address."
        ) from error
    with client:
        try:
            _wait_for_workers(client, scheduler, workers)
            if scheduler is None:
                client.run(_ignore_interrupts)
            executor = client.get_executor(pure=False)
            executor.workers = len(client.nthreads())
            executor.present = lambda: _present(client)
            yield executor
        except (WorkerError, OSError) as error:
            if scheduler is None or client.status == "running":
                raise
            # Dask would print a traceback when the client is closed.
            logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
            raise WorkerError(
                f"the Dask scheduler at {scheduler} went away. Finished measurements are saved. To continue, "
                f"start a scheduler and workers, and {RUN_AGAIN}."
            ) from error


def _wait_for_workers(client: Client, scheduler: str | None, workers: int) -> None:
    try:
        client.wait_for_workers(workers, timeout=_PATIENCE)
    except TimeoutError as error:
        there = len(client.nthreads())
        has = f"has {there} of {workers} workers" if there else "has no workers"
        raise WorkerError(
            f"the Dask cluster on this machine {has} after {_PATIENCE:.0f} s. Give fewer --workers."
            if scheduler is None
            else f"the Dask scheduler at {scheduler} {has}. Start some with: dask worker {scheduler}"
        ) from error


def _ignore_interrupts() -> None:
    """Let a worker on this machine ignore Ctrl-C, which a terminal sends to all processes of a command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _present(client: Client) -> int:
    """Return how many workers a Dask cluster has now; 1 if its scheduler does not answer."""
    try:
        return len(client.nthreads())
    except (OSError, RuntimeError):
        return 1


def _check_address(scheduler: str) -> None:
    try:
        get_address_host_port(scheduler)
    except ValueError as error:
        expected = "the address that dask scheduler prints, such as tcp://127.0.0.1:8786"
        raise ArgumentError("scheduler", expected=expected, got=f"{scheduler} ({error})") from error
