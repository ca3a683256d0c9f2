"""Draw the figure of the character model in docs/evidence.md, and write its table, from what train.py left.

python examples/characters/page.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tables import markdown, write

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOCS = HERE.parents[1] / "docs"
FIGURES = DOCS / "_static" / "character-model"
NBSP = "\N{NO-BREAK SPACE}"

#: Colour on light, colour on dark, dashes.
STYLES: dict[str, tuple[str, str, Any]] = {
    "plain": ("#1a1a1a", "#e6e6e6", "-"),
    "plain-short": ("#1a1a1a", "#e6e6e6", (0, (1, 1.5))),
    "spectral": ("#0b5fa5", "#7ab8f5", "-"),
    "spectral-strong": ("#0b5fa5", "#7ab8f5", (0, (4, 2))),
    "blocks": ("#00724f", "#5fd3a8", "-"),
    "jasmin": ("#b35900", "#ffab5e", "-"),
}
#: Where there are no lines.
MARKERS = {
    "plain": "o",
    "plain-short": "v",
    "spectral": "o",
    "spectral-strong": "s",
    "blocks": "D",
    "jasmin": "o",
}


class Results:
    """The tables of a folder."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.losses, self.layers, self.constants, self.robustness = (
            pd.read_csv(folder / f"{name}.csv", dtype={"layer": str})
            for name in ("losses", "layers", "constants", "robustness")
        )
        self.facts: dict[str, Any] = json.loads((folder / "setting.json").read_text("utf-8"))
        self.forms = list(dict.fromkeys(self.losses["form"]))
        self.seeds = sorted(self.losses["seed"].unique())

    def name(self, form: str) -> str:
        """Name a form and its strength."""
        given = self.facts["forms"][form]
        if given["penalty"] == "none":
            steps = round(given["share"] * self.facts["setting"]["steps"])
            return "plain" if given["share"] == 1 else f"plain, {steps} steps"
        names = {"spectral": "spectral", "blocks": "spectral of blocks", "jasmin": "JaSMin"}
        return f"{names[given['penalty']]}, {given['strength']:g}"

    def at_the_end(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of the last look at each run."""
        return table[table["step"] == table.groupby(["form", "seed"])["step"].transform("max")]

    def end_losses(self) -> pd.DataFrame:
        """Return the held-out loss at the end, a row a seed, a column a form."""
        end = self.at_the_end(self.losses)
        return end.pivot_table(index="seed", columns="form", values="held_out")[self.forms]

    def end_constants(self) -> pd.DataFrame:
        """Return constants at the end, mean over the windows, by form and seed, a column a layer."""
        return self.constants.pivot_table(index=["form", "seed"], columns="layer", values="constant")

    def largest(self) -> pd.DataFrame:
        """Return the largest constant of a layer at each look, mean over the probe windows."""
        return self.layers.groupby(["form", "seed", "step"], as_index=False)["lipschitz_mean"].max()


def spread(values: pd.Series, digits: str = ".2f") -> str:
    """Write the mean over the seeds, and the least and the largest."""
    return f"{values.mean():{digits}} ({values.min():{digits}} to {values.max():{digits}})".replace(" ", NBSP)


def outcome(results: Results) -> str:
    """Write one row a form: loss, constants and what a small attack does, at the end."""
    losses, constants = results.end_losses(), results.end_constants()
    attacked = results.robustness.set_index(["form", "kind", "size"])["rise"]
    layers = [layer for layer in constants.columns if layer != "whole"]
    rows = [
        [
            results.name(form),
            spread(losses[form], ".3f"),
            *(spread(constants.loc[form][layer]) for layer in layers),
            spread(constants.loc[form]["whole"], ".0f"),
            spread(attacked.loc[(form, "attack", 0.05)]),
        ]
        for form in results.forms
    ]
    head = ["penalty, strength", "held-out loss", *(f"layer {layer}" for layer in layers)]
    head += ["whole model", f"rise of the loss under attack of 5{NBSP}%"]
    return markdown([head, *rows])


# ---------------------------------------------------------------- figures


def style(*, dark: bool) -> dict[str, Any]:
    """Return colours and fonts."""
    ink, back, grid = ("#e6e6e6", "#131416", "#3a3d42") if dark else ("#1a1a1a", "#ffffff", "#dcdcdc")
    return {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.edgecolor": grid,
        "axes.facecolor": back,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": grid,
        "grid.linewidth": 0.4,
        "figure.facecolor": back,
        "savefig.facecolor": back,
    }


def curves(axis: Axes, data: pd.DataFrame, x: str, y: str, results: Results, *, dark: bool) -> None:
    """Draw the mean over the seeds and the range between them, for each form."""
    for form in results.forms:
        wide = data[data["form"] == form].pivot_table(index=x, columns="seed", values=y)
        colour, dashes = STYLES[form][dark], STYLES[form][2]
        axis.fill_between(
            wide.index, wide.min(axis=1), wide.max(axis=1), color=colour, alpha=0.15, linewidth=0
        )
        axis.plot(wide.index, wide.mean(axis=1), color=colour, linestyle=dashes, linewidth=1.5)


def legend(figure: Figure, results: Results, *, dark: bool) -> None:
    """Name the forms above the panels."""
    handles = [
        Line2D(
            [],
            [],
            color=STYLES[form][dark],
            linestyle=STYLES[form][2],
            marker=MARKERS[form],
            label=results.name(form),
        )
        for form in results.forms
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)


def training(results: Results, *, dark: bool) -> Figure:
    """Draw loss and largest constant over the steps, and the whole model's constant against the loss."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    first, second, third = figure.subplots(1, 3)
    curves(first, results.losses, "step", "held_out", results, dark=dark)
    learnt = results.losses[results.losses["step"] > 0]["held_out"]
    first.set(xlabel="step", ylabel="held-out loss (nats a character)")
    first.set_ylim(learnt.min() - 0.05, learnt.max() + 0.05)  # where it begins is no news
    curves(second, results.largest(), "step", "lipschitz_mean", results, dark=dark)
    second.set(xlabel="step", ylabel="largest constant of a layer", yscale="log")
    losses, whole = results.end_losses(), results.end_constants()["whole"]
    for form in results.forms:
        third.plot(
            losses[form],
            whole.loc[form],
            linestyle="none",
            marker=MARKERS[form],
            markersize=6,
            color=STYLES[form][dark],
        )
    third.set(xlabel="held-out loss at the end", ylabel="constant of the whole model", ylim=(0, None))
    legend(figure, results, dark=dark)
    return figure


def main(arguments: list[str] | None = None) -> None:
    """Draw, and fill the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of tables [results/]")
    parser.add_argument("--figures", type=Path, help="draw into this folder and leave the page alone")
    options = parser.parse_args(arguments)
    results = Results(options.results)
    folder = options.figures or FIGURES
    folder.mkdir(parents=True, exist_ok=True)
    for dark in (False, True):
        with rc_context(style(dark=dark)):
            path = folder / f"training-{'dark' if dark else 'light'}.png"
            training(results, dark=dark).savefig(path, dpi=150, metadata={"Software": "howsmooth"})
    if options.figures is None:
        write({"outcome": outcome(results)})


if __name__ == "__main__":
    main()
