"""Float64 tensors that carry a bound on their rounding error through every PyTorch operation.

A :class:`Rounded` tensor holds computed numbers and ``error``, an upper bound of the Frobenius norm of their
distance to the numbers that exact arithmetic gives. Code that is written for tensors runs on it unchanged.
An operation without a rule raises :class:`MissingRuleError`, so that no rounding is forgotten. Plain tensors
and numbers that meet a rounded tensor are taken to be correct to ``FUZZ`` relative, entry by entry.

Proofs of the rules: documentation page "A proved radius for a whole network", section "Rounding".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from howsmooth.rounding.directed_rounding import LOST, STEP, UNDERFLOW, U, above, gamma

__all__ = [
    "ELEMENTARY", "FUZZ", "RULES", "VIEWS", "MissingRuleError", "Rounded", "along", "compute", "exact",
    "frobenius_above", "lower", "made", "multilinear", "plain", "rowwise", "settled", "upper",
]  # fmt: skip

FUZZ = 4 * U
"""Relative error that constants and weights may have before anything is computed with them."""

# Exponential, error function, tangent and root are taken to be correct to this relative error: four units in
# the last place.
ELEMENTARY = 8 * U
_SMALL = 1 << 16


class MissingRuleError(TypeError):
    """The exception for an operation on a rounded tensor whose rounding error no rule can bound."""


class Rounded(Tensor):
    """A float64 tensor with an upper bound ``error`` on the Frobenius norm of its rounding error.

    ``relative`` bounds the relative error of every entry, and ``worst`` the error of every entry; they are
    infinite where nothing better than ``error`` is known.
    """

    error: float
    relative: float
    worst: float
    _size: float | None
    _peak: float | None

    @property
    def frobenius(self) -> float:
        """Return an upper bound on the Frobenius norm of the computed entries of this tensor."""
        if self._size is None:
            self._size = frobenius_above(plain(self))
        return self._size

    @property
    def peak(self) -> float:
        """Return an upper bound on the largest absolute value of the computed entries of this tensor."""
        if self._peak is None:
            value = plain(self)
            self._peak = float(value.abs().amax()) if value.numel() else 0.0
        return self._peak

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return compute(RULES, func, args, kwargs)


def compute(
    rules: Mapping[str, Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    """Compute a PyTorch operation, or read an attribute, by the rule of its name in ``rules``."""
    name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
    rule = rules.get(name)
    if rule is None:
        raise MissingRuleError(f"no bound on the rounding error of {name}")
    with torch._C.DisableTorchFunctionSubclass():
        return rule(func, *args, **(kwargs or {}))


def made(value: Tensor, error: float, size: float | None = None, peak: float | None = None) -> Rounded:
    """Attach an error bound to a tensor, with bounds on its Frobenius norm and its largest entry if known."""
    with torch._C.DisableTorchFunctionSubclass():
        found: Rounded = plain(value).as_subclass(Rounded)
    found.error, found._size, found._peak = error * STEP, size, peak
    found.relative = found.worst = math.inf
    return found


def exact(value: Tensor, error: float = 0.0, frobenius: float | None = None) -> Rounded:
    """Convert a float64 tensor to a rounded tensor whose error is at most ``error``, by default zero.

    ``frobenius`` is a bound on its Frobenius norm, if one is known.
    """
    return made(value, error, frobenius)


def plain(value: Tensor) -> Tensor:
    """Return the computed numbers of a rounded tensor as a plain tensor, without the error bound."""
    if not isinstance(value, Rounded):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def along(function: Callable[[Tensor], Tensor], slope: float, x: Tensor) -> Tensor:
    """Apply a function, whose derivative is at most ``slope``, to each entry of a rounded tensor."""
    if not isinstance(x, Rounded):
        return function(x)
    value, error = settled(function(exact(plain(x))))
    return exact(value, error + slope * x.error)


def settled(value: Tensor) -> tuple[Tensor, float]:
    """Return the computed numbers of a tensor and the bound on their error, zero for a plain tensor."""
    return plain(value), value.error if isinstance(value, Rounded) else 0.0


def upper(value: Tensor) -> Tensor:
    """Return upper bounds on the exact entries of a rounded tensor; a plain tensor is returned as it is."""
    return plain(value) + value.error * STEP if isinstance(value, Rounded) else value


def lower(value: Tensor) -> Tensor:
    """Return lower bounds on the exact entries of a rounded tensor; a plain tensor is returned as it is."""
    return plain(value) - value.error * STEP if isinstance(value, Rounded) else value


def multilinear(function: Callable[..., Tensor], *operands: Tensor, roundings: int) -> Tensor:
    """Apply a multilinear function to rounded tensors, and bound the rounding error of the result.

    The Frobenius norm of the result must be at most the product of the operands' norms. Each computed number
    is correct up to ``roundings`` rounding errors of its terms in absolute value.
    """
    value = function(*map(plain, operands))
    if not any(isinstance(operand, Rounded) for operand in operands):
        return value
    sizes, errors = zip(*map(_measures, operands), strict=True)
    whole = math.prod(sizes)
    error = gamma(roundings + 2) * whole
    for i, own in enumerate(errors):
        others = (s + e for j, (s, e) in enumerate(zip(sizes, errors, strict=True)) if j != i)
        error += own * math.prod(others) if own else 0.0
    return made(value, error * STEP)


def rowwise(function: Callable[..., Tensor], *operands: Tensor, roundings: int) -> Tensor:
    """Apply a bilinear function to pairs of rows (..., k) of rounded tensors, and bound the rounding error.

    The norm of a result must be at most the product of the norms of the two rows. The error of one operand
    then counts with the longest row of the other.
    """
    value = function(*map(plain, operands))
    if not any(isinstance(operand, Rounded) for operand in operands):
        return value
    errors = [_measures(operand)[1] for operand in operands]
    rows = [float(torch.linalg.vector_norm(plain(x), dim=-1).amax()) * STEP + LOST for x in operands]
    error = errors[0] * (rows[1] + errors[1]) + errors[1] * rows[0]
    own = min(rows[0] * _measures(operands[1])[0], rows[1] * _measures(operands[0])[0])
    return made(value, error + gamma(roundings) * own)


def frobenius_above(value: Tensor) -> float:
    """Return an upper bound on the Frobenius norm of a tensor of floats."""
    if not value.numel():
        return 0.0
    return above(float(torch.linalg.vector_norm(value)), value.numel()) + LOST * math.sqrt(value.numel())


def _measures(operand: Any) -> tuple[float, float]:
    if isinstance(operand, Rounded):
        return operand.frobenius, operand.error
    size = frobenius_above(operand.double()) if isinstance(operand, Tensor) else abs(operand)
    return size, FUZZ * size


def _peak(operand: Any) -> float:
    """Return a bound on the largest absolute entry of an operand, coarse for large rounded tensors."""
    if isinstance(operand, Rounded):
        small = operand._peak is not None or operand.numel() <= _SMALL
        return operand.peak if small else operand.frobenius
    if isinstance(operand, Tensor):
        return float(operand.double().abs().amax()) if operand.numel() else 0.0
    return float(abs(operand))


def _copies(operand: Any, entries: int) -> float:
    """Return √c, where c is the number of times that broadcasting repeats each entry of an operand."""
    own = operand.numel() if isinstance(operand, Tensor) else 1
    return math.sqrt(entries / own) if own else 0.0


def _view(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operation that only moves, repeats or drops entries, and bound the error of the result."""
    found = func(x, *args, **kwargs)
    if isinstance(found, tuple | list):
        return [_entries_of(x, made(part, x.error)) for part in found]
    if not isinstance(found, Tensor):
        return found
    copies = _copies(x, found.numel())
    same = copies == 1.0
    return _entries_of(x, made(found, x.error * max(1.0, copies), x._size if same else None, x._peak))


def _entries_of(x: Rounded, found: Rounded) -> Rounded:
    """Copy the error bounds of single entries from x to a tensor that consists of entries of x."""
    found.relative, found.worst = x.relative, x.worst
    return found


def _getitem(func: Any, x: Any, index: Any) -> Any:
    found = func(x, index)
    if not isinstance(x, Rounded):
        return found
    copies = 1
    parts = index if isinstance(index, tuple) else (index,)
    tensors = [torch.as_tensor(t) for t in parts if isinstance(t, Tensor | list)]
    if tensors and tensors[0].dtype != torch.bool:
        places = tensors[0]
        for more in tensors[1:]:
            places = places * (1 << 20) + more
        if places.numel():
            copies = int(places.unique(return_counts=True)[1].max())
        if any(bool((t < 0).any()) for t in tensors):
            copies *= 2 ** len(tensors)  # an entry may have a negative index, too
    root = math.sqrt(copies)
    return _entries_of(x, made(found, x.error * root))


def _setitem(func: Any, x: Any, index: Any, value: Any) -> None:
    if not isinstance(x, Rounded):
        raise MissingRuleError("a rounded tensor is written into a plain one; make that one with new_zeros")
    func(plain(x), index, plain(value) if isinstance(value, Tensor) else value)
    own = value.error * _copies(value, plain(x)[index].numel()) if isinstance(value, Rounded) else 0.0
    x.error = math.hypot(x.error, own) * STEP
    x._size = x._peak = None
    x.relative = x.worst = math.inf


def _add(func: Any, x: Any, y: Any) -> Any:
    found = {"rsub": torch.sub, "__rsub__": torch.sub}.get(func.__name__)
    value = func(_bare(x), _bare(y)) if found is None else torch.sub(_bare(y), _bare(x))
    error = size = 0.0
    for operand in (x, y):
        own, of = _measures(operand)
        copies = _copies(operand, value.numel())
        size, error = size + own * copies, error + of * copies
    return made(value, error + 2 * U * size)


def _inplace_add(func: Any, x: Any, y: Any) -> Any:
    return _add(torch.Tensor.add_ if isinstance(x, Rounded) else torch.add, x, y)


def _bare(operand: Any) -> Any:
    return plain(operand) if isinstance(operand, Tensor) else operand


def _mul(func: Any, x: Any, y: Any) -> Any:
    value = torch.mul(_bare(x), _bare(y))
    entries = value.numel()
    (a, of_a), (b, of_b) = _measures(x), _measures(y)
    peak_a, peak_b = _peak(x), _peak(y)
    copies_a, copies_b = _copies(x, entries), _copies(y, entries)
    size = min(a * b, copies_a * a * peak_b, copies_b * b * peak_a)
    error_a = of_a * min(b + of_b, copies_a * (peak_b + of_b))
    error_b = of_b * min(a, copies_b * peak_a)
    found = made(value, 0.0)
    if isinstance(x, Rounded) and x.relative < 1:
        error_a = min(error_a, x.relative * (found.frobenius + error_b))
    elif isinstance(y, Rounded) and y.relative < 1:
        error_b = min(error_b, y.relative * (found.frobenius + error_a))
    found.error = (error_a + error_b + 2 * U * size) * STEP
    return found


def _div(func: Any, x: Any, y: Any) -> Any:
    if not isinstance(y, Tensor):
        return _mul(torch.mul, x, 1 / y)
    value = torch.div(_bare(x), plain(y))
    (a, of_a), (_, of_b) = _measures(x), _measures(y)
    if not isinstance(y, Rounded):
        of_b = FUZZ * _peak(y)
    smallest = float(plain(y).abs().amin())
    room = smallest - of_b
    copies = _copies(x, value.numel())
    if not room > 0:
        return made(value, math.inf)
    size = copies * a / smallest
    # An entry of y may stand beside many of x: the quotient's error is bounded entry by entry.
    return made(value, copies * of_a / room + size * of_b / room + 2 * U * size)


def _pow(func: Any, x: Any, exponent: Any) -> Any:
    if exponent not in (2, 3, 4, 5):
        raise MissingRuleError(f"no bound on the rounding error of the power {exponent}")
    found = x
    for _ in range(exponent - 1):
        found = _mul(torch.mul, found, x)
    return found


def _reduced(x: Rounded, value: Tensor, mean: bool) -> Rounded:
    count = x.numel() / max(value.numel(), 1)
    root, scale = math.sqrt(count), 1 / count if mean else 1.0
    size = x.frobenius * root * scale
    return made(value, x.error * root * scale + gamma(int(count) + 2) * size)


def _sum(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return _reduced(x, func(plain(x), *args, **kwargs), "mean" in func.__name__)


def _matmul(func: Any, x: Any, y: Any) -> Any:
    if func.__name__ == "__rmatmul__":
        x, y = y, x
    if isinstance(x, Rounded) and x.relative < 1 and x.ndim == 3 and y.ndim == 3:
        return _einsum(torch.einsum, "hij,hje->hie", x, y)
    found = multilinear(torch.matmul, x, y, roundings=x.shape[-1])
    if isinstance(found, Rounded) and max(x.numel(), y.numel(), found.numel()) <= _SMALL and y.ndim > 1:
        # The error of one entry counts the longest row and the longest column.
        row = float(torch.linalg.vector_norm(plain(x), dim=-1).amax()) * STEP + LOST
        column = float(torch.linalg.vector_norm(plain(y), dim=-2).amax()) * STEP + LOST
        of_x, of_y = _measures(x)[1], _measures(y)[1]
        own = gamma(x.shape[-1] + 2) * row * column
        found.worst = (own + of_x * (column + of_y) + of_y * row) * STEP
    return found


def _einsum(func: Any, equation: str, *operands: Any) -> Any:
    inputs, output = equation.replace(" ", "").split("->")
    lengths: dict[str, list[int]] = {}
    for part, operand in zip(inputs.split(","), operands, strict=True):
        first, *last = part.split("...")
        ends = list(zip(first, operand.shape, strict=False))
        if last and last[0]:
            ends += list(zip(last[0], operand.shape[-len(last[0]) :], strict=True))
        for letter, length in ends:
            lengths.setdefault(letter, []).append(length)
    summed = [found for letter, found in lengths.items() if letter not in output]
    if any(len(found) < 2 for found in summed):
        raise MissingRuleError(f"no bound on the rounding error of einsum {equation}: sum one operand first")
    terms = math.prod(found[0] for found in summed) + len(operands)
    first = operands[0]
    if len(operands) == 2 and isinstance(first, Rounded) and first.relative < 1:
        return _weighted(equation, inputs, output, first, operands[1], terms)
    return multilinear(lambda *values: torch.einsum(equation, *values), *operands, roundings=terms)


def _weighted(equation: str, inputs: str, output: str, weights: Rounded, x: Tensor, terms: int) -> Rounded:
    """Compute weighted sums of a rounded tensor with nonnegative weights, and bound the error of the sums.

    The error of the weights counts with the same sum of lengths of x, over the indices that are the weights';
    the error of x counts with the norm of the weights as a matrix, at most √(row sum · column sum).
    """
    own, other = (part.replace("...", "") for part in inputs.split(","))
    value = torch.einsum(equation, plain(weights), plain(x))
    kept = "".join(letter for letter in other if letter in own)
    if not other.startswith(kept):
        raise MissingRuleError(
            f"no bound on the rounding error of einsum {equation}: common indices come first"
        )
    P = plain(weights)
    sizes = plain(x).flatten(len(kept)) if x.ndim > len(kept) else plain(x)[..., None]
    sizes = torch.linalg.vector_norm(sizes, dim=-1)
    common = "".join(letter for letter in output if letter in own)
    whole = frobenius_above(torch.einsum(f"{own},{kept}->{common}", P, sizes))
    matrix, summed = math.inf, [letter for letter in own if letter not in output]
    if P.ndim > 1 and len(summed) == 1 and summed[0] in own[-2:]:
        matrix = math.sqrt(float(P.sum(-1).amax()) * float(P.sum(-2).amax())) * STEP
    of_x = _measures(x)[1]
    error = of_x * min(weights.frobenius, matrix) * (1 + weights.relative)
    return made(value, error + (gamma(terms + 2) + weights.relative) * whole)


def _joined(func: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    value = func([plain(t) for t in tensors], *args, **kwargs)
    errors = [_measures(t)[1] for t in tensors]
    return made(value, math.hypot(*errors))


def _elementary(slope: Callable[[Tensor, float], float]) -> Any:
    """Return the rule that evaluates an entrywise PyTorch function, such as exp, on a rounded tensor.

    The error bound of the result is the error of the argument times ``slope``, which bounds the derivative of
    the function within this error, plus the rounding of the function.
    """

    def rule(func: Any, x: Any) -> Any:
        value = func(plain(x))
        own = frobenius_above(value)
        moved = x.error * slope(plain(x), x.error) if x.error else 0.0
        return made(value, moved + ELEMENTARY * own + UNDERFLOW * math.sqrt(value.numel()), own)

    return rule


def _sqrt_slope(x: Tensor, error: float) -> float:
    smallest = float(x.amin())
    return smallest**-0.5 * STEP if smallest > 0 else math.inf


def _softmax(func: Any, x: Any, dim: int) -> Any:
    value = func(plain(x), dim)
    keys, size = value.shape[dim], frobenius_above(value)
    # A weight is a ratio of exponentials of which none is below e^-745 without becoming zero.
    worst = min(x.error, x.worst)
    change = math.expm1(2 * worst + gamma(keys + 2000)) * STEP if worst < 0.1 else math.inf
    error = min(change * size + UNDERFLOW * math.sqrt(value.numel()), 2 * math.sqrt(value.numel()))
    found = made(value, error, size)
    found.relative = change
    return found


def _masked(func: Any, x: Any, mask: Any, value: Any) -> Any:
    return _entries_of(x, made(func(plain(x), mask, value), x.error, math.inf, math.inf))


def _lengths(func: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Bound the norms of the exact vectors by a plain tensor."""
    more = x.error * STEP + LOST * math.sqrt(x.numel())
    found: Tensor = func(plain(x), *args, **kwargs) * STEP + more
    return found


def _amax(func: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    found: Tensor = func(plain(x), *args, **kwargs) + x.error * STEP
    return found


def _asked(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*map(_bare, args), **kwargs)


VIEWS = (
    "mT T permute flatten unflatten movedim diagonal reshape expand unbind unsqueeze split squeeze transpose "
    "neg __neg__ abs __abs__ clone contiguous detach"
)
_QUESTIONS = (
    "shape dtype ndim device layout numel __len__ dim size is_floating_point is_sparse eq __eq__ ne __ne__ "
    "requires_grad data_ptr stride is_complex is_cuda names gt __gt__ lt __lt__"
)
RULES: dict[str, Any] = {
    **dict.fromkeys(VIEWS.split(), _view),
    **dict.fromkeys(_QUESTIONS.split(), _asked),
    **dict.fromkeys(("add", "__add__", "__radd__", "sub", "__sub__", "rsub", "__rsub__"), _add),
    **dict.fromkeys(("__iadd__", "add_"), _inplace_add),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _mul),
    **dict.fromkeys(("div", "__truediv__", "true_divide"), _div),
    **dict.fromkeys(("pow", "__pow__"), _pow),
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__"), _matmul),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(
        ("new_zeros", "new_empty", "zeros_like"),
        lambda func, x, *args, **kwargs: made(func(plain(x), *args, **kwargs), 0.0),
    ),
    "full_like": lambda func, x, fill: made(func(plain(x), fill), FUZZ * abs(fill) * math.sqrt(x.numel())),
    "__iter__": lambda func, x: iter(_view(torch.unbind, x)),
    "square": lambda func, x: _mul(torch.mul, x, x),
    "einsum": _einsum,
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "exp": _elementary(lambda x, error: math.exp(min(float(x.amax()) + error, 700.0)) * STEP),
    "relu": _elementary(lambda x, error: 1.0),
    "erfc": _elementary(lambda x, error: 1.13),
    "tanh": _elementary(lambda x, error: 1.0),
    "sqrt": _elementary(_sqrt_slope),
    "softmax": _softmax,
    "masked_fill": _masked,
    "linalg_vector_norm": _lengths,
    "amax": _amax,
}
