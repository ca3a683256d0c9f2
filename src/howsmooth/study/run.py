"""Carry a plan out: measurements first, then the bounds beside them.

What the store has is skipped; what comes is written batch by batch. Interrupt it at any moment and
run it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from howsmooth.study.begin import begun_study
from howsmooth.study.environment import environment
from howsmooth.study.failure_log import FailureLog
from howsmooth.study.measuring import bounds_of, measured
from howsmooth.study.plan import Plan
from howsmooth.study.progress import Outcome, Progress
from howsmooth.study.tools import Tools
from howsmooth.study.work import bounds_left, count_planned, measurement_cost, work

__all__ = ["run"]


def run(
    plan: Plan,
    folder: Path,
    tools: Tools,
    *,
    command: str = "",
    keep_going: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Measure what the plan asks for and the store in ``folder`` does not have.

    What fails is recorded, and since it leaves no measurement, it is tried again the next time.

    Parameters
    ----------
    plan
        What to measure.
    folder
        Of the store; made, with the store, once every check has passed.
    tools
        What to measure with, usually :func:`howsmooth.study.tools.default_tools`.
    command
        To be recorded as the origin of the rows.
    keep_going
        Go on with the rest of the plan after a failure, instead of raising it.
    on_progress
        Called before the first and after every batch is written.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the plan is impossible, before anything is measured, or with ``keep_going`` if all of it is; if
        the store cannot be written; or without ``keep_going`` if measuring fails. What was measured until
        then has been written.

    """
    began = time.perf_counter()
    with begun_study(plan, folder, tools, keep_going=keep_going) as begun:
        plan, store, models, placed = begun.plan, begun.store, begun.models, begun.placed
        batches = list(work(plan, placed, store))
        bounds = [] if tools.bound is None else list(bounds_left(plan, placed, store))
        planned = sum(len(batch.missing) for batch in batches)
        kept = sum(count_planned(plan, one) for one, _ in placed) - planned
        done = unconverged = failures = 0
        reason = ""
        if batches or bounds or begun.impossible:
            number = store.start_run(command, plan.device, environment(plan.device))
            started = time.monotonic()
            failed = FailureLog(store, number, keep_going=keep_going)
            for spec, text, error in begun.impossible:
                failed.add(error, spec.label, text)
            cost_planned = sum(batch.cost for batch in batches) + sum(task.cost for task in bounds)
            cost_done = 0.0
            for batch in batches:
                where = (batch.subject.model.label, batch.subject.text.name, batch.n, batch.scope)
                if batch is batches[0]:
                    on_progress(Progress(0, planned, kept, 0.0, cost_planned, *where, -1, failed.count))
                cost_after = cost_done + batch.cost
                for found in measured(plan, batch, tools, models, failed):
                    rows = found.rows
                    store.add(
                        rows,
                        number,
                        worked=time.monotonic() - started,
                        sensitivities=found.sensitivities,
                        sequences=found.sequences,
                    )
                    done += len(rows)
                    unconverged += sum(not row.converged for row in rows)
                    cost_done += len(rows) * measurement_cost(batch.n)
                    told = (done, planned, kept, cost_done, cost_planned, *where, rows[0].layer)
                    on_progress(Progress(*told, failed.count))
                cost_done = cost_after
            for task in bounds:
                where = (task.subject.model.label, task.subject.text.name, task.n, task.scope)
                told = (done, planned, kept, cost_done, cost_planned, *where, -1)
                on_progress(Progress(*told, failed.count, bounding=True))
                # Bounds stand beside measurements; what failed has none.
                there = task.among(store.known(*where[:2]))
                if there.missing and tools.bound is not None:
                    for found_bounds in bounds_of(plan, there, tools, models, tools.bound, failed):
                        store.add_bounds(found_bounds, number)
                cost_done += task.cost
            if bounds:
                told = (done, planned, kept, cost_done, cost_planned, *where, -1)
                on_progress(Progress(*told, failed.count, bounding=True))
            store.finish_run(number)
            failures, reason = failed.count, failed.first
    return Outcome(done, kept, unconverged, time.perf_counter() - began, failures, reason)
