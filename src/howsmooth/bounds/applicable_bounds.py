"""The list of all bounds that apply to a given attention, and the choice of the tightest one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.bounds.attention_parameters import Head, Parameters, parameters_of
from howsmooth.bounds.ball_lower_bounds import (
    causal_two_cluster_lower_bound,
    causal_two_heavy_tokens_lower_bound,
    equal_tokens_lower_bound,
    heavy_token_lower_bound,
    proposition_3_4,
    quadratic_growth,
    two_cluster_lower_bound,
    two_heavy_tokens_lower_bound,
)
from howsmooth.bounds.ball_upper_bounds import (
    ball_upper_bound,
    mean_field_upper_bound,
    theorem_3_3,
    theorem_3_5,
    theorem_e_3,
)
from howsmooth.bounds.bound import Bound
from howsmooth.bounds.bound_problem import Problem
from howsmooth.bounds.certificates import certificate
from howsmooth.bounds.large_radius_bounds import theorem_3_7, theorem_4_5
from howsmooth.bounds.local_upper_bounds import (
    diameter_upper_bound,
    theorem_c_3,
    yudin_theorem_3,
)
from howsmooth.bounds.masked_ball_upper_bounds import (
    causal_ball_upper_bound,
    causal_mean_field_upper_bound,
    masked_ball_upper_bound,
    theorem_4_3,
    theorem_4_4,
)
from howsmooth.bounds.mean_field_lower_bounds import (
    proposition_3_6,
    proposition_3_6_rate,
    two_dirac,
    weighted_two_atom_lower_bound,
)
from howsmooth.bounds.modified_score_upper_bounds import any_scores_ball_upper_bound
from howsmooth.bounds.multi_head_upper_bounds import (
    folded_gram_upper_bound,
    gram_upper_bound,
    lemma_3_8,
    output_norm_upper_bound,
)
from howsmooth.errors import ArgumentError

__all__ = ["Statement", "all_bounds", "applicable_bounds", "best"]


Statement = Callable[[], Bound]
"""A function without arguments that computes a bound."""


def all_bounds(problem: Problem, *, side: str | None = None) -> list[Bound]:
    """Compute all bounds that are defined for this kind of attention, even where a hypothesis fails.

    They are the bounds at the tokens X, if the problem has X; the bounds on the ball for n tokens, if it has
    a length; and the bounds on the ball that hold for every length.
    """
    return [evaluate() for _, evaluate in applicable_bounds(problem, side=side)]


def applicable_bounds(problem: Problem, *, side: str | None = None) -> list[tuple[str, Statement]]:
    """List the names of the bounds that apply to an attention, with functions that compute them."""
    found: list[tuple[str, Statement]] = []
    f = problem.attention
    rotary = isinstance(f, SelfAttention) and f.rotary is not None
    if isinstance(f, SelfAttention) and (rotary or f.feature_names()):
        if side != "lower":
            found += _at_tokens(problem, rotary=True)
            if problem.length is not None:
                found += _each((any_scores_ball_upper_bound,), f, problem.length, problem.radius)
        return found
    if side != "lower":
        found += _at_tokens(problem, rotary=False) + _on_the_ball(problem)
    if side != "upper":
        found += _from_below(problem)
    return found


def _each(statements: Iterable[Callable[..., Bound]], *arguments: object) -> list[tuple[str, Statement]]:
    return [(statement.__name__, partial(statement, *arguments)) for statement in statements]


def _on_the_ball(problem: Problem) -> list[tuple[str, Statement]]:
    parameters = _parameters(problem)
    n, radius = problem.length, problem.radius
    if len(parameters.heads) > 1:
        if n is None:
            return []
        several = (lemma_3_8, output_norm_upper_bound, gram_upper_bound, folded_gram_upper_bound)
        return _each(several, parameters, n, radius)
    head = problem.attention if isinstance(problem.attention, Head) else parameters
    if parameters.masking == "none":
        free = _each((theorem_3_5, mean_field_upper_bound), head, radius)
        return (
            free
            if n is None
            else [*free, *_each((theorem_3_3, theorem_e_3, ball_upper_bound), head, n, radius)]
        )
    if parameters.masking == "causal":
        free = _each((theorem_4_4, causal_mean_field_upper_bound), head, radius)
        return free if n is None else [*free, *_each((theorem_4_3, causal_ball_upper_bound), head, n, radius)]
    return [] if n is None else _each((masked_ball_upper_bound,), head, n, radius)


def _at_tokens(problem: Problem, *, rotary: bool) -> list[tuple[str, Statement]]:
    X, attention = problem.X, problem.attention
    if X is None:
        return []

    certified = [("certificate", lambda: certificate(attention, X).bound())]
    if isinstance(attention, SelfAttention) and attention.feature_names():
        norms = (attention.query_norm, attention.key_norm)
        known = all(norm is None or norm.d == attention.key_dim for norm in norms)
        return certified if known else []
    if rotary or _heads(attention) > 1:
        return certified
    limit = theorem_4_5 if _parameters(problem).masking == "causal" else theorem_3_7
    local = (theorem_c_3, diameter_upper_bound, yudin_theorem_3)
    return [*certified, *_each((limit,), attention, X, 1.0), *_each(local, attention, X)]


def _heads(attention: Head | Parameters | SelfAttention) -> int:
    if isinstance(attention, Parameters):
        return len(attention.heads)
    return attention.heads if isinstance(attention, SelfAttention) else 1


def _from_below(problem: Problem) -> list[tuple[str, Statement]]:
    parameters, n, radius = _parameters(problem), problem.length, problem.radius
    if parameters.masking == "other":
        return []
    if n is None:
        if parameters.masking == "causal" or len(parameters.heads) > 1:
            return []
        mean_field = (
            proposition_3_6,
            weighted_two_atom_lower_bound,
            proposition_3_6_rate,
            two_dirac,
        )
        return _each(mean_field, parameters, radius)
    causal = parameters.masking == "causal"
    ties = causal_two_heavy_tokens_lower_bound if causal else two_heavy_tokens_lower_bound
    found = _each((heavy_token_lower_bound, equal_tokens_lower_bound, ties), parameters, n, radius)
    if len(parameters.heads) == 1:
        one_head = [causal_two_cluster_lower_bound] if causal else [proposition_3_4, two_cluster_lower_bound]
        found += _each((*one_head, quadratic_growth), parameters, n, radius)
        if problem.X is not None:
            limit = theorem_4_5 if causal else theorem_3_7
            found.append((limit.__name__, partial(limit, parameters, problem.X, 1.0, side="lower")))
    return found


def _parameters(problem: Problem) -> Parameters:
    return parameters_of(problem.attention)


def best(
    attention: object,
    X: Tensor | None = None,
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
        Tokens (n, d) for a bound on ‖D_X f‖; None for a bound on the Lipschitz constant on B_R^n.
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
    if side not in ("upper", "lower"):
        raise ArgumentError("side", expected="'upper' or 'lower'", got=repr(side))
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
    if not candidates:
        if side == "lower" and isinstance(problem.attention, SelfAttention):
            parameters_of(problem.attention)  # raises an error about rotary positions and other scores
        if problem.length is not None:
            failed = {h.statement: None for bound in found for h in bound.hypotheses if not h.holds}
            raise ArgumentError(
                "attention",
                expected=f"what a bound needs: {'; '.join(failed) or 'no mask, or a causal one'}",
                got=f"one for which no {side} bound holds",
            )
        raise ArgumentError(
            "length",
            expected=f"a number of tokens, as no {side} bound for this attention holds for every length",
            got="None",
        )
    choose = min if side == "upper" else max
    return choose(candidates, key=lambda bound: bound.log_value)
