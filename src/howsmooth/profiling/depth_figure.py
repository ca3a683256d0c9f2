"""Draw a depth profile: the constants down a model's depth, beside the product of its stages' constants."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from howsmooth.profiling.depth import DepthProfile
from howsmooth.profiling.output_folder import write_result
from howsmooth.study.figures.style import STYLE, literal, new_figure

__all__ = ["draw", "write"]

_CURVES = {
    "product": ("product of the stages", "--"),
    "until": ("embeddings to here", "-"),
    "beyond": ("here to the output", "-"),
    "own": ("the stage alone", ":"),
}


def draw(profile: DepthProfile) -> Figure:
    """Draw the constants of all stages on a logarithmic axis, with their intervals as bars."""
    with rc_context(STYLE):
        table = profile.table
        figure = new_figure(max(4.6, 2.4 + 0.3 * len(table)), 3.4)
        axis = figure.subplots()
        for column, (label, line) in _CURVES.items():
            values = table[column]
            bars = None
            if column != "product":
                limits = table[[f"{column}_lower", f"{column}_upper"]]
                below, above = (limits.iloc[:, i].sub(values).abs() for i in (0, 1))
                bars = [below.to_numpy(), above.to_numpy()]
            axis.errorbar(
                range(len(table)), values, bars, linestyle=line, marker="o", markersize=3, label=label
            )
        axis.set_yscale("log")
        step = -(-len(table) // 16)
        names = [stage.removeprefix("block ") for stage in table["stage"]]
        axis.set_xticks(range(0, len(table), step), names[::step], rotation=45 if len(table) > 8 else 0)
        axis.set(xlabel="block", ylabel="local Lipschitz constant")
        axis.legend()
        axis.set_title(literal(f"{profile.model}, {profile.n} tokens, to the {profile.output}"), pad=8)
        return figure


def write(profile: DepthProfile, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the figure and the table of a depth profile into a folder, and return their paths.

    Raises
    ------
    StoreError
        If the folder cannot be written.

    """
    return write_result(folder, profile.plot(), profile.model, {"depth": profile.table})
