"""The random start vector of Lanczos for a sequence that is divided among processes. Each process keeps only
the rows of the tokens that it holds.

The rows are bit for bit those that a single process would draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.seeds import torch_seed

__all__ = ["own_start"]

# Random numbers drawn at a time.
_CHUNK = 1 << 22
# PyTorch draws normal numbers in groups of 16. If the size of a tensor is no multiple of 16, it draws the
# last 16 numbers again.
_GROUP = 16


def own_start(
    n: int, d: int, ranges: Sequence[slice], seed: int, *, chunk: int = _CHUNK
) -> Float[Tensor, "own d"]:
    """Draw this process's rows of the random start vector of Lanczos.

    The start is Gaussian, of shape (n, d), in float64 on the CPU; ``ranges`` are the rows to return.

    They equal, bit for bit, the rows that one process draws with ``torch.randn(n, d)``, so the result does
    not depend on the number of processes. Every process draws all numbers, but keeps only its rows and one
    chunk in memory.
    """
    generator = torch.Generator().manual_seed(torch_seed(seed))
    # Chunks hold a multiple of 16 numbers, so that their last groups are complete.
    step = max(1, chunk // (d * _GROUP)) * _GROUP
    own = torch.empty(sum(part.stop - part.start for part in ranges), d, dtype=torch.float64)
    first = 0
    while first < n:
        last = first + step
        if (n - last) * d < _GROUP:  # the remaining numbers do not fill a group, so they join this chunk
            last = n
        drawn = torch.randn(last - first, d, generator=generator, dtype=torch.float64)
        place = 0
        # Keep the rows of this chunk that belong to this process; drop the others.
        for part in ranges:
            low, high = max(part.start, first), min(part.stop, last)
            if low < high:
                own[place + low - part.start : place + high - part.start] = drawn[low - first : high - first]
            place += part.stop - part.start
        first = last
    return own
