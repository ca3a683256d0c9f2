"""Tests on a CUDA device: ``pytest -m gpu tests/gpu``. Without one they skip.

The judge is the CPU in float64. ``HOWSMOOTH_GPU_TESTS_DEVICE=cpu`` runs the same tests on the CPU, so that
they themselves are tested where there is no accelerator, and ``HOWSMOOTH_GPU_TESTS_DEVICE=pretended`` on a
device that is the CPU under the rules of another: a tensor left behind on the CPU is seen there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests import _pretended_device

VARIABLE = "HOWSMOOTH_GPU_TESTS_DEVICE"


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    chosen = os.environ.get(VARIABLE, "cuda")
    if chosen == _pretended_device.NAME:
        with _pretended_device.pretended() as pretended:
            yield pretended
        return
    if torch.device(chosen).type == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"no CUDA device on this machine; {VARIABLE}=cpu runs the same tests on the CPU")
    yield torch.device(chosen)
