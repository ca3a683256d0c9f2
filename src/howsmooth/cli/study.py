"""``howsmooth study``: carry out a plan file, say how far it is, and merge the stores of several machines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from howsmooth.cli.measure import TYPED
from howsmooth.cli.options import JsonOption, QuietOption, under
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
    "[cyan]howsmooth study sweep.toml --status[/]  how far it is, also while it runs",
    "[cyan]howsmooth study sweep.toml --resume[/]  go on, and try again what failed",
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
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the study. Default: what the plan says.", show_default=False),
    ] = None,
    json: Annotated[bool, under(None, JsonOption)] = False,
    quiet: Annotated[bool, under(None, QuietOption)] = False,
) -> int:
    """Carry out a study that is written down in a plan file."""
    if merge:
        if resume or status:
            raise ArgumentError("merge", expected="--merge alone", got="it with --resume or --status")
        return _merge(paths, out, as_json=json, quiet=quiet)
    if len(paths) != 1:
        raise ArgumentError(
            "plan", expected="one plan file", got=str(len(paths)), remedy="Several stores need --merge."
        )
    if status:
        return _status(paths[0], out, as_json=json)
    return _carry_out(paths[0], out, resume=resume, as_json=json, quiet=quiet)


def _carry_out(path: Path, out: Path | None, *, resume: bool, as_json: bool, quiet: bool) -> int:
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
            display.phase("Reading texts and models")
            # First, as items that apply to no model are to be refused before anything is measured.
            values = _as_published(asked, folder, command, watch)
            watch = Watch(display, again)
            outcome = run(
                asked.plan, folder, default_tools(), command=command, keep_going=True, on_progress=watch
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


def _as_published(asked: Study, folder: Path, command: str, watch: Watch) -> Outcome | None:
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
    )


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
