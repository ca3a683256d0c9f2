"""Carry a plan out: measurements first, then the bounds beside them.

What the store has is skipped; what comes is written batch by batch. Interrupt it at any moment and
run it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from howsmooth.study.begin import begun_study
from howsmooth.study.cost import measurement_cost
from howsmooth.study.environment import environment
from howsmooth.study.failure_log import FailureLog
from howsmooth.study.measuring import bounds_of, measured
from howsmooth.study.plan import Plan
from howsmooth.study.progress import Outcome, Progress
from howsmooth.study.tools import Tools
from howsmooth.study.work import Batch, Bounds, bounds_left, count_planned, work

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

            def tell(task: Batch | Bounds, layer: int = -1) -> None:
                where = (task.subject.model.label, task.subject.text.name, task.n, task.scope, layer)
                told = Progress(done, planned, kept, cost_done, cost_planned, *where, failed.count)
                on_progress(replace(told, bounding=isinstance(task, Bounds)))

            try:
                for batch in batches:
                    if batch is batches[0]:
                        tell(batch)
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
                        tell(batch, rows[0].layer)
                    cost_done = cost_after
                for task in bounds:
                    tell(task)
                    # Bounds stand beside measurements; what failed has none.
                    there = task.among(store.known(task.subject.model.label, task.subject.text.name))
                    if there.missing and tools.bound is not None:
                        for found_bounds in bounds_of(plan, there, tools, models, tools.bound, failed):
                            store.add_bounds(found_bounds, number)
                    cost_done += task.cost
                if bounds:
                    tell(bounds[-1])
            except KeyboardInterrupt:
                # It may have come after a batch was written and before that was told.
                done = planned - sum(len(batch.missing) for batch in work(plan, placed, store))
                if batches:
                    tell(batches[-1])
                raise
            store.finish_run(number)
            failures, reason = failed.count, failed.first
    return Outcome(done, kept, unconverged, time.perf_counter() - began, failures, reason)
