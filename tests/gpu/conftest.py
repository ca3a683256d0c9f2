"""Tests on a CUDA device: ``pytest -m gpu tests/gpu``. Without one they skip.

The judge is the CPU in float64. ``HOWSMOOTH_GPU_TESTS_DEVICE=cpu`` runs the same tests on the CPU, so that
they themselves are tested where there is no accelerator.
"""

from __future__ import annotations

import os

import pytest
import torch

VARIABLE = "HOWSMOOTH_GPU_TESTS_DEVICE"


@pytest.fixture(scope="session")
def device() -> torch.device:
    chosen = torch.device(os.environ.get(VARIABLE, "cuda"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"no CUDA device on this machine; {VARIABLE}=cpu runs the same tests on the CPU")
    return chosen
