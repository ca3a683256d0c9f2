"""The parameters of an attention in the paper's notation: A, V and b of each head, and the output maps W_h.

Scores are ⟨A x_i + b, x_j⟩ with A = scale · Kᵀ Q and b = scale · Kᵀ b_q, and values are V x_j. The key bias
is left out because it shifts all scores of a row alike. Value and output biases are left out because they do
not change the derivative.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property, reduce, wraps
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.attention import SelfAttention, TokenMap
from howsmooth.attention.masks import Visibility
from howsmooth.attention.theorem_preconditions import (
    remedy_for_other_map,
    require_formula,
    require_plain_scores,
)
from howsmooth.bounds.bound import exp
from howsmooth.bounds.log_numbers import Log
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import (
    above,
    gamma,
    product_norms_above,
    spectral_norm_above,
    spectral_norm_below,
    up,
)

__all__ = [
    "ROUNDINGS", "Head", "Parameters", "SiteLike", "as_matrix", "largest_distance", "log_size",
    "log_spectral_norm", "norm", "normalised", "norms_of_rows", "opened", "parameters_of", "remembered",
    "row_blocks",
]  # fmt: skip

ROUNDINGS = 8
"""Bounds hold for all matrices and biases of queries, keys and values whose entries are so many roundings
away from those given, since a norm layer may have been multiplied into them, and the scale of the scores.
"""

# Products of parameters with larger logarithms, or their squares' sums, might leave the range of float64.
_LARGEST_LOG = 700.0
# Number of pairs of tokens in one block, so that no n × n matrix is formed for a long sequence.
_PAIRS = 1 << 22
# The most numbers that a function remembers.
_MOST_NUMBERS = 1 << 14


def remembered(compute: Callable[..., float]) -> Callable[..., float]:
    """Return a version of ``compute`` that remembers its results, and reuses them for equal tensors.

    A layer is captured anew for each length, but its matrices have the norms of before. Tensors are
    recognised by digests of their entries, so none is kept, and one that was changed is another one.
    """
    known: dict[tuple[object, ...], float] = {}

    @wraps(compute)
    def found(*tensors: Tensor, **options: object) -> float:
        key = (*map(_identity, tensors), *options.items())
        number = known.get(key)
        if number is None:
            if len(known) >= _MOST_NUMBERS:
                known.clear()
            number = known[key] = compute(*tensors, **options)
        return number

    return found


def _identity(tensor: Tensor) -> tuple[object, ...]:
    # The last digits of a norm depend on the order of the entries in memory, too.
    entries = hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).digest()
    return tensor.shape, tensor.stride(), tensor.device, entries


@remembered
def log_spectral_norm(*factors: Tensor, upper: bool = True) -> float:
    """Return the logarithm of the spectral norm of a product of float64 matrices, rounded up or down.

    Each factor is divided by its size, so that the product neither overflows nor underflows. The result also
    holds for factors whose entries are ``ROUNDINGS`` away from those given.
    """
    scaled = [normalised(factor) for factor in factors]
    sizes = math.prod(float(torch.linalg.vector_norm(t)) for t in scaled)
    given = ROUNDINGS * len(factors)
    if upper and len(factors) == 2:
        norm = float(product_norms_above(*scaled)) + up(gamma(given) * sizes)
    else:
        # A computed product of matrices is off by γ_m |L| |R| entry by entry, with m terms in its sums.
        error = up(gamma(given + sum(factor.shape[0] for factor in factors[1:])) * sizes)
        whole = reduce(torch.matmul, scaled)
        norm = spectral_norm_above(whole) + error if upper else spectral_norm_below(whole) - error
    if norm <= 0:
        return -math.inf
    return math.fsum([math.log(norm), *map(log_size, factors)])


def norm(*factors: Tensor) -> Log:
    """Return the spectral norm of a product of float64 matrices, rounded up."""
    return Log(log_spectral_norm(*factors))


def log_size(tensor: Tensor) -> float:
    """Return the log of the number by which :func:`normalised` divides a tensor, −inf for a zero tensor."""
    return math.log(_size(tensor)) if bool((tensor != 0).any()) else -math.inf


def normalised(tensor: Tensor) -> Tensor:
    """Divide a tensor by a power of two, so that its largest absolute entry lies between 1 and 2."""
    return tensor / _size(tensor)


def _size(tensor: Tensor) -> float:
    """Return the largest power of two up to a tensor's largest absolute entry. Division by it is exact."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return 2.0 ** (math.frexp(largest)[1] - 1) if 0 < largest < math.inf else 1.0


def row_blocks(n: int) -> Iterator[slice]:
    """Yield slices that cut an n × n matrix into blocks of rows with a bounded number of entries."""
    length = max(1, _PAIRS // n)
    for start in range(0, n, length):
        yield slice(start, min(start + length, n))


def largest_distance(x: Tensor) -> float:
    """Return an upper bound on the distances between rows of x (n, d), computed from their differences."""
    exact, scaled = "donot_use_mm_for_euclid_dist", normalised(x)  # squares of large entries overflow
    blocks = (torch.cdist(scaled[rows], scaled, compute_mode=exact) for rows in row_blocks(len(x)))
    return _size(x) * above(max(float(distances.amax()) for distances in blocks), 2 * x.shape[1] + 4)


def norms_of_rows(x: Tensor) -> Tensor:
    """Return the norms of the rows of x, rounded up, also where their squares leave the range of float64."""
    norms: Tensor = torch.linalg.vector_norm(normalised(x), dim=-1)
    return _size(x) * above(norms, x.shape[-1] + 2)


def as_matrix(
    name: str, value: object, shape: tuple[int | str, ...], *, what: str = "numbers", remedy: str = ""
) -> Tensor:
    """Convert a tensor, an array or nested lists of real numbers to a checked float64 tensor on the CPU.

    An entry of ``shape`` is a required size, or the name of a size that may be any positive number. ``what``
    and ``remedy`` are words for the error: ArgumentError for another kind or shape, NonFiniteError for an
    entry that is NaN or infinite.
    """
    got, given = type(value).__name__, None
    with contextlib.suppress(TypeError, ValueError):  # text, None, or lists of different lengths
        given = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        got = f"shape {tuple(given.shape)}" if given.ndim else repr(value)
        if given.dtype.is_complex or given.dtype == torch.bool:
            got, given = str(given.dtype), None
    if (
        given is None
        or given.ndim != len(shape)
        or not all(
            size == want if isinstance(want, int) else size >= 1
            for size, want in zip(given.shape, shape, strict=True)
        )
    ):
        sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        if not remedy and shape[0] == "heads" and got.startswith("shape"):
            remedy = f"For a single head give {name}[None]."
        expected = f"{what} of shape ({sizes}), a tensor, an array or nested lists"
        raise ArgumentError(name, expected=expected, got=got, remedy=remedy)
    if not bool(torch.isfinite(given).all()):
        raise NonFiniteError(name, expected="finite numbers", got="NaN or infinity")
    return given.to(device="cpu", dtype=torch.float64)


class Head:
    """One attention head in the notation of the paper: the scores are ⟨A x_i + b, x_j⟩ and the values V x_j.

    A, V and b are stored in float64 on the CPU.

    Parameters
    ----------
    A
        Matrix of the scores, (d, d), or a pair of factors (left (d, k), right (k, d)) with A = left @ right.
    V
        Value matrix, (d_out, d). All are tensors, arrays or nested lists of real numbers.
    b
        Query bias of the scores, (d,), or None for zero.

    Raises
    ------
    ArgumentError
        If A is not square, or shapes do not fit.
    NonFiniteError
        If an entry is NaN or infinite.

    """

    def __init__(self, A: object, V: object, b: object = None) -> None:
        if isinstance(A, tuple) and len(A) == 2 and np.ndim(A[0]) == 2:
            left = as_matrix("A", A[0], ("d", "k"), what="factors")
            right = as_matrix(
                "A", A[1], (left.shape[1], left.shape[0]), what="factors (d, k) and (k, d), here one"
            )
        else:
            left = as_matrix("A", A, ("d", "d"), what="a matrix")
            right = torch.eye(left.shape[1], dtype=torch.float64)
        if left.shape[0] != right.shape[1]:
            raise ArgumentError(
                "A",
                expected="a square matrix (d, d), the bilinear form of the scores",
                got=f"shape {tuple(left.shape)}",
                remedy="For query and key matrices Q, K of shape (k, d), A = K.T @ Q / k**0.5.",
            )
        _require_product("A", left, right)
        self.left, self.right, self.d = left, right, left.shape[0]
        self.V = as_matrix("V", V, ("d_out", self.d), what="a matrix")
        #: Matrices whose product is V, from which its norm is right also where the product underflows.
        self.V_factors: tuple[Tensor, ...] = (self.V,)
        zero = torch.zeros(self.d, dtype=torch.float64)
        self.b = zero if b is None else as_matrix("b", b, (self.d,), what="a vector")
        #: A bound on the rounding error of b, if it was computed.
        self.b_error = 0.0

    def with_values(self, *factors: Tensor) -> Head:
        """Return a head with the same scores and with the product of ``factors`` as its value matrix."""
        other = copy(self)
        other.V, other.V_factors = reduce(torch.matmul, factors), factors
        vars(other).pop("log_V_norm", None)  # the copy keeps what is known of the scores
        return other

    @cached_property
    def A(self) -> Tensor:
        """The matrix A (d, d) in the attention scores ⟨A x_i + b, x_j⟩."""
        return self.left @ self.right

    @cached_property
    def log_A_norm(self) -> float:
        """The logarithm of the spectral norm of the score matrix A, rounded up. It is finite also where the
        product of the factors underflows.
        """
        return log_spectral_norm(self.left, self.right)

    @cached_property
    def log_V_norm(self) -> float:
        """The logarithm of the spectral norm of the value matrix V, rounded up."""
        return log_spectral_norm(*self.V_factors)

    @property
    def A_norm(self) -> float:
        """The spectral norm of the score matrix A, rounded up."""
        return exp(self.log_A_norm)

    @property
    def V_norm(self) -> float:
        """The spectral norm of the value matrix V, rounded up."""
        return exp(self.log_V_norm)

    @cached_property
    def b_norm(self) -> float:
        """The Euclidean norm of the query bias b, rounded up."""
        return float(norms_of_rows(self.b[None])) + self.b_error

    @cached_property
    def real_eigenpairs(self) -> list[tuple[float, Tensor]]:
        """The real eigenvalues of A in ascending order, each with a unit eigenvector.

        For A = left @ right of rank k < d, the nonzero eigenvalues come from the k × k matrix right @ left,
        since right left w = λ w implies A left w = λ left w. Zero is an eigenvalue too, because A is
        singular.
        """
        k = self.left.shape[1]
        small = self.right @ self.left if k < self.d else self.A
        values, vectors = torch.linalg.eig(small)
        pairs = []
        for value, vector in zip(values.tolist(), vectors.T, strict=True):
            if value.imag != 0:
                continue
            u = self.left @ vector.real if k < self.d else vector.real
            length = float(torch.linalg.vector_norm(u))
            if length > 0:
                pairs.append((value.real, u / length))
        if k < self.d:
            # The last rows of the complete Q factor of rightᵀ span the null space of right.
            null = torch.linalg.qr(self.right.mT, mode="complete").Q[:, -1]
            pairs.append((0.0, null))
        return sorted(pairs, key=lambda pair: pair[0])

    def __repr__(self) -> str:
        return f"Head(d={self.d}, ‖A‖={self.A_norm:.4g}, ‖V‖={self.V_norm:.4g}, |b|={self.b_norm:.4g})"


def _require_product(name: str, left: Tensor, right: Tensor) -> None:
    """Raise NonFiniteError if the product of two matrices, or its norm, might leave the range of float64."""
    log = log_size(left) + log_size(right) + math.log(max(left.numel() * right.numel(), 1))
    if log > _LARGEST_LOG:
        raise NonFiniteError(
            name,
            expected=f"products of the attention's matrices below exp({_LARGEST_LOG:g})",
            got=f"up to exp({log:.4g})",
            remedy="Scores or outputs of this size leave the range of float64.",
        )


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters of a multi-head attention f(X) = Σ_h W_h f_h(X): heads, output maps W_h and mask."""

    #: One head for each query head; grouped queries repeat the key/value heads.
    heads: tuple[Head, ...]
    #: The maps W_h (d_out, value_dim): blocks of columns of the output projection, or of the identity if the
    #: heads are concatenated.
    outputs: tuple[Tensor, ...]
    #: For "causal", token i sees the tokens j <= i.
    masking: Literal["none", "causal", "other"]
    #: For "other": True where the query (row) sees the key (column), or None. A mask fixes the length.
    mask: Bool[Tensor, "n n"] | None
    #: For "other" without a mask: token i sees the tokens j with |i − j| < ``window``, and only tokens with
    #: j <= i if ``causal``.
    window: int | None = None
    causal: bool = False
    #: Whether it is a head alone, which statements about a causal mask take as causal.
    bare: bool = False

    def visibility(self, n: int, *, argument: str = "length") -> Visibility:
        """Return the mask for n tokens. Raise an ArgumentError about ``argument`` if the attention has a mask
        for another number of tokens.
        """
        if self.mask is not None and self.mask.shape[0] != n:
            expected = f"{self.mask.shape[0]}, the length of the mask"
            raise ArgumentError(argument, expected=expected, got=str(n))
        return Visibility(n, self.masking == "causal" or self.causal, self.window, self.mask)

    @property
    def W(self) -> Tensor:
        """The output projection [W_1 … W_H] of the attention, of shape (d_out, heads · value_dim)."""
        return torch.cat(self.outputs, dim=1)

    def one_head(self, needed_by: str) -> Head:
        """Return the head of a single-head attention, with its output map multiplied into its value matrix.
        If the attention has several heads, raise an ArgumentError that names the bound ``needed_by``.
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
        """Return head ``h`` with its output map multiplied into its value matrix, which becomes W_h V_h."""
        head, output = self.heads[h], self.outputs[h]
        identity = torch.eye(*output.shape, dtype=output.dtype)
        return head if torch.equal(output, identity) else head.with_values(output, *head.V_factors)


@runtime_checkable
class SiteLike(Protocol):
    """The attributes of a captured layer of a model from which bounds are computed."""

    @property
    def map(self) -> object:
        """The function that the layer computes from its tokens, for instance a SelfAttention."""

    @property
    def x(self) -> Tensor:
        """The tokens X of shape (batch, n, d) that are the input of ``map``."""

    @property
    def norm(self) -> object:
        """The norm layer whose output is X, or None."""


def opened(source: object) -> tuple[object, Tensor | None, object]:
    """Return the map, tokens and norm layer of a captured layer. Return any other object with two None."""
    if isinstance(source, SiteLike) and not isinstance(source, TokenMap):
        return source.map, source.x, source.norm
    return source, None, None


def parameters_of(attention: object) -> Parameters:
    """Return the parameters A, V, b of all heads of an attention, in float64 on the CPU.

    ``attention`` is a :class:`Head`, :class:`Parameters`, a :class:`~howsmooth.attention.SelfAttention`, or a
    captured site whose map is a SelfAttention. ArgumentError is raised for others, and for rotary positions,
    a score bias, soft-capped scores, sinks or norms of queries or keys, since scores are then not
    ⟨A x_i + b, x_j⟩ or P not their softmax.
    """
    if isinstance(attention, Parameters):
        return attention
    if isinstance(attention, Head):
        identity = torch.eye(attention.V.shape[0], dtype=torch.float64)
        return Parameters((attention,), (identity,), "none", None, bare=True)
    f = opened(attention)[0]
    require_plain_scores(f, "these bounds")
    if not isinstance(f, SelfAttention):
        if f is not attention:
            require_formula(f, "these bounds")
            expected, got = "a site whose map is attention alone", getattr(attention, "scope", "?")
            remedy = "Capture with scope 'attention', 'heads' or 'head'; for norms see pre_norm_upper_bound."
            raise ArgumentError("attention", expected=expected, got=f"scope {got!r}", remedy=remedy)
        expected, remedy = "a SelfAttention, a captured site or a Head", remedy_for_other_map(f)
        raise ArgumentError("attention", expected=expected, got=type(f).__name__, remedy=remedy)
    if f.rotary is not None:
        raise ArgumentError(
            "attention",
            expected="scores ⟨A x_i + b, x_j⟩ with one matrix A",
            got="rotary positions, with which A depends on the distance of the tokens",
            remedy="best(side='upper') and hs.bounds.certificate at given tokens accept "
            "rotary positions; hs.adversarial.ascend finds large constants.",
        )
    f = f.to(dtype=torch.float64, device="cpu")
    output = torch.eye(f.heads * f.value_dim, dtype=torch.float64) if f.output is None else f.output
    _require_product("value", output, f.value)
    if f.query_bias is not None:
        _require_product("query_bias", f.key, f.query_bias)
    heads = []
    for h in range(f.heads):
        group = h // (f.heads // f.kv_heads)
        key = f.key[group].mT
        head = Head((key, f.scale * f.query[h]), f.value[group])
        if f.query_bias is not None:
            bias = f.query_bias[h]
            head.b = f.scale * (key @ bias)
            size = float(torch.linalg.vector_norm(key.abs() @ bias.abs()))
            # What underflows, so that a b of zeros is trusted only where every term of its sums is zero
            least = 2.0**-1074 * key.numel() * (1 + abs(f.scale)) * bool(key[:, bias != 0].any())
            head.b_error = up(gamma(len(bias) + 2 * ROUNDINGS) * abs(f.scale) * size) + least
        heads.append(head)
    given = tuple(heads), output.split(f.value_dim, dim=1)
    if f.mask is not None:
        return Parameters(*given, "other", f.visible_keys(f.mask.shape[0]))
    if f.window is not None:
        return Parameters(*given, "other", None, f.window, f.causal)
    return Parameters(*given, "causal" if f.causal else "none", None)
