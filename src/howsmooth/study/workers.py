"""What a worker does: one task of a study, with models of its own, told back as rows and failures.

A task goes to a thread, a process or another machine as plain data, the inputs of its sequences included;
the model is loaded there, and kept for the next task. Nothing is written there: rows and failures go back to
the process that holds the store.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.errors import WorkerError
from howsmooth.study.failure_log import FailureLog
from howsmooth.study.feeds import HeldFeed
from howsmooth.study.plan import Plan
from howsmooth.study.prepare import Models, Subject
from howsmooth.study.records import Failure
from howsmooth.study.tools import Estimate, Model, Tools

__all__ = ["Carry", "Job", "Piece", "carry_out", "packed", "stop"]

Carry = Callable[[Plan, Any, Tools, Models, FailureLog], Iterator[Any]]
"""Carries out one task, and gives what is to be written together."""


@dataclass(frozen=True, eq=False)
class Job:
    """One task as it travels to a worker.

    Attributes
    ----------
    run
        A name of the run: models are kept for its tasks only.
    version
        Of howsmooth, where the task comes from.
    plan, task, tools, carry, keep_going
        What is to be done, and how.
    alone
        Whether it changes what all threads of a process share, such as PyTorch's random state.
    threads
        CPU threads for PyTorch; ``None`` leaves what the worker has.

    """

    run: str
    version: str
    plan: Plan
    task: Any
    tools: Tools
    carry: Carry
    keep_going: bool
    alone: bool
    threads: int | None


@dataclass(frozen=True, eq=False)
class Piece:
    """What came of a task.

    Attributes
    ----------
    found
        What is to be written together, one after the other.
    failures
        What failed.
    unusable
        Labels of models that cannot be loaded.
    error
        What ends the run; ``None`` if it can go on.

    """

    found: list[Any]
    failures: list[Failure]
    unusable: frozenset[str]
    error: Exception | None


def packed(task: Any) -> Any:
    """Return a :class:`~howsmooth.study.work.Task` with the inputs of its own sequences, and nothing more."""
    subject: Subject = task.subject
    # Words are kept of sample 0.
    worded = [task.starts[0]] if task.what == "measurement" and 0 in task.starts else []
    held = HeldFeed.of(subject.feed, list(task.starts.values()), task.n, worded)
    # A folder may stand elsewhere for a worker; the text is needed where a tokenizer is trained on it.
    folder = Path(subject.spec.name)
    spec = replace(subject.spec, name=str(folder.absolute())) if folder.is_dir() else subject.spec
    content = subject.content if spec.random_init else ""
    return replace(task, subject=replace(subject, spec=spec, feed=held, content=content))


# The tasks of one process, be they in several threads, load models, capture and change PyTorch's settings one
# at a time. What runs beside that touches nothing but its own tensors.
_ONE_AT_A_TIME = threading.RLock()
_kept: tuple[str, Models] | None = None
_stopped: set[str] = set()


def stop(run: str) -> None:
    """Let the threads of this process give up the tasks of a run, at the next layer, and its models."""
    global _kept
    _stopped.add(run)
    with _ONE_AT_A_TIME:
        if _kept is not None and _kept[0] == run:
            _kept = None


def carry_out(job: Job) -> Piece:
    """Carry a task out, in a worker; it raises nothing, so that an error of its own is no lost worker."""
    gathered: list[Failure] = []
    failed = FailureLog(gathered.extend, keep_going=job.keep_going)
    found: list[Any] = []
    error: Exception | None = None
    try:
        _check_version(job)
        if job.threads is not None and torch.get_num_threads() != job.threads:
            torch.set_num_threads(job.threads)
        with _ONE_AT_A_TIME if job.alone else nullcontext():
            for part in job.carry(job.plan, job.task, _guarded(job.tools), _models(job), failed):
                found.append(part)
                if job.run in _stopped:
                    break
    except Exception as raised:
        error = _sendable(raised)
    return Piece(found, gathered, frozenset(failed.unusable), error)


def _check_version(job: Job) -> None:
    here = version("howsmooth")
    if job.version != here:
        raise WorkerError(
            f"a worker has howsmooth {here}, and the study is run by {job.version}: what they "
            "measure need not agree. Install the same version on all machines."
        )


class _SharedModels(Models):
    """Models for all threads of a process."""

    def load_for(self, subject: Subject) -> Model:
        with _ONE_AT_A_TIME:
            return super().load_for(subject)


def _models(job: Job) -> Models:
    """Return the models that were kept for this run, or begin with none."""
    global _kept
    with _ONE_AT_A_TIME:
        if _kept is None or _kept[0] != job.run:
            _kept = None  # let go of another run's model before there is a new one
            _kept = (job.run, _SharedModels(job.plan, job.tools))
        return _kept[1]


def _guarded(tools: Tools) -> Tools:
    """Let the threads of a process do one at a time what changes a model or the settings of PyTorch."""

    def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            with _ONE_AT_A_TIME:
                return function(*arguments, **options)

        return guarded

    def measure(function: object, x: Tensor, **options: Any) -> Estimate:
        # Attention in closed form is products of its own matrices. Other maps may run the model, choose
        # one of PyTorch's attention kernels for the whole process, or both.
        with nullcontext() if isinstance(function, SelfAttention) else _ONE_AT_A_TIME:
            return tools.measure(function, x, **options)

    return replace(
        tools,
        capture=one_at_a_time(tools.capture),
        measure=measure,
        bound=None if tools.bound is None else one_at_a_time(tools.bound),
    )


def _sendable(error: Exception) -> Exception:
    """Return an error, or if it cannot travel between processes its words."""
    try:
        # Made anew as at the other end, without pickle, which this project does not read.
        again = copy.deepcopy(error)
    except Exception:
        again = None
    if "<locals>" not in type(error).__qualname__ and type(again) is type(error) and str(again) == str(error):
        return error
    return WorkerError(f"{type(error).__name__}: {error}")
