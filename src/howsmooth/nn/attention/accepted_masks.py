"""The attention masks that Lipschitz layers accept, and their addition to the attention scores.

A layer accepts the masks for which its Lipschitz constant is proved. Masks follow PyTorch's conventions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.bounds.visible_key_counts import VisibleRows, visible_rows
from howsmooth.errors import ArgumentError
from howsmooth.nn.checks import require

__all__ = ["Masking"]

_KINDS = ("none", "causal", "any", "additive")
_REMEDY = (
    "Build the layer with mask='any', whose constant covers all boolean masks, or with mask='additive', "
    "whose constant covers all masks."
)


@dataclass(frozen=True, eq=False)
class Masking:
    """The attention masks that a layer accepts, because its Lipschitz constant is proved for them.

    Attributes
    ----------
    kind
        "none" is no mask. "causal" always applies the causal mask, and "fixed" always applies ``hidden``.
        "any" covers every boolean mask, and "additive" every mask of numbers or −inf. Each query must see at
        least one key.
    hidden
        The mask of kind "fixed": (n, n), True where a query (row) does not see a key (column).
    rows
        The data on ``hidden`` that bounds need. They are computed once, because inside PyTorch's function
        transforms the values of tensors cannot be read.

    """

    kind: str
    hidden: Bool[Tensor, "n n"] | None = None
    rows: VisibleRows | None = None

    @classmethod
    def read(cls, mask: object, length: int) -> Masking:
        """Convert the constructor argument ``mask`` of a layer to the attention masks that the layer accepts.

        ``mask`` is the name of a kind of masks, or a boolean matrix (length, length), True where a query
        (row) must not see a key (column).
        """
        if isinstance(mask, str) and mask in _KINDS:
            return cls(mask)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (length, length):
            got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise ArgumentError(
                "mask",
                expected=f"one of {_KINDS}, or a boolean matrix ({length}, {length}), True where hidden",
                got=got,
            )
        _check_rows(mask, "mask")
        hidden = mask.cpu().clone()
        return cls("fixed", hidden, visible_rows(length, ~hidden))

    def always(self, n: int) -> Tensor | None:
        """Return the mask (n, n) that applies in every call of the layer, or None if there is no such mask.

        An entry is True where the query (row) does not see the key (column).
        """
        if self.kind == "causal":
            return torch.ones(n, n, dtype=torch.bool).triu(1)
        return self.hidden

    def scores(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        *,
        heads: int,
        x: Tensor,
    ) -> Tensor | None:
        """Return all masks of a call as one tensor of numbers that are added to the attention scores.

        Its shape is (batch or 1, heads or 1, n, n). The result is None if the call has no mask.

        Raises
        ------
        ArgumentError
            If the constant does not cover the masks of this call, or a mask has a wrong shape or dtype.

        """
        batch, n, _ = x.shape
        own = self.always(n)
        if attn_mask is None and is_causal:
            if self.kind not in ("causal", "any", "additive"):
                raise ArgumentError(
                    "is_causal",
                    expected="False, because the constant was proved without a causal mask",
                    got="True",
                    remedy="Build the layer with mask='causal'.",
                )
            own = torch.ones(n, n, dtype=torch.bool).triu(1)
        parts = [] if own is None else [own.to(x.device)[None, None]]
        given = []
        if attn_mask is not None:
            shapes = {(n, n): (1, 1, n, n), (batch * heads, n, n): (batch, heads, n, n)}
            given.append(_shaped("attn_mask", attn_mask, shapes, x.device))
        if key_padding_mask is not None:
            shapes = {(batch, n): (batch, 1, 1, n)}
            given.append(_shaped("key_padding_mask", key_padding_mask, shapes, x.device))
        if self.kind in ("none", "causal", "fixed"):
            for name, mask in given:
                self._check_known(name, mask, own)
            given = []
        for name, mask in given:
            if self.kind == "any":
                mask = _as_boolean(name, mask)
            parts.append(mask)
        if not parts:
            return None
        numbers = [_as_numbers(mask, x.dtype) for mask in parts]
        total = numbers[0]
        for more in numbers[1:]:
            total = total + more
        # Under the mask that every call applies, each query sees a key.
        if given:
            argument = "attn_mask" if attn_mask is not None else "key_padding_mask"
            _check_rows(torch.isneginf(total), argument)
        return total

    def _check_known(self, name: str, mask: Tensor, own: Tensor | None) -> None:
        """Raise ArgumentError if a mask in a call differs from the mask of the layer.

        The layer's Lipschitz constant is proved for its own mask only.
        """
        here = torch.zeros((), dtype=torch.bool) if own is None else own
        hidden = mask if mask.dtype == torch.bool else torch.isneginf(mask)
        numbers = None if mask.dtype == torch.bool else mask.masked_fill(hidden, 0.0)
        wanted = (
            here.to(mask.device).expand(hidden.shape) if name == "attn_mask" else torch.zeros_like(hidden)
        )
        what = {"none": "no mask", "causal": "the causal mask alone", "fixed": "the mask of the layer alone"}
        other = (hidden != wanted) if numbers is None else (hidden != wanted) | (numbers != 0)
        _refuse_where(
            other,
            name,
            expected=f"{what[self.kind]}, for which the constant was proved",
            got="another one",
            remedy=_REMEDY,
        )


def _shaped(
    name: str, mask: Tensor, shapes: Mapping[tuple[int, ...], tuple[int, ...]], device: torch.device
) -> tuple[str, Tensor]:
    if not isinstance(mask, Tensor) or mask.layout is not torch.strided or mask.is_meta:
        got = type(mask).__name__ if not isinstance(mask, Tensor) else f"{mask.layout} on {mask.device}"
        raise ArgumentError(name, expected="a dense tensor", got=got)
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ArgumentError(name, expected="a boolean or floating-point tensor", got=str(mask.dtype))
    if tuple(mask.shape) not in shapes:
        raise ArgumentError(
            name, expected=f"shape {' or '.join(map(str, shapes))}", got=f"shape {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        _refuse_where(
            (mask != mask) | (mask == math.inf),
            name,
            expected="finite numbers or -inf",
            got="NaN or infinity",
        )
    return name, mask.to(device).reshape(shapes[tuple(mask.shape)])


def _as_boolean(name: str, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    hidden = torch.isneginf(mask)
    _refuse_where(
        mask.masked_fill(hidden, 0.0) != 0,
        name,
        expected="a boolean mask, or a mask of zeros and -inf",
        got="other numbers",
        remedy="Build the layer with mask='additive', whose constant covers such masks.",
    )
    return hidden


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
    return mask.to(dtype)


def _check_rows(hidden: Tensor, name: str) -> None:
    _refuse_where(
        hidden.all(dim=-1),
        name,
        expected="at least one visible key for every query",
        got="a query that sees no key",
        remedy="The attention weights of such a query are not defined; leave such tokens out.",
    )


def _refuse_where(wrong: Tensor, name: str, **words: str) -> None:
    """Raise an error about the argument ``name`` if any entry of the tensor ``wrong`` is True.

    This also works inside torch.func.vmap.
    """
    message = f"{name}: expected {words['expected']}"
    require(wrong, torch.logical_not, lambda _: ArgumentError(name, **words), message)
