"""The tests on CUDA devices, themselves tested: they skip without one, and pass on what is in its place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def counts(device: str = "cuda", **variables: str) -> dict[str, int]:
    """Run the tests in a process of their own, on what is given for a device; how many passed and so on."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOWSMOOTH_GPU_TESTS_DEVICE": device, **variables}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests/gpu", "-m", "gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    closing = done.stdout.strip().splitlines()[-1]
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", closing)}


@pytest.mark.slow
def test_they_skip_without_a_device_and_pass_on_the_cpu() -> None:
    skipped = counts(CUDA_VISIBLE_DEVICES="")
    assert skipped["skipped"] > 150
    assert not {"passed", "failed", "error", "errors"} & set(skipped)
    passed = counts("cpu")
    assert passed["skipped"] == 1  # that two devices are told apart
    assert passed["passed"] == skipped["skipped"] - 1
    assert not {"failed", "error", "errors"} & set(passed)


@pytest.mark.slow
def test_no_tensor_is_left_on_the_cpu() -> None:
    passed = counts("pretended")
    assert passed["passed"] > 200
    assert passed["skipped"] == 34  # kernels are CUDA's: 6 intervals by them, 28 of attention as a function
    assert not {"failed", "error", "errors"} & set(passed)
