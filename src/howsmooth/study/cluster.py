"""A Dask cluster as the workers of a study; the only module that knows Dask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from howsmooth.errors import ArgumentError, WorkerError

try:
    from distributed import Client
except ImportError as error:
    raise ArgumentError(
        "executor",
        expected="threads or processes, as Dask is not installed",
        got="dask",
        remedy="Install it, here and on the workers, with: pip install 'howsmooth[dask]'",
    ) from error

__all__ = ["Cluster", "connected_cluster"]

_PATIENCE = 30.0


class Cluster(Executor):
    """The workers of a Dask scheduler, however many there are at the time.

    Dask gives the tasks of a lost worker to others; one that four workers in a row were lost with fails.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._executor = client.get_executor(pure=False)

    @property
    def workers(self) -> int:
        """How many tasks the cluster carries out at a time."""
        with _connection_needed():
            return sum(self._client.nthreads().values())

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a worker call a function."""
        with _connection_needed():
            future: Future[Any] = self._executor.submit(fn, *args, **kwargs)
        return future


@contextmanager
def _connection_needed() -> Iterator[None]:
    """Say in words that the scheduler is gone; Dask has tried to reach it for half a minute then."""
    try:
        yield
    except OSError as error:
        raise WorkerError(
            f"the connection to the Dask scheduler was lost ({error}). What was measured is kept: run the "
            "same again."
        ) from error


@contextmanager
def connected_cluster(scheduler: str) -> Iterator[Cluster]:
    """Connect to a scheduler, and leave it as it is afterwards.

    Parameters
    ----------
    scheduler
        Its address.

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
        yield Cluster(client)
