"""Write the HTML report of a study, from its store alone, as one file without external resources."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from howsmooth.results.drawing import Picture
from howsmooth.results.page import page, plain_text, templates
from howsmooth.rounding import limit_in_digits
from howsmooth.scopes import SCOPE_MEANINGS
from howsmooth.study.exponents import GROUP, LEVEL, STRATA
from howsmooth.study.plans import PUBLISHED_ITEMS
from howsmooth.study.records import PLACE, Contents, plain_rows
from howsmooth.words import (
    amount_in_words,
    decimal,
    duration,
    kind_in_words,
    place_in_words,
    scope_in_words,
    sentence,
    visible_token,
)

__all__ = ["render"]

CONFIDENCE = f"{LEVEL * 100:.0f} %"
"""The confidence of the intervals of exponents and correlations, as text."""

MOST_POINTS = 50_000
"""The largest number of points in the scatter plot; more would make the page slow on a phone."""

MOST_ENERGIES = 200_000
"""The largest number of token energies in the page, which take about three megabytes."""

_MEASURED = "measured"  # the quantity of the store's own measurements
_HERE = "‖D_X f‖"  # the quantity of a bound on one sequence; others are over all inputs of a ball
_PLACE = list(PLACE)
_USUAL_LENGTH = 64  # of a text that is read at a glance
# Characters that could end the script element, start another, or break a line of JavaScript.
_ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
_ASSETS = Path(__file__).parent / "templates" / "report"
_SCRIPTS = ("uplot/uPlot.iife.min.js", "page.js", "scatter.js", "bounds.js", "tokens.js")
_MOST_BOUNDS = 60
_MOST_INLINED = 40  # figures: a page with every head of a large model would be too heavy for a phone


def render(
    contents: Contents, exponents: pd.DataFrame, compared: pd.DataFrame, pictures: Sequence[Picture]
) -> str:
    """Return the HTML report of the contents of a store, with the fitted exponents and the figures."""
    rows = contents.measurements
    singles = [picture for picture in pictures if not picture.overview]
    bounds = bounds_data(contents.bounds, rows)
    data = {
        "scatter": scatter_data(rows, exponents, contents.published, compared),
        "bounds": bounds,
        "tokens": sensitivity_data(contents.sensitivities),
    }
    kinds = set(contents.kinds.values())
    runs = plain_rows(contents.runs)
    for run in runs:
        run["environment"] = list(json.loads(run["environment"]).items())
    body = _template(contents).render(
        points=data["scatter"],
        published=plain_rows(compared),
        items=[one for one in PUBLISHED_ITEMS.items() if one[0] in ",".join(compared["items"]).split(",")],
        sharpest=sharpest(bounds) if bounds else [],
        most_bounds=_MOST_BOUNDS,
        tokens=data["tokens"],
        study=contents.study,
        level=CONFIDENCE,
        families=list(_headlines(contents.with_choices(rows), exponents)),
        drawn=bool(pictures),
        overviews=[_image(picture) for picture in pictures if picture.overview],
        singles=[_image(picture) for picture in singles[:_MOST_INLINED]],
        not_shown=len(singles[_MOST_INLINED:]),
        exponents=plain_rows(exponents),
        strata=STRATA,
        by_radius=bool(exponents["radius_correlation"].notna().any()),
        convergence=convergence(rows),
        total=len(rows),
        unconverged=int((~rows["converged"]).sum()),
        scopes=[one for one in SCOPE_MEANINGS.items() if one[0] in set(rows["scope"])],
        **{name: plain_rows(getattr(contents, name)) for name in ("models", "texts", "inputs", "failures")},
        kinds=kinds,
        windows=kinds != {"images"},
        runs=runs,
        maskings=[(one, ", ".join(sorted(set(names)))) for one, names in rows.groupby("model")["masking"]],
        seconds=float(rows["seconds"].sum()),
        zeros=int((rows["lipschitz"] <= 0).sum()),
    )
    title = f"How smooth is attention? {', '.join(contents.models['label'])}"
    style = f"{_asset('uplot/uPlot.min.css')}\n{_asset('report.css')}"
    written = {name: script_json(value) for name, value in data.items() if value is not None}
    return page(title, [body], style=style, script=_script(), data=written)


def _template(contents: Contents) -> jinja2.Template:
    nouns = {plain_text(name): kind_in_words(kind) for name, kind in contents.kinds.items()}
    environment = templates("howsmooth.study")
    environment.globals |= {"amount": amount_in_words, "place": place_in_words, "scope": scope_in_words}
    named = {one.__name__: one for one in (three_digits, slope, chance, duration, sentence)}
    environment.filters |= named | {
        "limit": partial(limit_in_digits, digits=3),
        "percent": lambda share: f"{100 * share:.2g} %",
        "head": lambda head: "all" if head is None else head,
        "noun": lambda text: nouns.get(plain_text(text), "text"),
    }
    return environment.get_template("report.html.jinja")


def _headlines(rows: pd.DataFrame, exponents: pd.DataFrame) -> Iterator[dict[str, Any]]:
    place = ["model", "text", "scope"]
    for names, group in rows.groupby(place, sort=True):
        words = headline(group, exponents[(exponents[place] == list(names)).all(axis=1)])
        scope = scope_in_words(group.iloc[0])
        yield {"model": names[0], "text": names[1], "scope_words": scope, "headline": words}


def _image(picture: Picture) -> dict[str, Any]:
    return picture.on_page() | {"file": f"figures/{picture.pdf.name}", "title": f"{picture.title}."}


def _script() -> str:
    parts = "\n".join(_asset(name) for name in _SCRIPTS)
    return f'/*! uPlot:\n{_asset("uplot/LICENSE")}\n*/\n"use strict";\n(() => {{\n{parts}}})();\n'


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


# ---- Headlines and tables


def three_digits(value: float | None) -> str:
    """Format a number with three significant digits; a missing number gives an empty string."""
    return "" if value is None or math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"


def slope(value: float | None) -> str:
    """Format an exponent or a correlation with three decimals; a missing one gives an empty string."""
    return "" if value is None or math.isnan(value) else decimal(value, 3)


def chance(value: float | None) -> str:
    """Format a p value."""
    return "below 0.001" if value is not None and value < 0.001 else slope(value)


def headline(rows: pd.DataFrame, exponents: pd.DataFrame) -> str:
    """Return one sentence on how large the constants of one model, text and scope are, and how they grow."""
    span = f"lengths {rows['n'].min()} to {rows['n'].max()}"
    low, high = three_digits(rows["lipschitz"].min()), three_digits(rows["lipschitz"].max())
    values = f"The constants measured are between {low} and {high}"
    good = sorted((row for row in plain_rows(exponents) if not row["note"]), key=lambda row: row["slope"])
    if not good:
        return f"{values} over {span}. There are too few lengths to fit an exponent."
    first, last = good[0], good[-1]
    least, most = decimal(first["slope"], 3), decimal(last["slope"], 3)
    if len(good) == 1:
        interval = f"{CONFIDENCE} interval {decimal(first['low'], 3)} to {decimal(first['high'], 3)}"
        return f"The constant grows like n to the power {least} ({interval}) over {span}. {values}."
    powers = f"of about {least} in all layers and heads"
    if least != most:
        low_end, high_end = (place_in_words(row["layer"], row["head"]) for row in (first, last))
        powers = f"between {least} ({low_end}) and {most} ({high_end})"
    flat = sum(row["low"] <= 0 <= row["high"] for row in good)
    quarter = sum(row["quarter"] >= 1 - LEVEL for row in good)
    return (
        f"The constant grows like n to a power {powers} over {span} (in {flat or 'none'} of {len(good)} fits "
        f"the interval contains 0, no growth). {values}. "
        f"The interval of {quarter or 'none'} of the {len(good)} exponents contains 1/4."
    )


def sharpest(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the smallest upper and the largest lower bound for each layer, then for each head."""
    table = []
    for place_ in sorted(found["places"], key=lambda one: one["head"] is not None):
        value = place_["measured"] and place_["measured"][0]
        holding = [row for row in place_["rows"] if row[4] and row[2]]
        # A lower bound on the supremum over a ball is no lower bound on the constant at this sequence.
        upper = min((row for row in holding if row[1]), key=lambda row: row[2], default=None)
        lower = max((row for row in holding if row[6] and not row[1]), key=lambda row: row[2], default=None)
        row = {name: found["names"][name][place_[name]] for name in ("model", "text", "scope")}
        row |= {"layer": place_["layer"], "n": place_["n"], "head": place_["head"], "measured": value}
        for side, best in (("upper", upper), ("lower", lower)):
            ratio = best[2] / value if best and value else None
            row[side] = best and {"value": best[2], "name": found["labels"][best[0]], "ratio": ratio}
        table.append(row)
    return table


def convergence(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Tabulate how many constants of a model, text and scope converged, and how wide their intervals are."""
    width = (rows["upper"] - rows["lower"]) / rows["lipschitz"].where(rows["lipschitz"] > 0)
    groups = rows.assign(width=width).groupby(["model", "text", "scope"], sort=True)
    found = groups.agg(
        total=("converged", "size"),
        converged=("converged", "sum"),
        width=("width", "median"),
        widest=("width", "max"),
        iterations=("iterations", "median"),
    )
    return plain_rows(found.reset_index())


# ---- Numbers that the script of the page reads, as JSON


def script_json(value: object) -> Markup:
    """Return a value as JSON that is safe inside an HTML element; NaN and infinity raise ValueError."""
    return Markup(json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPES))


def scatter_data(
    measurements: pd.DataFrame, exponents: pd.DataFrame, published: pd.DataFrame, compared: pd.DataFrame
) -> dict[str, Any] | None:
    """Return the points and fits of the page's plot of constants against length or radius; None without
    points. The entry ``groups`` describes each fit, and ``total`` is the number of points before thinning.
    """
    ours = {"quantity": _MEASURED, "items": ""}
    theirs = {"scope": "attention", "head": None}
    rows = _joined(measurements.assign(**ours), published.assign(**theirs, converged=published["settled"]))
    if rows.empty:
        return None
    groups = _joined(exponents.assign(**ours), compared.assign(**theirs))
    keys = [*GROUP, "quantity", "items"]
    group = rows[keys].merge(groups[keys].reset_index(), how="left", on=keys)["index"]
    step = math.ceil(len(rows) / MOST_POINTS)
    kept = rows.iloc[::step]
    columns = {"radius": "radius_mean", "value": "lipschitz"}
    names, groups = _numbered(groups, "model", "text", "scope", "quantity")
    return {
        "names": names,
        "groups": [_group(row) for row in plain_rows(groups)],
        "points": {
            "group": group.iloc[::step].tolist(),
            "n": kept["n"].tolist(),
            "sample": kept["sample"].tolist(),
            **{name: [_rounded(one) for one in kept[column]] for name, column in columns.items()},
            "lower": [_rounded(one, upper=False) for one in kept["lower"]],
            "upper": [_rounded(one, upper=True) for one in kept["upper"]],
            "converged": kept["converged"].astype(int).tolist(),
        },
        "total": len(rows),
    }


def _group(row: dict[str, Any]) -> dict[str, Any]:
    group = {name: row[name] for name in (*GROUP, "quantity")}
    group["where"] = place_in_words(row["layer"], row["head"])
    if row["note"]:
        return {**group, "fit": None, "exponent": f"no exponent: {row['note']}"}
    fit = {name: _rounded(row[name]) for name in ("slope", "intercept", "n_min", "n_max")}
    ends = f"{CONFIDENCE} interval {slope(row['low'])} to {slope(row['high'])}"
    words = f"exponent {slope(row['slope'])}, {ends}, p for 1/4 {chance(row['quarter'])}"
    return {**group, "fit": fit, "exponent": words}


def bounds_data(bounds: pd.DataFrame, measurements: pd.DataFrame) -> dict[str, Any] | None:
    """Return the bounds at each sequence, and the constants measured there; None if there are no bounds.

    Each of the ``places`` has ``rows`` of (label, is upper bound, value, log10 of the value, holds, source,
    is a bound at this sequence). A value is None if it overflows or does not exist.
    """
    if bounds.empty:
        return None
    table = bounds.merge(measurements[[*_PLACE, "lipschitz", "lower", "upper"]], how="left", on=_PLACE)
    names, table = _numbered(table, "model", "text", "scope", "name", "source")
    places = []
    for _, rows in table.groupby(_PLACE, sort=False, dropna=False):
        first, *_ = listed = plain_rows(rows)
        place = {name: first[name] for name in _PLACE} | {"radius": _rounded(first["radius"])}
        ends = [_rounded(first[end], upper=end == "upper") for end in ("lower", "upper")]
        value = _rounded(first["lipschitz"])
        measured = None if value is None else [value, *ends]
        places.append({**place, "measured": measured, "rows": [_bound(row) for row in listed]})
    labels, sources = names.pop("name"), names.pop("source")
    return {"names": names, "labels": labels, "sources": sources, "places": places}


def _bound(row: dict[str, Any]) -> tuple[Any, ...]:
    power = None if row["log_value"] is None else row["log_value"] / math.log(10)
    is_upper = row["side"] == "upper"
    numbers = [_rounded(one, upper=is_upper) for one in (row["value"], power)]
    return (row["name"], is_upper, *numbers, bool(row["holds"]), row["source"], row["quantity"] == _HERE)


def sensitivity_data(rows: pd.DataFrame) -> dict[str, Any] | None:
    """Return each token's energies: its shares of the squared norms of a Jacobian's leading singular vectors.

    A layer or head at a sequence has the energies ``input`` and ``output``, and how many tokens have ``half``
    of each. ``apart``: the tokens do not join to the text; ``start``: the row to show first; ``total``:
    before thinning.
    """
    if rows.empty:
        return None
    # Of too many energies for a page, those of the longest length and of some shorter lengths are kept.
    step = math.ceil(2 * int(rows["n"].sum()) / MOST_ENERGIES)
    thinned = rows[rows["n"].isin(sorted(rows["n"].unique(), reverse=True)[::step])]
    names, kept = _numbered(thinned, "model", "text", "scope")
    by_sequence = kept.groupby(["model", "text", "n", "sample"], sort=False)
    kept["sequence"] = by_sequence.ngroup()
    found = [
        {
            **{name: row[name] for name in (*_PLACE, "converged", "sequence")},
            "input": [_rounded(one, 3) for one in row["input_energy"]],
            "output": [_rounded(one, 3) for one in row["output_energy"]],
            "half": [_tokens_of_half(row[side]) for side in ("input_energy", "output_energy")],
        }
        for row in plain_rows(kept)
    ]
    sequences = [
        {"words": [visible_token(token) for token in row["tokens"]], "apart": row["place"] is None}
        for row in plain_rows(kept[~kept["sequence"].duplicated()])
    ]
    start = _start(found, names["scope"])
    return {"names": names, "sequences": sequences, "rows": found, "start": start, "total": len(rows)}


def _tokens_of_half(energies: Sequence[float]) -> int:
    reached = np.cumsum(sorted(energies, reverse=True))
    return int(np.searchsorted(reached, reached[-1] / 2)) + 1


def _start(rows: Sequence[dict[str, Any]], scopes: Sequence[str]) -> int:
    """Return the index of the row to show first: of the middle layer, if possible with at most 64 tokens."""
    scope = scopes.index("attention") if "attention" in scopes else rows[0]["scope"]
    begun = next(row for row in rows if row["scope"] == scope)
    alike = [row for row in rows if all(row[name] == begun[name] for name in ("model", "text", "scope"))]
    layers = sorted({row["layer"] for row in alike})
    layer = layers[len(layers) // 2]
    n = max((row["n"] for row in alike if row["n"] <= _USUAL_LENGTH), default=min(row["n"] for row in alike))
    return rows.index(
        min(alike, key=lambda row: (abs(row["n"] - n), abs(row["layer"] - layer), row["head"] or 0))
    )


def _joined(*tables: pd.DataFrame) -> pd.DataFrame:
    there = [table.astype({"head": "Int64"}) for table in tables if len(table)] or [tables[0]]
    return pd.concat(there, ignore_index=True)


def _numbered(table: pd.DataFrame, *columns: str) -> tuple[dict[str, list[str]], pd.DataFrame]:
    """Replace the names in some columns by indices; return the lists of names, and the table."""
    names, numbers = {}, {}
    for column in columns:
        numbers[column], found = pd.factorize(table[column])
        names[column] = [plain_text(name) for name in found]
    return names, table.assign(**numbers)


def _rounded(value: float | None, digits: int = 7, *, upper: bool | None = None) -> float | None:
    """Round a number: an upper limit up, a lower limit down. NaN and infinite numbers become None."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{value:.{digits}g}" if upper is None else limit_in_digits(value, digits, upper=upper))
