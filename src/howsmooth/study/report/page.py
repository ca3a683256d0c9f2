"""The page, put together: one file, with its style, its script and its numbers inside.

Its content security policy names the digests of the one style sheet and the one script that it has,
so that a browser runs and applies nothing else, whatever the data hold.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from howsmooth.scopes import SCOPE_MEANINGS, SCOPES
from howsmooth.study.figures import Picture
from howsmooth.study.names import amount_in_words, kind_in_words, place_in_words, sentence
from howsmooth.study.pages import digest, style_sheet, templates_of
from howsmooth.study.published_rows import compare
from howsmooth.study.radius import STRATA
from howsmooth.study.records import Contents, plain_rows
from howsmooth.study.report import tables, wording
from howsmooth.study.report.caveats import caveats
from howsmooth.study.report.numbers import bounds_beside, embedded, scatter, sensitive

__all__ = ["render"]

_ASSETS = Path(__file__).parents[1] / "templates" / "report"
_SCRIPTS = ("uplot/uPlot.iife.min.js", "page.js", "scatter.js", "bounds.js", "tokens.js")
_MOST_BOUNDS = 60
_MOST_INLINED = 40  # figures: a page with every head of a large model would be too heavy for a phone
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
    rows = contents.measurements
    found = _families(rows, exponents, pictures)
    style, script = _style(found), _script()
    compared = compare(contents.published)
    data = {
        "scatter": scatter(rows, exponents, contents.published, compared),
        "bounds": bounds_beside(contents.bounds, rows),
        "tokens": sensitive(contents.sensitivities),
    }
    kinds = set(contents.kinds.values())
    page: str = _template(contents).render(
        style=Markup(style),
        script=Markup(script),
        style_digest=digest(style),
        script_digest=digest(script),
        data=[(name, embedded(value)) for name, value in data.items() if value is not None],
        points=data["scatter"],
        published=plain_rows(compared),
        items=tables.items_of(compared),
        sharpest=tables.sharpest(data["bounds"]) if data["bounds"] else [],
        most_bounds=_MOST_BOUNDS,
        tokens=data["tokens"],
        study=contents.study,
        level=wording.CONFIDENCE,
        families=found,
        exponents=plain_rows(exponents),
        strata=STRATA,
        by_radius=bool(exponents["radius_correlation"].notna().any()),
        convergence=tables.convergence(rows),
        total=len(rows),
        unconverged=int((~rows["converged"]).sum()),
        scopes=[(scope, SCOPE_MEANINGS[scope]) for scope in SCOPES if scope in set(rows["scope"])],
        models=plain_rows(contents.models),
        texts=plain_rows(contents.texts),
        kinds=kinds,
        windows=not kinds <= {"images", "audio"} or not kinds,
        inputs=plain_rows(contents.inputs),
        runs=tables.runs(contents.runs),
        maskings=tables.maskings(rows),
        seconds=float(rows["seconds"].sum()),
        caveats=caveats(contents),
    )
    return page


def _template(contents: Contents) -> jinja2.Template:
    nouns = {wording.plain(name): kind_in_words(kind) for name, kind in contents.kinds.items()}
    environment = templates_of("howsmooth.study")
    environment.globals |= {"amount": amount_in_words, "place": place_in_words}
    environment.filters |= {
        "number": wording.number,
        "slope": wording.slope,
        "chance": wording.chance,
        "plain": wording.plain,
        "percent": lambda share: f"{100 * share:.2g} %",
        "head": lambda head: "all" if head is None else head,
        "duration": wording.duration,
        "sentence": sentence,
        "noun": lambda text: nouns.get(wording.plain(text), "text"),
    }
    return environment.get_template("report.html.jinja")


def _families(
    rows: pd.DataFrame, exponents: pd.DataFrame, pictures: Sequence[Picture]
) -> list[dict[str, Any]]:
    """List one entry a (model, text, scope): its headline, and its figures."""
    found: list[dict[str, Any]] = []
    room = _MOST_INLINED
    for (model, text, scope), group in rows.groupby(["model", "text", "scope"], sort=True):
        mine = [p for p in pictures if (p.model, p.text, p.scope) == (model, text, scope)]
        singles = [picture for picture in mine if not picture.overview]
        shown = singles[:room]
        room -= len(shown)
        fits = exponents.query("model == @model and text == @text and scope == @scope")
        found.append(
            {
                "model": model,
                "text": text,
                "scope": scope,
                "headline": tables.headline(group, fits),
                "overviews": [_image(picture) for picture in mine if picture.overview],
                "singles": [_image(picture) for picture in shown],
                "not_shown": len(singles) - len(shown),
            }
        )
    return found


def _image(picture: Picture) -> dict[str, Any]:
    data = base64.b64encode(picture.png.read_bytes()).decode()
    return {
        "source": f"data:image/png;base64,{data}",
        "alt": picture.alt,
        "place": "every layer" if picture.layer is None else place_in_words(picture.layer, picture.head),
        "file": f"figures/{picture.pdf.name}",
        # As large as on paper, where there is room; still readable, by scrolling, where there is not.
        "width": round(picture.inches * _DOTS_AN_INCH),
        "least": round(max(min(picture.inches, 6.5), 0.55 * picture.inches) * _DOTS_AN_INCH),
    }


def _style(found: Sequence[dict[str, Any]]) -> str:
    """Read the style sheets, with a rule for each least width: the policy allows no style of an element."""
    images = (image for family in found for kind in ("overviews", "singles") for image in family[kind])
    least = sorted({int(image["least"]) for image in images})
    rules = "".join(f".least-{width} {{ min-width: {width}px; }}\n" for width in least)
    return style_sheet(f"{_asset('uplot/uPlot.min.css')}\n{_asset('report.css')}") + rules


def _script() -> str:
    """Read the script, its parts in one scope of their own, with the licence that uPlot asks to carry."""
    parts = "\n".join(_asset(name) for name in _SCRIPTS)
    return f'/*! uPlot:\n{_asset("uplot/LICENSE")}\n*/\n"use strict";\n(() => {{\n{parts}}})();\n'


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
