"""Inputs where attention has a provably large local Lipschitz constant.

Every input consists of one or two heavy tokens, which get much attention, and copies of one light token. The
heavy tokens come first: causal attention needs this order, and for unmasked attention the order is
irrelevant. ``howsmooth.bounds`` evaluates the theorems that give lower bounds at the same tokens.
Derivations: documentation page "Worst inputs, and lower bounds".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.bounds.attention_parameters import Head, Parameters, parameters_of
from howsmooth.bounds.bound import check_length, check_radius
from howsmooth.bounds.worst_case_tokens import (
    HeavyTokens,
    searched_pairs,
    searched_tokens,
    spread_directions,
    two_cluster_points,
)
from howsmooth.errors import ArgumentError

__all__ = ["Construction", "balanced", "constructions", "heavy_token", "two_cluster", "two_heavy_tokens"]

_CHOICES = ("paper", "max", "min")
_Builder = Callable[[str, HeavyTokens, int, str, str], "Construction"]


@dataclass(frozen=True, eq=False)
class Construction:
    """A sequence of tokens that was constructed to give an attention a large local Lipschitz constant.

    Attributes
    ----------
    name
        Name of the function that built the tokens.
    x
        Tokens (n, d), in the dtype and on the device of the attention.
    head
        The head whose A and W_h V_h they were built for.
    source
        The theorem and paper, or the page of the documentation with the derivation.
    description
        One phrase that describes the tokens.

    """

    name: str
    x: Float[Tensor, "n d"]
    head: int
    source: str
    description: str

    def __repr__(self) -> str:
        n, d = self.x.shape
        return f"Construction({self.name}, head {self.head}, {n} tokens of dimension {d}: {self.description})"


def two_cluster(
    attention: object, length: int, radius: float, *, head: int = 0, choice: str = "paper"
) -> Construction:
    """Return the two-cluster input of the paper, which consists of one token and n − 1 copies of another
    token.

    Both tokens lie along an eigenvector of a matrix A. In the first case the tokens are Ru and Ru/2, where u
    is a unit eigenvector of A for its largest real eigenvalue γ_max. In the second case they are Ru and −Ru,
    where u belongs to the smallest real eigenvalue γ_min. A is the matrix of the scores ⟨A x_i, x_j⟩.

    Parameters
    ----------
    attention
        A Head, a SelfAttention without rotary positions, or a captured site of one.
    length
        Number of tokens n >= 2.
    radius
        Radius R > 0 of the ball that contains the tokens.
    head
        Number of the head whose matrix A is used.
    choice
        "paper" takes the first case if γ_max/8 >= −γ_min, else the second. "max" forces the first case,
        "min" the second.

    Raises
    ------
    ArgumentError
        If A has no real eigenvalue, or an argument is out of range.

    References
    ----------
    Section 5.2 and Proposition 3.4, Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024.

    """
    R, (chosen, give) = check_radius(radius), _of_head(attention, head)
    check_length(length, least=2)
    if choice not in _CHOICES:
        raise ArgumentError("choice", expected="'paper', 'max' or 'min'", got=repr(choice))
    points = two_cluster_points(chosen, R, choice)
    if points is None:
        raise ArgumentError(
            "attention",
            expected=f"a matrix A of head {head} with a real eigenvalue",
            got="complex eigenvalues only",
            remedy="Use heavy_token(attention, length, radius), which needs no real eigenvalue.",
        )
    half = float(points.heavies[0] @ points.light) > 0
    phrase = "Ru against Ru/2, u for γ_max" if half else "Ru against −Ru, u for γ_min"
    return give(
        "two_cluster",
        points,
        length,
        "Section 5.2 and Proposition 3.4, Castin, Ablin, Peyré, ICML 2024",
        phrase,
    )


def heavy_token(attention: object, length: int, radius: float, *, head: int = 0) -> Construction:
    """Return a sequence of one heavy token, which gets most of the attention, and n − 1 copies of a light
    token.

    For a head with scores ⟨A x_i + b, x_j⟩ and the light token w, the heavy token is R y/|y| with y = Aw + b.
    w maximises the gap R|y| − ⟨y, w⟩ between the scores of both tokens. A needs no real eigenvalue.

    Parameters
    ----------
    attention, length, radius, head
        As in :func:`two_cluster`.

    Raises
    ------
    ArgumentError
        If an argument is out of range.

    References
    ----------
    Documentation page "Worst inputs, and lower bounds", section "No real eigenvalue is needed".

    """
    R, (chosen, give) = check_radius(radius), _of_head(attention, head)
    check_length(length, least=2)
    points = searched_tokens(chosen, R)[0]
    return give(
        "heavy_token",
        points,
        length,
        'howsmooth documentation, "Worst inputs, and lower bounds"',
        "R·y/|y| against copies of w, y = Aw + b, of largest gap",
    )


def two_heavy_tokens(attention: object, length: int, radius: float, *, head: int = 0) -> Construction:
    """Return a sequence of two heavy tokens, which share most of the attention, and n − 2 copies of a light
    token.

    The light token attends to both heavy tokens equally. The heavy tokens are R(cosθ ŷ ± sinθ v), where w is
    the light token, y = Aw + b, ŷ = y/|y| and v ⊥ ŷ. Of all w, θ and v that are tried, those with the largest
    certified lower bound under the attention's mask are taken.

    Parameters
    ----------
    attention, radius, head
        As in :func:`two_cluster`.
    length
        Number of tokens n >= 3.

    Raises
    ------
    ArgumentError
        If A and b are zero, V is zero, d = 1, or an argument is out of range.

    References
    ----------
    Documentation page "Worst inputs, and lower bounds", section "The tie".

    """
    R, (chosen, give) = check_radius(radius), _of_head(attention, head)
    check_length(length, least=3)
    causal = parameters_of(attention).masking == "causal"
    found = searched_pairs(chosen, length, R, masked=causal)
    if not found:
        raise ArgumentError(
            "attention",
            expected=f"d >= 2, and scores and values of head {head} that are not zero",
            got=repr(chosen),
        )
    return give(
        "two_heavy_tokens",
        found[0],
        length,
        'howsmooth documentation, "Worst inputs, and lower bounds"',
        "R(cosθ ŷ ± sinθ v) against copies of w, y = Aw + b",
    )


def balanced(attention: object, length: int, radius: float, *, head: int = 0) -> Construction:
    """Return a sequence of tokens that alternate between Ru and −Ru. The last token is zero and sees all
    tokens alike for every R.

    u is a unit vector orthogonal to the query bias b for which |Vu| |Aᵀu| is large. The local Lipschitz
    constant at these tokens grows like R² for every length.

    Parameters
    ----------
    attention, radius, head
        As in :func:`two_cluster`.
    length
        Number of tokens n >= 2.

    Raises
    ------
    ArgumentError
        If every u that is tried is parallel to b, or an argument is out of range.

    References
    ----------
    Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021; documentation page "Worst
    inputs, and lower bounds", section "Quadratic growth in R".

    """
    R, (chosen, give) = check_radius(radius), _of_head(attention, head)
    check_length(length, least=2)
    found = _balanced(chosen, give, length, R)
    if found is None:
        raise ArgumentError(
            "attention", expected=f"a direction orthogonal to the query bias of head {head}", got="none"
        )
    return found


def _balanced(chosen: Head, give: _Builder, length: int, R: float) -> Construction | None:
    directions = spread_directions(chosen)
    if not len(directions):
        return None
    moved = (directions @ chosen.V.mT).norm(dim=1) * (directions @ chosen.left @ chosen.right).norm(dim=1)
    u = directions[int(moved.argmax())]
    signs = 1 - 2 * (torch.arange(length - 1) % 2)
    return give(
        "balanced",
        HeavyTokens(signs[:, None] * (R * u), torch.zeros_like(u)),
        length,
        'howsmooth documentation, "Worst inputs, and lower bounds"',
        "Ru and −Ru in turns, and a last token of zero",
    )


def constructions(
    attention: object, length: int, radius: float, *, heads: Sequence[int] | None = None
) -> list[Construction]:
    """Return all inputs with a large local Lipschitz constant that this library can construct for the given
    attention.

    Parameters
    ----------
    attention, length, radius
        As in :func:`two_cluster`.
    heads
        Numbers of the heads; all heads by default.

    Raises
    ------
    ArgumentError
        If an argument is out of range.

    """
    R, n = check_radius(radius), check_length(length)
    parameters = parameters_of(attention)
    found: list[Construction] = []
    for h in range(len(parameters.heads)) if heads is None else heads:
        chosen, give = _of_head(attention, h)
        if n >= 2:
            for choice in ("paper", "max", "min"):
                points = two_cluster_points(chosen, R, choice)
                if points is None:
                    break
                built = two_cluster(attention, n, R, head=h, choice=choice)
                if not any(c.head == h and bool((c.x == built.x).all()) for c in found):
                    found.append(built)
            found.append(heavy_token(attention, n, R, head=h))
            if (spread := _balanced(chosen, give, n, R)) is not None:
                found.append(spread)
        # Two tokens of equal attention need two dimensions, scores and values.
        if n >= 3 and chosen.d >= 2 and chosen.A_norm + chosen.b_norm > 0 and chosen.V_norm > 0:
            found.append(two_heavy_tokens(attention, n, R, head=h))
    return found


def _of_head(attention: object, head: int) -> tuple[Head, _Builder]:
    """Return a head, and a function that makes a Construction of few tokens, in the attention's dtype."""
    parameters: Parameters = parameters_of(attention)
    count = len(parameters.heads)
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < count:
        raise ArgumentError("head", expected=f"a head from 0 to {count - 1}", got=repr(head))
    f = getattr(attention, "map", attention)

    def give(name: str, points: HeavyTokens, length: int, source: str, description: str) -> Construction:
        x = points.tokens(length)
        return Construction(
            name, x.to(f.query) if isinstance(f, SelfAttention) else x, head, source, description
        )

    return parameters.folded(head), give
