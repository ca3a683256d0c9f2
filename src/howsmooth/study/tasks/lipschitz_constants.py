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
from howsmooth.scopes import layers_of_scope
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
            samples = [
                s for s in self.starts if (self.scope, site.layer, site.head, self.n, s) in self.missing
            ]
            if samples:

                def no_sample(error: Exception, sample: int, site: Any = site) -> Failed:
                    return self.failed(error, (site.layer, site.head), [sample])

                yield from each_if_not_all(samples, partial(self._measured, site), no_sample)

    def _measured(self, site: Any, samples: Sequence[int]) -> list[Found]:
        """Measure one layer or head at some samples in one batch; return one list of rows, in a list."""
        plan = self.plan
        place = (self.scope, site.layer, site.head, self.n)
        seeds = [start_seed(plan, self.subject, *place, sample) for sample in samples]
        places = [list(self.starts).index(sample) for sample in samples]
        began = time.perf_counter()
        estimate = lipschitz.local_lipschitz(
            site.map,
            site.x[places],
            rtol=plan.rtol,
            confidence=plan.confidence,
            max_iterations=plan.max_iterations,
            seed=seeds,
            method=plan.settings()["method"],
            memory=plan.memory,
        )
        seconds = (time.perf_counter() - began) / len(samples)
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
                site=site.name,
                start=self.starts[sample],
            )
            for slot, sample in enumerate(samples)
        ]
        # The report shows the output shares beside the tokens, so each token needs an output of its own.
        shown = self.n <= _MOST_TOKENS and estimate.output_direction.shape[-2] == self.n
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
            size = batch_size(subject.model.heads, n, study.plan.dtype)
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
