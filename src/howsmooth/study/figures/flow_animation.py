"""Write an animation of a flow as a GIF."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.animation import PillowWriter
from matplotlib.collections import LineCollection
from mpl_toolkits.mplot3d.art3d import Line3DCollection

from howsmooth.study.figures.flows import (
    ELLIPSE,
    FlowView,
    limits_of,
    map_axis,
    outline,
    set_limits,
    shown_tokens,
)
from howsmooth.study.figures.style import STYLE, literal, new_figure
from howsmooth.study.progress_listener import Listener

__all__ = ["animate_flow"]

_MOST_FRAMES = 120
_TAIL = 12
_PER_SECOND = 15
_DOTS_PER_INCH = 90
_FAR = 3.0
_WIDTH = 72


def animate_flow(view: FlowView, folder: str | os.PathLike[str], listener: Listener) -> Path:
    """Write ``flow.gif`` with at most 120 evenly spaced frames into a folder, and return its path."""
    folder = Path(folder)
    frames = np.unique(np.linspace(0, len(view.times) - 1, min(len(view.times), _MOST_FRAMES)).round())
    path, partial = folder / "flow.gif", folder / ".flow.partial.gif"
    with rc_context(STYLE):
        figure = new_figure(5.4, 5.4)
        scene = _Scene(figure, view)
        writer = PillowWriter(_PER_SECOND)
        with writer.saving(figure, partial, _DOTS_PER_INCH):
            # Fix the layout at the last frame, which has the longest tick labels, so that the axes stand
            # still.
            scene.show(len(view.times) - 1)
            figure.canvas.draw()
            figure.set_layout_engine("none")
            for done, place in enumerate(frames.astype(int)):
                scene.show(int(place))
                writer.grab_frame()
                listener.advance(float(done + 1), float(len(frames)), f"{done + 1} of {len(frames)}")
    partial.replace(path)
    return path


class _Scene:
    """The axes of an animation with the tokens, which can be moved to their positions in any frame."""

    def __init__(self, figure: Any, view: FlowView) -> None:
        self._view = view
        self._shown = shown_tokens(view.points.shape[1])
        self._axis = map_axis(figure, view, 111)
        self._still = _common_limits(view)
        colours = view.colours[self._shown]
        lines: Any = Line3DCollection if view.dimensions == 3 else LineCollection
        empty = np.zeros((len(self._shown), 2, max(2, view.dimensions)))
        self._tails = lines(empty, colors=colours, linewidths=1.2, alpha=0.45, zorder=2)
        self._axis.add_collection(self._tails)
        dots: dict[str, Any] = {"s": 34 if len(self._shown) <= 100 else 12, "c": colours, "zorder": 4}
        dots |= {"edgecolors": "white", "linewidths": 0.5, "clip_on": view.dimensions > 1}
        if view.dimensions == 3:
            dots["depthshade"] = False
        self._dots = self._axis.scatter(*self._at(0).T, **dots)
        self._ring = None
        if view.mean is not None and view.dimensions == 2:
            (self._ring,) = self._axis.plot([], [], color=ELLIPSE, linewidth=1.6, zorder=5)
        figure.suptitle(literal(fill(view.title, _WIDTH)), fontsize=9.5)
        self._words = self._axis.set_title("t", loc="left", fontsize=9)
        if self._still is not None:
            set_limits(self._axis, view, self._still)

    def _at(self, place: int) -> np.ndarray:
        points = self._view.points[place, self._shown]
        if self._view.dimensions > 1:
            return np.asarray(points)
        return np.column_stack([np.full(len(points), self._view.times[place]), points[:, 0]])

    def show(self, place: int) -> None:
        """Move the tokens to their positions in a frame, and draw the last part of their paths."""
        view = self._view
        first = 0 if view.dimensions == 1 else max(0, place - _TAIL)
        ways = np.stack([self._at(one) for one in range(first, place + 1)], axis=1)
        self._tails.set_segments(list(ways))
        now = self._at(place)
        if view.dimensions == 3:
            self._dots._offsets3d = tuple(now.T)
        else:
            self._dots.set_offsets(now)
        if self._ring is not None and view.mean is not None and view.covariance is not None:
            self._ring.set_data(*outline(view.mean[place], view.covariance[place]).T)
        if self._still is None:
            set_limits(self._axis, view, limits_of(view, slice(first, place + 1)))
        self._words.set_text(f"t = {view.times[place]:.4g}")


def _common_limits(view: FlowView) -> list[tuple[float, float]] | None:
    """Return axis limits that contain all frames; None if the first frame would look too small in them."""
    whole = limits_of(view, slice(None))
    width, first = (max(high - low for low, high in one) for one in (whole, limits_of(view, [0])))
    return whole if view.dimensions == 1 or width <= _FAR * first else None
