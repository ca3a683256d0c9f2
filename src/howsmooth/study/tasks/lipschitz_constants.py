"""Define the tasks of measuring constants at sequences of one length, and at sequences of several lengths.

The model runs once for each length, and each layer is measured at all sequences in one batch. If a layer is
the same map at several lengths, its constants at the sequences of these lengths are measured in one call, in
which the sequences share matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from howsmooth import lipschitz
from howsmooth.batching import are_measured_together
from howsmooth.lipschitz_estimate import LipschitzEstimate
from howsmooth.scopes import CROSS_SCOPE, layers_of_scope
from howsmooth.seeds import derive_seed
from howsmooth.study.plans import Plan
from howsmooth.study.records import KEY_COLUMNS, Measurement, Row, Sensitivity, SequenceRecord
from howsmooth.study.study_preparation import PreparedStudy, Subject
from howsmooth.study.tasks.task import Failed, Found, SequenceTask, Work, each_if_not_all

__all__ = ["ConstantsTask", "JoinedConstants", "batch_size", "constants_left", "joined", "start_seed"]

# Samples of one length are measured in one batch if they need at most about this many bytes.
_BATCH_BYTES = 2**31
_ARRAYS_A_HEAD = 6
# Sensitivities are stored for the first sample up to this many tokens; the report cannot show more.
_MOST_TOKENS = 512


class ConstantsTask(SequenceTask):
    """The task of measuring constants at some sequences of one length in one forward pass."""

    kind = Measurement

    def computed(self, model: Any) -> Iterator[Found]:
        """Measure layer after layer, and yield rows. If a batch fails, measure its sequences one by one."""
        for site in self.sites(model):
            if isinstance(site, Failed):
                yield site
                continue
            if samples := self.samples_left(site):
                yield from self.measured(site, samples)

    def samples_left(self, site: Any) -> list[int]:
        """Return the samples for which a layer or head is not measured yet."""
        return [s for s in self.starts if (self.scope, site.layer, site.head, self.n, s) in self.missing]

    def measured(self, site: Any, samples: Sequence[int]) -> Iterator[Found]:
        """Measure one layer or head at some sequences (samples), and yield the rows.

        If measuring them in one batch fails, measure each sequence by itself.
        """
        yield from each_if_not_all(
            samples, partial(self._measured, site), partial(self._no_sample, (site.layer, site.head))
        )

    def _no_sample(self, place: tuple[int, int | None], error: Exception, sample: int) -> Failed:
        return self.failed(error, place, [sample])

    def _measured(self, site: Any, samples: Sequence[int]) -> list[Found]:
        began = time.perf_counter()
        tokens, seeds = self.tokens_of(site, samples), self.seeds_of(site, samples)
        estimate = self.estimate(site.map, tokens, seeds)
        return self.rows(site, samples, estimate, (time.perf_counter() - began) / len(samples))

    def tokens_of(self, site: Any, samples: Sequence[int]) -> torch.Tensor:
        """Return the input tokens (sample, n, d) of one layer or head for some sequences (samples)."""
        tokens: torch.Tensor = site.x[[list(self.starts).index(sample) for sample in samples]]
        return tokens

    def seeds_of(self, site: Any, samples: Sequence[int]) -> list[int]:
        """Return the seeds of the solver's random starts for a layer or head at some sequences (samples)."""
        place = (self.scope, site.layer, site.head, self.n)
        return [start_seed(self.plan, self.subject, *place, sample) for sample in samples]

    def estimate(self, f: Any, tokens: Any, seeds: list[int]) -> Any:
        """Measure the local Lipschitz constant of a map at some sequences, with the settings of the plan.

        ``tokens`` is a batch or a list of sequences.
        """
        plan = self.plan
        return lipschitz.local_lipschitz(
            f,
            tokens,
            rtol=plan.rtol,
            confidence=plan.confidence,
            max_iterations=plan.max_iterations,
            seed=seeds,
            memory=plan.memory,
        )

    def rows(self, site: Any, samples: Sequence[int], estimate: Any, seconds: float) -> list[Found]:
        """Convert the estimates of one layer or head at some sequences (samples) into rows.

        Return a list with one list of rows. ``seconds`` is the time of one sequence.
        """
        plan, seeds = self.plan, self.seeds_of(site, samples)
        places = [list(self.starts).index(sample) for sample in samples]
        rows: list[Row] = [
            Measurement(
                model=self.model,
                layer=site.layer,
                head=site.head,
                scope=self.scope,
                causal=site.causal,
                text=self.subject.text.name,
                sample=sample,
                n=self.n,
                radius_mean=float(site.radius_mean[places[slot]]),
                radius_max=float(site.radius_max[places[slot]]),
                lipschitz=float(estimate.value[slot]),
                lower=float(estimate.lower[slot]),
                upper=float(estimate.upper[slot]),
                confidence=float(estimate.confidence),
                converged=bool(estimate.converged[slot]),
                iterations=int(estimate.iterations[slot]),
                seconds=seconds,
                seed=seeds[slot],
                dtype=plan.dtype,
                method=estimate.method,
                masking=site.masking,
                site=f"{site.name}, side {site.side}" if self.scope == CROSS_SCOPE else site.name,
                start=self.starts[sample],
            )
            for slot, sample in enumerate(samples)
        ]
        # The report shows the shares of inputs and outputs beside the tokens, so each token needs its own.
        directions = (estimate.input_direction, estimate.output_direction)
        shown = self.n <= _MOST_TOKENS and all(e.shape[-2] == self.n for e in directions)
        if 0 in samples and shown:
            assert self.data is not None
            where, slot = (self.model, self.subject.text.name), list(samples).index(0)
            inward, outward = (
                _energy(one[slot]) for one in (estimate.input_direction, estimate.output_direction)
            )
            rows += [
                SequenceRecord(*where, self.n, 0, self.starts[0], self.data.place, self.data.words),
                Sensitivity(*where, self.scope, site.layer, site.head, self.n, 0, inward, outward),
            ]
        return [rows]


def _energy(direction: torch.Tensor) -> tuple[float, ...]:
    """Return each token's share of the squared norm of ``direction`` (n, d), to seven digits."""
    shares = direction.double().square().sum(dim=-1).cpu()
    total = float(shares.sum())
    parts = shares / total if total > 0 else torch.zeros_like(shares)
    return tuple(float(f"{part:.7g}") for part in parts.tolist())


def start_seed(
    plan: Plan, subject: Subject, scope: str, layer: int, head: int | None, n: int, sample: int
) -> int:
    """Return the seed of the solver's random start for one measurement.

    It depends only on the plan's seed and the arguments.
    """
    return derive_seed(
        purpose="start",
        seed=plan.seed,
        text=subject.text.digest,
        model=subject.fingerprint,
        scope=scope,
        layer=layer,
        head=head,
        n=n,
        sample=sample,
    )


def constants_left(study: PreparedStudy) -> Work:
    """List the tasks that measure the constants of a study that are missing in the store.

    They are ordered by model and input, then from short to long sequences.
    """
    tasks, kept = [], 0
    for subject in study.subjects:
        where = {"model": subject.model.label, "text": subject.text.name}
        known = study.store.keys(Measurement, KEY_COLUMNS, **where)
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
                samples = {
                    sample: subject.starts[n, sample] for sample in sorted({key[-1] for key in missing})
                }
                if missing:
                    tasks.append(ConstantsTask(study.plan, subject, n, scope, samples, missing))
    return Work(Measurement, "constants", tasks, kept)


def batch_size(heads: int, n: int, dtype: str) -> int:
    """Return how many sequences of n tokens to measure in one batch: as many as need at most 2 GiB."""
    itemsize = 8 if dtype == "float64" else 4
    return max(1, _BATCH_BYTES // (heads * n * n * itemsize * _ARRAYS_A_HEAD))


# Lengths are joined as long as all their sequences have no more tokens than this. On a CPU, products with
# more tokens take no less time for each, and finished results would be written late.
_TOKENS = {"cpu": 1 << 11}
_TOKENS_ELSEWHERE = 1 << 15
_TASKS_EACH = 6


@dataclass(frozen=True, eq=False)
class JoinedConstants(SequenceTask):
    """The task of measuring the constants of one model, input and scope at sequences of several lengths.

    ``parts`` are the tasks for the single lengths; ``n`` is the average number of tokens of a row.
    """

    parts: tuple[ConstantsTask, ...] = ()

    kind = Measurement

    @classmethod
    def of(cls, parts: tuple[ConstantsTask, ...]) -> JoinedConstants:
        """Make one task from several tasks that each measure at a single length."""
        one, missing = parts[0], frozenset[Any]().union(*(part.missing for part in parts))
        n = round(sum(part.size * part.n for part in parts) / len(missing))
        return cls(one.plan, one.subject, n, one.scope, {}, missing, parts=parts)

    @property
    def words(self) -> str:
        """A short text for progress messages, with the name of the model and the lengths."""
        return f"{self.model}, n = {self.parts[0].n} to {self.parts[-1].n}"

    def packed(self) -> JoinedConstants:
        """Return the task with the inputs of its sequences, ready to be sent to another process."""
        return replace(self, parts=tuple(part.packed() for part in self.parts))

    def failed(self, error: Exception, *_: Any) -> Failed:
        """Turn an error into a :class:`~howsmooth.study.tasks.task.Failed` for all rows of the task."""
        return Failed([row for part in self.parts for row in part.failed(error).rows], error)

    def computed(self, model: Any) -> Iterator[Found]:
        """Yield the rows that are missing in the store, layer by layer.

        If the call for all lengths fails, each length is measured separately. Errors of layers that cannot be
        captured are yielded last, because such an error may end the study.
        """
        failures: list[Failed] = []
        groups: dict[tuple[int, int | None], list[_Part]] = {}
        # The longest sequence comes first, as its map has the longest tables of positions.
        for task in sorted(self.parts, key=lambda part: -part.n):
            for site in task.sites(model):
                if isinstance(site, Failed):
                    failures.append(site)
                elif samples := task.samples_left(site):
                    group = groups.setdefault((site.layer, site.head), [])
                    if group and are_measured_together(group[0].site.map, site.map):
                        site = replace(site, map=group[0].site.map)  # one copy of the parameters
                    group.append(_Part(task, site, samples))
        for group in groups.values():
            yield from _rows(group[::-1])
        yield from failures[::-1]


class _Part(NamedTuple):
    """One layer or head at one length, with the indices of the sequences that are not measured yet."""

    task: ConstantsTask
    site: Any
    samples: Sequence[int]


def joined(work: Work, device: str, workers: int = 1) -> Work:
    """Join the measuring tasks of one model, input and scope into tasks that each have several lengths, and
    are so many that each of the ``workers`` has work to the end.
    """
    most = _TOKENS.get(torch.device(device).type, _TOKENS_ELSEWHERE)
    if workers > 1:
        tokens = sum(len(task.starts) * task.n for task in work.tasks if isinstance(task, ConstantsTask))
        most = min(most, tokens // (_TASKS_EACH * workers))
    groups: list[list[ConstantsTask]] = []
    latest: dict[tuple[Any, ...], list[ConstantsTask]] = {}
    for task in work.tasks:
        assert isinstance(task, ConstantsTask)
        key = (id(task.subject), task.scope)
        group = latest.get(key)
        if group is None or sum(len(one.starts) * one.n for one in [*group, task]) > most:
            group = latest[key] = []
            groups.append(group)
        group.append(task)
    tasks = [group[0] if len(group) == 1 else JoinedConstants.of(tuple(group)) for group in groups]
    return replace(work, tasks=tasks)


def _rows(group: Sequence[_Part]) -> Iterator[Found]:
    """Yield the rows of one layer or head at all lengths of a task."""
    f = group[-1].site.map
    together = [part for part in group if part.site.map is f]
    estimates = []
    if len(together) > 1:
        # If one sequence is at fault, this shows where each length is measured by itself.
        with suppress(Exception):
            estimates = _estimates(together)
    for part, (estimate, seconds) in zip(together, estimates, strict=False):
        yield from part.task.rows(part.site, part.samples, estimate, seconds)
    for part in group:
        if not estimates or part.site.map is not f:
            yield from part.task.measured(part.site, part.samples)


def _estimates(parts: Sequence[_Part]) -> list[tuple[LipschitzEstimate, float]]:
    """Measure one map at the sequences of several lengths in one call, whose time is divided by tokens."""
    began = time.perf_counter()
    found = parts[-1].task.estimate(
        parts[-1].site.map,
        [x for part in parts for x in part.task.tokens_of(part.site, part.samples)],
        [seed for part in parts for seed in part.task.seeds_of(part.site, part.samples)],
    )
    a_token = (time.perf_counter() - began) / sum(len(part.samples) * part.task.n for part in parts)
    estimates, first = [], 0
    for part in parts:
        some = slice(first, first + len(part.samples))
        first = some.stop
        fields: dict[str, Any] = {
            name: getattr(found, name) for name in ("confidence", "method", "scope", "rtol", "seed")
        }
        for name in ("value", "lower", "upper", "converged", "iterations"):
            fields[name] = getattr(found, name)[some]
        for name in ("input_direction", "output_direction"):
            fields[name] = torch.stack(getattr(found, name)[some])
        estimates.append((LipschitzEstimate(**fields), a_token * part.task.n))
    return estimates
