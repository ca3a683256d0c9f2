"""Jacobians in closed form: of attention, norm layers, residual connections and compositions.

The point of linearisation is computed in float64 for every dtype of the products, because in float32 the
rounding of a large score would be an error in the exponent of a probability. Only the products run in the
dtype that the caller asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
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
)
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.compositions import layers
from howsmooth.errors import ArgumentError
from howsmooth.jacobian.attention import attention_jacobians
from howsmooth.jacobian.custom_code_attention import StagedJacobian
from howsmooth.jacobian.norm_layers import NormJacobian, ScaleJacobian
from howsmooth.jacobian.projections import LayerMatrices, projections
from howsmooth.jacobian.rounding_bounds import composed_error, image_off, residual_error
from howsmooth.rounding import MatrixNorms
from howsmooth.spectral import LinearOperator

__all__ = [
    "closed_form_jacobian",
    "closed_form_jacobians",
    "has_closed_form",
    "in_double",
    "runs_members_alone",
]

_Map = TypeVar("_Map", bound=TokenMap)


@dataclass(frozen=True)
class _Form:
    """The settings with which all layers are linearised, and cached norms of matrices for proofs."""

    made: Mapping[torch.dtype, Callable[[SelfAttention], LayerMatrices]]
    weighting: Weighting | None = None
    streamed: bool = False
    allowance: float | None = None
    norms: MatrixNorms = field(default_factory=MatrixNorms)


def has_closed_form(f: Callable[[Tensor], Tensor]) -> bool:
    """Return True if the Jacobian of the map ``f`` is known in closed form."""
    known = SelfAttention | StagedAttention | LayerNorm | RMSNorm | LayerScale
    return all(isinstance(layer, known) for layer in layers(f))


def runs_members_alone(f: Callable[[Tensor], Tensor]) -> bool:
    """Return True if the Jacobian of ``f`` is computed for each sequence apart, so batches save no time."""
    return any(isinstance(layer, StagedAttention) for layer in layers(f))


def closed_form_jacobian(
    f: TokenMap,
    x: Tensor,
    *,
    weighting: Weighting | None = None,
    dtype: torch.dtype | None = None,
    streamed: bool = False,
    allowance: float | None = None,
) -> LinearOperator:
    """Return the Jacobian of the map ``f`` at each sequence of a batch ``x`` (batch, n, d), in closed form.

    With a weighting the operator has the blocks √(a_i/a_j) J_ij. It is the Jacobian at the measure of weights
    a_i on the tokens, between the norms |E|_a² = Σ_i a_i |e_i|² (Definition C.4), and acts on √a_i e_i.

    Parameters
    ----------
    f
        A map for which ``has_closed_form`` is true.
    x
        Tokens (batch, n, d), in the dtype of the map.
    weighting
        Weights and positions of the tokens as atoms of a measure; None for a sequence of tokens.
    dtype
        Dtype of the products; by default that of ``x``.
    streamed
        If True, probabilities are not kept but formed anew in each product, in memory O(n d) instead of
        O(n²). Attention at a measure ignores it.
    allowance
        Relative rounding error that streamed float32 products may have. On a CUDA device it decides how many
        bits the kernels keep: 16 take half the time of 24. None asks for 24.

    Raises
    ------
    ArgumentError
        If an argument does not fit, or the map does not act on measures.
    NonFiniteError
        If an entry √(a_i/a_j) P_ij is out of the range of ``dtype``.

    """
    dtype = dtype or x.dtype
    form = {"weighting": weighting, "streamed": streamed, "allowance": allowance}
    return closed_form_jacobians(f, [x], (dtype,), **form)[0][dtype]


def closed_form_jacobians(
    f: TokenMap, xs: Sequence[Tensor], dtypes: Sequence[torch.dtype], **form: Any
) -> list[dict[torch.dtype, LinearOperator]]:
    """Return the Jacobians of ``f`` in several dtypes at several batches ``xs`` (batch, n, d), whose lengths
    n may differ. The further arguments are those of :func:`closed_form_jacobian`.

    Jacobians of one dtype share their projections, and each batch is linearised once for all dtypes.
    """
    if not has_closed_form(f):
        raise ArgumentError("f", expected="a map with a closed-form Jacobian", got=type(f).__name__)
    for x in xs:
        f.check_length(x.shape[-2])
    double, rows = in_double(f), sum(x.shape[0] * x.shape[1] for x in xs)
    how = _Form(projections(dtypes, rows), **form)
    # Rounding errors are proved for float64 products only, and not at measures or of layers that are code.
    # The tokens count as exact, so the proof begins with an error of zero.
    exact = how.weighting is None and torch.float64 in dtypes and not runs_members_alone(f)
    found = []
    for x in xs:
        tokens = x.double()
        off = tokens.new_zeros(tokens.shape[:-1]) if exact else None
        found.append(_linearise(double, tokens, off, how))
    return [dict(zip(dtypes, operators, strict=True)) for operators in found]


def in_double(f: _Map) -> _Map:
    """Return the map converted to float64, the dtype in which Jacobians are formed. Raise ArgumentError if it
    is on an MPS device, which has no float64.
    """
    if f.device.type == "mps":
        raise ArgumentError(
            "x",
            expected="a tensor on the CPU or a CUDA device",
            got="mps",
            remedy="Use x.cpu(): MPS has no float64.",
        )
    return f if f.dtype == torch.float64 else f.to(dtype=torch.float64)


def _linearise(f: TokenMap, x: Tensor, off: Tensor | None, form: _Form) -> list[LinearOperator]:
    """Linearise a float64 map in each dtype. ``off`` (batch, n) bounds token errors; None: no proof."""
    weighting, dtypes = form.weighting, tuple(form.made)
    match f:
        case SelfAttention():
            return attention_jacobians(
                f, x, form.made, off, form.norms, weighting, streamed=form.streamed, allowance=form.allowance
            )
        case StagedAttention():
            f.refuse_measures(weighting)
            return [StagedJacobian.at(f, x, dtype, streamed=form.streamed) for dtype in dtypes]
        case LayerNorm() | RMSNorm():
            # A norm maps each token by itself, where √(a_i/a_j) is 1: the weighting changes nothing.
            return [NormJacobian.at(f, x, dtype, off) for dtype in dtypes]
        case LayerScale():
            return [ScaleJacobian(f.weight.to(dtype), x.shape[0], x.shape[1]) for dtype in dtypes]
        case Residual():
            return [ResidualJacobian(operator) for operator in _linearise(f.inner, x, off, form)]
        case Compose():
            # The outer Jacobian is taken at the image of the inner map, whose error bound is carried on.
            image = f.inner._forward(x, weighting)
            moved = None if off is None else image_off(f.inner, x, off, form.norms, image)
            outer, inner = _linearise(f.outer, image, moved, form), _linearise(f.inner, x, off, form)
            return [ComposedJacobian(*parts) for parts in zip(outer, inner, strict=True)]
    raise AssertionError(type(f))  # pragma: no cover - the caller has asked has_closed_form


class ResidualJacobian(LinearOperator):
    """The Jacobian I + J of a residual connection, where J is the Jacobian of the residual branch."""

    def __init__(self, inner: LinearOperator) -> None:
        proved = None if inner.proved is None else residual_error(inner.proved)
        shapes, placed = (inner.in_shape, inner.out_shape), (inner.dtype, inner.device)
        super().__init__(inner.batch, *shapes, *placed, inner.rounding, proved)
        self.inner = inner

    def _product(self, e: Tensor) -> Tensor:
        return e + self.inner.product(e)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return u + self.inner.adjoint_product(u)

    def select(self, members: Tensor) -> ResidualJacobian:
        """Return the Jacobians at the chosen sequences of the batch."""
        return ResidualJacobian(self.inner.select(members))


class ComposedJacobian(LinearOperator):
    """The Jacobian of a composition of two maps, which is the product of their Jacobians."""

    def __init__(self, outer: LinearOperator, inner: LinearOperator) -> None:
        proved = None
        if outer.proved is not None and inner.proved is not None:
            proved = composed_error(outer.proved, inner.proved)
        shapes, placed = (inner.in_shape, outer.out_shape), (inner.dtype, inner.device)
        super().__init__(inner.batch, *shapes, *placed, inner.rounding + outer.rounding, proved)
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
        """Return the Jacobians at the chosen sequences of the batch."""
        return ComposedJacobian(self.outer.select(members), self.inner.select(members))
