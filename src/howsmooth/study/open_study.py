"""Open a study: check its plan and its store, and choose its sequences, before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from howsmooth.study.measured_models import Impossible, Models, Subject, checked_subjects
from howsmooth.study.plans import Plan
from howsmooth.study.records import MEASURE, InputRecord, ModelRecord, TextRecord
from howsmooth.study.store import PendingStore, Store

__all__ = ["OpenStudy", "opened_study"]


@dataclass(frozen=True, eq=False)
class OpenStudy:
    """A checked study that is ready to run: its plan, store, models and sequences.

    ``pending`` is the store, which may not exist yet. ``impossible`` are the models and texts that were left
    out because they cannot be used. With ``keep_going`` these are left out, and work goes on after failures.
    """

    plan: Plan
    pending: PendingStore
    models: Models
    subjects: list[Subject]
    impossible: Impossible
    keep_going: bool

    @property
    def store(self) -> Store | None:
        """The open store of the study; ``None`` until it is created."""
        return self.pending.store

    def begin(self) -> Store:
        """Create the study's store if needed, record all models and texts there, and return the store."""
        store = self.pending.begin(self.plan.settings())
        store.add(record for one in self.subjects for record in _records(one))
        return store


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
    with PendingStore(folder, MEASURE, write=write) as pending:
        pending.check(plan.settings())
        models, impossible = models or Models(plan), Impossible()
        subjects = checked_subjects(plan, models, impossible if keep_going else None, pending.store)
        yield OpenStudy(plan, pending, models, subjects, impossible, keep_going)


def _records(one: Subject) -> tuple[ModelRecord, TextRecord, InputRecord]:
    where = (one.model.label, one.text.name)
    return one.model, one.text, InputRecord(*where, one.fingerprint, one.tokenizer_source, one.feed.count)
