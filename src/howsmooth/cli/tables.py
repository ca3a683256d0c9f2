"""Bounds and attacks for people and for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from howsmooth.cli.result import package_version, records
from howsmooth.study.attack_tables import PublishedAttacks
from howsmooth.study.bounding import LOCAL, Bounded
from howsmooth.study.exponents import LEVEL
from howsmooth.study.names import decimal, encodable, mask_in_words, place_in_words, readable
from howsmooth.study.progress import Outcome
from howsmooth.study.records import Attack
from howsmooth.study.sources import Source
from howsmooth.study.store import STORE_NAME

__all__ = ["amount", "attacks_as_json", "bounds_as_json", "show_attacks", "show_bounds"]

_MEASURED = "measured"


def bounds_as_json(source: Source, bounded: Sequence[Bounded], written: Path | None) -> str:
    """Describe the bounds as one JSON object; what overflows or is trivial is null, with its logarithm."""
    described = {
        "howsmooth": package_version(),
        "source": source.label,
        "description": source.description,
        "text": source.text or None,
        "fingerprint": source.fingerprint,
        "attentions": [_described(one) for one in bounded],
        "file": None if written is None else str(written),
    }
    return json.dumps(described, indent=2, allow_nan=False)


def _described(one: Bounded) -> dict[str, Any]:
    logs = one.rows.attrs["log_values"]
    rows = records(one.rows.reset_index())
    return {
        "layer": one.target.layer,
        "head": one.target.head,
        "scope": one.target.scope,
        "masking": one.target.masking,
        "n": one.n,
        "radius": one.ball.radius,
        "radius_from": one.ball.origin,
        "bounds": [
            row | {"log_value": log if math.isfinite(log) else None}
            for row, log in zip(rows, logs, strict=True)
        ],
    }


def show_bounds(source: Source, bounded: Sequence[Bounded], written: Path | None) -> None:
    """Print a table for each attention, measured constants first."""
    console = Console()
    for one in bounded:
        words = f"{readable(source.label)}, {one.target.place}, scope {one.target.scope}"
        masking = mask_in_words(one.target.masking)
        console.print(
            Text(f"\n{words}, {masking}, n = {one.n}, R = {one.ball.radius:.4g} ({one.ball.origin})", "bold")
        )
        for title, table in _tables(one):
            console.print(Padding(Text(title), (1, 0, 0, 2), expand=False))
            console.print(Padding(table, (0, 0, 0, 2), expand=False))
    if written is not None:
        print(encodable(f"\nWritten: {written}"))


def _tables(one: Bounded) -> Iterator[tuple[str, Table]]:
    rows, logs = one.rows, pd.Series(one.rows.attrs["log_values"])
    local = (rows.index == LOCAL) & (rows["name"] != _MEASURED).to_numpy()
    measured = rows[(rows["name"] == _MEASURED).to_numpy()]
    value = float(measured["value"].min()) if len(measured) else None
    if value is not None:
        low, high = float(measured["value"].min()), float(measured["value"].max())
        yield (
            f"At the tokens of {'the text' if one.target.norm is not None else 'X'}: "
            f"measured {_ends(low, high)} ({measured['source'].iloc[0]})",
            _table(rows[local], logs[local], value),
        )
    ball = rows.index != LOCAL
    if ball.any():
        yield (
            f"For all n tokens of norm at most R = {one.ball.radius:.4g}:",
            _table(rows[ball], logs[ball], value),
        )


def _ends(low: float, high: float) -> str:
    ends = f"{low:.6g}", f"{high:.6g}"
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _table(rows: pd.DataFrame, logs: pd.Series, measured: float | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("bound", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    if measured:
        table.add_column("÷ measured", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    pairs = list(zip(records(rows), logs, strict=True))
    # What does not hold is told last, with what it lacks.
    for row, log in sorted(pairs, key=lambda pair: not pair[0]["holds"]):
        holds, origin = row["holds"], row["source"]
        ratio = amount(log - math.log(measured), 3) if measured and holds else ""
        cells = [
            row["name"],
            "≤" if row["side"] == "upper" else "≥",
            amount(log) if holds else "not valid",
            *([ratio] if measured else []),
            origin if holds else origin.partition(" (needs: ")[2].removesuffix(")").join(("needs: ", "")),
        ]
        table.add_row(*(Text(cell, "" if holds else "dim") for cell in cells))
    return table


def attacks_as_json(published: PublishedAttacks, outcome: Outcome, folder: Path) -> str:
    """Describe what was found as one JSON object; what overflows is null, with its logarithm."""
    described = {
        "howsmooth": package_version(),
        "out": str(folder),
        "seconds": round(outcome.seconds, 3),
        "attacked": outcome.made[Attack.table],
        "kept": outcome.kept[Attack.table],
        **published.identity,
        "attacks": records(published.summary),
        "exponents": records(published.exponents),
        "exponent_confidence": LEVEL,
        "heads": records(published.heads),
        "files": {
            "store": str(folder / STORE_NAME),
            **{name: str(path) for name, path in published.files.items()},
            "figures": [str(path) for figure in published.figures for path in figure],
        },
    }
    return json.dumps(described, indent=2, allow_nan=False)


def show_attacks(published: PublishedAttacks, outcome: Outcome, folder: Path) -> None:
    """Print the constants found, a table for each attention, with its exponent, and where everything is."""
    console = Console()
    label = readable(str(published.identity.get("source", "")))
    place = itemgetter("layer", "head")
    fits = [row for row in records(published.exponents) if not row["note"]]
    for (layer, head), family in groupby(records(published.summary), key=place):
        rows = list(family)
        where, masking = place_in_words(layer, head), mask_in_words(rows[0]["masking"])
        words = f"{label}, {where}, scope {rows[0]['scope']}, {masking}, R = {rows[0]['radius']:.4g}"
        console.print(Text(f"\n{words}", "bold"))
        console.print(Padding(_attack_table(rows), (0, 0, 0, 2), expand=False))
        growth = [
            f"{row['series']} like n^{decimal(row['slope'], 2)} "
            f"[{decimal(row['low'], 2)}, {decimal(row['high'], 2)}]"
            for row in fits
            if place(row) == (layer, head)
        ]
        if growth:
            console.print(Text(f"  growth: {'; '.join(growth)}"))
    words = f"\n{outcome.made[Attack.table]} attacks made in {outcome.seconds:.1f} s"
    words += f", {outcome.kept[Attack.table]} were there already" if outcome.kept[Attack.table] else ""
    console.print(Text(f"{words}."))
    # Not through rich, which would break a long path in two.
    print(encodable(f"Tables: {published.files['summary']}, attacks.csv, exponents.csv, heads.csv"))
    print(encodable(f"Also in {folder}: {STORE_NAME}, figures/, and the tokens found in inputs/"))


def _attack_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("n", "given tokens", "paper", "found", "by", "÷ paper", "upper bound", "by", "reached"):
        table.add_column(name, justify="left" if name == "by" else "right", no_wrap=name != "by")
    for row in rows:
        share = row["found_to_upper"]
        table.add_row(
            str(row["n"]),
            _number(row["tokens"]),
            _number(row["paper"]),
            _number(row["found"]) + ("" if row["converged"] else " ?"),
            row["found_by"],
            _number(row["found_to_paper"], 3),
            "" if row["log_upper"] is None else amount(row["log_upper"], 4),
            row["upper_by"],
            "" if share is None else f"{100 * share:.3g} %",
        )
    return table


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def amount(log: float, digits: int = 5) -> str:
    """Write the number with this natural logarithm, however large."""
    if log == -math.inf:
        return "0"
    if log == math.inf:
        return "inf"
    if abs(log) < 600:
        return f"{math.exp(log):.{digits}g}"
    power = math.floor(log / math.log(10))
    return f"{math.exp(log - power * math.log(10)):.{digits}g}e{power:+d}"
