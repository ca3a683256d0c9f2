"""Rescaled tokens z(t) = e^{−tV} x(t) with the value matrix V, which can form clusters while the tokens x(t)
of a flow diverge.

Source: Geshkovski, Letrouit, Polyanskiy, Rigollet, *The emergence of clusters in self-attention dynamics*,
NeurIPS 2023. The documentation page "Growth along a flow, clusters, rescaled tokens" derives the equation of
z and says where it is defined.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import as_parameter, check_tokens
from howsmooth.attention.theorem_preconditions import require_plain_scores
from howsmooth.dynamics.trajectory import Trajectory
from howsmooth.dynamics.velocity_fields import Field, Velocity
from howsmooth.errors import ArgumentError
from howsmooth.measures import DiscreteMeasure

__all__ = ["Rescaled", "rescaled", "value_matrix"]

# Heads count as commuting with V if the commutator is at most this fraction of their norms' product.
_COMMUTE = 1e-6


class Rescaled(Field):
    """The velocity field of the rescaled tokens z(t) = e^{−tV} x(t), where the tokens x(t) flow through
    attention with the value matrix V.

    The velocity is z_i' = Σ_h W_h (Σ_j P^h_ij z_j − z_i) + e^{−tV} c. Here W_h = O_h V_h is the product of
    the output and value matrices of head h, V = Σ_h W_h, c is the sum of the value and output biases'
    contributions, and P^h are the attention probabilities at the tokens x = e^{tV} z. At t = 0, z = x.

    Parameters
    ----------
    attention
        Self-attention with d_out = d, causal or not, without rotary positions. Every W_h must commute with V,
        which always holds for a single head.

    Raises
    ------
    ArgumentError
        If ``attention`` does not meet these conditions.

    Notes
    -----
    The scores grow like e^{2λt}, where λ is the largest real part of an eigenvalue of V. This growth is kept
    as a separate scalar factor, so large scores do not reduce the accuracy of z. Once the scores exceed 1/ε
    (ε is the machine epsilon), the softmax is in effect a maximum. If two scores then agree up to ε, rounding
    decides which token is taken, as in the flow of x.

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
        """Raise ArgumentError unless the attention layer accepts the tokens ``x``."""
        check_tokens(x, self.attention)

    def attention_at(self, t: float) -> SelfAttention:
        """Return the attention layer that acts on the rescaled tokens at time t. It has no value bias and no
        output bias.

        Its queries and keys are the queries and keys of e^{tV} z. The factor e^{2λt} is in its scale, bounded
        below overflow.
        """
        f = self.attention
        # exp(t(V − λI)) stays bounded; the factor e^{2λt} of the scores goes into their scale.
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
            # Above the limit, the softmax is a maximum anyway, and scores must not overflow.
            scale=f.scale * math.exp(min(2 * self.rate * t, self._limit)),
        )

    def velocity(self, begin: float, end: float, weighting: Weighting | None = None) -> Velocity:
        """Return the velocity of the rescaled tokens z as a function of time and z."""
        return lambda t, z: self._velocity(float(t), z, weighting)

    def _velocity(self, t: float, z: Tensor, weighting: Weighting | None) -> Tensor:
        seen = self.attention_at(t)._forward(z, weighting)
        moved: Tensor = seen - z @ self.value.mT
        shift: Tensor = torch.linalg.matrix_exp(-t * self.value) @ self.shift
        return moved + shift

    def describe(self) -> str:
        """Return a phrase that describes the attention layer and says that its tokens are rescaled."""
        return f"{self.attention.describe()}, in rescaled tokens"


def rescaled(trajectory: Trajectory, value: Tensor | SelfAttention) -> Trajectory:
    """Convert a trajectory of tokens x(t) to the trajectory of the rescaled tokens z(t) = e^{−tV} x(t) for a
    matrix V.

    Parameters
    ----------
    trajectory
        A trajectory of tokens or of a discrete measure.
    value
        The matrix V, (d, d), or an attention whose ``value_matrix`` is taken as V.

    Raises
    ------
    ArgumentError
        If the trajectory is of Gaussians, or the shape of V does not fit its points.

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
    """Return the sum V = Σ_h O_h V_h over the heads h of an attention layer, with output matrices O_h and
    value matrices V_h. Raise ArgumentError if d_out is not d, or the attention has sinks.
    """
    return _head_matrices(attention).sum(dim=0)


def _head_matrices(attention: SelfAttention) -> Float[Tensor, "heads d d"]:
    f = attention
    if f.sinks is not None:
        raise ArgumentError(
            "attention", expected="attention without sinks, whose probabilities sum to one", got="sinks"
        )
    if f.d_out != f.d:
        raise ArgumentError(
            "attention", expected="attention with d_out = d", got=f"d = {f.d}, d_out = {f.d_out}"
        )
    value = f.value.repeat_interleave(f.heads // f.kv_heads, dim=0)
    output = torch.eye(f.d, dtype=f.dtype, device=f.device) if f.output is None else f.output
    heads: Tensor = output.unflatten(1, (f.heads, f.value_dim)).movedim(1, 0) @ value
    return heads
