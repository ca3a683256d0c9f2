"""Run the attacks of a plan on each attention at each length, and write the results to a store."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from howsmooth.errors import ArgumentError
from howsmooth.seeds import derive_seed
from howsmooth.study.attention_sources import AttentionSource, Ball, Target, open_attention_source, shortened
from howsmooth.study.head_eigenvalues import head_eigenvalues
from howsmooth.study.plans import AttackPlan
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.records import ATTACK, ATTACK_PLACE, Attack, HeadRecord
from howsmooth.study.runner import Means, Runner
from howsmooth.study.store import PendingStore
from howsmooth.study.tasks.attacks import AttackTask
from howsmooth.study.tasks.task import Work

__all__ = ["run_attack"]


def run_attack(plan: AttackPlan, folder: str | os.PathLike[str], means: Means | None = None) -> Outcome:
    """Run the attacks that a plan asks for and that the store in ``folder`` does not have.

    Folder and store are created after all checks have passed. Without ``means``, the attacks run in this
    process, and the first failure ends the run.

    Raises
    ------
    WorkerError
        If the executor loses its workers.
    howsmooth.errors.HowsmoothError
        If the plan is impossible, before any attack runs; if the store cannot be written; or, without
        ``keep_going``, if an attack fails. Finished attacks are in the store then.

    """
    folder = Path(folder)
    began = time.monotonic()
    means = means or Means()
    means.listener.phase("Reading")
    # Open an existing store before loading a model: an unusable store is then reported at once.
    with PendingStore(folder, ATTACK) as pending:
        source = open_attention_source(plan)
        origin = {"source": source.label, "fingerprint": source.fingerprint, "text": source.text}
        identity = origin | plan.settings()
        pending.check(identity)
        tasks, heads = list(_tasks(plan, source, folder)), list(_head_records(plan, source))
        store = pending.begin(identity)
        store.add(heads)
        known = store.keys(Attack, ATTACK_PLACE)
        left = [task for task in tasks if task.key not in known]
        runner = Runner(store, means)
        runner.carry_out(Work(Attack, "attacks", left, len(tasks) - len(left)))
        return replace(runner.finish(), seconds=time.monotonic() - began)


def _tasks(plan: AttackPlan, source: AttentionSource, folder: Path) -> Iterator[AttackTask]:
    """Yield the tasks of a plan: one for each pair of an attention and a length, from short to long."""
    usual = source.attentions(source.usual_length or max(plan.lengths))
    balls = [_ball(plan, one) for one in usual]
    for n in sorted(plan.lengths):
        for target, ball in zip(_attentions_at(source, usual, n), balls, strict=True):
            seed = derive_seed(
                purpose=ATTACK,
                seed=plan.seed,
                source=source.fingerprint,
                scope=plan.scope,
                layer=target.layer,
                head=target.head,
                n=n,
            )
            yield AttackTask(plan, source.label, source.text, target, n, ball, seed, folder.absolute())


def _attentions_at(source: AttentionSource, usual: list[Target], n: int) -> Iterator[Target]:
    """Yield each attention of a source with the mask, window and tokens that it has at length n.

    Parameters that do not depend on n are shared between lengths.
    """
    # A length beyond the model's positions has no tokens of the text, but the same attention map.
    there = source.longest is not None and n <= source.longest
    for one, own in zip(usual, source.attentions(n) if there else usual, strict=True):
        # A mask, a window or rotary positions can depend on the length, so take them from this length. A
        # short sequence does not show a window; then the map of the usual length has none either.
        parts = (own.attention.mask, own.attention.rotary, own.attention.window)
        if there and any(part is not None for part in parts):
            yield own
        else:
            yield replace(one, attention=shortened(one.attention, n), x=own.x if there else None)


def _ball(plan: AttackPlan, one: Target) -> Ball:
    ball = one.ball(plan.radius)
    if ball.radius == 0:
        raise ArgumentError(
            "radius",
            expected="a number, because all tokens are zero and give no radius",
            got=repr(plan.radius),
        )
    return ball


def _head_records(plan: AttackPlan, source: AttentionSource) -> Iterator[HeadRecord]:
    """Yield a row for every head, with its score matrix's eigenvalues and its parameters' norms."""
    for one in source.all_attentions():
        if one.attention.rotary is None:
            radius = _ball(plan, one).radius
            for h, strength in enumerate(head_eigenvalues(one.attention)):
                yield HeadRecord(one.layer, h, radius, **asdict(strength))
