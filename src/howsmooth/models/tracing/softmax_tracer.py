"""A tracer that finds every softmax attention in the forward pass of a PyTorch module and reads its queries,
keys and values.

A :class:`SoftmaxTracer` is a torch function mode. It finds calls of ``scaled_dot_product_attention``, and
products of values with a softmax whose scores come from a product of two tensors. ``score_tracer`` follows
the scores operation by operation, so that the operands of the attention can be read and its output replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.models.tracing.axis_tracking import Axis, leaves
from howsmooth.models.tracing.contractions import Contraction
from howsmooth.models.tracing.score_provenance import Opaque, Unreadable, all_true, read_operands
from howsmooth.models.tracing.score_tracer import HIDES, Probabilities, ScoreTracer

__all__ = ["SoftmaxCall", "SoftmaxTracer", "capped_scores", "softmax_values", "triangle"]

_ROWS = 32  # number of output rows that are recomputed to check the operands that were read


@dataclass(frozen=True, eq=False)
class SoftmaxCall:
    """One softmax attention: ``output = softmax(softcap · tanh(scale · q kᵀ / softcap) + mask) v``.

    The tensors are the model's own, or views of them: the model may change them after the call. ``lead``
    stands for the batch axis and, in models with windows, the axis of windows. The axis of heads has length
    one if the model's code has no such axis.
    """

    query: Tensor | None  # (*lead, heads, m, key_dim)
    key: Tensor | None  # (*lead, kv_heads, n, key_dim)
    value: Tensor  # (*lead, kv_heads, n, value_dim)
    scale: float
    mask: Tensor | None  # additive, or boolean with True where visible; broadcasts to (*lead, heads, m, n)
    softcap: float | None
    sinks: Tensor | None  # (heads,)
    output: Tensor | None  # (*lead, heads, m, value_dim); None if the tracer runs ``ahead``
    probabilities: Tensor | None  # (*lead, heads, m, n); None if the code never computes them
    kind: str  # "sdpa", "softmax", or "interface" (see ``attention_hooks``)
    obstacle: str  # why the operands could not be read, in a phrase; "" if they were read
    causal: bool = False  # besides the mask, query i sees only the keys j <= i; this needs no (m, n) mask


class SoftmaxTracer(ScoreTracer):
    """A torch function mode that finds every softmax attention and calls ``on_softmax`` with it.

    Parameters
    ----------
    on_softmax
        Called with each attention after it was computed. A tensor that it returns, of the shape of the call's
        ``output``, replaces the output; derivatives then go through that tensor.
    ahead
        Whether to call ``on_softmax`` before the attention is computed. The call then has no ``output``, and
        the attention runs only if ``on_softmax`` returns None. This is needed under ``torch.func.jvp``, which
        PyTorch's fused attention does not support.
    check
        Whether to recompute the attention from the operands that were read and compare it with the output; a
        difference is named in ``obstacle``. At most 32 rows are recomputed, or all of them if an operation
        was ignored that should change nothing. Nothing is compared if ``ahead``, or inside ``torch.vmap``.

    """

    def __init__(
        self, on_softmax: Callable[[SoftmaxCall], Tensor | None], *, ahead: bool = False, check: bool = True
    ) -> None:
        super().__init__()
        self._on_core = on_softmax
        self._ahead = ahead
        self._check = check

    def _report(self, call: SoftmaxCall) -> Tensor | None:
        """Pass a softmax attention to the callback ``on_softmax``. Return the output that the callback gives
        in place of the original output, or None if it gives none.
        """
        replacement = self._on_core(call)
        if replacement is None or call.output is None:
            return replacement
        if replacement.shape != call.output.shape:
            raise ArgumentError(
                "on_softmax",
                expected=f"an output of shape {tuple(call.output.shape)}",
                got=f"one of shape {tuple(replacement.shape)}",
            )
        return replacement.to(call.output.dtype)

    def weighted(
        self, contraction: Contraction, p: Tensor, known: Probabilities | Opaque, run: Callable[[], Tensor]
    ) -> Tensor:
        """Return the product of attention weights and values, or an output that replaces it.

        The callback ``on_softmax`` gives the replacement.
        """
        layout = _Layout(contraction, p, known)
        output = None if self._ahead else run()
        replacement = self._report(layout.call(output, check=self._check and not self._ahead))
        if replacement is not None:
            return layout.undo(replacement)
        return run() if output is None else output

    def fused(self, given: dict[str, Any], run: Callable[[], Tensor]) -> Tensor:
        """Return the output of ``scaled_dot_product_attention``, or an output that replaces it.

        The callback ``on_softmax`` gives the replacement.
        """
        query, key, value = given["query"], given["key"], given["value"]
        if any(t.is_nested for t in (query, key, value)) or min(t.ndim for t in (query, key, value)) < 2:
            return run()
        shape = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
        q, k, v = (t.expand(*shape, *t.shape[-3:]) if t.ndim > 2 else t[None] for t in (query, key, value))
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal", False))
        if causal and q.shape[-2] != k.shape[-2]:
            mask, causal = triangle(q, k), False
        if mask is not None:
            mask = mask[(None,) * (q.ndim - mask.ndim)]
        scale = given.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        result = None if self._ahead else run()
        output = result if result is None or query.ndim > 2 else result[None]
        call = SoftmaxCall(q, k, v, scale, mask, None, None, output, None, "sdpa", "", causal)
        if given.get("dropout_p", 0.0) > 0:
            call = _unreadable(v, output, None, "its probabilities are dropped at random")
        replacement = self._report(call)
        if replacement is None:
            return run() if result is None else result
        return replacement if query.ndim > 2 else replacement[0]

    def flex(self, given: Any, run: Callable[[], Any]) -> Any:
        """Return the results of the operator behind ``flex_attention``; its output may be replaced."""
        query, key, value, score_mod, blocks, scale = given[:6]
        mask, obstacle = _flex_mask(query, key, score_mod, blocks[-1])
        results = None if self._ahead else run()
        output = None if results is None else results[0]
        call = SoftmaxCall(query, key, value, float(scale), mask, None, None, output, None, "sdpa", "")
        replacement = self._report(_unreadable(value, output, None, obstacle) if obstacle else call)
        if replacement is None:
            return run() if results is None else results
        row = query.new_zeros(query.shape[:-1])  # sums and maxima, which attention modules do not use
        return (replacement, row, row) if results is None else (replacement, *results[1:])


def _flex_mask(query: Tensor, key: Tensor, score_mod: Any, mask_mod: Any) -> tuple[Tensor | None, str]:
    """Return the mask of a ``flex_attention``, boolean or with the numbers that it adds to the scores; and
    why it is no mask, or "".
    """
    sizes = (*query.shape[:-1], key.shape[-2])
    places = [
        torch.arange(size, device=query.device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(sizes)
    ]
    visible = mask_mod(*places)
    zero = query.new_zeros(1, 1, 1, 1)
    bias, moved = (score_mod(score, *places) for score in (zero, zero + 1.5))
    hidden = bias.isneginf()
    if not torch.allclose((moved - 1.5).masked_fill(hidden, 0.0), bias.masked_fill(hidden, 0.0), atol=1e-5):
        return None, "its score_mod is no number that is added to the scores"
    visible = visible & ~hidden
    if bool((bias.masked_fill(hidden, 0.0) != 0).any()):
        return torch.where(visible, bias, -math.inf).expand(*[-1] * 2, *sizes[2:]), ""
    return None if all_true(visible) else visible.expand(*visible.shape[: visible.ndim - 2], *sizes[2:]), ""


class _Layout:
    """A product of attention weights and values, with its axes ordered as in a SoftmaxCall.

    ``lead``, ``rows``, ``keys`` and ``columns`` are the labels of the axes in the contraction.
    """

    def __init__(self, contraction: Contraction, p: Tensor, known: Probabilities | Opaque) -> None:
        self.known, self.probabilities, self.value = known, p, contraction.right
        first, second = contraction.left_labels, contraction.right_labels
        if p is not contraction.left:
            first, second, self.value = second, first, contraction.left
        self.p_labels, self.v_labels, self.labels = first, second, contraction.labels
        # keys: summed over; lead: in both operands and the result (batch, heads); rows and columns: in one
        # operand
        self.keys = [label for label in first if label in second and label not in self.labels]
        self.lead = [label for label in first if label in second and label in self.labels]
        self.rows = [label for label in first if label not in second]
        self.columns = [label for label in second if label not in first]
        self.sizes = dict(zip(first, self.probabilities.shape, strict=True))
        for label, size in zip(second, self.value.shape, strict=True):
            self.sizes[label] = max(size, self.sizes.get(label, 1))

    def call(self, output: Tensor | None, *, check: bool) -> SoftmaxCall:
        """Return the attention as a SoftmaxCall, with its operands or the reason why they could not be
        determined.
        """
        lead = [self.sizes[label] for label in self.lead] or [1]
        m, columns = _length(self.sizes, self.rows), _length(self.sizes, self.columns)
        value = self._sorted(self.value, self.v_labels, [*self.lead, *self.keys, *self.columns])
        value = value.reshape(*(value.shape[: len(self.lead)] or (1,)), -1, columns)
        p = self._sorted(self.probabilities, self.p_labels, [*self.lead, *self.rows, *self.keys])
        p = p.reshape(*(p.shape[: len(self.lead)] or (1,)), m, -1)
        if output is not None:
            output = self._sorted(output, self.labels, [*self.lead, *self.rows, *self.columns])
            output = output.reshape(*lead, m, columns)
        try:
            call = self._read(lead, value, output, p)
        except Unreadable as reason:
            return _unreadable(value, output, p, str(reason))
        assert isinstance(self.known, Probabilities)
        scores = self.known.scores
        if check and not _agrees(call, scores.eps, every=scores.approximate):
            assert output is not None
            finite = "that of the softmax of its scores" if all_true(output.isfinite()) else "finite"
            return _unreadable(value, output, p, f"its output is not {finite}")
        return call

    def _read(self, lead: list[int], value: Tensor, output: Tensor | None, p: Tensor) -> SoftmaxCall:
        if isinstance(self.known, Opaque):
            raise Unreadable(self.known.reason)
        axes = dict(zip(self.p_labels, self.known.scores.axes, strict=True))
        summed = [leaf for label in self.keys for leaf in leaves(axes[label])]
        if not self.known.cut or summed != list(leaves(self.known.keys)):
            raise Unreadable("its softmax does not run over the values that are summed")
        rows: Axis = tuple(factor for label in self.rows for factor in axes[label])
        leading = [axes[label] for label in self.lead] or [()]
        reading = read_operands(self.known.scores, leading, rows, self.known.keys)
        query = reading.query.expand(*lead, *reading.query.shape[-2:])
        kv_heads = max(reading.key.shape[-3], value.shape[-3])
        key = reading.key.expand(*lead[:-1], kv_heads, *reading.key.shape[-2:])
        value = value.expand(*lead[:-1], kv_heads, *value.shape[-2:])
        return SoftmaxCall(query, key, value, reading.scale, reading.mask, reading.softcap, reading.sinks,
                        output, p, "softmax", "")  # fmt: skip

    def undo(self, output: Tensor) -> Tensor:
        """Permute the axes of an attention output to the order that the code of the model expects.

        The output has shape (*lead, m, columns).
        """
        order = [*self.lead, *self.rows, *self.columns]
        output = output.reshape([self.sizes[label] for label in order])
        return output.permute([order.index(label) for label in self.labels])

    @staticmethod
    def _sorted(tensor: Tensor, labels: Sequence[Any], order: Sequence[Any]) -> Tensor:
        positions = [labels.index(label) for label in order]
        return tensor if positions == list(range(tensor.ndim)) else tensor.permute(positions)


def capped_scores(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the attention scores (..., m, n) after scaling and soft cap, before masking."""
    scores = query @ key.mT * scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softmax_values(scores: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Return the averages of the values under the softmax of the scores, given a mask and attention sinks."""
    n, dtype = scores.shape[-1], scores.dtype
    if mask is not None:
        boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(mask.logical_not(), -math.inf) if boolean else scores + mask
    if sinks is None:
        return scores.to(dtype).softmax(dim=-1) @ value
    column = sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores.to(dtype), column), dim=-1).softmax(dim=-1)[..., :n] @ value


def triangle(query: Tensor, key: Tensor) -> Tensor:
    """Return the (m, n) mask that PyTorch's ``is_causal`` stands for, in which query i sees the
    keys j <= i.
    """
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


def _length(sizes: dict[Any, int], labels: Sequence[Any]) -> int:
    return math.prod(sizes[label] for label in labels)


def _unreadable(value: Tensor, output: Tensor | None, p: Tensor | None, reason: str) -> SoftmaxCall:
    kind = "sdpa" if p is None else "softmax"
    return SoftmaxCall(None, None, value, 1.0, None, None, None, output, p, kind, reason)


def _agrees(call: SoftmaxCall, eps: float, *, every: bool) -> bool:
    """Return True if the operands read from a softmax call reproduce its output.

    Unless ``every`` is set, a sample of the rows is compared.

    Rows that see no key are not compared: their output has no meaning.
    """
    assert call.query is not None
    assert call.key is not None
    assert call.output is not None
    q, k, v, mask, output = call.query, call.key, call.value, call.mask, call.output
    m = q.shape[-2]
    dtype = torch.float32
    for tensor in (q, k, v, output):
        dtype = torch.promote_types(dtype, tensor.dtype)
    with torch.no_grad(), torch._C.DisableTorchFunction():  # hide this computation from all tracers
        if m > _ROWS and not every:
            rows = torch.linspace(0, m - 1, _ROWS, device=q.device).round().long()
            q, output = q[..., rows, :], output[..., rows, :]
            mask = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
        scores = capped_scores(q.to(dtype), k.to(dtype), call.scale, call.softcap)
        size = scores.abs().max()  # the error of the weights grows with the size of the scores
        seen = torch.ones((), dtype=torch.bool, device=q.device)
        if mask is not None:
            seen = (mask if mask.dtype == torch.bool else mask > HIDES).any(-1)
        expected = softmax_values(scores, v.to(dtype), mask, call.sinks)
        eps = max(eps, torch.finfo(output.dtype).eps)
        allowed = 16 * eps * (1 + size) * v.abs().max().to(dtype)
        wrong = ~((expected - output).abs() <= allowed) & seen[..., None]
        return all_true(~wrong)
