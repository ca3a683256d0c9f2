"""Memory for temporary tiles of the attention matrix. Later tiles and later products use it again."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

__all__ = ["Scratch"]

# Largest scratch memory, in bytes, that is kept for the next pass. A pass that needs more takes so long that
# the time to get fresh memory does not matter.
_LEFT = 1 << 23


# What a pass leaves to the next one in the same thread, as the attribute ``memory``.
_left = threading.local()


class Scratch:
    """Memory for the temporary tensors of one pass over all tiles of the attention matrix.

    A small amount of memory is kept for the next pass of the same thread. Otherwise the system would take it
    back and map it again page by page, a tenth of the time of a product at two thousand tokens.
    """

    def __init__(self) -> None:
        self.memory: dict[object, Tensor] = getattr(_left, "memory", {})
        _left.memory = {}

    def empty(self, name: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor, in the memory of an earlier one of this name if that suffices."""
        size, key = math.prod(shape), (name, dtype, device)
        held = self.memory.get(key)
        if held is None or len(held) < size:
            # A tensor made in inference mode could not be written to later, outside of inference mode.
            with torch.inference_mode(mode=False):
                held = self.memory[key] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)

    def leave(self) -> None:
        """Keep the memory for the next pass in this thread, unless it exceeds 8 MiB."""
        if sum(t.nbytes for t in self.memory.values()) <= _LEFT:
            _left.memory = self.memory
        self.memory = {}
