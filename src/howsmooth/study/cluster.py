"""A Dask cluster as the workers of a study; the only module that knows Dask."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from howsmooth.errors import ArgumentError, WorkerError

try:
    from distributed import Client
except ImportError as error:
    raise ArgumentError(
        "executor",
        expected="processes, as Dask is not installed",
        got="dask",
        remedy="Install it, here and on the workers, with: pip install 'howsmooth[dask]'",
    ) from error

__all__ = ["connected_cluster"]

_PATIENCE = 30.0


@contextmanager
def connected_cluster(scheduler: str) -> Iterator[Executor]:
    """Connect to a scheduler, and leave it as it is afterwards.

    Dask gives the tasks of a lost worker to others; one that four workers in a row were lost with fails.

    Parameters
    ----------
    scheduler
        Its address.

    Yields
    ------
    Executor
        It says in ``workers`` how many processes the cluster had at the beginning.

    Raises
    ------
    WorkerError
        If nobody answers there within half a minute, or no worker is there.

    """
    try:
        client = Client(scheduler, timeout=_PATIENCE, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"no Dask scheduler answers at {scheduler} ({error}). Start one with dask scheduler, which "
            "prints its address."
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=_PATIENCE)
        except TimeoutError as error:
            raise WorkerError(
                f"the Dask scheduler at {scheduler} has no workers. Start some with: dask worker {scheduler}"
            ) from error
        executor = client.get_executor(pure=False)
        executor.workers = len(client.nthreads())
        yield executor
