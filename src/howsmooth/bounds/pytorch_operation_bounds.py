"""Rules that bound the values and the derivative of the result of each PyTorch operation in a recorded map.

A :class:`Range` bounds one tensor of the map on a ball of inputs. A rule computes the range of an operation's
result from the ranges of its arguments. Proofs: documentation page "Bounds for recorded maps",
Theorem P.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention.custom_code_attention import SoftmaxCore

__all__ = ["NoRuleError", "Range", "range_of", "softmax_attention", "written"]

# Each result is enlarged by this relative error, far above the rounding of a sum of 400,000 positive numbers.
_MARGIN = 1e-10
# This number, added to every bound of an entry, is far above what underflow can lose.
_LEAST = 1e-290

aten = torch.ops.aten


class NoRuleError(Exception):
    """Raised for a PyTorch operation whose result no rule can bound; the message names the operation."""


@dataclass(frozen=True, eq=False)
class Range:
    """Bounds on the entries, the norms and the derivative of a tensor T(X), valid for all inputs X of a ball.

    Attributes
    ----------
    size
        Upper bounds on |T_e|, a tensor of the shape of T in float64.
    norm
        Upper bounds on the Euclidean norms of T along its last axis, of the shape of T without that axis.
    slope
        Upper bound on the spectral norm of the derivative of X ↦ T(X).
    part
        Set for a sum of squares, its root and the inverse of that: of which tensor these are.

    """

    size: Tensor
    norm: Tensor
    slope: float
    part: _RootPart | None = None

    @classmethod
    def of(cls, size: Tensor, slope: float, norm: Tensor | None = None) -> Range:
        """Return a Range with the given bounds on entries, derivative and norms, after rounding them up.

        ``size`` also implies bounds on the norms; the smaller ones are taken.
        """
        size = size * (1 + _MARGIN) + _LEAST
        implied = size if size.ndim == 0 else torch.linalg.vector_norm(size, dim=-1)
        norm = implied if norm is None else torch.minimum(implied, norm)
        return cls(size, norm * (1 + _MARGIN), slope * (1 + _MARGIN))

    @property
    def largest(self) -> float:
        """The maximum of the bounds on the absolute values of all entries of the tensor."""
        return float(self.size.max()) if self.size.numel() else 0.0

    @property
    def longest(self) -> float:
        """The maximum of the bounds on the norms of all vectors along the last axis of the tensor."""
        return float(self.norm.max()) if self.norm.numel() else 0.0

    @property
    def matrix_norm(self) -> float:
        """Upper bound on the spectral norms of the matrices in the last two axes of the tensor."""
        rows, columns = self.size.sum(-1).amax(-1), self.size.sum(-2).amax(-1)
        frobenius = torch.linalg.vector_norm(self.norm, dim=-1)
        return float(torch.minimum((rows * columns).sqrt(), frobenius).max()) * (1 + _MARGIN)


@dataclass(frozen=True, eq=False)
class _RootPart:
    """The tensor t and the constants c, ε and p of an expression (c |t|² + ε)^p, where |t| is the norm along
    the last axis.

    The power p is 1 for a sum of squares, 1/2 for its root and −1/2 for the inverse root. With ``least`` the
    tensor is max(|t|, least).
    """

    tensor: Range
    factor: float
    epsilon: float = 0.0
    power: float = 1.0
    squares: bool = False  # whether the tensor holds the squares themselves, before they are added up
    least: float | None = None


Operand = Range | Tensor | float | int | bool | None


# ---- selections and copies of entries


def _selected(select: Callable[[Tensor], Any], given: Range) -> Any:
    """Bound the result of an operation that selects entries of its argument, such as a slice."""
    entries = torch.arange(given.size.numel()).reshape(given.size.shape)
    chosen = select(entries)
    if isinstance(chosen, Tensor):
        return _picked(given, chosen)
    return [_picked(given, one) for one in chosen]


def _picked(given: Range, entries: Tensor) -> Range:
    size = given.size.reshape(-1)[entries]
    if entries.numel() == 0:
        return Range.of(size, given.slope)
    times = int(torch.bincount(entries.reshape(-1)).max())
    norm = None
    if entries.ndim and given.size.ndim:
        rows = entries // given.size.shape[-1]
        ordered = entries.sort(dim=-1).values
        distinct = (ordered.diff(dim=-1) > 0).all(dim=-1) & (rows.amin(-1) == rows.amax(-1))
        norm = torch.where(distinct, given.norm.reshape(-1)[rows[..., 0]], math.inf)
    return Range.of(size, given.slope * math.sqrt(times), norm)


def _joined(join: Callable[[list[Tensor]], Tensor], parts: Sequence[Range | Tensor]) -> Range:
    """Bound a concatenation of tensors, given bounds on the tensors."""
    sizes = [part.size if isinstance(part, Range) else part.double().abs() for part in parts]
    slope = math.hypot(*(part.slope for part in parts if isinstance(part, Range)))
    return Range.of(join(sizes), slope)


# ---- sums, products and linear maps


def _sum(one: Operand, other: Operand, alpha: float = 1.0) -> Range:
    """Bound the sum one + alpha · other of two tensors, given bounds on both."""
    a, b = (_size(value) for value in (one, other))
    slope = _slope(one) * _copies(a, b) + abs(alpha) * _slope(other) * _copies(b, a)
    size = a + abs(alpha) * b
    norm = None
    if size.ndim:
        first, second = (torch.linalg.vector_norm(t.expand(size.shape), dim=-1) for t in (a, b))
        if isinstance(one, Range) and one.size.shape == size.shape:
            first = one.norm
        if isinstance(other, Range) and other.size.shape == size.shape:
            second = other.norm
        norm = first + abs(alpha) * second
    made = Range.of(size, slope, norm)
    if isinstance(one, Range) and one.part is not None and isinstance(other, int | float):
        shift = alpha * other
        if one.part.power == 1.0 and not one.part.squares and shift >= 0:
            return replace(made, part=replace(one.part, epsilon=one.part.epsilon + shift))
    return made


def _size(value: Operand) -> Tensor:
    if isinstance(value, Range):
        return value.size
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").abs()


def _slope(value: Operand) -> float:
    return value.slope if isinstance(value, Range) else 0.0


def _copies(a: Tensor, b: Tensor) -> float:
    """Return √c, where c is the number of times that broadcasting with ``b`` repeats each entry of ``a``."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    return math.sqrt(math.prod(shape) / max(1, a.numel()))


def _product(one: Operand, other: Operand) -> Range:
    """Bound the entrywise product of two tensors, given bounds on both."""
    if isinstance(one, Range) and isinstance(other, Range):
        normalised = _normalised(one, other) or _normalised(other, one)
        if normalised is not None:
            return normalised
    a, b = _size(one), _size(other)
    slope = 0.0
    for t, factor in ((one, other), (other, one)):
        if isinstance(t, Range):
            slope += t.slope * _largest_factor(t.size, factor)
    size = a * b
    norm = None
    if size.ndim:
        norms = [
            torch.where(t.norm == 0, 0.0, t.norm) * factor.expand(size.shape).amax(-1)
            for t, factor in ((one, b), (other, a))
            if isinstance(t, Range) and t.size.shape == size.shape
        ]
        norm = norms[0] if len(norms) == 1 else torch.minimum(*norms) if norms else None
    made = Range.of(size, slope, norm)
    if one is other and isinstance(one, Range):
        return replace(made, part=_RootPart(one, 1.0, squares=True))
    return made


def _largest_factor(t: Tensor, factor: Operand) -> float:
    """Bound the norm of the linear map t ↦ factor · t, where the tensor t may be broadcast."""
    f = _size(factor)
    shape = torch.broadcast_shapes(t.shape, f.shape)
    if isinstance(factor, Range) and t.ndim == f.ndim and t.shape[:-1] == f.shape[:-1] and t.shape[-1] == 1:
        return factor.longest
    return math.sqrt(float(f.square().expand(shape).sum_to_size(t.shape).max())) * (1 + _MARGIN)


def _normalised(t: Range, inverse: Range) -> Range | None:
    """Bound a tensor divided by its norms along the last axis, given bounds on the tensor and on the inverse
    norms.

    The quotient is t / max((c |t|² + ε)^{1/2}, least) with constants c, ε and ``least``. The result is None
    if ``inverse`` is not the inverse of this norm of t.
    """
    part = inverse.part
    if part is None or part.tensor is not t or part.power != -0.5:
        return None
    least = max(part.least or 0.0, math.sqrt(part.epsilon))
    if not least > 0:
        return None
    # The divisor is at least |t| times the root of c, and at least ``least``. Where it is a root, the
    # derivative of the quotient is at most its inverse.
    steep, longest = 1 / least, 1 / math.sqrt(part.factor)
    norm = torch.minimum(t.norm * steep, torch.tensor(longest, dtype=torch.float64))
    size = torch.minimum(t.size * steep, norm[..., None])
    return Range.of(size, t.slope * steep, norm)


def _matrix_product(one: Operand, other: Operand) -> Range:
    """Bound the product of the matrices in the last two axes of two tensors."""
    if isinstance(one, Range) and isinstance(other, Range):
        size = torch.minimum(
            one.size @ other.size,
            one.norm[..., None] * torch.linalg.vector_norm(other.size, dim=-2, keepdim=True),
        )
        return Range.of(size, one.slope * other.matrix_norm + other.slope * one.matrix_norm)
    if isinstance(one, Range):
        assert isinstance(other, Tensor)
        W = other.double().cpu()
        strength = _spectral_norm(W)
        lengths = torch.linalg.vector_norm(W, dim=-2, keepdim=True)
        size = torch.minimum(one.size @ W.abs(), one.norm[..., None] * lengths)
        return Range.of(size, one.slope * strength, one.norm * strength)
    assert isinstance(one, Tensor)
    assert isinstance(other, Range)
    P = one.double().cpu()
    return Range.of(P.abs() @ other.size, other.slope * _spectral_norm(P))


def _sum_with_product(c: Operand, a: Operand, b: Operand, beta: float = 1.0, alpha: float = 1.0) -> Range:
    return _sum(_product(_matrix_product(a, b), alpha), _product(c, beta))


def _spectral_norm(W: Tensor) -> float:
    """Return the largest spectral norm of the matrices in the last two axes of a tensor, rounded up."""
    if W.numel() == 0:
        return 0.0
    slack = 16 * (W.shape[-1] + W.shape[-2]) * torch.finfo(torch.float64).eps
    return float(torch.linalg.matrix_norm(W, 2).max()) * (1 + slack)


# ---- functions of single numbers


def _pointwise(
    steep: float, size: Callable[[Tensor], Tensor], growth: float = math.inf
) -> Callable[..., Range]:
    """Return the rule for an entrywise function f with |f'(t)| ≤ ``steep`` and |f(t)| ≤ ``growth`` · |t|."""

    def rule(given: Range, *_: object, **__: object) -> Range:
        norm = given.norm * growth if math.isfinite(growth) else None
        return Range.of(size(given.size), given.slope * steep, norm)

    return rule


def _softplus(given: Range, beta: float = 1.0, threshold: float = 20.0) -> Range:
    return Range.of(given.size + math.log(2.0) / beta, given.slope)


def _same(t: Tensor) -> Tensor:
    return t


def _power(given: Range, exponent: object) -> Range:
    if not isinstance(exponent, int | float):
        raise NoRuleError("an exponent that is a tensor")
    p = exponent
    if p == 1:
        return given
    if p == 2:
        return _product(given, given)
    if p > 0 and p == int(p):
        return Range.of(given.size**p, given.slope * p * given.largest ** (p - 1))
    if p in (0.5, -0.5):
        return _root(given, p)
    raise NoRuleError(f"the power {p:g}")


def _root(given: Range, power: float) -> Range:
    """Bound the square root, or the inverse square root, of a sum of squares plus ε > 0."""
    part = given.part
    if part is None or part.power != 1.0 or part.squares or not part.epsilon > 0:
        raise NoRuleError("a root of what is not a sum of squares plus ε > 0")
    c, e = part.factor, part.epsilon
    longest = part.tensor.norm.reshape(given.size.shape)
    of_root = math.sqrt(c) * part.tensor.slope
    if power > 0:
        made = Range.of((c * longest.square() + e).sqrt(), of_root)
    else:
        made = Range.of(torch.full_like(given.size, 1 / math.sqrt(e)), of_root / e)
    return replace(made, part=replace(part, power=power))


def _inverse(given: Range) -> Range:
    part = given.part
    if part is None or part.power != 0.5:
        raise NoRuleError("a division by what may be zero")
    least = max(part.least or 0.0, math.sqrt(part.epsilon))
    if not least > 0:
        raise NoRuleError("a division by what may be zero")
    made = Range.of(torch.full_like(given.size, 1 / least), given.slope / least**2)
    return replace(made, part=replace(part, power=-0.5))


def _quotient(one: Operand, other: Operand, rounding_mode: str | None = None) -> Range:
    if rounding_mode is not None:
        raise NoRuleError("a rounded division")
    if isinstance(other, Range):
        return _product(one, _inverse(other))
    return _product(one, 1.0 / torch.as_tensor(other, dtype=torch.float64))


def _reduced(given: Range, dim: Any, keepdim: bool, mean: bool) -> Range:
    axes = (
        list(range(given.size.ndim))
        if dim is None or dim == []
        else [dim]
        if isinstance(dim, int)
        else list(dim)
    )

    count = math.prod(given.size.shape[axis] for axis in axes)
    size = given.size.mean(axes, keepdim=keepdim) if mean else given.size.sum(axes, keepdim=keepdim)
    root = math.sqrt(count)
    made = Range.of(size, given.slope / root if mean else given.slope * root)
    part = given.part
    last = len(axes) == 1 and axes[0] in (-1, given.size.ndim - 1)
    if part is None or not part.squares or not last or not keepdim:
        return made
    factor = 1.0 / given.size.shape[-1] if mean else 1.0
    # The sum of the squares is the square of the norm, and its gradient has norm 2 |t|.
    longest = part.tensor.norm
    size = factor * longest.square()
    slope = 2 * factor * part.tensor.longest * part.tensor.slope
    better = Range.of(torch.minimum(made.size, size[..., None] if keepdim else size), min(made.slope, slope))
    return replace(better, part=replace(part, squares=False, factor=factor))


def _vector_norm(
    given: Range, order: float = 2, dim: Any = None, keepdim: bool = False, **_: object
) -> Range:
    axes = [dim] if isinstance(dim, int) else list(dim or ())
    if order != 2 or len(axes) != 1 or axes[0] not in (-1, given.size.ndim - 1) or not keepdim:
        raise NoRuleError("a norm other than the Euclidean norm along the last axis")
    made = Range.of(given.norm[..., None], given.slope)
    return replace(made, part=_RootPart(given, 1.0, power=0.5))


def _clamped(given: Range, least: Any = None, most: Any = None) -> Range:
    limits = [limit for limit in (least, most) if limit is not None]
    if any(isinstance(limit, Range | Tensor) for limit in limits):
        raise NoRuleError("limits that are tensors")
    largest = max(abs(limit) for limit in limits)
    size = torch.full_like(given.size, largest) if len(limits) == 2 else given.size.clamp_min(largest)
    made = Range.of(size, given.slope)
    part = given.part
    if part is None or part.power != 0.5 or most is not None or not least > 0:
        return made
    return replace(made, part=replace(part, least=max(least, part.least or 0.0)))


# ---- norm layers, softmax, convolution


def _layer_norm(given: Range, shape: Sequence[int], weight: Any, bias: Any, epsilon: float) -> Range:
    if len(shape) != 1 or not epsilon > 0:
        raise NoRuleError("a norm layer with ε = 0 or over several axes")
    d = shape[0]
    steep = 1 / math.sqrt(epsilon)
    norm = (given.norm * steep).clamp(max=math.sqrt(d))
    plain = Range.of(norm[..., None].expand(given.size.shape), given.slope * steep, norm)
    scaled = plain if weight is None else _product(plain, weight)
    return scaled if bias is None else _sum(scaled, bias)


def _batch_norm(
    given: Range,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    epsilon: float,
) -> list[Range | None]:
    """Bound the result of a batch norm in evaluation mode, which is an affine map of each channel."""
    if training:
        raise NoRuleError("a batch norm in training")
    shape = (-1, *[1] * (given.size.ndim - 2))
    factor = (variance.double() + epsilon).rsqrt()
    factor = factor if weight is None else factor * weight.double()
    shift = -mean.double() * factor if bias is None else bias.double() - mean.double() * factor
    return [_sum(_product(given, factor.reshape(shape)), shift.reshape(shape)), None, None]


def _softmax(given: Range, dim: int, *_: object, **__: object) -> Range:
    ones = torch.ones_like(given.size)
    last = dim in (-1, given.size.ndim - 1)
    return Range.of(ones, given.slope / 2, torch.ones_like(given.norm) if last else None)


def _convolution(
    given: Operand,
    weight: Operand,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *rest: Any,
) -> Range:
    if not isinstance(given, Range) or not isinstance(weight, Tensor):
        raise NoRuleError("a convolution with weights that depend on the tokens")
    kernel = weight.double().cpu().abs()
    settings = (stride, padding, dilation, transposed, *rest)
    size = aten.convolution(given.size, kernel, None, *settings)
    # The norm of the map is at most the root of (largest row sum) · (largest column sum).
    ones = torch.ones_like(given.size)
    rows = aten.convolution(ones, kernel, None, *settings)
    columns = aten.convolution_backward(
        torch.ones_like(rows), ones, kernel, None, *settings, [True, False, False]
    )[0]
    made = Range.of(size, given.slope * math.sqrt(float(rows.max()) * float(columns.max())))
    return made if bias is None else _sum(made, bias.reshape(-1, *[1] * (size.ndim - 2)))


def _fused_attention(
    q: Operand,
    k: Operand,
    v: Operand,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Operand = None,
    scale: float | None = None,
) -> list[Range | None]:
    keys = k.size if isinstance(k, Range) else k
    assert isinstance(keys, Tensor)
    mask = attn_mask if isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.bool else None
    core = SoftmaxCore(keys.shape[-1] ** -0.5 if scale is None else scale, causal=is_causal, mask=mask)
    return [softmax_attention(core, q, k, v, None if mask is not None else attn_mask), None]


def softmax_attention(core: SoftmaxCore, q: Operand, k: Operand, v: Operand, bias: Operand = None) -> Range:
    """Bound the output of a softmax attention and its derivative, given bounds on the queries, keys and
    values and on their derivatives.

    An argument that does not depend on the tokens is a tensor.

    Parameters
    ----------
    core
        The softmax attention.
    q, k, v
        Queries (*lead, heads, m, key_dim), keys (*lead, kv_heads, n, key_dim) and values.
    bias
        What is added to the scores besides the bias of ``core``.

    """
    queries, keys, values = (t if isinstance(t, Range) else _constant(t) for t in (q, k, v))
    heads, m = queries.size.shape[-3:-1]
    kv_heads, n = keys.size.shape[-3:-1]
    group = heads // kv_heads
    seen = torch.ones(m, n, dtype=torch.bool)
    if core.causal:
        seen = seen.tril()
    if core.window is not None:
        i = torch.arange(n)
        seen = seen & ((i[:, None] - i).abs() < core.window)
    if core.mask is not None:
        seen = seen & core.mask.cpu()
    # How many queries of a query head see a key, at most.
    often = int(seen.sum(dim=-2).max())
    Q, K, V = (t.norm.amax(dim=-1) for t in (queries, keys, values))
    K, V = (t.repeat_interleave(group, dim=-1) for t in (K, V))
    scale, root, repeated = abs(core.scale), math.sqrt(often), math.sqrt(group)
    slope = scale * float((V * K).max()) * queries.slope
    slope += scale * root * repeated * float((Q * V).max()) * keys.slope
    slope += root * repeated * values.slope
    if isinstance(bias, Range):
        slope += float(V.max()) * bias.slope * _copies(bias.size, bias.size.new_empty((*Q.shape, m, n)))
    size = values.size.amax(dim=-2, keepdim=True).repeat_interleave(group, dim=-3)
    size = size.expand(*size.shape[:-2], m, size.shape[-1])
    norm = V[..., None].expand(size.shape[:-1])
    return Range.of(size, slope, norm)


def _constant(t: Operand) -> Range:
    return Range.of(_size(t), 0.0)


# ---- the table of rules

# Operations whose result holds entries of their first argument, at places that the other arguments say.
_SELECTING = (
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze",
    "select", "slice", "split", "unsafe_split", "split_with_sizes", "unbind", "repeat", "roll", "flip",
    "index", "index_select", "gather", "unfold", "diagonal",
)  # fmt: skip
_COPYING = ("clone", "detach", "alias", "contiguous", "lift_fresh", "_to_copy")
_FUSED = "_scaled_dot_product_flash_attention_for_cpu"
# Operations whose first argument may be a constant while a later one depends on the tokens.
_SYMMETRIC = ("add", "sub", "rsub", "mul", "div", "mm", "bmm", "addmm", "baddbmm", _FUSED)
_SILU = 1.0998394  # the largest slope of x ↦ x sigmoid(x), 1.09983932..., rounded up
_GELU = 1.13  # the largest slopes of x ↦ x Φ(x) and of its tanh form are 1.12891 and 1.12900, rounded up

_RULES: dict[str, Callable[..., Any]] = {
    "add": _sum,
    "sub": lambda a, b, alpha=1.0: _sum(a, b, -alpha),
    "rsub": lambda a, b, alpha=1.0: _sum(b, a, -alpha),
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    "square": lambda a: _product(a, a),
    "mm": _matrix_product,
    "bmm": _matrix_product,
    "addmm": _sum_with_product,
    "baddbmm": _sum_with_product,
    "sum": lambda a, dim=None, keepdim=False, **_: _reduced(a, dim, keepdim, mean=False),
    "mean": lambda a, dim=None, keepdim=False, **_: _reduced(a, dim, keepdim, mean=True),
    "rsqrt": lambda a: _root(a, -0.5),
    "sqrt": lambda a: _root(a, 0.5),
    "reciprocal": lambda a: _inverse(a),
    "linalg_vector_norm": _vector_norm,
    "clamp_min": _clamped,
    "clamp": _clamped,
    "clamp_max": lambda a, most: _clamped(a, None, most),
    "neg": _pointwise(1.0, _same, 1.0),
    "abs": _pointwise(1.0, _same, 1.0),
    "relu": _pointwise(1.0, _same, 1.0),
    "tanh": _pointwise(1.0, torch.tanh, 1.0),
    "sigmoid": _pointwise(0.25, torch.sigmoid),
    "silu": _pointwise(_SILU, _same, 1.0),
    "gelu": _pointwise(_GELU, _same, 1.0),
    "hardswish": _pointwise(1.5, _same, 1.0),
    "softplus": _softplus,
    "sin": _pointwise(1.0, lambda t: t.clamp(max=1.0), 1.0),
    "cos": _pointwise(1.0, torch.ones_like),
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "native_layer_norm": _layer_norm,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": lambda x, w, b, m, v, _, e: _batch_norm(
        x, w, b, m, v, False, 0.0, e
    ),
    "convolution": _convolution,
    _FUSED: _fused_attention,
}


def range_of(name: str, arguments: Sequence[Any], settings: dict[str, Any]) -> Any:
    """Bound the results of a PyTorch operation, given bounds on its arguments.

    Parameters
    ----------
    name
        The name of the operation in ``torch.ops.aten``.
    arguments, settings
        Its arguments, with a :class:`Range` in place of each tensor that depends on the tokens.

    Raises
    ------
    NoRuleError
        If the operation has no rule, or not for such arguments.

    """
    if name in _COPYING:
        return arguments[0]
    if name in _SELECTING:
        if not isinstance(arguments[0], Range) or _depends(arguments[1:]):
            raise NoRuleError(f"{name} at places that depend on the tokens")
        made = _selected(lambda t: getattr(aten, name)(t, *arguments[1:], **settings), arguments[0])
        # A norm that is repeated along the last axis is still the norm of the same tensor.
        kept = (
            name == "expand"
            and arguments[0].size.shape[-1:] == (1,)
            and made.size.ndim == arguments[0].size.ndim
        )
        return replace(made, part=arguments[0].part) if kept else made
    if name in ("cat", "stack"):
        dim = [*arguments[1:], settings.get("dim", 0)][0]
        return _joined(lambda parts: getattr(torch, name)(parts, dim), arguments[0])
    if name == "where" and len(arguments) == 3 and not isinstance(arguments[0], Range):
        return _where(*arguments)
    if name == "masked_fill" and not isinstance(arguments[1], Range):
        return _where(arguments[1], arguments[2], arguments[0])
    if name == "constant_pad_nd":
        given, widths, *rest = arguments
        value = rest[0] if rest else 0.0
        return Range.of(aten.constant_pad_nd(given.size, widths, abs(value)), given.slope)
    rule = _RULES.get(name)
    if rule is None or not (isinstance(arguments[0], Range) or name in _SYMMETRIC):
        raise NoRuleError(f"the operation {name}")
    return rule(*arguments, **settings)


def written(buffer: Tensor | Range, place: Tensor, value: Operand) -> Range:
    """Bound a tensor after new values have been assigned to a part of it.

    ``place`` holds the indices of the written entries in the flattened tensor.
    """
    size = _size(buffer).contiguous().clone()
    size.view(-1)[place.reshape(-1)] = _size(value).expand(place.shape).reshape(-1)
    slope = _slope(value) * _copies(_size(value), place)
    return Range.of(size, math.hypot(_slope(buffer), slope))


def _depends(arguments: Sequence[Any]) -> bool:
    flat = [one for a in arguments for one in (a if isinstance(a, list | tuple) else [a])]
    return any(isinstance(one, Range) for one in flat)


def _where(condition: Tensor, one: Operand, other: Operand) -> Range:
    a, b = _size(one), _size(other)
    slopes = [
        _slope(t) * _copies(s, condition.new_empty(torch.broadcast_shapes(condition.shape, a.shape, b.shape)))
        for t, s in ((one, a), (other, b))
    ]
    return Range.of(torch.where(condition.cpu(), a, b), math.hypot(*slopes))
