"""Define the options for carrying out a plan: output folder, workers and threads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from howsmooth.errors import ArgumentError
from howsmooth.study.options import HOW, OUTPUT, Folder, Integer, Told, Word, options

__all__ = ["Execution", "Out", "Threads"]

# PyTorch accepts any int and would try to start that many threads.
_MOST_THREADS = 4096
_MOST_WORKERS = 1024

Out = Annotated[Folder, OUTPUT, "Folder for what is written."]

Threads = Annotated[
    Annotated[Integer, Field(ge=1, le=_MOST_THREADS)] | None,
    HOW,
    "CPU threads of PyTorch. Default: what is fastest on the machine as it is.",
]


@options
class Execution:
    """The options for carrying out a plan: output folder, workers and threads. They change no result."""

    out: Out = Path("howsmooth-out")
    executor: Annotated[
        Literal["processes", "dask"] | None,
        HOW,
        "Measure on workers: processes on this machine, or the workers of a Dask cluster.",
    ] = None
    workers: Annotated[
        Annotated[Integer, Field(ge=1, le=_MOST_WORKERS)] | None,
        HOW,
        "With --executor: the number of processes, by default one for each CPU core; with --scheduler, "
        "how many workers of the cluster to wait for, by default one. Without --executor, measure "
        "starts processes by itself where they save time.",
    ] = None
    scheduler: Annotated[
        Word | None,
        Told("ADDRESS", panel=HOW.panel),
        "Address of the scheduler of the Dask cluster, such as tcp://10.0.0.1:8786. Default: a cluster "
        "on this machine, started for this command.",
    ] = None
    threads: Annotated[
        Threads, "CPU threads of PyTorch, of each worker. Default: what is fastest on the machine as it is."
    ] = None

    def __post_init__(self) -> None:
        got = f"the executor {self.executor}" if self.executor else "no executor"
        if self.workers is not None and self.executor is None:
            raise ArgumentError("workers", expected="it together with the executor processes", got=got)
        if self.scheduler is None:
            return
        if self.executor != "dask":
            raise ArgumentError("scheduler", expected="it together with the executor dask", got=got)
        try:
            port = urlsplit(f"//{self.scheduler.rpartition('//')[2]}").port
        except ValueError:
            port = None
        if port is None and not self.scheduler.startswith("inproc:"):  # one in this process has none
            expected = "the address that dask scheduler prints, such as tcp://10.0.0.1:8786"
            raise ArgumentError("scheduler", expected=expected, got=self.scheduler)
