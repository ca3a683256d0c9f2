"""Define the figures of the paper: what each one shows, how much it measures, and which module makes it.

This module imports neither PyTorch nor a model, so that figures are listed and counted at once. To add a
figure, write its module with the functions ``measure`` and ``show``, and name it in :data:`FIGURES`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth.errors import ArgumentError, HowsmoothError, similar_name
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.plans import ModelSpec

if TYPE_CHECKING:
    import pandas as pd

    from howsmooth.paper.bench import Bench
    from howsmooth.paper.plotting import Picture

__all__ = ["FIGURES", "MODELS", "Figure", "Finding", "Request", "TasksLeft", "choose_figures", "tasks_left"]

MODELS = (
    ModelSpec("builtin-encoder"),
    ModelSpec("builtin-encoder", as_decoder=True),
    ModelSpec("gpt2", random_init=True),
)
"""Models like the paper's that need no network: an encoder, the same as a decoder, and a random GPT-2."""


@dataclass(frozen=True, eq=False)
class Finding:
    """The results of a figure: pictures, sentences, tables, and how the numbers were made.

    The sentences in ``seen`` describe the results; their numbers come from the measurements. Each table is a
    pair of a caption and a DataFrame.
    """

    pictures: list[Picture]
    seen: list[str]
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, or an additional figure or table of this library on a statement of the paper.

    Attributes
    ----------
    name, title, paper
        The name on the command line, such as ``figure-1``; the title; the place in the paper.
    about
        A few sentences that say what the figure shows, how it is measured, and how it is drawn.
    measure
        A function that checks the options of a :class:`~howsmooth.paper.bench.Bench`, measures what its
        folder lacks, and returns all numbers of the figure.
    show
        A function that draws these numbers into a folder and describes them. It never measures.
    models, lengths, samples
        The models, numbers of tokens and number of sequences, unless the user names others.
    count
        The number of tasks of a request: sequences of text at which constants are measured, and units of work
        (:meth:`~howsmooth.paper.bench.Bench.kept`), where all heads of a layer count once.

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
    """The options of the user for one figure, with the figure's own models, lengths and samples where the
    user names none.
    """

    figure: Figure
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

    @property
    def layers(self) -> int:
        """The number of layers of all models; where it depends on the models, one layer of each."""
        asked = self.options.layers
        known = 1 if asked is None else sum(len(range(a, b + 1, step)) for a, b, step in asked.items)
        return len(self.models) * max(1, known)

    @property
    def texts(self) -> int:
        """The number of pairs of a model and a text."""
        return len(self.models) * len(self.options.texts)

    @property
    def sequences(self) -> int:
        """The number of sequences of text that all models read."""
        return self.texts * len(self.lengths) * self.samples


@dataclass(frozen=True)
class TasksLeft:
    """The number of tasks of a figure that are still to be done. If the figure cannot be made, ``refused`` is
    the reason.
    """

    name: str
    tasks: int = 0
    refused: str = ""


def tasks_left(
    chosen: Sequence[Figure], options: FigureOptions, folder: str | os.PathLike[str]
) -> list[TasksLeft]:
    """Count for each figure the tasks that its folder lacks. No model is loaded: of ``--layers all`` one
    layer is counted.
    """
    found = []
    for figure in chosen:
        request = Request(figure, options)
        try:
            left = figure.count(request) - _done(request, Path(folder) / figure.name)
            found.append(TasksLeft(figure.name, max(left, 0)))
        except HowsmoothError as error:
            found.append(TasksLeft(figure.name, refused=" ".join(str(error).split())))
    return found


def _done(request: Request, folder: Path) -> int:
    """Count the tasks of a request that the store in a folder has."""
    from howsmooth.study.store_file import store_there

    if not store_there(folder):
        return 0
    from howsmooth.study.records import FIGURE, FigureRow, Measurement
    from howsmooth.study.store import Store

    options, labels = request.options, {spec.label for spec in request.models}
    with Store.open(folder, write=False) as store:
        store.check(FIGURE, {"seed": options.seed})
        sequences = [
            sequence
            for sequence in store.keys(Measurement, ("model", "n", "sample", "text"))
            if sequence[0] in labels and sequence[1] in request.lengths and sequence[2] < request.samples
        ]
        units = set()
        for (unit,) in store.keys(FigureRow, ("unit",)):
            key = json.loads(unit)
            asked = {"search": options.search, "published": options.as_published}.get(key.get("task"), True)
            if asked and ("fingerprint" not in key or key["model"] in labels):
                units.add(json.dumps({name: key[name] for name in key if name not in ("head", "scope")}))
    return len(sequences) + len(units)


def choose_figures(names: Sequence[str]) -> list[Figure]:
    """Return the figures with the given names, in the order of the paper; if no name is given, return all
    figures.

    A figure may also be named by its place in the paper, written with hyphens, such as ``figure-2``.

    Raises
    ------
    ArgumentError
        If no figure has one of the names.

    """
    own = {one.name: one for one in FIGURES}
    known = {one.paper.lower().replace(" ", "-"): one for one in FIGURES} | own
    for name in names:
        if name not in known:
            raise ArgumentError(
                "figure",
                expected=f"one of {', '.join(own)}",
                got=repr(name),
                remedy=similar_name(name, known),
            )
    chosen = [known[name] for name in names]
    return [one for one in FIGURES if not names or one in chosen]


def _figure(module: str, name: str, title: str, paper: str, about: str, **size: Any) -> Figure:
    """Return a figure that a module measures and shows; the module is imported when it is needed."""

    def calling(function: str) -> Callable[..., Any]:
        return lambda *given: getattr(import_module(f"howsmooth.paper.{module}"), function)(*given)

    return Figure(name, title, paper, about, calling("measure"), calling("show"), **size)


FIGURES: tuple[Figure, ...] = (
    _figure(
        "figure_1",
        "figure-1",
        "The constant of attention on text, against the length",
        "Figure 1",
        "Each point is a sequence of n tokens of a text. Its height is the local Lipschitz constant there of "
        "an attention layer, all heads and the output projection, without residual and norm; its colour is "
        "the root mean square norm of its tokens. The paper's columns are the first layer of an encoder, "
        "layer 6 (or the last) of the same encoder run as a decoder with its causal mask, and layer 6 of an "
        "untrained GPT-2. The solid line is the least-squares fit of a power of n, which stands above each "
        "panel with its 95 % interval; the dashed one is n to the power 1/4 with only its factor fitted to "
        "the same points. In the pictures against the mean radius r is the correlation of the logarithms "
        "of both, with its 95 % interval.",
        lengths=tuple(range(4, 101, 4)),
        samples=10,
        count=lambda request: request.sequences,
    ),
    _figure(
        "proposition_3_6_two_diracs",
        "two-dirac",
        "Two Diracs at which the constant of mean-field attention grows exponentially",
        "Proposition 3.6",
        "A light Dirac at Ru, a heavy one at −Ru (A = −I) or at Ru/2 (A = 8I), V = I, in four dimensions, so "
        "that g = γR² is R². The light mass is the paper's e^(−2g), or 1/(1 + 3e^(2g)), the best as R grows. "
        "The local constant in W₂ of mean-field attention is measured at these measures, with weights as "
        "logarithms: beyond R = 18.8, the vertical line, e^(2g) is no float64 number. Left, for A = −I, "
        "against R, with bounds. Right, for both families, up to R = 10, divided by (g/2) e^g, the rate of "
        "Proposition 3.6; bounds for A = −I. No model and no text is involved.",
        count=lambda _: 272,
    ),
    _figure(
        "end_of_sqrt_n_growth",
        "crossover",
        "Where growth like √n ends: weights that no sequence of tokens has",
        "Propositions 3.4 and 3.6",
        "One heavy token at Ru against n − 1 at −Ru, A = −I, V = I, as a measure of two atoms with weights "
        "1/n and 1 − 1/n, so that n may be any number: γR² is such that e^(2γR²) is 10^4, 10^20 and 10^40. "
        "The local constant in W₂ grows like √n until one token has no longer the weight of all others; the "
        "bound that holds for every n says that no other tokens do much better. Proposition 3.4 is a lower "
        "bound, at these very tokens; Theorem 3.3 and howsmooth's Theorem A are upper bounds for n tokens in "
        "the ball. The constant is at least 1: all tokens may move alike, across u. No model and no text is "
        "involved.",
        count=lambda _: 276,
    ),
    _figure(
        "section_5_2_worst_inputs",
        "adversarial",
        "One head at its worst inputs, beside text of the same length",
        "Figure 2",
        "The local Lipschitz constant of one head, values only, at the paper's two clusters: a token Ru and "
        "copies of Ru/2 or of −Ru, u an eigenvector of A. R is one of the paper's radii, or the norm of the "
        "longest real token that the layer is given. Beside it, with --search, the constant at the worst "
        "tokens that howsmooth finds in the same ball; on real text of the same length, with bars from the "
        "smallest to the largest over sequences and heads; and upper bounds on the ball, which no tokens can "
        "exceed. Dashed, the median over all heads of the layer at the paper's tokens, and shaded from the "
        "smallest to the largest. Of scores that the paper does not treat, such as those with rotary "
        "positions, the paper's tokens and theorems are left out.",
        lengths=(12, 24, 64, 160, 392),
        samples=4,
        count=lambda request: (
            request.sequences
            + 4
            * request.layers
            * len([n for n in request.lengths if n >= 2])
            * (1 + request.options.search + request.options.as_published)
        ),
    ),
    _figure(
        "appendix_c_5_gamma_r_squared",
        "gamma-r2",
        "How strong the scores of each head are on real text: γR²",
        "Appendix C.5",
        "γ = max(−γ_min, γ_max/8), with the smallest and the largest real eigenvalue of A = KᵀQ/√k, for "
        "every head of every layer; R is the root mean square norm of the tokens that real text gives the "
        "layer; bars go from the smallest to the largest of a sequence. The lower bound of Proposition 3.4, "
        "√(n−1)/(1 + (n−1)e^(−2γR²)), grows like √n only while n is well below e^(2γR²): above the dashed "
        "line, log(99)/2, the heavy one of the paper's two clusters has at least half of the weight at "
        "n = 100.",
        lengths=(64,),
        count=lambda request: request.texts * len(request.lengths),
    ),
    _figure(
        "appendix_c_7_quadratic_growth",
        "quadratic-growth",
        "Tokens at which the constant grows like R²",
        "Appendix C.7",
        "One token (or two) at zero, all others balanced at ±Ru: the zero sees all tokens alike, however "
        "large R is, and its own block of the Jacobian is V(I/n + (m/n)R² uuᵀA), m the number of tokens "
        "±Ru. For A = γI, V = I and odd n this is 1/n + γR²(n−1)/n: attention is not Lipschitz on all "
        "sequences, not even on three tokens. First, A = V = I in four dimensions, the formula dashed; then "
        "every head of a layer of each model, with u the best of singular vectors of A and V, orthogonal to "
        "the query bias, and dashed R² with only its factor fitted; the vertical line is the norm of real "
        "tokens. Rotary positions turn A by the distance of two tokens: A is then its mean over the tokens "
        "±Ru, and ‖A‖ the largest norm. Exponents are fitted where ‖A‖R² is at least 300.",
        lengths=(3, 11, 101),
        count=lambda request: request.layers + min(4, len([n for n in request.lengths if n >= 3])),
    ),
    _figure(
        "appendix_e_2_untrained_gpt2",
        "gpt2",
        "The constant and the norm of the tokens, against the length",
        "Appendix E.2",
        "By default, a GPT-2 of full size with untrained weights is measured. Above: the local Lipschitz "
        "constant of attention, with all heads and the output projection, without residual and norm, "
        "against the length, with the fitted exponent and its 95 % interval. Below: the root mean square "
        "norm of a sequence's tokens. Filled dots are the tokens that attention receives, after the norm "
        "layer; hollow dots are the tokens that enter the layer, before the norm layer, with the correlation "
        "of log norm and log n. Where the norm grows with the length, the exponent in the length includes an "
        "effect of the norm. As published, dropout stays on in an untrained model, and the output is used in "
        "place of the tangent.",
        models=(ModelSpec("gpt2", random_init=True),),
        lengths=(4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
        samples=4,
        count=lambda request: request.sequences + request.texts * len(request.lengths),
    ),
    _figure(
        "all_bounds_against_measurements",
        "bounds",
        "All bounds against measurements, at real tokens",
        "Theorems 3.3 to C.3",
        "For the layers of Figure 1, at one sequence of each text and length: every bound of the paper and "
        "of this library that applies to the layer, divided by the constant measured there, for each head "
        "alone and for all heads with the output projection. Bounds at the tokens hold for this sequence. "
        "Bounds over the ball hold for all sequences whose tokens have at most the largest norm that the "
        "norm layer before the attention can produce. Upper bounds must lie above the measured constant. "
        "Lower bounds over the ball concern the worst tokens in it, and may lie above or below the measured "
        "constant. A dot is a head at a sequence, a larger mark is the median, and dots at the right end lie "
        "beyond it. For models with tokens of dimension 512 or more, all heads together are bounded only "
        "at the shortest length of the first text, because this takes minutes.",
        lengths=(8, 32, 96),
        samples=1,
        count=lambda request: request.layers * len(request.options.texts) * len(request.lengths),
    ),
)
"""All figures, in the order of the paper."""
