"""A flow of many tokens takes memory in proportion to their number, not to its square."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
import howsmooth as hs
torch.set_num_threads(1)
n = int(sys.argv[1])
parameters = torch.randn(3, 2, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
f = hs.SelfAttention(*parameters, torch.eye(4, dtype=torch.float64), causal=sys.argv[2] == "causal")
x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
run = hs.dynamics.flow(f, x, [0.0, 0.1], method="euler", step=0.1)
assert run.status == "finished" and run.points.shape == (2, n, 4)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(n: int, masking: str) -> int:
    """Return the largest resident size, in bytes, of a process that lets n tokens flow for one step."""
    command = [sys.executable, "-c", PROGRAM, str(n), masking]
    return 1024 * int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("masking", ["unmasked", "causal"])
def test_a_flow_of_20000_tokens_needs_no_matrix_of_its_size(masking: str) -> None:
    n = 20_000
    added = peak(n, masking) - peak(100, masking)
    assert added < n * n * 8 / 10
