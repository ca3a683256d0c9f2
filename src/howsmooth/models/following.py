"""Follow scores through the functions of torch, from a product of two tensors to their use as probabilities.

A :class:`Follower` is a torch function mode with a rule for every function that attention code applies to
scores and probabilities. What no rule knows is forgotten, or, where it mixes scores, remembered as the
reason why they cannot be read.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from howsmooth.models.axes import Axis, broadcast, leaves
from howsmooth.models.contractions import PRODUCTS, Contraction, contraction_of, product_scores, two
from howsmooth.models.scores import SEVERAL_PRODUCTS, Scores, holds

__all__ = ["HIDES", "Follower", "Probabilities"]

HIDES = -9000.0  # a number at most this, written over a score or added to it, hides it


@dataclass(frozen=True, slots=True)
class Probabilities:
    """What is known about a tensor that came out of a softmax."""

    scores: Scores  # whose axes are now those of the probabilities
    keys: Axis  # over which the softmax ran, without sinks
    cut: bool  # the sinks' column is gone, or there was none


class Follower(TorchFunctionMode):
    """Knows which tensors are scores or probabilities, and hands over the products that end an attention."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        # By id, with a weak reference to tell that the id is still that of the same tensor.
        self._known: dict[int, tuple[ref[Tensor], Scores | Probabilities]] = {}

    def weighted(
        self, contraction: Contraction, p: Tensor, known: Probabilities, run: Callable[[], Tensor]
    ) -> Tensor:
        """Run a product of probabilities with values."""
        raise NotImplementedError

    def fused(self, given: dict[str, Any], run: Callable[[], Tensor]) -> Tensor:
        """Run ``scaled_dot_product_attention`` with these arguments."""
        raise NotImplementedError

    def __enter__(self) -> Follower:
        """Start to follow; the mode may be entered again inside of itself."""
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop following, and forget all tensors."""
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

    def known(self, tensor: Any) -> Scores | Probabilities | None:
        """Return what is known about a tensor."""
        entry = self._known.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def note(self, tensor: Any, known: Scores | Probabilities | None) -> None:
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


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


def _spoiled(known: Scores | Probabilities | None, what: str) -> Scores | Probabilities | None:
    if isinstance(known, Scores):
        return known.but(f"its scores {what}")
    if isinstance(known, Probabilities):
        return replace(known, scores=known.scores.but(f"its probabilities {what}"))
    return None


def _on_scores(known: Any, change: Callable[[Scores], Scores]) -> Any:
    """Change the scores, or the axes of probabilities."""
    if isinstance(known, Probabilities):
        return replace(known, scores=change(known.scores))
    return change(known)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "__float__") and not isinstance(value, Tensor))


def _multiply(follower: Follower, func: Any, args: Any, kwargs: Any, inverse: bool = False) -> Any:
    left, right = two(args, kwargs)
    known, other = follower.known(left), follower.known(right)
    if known is None and (other is None or inverse):
        return func(*args, **kwargs)
    if known is None:
        known, right = other, left
    elif other is not None:
        known = _spoiled(known, "are multiplied by other numbers")
    if isinstance(known, Probabilities):
        # A mask of heads is all ones unless heads are pruned.
        same = (_number(right) and right == 1) or (isinstance(right, Tensor) and holds(right == 1))
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
    follower.note(result, changed)
    return result


def _divide(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    return _multiply(follower, func, args, kwargs, inverse=True)


def _add(
    follower: Follower, func: Any, args: Any, kwargs: Any, signs: tuple[float, float] = (1.0, 1.0)
) -> Any:
    left, right = two(args, kwargs)
    known, other = follower.known(left), follower.known(right)
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
        if func in _IN_PLACE and isinstance(right, Tensor):
            right = right.clone()  # written over by the result
    if isinstance(known, Scores):
        moved = known if mine == 1 else known.times(mine)
        changed: Any = moved.plus(right, theirs) if isinstance(right, Tensor) else moved
    else:
        changed = _spoiled(known, "are added to")
    result = func(*args, **kwargs)
    follower.note(result, changed)
    return result


def _subtract(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    return _add(follower, func, args, kwargs, signs=(1.0, -1.0))


def _subtract_from(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    return _add(follower, func, args, kwargs, signs=(-1.0, 1.0))


def _negate(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    known = follower.known(args[0])
    result = func(*args, **kwargs)
    follower.note(result, known.times(-1.0) if isinstance(known, Scores) else _spoiled(known, "are negated"))
    return result


def _tanh(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    known = follower.known(args[0] if args else kwargs.get("input"))
    result = func(*args, **kwargs)
    follower.note(result, known.capped() if isinstance(known, Scores) else _spoiled(known, "are capped"))
    return result


def _convert(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    """Dtypes, devices and copies."""
    known = follower.known(args[0])
    result = func(*args, **kwargs)
    if known is not None and isinstance(result, Tensor):
        exact = result.is_floating_point()
        follower.note(result, _on_scores(known, lambda s: s.rounded(result.dtype)) if exact else None)
    return result


def _same(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    """Keep what is known: the function should change nothing that counts, which every row is checked for."""
    known = follower.known(args[0] if args else kwargs.get("input"))
    result = func(*args, **kwargs)
    if known is not None and isinstance(result, Tensor) and result.shape == args[0].shape:
        follower.note(result, _on_scores(known, lambda s: replace(s, approximate=True)))
    return result


def _reshape(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    known = follower.known(args[0])
    result = func(*args, **kwargs)
    if known is not None and result.dtype == args[0].dtype:
        follower.note(result, _on_scores(known, lambda s: s.reshaped(result.shape)))
    return result


def _expand(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    known = follower.known(args[0])
    result = func(*args, **kwargs)
    if known is not None:
        follower.note(result, _on_scores(known, lambda s: s.moved(broadcast(s.axes, result.shape)[0])))
    return result


def _permute(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    known = follower.known(args[0])
    result = func(*args, **kwargs)
    if known is not None and isinstance(result, Tensor):
        # Lengths 1, 2, 3... tell where each axis went, however the function is told.
        marked = func(torch.empty(tuple(range(1, args[0].ndim + 1)), device="meta"), *args[1:], **kwargs)
        order = [size - 1 for size in marked.shape]
        follower.note(result, _on_scores(known, lambda s: s.moved(tuple(s.axes[i] for i in order))))
    return result


def _index(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    known = follower.known(args[0])
    result = func(*args, **kwargs)
    if known is None or not isinstance(result, Tensor):
        return result
    tensor = args[0]
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if result.numel() == tensor.numel() and all(i is None or isinstance(i, slice) or i is ... for i in index):
        follower.note(result, _on_scores(known, lambda s: s.reshaped(result.shape)))
    else:
        follower.note(result, _without_sinks(known, tensor, result) or _spoiled(known, "are indexed"))
    return result


def _narrow(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    known = follower.known(args[0])
    result = func(*args, **kwargs)
    if known is not None:
        follower.note(result, _without_sinks(known, args[0], result) or _spoiled(known, "are indexed"))
    return result


def _without_sinks(known: Any, tensor: Tensor, result: Tensor) -> Probabilities | None:
    """Probabilities from which the column of the sinks was cut off, and nothing else."""
    if not isinstance(known, Probabilities) or known.cut or known.scores.sinks is None:
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
    return Probabilities(scores, sinks.keys, True)


def _join(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    tensors = args[0] if args else kwargs.get("tensors")
    result = func(*args, **kwargs)
    known = [follower.known(tensor) for tensor in tensors] if isinstance(tensors, list | tuple) else []
    if not any(isinstance(k, Scores | Probabilities) for k in known):
        return result
    which = next(i for i, k in enumerate(known) if k is not None)
    here = known[which]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    if isinstance(here, Scores) and len(tensors) == 2 and known[1 - which] is None:
        other = tensors[1 - which]
        follower.note(result, here.joined(other, dim % result.ndim, first=which == 1))
    else:
        follower.note(result, _spoiled(here, "are joined to others"))
    return result


def _masked_fill(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    known = follower.known(args[0])
    result = func(*args, **kwargs)
    pairs = args[1] if len(args) > 1 else kwargs.get("mask")
    value = args[2] if len(args) > 2 else kwargs.get("value")
    if isinstance(pairs, Tensor):
        follower.note(result, _overwritten(known, pairs, value))
    return result


def _where(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.where(condition, a, b)`` and ``a.where(condition, b)``."""
    result = func(*args, **kwargs)
    method = func is Tensor.where
    condition, first, second = (
        (args[1], args[0], args[2]) if method and len(args) > 2 else (*args, None, None)[:3]
    )
    if not isinstance(condition, Tensor):
        return result
    for tensor, other, hidden in ((first, second, True), (second, first, False)):
        known = follower.known(tensor)
        if known is not None and follower.known(other) is None:
            follower.note(result, _overwritten(known, ~condition if hidden else condition, other))
            return result
    return result


def _overwritten(known: Any, pairs: Tensor, value: Any) -> Any:
    """Scores or probabilities with another number in some places."""
    if isinstance(known, Probabilities):
        # Probabilities of hidden pairs are zero already; where that is not so the check sees it.
        return _on_scores(known, lambda s: replace(s, approximate=True))
    if not isinstance(known, Scores):
        return None
    low = holds(value <= HIDES) if isinstance(value, Tensor) else _number(value) and value <= HIDES
    if known.sinks is not None:
        return known.but("its scores and sinks are masked together")
    return known.hiding(pairs.bool()) if low else known.but("its scores are written over by other numbers")


def _softmax(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0] if args else kwargs.get("input")
    known = follower.known(tensor)
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
    follower.note(result, Probabilities(known.rounded(result.dtype), keys, cut))
    return result


def _dropout(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    known = follower.known(args[0] if args else kwargs.get("input"))
    result = func(*args, **kwargs)
    if known is not None:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        follower.note(result, _spoiled(known, "are dropped at random") if training and p > 0 else known)
    return result


def _opaque(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    """Go through functions that mix scores: what comes out still comes from a product."""
    known = follower.known(args[0] if args else kwargs.get("input"))
    result = func(*args, **kwargs)
    if known is not None:
        first = result[0] if isinstance(result, tuple) else result
        follower.note(first, _spoiled(known, f"go through {_name(func)}"))
    return result


def _product(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    contraction = contraction_of(func, args, kwargs)
    if contraction is None:
        return func(*args, **kwargs)
    for operand in (contraction.left, contraction.right):
        known = follower.known(operand)
        if isinstance(known, Probabilities) and contraction.bias is None:
            return follower.weighted(contraction, operand, known, lambda: func(*args, **kwargs))
    result = func(*args, **kwargs)
    follower.note(result, product_scores(contraction))
    return result


def _fused(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return follower.fused(given, lambda: func(*args, **kwargs))


def _inside(follower: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the body of a function of torch under the mode.

    Under a mode such functions hand themselves over as a whole. Their own code, run with a
    ``has_torch_function`` that says no, goes on to functions that are handed over one by one.
    """
    seen = {**func.__globals__, "has_torch_function": lambda _: False}
    body = types.FunctionType(func.__code__, seen, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    with follower:
        return body(*args, **kwargs)


def _functions(names: str) -> set[Any]:
    """Everything in torch that has one of the names."""
    homes = (torch, Tensor, functional, torch.special)
    found = {getattr(home, name) for name in names.split() for home in homes if hasattr(home, name)}
    return {
        f.__get__ if isinstance(f, property) or type(f).__name__ == "getset_descriptor" else f for f in found
    }


_IN_PLACE = _functions("add_ sub_ subtract_ __iadd__ __isub__")
_RULES: dict[Any, Callable[[Follower, Any, Any, Any], Any]] = {
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
        _fused: "scaled_dot_product_attention",
        _inside: "multi_head_attention_forward",
    }.items()
    for function in _functions(names)
}
_RULES |= dict.fromkeys(PRODUCTS, _product)
