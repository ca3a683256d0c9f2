"""Define the task of measuring constants at several sequences of one length together.

The model runs once, and each layer is measured at all sequences in one batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from howsmooth import lipschitz
from howsmooth.scopes import CROSS_SCOPE, layers_of_scope
from howsmooth.seeds import derive_seed
from howsmooth.study.measured_models import Subject
from howsmooth.study.open_study import OpenStudy
from howsmooth.study.plans import Plan
from howsmooth.study.records import KEY_COLUMNS, Measurement, Row, Sensitivity, SequenceRecord, keys_of
from howsmooth.study.tasks.task import Failed, Found, SequenceTask, Work, each_if_not_all

__all__ = ["ConstantsTask", "batch_size", "constants_left", "start_seed"]

# Samples of one length are measured in one batch if they need at most about this many bytes.
_BATCH_BYTES = 2**31
_ARRAYS_A_HEAD = 6
# Sensitivities are stored for the first sample up to this many tokens; the report cannot show more.
_MOST_TOKENS = 512


class ConstantsTask(SequenceTask):
    """Measures the Lipschitz constants at some sequences of one length, with one forward pass."""

    kind = Measurement

    def computed(self, model: Any) -> Iterator[Found]:
        """Yield the measured constants layer by layer; if a batch fails, measure its samples one by one."""
        for site in self.sites(model):
            if isinstance(site, Failed):
                yield site
                continue
            if samples := self.samples_left(site):
                yield from self.measured(site, samples)

    def samples_left(self, site: Any) -> list[int]:
        """Return the samples of which the store lacks the row of one layer or head."""
        return [s for s in self.starts if (self.scope, site.layer, site.head, self.n, s) in self.missing]

    def measured(self, site: Any, samples: Sequence[int]) -> Iterator[Found]:
        """Yield the rows of one layer or head at some samples, measured together or else one by one."""
        yield from each_if_not_all(
            samples, partial(self._measured, site), partial(self._no_sample, (site.layer, site.head))
        )

    def _no_sample(self, place: tuple[int, int | None], error: Exception, sample: int) -> Failed:
        return self.failed(error, place, [sample])

    def _measured(self, site: Any, samples: Sequence[int]) -> list[Found]:
        """Measure one layer or head at some samples in one batch; return one list of rows, in a list."""
        began = time.perf_counter()
        tokens, seeds = self.tokens_of(site, samples), self.seeds_of(site, samples)
        estimate = self.estimate(site.map, tokens, seeds)
        return self.rows(site, samples, estimate, (time.perf_counter() - began) / len(samples))

    def tokens_of(self, site: Any, samples: Sequence[int]) -> torch.Tensor:
        """Return the tokens (sample, n, d) of one layer or head at some samples."""
        tokens: torch.Tensor = site.x[[list(self.starts).index(sample) for sample in samples]]
        return tokens

    def seeds_of(self, site: Any, samples: Sequence[int]) -> list[int]:
        """Return the seeds of the solver's random starts for one layer or head at some samples."""
        place = (self.scope, site.layer, site.head, self.n)
        return [start_seed(self.plan, self.subject, *place, sample) for sample in samples]

    def estimate(self, f: Any, tokens: Any, seeds: list[int]) -> Any:
        """Measure a map with the settings of the plan, at a batch or at a list of sequences."""
        plan = self.plan
        return lipschitz.local_lipschitz(
            f,
            tokens,
            rtol=plan.rtol,
            confidence=plan.confidence,
            max_iterations=plan.max_iterations,
            seed=seeds,
            method=plan.settings()["method"],
            memory=plan.memory,
        )

    def rows(self, site: Any, samples: Sequence[int], estimate: Any, seconds: float) -> list[Found]:
        """Return one list of rows, in a list, for the estimates of one layer or head at some samples.

        ``seconds`` is the time of one sample.
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


def constants_left(study: OpenStudy) -> Work:
    """List the tasks that measure the constants missing in the store.

    They are ordered by model and input, then from short to long sequences.
    """
    tasks, kept = [], 0
    for subject in study.subjects:
        where = {"model": subject.model.label, "text": subject.text.name}
        known = study.store.keys(Measurement, KEY_COLUMNS, **where)
        for n, scope in ((n, scope) for n in sorted(subject.lengths) for scope in study.plan.scopes):
            heads = subject.heads if scope == "head" else (None,)
            asked = keys_of(scope, layers_of_scope(scope, subject.layers), heads, [n], study.plan.samples)
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
    """Return how many sequences of n tokens can be measured in one batch without filling the memory."""
    itemsize = 8 if dtype == "float64" else 4
    return max(1, _BATCH_BYTES // (heads * n * n * itemsize * _ARRAYS_A_HEAD))
