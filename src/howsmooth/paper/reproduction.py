"""Make figures of the paper: measure and draw each figure, and write the files of the figures and one HTML
page.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from matplotlib import rc_context

from howsmooth.errors import HowsmoothError
from howsmooth.files import replace_file, write_table, written_beside
from howsmooth.paper import figure_definition
from howsmooth.paper.bench import models_for, opened_bench
from howsmooth.paper.figure_definition import Figure, Finding
from howsmooth.paper.html_page import PAGE, render, section
from howsmooth.paper.plotting import PAPER
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.environment import environment
from howsmooth.study.runner import Means

__all__ = ["Reproduction", "make", "produce"]

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
    means = means or Means()
    means = replace(means, models=models_for(options))
    try:
        for figure in chosen:
            began = time.perf_counter()
            means.listener.phase(f"{figure.paper}: {figure.title}")
            try:
                made.findings[figure.name] = make(figure, options, folder, means)
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


def make(figure: Figure, options: FigureOptions, folder: str | os.PathLike[str], means: Means) -> Finding:
    """Measure and draw one figure, and write its pictures, its tables and its section of the page into its
    own folder within ``folder``.
    """
    own = Path(folder) / figure.name
    with opened_bench(figure, options, own, means) as bench:
        numbers = figure.measure(bench)
    with rc_context(PAPER):
        finding = replace(figure.show(numbers, own), made=bench.made)
    for number, (_, table) in enumerate(finding.tables, 1):
        write_table(table, own, f"table-{number}.csv")
    with written_beside(own, "finished measurements"):
        # Keep the section in a file, so that later commands can include it in their page.
        replace_file(own / _SECTION, section(figure, finding, folder))
    return finding


def _write_page(made: Reproduction, options: FigureOptions, folder: Path, command: str) -> None:
    """Write the page with the figures of this call and of earlier calls in this folder."""
    sections = []
    for figure in figure_definition.FIGURES:
        path = folder / figure.name / _SECTION
        if figure.name in made.refused:
            sections.append((figure, section(figure, Finding([], []), folder, made.refused[figure.name])))
        elif path.is_file():
            sections.append((figure, path.read_text(encoding="utf-8")))
    with written_beside(folder, "finished measurements"):
        replace_file(made.page, render(sections, command, environment(options.device)))
