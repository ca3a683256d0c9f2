"""Print the status of a study, and the result of a merge, as tables or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from howsmooth.cli.terminal_output import as_json, say, show_table
from howsmooth.study.merge import Merged
from howsmooth.study.status import Status
from howsmooth.study.store import STORE_NAME
from howsmooth.study.text_formatting import duration, readable

__all__ = ["merged_as_json", "show_merged", "show_status", "status_as_json"]

_MOST_REASONS = 5


def status_as_json(found: Status, folder: Path) -> str:
    """Return the progress of a study as one JSON object."""
    return as_json(out=folder, **asdict(found))


def show_status(found: Status, folder: Path, *, of_plan: bool = True) -> None:
    """Print how many measurements of a study are done and left, whether it runs, and reasons of failures.

    ``of_plan`` says whether the status is that of a plan.
    """
    rows = []
    for part in found.parts:
        planned, left = (part.planned, part.planned - part.done) if part.planned is not None else ("?", "?")
        names = [readable(part.model), readable(part.text), part.scope]
        rows.append([*names, *map(str, (planned, part.done, part.failed, left))])
    names = ["model", "text", "scope"]
    show_table([*names, "planned", "done", "failed", "left"], rows, wrapped=names)
    say(f"\n{_now(found)}")
    if not of_plan:
        say("How many are planned is in the plan file: howsmooth study PLAN.toml --status")
    elif any(part.planned is None for part in found.parts):
        say("A question mark: the model was not loaded yet or could not be, so its layers are unknown.")
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
        words = f"Not running: the run that started at {found.started} was interrupted"
    else:
        words = f"Not running: the run that started at {found.started} ended at {found.finished}"
    left = any(part.planned is None or part.done < part.planned for part in found.parts)
    if found.rate is not None:
        words += f"; {found.rate:.3g} measurements a second"
    if found.remaining is not None and left:
        words += f", about {duration(found.remaining)} left"
    return f"{words}." if left else f"{words}. All measurements are done."


def merged_as_json(merged: Merged, folder: Path) -> str:
    """Return the numbers of rows that a merge of stores added or found already there, as a JSON object."""
    return as_json(out=folder, **asdict(merged))


def show_merged(merged: Merged, written: Path) -> None:
    """Print how many measurements a merge of stores added, and the path of the report."""
    say(
        f"{merged.added} measurements were added, {merged.same} were already there. The store now holds "
        f"{merged.total} measurements and {merged.failures} unresolved failures."
    )
    if merged.published:
        say(f"{merged.published} values of the paper's published code were added.")
    say(f"Report: {written}")
