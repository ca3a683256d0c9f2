"""The function ``local_lipschitz``, which measures the local Lipschitz constant of any map at given tokens or
at a measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import AbstractMeasure
from howsmooth.jacobian.closed_form import has_closed_form
from howsmooth.lipschitz.arguments import check_call
from howsmooth.lipschitz.measurement import Part, measured
from howsmooth.lipschitz.singular_value_solver import Solver, member_seeds
from howsmooth.lipschitz_estimate import FIELDS, LipschitzEstimate, LipschitzEstimates
from howsmooth.memory import memory_budget
from howsmooth.threads import with_fastest_threads
from howsmooth.words import function_name

__all__ = ["local_lipschitz"]


@overload
def local_lipschitz(
    f: Callable[[Tensor], Tensor],
    x: Tensor | AbstractMeasure,
    *,
    rtol: float = ...,
    confidence: float = ...,
    max_iterations: int = ...,
    seed: int | Sequence[int] = ...,
    method: str = ...,
    memory: int | None = ...,
    batch_dims: int | None = ...,
) -> LipschitzEstimate: ...


@overload
def local_lipschitz(
    f: Callable[[Tensor], Tensor],
    x: list[Tensor] | tuple[Tensor, ...],
    *,
    rtol: float = ...,
    confidence: float = ...,
    max_iterations: int = ...,
    seed: int | Sequence[int] = ...,
    method: str = ...,
    memory: int | None = ...,
    batch_dims: int | None = ...,
) -> LipschitzEstimates: ...


@with_fastest_threads
def local_lipschitz(
    f: Any,
    x: Any,
    *,
    rtol: float = 1e-4,
    confidence: float = 0.999,
    max_iterations: int = 200,
    seed: int | Sequence[int] = 0,
    method: str = "auto",
    memory: int | None = None,
    batch_dims: int | None = None,
) -> LipschitzEstimate | LipschitzEstimates:
    """Measure the local Lipschitz constant ‖D_X f‖₂ of ``f`` at each input X in ``x``.

    The solver is the Lanczos process on JᵀJ, J the Jacobian, from a random vector. Members run together, and
    each member stops when its interval is narrower than ``rtol``.

    At a discrete measure Σ_i a_i δ_{x_i} the constant is the weighted norm sup |J E|_a / |E|_a of the
    mean-field map, with |E|_a² = Σ_i a_i |e_i|² (Lemma C.5). It says how far the image of the measure
    moves in W₂ if each atom moves as a whole. For atoms that may split, see
    :func:`howsmooth.measures.wasserstein_lipschitz`.

    Parameters
    ----------
    f
        A map of this library (closed form), or any differentiable PyTorch map of tokens (..., n, d) to a
        tensor with the same leading axes (autodiff). Members of the batch must be independent.
    x
        Tokens (..., n, d), float32 or float64, batched over the leading axes (see ``batch_dims`` for vectors
        and images); or a list or tuple of sequences of tokens (n_i, d) with lengths n_i that may differ,
        which share matrix products; or a measure with atoms, at which maps of this library are measured in
        float64.
    rtol
        Relative width of the interval at which a member has converged. Intervals contain all rounding errors,
        so float64 seldom reaches less than 1e-7.
    confidence
        Probability, over the random start, with which each interval holds.
    max_iterations
        Largest number of steps of the solver. Each step takes one product with J and one with Jᵀ.
    seed
        Seed of the random start, of which the lowest 64 bits count: one integer, or one for each member. From
        one integer, every member i derives a stream of random numbers of its own. The result of a member
        depends on its input and its stream, and not on the other members of the batch.
    method
        "closed form", "autodiff", or "auto": closed form where there is one, else autodiff.
    memory
        Number of bytes that the closed form may use; by default half of the free memory. If the n² attention
        probabilities of each head do not fit, every product computes them again in blocks, in memory O(n d).
        The results are the same up to rounding. By autodiff, the float32 results of the maps of this library
        are checked in float64 if that fits, and ``scope`` says if it did not; the rest ignores this limit.
    batch_dims
        Number of leading axes of ``x`` that count members; by default all but the last two, which are
        tokens (n, d). With 1, images (batch, channels, height, width) or vectors (batch, d) are measured one
        by one by any ``f`` that takes such batches; with 0, ``x`` is one member. ``batch_dims`` is required
        if ``x`` is a matrix and ``f`` is no map of this library and acts on each row separately: the rows may
        be separate vectors, or tokens of one sequence, whose constant is the largest constant of a row.

    Returns
    -------
    LipschitzEstimate or LipschitzEstimates
        Values, intervals, status and directions. The result is a LipschitzEstimates, with values of shape
        (len(x),), for a list or tuple, and otherwise a LipschitzEstimate.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.
    NonFiniteError
        If ``x``, f(x) or a product is not finite, or the constant itself is beyond float64's range.
    DerivativeError
        If ``f`` cannot be differentiated, or its two derivatives disagree.

    References
    ----------
    Definition of the local constant: Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024,
    Section 3; at a measure: Definition C.4 and Lemma C.5. Interval: the documentation's pages "The spectral
    norm, with an interval" and "Rounding, proved".

    """
    check_call(f, x, rtol, confidence, max_iterations, method, batch_dims)
    closed = method != "autodiff" and has_closed_form(f)
    lead: torch.Size | None = torch.Size()
    members: Sequence[Tensor] | Tensor
    weighting = None
    if isinstance(x, AbstractMeasure):
        points, weights = x.weighted_tokens()
        members = points.detach().double()[None]
        weighting = Weighting(weights.log_weights.detach(), weights.positions)
    elif isinstance(x, Tensor):
        # The solver sees one axis of members; the axes of the batch come back at the end.
        leading = x.ndim - 2 if batch_dims is None else batch_dims
        lead, members = x.shape[:leading], x.detach().reshape(-1, *x.shape[leading:])
    else:
        lead, members = None, [one.detach() for one in x]
    clear = lead is None or batch_dims is not None or len(lead) > 0 or isinstance(f, TokenMap)
    parts, checked = measured(
        f,
        members,
        lead,
        weighting,
        Solver(rtol, confidence, max_iterations, member_seeds(seed, len(members))),
        memory_budget(memory, members[0].device),
        closed=closed,
        rows_are_tokens=clear,
    )
    found = _by_sequence(parts, [len(one) for one in members]) if lead is None else _by_batch(parts, lead)
    words = f.describe() if isinstance(f, TokenMap) else function_name(f)
    if isinstance(x, AbstractMeasure):
        words += f", at a measure of {len(members[0])} atoms"
    kind = LipschitzEstimates if lead is None else LipschitzEstimate
    return kind(
        **found,
        confidence=confidence,
        method="closed form" if closed else "autodiff",
        scope=words if checked else f"{words}; not checked in float64, for lack of memory",
        rtol=rtol,
        seed=seed if isinstance(seed, int) else tuple(seed),
    )


def _by_batch(parts: Sequence[Part], lead: torch.Size) -> dict[str, Any]:
    joined = {
        name: torch.cat([getattr(found, field) for _, found in parts]) for name, field in FIELDS.items()
    }
    return {name: tensor.reshape((*lead, *tensor.shape[1:])) for name, tensor in joined.items()}


def _by_sequence(parts: Sequence[Part], lengths: Sequence[int]) -> dict[str, Any]:
    """Join results that come sorted by the lengths of sequences, in the original order of the sequences."""
    rows = {i: (found, row) for numbers, found in parts for row, i in enumerate(numbers)}
    found: dict[str, Any] = {}
    for name, field in FIELDS.items():
        values = [getattr(rows[i][0], field)[rows[i][1]] for i in range(len(lengths))]
        # Directions have as many rows as the longest member of their batch; cut off the rows of padding.
        directions = name.endswith("direction")
        found[name] = (
            tuple(t[:n] for t, n in zip(values, lengths, strict=True)) if directions else torch.stack(values)
        )
    return found
