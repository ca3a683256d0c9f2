"""The sensitivity of the output of an attention layer to changes of its queries, its keys or its values
alone.

The formulas and their proofs stand on the documentation page "Errors in queries, keys and values".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from howsmooth.attention import SelfAttention, TokenMap
from howsmooth.attention.scaled_dot_product import row_blocks
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import in_double
from howsmooth.jacobian.centred_queries_keys_values import Operands
from howsmooth.jacobian.softmax import SoftmaxDerivative, softmax_derivative
from howsmooth.lipschitz.arguments import check_arguments
from howsmooth.lipschitz.singular_value_solver import member_seeds, starts
from howsmooth.spectral import LinearOperator, lanczos

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["OperandSensitivity", "QKVSensitivity", "entry_sensitivities", "operands_of", "qkv_sensitivity"]


@dataclass(frozen=True, eq=False)
class OperandSensitivity:
    """Norms of the derivative of the output of an attention layer with respect to its queries, keys or
    values, for each head.

    Every tensor is float64 and has one member for each head: query heads for the queries, key/value heads
    for the keys and the values. A key/value head moves the outputs of all query heads that share it.
    """

    #: The spectral norm of the derivative in all tokens of the head, (heads,).
    value: Float64[Tensor, " heads"]
    #: Lower limit of an interval that contains the norm, (heads,).
    lower: Float64[Tensor, " heads"]
    #: Upper limit of that interval, (heads,).
    upper: Float64[Tensor, " heads"]
    #: Whether the interval is as narrow as ``rtol`` asks, (heads,).
    converged: Bool[Tensor, " heads"]
    #: The spectral norm of the derivative in one token of the head, (heads, n), from a dense eigenvalue
    #: problem. Each is exact up to the rounding of its head's norm.
    tokens: Float64[Tensor, "heads n"]
    #: The norm of the derivative in one entry of one token, (heads, n, dim): the norm of a column of the
    #: Jacobian.
    entries: Float64[Tensor, "heads n dim"]


@dataclass(frozen=True, eq=False, repr=False)
class QKVSensitivity:
    """The sensitivity of the output of one attention layer to changes of its queries, its keys or its values
    alone.
    """

    #: The derivative in the queries that the scores are formed from, before their scale.
    query: OperandSensitivity
    #: The derivative in the keys.
    key: OperandSensitivity
    #: The derivative in the values.
    value: OperandSensitivity
    #: Probability with which each interval holds.
    confidence: float
    #: A description of the map whose output is meant.
    scope: str

    def to_pandas(self) -> pd.DataFrame:
        """Return a table of the measured sensitivities, with one row for each head and each of queries, keys
        and values.

        Its columns are ``operand`` ("query", "key" or "value"), ``head`` (of queries, or of keys and values),
        ``value``, ``lower``, ``upper`` and ``converged``.
        """
        import pandas as pd  # takes half a second, which measuring alone does not need

        parts = []
        for name, part in self._parts():
            table = pd.DataFrame({"operand": name, "head": range(len(part.value))})
            for column in ("value", "lower", "upper", "converged"):
                table[column] = getattr(part, column).cpu().numpy()
            parts.append(table)
        return pd.concat(parts, ignore_index=True)

    def tokens(self) -> pd.DataFrame:
        """Return a table of the sensitivity of the layer's output to the query, the key and the value of each
        single token.

        It has one row for each operand, head and token. Its columns are ``operand``, ``head``, ``position``
        (from 0) and ``value``, the norm.
        """
        import pandas as pd  # takes half a second, which measuring alone does not need

        parts = []
        for name, part in self._parts():
            heads, n = part.tokens.shape
            rows = pd.MultiIndex.from_product([[name], range(heads), range(n)])
            table = pd.DataFrame(rows.to_list(), columns=["operand", "head", "position"])
            parts.append(table.assign(value=part.tokens.flatten().cpu().numpy()))
        return pd.concat(parts, ignore_index=True)

    def __repr__(self) -> str:
        largest = ", ".join(
            f"{name} {float(part.value.max()):.6g} (head {int(part.value.argmax())})"
            for name, part in self._parts()
        )
        return f"QKVSensitivity(largest in one head: {largest}; {self.scope})"

    def _parts(self) -> tuple[tuple[str, OperandSensitivity], ...]:
        return ("query", self.query), ("key", self.key), ("value", self.value)


def qkv_sensitivity(
    attention: object,
    x: Tensor | None = None,
    *,
    rtol: float = 1e-4,
    confidence: float = 0.999,
    max_iterations: int = 200,
    seed: int = 0,
) -> QKVSensitivity:
    """Measure the sensitivity of the output of an attention layer to its queries, keys and values, for each
    head.

    The operands are those that the scores are formed from: after biases, norm layers and rotary positions.
    Such keys and values are what the KV cache of transformers stores. The output is that of the layer's
    scope: with the output projection in scope ``attention``, without it in ``heads`` and ``head``.

    The norm in all queries of a head, and the norm in one token, are dense eigenvalue problems. The norms in
    all keys and in all values of a head are measured by the Lanczos process with an interval. Everything is
    computed in float64, with n² numbers for each head in memory.

    Parameters
    ----------
    attention
        A captured site, or a :class:`~howsmooth.attention.SelfAttention`.
    x
        The tokens (n, d) of one sequence, float32 or float64; None for the tokens of the site.
    rtol, confidence, max_iterations
        As for :func:`howsmooth.local_lipschitz`.
    seed
        Seed of the random starts; each head has its own.

    Returns
    -------
    QKVSensitivity
        With ``query``, ``key`` and ``value``, each an :class:`OperandSensitivity`.

    Raises
    ------
    ArgumentError
        If ``attention`` is no site or map of this kind, or another argument does not fit.
    NonFiniteError
        If ``x`` or a product is not finite.

    """
    f, x = operands_of(attention, x)
    check_arguments(f, x, rtol, confidence, max_iterations)
    if not 0 <= seed < 2**64:
        raise ArgumentError("seed", expected="an integer from 0 to 2**64 - 1", got=repr(seed))
    at = _Layer.at(f, x)
    double, derivative = at.f, at.derivative

    def in_all_tokens(which: Literal["key", "value"], stream: int) -> OperandSensitivity:
        tokens, entries = _norms(at.key_grams() if which == "key" else at.value_grams())
        operator = _InOneOperand(at, which)
        seeds = member_seeds((seed + stream) % 2**64, double.kv_heads)
        found = lanczos(
            operator,
            starts(operator, seeds, [at.n] * double.kv_heads),
            rtol=rtol,
            confidence=confidence,
            max_iterations=max_iterations,
        )
        return OperandSensitivity(
            found.sigma, found.lower, found.upper, found.converged, tokens.cpu(), entries.cpu()
        )

    tokens, entries = (t.cpu() for t in at.queries())
    rounding = derivative.rounding(double.kv_heads).repeat_interleave(at.group)
    largest = tokens.amax(dim=1)
    lower, upper = largest * (1 - rounding), largest * (1 + rounding)
    converged = upper - lower <= rtol * largest
    return QKVSensitivity(
        query=OperandSensitivity(largest, lower, upper, converged, tokens, entries),
        key=in_all_tokens("key", 1),
        value=in_all_tokens("value", 2),
        confidence=confidence,
        scope=f.describe(),
    )


def entry_sensitivities(
    f: SelfAttention, x: Float[Tensor, "n d"]
) -> tuple[Float64[Tensor, "kv_heads n key_dim"], Float64[Tensor, "kv_heads n value_dim"]]:
    """Return the norm of the derivative of the output of a layer with respect to each entry of its keys and
    of its values.

    These are the ``entries`` of :func:`qkv_sensitivity`, computed alone in a fraction of its time.
    """
    at = _Layer.at(f, x)
    return at.key_entries().cpu(), _column_norms(at.value_grams()).cpu()


def operands_of(attention: object, x: Tensor | None) -> tuple[SelfAttention, Tensor]:
    """Return an attention layer and the tokens (n, d) of one sequence, given either both of them or a
    captured layer.

    Raises
    ------
    ArgumentError
        If the queries, keys and values of the map are not known, or a site has several sequences.

    """
    f = attention if isinstance(attention, TokenMap) else getattr(attention, "map", attention)
    if not isinstance(f, SelfAttention):
        got = f.describe() if isinstance(f, TokenMap) else type(f).__name__
        scope = getattr(attention, "scope", None)
        raise ArgumentError(
            "attention",
            expected="a SelfAttention, or a site whose map is one",
            got=got if scope is None else f"scope {scope!r}: {got}",
            remedy="Capture with scope 'attention', 'heads' or 'head'; its projections must be known.",
        )
    if x is None:
        x = getattr(attention, "x", None)
        if not isinstance(x, Tensor) or x.shape[0] != 1:
            raise ArgumentError(
                "x",
                expected="the tokens (n, d) of one sequence",
                got="None" if x is None else f"a site with {x.shape[0]} sequences",
                remedy="Pass one sequence, for instance site.x[0].",
            )
        x = x[0]
    if not isinstance(x, Tensor) or x.ndim != 2:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError("x", expected="the tokens (n, d) of one sequence", got=got)
    return f, x


class _Layer:
    """The derivative of the softmax of each query head of an attention layer at given tokens, together with
    the output matrix of the layer.

    Axes of tensors: b = key/value head, G = query heads that share it. The heads of a group have output
    matrices W_1, …, W_G, replaced by the parts R_1, …, R_G of a triangular factor with the same Gram matrix.
    """

    @classmethod
    def at(cls, f: SelfAttention, x: Float[Tensor, "n d"]) -> _Layer:
        """Return the derivative of an attention layer at tokens ``x``, in float64."""
        double = in_double(f)
        assert isinstance(double, SelfAttention)
        operands = Operands.of_tokens(double, x.detach().double()[None])
        derivative = softmax_derivative(operands, double.visible_keys(len(x)), torch.float64)
        return cls(double, derivative, len(x))

    def __init__(self, f: SelfAttention, derivative: SoftmaxDerivative, n: int) -> None:
        self.f = f
        self.derivative = derivative
        self.n = n
        self.group = f.heads // f.kv_heads
        width = f.heads * f.value_dim
        output = torch.eye(width, dtype=f.dtype, device=f.device) if f.output is None else f.output
        # (b, d_out, G value_dim) → (b, r, G, value_dim) with r = min(d_out, G value_dim).
        whole = output.unflatten(1, (f.kv_heads, -1)).movedim(1, 0)
        factor = torch.linalg.qr(whole, mode="r").R if whole.shape[1] > whole.shape[2] else whole
        self.factor = factor.unflatten(2, (self.group, f.value_dim))
        self.q = derivative.q.unflatten(1, (self.group, n))
        self.p = derivative.p.unflatten(1, (self.group, n))
        self.slope = derivative.slope.unflatten(1, (self.group, n))
        self.mean = derivative.mean.unflatten(1, (self.group, n))

    def out(self, heads: Float[Tensor, "b m value_dim"]) -> Float[Tensor, "b n r"]:
        """Multiply the output of each head by its part of ``factor``, which replaces the output matrix, and
        sum over the heads that share a key head.
        """
        return torch.einsum("bgnv,brgv->bnr", heads.unflatten(1, (self.group, self.n)), self.factor)

    def out_adjoint(self, y: Float[Tensor, "b n r"]) -> Float[Tensor, "b m value_dim"]:
        """Apply the transpose of :meth:`out`, which gives the cotangents of the head outputs."""
        return torch.einsum("bnr,brgv->bgnv", y, self.factor).flatten(1, 2)

    def queries(self) -> tuple[Float[Tensor, "heads n"], Float[Tensor, "heads n key_dim"]]:
        """Return the norm of the derivative of the layer output with respect to each query, and to each entry
        of each query.
        """
        d, tokens, entries = self.derivative, [], []
        for b in range(self.f.kv_heads):
            for g in range(self.group):
                block = self.q.new_empty(self.n, self.factor.shape[1], self.f.key_dim)
                for rows in self._row_blocks(d.v.shape[-1]):
                    z = d.v[b] - self.mean[b, g, rows, None]  # (rows, n, value_dim)
                    block[rows] = self.factor[b, :, g] @ (z.mT @ (self.slope[b, g, rows, :, None] * d.k[b]))
                if d.sink is not None:
                    away = d.sink.away.unflatten(1, (self.group, self.n))[b, g] @ self.factor[b, :, g].mT
                    p = d.sink.p.unflatten(1, (self.group, self.n))[b, g]
                    block += (p[:, None] * away)[..., None] * d.sink.k[b]
                block *= abs(self.f.scale)  # the derivative above is in the scaled queries
                tokens.append(torch.linalg.matrix_norm(block, 2))
                entries.append(torch.linalg.vector_norm(block, dim=1))
        return torch.stack(tokens), torch.stack(entries)

    def key_grams(self) -> Float[Tensor, "b n key_dim key_dim"]:
        """Return AᵀA for each key, where A is the derivative of the layer output with respect to this key
        alone.

        In key j it is Σ_i Σ_gh ⟨u^g_ij, u^h_ij⟩ q^g_i (q^h_i)ᵀ with u^g_ij = P^g_ij D^g_ij R_g (v_j − O^g_i),
        where D is the derivative of the soft cap.
        """
        dim = self.f.key_dim

        def outer(q: Tensor) -> Tensor:
            return (q[:, None, :, :, None] * q[None, :, :, None]).flatten(-2)

        grams: Tensor = self._key_sums(outer, dim * dim).unflatten(-1, (dim, dim))
        return grams

    def key_entries(self) -> Float[Tensor, "b n key_dim"]:
        """Return the norm of the derivative of the layer output with respect to each entry of each key.

        No whole Gram matrix is formed.
        """
        squares = self._key_sums(lambda q: q[:, None] * q[None], self.f.key_dim)
        return squares.clamp_min(0.0).sqrt()

    def _key_sums(self, pairs: Callable[[Tensor], Tensor], width: int) -> Float[Tensor, "b n _width"]:
        """Return, for each key j, a sum over all queries and pairs of heads, from which the norm of the
        derivative with respect to key j follows.

        The vectors u are those of :meth:`key_grams`. The function ``pairs`` turns the queries (G, n, key_dim)
        of a group into the vectors c^gh_i (G, G, n, width), one for each pair of heads.
        """
        sums = self.q.new_zeros(self.f.kv_heads, self.n, width)
        for b in range(self.f.kv_heads):
            c = pairs(self.q[b])
            values = torch.einsum("nv,rgv->gnr", self.derivative.v[b], self.factor[b])
            means = torch.einsum("gnv,rgv->gnr", self.mean[b], self.factor[b])
            for rows in self._row_blocks(self.group * values.shape[-1]):
                u = (values[:, None] - means[:, rows, None]) * self.slope[b, :, rows, :, None]
                inner = torch.einsum("gijr,hijr->ghij", u, u)
                sums[b] += torch.einsum("ghij,ghik->jk", inner, c[:, :, rows])
        found: Tensor = sums
        return found

    def value_grams(self) -> Float[Tensor, "b n value_dim value_dim"]:
        """Return AᵀA for each value vector, where A is the derivative of the layer output with respect to
        this value alone.
        """
        attended = torch.einsum("bgij,bhij->bghj", self.p, self.p)
        outputs = torch.einsum("brgv,brhw->bghvw", self.factor, self.factor)
        grams: Tensor = torch.einsum("bghj,bghvw->bjvw", attended, outputs)
        return grams

    def _row_blocks(self, width: int) -> list[slice]:
        return row_blocks(1, width, self.n, self.n, self.q.device)[0][1]


def _norms(gram: Float[Tensor, "b n k k"]) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n k"]]:
    """Return the spectral norm and the column norms of each matrix A, given the matrices AᵀA."""
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0).sqrt(), _column_norms(gram)


def _column_norms(gram: Float[Tensor, "b n k k"]) -> Float[Tensor, "b n k"]:
    return gram.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()


class _InOneOperand(LinearOperator):
    """The derivative of the output of a layer with respect to all its keys or all its values, with one linear
    map for each key head.
    """

    def __init__(self, at: _Layer, which: Literal["key", "value"]) -> None:
        f, heads = at.f, at.f.kv_heads
        self.at = at
        self.which = which
        dim = f.key_dim if which == "key" else f.value_dim
        rounding = at.derivative.rounding(heads)
        super().__init__(heads, (at.n, dim), (at.n, at.factor.shape[1]), torch.float64, at.q.device, rounding)

    def _product(self, e: Tensor) -> Tensor:
        d = self.at.derivative
        key, value = (e, torch.zeros_like(d.v)) if self.which == "key" else (torch.zeros_like(d.k), e)
        return self.at.out(d.product(torch.zeros_like(d.q), key, value))

    def _adjoint_product(self, u: Tensor) -> Tensor:
        _, key, value = self.at.derivative.adjoint(self.at.out_adjoint(u))
        return key if self.which == "key" else value
