"""Define the task of computing all bounds on one layer at one sequence."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from howsmooth.scopes import ATTENTION_SCOPES
from howsmooth.study.open_study import OpenStudy
from howsmooth.study.records import KEY_COLUMNS, Bounding, Measurement, Row, Run
from howsmooth.study.store import Store
from howsmooth.study.tasks import attention_bounds
from howsmooth.study.tasks.task import Failed, Found, SequenceTask, Work
from howsmooth.study.text_windows import bounded_lengths

__all__ = ["SHARE", "BoundsTask", "bounds_left", "seconds_for_bounds", "spent_on_bounds"]

SHARE = 0.2
"""The largest share of the measuring time that bounds may take by default."""


class BoundsTask(SequenceTask):
    """The task of computing all bounds on one layer at one sequence.

    The sequence is sample 0.
    """

    kind = Bounding
    # A failure does not end the run: a report without bounds is better than none.
    essential = False

    @property
    def words(self) -> str:
        """A short description for progress messages: the model and the length."""
        return f"{super().words}, bounds"

    def count(self, rows: Sequence[Row]) -> int:
        """Return 1, since all bounds on one attention are counted together."""
        return 1

    def computed(self, model: Any) -> Iterator[Found]:
        """Yield the rows of the bounds, one head after another."""
        for site in self.sites(model):
            if isinstance(site, Failed):
                yield site
            elif (self.scope, site.layer, site.head, self.n, 0) in self.missing:
                try:
                    yield self._bounded(site)
                except Exception as error:
                    yield self.failed(error, (site.layer, site.head), [0])

    def _bounded(self, site: Any) -> list[Row]:
        began = time.perf_counter()
        found = attention_bounds.bound_site(site)
        seconds = time.perf_counter() - began
        return [
            Bounding(
                model=self.model,
                text=self.subject.text.name,
                scope=self.scope,
                layer=site.layer,
                head=site.head,
                n=self.n,
                sample=0,
                start=self.starts[0],
                radius=found.radius,
                seconds=seconds,
                **asdict(bound),
            )
            for bound in found.bounds
        ]


def bounds_left(study: OpenStudy) -> Work:
    """List the tasks that compute a study's missing bounds, from short sequences to long ones."""
    tasks: list[BoundsTask] = []
    kept = 0
    for subject in study.subjects:
        assert study.store is not None
        where = {"model": subject.model.label, "text": subject.text.name, "sample": 0}
        measured = study.store.keys(Measurement, KEY_COLUMNS, **where)
        known = study.store.keys(Bounding, KEY_COLUMNS, **where)
        for n in bounded_lengths(subject.lengths):
            for scope in (scope for scope in study.plan.scopes if scope in ATTENTION_SCOPES):
                heads = subject.heads if scope == "head" else (None,)
                for layer in subject.layers:
                    asked = measured & {(scope, layer, head, n, 0) for head in heads}
                    kept += len(asked & known)
                    if missing := asked - known:
                        places = {0: subject.starts[n, 0]}
                        tasks.append(BoundsTask(study.plan, subject, n, scope, places, missing))
    return Work(Bounding, "attentions' bounds", sorted(tasks, key=lambda task: task.n), kept)


def spent_on_bounds(store: Store) -> list[tuple[tuple[str, str, str], int, float]]:
    """List how long each attention's bounds took: the key of its kind of task, the length n, the seconds."""
    columns = ("model", "text", *KEY_COLUMNS, "seconds")
    return [
        ((Bounding.table, model, scope), n, seconds)
        for model, _, scope, _, _, n, _, seconds in store.keys(Bounding, columns)
    ]


def seconds_for_bounds(study: OpenStudy) -> float:
    """Return how many seconds the bounds of a study may still take.

    By default, bounds may take a fifth of the time of the other work.
    """
    assert study.store is not None
    if study.plan.bounds == "all":
        return math.inf
    # The time of a run includes its bounds, so subtract them to get the other work.
    spent = sum(seconds for *_, seconds in spent_on_bounds(study.store))
    worked = sum(run.worked for run, _ in study.store.rows(Run))
    return SHARE * (worked - spent) - spent
