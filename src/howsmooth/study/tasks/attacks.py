"""Attacks: all that is tried on one attention at one length, to make it as steep as can be in a ball.

The constant at the tokens at hand, at those that are written down from the parameters, at the best that
gradient ascent finds, and the smallest upper bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth import adversarial, bounds, lipschitz
from howsmooth.attention import SelfAttention
from howsmooth.models.parameter_files import save_parameters
from howsmooth.study.names import file_stem
from howsmooth.study.plan import AttackPlan
from howsmooth.study.records import Attack, Row
from howsmooth.study.sources import Ball, Target, longest
from howsmooth.study.subjects import Models
from howsmooth.study.tasks.task import Failed, Found, Task, failure_row

__all__ = ["INPUTS", "AttackTask"]

INPUTS = "inputs"
"""The folder, in that of the store, for the tokens found."""

_RTOL = 1e-4
_RANDOM_STARTS = 2
_ATOM_STEPS = 3
# Tokens on the sphere may be longer than its radius by a rounding error.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class AttackTask(Task):
    """All that is tried on one attention at one length.

    Attributes
    ----------
    asked
        How hard to try.
    source, text
        The name of the model or of the parameter file, and of the text; the latter is empty without one.
    target
        The attention at this length.
    n
        The length.
    ball
        In which tokens are sought.
    seed
        Of all random numbers.
    folder
        That of the store, for the tokens found.

    """

    kind = Attack

    asked: AttackPlan
    source: str
    text: str
    target: Target
    n: int
    ball: Ball
    seed: int
    folder: Path

    @property
    def key(self) -> tuple[int, int | None, int]:
        """What tells its rows from those of other tasks: layer, head and n."""
        return self.target.layer, self.target.head, self.n

    @property
    def model(self) -> str:
        """The name of the model or of the parameter file."""
        return self.source

    @property
    def alike(self) -> tuple[Any, ...]:
        """The kind of rows and the scope."""
        return Attack.table, self.target.scope

    @property
    def words(self) -> str:
        """Where the attention stands, and the length."""
        return f"{self.target.place}, n = {self.n}"

    def count(self, rows: Sequence[Row]) -> int:
        """Count the attention at this length, of which all rows are found together."""
        return 1

    def found(self, models: Models | None) -> Iterator[Found]:
        """Try everything, and save the steepest tokens with the attention."""
        try:
            yield self._rows()
        except Exception as error:
            yield self.failed(error)

    def failed(self, error: Exception) -> Failed:
        """Say that nothing came of the attention at this length."""
        one = self.target
        where = (self.source, self.text, one.scope, one.layer, one.head, self.n)
        return Failed([failure_row(error, Attack, *where)], error)

    def _rows(self) -> list[Attack]:
        f = self.target.attention.to(dtype=torch.float64, device="cpu")
        tried = list(self._tried(f))
        uppers = self._uppers(f)
        most = self.ball.radius * (1 + _ROUNDING)
        # The tokens at hand may lie outside a ball that was asked for.
        best = max(
            (one for one in tried if one.row.kind != "tokens" or longest(one.x) <= most),
            key=lambda one: one.value,
        )
        file = self._save(best)
        return [*(replace(one.row, file=file) if one is best else one.row for one in tried), *uppers]

    def _tried(self, f: SelfAttention) -> Iterator[_Tried]:
        """Measure at one input after another, and time each with the search for it."""
        began = time.perf_counter()
        for kind, name, x, estimate, evaluations in self._inputs(f):
            value = float(estimate.value)
            row = self._row(
                kind,
                name,
                value=value,
                log_value=math.log(value) if value > 0 else -math.inf,
                lower=float(estimate.lower),
                upper=float(estimate.upper),
                converged=bool(estimate.converged),
                radius_max=longest(x),
                seconds=time.perf_counter() - began,
                evaluations=evaluations,
            )
            yield _Tried(row, value, x)
            began = time.perf_counter()

    def _inputs(self, f: SelfAttention) -> Iterator[tuple[str, str, Tensor, Any, int]]:
        """Yield inputs by kind and name, each with the estimate there and how many it took to find it."""
        if self.target.x is not None:
            x = self.target.x.double()
            yield "tokens", "tokens", x, self._measured(f, x), 1
        if f.rotary is None and f.mask is None and f.window is None:
            built = adversarial.constructions(f, self.n, self.ball.radius)
            for name, x in _named(built):
                yield "construction", name, x, self._measured(f, x), 1
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
        yield "ascent", "ascent", ascent.x, ascent.estimate, len(ascent.history)

    def _measured(self, f: SelfAttention, x: Tensor) -> Any:
        return lipschitz.local_lipschitz(f, x, rtol=_RTOL, seed=self.seed)

    def _uppers(self, f: SelfAttention) -> list[Attack]:
        """Find the smallest upper bound on the ball; no theorem speaks of rotary positions."""
        if f.rotary is not None:
            return []
        began = time.perf_counter()
        bound = bounds.best(f, length=self.n, radius=self.ball.radius)
        row = self._row(
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
        return [row]

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

    def _save(self, best: _Tried) -> str:
        """Save the steepest tokens with the attention; return the file, relative to the folder."""
        one = self.target
        head = [] if one.head is None else [f"head-{one.head:02d}"]
        stem = file_stem(f"layer-{one.layer:02d}", *head, f"n-{self.n:05d}")
        path = Path(INPUTS, f"{stem}.safetensors")
        notes = {
            "source": self.source,
            "place": one.place,
            "scope": one.scope,
            "radius": repr(self.ball.radius),
            "found_by": best.row.name,
            "lipschitz": repr(best.value),
        }
        save_parameters(self.folder / path, one.attention, best.x.detach().cpu(), notes)
        return path.as_posix()


@dataclass(frozen=True, eq=False)
class _Tried:
    """An input, the constant there, and the row that says so."""

    row: Attack
    value: float
    x: Tensor


def _named(constructions: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Name the tokens of constructions so that no two share a name; the paper's choice is ``two_cluster``.

    Of a head's two clusters the first is the one that the paper's rule chooses.
    """
    several = len({one.head for one in constructions}) > 1
    used = set()
    for one in constructions:
        where = f", head {one.head}" if several else ""
        name = f"{one.name}{where}"
        yield f"{one.name}, other eigenvalue{where}" if name in used else name, one.x.double()
        used.add(name)
