"""The result of a measurement, for people and for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from howsmooth.study.exponents import LEVEL
from howsmooth.study.names import decimal, encodable, kind_in_words, readable
from howsmooth.study.plan import Plan
from howsmooth.study.progress import Outcome
from howsmooth.study.publish import Published
from howsmooth.study.records import Bounding, Measurement, PublishedValue, Row
from howsmooth.study.store import STORE_NAME

__all__ = ["as_json", "package_version", "records", "show"]


def as_json(plan: Plan, outcome: Outcome, published: Published, folder: Path) -> str:
    """Describe the result as one JSON object.

    ``measurements``, ``bounds`` and ``published`` count what this command asked for; ``exponents``,
    ``models`` and ``texts`` are those of the whole store.
    """
    contents = published.contents
    written = {
        "howsmooth": package_version(),
        "out": str(folder),
        "seconds": round(outcome.seconds, 3),
        "failed": outcome.failed,
        "measurements": {
            **_counts(outcome, Measurement),
            "in_store": len(contents.measurements),
            "unconverged_in_store": int((~contents.measurements["converged"]).sum()),
        },
        "bounds": {**_counts(outcome, Bounding), "left_out": outcome.left_out},
        "published": None
        if published.compared.empty
        else {
            **_counts(outcome, PublishedValue),
            "in_store": len(contents.published),
            "exponents": records(published.compared),
        },
        "settings": plan.described(),
        "models": records(contents.models),
        "texts": records(contents.texts),
        "inputs": records(contents.inputs),
        "exponents": records(published.exponents),
        "exponent_confidence": LEVEL,
        "files": {
            "store": str(folder / STORE_NAME),
            "measurements": str(folder / "measurements.csv"),
            "exponents": str(folder / "exponents.csv"),
            "report": str(published.report),
            "figures": [str(path) for picture in published.pictures for path in (picture.png, picture.pdf)],
        },
    }
    return json.dumps(written, indent=2, allow_nan=False)


def _counts(outcome: Outcome, kind: type[Row]) -> dict[str, int]:
    return {"made": outcome.made[kind.table], "kept": outcome.kept[kind.table]}


def show(plan: Plan, outcome: Outcome, published: Published, folder: Path) -> None:
    """Print the exponents and where everything is."""
    console = Console()
    labels = {model.label for model in plan.models}
    rows = [row for row in records(published.exponents) if row["model"] in labels]
    console.print("\nThe constant grows like n to the power:")
    kinds = dict(published.contents.texts[["name", "kind"]].itertuples(index=False, name=None))
    for key, family in groupby(rows, key=itemgetter("model", "scope", "text")):
        model, scope, text = key
        kind = kind_in_words(kinds.get(text, "text"))
        console.print(Text(f"\n{readable(model)}, scope {scope}, {kind} {readable(text)}", style="bold"))
        console.print(Padding(_table(list(family)), (0, 0, 0, 2)))
    hidden = len(published.exponents) - len(rows)
    if hidden:
        console.print(f"\nand {hidden} exponents of other models in this folder.")
    if plan.as_published:
        _show_compared(console, published.compared)
    for sentence in _said(outcome):
        console.print(Text(sentence))
    # Not through rich, which would break a long path in two.
    print(encodable(f"Report: {published.report}"))
    print(encodable(f"Also in {folder}: measurements.csv, exponents.csv, {STORE_NAME}, figures/"))


def _said(outcome: Outcome) -> Iterator[str]:
    """Say what was made, what was there, and what is missing."""
    kept, unsettled = outcome.kept[Measurement.table], sum(outcome.unsettled.values())
    words = f"\n{outcome.made[Measurement.table]} measurements made in {outcome.seconds:.1f} s"
    words += f", {kept} were there already" if kept else ""
    yield words + (f"; {unsettled} did not converge." if unsettled else ".")
    values = outcome.made[PublishedValue.table]
    if values:
        yield f"{values} published values made; their exponents are in published-exponents.csv."
    if outcome.left_out:
        yield (
            f"Bounds of {outcome.left_out} attentions were left out, as they would take more than a fifth of "
            "the measurements' time: --bounds all computes them, --bounds none leaves all out."
        )
    if outcome.failed:
        yield (
            f"{outcome.failed} failed, the first because of: {readable(outcome.first_failure, longest=300)} "
            "They are recorded, and the next run tries them again."
        )
    if unsettled:
        yield "A larger --max-iterations, with another --out, narrows their intervals."


def _show_compared(console: Console, compared: pd.DataFrame) -> None:
    """Print the exponents of what the paper's code computes beside those of the corrected constant."""
    place = itemgetter("model", "text", "layer")
    for (model, text, layer), family in groupby(records(compared), key=place):
        words = f"\nAs published: {readable(model)}, layer {layer}, text {readable(text)}"
        console.print(Text(words, style="bold"))
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("quantity", no_wrap=True)
        for name in ("exponent", "95 % interval", "p of 1/4", "points", "÷ corrected"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in family:
            fitted = not row["note"]
            table.add_row(
                row["quantity"],
                decimal(row["slope"], 3) if fitted else row["note"],
                f"{decimal(row['low'], 3)} to {decimal(row['high'], 3)}" if fitted else "",
                f"{row['quarter']:.2g}" if fitted else "",
                str(row["n_points"]),
                "" if row["ratio"] is None else f"{row['ratio']:.3g}",
            )
        console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    by_head = any(row["head"] is not None for row in rows)
    for name in (
        "layer",
        *(["head"] if by_head else []),
        "exponent",
        f"{LEVEL * 100:.0f} % interval",
        "points",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        slope = row["note"] or decimal(row["slope"], 3)
        interval = "" if row["note"] else f"{decimal(row['low'], 3)} to {decimal(row['high'], 3)}"
        place = [str(row["layer"]), *([str(row["head"])] if by_head else [])]
        table.add_row(*place, slope, interval, str(row["n_points"]))
    return table


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """List rows with plain values; what is missing or not a number is null, which JSON can say."""
    return [
        {str(name): _value(str(name), value) for name, value in row.items()}
        for row in table.astype(object).to_dict("records")
    ]


def _value(name: str, value: Any) -> Any:
    if pd.isna(value) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if name in ("random_init", "as_decoder"):
        return bool(value)
    return value.item() if hasattr(value, "item") else value


def package_version() -> str:
    """Return the version of howsmooth."""
    from importlib.metadata import version

    return version("howsmooth")
