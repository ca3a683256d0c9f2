"""The command ``howsmooth study``, which carries out a plan file, shows its progress, or merges studies."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from howsmooth.cli.plan_execution import MeasurementShown, carry_out, tell_forecast
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import as_json as json_object
from howsmooth.cli.terminal_output import say, show_table
from howsmooth.cli.typer_command import (
    Shown,
    as_typed,
    command,
    use_threads,
)
from howsmooth.errors import ArgumentError, StoreError
from howsmooth.study.execution_options import Execution
from howsmooth.study.plan_file import read_plan
from howsmooth.study.plans import Plan
from howsmooth.study.text_formatting import duration, readable

if TYPE_CHECKING:
    from howsmooth.study.status import Status

__all__ = ["study"]

_MOST_REASONS = 5

_EXAMPLES = (
    "A plan file names models, texts, lengths, samples, scopes, layers and heads; the guide explains its "
    "keys. Options on the command line override the file. Without --out, the output folder is beside the "
    "plan file.",
    "Examples:",
    "[cyan]howsmooth study sweep.toml[/]  start a study",
    "[cyan]howsmooth study sweep.toml --dry-run[/]  only predict its time and memory",
    "[cyan]howsmooth study sweep.toml --status[/]  show its progress, also while it runs",
    "[cyan]howsmooth study sweep.toml --resume[/]  continue, and retry failed measurements",
    "[cyan]howsmooth study sweep.toml --executor dask --scheduler tcp://10.0.0.1:8786[/]  on a cluster",
    "[cyan]howsmooth study --merge a-out b-out --out all[/]  merge the stores of two machines",
    "A failed measurement is recorded, the others continue, and the exit code is 3.",
)


@command(*_EXAMPLES)
def study(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN.toml",
            help="A plan file; with --merge, folders of studies; with --status, a plan file or a folder.",
            show_default=False,
        ),
    ],
    execution: Annotated[dict[str, Any], Execution],
    shown: MeasurementShown,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue a study in a folder that already holds measurements."),
    ] = False,
    status: Annotated[
        bool,
        typer.Option("--status", help="Only show how many measurements are planned, done, failed and left."),
    ] = False,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Only merge the measurements of several folders into --out."),
    ] = False,
) -> int:
    """Run a study that a plan file describes."""
    if merge:
        if resume or status or shown.dry_run:
            raise ArgumentError(
                "merge",
                expected="--merge without --resume, --status and --dry-run",
                got="--merge with one of them",
            )
        return _merge(paths, execution.get("out"), shown)
    if len(paths) != 1:
        raise ArgumentError(
            "plan", expected="one plan file", got=str(len(paths)), remedy="Add --merge to merge studies."
        )
    if shown.dry_run and status:
        raise ArgumentError("dry-run", expected="--dry-run without --status", got="both")
    if status and not paths[0].is_file():
        return _tell_status(None, paths[0], shown)
    # Options of output and workers on the command line replace those in the file.
    plan, how = read_plan(paths[0], **execution)
    use_threads(how.threads)
    if shown.dry_run:
        return tell_forecast(plan, how, shown, keep_going=True)
    if status:
        return _tell_status(plan, how.out, shown)
    if not resume:
        _refuse_kept(how.out)
    again = as_typed() if resume else as_typed("--resume")
    return carry_out(plan, how, shown, again=again, keep_going=True)


def _refuse_kept(out: Path) -> None:
    """Refuse a folder that holds measurements, because only the option ``--resume`` continues them."""
    from howsmooth.study.records import Measurement
    from howsmooth.study.store import Store

    if not Store.exists(out):
        return
    with Store.open(out, write=False) as store:
        held = store.count(Measurement)
    if held:
        raise StoreError(
            f"{out} already holds a study with {held} measurements. Add --resume to continue it, "
            "--status to see its progress, or choose another --out."
        )


def _tell_status(plan: Plan | None, folder: Path, shown: Shown) -> int:
    """Print how many measurements of a plan file, or of the study in a folder, are done and left."""
    from howsmooth.study.input_sequences import open_data
    from howsmooth.study.status import status

    names = [] if plan is None else [open_data(source).record.name for source in plan.sources]
    found = status(folder, plan, names)
    if shown.json:
        typer.echo(json_object(out=folder, **asdict(found)))
    else:
        _show_status(found, folder, of_plan=plan is not None)
    return 0


def _show_status(found: Status, folder: Path, *, of_plan: bool) -> None:
    """Print how many measurements are done and left, whether the study is running, and why measurements
    failed.
    """
    from howsmooth.study.store import STORE_NAME

    rows = []
    for part in found.parts:
        planned, left = (part.planned, part.planned - part.done) if part.planned is not None else ("?", "?")
        names = [readable(part.model), readable(part.text), part.scope]
        failed = "?" if part.failed is None else part.failed
        rows.append([*names, *map(str, (planned, part.done, failed, left))])
    names = ["model", "text", "scope"]
    show_table([*names, "planned", "done", "failed", "left"], rows, wrapped=names)
    say(f"\n{_now(found)}")
    if not of_plan:
        say(
            "How many are planned is in the plan file: howsmooth study PLAN.toml --status, or for howsmooth "
            "measure in its --dry-run."
        )
    elif any(part.planned is None for part in found.parts):
        say(
            "A question mark: the model was not loaded yet or could not be, so its layers are unknown; or "
            "its lengths are those that a model of images has by default."
        )
    if found.reasons:
        say("\nReasons of failures (the next run tries these measurements again):")
        for reason, count in found.reasons[:_MOST_REASONS]:
            times = "once" if count == 1 else f"{count} times"
            say(f"  {times}: {readable(reason, longest=300)}")
        if len(found.reasons) > _MOST_REASONS:
            say(f"  and {len(found.reasons) - _MOST_REASONS} other reasons")
    say(f"\nStore: {folder / STORE_NAME}")


def _now(found: Status) -> str:
    if found.running:
        words = f"Running since {found.started}" if found.started else "Running, nothing measured yet"
    elif found.started is None:
        words = "Not started"
    elif found.finished is None:
        words = f"Not running: the run that started at {found.started} did not finish"
    else:
        words = f"Not running: the run that started at {found.started} ended at {found.finished}"
    left = any(part.planned is None or part.done < part.planned for part in found.parts)
    # The rate so far says little about longer sequences, which the time left takes into account.
    if found.remaining is not None and left:
        words += f"; about {duration(found.remaining)} left"
    elif found.rate is not None:
        words += f"; {found.rate:.3g} measurements a second"
    if left:
        return f"{words}."
    more = "" if found.finished else " Bounds, tables, figures or the report are left."
    return f"{words}. All measurements are done.{more}"


def _merge(paths: list[Path], out: Path | None, shown: MeasurementShown) -> int:
    from howsmooth.study.measurement_outputs import write_outputs
    from howsmooth.study.merge import merge_stores

    if out is None:
        raise ArgumentError("out", expected="a folder for the merged study", got="none", remedy="Add --out.")
    with shown_progress(quiet=shown.quiet) as display:
        display.phase(f"Merging {len(paths)} studies")
        merged = merge_stores(paths, out)
        display.phase(shown.last_phase)
        written = write_outputs(out, display, figures=not shown.no_figures, parquet=shown.parquet)
    if shown.json:
        typer.echo(json_object(out=out, **asdict(merged)))
    elif not shown.quiet:
        say(
            f"{merged.added} measurements were added, {merged.same} were already there. The store now holds "
            f"{merged.total} measurements and {merged.failures} unresolved failures."
        )
        if merged.published:
            say(f"{merged.published} values of the paper's published code were added.")
        say(f"Report: {written.report}")
    return 0
