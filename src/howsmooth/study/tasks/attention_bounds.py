"""Compute all bounds on one attention at one sequence, or say why a bound is left out."""

from __future__ import annotations

from typing import Any

import torch

from howsmooth.attention import SelfAttention
from howsmooth.bounds.bound import Quantity
from howsmooth.bounds.problem import Problem
from howsmooth.bounds.selection import applicable_bounds
from howsmooth.errors import HowsmoothError
from howsmooth.study.records import SiteBound, SiteBounds

__all__ = ["bound_site"]

# Bounds that are left out because they would take longer than the measurement.
_SEARCHES = frozenset(
    {"two_heavy_tokens_lower_bound", "causal_two_heavy_tokens_lower_bound", "heavy_token_lower_bound"}
)
# The largest numbers of tokens at which bounds are computed that take long. The last one takes a singular
# value decomposition of the (n, n) probabilities.
_MOST_TOKENS = {
    "certificate_heads": 256,
    "certificate_parts": 256,
    "certificate_rows": 256,
    "certificate_frobenius": 256,
    "covariance_upper_bound": 256,
    "yudin_theorem_3": 1024,
}
_WIDE, _MOST_TOKENS_IF_WIDE = 512, 64


def bound_site(site: Any) -> SiteBounds:
    """Compute all bounds on one attention of a model, at the sequence of tokens that it receives.

    Some bounds are left out to save time: searches over inputs (``howsmooth attack`` makes them); the
    certificates and ``covariance_upper_bound`` at more than 256 tokens; in 512 or more dimensions, the joint
    certificate of several heads at more than 64 tokens; and ``yudin_theorem_3`` at more than 1,024 tokens.
    The other bounds form no (n, n) matrix.

    Parameters
    ----------
    site
        A site that :func:`howsmooth.models.capture` returned, with one of the scopes of attention alone.

    Returns
    -------
    SiteBounds
        One entry for each bound; if there is none, its source gives the reason.

    """
    try:
        question = Problem.of(site)
        statements = [
            (side, name, evaluate)
            for side in ("upper", "lower")
            for name, evaluate in applicable_bounds(question, side=side)
        ]
    except HowsmoothError as error:
        return SiteBounds(float(site.radius_max[0]), (_nothing("any", "upper", Quantity.LOCAL, error),))
    ball = Quantity.MASKED if site.causal else Quantity.GLOBAL
    found = []
    for side, name, evaluate in statements:
        quantity = ball if name in _SEARCHES else Quantity.LOCAL
        if cost := _cost(name, question):
            found.append(SiteBound(name, side, str(quantity), None, None, False, cost))
            continue
        try:
            bound = evaluate()
        except _NO_BOUND as error:
            found.append(_nothing(name, side, quantity, error))
            continue
        failed = "; ".join(h.statement for h in bound.hypotheses if not h.holds)
        found.append(
            SiteBound(
                name=bound.name,
                side=bound.side,
                quantity=str(bound.quantity),
                value=None if failed else bound.value,
                log_value=None if failed else bound.log_value,
                holds=not failed,
                source=f"{bound.source} (needs: {failed})" if failed else bound.source,
            )
        )
    return SiteBounds(question.radius, tuple(found))


def _nothing(name: str, side: str, quantity: Quantity, error: Exception) -> SiteBound:
    words = " ".join(str(error).split()) or type(error).__name__
    return SiteBound(name, side, str(quantity), None, None, False, words)


# Errors that mean "no bound": a hypothesis fails, eigenvalues do not converge, or a formula overflows.
_NO_BOUND = (HowsmoothError, torch.linalg.LinAlgError, ArithmeticError)  # type: ignore[attr-defined]


def _cost(name: str, question: Problem) -> str:
    """Return why a bound takes too long for this number or dimension of tokens; empty if it does not."""
    if name in _SEARCHES:
        return "left out: it needs a search over inputs; howsmooth bound computes it"
    d = question.attention.d if isinstance(question.attention, SelfAttention) else 0
    wide = name == "certificate_heads" and d >= _WIDE
    most = _MOST_TOKENS_IF_WIDE if wide else _MOST_TOKENS.get(name)
    if most is None or (question.length or 0) <= most:
        return ""
    where = f" in {_WIDE} or more dimensions" if wide else ""
    return f"left out: it takes long at more than {most} tokens{where}; howsmooth bound computes it"
