"""Write the states of a flow as rows of the store (frames), and read them as tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.errors import StoreError
from howsmooth.study.records import Ending, FrameRow
from howsmooth.study.store import Store

__all__ = ["ending", "frame_at", "frame_row", "frames", "gaussian_of", "tokens_of"]


def frame_row(
    place: int,
    time: float,
    x: Float64[Tensor, "n d"],
    gaussian: tuple[Tensor, Tensor] | None = None,
    evaluations: int = 0,
    seconds: float = 0.0,
) -> FrameRow:
    """Return the row of a frame: its index, its time, the tokens, and the Gaussian's mean and covariance."""
    mean, covariance = (None, None) if gaussian is None else map(_bytes, gaussian)
    n, d = x.shape
    return FrameRow(place, time, n, d, _bytes(x), mean, covariance, evaluations, seconds)


def tokens_of(frame: FrameRow) -> Float64[Tensor, "n d"]:
    """Return the tokens of a stored state of a flow (a frame), as a tensor of shape (n, d)."""
    return _tensor(frame.x, frame.n, frame.d)


def gaussian_of(frame: FrameRow) -> tuple[Float64[Tensor, " d"], Float64[Tensor, "d d"]] | None:
    """Return the mean and the covariance of the Gaussian in a frame; None if the flow has no Gaussian."""
    if frame.mean is None or frame.covariance is None:
        return None
    return _tensor(frame.mean, frame.d), _tensor(frame.covariance, frame.d, frame.d)


def frame_at(store: Store, place: int) -> FrameRow:
    """Read the stored state of a flow (frame) that has a given index in the store.

    Raises
    ------
    StoreError
        If the frame is missing.

    """
    for row, _ in store.rows(FrameRow, place=place):
        return row
    raise StoreError(f"{store.path} is damaged (frame {place} is missing). Choose another --out.")


def frames(store: Store) -> Iterator[FrameRow]:
    """Yield the stored states of a flow (frames) from a store, with only one in memory at a time."""
    return (frame_at(store, place) for place in range(store.count(FrameRow)))


def ending(store: Store) -> Ending | None:
    """Return the reason why the flow ended early; None if it did not."""
    return next((row for row, _ in store.rows(Ending)), None)


def _bytes(x: Tensor) -> bytes:
    # Write little-endian bytes on every machine.
    return x.detach().cpu().contiguous().numpy().astype("<f8").tobytes()


def _tensor(content: bytes, *shape: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype="<f8").astype(np.float64).reshape(shape))
