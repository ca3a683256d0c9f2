"""Write the tables, the figures and the report of a store of measurements. Nothing is measured here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.study.exponents import LEVEL, compare, exponents
from howsmooth.study.figures import Picture, draw_all
from howsmooth.study.file_writing import csv_of, replace_file, write_parquet, written_beside
from howsmooth.study.progress_listener import SILENT, Listener
from howsmooth.study.records import Contents, plain_rows
from howsmooth.study.report import render
from howsmooth.study.store import Store
from howsmooth.study.text_formatting import counted, place_in_words, readable

__all__ = ["Outputs", "citations", "write_outputs"]


@dataclass(frozen=True)
class Outputs:
    """The files written by :func:`write_outputs`, and the tables in them.

    ``contents`` has the tables of the store at the time of writing. ``exponents`` comes from
    :func:`howsmooth.study.exponents.exponents`; ``compared`` from :func:`howsmooth.study.exponents.compare`,
    and is empty if the store has no published values. ``parquet`` has the paths of the tables in parquet.
    """

    contents: Contents
    exponents: pd.DataFrame
    compared: pd.DataFrame
    pictures: list[Picture]
    report: Path
    parquet: tuple[Path, ...] = ()


def write_outputs(
    folder: str | os.PathLike[str],
    listener: Listener = SILENT,
    *,
    figures: bool = True,
    parquet: bool = False,
) -> Outputs:
    """Write ``measurements.csv``, ``exponents.csv``, ``figures/`` and ``report.html`` beside a store.

    If the store has published values, also write ``published.csv`` and ``published-exponents.csv``. Without
    ``figures``, none are drawn, and the report has none. With ``parquet``, also write
    ``measurements.parquet`` and ``exponents.parquet``, with the lines to cite in their metadata.

    Raises
    ------
    ArgumentError
        If ``parquet`` is asked for and pandas has no engine for it.
    StoreError
        If the store cannot be read or a file cannot be written.

    """
    folder = Path(folder)
    with Store.open(folder, write=False) as store:
        contents = store.contents()
    rows = contents.measurements
    table, compared = exponents(rows), compare(contents.published)
    stored = rows["model"].map(contents.models.set_index("label")["stored"])
    written = rows.loc[:, "model":"seed"].assign(stored=stored, computed=rows["dtype"])
    tables = {"measurements": written, "exponents": table} if parquet else {}
    in_parquet = tuple(folder / f"{name}.parquet" for name in tables)
    with written_beside(folder, "measurements"):
        for path, each in zip(in_parquet, tables.values(), strict=True):
            write_parquet(each, path, "\n".join(citations(contents, plain_rows(table))))
        replace_file(folder / "measurements.csv", csv_of(written))
        replace_file(folder / "exponents.csv", csv_of(table))
        pictures = []
        if figures:
            pictures = draw_all(rows, folder / "figures", listener, contents.kinds)
        page = folder / "report.html"
        replace_file(page, render(contents, table, compared, pictures))
        if len(contents.published):
            values = contents.published.drop(columns="run")
            replace_file(folder / "published.csv", csv_of(values))
            replace_file(folder / "published-exponents.csv", csv_of(compared))
    return Outputs(contents, table, compared, pictures, page, in_parquet)


def citations(contents: Contents, exponents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line to cite for each model, scope and text, with the largest exponent of any layer or head."""
    digests = {row["name"]: row["digest"] for row in plain_rows(contents.texts)}
    weights = {(row["model"], row["text"]): row["fingerprint"] for row in plain_rows(contents.inputs)}
    made_by = json.loads(plain_rows(contents.runs)[-1]["environment"])
    fitted = [row for row in exponents if not row["note"]]
    for (model, scope, text), family in groupby(fitted, key=itemgetter("model", "scope", "text")):
        rows = list(family)
        most = max(rows, key=itemgetter("slope"))
        place = (
            ""
            if scope == "model"
            else f" of {counted(len(rows), 'fit')}, {place_in_words(most['layer'], most['head'])}"
        )
        yield (
            f"Local Lipschitz constant of {readable(model)}, scope {scope}, on {readable(text)} (SHA-256 "
            f"{digests[text][:12]}): n to the power {most['slope']:.3f}, {LEVEL * 100:.0f} % interval "
            f"{most['low']:.3f} to {most['high']:.3f} (the largest{place}), {most['n_points']} points from "
            f"n = {most['n_min']} to {most['n_max']}; weights {weights[model, text][:12]}; "
            + ", ".join(f"{name} {made_by[name]}" for name in ("howsmooth", "torch", "transformers"))
            + "."
        )
