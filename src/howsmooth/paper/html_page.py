"""Write the HTML page that shows all figures, their results, and how the results were made.

Nothing in this module measures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from markupsafe import Markup

from howsmooth.paper.figure_definition import Figure, Finding
from howsmooth.results.drawing import data_url
from howsmooth.results.page import frame, page, parts
from howsmooth.words import counted, readable

__all__ = ["PAGE", "render", "section"]

PAGE = "reproduce.html"
"""The file name of the page."""

_TITLE = "How Smooth Is Attention? The figures, reproduced"
_ROWS_SHOWN = 12
_MOST_ROWS = 300


def render(sections: Sequence[tuple[Figure, str]], command: str, environment: Mapping[str, str]) -> str:
    """Return the page of all figures as a single HTML file, which links to PDF and CSV files in the same
    folder.

    ``sections`` is a list of pairs of a figure and the HTML of its section, in the order of the page.
    ``command`` is the command that the user typed, and ``environment`` describes the software and hardware,
    as :func:`howsmooth.study.environment.environment` returns it.
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
        "<p>The figures of the paper <cite>How Smooth Is Attention?</cite> (Castin, Ablin, Peyré, ICML "
        "2024), made again. The section “How it was made” says how the numbers were measured, and the "
        "sentences under “What is seen” are written from these numbers. The figures may differ from the "
        "paper's if models, texts or lengths differ.</p>"
    )
    start = [html.head(_TITLE), about, html.contents(links | {"made": "How it was made"})]
    return page(
        _TITLE, [*start, *(text for _, text in sections), html.section("made", Markup("".join(made)))]
    )


def section(figure: Figure, finding: Finding, folder: str | os.PathLike[str], refused: str = "") -> str:
    """Return the HTML of the page's section on one figure.

    Links are relative to ``folder``, in which the page is written. ``refused`` is the reason why the figure
    could not be made, and is empty if it was made.
    """
    html = parts()
    body = [html.heading(f"{figure.paper}: {figure.title}", figure.name), html.words(figure.about)]
    if refused:
        words = Markup("<b>This figure could not be made.</b> {}").format(readable(refused, 2000))
        body.append(html.words(words))
    for picture in finding.pictures:
        file = picture.pdf.relative_to(folder).as_posix()
        image = data_url(picture.png.read_bytes())
        body.append(html.picture(image, picture.alt, picture.width, f"{picture.title}.", file))
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
