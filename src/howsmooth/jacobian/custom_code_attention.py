"""The Jacobian of an attention layer that is written as PyTorch code around calls of softmax attention.

The softmax attentions are differentiated in closed form, and PyTorch differentiates the code around them.

The layer is run once with each softmax replaced by an autograd function. The value of this function is the
output of the softmax at the point of linearisation, computed in float64 and rounded once; its derivative and
its adjoint are in closed form. The graph of the run is kept, and Jᵀ u is one backward pass through it. Jᵀ u
is linear in u, so J e is one backward pass through the graph of Jᵀ u. Neither product runs the layer again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from howsmooth.attention.custom_code_attention import SoftmaxCore, StagedAttention
from howsmooth.errors import ArgumentError, DerivativeError, NonFiniteError
from howsmooth.jacobian.autodiff import (
    MULTIPLES,
    Linearisation,
    allowance_for_rounding,
    as_derivative_errors,
    check_adjoint,
    check_against_differences,
    moved_by_rounding,
    one_backend,
)
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.softmax import SoftmaxDerivative, softmax_derivative
from howsmooth.jacobian.streamed_softmax import StreamedDerivative, streamed_derivative
from howsmooth.spectral import LinearOperator

__all__ = ["StagedJacobian"]


class StagedJacobian(LinearOperator):
    """The Jacobian of a layer written as PyTorch code, with one autograd graph for each sequence."""

    def __init__(self, members: tuple[_Member, ...]) -> None:
        first = members[0]
        rounding = torch.stack([member.rounding for member in members])
        shapes = tuple(first.x.shape), tuple(first.kept.y.shape)
        super().__init__(len(members), *shapes, first.x.dtype, first.x.device, rounding)
        self.members = members

    @classmethod
    def at(
        cls, f: StagedAttention, x: Tensor, dtype: torch.dtype, *, streamed: bool = False
    ) -> StagedJacobian:
        """Return the Jacobian of a float64 layer at float64 tokens (batch, n, d), with products in ``dtype``.

        If ``streamed``, the softmaxes keep no probabilities. Raise ArgumentError if the layer breaks its
        contract, DerivativeError if its derivatives contradict each other or its values, NonFiniteError if
        an output is not finite.
        """
        rounded = f.to(dtype=dtype)
        return cls(tuple(_Member(f, rounded, member, dtype, streamed=streamed) for member in x))

    def _product(self, e: Tensor) -> Tensor:
        return torch.stack([member.product(part) for member, part in zip(self.members, e, strict=True)])

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return torch.stack([member.adjoint(part) for member, part in zip(self.members, u, strict=True)])

    def select(self, members: Tensor) -> StagedJacobian:
        """Return the Jacobians at the chosen sequences of the batch."""
        return StagedJacobian(tuple(self.members[i] for i in members.tolist()))


class _Member:
    """The Jacobian of a float64 layer ``f`` at one sequence; ``rounded`` is its copy in ``dtype``."""

    def __init__(
        self, f: StagedAttention, rounded: StagedAttention, x: Tensor, dtype: torch.dtype, *, streamed: bool
    ) -> None:
        cores: list[_CoreAt] = []

        def exact(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o = f.cores[i].attend(q, k, v)
            cores.append(_CoreAt.at(f.cores[i], q, k, v, o, dtype, streamed=streamed))
            return o

        def core(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o: Tensor = _Linearised.apply(q, k, v, cores[i])  # type: ignore[no-untyped-call]
            return o

        def tangent(x: Tensor, e: Tensor) -> Tensor:
            with torch.no_grad(), one_backend(), as_derivative_errors("forward"), forward_ad.dual_level():
                y, moved = forward_ad.unpack_dual(rounded.run(forward_ad.make_dual(x, e), core))
            return torch.zeros_like(y) if moved is None else moved

        with torch.no_grad(), one_backend():
            y = f.run(x, exact)
        if not bool(torch.isfinite(y).all()):
            raise NonFiniteError("f", expected="finite outputs at x", got="NaN or infinity")
        self.x, self.cores = x.detach().to(dtype), cores
        self.forward_product = tangent
        with as_derivative_errors("reverse"):
            # PyTorch refuses in-place changes of a leaf. A layer may change its input, so it gets a copy.
            self.kept = Linearisation(lambda x: rounded.run(x * 1, core), self.x, math.inf, forward=tangent)
        own = torch.stack([core.derivative.rounding(1).amax() for core in cores]).amax()
        self.rounding = self._checked(rounded, y, own)

    def product(self, e: Tensor) -> Tensor:
        with one_backend(), as_derivative_errors("reverse"):
            return self.kept.product(e)

    def adjoint(self, u: Tensor) -> Tensor:
        with one_backend(), as_derivative_errors("reverse"):
            return self.kept.adjoint_product(u)

    def _checked(self, f: StagedAttention, y: Tensor, own: Tensor) -> Tensor:
        """Judge the derivatives; the estimated rounding includes the error ``own`` of the softmaxes."""
        dtype = self.x.dtype
        # The run with the graph must reproduce the float64 run, up to rounding.
        drift = (self.kept.y.detach().double() - y).norm()
        if self.kept.y.shape != y.shape or bool(drift > 1e4 * torch.finfo(dtype).eps * y.norm()):
            raise ArgumentError(
                "f",
                expected="the same output for the same input",
                got="two different outputs",
                remedy="Turn off dropout and other randomness, for instance with eval().",
            )
        generator = torch.Generator().manual_seed(0)
        e = torch.randn(self.x.shape, generator=generator, dtype=torch.float64).to(self.x)
        u = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(self.x)
        # Forward mode runs the layer with tangents, by other formulas than the two graphs: it is the judge.
        je = self.forward_product(self.x, e)
        jtu = self.adjoint(u)
        moves = zip(MULTIPLES, moved_by_rounding(self.x), strict=True)
        forward = allowance_for_rounding(
            (self.forward_product(x, c * e)[None] / c for c, x in moves), je[None]
        )
        reverse = allowance_for_rounding((self.adjoint(c * u)[None] / c for c in MULTIPLES), jtu[None])
        check_adjoint(e, je, u, jtu, forward, reverse)
        # Without a valid graph of the adjoint, products are computed in forward mode.
        if not self._twice_gives(e, je):
            self.kept.twice = False
        rounding = own + torch.maximum(forward, reverse)[0]

        def value(x: Tensor) -> Tensor:
            with torch.no_grad(), one_backend():
                return f._forward(x)

        product = partial(self.forward_product, self.x)
        check_against_differences(value, self.x, value(self.x), e, product, float(rounding), je)
        return rounding

    def _twice_gives(self, e: Tensor, je: Tensor) -> bool:
        try:
            off = (self.product(e) - je).norm()
        except DerivativeError:  # an operation in the layer has no second derivative
            return False
        return bool(off <= 1e4 * torch.finfo(e.dtype).eps * je.norm())


@dataclass(frozen=True, eq=False)
class _CoreAt:
    """The output and the derivative of one softmax attention at given queries, keys and values. Products use
    the tensor shapes of the layer, and tangents of unscaled queries.
    """

    output: Tensor
    derivative: SoftmaxDerivative | StreamedDerivative
    scale: float

    @classmethod
    def at(
        cls,
        core: SoftmaxCore,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dtype: torch.dtype,
        *,
        streamed: bool,
    ) -> _CoreAt:
        q, k, v = (t.detach().double() for t in (q, k, v))
        visible, features = core.rules(q, k)
        # All leading axes of the layer are folded into one batch axis.
        grouped = q.unflatten(-3, (k.shape[-3], -1))
        operands = Operands.of_heads(
            grouped.reshape(-1, *grouped.shape[-4:]),
            k.reshape(-1, *k.shape[-3:]),
            v.reshape(-1, *v.shape[-3:]),
            core.scale,
            features,
        )
        derivative: SoftmaxDerivative | StreamedDerivative
        if streamed:
            derivative = streamed_derivative(operands, visible, dtype)
        else:
            derivative = softmax_derivative(operands, visible.whole(q.device), dtype)
        return cls(o.detach().to(dtype, copy=True), derivative, core.scale)

    def product(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        rows = self.derivative.k.shape[0]
        dq, dk, dv = (t.to(self.output.dtype) for t in (dq, dk, dv))
        # The derivative is in scaled queries, the layer in unscaled ones.
        dq = (self.scale * dq).reshape(rows, -1, dq.shape[-1])
        dk, dv = (t.reshape(rows, *t.shape[-2:]) for t in (dk, dv))
        return self.derivative.product(dq, dk, dv).reshape(self.output.shape)

    def adjoint(self, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.derivative.k.shape[0]
        do = do.to(self.output.dtype).reshape(rows, -1, do.shape[-1])
        dq, dk, dv = self.derivative.adjoint(do)
        return self.scale * dq, dk, dv


class _Linearised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: _CoreAt) -> Tensor:
        ctx.core = core
        ctx.shapes = (q.shape, k.shape, v.shape)
        ctx.dtypes = (q.dtype, k.dtype, v.dtype)
        if (*q.shape[:-1], v.shape[-1]) != core.output.shape:
            raise DerivativeError("f: its softmaxes have other shapes in another run of the same input.")
        # A copy, because PyTorch makes the result part of the graph and the layer may change it in place.
        return core.output.to(v.dtype, copy=True)

    @staticmethod
    def jvp(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, _: None) -> Tensor:
        core: _CoreAt = ctx.core
        return core.product(dq, dk, dv).to(ctx.dtypes[2])

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        parts: tuple[Tensor, Tensor, Tensor] = _Transposed.apply(  # type: ignore[no-untyped-call]
            do, ctx.core, ctx.shapes, ctx.dtypes
        )
        return *parts, None


class _Transposed(torch.autograd.Function):
    """The adjoint of the derivative of a softmax, as an autograd function with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, do: Tensor, core: _CoreAt, shapes: Any, dtypes: Any) -> tuple[Tensor, ...]:
        ctx.core = core
        ctx.dtype = do.dtype
        parts = zip(core.adjoint(do), shapes, dtypes, strict=True)
        return tuple(part.reshape(shape).to(dtype) for part, shape, dtype in parts)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None]:
        core: _CoreAt = ctx.core
        return core.product(dq, dk, dv).to(ctx.dtype), None, None, None
