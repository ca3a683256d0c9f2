"""The function ``attention``, which checks queries, keys and values and computes their softmax attention."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.masks import check_window
from howsmooth.errors import ArgumentError
from howsmooth.functional.blockwise_autograd import Shape
from howsmooth.functional.operator import evaluated

__all__ = ["attention"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attention(
    q: object,
    k: object,
    v: object,
    mask: object = None,
    *,
    causal: object = False,
    window: object = None,
    offset: object = 0,
    scale: object = None,
    score_bias: object = None,
    softcap: object = None,
    sinks: object = None,
    dropout_p: object = 0.0,
    kernels: object = False,
) -> Float[Tensor, "*lead m value_dim"]:
    """Compute exact softmax attention of m queries and n keys in memory O(m + n). The result can be
    differentiated in forward and reverse mode any number of times.

    O = P v, where P is the row softmax of S = c tanh(s / c) + mask + score_bias over the visible keys, and
    s = scale · q kᵀ (without a cap S = s + mask + score_bias). Forward and reverse mode, any nesting of them,
    and vmap are supported, in PyTorch's autograd and in torch.func. Scores are formed one block of query rows
    at a time. They are not kept, but formed again in every derivative. Blocks that causal order or a window
    hides are not formed.

    The output of a query that sees no key is zero, and so are its derivatives.

    Parameters
    ----------
    q
        Queries (..., heads, m, key_dim), or (m, key_dim) for one head, in float16, bfloat16, float32 or
        float64. Products of the half precisions are summed in float32.
    k
        Keys (..., kv_heads, n, key_dim), or (n, key_dim); ``kv_heads`` divides ``heads``, and successive
        heads of queries share a key head. Axes in front broadcast.
    v
        Values (..., kv_heads, n, value_dim), or (n, value_dim).
    mask
        Booleans, True where the query sees the key; or numbers that are added to the scores, −∞ to hide a
        key. Broadcast to (..., heads, m, n).
    causal
        If True, the query at position i sees only the keys j <= i.
    window
        If given, the query at position i sees only the keys j with |i − j| < window.
    offset
        Position of the first query among the keys, which ``causal`` and ``window`` count from. By default
        0, as in ``scaled_dot_product_attention``; n − m for the last m of n tokens, whose earlier keys a
        cache holds.
    scale
        Factor of q kᵀ in the scores; 1/√key_dim by default.
    score_bias
        Numbers that are added to the scores, such as a bias by distance. Broadcast to (..., heads, m, n).
    softcap
        c > 0: the scores s become c tanh(s / c), before mask and bias are added.
    sinks
        The score of one further key whose value is zero: (heads,), or a shape that broadcasts to
        (..., heads, m, 1), for a score of each query.
    dropout_p
        Probability that an entry of P is dropped; the others are divided by 1 − ``dropout_p``. Drawn from
        PyTorch's default generator at each call (other entries than ``scaled_dot_product_attention`` drops
        for the same seed); derivatives drop the same entries. For training; 0 by default.
    kernels
        True to compute the value, the first and the second derivatives in Triton kernels, on a CUDA device.
        The kernels take float32, bfloat16 and float16, and heads of up to 256 entries, without dropout.
        Derivatives in masks and biases, and derivatives of higher order, are computed in blocks as without
        kernels. The default is False because the kernels depend on Triton's compiler, and have been checked
        on one kind of device, an NVIDIA H200 (documentation page "Evidence").

    Returns
    -------
    The output O, (..., heads, m, value_dim), or (m, value_dim) for one head, in the dtype of ``q``. Within
    ``torch.autocast`` all tensors of floating-point numbers but float64 are first cast to its dtype, as in
    ``scaled_dot_product_attention``.

    Raises
    ------
    ArgumentError
        If a shape, dtype, device or option does not fit the others.

    """
    q, k, v, mask, score_bias, sinks = _autocast(q, k, v, mask, score_bias, sinks)
    q, k, v = _tensor("q", q), _tensor("k", k, like=q), _tensor("v", v, like=q)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim < 2 or (t.ndim == 2) != (q.ndim == 2):
            raise ArgumentError(
                name,
                expected="queries, keys and values (..., heads, tokens, entries), or all (tokens, entries)",
                got=f"shape {tuple(t.shape)} beside queries {tuple(q.shape)}",
            )
    one_head = q.ndim == 2
    if one_head:
        q, k, v = q[None], k[None], v[None]
    lead = _check_shapes(q, k, v)
    (heads, m, key_dim), (kv_heads, n), value_dim = q.shape[-3:], k.shape[-3:-1], v.shape[-1]
    group, size = heads // kv_heads, math.prod(lead)

    if not isinstance(causal, bool):
        raise ArgumentError("causal", expected="True or False", got=repr(causal))
    if isinstance(offset, bool) or not isinstance(offset, int | torch.SymInt) or offset < 0:
        raise ArgumentError("offset", expected="a whole number >= 0", got=repr(offset))
    names = ["q", "k", "v"]
    # Query heads that share a key head are put on an axis of their own, the group.
    tensors = [
        q.expand(*lead, heads, m, key_dim).reshape(size, kv_heads, group, m, key_dim),
        k.expand(*lead, kv_heads, n, key_dim).reshape(size, kv_heads, 1, n, key_dim),
        v.expand(*lead, kv_heads, n, value_dim).reshape(size, kv_heads, 1, n, value_dim),
    ]
    axes = (*lead, heads, m, n)
    if mask is not None:
        boolean = isinstance(mask, Tensor) and mask.dtype == torch.bool
        names.append("seen" if boolean else "mask")
        tensors.append(_as_scores("mask", _tensor("mask", mask, like=q, boolean=True), axes, group))
    if score_bias is not None:
        names.append("bias")
        tensors.append(_as_scores("score_bias", _tensor("score_bias", score_bias, like=q), axes, group))
    if sinks is not None:
        column = _tensor("sinks", sinks, like=q)
        column = column[:, None, None] if column.ndim == 1 else column
        names.append("sinks")
        tensors.append(_as_scores("sinks", column, (*lead, heads, m, 1), group))

    if not isinstance(dropout_p, int | float) or isinstance(dropout_p, bool) or not 0 <= dropout_p <= 1:
        raise ArgumentError("dropout_p", expected="a number from 0 to 1", got=repr(dropout_p))
    if dropout_p:
        names.append("seed")
        drawn = torch.randint(-(2**31), 2**31, (size, 1, 1, 1, 1), dtype=torch.int32, device=q.device)
        tensors.append(drawn)

    factor = 1 / math.sqrt(key_dim) if scale is None else _number("scale", scale)
    cap = None if softcap is None else _number("softcap", softcap, positive=True)
    if not isinstance(kernels, bool):
        raise ArgumentError("kernels", expected="True or False", got=repr(kernels))
    window = check_window(window)
    settings = (",".join(names), causal, window, offset, factor, cap, float(dropout_p), kernels)
    out = evaluated(tensors, *settings)
    return out.reshape(m, value_dim) if one_head else out.reshape(*lead, heads, m, value_dim)


def _autocast(first: object, *others: object) -> tuple[object, ...]:
    """Convert the arguments to the dtype of ``torch.autocast``, if it is enabled on the device of ``first``.

    As in PyTorch, float64 tensors and tensors of booleans or integers are left as they are.
    """
    every = (first, *others)
    if not isinstance(first, Tensor) or not torch.is_autocast_enabled(first.device.type):
        return every
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in every
    )


def _tensor(name: str, t: object, *, like: Tensor | None = None, boolean: bool = False) -> Tensor:
    """Return ``t`` after checking that it is a tensor of the dtype of ``like`` (or bool, if ``boolean``)."""
    if not isinstance(t, Tensor):
        raise ArgumentError(name, expected="a torch.Tensor", got=type(t).__name__)
    if like is None and t.dtype not in _DTYPES:
        raise ArgumentError(name, expected="float16, bfloat16, float32 or float64", got=str(t.dtype))
    if like is not None and t.dtype != like.dtype and not (boolean and t.dtype == torch.bool):
        expected = f"{like.dtype}, as q" if not boolean else f"torch.bool, or {like.dtype} as q"
        raise ArgumentError(name, expected=expected, got=str(t.dtype))
    if like is not None and t.device != like.device:
        raise ArgumentError(name, expected=f"a tensor on {like.device}, as q", got=f"one on {t.device}")
    return t


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """Check that queries, keys and values fit together, and return the broadcast shape of leading axes."""
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        expected = (
            f"keys of the {q.shape[-1]} entries of the queries" if q.shape[-1] else "entries in queries"
        )
        raise ArgumentError("k", expected=expected, got=f"shape {tuple(k.shape)}")
    if v.shape[-3:-1] != k.shape[-3:-1]:
        raise ArgumentError(
            "v",
            expected=f"values for the {k.shape[-3]} heads and {k.shape[-2]} tokens of the keys",
            got=f"shape {tuple(v.shape)}",
        )
    if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3] != 0:
        raise ArgumentError(
            "k",
            expected=f"a number of key heads that divides the {q.shape[-3]} heads of the queries",
            got=f"{k.shape[-3]} heads",
        )
    try:
        return tuple(torch.broadcast_shapes(*(t.shape[:-3] for t in (q, k, v))))
    except RuntimeError:
        got = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ArgumentError("q, k, v", expected="leading axes that broadcast", got=f"shapes {got}") from None


def _as_scores(name: str, t: Tensor, axes: Shape, group: int) -> Tensor:
    """Reshape a tensor that broadcasts to ``axes`` = (*lead, heads, m, n) to (lead, kv_heads, group, m, n).

    In the result each axis has its full length or 1.
    """
    if t.ndim > len(axes) or any(
        size not in (1, full) for size, full in zip(t.shape[::-1], axes[::-1], strict=False)
    ):
        raise ArgumentError(name, expected=f"a shape that broadcasts to {axes}", got=str(tuple(t.shape)))
    t = t.reshape(*(1,) * (len(axes) - t.ndim), *t.shape)
    lead = axes[:-3] if any(size != 1 for size in t.shape[:-3]) else t.shape[:-3]
    t = t.expand(*lead, *t.shape[-3:])
    heads = (1, 1) if t.shape[-3] == 1 else (t.shape[-3] // group, group)
    return t.reshape(math.prod(lead), *heads, *t.shape[-2:])


def _number(name: str, x: object, *, positive: bool = False) -> float:
    good = isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
    if not good or (positive and float(x) <= 0):  # type: ignore[arg-type]
        raise ArgumentError(name, expected=f"a finite number{' > 0' if positive else ''}", got=repr(x))
    return float(x)  # type: ignore[arg-type]
