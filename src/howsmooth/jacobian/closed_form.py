"""Jacobians of this library's own maps in closed form.

The point of linearisation is evaluated in float64 whatever the dtype of the products: in float32 the
rounding of a large score would be an error in the exponent of every probability. Only the products
run in the dtype that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import (
    Compose,
    LayerNorm,
    LayerScale,
    Residual,
    RMSNorm,
    SelfAttention,
    StagedAttention,
    TokenMap,
    Weighting,
)
from howsmooth.attention.core import attention_scores, cap_slope
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.jacobian.norms import NormJacobian, ScaleJacobian, norm_jacobian
from howsmooth.jacobian.operands import Operands
from howsmooth.jacobian.projections import Projection, Projections
from howsmooth.jacobian.proved import (
    attention_error,
    composed_error,
    image_off,
    provable,
    residual_error,
)
from howsmooth.jacobian.softmax import (
    SoftmaxDerivative,
    WeightedSoftmaxDerivative,
    softmax_derivative,
)
from howsmooth.jacobian.staged import StagedJacobian
from howsmooth.jacobian.streamed_attention import StreamedAttentionJacobian
from howsmooth.roundoff import MatrixNorms
from howsmooth.spectral import LinearOperator, ProductError

__all__ = [
    "closed_form_jacobian",
    "closed_form_jacobians",
    "has_closed_form",
    "in_double",
    "runs_members_alone",
]


@dataclass(frozen=True)
class _Form:
    """Whether products form probabilities anew, what rounding these may have; and norms of matrices."""

    streamed: bool = False
    allowance: float | None = None
    norms: MatrixNorms = field(default_factory=MatrixNorms)


def has_closed_form(f: Callable[[Tensor], Tensor]) -> bool:
    """Tell whether :func:`closed_form_jacobian` knows the map ``f``."""
    if isinstance(f, Residual):
        return has_closed_form(f.inner)
    if isinstance(f, Compose):
        return has_closed_form(f.outer) and has_closed_form(f.inner)
    return isinstance(f, SelfAttention | StagedAttention | LayerNorm | RMSNorm | LayerScale)


def runs_members_alone(f: Callable[[Tensor], Tensor]) -> bool:
    """Tell whether members of a batch have nothing in common, so that together they only take more memory."""
    match f:
        case Residual():
            return runs_members_alone(f.inner)
        case Compose():
            return runs_members_alone(f.outer) or runs_members_alone(f.inner)
        case _:
            return isinstance(f, StagedAttention)


def closed_form_jacobian(
    f: TokenMap,
    x: Tensor,
    *,
    weighting: Weighting | None = None,
    dtype: torch.dtype | None = None,
    streamed: bool = False,
    allowance: float | None = None,
) -> LinearOperator:
    """Return the Jacobian of ``f`` at each member of ``x`` (batch, n, d).

    With a weighting it is the operator of the blocks √(a_i/a_j) J_ij: the Jacobian at the measure of weights
    a_i on the tokens, between the norms |E|_a² = Σ_i a_i |e_i|² (Definition C.4). It acts on √a_i e_i.

    Parameters
    ----------
    f
        A map for which :func:`has_closed_form` is true.
    x
        Tokens (batch, n, d), in the dtype of the map.
    weighting
        Weights and positions that make each member's tokens the atoms of a measure.
    dtype
        Dtype of the products, float32 or float64; that of ``x`` by default.
    streamed
        Keep no probabilities but form them in each product anew: memory O(n d), not n². Not at measures.
    allowance
        Relative rounding that streamed float32 products may have. The kernels of a CUDA device take half the
        time with 16 bits of 24, and do without scores in float64, where it permits. None leaves it to them.

    Raises
    ------
    ArgumentError
        If an argument does not fit, or the map does not act on measures.
    NonFiniteError
        If an entry √(a_i/a_j) P_ij is beyond the range of the products' dtype.

    """
    dtype = dtype or x.dtype
    (of_dtype,) = _linearised(f, [x], weighting, (dtype,), _Form(streamed, allowance))
    return of_dtype[dtype]


def closed_form_jacobians(
    f: TokenMap, xs: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> list[dict[torch.dtype, LinearOperator]]:
    """Return the Jacobian of ``f`` at each of some batches (batch, n, d), n of its own, in each dtype.

    As :func:`closed_form_jacobian`. Those in one dtype share what they hold of the parameters, and the map is
    linearised once for all dtypes.
    """
    return _linearised(f, xs, None, dtypes, _Form())


def _linearised(
    f: TokenMap,
    xs: Sequence[Tensor],
    weighting: Weighting | None,
    dtypes: Sequence[torch.dtype],
    form: _Form,
) -> list[dict[torch.dtype, LinearOperator]]:
    if not has_closed_form(f):
        raise ArgumentError("f", expected="a map with a closed-form Jacobian", got=type(f).__name__)
    for x in xs:
        f.check_length(x.shape[-2])
    double, rows = in_double(f), sum(x.shape[0] * x.shape[1] for x in xs)
    made = [Projections(dtype, rows) for dtype in dtypes]
    # Tokens are exact as they are given; at measures, and for products in float32, nothing is proved.
    exact = weighting is None and torch.float64 in dtypes and provable(f)
    found = []
    for x in xs:
        tokens = x.double()
        off = tokens.new_zeros(tokens.shape[:-1]) if exact else None
        found.append(_linearise(double, tokens, off, weighting, made, form))
    return [dict(zip(dtypes, operators, strict=True)) for operators in found]


def in_double(f: TokenMap) -> TokenMap:
    """Return the map in float64, in which every linearisation is made.

    Raises
    ------
    ArgumentError
        If its device has no float64.

    """
    if f.device.type == "mps":
        raise ArgumentError(
            "x",
            expected="a tensor on the CPU or a CUDA device",
            got="mps",
            remedy="Use x.cpu(): MPS has no float64.",
        )
    return f if f.dtype == torch.float64 else f.to(dtype=torch.float64)


def _linearise(
    f: TokenMap,
    x: Tensor,
    off: Tensor | None,
    weighting: Weighting | None,
    made: Sequence[Projections],
    form: _Form,
) -> list[LinearOperator]:
    """Linearise a float64 map at float64 tokens; products in the dtype of each of the projections.

    ``off`` bounds how far each token may be from where exact arithmetic has it; without it nothing is proved.
    """
    dtypes = [projections.dtype for projections in made]
    match f:
        case SelfAttention() if form.streamed and weighting is None:
            return [
                StreamedAttentionJacobian.at(f, x, dtype, off=off, norms=form.norms, allowance=form.allowance)
                for dtype in dtypes
            ]
        case SelfAttention():
            return AttentionJacobian.at(f, x, off, weighting, made, form.norms)
        case StagedAttention():
            f.refuse_measures(weighting)
            return [StagedJacobian.at(f, x, dtype, streamed=form.streamed) for dtype in dtypes]
        case LayerNorm() | RMSNorm():
            # Token by token: both roots of a weight cancel.
            return [NormJacobian.at(f, x, dtype, off) for dtype in dtypes]
        case LayerScale():
            return [ScaleJacobian(f.weight.to(dtype), x.shape[0], x.shape[1]) for dtype in dtypes]
        case Residual():
            inner = _linearise(f.inner, x, off, weighting, made, form)
            return [ResidualJacobian(operator) for operator in inner]
        case Compose():
            image = f.inner._forward(x, weighting)
            moved = None if off is None else image_off(f.inner, x, off, form.norms, image)
            outer = _linearise(f.outer, image, moved, weighting, made, form)
            inner = _linearise(f.inner, x, off, weighting, made, form)
            return [ComposedJacobian(*parts) for parts in zip(outer, inner, strict=True)]
        case _:  # pragma: no cover - has_closed_form was asked first
            raise ArgumentError("f", expected="a map with a closed-form Jacobian", got=type(f).__name__)


class AttentionJacobian(LinearOperator):
    """Jacobian of multi-head self-attention: projections, softmax derivative, output projection."""

    def __init__(
        self,
        attention: SelfAttention,
        projection: Projection,
        core: SoftmaxDerivative | WeightedSoftmaxDerivative,
        norms: tuple[NormJacobian | None, NormJacobian | None],
        proved: ProductError | None = None,
    ) -> None:
        n, batch = core.k.shape[1], core.k.shape[0] // attention.kv_heads
        super().__init__(
            batch,
            (n, attention.d),
            (n, attention.d_out),
            projection.weight.dtype,
            projection.weight.device,
            sum((norm.rounding for norm in norms if norm is not None), core.rounding(batch)),
            proved,
        )
        self.attention = attention
        self.projection = projection
        self.core = core
        self.norms = norms

    @classmethod
    def at(
        cls,
        f: SelfAttention,
        x: Tensor,
        off: Tensor | None,
        weighting: Weighting | None,
        made: Sequence[Projections],
        norms: MatrixNorms,
    ) -> list[LinearOperator]:
        """Linearise float64 attention at float64 tokens (batch, n, d), or at a measure on them."""
        visible = f.visible_keys(x.shape[1], weighting)
        operands = Operands.of_tokens(f, x)

        def in_dtype(projections: Projections) -> AttentionJacobian:
            dtype = projections.dtype
            of_rows = (
                norm_jacobian(f.query_norm, x, f.query, f.query_bias, dtype),
                norm_jacobian(f.key_norm, x, f.key, f.key_bias, dtype),
            )
            core = (
                softmax_derivative(operands, visible, dtype)
                if weighting is None
                else _weighted_softmax_derivative(operands, visible, weighting, dtype)
            )
            proved = None
            if off is not None and isinstance(core, SoftmaxDerivative) and core.moments is not None:
                proved = attention_error(f, x, off, operands, core.moments, core.mean, norms)
            return cls(f, projections.of(f), core, of_rows, proved)

        return [in_dtype(projections) for projections in made]

    def _product(self, e: Tensor) -> Tensor:
        return self.projection.out(self.heads(self.projection.into(e)))

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self.projection.into_adjoint(self.heads_adjoint(self.projection.out_adjoint(u)))

    def _energy_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        energy, through = self.projection.through(self.heads(self.projection.into(e)))
        return energy.sum(dim=1), self.projection.into_adjoint(self.heads_adjoint(through))

    def heads(self, rows: Float[Tensor, "batch n rows"]) -> Float[Tensor, "batch n out"]:
        """Return the tangent of all heads, side by side, for tangents of the projections, side by side."""
        f, (b, n, _) = self.attention, rows.shape
        q_rows, kv_rows = f.heads * f.key_dim, f.kv_heads * f.key_dim
        dq, dk, dv = rows.split((q_rows, kv_rows, f.kv_heads * f.value_dim), dim=-1)
        query_norm, key_norm = self.norms
        if query_norm is not None:
            dq = query_norm.product(dq.reshape(b, *query_norm.in_shape))
        if key_norm is not None:
            dk = key_norm.product(dk.reshape(b, *key_norm.in_shape))
        dq = dq.reshape(b, n, f.heads, f.key_dim).transpose(1, 2)
        dk = dk.reshape(b, n, f.kv_heads, f.key_dim).transpose(1, 2)
        dv = dv.view(b, n, f.kv_heads, f.value_dim).transpose(1, 2)
        rotary = self.projection.rotary
        if rotary is not None:
            dq, dk = rotary.rotate(dq), rotary.rotate(dk)
        bh = b * f.kv_heads
        dk, dv = dk.reshape(bh, n, f.key_dim), dv.reshape(bh, n, f.value_dim)
        do = self.core.product(dq.reshape(bh, -1, f.key_dim), dk, dv)
        return do.view(b, f.heads, n, f.value_dim).transpose(1, 2).reshape(b, n, -1)

    def heads_adjoint(self, heads: Float[Tensor, "batch n out"]) -> Float[Tensor, "batch n rows"]:
        """Return the adjoint of :meth:`heads`."""
        f, (b, n, _) = self.attention, heads.shape
        do = heads.view(b, n, f.heads, f.value_dim).transpose(1, 2)
        dq, dk, dv = self.core.adjoint(do.reshape(b * f.kv_heads, -1, f.value_dim))
        dq = dq.view(b, f.heads, n, f.key_dim)
        dk, dv = (t.unflatten(0, (b, f.kv_heads)) for t in (dk, dv))
        rotary = self.projection.rotary
        if rotary is not None:
            dq, dk = rotary.rotate_adjoint(dq), rotary.rotate_adjoint(dk)
        parts = [part.transpose(1, 2).reshape(b, n, -1) for part in (dq, dk, dv)]
        for i, norm in enumerate(self.norms):
            if norm is not None:  # queries, then keys
                parts[i] = norm.adjoint_product(parts[i].reshape(b, *norm.in_shape)).reshape(b, n, -1)
        return torch.cat(parts, dim=-1)

    def select(self, members: Tensor) -> AttentionJacobian:
        """Return the operator of some members."""
        kv_heads = self.attention.kv_heads
        heads = torch.arange(kv_heads, device=members.device)
        rows = (members[:, None] * kv_heads + heads).flatten().to(self.device)
        query_norm, key_norm = (None if norm is None else norm.select(members) for norm in self.norms)
        core = self.core.select(rows)
        proved = None if self.proved is None else self.proved.select(members)
        return AttentionJacobian(self.attention, self.projection, core, (query_norm, key_norm), proved)


def _weighted_softmax_derivative(
    operands: Operands, visible: Tensor | None, weighting: Weighting, dtype: torch.dtype
) -> WeightedSoftmaxDerivative:
    # A shift of all keys is one of each row of scores, which the softmax forgets: centred, they round less.
    features = operands.features
    scores = attention_scores(operands.q, operands.k, 1.0, visible, weighting.log_weights, features)
    log_p = torch.log_softmax(scores, dim=-1)
    half = weighting.log_weights / 2
    tilted = (log_p + (half[:, None] - half)).exp().flatten(2, 3).flatten(0, 1).to(dtype)
    if not bool(torch.isfinite(tilted).all()):
        largest = float((log_p + (half[:, None] - half)).max())
        raise NonFiniteError(
            "f",
            expected=f"weighted probabilities √(a_i/a_j) P_ij in the range of {dtype}",
            got=f"one of about exp({largest:.6g})",
            remedy="The constant is of that size. Take smaller tokens or weights nearer to each other.",
        )
    p = log_p.exp().flatten(2, 3).flatten(0, 1)
    q, k, v = operands.q.flatten(2, 3).flatten(0, 1), operands.k.flatten(0, 1), operands.v.flatten(0, 1)
    log_range = float(weighting.log_weights.abs().max())
    mean, slope, tilted_slope = p @ v, p, tilted
    if features.softcap is not None:
        factor = cap_slope(q @ k.mT, features.softcap)
        slope, tilted_slope = p * factor, (tilted * factor).to(dtype)
    q, k, v, slope, mean = (t.to(dtype) for t in (q, k, v, slope, mean))
    return WeightedSoftmaxDerivative(q, k, v, slope, tilted, tilted_slope, mean, log_range)


class ResidualJacobian(LinearOperator):
    """I + J."""

    def __init__(self, inner: LinearOperator) -> None:
        super().__init__(
            inner.batch,
            inner.in_shape,
            inner.out_shape,
            inner.dtype,
            inner.device,
            inner.rounding,
            None if inner.proved is None else residual_error(inner.proved),
        )
        self.inner = inner

    def _product(self, e: Tensor) -> Tensor:
        return e + self.inner.product(e)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return u + self.inner.adjoint_product(u)

    def select(self, members: Tensor) -> ResidualJacobian:
        """Return the operator of some members."""
        return ResidualJacobian(self.inner.select(members))


class ComposedJacobian(LinearOperator):
    """The product of two Jacobians, by the chain rule."""

    def __init__(self, outer: LinearOperator, inner: LinearOperator) -> None:
        super().__init__(
            inner.batch,
            inner.in_shape,
            outer.out_shape,
            inner.dtype,
            inner.device,
            inner.rounding + outer.rounding,
            None
            if outer.proved is None or inner.proved is None
            else composed_error(outer.proved, inner.proved),
        )
        self.outer = outer
        self.inner = inner

    def _product(self, e: Tensor) -> Tensor:
        return self.outer.product(self.inner.product(e))

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self.inner.adjoint_product(self.outer.adjoint_product(u))

    def _gram_product(self, e: Tensor) -> tuple[Tensor, Tensor]:
        image, gram = self.outer.gram_product(self.inner.product(e))
        return image, self.inner.adjoint_product(gram)

    def select(self, members: Tensor) -> ComposedJacobian:
        """Return the operator of some members."""
        return ComposedJacobian(self.outer.select(members), self.inner.select(members))
