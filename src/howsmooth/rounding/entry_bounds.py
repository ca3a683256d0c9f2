"""Float64 tensors that carry a bound on the rounding error of each of their entries.

A :class:`RoundedEntries` tensor is a :class:`~howsmooth.rounding.rounded_tensor.Rounded` one that
knows more: ``entries`` bounds the error of each entry, and ``error`` is their Frobenius norm. Where a few
scores or weights are far larger than all others, this is what keeps the errors of the others small. An
operation without a rule for entries uses that for the norm, whose result is a :class:`Rounded` tensor.

Proofs of the rules: documentation page "Certificates at given tokens", section "Rounding".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from howsmooth.rounding.directed_rounding import UNDERFLOW, U, gamma, up
from howsmooth.rounding.rounded_tensor import (
    ELEMENTARY,
    FUZZ,
    RULES,
    VIEWS,
    Rounded,
    compute,
    frobenius_above,
    plain,
)

__all__ = ["RoundedEntries", "along_entries", "entries_of", "known_to"]


class RoundedEntries(Rounded):
    """A float64 tensor that carries an upper bound on the rounding error of each entry, in ``entries``."""

    entries: Tensor

    @property
    def error(self) -> float:  # type: ignore[override]
        """Return a bound on the Frobenius norm of the error, computed from the bounds of the entries."""
        return frobenius_above(self.entries)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands = args[0] if args and isinstance(args[0], list | tuple) else args
        known = all(isinstance(x, RoundedEntries) or not isinstance(x, Rounded) for x in operands)
        return compute(RULES | _RULES if known else RULES, func, args, kwargs)


def known_to(value: Tensor, entries: Tensor | float = 0.0) -> RoundedEntries:
    """Convert a float64 tensor to one with error bounds ``entries`` on its entries, by default zero."""
    with torch._C.DisableTorchFunctionSubclass():
        found: RoundedEntries = plain(value).as_subclass(RoundedEntries)
    errors = entries if isinstance(entries, Tensor) else value.new_tensor(entries)
    found.entries = errors.expand(found.shape)
    found._size = found._peak = None
    found.relative = found.worst = math.inf
    return found


def entries_of(value: Tensor) -> Tensor:
    """Return the bounds on the errors of the entries of a tensor that carries them."""
    assert isinstance(value, RoundedEntries)
    return value.entries


def along_entries(function: Callable[[Tensor], Tensor], slope: float, x: Tensor) -> Tensor:
    """Apply a function, whose derivative is at most ``slope``, to each entry of a tensor with errors."""
    found = function(known_to(plain(x)))
    return known_to(plain(found), up(entries_of(found) + slope * entries_of(x)))


def _errors(operand: Any) -> tuple[Tensor, Tensor, float]:
    """Return the numbers of an operand, bounds on their absolute errors, and one on their relative errors."""
    if isinstance(operand, RoundedEntries):
        return plain(operand), operand.entries, 0.0
    value = operand.double() if isinstance(operand, Tensor) else torch.tensor(operand, dtype=torch.float64)
    return value, torch.zeros((), dtype=torch.float64), FUZZ


def _view(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, RoundedEntries):
        return func(x, *args, **kwargs)
    moved = torch.abs if func.__name__ in ("neg", "__neg__", "abs", "__abs__") else func
    found, errors = func(plain(x), *args, **kwargs), moved(x.entries, *args, **kwargs)
    if isinstance(found, tuple | list):
        return [known_to(part, of) for part, of in zip(found, errors, strict=True)]
    return known_to(found, errors)


def _add(func: Any, x: Any, y: Any) -> Any:
    (a, of_a, by_a), (b, of_b, by_b) = _errors(x), _errors(y)
    value = a - b if "sub" in func.__name__ else a + b
    value = -value if func.__name__ in ("rsub", "__rsub__") else value
    return known_to(value, up(of_a + by_a * a.abs() + of_b + by_b * b.abs() + 2 * U * value.abs()))


def _mul(func: Any, x: Any, y: Any) -> Any:
    (a, of_a, by_a), (b, of_b, by_b) = _errors(x), _errors(y)
    value = a * b
    error = of_a * (b.abs() + of_b) + a.abs() * of_b + (2 * U + by_a + by_b) * value.abs()
    return known_to(value, up(error))


def _div(func: Any, x: Any, y: Any) -> Any:
    if isinstance(y, Tensor):
        return RULES["div"](func, x, y)
    value, errors, _ = _errors(x)
    value = value / y
    return known_to(value, up(errors / abs(y) + 2 * U * value.abs()))


def _matmul(func: Any, x: Any, y: Any) -> Any:
    if func.__name__ == "__rmatmul__":
        x, y = y, x
    (a, of_a, by_a), (b, of_b, by_b) = _errors(x), _errors(y)
    size = a.abs() @ b.abs()
    error = (gamma(a.shape[-1] + 2) + by_a + by_b) * size
    # A product with errors of zero is spared.
    if of_a.ndim and bool(of_a.any()):
        error = error + of_a @ (b.abs() + of_b)
    if of_b.ndim and bool(of_b.any()):
        error = error + a.abs() @ of_b
    return known_to(a @ b, up(error))


def _tanh(func: Any, x: Any) -> Any:
    value = torch.tanh(plain(x))
    return known_to(value, up(x.entries + ELEMENTARY * value.abs()))


def _softmax(func: Any, x: Any, dim: int) -> Any:
    """Compute attention weights P with bounds on their errors, from scores with error bounds.

    Some scores may be −inf. If the scores of a row have errors of at most δ, a weight has an error of at most
    2δ e^{2δ} P (1 − P), plus rounding. The weight in a row with one finite score is exact.
    """
    scores = plain(x)
    visible = ~scores.isneginf()
    shifted = scores - scores.amax(dim, keepdim=True)
    P = torch.softmax(scores, dim)
    moved = 2 * (x.entries + 2 * U * shifted.abs()).masked_fill(~visible, 0.0).amax(dim, keepdim=True)
    rounding = gamma(P.shape[dim] + 20)
    error = P * (moved * torch.exp(moved) * (1 - P + 4 * rounding) + rounding) + UNDERFLOW
    error = torch.where(moved > 1, 1.01, error)
    return known_to(P, up(error.masked_fill(~visible | (visible.sum(dim, keepdim=True) == 1), 0.0)))


def _masked(func: Any, x: Any, mask: Any, value: Any) -> Any:
    return known_to(func(plain(x), mask, value), x.entries.masked_fill(mask, 0.0))


def _joined(func: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    parts = [t if isinstance(t, RoundedEntries) else known_to(t, FUZZ * t.abs()) for t in tensors]
    values, errors = [plain(t) for t in parts], [t.entries for t in parts]
    return known_to(func(values, *args, **kwargs), func(errors, *args, **kwargs))


_RULES: dict[str, Any] = {
    **dict.fromkeys(VIEWS.split(), _view),
    "__getitem__": _view,
    **dict.fromkeys(("add", "__add__", "__radd__", "sub", "__sub__", "rsub", "__rsub__"), _add),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _mul),
    **dict.fromkeys(("div", "__truediv__", "true_divide"), _div),
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__"), _matmul),
    **dict.fromkeys(("cat", "stack"), _joined),
    "tanh": _tanh,
    "softmax": _softmax,
    "masked_fill": _masked,
}
