"""Which tokens of a sequence its constant depends on, for the page."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from howsmooth.study.names import readable
from howsmooth.study.report.data import rounded
from howsmooth.study.report.wording import place, plain, records

__all__ = ["MOST_ENERGIES", "first_shown", "piece", "sensitive"]

MOST_ENERGIES = 200_000
"""More numbers would make the page heavy: about three megabytes."""

_DIGITS = 3
_LEVELS = 9  # of shading, as in the script and the style sheet
_USUAL_LENGTH = 64
_LONGEST_PIECE = 40
_SIGNS = {"\n": "↵", "\r": "↵", "\t": "→"}


def sensitive(rows: pd.DataFrame) -> dict[str, Any] | None:
    """Put together the sequences with the energies of their tokens.

    Parameters
    ----------
    rows
        The sensitivities of a store.

    Returns
    -------
    dict or None
        ``names`` of models, texts and scopes; ``sequences``, each with its tokens as ``words``, which are
        ``apart`` if they are not together the text; ``rows``, one for each layer or head at a sequence, with
        the energies ``input`` and ``output``; ``start``, the row to begin with; ``total``, the number of rows
        that there are. None if there are none.

    """
    if rows.empty:
        return None
    kept = _thinned(rows)
    names = {axis: list(dict.fromkeys(kept[axis])) for axis in ("model", "text", "scope")}
    sequences: dict[tuple[Any, ...], int] = {}
    tokens: list[dict[str, Any]] = []
    found = []
    for row in records(kept):
        key = (row["model"], row["text"], row["n"], row["sample"])
        if key not in sequences:
            sequences[key] = len(sequences)
            words = [piece(token) for token in row["tokens"]]
            tokens.append({"words": words, "apart": row["place"] is None})
        found.append(
            {
                **{axis: names[axis].index(row[axis]) for axis in names},
                **{axis: row[axis] for axis in ("layer", "head", "n", "sample", "converged")},
                "sequence": sequences[key],
                "input": rounded(row["input_energy"], _DIGITS),
                "output": rounded(row["output_energy"], _DIGITS),
            }
        )
    return {
        "names": {axis: [plain(name) for name in all_] for axis, all_ in names.items()},
        "sequences": tokens,
        "rows": found,
        "start": _start(found, names["scope"]),
        "total": len(rows),
    }


def first_shown(found: dict[str, Any]) -> dict[str, Any]:
    """Describe the row to begin with for a page without a script.

    Returns
    -------
    dict
        The names of its ``model``, ``text`` and ``scope``, its ``place`` and ``n``, whether its
        tokens are ``apart``, and for ``input`` and ``output``
        the tokens with the level of their shading and their share in percent.

    """
    row = found["rows"][found["start"]]
    tokens = found["sequences"][row["sequence"]]
    return {
        **{axis: found["names"][axis][row[axis]] for axis in ("model", "text", "scope")},
        "place": place(row["layer"], row["head"]),
        "n": row["n"],
        "apart": tokens["apart"],
        **{side: _shaded(tokens["words"], row[side]) for side in ("input", "output")},
    }


def _shaded(tokens: list[str], energies: list[float]) -> list[tuple[str, int, str]]:
    most = max(energies)
    return [
        (token, round(_LEVELS * energy / most) if most > 0 else 0, f"{100 * energy:.2g} %")
        for token, energy in zip(tokens, energies, strict=True)
    ]


def piece(token: str) -> str:
    """Make a token fit to be shown in its line: what moves or hides words is made visible."""
    if token == "":
        return "∅"
    if len(token) > 2 * _LONGEST_PIECE:  # of which only the ends are shown
        token = token[:_LONGEST_PIECE] + token[-_LONGEST_PIECE:]
    signs = "".join(_SIGNS.get(letter, letter) for letter in token)
    return readable("".join(" " if letter.isspace() else letter for letter in signs), longest=_LONGEST_PIECE)


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    """Leave out lengths evenly, never the longest, until the page can hold the rest."""
    total = 2 * int(rows["n"].sum())
    step = math.ceil(total / MOST_ENERGIES)
    if step == 1:
        return rows
    lengths = sorted(rows["n"].unique(), reverse=True)
    return rows[rows["n"].isin(lengths[::step])]


def _start(rows: list[dict[str, Any]], scopes: list[str]) -> int:
    """Choose what to show first: a length that is read at a glance, a layer in the middle."""
    scope = scopes.index("attention") if "attention" in scopes else rows[0]["scope"]
    first = [row for row in rows if row["scope"] == scope]
    first = [row for row in first if (row["model"], row["text"]) == (first[0]["model"], first[0]["text"])]
    layers = sorted({row["layer"] for row in first})
    lengths = sorted({row["n"] for row in first})
    layer = layers[len(layers) // 2]
    n = max((length for length in lengths if length <= _USUAL_LENGTH), default=lengths[0])
    best = min(first, key=lambda row: (abs(row["n"] - n), abs(row["layer"] - layer), row["head"] or 0))
    return rows.index(best)
