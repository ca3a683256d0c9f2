"""See every softmax attention that runs in a PyTorch module, whatever code it is written in.

A :class:`Watch` is a torch function mode. It sees ``scaled_dot_product_attention``, and every softmax
over scores that are a product of two tensors, once its result is multiplied by values. What was done to
the scores in between is followed operation by operation (``scores``), so that the operands of the attention
can be handed over, and its output replaced.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from howsmooth.errors import ArgumentError
from howsmooth.models.axes import Axis, Factor, broadcast, leaves
from howsmooth.models.scores import SEVERAL_PRODUCTS, Operand, Scores, Unreadable, read

__all__ = ["CoreCall", "Watch"]

_HIDES = -9000.0  # a number at most this, written over a score or added to it, hides it
_ROWS = 32  # rows of the probabilities that are recomputed to check a reading


@dataclass(frozen=True, eq=False)
class CoreCall:
    """One softmax attention: ``output = softmax(softcap · tanh(scale · q kᵀ / softcap) + mask) v``.

    Tensors are the model's own or views of them. ``lead`` holds the batch and, where there are some,
    windows; there is always an axis of heads, of length one where the code has none.
    """

    query: Tensor | None  # (*lead, heads, m, key_dim)
    key: Tensor | None  # (*lead, kv_heads, n, key_dim)
    value: Tensor  # (*lead, kv_heads, n, value_dim)
    scale: float
    mask: Tensor | None  # additive, or boolean with True where visible; broadcasts to (*lead, heads, m, n)
    softcap: float | None
    sinks: Tensor | None  # (heads,)
    output: Tensor | None  # (*lead, heads, m, value_dim); None for a watch that runs ahead
    probabilities: Tensor | None  # (*lead, heads, m, n) where the code has them
    kind: str  # "sdpa" or "softmax"
    obstacle: str  # why the operands could not be read, in a phrase; "" where they were


@dataclass(frozen=True, slots=True)
class _Probabilities:
    """What is known about a tensor that came out of a softmax."""

    scores: Scores  # whose axes are now those of the probabilities
    keys: Axis  # over which the softmax ran, without sinks
    cut: bool  # the sinks' column is gone, or there was none


@dataclass(frozen=True, slots=True)
class _Contraction:
    """A product of two tensors: for each a label of each axis, and the labels of the result."""

    left: Tensor
    right: Tensor
    left_labels: tuple[Any, ...]
    right_labels: tuple[Any, ...]
    labels: tuple[Any, ...]
    bias: Tensor | None = None
    beta: float = 1.0
    alpha: float = 1.0


class Watch(TorchFunctionMode):
    """Call a function at every softmax attention that runs while the watch is on.

    Parameters
    ----------
    on_core
        Called with each attention as it ends. A tensor that it returns, of the shape of the call's
        ``output``, takes the place of the output; derivatives then go through that tensor.
    ahead
        Whether to call ``on_core`` before the attention is computed. The call then has no ``output``, and
        the attention runs only if ``on_core`` returns None. For replays under ``torch.func.jvp``, which
        PyTorch's fused attention refuses.
    check
        Whether to compare the output with the attention of the operands that were read, and to say so in
        the ``obstacle`` where they differ. At most 32 rows of it are recomputed, unless something was left
        out that should make no difference. Never done ahead, nor inside ``torch.vmap``.

    """

    def __init__(
        self, on_core: Callable[[CoreCall], Tensor | None], *, ahead: bool = False, check: bool = True
    ) -> None:
        super().__init__()
        self._on_core = on_core
        self._ahead = ahead
        self._check = check
        self._depth = 0
        # By id, with a weak reference to tell that the id is still that of the same tensor.
        self._known: dict[int, tuple[ref[Tensor], Scores | _Probabilities]] = {}

    def __enter__(self) -> Watch:
        """Start to watch; a watch may be entered again inside of itself."""
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop watching, and forget all tensors."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if not self._depth:
            self._known.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and follow what it does to scores."""
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs)
        result = func(*args, **kwargs)
        # Written over by a function that no rule knows: what was known of it holds no more.
        if args and id(args[0]) in self._known and (result is args[0] or result is None):
            self._spoil(args[0], func)
        return result

    def known(self, tensor: Any) -> Scores | _Probabilities | None:
        """Return what is known about a tensor."""
        entry = self._known.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def note(self, tensor: Any, known: Scores | _Probabilities | None) -> None:
        """Remember what is known about a tensor, for as long as it lives."""
        if known is None or not isinstance(tensor, Tensor):
            return
        key, table = id(tensor), self._known
        entry = table.get(key)
        if entry is not None and entry[0]() is tensor:
            table[key] = (entry[0], known)
            return

        def forget(dead: ref[Tensor]) -> None:
            if key in table and table[key][0] is dead:
                del table[key]

        table[key] = (ref(tensor, forget), known)

    def _spoil(self, tensor: Tensor, func: Any) -> None:
        self.note(tensor, _spoiled(self.known(tensor), f"are written over by {_name(func)}"))

    def report(self, call: CoreCall) -> Tensor | None:
        """Hand a call over, and take what is to replace its output."""
        replacement = self._on_core(call)
        if replacement is None or call.output is None:
            return replacement
        if replacement.shape != call.output.shape:
            raise ArgumentError(
                "on_core",
                expected=f"an output of shape {tuple(call.output.shape)}",
                got=f"one of shape {tuple(replacement.shape)}",
            )
        return replacement.to(call.output.dtype)

    def attend(self, contraction: _Contraction, func: Any, args: Any, kwargs: Any) -> Any:
        """Report the product of probabilities and values, and run it."""
        layout = _Layout(contraction, self.known(contraction.left), self.known(contraction.right))
        if self._ahead:
            replacement = self.report(layout.call(None, check=False))
            return func(*args, **kwargs) if replacement is None else layout.undo(replacement)
        output = func(*args, **kwargs)
        replacement = self.report(layout.call(output, check=self._check))
        return output if replacement is None else layout.undo(replacement)


class _Layout:
    """The product of probabilities and values, rearranged to (*lead, heads, m, n) and (..., n, value_dim)."""

    def __init__(self, contraction: _Contraction, left: Any, right: Any) -> None:
        first = isinstance(left, _Probabilities)
        self.known: _Probabilities = left if first else right
        p, v = contraction.left_labels, contraction.right_labels
        self.probabilities, self.value = contraction.left, contraction.right
        if not first:
            p, v = v, p
            self.probabilities, self.value = self.value, self.probabilities
        self.p_labels, self.v_labels, self.labels = p, v, contraction.labels
        self.keys = [label for label in p if label in v and label not in self.labels]
        self.lead = [label for label in p if label in v and label in self.labels]
        self.rows = [label for label in p if label not in v]
        self.columns = [label for label in v if label not in p]
        self.sizes = dict(zip(p, self.probabilities.shape, strict=True))
        for label, size in zip(v, self.value.shape, strict=True):
            self.sizes[label] = max(size, self.sizes.get(label, 1))

    def call(self, output: Tensor | None, *, check: bool) -> CoreCall:
        """Read the operands."""
        lead = [self.sizes[label] for label in self.lead] or [1]
        m, columns = _length(self.sizes, self.rows), _length(self.sizes, self.columns)
        axes = dict(zip(self.p_labels, self.known.scores.axes, strict=False))
        value = self._sorted(self.value, self.v_labels, [*self.lead, *self.keys, *self.columns])
        value = value.reshape(*(value.shape[: len(self.lead)] or (1,)), -1, columns)
        p = self._sorted(self.probabilities, self.p_labels, [*self.lead, *self.rows, *self.keys])
        p = p.reshape(*(p.shape[: len(self.lead)] or (1,)), m, -1)
        if output is not None:
            output = self._sorted(output, self.labels, [*self.lead, *self.rows, *self.columns])
            output = output.reshape(*lead, m, columns)
        try:
            if not self.known.scores.obstacle and (
                len(self.keys) != 1
                or leaves(axes[self.keys[0]]) != leaves(self.known.keys)
                or not self.known.cut
            ):
                raise Unreadable("its softmax does not run over the values that are summed")  # noqa: TRY301
            rows: Axis = tuple(f for label in self.rows for f in axes[label])
            leading = [axes[label] for label in self.lead] or [()]
            reading = read(self.known.scores, leading, rows, self.known.keys)
            query = reading.query.expand(*lead, *reading.query.shape[-2:])
            kv_heads = max(reading.key.shape[-3], value.shape[-3])
            key = reading.key.expand(*lead[:-1], kv_heads, *reading.key.shape[-2:])
            value = value.expand(*lead[:-1], kv_heads, *value.shape[-2:])
            call = CoreCall(query, key, value, reading.scale, reading.mask, reading.softcap, reading.sinks,
                            output, p, "softmax", "")  # fmt: skip
        except Unreadable as reason:
            return _unreadable(value, output, p, str(reason))
        every = self.known.scores.approximate
        if check and _agrees(call, self.known.scores.eps, every=every) is False:
            return _unreadable(value, output, p, "its output is not that of the softmax of its scores")
        return call

    def undo(self, output: Tensor) -> Tensor:
        """Bring an output back to the arrangement that the code expects."""
        order = [*self.lead, *self.rows, *self.columns]
        output = output.reshape([self.sizes[label] for label in order])
        return output.permute([order.index(label) for label in self.labels])

    @staticmethod
    def _sorted(tensor: Tensor, labels: Sequence[Any], order: Sequence[Any]) -> Tensor:
        positions = [labels.index(label) for label in order]
        return tensor if positions == list(range(tensor.ndim)) else tensor.permute(positions)


def _length(sizes: dict[Any, int], labels: Sequence[Any]) -> int:
    return math.prod(sizes[label] for label in labels)


def _unreadable(value: Tensor, output: Tensor | None, p: Tensor | None, reason: str) -> CoreCall:
    kind = "sdpa" if p is None else "softmax"
    return CoreCall(None, None, value, 1.0, None, None, None, output, p, kind, reason)


def _agrees(call: CoreCall, eps: float, *, every: bool) -> bool | None:
    """Whether the output is the attention of the operands, on a sample of rows; None if it cannot be known.

    Rows that see no key are left out: whatever code does with them, it means nothing.
    """
    assert call.query is not None
    assert call.key is not None
    assert call.output is not None
    q, k, v, mask, output = call.query, call.key, call.value, call.mask, call.output
    m, n = q.shape[-2], k.shape[-2]
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    with torch.no_grad():
        if m > _ROWS and not every:
            rows = torch.linspace(0, m - 1, _ROWS, device=q.device).round().long()
            q, output = q[..., rows, :], output[..., rows, :]
            mask = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
        scores = call.scale * (q.to(dtype) @ k.to(dtype).mT)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        size = scores.abs().max()
        seen = torch.ones((), dtype=torch.bool, device=q.device)
        if mask is not None and mask.dtype == torch.bool:
            seen = mask.any(-1)
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            seen = (mask > _HIDES).any(-1)
            scores = scores + mask
        if call.sinks is not None:
            column = call.sinks[:, None, None].to(dtype).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        expected = scores.softmax(-1)[..., :n] @ v.to(dtype)
        eps = max(eps, torch.finfo(output.dtype).eps)
        allowed = 16 * eps * (1 + size) * v.abs().max().to(dtype)
        wrong = ~((expected - output).abs() <= allowed) & seen[..., None]
        try:
            return not bool(wrong.any())
        except RuntimeError:  # inside vmap no value can be looked at
            return None


# --- Rules: what a function of torch does to scores and probabilities ----------------------------------


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


def _spoiled(known: Scores | _Probabilities | None, what: str) -> Scores | _Probabilities | None:
    if isinstance(known, Scores):
        return known.but(f"its scores {what}")
    if isinstance(known, _Probabilities):
        return replace(known, scores=known.scores.but(f"its probabilities {what}"))
    return None


def _on_scores(known: Any, change: Callable[[Scores], Scores]) -> Any:
    """Change the scores, or the axes of probabilities."""
    if isinstance(known, _Probabilities):
        return replace(known, scores=change(known.scores))
    return change(known)


def _two(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the two operands of a binary function."""
    rest = [*args[1:], *(kwargs[name] for name in ("other", "mat2") if name in kwargs)]
    return (args[0] if args else kwargs.get("input")), (rest[0] if rest else None)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "__float__") and not isinstance(value, Tensor))


def _all_ones(tensor: Tensor) -> bool:
    return bool((tensor == 1).all())


def _multiply(watch: Watch, func: Any, args: Any, kwargs: Any, inverse: bool = False) -> Any:
    left, right = _two(args, kwargs)
    known, other = watch.known(left), watch.known(right)
    if known is None and (other is None or inverse):
        return func(*args, **kwargs)
    if known is None:
        known, right = other, left
    elif other is not None:
        known = _spoiled(known, "are multiplied by other numbers")
    if isinstance(known, _Probabilities):
        # A mask of heads is all ones unless heads are pruned.
        same = (_number(right) and right == 1) or (isinstance(right, Tensor) and _all_ones(right))
        same = same and (not isinstance(right, Tensor) or right.ndim <= len(known.scores.axes))
        changed: Any = known if same else _spoiled(known, "are multiplied by other numbers")
    elif kwargs.get("rounding_mode") is not None or not isinstance(known, Scores):
        changed = None
    elif _number(right):
        number = float(right)
        changed = known.times(1 / number if inverse else number)
    else:
        changed = known.times_tensor(right, inverse=inverse) if isinstance(right, Tensor) else None
    result = func(*args, **kwargs)
    watch.note(result, changed)
    return result


def _divide(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    return _multiply(watch, func, args, kwargs, inverse=True)


def _add(watch: Watch, func: Any, args: Any, kwargs: Any, signs: tuple[float, float] = (1.0, 1.0)) -> Any:
    left, right = _two(args, kwargs)
    known, other = watch.known(left), watch.known(right)
    if known is None and other is None:
        return func(*args, **kwargs)
    alpha = float(kwargs.get("alpha", 1.0))
    mine, theirs = signs[0], signs[1] * alpha
    if known is not None and other is not None:
        both = isinstance(known, Scores) and isinstance(other, Scores)
        known = (
            known.but(SEVERAL_PRODUCTS)
            if both and isinstance(known, Scores)
            else _spoiled(known, "are added")
        )
    elif known is None:
        known, right, mine, theirs = other, left, theirs, mine
    if isinstance(known, Scores):
        # The tensor is kept as it is now, should it be written over later: in-place sums start with scores.
        moved = known if mine == 1 else known.times(mine)
        changed: Any = moved.plus(right, theirs) if isinstance(right, Tensor) else moved
    else:
        changed = _spoiled(known, "are added to")
    result = func(*args, **kwargs)
    watch.note(result, changed)
    return result


def _subtract(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    return _add(watch, func, args, kwargs, signs=(1.0, -1.0))


def _subtract_from(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    return _add(watch, func, args, kwargs, signs=(-1.0, 1.0))


def _negate(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    known = watch.known(args[0])
    result = func(*args, **kwargs)
    watch.note(result, known.times(-1.0) if isinstance(known, Scores) else _spoiled(known, "are negated"))
    return result


def _tanh(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    known = watch.known(args[0] if args else kwargs.get("input"))
    result = func(*args, **kwargs)
    watch.note(result, known.capped() if isinstance(known, Scores) else _spoiled(known, "are capped"))
    return result


def _convert(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    """Dtypes, devices and copies."""
    known = watch.known(args[0])
    result = func(*args, **kwargs)
    if known is not None and isinstance(result, Tensor):
        exact = result.is_floating_point()
        watch.note(result, _on_scores(known, lambda s: s.rounded(result.dtype)) if exact else None)
    return result


def _same(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    """Keep what is known: the function should change nothing that counts, which every row is checked for."""
    known = watch.known(args[0] if args else kwargs.get("input"))
    result = func(*args, **kwargs)
    if known is not None and isinstance(result, Tensor) and result.shape == args[0].shape:
        watch.note(result, _on_scores(known, lambda s: replace(s, approximate=True)))
    return result


def _reshape(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    known = watch.known(args[0])
    result = func(*args, **kwargs)
    if known is not None and result.dtype == args[0].dtype:
        watch.note(result, _on_scores(known, lambda s: s.reshaped(result.shape)))
    return result


def _expand(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    known = watch.known(args[0])
    result = func(*args, **kwargs)
    if known is not None:
        watch.note(result, _on_scores(known, lambda s: s.moved(broadcast(s.axes, result.shape)[0])))
    return result


def _permute(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    known = watch.known(args[0])
    result = func(*args, **kwargs)
    if known is not None and isinstance(result, Tensor):
        # Lengths 1, 2, 3... tell where each axis went, however the function is told.
        marked = func(torch.empty(tuple(range(1, args[0].ndim + 1)), device="meta"), *args[1:], **kwargs)
        order = [size - 1 for size in marked.shape]
        watch.note(result, _on_scores(known, lambda s: s.moved(tuple(s.axes[i] for i in order))))
    return result


def _index(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    known = watch.known(args[0])
    result = func(*args, **kwargs)
    if known is None or not isinstance(result, Tensor):
        return result
    tensor = args[0]
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if result.numel() == tensor.numel() and all(i is None or isinstance(i, slice) or i is ... for i in index):
        watch.note(result, _on_scores(known, lambda s: s.reshaped(result.shape)))
    else:
        watch.note(result, _without_sinks(known, tensor, result) or _spoiled(known, "are indexed"))
    return result


def _narrow(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    known = watch.known(args[0])
    result = func(*args, **kwargs)
    if known is not None:
        watch.note(result, _without_sinks(known, args[0], result) or _spoiled(known, "are indexed"))
    return result


def _without_sinks(known: Any, tensor: Tensor, result: Tensor) -> _Probabilities | None:
    """Probabilities from which the column of the sinks was cut off, and nothing else."""
    if not isinstance(known, _Probabilities) or known.cut or known.scores.sinks is None:
        return None
    sinks, axes = known.scores.sinks, known.scores.axes
    dim = next((i for i, axis in enumerate(axes) if leaves(axis) == sinks.joined), None)
    if dim is None or result.ndim != tensor.ndim:
        return None
    shape = list(tensor.shape)
    shape[dim] -= 1
    start = tensor.stride(dim) if sinks.first else 0
    if list(result.shape) != shape or result.storage_offset() - tensor.storage_offset() != start:
        return None
    scores = replace(known.scores, axes=(*axes[:dim], sinks.keys, *axes[dim:][1:]))
    return _Probabilities(scores, sinks.keys, True)


def _join(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    tensors = args[0] if args else kwargs.get("tensors")
    result = func(*args, **kwargs)
    known = [watch.known(tensor) for tensor in tensors] if isinstance(tensors, list | tuple) else []
    if not any(isinstance(k, Scores | _Probabilities) for k in known):
        return result
    which = next(i for i, k in enumerate(known) if k is not None)
    here = known[which]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    if isinstance(here, Scores) and len(tensors) == 2 and known[1 - which] is None:
        other = tensors[1 - which]
        watch.note(result, here.joined(other, dim % result.ndim, first=which == 1))
    else:
        watch.note(result, _spoiled(here, "are joined to others"))
    return result


def _masked_fill(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    known = watch.known(args[0])
    result = func(*args, **kwargs)
    pairs = args[1] if len(args) > 1 else kwargs.get("mask")
    value = args[2] if len(args) > 2 else kwargs.get("value")
    if isinstance(pairs, Tensor):
        watch.note(result, _overwritten(known, pairs, value))
    return result


def _where(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.where(condition, a, b)`` and ``a.where(condition, b)``."""
    result = func(*args, **kwargs)
    method = func is Tensor.where
    condition, first, second = (
        (args[1], args[0], args[2]) if method and len(args) > 2 else (*args, None, None)[:3]
    )
    if not isinstance(condition, Tensor):
        return result
    for tensor, other, hidden in ((first, second, True), (second, first, False)):
        known = watch.known(tensor)
        if known is not None and watch.known(other) is None:
            watch.note(result, _overwritten(known, ~condition if hidden else condition, other))
            return result
    return result


def _overwritten(known: Any, pairs: Tensor, value: Any) -> Any:
    """Scores or probabilities with another number in some places."""
    if isinstance(known, _Probabilities):
        # Probabilities of hidden pairs are zero already; where that is not so the check sees it.
        return _on_scores(known, lambda s: replace(s, approximate=True))
    if not isinstance(known, Scores):
        return None
    low = bool((value <= _HIDES).all()) if isinstance(value, Tensor) else _number(value) and value <= _HIDES
    if known.sinks is not None:
        return known.but("its scores and sinks are masked together")
    return known.hiding(pairs.bool()) if low else known.but("its scores are written over by other numbers")


def _softmax(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0] if args else kwargs.get("input")
    known = watch.known(tensor)
    result = func(*args, **kwargs)
    if not isinstance(known, Scores):
        return result
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(dim, int):
        return result
    keys = known.axes[dim] if len(known.axes) == result.ndim else ()
    cut = True
    if known.sinks is not None:
        cut = leaves(keys) != known.sinks.joined
        known = known.but("its softmax does not run over the joined scores and sinks") if cut else known
    watch.note(result, _Probabilities(known.rounded(result.dtype), keys, cut))
    return result


def _dropout(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    known = watch.known(args[0] if args else kwargs.get("input"))
    result = func(*args, **kwargs)
    if known is not None:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        watch.note(result, _spoiled(known, "are dropped at random") if training and p > 0 else known)
    return result


def _opaque(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    """Go through functions that mix scores: what comes out still comes from a product."""
    known = watch.known(args[0] if args else kwargs.get("input"))
    result = func(*args, **kwargs)
    if known is not None:
        first = result[0] if isinstance(result, tuple) else result
        watch.note(first, _spoiled(known, f"go through {_name(func)}"))
    return result


def _product(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    contraction = _contraction(func, args, kwargs)
    if contraction is None:
        return func(*args, **kwargs)
    left, right = watch.known(contraction.left), watch.known(contraction.right)
    if contraction.bias is None and (isinstance(left, _Probabilities) or isinstance(right, _Probabilities)):
        return watch.attend(contraction, func, args, kwargs)
    result = func(*args, **kwargs)
    if not _is_parameter(contraction.left) and not _is_parameter(contraction.right):
        watch.note(result, _product_scores(contraction))
    return result


def _is_parameter(tensor: Tensor) -> bool:
    """Whether the tensor is a view of a parameter: its product with tokens is a layer, not scores."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _product_scores(c: _Contraction) -> Scores | None:
    shared = [label for label in c.left_labels if label in c.right_labels and label not in c.labels]
    if len(shared) != 1 or not c.left.is_floating_point():
        return None
    contracted = Factor(c.left.shape[c.left_labels.index(shared[0])])
    sizes: dict[Any, int] = {}
    for labels, tensor in ((c.left_labels, c.left), (c.right_labels, c.right)):
        for label, size in zip(labels, tensor.shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
            if size == 0:
                return None
    axes: dict[Any, Axis] = {label: (Factor(sizes[label]),) if sizes[label] > 1 else () for label in c.labels}
    axes[shared[0]] = (contracted,)

    def operand(labels: tuple[Any, ...], tensor: Tensor) -> Operand:
        own = zip(labels, tensor.shape, strict=True)
        return Operand(
            tensor, tuple(axes[label] if size > 1 or label == shared[0] else () for label, size in own)
        )

    scores = Scores(
        axes=tuple(axes[label] for label in c.labels),
        left=operand(c.left_labels, c.left),
        right=operand(c.right_labels, c.right),
        contracted=contracted,
        eps=max(torch.finfo(t.dtype).eps for t in (c.left, c.right)),
        scale=c.alpha,
    )
    return scores if c.bias is None or c.beta == 0 else scores.plus(c.bias, c.beta)


def _contraction(func: Any, args: Any, kwargs: Any) -> _Contraction | None:
    """Write a product of two tensors with a label for each axis."""
    if func is torch.einsum:
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        if not isinstance(args[0], str) or len(operands) != 2:
            return None
        return _einsum(args[0], *operands)
    bias, beta, alpha = None, 1.0, 1.0
    if func in _WITH_BIAS:
        given = dict(zip(("input", "left", "right"), args, strict=False))
        for name, value in kwargs.items():
            given[{"batch1": "left", "mat1": "left", "batch2": "right", "mat2": "right"}.get(name, name)] = (
                value
            )
        bias, left, right = given.get("input"), given.get("left"), given.get("right")
        beta, alpha = float(given.get("beta", 1.0)), float(given.get("alpha", 1.0))
    else:
        left, right = _two(args, kwargs)
        if func is Tensor.__rmatmul__:
            left, right = right, left
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or min(left.ndim, right.ndim) < 2:
        return None
    rank = max(left.ndim, right.ndim)
    lead = tuple(range(rank - 2))
    return _Contraction(
        left, right,
        (*lead[rank - left.ndim :], "m", "c"), (*lead[rank - right.ndim :], "c", "n"), (*lead, "m", "n"),
        bias, beta, alpha,
    )  # fmt: skip


def _einsum(equation: str, left: Tensor, right: Tensor) -> _Contraction | None:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    if not arrow:
        letters = [c for c in inputs if c.isalpha()]
        output = ("..." if "..." in inputs else "") + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    hidden = [
        tensor.ndim - len(term.replace("...", "")) for term, tensor in zip(terms, (left, right), strict=True)
    ]
    longest = max([0] + [count for term, count in zip(terms, hidden, strict=True) if "..." in term])

    def labels(term: str, count: int) -> tuple[Any, ...]:
        before, dots, after = term.partition("...")
        return (*before, *(range(longest - count, longest) if dots else ()), *after)

    written = labels(terms[0], hidden[0]), labels(terms[1], hidden[1]), labels(output, longest)
    if any(len(set(term)) != len(term) for term in written) or any(
        len(term) != tensor.ndim for term, tensor in zip(written, (left, right), strict=False)
    ):
        return None
    alone = set(written[0]) ^ set(written[1])
    return None if alone - set(written[2]) else _Contraction(left, right, *written)


def _fused(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    """``scaled_dot_product_attention``, whose operands are its arguments."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    if any(t.is_nested for t in (query, key, value)) or min(t.ndim for t in (query, key, value)) < 2:
        return func(*args, **kwargs)
    shape = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    q, k, v = (t.expand(*shape, *t.shape[-3:]) if t.ndim > 2 else t[None] for t in (query, key, value))
    mask = given.get("attn_mask")
    if given.get("is_causal", False):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.ndim < q.ndim:
        mask = mask[(None,) * (q.ndim - mask.ndim)]
    scale = given.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    result = None if watch._ahead else func(*args, **kwargs)
    output = result if result is None or result.ndim > 2 else result[None]
    call = CoreCall(q, k, v, scale, mask, None, None, output, None, "sdpa", "")
    if given.get("dropout_p", 0.0) > 0:
        call = _unreadable(v, output, None, "its probabilities are dropped at random")
    replacement = watch.report(call)
    if replacement is None:
        return func(*args, **kwargs) if result is None else result
    return replacement if query.ndim > 2 else replacement[0]


def _inside(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the body of a function of torch under the watch.

    Under a mode such functions hand themselves over as a whole. Their own code, run with a
    ``has_torch_function`` that says no, goes on to functions that are handed over one by one.
    """
    seen = {**func.__globals__, "has_torch_function": lambda _: False}
    body = types.FunctionType(func.__code__, seen, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    with watch:
        return body(*args, **kwargs)


def _functions(names: str) -> set[Any]:
    """Everything in torch that has one of the names."""
    homes = (torch, Tensor, functional, torch.special)
    found = {getattr(home, name) for name in names.split() for home in homes if hasattr(home, name)}
    return {
        f.__get__ if isinstance(f, property) or type(f).__name__ == "getset_descriptor" else f for f in found
    }


_WITH_BIAS = _functions("baddbmm addmm")
_RULES: dict[Any, Callable[[Watch, Any, Any, Any], Any]] = {
    function: rule
    for rule, names in {
        _multiply: "mul multiply mul_ multiply_ __mul__ __rmul__ __imul__",
        _divide: "div divide true_divide div_ divide_ true_divide_ __truediv__ __itruediv__ __div__ __idiv__",
        _add: "add add_ __add__ __radd__ __iadd__",
        _subtract: "sub subtract sub_ subtract_ __sub__ __isub__",
        _subtract_from: "rsub __rsub__",
        _negate: "neg neg_ negative __neg__",
        _tanh: "tanh tanh_",
        _convert: "to float double half bfloat16 type type_as contiguous clone cpu cuda",
        _same: "clamp clamp_ clip clip_ clamp_min clamp_max maximum max nan_to_num nan_to_num_",
        _reshape: "view reshape view_as reshape_as flatten unflatten squeeze unsqueeze squeeze_ unsqueeze_",
        _expand: "expand expand_as broadcast_to",
        _permute: "transpose permute swapaxes swapdims movedim moveaxis t T mT H mH adjoint",
        _index: "__getitem__",
        _narrow: "narrow",
        _join: "cat concat concatenate",
        _masked_fill: "masked_fill masked_fill_",
        _where: "where",
        _softmax: "softmax",
        _dropout: "dropout dropout_ alpha_dropout feature_dropout",
        _opaque: (
            "gather take_along_dim index_select pad roll flip as_strided linear conv1d conv2d relu square "
            "sort topk sum cumsum exp sigmoid detach batch_norm group_norm layer_norm"
        ),
        _product: "matmul __matmul__ __rmatmul__ bmm mm baddbmm addmm einsum",
        _fused: "scaled_dot_product_attention",
        _inside: "multi_head_attention_forward",
    }.items()
    for function in _functions(names)
}
