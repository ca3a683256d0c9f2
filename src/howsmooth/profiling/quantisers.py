"""Round keys, values and weights to few bits by absmax quantisation, or as KIVI does. Run a model with the
rounded keys and values of some heads, as if they came from a quantised KV cache.

An entry is rounded to an integer multiple of a step, counted from a zero point. All entries of a group share
both. In absmax quantisation the zero point is 0, and the step is the largest absolute value over
2^(bits−1) − 1. In KIVI (arXiv:2402.02750) the zero point is the smallest entry, and the step is the largest
minus the smallest over 2^bits − 1. The window of exact tokens here is never shorter than R; KIVI's own window
of keys is quantised as a whole, and empty again, each time it has R tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.models.recorded_softmaxes import RecordedModel
from howsmooth.profiling.model_input import chosen_words
from howsmooth.threads import renew_threads

__all__ = [
    "OF_WEIGHTS", "QUANTISERS", "checked_bits", "checked_quantisers", "group_of", "quantised_tokens",
    "rounded", "simulated_kl", "steps_and_zeros",
]  # fmt: skip

QUANTISERS = ("token", "channel", "group-32", "group-64", "kivi")
"""The quantisers by name.

Which entries of a head's keys or values share a step: ``token`` all channels of one token, ``channel`` one
channel of all tokens, ``group-32`` and ``group-64`` that many neighbouring channels of one token. ``kivi``
has zero points, and rounds keys by channel and values by token. There are also ``kivi-G``, in groups of G
tokens or channels, and ``kivi-G-R``, with a window of the R last tokens that stay exact.
"""

OF_WEIGHTS = ("channel", "group-128", "group-64", "group-32")
"""The quantisers of weights: one step for an output channel, or for so many neighbouring weights of it."""

_BITS = (2, 16)
_SIZES = {"group-32": 32, "group-64": 64, "group-128": 128}
_KIVI = re.compile(r"kivi(?:-([1-9]\d*))?(?:-([1-9]\d*))?")
_GROUPS = "For groups of 32 tokens or channels and a window of 128 tokens give kivi-32-128, for example."


def checked_quantisers(names: object, known: Sequence[str] = QUANTISERS) -> tuple[str, ...]:
    """Return the names of quantisers, each once, all if None; raise ArgumentError unless all are known."""
    names = known if names is None else names
    given = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Sequence) else ()
    families = ["kivi" if isinstance(one, str) and _KIVI.fullmatch(one) else one for one in given]
    chosen_words("quantisers", families, known, _GROUPS if known is QUANTISERS else "")
    return tuple(dict.fromkeys(given))


def checked_bits(bits: object, name: str = "bits") -> tuple[int, ...]:
    """Return the numbers of bits, each once; raise ArgumentError unless all are whole, from 2 to 16."""
    given = (bits,) if isinstance(bits, int) else tuple(bits) if isinstance(bits, Sequence) else ()
    low, high = _BITS
    if not given or any(isinstance(b, bool) or not isinstance(b, int) or not low <= b <= high for b in given):
        raise ArgumentError(name, expected=f"whole numbers from {low} to {high}", got=repr(bits))
    return tuple(dict.fromkeys(given))


def group_of(quantiser: str, dim: int) -> str:
    """Return the quantiser's name, or "token" if a group would hold all ``dim`` channels of a token."""
    return "token" if _SIZES.get(quantiser, 0) >= dim else quantiser


def quantised_tokens(n: int, quantiser: str, operand: str) -> int:
    """Return how many of the first tokens are quantised: without a window, and keys in whole groups only."""
    size, window = _group_and_window(quantiser)
    stored = max(n - window, 0)
    return stored - stored % size if size and operand == "K" and _KIVI.fullmatch(quantiser) else stored


def steps_and_zeros(
    t: Float[Tensor, "*lead n dim"], bits: int, quantiser: str, operand: str
) -> tuple[Float[Tensor, "*lead n dim"], Float[Tensor, "*lead n dim"]]:
    """Return the step and the zero point of each entry of keys ("K") or values ("V"). Entries that stay exact
    have the step zero. An ArgumentError says that a group or window does not fit.
    """
    kivi = _KIVI.fullmatch(quantiser) is not None
    axis = -2 if quantiser == "channel" or (kivi and operand == "K") else -1
    size, _ = _group_and_window(quantiser)
    (n, dim), stored = t.shape[-2:], quantised_tokens(t.shape[-2], quantiser, operand)
    if kivi and (not stored or (size and axis == -1 and dim % size)):
        expected = f"a group and a window that fit {n} tokens, the group a divisor of {dim} channels"
        remedy = "Give kivi for one group without a window."
        raise ArgumentError("quantisers", expected=expected, got=repr(quantiser), remedy=remedy)
    found = []
    for part in t[..., :stored, :].split(size or t.shape[axis], dim=axis):
        low = part.amin(dim=axis, keepdim=True) if kivi else part.new_zeros(1)
        width = (part - low).abs().amax(dim=axis, keepdim=True)
        levels = 2**bits - 1 if kivi else 2 ** (bits - 1) - 1
        found.append(((width / levels).expand_as(part), low.expand_as(part)))
    step, zero = (torch.cat(parts, dim=axis) for parts in zip(*found, strict=True))
    exact = t.new_zeros(*t.shape[:-2], n - stored, dim)
    return torch.cat((step, exact), dim=-2), torch.cat((zero, exact), dim=-2)


def _group_and_window(quantiser: str) -> tuple[int, int]:
    """Return the size of a group, 0 if it is a whole token or channel, and the number of exact tokens."""
    kivi = _KIVI.fullmatch(quantiser)
    return (int(kivi[1] or 0), int(kivi[2] or 0)) if kivi else (_SIZES.get(quantiser, 0), 0)


def rounded(t: Tensor, step: Float[Tensor, "*lead n dim"], zero: Float[Tensor, "*lead n dim"]) -> Tensor:
    """Round each entry of keys or values (*lead, n, dim) to its zero point plus a multiple of its step."""
    whole = torch.where(step > 0, step, 1.0)
    return torch.where(step > 0, ((t - zero) / whole).round() * step + zero, t)


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
            part.copy_(rounded(part, *steps_and_zeros(part, count, quantiser, operand)))
        return keys, values

    return whole.mean_kl(change)
