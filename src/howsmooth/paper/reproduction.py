"""Make figures of the paper: measure and draw each figure, and write the files of the figures and one HTML
page.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from howsmooth.errors import ArgumentError, HowsmoothError, similar_name
from howsmooth.files import replace_file, write_table, written_beside
from howsmooth.paper.all_bounds_against_measurements import ALL_BOUNDS
from howsmooth.paper.appendix_c_5_gamma_r_squared import GAMMA_RADIUS
from howsmooth.paper.appendix_c_7_quadratic_growth import QUADRATIC_GROWTH
from howsmooth.paper.appendix_e_2_untrained_gpt2 import GPT2_GROWTH
from howsmooth.paper.end_of_sqrt_n_growth import CROSSOVER
from howsmooth.paper.figure_1 import FIGURE_1
from howsmooth.paper.figure_definition import Figure, FigureContext, Finding, models_for
from howsmooth.paper.html_page import PAGE, render, section
from howsmooth.paper.proposition_3_6_two_diracs import TWO_DIRAC
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.paper.section_5_2_worst_inputs import WORST_INPUTS
from howsmooth.study.environment import environment
from howsmooth.study.progress_listener import SILENT, Listener
from howsmooth.study.runner import Means
from howsmooth.study.store import Store

__all__ = ["FIGURES", "Reproduction", "TasksLeft", "choose_figures", "produce", "tasks_left"]

FIGURES: tuple[Figure, ...] = (
    FIGURE_1,
    TWO_DIRAC,
    CROSSOVER,
    WORST_INPUTS,
    GAMMA_RADIUS,
    QUADRATIC_GROWTH,
    GPT2_GROWTH,
    ALL_BOUNDS,
)
"""All figures, in the order of the paper."""

_SECTION = "section.html"
"""The file in a figure's folder that holds its section of the page."""


@dataclass(frozen=True, eq=False)
class Reproduction:
    """The result of :func:`produce`: the path of the HTML page, and three dictionaries with an entry for each
    figure.

    ``findings`` contains the results of the figures that were made, ``seconds`` the time that each figure
    took, and ``refused`` the reasons why the other figures could not be made.
    """

    page: Path
    findings: dict[str, Finding] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


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


def produce(
    chosen: Sequence[Figure],
    options: FigureOptions,
    folder: str | os.PathLike[str],
    means: Means | None = None,
) -> Reproduction:
    """Measure and draw the chosen figures, and write one HTML page with all figures in the output folder.

    Parameters
    ----------
    chosen, options
        The figures to make, and the options for all of them.
    folder
        The output folder. It receives the page, and a folder for each figure, named after the figure.
    means
        The listener that is told the progress, the workers, and the command that the user typed; by default
        the tasks run in this process.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If none of the figures can be made; the error is that of the first figure. If some can be made, the
        reasons why the others cannot are in the result and on the page.

    """
    folder = Path(folder)
    made, errors = Reproduction(folder / PAGE), list[HowsmoothError]()
    means = replace(means or Means(), models=models_for(options))
    try:
        for figure in chosen:
            began = time.perf_counter()
            means.listener.phase(f"{figure.paper}: {figure.title}")
            try:
                made.findings[figure.name] = _make(figure, options, folder, means)
            except HowsmoothError as error:
                errors.append(error)
                made.refused[figure.name] = " ".join(str(error).split())
            made.seconds[figure.name] = time.perf_counter() - began
    except KeyboardInterrupt:
        # The figures that are finished are on the page, also if the next one takes hours.
        if made.findings:
            _write_page(made, options, folder, means.command)
        raise
    if errors and not made.findings:
        raise errors[0]
    means.listener.phase("Writing the page")
    _write_page(made, options, folder, means.command)
    return made


def _make(figure: Figure, options: FigureOptions, folder: Path, means: Means) -> Finding:
    """Make one figure, and write its tables and its section of the page into its folder."""
    own = folder / figure.name
    finding = figure.make(options, own, means)
    for number, (_, table) in enumerate(finding.tables, 1):
        write_table(table, own, f"table-{number}.csv")
    with written_beside(own, "finished measurements"):
        # Keep the section in a file, so that later commands can include it in their page.
        replace_file(own / _SECTION, section(figure, finding, folder))
    return finding


def _write_page(made: Reproduction, options: FigureOptions, folder: Path, command: str) -> None:
    """Write the page with the figures of this call and of earlier calls in this folder."""
    sections = []
    for figure in FIGURES:
        path = folder / figure.name / _SECTION
        if figure.name in made.refused:
            sections.append((figure, section(figure, Finding([], []), folder, made.refused[figure.name])))
        elif path.is_file():
            sections.append((figure, path.read_text(encoding="utf-8")))
    with written_beside(folder, "finished measurements"):
        replace_file(made.page, render(sections, command, environment(options.device)))


@dataclass(frozen=True)
class TasksLeft:
    """The number of tasks of a figure that are still to be done. If the figure cannot be made, ``refused`` is
    the reason.
    """

    name: str
    tasks: int = 0
    refused: str = ""


def tasks_left(
    chosen: Sequence[Figure],
    options: FigureOptions,
    folder: str | os.PathLike[str],
    listener: Listener = SILENT,
) -> list[TasksLeft]:
    """Plan each figure, and count the tasks that its folder lacks, without carrying them out. The listener
    receives the name of the figure that is planned.
    """
    models, found = models_for(options), []
    for figure in chosen:
        listener.phase(f"Planning {figure.name}")
        try:
            with Store.open(Path(folder) / figure.name, write=False, late=True) as store:
                plan = figure.plan(FigureContext(options, store, Means(models=models)))
                found.append(TasksLeft(figure.name, sum(len(work.tasks) for work in plan)))
        except HowsmoothError as error:
            found.append(TasksLeft(figure.name, refused=" ".join(str(error).split())))
    return found
