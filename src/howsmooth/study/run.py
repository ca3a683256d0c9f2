"""Carry a plan out: measurements first, then the bounds beside them.

What the store has is skipped; what comes is written batch by batch. Interrupt it at any moment and
run it again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from howsmooth.study.begin import begun_study
from howsmooth.study.environment import environment
from howsmooth.study.failure_log import FailureLog
from howsmooth.study.measuring import bounded, measured
from howsmooth.study.plan import Plan
from howsmooth.study.progress import Outcome, Progress
from howsmooth.study.spread import Means, carried
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
    executor: Executor | None = None,
    threads: int | None = None,
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
    executor
        Where to measure: an executor in the sense of ``concurrent.futures``, such as one of
        :mod:`howsmooth.study.executors`; it is not shut down. By default here, one batch after the other. The
        store is written here either way.
    threads
        CPU threads of PyTorch for each task of the executor; by default what its workers have.

    Raises
    ------
    WorkerError
        If the workers of the executor are lost.
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
            number = store.start_run(command, plan.device, environment(plan.device, executor, threads))
            started = time.monotonic()
            failed = FailureLog(lambda rows: store.fail(rows, number), keep_going=keep_going)
            means = Means(plan, tools, models, failed, keep_going, executor, threads)
            for spec, text, error in begun.impossible:
                failed.add(error, spec.label, text)
            cost_planned = sum(batch.cost for batch in batches) + sum(task.cost for task in bounds)
            cost_done = 0.0

            def tell(task: Batch | Bounds, layer: int = -1) -> None:
                where = (task.subject.model.label, task.subject.text.name, task.n, task.scope, layer)
                told = Progress(done, planned, kept, cost_done, cost_planned, *where, failed.count)
                on_progress(replace(told, bounding=isinstance(task, Bounds)))

            try:
                if batches:
                    tell(batches[0])
                # What a batch counted for so far; the rest of it when nothing more comes.
                counted: defaultdict[int, float] = defaultdict(float)
                with closing(carried(measured, batches, means)) as steps:
                    for batch, found in steps:
                        if found is None:
                            cost_done += batch.cost - counted[id(batch)]
                            continue
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
                        cost = len(rows) * batch.cost_of_one
                        counted[id(batch)] += cost
                        cost_done += cost
                        tell(batch, rows[0].layer)
                # Bounds stand beside measurements; what failed has none.
                there = [
                    task.among(store.known(task.subject.model.label, task.subject.text.name))
                    for task in bounds
                ]
                cost_done += sum(task.cost for task in bounds) - sum(task.cost for task in there)
                there = [task for task in there if task.missing]
                if there:
                    tell(there[0])
                with closing(carried(bounded, there, means)) as more:
                    for task, rows in more:
                        if rows is not None:
                            store.add_bounds(rows, number)
                        else:
                            cost_done += task.cost
                            tell(task)
                if bounds and not there:
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
