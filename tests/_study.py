"""Stand-ins for models, texts and estimates, so that the study is tested without any of them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from howsmooth.errors import ModelError, TextError
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.records import SiteBound, SiteBounds
from howsmooth.study.tools import Tools


def digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


@dataclass(frozen=True)
class FakeTokenizer:
    """Words such as ``w17`` are tokens."""

    knows_places: bool = True

    def __call__(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def located(self, text: str) -> tuple[list[int], list[int]]:
        places = [match.start() for match in re.finditer(r"\S+", text)]
        return self(text), places if self.knows_places else []

    def decoded(self, ids: list[int]) -> list[str]:
        return [f"w{number}" for number in ids]


@dataclass(frozen=True)
class FakeModel:
    source: str = "A stand-in."
    tokenizer_source: str = "Words."
    fingerprint: str = digest("fake")
    max_length: int | None = 64
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

    def bound(site: Any) -> SiteBounds:
        firsts = site.x[:, 0, 0].to(torch.int64)
        assert len(firsts) == 1
        work.bounded.append((site.scope, site.layer, site.head, site.x.shape[1], int(firsts[0])))
        value = 1000.0 * (1 + site.layer)
        upper = SiteBound("above", "upper", "‖D_X f‖", value, math.log(value), True, "A theorem")
        return SiteBounds(7.5, (upper, SiteBound("dear", "upper", "‖D_X f‖", None, None, False, "left out")))

    return Tools(load_model, load_text, capture, measure, bound), work


def _direction(firsts: torch.Tensor, n: int, sign: float) -> torch.Tensor:
    """Make unit vectors (batch, n, 2): token i has energy in proportion to i + 1, or, with -1, to n - i."""
    weights = torch.arange(1, n + 1, dtype=torch.float64)
    weights = weights if sign > 0 else weights.flip(0)
    rows = (weights / weights.sum() / 2).sqrt()[:, None].expand(n, 2)
    return sign * rows.expand(len(firsts), n, 2).float()


def make_plan(**changes: Any) -> Plan:
    """Build a small plan for the stand-ins."""
    values: dict[str, Any] = {
        "models": (ModelSpec("small"),),
        "texts": ("prose",),
        "lengths": (2, 4, 8),
        "samples": 5,
    }
    return Plan(**(values | changes))


def published_modules() -> dict[str, ModuleType]:
    """Stand-ins for ``howsmooth.published`` and ``howsmooth.models``, for a process of its own.

    They are there before anything imports the real ones, which takes seconds.
    """

    def capture_layers(
        model: FakeModel, tokens: torch.Tensor, layers: Sequence[int], *, training: bool, seeds: Sequence[int]
    ) -> list[Any]:
        radius = (tokens[:, 0] % 7 + 1).double()
        return [
            SimpleNamespace(attention=SimpleNamespace(layer=layer, radius_mean=radius), firsts=tokens[:, 0])
            for layer in layers
        ]

    def items_that_apply(layer: Any, items: Any = None, *, untrained: bool = False) -> tuple[str, ...]:
        return ("output", "stopping")

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

    published = ModuleType("howsmooth.published")
    models = ModuleType("howsmooth.models")
    published.__dict__.update(
        capture_layers=capture_layers,
        items_that_apply=items_that_apply,
        measure_layer=measure_layer,
        parse_items=lambda words: None,
        PublishedLayer=object,
    )
    models.__dict__.update(LoadedModel=object)
    return {"howsmooth.published": published, "howsmooth.models": models}


def published_of(folder: Path) -> set[tuple[Any, ...]]:
    """What a store holds of published values; fails if one is there twice."""
    from howsmooth.study.store import Store

    with Store.open(folder, write=False) as store:
        table = store.published()
    keys = ["model", "text", "layer", "n", "sample", "quantity", "items"]
    assert not table.duplicated(keys).any()
    return set(table[[*keys, "start", "seed", "lipschitz"]].itertuples(index=False, name=None))


def rows_of(folder: Path) -> set[tuple[Any, ...]]:
    """What a store holds, by key, as a set of (key, value); fails if a key is there twice."""
    from howsmooth.study.store import Store

    with Store.open(folder, write=False) as store:
        table = store.measurements()
    keys = ["model", "text", "scope", "layer", "head", "n", "sample"]
    assert not table.duplicated(keys).any()
    columns = [*keys, "start", "seed", "lipschitz"]
    return {
        tuple(None if value != value else value for value in row)
        for row in table[columns].astype(object).where(table[columns].notna(), None).itertuples(index=False)
    }
