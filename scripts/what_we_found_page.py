"""Draw the picture of real models in docs/evidence.md, and write its tables, from those of what_we_found.py.

python scripts/what_we_found_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from howsmooth.study.exponents import fit_exponent

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.tables import markdown, write

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLES = DOCS / "_static" / "what-we-found"
MODELS = (
    "builtin-encoder",
    "builtin-encoder (as decoder)",
    "builtin-decoder",
    "stories260k",
    "all-MiniLM-L6-v2",
    "capp_gpt",
    "gpt2 (random init)",
)
TEXTS = {"alice": "Alice", "ag_news": "AG_NEWS", "parts": "parts"}
PARTS = "parts"
NBSP = "\N{NO-BREAK SPACE}"
LEVEL = 0.05
QUANTITIES = {"corrected": ("#0b5fa5", "#7ab8f5", "o"), "as published": ("#b35900", "#ffab5e", "^")}


def read(name: str) -> pd.DataFrame:
    """Read one of the tables."""
    return pd.read_csv(TABLES / f"{name}.csv")


def in_order(table: pd.DataFrame, column: str, order: Sequence[str]) -> list[str]:
    """List the values of a column that are there, in a given order."""
    return [value for value in order if value in set(table[column])]


def holm(p: pd.Series, level: float = LEVEL) -> pd.Series:
    """Tell which hypotheses Holm's procedure refuses: a true one among them in at most 5 % of cases."""
    ordered = p.sort_values()
    left = len(p) - np.arange(len(p))
    return (ordered * left <= level).cummin().reindex(p.index)


def _ends(values: pd.Series) -> str:
    """Write the least and the largest, on one line."""
    return f"{values.min():.2f} to {values.max():.2f}".replace(" ", NBSP)


def _holds(fits: pd.DataFrame) -> int:
    return int((fits["quarter"] >= LEVEL).sum())


def answer() -> str:
    """Write the counts that the answer rests on, as sentences."""
    fits = read("attention")
    right, there = (fits[fits["quantity"] == quantity] for quantity in QUANTITIES)
    apart = right[["short_low", "short_high", "long_low", "long_high"]].dropna()
    bent = (apart["short_low"] > apart["long_high"]) | (apart["long_low"] > apart["short_high"])
    lines = [
        f"**Corrected**, {_spread(right)}",
        f"**As published**, {_spread(there)}",
        f"The corrected constant grows with $n$ in {_share(right['low'] > 0)} fits (the whole interval is "
        f"above zero), and more slowly than $\\sqrt{{n}}$ in {_share(right['high'] < 0.5)} (below 1/2).",
        "Fitted to $n \\le 16$ and to $n \\ge 24$ apart, the two corrected intervals have nothing in "
        f"common in {_share(bent)} cases.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _share(which: pd.Series) -> str:
    return f"{int(which.sum())} of {len(which)}"


def _spread(fits: pd.DataFrame) -> str:
    ends = [fits.loc[fits["slope"].idxmin()], fits.loc[fits["slope"].idxmax()]]
    low, high = (
        f"{end['slope']:.2f} (`{end['model']}`, layer {end['layer']}, {TEXTS[end['text']]})" for end in ends
    )
    distance = (fits["slope"] - 0.25).abs()
    return (
        f"{len(fits)} fits of a layer on a text: exponents from {low} to {high}, median "
        f"{fits['slope'].median():.2f}. They are {distance.median():.3f} away from 1/4 in "
        f"the median, and {(distance <= 0.03).sum()} are within 0.03 of it. 1/4 is in the 95 % interval of "
        f"{_holds(fits)}, and refused in {int(holm(fits['quarter']).sum())} by Holm's procedure over all "
        f"{len(fits)}."
    )


def models() -> str:
    """Write one row a model, over its layers and texts."""
    fits = read("attention")
    rows = []
    for model in in_order(fits, "model", MODELS):
        of = fits[fits["model"] == model]
        cells = []
        for quantity in QUANTITIES:
            part = of[of["quantity"] == quantity]
            cells += [_ends(part["slope"]), f"{_holds(part)} of {len(part)}"]
        ratio = of[of["quantity"] == "as published"]["ratio"]
        rows.append([f"`{model}`", *cells, _ends(ratio)])
    head = ["model", "corrected", "1/4 inside", "as published", "1/4 inside", "÷ corrected"]
    return markdown([head, *rows])


def whole() -> str:
    """Write one row a model: medians of the constant of the whole model, and the exponent in n."""
    found = read("whole")
    lengths = sorted(found["n"].unique())
    rows = []
    for model in in_order(found, "model", MODELS):
        of = found[found["model"] == model]
        middle = of.groupby("n")["lipschitz"].median()
        fit = fit_exponent(of["n"].to_numpy(), of["lipschitz"].to_numpy(), of["converged"].to_numpy())
        medians = [f"{middle[n]:.4g}" if n in middle else "" for n in lengths]
        rows.append([f"`{model}`", *medians, f"{fit.slope:.2f} [{fit.low:.2f}, {fit.high:.2f}]"])
    return markdown([["model", *map(str, lengths), "exponent in $n$"], *rows])


def _round(value: float, digits: int) -> str:
    """Write a large number with so many digits that are not zero."""
    return f"{float(f'{value:.{digits}g}'):,.0f}"


def depth() -> str:
    """Write one row a model: the constant until the middle block and of the whole model, and the product."""
    found = read("depth")
    rows = []
    for model in in_order(found, "model", MODELS):
        of = found[found["model"] == model]
        blocks = of[of["stage"].str.startswith("block")]["until"].to_list()
        last = of.iloc[-1]
        rows.append(
            [
                f"`{model}`",
                str(last["n"]),
                str(len(blocks)),
                f"{blocks[(len(blocks) - 1) // 2]:.4g}",
                f"{last['until']:.6g} [{last['until_lower']:.6g}, {last['until_upper']:.6g}]",
                _round(last["product"], 3),
                _round(1 / last["ratio"], 2),
            ]
        )
    head = ["model", "$n$", "blocks", "until the middle", "whole model", "product", "product / whole"]
    return markdown([head, *rows])


def tables() -> dict[str, str]:
    """Return every table of the page."""
    return {"answer": answer(), "models": models(), "whole": whole(), "depth": depth()}


def forest(*, dark: bool) -> Figure:
    """Draw every exponent with its interval, a panel for each text."""
    ink, back, grid = ("#e6e6e6", "#131416", "#3a3d42") if dark else ("#1a1a1a", "#ffffff", "#dcdcdc")
    fits = read("attention")
    fits = fits[fits["quantity"].isin(QUANTITIES)]
    texts = in_order(fits, "text", [text for text in TEXTS if text != PARTS])
    places = []
    for model in in_order(fits, "model", MODELS):
        places += [(model, layer) for layer in sorted(fits[fits["model"] == model]["layer"].unique())]
    gaps = np.cumsum([i > 0 and places[i][0] != places[i - 1][0] for i in range(len(places))])
    y = {place: i + 0.9 * gap for i, (place, gap) in enumerate(zip(places, gaps, strict=True))}
    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.edgecolor": grid,
        "axes.facecolor": back,
        "figure.facecolor": back,
        "savefig.facecolor": back,
    }
    with rc_context(style):
        figure = Figure(figsize=(2.4 + 2.5 * len(texts), 1.2 + 0.2 * max(y.values())), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(texts), sharey=True, sharex=True, squeeze=False)[0]
        for axis, text in zip(axes, texts, strict=True):
            # The parts of capp_gpt are its only text, and stand in the first panel.
            shown = fits[(fits["text"] == text) | ((fits["text"] == PARTS) & (text == texts[0]))]
            axis.axvline(0.25, color=ink, linewidth=1, linestyle=(0, (5, 3)), zorder=1)
            axis.axvline(0, color=grid, linewidth=1, zorder=0)
            axis.axvline(0.5, color=grid, linewidth=1, zorder=0)
            for quantity, (on_light, on_dark, marker) in QUANTITIES.items():
                colour = on_dark if dark else on_light
                of = shown[shown["quantity"] == quantity]
                at = np.array([y[place] for place in zip(of["model"], of["layer"], strict=True)])
                at = at + (-0.17 if quantity == "corrected" else 0.17)
                ends = np.array([of["slope"] - of["low"], of["high"] - of["slope"]])
                axis.errorbar(
                    of["slope"],
                    at,
                    xerr=ends,
                    fmt=marker,
                    color=colour,
                    markersize=4,
                    linewidth=1.3,
                    zorder=3,
                )
            axis.set_title(TEXTS[text], fontsize=10)
            axis.grid(visible=True, axis="y", linewidth=0.4, color=grid)
            axis.tick_params(length=0)
            for side in ("top", "right", "left"):
                axis.spines[side].set_visible(False)
        axes[0].set_yticks([y[place] for place in places], [f"layer {layer}" for _, layer in places])
        axes[0].set_ylim(max(y.values()) + 0.8, -1.3)
        axes[0].set_xticks([0, 0.25, 0.5, 0.75], ["0", "1/4", "1/2", "3/4"])
        axes[0].set_xlim(float(fits["low"].min()) - 0.03, float(fits["high"].max()) + 0.03)
        for model in dict.fromkeys(model for model, _ in places):
            first = min(y[place] for place in places if place[0] == model)
            words = model + (", on its parts" if model == "capp_gpt" else "")
            axes[0].text(
                -0.26,
                first - 0.75,
                words,
                transform=axes[0].get_yaxis_transform(),
                weight="bold",
                fontsize=8.5,
            )
        handles = [
            Line2D([], [], color=colours[dark], marker=colours[2], markersize=5, linewidth=1.3, label=name)
            for name, colours in QUANTITIES.items()
        ]
        figure.supxlabel("exponent s of the fit c·nˢ, with its 95 % interval", fontsize=9)
        figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    return figure


def main() -> None:
    """Draw, and fill the page."""
    for dark in (False, True):
        path = TABLES / f"exponents-{'dark' if dark else 'light'}.png"
        forest(dark=dark).savefig(path, dpi=150, metadata={"Software": "howsmooth"})
    write(tables())


if __name__ == "__main__":
    main()
