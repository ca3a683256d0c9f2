"""Of what attention, at which tokens or on which ball, a Lipschitz constant is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.attention.plain_scores import require_plain_scores
from howsmooth.bounds.bound import check_length, check_radius
from howsmooth.bounds.norms import norm_radius
from howsmooth.bounds.parameters import Head, Parameters, SiteLike, parameters_of
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["Question"]

# Tokens that are all zero lie in every ball; statements want one.
_LEAST_RADIUS = 1e-150


@dataclass(frozen=True, eq=False)
class Question:
    """Of what attention, where, the Lipschitz constant is asked for.

    Attributes
    ----------
    attention
        A Head, Parameters or SelfAttention.
    X
        Tokens (n, d), or None for all tokens in the ball.
    length
        Sequence length, or None for every length at once.
    radius
        Of the ball.
    radius_from
        Where the radius comes from, in words.

    """

    attention: Head | Parameters | SelfAttention
    X: Tensor | None
    length: int | None
    radius: float
    radius_from: str

    @classmethod
    def of(
        cls, source: object, X: Tensor | None = None, length: object = None, radius: object = None
    ) -> Question:
        """Read the arguments of :func:`best` and :func:`~howsmooth.bounds.table`."""
        attention, norm = source, None
        if isinstance(source, SiteLike) and not isinstance(source, SelfAttention):
            attention, norm = source.map, source.norm
            if X is None and length is None:
                X = _single(source.x)
        if not isinstance(attention, Head | Parameters | SelfAttention):
            attention = parameters_of(source)  # which says what is wrong with it
        require_plain_scores(attention, "these bounds")
        n = None if length is None else check_length(length)
        farthest = 0.0
        if X is not None:
            X = _tokens(X, attention)
            if n not in (None, X.shape[0]):
                raise ArgumentError("length", expected=f"the length of X, {X.shape[0]}, or None", got=str(n))
            n = X.shape[0]
            farthest = float(torch.linalg.vector_norm(X, dim=-1).max())
        R, words = _radius(radius, norm, X is not None, farthest)
        # A float32 token may be longer than its norm layer allows by a rounding error.
        return cls(attention, X, n, max(R, farthest), words)


def _radius(given: object, norm: object, from_tokens: bool, farthest: float) -> tuple[float, str]:
    if given is not None:
        radius = check_radius(given)
        if farthest <= radius * (1 + 1e-6):
            return radius, "given"
        raise ArgumentError(
            "radius",
            expected="at least the largest norm of a token of X",
            got=f"{radius:g}, with a token of norm {farthest:g}",
        )
    if isinstance(norm, LayerNorm | RMSNorm):
        return max(norm_radius(norm), _LEAST_RADIUS), f"the {type(norm).__name__} before the attention"
    if from_tokens:
        return max(farthest, _LEAST_RADIUS), "the longest token of X"
    raise ArgumentError(
        "radius",
        expected="a finite number > 0, as there is no norm layer and no X to take it from",
        got="None",
    )


def _single(x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        return x[0]
    raise ArgumentError(
        "X",
        expected="one sequence",
        got=f"a site with {x.shape[0]}",
        remedy="Give one of them, as X=site.x[0].",
    )


def _tokens(X: Tensor, attention: Head | Parameters | SelfAttention) -> Tensor:
    d = attention.heads[0].d if isinstance(attention, Parameters) else attention.d
    if X.ndim == 3 and X.shape[0] == 1:
        X = X[0]
    if X.ndim != 2 or X.shape[-1] != d or X.shape[0] < 1:
        expected = f"tokens of shape (n, {d}), one sequence"
        raise ArgumentError("X", expected=expected, got=f"shape {tuple(X.shape)}")
    if not bool(torch.isfinite(X).all()):
        raise NonFiniteError("X", expected="finite numbers", got="NaN or infinity")
    return X.detach().cpu().double()
