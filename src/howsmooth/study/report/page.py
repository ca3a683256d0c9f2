"""Assemble the report: one HTML file that contains its style, its script and its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from howsmooth.results.drawing import Picture, data_url
from howsmooth.results.page import page, plain, templates
from howsmooth.rounding import limit_in_digits
from howsmooth.scopes import SCOPE_MEANINGS
from howsmooth.study.exponents import STRATA
from howsmooth.study.records import Contents, plain_rows
from howsmooth.study.report import tables
from howsmooth.study.report.chart_data import bounds_data, scatter_data, script_json, sensitivity_data
from howsmooth.words import (
    amount_in_words,
    duration,
    kind_in_words,
    place_in_words,
    scope_in_words,
    sentence,
)

__all__ = ["render"]

_ASSETS = Path(__file__).parents[1] / "templates" / "report"
_SCRIPTS = ("uplot/uPlot.iife.min.js", "page.js", "scatter.js", "bounds.js", "tokens.js")
_MOST_BOUNDS = 60
_MOST_INLINED = 40  # figures: a page with every head of a large model would be too heavy for a phone


def render(
    contents: Contents, exponents: pd.DataFrame, compared: pd.DataFrame, pictures: Sequence[Picture]
) -> str:
    """Return the report as HTML without references to other files or sites.

    ``exponents`` are fitted to the measurements of the store, ``compared`` to its published values; the PNG
    files of ``pictures`` are embedded.
    """
    rows = contents.measurements
    singles = [picture for picture in pictures if not picture.overview]
    bounds = bounds_data(contents.bounds, rows)
    data = {
        "scatter": scatter_data(rows, exponents, contents.published, compared),
        "bounds": bounds,
        "tokens": sensitivity_data(contents.sensitivities),
    }
    kinds = set(contents.kinds.values())
    body = _template(contents).render(
        points=data["scatter"],
        published=plain_rows(compared),
        items=tables.items_of(compared),
        sharpest=tables.sharpest(bounds) if bounds else [],
        most_bounds=_MOST_BOUNDS,
        tokens=data["tokens"],
        study=contents.study,
        level=tables.CONFIDENCE,
        families=list(_headlines(contents.with_choices(rows), exponents)),
        drawn=bool(pictures),
        overviews=[_image(picture) for picture in pictures if picture.overview],
        singles=[_image(picture) for picture in singles[:_MOST_INLINED]],
        not_shown=len(singles[_MOST_INLINED:]),
        exponents=plain_rows(exponents),
        strata=STRATA,
        by_radius=bool(exponents["radius_correlation"].notna().any()),
        convergence=tables.convergence(rows),
        total=len(rows),
        unconverged=int((~rows["converged"]).sum()),
        scopes=[one for one in SCOPE_MEANINGS.items() if one[0] in set(rows["scope"])],
        models=plain_rows(contents.models),
        texts=plain_rows(contents.texts),
        kinds=kinds,
        windows=kinds != {"images"},
        inputs=plain_rows(contents.inputs),
        runs=tables.runs(contents.runs),
        maskings=tables.maskings(rows),
        seconds=float(rows["seconds"].sum()),
        failures=plain_rows(contents.failures),
        zeros=int((rows["lipschitz"] <= 0).sum()),
    )
    labels = ", ".join(contents.models["label"])
    return page(
        f"How smooth is attention? {labels}",
        [body],
        style=f"{_asset('uplot/uPlot.min.css')}\n{_asset('report.css')}",
        script=_script(),
        data={name: script_json(value) for name, value in data.items() if value is not None},
    )


def _template(contents: Contents) -> jinja2.Template:
    nouns = {plain(name): kind_in_words(kind) for name, kind in contents.kinds.items()}
    environment = templates("howsmooth.study")
    environment.globals |= {"amount": amount_in_words, "place": place_in_words, "scope": scope_in_words}
    environment.filters |= {
        "number": tables.number,
        "limit": partial(limit_in_digits, digits=3),
        "slope": tables.slope,
        "chance": tables.chance,
        "percent": lambda share: f"{100 * share:.2g} %",
        "head": lambda head: "all" if head is None else head,
        "duration": duration,
        "sentence": sentence,
        "noun": lambda text: nouns.get(plain(text), "text"),
    }
    return environment.get_template("report.html.jinja")


def _headlines(rows: pd.DataFrame, exponents: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the headline of each model, text and scope."""
    place = ["model", "text", "scope"]
    for names, group in rows.groupby(place, sort=True):
        words = tables.headline(group, exponents[(exponents[place] == list(names)).all(axis=1)])
        where = {"model": names[0], "text": names[1], "scope_words": scope_in_words(group.iloc[0])}
        yield where | {"headline": words}


def _image(picture: Picture) -> dict[str, Any]:
    shown = {"source": data_url(picture.png.read_bytes()), "file": f"figures/{picture.pdf.name}"}
    return shown | {"alt": picture.alt, "title": f"{picture.title}.", "width": picture.width}


def _script() -> str:
    """Return the JavaScript of the page, with the licence of the chart library uPlot before it."""
    parts = "\n".join(_asset(name) for name in _SCRIPTS)
    return f'/*! uPlot:\n{_asset("uplot/LICENSE")}\n*/\n"use strict";\n(() => {{\n{parts}}})();\n'


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
