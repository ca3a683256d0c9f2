"""Seeds of random streams, of which every bit counts."""

from __future__ import annotations

import numpy as np

__all__ = ["torch_seed"]


def torch_seed(seed: int) -> int:
    """Return what to seed PyTorch's generator on the CPU with, of which it reads 32 bits alone.

    Seeds from 0 to 2^32 − 1 stay as they are. Others, taken modulo 2^64, are hashed to 32 bits, so that two
    seeds share a stream with a probability of 2^-32, however they are related.
    """
    seed %= 2**64
    return seed if seed < 2**32 else int(np.random.SeedSequence(seed).generate_state(1)[0])
