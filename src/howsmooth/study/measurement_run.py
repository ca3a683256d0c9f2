"""Run a plan of measurements: first constants, then values of the published code if asked for, then bounds.

Rows that the store already has are skipped. Results are written step by step, so a run can be interrupted at
any moment and continued later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from howsmooth.study.executors import (
    are_worth_it,
    fitting_processes,
    memory_each,
    processes_of,
    threads_each,
    workers_of,
)
from howsmooth.study.plans import Plan
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.records import Measurement
from howsmooth.study.runner import Means, Runner
from howsmooth.study.study_preparation import PreparedStudy, prepared_study
from howsmooth.study.tasks.bounds import bounds_left, seconds_for_bounds, spent_on_bounds
from howsmooth.study.tasks.lipschitz_constants import constants_left, joined
from howsmooth.study.tasks.task import Failed, Work
from howsmooth.study.worker_processes import worker_processes
from howsmooth.threads import fastest_threads

__all__ = ["run"]


def run(
    plan: Plan,
    folder: str | os.PathLike[str],
    means: Means | None = None,
    *,
    beside: Sequence[Callable[[PreparedStudy], Work]] = (),
) -> Outcome:
    """Measure the constants of a plan that the store in ``folder`` lacks, and write them there.

    Folder and store are created after all checks have passed. A failure is recorded; since it leaves no
    measurement, the next run tries it again. Without ``means``, the tasks run in this process, and the first
    failure ends the run. The functions ``beside`` list more work at the same sequences, such as the values of
    the paper's published code.

    Raises
    ------
    WorkerError
        If the executor loses its workers.
    howsmooth.errors.HowsmoothError
        If the plan is impossible, or with ``keep_going`` all of it, before anything is measured; if the
        store cannot be written; or, without ``keep_going``, if a measurement fails. Finished measurements
        are in the store then.

    """
    began = time.monotonic()
    means = means or Means()
    means.listener.phase("Reading texts and models" if plan.texts else "Reading inputs and models")
    processes = fitting_processes(plan) if means.may_start_processes else processes_of(means.executor)
    plan = replace(plan, memory=memory_each(processes, plan.memory, plan.device))
    with (
        prepared_study(plan, folder, keep_going=means.keep_going) as study,
        ExitStack() as opened,
        fastest_threads(means.threads if means.executor is None else None),
    ):
        # List all work first: impossible work is then refused before the store is created.
        constants = constants_left(study)
        if means.executor is None:  # workers that the user asked for take one length each
            left = sum(task.size for task in constants.tasks)
            if are_worth_it(processes, left, study.models.bytes):
                pool = opened.enter_context(worker_processes(processes))
                means = replace(means, executor=pool, threads=threads_each(pool, None))
                means.listener.phase(f"Measuring in {processes} processes")
            constants = joined(constants, plan.device, workers_of(means.executor))
        listed = [constants, *(kind(study) for kind in beside)]
        study.begin()
        runner = Runner(study.store, means, study.models, plan.device)
        for spec, text, error in study.impossible:
            runner.fail(Failed.of(error, Measurement, (spec.label, text)))
        for work in listed:
            runner.carry_out(work)
        if plan.bounds != "none":
            for alike, n, seconds in spent_on_bounds(study.store):
                runner.task_times.learn(alike, n, 1, seconds)
            runner.carry_out(bounds_left(study), seconds=seconds_for_bounds(study))
        return runner.finish(began)
