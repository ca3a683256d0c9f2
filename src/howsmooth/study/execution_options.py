"""Define the options for carrying out a plan: output folder, workers and threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from howsmooth.errors import ArgumentError
from howsmooth.study.options import HOW, OUTPUT, Options, choice, option, path, whole, words

__all__ = ["Execution"]

# PyTorch accepts any int and would try to start that many threads.
_MOST_THREADS = 4096
_MOST_WORKERS = 1024


@dataclass(frozen=True)
class Execution(Options):
    """The options for carrying out a plan: output folder, workers and threads. They change no result."""

    out: Path = option(
        "howsmooth-out", path(), "Folder for the store, tables, figures and report.", panel=OUTPUT
    )
    executor: str | None = option(
        None,
        choice("processes", "dask"),
        "Measure on workers: processes on this machine, or the workers of a Dask cluster.",
        metavar="processes|dask",
        panel=HOW,
    )
    workers: int | None = option(
        None,
        whole(1, _MOST_WORKERS),
        "With --executor: the number of processes, by default one for each CPU core; with --scheduler, how "
        "many workers of the cluster to wait for, by default one. Without --executor, one process does all.",
        panel=HOW,
    )
    scheduler: str | None = option(
        None,
        words(),
        "Address of the scheduler of the Dask cluster, such as tcp://10.0.0.1:8786. Default: a cluster on "
        "this machine, started for this command.",
        metavar="ADDRESS",
        panel=HOW,
    )
    threads: int | None = option(
        None,
        whole(1, _MOST_THREADS),
        "CPU threads, for each worker if there are workers. Default: what is fastest on the machine as it "
        "is; processes of one thread for a large study.",
        panel=HOW,
    )

    def check(self) -> None:
        """Raise ArgumentError for workers or a scheduler that the chosen executor cannot use."""
        got = f"the executor {self.executor}" if self.executor else "no executor"
        if self.workers is not None and self.executor is None:
            raise ArgumentError("workers", expected="it together with the executor processes", got=got)
        if self.scheduler is not None and self.executor != "dask":
            raise ArgumentError("scheduler", expected="it together with the executor dask", got=got)
        if self.scheduler is not None:
            try:
                _ = urlsplit(f"//{self.scheduler.rpartition('//')[2]}").port
            except ValueError as error:
                raise ArgumentError(
                    "scheduler", expected="an address such as tcp://10.0.0.1:8786", got=self.scheduler
                ) from error
