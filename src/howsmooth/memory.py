"""The number of bytes of memory that a computation may use: the limit set by the user, or a share of the free
memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from howsmooth.errors import ArgumentError

__all__ = ["SHARE", "free_memory", "memory_budget"]

SHARE = 0.5
"""The share of the free memory that is used unless the caller gives a limit."""

# Free bytes assumed if the operating system does not report its memory.
_UNKNOWN = 4 << 30
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def memory_budget(memory: object, device: torch.device) -> int:
    """Return the number of bytes that may be used on ``device``: ``memory``, or half of the free memory if it
    is None. Raise ArgumentError if it is anything but a positive integer.
    """
    if memory is None:
        return int(SHARE * free_memory(device))
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
        raise ArgumentError(
            "memory",
            expected="a number of bytes >= 1, or None",
            got=repr(memory),
            remedy="8 GiB are 8 * 2**30.",
        )
    return memory


def free_memory(device: torch.device) -> int:
    """Return the number of free bytes on ``device``. On a CPU this respects the memory limit of a
    container.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    system, group = _free_in_system(), _free_in_control_group()
    return max(0, system if group is None else min(system, group))


def _free_in_system() -> int:
    try:
        # On Linux, MemAvailable includes the file cache that the kernel would give up.
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:
        # Other systems report only the physical memory; half of it is assumed to be free.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN


def _free_in_control_group() -> int | None:
    """Return how many bytes the memory limit of the container leaves, or None if no limit is known."""
    # The first row names the files of control groups version 2, the second those of version 1.
    for limit, used, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = int((_CONTROL_GROUP / limit).read_text())
            taken = int((_CONTROL_GROUP / used).read_text())
            stat = (_CONTROL_GROUP / used).with_name("memory.stat").read_text().split()
            # The cache of files counts as used memory, but the kernel frees it when memory is needed.
            return most - taken + int(stat[stat.index(files) + 1])
        except (OSError, ValueError, IndexError):  # "max" stands for no limit and is not a number
            continue
    return None
