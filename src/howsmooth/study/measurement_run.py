"""Run a plan of measurements: first constants, then values of the published code if asked for, then bounds.

Rows that the store already has are skipped. Results are written step by step, so a run can be interrupted at
any moment and continued later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from howsmooth.study.executors import memory_each
from howsmooth.study.plans import Plan
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.records import Measurement
from howsmooth.study.runner import Means, Runner
from howsmooth.study.study_preparation import PreparedStudy, prepared_study
from howsmooth.study.tasks.bounds import bounds_left
from howsmooth.study.tasks.lipschitz_constants import constants_left, joined
from howsmooth.study.tasks.task import Failed, Work

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
    plan = replace(plan, memory=memory_each(means.executor, plan.memory, plan.device))
    with prepared_study(plan, folder, keep_going=means.keep_going) as study:
        # List all work first: impossible work is then refused before the store is created.
        constants = constants_left(study)
        if means.executor is None:  # workers take one length each, so that all of them have work
            constants = joined(constants, plan.device)
        listed = [constants, *(kind(study) for kind in beside)]
        study.begin()
        runner = Runner(study.store, means, study.models, plan.device)
        for spec, text, error in study.impossible:
            runner.fail(Failed.of(error, Measurement, (spec.label, text)))
        for work in listed:
            runner.carry_out(work)
        if plan.bounds != "none":
            runner.carry_out(bounds_left(study))
        return runner.finish(began)
