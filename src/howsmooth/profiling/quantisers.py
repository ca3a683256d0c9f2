"""Round keys and values to few bits by absmax quantisation. Run a model with the rounded keys and values of
some heads, as if they came from a quantised KV cache.

An entry is rounded to an integer multiple of a step. All entries of a group share one step, which is their
largest absolute value divided by 2^(bits−1) − 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.models.recorded_softmaxes import RecordedModel
from howsmooth.threads import renew_threads

__all__ = ["QUANTISERS", "absmax_steps", "checked_bits", "group_of", "rounded", "simulated_kl"]

QUANTISERS = ("token", "channel", "group-32", "group-64")
"""The quantisers by name.

Which entries of a head's keys or values share a step: ``token`` all channels of one token, ``channel`` one
channel of all tokens, ``group-32`` and ``group-64`` that many neighbouring channels of one token.
"""

_BITS = (2, 16)
_SIZES = {"group-32": 32, "group-64": 64}


def checked_bits(bits: object) -> tuple[int, ...]:
    """Return the numbers of bits, each once; raise ArgumentError unless all are whole, from 2 to 16."""
    given = (bits,) if isinstance(bits, int) else tuple(bits) if isinstance(bits, Sequence) else ()
    low, high = _BITS
    if not given or any(isinstance(b, bool) or not isinstance(b, int) or not low <= b <= high for b in given):
        raise ArgumentError("bits", expected=f"whole numbers from {low} to {high}", got=repr(bits))
    return tuple(dict.fromkeys(given))


def group_of(quantiser: str, dim: int) -> str:
    """Return the quantiser's name, or "token" if a group would hold all ``dim`` channels of a token."""
    return "token" if _SIZES.get(quantiser, 0) >= dim else quantiser


def absmax_steps(t: Float[Tensor, "*lead n dim"], bits: int, quantiser: str) -> Float[Tensor, "*lead n dim"]:
    """Return the step of each entry: the largest absolute value in its group over 2^(bits−1) − 1."""
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


Place = tuple[int, int, str]
"""A layer, a key/value head, and "K" or "V"."""


def simulated_kl(whole: RecordedModel, bits: Mapping[Place, int], quantiser: str) -> float:
    """Return the mean KL divergence of a model's predictions if some keys or values are quantised; ``bits``
    says which, and to how many bits. Quantised layers also change the keys and values of later layers.
    """
    renew_threads()

    def change(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        chosen = [(head, operand, count) for (at, head, operand), count in bits.items() if at == layer]
        if not chosen:
            return None
        keys, values = (t.clone(memory_format=torch.contiguous_format) for t in (keys, values))
        for head, operand, count in chosen:
            part = whole.layers[layer].by_head(keys if operand == "K" else values)[head]  # a view
            part.copy_(rounded(part, absmax_steps(part, count, quantiser)))
        return keys, values

    return whole.mean_kl(change)
