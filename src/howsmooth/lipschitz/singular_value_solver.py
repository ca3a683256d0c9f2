"""The solver for Jacobians, with the accuracy and the random starts that the user requested."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.jacobian.unequal_lengths import energy_products_together, filled
from howsmooth.seeds import random_stream
from howsmooth.spectral import LeadingTriplet, LinearOperator, lanczos
from howsmooth.spectral.lanczos import lanczos_together

__all__ = ["Solver", "member_seeds"]

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

    def alone(
        self,
        operator: LinearOperator,
        members: Sequence[int],
        *,
        start: Tensor | None = None,
        basis_bytes: int | None = None,
    ) -> LeadingTriplet:
        """Find the largest singular values of a batch of Jacobians.

        The argument ``start`` has the :meth:`starts` of the members, if they are drawn already, and
        ``basis_bytes`` is the number of bytes for the Krylov basis, if it is limited.
        """
        if start is None:
            start = self.starts(members, operator.in_shape, operator.dtype, operator.device)
        return lanczos(
            operator,
            start,
            rtol=self.rtol,
            confidence=self.confidence,
            max_iterations=self.max_iterations,
            basis_bytes=basis_bytes,
        )

    def together(
        self,
        operators: Sequence[LinearOperator],
        members: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
    ) -> list[LeadingTriplet]:
        """Find the largest singular values of several batches of Jacobians in the same steps, so that they
        share matrix products.

        The Jacobians are of one map, at sequences that may have different ``lengths``. A member that is
        shorter than its operator has zeros in the tokens that it lacks.
        """
        starts = [
            self.starts(lot, operator.in_shape, operator.dtype, operator.device, of_lot)
            for operator, lot, of_lot in zip(operators, members, lengths, strict=True)
        ]
        return lanczos_together(
            operators,
            starts,
            rtol=self.rtol,
            confidence=self.confidence,
            max_iterations=self.max_iterations,
            products=energy_products_together,
            sizes=[
                [n * start.shape[-1] for n in of_lot] for start, of_lot in zip(starts, lengths, strict=True)
            ],
        )

    def starts(
        self,
        members: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Draw a Gaussian start vector of the given shape for each of the sequences ``members``. If
        ``lengths`` are given, the tokens of a start from its length on are zero.

        They are drawn on the CPU in float64, so that every device and dtype has the same starts.
        """
        longest, *rest = shape

        def draw(member: int, length: int) -> Tensor:
            drawn = random_stream(self.seeds[member]).standard_normal((length, *rest))
            start = torch.from_numpy(drawn).to(dtype)
            return start if length == longest else filled(start, longest)

        each = [longest] * len(members) if lengths is None else lengths
        if len(members) == 1 or math.prod(shape) < _WORTH_A_THREAD:
            drawn = list(map(draw, members, each))
        else:
            # NumPy draws random numbers in one thread, and several draws in several threads run in parallel.
            with ThreadPoolExecutor() as pool:
                drawn = list(pool.map(draw, members, each))
        return torch.stack(drawn).to(device)


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
