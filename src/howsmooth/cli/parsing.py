"""Threads of PyTorch, as the command line asks for them."""

from __future__ import annotations

from howsmooth.study.plan import Execution

__all__ = ["use_threads"]


def use_threads(count: int | None) -> None:
    """Let PyTorch use so many threads; ``None`` leaves it as it is.

    Raises
    ------
    howsmooth.errors.ArgumentError
        If no machine has so many.

    """
    threads = Execution(threads=count).threads
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
