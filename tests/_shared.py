"""What several tests need: shared data that users do not have, and scripts as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def shared_data(*parts: str) -> Path:
    """Path of a file or folder of shared data; the test skips, saying so, where it is absent."""
    path = ROOT.parent.joinpath("shared", "data", *parts)
    if not path.exists():
        pytest.skip(f"shared data {'/'.join(parts)} is not on this machine")
    return path


def script(path: str) -> ModuleType:
    """Import a script of the repository, given by its path from the root."""
    spec = importlib.util.spec_from_file_location(f"script_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
