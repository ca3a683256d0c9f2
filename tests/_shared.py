"""The shared data that developers and CI have beside the checkout, and users do not."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


def shared_data(*parts: str) -> Path:
    """Path of a file or folder of shared data; the test skips, saying so, where it is absent."""
    path = SHARED.joinpath("data", *parts)
    if not path.exists():
        pytest.skip(f"shared data {'/'.join(parts)} is not on this machine")
    return path
