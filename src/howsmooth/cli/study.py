"""``howsmooth study``: carry out a plan file, say how far it is, and merge the stores of several machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from howsmooth.cli.carrying import carry_out
from howsmooth.cli.forecast import DryRunOption, tell_forecast
from howsmooth.cli.options import JsonOption, QuietOption, as_typed, command, refuse_workers, use_threads
from howsmooth.cli.progress import shown_progress
from howsmooth.errors import ArgumentError, StoreError
from howsmooth.study.names import encodable
from howsmooth.study.plan import Execution

if TYPE_CHECKING:
    from howsmooth.study.plan_file import Study

__all__ = ["study"]

_EXAMPLES = (
    "A plan names models, texts, lengths, samples, scopes, layers and heads; the guide explains its keys. "
    "What is typed comes before what it says; its folder is that of the plan where --out says no other.",
    "Examples:",
    "[cyan]howsmooth study sweep.toml[/]  begin",
    "[cyan]howsmooth study sweep.toml --dry-run[/]  how long it would take",
    "[cyan]howsmooth study sweep.toml --status[/]  how far it is, also while it runs",
    "[cyan]howsmooth study sweep.toml --resume[/]  go on, and try again what failed",
    "[cyan]howsmooth study sweep.toml --executor dask --scheduler tcp://10.0.0.1:8786[/]  on a cluster",
    "[cyan]howsmooth study --merge a-out b-out --out all[/]  put the stores of two machines together",
    "What fails is recorded and stops nothing else; the exit code is 3 then.",
)


@command(*_EXAMPLES)
def study(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN.toml", help="A plan file; with --merge, folders of studies.", show_default=False
        ),
    ],
    execution: Annotated[dict[str, Any], Execution],
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue in a folder that holds measurements; without it, that is refused."
        ),
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Measure nothing: say what is planned, done, failed and left.")
    ] = False,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Measure nothing: put the measurements of several folders into --out."),
    ] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Carry out a study that is written down in a plan file."""
    idle = "--merge" if merge else "--dry-run" if dry_run else "--status" if status else ""
    if idle:
        refuse_workers(execution.get("executor"), idle)
    if merge:
        if resume or status or dry_run:
            raise ArgumentError("merge", expected="--merge alone", got="it with another of these options")
        return _merge(paths, execution.get("out"), as_json=json, quiet=quiet)
    if len(paths) != 1:
        raise ArgumentError(
            "plan", expected="one plan file", got=str(len(paths)), remedy="Several stores need --merge."
        )
    if dry_run and status:
        raise ArgumentError("dry-run", expected="--dry-run alone", got="it with --status")
    asked = _asked(paths[0], execution)
    if dry_run:
        tell_forecast(asked.plan, asked.execution, as_json=json, quiet=quiet, keep_going=True)
        return 0
    if status:
        return _status(asked, as_json=json)
    return _carry_out(asked, resume=resume, as_json=json, quiet=quiet)


def _asked(path: Path, typed: dict[str, Any]) -> Study:
    """Read a plan file; what was typed comes before what it says of the execution."""
    from howsmooth.study.plan_file import read_plan

    asked = read_plan(path)
    execution = replace(asked.execution, **typed)
    use_threads(execution.threads)
    return replace(asked, execution=execution)


def _carry_out(asked: Study, *, resume: bool, as_json: bool, quiet: bool) -> int:
    from howsmooth.study.store import Store

    out = asked.execution.out
    if not resume and Store.exists(out):
        raise StoreError(
            f"{out} holds a study already. Add --resume to continue it, --status to see how far it is, "
            "or choose another --out."
        )
    again = as_typed() if resume else as_typed("--resume")
    return carry_out(asked.plan, asked.execution, again=again, keep_going=True, as_json=as_json, quiet=quiet)


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


def _merge(paths: list[Path], out: Path | None, *, as_json: bool, quiet: bool) -> int:
    from howsmooth.cli.study_result import merged_as_json, show_merged
    from howsmooth.study.merge import merge_stores
    from howsmooth.study.publish import publish

    if out is None:
        raise ArgumentError("out", expected="a folder for the merged study", got="none", remedy="Add --out.")
    with shown_progress(quiet=quiet) as display:
        display.phase(f"Merging {len(paths)} studies")
        merged = merge_stores(paths, out)
        display.phase("Drawing figures")
        written = publish(out, display).report
    if as_json:
        typer.echo(merged_as_json(merged, out))
    elif not quiet:
        show_merged(merged, written)
    return 0
