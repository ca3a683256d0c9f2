"""The command ``howsmooth study``: run a plan file, show its status, or merge stores of several machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from howsmooth.cli.dry_run import DryRunOption, tell_forecast
from howsmooth.cli.plan_execution import carry_out
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.typer_command import (
    JsonOption,
    NoFiguresOption,
    QuietOption,
    as_typed,
    command,
    refuse_workers,
    use_threads,
)
from howsmooth.errors import ArgumentError, StoreError
from howsmooth.study.execution_options import Execution
from howsmooth.study.text_formatting import encodable

if TYPE_CHECKING:
    from howsmooth.study.plan_file import Study

__all__ = ["study"]

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
    dry_run: DryRunOption = False,
    no_figures: NoFiguresOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Run a study that a plan file describes."""
    idle = "--merge" if merge else "--dry-run" if dry_run else "--status" if status else ""
    if idle:
        refuse_workers(execution.get("executor"), idle)
    if merge:
        if resume or status or dry_run:
            raise ArgumentError(
                "merge",
                expected="--merge without --resume, --status and --dry-run",
                got="--merge with one of them",
            )
        return _merge(paths, execution.get("out"), figures=not no_figures, as_json=json, quiet=quiet)
    if len(paths) != 1:
        raise ArgumentError(
            "plan", expected="one plan file", got=str(len(paths)), remedy="Add --merge to merge studies."
        )
    if dry_run and status:
        raise ArgumentError("dry-run", expected="--dry-run without --status", got="both")
    if status and paths[0].is_dir():
        return _status_of_folder(paths[0], as_json=json)
    asked = _read_plan_file(paths[0], execution)
    if dry_run:
        return tell_forecast(asked.plan, asked.execution, as_json=json, quiet=quiet, keep_going=True)
    if status:
        return _status(asked, as_json=json)
    return _carry_out(asked, resume=resume, figures=not no_figures, as_json=json, quiet=quiet)


def _read_plan_file(path: Path, typed: dict[str, Any]) -> Study:
    """Read a plan file; options of output and workers on the command line replace those in the file."""
    from howsmooth.study.plan_file import read_plan

    asked = read_plan(path, **typed)
    use_threads(asked.execution.threads)
    return asked


def _carry_out(asked: Study, *, resume: bool, figures: bool, as_json: bool, quiet: bool) -> int:
    from howsmooth.study.records import Measurement
    from howsmooth.study.store import Store

    out = asked.execution.out
    if not resume and Store.exists(out):
        with Store.open(out, write=False) as store:
            held = store.count(Measurement)
        if held:
            raise StoreError(
                f"{out} already holds a study with {held} measurements. Add --resume to continue it, "
                "--status to see its progress, or choose another --out."
            )
    again = as_typed() if resume else as_typed("--resume")
    shown = {"figures": figures, "as_json": as_json, "quiet": quiet}
    return carry_out(asked.plan, asked.execution, again=again, keep_going=True, **shown)


def _status(asked: Study, *, as_json: bool) -> int:
    from howsmooth.cli.study_result import show_status, status_as_json
    from howsmooth.study.status import status as compare
    from howsmooth.texts import load_text

    folder = asked.execution.out
    texts = [encodable(load_text(name).name) for name in asked.plan.texts]
    found = compare(asked.plan, texts, folder)
    if as_json:
        typer.echo(status_as_json(found, folder))
    else:
        show_status(found, folder)
    return 0


def _status_of_folder(folder: Path, *, as_json: bool) -> int:
    from howsmooth.cli.study_result import show_status, status_as_json
    from howsmooth.study.status import status_of_folder

    found = status_of_folder(folder)
    if as_json:
        typer.echo(status_as_json(found, folder))
    else:
        show_status(found, folder, of_plan=False)
    return 0


def _merge(paths: list[Path], out: Path | None, *, figures: bool, as_json: bool, quiet: bool) -> int:
    from howsmooth.cli.study_result import merged_as_json, show_merged
    from howsmooth.study.measurement_outputs import write_outputs
    from howsmooth.study.merge import merge_stores

    if out is None:
        raise ArgumentError("out", expected="a folder for the merged study", got="none", remedy="Add --out.")
    with shown_progress(quiet=quiet) as display:
        display.phase(f"Merging {len(paths)} studies")
        merged = merge_stores(paths, out)
        display.phase("Drawing figures" if figures else "Writing tables")
        written = write_outputs(out, display, figures=figures).report
    if as_json:
        typer.echo(merged_as_json(merged, out))
    elif not quiet:
        show_merged(merged, written)
    return 0
