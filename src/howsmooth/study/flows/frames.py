"""Define the frames of a flow, and read them from the store. A frame is the state at one time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.errors import StoreError
from howsmooth.study.records import Ending, FrameRow
from howsmooth.study.store import Store

__all__ = ["FLOW", "Frame", "count_frames", "ending", "frame_at", "frames"]

FLOW = "flow"
"""The value of ``StudyRecord.kind`` for flows."""


@dataclass(frozen=True, eq=False)
class Frame:
    """The state of a flow at one time.

    ``place`` is the index of the frame, 0 for the start. ``mean`` and ``covariance`` belong to the Gaussian
    measure that is followed beside the tokens ``x``, if any. ``evaluations`` counts the evaluations of the
    vector field since the previous frame, which took ``seconds``.
    """

    place: int
    time: float
    x: Float64[Tensor, "n d"]
    mean: Float64[Tensor, " d"] | None = None
    covariance: Float64[Tensor, "d d"] | None = None
    evaluations: int = 0
    seconds: float = 0.0

    def row(self) -> FrameRow:
        """Convert the frame to a row of the store."""
        n, d = self.x.shape
        mean = None if self.mean is None else _bytes(self.mean)
        covariance = None if self.covariance is None else _bytes(self.covariance)
        return FrameRow(
            self.place, self.time, n, d, _bytes(self.x), mean, covariance, self.evaluations, self.seconds
        )

    @classmethod
    def of(cls, row: FrameRow) -> Frame:
        """Convert a row of the store to a frame."""
        return cls(
            row.place,
            row.time,
            _tensor(row.x, row.n, row.d),
            None if row.mean is None else _tensor(row.mean, row.d),
            None if row.covariance is None else _tensor(row.covariance, row.d, row.d),
            row.evaluations,
            row.seconds,
        )


def count_frames(store: Store) -> int:
    """Return the number of frames in a store, including the start."""
    return store.count(FrameRow)


def frame_at(store: Store, place: int) -> Frame:
    """Read the frame with a given index.

    Raises
    ------
    StoreError
        If the frame is missing.

    """
    for row, _ in store.rows(FrameRow, place=place):
        return Frame.of(row)
    raise StoreError(f"{store.path} is damaged (frame {place} is missing). Choose another --out.")


def frames(store: Store) -> Iterator[Frame]:
    """Yield the frames of a store, with only one in memory at a time."""
    return (frame_at(store, place) for place in range(count_frames(store)))


def ending(store: Store) -> Ending | None:
    """Return the reason why the flow ended early; None if it did not."""
    return next((row for row, _ in store.rows(Ending)), None)


def _bytes(x: Tensor) -> bytes:
    # Write little-endian bytes on every machine.
    return x.detach().cpu().contiguous().numpy().astype("<f8").tobytes()


def _tensor(content: bytes, *shape: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype="<f8").astype(np.float64).reshape(shape))
