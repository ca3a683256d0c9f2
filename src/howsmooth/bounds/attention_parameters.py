"""The parameters of an attention in the paper's notation: A, V and b of each head, and the output maps W_h.

Scores are ⟨A x_i + b, x_j⟩ with A = scale · Kᵀ Q and b = scale · Kᵀ b_q, and values are V x_j. The key bias
is left out because it shifts all scores of a row alike. Value and output biases are left out because they do
not change the derivative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.masks import Visibility
from howsmooth.attention.theorem_preconditions import (
    remedy_for_other_map,
    require_formula,
    require_plain_scores,
)
from howsmooth.bounds.bound import exp
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import spectral_norm_above

__all__ = [
    "ROTARY",
    "Attention",
    "Head",
    "Parameters",
    "SiteLike",
    "largest_distance",
    "log_largest_weight",
    "log_size",
    "log_spectral_norm",
    "parameters_of",
    "row_blocks",
    "unit",
]

ROTARY = "rotary positions, with which A depends on the distance of the tokens"
"""Why attention with rotary positions has no bound on a ball, in words."""

# Products of parameters with larger logarithms, or their squares' sums, might leave the range of float64.
_LARGEST_LOG = 700.0
# Number of pairs of tokens in one block, so that no n × n matrix is formed for a long sequence.
_PAIRS = 1 << 22


def log_spectral_norm(*factors: Tensor) -> float:
    """Return the logarithm of the spectral norm of a product of float64 matrices, rounded up.

    Each factor is divided by its largest entry, so that the product neither overflows nor underflows.
    """
    norm = spectral_norm_above(reduce(torch.matmul, map(unit, factors)))
    if norm == 0:
        return -math.inf
    logs = [math.log(norm), *map(log_size, factors)]
    return math.fsum(logs) + 4 * 2.0**-52 * math.fsum(map(abs, logs))


def log_size(tensor: Tensor) -> float:
    """Return the logarithm of the largest absolute entry of a tensor."""
    size = float(tensor.abs().max()) if tensor.numel() else 0.0
    return math.log(size) if size > 0 else -math.inf


def unit(tensor: Tensor) -> Tensor:
    """Return a tensor divided by its largest absolute entry, or the tensor itself if it is zero or empty."""
    size = float(tensor.abs().max()) if tensor.numel() else 0.0
    return tensor / size if size > 0 else tensor


def row_blocks(n: int) -> Iterator[slice]:
    """Yield slices that cut an n × n matrix into blocks of rows with a bounded number of entries."""
    length = max(1, _PAIRS // n)
    for start in range(0, n, length):
        yield slice(start, min(start + length, n))


def largest_distance(x: Tensor) -> float:
    """Return the largest distance between two rows of x (n, d), computed from differences of rows."""
    exact = "donot_use_mm_for_euclid_dist"
    return max(float(torch.cdist(x[rows], x, compute_mode=exact).amax()) for rows in row_blocks(len(x)))


class Head:
    """One attention head in the notation of the paper: the scores are ⟨A x_i + b, x_j⟩ and the values V x_j.

    A, V and b are stored in float64 on the CPU.

    Parameters
    ----------
    A
        Matrix of the scores, (d, d), or a pair of factors (left (d, k), right (k, d)) with A = left @ right.
    V
        Value matrix, (d_out, d).
    b
        Query bias of the scores, (d,), or None for zero.

    Raises
    ------
    ArgumentError
        If A is not square, or shapes do not fit.
    NonFiniteError
        If an entry is NaN or infinite.

    """

    def __init__(self, A: Tensor | tuple[Tensor, Tensor], V: Tensor, b: Tensor | None = None) -> None:
        if isinstance(A, tuple):
            left, right = (_matrix("A", factor) for factor in A)
            if left.shape[1] != right.shape[0]:
                raise ArgumentError(
                    "A",
                    expected="factors (d, k) and (k, d)",
                    got=f"shapes {tuple(left.shape)} and {tuple(right.shape)}",
                )
            shape = (left.shape[0], right.shape[1])
        else:
            left = _matrix("A", A)
            shape = (left.shape[0], left.shape[1])
            right = torch.eye(shape[1], dtype=torch.float64)
        if shape[0] != shape[1]:
            raise ArgumentError(
                "A",
                expected="a square matrix (d, d), the bilinear form of the scores",
                got=f"shape {shape}",
                remedy="For query and key matrices Q, K of shape (k, d), A = K.T @ Q / k**0.5.",
            )
        _require_product("A", left, right)
        self.left, self.right = left, right
        self.d = shape[0]
        self.V = _matrix("V", V)
        if self.V.shape[1] != self.d:
            raise ArgumentError(
                "V", expected=f"a matrix (d_out, {self.d}), as A", got=f"shape {tuple(V.shape)}"
            )
        self.b = torch.zeros(self.d, dtype=torch.float64)
        if b is not None:
            self.b = _matrix("b", b[None] if b.ndim == 1 else b)[0]
            if b.ndim != 1 or self.b.shape[0] != self.d:
                raise ArgumentError("b", expected=f"a vector ({self.d},)", got=f"shape {tuple(b.shape)}")

    @cached_property
    def A(self) -> Tensor:
        """The matrix A (d, d) in the attention scores ⟨A x_i + b, x_j⟩."""
        return self.left @ self.right

    @cached_property
    def log_A_norm(self) -> float:
        """The logarithm of the spectral norm of the score matrix A, rounded up. It is finite also where the
        product of the factors underflows.
        """
        left, right = unit(self.left), unit(self.right)
        if left.shape[1] < self.d:
            # ‖A‖ is the norm of a small product: of the triangular QR factors of left and of rightᵀ.
            left, right = (torch.linalg.qr(factor, mode="r").R for factor in (left, right.mT))
            right = right.mT
        return log_size(self.left) + log_size(self.right) + log_spectral_norm(left, right)

    @cached_property
    def A_norm(self) -> float:
        """The spectral norm of the score matrix A, rounded up."""
        return exp(self.log_A_norm)

    @cached_property
    def log_V_norm(self) -> float:
        """The logarithm of the spectral norm of the value matrix V, rounded up."""
        return log_spectral_norm(self.V)

    @cached_property
    def V_norm(self) -> float:
        """The spectral norm of the value matrix V, rounded up."""
        return exp(self.log_V_norm)

    @cached_property
    def b_norm(self) -> float:
        """The Euclidean norm of the query bias b, rounded up."""
        return exp(log_spectral_norm(self.b[None]))

    def __repr__(self) -> str:
        return f"Head(d={self.d}, ‖A‖={self.A_norm:.4g}, ‖V‖={self.V_norm:.4g}, |b|={self.b_norm:.4g})"


def _require_product(name: str, left: Tensor, right: Tensor) -> None:
    """Raise NonFiniteError if the product of two matrices, or its norm, might leave the range of float64."""
    entries = left.numel() * right.numel()
    log = log_size(left) + log_size(right) + math.log(max(entries, 1))
    if log > _LARGEST_LOG:
        raise NonFiniteError(
            name,
            expected=f"products of the attention's matrices below exp({_LARGEST_LOG:g})",
            got=f"up to exp({log:.4g})",
            remedy="Scores or outputs of this size leave the range of float64.",
        )


def _matrix(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim != 2 or not value.is_floating_point():
        got = (
            f"{value.dtype} of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise ArgumentError(
            name,
            expected="a floating-point tensor (matrix)",
            got=got,
            remedy="" if isinstance(value, Tensor) else "Use torch.as_tensor.",
        )
    if not bool(torch.isfinite(value).all()):
        raise NonFiniteError(name, expected="finite numbers", got="NaN or infinity")
    return value.detach().to(device="cpu", dtype=torch.float64)


Masking = Literal["none", "causal", "other"]


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters of a multi-head attention f(X) = Σ_h W_h f_h(X): heads, output maps W_h and mask.

    Attributes
    ----------
    heads
        One :class:`Head` for each query head; grouped queries repeat the key/value heads.
    outputs
        The maps W_h (d_out, value_dim): blocks of columns of the output projection, or of the identity if
        the heads are concatenated.
    masking
        "none", "causal" (token i sees the tokens j <= i), or "other".
    mask
        For "other": boolean (n, n), True where the query (row) sees the key (column), or None. A mask fixes
        the length.
    window, causal
        For "other" without a mask: token i sees the tokens j with |i − j| < ``window``, and only tokens with
        j <= i if ``causal``.

    """

    heads: tuple[Head, ...]
    outputs: tuple[Tensor, ...]
    masking: Masking
    mask: Bool[Tensor, "n n"] | None
    window: int | None = None
    causal: bool = False

    def visibility(self, n: int) -> Visibility:
        """Return the mask of the attention for n tokens.

        Raises
        ------
        ArgumentError
            If there is a mask of another length.

        """
        if self.mask is not None and self.mask.shape[0] != n:
            raise ArgumentError(
                "length", expected=f"{self.mask.shape[0]}, the length of the mask", got=str(n)
            )
        return Visibility(n, self.masking == "causal" or self.causal, self.window, self.mask)

    @property
    def W(self) -> Tensor:
        """The output projection [W_1 … W_H] of the attention, of shape (d_out, heads · value_dim)."""
        return torch.cat(self.outputs, dim=1)

    def one_head(self, needed_by: str) -> Head:
        """Return the head of a single-head attention, with the output map multiplied into the value matrix.

        The value matrix is W_1 V_1. ``needed_by`` is the theorem that needs one head; the error mentions it.

        Raises
        ------
        ArgumentError
            If there are several heads.

        """
        if len(self.heads) != 1:
            raise ArgumentError(
                "attention",
                expected=f"one head: {needed_by} is a statement about single-head attention",
                got=f"{len(self.heads)} heads",
                remedy="Pass attention.head(h), or use best or a bound for several heads, such as lemma_3_8.",
            )
        return self.folded(0)

    def folded(self, h: int) -> Head:
        """Return head ``h`` of the attention, with its output map multiplied into the value matrix.

        The value matrix is W_h V_h.
        """
        head, output = self.heads[h], self.outputs[h]
        folded = Head((head.left, head.right), output @ head.V, head.b)
        folded.log_V_norm = log_spectral_norm(output, head.V)  # right also where the product underflows
        return folded


@runtime_checkable
class SiteLike(Protocol):
    """The attributes that the bounds read from a captured layer of a model: its map, its tokens and its norm
    layer.
    """

    @property
    def map(self) -> object:
        """The function that the captured layer computes from its tokens, for instance a SelfAttention."""

    @property
    def x(self) -> Tensor:
        """The tokens (batch, n, d) that the layer received when it was captured."""

    @property
    def norm(self) -> object:
        """The norm layer whose outputs are the tokens of the attention, or None if there is no norm layer."""


Attention = Head | Parameters | SelfAttention | SiteLike
"""The types that functions of ``howsmooth.bounds`` accept as an attention."""


def parameters_of(attention: object) -> Parameters:
    """Return the parameters A, V, b of all heads of an attention, in float64 on the CPU.

    Parameters
    ----------
    attention
        A :class:`Head`, :class:`Parameters`, a :class:`~howsmooth.attention.SelfAttention`, or a captured
        site whose map is a SelfAttention.

    Raises
    ------
    ArgumentError
        If ``attention`` is none of these. Also if it has rotary positions, a score bias, soft-capped scores,
        sinks or norms of queries or keys, since scores are then not ⟨A x_i + b, x_j⟩ or P not their softmax.

    """
    if isinstance(attention, Parameters):
        return attention
    if isinstance(attention, Head):
        identity = torch.eye(attention.V.shape[0], dtype=torch.float64)
        return Parameters((attention,), (identity,), "none", None)
    if not isinstance(attention, SelfAttention):
        require_plain_scores(attention, "these bounds")
        if isinstance(attention, SiteLike):
            return _of_site(attention)
        raise ArgumentError(
            "attention",
            expected="a SelfAttention, a captured site or a Head",
            got=type(attention).__name__,
            remedy=remedy_for_other_map(attention),
        )
    require_plain_scores(attention, "these bounds")
    if attention.rotary is not None:
        raise ArgumentError(
            "attention",
            expected="scores ⟨A x_i + b, x_j⟩ with one matrix A",
            got=ROTARY,
            remedy="best(side='upper') and hs.bounds.certificate at given tokens accept "
            "rotary positions; hs.adversarial.ascend finds large constants.",
        )
    f = attention.to(dtype=torch.float64, device="cpu")
    group = f.heads // f.kv_heads
    heads = []
    width = f.heads * f.value_dim
    output = torch.eye(width, dtype=torch.float64) if f.output is None else f.output
    _require_product("value", output, f.value)
    if f.query_bias is not None:
        _require_product("query_bias", f.key, f.query_bias)
    for h in range(f.heads):
        key = f.key[h // group]
        bias = None if f.query_bias is None else f.scale * (key.mT @ f.query_bias[h])
        heads.append(Head((key.mT, f.scale * f.query[h]), f.value[h // group], bias))
    outputs = output.split(f.value_dim, dim=1)
    if f.mask is not None:
        return Parameters(tuple(heads), outputs, "other", f.visible_keys(f.mask.shape[0]))
    if f.window is not None:
        return Parameters(tuple(heads), outputs, "other", None, f.window, f.causal)
    return Parameters(tuple(heads), outputs, "causal" if f.causal else "none", None)


def _of_site(site: SiteLike) -> Parameters:
    if isinstance(site.map, SelfAttention):
        return parameters_of(site.map)
    require_plain_scores(site.map, "these bounds")
    require_formula(site.map, "these bounds")
    raise ArgumentError(
        "attention",
        expected="a site whose map is attention alone",
        got=f"scope {getattr(site, 'scope', '?')!r}",
        remedy="Capture with scope 'attention', 'heads' or 'head'; for norms see pre_norm_upper_bound.",
    )


def log_largest_weight(n: int | float, a: float) -> float:
    """Return the log of the largest attention weight that is possible if a query sees n keys with scores in
    [−a, a].

    This weight is P̄(n, a) = 1/(1 + (n−1)e^{−2a}).
    """
    if n <= 1:
        return 0.0
    exponent = math.log(n - 1) - 2 * a
    # log(1 + e^t), without overflow for large t
    return -(max(exponent, 0.0) + math.log1p(math.exp(-abs(exponent))))
