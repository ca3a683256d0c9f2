"""The class ``Problem``: an attention, and the tokens or the ball for which bounds on its Lipschitz constant
are asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention, TokenMap
from howsmooth.bounds.attention_parameters import (
    Head,
    Parameters,
    as_matrix,
    largest_distance,
    norms_of_rows,
    opened,
    parameters_of,
)
from howsmooth.bounds.bound import Side, check_length, check_radius
from howsmooth.bounds.log_numbers import Log
from howsmooth.bounds.norm_layer_outputs import norm_radius
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import above, gamma, up

__all__ = ["Problem", "at_tokens", "far_out", "for_every_length", "on_ball"]

T = TypeVar("T")

# The radius used when all tokens are zero, since the theorems need a positive one.
_LEAST_RADIUS = 1e-150


@dataclass(frozen=True, eq=False)
class Vectors:
    """The vectors M x_i + b for tokens x_i, with upper bounds on their norms and on their rounding errors."""

    values: Float[Tensor, "n d"]
    lengths: Float[Tensor, " n"]
    error: float

    @classmethod
    def of(cls, x: Tensor, first: Tensor, second: Tensor, bias: Tensor, off: float = 0.0) -> Vectors:
        """Compute the vectors x_i @ first @ second + bias. ``off`` bounds the error of the given bias."""
        values = _finite((x @ first) @ second + bias)
        sizes = norms_of_rows((x.abs() @ first.abs()) @ second.abs() + bias.abs()).max()
        error = up(gamma(sum(first.shape) + 2) * float(sizes) + off)
        return cls(values, above(norms_of_rows(values) + error, 1), error)

    @property
    def longest(self) -> Log:
        """The largest of the upper bounds on the norms of the vectors."""
        return Log.of(self.lengths.max())

    @property
    def diameter(self) -> Log:
        """An upper bound on the distances between the vectors."""
        return Log.of(above(largest_distance(self.values) + 2 * self.error, 1))


@dataclass(frozen=True, eq=False)
class Problem:
    """An attention, and the tokens or the ball for which bounds on its Lipschitz constant are asked."""

    attention: Head | Parameters | SelfAttention
    #: Tokens (n, d), float64 on the CPU, or None for all tokens in the ball.
    X: Float[Tensor, "n d"] | None = None
    #: Sequence length n, or None for a bound that holds for every length.
    length: int | None = None
    #: Radius R of the ball, and a phrase that says how it was found.
    radius: float = 1.0
    radius_from: str = "given"
    #: The factor R of a statement about the tokens R·X, and the side that the caller chose.
    factor: float = 1.0
    side: Side = "upper"
    _found: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, source: object, X: object = None, length: object = None, radius: object = None) -> Problem:
        """Make a problem from the arguments of :func:`best`. They and the errors are described there."""
        attention, of_site, norm = opened(source)
        X = of_site if X is None and length is None else X
        if isinstance(attention, TokenMap) and not isinstance(attention, SelfAttention):
            raise ArgumentError(
                "attention",
                expected="attention given by its matrices: no bound is known for any other map",
                got=attention.describe(),
                remedy="local_lipschitz measures it at given tokens. If it belongs to a captured layer, the "
                "scopes 'attention', 'heads' and 'head' may have bounds; for norms see pre_norm_upper_bound.",
            )
        if not isinstance(attention, Head | Parameters | SelfAttention):
            attention = parameters_of(source)  # raises an error for other types
        x = None if X is None else _tokens(X, attention)
        n = None if length is None else check_length(length)
        farthest = 0.0
        if x is not None:
            if n not in (None, x.shape[0]):
                raise ArgumentError("length", expected=f"the length of X, {x.shape[0]}, or None", got=str(n))
            n, farthest = x.shape[0], float(norms_of_rows(x).max())
        if radius is not None:
            R, words = check_radius(radius), "given"
            if farthest > R * (1 + 1e-6):
                expected = "at least the largest norm of a token of X"
                raise ArgumentError(
                    "radius", expected=expected, got=f"{R:g}, with a token of norm {farthest:g}"
                )
        elif isinstance(norm, LayerNorm | RMSNorm):
            R, words = (
                max(norm_radius(norm), _LEAST_RADIUS),
                f"the {type(norm).__name__} before the attention",
            )
        elif x is not None:
            R, words = max(farthest, _LEAST_RADIUS), "the longest token of X"
        else:
            expected = "a finite number > 0, as there is no norm layer and no X to take it from"
            raise ArgumentError("radius", expected=expected, got="None")
        # By rounding, a float32 token may be slightly longer than the radius of its norm layer.
        return cls(attention, x, n, max(R, farthest), words)

    @property
    def n(self) -> int:
        """The number of tokens, if one is given."""
        assert self.length is not None
        return self.length

    @property
    def plain(self) -> bool:
        """Whether the scores are ⟨A x_i + b, x_j⟩ and the attention weights are their softmax."""
        f = self.attention
        return not isinstance(f, SelfAttention) or (f.rotary is None and not f.feature_names())

    @cached_property
    def parameters(self) -> Parameters:
        """The matrices of all heads and the mask."""
        return parameters_of(self.attention)

    @cached_property
    def head(self) -> Head:
        """The head of a single-head attention, with its output map multiplied into its value matrix."""
        return self.parameters.one_head("this statement")

    @property
    def V(self) -> Log:
        """The spectral norm ‖V‖ of the value matrix."""
        return Log(self.head.log_V_norm)

    @property
    def a(self) -> Log:
        """‖A‖R², a bound on the scores of one head on the ball if it has no query bias."""
        # A logarithm, because ‖A‖ may underflow and R² overflow where their product does neither.
        return Log(self.head.log_A_norm) * Log.of(self.radius) ** 2

    @property
    def a3(self) -> Log:
        """(‖A‖R + |b|)R, a bound on the scores of one head on the ball if it has the query bias b."""
        return self.a + Log.of(self.head.b_norm) * self.radius

    def once(self, compute: Callable[..., T], *arguments: object) -> T:
        """Return ``compute(self, *arguments)``, which is computed once and then remembered."""
        key = (compute, arguments)
        if key not in self._found:
            self._found[key] = compute(self, *arguments)
        found: T = self._found[key]
        return found

    # ---- at tokens

    @property
    def tokens(self) -> Float[Tensor, "n d"]:
        """The tokens X, if they are given."""
        assert self.X is not None
        return self.X

    @cached_property
    def y(self) -> Vectors:
        """The vectors A x_i + b, whose inner products with the tokens are the scores."""
        head = self.head
        return Vectors.of(self.tokens, head.right.mT, head.left.mT, head.b, head.b_error)

    @cached_property
    def transposed(self) -> Vectors:
        """The vectors Aᵀ x_i for the tokens x_i."""
        return Vectors.of(self.tokens, self.head.left, self.head.right, torch.zeros_like(self.head.b))

    @cached_property
    def visible(self) -> Bool[Tensor, "n n"]:
        """The mask (n, n), which is True where the query (row) sees the key (column)."""
        n = len(self.tokens)
        seen = self.parameters.visibility(n, argument="X").whole()
        return torch.ones(n, n, dtype=torch.bool) if seen is None else seen

    @cached_property
    def weights(self) -> Float[Tensor, "n n"]:
        """The attention weights P of one head at the tokens."""
        scores = _finite(self.y.values @ (self.tokens - self.tokens.mean(dim=0)).mT)
        return torch.softmax(scores.masked_fill(~self.visible, -torch.inf), dim=1)

    @property
    def log_error_of_weights(self) -> float:
        """A bound on the rounding errors of the logarithms of the attention weights. It is 700 at most."""
        # Errors of the scores of at most e change a weight by a factor of at most e^{2e}; tokens less their
        # mean are at most twice as long as the longest token.
        roundings = gamma(self.head.d + 4) * self.y.lengths.max() + self.y.error
        of_scores = up(4 * float(roundings * norms_of_rows(self.tokens).max()))
        return min(of_scores + gamma(2 * len(self.tokens) + 40), 700.0)

    @cached_property
    def diameter(self) -> Log:
        """The largest distance between two tokens."""
        return Log.of(largest_distance(self.tokens))


# ---- the problems of statements


def on_ball(attention: object, length: object, radius: object) -> Problem:
    """Return the problem of bounding the Lipschitz constant of attention for n tokens in a ball."""
    return Problem(parameters_of(attention), None, check_length(length), check_radius(radius))


def for_every_length(attention: object, radius: object) -> Problem:
    """Return the problem of bounding the Lipschitz constant of attention on a ball for every length."""
    return Problem(parameters_of(attention), radius=check_radius(radius))


def at_tokens(attention: object, X: object = None) -> Problem:
    """Return the problem of bounding the norm of the Jacobian of attention at given tokens."""
    parameters = parameters_of(attention)
    x = _tokens(opened(attention)[1] if X is None else X, parameters)
    return Problem(parameters, x, len(x))


def far_out(attention: object, X: object, radius: object, *, side: object = "upper") -> Problem:
    """Return the problem of bounding the norm of the Jacobian of attention at the tokens R·X.

    Other Parameters
    ----------------
    X
        Tokens (n, d), a tensor, an array or nested lists. The bound is for the Jacobian at ``radius * X``.
    radius
        The factor R > 0.
    side
        "upper" for the limit plus the distance from it, "lower" for the limit minus the distance.

    """
    parameters = parameters_of(attention)
    x = _tokens(X, parameters)
    return Problem(parameters, x, len(x), factor=check_radius(radius), side=check_side(side))


def check_side(side: object) -> Side:
    """Return ``side`` after checking that it is "upper" or "lower"."""
    if side == "upper" or side == "lower":
        return side
    raise ArgumentError("side", expected="'upper' or 'lower'", got=repr(side))


def _tokens(X: object, attention: Head | Parameters | SelfAttention) -> Float[Tensor, "n d"]:
    d = attention.heads[0].d if isinstance(attention, Parameters) else attention.d
    remedy = "Give one sequence of tokens of the attention's dimension."
    if isinstance(X, Tensor) and X.ndim == 3:
        remedy = "Give one sequence, for instance X=site.x[0]."
        X = X[0] if len(X) == 1 else X
    elif isinstance(X, int | float):
        remedy = "For a bound on a ball, give length and radius by name."
    x = as_matrix("X", X, ("n", d), what="tokens", remedy=remedy)
    if isinstance(attention, Parameters):
        attention.visibility(len(x), argument="X")  # raises an error for a mask of another length
    return x


def _finite(numbers: Tensor) -> Tensor:
    if bool(torch.isfinite(numbers).all()):
        return numbers
    raise NonFiniteError("X", expected="scores below the largest float64", got="larger ones")
