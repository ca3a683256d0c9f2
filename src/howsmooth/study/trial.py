"""Measure a little of one model: how many steps the solver needs, and how far times are from what is counted.

What is counted (:mod:`howsmooth.study.cost`) knows neither the code of a model around its attention nor the
spectrum of its Jacobian. One or two lengths that take about a second tell both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import Compose, Residual, SelfAttention
from howsmooth.batching import footprint
from howsmooth.jacobian.streamed import SINGLE_SCORES
from howsmooth.memory import memory_budget
from howsmooth.study.cost import Curve, Layer, Rates, capture_seconds, estimate_cost, usual_layer
from howsmooth.study.plan import Plan
from howsmooth.study.prepare import Models, Subject, capture_sites, on_device
from howsmooth.study.sequences import Sequences
from howsmooth.study.store import Store
from howsmooth.study.tools import SiteLike, Tools

__all__ = ["Steps", "Takes", "Trial", "layer_of", "taken", "tried"]

# A trial takes about so long, and is made of so many sequences and attentions at most.
_TRIAL_SECONDS = 1.0
_TRIAL_MEMBERS, _TRIAL_SITES, _TRIAL_LENGTHS = 10, 3, 2
# All layers are captured if that takes no longer.
_CAPTURE_SECONDS = 3.0
# At fewer tokens a constant needs fewer steps than at most lengths.
_FEW_TOKENS = 8
# Mean steps of a whole model are seldom further from those of a trial.
_BELOW, _ABOVE = 0.75, 1.4
# Where a trial would take too long: from trained to untrained models.
_USUAL_STEPS = (10.0, 20.0, 42.0)


@dataclass(frozen=True)
class Steps:
    """Mean steps of the solver that are expected, from few to many.

    Attributes
    ----------
    low, likely, high
        Steps.
    source
        Where they come from: ``"the store"``, ``"a trial at n = 8"``, ``"other models"``.

    """

    low: float
    likely: float
    high: float
    source: str


@dataclass(frozen=True)
class Trial:
    """What was found out about the attentions of one subject and scope: true times over expected ones."""

    map: Any
    n: int
    layer: Layer
    steps: Steps
    estimate: Curve
    capture: Curve


@dataclass(frozen=True)
class Takes:
    """How one sequence is measured: bytes beside the solver's basis, of so many that it may take."""

    streamed: bool
    size: float
    budget: float

    @property
    def fits(self) -> bool:
        """Whether it can be measured; where nobody knows the size, it is tried."""
        return not self.streamed or self.size <= self.budget


def taken(plan: Plan, found: Any, layer: Layer, known: int, n: int) -> Takes:
    """Tell how a map that was captured at ``known`` tokens is measured at n."""
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    budget = float(memory_budget(plan.memory, device))
    how = footprint(found, (n, layer.d), dtype=dtype, device=device, memory=plan.memory)
    if _attention_in(found) is not None:
        return Takes(how.streamed, float(how.size), budget)
    if not how.size:
        # Autodiff: probabilities and what is made of them, in one precision or two.
        return Takes(False, 28.0 * layer.heads * n * n, budget)
    # Stages know their own length only, and are streamed where probabilities do not fit.
    size = how.size * (n / known) ** 2
    return Takes(size > budget, min(size, budget), budget)


def tried(
    plan: Plan,
    subject: Subject,
    scope: str,
    places: Sequences,
    tools: Tools,
    models: Models,
    rates: Rates,
    store: Store | None,
    clock: Callable[[], float],
) -> Trial:
    """Measure a little of one subject and scope, and hold the times against what is expected.

    Parameters
    ----------
    plan, subject, scope, places
        What, and where its sequences begin.
    tools, models, clock
        With what.
    rates
        Of the machine.
    store
        Gives the steps of what it has measured; ``None`` if there is none.

    """
    model = models.load_for(subject)
    layer = usual_layer(1 if scope == "head" else subject.model.heads)
    estimates: list[tuple[float, float]] = []
    captures: list[tuple[float, float]] = []
    found: list[list[float]] = []
    lengths = sorted(subject.lengths)
    n: int | None = next((n for n in lengths if n >= _FEW_TOKENS), lengths[-1])
    while n is not None:
        members = _members(plan, rates, layer, n, found)
        layers = _layers(rates, layer, subject, n, max(1, members))
        starts = [places[n, sample] for sample in range(max(1, members))]
        inputs = on_device(subject.feed.inputs(starts, n), plan.device)
        began = clock()
        sites = capture_sites(tools, model, inputs, subject, scope, layers, n)
        seconds = clock() - began
        layer = layer_of(sites[0].map, sites[0].x, layer)
        expected = capture_seconds(
            rates, layer, n, members=len(starts), layers=subject.model.layers, captured=len(layers)
        )
        captures.append((float(n), max(seconds, 1e-6) / expected))
        # Now that the layer is known: it may take too long after all.
        if not _members(plan, rates, layer, n, found):
            break
        if not found:
            _measure(plan, tools, sites[0], members, 2)  # what is done once in a process
        ratios = []
        for site in _some(sites):
            began = clock()
            steps = _measure(plan, tools, site, len(starts), plan.max_iterations)
            seconds = clock() - began
            ratios.append(max(seconds, 1e-6) / _expected(plan, rates, layer, site, n, steps))
            found.append(steps)
        estimates.append((float(n), sum(ratios) / len(ratios)))
        n = _longest_trial(plan, rates, layer, [one for one in lengths if one > n], found)
        if len(estimates) == _TRIAL_LENGTHS:
            break
    return Trial(
        map=sites[0].map,
        n=int(sites[0].x.shape[-2]),
        layer=layer,
        steps=_steps(subject, scope, found, [int(n) for n, _ in estimates], store),
        estimate=tuple(estimates) or ((1.0, 1.0),),
        capture=tuple(captures),
    )


def _layers(rates: Rates, layer: Layer, subject: Subject, n: int, members: int) -> tuple[int, ...]:
    """Pick the layers to capture: all, or the first where that would take too long."""
    every = subject.layers
    seconds = capture_seconds(
        rates, layer, n, members=members, layers=subject.model.layers, captured=len(every)
    )
    return every if seconds < _CAPTURE_SECONDS else every[:1]


def _expected(
    plan: Plan, rates: Rates, layer: Layer, site: SiteLike, n: int, steps: Sequence[float]
) -> float:
    """Return the seconds that are expected with these steps."""
    mean = sum(steps) / len(steps)
    return estimate_cost(
        rates,
        layer,
        n,
        members=len(steps),
        steps=mean,
        dtype=plan.dtype,
        streamed=taken(plan, site.map, layer, n, n).streamed,
        last=max(steps) / mean,
    ).seconds


def _measure(plan: Plan, tools: Tools, site: SiteLike, members: int, most: int) -> list[float]:
    """Measure a site as a run does, and return the steps of its members."""
    estimate = tools.measure(
        site.map,
        site.x,
        rtol=plan.rtol,
        confidence=plan.confidence,
        max_iterations=most,
        seed=list(range(members)),
        method=plan.identity.method,
        memory=plan.memory,
    )
    return [max(1.0, float(steps)) for steps in estimate.iterations]


def _members(plan: Plan, rates: Rates, layer: Layer, n: int, found: Sequence[Sequence[float]]) -> int:
    """How many sequences can be tried together."""
    steps = _mean(found) if found else _USUAL_STEPS[1]
    one = estimate_cost(rates, layer, n, members=1, steps=steps, dtype=plan.dtype).seconds
    return min(plan.samples, _TRIAL_MEMBERS, int(_TRIAL_SECONDS / one))


def _longest_trial(
    plan: Plan, rates: Rates, layer: Layer, lengths: Sequence[int], found: Sequence[Sequence[float]]
) -> int | None:
    fitting = [n for n in lengths if _members(plan, rates, layer, n, found)]
    return fitting[-1] if fitting else None


def _some(sites: Sequence[SiteLike]) -> list[SiteLike]:
    """Pick the first, a middle and the last."""
    places = {0, len(sites) // 2, len(sites) - 1}
    return [sites[place] for place in sorted(places)][:_TRIAL_SITES]


def _steps(
    subject: Subject,
    scope: str,
    found: Sequence[Sequence[float]],
    where: Sequence[int],
    store: Store | None,
) -> Steps:
    if store is not None:
        rows = store.measurements()
        mine = rows[
            (rows["model"] == subject.model.label)
            & (rows["text"] == subject.text.name)
            & (rows["scope"] == scope)
        ]
        if len(mine):
            mean = float(mine["iterations"].mean())
            return Steps(_BELOW * mean, mean, _ABOVE * mean, "the store")
    if not found:
        return Steps(*_USUAL_STEPS, "other models")
    mean = _mean(found)
    means = [sum(one) / len(one) for one in found]
    words = " and ".join(map(str, sorted(where)))
    return Steps(min(_BELOW * mean, *means), mean, max(_ABOVE * mean, *means), f"a trial at n = {words}")


def _mean(found: Iterable[Sequence[float]]) -> float:
    every = [steps for one in found for steps in one]
    return sum(every) / len(every)


def layer_of(found: Any, x: Tensor, usual: Layer) -> Layer:
    """Return the sizes of a captured attention; of a map that does not tell them, usual ones."""
    f, d = _attention_in(found), int(x.shape[-1])
    if f is not None:
        # Behind a norm other tokens than these come to the attention, of the same size about.
        q, k, _ = f.projections(x.to(f.dtype))
        longest = (float(torch.linalg.vector_norm(t, dim=-1).max()) for t in (q, k))
        return Layer(
            f.d,
            f.d_out,
            f.heads,
            f.kv_heads,
            f.key_dim,
            f.value_dim,
            projected=f.output is not None,
            causal=f.causal,
            window=f.window,
            sharp=f.scale * math.prod(longest) > SINGLE_SCORES,
        )
    dim = max(1, d // usual.heads) if usual.heads > 1 else usual.key_dim
    return Layer(d, d, usual.heads, usual.heads, dim, dim)


def _attention_in(f: Any) -> SelfAttention | None:
    match f:
        case SelfAttention():
            return f
        case Residual():
            return _attention_in(f.inner)
        case Compose():
            return _attention_in(f.inner) or _attention_in(f.outer)
        case _:
            return None
