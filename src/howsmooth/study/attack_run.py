"""Attack the attention of a model or a parameter file: search a ball for tokens with a large constant.

An attack measures the local Lipschitz constant at the given tokens, at constructed tokens and at the best
tokens of gradient ascent. It also computes the smallest upper bound on the constant over the ball.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth import adversarial, bounds, lipschitz
from howsmooth.attention import SelfAttention
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.models.attention_parameter_files import save_parameters
from howsmooth.seeds import derive_seed
from howsmooth.study.attention_sources import (
    AttentionSource,
    Ball,
    Target,
    largest_norm,
    open_attention_source,
    shortened,
)
from howsmooth.study.plans import AttackPlan
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.records import ATTACK, ATTACK_PLACE, Attack, Row
from howsmooth.study.runner import Means, Runner
from howsmooth.study.store import Store
from howsmooth.study.study_preparation import Models
from howsmooth.study.tasks.task import Failed, Found, Task, Work
from howsmooth.study.text_formatting import file_stem

__all__ = ["INPUTS", "AttackTask", "run_attack"]

INPUTS = "inputs"
"""The name of the folder for the worst tokens, inside the folder of the store."""

_LENGTHS = range(12, 393, 76)
_RTOL = 1e-4
_RANDOM_STARTS = 2
_ATOM_STEPS = 3
# Rounding can make tokens on the sphere longer than its radius: those found here by less than the first
# fraction, those that a model computed in float32 by less than the second.
_ROUNDING, _ROUNDING_OF_MODEL = 1e-9, 1e-6


def run_attack(plan: AttackPlan, folder: str | os.PathLike[str], means: Means | None = None) -> Outcome:
    """Run the attacks of a plan that the store in ``folder`` lacks, and write their results there.

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
    with Store.open(folder, late=True) as store:
        source = open_attention_source(plan)
        origin = {"source": source.label, "fingerprint": source.identity, "text": source.text}
        identity = origin | plan.settings()
        store.check(ATTACK, identity)
        tasks = list(_tasks(plan, source, folder))
        store.begin(ATTACK, identity)
        known = store.keys(Attack, ATTACK_PLACE)
        left = [task for task in tasks if task.key not in known]
        runner = Runner(store, means)
        runner.carry_out(Work(Attack, "attacks", left, len(tasks) - len(left)))
        return runner.finish(began)


def _tasks(plan: AttackPlan, source: AttentionSource, folder: Path) -> Iterator[AttackTask]:
    """Yield an attack task for each layer or head at each length of a plan, from short to long lengths."""
    lengths = plan.lengths or source.usual_lengths or _LENGTHS
    usual = source.attentions(source.usual_length or max(lengths))
    balls = _balls(plan, source, usual, lengths)
    for n in sorted(lengths):
        for target, ball in zip(_attentions_at(source, usual, n), balls, strict=True):
            seed = derive_seed(
                purpose=ATTACK,
                seed=plan.seed,
                source=source.identity,
                scope=plan.scope,
                layer=target.layer,
                head=target.head,
                n=n,
            )
            yield AttackTask(plan, source.label, source.text, target, n, ball, seed, folder.absolute())


def _attentions_at(source: AttentionSource, usual: list[Target], n: int) -> Iterator[Target]:
    """Yield each layer or head of a source (a model or a parameter file), adapted to n tokens.

    The mask, the sliding window and the input tokens are taken for the length n.
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


def _balls(
    plan: AttackPlan, source: AttentionSource, usual: list[Target], lengths: Iterable[int]
) -> list[Ball]:
    """Return the ball of each layer or head. Where the tokens give the radius, it holds those of all
    lengths.
    """
    there = [n for n in lengths if source.longest is not None and n <= source.longest]
    by_tokens = plan.radius == "data" or (plan.radius == "auto" and any(one.norm is None for one in usual))
    if not there or not by_tokens:
        return [_ball(plan, one) for one in usual]
    at_lengths = [[_ball(plan, one) for one in source.attentions(n)] for n in there]
    return [max(balls, key=lambda ball: ball.radius) for balls in zip(*at_lengths, strict=True)]


def _ball(plan: AttackPlan, one: Target) -> Ball:
    ball = one.ball(plan.radius)
    if ball.radius == 0:
        raise ArgumentError(
            "radius",
            expected="a number, because all tokens are zero and give no radius",
            got=repr(plan.radius),
        )
    return ball


@dataclass(frozen=True, eq=False)
class AttackTask(Task):
    """The task of attacking one layer or head: search a ball for n tokens with a large Lipschitz constant.

    ``asked`` is the plan, which sets the effort of the search. ``model`` and ``text`` are the names of the
    model or parameter file and of the text, which may be empty. ``target`` is the attention at this length,
    ``seed`` the seed of all random numbers, and ``folder`` the folder of the store, in which the worst tokens
    are saved.
    """

    kind = Attack
    size = 1  # all attacks on one attention are one result

    asked: AttackPlan
    model: str
    text: str
    target: Target
    n: int
    ball: Ball
    seed: int
    folder: Path

    @property
    def key(self) -> tuple[int, int | None, int]:
        """The layer, head and length, which identify the rows of the task in the store."""
        return self.target.layer, self.target.head, self.n

    @property
    def words(self) -> str:
        """A short description for progress messages: the layer, the head and the length."""
        return f"{self.target.place}, n = {self.n}"

    def count(self, rows: Sequence[Row]) -> int:
        """Return 1, since a task counts as one attack, however many rows it writes."""
        return 1

    def found(self, models: Models | None) -> Iterator[Found]:
        """Attack the attention, save the worst tokens, and yield the rows for the store."""
        try:
            yield self._rows()
        except Exception as error:
            yield self.failed(error)

    def failed(self, error: Exception) -> Failed:
        """Turn an error into a failure of the task, with one row for this layer or head at this length."""
        one = self.target
        where = (self.model, self.text, one.scope, one.layer, one.head, self.n)
        return Failed.of(error, Attack, where)

    def _rows(self) -> list[Attack]:
        f = self.target.attention.to(dtype=torch.float64, device="cpu")
        tried = list(self._tried(f))
        upper = self._upper(f)
        most = self.ball.radius * (1 + _ROUNDING)
        # The given tokens may lie outside the ball that the user asked for; then they do not count.
        best, x = max(
            ((row, x) for row, x in tried if row.kind != "tokens" or largest_norm(x) <= most),
            key=lambda one: one[0].value or 0.0,
        )
        file = self._save(best, x)
        return [*(replace(row, file=file) if row is best else row for row, _ in tried), upper]

    def _into_ball(self, x: Tensor) -> Tensor:
        """Shorten tokens that are outside of the ball by the rounding of the model alone, to its radius."""
        excess = x.norm(dim=-1, keepdim=True) / self.ball.radius
        return torch.where((excess > 1) & (excess < 1 + _ROUNDING_OF_MODEL), x / excess, x)

    def _tried(self, f: SelfAttention) -> Iterator[tuple[Attack, Tensor]]:
        """Measure the constant at given tokens, at constructed tokens and at tokens found by gradient ascent.

        For each of them, yield the row of the constant and the tokens.
        """
        began = time.perf_counter()

        def tried(kind: str, name: str, x: Tensor, found: Any = None, evaluations: int = 1) -> Any:
            nonlocal began
            estimate = lipschitz.local_lipschitz(f, x, rtol=_RTOL, seed=self.seed) if found is None else found
            value = float(estimate.value)
            row = self._row(
                kind,
                name,
                value=value,
                log_value=math.log(value) if value > 0 else -math.inf,
                lower=float(estimate.lower),
                upper=float(estimate.upper),
                converged=bool(estimate.converged),
                radius_max=largest_norm(x),
                seconds=time.perf_counter() - began,
                evaluations=evaluations,
            )
            began = time.perf_counter()
            return row, x

        given = (
            [] if self.target.x is None else [("tokens", "tokens", self._into_ball(self.target.x.double()))]
        )
        if f.rotary is None and f.mask is None and f.window is None and not f.feature_names():
            built = _named(adversarial.constructions(f, self.n, self.ball.radius))
            given += [("construction", name, x) for name, x in built]
        for one in given:
            # Tokens at which float64 loses all digits of the Jacobian are left out.
            with contextlib.suppress(NonFiniteError):
                yield tried(*one)
        ascent = adversarial.ascend(
            f,
            length=self.n,
            radius=self.ball.radius,
            random_starts=_RANDOM_STARTS,
            steps=self.asked.steps,
            atom_restarts=self.asked.restarts,
            atom_steps=_ATOM_STEPS * self.asked.steps,
            seed=self.seed,
        )
        yield tried("ascent", "ascent", ascent.x, ascent.estimate, len(ascent.history))

    def _upper(self, f: SelfAttention) -> Attack:
        """Return a row with the smallest upper bound on the Lipschitz constant over the ball of tokens."""
        began = time.perf_counter()
        bound = bounds.best(f, length=self.n, radius=self.ball.radius)
        return self._row(
            "upper",
            bound.name,
            value=bound.value if math.isfinite(bound.value) else None,
            log_value=bound.log_value,
            lower=None,
            upper=None,
            converged=True,
            radius_max=None,
            seconds=time.perf_counter() - began,
            evaluations=0,
        )

    def _row(self, kind: str, name: str, **values: Any) -> Attack:
        return Attack(
            layer=self.target.layer,
            head=self.target.head,
            scope=self.target.scope,
            masking=self.target.masking,
            n=self.n,
            radius=self.ball.radius,
            radius_from=self.ball.origin,
            kind=kind,
            name=name,
            seed=self.seed,
            file=None,
            **values,
        )

    def _save(self, best: Attack, x: Tensor) -> str:
        """Write the attacked attention and its worst tokens to a file; return its relative path."""
        one = self.target
        head = [] if one.head is None else [f"head-{one.head:02d}"]
        stem = file_stem(f"layer-{one.layer:02d}", *head, f"n-{self.n:05d}")
        path = Path(INPUTS, f"{stem}.safetensors")
        notes = {
            "source": self.model,
            "place": one.place,
            "scope": one.scope,
            "radius": repr(self.ball.radius),
            "found_by": best.name,
            "lipschitz": repr(best.value),
        }
        save_parameters(self.folder / path, one.attention, x.detach().cpu(), notes)
        return path.as_posix()


def _named(constructions: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """For each construction of tokens with a large constant, yield a unique name and the constructed tokens.

    The paper's construction is named ``two_cluster``. A head may have two two-cluster constructions; the
    first uses the eigenvalue that the paper chooses.
    """
    several = len({one.head for one in constructions}) > 1
    used = set()
    for one in constructions:
        where = f", head {one.head}" if several else ""
        name = f"{one.name}{where}"
        yield f"{one.name}, other eigenvalue{where}" if name in used else name, one.x.double()
        used.add(name)
