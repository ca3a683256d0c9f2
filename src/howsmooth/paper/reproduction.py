"""Make figures of the paper: measure and draw them, and write their files and one HTML page."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup
from matplotlib import rc_context

from howsmooth.errors import HowsmoothError
from howsmooth.files import replace_file, write_table, written_beside
from howsmooth.paper import figure_definition
from howsmooth.paper.figure_definition import Finding, PaperFigure
from howsmooth.paper.figure_measurements import models_for, opened_bench
from howsmooth.paper.plotting import PAPER
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.results.page import frame, page, parts
from howsmooth.study.environment import environment
from howsmooth.study.runner import Means
from howsmooth.words import counted, readable

__all__ = ["PAGE", "Reproduction", "figures_page", "make", "produce", "section"]

PAGE = "reproduce.html"
"""The file name of the page."""

_SECTION = "section.html"  # in a figure's folder, for the pages of later commands
_TITLE = "How Smooth Is Attention? The figures, reproduced"
_ROWS_SHOWN = 12
_MOST_ROWS = 300


@dataclass(frozen=True, eq=False)
class Reproduction:
    """The path of the HTML page, and dictionaries from the name of a figure to its finding, to the seconds it
    took, and to the reason why it was refused.
    """

    page: Path
    findings: dict[str, Finding] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def produce(
    chosen: Sequence[PaperFigure],
    options: FigureOptions,
    folder: str | os.PathLike[str],
    means: Means | None = None,
) -> Reproduction:
    """Measure and draw figures, each in a folder of its name, and write one HTML page with all of them.

    ``means`` are the listener that is told the progress, the workers, and the command that the user typed; by
    default the tasks run in this process. If only some figures can be made, the reasons are in the result and
    on the page; if none can, the error of the first one is raised.
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


def make(
    figure: PaperFigure, options: FigureOptions, folder: str | os.PathLike[str], means: Means
) -> Finding:
    """Measure and draw one figure, and write its files into its own folder within ``folder``."""
    own = Path(folder) / figure.name
    with opened_bench(figure, options, own, means) as bench:
        numbers = figure.measure(bench)
    with rc_context(PAPER):
        finding = replace(figure.show(numbers, own), made=bench.made)
    for number, (_, table) in enumerate(finding.tables, 1):
        write_table(table, own, f"table-{number}.csv")
    with written_beside(own, "finished measurements"):
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
        replace_file(made.page, figures_page(sections, command, environment(options.device)))


def figures_page(
    sections: Sequence[tuple[PaperFigure, str]], command: str, environment: Mapping[str, str]
) -> str:
    """Return the HTML page made of the given figures and their sections. It also shows the command that the
    user typed, and the software and hardware (:func:`howsmooth.study.environment.environment`).
    """
    html = parts()
    links = {figure.name: f"{figure.paper}: {figure.title}" for figure, _ in sections}
    made = [
        html.heading("How it was made", "made"),
        html.words("This command made the page. If it is called again, it repeats no measurement:"),
        Markup("<pre>{}</pre>").format(readable(command, 5000)),
        html.pairs(environment),
    ]
    about = Markup(
        "<p>The figures of <cite>How Smooth Is Attention?</cite> (Castin, Ablin, Peyré, ICML 2024), made "
        "again. The sentences under “What is seen” are written from the measured numbers; they may differ "
        "from the paper's for other models, texts or lengths.</p>"
    )
    start = [html.head(_TITLE), about, html.contents(links | {"made": "How it was made"})]
    return page(
        _TITLE, [*start, *(text for _, text in sections), html.section("made", Markup("".join(made)))]
    )


def section(figure: PaperFigure, finding: Finding, folder: str | os.PathLike[str], refused: str = "") -> str:
    """Return the section of a figure as HTML, with links relative to ``folder``.

    ``refused`` is the reason why the figure could not be made; empty if it was made.
    """
    html = parts()
    body = [html.heading(f"{figure.paper}: {figure.title}", figure.name), html.words(figure.about)]
    if refused:
        words = Markup("<b>This figure could not be made.</b> {}").format(readable(refused, 2000))
        body.append(html.words(words))
    for picture in finding.pictures:
        file = picture.pdf.relative_to(folder).as_posix()
        body.append(html.picture(**picture.on_page(), caption=f"{picture.title}.", file=file))
    if finding.seen:
        body += [html.heading("What is seen", level=3), html.items(finding.seen)]
    for number, (caption, table) in enumerate(finding.tables, 1):
        file = f"{figure.name}/table-{number}.csv"
        link = Markup('<a href="{}">{}</a>').format(quote(file), file)
        if len(table) > _MOST_ROWS:
            words = Markup("This page has no room for so many rows; they are in {}.").format(link)
            shown = html.words(words)
        else:
            shown = frame(table, Markup("All digits are in {}.").format(link), label=caption)
        summary = f"{caption} ({counted(len(table), 'row')})"
        body.append(html.folded(summary, shown, len(table) <= _ROWS_SHOWN))
    if finding.made:
        body.append(html.folded("Models, texts and settings", html.pairs(finding.made)))
    found: str = html.section(figure.name, Markup("".join(body)))
    return found
