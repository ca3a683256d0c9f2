"""Seeds for PyTorch's random generators that use all 64 bits."""

from __future__ import annotations

import numpy as np

__all__ = ["torch_seed"]


def torch_seed(seed: int) -> int:
    """Return a 32-bit seed that depends on all bits of ``seed``.

    PyTorch's CPU generator ignores all but the lowest 32 bits of its seed.

    Seeds from 0 to 2^32 − 1 are returned unchanged. Other seeds are taken modulo 2^64 and hashed to 32
    bits, so two different seeds give the same stream with probability 2^-32 only, even if they are related
    (s and s + 1, say).
    """
    seed %= 2**64
    return seed if seed < 2**32 else int(np.random.SeedSequence(seed).generate_state(1)[0])
