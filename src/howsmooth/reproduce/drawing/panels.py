"""What Figure 1 is drawn from: the panels, their fits, and what is seen in them, in words and as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from howsmooth.reproduce.drawing.fits import beside_corrected, fit_measured, fit_published, is_steady
from howsmooth.reproduce.finding import read_note
from howsmooth.reproduce.words import made_of, power, ratio
from howsmooth.study.exponents import LEVEL, QUARTER, Exponent
from howsmooth.study.names import decimal, readable
from howsmooth.study.published_rows import read_rows
from howsmooth.study.radius import radius_correlation
from howsmooth.study.store import Contents, Store

__all__ = ["Panel", "panel_table", "panel_words", "quarter_line", "read_panels"]


@dataclass(frozen=True, eq=False)
class Panel:
    """A layer of a model on a text.

    Attributes
    ----------
    model, layer, text
        What it is.
    rows
        Its measurements.
    fit
        The power of n fitted to the converged ones.
    published
        Values that the published code computes at the same sequences, with columns ``n``, ``lipschitz`` and
        ``ratio`` (to the corrected constant); None if they were not asked for.
    published_fit
        The power of n fitted to them.

    """

    model: str
    layer: int
    text: str
    rows: pd.DataFrame
    fit: Exponent
    published: pd.DataFrame | None = None
    published_fit: Exponent | None = None

    @property
    def name(self) -> str:
        """What it is, in words."""
        return f"{readable(self.model)}, layer {self.layer}"

    @property
    def drawn(self) -> pd.DataFrame:
        """The rows that have a place on log axes and an interval as narrow as asked."""
        return self.rows[self.rows["converged"] & (self.rows["lipschitz"] > 0)]


def read_panels(folder: Path) -> tuple[list[list[Panel]], list[tuple[str, str]]]:
    """Read what was asked for last: a list of columns of panels, one a text; and how it was made.

    Raises
    ------
    StoreError
        If something cannot be read.

    """
    note = read_note(folder)
    columns: list[list[Panel]] = []
    made: dict[str, str] = {}
    for column in note["columns"]:
        place = folder / column["folder"]
        with Store.open(place, write=False) as store:
            contents = store.contents()
        published = read_rows(place) if note["as_published"] else None
        columns.append([_panel(column, text, contents, published, note) for text in note["texts"]])
        texts = contents.texts[contents.texts["name"].isin(note["texts"])]
        inputs = contents.inputs[contents.inputs["text"].isin(note["texts"])]
        made.update(made_of(contents.models, texts, inputs))
        study = contents.study
        made["Settings"] = (
            f"seed {study['seed']}, {study['dtype']}, relative tolerance {study['rtol']}, confidence "
            f"{study['confidence']}, lengths {min(note['lengths'])} to {max(note['lengths'])}, "
            f"{note['samples']} sequences a length, none overlapping another of the same model and text."
        )
    return columns, list(made.items())


def _panel(
    column: dict[str, Any],
    text: str,
    contents: Contents,
    published: pd.DataFrame | None,
    note: dict[str, Any],
) -> Panel:
    rows = _asked(contents.measurements, text, note)
    panel = {
        "model": column["model"],
        "layer": column["layer"],
        "text": text,
        "rows": rows,
        "fit": fit_measured(rows),
    }
    if published is None:
        return Panel(**panel)
    beside = beside_corrected(_asked(published, text, note))
    return Panel(**panel, published=beside, published_fit=fit_published(beside))


def _asked(rows: pd.DataFrame, text: str, note: dict[str, Any]) -> pd.DataFrame:
    wanted = (rows["text"] == text) & rows["n"].isin(note["lengths"]) & (rows["sample"] < note["samples"])
    asked: pd.DataFrame = rows.loc[wanted]
    return asked


def quarter_line(n: np.ndarray, lipschitz: np.ndarray) -> tuple[float, float]:
    """Fit c · n^(1/4) by least squares of the logarithms; return c and the standard deviation around it."""
    residual = np.log(lipschitz) - QUARTER * np.log(n)
    return math.exp(float(residual.mean())), float(residual.std(ddof=1)) if len(n) > 1 else math.nan


def panel_words(panels: list[Panel]) -> list[str]:
    """Say what is seen in the panels: how many exponents may be 1/4, and then of each panel what it shows."""
    seen = []
    fitted = [panel for panel in panels if not panel.fit.note]
    if fitted:
        inside = [panel for panel in fitted if panel.fit.low <= QUARTER <= panel.fit.high]
        above = sum(panel.fit.low > QUARTER for panel in fitted)
        below = sum(panel.fit.high < QUARTER for panel in fitted)
        seen.append(
            f"The interval contains 1/4 in {len(inside)} of {len(fitted)} panels; it lies wholly above 1/4 "
            f"in {above} and wholly below in {below}."
        )
    theirs = [p for p in panels if p.published_fit is not None and not p.published_fit.note]
    if theirs:
        inside = [
            p for p in theirs if p.published_fit and p.published_fit.low <= QUARTER <= p.published_fit.high
        ]
        seen.append(f"As published, the interval contains 1/4 in {len(inside)} of {len(theirs)} panels.")
    return seen + [_words(panel) for panel in panels]


def _words(panel: Panel) -> str:
    rows, fit = panel.drawn, panel.fit
    words = f"{panel.name}, on {readable(panel.text)}: "
    if fit.note:
        return words + f"there is no exponent, {fit.note}."
    _, around = quarter_line(rows["n"].to_numpy(), rows["lipschitz"].to_numpy())
    words += (
        f"the constant grows like {power(fit)}, from {len(rows)} sequences of {fit.n_min} to {fit.n_max} "
        f"tokens; the points scatter by a factor of about {math.exp(fit.spread):.2f} around this line, and "
        f"of {math.exp(around):.2f} around n to the power 1/4. {_radius_words(rows)}"
    )
    hollow = len(panel.rows) - len(rows)
    if hollow:
        words += f" {hollow} measurements are left out, as they did not converge or are zero."
    if panel.published is not None and panel.published_fit is not None:
        words += (
            f" As published, the quantity goes like {power(panel.published_fit)}, and is in the median "
            f"{ratio(float(panel.published['ratio'].median()))} times the corrected constant."
        )
    return words


def _radius_words(rows: pd.DataFrame) -> str:
    radius = rows["radius_mean"].to_numpy(dtype=float)
    if is_steady(radius):
        return f"The mean radius is {radius.mean():.4g} for all of them."
    found = radius_correlation(rows["n"].to_numpy(), radius, LEVEL)
    words = f"The mean radius goes from {radius.min():.4g} to {radius.max():.4g}"
    if math.isnan(found.value):
        return words + "."
    return (
        f"{words}, and the correlation of its logarithm with that of n is {decimal(found.value, 2)} "
        f"({decimal(found.low, 2)} to {decimal(found.high, 2)})."
    )


def panel_table(panels: list[Panel]) -> pd.DataFrame:
    """Tabulate the exponents of the panels."""
    rows = []
    for panel in panels:
        row: dict[str, Any] = {
            "model": panel.model,
            "layer": panel.layer,
            "text": panel.text,
            **_fit_columns("", panel.fit),
            "sequences": panel.fit.n_points,
        }
        if panel.published is not None and panel.published_fit is not None:
            row |= _fit_columns("published ", panel.published_fit)
            row["published / corrected"] = float(panel.published["ratio"].median())
        rows.append(row)
    return pd.DataFrame(rows)


def _fit_columns(prefix: str, fit: Exponent) -> dict[str, float]:
    return {
        f"{prefix}exponent": fit.slope,
        f"{prefix}low": fit.low,
        f"{prefix}high": fit.high,
        f"{prefix}p of 1/4": fit.quarter,
    }
