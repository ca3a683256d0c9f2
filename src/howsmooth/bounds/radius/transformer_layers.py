"""The layers of a Transformer (attention, feed-forward, norm), with their first and second derivatives in
closed form.

Each layer has the same five methods. ``value`` returns its outputs (n', d_out) for tokens u (n, d). ``push``
multiplies its Jacobian at u by tangents (n, d, k), k vectors at once, and ``pull`` the transposed Jacobian by
adjoints (n', d_out, k). ``second`` returns the second derivative along k tangents as packed quadratic forms
(n', d_out, p) in k variables. ``curvature`` multiplies the Hessian of ⟨adjoint, outputs⟩ by tangents, for one
adjoint (n', d_out). Everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius.packed_quadratic_forms import Pairs
from howsmooth.rounding import INFLATION, gamma
from howsmooth.rounding.rounded_tensor import Rounded, along, exact, lower, plain, upper

_Function = Callable[[Tensor], Tensor]
_Bound = Callable[[Tensor, Tensor], Tensor]

# An extremum that lies outside of an interval by less than this counts as inside.
_NEAR = 1e-9
# In so many cells is each side of an interval divided on which the rest of a Taylor polynomial is bounded.
_CELLS = 16

__all__ = [
    "ACTIVATIONS", "Activation", "Attention", "FeedForward", "GatedFeedForward", "Map", "Norm", "Rests",
    "Softmax",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm layer: LayerNorm if ``centred`` is true, otherwise RMSNorm.

    It maps a token u to √d · gain ∘ h/r + bias, where h is u, without its mean if centred, and r² = |h|² +
    d·eps.
    """

    gain: Tensor
    bias: Tensor
    eps: float
    centred: bool

    def centre(self, tangents: Tensor) -> Tensor:
        """Subtract the mean from each token (n, d, ...) if the norm layer is a LayerNorm."""
        return tangents - tangents.mean(1, keepdim=True) if self.centred else tangents

    def direction_and_length(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens h/r (n, d) before gain and bias, and the norms r (n, 1)."""
        h = self.centre(u)
        r = (h.square().sum(1, keepdim=True) + u.shape[1] * self.eps).sqrt()
        return h / r, r

    def scaled(self, adjoint: Tensor) -> Tensor:
        """Multiply vectors (n, d) or (n, d, k) entrywise by √d · gain, the last step of a norm layer."""
        factor = math.sqrt(len(self.gain)) * self.gain
        return adjoint * (factor[:, None] if adjoint.ndim == 3 else factor)

    def value(self, u: Tensor) -> Tensor:
        """Return the outputs (n, d) of the norm layer."""
        return self.scaled(self.direction_and_length(u)[0]) + self.bias

    def push(self, u: Tensor, tangents: Tensor) -> Tensor:
        """Multiply the Jacobian of the norm layer by tangents (n, d, k)."""
        return self.scaled(self._across(u, self.centre(tangents)))

    def pull(self, u: Tensor, adjoints: Tensor) -> Tensor:
        """Multiply the transposed Jacobian of the norm layer by adjoints (n, d, k)."""
        return self.centre(self._across(u, self.scaled(adjoints)))

    def _across(self, u: Tensor, w: Tensor) -> Tensor:
        """Return the parts of vectors w (n, d, k) that are orthogonal to the tokens h, divided by r."""
        direction, r = self.direction_and_length(u)
        along = torch.einsum("nd,ndk->nk", direction, w)
        return (w - direction[..., None] * along[:, None]) / r[..., None]

    def second(self, u: Tensor, tangents: Tensor, pairs: Pairs) -> Tensor:
        """Return the second derivative of the norm layer along k tangents, as quadratic forms (n, d, p)."""
        direction, r = self.direction_and_length(u)
        w = self.centre(tangents)
        along = torch.einsum("nd,ndk->nk", direction, w)
        radial = 3 * pairs.square(along) - pairs.packed(w.mT @ w)
        found = u.new_empty(*u.shape, radial.shape[1])
        for j in range(len(u)):
            turned = direction[j, :, None] * radial[j] - 2 * pairs.product(w[j], along[j])
            found[j] = turned * (math.sqrt(u.shape[1]) * self.gain / r[j] ** 2)[:, None]
        return found

    def curvature(self, u: Tensor, adjoint: Tensor, tangents: Tensor) -> Tensor:
        """Multiply the Hessian of ⟨adjoint, outputs of the norm layer⟩ by tangents (n, d, k)."""
        direction, r = self.direction_and_length(u)
        w, b = self.centre(tangents), self.scaled(adjoint)
        own = torch.einsum("nd,nd->n", direction, b)[:, None, None]
        along = torch.einsum("nd,ndk->nk", direction, w)[:, None]
        across = torch.einsum("nd,ndk->nk", b, w)[:, None]
        turned = b[..., None] * along + w * own + direction[..., None] * (across - 3 * own * along)
        return self.centre(-turned / r[..., None] ** 2)


class Rests(NamedTuple):
    """Bounds on the errors r of an activation's Taylor polynomials of the degrees 1 to 4, for changes t up to
    some width: on |r| (4, *batch) and on |r|/t².
    """

    size: Tensor
    relative: Tensor


class Activation(NamedTuple):
    """An activation function φ, applied entry by entry.

    ``derivatives`` are φ and its first four derivatives. ``largest`` bound |φ⁽³⁾|, |φ⁽⁴⁾| and |φ⁽⁵⁾| on the
    interval [z − width, z + width], given z and width. ``slopes`` bound |φ'| to |φ⁽⁵⁾| everywhere. With
    ``kink``, φ is ReLU: its derivatives are those beside 0, and ``largest`` is empty.
    """

    derivatives: tuple[Callable[[Tensor], Tensor], ...]
    largest: tuple[Callable[[Tensor, Tensor], Tensor], ...]
    slopes: tuple[float, float, float, float, float]
    kink: bool = False

    def derivative(self, order: int, z: Tensor) -> Tensor:
        """Return the derivative of the activation at z of the given order, from 0 to 4, entry by entry."""
        function = self.derivatives[order]
        if self.kink and order == 1 and isinstance(z, Rounded):
            near = plain(z).abs() <= z.error  # on which side of 0 these lie is not known
            return exact(function(plain(z)), math.sqrt(int(near.sum())))
        return along(function, self.slopes[order], z)

    def rests(self, z: Tensor, width: Tensor) -> Rests:
        """Bound the errors of the activation's Taylor polynomials around z, from z − width to z + width."""
        if self.kink:
            size = (upper(width) - lower(z.abs())).clamp_min(0).expand(4, *z.shape)
            return Rests(size, torch.full_like(size, torch.inf))
        ends = torch.arange(1, _CELLS + 1, dtype=z.dtype).reshape(-1, *(1,) * z.ndim) / _CELLS
        far = ends * width
        near = torch.cat([torch.zeros_like(far[:1]), far[:-1]])
        sides = [self._rests_beside(z, side, near, far) for side in (-1, 1)]
        return Rests(*(torch.maximum(*both) for both in zip(*sides, strict=True)))

    def _rests_beside(self, z: Tensor, side: int, near: Tensor, far: Tensor) -> Rests:
        """Bound the errors of Taylor polynomials where ``side`` times the change lies between near and far,
        for all of the cells (cells, *batch).

        Along a cell |r| is at most linear between its ends, plus (far − near)²/8 times the largest |r''|, and
        linear interpolation of t² is at most t² + (far − near)²/4.
        """
        square = (far - near) ** 2
        rest = self.derivative(0, z + side * far) - self.derivative(0, z)
        middle, bounds = z + side * far / 2, list[tuple[Tensor, Tensor]]()
        for degree in range(1, 5):
            slope = self.derivative(degree, z)
            rest = rest - slope * (side * far) ** degree / math.factorial(degree)
            at_far = upper(rest.abs())
            at_near = torch.cat([torch.zeros_like(at_far[:1]), at_far[:-1]])
            largest = self.largest[max(degree - 2, 0)](middle, far / 2)
            if degree == 1:
                largest = upper(self.derivative(2, z).abs()) + largest * far
            bend = largest * far ** (degree - 1) / math.factorial(degree - 1)  # bounds |r''|
            size = torch.maximum(at_near, at_far) + square / 8 * bend
            by_square = bend / (degree * (degree + 1))
            ends = torch.maximum(at_near / near**2, at_far / far**2) * (1 + square / near**2 / 4)
            relative = torch.minimum(ends + square / 8 * bend / near**2, by_square)
            relative = torch.where(near**2 > 0, relative, by_square)
            bounds.append((torch.minimum(size, by_square * far**2).amax(0), relative.amax(0)))
        return Rests(*map(torch.stack, zip(*bounds, strict=True)))


def _density(z: Tensor) -> Tensor:
    return torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _normal(z: Tensor) -> Tensor:
    return torch.erfc(-z / math.sqrt(2)) / 2


def _largest(function: _Function, extrema: tuple[float, ...]) -> _Bound:
    """Return a function of (z, width) that bounds the absolute value of a given function on the interval from
    z − width to z + width, by the values at both ends and at those extrema that lie inside.
    """

    @cache  # otherwise most of the time of a radius
    def peak(extremum: float, rounded: bool) -> float:
        point = torch.tensor(extremum, dtype=torch.float64)
        value = function(exact(point, gamma(64) * abs(extremum)) if rounded else point)
        return float(upper(value.abs()))

    def largest(z: Tensor, width: Tensor) -> Tensor:
        width = width * INFLATION
        low, high = z - width, z + width
        found = torch.maximum(upper(function(low).abs()), upper(function(high).abs()))
        for extremum in extrema:
            inside = (lower(low) - _NEAR <= extremum) & (extremum <= upper(high) + _NEAR)
            known = found.clamp_min(peak(extremum, isinstance(z, Rounded)))
            found = torch.where(inside, known, found)
        return found

    return largest


def _smooth(
    functions: Sequence[_Function],
    extrema: Sequence[tuple[float, ...]],
    slopes: tuple[float, float, float, float, float],
) -> Activation:
    """Return the activation with given derivatives of order zero to five.

    ``extrema`` are the zeros of the derivatives of order four, five and six that are not negative; each has a
    negative counterpart.
    """
    largest = (
        _largest(function, tuple(s * z for z in zeros for s in (1, -1)))
        for function, zeros in zip(functions[3:], extrema, strict=True)
    )
    return Activation(tuple(functions[:5]), tuple(largest), slopes)


def _of_tanh(function: _Function) -> _Function:
    return lambda z: function(torch.tanh(z))


def _zeros_of_tanh(*squares: float) -> tuple[float, ...]:
    return tuple(math.atanh(math.sqrt(square)) for square in squares)


def _gated_tanh(
    a: float, b: float, slopes: tuple[float, float, float, float, float], *extrema: tuple[float, ...]
) -> Activation:
    """Return the activation z (1 + tanh(az + bz³))/2, such as SiLU and the tanh approximation of GELU."""

    def derivative(order: int) -> _Function:
        def found(z: Tensor) -> Tensor:
            # Taylor coefficients of y = tanh g at z, from y' = (1 − y²) g'.
            slopes = (a + 3 * b * z * z, 3 * b * z, torch.full_like(z, b))
            g = a * z + b * z**3
            shrunk = torch.exp(-2 * g.abs())
            y, rest = [torch.tanh(g)], [4 * shrunk / (1 + shrunk) ** 2]  # rest are the coefficients of 1 − y²
            for m in range(order):
                terms = [rest[m - j] * (j + 1) * slopes[j] for j in range(min(3, m + 1))]
                y.append(torch.stack(terms).sum(0) / (m + 1))
                rest.append(-torch.stack([y[i] * y[m + 1 - i] for i in range(m + 2)]).sum(0))
            if order == 0:
                return z / 2 * (1 + y[0])
            return math.factorial(order) / 2 * (z * y[order] + y[order - 1] + (order == 1))

        return found

    return _smooth([derivative(order) for order in range(6)], extrema, slopes)


def _swish(slope: float) -> Activation:
    """Return the activation z σ(slope · z), where σ is the logistic function."""
    zeros = (
        (1.0319582417807491234, 4.4292351005572279796),
        (0.0, 1.8197756117250127265, 5.4008187394952158684),
        (0.71774192314656655792, 2.5062894864027523932, 6.3619922836816901434),
    )
    one, two, three, four, five = 1.1, 0.51, 0.31, 0.51, 0.66
    slopes = (one, two * slope, three * slope**2, four * slope**3, five * slope**4)
    return _gated_tanh(slope / 2, 0.0, slopes, *(tuple(z / slope for z in order) for order in zeros))


def _zero(z: Tensor) -> Tensor:
    return torch.zeros_like(z)


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(
        (lambda z: z, lambda z: torch.zeros_like(z) + 1, *(_zero,) * 3),
        (lambda z, width: torch.zeros_like(plain(z)),) * 3,
        slopes=(1.0, 0.0, 0.0, 0.0, 0.0),
    ),
    "gelu": _smooth(
        [
            lambda z: z * _normal(z),
            lambda z: _normal(z) + z * _density(z),
            lambda z: _density(z) * (2 - z * z),
            lambda z: _density(z) * (z**3 - 4 * z),
            lambda z: _density(z) * (-(z**4) + 7 * z**2 - 4),
            lambda z: _density(z) * z * (z**4 - 11 * z**2 + 18),
        ],
        # The roots of z⁴ − 7z² + 4, of z (z⁴ − 11z² + 18) and of z⁶ − 16z⁴ + 51z² − 18.
        [
            (math.sqrt((7 - math.sqrt(33)) / 2), math.sqrt((7 + math.sqrt(33)) / 2)),
            (0.0, math.sqrt(2), 3.0),
            tuple(map(math.sqrt, (0.40248426380182073, 3.7864793479239887, 11.811036388274188))),
        ],
        slopes=(1.13, 0.8, 0.78, 1.6, 2.85),
    ),
    "tanh": _smooth(
        [
            torch.tanh,
            _of_tanh(lambda y: 1 - y**2),
            _of_tanh(lambda y: -2 * y * (1 - y * y)),
            _of_tanh(lambda y: (1 - y * y) * (6 * y * y - 2)),
            _of_tanh(lambda y: (1 - y * y) * (16 * y - 24 * y**3)),
            _of_tanh(lambda y: (1 - y**2) * (16 - 120 * y**2 + 120 * (y**2) ** 2)),
        ],
        # With y = tanh z: the roots of y (2 − 3y²), of 15y⁴ − 15y² + 2 and of y (45y⁴ − 60y² + 17).
        [
            (0.0, *_zeros_of_tanh(2 / 3)),
            _zeros_of_tanh((15 - math.sqrt(105)) / 30, (15 + math.sqrt(105)) / 30),
            (0.0, *_zeros_of_tanh((30 - math.sqrt(135)) / 45, (30 + math.sqrt(135)) / 45)),
        ],
        slopes=(1.0, 0.77, 2.0, 4.1, 16.0),
    ),
    "silu": _swish(1.0),
    "quick_gelu": _swish(1.702),
    "gelu_tanh": _gated_tanh(
        math.sqrt(2 / math.pi),
        0.044715 * math.sqrt(2 / math.pi),
        (1.13, 0.8, 0.78, 1.61, 2.87),
        (0.78757618641889401013, 2.5534179143294429017),
        (0.0, 1.405964009736336315, 3.0478575051906081121),
        (0.62441425371550965649, 1.9450780136177141645, 3.4998964931162857001),
    ),
    "relu": Activation(
        (torch.relu, lambda z: (z > 0).to(z.dtype), *(_zero,) * 3),
        (),
        slopes=(1.0, 0.0, 0.0, 0.0, 0.0),
        kink=True,
    ),
}
"""The activations that have a remainder, by name."""


class _Neurons:
    down: Tensor

    @cached_property
    def square(self) -> Tensor:
        """Return W₂ᵀ W₂ without its rounding error."""
        value = plain(self.down)
        return value.T @ value


@dataclass(frozen=True, eq=False)
class FeedForward(_Neurons):
    """A feed-forward layer, which maps each token u to W₂ φ(W₁ u + b₁) + b₂.

    ``up`` is W₁ and ``down`` is W₂.
    """

    up: Tensor
    up_bias: Tensor
    activation: Activation
    down: Tensor
    down_bias: Tensor

    def preactivations(self, u: Tensor) -> Tensor:
        """Return W₁ u + b₁ (n, m), to which the feed-forward layer applies its activation."""
        return u @ self.up.T + self.up_bias

    def value(self, u: Tensor) -> Tensor:
        """Return the outputs (n, d_out) of the feed-forward layer."""
        return self.activation.derivative(0, self.preactivations(u)) @ self.down.T + self.down_bias

    def push(self, u: Tensor, tangents: Tensor) -> Tensor:
        """Multiply the Jacobian of the feed-forward layer by tangents (n, d, k)."""
        slope = self.activation.derivative(1, self.preactivations(u))
        return self.down @ (slope[..., None] * (self.up @ tangents))

    def pull(self, u: Tensor, adjoints: Tensor) -> Tensor:
        """Multiply the transposed Jacobian of the feed-forward layer by adjoints (n, d_out, k)."""
        slope = self.activation.derivative(1, self.preactivations(u))
        return self.up.T @ (slope[..., None] * (self.down.T @ adjoints))

    def second(self, u: Tensor, tangents: Tensor, pairs: Pairs) -> Tensor:
        """Return the second derivative of the feed-forward layer along k tangents, as quadratic forms."""
        bend = self.activation.derivative(2, self.preactivations(u))
        return torch.stack(
            [(self.down * b) @ pairs.square(self.up @ G) for b, G in zip(bend, tangents, strict=True)]
        )

    def curvature(self, u: Tensor, adjoint: Tensor, tangents: Tensor) -> Tensor:
        """Multiply the Hessian of ⟨adjoint, outputs of the feed-forward layer⟩ by tangents (n, d, k)."""
        bend = self.activation.derivative(2, self.preactivations(u)) * (adjoint @ self.down)
        return self.up.T @ (bend[..., None] * (self.up @ tangents))


@dataclass(frozen=True, eq=False)
class GatedFeedForward(_Neurons):
    """A gated feed-forward layer, which maps each token u to W₂ (φ(W₁ u + b₁) ∘ (W₃ u + b₃)) + b₂.

    ``gate`` is W₁, ``up`` is W₃ and ``down`` is W₂.
    """

    gate: Tensor
    gate_bias: Tensor
    up: Tensor
    up_bias: Tensor
    activation: Activation
    down: Tensor
    down_bias: Tensor

    def preactivations(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return z = W₁ u + b₁ and v = W₃ u + b₃ (n, m), from which the gated layer computes φ(z) v."""
        return u @ self.gate.T + self.gate_bias, u @ self.up.T + self.up_bias

    def value(self, u: Tensor) -> Tensor:
        """Return the outputs (n, d_out) of the gated feed-forward layer."""
        z, v = self.preactivations(u)
        return (self.activation.derivative(0, z) * v) @ self.down.T + self.down_bias

    def slopes(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives φ'(z) v and φ(z) of the product φ(z) v with respect to z and to v."""
        z, v = self.preactivations(u)
        return self.activation.derivative(1, z) * v, self.activation.derivative(0, z)

    def bends(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the second derivative φ''(z) v of φ(z) v with respect to z, and the mixed one φ'(z)."""
        z, v = self.preactivations(u)
        return self.activation.derivative(2, z) * v, self.activation.derivative(1, z)

    def push(self, u: Tensor, tangents: Tensor) -> Tensor:
        """Multiply the Jacobian of the gated layer by tangents (n, d, k)."""
        by_z, by_v = self.slopes(u)
        moved = by_z[..., None] * (self.gate @ tangents) + by_v[..., None] * (self.up @ tangents)
        return self.down @ moved

    def pull(self, u: Tensor, adjoints: Tensor) -> Tensor:
        """Multiply the transposed Jacobian of the gated layer by adjoints (n, d_out, k)."""
        by_z, by_v = self.slopes(u)
        back = self.down.T @ adjoints
        return self.gate.T @ (by_z[..., None] * back) + self.up.T @ (by_v[..., None] * back)

    def second(self, u: Tensor, tangents: Tensor, pairs: Pairs) -> Tensor:
        """Return the second derivative of the gated layer along k tangents, as quadratic forms."""
        bend, mixed = self.bends(u)
        found = []
        for b, c, G in zip(bend, mixed, tangents, strict=True):
            dz, dv = self.gate @ G, self.up @ G
            found.append((self.down * b) @ pairs.square(dz) + (self.down * (2 * c)) @ pairs.product(dz, dv))
        return torch.stack(found)

    def curvature(self, u: Tensor, adjoint: Tensor, tangents: Tensor) -> Tensor:
        """Multiply the Hessian of ⟨adjoint, outputs of the gated layer⟩ by tangents (n, d, k)."""
        bend, mixed = (part * (adjoint @ self.down) for part in self.bends(u))
        dz, dv = self.gate @ tangents, self.up @ tangents
        by_z = bend[..., None] * dz + mixed[..., None] * dv
        return self.gate.T @ by_z + self.up.T @ (mixed[..., None] * dz)


class Softmax(NamedTuple):
    """The queries, keys, values and attention weights that multi-head attention computes from tokens u."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor

    def centred(self, scores: Tensor) -> Tensor:
        """Subtract from scores (H, r, n, ...) their mean under the attention weights of each query."""
        mean = torch.einsum("hij,hij...->hi...", self.weights, scores)
        return scores - mean[:, :, None]


@dataclass(frozen=True, eq=False)
class Attention:
    """Multi-head softmax attention, given by the weights and biases of its heads.

    ``query``, ``key`` and ``value_weight`` have the shape (H, e, d), their biases (H, e), and ``output`` (H,
    d_out, e). ``rows`` are the tokens whose outputs are computed; ``visible`` (n, n) says which tokens a row
    sees, or is None for all. ``turns`` (n, e, e) are rotations of each token's queries and keys, or None, and
    ``score_bias`` (H, n, n) is added to the scores. The scale of the scores is part of the query.
    """

    query: Tensor
    query_bias: Tensor
    key: Tensor
    key_bias: Tensor
    value_weight: Tensor
    value_bias: Tensor
    output: Tensor
    output_bias: Tensor
    rows: Tensor
    visible: Tensor | None = None
    turns: Tensor | None = None
    score_bias: Tensor | None = None

    def _turned(self, heads: Tensor, tokens: Tensor | slice) -> Tensor:
        """Apply rotary positions of the given tokens to queries or keys (H, tokens, e, ...)."""
        return heads if self.turns is None else torch.einsum("nef,hnf...->hne...", self.turns[tokens], heads)

    def query_maps(self) -> Tensor:
        """Return the matrices (H, rows, e, d) that map tokens to queries, including rotary positions."""
        return self._turned(self.query[:, None].expand(-1, len(self.rows), -1, -1), self.rows)

    def key_maps(self, n: int) -> Tensor:
        """Return the matrices (H, n, e, d) that map tokens to keys, including rotary positions."""
        return self._turned(self.key[:, None].expand(-1, n, -1, -1), slice(None))

    def softmax(self, u: Tensor) -> Softmax:
        """Compute the queries, keys, values and attention weights of all heads at tokens u (n, d)."""
        q = torch.einsum("hed,nd->hne", self.query, u[self.rows]) + self.query_bias[:, None]
        k = torch.einsum("hed,nd->hne", self.key, u) + self.key_bias[:, None]
        q, k = self._turned(q, self.rows), self._turned(k, slice(None))
        v = torch.einsum("hed,nd->hne", self.value_weight, u) + self.value_bias[:, None]
        scores = q @ k.mT
        if self.score_bias is not None:
            scores = scores + self.score_bias[:, self.rows]
        if self.visible is not None:
            scores = scores.masked_fill(~self.visible[self.rows], -torch.inf)
        return Softmax(q, k, v, scores.softmax(-1))

    def value(self, u: Tensor) -> Tensor:
        """Return the outputs (rows, d_out) of the attention."""
        at = self.softmax(u)
        return torch.einsum("hoe,hie->io", self.output, at.weights @ at.v) + self.output_bias

    def tangents(self, tangents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the derivatives of the queries of ``rows``, and of all keys and values (H, n, e, k), along k
        tangents (n, d, k).
        """
        dq = torch.einsum("hed,ndk->hnek", self.query, tangents[self.rows])
        dk = torch.einsum("hed,ndk->hnek", self.key, tangents)
        dq, dk = self._turned(dq, self.rows), self._turned(dk, slice(None))
        return dq, dk, torch.einsum("hed,ndk->hnek", self.value_weight, tangents)

    def score_changes(self, at: Softmax, dq: Tensor, dk: Tensor) -> Tensor:
        """Return the derivatives (H, rows, n, k) of the centred scores, given those of queries and keys."""
        changes = torch.einsum("hiek,hje->hijk", dq, at.k) + torch.einsum("hie,hjek->hijk", at.q, dk)
        return at.centred(changes)

    def push(self, u: Tensor, tangents: Tensor) -> Tensor:
        """Multiply the Jacobian of the attention by tangents (n, d, k)."""
        at = self.softmax(u)
        dq, dk, dv = self.tangents(tangents)
        moved = at.weights[..., None] * self.score_changes(at, dq, dk)
        heads = torch.einsum("hijk,hje->hiek", moved, at.v) + torch.einsum("hij,hjek->hiek", at.weights, dv)
        return torch.einsum("hoe,hiek->iok", self.output, heads)

    def _back(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the gradient (n, d, k) by the tokens, given those by queries, keys and values."""
        if self.turns is not None:
            q = torch.einsum("nef,hnek->hnfk", self.turns[self.rows], q)
            k = torch.einsum("nef,hnek->hnfk", self.turns, k)
        tokens = torch.einsum("hed,hnek->ndk", self.key, k)
        tokens = tokens + torch.einsum("hed,hnek->ndk", self.value_weight, v)
        tokens[self.rows] += torch.einsum("hed,hnek->ndk", self.query, q)
        return tokens

    def pull(self, u: Tensor, adjoints: Tensor) -> Tensor:
        """Multiply the transposed Jacobian of the attention by adjoints (rows, d_out, k)."""
        at = self.softmax(u)
        w = torch.einsum("hoe,iok->hiek", self.output, adjoints)
        c = at.weights[..., None] * at.centred(torch.einsum("hiek,hje->hijk", w, at.v))
        return self._back(
            torch.einsum("hijk,hje->hiek", c, at.k),
            torch.einsum("hijk,hie->hjek", c, at.q),
            torch.einsum("hij,hiek->hjek", at.weights, w),
        )

    def second(self, u: Tensor, tangents: Tensor, pairs: Pairs) -> Tensor:
        """Return the second derivative of the attention along k tangents, as quadratic forms."""
        at = self.softmax(u)
        dq, dk, dv = self.tangents(tangents)
        t = self.score_changes(at, dq, dk)
        found = u.new_empty(len(self.rows), self.output.shape[1], len(pairs.i))
        for i in range(len(self.rows)):
            heads = []
            for h, output in enumerate(self.output):
                P, score = at.weights[h, i], t[h, i]
                v = at.v[h] - P @ at.v[h]
                forms = torch.einsum("je,jfk->efk", P[:, None] * v, dk[h])  # Σ P v̄ dkᵀ
                forms = torch.einsum("efk,fl->ekl", forms, dq[h, i])
                forms = forms + torch.einsum("jek,jl->ekl", dv[h], P[:, None] * score)
                thirds = (P[:, None] * v).T @ pairs.square(score)
                heads.append(output @ (2 * pairs.packed(forms) + thirds))
            found[i] = torch.stack(heads).sum(0)
        return found

    def curvature(self, u: Tensor, adjoint: Tensor, tangents: Tensor) -> Tensor:
        """Multiply the Hessian of ⟨adjoint, outputs of the attention⟩ by tangents (n, d, k)."""
        at = self.softmax(u)
        dq, dk, dv = self.tangents(tangents)
        t = self.score_changes(at, dq, dk)
        w = torch.einsum("hoe,io->hie", self.output, adjoint)
        c = at.centred(w @ at.v.mT)
        dc = torch.einsum("hie,hjek->hijk", w, dv)
        bend = at.weights[..., None] * at.centred(c[..., None] * t + dc)
        slope = at.weights * c
        return self._back(
            torch.einsum("hijk,hje->hiek", bend, at.k) + torch.einsum("hij,hjek->hiek", slope, dk),
            torch.einsum("hijk,hie->hjek", bend, at.q) + torch.einsum("hij,hiek->hjek", slope, dq),
            torch.einsum("hijk,hie->hjek", at.weights[..., None] * t, w),
        )


Map = Attention | FeedForward | GatedFeedForward | Norm
"""What a stage can compute."""
