"""Count what a run of a plan would measure, and predict in what memory, without measuring or writing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from howsmooth.attention import SelfAttention
from howsmooth.batching import footprint
from howsmooth.memory import memory_budget
from howsmooth.study.plans import Plan
from howsmooth.study.study_preparation import PreparedStudy, prepared_study
from howsmooth.study.tasks.lipschitz_constants import ConstantsTask, constants_left
from howsmooth.study.tasks.task import Failed

__all__ = ["DryRun", "Part", "dry_run"]

# Number of vectors of n·d entries that the solver keeps for one sequence: a typical basis and work space.
_VECTORS = 40


@dataclass(frozen=True)
class Part:
    """What is left to measure of one model on one text in one scope.

    ``layers``, ``lengths``, ``sequences`` and ``measurements`` are numbers; ``longest`` is the largest number
    of tokens of a sequence. ``memory`` are the bytes that the sequences of this length take which are
    measured together, beside the model and its input: attention probabilities and the vectors of the solver.
    It is None if it is not known beforehand. ``lacking`` is None if one of these sequences fits into the
    memory that it may use, or else the bytes that it would need: it will be refused.
    """

    model: str
    text: str
    scope: str
    layers: int
    lengths: int
    longest: int
    sequences: int
    measurements: int
    memory: float | None
    lacking: float | None


@dataclass(frozen=True)
class DryRun:
    """What a run of a plan would measure.

    ``kept`` is the number of measurements of the plan that the store already has. ``impossible`` are the
    models and texts that cannot be measured, as (model, text or None, reason).
    """

    parts: tuple[Part, ...]
    kept: int
    impossible: tuple[tuple[str, str | None, str], ...]


def dry_run(plan: Plan, folder: str | os.PathLike[str], *, keep_going: bool = False) -> DryRun:
    """Load and check all that a run of a plan would, and count what the store in ``folder`` lacks.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        The errors that ``run`` raises before it measures.

    """
    with prepared_study(plan, folder, write=False, keep_going=keep_going) as study:
        left = constants_left(study)
        groups: dict[tuple[str, str, str], list[ConstantsTask]] = {}
        for task in left.tasks:
            assert isinstance(task, ConstantsTask)
            groups.setdefault((task.model, task.subject.text.name, task.scope), []).append(task)
        impossible = [(spec.label, text, str(error)) for spec, text, error in study.impossible]
        parts = []
        for (model, text, scope), tasks in groups.items():
            longest = max(task.n for task in tasks)
            memory: float | None = None
            lacking: float | None = None
            try:
                memory, lacking = _memory(study, tasks, longest)
            except Exception as error:
                if not keep_going:
                    raise
                impossible.append((model, text, str(error)))
            parts.append(
                Part(
                    model,
                    text,
                    scope,
                    layers=len({layer for task in tasks for layer in task.layers}),
                    lengths=len({task.n for task in tasks}),
                    longest=longest,
                    sequences=len({(task.n, sample) for task in tasks for sample in task.starts}),
                    measurements=sum(task.size for task in tasks),
                    memory=memory,
                    lacking=lacking,
                )
            )
        reasons = ((label, text, " ".join(error.split())) for label, text, error in impossible)
        return DryRun(tuple(parts), left.kept, tuple(dict.fromkeys(reasons)))


def _memory(
    study: PreparedStudy, tasks: Sequence[ConstantsTask], longest: int
) -> tuple[float | None, float | None]:
    """Return the bytes of the longest sequences measured together, and those that one needs if it does not
    fit.
    """
    plan, first = study.plan, min(tasks, key=lambda task: task.n)
    sample = next(iter(first.starts))
    missing = frozenset(key for key in first.missing if key[1] == first.layers[0])
    shortest = replace(first, starts={sample: first.starts[sample]}, missing=missing).packed()
    site = next(shortest.sites(study.models.load_for(first.subject)))
    if isinstance(site, Failed):
        raise site.error
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    known, d = site.x.shape[-2:]
    exact = isinstance(site.map, SelfAttention)
    # The footprint of other maps is known only at the length of capture; it grows like n².
    tokens = longest if exact else known
    how = footprint(site.map, (tokens, d), dtype=dtype, device=device, memory=plan.memory)
    if not how.size:
        return None, None
    size = float(how.size) if exact else how.size * (longest / first.n) ** 2
    budget = float(memory_budget(plan.memory, device))
    members = max(len(task.starts) for task in tasks if task.n == longest)
    # Sequences share a batch as far as memory allows, so the batch takes at most the budget. A streamed map
    # is measured one sequence after another.
    together = size if how.streamed else min(members * size, max(size, budget))
    lacking = size if how.streamed and size > budget else None
    return together + members * _VECTORS * longest * d * dtype.itemsize, lacking
