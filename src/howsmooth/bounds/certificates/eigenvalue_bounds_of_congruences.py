"""Proved upper bounds on the largest eigenvalues of O B_i Oᵀ for one matrix O and many matrices B_i.

The matrices O B_i Oᵀ are never formed. Proof: documentation page "Certificates at given tokens", section
"Verified norms", paragraph "By domination".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.rounding import TINY, Enclosed, U, gamma, largest_eigenvalues_above, up

__all__ = ["Domination"]

_BLOCK = 1 << 20  # number of entries of the matrices that are factorised in one call, which fit into a cache

# OᵀO may be singular, so this fraction of its Frobenius norm is added to its diagonal before it is inverted.
_REGULARISED = 1e-7

# Estimates of eigenvalues may be too small, so groups of matrices are filled up to this fraction.
_FULL = 0.9

# A column of zeros multiplies nothing, so the dominating matrix may be huge there.
_HUGE = 2.0**100


@dataclass(frozen=True, eq=False)
class Domination:
    """A matrix N and a number ``excess`` that bound the largest eigenvalue of O B Oᵀ for a fixed matrix O. If
    a symmetric matrix B satisfies B ≤ t N, the eigenvalue is at most excess · t.

    N is nearly the inverse of OᵀO, so ``excess`` is nearly 1. It includes the rounding errors of a Cholesky
    factorisation that proves B ≤ t N.
    """

    N: Float[Tensor, "m m"]
    excess: Float[Tensor, ""]

    @classmethod
    def of(cls, O: Float[Tensor, "rows m"]) -> Domination:  # noqa: E741
        """Compute the matrix N and the number ``excess`` for a nonzero matrix ``O``.

        N is close to (OᵀO)⁻¹.
        """
        m = O.shape[1]
        size = O.abs().amax(0)
        scale = torch.where(size > 0, torch.ldexp(torch.ones_like(size), -torch.frexp(size).exponent), _HUGE)
        scaled = O * scale
        gram = scaled.mT @ scaled
        gram.diagonal().add_(_REGULARISED * torch.linalg.matrix_norm(gram))
        N = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        N = (N + N.mT) / 2
        cholesky = gamma(m + 4) / (1 - gamma(m + 4)) * m
        added = up(cholesky * N.diagonal() + 4 * U * torch.linalg.matrix_norm(N))
        enlarged = N.clone()
        enlarged.diagonal().add_(added)
        slack = gamma(2 * m + 6) * scaled.square().sum() * torch.linalg.matrix_norm(enlarged)
        product = (scaled @ enlarged @ scaled.mT)[None]
        excess = largest_eigenvalues_above(product, up(slack)[None], guess=product.new_ones(1)).upper[0]
        # Scaling by powers of two is exact.
        return cls(scale[:, None] * N * scale, excess)

    def largest_eigenvalues(
        self,
        subtract: Callable[[Tensor, Tensor], None],
        guess: Float[Tensor, " batch"],
        slack: Float[Tensor, " batch"],
    ) -> Enclosed:
        """Return proved upper bounds on the largest eigenvalues of the matrices O B_i Oᵀ.

        ``subtract(a, members)`` subtracts the matrices B_i with these indices from a batch of matrices; it
        may leave out the upper triangle. ``guess`` estimates the eigenvalues. ``slack`` bounds how much the
        errors of B_i add to them.
        """
        t = guess + TINY
        memory = self._memory(len(t))
        waiting, rise = torch.arange(len(t)), 1e-3
        while len(waiting):
            failed = []
            for members in waiting.split(len(memory)):
                shifted = torch.mul(t[members, None, None], self.N, out=memory[: len(members)])
                subtract(shifted, members)
                failed.append(members[_not_positive_definite(shifted)])
            waiting = torch.cat(failed)
            t[waiting] = t[waiting] * (1 + rise) + TINY
            rise *= 4
        return Enclosed((t * self.excess + up(slack) + TINY) * (1 + 4 * U), t)

    def largest_of_all(
        self,
        subtract: Callable[[Tensor, Tensor], None],
        guesses: Float[Tensor, " batch"],
        slack: Float[Tensor, " batch"],
    ) -> Enclosed:
        """Return one proved upper bound on the largest eigenvalues of all matrices O B_i Oᵀ, for positive
        semidefinite B_i.

        ``subtract(a, members)`` subtracts the sum of the matrices B_i with these indices from one matrix; it
        may leave out the upper triangle. The other arguments are those of :meth:`largest_eigenvalues`.
        Matrices whose eigenvalues are small are proved together: a bound on the eigenvalues of
        O (B_i + B_j) Oᵀ is one for both.
        """
        t = guesses.amax() + TINY
        added, rise = slack.amax(), 1e-3
        waiting = _groups(guesses.tolist(), float(t))
        memory = self._memory(len(waiting))
        while waiting:
            failed = []
            for first in range(0, len(waiting), len(memory)):
                part = waiting[first : first + len(memory)]
                shifted = memory[: len(part)].copy_(t * self.N)
                for a, group in zip(shifted, part, strict=True):
                    subtract(a, torch.tensor(group))
                refused = _not_positive_definite(shifted).tolist()
                failed += [group for group, no in zip(part, refused, strict=True) if no]
                added = max([added, *(slack[group].sum() for group in part)])
            waiting = [[member] for group in failed for member in group]
            if any(len(group) == 1 for group in failed):
                # A matrix alone is not below t N, so t was too small.
                t = t * (1 + rise) + TINY
                rise *= 4
        return Enclosed((t * self.excess + up(added) + TINY) * (1 + 4 * U), t)

    def _memory(self, count: int) -> Float[Tensor, "block m m"]:
        """Return uninitialised memory for as many of ``count`` matrices as are factorised in one call."""
        return self.N.new_empty(max(1, min(count, _BLOCK // self.N.numel())), *self.N.shape)


def _not_positive_definite(a: Float[Tensor, "batch m m"]) -> Bool[Tensor, " batch"]:
    """Factorise symmetric matrices, of which the lower triangles are read, and return for each whether its
    Cholesky factorisation fails.

    The factors overwrite the contiguous matrices: where every call takes new memory, the system's page
    faults cost half as much as the factorisations.
    """
    columns = a.mT  # LAPACK's order of the entries, in which the lower triangle is the upper one
    info = torch.empty(len(a), dtype=torch.int32)
    torch.linalg.cholesky_ex(columns, upper=True, out=(columns, info))
    return info != 0


def _groups(sizes: list[float], capacity: float) -> list[list[int]]:
    """Divide the indices of given numbers into groups, such that the numbers of a group sum to at most
    ``capacity``.

    The largest numbers are assigned first. No number may exceed ``capacity``.
    """
    groups: list[list[int]] = []
    room: list[float] = []
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        for place, left in enumerate(room):
            if sizes[index] <= left:
                groups[place].append(index)
                room[place] -= sizes[index]
                break
        else:
            groups.append([index])
            room.append(_FULL * capacity - sizes[index])
    return groups
