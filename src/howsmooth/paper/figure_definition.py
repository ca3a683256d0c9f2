"""Define the figures of the paper: what each one shows, how much it measures, and which module makes it.

Figures are listed and counted at once, without PyTorch. To add one, write its module with the functions
``measure`` and ``show``, and name it in :data:`FIGURES`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth.errors import ArgumentError, HowsmoothError, similar_name
from howsmooth.model_folders import folder_of, stated_sizes
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.plans import ModelSpec

if TYPE_CHECKING:
    import pandas as pd

    from howsmooth.paper.figure_measurements import Bench
    from howsmooth.paper.plotting import Picture

__all__ = [
    "FIGURES", "MODELS", "Finding", "PaperFigure", "Request", "TasksLeft", "choose_figures", "count_left",
    "sizes_of", "task_of", "tasks_left",
]  # fmt: skip

MODELS = (
    ModelSpec("builtin-encoder"),
    ModelSpec("builtin-encoder", as_decoder=True),
    ModelSpec("gpt2", random_init=True),
)
"""Models like the paper's that need no network: an encoder, the same as a decoder, and a random GPT-2."""


@dataclass(frozen=True, eq=False)
class Finding:
    """The results of a figure: its pictures, sentences on what they show (``seen``), tables with captions,
    and notes on how the numbers were ``made``.
    """

    pictures: list[Picture]
    seen: list[str]
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper, or an additional one of this library on a statement of the paper.

    ``measure`` measures what the store of a :class:`~howsmooth.paper.figure_measurements.Bench` lacks, and
    returns all numbers of the figure; ``show`` draws them into a folder and describes them. The models,
    lengths and samples are those that are measured unless the user names others. ``count`` counts the tasks
    of a request: sequences of text, and units of work
    (:meth:`~howsmooth.paper.figure_measurements.Bench.kept`), where all heads of a layer count once.
    """

    name: str
    title: str
    paper: str
    about: str
    measure: Callable[[Bench], Any]
    show: Callable[[Any, Path], Finding]
    models: Sequence[ModelSpec] = MODELS
    lengths: tuple[int, ...] = ()
    samples: int = 8
    count: Callable[[Request], int] = lambda request: 0


@dataclass(frozen=True)
class Request:
    """The user's options for one figure. What the user left open is chosen by the figure."""

    figure: PaperFigure
    options: FigureOptions

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The models to measure."""
        return self.options.models or self.figure.models

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of tokens of the sequences."""
        return self.options.lengths or self.figure.lengths

    @property
    def samples(self) -> int:
        """The number of sequences of each text and length."""
        return self.options.samples or self.figure.samples

    def layer_count(self) -> int:
        """Return the number of layers to measure in all models together. If all layers of a model are chosen
        but its folder does not state how many it has, count one. Raise ArgumentError for a layer that a model
        lacks.
        """
        if (asked := self.options.layers) is None:
            return len(self.models)
        known = sum(len(range(a, b + 1, step)) for a, b, step in asked.items)
        counts = [(sizes_of(spec).get("layers"), spec.label) for spec in self.models]
        return sum(len(asked.resolve(n, label, "layers")) if n else max(1, known) for n, label in counts)

    @property
    def texts(self) -> int:
        """The number of pairs of a model and a text."""
        return len(self.models) * len(self.options.texts)

    @property
    def sequences(self) -> int:
        """The number of text sequences summed over all models, each at the lengths that it can read."""
        most = [sizes_of(spec).get("positions", math.inf) for spec in self.models]
        lengths = sum(sum(n <= longest for n in self.lengths) or 1 for longest in most)
        return lengths * len(self.options.texts) * self.samples


@dataclass(frozen=True)
class TasksLeft:
    """How many tasks of a figure are left, or why it cannot be made (``refused``). Models in ``unknown`` are
    counted with one layer, because their number of layers is known only after loading.
    """

    name: str
    tasks: int = 0
    refused: str = ""
    unknown: tuple[str, ...] = ()


def tasks_left(
    chosen: Sequence[PaperFigure], options: FigureOptions, folder: str | os.PathLike[str]
) -> list[TasksLeft]:
    """Count the tasks of each figure that are not yet done in its folder, without loading a model."""
    found = []
    for figure in chosen:
        request = Request(figure, options)
        try:
            left = count_left(request, Path(folder) / figure.name)
            of_all = request.models if options.layers is not None and not options.layers.items else ()
            unknown = tuple(spec.label for spec in of_all if "layers" not in sizes_of(spec))
            found.append(TasksLeft(figure.name, left, unknown=unknown))
        except HowsmoothError as error:
            found.append(TasksLeft(figure.name, refused=" ".join(str(error).split())))
    return found


def sizes_of(spec: ModelSpec) -> dict[str, int]:
    """Return the sizes of a model, such as its number of layers, as far as its folder states them."""
    folder = None if spec.part else folder_of(spec.name, random_init=spec.random_init)
    return {} if folder is None else stated_sizes(folder)


def task_of(key: Mapping[str, Any]) -> str:
    """Return the name of the task that includes a unit of work. All heads and scopes of a layer share one."""
    return json.dumps({name: key[name] for name in sorted(key) if name not in ("head", "scope")})


def count_left(request: Request, folder: str | os.PathLike[str]) -> int:
    """Count the tasks of one figure not yet done in its own ``folder``; refuse layers that a model lacks."""
    request.layer_count()
    return max(request.figure.count(request) - _done(request, Path(folder)), 0)


def _done(request: Request, folder: Path) -> int:
    from howsmooth.study.store_file import store_there

    if not store_there(folder):
        return 0
    from howsmooth.study.records import FIGURE, FigureRow, Measurement, PublishedValue
    from howsmooth.study.store import Store

    options, labels = request.options, {spec.label for spec in request.models}
    with Store.open(folder, write=False) as store:
        store.check(FIGURE, {"seed": options.seed})
        sequences = sum(
            model in labels and n in request.lengths and sample < request.samples
            for kind in (Measurement, *([PublishedValue] if options.as_published else []))
            for model, n, sample, _ in store.keys(kind, ("model", "n", "sample", "text"))
        )
        units = set()
        for (unit,) in store.keys(FigureRow, ("unit",)):
            key = json.loads(unit)
            asked = {"search": options.search, "published": options.as_published}.get(key.get("task"), True)
            if asked and ("fingerprint" not in key or key["model"] in labels):
                units.add(task_of(key))
    return int(sequences) + len(units)


def choose_figures(names: Sequence[str]) -> list[PaperFigure]:
    """Return the figures with the given names, or all if there are no names, in the order of the paper.

    A figure may also be named by its place in the paper, such as ``figure-2``. An ArgumentError names the
    figures if there is none of such a name.
    """
    own = {one.name: one for one in FIGURES}
    known = {one.paper.lower().replace(" ", "-"): one for one in FIGURES} | own
    for name in names:
        if name not in known:
            raise ArgumentError(
                "figure",
                expected=f"one of {', '.join(own)}, or a place in the paper such as figure-2",
                got=repr(name),
                remedy=similar_name(name, known),
            )
    chosen = [known[name] for name in names]
    return [one for one in FIGURES if not names or one in chosen]


def _figure(module: str, name: str, title: str, paper: str, about: str, **size: Any) -> PaperFigure:
    """Define a figure by the module that measures and shows it, which is imported only when needed."""

    def calling(function: str) -> Callable[..., Any]:
        return lambda *given: getattr(import_module(f"howsmooth.paper.{module}"), function)(*given)

    return PaperFigure(name, title, paper, about, calling("measure"), calling("show"), **size)


def _worst_inputs(request: Request) -> int:
    balls = 4 * request.layer_count() * len([n for n in request.lengths if n >= 2])
    return request.sequences + balls * (1 + request.options.search + request.options.as_published)


def _on_text(request: Request) -> int:
    return request.sequences * (1 + request.options.as_published)


FIGURES: tuple[PaperFigure, ...] = (
    _figure(
        "figure_1",
        "figure-1",
        "The constant of attention on text, against the length",
        "Figure 1",
        "Each point is a sequence of n tokens of a text: its height is the local Lipschitz constant there of "
        "an attention layer, all heads and the output projection, without residual and norm; its colour is "
        "the root mean square norm of its tokens. Solid is the fitted power of n, with its 95 % interval; "
        "dashed n to the power 1/4, with only its factor fitted. Against the mean radius, r is the "
        "correlation of the logarithms of both.",
        lengths=tuple(range(4, 101, 4)),
        samples=10,
        count=_on_text,
    ),
    _figure(
        "two_diracs",
        "two-dirac",
        "Two Diracs at which the constant of mean-field attention grows exponentially",
        "Proposition 3.6",
        "The local constant in W₂ of mean-field attention at a light Dirac at Ru and a heavy one at −Ru "
        "(A = −I) or Ru/2 (A = 8I), with V = I in four dimensions, so that g = γR² is R². The light mass is "
        "the paper's e^(−2g), or the best as R grows, 1/(1 + 3e^(2g)). Proposition 3.6 is a lower bound at "
        "these measures, the others are upper bounds on the ball, all for A = −I; beyond the vertical line "
        "e^(2g) is no float64 number.",
        count=lambda _: 272,
    ),
    _figure(
        "crossover",
        "crossover",
        "Where growth like √n ends: weights that no sequence of tokens has",
        "Propositions 3.4 and 3.6",
        "The local constant in W₂ at a token Ru against n − 1 at −Ru, A = −I, V = I, as a measure of weights "
        "1/n and 1 − 1/n, so that n may be any number. It grows like √n until one token has no longer the "
        "weight of all others. Proposition 3.4 is a lower bound at these tokens; Theorem 3.3, howsmooth's "
        "Theorem A and its bound for every n are upper bounds for n tokens in the ball.",
        count=lambda _: 276,
    ),
    _figure(
        "worst_inputs",
        "adversarial",
        "One head at the paper's tokens in a ball, beside text of the same length",
        "Figure 2",
        "The local Lipschitz constant of one head, values only, at the paper's two clusters in a ball of "
        "radius R: a token Ru and copies of Ru/2 or −Ru, u an eigenvector of A; dashed the median over all "
        "heads, shaded from the smallest to the largest. Beside it stand text of the same length, with bars "
        "over sequences and heads, which may lie above the paper's tokens; and upper bounds, which no tokens "
        "in the ball exceed.",
        models=MODELS[:2],
        lengths=(12, 24, 64, 160, 392),
        samples=4,
        count=_worst_inputs,
    ),
    _figure(
        "gamma_r2",
        "gamma-r2",
        "How strong the scores of each head are on real text: γR²",
        "Appendix C.5",
        "γ = max(−γ_min, γ_max/8), from the smallest and the largest real eigenvalue of A = KᵀQ/√k, of every "
        "head; R is the root mean square norm of the tokens that text gives the layer, with bars from the "
        "smallest to the largest of a sequence. The lower bound of Proposition 3.4 grows like √n only while "
        "n is well below e^(2γR²): above the dashed line, log(99)/2, the heavy token of the paper's two "
        "clusters has at least half of the weight at n = 100.",
        lengths=(64,),
        count=lambda request: request.texts * len(request.lengths),
    ),
    _figure(
        "quadratic_growth",
        "quadratic-growth",
        "Tokens at which the constant grows like R²",
        "Appendix C.7",
        "One token (or two) at zero, all others balanced at ±Ru: the zero sees all tokens alike, however "
        "large R is. First A = V = I in four dimensions; dashed the norm of the zero's own block of the "
        "Jacobian, 1/n + R²(n−1)/n for odd n. Then every head of a layer of each model, u from singular "
        "vectors of A and V; dashed R², with only its factor fitted. The vertical line is the norm of real "
        "tokens.",
        lengths=(3, 11, 101),
        count=lambda request: request.layer_count() + min(4, len([n for n in request.lengths if n >= 3])),
    ),
    _figure(
        "untrained_gpt2",
        "gpt2",
        "The constant and the norm of the tokens, against the length",
        "Appendix E.2",
        "By default of a GPT-2 of full size with untrained weights. Above, the local Lipschitz constant of "
        "attention, all heads and the output projection, without residual and norm, with the fitted exponent "
        "and its 95 % interval. Below, the root mean square norm of the tokens that attention receives "
        "(filled) and that enter the layer, before its norm (hollow), with the correlation of its logarithm "
        "and log n: where the norm grows, the exponent includes its effect.",
        models=(ModelSpec("gpt2", random_init=True),),
        lengths=(4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
        samples=4,
        count=lambda request: _on_text(request) + request.texts * len(request.lengths),
    ),
    _figure(
        "all_bounds",
        "bounds",
        "All bounds against measurements, at real tokens",
        "Theorems 3.3 to C.3",
        "Every bound on a layer of Figure 1 divided by the constant measured at a sequence of text, for each "
        "head and for all heads with the output projection. A dot is a head at a sequence, a larger mark "
        "the median. The ball is that of the largest norm which the norm layer can produce: upper bounds "
        "must lie above the constant, lower ones concern the worst tokens in the ball and may lie on either "
        "side. For tokens of dimension 512 or more, all heads together are bounded only at one sequence.",
        lengths=(8, 32, 96),
        samples=1,
        count=lambda request: request.layer_count() * len(request.options.texts) * len(request.lengths),
    ),
)
"""All figures, in the order of the paper."""
