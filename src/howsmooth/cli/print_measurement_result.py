"""Print the results of the command ``howsmooth measure`` as tables or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.cli.terminal_output import as_json, heading, paragraph, say, show_table
from howsmooth.study.exponents import LEVEL
from howsmooth.study.measurement_outputs import Outputs
from howsmooth.study.options import described
from howsmooth.study.plans import Plan
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.records import Bounding, Measurement, PublishedValue, Row, plain_rows
from howsmooth.study.store import STORE_NAME
from howsmooth.study.stored_tables import citations
from howsmooth.words import counted, decimal, kind_in_words, readable, scope_in_words

__all__ = ["measured_as_json", "show_measured"]

_INTERVAL = f"{LEVEL * 100:.0f} % interval"


def measured_as_json(plan: Plan, outcome: Outcome, published: Outputs, folder: Path) -> str:
    """Return the exponents, counts, settings and files of a study as one JSON object."""
    contents = published.contents
    values = _counts(outcome, PublishedValue) | {"in_store": len(contents.published)}
    values["exponents"] = plain_rows(published.compared)
    counts = _counts(outcome, Measurement) | {"in_store": len(contents.measurements)}
    counts["unconverged_in_store"] = int((~contents.measurements["converged"]).sum())
    return as_json(
        out=folder,
        seconds=round(outcome.seconds, 3),
        failed=outcome.failed,
        failures=plain_rows(contents.failures.drop(columns="detail")),
        measurements=counts,
        bounds=_counts(outcome, Bounding),
        published=None if published.compared.empty else values,
        settings=described(plan),
        **{name: plain_rows(getattr(contents, name)) for name in ("models", "texts", "inputs")},
        exponents=plain_rows(published.exponents),
        exponent_confidence=LEVEL,
        citations=list(citations(contents, plain_rows(published.exponents))),
        files={
            "store": folder / STORE_NAME,
            "measurements": folder / "measurements.csv",
            "exponents": folder / "exponents.csv",
            "parquet": published.parquet,
            "report": published.report,
            "figures": [path for picture in published.pictures for path in (picture.png, picture.pdf)],
        },
    )


def _counts(outcome: Outcome, kind: type[Row]) -> dict[str, Any]:
    return {"made": outcome.made[kind.table], "kept": outcome.kept[kind.table]}


def show_measured(plan: Plan, outcome: Outcome, published: Outputs, folder: Path) -> None:
    """Print the fitted exponents of n, the numbers of measurements, and the paths of the written files."""
    labels = {model.label for model in plan.models}
    rows = [row for row in plain_rows(published.exponents) if row["model"] in labels]
    say("\nThe constant grows like n to the power:")
    for (model, _, text), family in groupby(rows, key=itemgetter("model", "scope", "text")):
        kind = kind_in_words(published.contents.kinds.get(text, "text"))
        group = list(family)
        heading(f"\n{readable(model)}, {scope_in_words(group[0])}, {kind} {readable(text)}")
        places = ["layer", "head"] if any(row["head"] is not None for row in group) else ["layer"]
        table = [
            [*(str(row[name]) for name in places), *_exponent(row), str(row["n_points"])] for row in group
        ]
        show_table([*places, "exponent", _INTERVAL, "points"], table)
    if hidden := len(published.exponents) - len(rows):
        say(f"\nThe folder also holds {hidden} exponents of other models.")
    if plan.as_published:
        _show_compared(published.compared)
    for sentence in _count_sentences(outcome):
        paragraph(sentence)
    for line in citations(published.contents, rows):
        paragraph(f"To cite: {line}")
    say(f"Report: {published.report}")
    also = ["measurements.csv", "exponents.csv", *(path.name for path in published.parquet), STORE_NAME]
    also += ["figures/"] if published.pictures else []
    say(f"Also in {folder}: {', '.join(also)}")


def _count_sentences(outcome: Outcome) -> Iterator[str]:
    kept, unsettled = outcome.kept[Measurement.table], sum(outcome.unsettled.values())
    made = counted(outcome.made[Measurement.table], "measurement")
    words = f"\n{made} made in {outcome.seconds:.1f} s"
    words += f", {kept} were already there" if kept else ""
    yield words + (f"; {unsettled} did not converge." if unsettled else ".")
    if values := outcome.made[PublishedValue.table]:
        yield f"{values} published values made; their exponents are in published-exponents.csv."
    if unsettled:
        yield "To narrow their intervals, measure with a larger --max-iterations into another --out."


def _exponent(row: dict[str, Any]) -> tuple[str, str]:
    if row["note"]:
        return row["note"], ""
    return decimal(row["slope"], 3), f"{decimal(row['low'], 3)} to {decimal(row['high'], 3)}"


def _show_compared(compared: pd.DataFrame) -> None:
    """Print the exponents with which the published code's values and the correct constants grow with n."""
    place = itemgetter("model", "text", "layer")
    for (model, text, layer), family in groupby(plain_rows(compared), key=place):
        heading(f"\nAs published: {readable(model)}, layer {layer}, text {readable(text)}")
        show_table(
            ["quantity", "exponent", _INTERVAL, "p of 1/4", "points", "÷ corrected"],
            [
                [
                    row["quantity"],
                    *_exponent(row),
                    "" if row["note"] else f"{row['quarter']:.2g}",
                    str(row["n_points"]),
                    "" if row["ratio"] is None else f"{row['ratio']:.3g}",
                ]
                for row in family
            ],
            left=["quantity"],
        )
