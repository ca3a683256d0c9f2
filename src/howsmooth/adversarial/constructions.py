"""Inputs at which attention is provably steep: the paper's two clusters, and ours.

Each has its heavy tokens first, which causal attention needs and unmasked attention does not mind. What
the constant is at least there is a theorem: ``howsmooth.bounds`` evaluates it at the same tokens.
Derivations: docs/theory/worst-inputs.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.bounds.bound import check_length, check_radius
from howsmooth.bounds.parameters import Head, Parameters, parameters_of
from howsmooth.bounds.witness import Witness, best_ties, steepest_pairs, two_cluster_points
from howsmooth.errors import ArgumentError

__all__ = ["Construction", "constructions", "no_real_eigenvalue", "tie", "two_cluster"]

_CHOICES = ("paper", "max", "min")


@dataclass(frozen=True, eq=False)
class Construction:
    """Tokens built to make an attention steep.

    Attributes
    ----------
    name
        Of the function that built it.
    x
        Tokens (n, d), in the dtype and on the device of the attention.
    head
        The head whose A and W_h V_h they were built for.
    source
        Theorem and paper, or where it is derived.
    description
        One phrase.

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
    attention: object, length: int, radius: float, head: int = 0, choice: str = "paper"
) -> Construction:
    """Return the paper's two clusters: Ru once and Ru/2 else, or Ru once and −Ru else.

    u is a unit eigenvector of A for γ_max in the first case, for γ_min in the second.

    Parameters
    ----------
    attention
        A Head, a SelfAttention without rotary positions, or a captured site of one.
    length
        Number of tokens n >= 2.
    radius
        Radius R > 0 of the ball that holds the tokens.
    head
        The head whose A is used.
    choice
        "paper": the first case if γ_max/8 >= −γ_min, else the second. "max" or "min" forces one.

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
            remedy="no_real_eigenvalue(attention, length, radius) needs none.",
        )
    half = float(points.heavy @ points.light) > 0
    phrase = "Ru against Ru/2, u for γ_max" if half else "Ru against −Ru, u for γ_min"
    return give(
        "two_cluster",
        points,
        length,
        "Section 5.2 and Proposition 3.4, Castin, Ablin, Peyré, ICML 2024",
        phrase,
    )


def no_real_eigenvalue(attention: object, length: int, radius: float, head: int = 0) -> Construction:
    """Return Ry/|y| once and w else, y = Aw + b, where w makes the gap of scores R|y| − ⟨y, w⟩ largest.

    For every A, real eigenvalues or not.

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
    This library: docs/theory/worst-inputs.md.

    """
    R, (chosen, give) = check_radius(radius), _of_head(attention, head)
    check_length(length, least=2)
    points = steepest_pairs(chosen, R)[0]
    return give(
        "no_real_eigenvalue",
        points,
        length,
        "howsmooth, docs/theory/worst-inputs.md",
        "R·y/|y| against copies of w, y = Aw + b, of largest gap",
    )


def tie(attention: object, length: int, radius: float, head: int = 0) -> Construction:
    """Return two heavy tokens R(cosθ ŷ ± sinθ v) and copies of w, which cannot decide between them.

    y = Aw + b, ŷ = y/|y|, v ⊥ ŷ; w, θ and v are those of the largest certified value that was found, with
    the attention's own masking.

    Parameters
    ----------
    attention, radius, head
        As in :func:`two_cluster`.
    length
        Number of tokens n >= 3.

    Raises
    ------
    ArgumentError
        If A and b are zero, V is zero or d = 1, or an argument is out of range.

    References
    ----------
    This library: docs/theory/worst-inputs.md.

    """
    R, (chosen, give) = check_radius(radius), _of_head(attention, head)
    check_length(length, least=3)
    found = best_ties(chosen, length, R, masked=_is_causal(attention))
    if not found:
        raise ArgumentError(
            "attention",
            expected=f"d >= 2, and scores and values of head {head} that are not zero",
            got=repr(chosen),
        )
    return give(
        "tie",
        found[0],
        length,
        "howsmooth, docs/theory/worst-inputs.md",
        "R(cosθ ŷ ± sinθ v) against copies of w, y = Aw + b",
    )


def constructions(
    attention: object, length: int, radius: float, heads: Sequence[int] | None = None
) -> list[Construction]:
    """Return every construction that applies, for each of the heads.

    Parameters
    ----------
    attention, length, radius
        As in :func:`two_cluster`.
    heads
        All by default.

    Raises
    ------
    ArgumentError
        If an argument is out of range.

    """
    R, n = check_radius(radius), check_length(length)
    parameters = parameters_of(attention)
    found: list[Construction] = []
    for h in range(len(parameters.heads)) if heads is None else heads:
        chosen, _ = _of_head(attention, h)
        if n >= 2:
            for choice in ("paper", "max", "min"):
                points = two_cluster_points(chosen, R, choice)
                if points is None:
                    break
                built = two_cluster(attention, n, R, h, choice)
                if not any(c.head == h and bool((c.x == built.x).all()) for c in found):
                    found.append(built)
            found.append(no_real_eigenvalue(attention, n, R, h))
        if n >= 3 and _has_tie(chosen):
            found.append(tie(attention, n, R, h))
    return found


def _has_tie(head: Head) -> bool:
    """Tell whether a head has a tie: d >= 2, and scores and values that are not zero."""
    return head.d >= 2 and head.A_norm + head.b_norm > 0 and head.V_norm > 0


class _Give:
    """Puts a witness into the dtype and onto the device of the attention."""

    def __init__(self, attention: object, head: int) -> None:
        f = _map_of(attention)
        self.like = f.query if isinstance(f, SelfAttention) else None
        self.head = head

    def __call__(
        self, name: str, points: Witness, length: int, source: str, description: str
    ) -> Construction:
        x = points.tokens(length)
        if self.like is not None:
            x = x.to(self.like)
        return Construction(name, x, self.head, source, description)


def _of_head(attention: object, head: int) -> tuple[Head, _Give]:
    parameters: Parameters = parameters_of(attention)
    count = len(parameters.heads)
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < count:
        raise ArgumentError("head", expected=f"a head from 0 to {count - 1}", got=repr(head))
    return parameters.folded(head), _Give(attention, head)


def _map_of(attention: object) -> object:
    return getattr(attention, "map", attention)


def _is_causal(attention: object) -> bool:
    return parameters_of(attention).masking == "causal"
