"""What the basis of one-sided Lanczos costs in truth: own precision, half precision, none.

    OMP_NUM_THREADS=1 python benchmarks/lanczos.py
    OMP_NUM_THREADS=1 python benchmarks/lanczos.py --starts 200 --size 100

Matrices of prescribed singular values between random orthogonal factors, float32 products, many starts. Each
row: the share of starts whose interval, at the confidence asked for, holds the norm; the largest relative
distance of the Ritz value and of the upper limit from those in float64 after the same steps from the same
start (the limit is wider by the allowance for rounding); and the steps to the tolerance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from turns import show

from howsmooth.spectral import LeadingTriplet, LinearOperator
from howsmooth.spectral import lanczos as solve
from howsmooth.spectral.accurate_sums import squared_lengths
from howsmooth.spectral.krylov_basis import Basis


class Shared(LinearOperator):
    """One matrix for all members: each start is another run."""

    def __init__(self, matrix: Tensor, batch: int) -> None:
        super().__init__(batch, matrix.shape[1:], matrix.shape[:1], matrix.dtype, matrix.device)
        self.matrix = matrix

    def _product(self, e: Tensor) -> Tensor:
        return e @ self.matrix.mT

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return u @ self.matrix

    def select(self, members: Tensor) -> Shared:
        return Shared(self.matrix, len(members))


class Without(Basis):
    """Keeps vectors for the direction, and leaves orthogonality to the three-term recurrence."""

    def orthogonalise_(self, z: Tensor, latest: object) -> Tensor:
        return squared_lengths(z).sqrt()


BASES = {
    "own precision": (None, Basis),
    "half precision": (torch.float16, Basis),
    "no reorthogonalisation": (None, Without),
}


def spectra(n: int) -> dict[str, list[float]]:
    rest = n - 10
    return {
        "gap of 10 %": [1.0, *np.linspace(0.9, 0, n - 1)],
        "ten within 1e-4": [*np.linspace(1, 1 - 1e-4, 10), *np.linspace(0.9, 0, rest)],
        "largest five times": [*[1.0] * 5, *np.linspace(0.9, 0, n - 5)],
        "far outlier": [1.0, *np.linspace(0.01, 0.005, n - 1)],
        "rank 12": [*np.linspace(1, 0.1, 12), *[0.0] * (n - 12)],
        "no gap": [1 - 2e-3 * i for i in range(n)] if n <= 500 else list(np.linspace(1, 0, n)),
        "power law": [(i + 1) ** -0.5 for i in range(n)],
    }


def matrix_of(values: list[float], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)).Q
        for _ in range(2)
    )
    return left * torch.tensor(values, dtype=torch.float64) @ right.mT


@contextmanager
def basis(kind: type[Basis]) -> Iterator[None]:
    with mock.patch.object(sys.modules[solve.__module__], "Basis", kind):
        yield


def holds(found: LeadingTriplet, norm: float) -> float:
    return float(((found.lower <= norm) & (norm <= found.upper)).double().mean())


def rows(name: str, values: list[float], arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    matrix, count, confidence = matrix_of(values, 0), arguments.starts, arguments.confidence
    start = torch.randn(count, len(values), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    start = start.float()
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    fixed = {"rtol": 0.0, "confidence": confidence}
    exact = {
        steps: solve(Shared(matrix, count), start.double(), max_iterations=steps, **fixed)
        for steps in (arguments.early, arguments.steps)
    }
    for label, (dtype, kind) in BASES.items():
        with basis(kind):
            early, late = (
                solve(Shared(matrix.float(), count), start, max_iterations=s, basis_dtype=dtype, **fixed)
                for s in exact
            )
            stopped = solve(
                Shared(matrix.float(), count),
                start,
                rtol=arguments.rtol,
                confidence=confidence,
                max_iterations=200,
                basis_dtype=dtype,
            )
        row: dict[str, object] = {"singular values": name, "basis": label}
        row[f"holds, {arguments.early} steps"] = holds(early, norm)
        row[f"holds, {arguments.steps} steps"] = holds(late, norm)
        row["holds at the stop"] = holds(stopped, norm)
        row["steps to the stop"] = float(stopped.steps.double().mean())
        for what in ("sigma", "upper"):
            moved = [
                (getattr(found, what) / getattr(truth, what) - 1).abs().max()
                for found, truth in zip((early, late), exact.values(), strict=True)
                if (found.steps == truth.steps).all()
            ]
            row[f"{what} moved by"] = float(max(moved)) if moved else None
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=300, help="rows and columns of the matrices")
    parser.add_argument("--starts", type=int, default=2000)
    parser.add_argument("--confidence", type=float, default=0.9)
    parser.add_argument("--rtol", type=float, default=1e-3, help="of the runs that stop by themselves")
    parser.add_argument("--early", type=int, default=6, help="steps of the first comparison")
    parser.add_argument("--steps", type=int, default=40, help="steps of the second comparison")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = [row for name, values in spectra(arguments.size).items() for row in rows(name, values, arguments)]
    show(table, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
