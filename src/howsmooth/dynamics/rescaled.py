"""Rescaled tokens z(t) = e^{−tV} x(t): what clusters where the tokens themselves run away.

Geshkovski, Letrouit, Polyanskiy, Rigollet, *The emergence of clusters in self-attention dynamics*,
NeurIPS 2023. The equation of z, and where it is defined: docs/theory/growth.md.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import SelfAttention, Weighting
from howsmooth.attention.map import as_parameter, check_tokens
from howsmooth.attention.plain_scores import require_plain_scores
from howsmooth.dynamics.fields import Field, Velocity
from howsmooth.dynamics.trajectory import Trajectory
from howsmooth.errors import ArgumentError
from howsmooth.measures import DiscreteMeasure

__all__ = ["Rescaled", "rescaled", "value_matrix"]

# Heads commute with V up to this part of their size.
_COMMUTE = 1e-6


class Rescaled(Field):
    """The velocity of z(t) = e^{−tV} x(t), x' = f(x), integrated without ever forming x.

    z_i' = Σ_h W_h (Σ_j P^h_ij z_j − z_i) + e^{−tV} c, with W_h = O_h V_h the value and output matrix of head
    h, V = Σ_h W_h, c the constant that value and output biases add, and P^h the probabilities of the tokens
    x = e^{tV} z. At t = 0, z = x.

    Parameters
    ----------
    attention
        Self-attention with d_out = d, causal or not, without rotary positions, each of whose W_h commutes
        with V; one head always does.

    Raises
    ------
    ArgumentError
        If the attention is not of that kind.

    Notes
    -----
    The scores grow as e^{2λt}, λ the largest real part of an eigenvalue of V. The growth is kept apart as one
    factor, so that z is right for as long as its own numbers are. Beyond 1/ε that softmax is the maximum, and
    which of two tokens it takes whose scores agree to ε is up to rounding, here as in the flow of x.

    """

    def __init__(self, attention: object) -> None:
        if not isinstance(attention, SelfAttention) or attention.rotary is not None:
            got = "rotary positions" if isinstance(attention, SelfAttention) else type(attention).__name__
            raise ArgumentError("attention", expected="self-attention without rotary positions", got=got)
        require_plain_scores(attention, "rescaled tokens")
        heads = _head_matrices(attention)
        self.attention = attention
        self.value = heads.sum(dim=0)
        worst = max(float(torch.linalg.matrix_norm(w @ self.value - self.value @ w, 2)) for w in heads)
        size = float(torch.linalg.matrix_norm(self.value, 2)) * float(
            torch.linalg.matrix_norm(heads, 2).max()
        )
        if worst > _COMMUTE * size:
            raise ArgumentError(
                "attention",
                expected="heads whose W_h = O_h V_h commute with their sum V",
                got=f"a commutator of {worst / size:.2g} times their size",
                remedy="Rescale the trajectory of the tokens instead: rescaled(flow(...), attention).",
            )
        self.rate = max(0.0, float(torch.linalg.eigvals(self.value).real.max()))
        alone = attention._rebuilt(causal=False, mask=None)
        self.shift = alone(self.value.new_zeros(1, attention.d))[0]
        self._limit = 0.4 * math.log(torch.finfo(attention.dtype).max)

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError unless the attention takes ``x``."""
        check_tokens(x, self.attention)

    def attention_at(self, t: float) -> SelfAttention:
        """Return the attention by which rescaled tokens see each other at time t, without c."""
        f = self.attention
        growth = torch.linalg.matrix_exp(
            t * (self.value - self.rate * torch.eye(f.d, dtype=f.dtype, device=f.device))
        )
        bias = None if f.query_bias is None else math.exp(-self.rate * t) * f.query_bias
        return f._rebuilt(
            query=f.query @ growth,
            key=f.key @ growth,
            query_bias=bias,
            key_bias=None,
            value_bias=None,
            output_bias=None,
            scale=f.scale * math.exp(min(2 * self.rate * t, self._limit)),
        )

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the velocity of z."""
        return lambda t, z: self._velocity(float(t), z, weighting)

    def _velocity(self, t: float, z: Tensor, weighting: Weighting | None) -> Tensor:
        seen = self.attention_at(t)._forward(z, weighting)
        moved: Tensor = seen - z @ self.value.mT
        shift: Tensor = torch.linalg.matrix_exp(-t * self.value) @ self.shift
        return moved + shift

    def describe(self) -> str:
        """Return the words of the attention, and that tokens are rescaled."""
        return f"{self.attention.describe()}, in rescaled tokens"


def rescaled(trajectory: Trajectory, value: Tensor | SelfAttention) -> Trajectory:
    """Return the trajectory of z(t) = e^{−tV} x(t).

    Parameters
    ----------
    trajectory
        Of tokens, or of a discrete measure.
    value
        V, (d, d), or attention, of which it is :func:`value_matrix`.

    Raises
    ------
    ArgumentError
        If the trajectory has no points, or V does not fit them.

    """
    points = trajectory.points
    v = value_matrix(value) if isinstance(value, SelfAttention) else value
    v = as_parameter("value", v, (points.shape[-1],) * 2, like=points)
    moved = torch.stack(
        [
            x @ torch.linalg.matrix_exp(-t * v).mT
            for t, x in zip(trajectory.times.tolist(), points, strict=True)
        ]
    )
    states: Tensor | tuple[DiscreteMeasure, ...] = moved
    if not isinstance(trajectory.states, Tensor):
        weightings = [state.weighted_tokens()[1] for state in trajectory.states]
        states = tuple(
            DiscreteMeasure(z, log_weights=w.log_weights, positions=w.positions)
            for z, w in zip(moved, weightings, strict=True)
        )
    return replace(
        trajectory, states=states, error=None, drift=None, field=f"{trajectory.field}, tokens rescaled"
    )


def value_matrix(attention: SelfAttention) -> Float[Tensor, "d d"]:
    """Return V = Σ_h O_h V_h, by which attention moves tokens that are all equal (biases apart).

    Raises
    ------
    ArgumentError
        If d_out is not d, or there are sinks.

    """
    return _head_matrices(attention).sum(dim=0)


def _head_matrices(attention: SelfAttention) -> Float[Tensor, "heads d d"]:
    """Return W_h = O_h V_h of each head."""
    f = attention
    if f.sinks is not None:
        raise ArgumentError("attention", expected="rows of P that sum to one", got="sinks")
    if f.d_out != f.d:
        raise ArgumentError(
            "attention", expected="attention with d_out = d", got=f"d = {f.d}, d_out = {f.d_out}"
        )
    value = f.value.repeat_interleave(f.heads // f.kv_heads, dim=0)
    output = torch.eye(f.d, dtype=f.dtype, device=f.device) if f.output is None else f.output
    heads: Tensor = output.unflatten(1, (f.heads, f.value_dim)).movedim(1, 0) @ value
    return heads
