"""The frames of a flow: tokens as they are at one time, in memory and in the store."""

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
"""The kind of work, as the store has it."""


@dataclass(frozen=True, eq=False)
class Frame:
    """The state of a flow at one time, as :class:`~howsmooth.study.records.FrameRow` keeps it.

    ``place`` is 0 for the start; ``mean`` and ``covariance`` are those of the Gaussian measure beside the
    tokens ``x``, if it is followed; ``evaluations`` of the field since the frame before took ``seconds``.
    """

    place: int
    time: float
    x: Float64[Tensor, "n d"]
    mean: Float64[Tensor, " d"] | None = None
    covariance: Float64[Tensor, "d d"] | None = None
    evaluations: int = 0
    seconds: float = 0.0

    def row(self) -> FrameRow:
        """Return the frame as the store keeps it."""
        n, d = self.x.shape
        mean = None if self.mean is None else _bytes(self.mean)
        covariance = None if self.covariance is None else _bytes(self.covariance)
        return FrameRow(
            self.place, self.time, n, d, _bytes(self.x), mean, covariance, self.evaluations, self.seconds
        )

    @classmethod
    def of(cls, row: FrameRow) -> Frame:
        """Return the frame that a row of the store holds."""
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
    """Count the frames of a store, the start included."""
    return store.count(FrameRow)


def frame_at(store: Store, place: int) -> Frame:
    """Read the frame at a place.

    Raises
    ------
    StoreError
        If it is missing.

    """
    for row, _ in store.rows(FrameRow, place=place):
        return Frame.of(row)
    raise StoreError(f"{store.path} is damaged (frame {place} is missing). Choose another --out.")


def frames(store: Store) -> Iterator[Frame]:
    """Read the frames one after another: no more than one is in memory."""
    return (frame_at(store, place) for place in range(count_frames(store)))


def ending(store: Store) -> Ending | None:
    """Say why there are no more frames, if there is a reason."""
    return next((row for row, _ in store.rows(Ending)), None)


def _bytes(x: Tensor) -> bytes:
    # Little-endian wherever the file is written.
    return x.detach().cpu().contiguous().numpy().astype("<f8").tobytes()


def _tensor(content: bytes, *shape: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype="<f8").astype(np.float64).reshape(shape))
