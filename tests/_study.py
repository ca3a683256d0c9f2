"""Stand-ins for models, texts and estimates, so that the study is tested without any of them.

They take the places of the library's own functions while a study runs, so that the study needs no way in for
them.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch

from howsmooth.errors import ModelError, TextError
from howsmooth.study.environment import environment
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.records import Contents, Measurement, PublishedValue, Row, SiteBound
from howsmooth.study.store import Store
from howsmooth.study.tasks.bounds import LEFT_OUT


def digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


@dataclass(frozen=True)
class FakeTokenizer:
    """Words such as ``w17`` are tokens."""

    knows_places: bool = True
    special_tokens: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def located(self, text: str) -> tuple[list[int], list[int]]:
        places = [match.start() for match in re.finditer(r"\S+", text)]
        return self.encode(text), places if self.knows_places else []

    def decoded(self, ids: list[int]) -> list[str]:
        return [f"w{number}" for number in ids]


@dataclass(frozen=True)
class FakeModel:
    source: str = "A stand-in."
    tokenizer_source: str = "Words."
    fingerprint: str = digest("fake")
    max_length: int | None = 64
    stored: torch.dtype = torch.float32
    layers: int = 3
    heads: int = 2
    obstacle: str = ""

    tokenizer: FakeTokenizer = field(default_factory=lambda: FakeTokenizer())


@dataclass(frozen=True)
class FakeText:
    name: str
    content: str
    source: str = "Made up."

    @property
    def digest(self) -> str:
        return digest(self.content)


@dataclass
class Work:
    """What the stand-ins were asked to do."""

    measured: list[tuple[str, int, int | None, int, int]] = field(default_factory=list)
    """One entry a measurement: scope, layer, head, n, first token."""
    seeds: list[int] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    captures: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    bounded: list[tuple[str, int, int | None, int, int]] = field(default_factory=list)
    """One entry an attention that was bounded, as in ``measured``."""


def words(count: int) -> str:
    """A text whose token ids are the positions of the tokens, so that a window shows where it was cut."""
    return " ".join(f"w{index}" for index in range(count))


@dataclass(frozen=True)
class Tools:
    """Stand-ins for the functions of the library that a study calls."""

    load_model: Callable[..., Any]
    load_text: Callable[..., Any]
    capture: Callable[..., Any]
    measure: Callable[..., Any]
    bound: Callable[..., Any]


_environment = functools.cache(environment)


@contextmanager
def installed(tools: Tools) -> Iterator[None]:
    """Put stand-ins in the places of the library's own functions."""
    with ExitStack() as stack:
        for name, stand_in in (
            ("howsmooth.models.load_model", tools.load_model),
            ("howsmooth.models.capture", tools.capture),
            ("howsmooth.texts.load_text", tools.load_text),
            ("howsmooth.lipschitz.local_lipschitz", tools.measure),
            ("howsmooth.study.tasks.bounds.bound_site", tools.bound),
            # It asks git, which takes longer than a small run; what it says stays the same.
            ("howsmooth.study.runner.environment", _environment),
        ):
            stack.enter_context(patch(name, stand_in))
        yield


@dataclass
class Heard:
    """A listener that remembers what it was told, and calls ``then`` with each word of progress."""

    then: Callable[[str], None] = lambda words: None
    phases: list[str] = field(default_factory=list)
    told: list[tuple[float, float, str]] = field(default_factory=list)
    left: list[float | None] = field(default_factory=list)

    def phase(self, words: str) -> None:
        self.phases.append(words)

    def advance(self, done: float, total: float, words: str, left: float | None = None) -> None:
        self.told.append((done, total, words))
        self.left.append(left)
        self.then(words)


def run(plan: Plan, folder: Path, tools: Tools, *, beside: Sequence[Any] = (), **means: Any) -> Any:
    """Carry a plan out with stand-ins; what came of it has the counts of constants by short names."""
    from howsmooth.study.measurement_run import run as carry_out
    from howsmooth.study.runner import Means

    with installed(tools):
        outcome = carry_out(plan, folder, Means(**means), beside=beside)
    return SimpleNamespace(
        **vars(outcome),
        measured=outcome.made["measurements"],
        there=outcome.kept["measurements"],
        unconverged=outcome.unsettled["measurements"],
    )


def make_tools(
    *,
    tokens: int = 4000,
    models: dict[str, FakeModel] | None = None,
    texts: dict[str, str] | None = None,
    slope: float = 0.25,
    before_measure: Callable[[int], None] = lambda calls: None,
) -> tuple[Tools, Work]:
    """Build the four tools; ``before_measure`` is called with the number of estimates made so far."""
    work = Work()
    known_models = {"small": FakeModel()} if models is None else models
    known_texts = {"prose": words(tokens)} if texts is None else texts
    calls = 0

    def load_model(name: str, **options: Any) -> FakeModel:
        work.loads.append(name)
        if name not in known_models:
            raise ModelError(f"model: {name!r} is not known.")
        return known_models[name]

    def load_text(name: str) -> FakeText:
        if name not in known_texts:
            raise TextError(f"text: {name!r} is not there.")
        return FakeText(name, known_texts[name])

    def capture(
        model: FakeModel,
        inputs: torch.Tensor,
        layers: Sequence[int] | None = None,
        scope: str = "attention",
        heads: Sequence[int] | None = None,
    ) -> list[Any]:
        work.captures.append((scope, inputs.shape[1], tuple(layers or ())))
        chosen = range(model.layers) if layers is None else layers
        by_head = list(range(model.heads) if heads is None else heads) if scope == "head" else [None]
        x = inputs.to(torch.float32)[..., None]
        return [
            SimpleNamespace(
                name=f"layer.{layer}",
                layer=layer,
                head=head,
                scope=scope,
                causal=False,
                masking="none",
                x=x,
                map=SimpleNamespace(layer=layer, head=head, scope=scope),
                radius_mean=(inputs[:, 0] % 7 + 1).double(),
                radius_max=(inputs[:, 0] % 7 + 2).double(),
            )
            for layer in chosen
            for head in by_head
        ]

    def measure(function: Any, x: torch.Tensor, *, seed: Sequence[int], **options: Any) -> Any:
        nonlocal calls
        before_measure(calls)
        calls += 1
        firsts = x[:, 0, 0].to(torch.int64)
        assert len(seed) == len(firsts)
        n = x.shape[1]
        work.measured += [(function.scope, function.layer, function.head, n, int(first)) for first in firsts]
        work.seeds += list(seed)
        noise = 1 + 0.2 * torch.sin(firsts.double() + function.layer)
        value = (1 + function.layer) * n**slope * noise
        return SimpleNamespace(
            value=value,
            lower=value,
            upper=value * 1.00001,
            confidence=options["confidence"],
            converged=torch.ones(len(firsts), dtype=torch.bool),
            iterations=torch.full((len(firsts),), 12),
            method="closed form",
            input_direction=_direction(firsts, n, 1.0),
            output_direction=_direction(firsts, n, -1.0),
        )

    def bound(site: Any, *, dear: bool) -> tuple[float, list[SiteBound]]:
        firsts = site.x[:, 0, 0].to(torch.int64)
        assert len(firsts) == 1
        work.bounded.append((site.scope, site.layer, site.head, site.x.shape[1], int(firsts[0])))
        value = 1000.0 * (1 + site.layer)
        upper = SiteBound("above", "upper", "‖D_X f‖", value, math.log(value), True, "A theorem")
        last = SiteBound("dear", "upper", "‖D_X f‖", None, None, False, "needs more" if dear else LEFT_OUT)
        return 7.5, [upper, last]

    return Tools(load_model, load_text, capture, measure, bound), work


def _direction(firsts: torch.Tensor, n: int, sign: float) -> torch.Tensor:
    """Make unit vectors (batch, n, 2): token i has energy in proportion to i + 1, or, with -1, to n - i."""
    weights = torch.arange(1, n + 1, dtype=torch.float64)
    weights = weights if sign > 0 else weights.flip(0)
    rows = (weights / weights.sum() / 2).sqrt()[:, None].expand(n, 2)
    return sign * rows.expand(len(firsts), n, 2).float()


def overlapping(windows: Iterable[tuple[int, int]]) -> int:
    """Count the windows (first token, number of tokens) that overlap an earlier window of the text."""
    count = end = 0
    for start, n in sorted(windows):
        count += start < end
        end = max(end, start + n)
    return count


def make_plan(**changes: Any) -> Plan:
    """Build a small plan for the stand-ins."""
    values: dict[str, Any] = {
        "models": (ModelSpec("small"),),
        "texts": ("prose",),
        "lengths": (2, 4, 8),
        "samples": 5,
        "bounds": "all",
    }
    return Plan(**(values | changes))


@contextmanager
def published_stand_ins() -> Iterator[None]:
    """Put stand-ins in the places of what computes published values, which needs real models."""
    from howsmooth.paper.published_code import PublishedLayer

    def capture_layers(
        model: FakeModel, tokens: torch.Tensor, layers: Sequence[int], *, training: bool, seeds: Sequence[int]
    ) -> list[Any]:
        radius = (tokens[:, 0] % 7 + 1).double()
        return [
            Mock(
                spec=PublishedLayer,
                attention=SimpleNamespace(layer=layer, radius_mean=radius),
                firsts=tokens[:, 0],
            )
            for layer in layers
        ]

    def items_that_apply(layer: Any, items: Any = None, *, untrained: bool = False) -> tuple[str, ...]:
        return tuple(items or ("output", "stopping"))

    def measure_layer(layer: Any, items: Sequence[str], *, seeds: Sequence[int], **options: Any) -> Any:
        value = layer.firsts.double() + 10.0 ** (1 + layer.attention.layer) + len(items)
        nothing = torch.full_like(value, torch.nan)
        return SimpleNamespace(
            value=value,
            lower=nothing if items else value,
            upper=nothing if items else value,
            settled=torch.ones(len(value), dtype=torch.bool),
            steps=torch.full((len(value),), 9),
            map=f"layer {layer.attention.layer}",
        )

    stand_ins = {one.__name__: one for one in (capture_layers, items_that_apply, measure_layer)}
    with patch.multiple("howsmooth.paper.published_code.constants_task", **stand_ins):
        yield


def contents_of(folder: Path) -> Contents:
    """Read all that a store holds of measurements."""
    with Store.open(folder, write=False) as store:
        return store.contents()


def published_of(folder: Path) -> set[tuple[Any, ...]]:
    """What a store holds of published values; fails if one is there twice."""
    return _values_of(folder, PublishedValue)


def rows_of(folder: Path) -> set[tuple[Any, ...]]:
    """What a store holds of constants: keys from model to sample, then start, seed and value."""
    return _values_of(folder, Measurement)


def _values_of(folder: Path, kind: type[Row]) -> set[tuple[Any, ...]]:
    names = [*kind.key, "start", "seed", "lipschitz"]
    with Store.open(folder, write=False) as store:
        rows = [tuple(getattr(row, name) for name in names) for row, _ in store.rows(kind)]
    assert len({row[: len(kind.key)] for row in rows}) == len(rows)
    return set(rows)
