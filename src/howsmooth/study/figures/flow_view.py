"""Prepare a flow for drawing: points in one to three coordinates, colours, and limits of the axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int
from matplotlib import colormaps
from matplotlib.colors import to_rgba_array

__all__ = ["ELLIPSE", "FlowView", "cluster_colours", "limits_of", "outline", "shown_tokens"]

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
        The Gaussian measure in the drawn coordinates, if it is followed.
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
    """Return a colour for each cluster of two or more tokens; empty if clusters outnumber the colours."""
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
    mean: Float64[np.ndarray, " 2"], covariance: Float64[np.ndarray, "2 2"], corners: int = 100
) -> Float64[np.ndarray, "corners 2"]:
    """Return points on a Gaussian's ellipse in the plane, two standard deviations from the mean."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    angles = np.linspace(0.0, 2 * math.pi, corners)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    root = vectors * np.sqrt(np.clip(values, 0.0, None))
    return np.asarray(mean + _SIGMAS * (root @ circle).T, dtype=np.float64)


def limits_of(
    view: FlowView, frames: Sequence[int] | slice, *, margin: float = 0.06
) -> list[tuple[float, float]]:
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
    half = np.maximum(half, floor) * (1 + 2 * margin)
    return [(float(m - h), float(m + h)) for m, h in zip(middle, half, strict=True)]
