"""Open a study: check its plan and its store, and choose its sequences, before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from howsmooth.study.measured_models import Impossible, Models, Subject, checked_subjects
from howsmooth.study.plans import Plan
from howsmooth.study.records import MEASURE, InputRecord
from howsmooth.study.store import Store

__all__ = ["OpenStudy", "opened_study"]


@dataclass(frozen=True, eq=False)
class OpenStudy:
    """A checked study that is ready to run: its plan, store, models and sequences.

    The study creates its store when it begins. ``impossible`` are the models and texts that were left out
    because they cannot be used. With ``keep_going`` these are left out, and work goes on after failures.
    """

    plan: Plan
    store: Store
    models: Models
    subjects: list[Subject]
    impossible: Impossible
    keep_going: bool

    def begin(self) -> None:
        """Create the study's store if needed, and record all models and texts there."""
        self.store.begin(MEASURE, self.plan.settings())
        with self.store.transaction():
            for one in self.subjects:
                where = (one.model.label, one.text.name, one.fingerprint, one.tokenizer_source)
                self.store.add([one.model, one.text, InputRecord(*where, one.feed.count)])


@contextmanager
def opened_study(
    plan: Plan,
    folder: str | os.PathLike[str],
    *,
    write: bool = True,
    keep_going: bool = False,
    models: Models | None = None,
) -> Iterator[OpenStudy]:
    """Check that a plan can be carried out, and yield the study, ready to run.

    The models, the inputs and the store, if it exists, are checked. With ``keep_going``, models and texts
    that are impossible are left out. ``models`` is an existing loader with the same seed, device and
    precision.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the plan is impossible, or with ``keep_going`` all of it, or if the store cannot be used.

    """
    # Open an existing store before loading a model: an unusable store is then reported at once.
    with Store.open(folder, write=write, late=True) as store:
        store.check(MEASURE, plan.settings())
        models, impossible = models or Models(plan), Impossible()
        subjects = checked_subjects(plan, models, impossible if keep_going else None, store)
        yield OpenStudy(plan, store, models, subjects, impossible, keep_going)
