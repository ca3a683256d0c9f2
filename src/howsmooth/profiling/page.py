"""Show a profile as HTML: a page for the browser, and a fragment of it for notebooks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from howsmooth.profiling.output_folder import write_result
from howsmooth.profiling.result import Profile
from howsmooth.study.html_assets import data_url, digest, png, style_sheet, templates_of
from howsmooth.study.records import plain_rows
from howsmooth.study.report.chart_data import visible_token
from howsmooth.study.text_formatting import place_in_words

__all__ = ["fragment", "write"]

_LEVELS = 9  # shades of a highlighted token
_ON_PAGE = 60  # rows whose tokens a page shows; tokens.csv has all
_IN_NOTEBOOK = 3


def write(profile: Profile, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the page, the figure and the tables of a profile into a folder, and return their paths.

    Raises
    ------
    StoreError
        If the folder cannot be written.

    """
    tables = {"profile": profile.table, "tokens": profile.tokens}
    if profile.influence is not None:
        tables["influence"] = profile.influence.table
    return write_result(folder, profile.plot(), profile.model, tables, lambda image: render(profile, image))


def render(profile: Profile, image: str) -> str:
    """Return the profile as an HTML page in a single file, without scripts."""
    style = style_sheet(_template("profile.css").render())
    page: str = _template("profile.html.jinja").render(
        profile=profile, style=Markup(style), style_digest=digest(style), body=_body(profile, image, _ON_PAGE)
    )
    return page


def fragment(profile: Profile) -> str:
    """Return the profile as HTML for notebooks: its figure, ranking and most sensitive tokens."""
    style = _template("profile.css").render()
    body = _body(profile, data_url(png(profile.plot())), _IN_NOTEBOOK)
    return f'<div class="howsmooth"><style>{style}</style>{body}</div>'


def _template(name: str) -> Any:
    return templates_of("howsmooth.profiling").get_template(name)


def _body(profile: Profile, image: str, most: int) -> Markup:
    ranking = profile.ranking
    ranking = pd.concat([rows.head(most) for _, rows in ranking.groupby("scope", sort=False)])
    found = [
        {
            "place": place_in_words(row["layer"], row["head"]),
            "scope": row["scope"],
            "value": f"{row['value']:.6g}",
            "lower": f"{row['lower']:.6g}",
            "upper": f"{row['upper']:.6g}",
            "converged": row["converged"],
            "sides": _sides(profile, row["layer"], row["head"]),
        }
        for row in plain_rows(ranking)
    ]
    influence = profile.influence
    pictured = None
    if influence is not None:
        words = profile.words if len(profile.words) == influence.value.shape[1] else None
        pictured = data_url(png(influence.plot(words)))
    return Markup(
        _template("body.html.jinja").render(
            profile=profile,
            image=image,
            rows=found,
            total=len(profile.table),
            shown=len(found),
            influence=pictured,
        )
    )


def _sides(profile: Profile, layer: int, head: int | None) -> list[tuple[str, list[tuple[int, str, str]]]]:
    """Return two titled lists of all tokens, shaded by their shares of the change of input and of output.

    A token is a triple: its shade, its text, and its share of the change in words.
    """
    rows = profile._tokens_of(layer, head)
    words = [visible_token(word) for word in profile.words] or [f" {i} " for i in rows["position"]]
    sides = []
    for title, column in (("A change matters at", "input_share"), ("It shows at", "output_share")):
        shares = rows[column].fillna(0.0).to_list()
        most = max(shares) or 1.0
        spans = [
            (round(_LEVELS * share / most), word, f"token {i}: {100 * share:.2g} %")
            for i, (share, word) in enumerate(zip(shares, words, strict=False))
        ]
        sides.append((title, spans))
    return sides
