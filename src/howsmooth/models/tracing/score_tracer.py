"""A tracer that follows attention scores through torch functions, from the product of queries and keys to the
values.

A :class:`ScoreTracer` is a torch function mode with a rule for every function that attention code applies to
scores and probabilities. After a function without a rule the result is unknown. After a function that
attention does not use, such as a sort, the result is :class:`Opaque`, with the reason.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from howsmooth.models.tracing.axis_tracking import Axis, broadcast, leaves, regroup
from howsmooth.models.tracing.contractions import PRODUCTS, Contraction, contraction_of, product_scores, two
from howsmooth.models.tracing.score_provenance import SEVERAL_PRODUCTS, Opaque, Scores, all_true

__all__ = ["HIDES", "Probabilities", "ScoreTracer"]

HIDES = -9000.0  # a number at or below this, written over a score or added to it, hides the key


@dataclass(frozen=True, slots=True)
class Probabilities:
    """A record of how a tensor of attention weights was computed, as the softmax of scores."""

    scores: Scores  # the argument of the softmax, with the axes of the probabilities
    keys: Axis  # the axis of the keys, over which the softmax ran, without the column of the sinks
    cut: bool  # whether the column of the sinks was cut off, or there was none


Known = Scores | Probabilities | Opaque
Rule = Callable[["ScoreTracer", Any, Any, Any], Any]


class ScoreTracer(TorchFunctionMode):
    """A torch function mode that records which tensors are attention scores or attention weights.

    Subclasses implement :meth:`weighted` and :meth:`fused`, which are called where an attention ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        # By the id of the tensor; the weak reference tells whether the id still belongs to that tensor.
        self._known: dict[int, tuple[ref[Tensor], Known]] = {}

    def weighted(
        self, contraction: Contraction, p: Tensor, known: Probabilities | Opaque, run: Callable[[], Tensor]
    ) -> Tensor:
        """Compute attention weights times values; subclasses record the product as the output of a softmax
        attention.

        ``run`` computes the product with the model's code.
        """
        raise NotImplementedError

    def fused(self, given: dict[str, Any], run: Callable[[], Tensor]) -> Tensor:
        """Call ``scaled_dot_product_attention``; subclasses record the result as the output of a softmax
        attention.

        ``run`` computes it with the model's code.
        """
        raise NotImplementedError

    def flex(self, given: Any, run: Callable[[], Any]) -> Any:
        """Call the operator behind ``flex_attention``; subclasses record its result as :meth:`fused` does."""
        raise NotImplementedError

    def __enter__(self) -> ScoreTracer:
        """Start the tracing of attention scores; the tracer may be entered again while it is active."""
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop the tracing of attention scores; the outermost exit also forgets the records of all
        tensors.
        """
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if not self._depth:
            self._known.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, and store a record of its result if it was computed from scores."""
        kwargs = kwargs or {}
        # Most functions of a forward pass touch no scores. Until there is a tensor with a description, only
        # rules that can start one are run, because rules cost time.
        rule = _RULES.get(func)
        if rule is not None and (self._known or rule in _STARTS):
            return rule(self, func, args, kwargs)
        result = func(*args, **kwargs)
        # A function without a rule changed its first argument in place, so this tensor holds no scores any
        # more.
        if args and id(args[0]) in self._known and (result is args[0] or result is None):
            self.note(args[0], _mixed(self.known(args[0]), f"are written over by {_name(func)}"))
        return result

    def known(self, tensor: Any) -> Known | None:
        """Return the record of a tensor, or None if it is neither attention scores nor attention weights."""
        entry = self._known.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def note(self, tensor: Any, known: Known | None) -> None:
        """Store the record of a tensor of attention scores or weights for as long as the tensor exists."""
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


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


def _mixed(known: Known | None, what: str) -> Opaque | None:
    """Return the record of a tensor that was computed from scores by an operation that does not occur in
    softmax attention.

    ``what`` is a phrase that says what the operation does.
    """
    if known is None or isinstance(known, Opaque):
        return known
    after = isinstance(known, Probabilities)
    return Opaque(f"its {'probabilities' if after else 'scores'} {what}", after)


class _Applied(NamedTuple):
    """A call of a torch function on attention scores or attention weights, together with its result."""

    func: Any
    args: Any
    kwargs: Any
    tensor: Tensor
    result: Tensor

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument of the torch function, whether it was passed by position or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


def _of_one(change: Callable[[Scores | Probabilities, _Applied], Known | None]) -> Rule:
    """Return the rule by which the tracer records the result of a function of one tensor, such as ``neg``.

    ``change`` takes the description of the tensor and the call, and returns the description of the result.
    """

    def rule(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("input")
        known = tracer.known(tensor)
        result = func(*args, **kwargs)
        if known is not None and isinstance(result, Tensor):
            applied = _Applied(func, args, kwargs, tensor, result)
            tracer.note(result, known if isinstance(known, Opaque) else change(known, applied))
        return result

    return rule


def _each(known: Scores | Probabilities, change: Callable[[Scores], Scores | Opaque]) -> Known:
    """Apply the function ``change`` to a record of attention scores, or to the scores in the record of
    attention weights.
    """
    if isinstance(known, Scores):
        return change(known)
    scores = change(known.scores)
    if isinstance(scores, Opaque):
        return Opaque("its probabilities are reshaped across their axes", probabilities=True)
    return replace(known, scores=scores)


# Each rule below runs a torch function and stores the description of its result.


def _number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "__float__") and not isinstance(value, Tensor))


def _multiply(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any, inverse: bool = False) -> Any:
    left, right = two(args, kwargs)
    known, other = tracer.known(left), tracer.known(right)
    # Let ``known`` describe the factor that is scores. In a quotient the scores must be the numerator.
    if known is None and not inverse:
        known, other, right = other, known, left
        if known is not None and func in _IN_PLACE and isinstance(right, Tensor):
            right = right.clone()  # the function overwrites it with the result
    result_of = known
    if known is None:
        return func(*args, **kwargs)
    if other is not None or kwargs.get("rounding_mode") is not None:
        result_of = _mixed(known, "are multiplied by other numbers")
    elif isinstance(known, Probabilities):
        # Models multiply probabilities by a mask of heads, which is all ones unless heads are pruned.
        ones = right == 1 if _number(right) else isinstance(right, Tensor) and all_true(right == 1)
        smaller = not isinstance(right, Tensor) or right.ndim <= len(known.scores.axes)
        if not ones or not smaller:
            result_of = _mixed(known, "are multiplied by other numbers")
    elif isinstance(known, Scores) and _number(right):
        result_of = known.times(1 / float(right) if inverse and right else float(right))
    elif isinstance(known, Scores) and isinstance(right, Tensor):
        result_of = known.times_tensor(right, inverse=inverse)
    result = func(*args, **kwargs)
    tracer.note(result, result_of)
    return result


def _add(
    tracer: ScoreTracer, func: Any, args: Any, kwargs: Any, signs: tuple[float, float] = (1.0, 1.0)
) -> Any:
    left, right = two(args, kwargs)
    known, other = tracer.known(left), tracer.known(right)
    if known is None and other is None:
        return func(*args, **kwargs)
    # Let ``known`` describe the summand that is scores, with its sign in ``mine``.
    mine, theirs = signs[0], signs[1] * float(kwargs.get("alpha", 1.0))
    if known is None:
        known, other, right, mine, theirs = other, None, left, theirs, mine
        if func in _IN_PLACE and isinstance(right, Tensor):
            right = right.clone()  # the function overwrites it with the result
    # The sum of two products of queries and keys, such as content and position, is refused with a message
    # that says so. In the sum of one product and a tensor without a description, this tensor is a bias.
    products = isinstance(known, Scores) or isinstance(other, Scores)
    if other is not None and products and not any(map(_after_softmax, (known, other))):
        result_of: Known | None = Opaque(SEVERAL_PRODUCTS)
    elif other is not None or isinstance(known, Probabilities):
        result_of = _mixed(known, "are added to")
    else:
        result_of = known
    if result_of is known and isinstance(known, Scores):
        scaled = known if mine == 1 else known.times(mine)
        both = isinstance(scaled, Scores) and isinstance(right, Tensor)
        result_of = scaled.plus(right, theirs) if both and isinstance(scaled, Scores) else scaled
    result = func(*args, **kwargs)
    tracer.note(result, result_of)
    return result


def _after_softmax(known: Known | None) -> bool:
    return known.probabilities if isinstance(known, Opaque) else isinstance(known, Probabilities)


@_of_one
def _negate(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    return known.times(-1.0) if isinstance(known, Scores) else _mixed(known, "are negated")


@_of_one
def _tanh(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    return known.capped() if isinstance(known, Scores) else _mixed(known, "are capped")


@_of_one
def _convert(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    """Return the record of the result of a copy, or of a conversion to another dtype or device."""
    dtype = applied.result.dtype
    return _each(known, lambda s: s.rounded(dtype)) if dtype.is_floating_point else None


@_of_one
def _same(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    """Return the record of the result of a function such as ``clamp``, which is assumed to leave the scores
    unchanged.

    Whether it did is checked when the attention is complete, by computing its output again.
    """
    return _each(known, Scores.unchanged) if applied.result.shape == applied.tensor.shape else None


@_of_one
def _reshape(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    if applied.result.dtype != applied.tensor.dtype:
        return None  # ``view`` under another dtype reinterprets the bits
    return _each(known, lambda s: s.moved(regroup(s.axes, applied.result.shape)))


@_of_one
def _expand(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    return _each(known, lambda s: s.moved(broadcast(s.axes, applied.result.shape)[0]))


@_of_one
def _permute(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    # The function is applied to a meta tensor with axes of length 1, 2, 3, ..., which shows the permutation.
    lengths = torch.empty(tuple(range(1, applied.tensor.ndim + 1)), device="meta")
    marked = applied.func(lengths, *applied.args[1:], **applied.kwargs)
    return _each(known, lambda s: s.moved(tuple(s.axes[size - 1] for size in marked.shape)))


@_of_one
def _index(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    index = applied.args[1] if isinstance(applied.args[1], tuple) else (applied.args[1],)
    whole = applied.result.numel() == applied.tensor.numel()
    if whole and all(i is None or isinstance(i, slice) or i is ... for i in index):
        return _each(known, lambda s: s.moved(regroup(s.axes, applied.result.shape)))
    return _cut(known, applied)


def _cut(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    """Return the record of a slice of scores or attention weights. Only a slice that removes the column of
    attention sinks can still be read.
    """
    return _without_sinks(known, applied.tensor, applied.result) or _mixed(known, "are indexed")


@_of_one
def _masked_fill(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    return _overwritten(known, applied.argument(1, "mask"), applied.argument(2, "value"))


@_of_one
def _dropout(known: Scores | Probabilities, applied: _Applied) -> Known | None:
    p = applied.argument(1, "p", 0.5)
    training = applied.argument(2, "training", applied.kwargs.get("train", True))
    return _mixed(known, "are dropped at random") if training and p > 0 else known


def _without_sinks(known: Known, tensor: Tensor, result: Tensor) -> Probabilities | None:
    """Return the record of attention weights after their column of sinks was removed.

    The result is None if another part was cut off.
    """
    # The index is not read: the shape and the memory offset of the result tell which column was cut off.
    if not isinstance(known, Probabilities) or known.cut or known.scores.sinks is None:
        return None
    sinks, axes = known.scores.sinks, known.scores.axes
    dim = next((i for i, axis in enumerate(axes) if leaves(axis) == sinks.joined), None)
    if dim is None or result.ndim != tensor.ndim:
        return None
    shape = list(tensor.shape)
    shape[dim] -= 1
    start = tensor.stride(dim) if sinks.first else 0  # a view that lacks the first column starts one later
    if list(result.shape) != shape or result.storage_offset() - tensor.storage_offset() != start:
        return None
    scores = replace(known.scores, axes=(*axes[:dim], sinks.keys, *axes[dim + 1 :]))
    return Probabilities(scores, sinks.keys, True)


def _assign(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``a[i] = b``, and record that the tensor ``a`` can no longer be read as attention scores or
    weights.
    """
    known = tracer.known(args[0]) or tracer.known(args[2])
    func(*args, **kwargs)
    tracer.note(args[0], _mixed(known, "are put together from pieces"))


def _join(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
    tensors = args[0] if args else kwargs.get("tensors")
    result = func(*args, **kwargs)
    found = [tracer.known(t) for t in tensors] if isinstance(tensors, list | tuple) else []
    which = next((i for i, known in enumerate(found) if known is not None), None)
    if which is None:
        return result
    known = found[which]
    # A single tensor that is joined to scores may hold their sinks; ``Scores.joined`` decides.
    if isinstance(known, Scores) and len(found) == 2 and found[1 - which] is None:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
        tracer.note(result, known.joined(tensors[1 - which], dim % result.ndim, first=which == 1))
    else:
        tracer.note(result, _mixed(known, "are joined to others"))
    return result


def _where(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``torch.where``, which masks keys if it replaces scores by large negative numbers."""
    result = func(*args, **kwargs)
    if len(args) != 3:
        return result
    condition, first, second = (args[1], args[0], args[2]) if func is Tensor.where else args
    one, other = tracer.known(first), tracer.known(second)
    if one is not None and other is not None:
        tracer.note(result, _mixed(one, "are chosen among others"))
    elif one is not None:
        # The first tensor is kept where the condition is true, so the second one is written elsewhere.
        opaque = isinstance(one, Opaque)
        tracer.note(result, one if opaque else _overwritten(one, ~condition, second))
    elif other is not None:
        opaque = isinstance(other, Opaque)
        tracer.note(result, other if opaque else _overwritten(other, condition, first))
    return result


def _overwritten(known: Any, pairs: Tensor, value: Any) -> Known:
    """Return the record of attention scores after some entries were overwritten.

    ``value`` replaced them where ``pairs`` is True.
    """
    if isinstance(known, Probabilities):
        # The probabilities of hidden keys are zero already; if they are not, the check of all rows fails.
        return _each(known, Scores.unchanged)
    low = all_true(value <= HIDES) if isinstance(value, Tensor) else _number(value) and value <= HIDES
    return known.hiding(pairs.bool()) if low else Opaque("its scores are written over by other numbers")


def _softmax(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    known = tracer.known(tensor)
    result = func(*args, **kwargs)
    if isinstance(known, Opaque):
        # Scores that cannot be read give probabilities that cannot be read. A second softmax is no attention.
        tracer.note(result, None if known.probabilities else replace(known, probabilities=True, mixed=False))
    elif isinstance(known, Scores) and isinstance(dim, int):
        # With sinks, the softmax must run over the axis that holds keys and sinks.
        keys = known.axes[dim]
        joined = known.sinks is not None and leaves(keys) == known.sinks.joined
        if known.sinks is not None and not joined:
            tracer.note(result, Opaque("its softmax does not run over its scores and sinks", True))
        else:
            tracer.note(result, Probabilities(known.rounded(result.dtype), keys, not joined))
    return result


def _rearrange(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that selects, shifts or sorts scores, such as ``topk``, and record that its result
    cannot be read as attention scores.

    The result still derives from a product of queries and keys.
    """
    known = tracer.known(args[0] if args else kwargs.get("input"))
    result = func(*args, **kwargs)
    if known is not None:
        first = result[0] if isinstance(result, tuple | list) else result
        tracer.note(first, _mixed(known, f"go through {_name(func)}"))
    return result


def _mix(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that changes or mixes scores, such as ``exp`` or ``sum``, and record that its result
    cannot be read as attention scores.

    The result is Opaque; after a second such function it is unknown.
    """
    known = tracer.known(args[0] if args else kwargs.get("input"))
    result = func(*args, **kwargs)
    what = _mixed(known, f"go through {_name(func)}")
    if what is not None and not what.mixed:
        tracer.note(result, replace(what, mixed=True))
    return result


def _product(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
    contraction = contraction_of(func, args, kwargs)
    if contraction is None:
        return func(*args, **kwargs)
    # A product with probabilities is the end of an attention; every other product may be scores.
    for operand in (contraction.left, contraction.right):
        known = tracer.known(operand)
        if contraction.bias is None and isinstance(known, Probabilities | Opaque) and _after_softmax(known):
            if not _over_keys(contraction, operand, known):
                result = func(*args, **kwargs)
                tracer.note(result, Opaque("its probabilities are mixed across heads or queries", True))
                return result
            return tracer.weighted(contraction, operand, known, lambda: func(*args, **kwargs))
    result = func(*args, **kwargs)
    scores = product_scores(contraction)
    factors = contraction.left, contraction.right
    if scores is None and any(isinstance(tracer.known(t), Scores) for t in factors):
        scores = Opaque("its scores are multiplied by a weight matrix, which mixes heads")
    tracer.note(result, scores)
    return result


def _over_keys(contraction: Contraction, p: Tensor, known: Probabilities | Opaque) -> bool:
    """Return True if a product with attention weights sums over their keys, as far as these are known."""
    labels, other, factor = contraction.left_labels, contraction.right_labels, contraction.right
    if p is not contraction.left:
        labels, other, factor = other, labels, contraction.left
    if isinstance(known, Opaque):
        return not isinstance(factor, nn.Parameter)  # values are computed from tokens
    axes = dict(zip(labels, known.scores.axes, strict=True))
    lost = [label for label in labels if label in other and label not in contraction.labels]
    summed = {one for label in lost for one in leaves(axes[label])}
    # Queries and keys each have an axis of their own; what both have counts sequences, windows and heads.
    left, right = (
        {one for axis in operand.axes for one in leaves(axis)}
        for operand in (known.scores.left, known.scores.right)
    )
    return not summed or not summed <= (left & right)


def _fused(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return tracer.fused(given, lambda: func(*args, **kwargs))


def _flex(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
    return tracer.flex(args, lambda: func(*args, **kwargs))


def _inside(tracer: ScoreTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the body of a torch function so that the tracer sees the functions that it calls.

    Under a mode, functions such as ``multi_head_attention_forward`` arrive here as a whole. Their body is run
    with a ``has_torch_function`` that returns False, so that the functions it calls arrive one by one.
    """
    seen = {**func.__globals__, "has_torch_function": lambda _: False}
    body = types.FunctionType(func.__code__, seen, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    with tracer:
        return body(*args, **kwargs)


def _functions(names: str) -> set[Any]:
    """Find the torch functions, tensor methods and properties with the given names.

    ``names`` separates the names by spaces.
    """
    homes = (torch, Tensor, functional, torch.special)
    found = {getattr(home, name) for name in names.split() for home in homes if hasattr(home, name)}
    return {
        f.__get__ if isinstance(f, property) or type(f).__name__ == "getset_descriptor" else f for f in found
    }


_IN_PLACE = _functions("add_ sub_ subtract_ mul_ multiply_ __iadd__ __isub__ __imul__")
_NAMES: dict[Rule, str] = {
    _multiply: "mul multiply mul_ multiply_ __mul__ __rmul__ __imul__",
    partial(
        _multiply, inverse=True
    ): "div divide true_divide div_ divide_ true_divide_ __truediv__ __itruediv__ __div__ __idiv__",
    _add: "add add_ __add__ __radd__ __iadd__",
    partial(_add, signs=(1.0, -1.0)): "sub subtract sub_ subtract_ __sub__ __isub__",
    partial(_add, signs=(-1.0, 1.0)): "rsub __rsub__",
    _negate: "neg neg_ negative __neg__",
    _tanh: "tanh tanh_",
    _convert: "to float double half bfloat16 type type_as contiguous clone cpu cuda",
    _same: "clamp clamp_ clip clip_ clamp_min clamp_max maximum max nan_to_num nan_to_num_",
    _reshape: "view reshape view_as reshape_as flatten unflatten squeeze unsqueeze squeeze_ unsqueeze_",
    _expand: "expand expand_as broadcast_to",
    _permute: "transpose permute swapaxes swapdims movedim moveaxis t T mT H mH adjoint",
    _index: "__getitem__",
    _of_one(_cut): "narrow",
    _join: "cat concat concatenate",
    _masked_fill: "masked_fill masked_fill_",
    _where: "where",
    _softmax: "softmax",
    _dropout: "dropout dropout_ alpha_dropout feature_dropout",
    _rearrange: "gather take_along_dim index_select pad roll flip as_strided sort topk unfold",
    _mix: "linear conv1d conv2d relu square exp sigmoid sum cumsum detach batch_norm layer_norm",
    _assign: "__setitem__",
    _fused: "scaled_dot_product_attention",
    _inside: "multi_head_attention_forward",
}
_RULES = {function: rule for rule, names in _NAMES.items() for function in _functions(names)}
_RULES |= dict.fromkeys(PRODUCTS, _product)
_RULES[flex_attention] = _flex
_STARTS = frozenset({_product, _fused, _flex, _inside})  # rules that apply while no tensor has a description
