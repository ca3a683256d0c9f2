"""The page, put together: one file, with its style, its script and its numbers inside.

Its content security policy names the digests of the one style sheet and the one script that it has,
so that a browser runs and applies nothing else, whatever the data hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from howsmooth.study.exponents import LEVEL
from howsmooth.study.figures import Picture
from howsmooth.study.names import amount_in_words, kind_in_words, sentence
from howsmooth.study.pages import digest, style_sheet, templates_of
from howsmooth.study.plan import SCOPE_MEANINGS, SCOPES
from howsmooth.study.published_tables import compare
from howsmooth.study.radius import STRATA
from howsmooth.study.report import wording
from howsmooth.study.report.bounding import bounds_beside, sharpest
from howsmooth.study.report.caveats import caveats
from howsmooth.study.report.data import embedded, scatter
from howsmooth.study.report.families import families
from howsmooth.study.report.published import beside, items_of
from howsmooth.study.report.tables import convergence, exponent_rows, maskings, runs
from howsmooth.study.report.tokens import first_shown, sensitive
from howsmooth.study.sequences import APART_BY_LENGTH
from howsmooth.study.store import Contents

__all__ = ["render"]

_ASSETS = Path(__file__).parents[1] / "templates" / "report"
_SCRIPTS = (
    "page.js", "chooser.js", "axes.js", "colours.js", "scatter.js", "bounds.js", "tokens.js", "start.js",
)  # fmt: skip
_MOST_BOUNDS = 60


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
    named = contents.texts[["name", "kind"]].itertuples(index=False, name=None)
    nouns = {wording.plain(name): kind_in_words(str(kind)) for name, kind in named}
    environment = templates_of("howsmooth.study")
    environment.filters |= {
        "number": wording.number,
        "slope": wording.slope,
        "chance": wording.chance,
        "plain": wording.plain,
        "sentence": sentence,
        "noun": lambda text: nouns.get(wording.plain(text), "text"),
    }
    rows = contents.measurements
    found = families(rows, exponents, pictures)
    style, script = _style(found), _script()
    published = contents.published
    compared = compare(published)
    data = {
        "scatter": scatter(rows, exponents, published) if len(rows) or len(published) else None,
        "bounds": bounds_beside(contents.bounds, rows),
        "tokens": sensitive(contents.sensitivities),
    }
    return environment.get_template("report.html.jinja").render(
        style=Markup(style),
        script=Markup(script),
        style_digest=digest(style),
        script_digest=digest(script),
        data=[(name, embedded(value)) for name, value in data.items() if value is not None],
        left_out=_left_out(data["scatter"], lambda found: len(found["points"]["n"])),
        published=beside(compared),
        items=items_of(compared),
        sharpest=sharpest(data["bounds"]) if data["bounds"] else [],
        most_bounds=_MOST_BOUNDS,
        first=first_shown(data["tokens"]) if data["tokens"] else None,
        tokens_left_out=_left_out(data["tokens"], lambda found: len(found["rows"])),
        study=contents.study,
        apart_by_length=contents.study.get("windows") == APART_BY_LENGTH,
        level=f"{LEVEL * 100:.0f} %",
        families=found,
        exponents=exponent_rows(exponents),
        strata=STRATA,
        by_radius=bool(exponents["radius_correlation"].notna().any()),
        convergence=convergence(rows),
        total=len(rows),
        unconverged=int((~rows["converged"]).sum()),
        scopes=[(scope, SCOPE_MEANINGS[scope]) for scope in SCOPES if scope in set(rows["scope"])],
        models=wording.records(contents.models),
        texts=wording.records(contents.texts),
        amount=amount_in_words,
        kinds=set(contents.texts["kind"]),
        windows=not set(contents.texts["kind"]) <= {"images", "audio"} or contents.texts.empty,
        inputs=wording.records(contents.inputs),
        runs=runs(contents.runs),
        maskings=maskings(rows),
        seconds=wording.duration(float(rows["seconds"].sum())),
        caveats=caveats(contents),
    )


def _left_out(
    found: dict[str, Any] | None, counted: Callable[[dict[str, Any]], int]
) -> dict[str, int] | None:
    """Say how many of how many the page shows, if it does not show all."""
    if found is None or counted(found) == found["total"]:
        return None
    return {"shown": counted(found), "total": found["total"]}


def _style(found: Sequence[dict[str, Any]]) -> str:
    """Read the style sheet, with a rule for each least width: the policy allows no style of an element."""
    images = (image for family in found for kind in ("overviews", "singles") for image in family[kind])
    least = sorted({int(image["least"]) for image in images})
    rules = "".join(f".least-{width} {{ min-width: {width}px; }}\n" for width in least)
    return style_sheet((_ASSETS / "report.css").read_text(encoding="utf-8")) + rules


def _script() -> str:
    """Read the script, its parts in one scope of their own."""
    parts = "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'
