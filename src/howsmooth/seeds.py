"""Seeds of random number generators, derived from named values such as model, layer and sample."""

from __future__ import annotations

import hashlib
import json

import numpy as np

__all__ = ["derive_seed", "random_stream", "torch_seed"]


def random_stream(seed: int) -> np.random.Generator:
    """Return the generator of random start vectors for a seed, of which only the lowest 64 bits count.

    All of these bits are hashed to 128 bits, so no two seeds share a stream, however near they are, and none
    is a stream of PyTorch. The limits of a measurement hold for starts that do not depend on its tokens,
    which may have been drawn from PyTorch's generator with the same seed.
    """
    return np.random.default_rng(seed % 2**64)


def torch_seed(seed: int) -> int:
    """Convert a seed of any size to a 32-bit seed for PyTorch that depends on all of its bits.

    PyTorch's CPU generator ignores all but the lowest 32 bits of its seed.

    Seeds from 0 to 2^32 − 1 are returned unchanged. Other seeds are taken modulo 2^64 and hashed to 32
    bits, so two different seeds give the same stream with probability 2^-32 only, even if they are related
    (s and s + 1, say).
    """
    seed %= 2**64
    return seed if seed < 2**32 else int(np.random.SeedSequence(seed).generate_state(1)[0])


def derive_seed(**axes: str | int | None) -> int:
    """Derive the seed of a random generator from named values, such as a model, a layer and a sample.

    It is a number in [0, 2^63), half of the first eight bytes of the SHA-256 of the sorted axes. The seed of
    one combination of values does not depend on which other combinations are used.
    """
    written = json.dumps(axes, sort_keys=True, ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(written.encode()).digest()[:8], "big") >> 1
