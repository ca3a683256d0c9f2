"""Look for the worst inputs of every attention asked for, at every length, and keep what is found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from howsmooth.errors import ArgumentError
from howsmooth.study.plan import AttackPlan, derive_seed
from howsmooth.study.progress import Outcome
from howsmooth.study.records import ATTACK, ATTACK_PLACE, Attack, HeadStrength
from howsmooth.study.runner import Means, Runner
from howsmooth.study.sources import Ball, Source, Target, open_source, shortened
from howsmooth.study.store import PendingStore
from howsmooth.study.strengths import strengths
from howsmooth.study.tasks.attacks import AttackTask
from howsmooth.study.tasks.task import Work

__all__ = ["run_attack"]


def run_attack(plan: AttackPlan, folder: Path, means: Means | None = None) -> Outcome:
    """Attack what the plan asks for and the store in ``folder`` does not have.

    Parameters
    ----------
    plan
        What to attack.
    folder
        Of the store; made, with the store, once every check has passed.
    means
        How; by default here, in silence, ending at the first failure.

    Raises
    ------
    WorkerError
        If the workers of the executor are lost.
    howsmooth.errors.HowsmoothError
        If the plan is impossible, before anything is attacked; if the store cannot be written; or without
        ``keep_going`` if attacking fails, after what was found has been written.

    """
    began = time.monotonic()
    means = means or Means()
    means.listener.phase("Reading")
    # An existing store is opened first: if it cannot be used, no model need be loaded to say so.
    with PendingStore(folder, ATTACK) as pending:
        source = open_source(plan)
        origin = {"source": source.label, "fingerprint": source.fingerprint, "text": source.text}
        identity = origin | plan.settings()
        pending.check(identity)
        tasks, heads = list(_tasks(plan, source, folder)), list(_strengths(plan, source))
        store = pending.begin(identity)
        store.add(heads)
        known = store.keys(Attack, ATTACK_PLACE)
        left = [task for task in tasks if task.key not in known]
        runner = Runner(store, means)
        runner.carry_out(Work(Attack, "attacks", left, len(tasks) - len(left)))
        return replace(runner.finish(), seconds=time.monotonic() - began)


def _tasks(plan: AttackPlan, source: Source, folder: Path) -> Iterator[AttackTask]:
    """List all attentions at all lengths, from short to long."""
    usual = source.attentions(source.usual_length or max(plan.lengths))
    balls = [_ball(plan, one) for one in usual]
    for n in sorted(plan.lengths):
        for target, ball in zip(_at(source, usual, n), balls, strict=True):
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


def _at(source: Source, usual: list[Target], n: int) -> Iterator[Target]:
    """Put maps and tokens of a length together, sharing the parameters that do not depend on it."""
    # Beyond the model's positions there are no tokens, but the map is the same.
    there = source.longest is not None and n <= source.longest
    for one, own in zip(usual, source.attentions(n) if there else usual, strict=True):
        # Short tokens do not show a window, which is then not in the map of the usual length either.
        parts = (own.attention.mask, own.attention.rotary, own.attention.window)
        if there and any(part is not None for part in parts):
            yield own
        else:
            yield replace(one, attention=shortened(one.attention, n), x=own.x if there else None)


def _ball(plan: AttackPlan, one: Target) -> Ball:
    ball = one.ball(plan.radius)
    if ball.radius == 0:
        raise ArgumentError("radius", expected="a number, as all tokens are zero", got=repr(plan.radius))
    return ball


def _strengths(plan: AttackPlan, source: Source) -> Iterator[HeadStrength]:
    """Say of every head of every layer how strong its scores are, whether or not it is attacked."""
    for one in source.everywhere():
        if one.attention.rotary is None:
            radius = _ball(plan, one).radius
            for h, strength in enumerate(strengths(one.attention)):
                yield HeadStrength(one.layer, h, radius, **asdict(strength))
