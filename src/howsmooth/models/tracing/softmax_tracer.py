"""A tracer that finds every softmax attention in a forward pass, and reads its queries, keys and values.

A :class:`SoftmaxTracer` is a torch function mode. It finds calls of ``scaled_dot_product_attention``, and
products of values with a softmax whose scores come from a product of two tensors. ``score_rules`` follow the
scores operation by operation, so that the operands of the attention can be read and its output replaced.
"""

from __future__ import annotations

import math
import types as python_types
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from howsmooth.errors import ArgumentError
from howsmooth.models.tracing.axis_tracking import Axis, Operand, Unreadable, leaves, length
from howsmooth.models.tracing.contractions import (
    PRODUCTS,
    Contraction,
    contraction_of,
    product_scores,
)
from howsmooth.models.tracing.score_provenance import Opaque, ScoreRecord, read_operands
from howsmooth.models.tracing.score_rules import Applied, Known
from howsmooth.models.tracing.softmax_call import SoftmaxCall, all_true, disagreement

__all__ = ["SoftmaxTracer"]


class SoftmaxTracer(TorchFunctionMode):
    """A torch function mode that finds every softmax attention and calls ``on_softmax`` with it.

    ``on_softmax`` is called with each attention after it was computed. A tensor that it returns, of the
    shape of the call's ``output``, replaces the output; derivatives then go through that tensor. With
    ``ahead`` it is called before: the call then has no ``output``, and the attention runs only if it returns
    None. This is needed under ``torch.func.jvp``, which PyTorch's fused attention does not support.

    With ``check`` the attention is recomputed from the operands that were read and compared with the output;
    a difference is named in ``obstacle``. At most 32 rows are recomputed, or all of them if an operation was
    ignored that should change nothing. Nothing is compared if ``ahead``, or inside ``torch.vmap``.
    """

    def __init__(
        self, on_softmax: Callable[[SoftmaxCall], Tensor | None], *, ahead: bool = False, check: bool = True
    ) -> None:
        super().__init__()
        self._on_softmax = on_softmax
        self._ahead = ahead
        self._check = check
        self._depth = 0
        self._known: MutableMapping[Tensor, Known] = WeakTensorKeyDictionary()

    def __enter__(self) -> SoftmaxTracer:
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if not self._depth:
            self._known.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function. If its result comes from attention scores, store a record of the result."""
        kwargs = kwargs or {}
        run = partial(func, *args, **kwargs)
        if func in PRODUCTS:
            return self._product(contraction_of(func, args, kwargs), run)
        if func is functional.scaled_dot_product_attention:
            return self._fused(args, kwargs, run)
        if func is flex_attention:
            return self._flex(args, run)
        if func is functional.multi_head_attention_forward:
            return self._inside(func, args, kwargs)
        # Most functions of a forward pass touch no scores, and looking at them costs time.
        if not self._known:
            return run()
        call = Applied(func, args, kwargs, self.known)
        result = run()
        if call.first is not None:
            self._note(*call.record(call.first, result))
        return result

    def known(self, tensor: Any) -> Known | None:
        """Return the record of a tensor of attention scores or weights. Return None for any other tensor."""
        return self._known.get(tensor) if isinstance(tensor, Tensor) else None

    def _note(self, tensor: Any, known: Known | None) -> None:
        if known is not None and isinstance(tensor, Tensor):
            self._known[tensor] = known

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch function so that this tracer sees the torch functions that it calls."""
        # If ``has_torch_function`` were True, it would hand the whole call to this tracer again.
        seen = {**func.__globals__, "has_torch_function": lambda _: False}
        body = python_types.FunctionType(
            func.__code__, seen, func.__name__, func.__defaults__, func.__closure__
        )
        body.__kwdefaults__ = func.__kwdefaults__
        with self:
            return body(*args, **kwargs)

    def _attention(
        self,
        run: Callable[[], Any],
        describe: Callable[[Any], SoftmaxCall],
        as_result: Callable[[Tensor, Any], Any],
    ) -> Any:
        """Return the output of an attention, or the tensor that ``on_softmax`` returns in its place.

        ``describe`` is given the result, or None if it runs ``ahead``; ``as_result`` the other output also.
        """
        result = None if self._ahead else run()
        call = describe(result)
        output = self._on_softmax(call)
        if output is None:
            return run() if result is None else result
        if call.output is not None:
            if output.shape != call.output.shape:
                raise ArgumentError(
                    "on_softmax",
                    expected=f"an output of shape {tuple(call.output.shape)}",
                    got=f"one of shape {tuple(output.shape)}",
                )
            output = output.to(call.output.dtype)
        return as_result(output, result)

    def _product(self, contraction: Contraction | None, run: Callable[[], Any]) -> Any:
        if contraction is None:
            return run()
        # A product with probabilities is the end of an attention; every other product may be scores.
        left, right = contraction.left, contraction.right
        known = self.known(left.tensor), self.known(right.tensor)
        if contraction.bias is None:
            for p, value, record in ((left, right, known[0]), (right, left, known[1])):
                if record is not None and record.probabilities:
                    return self._weighted(contraction, p, value, record, run)
        result = run()
        scores: Known | None = product_scores(contraction)
        if scores is None and any(isinstance(record, ScoreRecord) for record in known):
            scores = Opaque("its scores are multiplied by a weight matrix, which mixes heads")
        self._note(result, scores)
        return result

    def _weighted(
        self, contraction: Contraction, p: Operand, value: Operand, known: Known, run: Callable[[], Any]
    ) -> Any:
        if isinstance(known, ScoreRecord):
            for label, axis in zip(p.axes, known.axes, strict=True):
                label[0].parts = axis if length(axis) > 1 else None
        both = [axis for axis in p.axes if axis in value.axes]
        lead = [axis for axis in both if axis in contraction.axes] or [()]  # batch, heads
        keys = tuple(chain(*(axis for axis in both if axis not in contraction.axes)))
        rows = tuple(chain(*(axis for axis in p.axes if axis not in value.axes)))
        columns = tuple(chain(*(axis for axis in value.axes if axis not in p.axes)))
        if not _sums_over_keys(known, keys, value.tensor):
            result = run()
            self._note(result, Opaque("its probabilities are mixed across heads or queries", True))
            return result
        ordered = (*lead, rows, columns)

        def describe(output: Tensor | None) -> SoftmaxCall:
            call = SoftmaxCall(
                value=value.arranged((*lead, keys, columns)),
                probabilities=p.arranged((*lead, rows, keys)),
                output=None if output is None else Operand(output, contraction.axes).arranged(ordered),
            )
            if isinstance(known, Opaque):
                return replace(call, obstacle=known.reason)
            if known.keys is None or leaves(keys) != leaves(known.keys):
                return replace(call, obstacle="its softmax does not run over the values that are summed")
            try:
                found = read_operands(known, lead, rows, call)
            except Unreadable as reason:
                return replace(call, obstacle=str(reason))
            check = self._check and output is not None
            difference = disagreement(found, known.eps, every=known.approximate) if check else ""
            return replace(call, obstacle=difference) if difference else found

        return self._attention(
            run, describe, lambda output, _: Operand(output, ordered).arranged(contraction.axes)
        )

    def _fused(self, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        operands = given["query"], given["key"], given["value"]
        if any(t.is_nested for t in operands) or min(t.ndim for t in operands) < 2:
            return run()
        shape = torch.broadcast_shapes(*(t.shape[:-3] for t in operands))
        q, k, v = (t.expand(*shape, *t.shape[-3:]) if t.ndim > 2 else t[None] for t in operands)
        mask, flat = given.get("attn_mask"), operands[0].ndim == 2
        if mask is not None:
            mask = mask[(None,) * (q.ndim - mask.ndim)]

        def describe(result: Tensor | None) -> SoftmaxCall:
            output = result[None] if result is not None and flat else result
            if given.get("dropout_p", 0.0) > 0:
                obstacle = "its probabilities are dropped at random"
                return SoftmaxCall(value=v, output=output, kind="sdpa", obstacle=obstacle)
            causal = bool(given.get("is_causal", False))
            return SoftmaxCall.given(
                q, k, given.get("scale"), mask, causal=causal, value=v, output=output, kind="sdpa"
            )

        return self._attention(run, describe, lambda output, _: output[0] if flat else output)

    def _flex(self, given: Any, run: Callable[[], Any]) -> Any:
        query, key, value, score_mod, blocks, scale = given[:6]

        def describe(results: Any) -> SoftmaxCall:
            call = SoftmaxCall(value=value, output=None if results is None else results[0], kind="sdpa")
            try:
                mask = _flex_mask(query, key, score_mod, blocks[-1])
            except Unreadable as reason:
                return replace(call, obstacle=str(reason))
            return replace(call, query=query, key=key, scale=float(scale), mask=mask)

        def as_results(output: Tensor, results: Any) -> Any:
            row = query.new_zeros(query.shape[:-1])  # sums and maxima, which attention modules do not use
            return (output, row, row) if results is None else (output, *results[1:])

        return self._attention(run, describe, as_results)


def _sums_over_keys(known: Known, summed: Axis, value: Tensor) -> bool:
    if isinstance(known, Opaque):
        return not isinstance(value, nn.Parameter)  # values are computed from tokens
    # Queries and keys each have an axis of their own; what both have counts sequences, windows and heads.
    alone = [(one,) for one in leaves(summed)]
    return not alone or not all(known.left.shares(one) and known.right.shares(one) for one in alone)


def _flex_mask(query: Tensor, key: Tensor, score_mod: Any, mask_mod: Any) -> Tensor | None:
    sizes = (*query.shape[:-1], key.shape[-2])
    places = [
        torch.arange(size, device=query.device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(sizes)
    ]
    zero = query.new_zeros(1, 1, 1, 1)
    bias, moved = (score_mod(score, *places) for score in (zero, zero + 1.5))
    hidden = bias.isneginf()
    finite = bias.masked_fill(hidden, 0.0)
    if not torch.allclose((moved - 1.5).masked_fill(hidden, 0.0), finite, atol=1e-5):
        raise Unreadable("its score_mod is no number that is added to the scores")
    visible: Tensor = mask_mod(*places) & ~hidden
    if bool((finite != 0).any()):
        visible = torch.where(visible, bias, -math.inf)
    elif all_true(visible):
        return None
    return visible.expand(*visible.shape[:-2], *sizes[2:])
