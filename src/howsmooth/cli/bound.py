"""The command ``howsmooth bound``. It computes all bounds that apply to the attention of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import amount, as_json, heading, paragraph, say, show_table
from howsmooth.cli.typer_command import Shown, command
from howsmooth.study.execution_options import Threads
from howsmooth.study.options import Folder, options
from howsmooth.study.plans import BoundPlan
from howsmooth.words import readable

if TYPE_CHECKING:
    import pandas as pd

    from howsmooth.study.attention_sources import AttentionSource
    from howsmooth.study.bound_run import Bounded

__all__ = ["bound"]

_EXAMPLES = (
    "Print one table for each attention. It lists bounds on the local constant at the tokens of the input, "
    "beside the measured constant, and bounds over all sequences of n tokens in the ball of radius R.",
    "Examples:",
    "[cyan]howsmooth bound builtin-encoder --layers 0[/]  the first layer, with all heads",
    "[cyan]howsmooth bound builtin-decoder --scope head --heads 0,1 --lengths 16,64[/]  two heads",
    "[cyan]howsmooth bound ./my-llama --tokens ids.npy --layers -1[/]  token ids instead of a text",
    "[cyan]howsmooth bound gpt2 --random-init --layers 6 --json[/]  JSON for another program",
    "[cyan]howsmooth bound builtin-encoder --layers 0 --lengths 12 --search[/]  also the worst tokens found",
    "Parameters of your own are bounded in Python, by howsmooth.bounds.table.",
)


@options
class BoundShown(Shown):
    """The options for showing progress and the result, and for writing the result."""

    out: Annotated[
        Folder | None,
        "Also write bounds.csv into this folder; with --search also the worst tokens, worst.npz.",
    ] = None
    threads: Threads = None


@command(*_EXAMPLES)
def bound(plan: BoundPlan, shown: BoundShown) -> int:
    """Compare every available bound on the Lipschitz constant of attention with the measured constant."""
    from howsmooth.files import write_table
    from howsmooth.study.attention_sources import AttentionSource
    from howsmooth.study.bound_run import bound_all, bounds_frame, write_worst

    out = shown.out
    with shown_progress(quiet=shown.quiet) as display:
        display.phase("Reading")
        source = AttentionSource(plan)
        display.phase("Bounding")
        bounded = list(bound_all(plan, source, display))
    written = None if out is None else write_table(bounds_frame(source.label, bounded), out, "bounds.csv")
    tokens = None if out is None or not plan.search else write_worst(bounded, out)
    if shown.json:
        typer.echo(_as_json(source, bounded, written, tokens))
    else:
        _show(source, bounded)
        if written is not None:
            say(f"\nWritten: {written}" + ("" if tokens is None else f", {tokens.name}"))
    return 0


def _as_json(
    source: AttentionSource, bounded: Sequence[Bounded], written: Path | None, tokens: Path | None
) -> str:
    from howsmooth.study.records import plain_rows

    def taken(one: object, *names: str) -> dict[str, Any]:
        return {name: getattr(one, name) for name in names}

    attentions, found = [], []
    for one in bounded:
        rows = one.rows.reset_index().assign(log_value=one.rows.attrs["log_values"])
        ball = {"n": one.n, "radius": one.ball.radius}
        attention = taken(one.target, "layer", "head", "scope", "masking") | ball
        attentions.append(attention | {"radius_from": one.ball.origin, "bounds": plain_rows(rows)})
        if one.worst is not None:
            most = taken(one.worst.estimate, "value", "lower", "upper", "confidence", "converged")
            found.append(taken(one.target, "layer", "head") | ball | most | {"by": one.worst.by})
    return as_json(
        source=source.label,
        **taken(source, "description", "text", "fingerprint"),
        attentions=attentions,
        file=written,
        **({"found": found, "tokens": tokens} if found else {}),
    )


def _show(source: AttentionSource, bounded: Sequence[Bounded]) -> None:
    """Print tables of the bounds on each attention, with its measured constant."""
    from howsmooth.study.bound_run import LOCAL

    sources: list[str] = []
    for one in bounded:
        where = f"{readable(source.label)}, {one.target.place}, scope {one.target.scope}"
        masking = "unmasked" if one.target.masking == "none" else one.target.masking
        heading(f"\n{where}, {masking}, n = {one.n}, R = {one.ball.radius:.4g} ({one.ball.origin})")
        rows, value, than = one.rows.assign(log=one.rows.attrs["log_values"]), None, "measured"
        here, is_measured = rows.index == LOCAL, (rows["name"] == "measured").to_numpy()
        if len(measured := rows[is_measured]):
            value = float(measured["value"].min())
            said = f"measured {_ends(value, float(measured['value'].max()))}"
            paragraph(f"\n  At the tokens of the input: {said} ({measured['source'].iloc[0]})")
            if len(local := rows[here & ~is_measured]):
                _show_bounds(local, value, sources)
        if here.all():
            continue
        paragraph(f"\n  For all n tokens of norm at most R = {one.ball.radius:.4g}:")
        if one.worst is not None:
            value, than = one.worst.lower, "found"
            status = "" if one.worst.estimate.converged else ", not converged"
            ends = _ends(value, float(one.worst.estimate.upper))
            paragraph(f"  The largest constant found: {ends} (by {one.worst.by}{status})")
        elif (longest := one.longest_outside) is not None:
            value = None
            outside = f"the longest token has norm {longest:.4g}, outside of this ball"
            paragraph(f"  The measured constant is not compared: {outside}.")
        _show_bounds(rows[~here], value, sources, than)
    if sources:
        heading("\nSources; titles in quotation marks are pages of the documentation of howsmooth")
        show_table(["", " "], [[f"[{i}]", source] for i, source in enumerate(sources, 1)], left=[" "])


def _ends(low: float, high: float) -> str:
    from howsmooth.rounding import limit_in_digits

    ends = limit_in_digits(low, 6, upper=False), limit_in_digits(high, 6, upper=True)
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _limit(row: dict[str, Any]) -> str:
    from howsmooth.rounding import limit_in_digits

    value, upper = row["value"], row["side"] == "upper"
    if value is None or not math.isfinite(value) or value == 0:
        return amount(row["log"], upper=upper)
    return limit_in_digits(value, 5, upper=upper)


def _show_bounds(
    rows: pd.DataFrame, constant: float | None, sources: list[str], than: str = "measured"
) -> None:
    """Print a table of bounds and their ratios to a constant, and add their sources to ``sources``."""
    from howsmooth.study.records import plain_rows

    table = []
    # Bounds whose hypotheses fail stand at the end, with the hypotheses that fail.
    for row in sorted(plain_rows(rows), key=lambda row: not row["holds"]):
        holds, origin = row["holds"], row["source"].removeprefix("howsmooth documentation, ")
        if origin not in sources:
            sources.append(origin)
        ratio = amount(row["log"] - math.log(constant), 3) if constant and holds else ""
        cells = [
            row["name"],
            "≤" if row["side"] == "upper" else "≥",
            _limit(row) if holds else "not valid",
            *([ratio] if constant else []),
            f"[{sources.index(origin) + 1}]",
        ]
        table.append([Text(cell, "" if holds else "dim") for cell in cells])
    names = ["bound", "", "value", *([f"÷ {than}"] if constant else []), "source"]
    show_table(names, table, left=["bound", "", "source"])
