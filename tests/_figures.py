"""What tests of single figures share: tiny models and a made-up text, requests, what a finding must be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from matplotlib import rc_context
from torch import Tensor

from howsmooth.errors import ModelError
from howsmooth.lipschitz import local_lipschitz
from howsmooth.models.loading.load import LoadedModel
from howsmooth.models.loading.tokenizers import Tokenizer
from howsmooth.paper import crossover, quadratic_growth, two_diracs, worst_inputs
from howsmooth.paper.figure_definition import Finding, PaperFigure
from howsmooth.paper.figure_measurements import models_for, opened_bench
from howsmooth.paper.plotting import PAPER
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.plans import ModelSpec
from howsmooth.study.progress_listener import Listener
from howsmooth.study.runner import Means

from ._study import FakeText
from ._tiny_models import VOCABULARY, tiny

TEXT = " ".join(f"w{(index * 7919) % 1009}" for index in range(3000))

OTHER = "$x_{$\x1b[31m\u202ename\\frac"
"""A text whose name means harm to figures and terminals."""

BERT, DECODER, GPT2, LLAMA = (ModelSpec(name) for name in ("bert", "bert-decoder", "gpt2", "llama"))

Note = Callable[[int], None]
"""Called before each constant of a figure with the number of those before it."""


class Words(Tokenizer):
    """Words w17 as token ids."""

    def __init__(self) -> None:
        super().__init__(None)

    def encode(self, text: str) -> list[int]:
        return [3 + int(word[1:]) % (VOCABULARY - 3) for word in text.split()]

    __call__ = encode  # the base class binds its own `encode` to a call


def load_tiny(name: str, **options: Any) -> LoadedModel:
    """Load a model of ``_tiny_models``, named as there."""
    try:
        model = tiny(name, dtype=options.get("dtype", torch.float32))
    except KeyError:
        raise ModelError(f"model: {name!r} is not known.") from None
    return LoadedModel(
        name=name,
        model=model,
        modality="text",
        tokenizer=Words(),
        tokenizer_source="Words.",
        source=f"A tiny {name}.",
        stored=torch.float32,
        fingerprint=hashlib.sha256(name.encode()).hexdigest(),
        max_length=32,
        vocab_size=VOCABULARY,
        layers=3,
        heads=4,
    )


@contextmanager
def tiny_library(note: Note = lambda calls: None) -> Iterator[None]:
    """Put tiny models and a made-up text in the places of the library's own."""
    calls = 0

    def measure(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        note(calls)
        calls += 1
        return local_lipschitz(*arguments, **options)

    with (
        patch("howsmooth.models.load_model", load_tiny),
        patch("howsmooth.texts.load_text", lambda name: FakeText(name, TEXT)),
        patch("howsmooth.lipschitz.local_lipschitz", measure),
    ):
        yield


@contextmanager
def quick() -> Iterator[None]:
    """Measure at fewer radii and lengths than the figures do, and attack with fewer starts."""
    effort = {"steps": 1, "random_starts": 0, "atom_restarts": 2, "atom_steps": 5}
    more = effort | {"steps": 4, "random_starts": 2}
    with (
        patch.multiple(worst_inputs, RADII=(), _EFFORT=effort, _OTHER_EFFORT=more),
        patch.object(two_diracs, "_RADII", (0.8, 1.5, 8.0, 26.5)),
        patch.object(crossover, "_LENGTHS", (2, 10, *(10**power for power in range(4, 45, 4)))),
        patch.object(quadratic_growth, "_STRENGTHS", (0.3, 400.0, 3000.0, 20000.0)),
    ):
        yield


class Told(Listener):
    """Listens to how far a figure is."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.shares: list[float] = []

    def phase(self, words: str) -> None:
        self.phases.append(words)

    def advance(self, done: float, total: float, words: str, left: float | None = None) -> None:
        share = done / total
        assert 0 <= share <= 1
        self.shares.append(share)


def asked(*models: ModelSpec, **changes: Any) -> FigureOptions:
    values: dict[str, Any] = {"models": models, "texts": ("prose", OTHER), "samples": 2}
    return FigureOptions(**(values | changes))


def measured(
    figure: PaperFigure,
    folder: Path,
    options: FigureOptions,
    note: Note = lambda calls: None,
    told: Told | None = None,
) -> Any:
    """Measure a figure of tiny models."""
    means = Means(told or Told(), models=models_for(options))
    with tiny_library(note), opened_bench(figure, options, folder, means) as bench:
        found = figure.measure(bench)
    assert bench.made  # says how the numbers came about
    return found


def shown(figure: PaperFigure, found: Any, folder: Path) -> Finding:
    """Draw what was measured; every finding has pictures with words for them, and no nan in a sentence."""
    with rc_context(PAPER):
        finding = figure.show(found, folder)
    for picture in finding.pictures:
        assert picture.png.read_bytes().startswith(b"\x89PNG")
        content = picture.pdf.read_bytes()
        assert content.startswith(b"%PDF")
        assert b"/Type3" not in content
        assert len(picture.alt) > 40
        assert " against " in picture.alt
    assert finding.seen
    assert all(words.isprintable() for words in finding.seen)
    assert not [line for line in finding.seen if "nan" in line.lower() or "inf" in line.split()]
    return finding


def never(calls: int) -> None:
    """Note a constant where none may be measured."""
    raise AssertionError("everything was measured before")


def counting(calls: list[int], stop: int | None = None) -> Note:
    """Note each constant in a list, and interrupt at one."""

    def note(number: int) -> None:
        if number == stop:
            raise KeyboardInterrupt
        calls.append(number)

    return note


def dense_norm(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """‖D_X f‖ of the whole Jacobian, in float64."""
    x = x.double()
    jacobian = torch.func.jacrev(f)(x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


def bert_head(layer: int, h: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and query bias of a head, read from the model's own weights, in float64."""
    part = tiny("bert").encoder.layer[layer].attention.self
    width = 24 // 4
    place = slice(h * width, (h + 1) * width)
    weights = [getattr(part, name).weight[place].detach().double() for name in ("query", "key", "value")]
    return weights[0], weights[1], weights[2], part.query.bias[place].detach().double()
