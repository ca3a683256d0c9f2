"""Flows and metrics of many tokens take memory in proportion to their number, not to its square."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
import howsmooth as hs
torch.set_num_threads(1)
n, what = int(sys.argv[1]), sys.argv[2]
parameters = torch.randn(3, 2, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
f = hs.SelfAttention(*parameters, torch.eye(4, dtype=torch.float64), causal=what == "causal")
x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
if what == "metrics":
    assert 1 < hs.dynamics.number_of_clusters(x, 0.1) <= n
    assert hs.dynamics.number_of_clusters(0 * x, 0.1) == 1
    assert 0 < hs.dynamics.log_interaction_energy(x) < 100
else:
    run = hs.dynamics.flow(f, x, [0.0, 0.1], method="euler", step=0.1)
    assert run.status == "finished" and run.points.shape == (2, n, 4)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(n: int, what: str) -> int:
    """Return the largest resident size, in bytes, of a process that lets n tokens flow, or measures them."""
    command = [sys.executable, "-c", PROGRAM, str(n), what]
    return 1024 * int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["unmasked", "causal", "metrics"])
def test_20000_tokens_need_no_matrix_of_their_size(what: str) -> None:
    n = 20_000
    added = peak(n, what) - peak(100, what)
    assert added < n * n * 8 / 10
