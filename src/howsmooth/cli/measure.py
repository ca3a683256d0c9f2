"""The command ``howsmooth measure``, which measures models on inputs and writes the results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import as_json, paragraph, say, show_table
from howsmooth.cli.typer_command import FAILED, Quiet, Shown, as_typed, command, means_of, resumable
from howsmooth.quick_imports import quick_imports
from howsmooth.study.execution_options import Execution
from howsmooth.study.options import WHAT, Folder, Told, options
from howsmooth.study.plans import Plan
from howsmooth.study.worker_processes import prepared_processes
from howsmooth.words import counted, encodable, readable

if TYPE_CHECKING:
    from howsmooth.study.measurement_run import DryRun
    from howsmooth.study.study_preparation import PreparedStudy
    from howsmooth.study.tasks.task import Work

__all__ = ["measure"]

_EXAMPLES = (
    "The folder --out receives a store with one row for each measurement, measurements.csv, exponents.csv "
    "and report.html, which explains and draws the results.",
    "Examples:",
    "[cyan]howsmooth measure[/]  the two built-in models on Alice's Adventures in Wonderland",
    "[cyan]howsmooth measure builtin-encoder --layers 0,-1 --lengths 4:64:4 --samples 5[/]  a quick look",
    "[cyan]howsmooth measure builtin-decoder --scope head --heads 0:3 --layers 2[/]  four heads",
    "[cyan]howsmooth measure gpt2 --random-init --text alice --layers 6[/]  the architecture, untrained",
    "[cyan]howsmooth measure builtin-encoder --as-decoder[/]  an encoder with a causal mask",
    "[cyan]howsmooth measure vit --random-init --images builtin --layers 0,5[/]  images instead of a text",
    "[cyan]howsmooth measure ./my-model --embeddings X.npy --lengths 4,8[/]  "
    "tokens that another program embedded",
    "[cyan]howsmooth measure builtin-encoder --as-published all[/]  also what the paper's code computes",
    "[cyan]howsmooth measure ./my-model --lengths 1024,4096 --dry-run[/]  only count, and predict the memory",
    "[cyan]howsmooth measure builtin-decoder --executor processes --workers 2[/]  on two processes",
    "[cyan]howsmooth measure --plan sweep.toml[/]  what a plan file says: many models, texts and scopes",
    "[cyan]howsmooth measure builtin-decoder --json --quiet > result.json[/]  JSON for another program",
    "Run the same command again to continue after an interruption; finished measurements are not repeated. "
    "Lengths, samples, layers, heads, scopes, texts and models can be added to a folder at any time.",
)


@options
class MeasureShown(Shown):
    """The options for showing progress and the result."""

    quiet: Quiet = False
    figures: Annotated[
        Literal["page", "all"],
        "page: the points that report.html draws when it is opened, and one overview of each model as PNG "
        "and PDF in the folder figures. all: also one of each layer and head, which takes longer.",
    ] = "page"
    parquet: Annotated[bool, "Also write the tables as parquet, with the line to cite."] = False
    dry_run: Annotated[
        bool,
        "Load and check everything, and print how much is left to measure and in what memory. Nothing is "
        "measured or written.",
    ] = False
    plan_file: Annotated[
        Folder | None,
        Told("FILE", panel=WHAT, flag="plan"),
        "A plan file in TOML, whose keys are options of what and how to measure; options typed beside it "
        "replace them. A failed measurement is recorded, the others continue, and the exit code is 3. "
        "Without --out, the folder is beside the file.",
    ] = None


@command(*_EXAMPLES)
def measure(plan: Plan, execution: Execution, shown: MeasureShown) -> int:
    """Measure the local Lipschitz constant of a model's attention on real inputs, with an interval."""
    # A plan file may take days; a command about one model ends at the first failure.
    keep_going = shown.plan_file is not None
    if shown.dry_run:
        return _tell_dry_run(plan, execution, shown, keep_going=keep_going)
    processes = prepared_processes(plan.constants, plan.device, execution)
    # Imported here because these modules take seconds to load, which --help should not.
    with quick_imports():
        import howsmooth.models  # noqa: F401 - which the study imports when it loads the first model
        from howsmooth.cli import print_measurement_result
        from howsmooth.study.measurement_outputs import write_outputs
        from howsmooth.study.measurement_run import run
        from howsmooth.threads import fastest_threads

    out = execution.out
    with resumable(lambda: _rows_kept(out)), shown_progress(quiet=shown.quiet) as display:
        with means_of(execution, display, keep_going=keep_going) as means, fastest_threads() as threads:
            outcome = run(plan, out, replace(means, processes=processes), beside=_beside(plan))
        words = "Drawing figures" if shown.figures == "all" else "Writing tables and report"
        display.phase(f"{words} ({threads.words})" if threads.words else words)
        published = write_outputs(out, display, figures=shown.figures, parquet=shown.parquet)
    if shown.json:
        typer.echo(print_measurement_result.measured_as_json(plan, outcome, published, out))
    elif not shown.quiet:
        print_measurement_result.show_measured(plan, outcome, published, out)
    if not outcome.failed:
        return 0
    failed, reason = counted(outcome.failed, "computation"), readable(outcome.first_failure, longest=300)
    again = f"Try again with:\n  {as_typed()}"
    typer.echo(f"{failed} failed. Reason of the first failure: {reason} {again}", err=True)
    return FAILED


def _rows_kept(folder: Path) -> str:
    from howsmooth.study.records import Measurement, PublishedValue
    from howsmooth.study.store import Store

    kept = ""
    if Store.exists(folder):
        with Store.open(folder, write=False) as store:
            counts = {kind.table: store.count(kind) for kind in (Measurement, PublishedValue)}
        kept = " and ".join(f"{count} {table}" for table, count in counts.items() if count)
    return f"{kept} are saved in {encodable(str(folder))}" if kept else "nothing was measured yet"


def _beside(plan: Plan) -> list[Callable[[PreparedStudy], Work]]:
    if not plan.as_published:
        return []
    from howsmooth.paper.published_code.constants_task import published_left

    return [published_left(None if plan.as_published == "all" else plan.as_published.split(","))]


# ---- What would be measured


def _tell_dry_run(plan: Plan, execution: Execution, shown: MeasureShown, *, keep_going: bool) -> int:
    from howsmooth.study.measurement_run import dry_run

    with shown_progress(quiet=shown.quiet or shown.json) as display:
        display.phase("Reading texts and models")
        found = dry_run(plan, execution.out, keep_going=keep_going)
    published = bool(plan.as_published)
    if shown.json:
        impossible = [{"model": m, "text": t, "error": error} for m, t, error in found.impossible]
        described = asdict(found) | {"impossible": impossible, "without_published_values": published}
        typer.echo(as_json(out=execution.out, **described))
    else:
        _show(found, execution, published=published)
    return FAILED if found.impossible else 0


def _show(found: DryRun, execution: Execution, *, published: bool) -> None:
    numbers = ["layers", "lengths", "sequences", "left", "longest"]
    counts = attrgetter("layers", "lengths", "sequences", "measurements", "longest")
    rows = [
        [readable(part.model), readable(part.text), part.scope, *map(str, counts(part)), _size(part.memory)]
        for part in found.parts
    ]
    names = ["model", "text", "scope"]
    show_table([*names, *numbers, "memory"], rows, left=names)
    left = counted(sum(part.measurements for part in found.parts), "measurement")
    kept = f"; {found.kept} are already in {execution.out}" if found.kept else ""
    paragraph(f"\nLeft to measure: {left}{kept}.")
    if found.parts:
        unknown = ", or ? if it is not known beforehand" if any(p.memory is None for p in found.parts) else ""
        each = ", for each worker" if execution.executor is not None else ""
        together = f"what the longest sequences that are measured together take{each}"
        paragraph(f"Memory: {together}, beside the model{unknown}.")
    for part in found.parts:
        if part.lacking is not None:
            paragraph(
                f"A sequence of {part.longest} tokens does not fit into the memory that one measurement may "
                f"use, so it will be refused. Raise --memory to {math.ceil(part.lacking / 1e6)}MB."
            )
    if published:
        paragraph("The values of the paper's published code are not counted.")
    for label, source, error in found.impossible:
        where = label if source is None else f"{label} on {source}"
        say(f"Cannot be measured: {readable(where)}: {readable(error, longest=300)}")
    say("Nothing was written.")


def _size(size: float | None) -> str:
    if size is None:
        return "?"
    return f"{size / 1e9:.1f} GB" if size >= 9.95e8 else f"{max(size / 1e6, 1):.0f} MB"
