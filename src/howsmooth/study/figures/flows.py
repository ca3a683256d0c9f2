"""Draw a flow of tokens: one figure of their paths and of metrics against time, and an animated GIF."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int
from matplotlib import colormaps, rc_context
from matplotlib.animation import PillowWriter
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from mpl_toolkits.mplot3d.art3d import Line3DCollection

from howsmooth.study.figures.drawing import GREY, STYLE, literal, new_figure, save
from howsmooth.study.progress_listener import Listener

__all__ = [
    "ELLIPSE", "FlowView", "animate_flow", "cluster_colours", "draw_flow", "limits_of", "map_axis",
    "outline", "set_limits", "shown_tokens",
]  # fmt: skip

_LEAST_SPAN = 0.02
_MARGIN = 0.06
ELLIPSE = "#c1121f"
"""The colour of the Gaussian measure that is drawn beside the tokens."""

# Colours of Okabe and Ito, which colour-blind readers can distinguish, without those too light on white.
_CLUSTERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#000000")
_ALONE = "#8c8c8c"
_MOST_SHOWN = 1000
_SIGMAS = 2.0


@dataclass(frozen=True, eq=False)
class FlowView:
    """The points, colours and labels with which a flow is drawn.

    Attributes
    ----------
    title, below
        The title and the subtitle.
    times
        The times of the frames.
    points
        The tokens in the drawn coordinates, of shape (frames, n, k) with k from 1 to 3.
    axes
        The names of these coordinates.
    metrics
        Columns to draw against ``times`` beside the paths; their names are the titles of the panels.
    ordered
        Whether to colour tokens by their position in the sequence. Otherwise they are coloured by their
        final cluster, if some tokens end in the same cluster.
    clusters
        The number of the final cluster of each token.
    mean, covariance
        The mean and covariance of the Gaussian measure in the drawn coordinates, if the flow has one.
    sphere
        The radius of the sphere on which the tokens move, if it can be drawn.
    growth
        The growth of perturbations, if it was measured, with the columns ``time``, ``value``, ``lower``,
        ``upper`` and ``product``.

    """

    title: str
    below: str
    times: Float64[np.ndarray, " frames"]
    points: Float64[np.ndarray, "frames n k"]
    axes: tuple[str, ...]
    metrics: pd.DataFrame
    ordered: bool
    clusters: Int[np.ndarray, " n"]
    mean: Float64[np.ndarray, "frames k"] | None = None
    covariance: Float64[np.ndarray, "frames k k"] | None = None
    sphere: float | None = None
    growth: pd.DataFrame | None = None

    @cached_property
    def colours(self) -> Float64[np.ndarray, "n 4"]:
        """The colour of each token, as RGBA."""
        named = {} if self.ordered else cluster_colours(self.clusters)
        if not named:
            places = np.linspace(0.0, 0.92, len(self.clusters))
            return np.asarray(colormaps["viridis"](places), dtype=np.float64)
        each = [named.get(int(one), _ALONE) for one in self.clusters]
        return np.asarray(to_rgba_array(each), dtype=np.float64)

    @property
    def by_place(self) -> bool:
        """True if colours show the position of a token in the sequence, rather than its cluster."""
        return self.ordered or not cluster_colours(self.clusters)

    @property
    def dimensions(self) -> int:
        """The number of drawn coordinates, from one to three."""
        return int(self.points.shape[2])


def cluster_colours(clusters: Int[np.ndarray, " n"]) -> dict[int, str]:
    """Return a dictionary from the number of each cluster of two or more tokens to its colour.

    The dictionary is empty if there are more clusters than colours.
    """
    sizes = np.bincount(clusters)
    together = np.flatnonzero(sizes > 1)
    if len(together) > len(_CLUSTERS):
        return {}
    by_size = together[np.argsort(-sizes[together], kind="stable")]
    return {int(one): _CLUSTERS[place] for place, one in enumerate(by_size)}


def shown_tokens(n: int) -> Int[np.ndarray, " shown"]:
    """Return the indices of the tokens to draw: all, or at most 1,000 that are evenly spaced."""
    return np.unique(np.linspace(0, n - 1, min(n, _MOST_SHOWN)).round().astype(np.int64))


def outline(
    mean: Float64[np.ndarray, " 2"], covariance: Float64[np.ndarray, "2 2"]
) -> Float64[np.ndarray, "corners 2"]:
    """Return points on the ellipse of a Gaussian in the plane at two standard deviations from its mean."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    angles = np.linspace(0.0, 2 * math.pi, 100)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    root = vectors * np.sqrt(np.clip(values, 0.0, None))
    return np.asarray(mean + _SIGMAS * (root @ circle).T, dtype=np.float64)


def limits_of(view: FlowView, frames: Sequence[int] | slice) -> list[tuple[float, float]]:
    """Return axis limits that contain all tokens and Gaussian ellipses in some frames of a flow.

    With two or three coordinates, all axes have the same length, so that a circle looks like a circle.
    """
    points = view.points[frames].reshape(-1, view.dimensions)
    if view.mean is not None and view.covariance is not None and view.dimensions == 2:
        ellipses = [outline(m, c) for m, c in zip(view.mean[frames], view.covariance[frames], strict=True)]
        points = np.concatenate([points, *ellipses])
    low, high = points.min(axis=0), points.max(axis=0)
    # Divide before adding or subtracting: high - low could overflow.
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    if view.dimensions > 1:
        half = np.full_like(half, half.max())
    floor = 1e-3 * np.maximum(np.abs(middle), 1e-300)
    half = np.maximum(half, floor) * (1 + 2 * _MARGIN)
    return [(float(m - h), float(m + h)) for m, h in zip(middle, half, strict=True)]


# ---- The figure


def draw_flow(view: FlowView, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Draw a flow into ``flow.png`` and ``flow.pdf`` in a folder, and return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure = new_figure(9.8, 5.4)
        parts = figure.add_gridspec(1, 2, width_ratios=[1.75, 1])
        axis = map_axis(figure, view, parts[0, 0])
        _draw_paths(axis, view)
        set_limits(axis, view, limits_of(view, slice(None)))
        if view.by_place:
            _add_order(figure, axis, view)
        figure.legend(
            handles=_handles(view), loc="outside lower left", ncols=4, handlelength=1.6, columnspacing=1.4
        )
        _draw_metrics(figure, parts[0, 1], view)
        figure.suptitle(literal(f"{view.title}\n{view.below}"))
        return save(figure, folder, "flow", view.title)


def map_axis(figure: Figure, view: FlowView, place: Any) -> Any:
    """Add axes in which to draw tokens: one coordinate against time, two in the plane, or three in space."""
    if view.dimensions == 3:
        axis: Any = figure.add_subplot(place, projection="3d")
        axis.set(xlabel=view.axes[0], ylabel=view.axes[1], zlabel=view.axes[2])
        axis.set_box_aspect((1, 1, 1), zoom=0.95)
        axis.tick_params(labelsize=8, pad=0)
        for one in (axis.xaxis, axis.yaxis, axis.zaxis):
            one.set_pane_color((1.0, 1.0, 1.0, 0.0))
            one.set_major_locator(MaxNLocator(5))
        axis.grid(visible=False)
        if view.sphere is not None:
            _draw_globe(axis, view.sphere)
        return axis
    axis = figure.add_subplot(place)
    if view.dimensions == 1:
        axis.set(xlabel="time t", ylabel=view.axes[0])
    else:
        axis.set(xlabel=view.axes[0], ylabel=view.axes[1])
        axis.set_aspect("equal", adjustable="box")
        if view.sphere is not None:
            angles = np.linspace(0.0, 2 * np.pi, 200)
            axis.plot(view.sphere * np.cos(angles), view.sphere * np.sin(angles), color="0.8", linewidth=0.8)
    axis.grid(visible=True, linewidth=0.4, color="0.9", zorder=0)
    axis.set_axisbelow(True)
    return axis


def set_limits(axis: Any, view: FlowView, limits: list[tuple[float, float]]) -> None:
    """Set the limits of axes in which tokens are drawn; a single coordinate is drawn against time."""
    if view.dimensions == 1:
        axis.set(xlim=(view.times[0], view.times[-1]) if len(view.times) > 1 else None, ylim=limits[0])
        return
    axis.set(xlim=limits[0], ylim=limits[1])
    if view.dimensions == 3:
        axis.set_zlim(limits[2])


def _draw_globe(axis: Any, radius: float) -> None:
    u, v = np.mgrid[0 : 2 * np.pi : 25j, 0 : np.pi : 13j]
    axis.plot_wireframe(
        radius * np.cos(u) * np.sin(v),
        radius * np.sin(u) * np.sin(v),
        radius * np.cos(v),
        color="0.85",
        linewidth=0.4,
    )


def _draw_paths(axis: Any, view: FlowView) -> None:
    """Draw the path of each token, with a hollow dot at its start and a full dot at its end."""
    shown = shown_tokens(view.points.shape[1])
    colours = view.colours[shown]
    ways = view.points[:, shown].swapaxes(0, 1)
    ends: dict[str, Any] = {"zorder": 4, "linewidths": 0.9, "clip_on": view.dimensions > 1}
    width = 1.0 if len(shown) <= 100 else 0.5
    if view.dimensions == 1:
        ways = np.stack([np.broadcast_to(view.times, ways.shape[:2]), ways[..., 0]], axis=-1)
    lines: Any = Line3DCollection if view.dimensions == 3 else LineCollection
    axis.add_collection(lines(ways, colors=colours, linewidths=width, alpha=0.55, zorder=2))
    size = 26 if len(shown) <= 100 else 10
    axis.scatter(*ways[:, 0].T, s=0.6 * size, facecolors="white", edgecolors=colours, **ends)
    axis.scatter(*ways[:, -1].T, s=size, c=colours, edgecolors="white", **(ends | {"linewidths": 0.4}))
    if view.mean is None or view.covariance is None:
        return
    if view.dimensions == 1:
        middle, spread = view.mean[:, 0], 2 * np.sqrt(view.covariance[:, 0, 0])
        axis.plot(view.times, middle - spread, color=ELLIPSE, linewidth=1.4, zorder=5)
        axis.plot(view.times, middle + spread, color=ELLIPSE, linewidth=1.4, zorder=5)
    if view.dimensions == 2:
        for place, dashes in ((0, (0.0, (3.0, 2.0))), (-1, "solid")):
            ring = outline(view.mean[place], view.covariance[place])
            axis.plot(*ring.T, color=ELLIPSE, linewidth=1.5, linestyle=dashes, zorder=5)


def _handles(view: FlowView) -> list[Line2D]:
    colour = GREY if not view.by_place else "#31688e"
    dot: dict[str, Any] = {"marker": "o", "linestyle": "none", "color": colour, "markersize": 5}
    handles = [
        Line2D([], [], markerfacecolor="white", label=f"start, t = {view.times[0]:.4g}", **dot),
        Line2D([], [], label=f"end, t = {view.times[-1]:.4g}", **dot),
    ]
    if view.mean is not None and view.dimensions < 3:
        words = "the Gaussian measure, two standard deviations"
        handles.append(Line2D([], [], color=ELLIPSE, linewidth=1.5, label=words))
    return handles


def _add_order(figure: Figure, axis: Any, view: FlowView) -> None:
    n = view.points.shape[1]
    scale = ScalarMappable(Normalize(1, max(n, 2)), ListedColormap(view.colours))
    bar = figure.colorbar(scale, ax=axis, pad=0.02, aspect=34, shrink=0.75)
    bar.ax.set_title("position of the token", loc="right", fontsize="medium")
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _draw_metrics(figure: Figure, place: Any, view: FlowView) -> None:
    """Draw a panel for each metric of a flow against time, one above the other."""
    rows = len(view.metrics.columns) + (view.growth is not None)
    places = place.subgridspec(rows, 1)
    above: Axes | None = None
    for row, name in enumerate(view.metrics.columns):
        axis = figure.add_subplot(places[row, 0], sharex=above)
        values = view.metrics[name].to_numpy(np.float64)
        there = np.isfinite(values)
        whole = bool(there.any()) and bool((values[there] == values[there].round()).all())
        axis.plot(
            view.times[there],
            values[there],
            color="#31688e",
            linewidth=1.4,
            drawstyle="steps-post" if whole else "default",
        )
        positive = values[there & (values > 0)]
        if not whole and len(positive) == there.sum() > 0 and positive.max() > 50 * positive.min():
            axis.set_yscale("log")
        else:
            axis.yaxis.set_major_locator(MaxNLocator(4, integer=whole))
            axis.ticklabel_format(axis="y", useOffset=False)
            _widen_limits(axis, values[there])
        _frame(axis, str(name), last=row == rows - 1)
        above = above or axis
    if view.growth is not None:
        _draw_growth(figure.add_subplot(places[rows - 1, 0], sharex=above), view.growth)


def _widen_limits(axis: Axes, values: Float64[np.ndarray, " times"]) -> None:
    """Widen the limits of an axis if its values hardly change, so that they look nearly constant."""
    if not len(values):
        return
    low, high = float(values.min()), float(values.max())
    least = _LEAST_SPAN * max(abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        axis.set_ylim(middle - least / 2, middle + least / 2)


def _draw_growth(axis: Axes, growth: pd.DataFrame) -> None:
    """Draw a curve of the growth of perturbations against time, and shade the interval around each value.

    A dashed line shows the product of the Lipschitz constants of all steps up to each time.
    """
    time, value = growth["time"].to_numpy(), growth["value"].to_numpy()
    axis.plot(
        time,
        growth["product"],
        color=GREY,
        linestyle=(0.0, (4.0, 2.0)),
        linewidth=1.2,
        label="product of steps",
    )
    axis.fill_between(time, growth["lower"], growth["upper"], color="#31688e", alpha=0.25, linewidth=0)
    axis.plot(time, value, color="#31688e", linewidth=1.4, marker="o", markersize=3, label="growth")
    if growth["product"].max() > 20 * value.min() > 0:
        axis.set_yscale("log")
    axis.legend(loc="upper left", fontsize=7.5, handlelength=1.8)
    _frame(axis, "growth of perturbations", last=True)


def _frame(axis: Axes, title: str, *, last: bool) -> None:
    axis.set_title(title, loc="left", fontsize=9, pad=3)
    axis.grid(visible=True, linewidth=0.4, color="0.9")
    axis.tick_params(labelsize=8, labelbottom=last)
    if last:
        axis.set_xlabel("time t")


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
    """The axes of an animation and a dot for each token; :meth:`show` draws them at a given frame."""

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
