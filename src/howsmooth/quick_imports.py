"""Imports of PyTorch and transformers in seven eighths of the time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quick_imports"]


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without collections of garbage in between, which find none among a million new objects, and
    leave these objects out of all later collections. Change nothing where PyTorch is imported already: what
    a user has made there may become garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
