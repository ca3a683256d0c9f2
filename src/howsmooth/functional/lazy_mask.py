"""The attention mask of a Hugging Face model, stored as a rule (causal order, window, padding) instead of a
matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from howsmooth.attention.masks import Visibility

__all__ = ["RuleMask", "rule_mask"]


class RuleMask(torch.Tensor):
    """The attention mask (batch, 1, m, n) of a Hugging Face model as a tensor whose entries are computed only
    when needed.

    Parameters
    ----------
    shape
        (batch, 1, m, n).
    visible
        Causal order, window, and the position of the first query.
    padding
        Booleans (batch, n), True for the keys that are seen; None if no key is padding.
    entries
        Function that returns the mask as numbers: 0 where the query sees the key, else the least number.
    dtype, device
        Those of the numbers.

    """

    rule: tuple[Visibility, Tensor | None]
    entries: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        visible: Visibility,
        padding: Tensor | None,
        entries: Callable[[], Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> RuleMask:
        """Create a mask that has a shape, dtype and device but no entries."""
        mask: RuleMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask.rule, mask.entries = (visible, padding), entries
        return mask

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    # Computes the entries before torch.func sees the operation, so that they belong to its current level.
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch annotates its placeholder alone.
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(RuleMask, lambda mask: mask.entries(), (args, kwargs or {}))
        return func(*args, **kwargs)


_KNOWN = {
    torch.Tensor.size,
    torch.Tensor.dim,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad")),
}


def rule_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Tensor | None:
    """Return the attention mask of a Hugging Face model as a :class:`RuleMask`, or as a tensor if its rule is
    not known.

    A :class:`RuleMask` is made of causal order, a window and padding. The arguments are those of the
    functions of transformers' ``AttentionMaskInterface``; the result has the entries of ``eager_mask`` there.
    It is None if every query sees every key and the model allows None.
    """
    from transformers import masking_utils

    function = masking_utils.causal_mask_function if mask_function is None else mask_function

    def entries() -> Tensor | None:
        found: Tensor | None = masking_utils.eager_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            dtype=dtype,
            device=device,
            **rest,
        )
        return found

    # Without a mask of padding, transformers compiles a mask of packed documents, which a window is part of.
    packed = torch.compiler.is_compiling() and attention_mask is None and local_size is not None
    rule = None if packed else _rule(function, local_size)
    simple = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset >= kv_offset
    flat = attention_mask is None or attention_mask.ndim == 2
    if rule is None or not simple or not flat:
        return entries()

    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        # The values of a batch of torch.func.vmap, and those in a compiled function, cannot be read.
        known = not torch.compiler.is_compiling() and not torch._C._functorch.is_batchedtensor(padding)
        if known and bool(padding.all()):
            padding = None
    if allow_is_bidirectional_skip and rule == (False, None) and padding is None:
        return None
    visible = Visibility(kv_length, *rule, offset=q_offset - kv_offset)
    if torch.compiler.is_compiling():
        # A compiler cannot make tensors of a further class, but it leaves out entries that nobody reads.
        mask = entries()
        if mask is not None:
            mask.rule = visible, padding  # type: ignore[attr-defined]
        return mask
    shape = (batch_size, 1, q_length, kv_length)
    return RuleMask(shape, visible, padding, entries, dtype, torch.device(device))


def _rule(function: Any, local_size: int | None) -> tuple[bool, int | None] | None:
    """Return whether a mask function of transformers is causal, and its window. Return None for other masks.

    The function is called with positions that note how they are compared, because a compiler does not let
    the values in closures be read.
    """
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return True, None
    if function is masking_utils.bidirectional_mask_function:
        return False, None
    # Other functions may index tensors by the positions, which a compiler would not forgive.
    if local_size is None or getattr(function, "__code__", None) is not masking_utils.and_masks().__code__:
        return None
    try:
        bounds = function(0, 0, _Position(1, 0, 0), _Position(0, 1, 0)).terms
    except TypeError:
        return None
    # Windows of transformers hold, on both sides, the keys at a distance of at most ``local_size``.
    known = {
        ((-1, 1, local_size - 1), (1, -1, 0)): (True, local_size),
        ((-1, 1, local_size), (1, -1, local_size), (1, 0, 0)): (False, local_size + 1),
    }
    return known.get(bounds)


class _Position:
    """The expression a q + b k + c in the positions q of a query and k of a key.

    The result of a comparison is a :class:`_Bounds`.
    """

    def __init__(self, *terms: int) -> None:
        self.terms = terms

    def __sub__(self, other: object) -> _Position:
        if isinstance(other, int):
            return _Position(*self.terms[:2], self.terms[2] - other)
        if not isinstance(other, _Position):
            raise TypeError
        return _Position(*(a - b for a, b in zip(self.terms, other.terms, strict=True)))

    def __ge__(self, other: object) -> _Bounds:
        return _Bounds((self - other).terms)

    def __gt__(self, other: object) -> _Bounds:
        # Positions are whole numbers.
        return _Bounds((self - other - 1).terms)

    def __le__(self, other: object) -> _Bounds:
        return _Bounds(tuple(-term for term in (self - other).terms))

    def __abs__(self) -> _Distance:
        return _Distance(self)

    def new_ones(self, *_: object, **__: object) -> _Bounds:
        """Return a condition that always holds, in place of the tensor of ones that transformers expects."""
        return _Bounds()


class _Distance:
    """The distance |a q + b k + c| between the positions of a query and of a key."""

    def __init__(self, difference: _Position) -> None:
        self.difference = difference

    def __le__(self, other: int) -> _Bounds:
        return (self.difference <= other) & (self.difference >= -other)


class _Bounds:
    """Conditions a q + b k + c >= 0, all of which must hold for a query to see a key."""

    device = None

    def __init__(self, *terms: tuple[int, ...]) -> None:
        self.terms = terms

    def __and__(self, other: _Bounds) -> _Bounds:
        return _Bounds(*self.terms, *other.terms)

    def to(self, _: object) -> _Bounds:
        """Return the conditions unchanged, because they lie on no device."""
        return self
