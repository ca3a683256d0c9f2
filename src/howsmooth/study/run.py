"""Carry a plan out: constants first, what stands beside them, then bounds.

What the store has is skipped; what comes is written step by step. Interrupt it at any moment and run it
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from howsmooth.memory import memory_budget
from howsmooth.study.executors import workers_of
from howsmooth.study.plan import Plan
from howsmooth.study.progress import Outcome
from howsmooth.study.records import Measurement
from howsmooth.study.runner import Means, Runner
from howsmooth.study.subjects import OpenStudy, opened_study
from howsmooth.study.tasks.bounds import bounds_left, seconds_for_bounds, spent_on_bounds
from howsmooth.study.tasks.constants import constants_left
from howsmooth.study.tasks.task import Failed, Work, failure_row

__all__ = ["run"]


def run(
    plan: Plan,
    folder: Path,
    means: Means | None = None,
    *,
    beside: Sequence[Callable[[OpenStudy], Work]] = (),
) -> Outcome:
    """Measure what the plan asks for and the store in ``folder`` does not have.

    What fails is recorded, and since it leaves no measurement, it is tried again the next time.

    Parameters
    ----------
    plan
        What to measure.
    folder
        Of the store; made, with the store, once every check has passed.
    means
        How; by default here, in silence, ending at the first failure.
    beside
        What else is left to measure at the same sequences, such as what the paper's code computes.

    Raises
    ------
    WorkerError
        If the workers of the executor are lost.
    howsmooth.errors.HowsmoothError
        If the plan is impossible, before anything is measured, or with ``keep_going`` if all of it is; if
        the store cannot be written; or without ``keep_going`` if measuring fails. What was measured until
        then has been written.

    """
    began = time.monotonic()
    means = means or Means()
    means.listener.phase("Reading texts and models" if plan.texts else "Reading inputs and models")
    plan = _with_memory_shared(plan, means)
    with opened_study(plan, folder, keep_going=means.keep_going, models=means.models) as study:
        # All is listed first, so that what cannot be done is refused before there is a store.
        listed = [constants_left(study), *(kind(study) for kind in beside)]
        store = study.begin()
        runner = Runner(store, means, study.models, plan.device)
        for spec, text, error in study.impossible:
            runner.fail(Failed([failure_row(error, Measurement, spec.label, text)], error))
        for work in listed:
            runner.carry_out(work)
        if plan.bounds != "none":
            for one in spent_on_bounds(store):
                runner.pace.learn(one.alike, one.n, 1, one.seconds)
            runner.carry_out(bounds_left(study), seconds=seconds_for_bounds(study))
        return replace(runner.finish(), seconds=time.monotonic() - began)


def _with_memory_shared(plan: Plan, means: Means) -> Plan:
    """Share the usual memory of one measurement out among workers that use the same one."""
    if plan.memory is not None or not isinstance(means.executor, ProcessPoolExecutor):
        return plan
    budget = memory_budget(None, torch.device(plan.device))
    return replace(plan, memory=max(1, budget // workers_of(means.executor)))
