"""All figures: carried out one after the other, their files and their page written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from howsmooth.errors import ArgumentError, HowsmoothError
from howsmooth.paper.all_bounds import ALL_BOUNDS
from howsmooth.paper.crossover import CROSSOVER
from howsmooth.paper.figure import Bench, Figure, Finding, models_for
from howsmooth.paper.figure_1 import FIGURE_1
from howsmooth.paper.gamma_radius import GAMMA_RADIUS
from howsmooth.paper.gpt2_growth import GPT2_GROWTH
from howsmooth.paper.page import PAGE, render, section
from howsmooth.paper.quadratic_growth import QUADRATIC_GROWTH
from howsmooth.paper.request import Request
from howsmooth.paper.two_dirac import TWO_DIRAC
from howsmooth.paper.units import writing
from howsmooth.paper.worst_inputs import WORST_INPUTS
from howsmooth.study.environment import environment
from howsmooth.study.files import replace_file, write_table
from howsmooth.study.progress import Listener, Silent

__all__ = ["FIGURES", "Produced", "choose_figures", "produce"]

FIGURES: tuple[Figure, ...] = (
    FIGURE_1, TWO_DIRAC, CROSSOVER, WORST_INPUTS, GAMMA_RADIUS, QUADRATIC_GROWTH, GPT2_GROWTH, ALL_BOUNDS,
)  # fmt: skip
"""All figures, in the order of the paper."""

_SECTION = "section.html"
"""The name of the file in a figure's folder with its section of the page."""


@dataclass(frozen=True, eq=False)
class Produced:
    """What was made.

    Attributes
    ----------
    page
        Its file.
    findings
        Of the figures that were carried out now, by name.
    seconds
        That they took.
    refused
        Those that could not be made, with the reason.

    """

    page: Path
    findings: dict[str, Finding] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def choose_figures(names: Sequence[str]) -> list[Figure]:
    """Find figures by name, in the order of the paper; all of them if none is named.

    Raises
    ------
    ArgumentError
        If there is none of a name.

    """
    known = {one.name: one for one in FIGURES}
    for name in names:
        if name not in known:
            raise ArgumentError("figure", expected=f"one of {', '.join(known)}", got=repr(name))
    return [one for one in FIGURES if not names or one.name in names]


def produce(
    chosen: Sequence[Figure],
    request: Request,
    folder: Path,
    listener: Listener | None = None,
    command: str = "",
) -> Produced:
    """Measure what is missing, draw, and write the page.

    Parameters
    ----------
    chosen
        What to carry out.
    request
        What is asked of each.
    folder
        Each figure has a folder in it, by its name; the page lies beside them.
    listener
        Told what begins, and how far it is.
    command
        As typed, to be recorded with the measurements and on the page.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If nothing of what was chosen can be made: the reason of the first. What is refused beside others is
        in the result, and on the page.

    """
    made = Produced(folder / PAGE)
    listener, models = listener or Silent(), models_for(request)
    errors: list[HowsmoothError] = []
    for figure in chosen:
        began, own = time.perf_counter(), folder / figure.name
        listener.phase(f"{figure.paper}: {figure.title}")
        try:
            finding = figure.make(Bench(request, own, models, listener, command))
            for number, (_, table) in enumerate(finding.tables, 1):
                write_table(table, own, f"table-{number}.csv")
            with writing(own):
                # Later commands put it on their page.
                replace_file(own / _SECTION, section(figure, finding, folder))
            made.findings[figure.name] = finding
        except HowsmoothError as error:
            errors.append(error)
            made.refused[figure.name] = " ".join(str(error).split())
        made.seconds[figure.name] = time.perf_counter() - began
    if errors and not made.findings:
        raise errors[0]
    listener.phase("Writing the page")
    sections = []
    for figure in FIGURES:
        path = folder / figure.name / _SECTION
        if figure.name in made.refused:
            sections.append((figure, section(figure, Finding([], []), folder, made.refused[figure.name])))
        elif path.is_file():
            sections.append((figure, path.read_text(encoding="utf-8")))
    with writing(folder):
        replace_file(made.page, render(sections, command, environment(request.device)))
    return made
