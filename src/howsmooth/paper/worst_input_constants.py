"""Measure the heads of a layer at the worst inputs of Section 5.2: at the paper's tokens, as the published
code does, and at tokens that a search finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from howsmooth import lipschitz
from howsmooth.adversarial import ascend, two_cluster
from howsmooth.attention import SelfAttention
from howsmooth.bounds import best, theorem_3_3, theorem_4_3, theorem_e_3
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.paper.bench import Values
from howsmooth.paper.published_code import power_iteration, wrong_slices
from howsmooth.paper.worst_input_pictures import HEAD

__all__ = ["at_papers_tokens", "at_published_tokens", "at_searched_tokens"]

_RTOL = 1e-4


def at_papers_tokens(
    f: SelfAttention | None, head: SelfAttention, radius: float, n: int, seed: int
) -> Iterator[Values]:
    """Yield the constants of all heads of a layer at the paper's two-cluster tokens in a ball, and this
    library's and the paper's bound for one head. If the paper does not treat the scores, ``f`` is None, and
    only the first bound is known.
    """
    uppers = {"upper": best(head, length=n, radius=radius)}
    if f is not None:
        biased = f.query_bias is not None
        theorem = theorem_4_3 if f.causal else theorem_e_3 if biased else theorem_3_3
        uppers["theirs"] = theorem(head, n, radius)
        for h in _real(f):
            x = two_cluster(f.head(h), n, radius).x
            yield {"kind": "paper", "name": "two_cluster", "head": h, **_measured(f.head(h), x, seed)}
    for kind, bound in uppers.items():
        yield {"kind": kind, "name": bound.name, "head": HEAD, "log_value": bound.log_value}


def at_searched_tokens(
    head: SelfAttention, effort: dict[str, Any], radius: float, n: int, seed: int
) -> Iterator[Values]:
    """Yield the constant of a head at the worst tokens in a ball that a search finds."""
    found = ascend(head, n, radius, seed=seed, **effort)
    yield {"kind": "search", "name": found.start, "head": HEAD, **_measured(head, found.x, seed)}


def at_published_tokens(f: SelfAttention, fused: bool, radius: float, n: int, seed: int) -> Iterator[Values]:
    """Yield what the published code computes for each head at the two-cluster tokens that it constructs. From
    a fused weight, which it slices along the wrong axis, these are not the paper's tokens; then the constants
    there are also measured correctly.
    """
    sliced = wrong_slices(f) if fused else f
    for h in _real(sliced):
        x = two_cluster(sliced.head(h), n, radius).x
        what = {"name": "two_cluster", "head": h}
        if fused:
            yield {"kind": "wrong slices", **what, **_measured(f.head(h), x, seed)}
        theirs = power_iteration(f.head(h), x, output=True, absolute=True, seed=seed)
        yield {"kind": "as published", **what, "value": theirs.value, "converged": theirs.settled}


def _real(f: SelfAttention) -> list[int]:
    """Return the heads whose A has a real eigenvalue: the paper's tokens exist only for these."""
    return [h for h, head in enumerate(parameters_of(f).heads) if head.real_eigenpairs]


def _measured(head: SelfAttention, x: Tensor, seed: int) -> Values:
    found = lipschitz.local_lipschitz(head, x, rtol=_RTOL, seed=seed)
    return {"value": float(found.value), "converged": bool(found.converged)}
