"""The Jacobian of a map at one long sequence whose tokens are divided among processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from howsmooth.attention import (
    Compose,
    LayerNorm,
    LayerScale,
    Residual,
    RMSNorm,
    Rotary,
    SelfAttention,
    TokenMap,
)
from howsmooth.attention.masks import Visibility
from howsmooth.attention.scaled_dot_product import ScoreFeatures
from howsmooth.distributed.communication import Collectives, Exchange
from howsmooth.distributed.softmax_derivative import SharedSoftmax, shared_softmax
from howsmooth.errors import ArgumentError, HowsmoothError
from howsmooth.jacobian.attention import StreamedAttentionJacobian
from howsmooth.jacobian.closed_form import ComposedJacobian, ResidualJacobian
from howsmooth.jacobian.norm_layers import NormJacobian, ScaleJacobian, norm_jacobian
from howsmooth.spectral import LinearOperator

__all__ = ["SharedMap", "check_shareable", "together"]

T = TypeVar("T")


def check_shareable(f: object) -> None:
    """Raise ArgumentError unless the map ``f`` can be measured at a sequence whose tokens are divided among
    processes.
    """
    match f:
        case SelfAttention() if f.mask is not None or f.score_bias is not None:
            raise ArgumentError(
                "f",
                expected="attention whose order is causal, a window or none, to share it among processes",
                got="a mask" if f.mask is not None else "a score bias",
                remedy="A matrix of n × n entries in every process would be the larger part of the memory.",
            )
        case SelfAttention() | LayerNorm() | RMSNorm() | LayerScale():
            return
        case Residual():
            check_shareable(f.inner)
        case Compose():
            check_shareable(f.outer)
            check_shareable(f.inner)
        case _:
            raise ArgumentError(
                "f",
                expected="SelfAttention, a norm, a LayerScale, or a Residual or Compose of them",
                got=type(f).__name__,
                remedy="Measure it in one process, with howsmooth.local_lipschitz.",
            )


def together(collectives: Collectives, compute: Callable[[], T]) -> T:
    """Run a computation in every process, and raise an error in every process if it fails in one of them.

    If one process alone raised, the others would wait for it forever.
    """
    result, problem = None, None
    try:
        result = compute()
    except HowsmoothError as error:
        problem = error
    said = collectives.all_gather_objects(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, words in enumerate(said):
        if words is not None:
            raise ArgumentError(
                "group",
                expected="a share that every process can take",
                got=f"process {rank}: {words.removesuffix('.')}",
            )
    assert result is not None
    return result


@dataclass(frozen=True)
class SharedMap:
    """The computation of maps and their Jacobians at one long sequence whose tokens are divided among
    processes.

    Parameters
    ----------
    exchange
        The communication between the processes. All processes must call the same methods in the same order.
    heads_together
        Number of key heads whose keys and values are gathered at a time.
    """

    exchange: Exchange
    heads_together: int

    def jacobian(self, f: TokenMap, x: Tensor, dtype: torch.dtype) -> LinearOperator:
        """Return the Jacobian as a linear operator that takes and returns this process's rows, with products
        computed in ``dtype``.

        The map and the tokens are float64.

        All processes compute its products together.

        Raises
        ------
        ArgumentError
            If a norm is not differentiable at a token of some process.

        """
        match f:
            case SelfAttention():
                return self._attention(f, x, dtype)
            case LayerNorm() | RMSNorm():
                return together(self.exchange.collectives, lambda: NormJacobian.at(f, x, dtype))
            case LayerScale():
                return ScaleJacobian(f.weight.to(dtype), x.shape[0], x.shape[1])
            case Residual():
                return ResidualJacobian(self.jacobian(f.inner, x, dtype))
            case Compose():
                outer = self.jacobian(f.outer, self.image(f.inner, x), dtype)
                return ComposedJacobian(outer, self.jacobian(f.inner, x, dtype))
        raise AssertionError(type(f))  # pragma: no cover - check_shareable comes first

    def image(self, f: TokenMap, x: Tensor) -> Tensor:
        """Return this process's rows of the output f(X), given its rows (1, own, d) of the tokens X in
        float64.
        """
        match f:
            case SelfAttention():
                local = self._placed(f)
                core = self._softmax(f, *local.projections(x), torch.float64)
                return local._projected(core.image()[None])
            case Residual():
                return x + self.image(f.inner, x)
            case Compose():
                return self.image(f.outer, self.image(f.inner, x))
            case _:
                return f._forward(x)

    def _attention(self, f: SelfAttention, x: Tensor, dtype: torch.dtype) -> LinearOperator:
        # Without sinks, the rows of P sum to 1, so a value bias changes no derivative. It is left out because
        # adding it would cost the values digits.
        local = self._placed(f if f.sinks is not None else f._rebuilt(value_bias=None))
        for norm, weight, bias in (
            (f.query_norm, f.query, f.query_bias),
            (f.key_norm, f.key, f.key_bias),
        ):
            if norm is not None:
                together(self.exchange.collectives, partial(norm_jacobian, norm, x, weight, bias, dtype))

        def core(q: Tensor, k: Tensor, v: Tensor) -> SharedSoftmax:
            return self._softmax(f, q, k, v, dtype)

        return StreamedAttentionJacobian.at(local, x, dtype, core)

    def _placed(self, f: SelfAttention) -> SelfAttention:
        """Return the attention layer with rotary embeddings for the positions of this process's tokens."""
        if f.rotary is None:
            return f
        shares = self.exchange.shares
        rows = shares.rows(self.exchange.collectives.rank).to(f.device)
        return f._rebuilt(rotary=Rotary(f.rotary.cos[rows], f.rotary.sin[rows]))

    def _softmax(
        self, f: SelfAttention, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype
    ) -> SharedSoftmax:
        n = self.exchange.shares.n
        visibility = Visibility(n, f.causal, f.window)
        features = ScoreFeatures(f.features.softcap, None, f.features.sinks)
        q = q.reshape(f.kv_heads, f.heads // f.kv_heads, *q.shape[-2:])
        return shared_softmax(
            q, k[0], v[0], f.scale, visibility, features, dtype, self.exchange, self.heads_together
        )
