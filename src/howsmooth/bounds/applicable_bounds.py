"""The bounds that apply to a given attention, and the choice of the tightest one."""

from __future__ import annotations

from howsmooth.attention import SelfAttention
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.bounds.bound import Bound, Side
from howsmooth.bounds.bound_problem import Problem, check_side
from howsmooth.bounds.catalogue import CATALOGUE, Statement
from howsmooth.errors import ArgumentError

__all__ = ["all_bounds", "applicable_bounds", "best"]


def applicable_bounds(problem: Problem, *, side: str | None = None) -> list[tuple[Statement[Problem], Side]]:
    """List the bounds of the catalogue that apply to a problem, each with its side: "upper" or "lower".

    They are the bounds at the tokens X, if the problem has X; the bounds on the ball for n tokens, if it has
    a length; and the bounds on the ball that hold for every length.
    """
    return [(made, one) for made in CATALOGUE.values() for one in made.sides(problem) if side in (None, one)]


def all_bounds(problem: Problem, *, side: str | None = None) -> list[Bound]:
    """Compute all bounds that :func:`applicable_bounds` lists, also those whose hypotheses fail."""
    return [statement.at(problem, one) for statement, one in applicable_bounds(problem, side=side)]


def best(
    attention: object,
    X: object = None,
    length: object = None,
    radius: object = None,
    *,
    side: str = "upper",
) -> Bound:
    """Return the tightest bound whose hypotheses hold: the smallest upper or the largest lower bound.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.SelfAttention`, a :class:`Head`, or a captured site. For a site, ``X``
        defaults to its tokens if no length is given.
    X
        Tokens (n, d), a tensor, an array or nested lists, for a bound on ‖D_X f‖; None for a bound on the
        Lipschitz constant on B_R^n.
    length
        Sequence length n. If both ``length`` and ``X`` are None, the bound holds for every length
        (mean-field).
    radius
        R, the largest norm of a token. Default: the radius of the norm layer before the attention of a site,
        else the norm of the longest token of X.
    side
        "upper" or "lower". Lower bounds are on the Lipschitz constant on B_R^n only; at given tokens,
        ``local_lipschitz(attention, X).lower`` is a lower bound.

    Returns
    -------
    Bound

    Raises
    ------
    ArgumentError
        If an argument does not fit, or no bound applies: a map that is not attention alone, or whose matrices
        are not known; several heads, rotary positions or other scores and no length; ``side="lower"`` with
        these scores, or with X.
    NonFiniteError
        If an entry of X is NaN or infinite.

    """
    side = check_side(side)
    problem = Problem.of(attention, X, length, radius)
    if side == "lower" and problem.X is not None:
        raise ArgumentError(
            "side",
            expected="'upper' with X",
            got="'lower'",
            remedy="local_lipschitz(attention, X).lower is a lower bound at X; "
            "for a bound on B_R^n, pass a length instead of X.",
        )
    found = all_bounds(problem, side=side)
    candidates = [bound for bound in found if bound.holds]
    if candidates:
        return (min if side == "upper" else max)(candidates, key=lambda bound: bound.log_value)
    if side == "lower" and isinstance(problem.attention, SelfAttention):
        parameters_of(problem.attention)  # raises an error about rotary positions and other scores
    if problem.length is None:
        words = f"as no {side} bound for this attention holds for every length"
        raise ArgumentError("length", expected=f"a number of tokens, {words}", got="None")
    failed = {h.statement: None for bound in found for h in bound.hypotheses if not h.holds}
    raise ArgumentError(
        "attention",
        expected=f"what a bound needs: {'; '.join(failed) or 'no mask, or a causal one'}",
        got=f"one for which no {side} bound holds",
    )
