"""Define the task of computing bounds on each layer at one sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from howsmooth.attention import SelfAttention
from howsmooth.bounds.applicable_bounds import applicable_bounds
from howsmooth.bounds.bound import Quantity
from howsmooth.bounds.bound_problem import Problem
from howsmooth.bounds.catalogue import Statement
from howsmooth.errors import HowsmoothError
from howsmooth.scopes import ATTENTION_SCOPES
from howsmooth.study.records import KEY_COLUMNS, Bounding, Measurement, Row, SiteBound
from howsmooth.study.study_preparation import PreparedStudy
from howsmooth.study.tasks.task import Failed, Found, SequenceTask, Work

__all__ = ["LEFT_OUT", "BoundsTask", "bound_site", "bounds_left"]

# The bounds that take longest, which are computed only if all bounds are asked for.
_DEAR = ("certificate", "folded_gram_upper_bound", "gram_upper_bound")
LEFT_OUT = "left out: it takes longer than others; howsmooth measure --bounds all computes it"
"""Why a bound is missing that only ``--bounds all`` computes."""
# The largest numbers of tokens at which bounds are computed that take long. The last one takes a singular
# value decomposition of the (n, n) probabilities.
_MOST_TOKENS = {"certificate": 256, "yudin_theorem_3": 1024}
_WIDE, _MOST_TOKENS_IF_WIDE = 512, 64
# Errors that mean "no bound": a hypothesis fails, eigenvalues do not converge, or a formula overflows.
_NO_BOUND = (HowsmoothError, torch.linalg.LinAlgError, ArithmeticError)  # type: ignore[attr-defined]


class BoundsTask(SequenceTask):
    """The task of computing bounds on each layer at the first sequence (sample 0) of one length."""

    kind = Bounding
    # A failure does not end the run: a report without bounds is better than none.
    essential = False

    @property
    def words(self) -> str:
        """A short description for progress messages: the model and the length."""
        return f"{super().words}, bounds"

    def count(self, rows: Sequence[Row]) -> int:
        """Return 1, since all bounds on one layer or head count as one result."""
        return 1

    def computed(self, model: Any) -> Iterator[Found]:
        """Compute the bounds with the loaded model, and yield the rows of each layer or head."""
        for site in self.sites(model):
            if isinstance(site, Failed):
                yield site
            elif (self.scope, site.layer, site.head, self.n, 0) in self.missing:
                try:
                    yield self._bounded(site)
                except Exception as error:
                    yield self.failed(error, (site.layer, site.head), [0])

    def _bounded(self, site: Any) -> list[Row]:
        radius, bounds = bound_site(site, dear=self.plan.bounds == "all")
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
                radius=radius,
                **asdict(bound),
            )
            for bound in bounds
        ]


def bound_site(site: Any, *, dear: bool = True) -> tuple[float, list[SiteBound]]:
    """Compute the bounds on one attention layer or head of a model, a site of
    :func:`howsmooth.models.capture`, at the tokens that it receives. Return the radius of the ball on which
    global bounds hold, and an entry for each bound; if a bound has no value, the ``source`` of its entry
    gives the reason.

    Some bounds are left out to save time: searches over inputs; the certificate at more than 256 tokens; in
    512 or more dimensions, the certificate of several heads at more than 64 tokens; and ``yudin_theorem_3``
    at more than 1,024 tokens. The command ``howsmooth bound`` computes these bounds too. Without ``dear``,
    the certificate and the bounds by Gram matrices are left out as well.
    """
    try:
        question = Problem.of(site)
        statements = [one for side in ("upper", "lower") for one in applicable_bounds(question, side=side)]
    except HowsmoothError as error:
        return float(site.radius_max[0]), [_nothing("any", "upper", Quantity.LOCAL, error)]
    found = []
    for statement, side in statements:
        why: Exception | str = _cost(statement, question)
        if not dear and not why and statement.name in _DEAR:
            why = LEFT_OUT
        try:
            bound = None if why else statement.at(question, side)
        except _NO_BOUND as error:
            bound, why = None, error
        if bound is None:
            found.append(_nothing(statement.name, side, statement.quantity_of(question), why))
            continue
        failed = "; ".join(h.statement for h in bound.hypotheses if not h.holds)
        if failed:
            reason = f"{bound.source} (needs: {failed})"
            found.append(_nothing(bound.name, bound.side, bound.quantity, reason))
        else:
            values = (bound.value, bound.log_value)
            found.append(SiteBound(bound.name, bound.side, str(bound.quantity), *values, True, bound.source))
    return question.radius, found


def _nothing(name: str, side: str, quantity: Quantity, why: Exception | str) -> SiteBound:
    words = " ".join(str(why).split()) or type(why).__name__
    return SiteBound(name, side, str(quantity), None, None, False, words)


def _cost(statement: Statement[Problem], question: Problem) -> str:
    """Return the reason for leaving a slow bound out at these tokens; empty if the bound is fast enough."""
    name = statement.name
    if statement.searched:
        return "left out: it needs a search over inputs; howsmooth bound computes it"
    f = question.attention
    wide = (
        name == "certificate"
        and isinstance(f, SelfAttention)
        and f.d >= _WIDE
        and (f.heads > 1 or bool(f.feature_names()))
    )
    most = _MOST_TOKENS_IF_WIDE if wide else _MOST_TOKENS.get(name)
    if most is None or (question.length or 0) <= most:
        return ""
    where = f" in {_WIDE} or more dimensions" if wide else ""
    return f"left out: it takes long at more than {most} tokens{where}; howsmooth bound computes it"


def bounds_left(study: PreparedStudy) -> Work:
    """List the tasks that compute a study's missing bounds, from short sequences to long ones."""
    tasks: list[BoundsTask] = []
    kept = 0
    for subject in study.subjects:
        where = {"model": subject.model.label, "text": subject.text.name, "sample": 0}
        measured = study.store.keys(Measurement, KEY_COLUMNS, **where)
        known = study.store.keys(Bounding, KEY_COLUMNS, **where)
        if study.plan.bounds == "all":
            known -= study.store.keys(Bounding, KEY_COLUMNS, source=LEFT_OUT, **where)
        for n in subject.lengths:
            for scope in (scope for scope in study.plan.scopes if scope in ATTENTION_SCOPES):
                heads = subject.heads if scope == "head" else (None,)
                for layer in subject.layers:
                    asked = measured & {(scope, layer, head, n, 0) for head in heads}
                    kept += len(asked & known)
                    if missing := asked - known:
                        places = {0: subject.starts[n, 0]}
                        tasks.append(BoundsTask(study.plan, subject, n, scope, places, missing))
    return Work(Bounding, "tables of bounds", sorted(tasks, key=lambda task: task.n), kept)
