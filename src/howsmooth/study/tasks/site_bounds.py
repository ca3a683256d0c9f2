"""Bounds at the sequences of a study: all that apply, or the reason why one of them is left out."""

from __future__ import annotations

from typing import Any

import torch

from howsmooth.attention import SelfAttention
from howsmooth.bounds.bound import Quantity
from howsmooth.bounds.problem import Question
from howsmooth.bounds.selection import applicable_bounds
from howsmooth.errors import HowsmoothError
from howsmooth.study.records import SiteBound, SiteBounds

__all__ = ["bound_site"]

# What is left out, since it would take longer than the measurements that it stands beside.
_SEARCHES = frozenset(
    {"two_heavy_tokens_lower_bound", "causal_two_heavy_tokens_lower_bound", "heavy_token_lower_bound"}
)
_SLOW = frozenset(
    {
        "certificate_heads",
        "certificate_parts",
        "certificate_rows",
        "certificate_frobenius",
        "covariance_upper_bound",
    }
)
_MOST_TOKENS = 256
# A singular value decomposition of the probabilities.
_CUBIC = frozenset({"yudin_theorem_3"})
_MOST_TOKENS_IF_CUBIC = 1024
_WIDE, _MOST_TOKENS_IF_WIDE = 512, 64


def bound_site(site: Any) -> SiteBounds:
    """Compute all bounds on a captured attention at its tokens, one sequence.

    Left out are searches over inputs (``howsmooth attack`` makes them), at more than 256 tokens the
    certificates and ``covariance_upper_bound``, in 512 or more dimensions the joint certificate of several
    heads at more than 64 tokens, and ``yudin_theorem_3`` at more than 1,024. The others form no matrix of all
    pairs of tokens.

    Parameters
    ----------
    site
        As :func:`howsmooth.models.capture` returns it, of one of the scopes that are attention alone.

    Returns
    -------
    SiteBounds
        With one entry a bound; where there is none, its source says why.

    """
    try:
        question = Question.of(site)
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
        try:
            _check_cost(name, question)
            bound = evaluate()
        except _NO_BOUND as error:
            found.append(_nothing(name, side, ball if name in _SEARCHES else Quantity.LOCAL, error))
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


class _LeftOutError(HowsmoothError):
    """A bound that would take too long."""


# Eigenvalues of extreme matrices may not converge; a formula may overflow.
_NO_BOUND = (HowsmoothError, torch.linalg.LinAlgError, ArithmeticError)  # type: ignore[attr-defined]


def _check_cost(name: str, question: Question) -> None:
    """Leave out what would take too long.

    Raises
    ------
    _LeftOutError
        Saying why.

    """
    n = question.length or 0
    d = question.attention.d if isinstance(question.attention, SelfAttention) else 0
    if name in _SEARCHES:
        raise _LeftOutError("left out: a search over inputs, which howsmooth bound carries out")
    wide = name == "certificate_heads" and d >= _WIDE
    most = _MOST_TOKENS_IF_WIDE if wide else _MOST_TOKENS
    if name in _CUBIC:
        most = _MOST_TOKENS_IF_CUBIC
    if name in _SLOW | _CUBIC and n > most:
        where = f" in {_WIDE} or more dimensions" if wide else ""
        raise _LeftOutError(
            f"left out: it takes long at more than {most} tokens{where}; howsmooth bound computes it"
        )
