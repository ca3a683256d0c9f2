"""A context manager that shortens imports of PyTorch and transformers by an eighth of the time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quick_imports"]


@contextmanager
def quick_imports() -> Iterator[None]:
    """Switch garbage collection off in a ``with`` block of imports, which make a million new objects and no
    garbage. Later collections leave these objects out. If PyTorch is imported already, nothing changes:
    objects of the user may become garbage.
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
