"""Bounds and attacks for people and for machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
from rich.text import Text

from howsmooth.cli.printing import amount, as_json, heading, paragraph, say, show_table
from howsmooth.study.attack_tables import PublishedAttacks
from howsmooth.study.bounding import LOCAL, Bounded
from howsmooth.study.exponents import LEVEL
from howsmooth.study.names import decimal, mask_in_words, place_in_words, readable
from howsmooth.study.progress import Outcome
from howsmooth.study.records import Attack, plain_rows
from howsmooth.study.sources import Source
from howsmooth.study.store import STORE_NAME

__all__ = ["attacks_as_json", "bounds_as_json", "show_attacks", "show_bounds"]

_MEASURED = "measured"


def bounds_as_json(source: Source, bounded: Sequence[Bounded], written: Path | None) -> str:
    """Describe the bounds as one JSON object; what overflows or is trivial is null, with its logarithm."""
    return as_json(
        source=source.label,
        description=source.description,
        text=source.text or None,
        fingerprint=source.fingerprint,
        attentions=[_described(one) for one in bounded],
        file=written,
    )


def _described(one: Bounded) -> dict[str, Any]:
    table = one.rows.reset_index().assign(log_value=one.rows.attrs["log_values"])
    return {
        "layer": one.target.layer,
        "head": one.target.head,
        "scope": one.target.scope,
        "masking": one.target.masking,
        "n": one.n,
        "radius": one.ball.radius,
        "radius_from": one.ball.origin,
        "bounds": plain_rows(table),
    }


def show_bounds(source: Source, bounded: Sequence[Bounded], written: Path | None) -> None:
    """Print a table for each attention, measured constants first."""
    for one in bounded:
        where = f"{readable(source.label)}, {one.target.place}, scope {one.target.scope}"
        ball = f"R = {one.ball.radius:.4g} ({one.ball.origin})"
        heading(f"\n{where}, {mask_in_words(one.target.masking)}, n = {one.n}, {ball}")
        rows, logs = one.rows, pd.Series(one.rows.attrs["log_values"])
        is_measured = (rows["name"] == _MEASURED).to_numpy()
        local = (rows.index == LOCAL) & ~is_measured
        measured = rows[is_measured]
        value = float(measured["value"].min()) if len(measured) else None
        if value is not None:
            tokens = "the text" if one.target.norm is not None else "X"
            said = f"measured {_ends(value, float(measured['value'].max()))}"
            paragraph(f"\n  At the tokens of {tokens}: {said} ({measured['source'].iloc[0]})")
            _show_bounds(rows[local], logs[local], value)
        if (rows.index != LOCAL).any():
            paragraph(f"\n  For all n tokens of norm at most R = {one.ball.radius:.4g}:")
            _show_bounds(rows[rows.index != LOCAL], logs[rows.index != LOCAL], value)
    if written is not None:
        say(f"\nWritten: {written}")


def _ends(low: float, high: float) -> str:
    ends = f"{low:.6g}", f"{high:.6g}"
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _show_bounds(rows: pd.DataFrame, logs: pd.Series, measured: float | None) -> None:
    pairs = zip(plain_rows(rows), logs, strict=True)
    table = []
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
        table.append([Text(cell, "" if holds else "dim") for cell in cells])
    names = ["bound", "", "value", *(["÷ measured"] if measured else []), "source"]
    show_table(names, table, left=["bound", ""], wrapped=["source"])


def attacks_as_json(published: PublishedAttacks, outcome: Outcome, folder: Path) -> str:
    """Describe what was found as one JSON object; what overflows is null, with its logarithm."""
    return as_json(
        out=folder,
        seconds=round(outcome.seconds, 3),
        attacked=outcome.made[Attack.table],
        kept=outcome.kept[Attack.table],
        **published.identity,
        attacks=plain_rows(published.summary),
        exponents=plain_rows(published.exponents),
        exponent_confidence=LEVEL,
        heads=plain_rows(published.heads),
        files={
            "store": folder / STORE_NAME,
            **published.files,
            "figures": [path for figure in published.figures for path in figure],
        },
    )


def show_attacks(published: PublishedAttacks, outcome: Outcome, folder: Path) -> None:
    """Print the constants found, a table for each attention, with its exponent, and where everything is."""
    label = readable(str(published.identity.get("source", "")))
    place = itemgetter("layer", "head")
    fits = [row for row in plain_rows(published.exponents) if not row["note"]]
    for (layer, head), family in groupby(plain_rows(published.summary), key=place):
        rows = list(family)
        where = f"{label}, {place_in_words(layer, head)}, scope {rows[0]['scope']}"
        heading(f"\n{where}, {mask_in_words(rows[0]['masking'])}, R = {rows[0]['radius']:.4g}")
        names = ["n", "given tokens", "paper", "found", "by", "÷ paper", "upper bound", "by", "reached"]
        show_table(names, map(_attack, rows), wrapped=["by"])
        growth = [
            f"{row['series']} like n^{decimal(row['slope'], 2)} "
            f"[{decimal(row['low'], 2)}, {decimal(row['high'], 2)}]"
            for row in fits
            if place(row) == (layer, head)
        ]
        if growth:
            paragraph(f"  growth: {'; '.join(growth)}")
    words = f"\n{outcome.made[Attack.table]} attacks made in {outcome.seconds:.1f} s"
    words += f", {outcome.kept[Attack.table]} were there already" if outcome.kept[Attack.table] else ""
    paragraph(f"{words}.")
    say(f"Tables: {published.files['summary']}, attacks.csv, exponents.csv, heads.csv")
    say(f"Also in {folder}: {STORE_NAME}, figures/, and the tokens found in inputs/")


def _attack(row: dict[str, Any]) -> list[str]:
    share = row["found_to_upper"]
    return [
        str(row["n"]),
        _number(row["tokens"]),
        _number(row["paper"]),
        _number(row["found"]) + ("" if row["converged"] else " ?"),
        row["found_by"],
        _number(row["found_to_paper"], 3),
        "" if row["log_upper"] is None else amount(row["log_upper"], 4),
        row["upper_by"],
        "" if share is None else f"{100 * share:.3g} %",
    ]


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"
