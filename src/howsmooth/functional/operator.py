"""Attention and its reverse-mode derivatives of every order as one operator of PyTorch, for ``torch.compile``
and ``torch.export``.

A compiler takes the operator as it is, so the blocks of query rows are chosen when the operator runs, memory
stays O(m + n), and no length is written into the graph. Eager mode does not use it, because PyTorch allows no
forward mode and no transform of torch.func for such operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from howsmooth.attention.masks import Visibility
from howsmooth.errors import ArgumentError
from howsmooth.functional.blockwise_autograd import BlockMap, Grid, ScoreBlock, apply
from howsmooth.functional.derivatives import attention_map
from howsmooth.functional.fused_attention import obstacle
from howsmooth.functional.scores import Scores

__all__ = ["attention_function", "attention_operator", "whole"]

_SETTINGS = (
    "str names, bool causal, SymInt? window, SymInt offset, float scale, float? softcap, float dropout, "
    "bool kernels"
)


def attention_function(
    tensors: Sequence[Tensor],
    names: str,
    causal: bool,
    window: int | None,
    offset: int,
    scale: float,
    softcap: float | None,
    dropout: float,
    kernels: bool,
) -> BlockMap:
    """Return attention as a function of queries, keys, values and further tensors, of five axes each.

    ``names`` are their names in :class:`Scores`, with commas between them.

    Raises
    ------
    ArgumentError
        If ``kernels`` is True and the kernels do not support the tensors.

    """
    q, k, v = tensors[:3]
    lead, kv_heads, group, m = q.shape[:4]
    grid = Grid(lead, kv_heads, group, m, Visibility(k.shape[-2], causal, window, offset=offset))
    scores = Scores(grid, scale, softcap, tuple(names.split(",")), dropout)
    found = obstacle(scores, dict(zip(scores.names, tensors, strict=False))) if kernels else None
    if found is not None:
        raise ArgumentError("kernels", expected="False, or a call that the kernels support", got=found)
    return attention_map(scores, (*q.shape[:4], v.shape[-1]), kernels=kernels)


def _derived(tensors: Sequence[Tensor], *settings: Any) -> BlockMap:
    """Return attention, or the reverse-mode derivative that the last entry of ``settings`` describes.

    That is a text with a part ``wanted:given;`` for each derivative, where a digit 1 in ``wanted`` marks the
    tensors whose cotangents are asked for, and in ``given`` the results that have a cotangent.
    """
    *of_attention, path = settings
    function = attention_function(tensors, *of_attention)
    for step in path.split(";")[:-1]:
        wanted, given = (tuple(digit == "1" for digit in flags) for flags in step.split(":"))
        shapes = tuple(tuple(t.shape) for t in tensors[: len(wanted)])
        function = function.reverse(wanted, given, shapes)
    return function


@torch.library.custom_op(
    "howsmooth::attention",
    mutates_args=(),
    schema=f"(Tensor[] tensors, {_SETTINGS}, str derivatives) -> Tensor[]",
)
def attention_operator(tensors: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    """Evaluate attention, or a reverse-mode derivative of it, as one operator of PyTorch.

    The arguments are those of :func:`attention_function`, then a text for the derivatives, which is empty for
    attention itself.
    """
    return [t.contiguous() for t in _derived(tensors, *settings).run(tuple(tensors))]


@attention_operator.register_fake
def _(tensors: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    q = tensors[0]
    function = _derived(tensors, *settings)
    found = [q.new_empty(shape) for _, shape in function.outputs]
    kept = [q.new_empty(q.shape[:-1] + last, dtype=torch.float32) for last in (tensors[2].shape[-1:], (1,))]
    return found + kept[: function.kept]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, *ctx.settings = inputs
    # A kernel for the value keeps tensors for all derivatives.
    kept = output[1:] if not ctx.settings[-1] else []
    ctx.save_for_backward(*tensors, *kept)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    wanted, saved = ctx.needs_input_grad[0], ctx.saved_tensors
    cotangents = cotangents[: len(cotangents) - (len(saved) - len(wanted))]
    given = [c for c in cotangents if c is not None]
    none: list[Tensor | None] = [None] * len(wanted)
    if given and any(wanted):
        *settings, path = ctx.settings
        marks = (
            "".join(str(int(f)) for f in flags) for flags in (wanted, [c is not None for c in cotangents])
        )
        found = iter(attention_operator([*saved, *given], *settings, f"{path}{':'.join(marks)};"))
        none = [next(found) if w else None for w in wanted]
    return (none, *(None,) * len(ctx.settings))


attention_operator.register_autograd(_backward, setup_context=_setup_context)


def evaluated(tensors: Sequence[Tensor], *settings: Any) -> Tensor:
    """Compute attention so that PyTorch can differentiate the result, in eager mode and in compiled
    functions. The arguments are those of :func:`attention_function`.
    """
    if not torch.compiler.is_compiling():
        return apply(attention_function(tensors, *settings), *tensors)[0]
    if not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0:
        found: Tensor = attention_operator(list(tensors), *settings, "")[0]
        return found
    if settings[-1]:
        raise ArgumentError("kernels", expected="False within torch.func in a compiled function", got="True")
    return whole(attention_function(tensors, *settings), *tensors)


def whole(function: BlockMap, *tensors: Tensor) -> Tensor:
    """Evaluate a BlockMap with one result as a single block, by operations that PyTorch can differentiate."""
    grid = function.grid
    block = ScoreBlock(*(slice(0, size) for size in (grid.lead, grid.kv_heads, grid.m, grid.visible.n)))
    dtype = tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(tensors[0].device.type, enabled=False):
        parts = tuple(t.to(wide) if t.is_floating_point() else t for t in tensors)
        (found,) = function.compute(block, parts, (function.outputs[0][1],))
    return found.to(dtype)
