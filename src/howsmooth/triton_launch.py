"""Launching of Triton kernels with the largest tile sizes that fit into the on-chip memory of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TileSize", "launch", "padded_width"]

_NARROWEST = 16  # columns of an operand of a matrix unit
# Index of the first tile that has fitted, for each kernel, dtype, device and set of options.
_fitted: dict[object, int] = {}


@dataclass(frozen=True)
class TileSize:
    """The numbers of query rows and keys in a tile of a Triton kernel, and of warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def padded_width(key_dim: int, value_dim: int) -> int:
    """Return the power of two to which a Triton kernel pads the number of columns of its matrices."""
    return max(_NARROWEST, 1 << (max(key_dim, value_dim) - 1).bit_length())


def launch(
    kernel: Any,
    tiles: Sequence[TileSize],
    grid: Callable[[TileSize], tuple[int, ...]],
    q: Tensor,
    arguments: Sequence[object],
    options: Mapping[str, object],
) -> None:
    """Run a Triton kernel with the largest of several ``tiles`` that fits into the on-chip memory of the GPU.
    If none fits, Triton's OutOfResources is raised.

    The tiles go from large to small, and the GPU is that of the queries ``q``. ``kernel`` is a compiled
    Triton function whose last constants are ``ROWS`` and ``KEYS``, ``options`` are its other constants, and
    ``grid`` returns the shape of the grid for a tile.
    """
    from triton.runtime.errors import OutOfResources

    case = (kernel, q.dtype, q.device, *options.values())
    for i in range(_fitted.get(case, 0), len(tiles)):
        tile = tiles[i]
        try:
            with torch.cuda.device_of(q):
                kernel[grid(tile)](
                    *arguments,
                    **options,
                    ROWS=tile.rows,
                    KEYS=tile.keys,
                    num_warps=tile.warps,
                    num_stages=tile.stages,
                )
        except OutOfResources:
            if tile is tiles[-1]:
                raise
        else:
            _fitted[case] = i
            return
