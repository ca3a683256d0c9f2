"""Read the rows of any store as pandas tables, with fitted exponents and lines to cite."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from howsmooth.errors import StoreError
from howsmooth.printed_table import PrintedTable
from howsmooth.study.exponents import LEVEL, exponents
from howsmooth.study.records import Contents, Measurement, plain_rows
from howsmooth.study.store import STORE_NAME, Store
from howsmooth.words import place_in_words, readable, scope_in_words

__all__ = ["citations", "measurement_table", "read"]

_HOW_MADE = ("method", "masking", "site", "start", "input_energy", "output_energy", "run")


def read(folder: str | os.PathLike[str]) -> dict[str, pd.DataFrame]:
    """Return the tables of a store by name. Other processes may write to the store meanwhile.

    ``folder`` is the ``--out`` folder of ``howsmooth measure``, the folder of a figure in that of ``howsmooth
    reproduce``, or the file ``study.sqlite`` in it. Without a store, or with a damaged one, StoreError is
    raised.

    Tables that have rows are ``measurements`` (a row for each constant, with its interval and status),
    ``models``, ``texts``, ``bounds``, ``sequences``, ``failures``, ``figure_rows`` and others, with the
    columns of the classes in :mod:`howsmooth.study.records`; ``run`` is the number of the run that wrote a
    row. ``measurements`` begins with the columns of ``measurements.csv``. With it comes the table
    ``exponents``, as in ``exponents.csv``; its ``attrs["howsmooth"]`` has the lines to cite.
    """
    place = Path(folder)
    if place.name == STORE_NAME and place.is_file():
        place = place.parent
    if place.is_file() or not Store.exists(place):
        remedy = "Give the folder that --out named."
        if within := sorted(place.glob(f"*/{STORE_NAME}")):
            remedy = f"Give a folder in it, such as {within[0].parent}."
        elif written := sorted(place.glob("*.csv")):
            remedy = f"Read {written[0]} with pandas: only measure and reproduce write a store."
        raise StoreError(f"folder: expected the output folder of howsmooth measure, got {place}. {remedy}")
    with Store.open(place, write=False) as store:
        tables = store.tables()
        contents = store.contents() if Measurement.table in tables else None
    if contents is not None:
        tables[Measurement.table] = measurement_table(contents, how_made=True)
        tables["exponents"] = contents.with_choices(exponents(contents.measurements))
    printed: dict[str, pd.DataFrame] = {
        name: PrintedTable(_readable(table)) for name, table in tables.items()
    }
    if contents is not None:
        lines = citations(contents, plain_rows(printed["exponents"]))
        printed["exponents"].attrs["howsmooth"] = "\n".join(lines)
    return printed


def _readable(table: pd.DataFrame) -> pd.DataFrame:
    """Give columns of text pandas' dtype for text, and drop the column ``run`` if it is empty."""
    text = pd.Series([""]).dtype
    mixed = [name for name in table if table[name].dtype == object]
    kinds = {name: {type(value) for value in table[name]} - {type(None)} for name in mixed}
    found = table.astype({name: text for name, kind in kinds.items() if kind == {str}})
    if "run" not in found:
        return found
    return found.drop(columns="run") if found["run"].isna().all() else found.astype({"run": "Int64"})


def measurement_table(contents: Contents, *, how_made: bool = False) -> pd.DataFrame:
    """Return the table of ``measurements.csv``; with ``how_made``, add how each constant was measured."""
    rows = contents.measurements
    stored = rows["model"].map(contents.models.set_index("label")["stored"])
    table = rows.loc[:, "model":"seed"].assign(stored=stored, computed=rows["dtype"])
    table = contents.with_choices(table)
    return table.join(rows[list(_HOW_MADE)]) if how_made else table


def citations(contents: Contents, exponents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line to cite for each model, scope and text, with the largest exponent of any layer or head."""
    digests = {row["name"]: row["digest"] for row in plain_rows(contents.texts)}
    fingerprints = {(row["model"], row["text"]): row["fingerprint"] for row in plain_rows(contents.inputs)}
    made_by = json.loads(plain_rows(contents.runs)[-1]["environment"])
    special = ", with special tokens" if contents.study.get("special_tokens") else ""
    fitted = [row for row in exponents if not row["note"]]
    for (model, scope, text), family in groupby(fitted, key=itemgetter("model", "scope", "text")):
        rows = list(family)
        most = max(rows, key=itemgetter("slope"))
        place = "" if scope == "model" else place_in_words(most["layer"], most["head"])
        if len(rows) > 1:
            place = f"the largest of {len(rows)} fits, {place}"
        yield (
            f"Local Lipschitz constant of {readable(model)}, {scope_in_words(most)}, on {readable(text)} "
            f"(SHA-256 {digests[text][:12]}{special}): n to the power {most['slope']:z.3f}, interval of "
            f"level {LEVEL} from {most['low']:z.3f} to {most['high']:z.3f}{place and f' ({place})'}, "
            f"{most['n_points']} points from n = {most['n_min']} to {most['n_max']}; model "
            f"{fingerprints[model, text][:12]}; "
            + ", ".join(f"{name} {made_by[name]}" for name in ("howsmooth", "torch", "transformers"))
            + "."
        )
