"""Draw the results of profiles as heatmaps, curves and scatter plots."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from howsmooth.study.figures.drawing import (
    COLOURS,
    GREY,
    STYLE,
    add_colourbar,
    draw_cells,
    literal,
    logarithmic,
    new_figure,
    set_axis,
    set_bar_ticks,
)
from howsmooth.study.records import plain_rows

__all__ = ["draw_depth", "draw_heatmap", "draw_influence", "draw_precision", "draw_radii"]

_CELL = 0.32  # inches
_SMALL_CELL = 0.3  # inches
_SCATTER = 4.2  # inches
_MOST_TICKS = 24
_MOST_WORDS = 64
_CHARACTERS = 10  # characters of a title in an inch
_MARGIN = 0.8  # inches beside the axes
# Influences below this share of the largest have one colour.
_RANGE = 1e-4
_CURVES = {
    "product": ("product of the stages", "--"),
    "until": ("embeddings to here", "-"),
    "beyond": ("here to the output", "-"),
    "own": ("the stage alone", ":"),
}


def _wrapped(title: str, width: float) -> str:
    """Break a title into lines that fit into a width in inches, and keep Matplotlib from reading formulas."""
    return "\n".join(literal(fill(line, int(_CHARACTERS * width))) for line in title.split("\n"))


@rc_context(STYLE)
def draw_heatmap(table: pd.DataFrame, title: str) -> Figure:
    """Draw the constants as two heatmaps: the first has a cell for each head, the second has a cell for each
    whole layer.

    Colours are logarithmic. Each panel has its own colour scale, because heads and layers are maps between
    different spaces. A cell is crossed out if its measurement did not converge, and empty if it was not
    measured. The table has the columns of :attr:`howsmooth.Profile.table`.
    """
    layers = sorted(table["layer"].unique())
    of_head = table["head"].notna()
    panels = [rows for rows in (table[of_head], table[~of_head]) if len(rows)]
    columns = [max(1, rows["head"].nunique()) for rows in panels]
    width = max(4.6, _CELL * sum(columns) + 1.3 * len(panels))
    figure = new_figure(width, max(2.6, 1.6 + _CELL * len(layers)))
    # Each panel has its colour bar as a further axis, so that all cells have one size.
    ratios = [ratio for count in columns for ratio in (count, min(0.5, 0.08 * sum(columns)))]
    axes = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
    for axis, bar, rows in zip(axes[::2], axes[1::2], panels, strict=True):
        _draw_panel(axis, bar, rows, layers)
    axes[0].set_ylabel("layer")
    figure.suptitle(_wrapped(title, width))
    return figure


def _draw_panel(axis: Axes, bar: Axes, rows: pd.DataFrame, layers: list[int]) -> None:
    """Draw the constants of all heads, or of the whole layers, as a heatmap with a colour bar."""
    heads = sorted(int(head) for head in rows["head"].dropna().unique())
    values = np.full((len(layers), max(1, len(heads))), np.nan)
    missed = np.zeros(values.shape, dtype=bool)
    for row in plain_rows(rows):
        place = layers.index(row["layer"]), heads.index(row["head"]) if heads else 0
        values[place], missed[place] = row["value"], not row["converged"]
    norm = logarithmic(values)
    draw_cells(axis, values, norm)
    _cross_out(axis, missed)
    step = -(-len(heads) // _MOST_TICKS) or 1
    axis.set_xticks(range(0, len(heads), step), [str(head) for head in heads[::step]])
    axis.set_xlabel("head" if heads else "whole layer")
    down = -(-len(layers) // _MOST_TICKS)
    axis.yaxis.set_major_locator(FixedLocator(range(0, len(layers), down)))
    axis.set_yticklabels([str(layer) for layer in layers[::down]])
    set_bar_ticks(axis.figure.colorbar(ScalarMappable(norm, COLOURS), cax=bar), norm)


def _cross_out(axis: Axes, cells: np.ndarray) -> None:
    for i, j in np.argwhere(cells):
        axis.text(j, i, "×", ha="center", va="center", color="white")


@rc_context(STYLE)
def draw_depth(table: pd.DataFrame, title: str) -> Figure:
    """Draw the constants of the blocks of a model, and of the model up to and after each block, on a
    logarithmic axis. Error bars show the intervals of the constants.

    The table has the columns of :attr:`howsmooth.profiling.DepthProfile.table`.
    """
    figure = new_figure(max(4.6, 2.4 + 0.3 * len(table)), 3.8)
    axis = figure.subplots()
    for column, (label, line) in _CURVES.items():
        values = table[column]
        bars = None
        if column != "product":
            bars = [(table[f"{column}_{end}"] - values).abs().to_numpy() for end in ("lower", "upper")]
        axis.errorbar(range(len(table)), values, bars, linestyle=line, marker="o", markersize=3, label=label)
    axis.set_yscale("log")
    step = -(-len(table) // 16)
    names = [stage.removeprefix("block ") for stage in table["stage"]]
    # The first label, "embeddings", is wider than a step, so the labels are turned around their ends.
    ticks = range(0, len(table), step)
    axis.set_xticks(ticks, names[::step], rotation=45, ha="right", rotation_mode="anchor")
    axis.set(xlabel="block", ylabel="local Lipschitz constant")
    figure.legend(loc="outside lower center", ncols=2)
    axis.set_title(_wrapped(title, figure.get_figwidth() - _MARGIN), pad=8)
    return figure


@rc_context(STYLE)
def draw_radii(table: pd.DataFrame, names: Sequence[str], title: str) -> Figure:
    """Draw the robust radius of each token, and the size of the smallest attack that was found, on a
    logarithmic axis.

    The table has the columns of :attr:`howsmooth.profiling.WordRadii.table`. The labels of its rows are
    ``names``.
    """
    figure = new_figure(max(3.6, 1.6 + 0.24 * len(table)), 3.0)
    axis = figure.subplots()
    axis.plot(range(len(table)), table["radius"], "o", label="proved")
    attack = table["attack"].astype(float)
    if bool(attack.notna().any()):
        axis.plot(range(len(table)), attack, "v", mfc="none", label="smallest attack found")
    axis.set_yscale("log")
    axis.set_xticks(range(len(table)), [literal(name) for name in names], rotation=90)
    axis.set_ylabel("radius")
    figure.legend(loc="outside lower center", ncols=2)
    axis.set_title(_wrapped(title, figure.get_figwidth() - _MARGIN))
    return figure


@rc_context(STYLE)
def draw_precision(table: pd.DataFrame, title: str, *, divergences: bool) -> Figure:
    """Draw the predicted effects of quantising keys and values, and compare them with the simulated effects.

    The first two panels have one cell for each layer and head, for the smallest number of bits and the first
    quantiser in the table. The effects are divergences of the model's predictions if ``divergences`` is true,
    and changes of the attention's output otherwise. The table has the columns of
    :attr:`howsmooth.Precision.table`.
    """
    predicted, real = ("predicted_kl", "kl") if divergences else ("predicted", "change")
    bits, quantiser = int(table["bits"].min()), table["quantiser"].iloc[0]
    shown = table[(table["bits"] == bits) & (table["quantiser"] == quantiser)]
    cells = shown.pivot_table(index="layer", columns=["operand", "head"], values=predicted)
    height = max(3.0, 1.6 + _SMALL_CELL * len(cells))
    width = max(1.6, _SMALL_CELL * cells.shape[1] / 2)
    figure = new_figure(_SCATTER + 2.4 + 2 * width, height)
    keys, values, scatter = figure.subplots(1, 3, width_ratios=[width, width, _SCATTER])
    norm = logarithmic(shown[predicted].to_numpy())
    for axis, operand, name in ((keys, "K", "keys"), (values, "V", "values")):
        _draw_kv_heads(axis, cells[operand], norm)
        axis.set_title(name)
    values.set_yticklabels([])
    values.set_ylabel("")
    what = "divergence (nats)" if divergences else "change of the output"
    add_colourbar(figure, values, norm, "")
    _draw_scatter(scatter, table, predicted, real)
    scatter.set(xlabel=f"predicted {what}", ylabel=f"real {what}", title="each row of the table")
    shades = f"colours: predicted {what}, {bits} bits, {quantiser}"
    figure.suptitle(_wrapped(f"{title}; {shades}", figure.get_figwidth()), fontsize=10)
    return figure


def _draw_kv_heads(axis: Axes, cells: pd.DataFrame, norm: Normalize) -> None:
    draw_cells(axis, cells.to_numpy(), norm)
    axis.set_xticks(range(cells.shape[1]), [str(head) for head in cells.columns])
    axis.set_yticks(range(len(cells)), [str(layer) for layer in cells.index])
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axis.set(xlabel="key/value head", ylabel="layer")


def _draw_scatter(axis: Axes, table: pd.DataFrame, predicted: str, real: str) -> None:
    rows = table[(table[predicted] > 0) & (table[real] > 0)]
    for operand, marker in (("K", "o"), ("V", "^")):
        some = rows[rows["operand"] == operand]
        axis.plot(some[predicted], some[real], marker, markersize=3, alpha=0.6, label=operand)
    if rows.empty:
        return
    both = pd.concat([rows[predicted], rows[real]])
    ends = np.array([both.min(), both.max()])
    axis.plot(ends, ends, color=GREY, linewidth=0.8, zorder=1)
    set_axis(axis, "x", both)
    set_axis(axis, "y", both)
    axis.legend()


@rc_context(STYLE)
def draw_influence(
    values: np.ndarray,
    converged: np.ndarray,
    outputs: Sequence[int],
    words: Sequence[str] | None,
    *,
    token_outputs: bool,
) -> Figure:
    """Draw the norms of the blocks of a Jacobian as a heatmap, with a row for each output and a column for
    each input token.

    Colours are logarithmic over four orders of magnitude. A cell is white if the norm is zero, and crossed
    out if the measurement of the norm did not converge. Outputs that are not tokens, such as a margin of two
    logits, have no text as labels.
    """
    rows, n = values.shape
    shown = np.where(values > 0, values, np.nan)
    shown = np.maximum(shown, _RANGE * values.max())
    norm = logarithmic(shown)
    cell = 0.2 if words is not None and n <= _MOST_WORDS else max(0.02, min(0.2, 5.0 / n))
    figure = new_figure(max(4.2, 1.9 + cell * n), max(2.6, 1.4 + cell * rows))
    axis = figure.subplots()
    draw_cells(axis, shown, norm)
    _cross_out(axis, ~converged)
    across, down = (
        1 if words is not None and count <= _MOST_WORDS else -(-count // _MOST_TICKS) for count in (n, rows)
    )
    names = [str(j) for j in range(n)] if words is None else [literal(word) for word in words]
    axis.set_xticks(range(0, n, across), names[::across], rotation=0 if words is None else 90)
    # A single output that is no token, such as a margin, has no number of its own.
    alone = [""] if len(outputs) == 1 else [str(i) for i in outputs]
    labels = [names[i] for i in outputs] if token_outputs else alone
    axis.set_yticks(range(0, rows, down), labels[::down])
    axis.set(xlabel="input token, which is moved", ylabel="output token" if token_outputs else "output")
    add_colourbar(figure, axis, norm, "‖∂y/∂x‖₂")
    return figure
