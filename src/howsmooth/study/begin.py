"""How every run begins: the store opened, the plan checked against it, models and sequences in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from howsmooth.errors import TextError
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.prepare import Models, Subject, place_sequences, prepare
from howsmooth.study.sequences import SCHEMES, Sequences
from howsmooth.study.store import Store
from howsmooth.study.tools import Tools

__all__ = ["Begun", "Consulted", "Impossible", "begun_study", "consulted_study"]

Impossible = list[tuple[ModelSpec, str | None, Exception]]
"""Models, or texts with a model, that cannot be used, and why."""


@dataclass(frozen=True)
class Begun:
    """A study that can be carried out.

    Attributes
    ----------
    plan
        As the store has it.
    store
        Open for writing; it knows all models and texts of the subjects.
    models
        Loads them.
    placed
        Subjects, with the first tokens of their sequences.
    impossible
        What was left out, if the run is to keep going.

    """

    plan: Plan
    store: Store
    models: Models
    placed: list[tuple[Subject, Sequences]]
    impossible: Impossible


@dataclass(frozen=True)
class Consulted:
    """A study that could be carried out; nothing was written.

    Attributes
    ----------
    plan, models, placed, impossible
        As for :class:`Begun`.
    store
        Open for reading; ``None`` if there is none yet.

    """

    plan: Plan
    store: Store | None
    models: Models
    placed: list[tuple[Subject, Sequences]]
    impossible: Impossible


@contextmanager
def begun_study(
    plan: Plan,
    folder: Path,
    tools: Tools,
    *,
    keep_going: bool,
    check: Callable[[Models, Subject], None] = lambda models, subject: None,
) -> Iterator[Begun]:
    """Open the store of a study; it is made once every check has passed.

    Parameters
    ----------
    plan, folder, tools, keep_going
        As for :func:`howsmooth.study.run.run`.
    check
        Raises an error if a subject cannot be used, for a reason of its own.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the plan is impossible, with ``keep_going`` if all of it is, or if the store cannot be used.

    """
    with ExitStack() as stack:
        # An existing store is opened first: if it cannot be used, no model need be loaded to say so.
        store = stack.enter_context(Store.open(folder)) if Store.exists(folder) else None
        if store is not None:
            plan = _as_stored(plan, store)
            store.check(plan.identity)
        models = Models(plan, tools)
        impossible: Impossible = []
        subjects = prepare(plan, tools, models, impossible if keep_going else None)
        subjects = [one for one in subjects if _passes(one, models, check, impossible, keep_going)]
        if not subjects:
            raise impossible[0][2]
        if store is None:
            store = stack.enter_context(Store.open(folder))
            store.check(plan.identity)
        for one in subjects:
            store.check_input(one.model, one.text, one.fingerprint, tokenizer_source=one.tokenizer_source)
        placed = list(_placed(plan, subjects, store, impossible if keep_going else None))
        if not placed:
            raise impossible[0][2]
        store.add_study(plan.identity)
        for one, _ in placed:
            store.add_input(
                one.model,
                one.text,
                one.fingerprint,
                tokenizer_source=one.tokenizer_source,
                tokens=one.feed.count,
            )
        yield Begun(plan, store, models, placed, impossible)


@contextmanager
def consulted_study(plan: Plan, folder: Path, tools: Tools, *, keep_going: bool) -> Iterator[Consulted]:
    """Check a study as :func:`begun_study` does, without making or changing its store.

    Parameters
    ----------
    plan, folder, tools, keep_going
        As for :func:`howsmooth.study.run.run`.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        As :func:`begun_study`.

    """
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(folder, write=False)) if Store.exists(folder) else None
        if store is not None:
            plan = _as_stored(plan, store)
            store.check(plan.identity)
        models = Models(plan, tools)
        impossible: Impossible = []
        skipped = impossible if keep_going else None
        subjects = prepare(plan, tools, models, skipped)
        if store is not None:
            for one in subjects:
                store.check_input(one.model, one.text, one.fingerprint, tokenizer_source=one.tokenizer_source)
        placed = list(_placed(plan, subjects, store, skipped))
        if not placed:
            raise impossible[0][2]
        yield Consulted(plan, store, models, placed, impossible)


def _passes(
    subject: Subject,
    models: Models,
    check: Callable[[Models, Subject], None],
    impossible: Impossible,
    keep_going: bool,
) -> bool:
    try:
        check(models, subject)
    except Exception as error:
        if not keep_going:
            raise
        impossible.append((subject.spec, subject.text.name, error))
        return False
    return True


def _as_stored(plan: Plan, store: Store) -> Plan:
    """Cut sequences as the store has them, if that is a way that we know."""
    scheme = store.study().get("windows")
    return replace(plan, windows=scheme) if scheme in SCHEMES else plan


def _placed(
    plan: Plan,
    subjects: list[Subject],
    store: Store | None,
    impossible: Impossible | None,
) -> Iterator[tuple[Subject, Sequences]]:
    """Say where the sequences of each subject lie; without room for them, it is impossible."""
    for subject in subjects:
        held = {} if store is None else store.sequences(subject.model.label, subject.text.name)
        try:
            yield subject, place_sequences(plan, subject, held)
        except TextError as error:
            if impossible is None:
                raise
            impossible.append((subject.spec, subject.text.name, error))
