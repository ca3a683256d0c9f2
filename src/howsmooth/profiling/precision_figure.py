"""Draw the result of ``precision``: what quantised keys and values change, predicted and simulated."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from howsmooth.profiling.precision_result import Precision
from howsmooth.study.figures.style import (
    GREY,
    STYLE,
    add_colourbar,
    draw_cells,
    literal,
    logarithmic,
    new_figure,
    set_axis,
)

__all__ = ["draw"]

_CELL = 0.3  # inches
_SCATTER = 4.2  # inches
_MARKERS = {"K": "o", "V": "^"}


def draw(found: Precision) -> Figure:
    """Draw the predicted effects of quantised keys, those of quantised values, and the real effects.

    The first two panels have a cell for each layer and head, at the fewest bits and with the first quantiser
    of the table. Effects are divergences of the predictions for a model with logits, otherwise changes of the
    attention's output.
    """
    with rc_context(STYLE):
        return _drawn(found)


def _drawn(found: Precision) -> Figure:
    predicted, real = ("predicted_kl", "kl") if found.has_kl else ("predicted", "change")
    table = found.table
    bits, quantiser = int(table["bits"].min()), table["quantiser"].iloc[0]
    shown = table[(table["bits"] == bits) & (table["quantiser"] == quantiser)]
    cells = shown.pivot_table(index="layer", columns=["operand", "head"], values=predicted)
    height = max(3.0, 1.6 + _CELL * len(cells))
    width = max(1.6, _CELL * cells.shape[1] / 2)
    figure = new_figure(_SCATTER + 2.4 + 2 * width, height)
    keys, values, scatter = figure.subplots(1, 3, width_ratios=[width, width, _SCATTER])
    norm = logarithmic(shown[predicted].to_numpy())
    for axis, operand, title in ((keys, "K", "keys"), (values, "V", "values")):
        _heatmap(axis, cells[operand], norm)
        axis.set_title(title)
    values.set_yticklabels([])
    values.set_ylabel("")
    what = "divergence (nats)" if found.has_kl else "change of the output"
    add_colourbar(figure, values, norm, "")
    _scatter(scatter, table, predicted, real)
    scatter.set(xlabel=f"predicted {what}", ylabel=f"real {what}", title="each row of the table")
    shades = f"colours: predicted {what}, {bits} bits, {quantiser}"
    figure.suptitle(f"{literal(found.model)}, one input of {found.n} tokens; {shades}", fontsize=10)
    return figure


def _heatmap(axis: Axes, cells: pd.DataFrame, norm: Normalize) -> None:
    draw_cells(axis, cells.to_numpy(), norm)
    axis.set_xticks(range(cells.shape[1]), [str(head) for head in cells.columns])
    axis.set_yticks(range(len(cells)), [str(layer) for layer in cells.index])
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axis.set(xlabel="key/value head", ylabel="layer")


def _scatter(axis: Axes, table: pd.DataFrame, predicted: str, real: str) -> None:
    rows = table[(table[predicted] > 0) & (table[real] > 0)]
    for operand, marker in _MARKERS.items():
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
