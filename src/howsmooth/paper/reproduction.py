"""Make all figures of the paper: measure and draw each, and write its files and the page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from howsmooth.errors import ArgumentError, HowsmoothError, similar_name
from howsmooth.paper.all_bounds import ALL_BOUNDS
from howsmooth.paper.crossover import CROSSOVER
from howsmooth.paper.figure import Figure, FigureContext, Finding, models_for
from howsmooth.paper.figure_1 import FIGURE_1
from howsmooth.paper.figure_options import FigureOptions
from howsmooth.paper.gamma_radius import GAMMA_RADIUS
from howsmooth.paper.gpt2_growth import GPT2_GROWTH
from howsmooth.paper.page import PAGE, render, section
from howsmooth.paper.quadratic_growth import QUADRATIC_GROWTH
from howsmooth.paper.row_cache import writing
from howsmooth.paper.two_dirac import TWO_DIRAC
from howsmooth.paper.worst_inputs import WORST_INPUTS
from howsmooth.study.environment import environment
from howsmooth.study.file_writing import replace_file, write_table
from howsmooth.study.progress_listener import SILENT, Listener

__all__ = ["FIGURES", "Reproduction", "choose_figures", "produce"]

FIGURES: tuple[Figure, ...] = (
    FIGURE_1, TWO_DIRAC, CROSSOVER, WORST_INPUTS, GAMMA_RADIUS, QUADRATIC_GROWTH, GPT2_GROWTH, ALL_BOUNDS,
)  # fmt: skip
"""All figures, in the order of the paper."""

_SECTION = "section.html"
"""The file in a figure's folder that holds its section of the page."""


@dataclass(frozen=True, eq=False)
class Reproduction:
    """What :func:`produce` made: the path of a page, and by figure name what this call found.

    ``findings`` are those of the figures that were made, ``seconds`` the time that each took, and ``refused``
    the reasons why figures could not be made.
    """

    page: Path
    findings: dict[str, Finding] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def choose_figures(names: Sequence[str]) -> list[Figure]:
    """Return the figures with the given names, in the order of the paper; all figures if no name is given.

    A figure may also be named by its place in the paper, with hyphens, such as ``figure-2``.

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
    listener: Listener = SILENT,
    command: str = "",
) -> Reproduction:
    """Measure and draw the chosen figures, and write one HTML page with all figures of the output folder.

    Parameters
    ----------
    chosen, options
        The figures to make, and the options for all of them.
    folder
        The output folder. It receives the page, and a folder for each figure, named after the figure.
    listener
        The listener that is told the progress.
    command
        The command that the user typed, to be recorded with the measurements and on the page.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If none of the figures can be made; the error is that of the first figure. If some can be made, the
        reasons why the others cannot are in the result and on the page.

    """
    folder = Path(folder)
    made, errors = Reproduction(folder / PAGE), list[HowsmoothError]()
    context = FigureContext(options, folder, models_for(options), listener, command)
    try:
        for figure in chosen:
            began = time.perf_counter()
            listener.phase(f"{figure.paper}: {figure.title}")
            try:
                made.findings[figure.name] = _make(figure, context)
            except HowsmoothError as error:
                errors.append(error)
                made.refused[figure.name] = " ".join(str(error).split())
            made.seconds[figure.name] = time.perf_counter() - began
    except KeyboardInterrupt:
        # The figures that are finished are on the page, also if the next one takes hours.
        if made.findings:
            _write_page(made, context)
        raise
    if errors and not made.findings:
        raise errors[0]
    listener.phase("Writing the page")
    _write_page(made, context)
    return made


def _make(figure: Figure, context: FigureContext) -> Finding:
    """Make a figure, and write its tables and its section of the page into its folder."""
    own = context.folder / figure.name
    finding = figure.make(replace(context, folder=own, made={}))
    for number, (_, table) in enumerate(finding.tables, 1):
        write_table(table, own, f"table-{number}.csv")
    with writing(own):
        # Keep the section in a file, so that later commands can include it in their page.
        replace_file(own / _SECTION, section(figure, finding, context.folder))
    return finding


def _write_page(made: Reproduction, context: FigureContext) -> None:
    """Write the page with the figures of this call, and those that earlier calls made in this folder."""
    sections, folder = [], context.folder
    for figure in FIGURES:
        path = folder / figure.name / _SECTION
        if figure.name in made.refused:
            sections.append((figure, section(figure, Finding([], []), folder, made.refused[figure.name])))
        elif path.is_file():
            sections.append((figure, path.read_text(encoding="utf-8")))
    with writing(folder):
        replace_file(made.page, render(sections, context.command, environment(context.options.device)))
