"""Memory that tiles are formed in, used again from tile to tile and from pass to pass."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

__all__ = ["Scratch"]

# A pass that takes more takes so long that fresh memory does not matter.
_LEFT = 1 << 23


class _Left(threading.local):
    """What a thread's last pass left."""

    memory: dict[object, Tensor] | None = None


_left = _Left()


class Scratch:
    """Scratch memory of one pass over tiles.

    What is little is left to the thread's next pass: memory that is given back to the system is taken anew
    page by page, which is a tenth of the time of a product at two thousand tokens.
    """

    def __init__(self) -> None:
        self.memory: dict[object, Tensor]
        self.memory, _left.memory = _left.memory or {}, None

    def empty(self, name: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory that an earlier tile of this name used, if it is large enough."""
        size, key = math.prod(shape), (name, dtype, device)
        held = self.memory.get(key)
        if held is None or len(held) < size:
            # What is made in inference mode cannot be written to outside of it.
            with torch.inference_mode(mode=False):
                held = self.memory[key] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)

    def leave(self) -> None:
        """Leave the memory to the next pass, if it is little."""
        if sum(t.nbytes for t in self.memory.values()) <= _LEFT:
            _left.memory = self.memory
        self.memory = {}
