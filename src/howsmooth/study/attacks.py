"""Look for the worst inputs of every attention asked for, at every length, and keep what is found.

At each length: the constant at the tokens at hand, at those that are written down from the parameters, at
the best that gradient ascent finds, and the smallest upper bound. What the store has is skipped; the rows
of one attention at one length are written together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.bounds.norms import norm_radius
from howsmooth.errors import ArgumentError
from howsmooth.models.parameter_files import save_parameters
from howsmooth.study.attack_plan import AttackPlan, AttackProgress, AttackTools
from howsmooth.study.attack_store import Attack, AttackStore, HeadRow
from howsmooth.study.cost import measurement_cost
from howsmooth.study.names import file_stem
from howsmooth.study.plan import derive_seed
from howsmooth.study.progress import Outcome
from howsmooth.study.sources import Found, Source, shortened
from howsmooth.study.strengths import strengths

__all__ = ["attack", "named_constructions"]

INPUTS = "inputs"
"""The folder, in that of the store, for the tokens found."""

_RTOL = 1e-4
_RANDOM_STARTS = 2
_ATOM_STEPS = 3


@dataclass(frozen=True, eq=False)
class _Job:
    """One attention at one length."""

    found: Found
    n: int
    radius: float
    radius_from: str

    @property
    def cost(self) -> float:
        """The time it takes, in no particular unit."""
        return measurement_cost(self.n, self.found.attention.heads)


class _Teller:
    """Turns the share done of one job into the progress of all."""

    def __init__(
        self, costs: Sequence[float], kept: int, on_progress: Callable[[AttackProgress], None]
    ) -> None:
        self._costs = costs
        self._kept = kept
        self._on_progress = on_progress

    def of(self, place: int, job: _Job) -> Callable[[float, str], None]:
        """Return what the job at a place of the list tells its share done to, and that it began."""

        def tell(share: float, more: str) -> None:
            self._tell(place, share, f"{job.found.place}, n = {job.n}{more}")

        tell(0.0, "")
        return tell

    def end(self) -> None:
        """Tell that all jobs are done."""
        self._tell(len(self._costs), 0.0, "")

    def _tell(self, place: int, share: float, words: str) -> None:
        here = self._costs[place] * share if place < len(self._costs) else 0.0
        cost = sum(self._costs[:place]) + here
        self._on_progress(AttackProgress(place, len(self._costs), self._kept, cost, sum(self._costs), words))


def attack(
    plan: AttackPlan,
    source: Source,
    folder: Path,
    tools: AttackTools,
    *,
    command: str = "",
    environment: Mapping[str, str] | None = None,
    on_progress: Callable[[AttackProgress], None] = lambda progress: None,
) -> Outcome:
    """Attack what the plan asks for and the store in ``folder`` does not have.

    Parameters
    ----------
    plan
        What to attack.
    source
        Where the attentions come from.
    folder
        Of the store; made, with the store, once every check has passed.
    tools
        What to attack with, usually :func:`~howsmooth.study.attack_plan.attack_tools`.
    command, environment
        To be recorded as the origin of the rows.
    on_progress
        Told before the first and after every row group.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the plan is impossible, before anything is attacked; or if attacking fails, after what was found
        has been written.

    """
    began = time.perf_counter()
    identity = plan.identity(source)
    if AttackStore.exists(folder):
        with AttackStore.open(folder, write=False) as there:
            there.check(identity)
    jobs = _jobs(plan, source)
    heads = _head_rows(plan, source)
    with AttackStore.open(folder) as store:
        store.check(identity)
        store.add_study(identity)
        store.add_heads(heads)
        known = store.known()
        left = [job for job in jobs if (job.found.layer, job.found.head, job.n) not in known]
        kept = len(jobs) - len(left)
        unconverged = 0
        if left:
            number = store.start_run(command, environment or {})
            watch = _Teller([job.cost for job in left], kept, on_progress)
            for place, job in enumerate(left):
                rows = _attacked(plan, source, job, folder, tools, watch.of(place, job))
                store.add(rows, number)
                unconverged += sum(not row.converged for row in rows)
            watch.end()
            store.finish_run(number)
    return Outcome(len(left), kept, unconverged, time.perf_counter() - began)


def named_constructions(constructions: Sequence[Any]) -> list[tuple[str, Any]]:
    """Name constructions so that no two share a name; the paper's own choice is ``two_cluster``.

    Of a head's two clusters the first is the one that the paper's rule chooses.
    """
    several = len({one.head for one in constructions}) > 1
    named: list[tuple[str, Any]] = []
    for one in constructions:
        where = f", head {one.head}" if several else ""
        name = f"{one.name}{where}"
        if any(name == other for other, _ in named):
            name = f"{one.name}, other eigenvalue{where}"
        named.append((name, one))
    return named


# ---- what there is to do


def _jobs(plan: AttackPlan, source: Source) -> list[_Job]:
    """List all attentions at all lengths, from short to long."""
    usual = source.usual_length or max(plan.lengths)
    reference = source.attentions(usual)
    radii = [_radius(plan.radius, one) for one in reference]
    jobs = []
    for n in sorted(plan.lengths):
        # Beyond the model's positions there are no tokens, but the map is the same.
        with_tokens = source.longest is not None and n <= source.longest
        at_length = source.attentions(n) if with_tokens else reference
        for one, own, radius in zip(reference, at_length, radii, strict=True):
            jobs.append(_Job(_at(one, own if with_tokens else None, n), n, *radius))
    return jobs


def _at(one: Found, own: Found | None, n: int) -> Found:
    """Put the map and the tokens of a length together, sharing the parameters that do not depend on it."""
    # Short tokens do not show a window, which is then not in the map of the reference either.
    parts = () if own is None else (own.attention.mask, own.attention.rotary, own.attention.window)
    if own is not None and any(part is not None for part in parts):
        return own
    return replace(one, attention=shortened(one.attention, n), x=None if own is None else own.x)


def _radius(asked: float | str, one: Found) -> tuple[float, str]:
    if not isinstance(asked, str):
        return float(asked), "given"
    if asked == "auto" and one.norm is not None:
        return norm_radius(one.norm), f"the {type(one.norm).__name__} before the attention"
    if one.x is None:
        raise ArgumentError(
            "radius",
            expected="a number, as neither a norm layer nor tokens say how long tokens can be",
            got=repr(asked),
            remedy="Give --radius.",
        )
    longest = _longest(one.x)
    if longest == 0:
        raise ArgumentError("radius", expected="a number, as all tokens are zero", got=repr(asked))
    return longest, f"the longest of {one.x.shape[0]} tokens"


def _longest(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double(), dim=-1).max())


def _head_rows(plan: AttackPlan, source: Source) -> list[HeadRow]:
    """Say of every head of every layer how strong its scores are, whether or not it is attacked."""
    rows = []
    for one in source.everywhere():
        radius, _ = _radius(plan.radius, one)
        if one.attention.rotary is not None:
            continue
        for h, one_head in enumerate(strengths(one.attention)):
            rows.append(HeadRow(one.layer, h, radius, **asdict(one_head)))
    return rows


# ---- one attention at one length


@dataclass(eq=False)
class _Best:
    """The steepest tokens in the ball so far."""

    value: float = -math.inf
    name: str = ""
    x: Tensor | None = None
    rows: list[Attack] = field(default_factory=list)

    def offer(self, value: float, name: str, x: Tensor) -> None:
        if value > self.value:
            self.value, self.name, self.x = value, name, x


def _attacked(
    plan: AttackPlan,
    source: Source,
    job: _Job,
    folder: Path,
    tools: AttackTools,
    tell: Callable[[float, str], None],
) -> list[Attack]:
    seed = derive_seed(
        purpose="attack",
        seed=plan.request.seed,
        source=source.fingerprint,
        scope=plan.request.scope,
        layer=job.found.layer,
        head=job.found.head,
        n=job.n,
    )
    f = job.found.attention.to(dtype=torch.float64, device="cpu")
    best, make = _Best(), _Maker(job, seed)
    if job.found.x is not None:
        began = time.perf_counter()
        x = job.found.x.double()
        estimate = tools.measure(f, x, rtol=_RTOL, seed=seed)
        best.rows.append(make.measured("tokens", "tokens", estimate, x, began))
        if _longest(x) <= job.radius * (1 + 1e-9):
            best.offer(float(estimate.value), "tokens", x)
    for name, x, row in _constructed(job, f, seed, tools, make):
        best.offer(row.value or 0.0, name, x)
        best.rows.append(row)
    began = time.perf_counter()

    def heard(row: dict[str, object]) -> None:
        step = int(str(row["step"]))
        tell(min(step / plan.steps, 1.0), f", step {step} of {plan.steps}")

    ascent = tools.ascend(
        f,
        length=job.n,
        radius=job.radius,
        random_starts=_RANDOM_STARTS,
        steps=plan.steps,
        atom_restarts=plan.restarts,
        atom_steps=_ATOM_STEPS * plan.steps,
        seed=seed,
        on_evaluation=heard,
    )
    best.offer(float(ascent.estimate.value), "ascent", ascent.x)
    best.rows.append(
        make.measured("ascent", "ascent", ascent.estimate, ascent.x, began, evaluations=len(ascent.history))
    )
    began = time.perf_counter()
    bound = _upper(f, job, tools)
    if bound is not None:
        best.rows.append(make.upper(bound, began))
    return _with_file(plan, source, job, folder, best)


def _constructed(
    job: _Job, f: SelfAttention, seed: int, tools: AttackTools, make: _Maker
) -> Iterator[tuple[str, Tensor, Attack]]:
    if f.rotary is not None or f.mask is not None or f.window is not None:
        return
    began = time.perf_counter()
    named = named_constructions(tools.constructions(f, job.n, job.radius))
    for name, one in named:
        x = one.x.double()
        estimate = tools.measure(f, x, rtol=_RTOL, seed=seed)
        yield name, x, make.measured("construction", name, estimate, x, began)
        began = time.perf_counter()


def _upper(f: SelfAttention, job: _Job, tools: AttackTools) -> Any:
    """Find the smallest upper bound on the ball; None with rotary positions, of which no theorem speaks."""
    if f.rotary is not None:
        return None
    return tools.best(f, length=job.n, radius=job.radius)


class _Maker:
    """Makes the rows of one job."""

    def __init__(self, job: _Job, seed: int) -> None:
        self._job = job
        self._seed = seed

    def measured(
        self, kind: str, name: str, estimate: Any, x: Tensor, began: float, *, evaluations: int = 1
    ) -> Attack:
        value = float(estimate.value)
        return self._row(
            kind,
            name,
            value=value,
            log_value=math.log(value) if value > 0 else -math.inf,
            lower=float(estimate.lower),
            upper=float(estimate.upper),
            converged=bool(estimate.converged),
            radius_max=_longest(x),
            seconds=time.perf_counter() - began,
            evaluations=evaluations,
        )

    def upper(self, bound: Any, began: float) -> Attack:
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
        job = self._job
        return Attack(
            layer=job.found.layer,
            head=job.found.head,
            scope=job.found.scope,
            masking=job.found.masking,
            n=job.n,
            radius=job.radius,
            radius_from=job.radius_from,
            kind=kind,
            name=name,
            seed=self._seed,
            file=None,
            **values,
        )


def _with_file(plan: AttackPlan, source: Source, job: _Job, folder: Path, best: _Best) -> list[Attack]:
    """Save the steepest tokens with the attention, and name the file in their row."""
    if best.x is None:
        return best.rows
    place = [
        f"layer-{job.found.layer:02d}",
        *([] if job.found.head is None else [f"head-{job.found.head:02d}"]),
    ]
    path = Path(INPUTS) / f"{file_stem(*place, f'n-{job.n:05d}')}.safetensors"
    notes = {
        "source": source.label,
        "place": job.found.place,
        "scope": job.found.scope,
        "radius": repr(job.radius),
        "found_by": best.name,
        "lipschitz": repr(best.value),
    }
    save_parameters(folder / path, job.found.attention, best.x.detach().cpu(), notes)
    file = path.as_posix()
    return [
        replace(row, file=file) if row.name == best.name and row.kind != "upper" else row for row in best.rows
    ]
