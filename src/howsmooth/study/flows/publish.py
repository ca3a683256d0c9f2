"""What is written beside the store of a flow: the trajectory, its metrics, a figure and an animation."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float64

from howsmooth.errors import StoreError
from howsmooth.study.figures.flow_animation import animate_flow
from howsmooth.study.figures.flow_view import FlowView
from howsmooth.study.figures.flows import FlowPicture, draw_flow
from howsmooth.study.files import write_table
from howsmooth.study.flows.metrics import Measured, measure_frames
from howsmooth.study.flows.store import Ending, FlowStore, Frame

__all__ = ["PublishedFlow", "publish_flow"]

_MOST_SHOWN = 3


@dataclass(frozen=True)
class PublishedFlow:
    """What was written, and what it was written from.

    Attributes
    ----------
    metrics
        One row a frame.
    growth
        Of perturbations, at some times; without rows if it was not measured.
    tolerance
        Tokens nearer than this count as one cluster.
    ending
        Why the flow ended early, if it did.
    last
        The time of the last frame.
    picture, animation
        The figure, and the moving one if it was asked for.
    trajectory, table
        The other files.

    """

    metrics: pd.DataFrame
    growth: pd.DataFrame
    tolerance: float
    ending: Ending | None
    last: float
    picture: FlowPicture
    animation: Path | None
    trajectory: Path
    table: Path


def publish_flow(
    folder: Path,
    *,
    title: str,
    ordered: bool,
    animation: str,
    tolerance: float | None,
    on_part: Callable[[str], None] = lambda words: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PublishedFlow:
    """Write ``trajectory.npz``, ``metrics.csv``, ``flow.png``, ``flow.pdf`` and an animation beside a store.

    Parameters
    ----------
    folder
        That holds the store.
    title
        What flows, for the figure.
    ordered
        Whether tokens see those before them only, so that they are coloured by their place.
    animation
        ``gif``, ``mp4`` or ``none``.
    tolerance
        Tokens nearer to each other than this are one cluster; ``None`` for a twentieth of how far the tokens
        are from their mean at the start, as root mean square.
    on_part, on_progress
        Told what begins, and how much of it is done.

    Raises
    ------
    StoreError
        If the store cannot be read or a file cannot be written.

    """
    try:
        with FlowStore.open(folder, write=False) as store:
            identity, ending, growth = store.identity(), store.ending(), store.growth()
            on_part("Measuring clusters")
            measured = measure_frames(store, tolerance, on_progress)
            trajectory = _write_trajectory(store, folder / "trajectory.npz")
            view = _view(store, measured, title, _below(identity, ending), ordered=ordered)
        table = write_table(measured.table, folder, "metrics.csv")
        if len(growth):
            write_table(growth, folder, "growth.csv")
        on_part("Drawing")
        picture = draw_flow(view, folder)
        moving = animate_flow(view, folder, animation, on_progress)
    except OSError as error:
        raise StoreError(
            f"{error.filename or folder} cannot be written: {error.strerror}. The frames are kept in "
            f"{folder}; make it writable or make room, and run the same command again."
        ) from error
    return PublishedFlow(
        measured.table,
        growth,
        measured.tolerance,
        ending,
        float(view.times[-1]),
        picture,
        moving,
        trajectory,
        table,
    )


def _below(identity: dict[str, object], ending: Ending | None) -> str:
    words = [f"{identity['n']} tokens in dimension {identity['d']}", str(identity["method"])]
    if identity["step"] is not None:
        words[-1] += f", step {identity['step']:g}"
    if identity["sphere"]:
        words.append("on a sphere")
    if identity["rescale"]:
        words.append("rescaled by exp(\N{MINUS SIGN}tV)")
    if ending is not None:
        words.append(f"{ending.status} at t = {ending.lower:.4g}")
    return "; ".join(words)


def _frames(store: FlowStore) -> Iterator[Frame]:
    """Read the frames one after another: no more than one is in memory."""
    for place in range(store.count()):
        yield store.frame(place)


def _write_trajectory(store: FlowStore, path: Path) -> Path:
    """Write all frames as NumPy reads them: ``times``, ``states`` and what there is of a Gaussian measure."""
    first = store.frame(0)
    shapes = {"times": (), "states": tuple(first.x.shape)}
    if first.mean is not None:
        d = first.x.shape[1]
        shapes |= {"mean": (d,), "covariance": (d, d)}
    partial = path.with_name(f".{path.name}.partial")
    with zipfile.ZipFile(partial, "w") as archive:
        for name, shape in shapes.items():
            # No date, so that the same flow gives the same file.
            member = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(member, "w", force_zip64=True) as file:
                header = {"descr": "<f8", "fortran_order": False, "shape": (store.count(), *shape)}
                np.lib.format.write_array_header_1_0(file, header)
                for frame in _frames(store):
                    file.write(_numbers(frame, name).astype("<f8").tobytes())
    partial.replace(path)
    return path


def _numbers(frame: Frame, name: str) -> Float64[np.ndarray, "..."]:
    if name == "times":
        return np.array(frame.time)
    of_frame = {"states": frame.x, "mean": frame.mean, "covariance": frame.covariance}[name]
    assert of_frame is not None
    return np.asarray(of_frame.numpy())


def _view(store: FlowStore, measured: Measured, title: str, below: str, *, ordered: bool) -> FlowView:
    """Choose the coordinates to show: all if there are few, or else those in which the tokens spread most."""
    d = store.frame(0).x.shape[1]
    if d <= _MOST_SHOWN:
        basis, names = np.eye(d), tuple(f"coordinate {i + 1}" for i in range(d))
    else:
        basis, share = _principal(store, d)
        names = tuple(f"principal direction {i + 1} ({100 * part:.0f} %)" for i, part in enumerate(share))
    times, points, means, covariances = [], [], [], []
    for frame in _frames(store):
        times.append(frame.time)
        points.append(frame.x.numpy() @ basis)
        if frame.mean is not None and frame.covariance is not None:
            means.append(frame.mean.numpy() @ basis)
            covariances.append(basis.T @ frame.covariance.numpy() @ basis)
    growth = store.growth()
    on_sphere = bool(store.identity()["sphere"]) and d in (2, 3)
    return FlowView(
        title=title,
        below=below,
        times=np.array(times),
        points=np.stack(points),
        axes=names,
        metrics=measured.shown,
        ordered=ordered,
        clusters=measured.clusters,
        mean=np.stack(means) if means else None,
        covariance=np.stack(covariances) if covariances else None,
        sphere=float(store.frame(0).x[0].norm()) if on_sphere else None,
        growth=growth if len(growth) else None,
    )


def _principal(store: FlowStore, d: int) -> tuple[Float64[np.ndarray, "d 2"], Float64[np.ndarray, " 2"]]:
    """Return the two directions in which tokens spread most, over all frames alike, and their shares."""
    total = np.zeros((d, d))
    for frame in _frames(store):
        x = frame.x.numpy()
        x = x / max(float(np.abs(x).max()), np.finfo(np.float64).tiny)
        x = x - x.mean(axis=0)
        spread = x.T @ x
        total += spread / max(float(np.trace(spread)), np.finfo(np.float64).tiny)
    values, vectors = np.linalg.eigh(total)
    basis = vectors[:, ::-1][:, :2]
    basis = basis * np.sign(basis[np.abs(basis).argmax(axis=0), [0, 1]])
    return basis, values[::-1][:2] / max(float(values.sum()), np.finfo(np.float64).tiny)
