"""Draw the norms of the blocks of a Jacobian as a heatmap of output and input tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from howsmooth.study.figures.style import STYLE, add_colourbar, draw_cells, literal, logarithmic, new_figure
from howsmooth.study.text_formatting import readable
from howsmooth.token_influence.result import Influence

__all__ = ["draw"]

_MOST_WORDS = 64
_MOST_TICKS = 24
# Values below this share of the largest have one colour.
_RANGE = 1e-4


def draw(found: Influence, words: Sequence[str] | None) -> Figure:
    """Draw a figure with one cell for each output (row) and input token (column).

    Colours are logarithmic over four orders of magnitude. A cell is white where the norm is zero, and crossed
    out where its interval did not converge.
    """
    with rc_context(STYLE):
        return _drawn(found, words)


def _drawn(found: Influence, words: Sequence[str] | None) -> Figure:
    values = found.value.numpy()
    rows, n = values.shape
    shown = np.where(values > 0, values, np.nan)
    shown = np.maximum(shown, _RANGE * values.max())
    norm = logarithmic(shown)
    cell = 0.2 if words is not None and n <= _MOST_WORDS else max(0.02, min(0.2, 5.0 / n))
    figure = new_figure(max(4.2, 1.9 + cell * n), max(2.6, 1.4 + cell * rows))
    axis = figure.subplots()
    draw_cells(axis, shown, norm)
    for i, j in np.argwhere(~found.converged.numpy()):
        axis.text(j, i, "×", ha="center", va="center", color="white")
    step = 1 if words is not None and n <= _MOST_WORDS else -(-n // _MOST_TICKS)
    names = [str(j) for j in range(n)] if words is None else [literal(readable(word)) for word in words]
    axis.set_xticks(range(0, n, step), names[::step], rotation=0 if words is None else 90)
    step = 1 if words is not None and rows <= _MOST_WORDS else -(-rows // _MOST_TICKS)
    # Outputs that are no tokens, such as a margin, have no words.
    labels = [names[i] if found.token_outputs else str(i) for i in found.outputs]
    axis.set_yticks(range(0, rows, step), labels[::step])
    axis.set(xlabel="input token, which is moved", ylabel="output token" if found.token_outputs else "output")
    add_colourbar(figure, axis, norm, "‖∂y/∂x‖₂")
    return figure
