"""The result of a measurement, for people and for machines."""

from __future__ import annotations

import json
import math
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

__all__ = ["as_json", "package_version", "records", "show"]


def as_json(
    plan: Plan, outcome: Outcome, published: Published, folder: Path, values: Outcome | None = None
) -> str:
    """Describe the result as one JSON object.

    ``measurements`` and ``published``, made of ``values``, count what this command asked for; ``exponents``,
    ``models`` and ``texts`` are those of the whole store.
    """
    contents = published.contents
    written = {
        "howsmooth": package_version(),
        "out": str(folder),
        "seconds": round(outcome.seconds, 3),
        "measurements": {
            "measured": outcome.measured,
            "kept": outcome.kept,
            "failed": outcome.failed,
            "in_store": len(contents.measurements),
            "unconverged_in_store": int((~contents.measurements["converged"]).sum()),
        },
        "published": None
        if values is None
        else {
            "measured": values.measured,
            "kept": values.kept,
            "failed": values.failed,
            "in_store": len(contents.published),
        },
        "settings": {
            "seed": plan.seed,
            "rtol": plan.rtol,
            "confidence": plan.confidence,
            "max_iterations": plan.max_iterations,
            "device": plan.device,
            "dtype": plan.dtype,
            "samples": plan.samples,
            # On images and sound the models may have chosen them.
            "lengths": list(plan.lengths) or sorted({int(n) for n in contents.measurements["n"]}),
            "scopes": list(plan.scopes),
        },
        "models": records(contents.models),
        "texts": records(contents.texts),
        "inputs": records(contents.inputs),
        "exponents": records(published.exponents),
        "exponent_confidence": LEVEL,
        "files": {
            "store": str(folder / "measurements.sqlite"),
            "measurements": str(published.measurements),
            "exponents": str(published.exponents_file),
            "report": str(published.report),
            "figures": [str(path) for picture in published.pictures for path in (picture.png, picture.pdf)],
        },
    }
    return json.dumps(written, indent=2, allow_nan=False)


def show(
    plan: Plan, outcome: Outcome, published: Published, folder: Path, values: Outcome | None = None
) -> None:
    """Print the exponents and where everything is; ``values`` counts published quantities."""
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
    words = f"\n{outcome.measured} measurements made in {outcome.seconds:.1f} s"
    words += f", {outcome.kept} were there already" if outcome.kept else ""
    words += f"; {outcome.unconverged} did not converge" if outcome.unconverged else ""
    console.print(Text(f"{words}."))
    if values is not None:
        words = f"{values.measured} published values in {values.seconds:.1f} s"
        words += f", {values.kept} were there already" if values.kept else ""
        console.print(Text(f"{words}; their exponents are in published-exponents.csv."))
    for one in (values, outcome):
        if one is not None and one.failed:
            console.print(
                Text(
                    f"{one.failed} failed, the first because of: {readable(one.first_failure, longest=300)} "
                    "They are recorded, and the next run tries them again."
                )
            )
    if outcome.unconverged:
        console.print("A larger --max-iterations, with another --out, narrows their intervals.")
    # Not through rich, which would break a long path in two.
    print(encodable(f"Report: {published.report}"))
    print(encodable(f"Also in {folder}: measurements.csv, exponents.csv, measurements.sqlite, figures/"))


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
