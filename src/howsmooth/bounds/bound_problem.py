"""The class ``Problem``: the attention and the tokens or ball for which bounds are asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention, TokenMap
from howsmooth.bounds.attention_parameters import Head, Parameters, SiteLike, parameters_of
from howsmooth.bounds.bound import check_length, check_radius
from howsmooth.bounds.norm_layer_outputs import norm_radius
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["Problem"]

# The radius used when all tokens are zero, since the theorems need a positive one.
_LEAST_RADIUS = 1e-150


@dataclass(frozen=True, eq=False)
class Problem:
    """An attention, and the tokens or the ball for which bounds on its Lipschitz constant are asked.

    Attributes
    ----------
    attention
        A Head, Parameters or SelfAttention.
    X
        Tokens (n, d), float64 on the CPU, or None for all tokens in the ball.
    length
        Sequence length n, or None for a bound that holds for every length.
    radius
        Radius R of the ball.
    radius_from
        A phrase that says how the radius was found.

    """

    attention: Head | Parameters | SelfAttention
    X: Tensor | None
    length: int | None
    radius: float
    radius_from: str

    @classmethod
    def of(
        cls, source: object, X: Tensor | None = None, length: object = None, radius: object = None
    ) -> Problem:
        """Convert the arguments of a user (an attention, and tokens or a ball) to a Problem.

        The arguments are those of :func:`best`.

        Raises
        ------
        ArgumentError
            If an argument does not fit, no bound is known for the map, or there is nothing to take the radius
            from.
        NonFiniteError
            If an entry of X is NaN or infinite.

        """
        attention, norm = source, None
        if isinstance(source, SiteLike) and not isinstance(source, TokenMap):
            attention, norm = source.map, source.norm
            if X is None and length is None:
                X = _single(source.x)
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
        X = None if X is None else _tokens(X, attention)
        n = None if length is None else check_length(length)
        farthest = 0.0
        if X is not None:
            if n not in (None, X.shape[0]):
                raise ArgumentError("length", expected=f"the length of X, {X.shape[0]}, or None", got=str(n))
            n = X.shape[0]
            size = float(X.abs().max()) or 1.0  # scaled because squares leave the range of float64 earlier
            farthest = size * float(torch.linalg.vector_norm(X / size, dim=-1).max())
        R, words = _radius(radius, norm, X is not None, farthest)
        # By rounding, a float32 token may be slightly longer than the radius of its norm layer.
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
        remedy="Pass one of the sequences, for instance X=site.x[0].",
    )


def _tokens(X: Tensor, attention: Head | Parameters | SelfAttention) -> Tensor:
    d = attention.heads[0].d if isinstance(attention, Parameters) else attention.d
    if not isinstance(X, Tensor):
        raise ArgumentError(
            "X",
            expected=f"tokens of shape (n, {d})",
            got=repr(X) if isinstance(X, int | float) else type(X).__name__,
            remedy="For a bound on a ball, give length and radius by name."
            if isinstance(X, int | float)
            else "Use torch.as_tensor.",
        )
    if X.ndim == 3 and X.shape[0] == 1:
        X = X[0]
    if X.ndim != 2 or X.shape[-1] != d or X.shape[0] < 1:
        expected = f"tokens of shape (n, {d}), one sequence"
        raise ArgumentError("X", expected=expected, got=f"shape {tuple(X.shape)}")
    if not bool(torch.isfinite(X).all()):
        raise NonFiniteError("X", expected="finite numbers", got="NaN or infinity")
    return X.detach().cpu().double()
