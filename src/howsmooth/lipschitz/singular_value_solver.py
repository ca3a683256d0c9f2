"""Singular value solvers for Jacobians, with the accuracy and the random seeds that the user requested."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.jacobian import AutodiffJacobian
from howsmooth.jacobian.packed_sequences import energy_products_together
from howsmooth.jacobian.padded_jacobian_batch import filled
from howsmooth.seeds import torch_seed
from howsmooth.spectral import LeadingTriplet, LinearOperator, golub_kahan, lanczos
from howsmooth.spectral.lanczos import lanczos_together

__all__ = ["Solver", "independent_seeds", "member_seeds", "starts"]

# Starts of at least this many entries are drawn by several threads.
_WORTH_A_THREAD = 1 << 14


@dataclass(frozen=True)
class Solver:
    """A solver for the largest singular value of the Jacobian at each of several sequences, with the
    requested accuracy.

    A seed determines the random start vector of its sequence. Sequences are named by their indices: a batch
    may hold any of them, in any order.
    """

    rtol: float
    confidence: float
    max_iterations: int
    seeds: Sequence[int]
    lengths: Sequence[int]

    def golub_kahan(
        self, operator: AutodiffJacobian, members: Sequence[int], *, judged: bool = False
    ) -> LeadingTriplet:
        """Find the largest singular values of a batch of Jacobians by Golub–Kahan bidiagonalisation.

        Here and in the methods below, ``judged`` says whether the caller checks the result in float64. The
        Jacobians were checked along the start vectors of their ``members`` (:meth:`starts_at`).
        """
        return golub_kahan(
            operator,
            self._starts(operator, members),
            image=operator.image,
            rtol=self.rtol,
            confidence=self.confidence,
            max_iterations=self.max_iterations,
            judged=judged,
        )

    def lanczos(
        self, operator: LinearOperator, members: Sequence[int], basis_bytes: int, *, judged: bool = False
    ) -> LeadingTriplet:
        """Find the largest singular values of a batch of Jacobians by Lanczos, with at most ``basis_bytes``
        bytes for the Krylov basis.
        """
        return lanczos(
            operator,
            self._starts(operator, members),
            rtol=self.rtol,
            confidence=self.confidence,
            max_iterations=self.max_iterations,
            basis_bytes=basis_bytes,
            judged=judged,
        )

    def together(
        self,
        operators: Sequence[LinearOperator],
        members: Sequence[Sequence[int]],
        *,
        judged: bool = False,
    ) -> list[LeadingTriplet]:
        """Find the largest singular values of several batches of Jacobians in the same steps, so that they
        share matrix products.

        The Jacobians are of one map, at sequences that may have different lengths.

        A member that is shorter than its operator has zeros in the tokens that it lacks.
        """
        return lanczos_together(
            operators,
            [self._starts(*parts) for parts in zip(operators, members, strict=True)],
            rtol=self.rtol,
            confidence=self.confidence,
            max_iterations=self.max_iterations,
            products=energy_products_together,
            sizes=[
                [self.lengths[i] * operator.in_shape[-1] for i in numbers]
                for operator, numbers in zip(operators, members, strict=True)
            ],
            judged=judged,
        )

    def starts_at(self, x: Float[Tensor, "members *in_shape"], members: Sequence[int]) -> Tensor:
        """Draw the start vectors of the sequences with the indices ``members``. The tokens ``x`` of these
        sequences determine the shape, dtype and device.
        """
        return _gaussian(tuple(x.shape[1:]), x.dtype, x.device, *self._drawn(members))

    def _starts(self, operator: LinearOperator, members: Sequence[int]) -> Tensor:
        return starts(operator, *self._drawn(members))

    def _drawn(self, members: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the random seeds and the lengths of the sequences with the indices ``members``."""
        return [self.seeds[i] for i in members], [self.lengths[i] for i in members]


def member_seeds(seed: int | Sequence[int], members: int) -> list[int]:
    """Return one 64-bit seed for each sequence of a batch, from which the random start vector of the solver
    is drawn.
    """
    if isinstance(seed, int):
        # Multiples of the golden ratio of 2^64 keep the streams of neighbouring seeds apart.
        return [(seed + member * 0x9E3779B97F4A7C15) % 2**64 for member in range(members)]
    if len(seed) != members:
        raise ArgumentError("seed", expected=f"an integer, or {members} of them", got=f"{len(seed)} integers")
    return [int(s) % 2**64 for s in seed]


def independent_seeds(seeds: Sequence[int], xs: Iterable[Tensor]) -> list[int]:
    """Replace each seed whose start vector repeats the tokens of its sequence, as it does where they were
    drawn from PyTorch's generator with this seed.

    The limits hold for starts that do not depend on the Jacobian. That of a norm layer is zero along its own
    tokens, so that a start along them shows nothing of it, and neither do shifted and rescaled ones.
    """
    changed = 0x9E3779B9 << 32  # makes it a seed that is hashed
    return [(s + changed) % 2**64 if _repeats(s, x) else s for s, x in zip(seeds, xs, strict=True)]


def _repeats(seed: int, x: Tensor) -> bool:
    """Return True if each token of ``x`` is a multiple of that of the start with this seed, or becomes one
    when its mean is subtracted. From the 32nd number on PyTorch draws the first 16 whatever follows.
    """
    if seed >= 2**32 or not x.numel():
        return False
    count = x.numel() if x.numel() < 32 else 16
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    width = min(x.shape[-1], count) if x.shape[-1] > 1 else count
    count -= count % width
    pair = torch.stack((x.detach().flatten()[:count].cpu().double(), drawn[:count])).unflatten(1, (-1, width))
    # Fewer than four numbers are near to multiples by chance once they are centred.
    for rows in (pair, pair - pair.mean(dim=-1, keepdim=True)) if width > 3 else (pair,):
        a, b = torch.nn.functional.normalize(rows, dim=-1)
        if bool(((a * b).sum(dim=-1).abs() > 1 - 1e-6).all()):
            return True
    return False


def starts(operator: LinearOperator, seeds: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Draw one Gaussian start vector for each sequence of a batch.

    A start has the length of its sequence, and is filled up with zero tokens to the operator's length.

    They are drawn on the CPU in float64, so that every device and dtype has the same starts.
    """
    return _gaussian(operator.in_shape, operator.dtype, operator.device, seeds, lengths)


def _gaussian(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    seeds: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    longest, *rest = shape

    def draw(seed: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(torch_seed(seed))
        start = torch.randn((length, *rest), generator=generator, dtype=torch.float64)
        start = start.to(dtype)
        return start if length == longest else filled(start, longest)

    if len(seeds) == 1 or math.prod(shape) < _WORTH_A_THREAD:
        members = list(map(draw, seeds, lengths))
    else:
        # PyTorch draws random numbers in one thread, and several draws in several threads run in parallel.
        with ThreadPoolExecutor() as pool:
            members = list(pool.map(draw, seeds, lengths))
    return torch.stack(members).to(device)
