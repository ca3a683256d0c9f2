"""Quantisers of keys and values by absmax: integers of few bits, multiplied by a step that a group of entries
shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import ArgumentError

__all__ = ["QUANTISERS", "absmax_steps", "checked_bits", "checked_quantisers", "group_of", "rounded"]

QUANTISERS = ("token", "channel", "group-32", "group-64")
"""The quantisers by name.

Which entries of a head's keys or values share a step: ``token`` all channels of one token, ``channel`` one
channel of all tokens, ``group-32`` and ``group-64`` that many neighbouring channels of one token.
"""

_BITS = (2, 16)
_SIZES = {"group-32": 32, "group-64": 64}


def checked_bits(bits: object) -> tuple[int, ...]:
    """Return numbers of bits as a tuple without repetition, after checking them.

    Raises
    ------
    ArgumentError
        If no number is given, or one is no whole number from 2 to 16.

    """
    given = (bits,) if isinstance(bits, int) else tuple(bits) if isinstance(bits, Sequence) else ()
    low, high = _BITS
    if not given or any(isinstance(b, bool) or not isinstance(b, int) or not low <= b <= high for b in given):
        raise ArgumentError("bits", expected=f"whole numbers from {low} to {high}", got=repr(bits))
    return tuple(dict.fromkeys(given))


def checked_quantisers(names: object) -> tuple[str, ...]:
    """Return names of quantisers as a tuple without repetition, after checking them.

    Raises
    ------
    ArgumentError
        If no name is given, or one is unknown.

    """
    given = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Sequence) else ()
    if not given or any(name not in QUANTISERS for name in given):
        raise ArgumentError("quantisers", expected=f"some of {', '.join(QUANTISERS)}", got=repr(names))
    return tuple(dict.fromkeys(given))


def group_of(quantiser: str, dim: int) -> str:
    """Return the name of the quantiser, or "token" if each of its groups contains a whole token.

    A group of at least ``dim`` channels is the whole token, so it has the name "token".
    """
    size = _SIZES.get(quantiser)
    return "token" if size is not None and size >= dim else quantiser


def absmax_steps(t: Float[Tensor, "*lead n dim"], bits: int, quantiser: str) -> Float[Tensor, "*lead n dim"]:
    """Return the rounding step of each entry, which is the largest absolute value of its group over
    2^(bits−1) − 1.

    Rounding moves an entry by at most half a step. Groups of zeros have the step zero.
    """
    size = _SIZES.get(quantiser)
    if quantiser == "channel":
        largest = t.abs().amax(dim=-2, keepdim=True)
    elif size is None:
        largest = t.abs().amax(dim=-1, keepdim=True)
    else:
        groups = [part.abs().amax(dim=-1, keepdim=True).expand_as(part) for part in t.split(size, dim=-1)]
        largest = torch.cat(groups, dim=-1)
    steps: Tensor = (largest / (2 ** (bits - 1) - 1)).expand_as(t)
    return steps


def rounded(t: Float[Tensor, "*lead n dim"], steps: Float[Tensor, "*lead n dim"]) -> Tensor:
    """Round each entry of keys or values to the nearest multiple of its step."""
    whole = torch.where(steps > 0, steps, 1.0)
    return torch.where(steps > 0, (t / whole).round() * steps, t)
