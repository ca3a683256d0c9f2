"""Draw matrices as coloured cells, for results on heads and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from howsmooth.results.drawing import COLOURS, literal

__all__ = ["Cells"]

_MOST_TICKS = 24


@dataclass(frozen=True, eq=False)
class Cells:
    """A matrix drawn as coloured cells. NaN stays white; cells marked in ``missed`` are crossed out.

    ``values`` has shape (rows, columns); ``rows`` and ``columns`` are their names, of which ``most`` stand
    beside the cells; names of columns that are ``words`` are upright.
    """

    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    x: str
    y: str = ""
    title: str = ""
    missed: np.ndarray | None = None
    most: int = _MOST_TICKS
    words: bool = False

    def draw(self, axis: Axes, norm: Normalize) -> None:
        """Draw the cells on the given axes, without tick marks or a frame."""
        axis.imshow(self.values, cmap=COLOURS, norm=norm, aspect="auto", interpolation="nearest")
        for i, j in np.argwhere(self.missed) if self.missed is not None else ():
            axis.text(j, i, "×", ha="center", va="center", color="white")
        for ticks, names in ((axis.set_xticks, self.columns), (axis.set_yticks, self.rows)):
            step = -(-len(names) // self.most) or 1
            ticks(range(0, len(names), step), [literal(name) for name in names[::step]])
        axis.tick_params(length=0)
        if self.words:
            axis.tick_params(axis="x", rotation=90)
        axis.set(xlabel=self.x, ylabel=self.y, title=self.title)
        for side in axis.spines.values():
            side.set_visible(False)
