"""The command ``howsmooth reproduce``, which measures and draws the figures of the paper."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import as_json, console, heading, say, show_table
from howsmooth.cli.typer_command import FAILED, Quiet, Shown, command, means_of, resumable
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.execution_options import Execution, Out
from howsmooth.study.options import Told, Words, described, options
from howsmooth.words import encodable, readable

if TYPE_CHECKING:
    from howsmooth.paper.figure_definition import PaperFigure
    from howsmooth.paper.reproduction import Reproduction

__all__ = ["reproduce"]

_EXAMPLES = (
    "The folder --out receives reproduce.html, the page with all figures, and a folder for each figure with "
    "its PDF, its tables and its measurements.",
    "Examples:",
    "[cyan]howsmooth reproduce[/]  all figures, without a network",
    "[cyan]howsmooth reproduce --list[/]  the names of the figures",
    "[cyan]howsmooth reproduce figure-1 --lengths 4:32:4 --samples 3[/]  a quick look",
    "[cyan]howsmooth reproduce --dry-run[/]  only count what is left to do for each figure",
    "[cyan]howsmooth reproduce figure-2 --search[/]  also search for tokens worse than the paper's",
    "[cyan]howsmooth reproduce figure-1 --as-published[/]  also what the paper's code computes",
    "[cyan]howsmooth reproduce figure-1 --model bert-base-uncased --text ag_news[/]  "
    "a model and a text of the paper, with a network",
    "[cyan]howsmooth reproduce --model ./my-model --text book.txt[/]  all figures for another model",
    "Run the same command again to continue after an interruption; finished work is not repeated. A figure "
    "is drawn, and shown on the page, once all its measurements are made.",
)

_NO_PAGE = "There is no page yet, since a figure is drawn once all its measurements are made"


@options
class ReproduceExecution(Execution):
    """The options for carrying out the work on figures: output folder, workers and threads."""

    out: Out = Path("howsmooth-reproduced")


@options
class ReproduceShown(Shown):
    """The options that choose figures, and those for showing progress and the result."""

    figures: Annotated[
        Words,
        Told("FIGURE", positional=True, several=True),
        "Names of figures, as --list prints them, or their places in the paper. Default: all.",
    ] = ()
    quiet: Quiet = False
    list: Annotated[bool, "Print the names of all figures and exit."] = False
    dry_run: Annotated[
        bool, "Count the tasks of each figure that are left. Nothing is measured or written."
    ] = False


@command(*_EXAMPLES)
def reproduce(options: FigureOptions, execution: ReproduceExecution, shown: ReproduceShown) -> int:
    """Reproduce the figures of the paper: measure, draw, and write one page that describes the results."""
    from howsmooth.paper.figure_definition import FIGURES, choose_figures

    if shown.list:
        lines = [f"{one.name:<18} {one.paper}: {one.title}" for one in FIGURES]
        typer.echo(json_format.dumps([*map(_listed, FIGURES)]) if shown.json else "\n".join(lines))
        return 0
    chosen = choose_figures(shown.figures)
    if shown.dry_run:
        return _tell_tasks(chosen, options, execution.out, shown)
    from howsmooth.paper.reproduction import PAGE, produce
    from howsmooth.study.store import STORE_NAME

    out = execution.out

    def kept() -> str:
        stores = [out / figure.name / STORE_NAME for figure in chosen]
        if not any(path.exists() for path in (out / PAGE, *stores)):
            return "nothing was measured yet"
        page = f"{PAGE} shows the finished figures" if (out / PAGE).exists() else _NO_PAGE
        return f"finished figures and measurements are saved in {encodable(str(out))}. {page}"

    with resumable(kept), shown_progress(quiet=shown.quiet) as display, means_of(execution, display) as means:
        made = produce(chosen, options, out, means)
    if shown.json:
        typer.echo(_as_json(made, chosen, options, out))
    elif not shown.quiet:
        _show(made, chosen)
    return FAILED if made.refused else 0


def _tell_tasks(chosen: Sequence[PaperFigure], options: FigureOptions, out: Path, shown: Shown) -> int:
    from howsmooth.paper.figure_definition import tasks_left

    found = tasks_left(chosen, options, out)
    if shown.json:
        typer.echo(as_json(figures=[asdict(one) for one in found]))
    else:
        rows = [[one.name, str(one.tasks)] for one in found if not one.refused]
        show_table(["figure", "tasks left"], rows, left=["figure"])
        if labels := {label for one in found for label in one.unknown}:
            say(f"All layers of {', '.join(sorted(labels))} count as one: their number is not known yet.")
        for one in (one for one in found if one.refused):
            say(f"Cannot be made: {one.name}: {readable(one.refused, longest=300)}")
        say("Nothing was written.")
    return FAILED if any(one.refused for one in found) else 0


def _show(made: Reproduction, figures: Sequence[PaperFigure]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    for one in figures:
        heading(f"\n{one.paper}: {one.title}")
        refused = f"Not made: {made.refused.get(one.name)}"
        for words in made.findings[one.name].seen if one.name in made.findings else [refused]:
            console().print(Padding(Text(f"- {readable(words, longest=2000)}"), (0, 0, 0, 2), expand=False))
    say(f"\nPage: {made.page}")
    say(f"Also in {made.page.parent}: a folder for each figure, with PDF, tables and measurements")


def _as_json(made: Reproduction, figures: Sequence[PaperFigure], options: FigureOptions, folder: Path) -> str:
    from howsmooth.study.records import plain_rows

    drawn = []
    for one in figures:
        if found := made.findings.get(one.name):
            pictures = [{"pdf": each.pdf, "png": each.png, "alt": each.alt} for each in found.pictures]
            tables = [{"caption": caption, "rows": plain_rows(table)} for caption, table in found.tables]
            more = {"seen": found.seen, "pictures": pictures, "tables": tables}
            drawn.append(_listed(one) | {"seconds": round(made.seconds[one.name], 3)} | more)
    settings = described(options)
    return as_json(out=folder, page=made.page, settings=settings, refused=made.refused, figures=drawn)


def _listed(figure: PaperFigure) -> dict[str, Any]:
    return {name: getattr(figure, name) for name in ("name", "paper", "title")}
