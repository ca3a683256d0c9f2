"""``howsmooth study``: carry out a plan file, say how far it is, and merge the stores of several machines."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from concurrent.futures import Executor as Pool
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from howsmooth.cli.forecast import CalibrateOption, DryRunOption, check_calibrate, tell_forecast
from howsmooth.cli.measure import TYPED
from howsmooth.cli.options import (
    Executor,
    ExecutorOption,
    JsonOption,
    QuietOption,
    SchedulerOption,
    WorkersOption,
    refuse_workers,
    under,
)
from howsmooth.cli.progress import choose
from howsmooth.cli.watch import INTERRUPTED, Watch
from howsmooth.errors import ArgumentError, StoreError
from howsmooth.study.names import encodable, readable

if TYPE_CHECKING:
    from howsmooth.study.plan_file import Study
    from howsmooth.study.progress import Outcome

__all__ = ["FAILED", "study"]

FAILED = 3
"""The exit code if something of the plan failed and the rest was measured."""

_EXAMPLES = (
    "A plan names models, texts, lengths, samples, scopes, layers and heads; the guide explains its keys.",
    "Examples:",
    "[cyan]howsmooth study sweep.toml[/]  begin",
    "[cyan]howsmooth study sweep.toml --dry-run[/]  how long it would take",
    "[cyan]howsmooth study sweep.toml --status[/]  how far it is, also while it runs",
    "[cyan]howsmooth study sweep.toml --resume[/]  go on, and try again what failed",
    "[cyan]howsmooth study sweep.toml --executor dask --scheduler tcp://10.0.0.1:8786[/]  on a cluster",
    "[cyan]howsmooth study --merge a-out b-out --out all[/]  put the stores of two machines together",
    "What fails is recorded and stops nothing else; the exit code is 3 then.",
)


def study(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN.toml", help="A plan file; with --merge, folders of studies.", show_default=False
        ),
    ],
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
    dry_run: Annotated[bool, under(None, DryRunOption)] = False,
    calibrate: Annotated[bool, under(None, CalibrateOption)] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the study. Default: what the plan says.", show_default=False),
    ] = None,
    executor: Annotated[Executor | None, under(None, ExecutorOption)] = None,
    workers: Annotated[int | None, under(None, WorkersOption)] = None,
    scheduler: Annotated[str | None, under(None, SchedulerOption)] = None,
    json: Annotated[bool, under(None, JsonOption)] = False,
    quiet: Annotated[bool, under(None, QuietOption)] = False,
) -> int:
    """Carry out a study that is written down in a plan file."""
    idle = "--merge" if merge else "--dry-run" if dry_run else "--status" if status else ""
    if idle:
        refuse_workers(executor, idle)
    if merge:
        if resume or status or dry_run:
            raise ArgumentError("merge", expected="--merge alone", got="it with another of these options")
        return _merge(paths, out, as_json=json, quiet=quiet)
    if len(paths) != 1:
        raise ArgumentError(
            "plan", expected="one plan file", got=str(len(paths)), remedy="Several stores need --merge."
        )
    check_calibrate(calibrate=calibrate, dry_run=dry_run)
    if dry_run:
        if status:
            raise ArgumentError("dry-run", expected="--dry-run alone", got="it with --status")
        return _dry_run(paths[0], out, calibrate=calibrate, as_json=json, quiet=quiet)
    if status:
        return _status(paths[0], out, as_json=json)
    kind = None if executor is None else str(executor)
    return _carry_out(
        paths[0],
        out,
        partial(_opened, kind, workers, scheduler),
        resume=resume,
        as_json=json,
        quiet=quiet,
    )


def _opened(
    kind: str | None, workers: int | None, scheduler: str | None
) -> AbstractContextManager[Pool | None]:
    from howsmooth.study.executors import opened_executor

    return opened_executor(kind, workers=workers, scheduler=scheduler)


def _carry_out(
    path: Path,
    out: Path | None,
    workers: Callable[[], AbstractContextManager[Pool | None]],
    *,
    resume: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    from howsmooth.study.executors import threads_each
    from howsmooth.study.plan_file import read_plan
    from howsmooth.study.store import Store

    asked = read_plan(path)
    folder = out or asked.out
    if not resume and Store.exists(folder):
        raise StoreError(
            f"{folder} holds a study already. Add --resume to continue it, --status to see how far it is, or "
            "choose another --out."
        )
    # Only now what takes seconds to load.
    from howsmooth.cli.parsing import use_threads
    from howsmooth.study.publish import publish
    from howsmooth.study.run import run
    from howsmooth.study.tools import default_tools

    use_threads(asked.threads)
    typed = TYPED.get()
    command = encodable(shlex.join(["howsmooth", *typed]))
    again = command if resume else encodable(shlex.join(["howsmooth", *typed, "--resume"]))
    display = choose(quiet=quiet)
    watch = Watch(display, again)
    try:
        with display:
            with workers() as pool:
                display.phase("Reading texts and models")
                each = threads_each(pool, asked.threads)
                # First, as items that apply to no model are to be refused before anything is measured.
                values = _as_published(asked, folder, command, watch, pool, each)
                watch = Watch(display, again)
                outcome = run(
                    asked.plan,
                    folder,
                    default_tools(),
                    command=command,
                    keep_going=True,
                    on_progress=watch,
                    executor=pool,
                    threads=each,
                )
            watch.finished = outcome
            display.phase("Drawing figures")
            published = publish(
                folder, lambda done, total: display.advance(done / total, 1.0, f"{done} of {total}")
            )
    except KeyboardInterrupt:
        typer.echo(watch.interrupted(folder), err=True)
        return INTERRUPTED
    from howsmooth.cli.result import as_json as written
    from howsmooth.cli.result import show

    if as_json:
        typer.echo(written(asked.plan, outcome, published, folder, values))
    elif not quiet:
        show(asked.plan, outcome, published, folder, values)
    failed = outcome.failed + (values.failed if values else 0)
    if failed:
        first = (values.first_failure if values else "") or outcome.first_failure
        reason = readable(first, longest=300)
        typer.echo(f"{failed} failed, the first because of: {reason} Try again with:\n  {again}", err=True)
        return FAILED
    return 0


def _as_published(
    asked: Study, folder: Path, command: str, watch: Watch, pool: Pool | None, threads: int | None
) -> Outcome | None:
    """Measure the published quantities, if the plan asks for them."""
    if not asked.as_published:
        return None
    from howsmooth.published import parse_items
    from howsmooth.study.published_run import run_as_published
    from howsmooth.study.tools import default_tools

    return run_as_published(
        asked.plan.of_attention,
        parse_items(asked.as_published),
        folder,
        default_tools(),
        command=command,
        keep_going=True,
        on_progress=watch,
        executor=pool,
        threads=threads,
    )


def _dry_run(path: Path, out: Path | None, *, calibrate: bool, as_json: bool, quiet: bool) -> int:
    from howsmooth.cli.parsing import use_threads
    from howsmooth.study.plan_file import read_plan

    asked = read_plan(path)
    use_threads(asked.threads)
    tell_forecast(
        asked.plan,
        out or asked.out,
        calibrate=calibrate,
        as_json=as_json,
        quiet=quiet,
        keep_going=True,
        published=bool(asked.as_published),
    )
    return 0


def _status(path: Path, out: Path | None, *, as_json: bool) -> int:
    from howsmooth.cli.study_result import show_status, status_as_json
    from howsmooth.study.plan_file import read_plan
    from howsmooth.study.status import status as compare
    from howsmooth.texts import load_text

    asked = read_plan(path)
    folder = out or asked.out
    texts = [encodable(load_text(name).name) for name in asked.plan.texts]
    found = compare(asked.plan, texts, folder, asked.as_published)
    if as_json:
        typer.echo(status_as_json(found, folder))
    else:
        show_status(found, folder)
    return 0


def _merge(paths: list[Path], out: Path | None, *, as_json: bool, quiet: bool) -> int:
    from howsmooth.cli.study_result import merged_as_json, show_merged
    from howsmooth.study.merge import merge_stores
    from howsmooth.study.publish import publish
    from howsmooth.study.published_tables import publish_comparison

    if out is None:
        raise ArgumentError("out", expected="a folder for the merged study", got="none", remedy="Add --out.")
    display = choose(quiet=quiet)
    with display:
        display.phase(f"Merging {len(paths)} studies")
        merged = merge_stores(paths, out)
        display.phase("Drawing figures")
        if merged.total:
            told = publish(out, lambda done, total: display.advance(done / total, 1.0, f"{done} of {total}"))
            written = told.report
        else:
            written = publish_comparison(out).exponents_file
    if as_json:
        typer.echo(merged_as_json(merged, out))
    elif not quiet:
        show_merged(merged, written)
    return 0


study.__dict__["examples"] = "\n\n".join(_EXAMPLES)
