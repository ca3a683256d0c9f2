"""Carry out a plan of measurements: first constants, then values of the published code if asked for, then
bounds. A dry run only counts what is left to measure, and predicts the memory that this needs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from howsmooth.attention import SelfAttention
from howsmooth.batching import footprint
from howsmooth.memory import memory_budget
from howsmooth.model_folders import BUILTIN_MODELS, builtin_folder
from howsmooth.study.executors import are_worth_it, memory_each, processes_of, threads_each, workers_of
from howsmooth.study.plans import Plan
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.records import Measurement
from howsmooth.study.runner import Means, Runner, load_early
from howsmooth.study.store import Store
from howsmooth.study.study_preparation import PreparedStudy, prepared_study
from howsmooth.study.tasks.bounds import bounds_left
from howsmooth.study.tasks.lipschitz_constants import ConstantsTask, constants_left, joined
from howsmooth.study.tasks.task import Failed, Work
from howsmooth.study.worker_processes import WORTH, worker_processes
from howsmooth.threads import fastest_threads

__all__ = ["DryRun", "Remaining", "dry_run", "run"]


def run(
    plan: Plan,
    folder: str | os.PathLike[str],
    means: Means | None = None,
    *,
    beside: Sequence[Callable[[PreparedStudy], Work]] = (),
) -> Outcome:
    """Measure the constants of a plan that are not yet in the store in ``folder``, and write them there.

    Folder and store are created after all checks have passed. A failure is recorded; since it leaves no
    measurement, the next run tries it again. Without ``means``, the tasks run in this process, and the first
    failure ends the run. The functions ``beside`` list more work at the same sequences.

    WorkerError is raised if the executor loses its workers; another HowsmoothError if the plan is impossible,
    or with ``keep_going`` all of it, if the store cannot be written, or, without ``keep_going``, if a
    measurement fails. Finished measurements are in the store then.
    """
    began = time.monotonic()
    means = means or Means()
    means.listener.phase("Reading texts and models" if plan.texts else "Reading inputs and models")
    processes = means.processes if means.executor is None else processes_of(means.executor)
    plan = replace(plan, memory=memory_each(processes, plan.memory, plan.device))
    with ExitStack() as opened:
        early = None
        new = means.executor is None and not Store.exists(folder)
        if new and are_worth_it(processes, WORTH, _most_bytes(plan)):
            # They load the first model while this process loads and checks everything.
            early = opened.enter_context(worker_processes(processes))
            load_early(early, plan, threads_each(early, None))
        study = opened.enter_context(prepared_study(plan, folder, keep_going=means.keep_going))
        opened.enter_context(fastest_threads(means.threads if means.executor is None else None))
        # List all work first: impossible work is then refused before the store is created.
        constants = constants_left(study)
        if means.executor is None:  # workers that the user asked for take one length each
            left = sum(task.size for task in constants.tasks)
            if are_worth_it(processes, left, study.models.bytes):
                pool = early or opened.enter_context(worker_processes(processes))
                means = replace(means, executor=pool, threads=threads_each(pool, None))
                means.listener.phase(f"Measuring in {processes} processes")
            elif early is not None:
                early.shutdown()
            constants = joined(constants, workers_of(means.executor))
        listed = [constants, *(kind(study) for kind in beside)]
        study.begin()
        runner = Runner(study.store, means, study.models, study.plan.device)
        for spec, text, error in study.impossible:
            runner.fail(Failed.of(error, Measurement, (spec.label, text)))
        for work in listed:
            runner.carry_out(work)
        if study.plan.bounds != "none":
            runner.carry_out(bounds_left(study))
        return runner.finish(began)


def _most_bytes(plan: Plan) -> float:
    """Bound the bytes of the first model's weights by the size of its files; infinity without files."""
    first = plan.models[0]
    folder = builtin_folder(first.name) if first.name in BUILTIN_MODELS else Path(first.name).expanduser()
    files = [] if first.random_init or not os.path.isdir(folder) else folder.glob("*.safetensors")  # noqa: PTH112
    size = sum(file.stat().st_size for file in files)
    # A file stores each number in at least two bytes.
    return size * getattr(torch, plan.dtype).itemsize / 2 or math.inf


# ---- What a run would measure

# Number of vectors of n·d entries that the solver keeps for one sequence: a typical basis and work space.
_VECTORS = 40


@dataclass(frozen=True)
class Remaining:
    """How many constants of one model, on one text and in one scope, are still to be measured."""

    model: str
    text: str
    scope: str
    layers: int
    lengths: int
    longest: int  #: The largest number of tokens of a sequence.
    sequences: int
    measurements: int
    #: The bytes of the sequences of the largest length that are measured together, beside the model and its
    #: input: attention probabilities and the vectors of the solver. None if it is not known beforehand.
    memory: float | None
    #: The bytes of one of these sequences, if they are more than it may use: it will be refused.
    lacking: float | None


@dataclass(frozen=True)
class DryRun:
    """What a run of a plan would measure, and what the store already has."""

    parts: tuple[Remaining, ...]
    kept: int  #: The number of measurements that the store already has.
    #: The models and texts that cannot be measured, as (model, text or None, reason).
    impossible: tuple[tuple[str, str | None, str], ...]


def dry_run(plan: Plan, folder: str | os.PathLike[str], *, keep_going: bool = False) -> DryRun:
    """Load and check all that a run would, raising the same errors, and count what is left to measure."""
    with prepared_study(plan, folder, write=False, keep_going=keep_going) as study:
        left = constants_left(study)
        groups: dict[tuple[str, str, str], list[ConstantsTask]] = {}
        for task in left.tasks:
            assert isinstance(task, ConstantsTask)
            groups.setdefault((task.model, task.subject.text.name, task.scope), []).append(task)
        impossible = [(spec.label, text, str(error)) for spec, text, error in study.impossible]
        parts = []
        for (model, text, scope), tasks in groups.items():
            lengths = {task.n for task in tasks}
            memory = lacking = None
            try:
                memory, lacking = _memory(study, tasks, max(lengths))
            except Exception as error:
                if not keep_going:
                    raise
                impossible.append((model, text, str(error)))
            layers = {layer for task in tasks for layer in task.layers}
            sequences = {(task.n, sample) for task in tasks for sample in task.starts}
            here = sum(task.size for task in tasks)
            counts = (len(layers), len(lengths), max(lengths), len(sequences), here)
            parts.append(Remaining(model, text, scope, *counts, memory, lacking))
        reasons = ((label, text, " ".join(error.split())) for label, text, error in impossible)
        return DryRun(tuple(parts), left.kept, tuple(dict.fromkeys(reasons)))


def _memory(
    study: PreparedStudy, tasks: Sequence[ConstantsTask], longest: int
) -> tuple[float | None, float | None]:
    plan, first = study.plan, min(tasks, key=lambda task: task.n)
    sample = next(iter(first.starts))
    missing = frozenset(key for key in first.missing if key[1] == first.layers[0])
    shortest = replace(first, starts={sample: first.starts[sample]}, missing=missing).packed()
    site = next(shortest.sites(study.models.load_for(first.subject)))
    if isinstance(site, Failed):
        raise site.error
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    known, d = site.x.shape[-2:]
    exact = isinstance(site.map, SelfAttention)
    # The footprint of other maps is known only at the length of capture; it grows like n².
    tokens = longest if exact else known
    how = footprint(site.map, (tokens, d), dtype=dtype, device=device, memory=plan.memory)
    if not how.size:
        return None, None
    size = float(how.size) if exact else how.size * (longest / first.n) ** 2
    budget = float(memory_budget(plan.memory, device))
    members = max(len(task.starts) for task in tasks if task.n == longest)
    # Sequences share a batch as far as memory allows, so the batch takes at most the budget. A streamed map
    # is measured one sequence after another.
    together = size if how.streamed else min(members * size, max(size, budget))
    lacking = size if how.streamed and size > budget else None
    return together + members * _VECTORS * longest * d * dtype.itemsize, lacking
