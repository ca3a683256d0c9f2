"""Define the task of measuring constants at sequences of one length or of several.

The model runs once for each length. If a layer is the same map at several lengths, its constants at the
sequences of these lengths are measured in one call, in which the sequences share matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch

from howsmooth import lipschitz
from howsmooth.batching import are_measured_together
from howsmooth.scopes import CROSS_SCOPE, layers_of_scope
from howsmooth.seeds import derive_seed
from howsmooth.study.plans import Plan
from howsmooth.study.records import KEY_COLUMNS, Measurement, Row, SequenceRecord
from howsmooth.study.study_preparation import PreparedStudy, Subject
from howsmooth.study.tasks.task import Failed, Found, SequenceTask, Work, each_if_not_all

__all__ = ["ConstantsTask", "batch_size", "constants_left", "joined", "start_seed"]

# Samples of one length are measured in one batch if they need at most about this many bytes.
_BATCH_BYTES = 2**31
_ARRAYS_A_HEAD = 6
# Energies are stored for the first sample up to this many tokens; the report cannot show more.
_MOST_TOKENS = 512
# Lengths are joined as long as all their sequences have no more tokens than this. On a CPU, products with
# more tokens take no less time for each, and finished results would be written late.
_TOKENS = {"cpu": 1 << 11}
_TOKENS_ELSEWHERE = 1 << 15
# So many tasks for each worker keep all of them at work to the end.
_TASKS_EACH = 6


class _Item(NamedTuple):
    """One constant to measure, of a layer or head at one sequence. ``slot`` is its index in the batch."""

    task: ConstantsTask
    site: Any
    sample: int
    slot: int

    @property
    def seed(self) -> int:
        task, at = self.task, (self.site.layer, self.site.head, self.task.n, self.sample)
        return start_seed(task.plan, task.subject, task.scope, *at)


@dataclass(frozen=True, eq=False)
class ConstantsTask(SequenceTask):
    """The task of measuring constants at sequences of one length or, if tasks were joined, of several."""

    longer: tuple[ConstantsTask, ...] = ()

    kind = Measurement

    @property
    def parts(self) -> tuple[ConstantsTask, ...]:
        """The task split into one task for each length, from short to long."""
        return (replace(self, longer=()), *self.longer)

    @property
    def size(self) -> int:  # type: ignore[override]
        """How many constants the task measures: those that the store does not have yet."""
        return len(self.missing) + sum(part.size for part in self.longer)

    @property
    def work(self) -> float:
        """An estimate of the work of the task, in arbitrary units."""
        return super().work if not self.longer else sum(part.work for part in self.parts)

    @property
    def words(self) -> str:
        """A short text for progress messages, with the name of the model and the lengths."""
        return super().words + (f" to {self.longer[-1].n}" if self.longer else "")

    def packed(self) -> Self:
        """Return the task with the inputs of its sequences, ready to be sent to another process."""
        return replace(super().packed(), longer=tuple(part.packed() for part in self.longer))

    def computed(self, model: Any) -> Iterator[Found]:
        """Measure the missing constants, and yield their rows, layer by layer. If measuring a layer at all
        sequences at once fails, measure fewer at once. Layers that cannot be captured come last, as failures.
        """
        failures: list[Failed] = []
        groups: dict[tuple[int | None, ...], list[_Item]] = {}
        # The longest sequence comes first, as its map has the longest tables of positions.
        for part in reversed(self.parts):
            for site in part.sites(model):
                if isinstance(site, Failed):
                    failures.append(site)
                    continue
                place: tuple[int | None, ...] = (site.layer, site.head)
                if longer := groups.get(place):
                    if are_measured_together(longer[0].site.map, site.map):
                        site = replace(site, map=longer[0].site.map)  # one copy of the parameters
                    else:
                        place = (*place, part.n)
                items = [_Item(part, site, sample, slot) for slot, sample in enumerate(part.starts)]
                missing = [i for i in items if (part.scope, *place[:2], part.n, i.sample) in part.missing]
                groups[place] = missing + groups.get(place, [])
        for group in groups.values():
            yield from each_if_not_all(group, _measured, _refused)
        yield from failures[::-1]


def _refused(error: Exception, item: _Item) -> Failed:
    return item.task.failed(error, (item.site.layer, item.site.head), [item.sample])


def _measured(items: Sequence[_Item]) -> list[Found]:
    if not items:
        return []
    began = time.perf_counter()
    plan, tokens = items[0].task.plan, [item.site.x[item.slot] for item in items]
    given = torch.stack(tokens) if len({item.task.n for item in items}) == 1 else tokens
    how = {name: getattr(plan, name) for name in ("rtol", "confidence", "max_iterations", "memory")}
    seeds = [item.seed for item in items]
    estimate = lipschitz.local_lipschitz(items[-1].site.map, given, seed=seeds, **how)
    a_token = (time.perf_counter() - began) / sum(item.task.n for item in items)
    rows: list[Row] = []
    for place, item in enumerate(items):
        rows += _rows(item, estimate, place, a_token * item.task.n)
    return [rows]


def _rows(item: _Item, estimate: Any, place: int, seconds: float) -> Iterator[Row]:
    """Yield one measurement as a row for the store; ``place`` is its index in the estimate. For sample 0 of a
    short length, a row with the tokens of the sequence comes first.
    """
    task, site, sample, slot = item
    n = task.n
    energies: tuple[tuple[float, ...] | None, ...] = (None, None)
    directions = [getattr(estimate, name)[place] for name in ("input_direction", "output_direction")]
    # The report shows the shares of inputs and outputs beside the tokens, so each token needs its own.
    if sample == 0 and n <= _MOST_TOKENS and all(one.shape[-2] == n for one in directions):
        assert task.data is not None
        where = (task.model, task.subject.text.name, n, 0)
        yield SequenceRecord(*where, task.starts[0], task.data.place, task.data.words)
        energies = tuple(map(_energy, directions))
    yield Measurement(
        model=task.model,
        layer=site.layer,
        head=site.head,
        scope=task.scope,
        causal=site.causal,
        text=task.subject.text.name,
        sample=sample,
        n=n,
        radius_mean=float(site.radius_mean[slot]),
        radius_max=float(site.radius_max[slot]),
        lipschitz=float(estimate.value[place]),
        lower=float(estimate.lower[place]),
        upper=float(estimate.upper[place]),
        confidence=float(estimate.confidence),
        converged=bool(estimate.converged[place]),
        iterations=int(estimate.iterations[place]),
        seconds=seconds,
        seed=item.seed,
        dtype=task.plan.dtype,
        method=estimate.method,
        masking=site.masking,
        site=f"{site.name}, side {site.side}" if task.scope == CROSS_SCOPE else site.name,
        start=task.starts[sample],
        input_energy=energies[0],
        output_energy=energies[1],
    )


def _energy(direction: torch.Tensor) -> tuple[float, ...]:
    """Return each token's share of the squared norm of ``direction`` (n, d), to seven digits."""
    shares = direction.double().square().sum(dim=-1).cpu()
    total = float(shares.sum())
    parts = shares / total if total > 0 else torch.zeros_like(shares)
    return tuple(float(f"{part:.7g}") for part in parts.tolist())


def start_seed(
    plan: Plan, subject: Subject, scope: str, layer: int, head: int | None, n: int, sample: int
) -> int:
    """Return the seed of the solver's random start for one measurement."""
    of: dict[str, Any] = {"seed": plan.seed, "text": subject.text.digest, "model": subject.fingerprint}
    return derive_seed(purpose="start", **of, scope=scope, layer=layer, head=head, n=n, sample=sample)


def constants_left(study: PreparedStudy) -> Work:
    """List the tasks that measure the missing constants of a study, by model, input and length."""
    tasks, kept = [], 0
    for subject in study.subjects:
        known = study.store.keys(Measurement, KEY_COLUMNS, model=subject.model.label, text=subject.text.name)
        for n, scope in ((n, scope) for n in sorted(subject.lengths) for scope in study.plan.scopes):
            heads = subject.heads if scope == "head" else (None,)
            asked = {
                (scope, layer, head, n, sample)
                for layer in layers_of_scope(scope, subject.layers)
                for head in heads
                for sample in range(study.plan.samples)
            }
            kept += len(asked & known)
            # Where one of two sequences stays fixed, each sample has a map of its own.
            alone = scope == CROSS_SCOPE or (scope == "model" and study.plan.side is not None)
            size = 1 if alone else batch_size(subject.model.heads, n, study.plan.dtype)
            for first in range(0, study.plan.samples, size):
                missing = frozenset(key for key in asked - known if first <= key[-1] < first + size)
                if missing:
                    starts = {one: subject.starts[n, one] for one in sorted({key[-1] for key in missing})}
                    tasks.append(ConstantsTask(study.plan, subject, n, scope, starts, missing))
    return Work(Measurement, "constants", tasks, kept)


def batch_size(heads: int, n: int, dtype: str) -> int:
    """Return how many sequences of n tokens to measure in one batch: as many as need at most 2 GiB."""
    itemsize = 8 if dtype == "float64" else 4
    return max(1, _BATCH_BYTES // (heads * n * n * itemsize * _ARRAYS_A_HEAD))


def joined(work: Work, workers: int = 1) -> Work:
    """Join tasks of one model, input and scope into fewer, but enough to keep all ``workers`` busy."""
    tokens = sum(len(task.starts) * task.n for task in work.tasks if isinstance(task, ConstantsTask))
    each = tokens // (_TASKS_EACH * workers) if workers > 1 else tokens
    groups: list[list[ConstantsTask]] = []
    latest: dict[tuple[int, str], list[ConstantsTask]] = {}
    for task in work.tasks:
        assert isinstance(task, ConstantsTask)
        most = min(each, _TOKENS.get(torch.device(task.plan.device).type, _TOKENS_ELSEWHERE))
        group = latest.get((id(task.subject), task.scope))
        if group is None or sum(len(one.starts) * one.n for one in [*group, task]) > most:
            group = latest[id(task.subject), task.scope] = []
            groups.append(group)
        group.append(task)
    return replace(work, tasks=[replace(first, longer=tuple(longer)) for first, *longer in groups])
