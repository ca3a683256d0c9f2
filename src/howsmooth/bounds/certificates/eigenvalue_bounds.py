"""Proved upper bounds on the largest eigenvalues of O B_i Oᵀ, for one matrix O and many matrices B_i.

The forms of the certificate consist of these. Small products are formed; of large ones B_i ≤ t N is proved
for a matrix N near (OᵀO)⁻¹. Proof: documentation page "Certificates at given tokens", section "Verified
norms".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.rounded_attention import row_blocks
from howsmooth.rounding import TINY, Enclosed, U, above, gamma, largest_eigenvalues_above, up

__all__ = ["FORMED", "dominated", "sandwich"]

FORMED = 128
"""Largest size of matrices O B Oᵀ that are formed. Eigenvalues of larger ones are bounded by domination."""

_BLOCK = 1 << 20  # number of entries of the matrices that are factorised in one call, which fit into a cache

# OᵀO may be singular, so this fraction of its Frobenius norm is added to its diagonal before it is inverted.
_REGULARISED = 1e-7

# Estimates of eigenvalues may be too small, so groups of matrices are filled up to this fraction.
_FULL = 0.9

# A column of zeros multiplies nothing, so the dominating matrix may be huge there.
_HUGE = 2.0**100

Groups = Sequence[Sequence[int]]
"""Indices of matrices B_i. The matrices of a group are proved together: B_i + B_j ≤ t N proves both."""


def sandwich(
    outer: Sequence[Float[Tensor, "rows _k"]],
    blocks: Sequence[Float[Tensor, "batch _k _k"]],
    slack: Sequence[Float[Tensor, " batch"]],
    guess: Float[Tensor, " batch"] | None = None,
) -> Enclosed:
    """Bound the largest eigenvalues of a batch of positive semidefinite matrices Σ_h O_h B^h O_hᵀ.

    ``outer`` has one matrix O_h for each head h, ``blocks`` one batch of matrices B^h, and ``slack`` bounds
    on the norm of a matrix that bounds the errors of B^h entry by entry. ``guess`` estimates the eigenvalues;
    without it they are computed.
    """
    squares = [o.square().sum() for o in outer]
    whole = torch.cat(tuple(outer), dim=1)
    rows, width = whole.shape
    error = sum(square * s for square, s in zip(squares, slack, strict=True))
    if guess is not None and rows > FORMED and bool(whole.any()):
        ends = list(itertools.accumulate(b.shape[1] for b in blocks))

        def subtract(a: Tensor, groups: Groups) -> None:
            members = torch.tensor([group[0] for group in groups])
            for b, end in zip(blocks, ends, strict=True):
                own = slice(end - b.shape[1], end)
                a[:, own, own].sub_(b[members])

        return dominated(whole, subtract, guess, up(torch.as_tensor(error)))
    factor = gamma(width + max(o.shape[1] for o in outer) + 6)
    for square, b, s in zip(squares, blocks, slack, strict=True):
        error = error + square * factor * (torch.linalg.matrix_norm(b) + s)
    found = []
    for part in row_blocks(len(blocks[0]), rows * max(width, rows)):
        middle = torch.cat([o @ b[part] for o, b in zip(outer, blocks, strict=True)], dim=-1)
        found.append(largest_eigenvalues_above(middle @ whole.mT, up(torch.as_tensor(error)[part])))
    return Enclosed(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def dominated(
    outer: Float[Tensor, "rows m"],
    subtract: Callable[[Tensor, Groups], None],
    guess: Float[Tensor, " batch"],
    slack: Float[Tensor, " batch"],
    *,
    largest: bool = False,
) -> Enclosed:
    """Bound the largest eigenvalue of each matrix O B_i Oᵀ without forming it. O must not be zero.

    ``subtract(a, groups)`` subtracts from each matrix of a batch the sum of the B_i of one group; it may
    leave out the upper triangle. ``guess`` estimates the eigenvalues, ``slack`` bounds how much the errors of
    B_i add to them. With ``largest`` only the largest bound of all is meant to be sharp, so that matrices of
    small eigenvalues are proved together, against the largest guess.
    """
    if not bool(guess.isfinite().all()):
        return Enclosed(torch.full_like(guess, torch.inf), guess)
    N, excess = _dominating(outer)
    t = (guess.amax().expand(len(guess)) if largest else guess) + TINY
    waiting = _groups(guess.tolist(), float(t[0])) if largest else [[i] for i in range(len(t))]
    memory = N.new_empty(max(1, min(len(waiting), _BLOCK // N.numel())), *N.shape)
    added, rise = slack.clone(), 1e-3
    while waiting:
        failed: list[list[int]] = []
        for first in range(0, len(waiting), len(memory)):
            part = waiting[first : first + len(memory)]
            heads = torch.tensor([group[0] for group in part])
            shifted = torch.mul(t[heads, None, None], N, out=memory[: len(part)])
            subtract(shifted, part)
            # The factors overwrite the matrices: where every call takes new memory, page faults cost half as
            # much as the factorisations. In LAPACK's order the lower triangle is the upper one.
            columns, info = shifted.mT, torch.empty(len(part), dtype=torch.int32)
            torch.linalg.cholesky_ex(columns, upper=True, out=(columns, info))
            for group, refused in zip(part, info.tolist(), strict=True):
                added[group] = slack[group].sum()
                failed += [group] if refused else []
        alone = [group[0] for group in failed if len(group) == 1]
        t[alone] = t[alone] * (1 + rise) + TINY
        rise *= 4 if alone else 1
        waiting = [[member] for group in failed for member in group]
    return Enclosed(above(t * excess + up(added) + TINY, 3), t)


def _dominating(outer: Float[Tensor, "rows m"]) -> tuple[Float[Tensor, "m m"], Float[Tensor, ""]]:
    """Return a matrix N near (OᵀO)⁻¹ and a number c near 1, on which the bounds of :func:`dominated` rest.

    If the Cholesky factorisation of t N − B succeeds, the largest eigenvalue of O B Oᵀ is at most c t, all
    rounding of the factorisation included.
    """
    m = outer.shape[1]
    size = outer.abs().amax(0)
    scale = torch.where(size > 0, torch.ldexp(torch.ones_like(size), -torch.frexp(size).exponent), _HUGE)
    scaled = outer * scale
    gram = scaled.mT @ scaled
    gram.diagonal().add_(_REGULARISED * torch.linalg.matrix_norm(gram))
    N = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    N = (N + N.mT) / 2
    enlarged = N.clone()
    cholesky = gamma(m + 4) / (1 - gamma(m + 4)) * m
    enlarged.diagonal().add_(up(cholesky * N.diagonal() + 4 * U * torch.linalg.matrix_norm(N)))
    slack = gamma(2 * m + 6) * scaled.square().sum() * torch.linalg.matrix_norm(enlarged)
    product = (scaled @ enlarged @ scaled.mT)[None]
    excess = largest_eigenvalues_above(product, up(slack)[None], guess=product.new_ones(1)).upper[0]
    return scale[:, None] * N * scale, excess  # scaling by powers of two is exact


def _groups(sizes: list[float], capacity: float) -> list[list[int]]:
    """Divide indices into groups of total size <= ``capacity``, the largest first."""
    groups: list[list[int]] = []
    room: list[float] = []
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        place = next((place for place, left in enumerate(room) if sizes[index] <= left), len(room))
        if place == len(room):
            groups.append([])
            room.append(_FULL * capacity)
        groups[place].append(index)
        room[place] -= sizes[index]
    return groups
