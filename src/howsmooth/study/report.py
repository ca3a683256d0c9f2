"""The page that a newcomer reads: self-contained, from the store alone."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import jinja2
import pandas as pd

from howsmooth.study.exponents import LEVEL
from howsmooth.study.figures import Picture
from howsmooth.study.names import decimal, readable, sentence
from howsmooth.study.plan import SCOPE_MEANINGS, SCOPES
from howsmooth.study.radius import STRATA
from howsmooth.study.sequences import APART_BY_LENGTH, overlapping
from howsmooth.study.store import Contents

__all__ = ["render"]

# A page with every head of a large model would be too heavy for a phone.
_MOST_INLINED = 40
_DOTS_AN_INCH = 96  # of a CSS pixel


def render(contents: Contents, exponents: pd.DataFrame, pictures: Sequence[Picture]) -> str:
    """Write the report.

    Parameters
    ----------
    contents
        Of the store.
    exponents
        Fitted from it.
    pictures
        Drawn from it; their PNG files are put into the page.

    Returns
    -------
    str
        HTML without a single reference to anything outside.

    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("howsmooth.study"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number,
        "slope": _slope,
        "chance": _chance,
        "plain": _plain,
        "sentence": sentence,
    }
    rows = contents.measurements
    return environment.get_template("report.html.jinja").render(
        study=contents.study,
        apart_by_length=contents.study.get("windows") == APART_BY_LENGTH,
        level=f"{LEVEL * 100:.0f} %",
        families=_families(rows, exponents, pictures),
        exponents=_exponent_rows(exponents),
        strata=STRATA,
        by_radius=bool(exponents["radius_correlation"].notna().any()),
        convergence=_convergence(rows),
        total=len(rows),
        unconverged=int((~rows["converged"]).sum()),
        scopes=[(scope, SCOPE_MEANINGS[scope]) for scope in SCOPES if scope in set(rows["scope"])],
        models=_records(contents.models),
        texts=_records(contents.texts),
        inputs=_records(contents.inputs),
        runs=_runs(contents.runs),
        maskings=_maskings(rows),
        seconds=_duration(float(rows["seconds"].sum())),
        caveats=_caveats(contents),
    )


def _families(
    rows: pd.DataFrame, exponents: pd.DataFrame, pictures: Sequence[Picture]
) -> list[dict[str, Any]]:
    """One entry a (model, text, scope): its headline, and its figures."""
    families = []
    inlined = 0
    for (model, text, scope), group in rows.groupby(["model", "text", "scope"], sort=True):
        mine = [p for p in pictures if (p.model, p.text, p.scope) == (model, text, scope)]
        overviews = [picture for picture in mine if picture.overview]
        singles = [picture for picture in mine if not picture.overview]
        shown = singles[: max(0, _MOST_INLINED - inlined)]
        inlined += len(shown)
        fits = exponents[
            (exponents["model"] == model) & (exponents["text"] == text) & (exponents["scope"] == scope)
        ]
        families.append(
            {
                "model": model,
                "text": text,
                "scope": scope,
                "headline": _headline(group, fits),
                "overviews": [_image(picture) for picture in overviews],
                "singles": [_image(picture) for picture in shown],
                "open": not overviews,
                "not_shown": len(singles) - len(shown),
            }
        )
    return families


def _headline(group: pd.DataFrame, fits: pd.DataFrame) -> str:
    span = f"lengths {group['n'].min()} to {group['n'].max()}"
    values = (
        f"The constant goes from {_number(group['lipschitz'].min())} to {_number(group['lipschitz'].max())}"
    )
    good = fits[fits["note"] == ""].sort_values("slope")
    if good.empty:
        return f"{values} over {span}; there are too few lengths for an exponent."
    low, high = good.iloc[0], good.iloc[-1]
    if len(good) == 1:
        return (
            f"It goes like n to the power {decimal(low['slope'], 2)} ({LEVEL * 100:.0f} % interval "
            f"{decimal(low['low'], 2)} to {decimal(low['high'], 2)}) over {span}. {values}."
        )
    quarter = int((good["quarter"] >= 1 - LEVEL).sum())
    ends = decimal(low["slope"], 2), decimal(high["slope"], 2)
    powers = f"between {ends[0]} ({_place(low)}) and {ends[1]} ({_place(high)})"
    if ends[0] == ends[1]:
        powers = f"of about {ends[0]} everywhere"
    return (
        f"It goes like n to a power {powers} over {span}. {values}. "
        f"The interval of {quarter or 'none'} of the {len(good)} exponents contains 1/4."
    )


def _place(row: pd.Series) -> str:
    head = "" if pd.isna(row["head"]) else f", head {row['head']}"
    return f"layer {row['layer']}{head}"


def _image(picture: Picture) -> dict[str, Any]:
    data = base64.b64encode(picture.png.read_bytes()).decode()
    place = "every layer" if picture.layer is None else f"layer {picture.layer}"
    if picture.head is not None:
        place += f", head {picture.head}"
    return {
        "source": f"data:image/png;base64,{data}",
        "alt": picture.alt,
        "place": place,
        "file": f"figures/{picture.pdf.name}",
        # As large as on paper, where there is room; still readable, by scrolling, where there is not.
        "width": round(picture.inches * _DOTS_AN_INCH),
        "least": round(max(min(picture.inches, 6.5), 0.55 * picture.inches) * _DOTS_AN_INCH),
    }


def _exponent_rows(exponents: pd.DataFrame) -> list[dict[str, Any]]:
    rows = []
    for row in _records(exponents):
        head = row["head"]
        rows.append({**row, "head": "all" if head is None else head})
    return rows


def _convergence(rows: pd.DataFrame) -> list[dict[str, Any]]:
    found = []
    for (model, text, scope), group in rows.groupby(["model", "text", "scope"], sort=True):
        width = (group["upper"] - group["lower"]) / group["lipschitz"].where(group["lipschitz"] > 0)
        found.append(
            {
                "model": model,
                "text": text,
                "scope": scope,
                "total": len(group),
                "converged": int(group["converged"].sum()),
                "width": float(width.median()) if width.notna().any() else math.nan,
                "widest": float(width.max()) if width.notna().any() else math.nan,
                "iterations": float(group["iterations"].median()),
            }
        )
    return found


def _maskings(rows: pd.DataFrame) -> list[tuple[str, str]]:
    pairs = rows[["model", "masking"]].drop_duplicates().sort_values(["model", "masking"])
    return [
        (str(model), ", ".join(str(name) for name in group["masking"]))
        for model, group in pairs.groupby("model", sort=True)
    ]


def _runs(runs: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {**run, "environment": list(json.loads(str(run["environment"])).items())} for run in _records(runs)
    ]


def _caveats(contents: Contents) -> list[str]:
    rows, models = contents.measurements, contents.models
    words = [
        "The constant is local: it is measured at these sequences of this text. Other inputs can have a much "
        "larger one, and the largest over all inputs of a given size is a different, harder quantity.",
        "The sequences are windows of running text without special tokens such as [CLS] or a start token, "
        "which a model may expect.",
    ]
    sequences = rows[["model", "text", "n", "sample", "start"]].drop_duplicates()
    shared = sum(
        overlapping(zip(group["start"], group["n"], strict=True))
        for _, group in sequences.groupby(["model", "text"])
    )
    if shared:
        words.append(
            f"{shared} of the {len(sequences)} sequences overlap others of the same text, so that points are "
            "not wholly independent, and the exponents' intervals are a little optimistic."
        )
    if bool(models["random_init"].astype(bool).any()):
        words.append(
            "Models marked “random init” have untrained weights: they show the architecture, not training."
        )
    if any(
        str(model).startswith("builtin-") and not untrained and text == "python-docs"
        for model, untrained, text in contents.inputs.merge(models, left_on="model", right_on="label")[
            ["name", "random_init", "text"]
        ].itertuples(index=False)
    ):
        words.append(
            "The built-in models were trained on the text python-docs itself, so they have seen it before."
        )
    trained_on_text = contents.inputs["tokenizer_source"].str.contains("trained on the text", case=False)
    if bool(trained_on_text.any()):
        words.append(
            "Where a tokenizer was trained on the text (see “How it was made”), tokens are not the model's."
        )
    if bool(models["as_decoder"].astype(bool).any()):
        words.append(
            "Models marked “as decoder” are encoders run with a causal mask that they were not trained with."
        )
    lost = contents.failures[contents.failures["resolved"].isna()]
    if len(lost):
        distinct = lost.drop_duplicates(["model", "text", "scope", "layer", "head", "n", "sample"])
        words.append(
            f"{len(distinct)} measurements failed and are missing here, the last because of: "
            f"“{readable(str(lost['error'].iloc[-1]), longest=300)}” The next run tries them again."
        )
    loose = int((~rows["converged"]).sum())
    if loose:
        words.append(
            f"{loose} measurements did not reach the tolerance. Their intervals hold, but are wide; they are "
            "drawn hollow and not fitted. A larger --max-iterations in a new --out narrows them."
        )
    zeros = int((rows["lipschitz"] <= 0).sum())
    if zeros:
        words.append(f"{zeros} constants are zero and cannot be shown or fitted on log axes.")
    return words


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries of plain Python values, missing ones None."""
    return [
        {str(name): None if pd.isna(value) else value for name, value in row.items()}
        for row in table.astype(object).to_dict("records")
    ]


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3g}"


def _slope(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else decimal(value, 3)


def _chance(value: float | None) -> str:
    """Show a p value; very small ones only as such, since their digits mean nothing."""
    if value is None or math.isnan(value):
        return ""
    return "below 0.001" if value < 0.001 else decimal(value, 3)


def _plain(value: object) -> str:
    """Names and paths as they can be shown: no control or direction characters, not endless."""
    return readable(str(value), longest=300)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} seconds"
    words = str(timedelta(seconds=round(seconds)))
    return f"{words} (hours:minutes:seconds)"
