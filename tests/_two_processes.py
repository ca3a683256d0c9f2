"""A process of a group: measures its rows of sequences."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import howsmooth as hs


def begin_peak() -> int:
    """Forget the largest resident size so far, and return the present one in bytes; Linux only, else 0."""
    forget = Path("/proc/self/clear_refs")
    if forget.exists():
        # Give back what the parent process has freed. A fork would use it again, and the peak not show it.
        with suppress(AttributeError):  # The function is one of glibc.
            ctypes.CDLL(None).malloc_trim(0)
        forget.write_text("5")
    return peak()


def peak() -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def main(folder: Path, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    found = {}
    # Written by the test itself, a moment ago.
    for name, (f, x, options) in torch.load(folder / "problems.pt", weights_only=False).items():
        rows = hs.distributed.own_rows(len(x))
        own = x[rows]
        before = begin_peak()
        estimate = hs.distributed.local_lipschitz(f, own, len(x), **options)
        found[name] = (rows, vars(estimate), peak() - before)
    torch.save(found, folder / f"found-{rank}.pt")
    dist.destroy_process_group()
