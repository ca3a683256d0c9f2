"""Carry out experiments, one after the other, and write their page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from howsmooth.errors import ArgumentError, HowsmoothError, StoreError
from howsmooth.reproduce.experiment import Experiment, OnStep, Request
from howsmooth.reproduce.finding import Finding
from howsmooth.reproduce.loading import remembering
from howsmooth.reproduce.page import PAGE, Section, render, table_name
from howsmooth.reproduce.registry import EXPERIMENTS
from howsmooth.study.environment import environment
from howsmooth.study.publish import write_table
from howsmooth.study.tools import Tools

__all__ = ["Produced", "choose_experiments", "produce"]


@dataclass(frozen=True, eq=False)
class Produced:
    """What was made.

    Attributes
    ----------
    sections
        Those of the page, in the order of the paper: those asked for, and those that the folder held.
    page
        Its file.
    seconds
        By experiment, of those that were carried out now.
    refused
        Those that could not be made, with the reason.

    """

    sections: list[Section]
    page: Path
    seconds: dict[str, float]
    refused: dict[str, str]


def choose_experiments(names: Sequence[str]) -> list[Experiment]:
    """Find experiments by name, in the order of the paper; all of them if none is named.

    Raises
    ------
    ArgumentError
        If there is none of a name.

    """
    known = {one.name: one for one in EXPERIMENTS}
    for name in names:
        if name not in known:
            raise ArgumentError("figure", expected=f"one of {', '.join(known)}", got=repr(name))
    return [one for one in EXPERIMENTS if not names or one.name in names]


def produce(
    chosen: Sequence[Experiment],
    request: Request,
    folder: Path,
    tools: Tools,
    *,
    on_phase: Callable[[str], None] = lambda words: None,
    on_step: OnStep = lambda step: None,
) -> Produced:
    """Measure what is missing, draw, and write the page.

    Parameters
    ----------
    chosen
        What to carry out.
    request
        What is asked of each.
    folder
        Each experiment has a folder in it, by its name; the page lies beside them.
    tools
        What to measure with.
    on_phase, on_step
        Told what begins, and how far it is.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If nothing of what was chosen can be made: the reason of the first. What is refused beside others is
        in the result, and on the page.

    """
    tools = remembering(tools)
    seconds: dict[str, float] = {}
    findings: dict[str, Finding] = {}
    refused: dict[str, str] = {}
    first: HowsmoothError | None = None
    for one in chosen:
        began = time.perf_counter()
        on_phase(f"{one.paper}: {one.title}")
        try:
            one.measure(request, folder / one.name, tools, on_step)
            findings[one.name] = _drawn(one, folder)
        except HowsmoothError as error:
            first = first or error
            refused[one.name] = " ".join(str(error).split())
        seconds[one.name] = time.perf_counter() - began
    if first is not None and not findings:
        raise first
    on_phase("Writing the page")
    names = {one.name for one in chosen}
    for one in EXPERIMENTS:
        # What an earlier command made stays on the page.
        if one.name not in names and (folder / one.name).is_dir():
            try:
                findings[one.name] = _drawn(one, folder)
            except StoreError:  # begun and not finished
                continue
    sections = [
        Section(one.name, one.title, one.paper, one.about, findings.get(one.name), refused.get(one.name, ""))
        for one in EXPERIMENTS
        if one.name in findings or one.name in refused
    ]
    page = folder / PAGE
    content = render(folder, sections, request.command, environment(request.device))
    try:
        partial = page.with_name(f".{PAGE}.partial")
        partial.write_text(content, encoding="utf-8", errors="backslashreplace", newline="\n")
        partial.replace(page)
    except OSError as error:
        raise StoreError(
            f"{page} cannot be written: {error.strerror}. What was measured is kept; make room or make it "
            "writable, and run the same command again."
        ) from error
    return Produced(sections, page, seconds, refused)


def _drawn(one: Experiment, folder: Path) -> Finding:
    finding = one.draw(folder / one.name)
    for number, (_, table) in enumerate(finding.tables):
        write_table(table, folder / one.name, table_name(number))
    return finding
