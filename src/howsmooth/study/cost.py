"""What measurements cost, in seconds and bytes: operations counted, times what a machine needs for them.

The one model of cost: the time left that is shown, and what ``--dry-run`` predicts, are both told by it.
It is arithmetic only, so that a look at a study loads no model.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass

__all__ = [
    "NOMINAL",
    "Cost",
    "Curve",
    "Layer",
    "Rates",
    "bounds_cost",
    "bounds_seconds",
    "capture_memory",
    "capture_seconds",
    "drawing_seconds",
    "estimate_cost",
    "measurement_cost",
    "read",
    "usual_layer",
]

# What nobody has looked at: the heads of most models, and steps between trained and untrained ones.
_HEAD = 64
_STEPS = 20.0
# A batch runs until its last member stops, so many times the mean.
_LAST = 1.3
# Vectors of one member that the solver holds beside its basis.
_VECTORS = 6
# Key dimensions at which a machine is calibrated; in between and beyond, time grows by the same for each.
NARROW, WIDE = 16, 64
# Bounds at one sequence, in eigenvalue problems of the size of a token: those that every attention has, and
# those of the joint certificate for each token. One head's certificates take n² d times some operations.
_PROBLEMS, _PROBLEMS_A_TOKEN, _PROBLEMS_A_HEAD = 18.0, 3.3, 8.0
_OPERATIONS_OF_ONE_HEAD = 8000.0
# An attention runs about so often until it is identified and verified, and what it was given is compared.
_RUNS_A_CAPTURE = 5.0
# Python's part of that, in steps of the solver.
_STEPS_A_CAPTURE = 25.0
# Bytes for each entry of P at the peak of a capture (scores and P of one layer), and at most: long layers are
# run in blocks. And what is kept of each token, in numbers of its dimension.
_CAPTURE_BYTES, _CAPTURE_BLOCKS, _CAPTURE_ROWS = 16.0, 2.0**28, 40.0
# Tables, figures and report are Python's work, as the steps of the solver are.
_STEPS_OF_A_REPORT, _STEPS_A_CURVE = 4000.0, 500.0


@dataclass(frozen=True)
class Layer:
    """The sizes of one attention, or of one head of it.

    Attributes
    ----------
    d, d_out
        Of a token before and after.
    heads, kv_heads, key_dim, value_dim
        Of the softmax; ``heads`` is 1 for one head alone.
    projected
        Whether there is an output projection.
    causal, window
        Which keys a query sees: where probabilities are not kept, only these cost time.
    sharp
        Whether scores are so large that float32 products form them in float64 where they are not kept.

    """

    d: int
    d_out: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    projected: bool = True
    causal: bool = False
    window: int | None = None
    sharp: bool = False

    def seen(self, n: int) -> float:
        """Return the share of n² that queries see."""
        reach = n if self.window is None else min(self.window, n)
        # Keys up to the own one, or on both sides of it.
        before = reach * n - reach * (reach - 1) / 2
        return (before if self.causal else 2 * before - n) / (float(n) * n)

    @property
    def rows(self) -> int:
        """Rows of the projections to queries, keys and values."""
        return self.heads * self.key_dim + self.kv_heads * (self.key_dim + self.value_dim)


Curve = tuple[tuple[float, float], ...]
"""Points (size, value), from small to large; between them a power of the size, beyond them the last value."""


@dataclass(frozen=True)
class Rates:
    """What a machine needs; pairs are of float32 and float64.

    Attributes
    ----------
    matrix
        Operations a second of a large matrix product.
    weights
        Bytes a second at which a product with few rows reads its matrix.
    narrow, wide
        Against n: seconds of one product with the softmax's derivative and one with its adjoint, for each
        entry of P, at 16 and at 64 dimensions of a head.
    softmax
        Against n: seconds to form one entry of P in float64.
    streamed_narrow, streamed_wide
        As ``narrow`` and ``wide`` for each entry that is seen, where P is not kept: of float32, of float64,
        and of float32 with scores in float64.
    streamed_softmax
        As ``softmax``, without keeping P.
    basis
        Bytes a second at which vectors are made orthogonal to a basis.
    step, member
        Seconds of a step of the solver beside its products, and for each member of a batch.
    eigen
        Against the dimension: seconds for the eigenvalues of a symmetric matrix.

    """

    matrix: tuple[float, float]
    weights: tuple[float, float]
    narrow: tuple[Curve, Curve]
    wide: tuple[Curve, Curve]
    softmax: Curve
    streamed_narrow: tuple[Curve, Curve, Curve]
    streamed_wide: tuple[Curve, Curve, Curve]
    streamed_softmax: Curve
    basis: float
    step: float
    member: float
    eigen: Curve


@dataclass(frozen=True)
class Cost:
    """Seconds, and bytes of the solver's vectors."""

    seconds: float
    memory: float


def usual_layer(heads: int) -> Layer:
    """Return the layer that a model of so many heads usually has."""
    d = _HEAD * heads
    return Layer(d, d, heads, heads, _HEAD, _HEAD)


def estimate_cost(
    rates: Rates,
    layer: Layer,
    n: int,
    *,
    members: int,
    steps: int | float,
    dtype: str,
    streamed: bool = False,
    last: float = _LAST,
) -> Cost:
    """Predict one call of :func:`howsmooth.local_lipschitz`.

    Parameters
    ----------
    rates, layer
        The machine, and what is measured.
    n
        Tokens of each member.
    members
        Sequences measured together.
    steps
        Steps of the solver, the mean over members.
    dtype
        ``"float32"`` or ``"float64"``.
    streamed
        Whether probabilities are formed anew in each product; members are then measured one by one.
    last
        Steps of the last member over the mean.

    """
    if streamed and members > 1:
        one = estimate_cost(rates, layer, n, members=1, steps=steps, dtype=dtype, streamed=True, last=1.0)
        return Cost(members * one.seconds, one.memory)
    single = dtype == "float32"
    width = 4 if single else 8
    size = float(n) * layer.d  # of one member's vectors
    products = _products(rates, layer, n, members, double=not single, streamed=streamed)
    exact = _products(rates, layer, n, members, double=True, streamed=streamed)
    formed = _formed(rates, layer, n, members, streamed=streamed)
    basis = members * size * width * steps * steps / rates.basis
    # One product more for the output's direction.
    seconds = formed + (steps + 1) * products + basis + steps * members * rates.member
    seconds += last * steps * rates.step
    if single:  # the verdict
        seconds += formed + exact + products
    vectors = last * steps * width + _VECTORS * 8
    return Cost(seconds, members * size * vectors)


def capture_seconds(rates: Rates, layer: Layer, n: int, *, members: int, layers: int, captured: int) -> float:
    """Predict a capture: a forward pass of a model, then each layer until it is verified.

    Parameters
    ----------
    rates, layer
        The machine, and one of the layers.
    n, members
        Tokens, and sequences together.
    layers, captured
        Of the model, and those that are asked for.

    """
    # An MLP has twice the parameters of the attention.
    parameters = 12.0 * layer.d**2
    block = parameters * (2 * members * n / rates.matrix[0] + 3 * 4 / rates.weights[0]) + 2 * rates.step
    softmax = members * layer.heads * float(n) * n * read(rates.softmax, n) / 2
    fixed = _STEPS_A_CAPTURE * rates.step
    return layers * (block + softmax) + captured * (fixed + _RUNS_A_CAPTURE * (block / 3 + softmax))


def capture_memory(layer: Layer, n: int, *, members: int) -> float:
    """Predict the bytes that a capture takes at its peak."""
    blocks = min(_CAPTURE_BYTES * members * layer.heads * float(n) * n, _CAPTURE_BLOCKS)
    return blocks + 4 * _CAPTURE_ROWS * members * n * layer.d


def bounds_seconds(rates: Rates, layer: Layer, n: int, *, most: int) -> float:
    """Predict the bounds at one sequence; certificates are left out above ``most`` tokens."""
    problem = read(rates.eigen, layer.d)
    if layer.heads > 1:
        return 300 * rates.step + problem * (_PROBLEMS + (_PROBLEMS_A_TOKEN * n if n <= most else 0.0))
    certificates = _OPERATIONS_OF_ONE_HEAD * n * n * layer.d / rates.matrix[1] if n <= most else 0.0
    return 100 * rates.step + problem * _PROBLEMS_A_HEAD + certificates


def bounds_cost(n: int, heads: int, *, most: int) -> float:
    """Estimate the time of the bounds at one sequence in the unit of :func:`measurement_cost`."""
    layer = usual_layer(heads)
    captured = capture_seconds(NOMINAL, layer, n, members=1, layers=1, captured=1)
    return captured + bounds_seconds(NOMINAL, layer, n, most=most)


def drawing_seconds(rates: Rates, curves: int) -> float:
    """Predict tables, figures and report of so many curves (attention layers of models and texts)."""
    return rates.step * (_STEPS_OF_A_REPORT + _STEPS_A_CURVE * curves)


def measurement_cost(n: int, heads: int) -> float:
    """Estimate the time of one measurement among ten, in seconds of a usual machine and model.

    Only the shares matter, and only for the time left that is shown.
    """
    layer = usual_layer(heads)
    measured = estimate_cost(NOMINAL, layer, n, members=10, steps=_STEPS, dtype="float32").seconds
    return (measured + capture_seconds(NOMINAL, layer, n, members=10, layers=1, captured=1)) / 10


def _products(rates: Rates, layer: Layer, n: int, members: int, *, double: bool, streamed: bool) -> float:
    """Seconds of one product with the Jacobian and one with its adjoint."""
    width, at = (8.0, 1) if double else (4.0, 0)
    weights = float(layer.d) * layer.rows
    if layer.projected:
        weights += float(layer.d_out) * layer.heads * layer.value_dim
    projections = 2 * weights * (2 * members * n / rates.matrix[at] + width / rates.weights[at])
    entries = members * layer.heads * float(n) * n
    curves = (rates.narrow[at], rates.wide[at])
    if streamed:
        entries *= layer.seen(n)
        at = 2 if layer.sharp and not double else at
        curves = (rates.streamed_narrow[at], rates.streamed_wide[at])
    narrow, wide = (read(curve, n) for curve in curves)
    dims = (layer.key_dim + layer.value_dim) / 2
    return projections + entries * max(
        narrow + (wide - narrow) * (dims - NARROW) / (WIDE - NARROW), narrow / 2
    )


def _formed(rates: Rates, layer: Layer, n: int, members: int, *, streamed: bool) -> float:
    """Seconds to linearise in float64: parameters, projections, the softmax."""
    weights = float(layer.d) * (layer.rows + layer.d_out)
    projections = weights * (2 * members * n / rates.matrix[1] + 6 * 8 / rates.weights[1])
    entries = members * layer.heads * float(n) * n * (layer.seen(n) if streamed else 1.0)
    return projections + entries * read(rates.streamed_softmax if streamed else rates.softmax, n)


def read(curve: Curve, size: int | float) -> float:
    """Read a value between the points of a curve."""
    at = bisect(curve, (size, math.inf))
    if at in (0, len(curve)):
        return curve[min(at, len(curve) - 1)][1]
    (left, low), (right, high) = curve[at - 1], curve[at]
    share = math.log(size / left) / math.log(right / left)
    return float(low * (high / low) ** share)


NOMINAL = Rates(
    matrix=(9.5e10, 4.9e10),
    weights=(4.0e10, 3.6e10),
    narrow=(
        ((2.0, 4e-7), (8.0, 4e-8), (32.0, 8e-9), (128.0, 5e-9), (512.0, 8e-9), (1024.0, 1e-8)),
        ((2.0, 5e-7), (8.0, 6e-8), (32.0, 2e-8), (128.0, 1.8e-8), (512.0, 2.2e-8), (1024.0, 3e-8)),
    ),
    wide=(
        ((2.0, 9e-7), (8.0, 9e-8), (32.0, 2.6e-8), (128.0, 1.6e-8), (512.0, 1.5e-8), (1024.0, 2e-8)),
        ((2.0, 1.2e-6), (8.0, 1.6e-7), (32.0, 8e-8), (128.0, 5e-8), (512.0, 5e-8), (1024.0, 5.5e-8)),
    ),
    softmax=((8.0, 1.7e-7), (128.0, 2e-8), (512.0, 1.4e-8)),
    streamed_narrow=(((2048.0, 6e-9),), ((2048.0, 1.4e-8),), ((2048.0, 9e-9),)),
    streamed_wide=(((2048.0, 1.4e-8),), ((2048.0, 3.2e-8),), ((2048.0, 1.8e-8),)),
    streamed_softmax=((2048.0, 1.2e-8),),
    basis=1.2e10,
    step=4e-4,
    member=9e-5,
    eigen=((16.0, 1.2e-5), (64.0, 1e-4), (256.0, 2.6e-3), (768.0, 4.5e-2)),
)
"""Those of one core with wide vector units, for shares of a whole that was not calibrated."""
