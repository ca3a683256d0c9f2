"""The attention masks that Lipschitz layers accept, and their addition to the attention scores.

A layer accepts the masks for which its Lipschitz constant is proved. As in PyTorch, True or −∞ stands where a
query (row) does not see a key (column).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.bounds.visible_key_counts import VisibleRows, visible_rows
from howsmooth.errors import ArgumentError
from howsmooth.nn.checks import refuse_where

__all__ = ["AcceptedMasks"]

_KINDS = ("none", "causal", "any", "additive")
_ONE_MASK = {"none": "no mask", "causal": "the causal mask alone", "fixed": "the mask of the layer alone"}


@dataclass(frozen=True, eq=False)
class AcceptedMasks:
    """The attention masks that a layer accepts, because its Lipschitz constant is proved for them.

    Of the kinds, "none" is no mask, "causal" always applies the causal mask, and "fixed" always applies
    ``hidden``, a mask (n, n). "any" covers every boolean mask, and "additive" every mask of numbers or −inf.
    Each query must see at least one key. ``rows`` is the data on ``hidden`` that bounds need, computed once,
    because inside PyTorch's function transforms the values of tensors cannot be read.
    """

    kind: str
    hidden: Bool[Tensor, "n n"] | None = None
    rows: VisibleRows | None = None

    @classmethod
    def read(cls, mask: object, length: int) -> AcceptedMasks:
        """Convert the constructor argument ``mask``: the name of a kind, or one mask (length, length)."""
        if isinstance(mask, str) and mask in _KINDS:
            return cls(mask)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (length, length):
            got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            expected = f"one of {_KINDS}, or a boolean matrix ({length}, {length}), True where hidden"
            raise ArgumentError("mask", expected=expected, got=got)
        _check_rows(mask, "mask")
        hidden = mask.cpu().clone()
        return cls("fixed", hidden, visible_rows(length, ~hidden))

    def rows_at(self, length: int) -> VisibleRows:
        """Return how many keys each query may see. The Lipschitz bound of the layer depends on this."""
        return visible_rows(length, self.kind) if self.rows is None else self.rows

    def always(self, n: int) -> Tensor | None:
        """Return the mask (n, n) that applies in every call of the layer, or None if there is none."""
        return _causal(n) if self.kind == "causal" else self.hidden

    def always_added(self, x: Tensor) -> Tensor | None:
        """Return the mask of every call as numbers (1, 1, n, n) to add to the scores of x (..., n, d)."""
        hidden = self.always(x.shape[-2])
        return None if hidden is None else _as_numbers(hidden.to(x.device), x.dtype)[None, None]

    def scores(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        heads: int,
        x: Tensor,
    ) -> Tensor | None:
        """Return all masks of a call as numbers (batch or 1, heads or 1, n, n) that are added to the scores.

        The result is None if the call has no mask. ArgumentError is raised if the constant does not cover the
        masks of this call, or a mask has a wrong shape or dtype.
        """
        batch, n, _ = x.shape
        own = self.always_added(x)
        if attn_mask is None and is_causal:
            if self.kind not in ("causal", "any", "additive"):
                expected = "False, because the constant was proved without a causal mask"
                remedy = "Build the layer with mask='causal'."
                raise ArgumentError("is_causal", expected=expected, got="True", remedy=remedy)
            own = _as_numbers(_causal(n).to(x.device), x.dtype)[None, None]
        given = {}
        shapes: dict[tuple[int, ...], tuple[int, ...]]
        if attn_mask is not None:
            shapes = {(n, n): (1, 1, n, n), (batch * heads, n, n): (batch, heads, n, n)}
            given["attn_mask"] = _read("attn_mask", attn_mask, shapes, x)
        if key_padding_mask is not None:
            shapes = {(batch, n): (batch, 1, 1, n)}
            given["key_padding_mask"] = _read("key_padding_mask", key_padding_mask, shapes, x)
        for name, mask in given.items():
            self._check_covered(name, mask, own)
        if self.kind in _ONE_MASK:
            return own
        total = own
        for mask in given.values():
            total = mask.to(x.dtype) if total is None else total + mask.to(x.dtype)
        if given and total is not None:
            _check_rows(torch.isneginf(total), next(iter(given)))
        return total

    def _check_covered(self, name: str, mask: Tensor, own: Tensor | None) -> None:
        """Raise ArgumentError if the constant of the layer does not hold for the mask of a call."""
        if self.kind == "any":
            numbers, expected = (
                (mask != 0) & ~torch.isneginf(mask),
                "a boolean mask, or a mask of zeros and -inf",
            )
            remedy = "Build the layer with mask='additive', whose constant covers such masks."
            refuse_where(numbers, name, expected, "other numbers", remedy)
        elif self.kind in _ONE_MASK:
            same = mask == (0.0 if own is None or name != "attn_mask" else own)
            expected = f"{_ONE_MASK[self.kind]}, for which the constant was proved"
            remedy = (
                "Build the layer with mask='any', whose constant covers all boolean masks, or with "
                "mask='additive', whose constant covers all masks."
            )
            refuse_where(~same, name, expected, "another one", remedy)


def _causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def _as_numbers(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -math.inf)


def _read(name: str, mask: Tensor, shapes: dict[tuple[int, ...], tuple[int, ...]], x: Tensor) -> Tensor:
    """``shapes`` maps each accepted shape to the shape of the result."""
    if not isinstance(mask, Tensor) or mask.layout is not torch.strided or mask.is_meta:
        got = type(mask).__name__ if not isinstance(mask, Tensor) else f"{mask.layout} on {mask.device}"
        raise ArgumentError(name, expected="a dense tensor", got=got)
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ArgumentError(name, expected="a boolean or floating-point tensor", got=str(mask.dtype))
    if tuple(mask.shape) not in shapes:
        expected = f"shape {' or '.join(map(str, shapes))}"
        raise ArgumentError(name, expected=expected, got=f"shape {tuple(mask.shape)}")
    shaped = mask.to(x.device).reshape(shapes[tuple(mask.shape)])
    if mask.dtype == torch.bool:
        return _as_numbers(shaped, x.dtype)
    refuse_where((mask != mask) | (mask == math.inf), name, "finite numbers or -inf", "NaN or infinity")
    return shaped


def _check_rows(hidden: Tensor, name: str) -> None:
    remedy = "The attention weights of such a query are not defined; leave such tokens out."
    expected = "at least one visible key for every query"
    refuse_where(hidden.all(dim=-1), name, expected, "a query that sees no key", remedy)
