"""How far a study is, and what a merge did, for people and for machines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from howsmooth.cli.printing import as_json, say, show_table
from howsmooth.cli.progress import duration
from howsmooth.study.merge import Merged
from howsmooth.study.names import readable
from howsmooth.study.status import Status
from howsmooth.study.store import STORE_NAME

__all__ = ["merged_as_json", "show_merged", "show_status", "status_as_json"]

_MOST_REASONS = 5


def status_as_json(found: Status, folder: Path) -> str:
    """Describe the status as one JSON object."""
    return as_json(out=folder, **asdict(found))


def show_status(found: Status, folder: Path) -> None:
    """Print a table, then what is going on and why something failed."""
    rows = []
    for part in found.parts:
        planned, left = (part.planned, part.planned - part.done) if part.planned is not None else ("?", "?")
        names = [readable(part.model), readable(part.text), part.scope]
        rows.append([*names, *map(str, (planned, part.done, part.failed, left))])
    names = ["model", "text", "scope"]
    show_table([*names, "planned", "done", "failed", "left"], rows, wrapped=names)
    say(f"\n{_now(found)}")
    if any(part.planned is None for part in found.parts):
        say("A model with ? has not been loaded yet, so that its layers are not known.")
    if found.reasons:
        say("\nFailed, and tried again by the next run:")
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
        words = "Not begun"
    elif found.finished is None:
        words = f"Not running: the run of {found.started} was interrupted"
    else:
        words = f"Not running: the run of {found.started} ended at {found.finished}"
    left = any(part.planned is None or part.done < part.planned for part in found.parts)
    if found.rate is not None:
        words += f"; {found.rate:.3g} measurements a second"
    if found.remaining is not None and left:
        words += f", about {duration(found.remaining)} left"
    return f"{words}." if left else f"{words}. All is measured."


def merged_as_json(merged: Merged, folder: Path) -> str:
    """Describe the merge as one JSON object."""
    return as_json(out=folder, **asdict(merged))


def show_merged(merged: Merged, written: Path) -> None:
    """Print what was added, and where the report is."""
    say(
        f"{merged.added} measurements added, {merged.same} were there already; {merged.total} in the store, "
        f"{merged.failures} failures not made good."
    )
    if merged.published:
        say(f"{merged.published} published values added.")
    say(f"Report: {written}")
