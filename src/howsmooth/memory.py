"""How much memory a computation may take: what the caller allows, or a share of what is free."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from howsmooth.errors import ArgumentError

__all__ = ["SHARE", "free_memory", "memory_budget", "parse_bytes"]

SHARE = 0.5
"""The share of the free memory that is used where nothing else is said."""

# Where the system does not tell.
_UNKNOWN = 4 << 30
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def parse_bytes(words: str) -> int:
    """Read a number of bytes: ``8GiB``, ``500MB``, ``1.5 TiB``, or digits alone.

    Raises
    ------
    ArgumentError
        If it is none, or less than one byte.

    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b)?\s*", words, re.IGNORECASE)
    if found is None or float(found[1]) < 1:
        raise ArgumentError(
            "memory", expected="a number of bytes such as 8GiB, 500MB or 8589934592", got=repr(words)
        )
    power = 0 if found[2] is None else "kmgt".index(found[2].lower()) + 1
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def memory_budget(memory: object, device: torch.device) -> int:
    """Return the bytes that may be used on ``device``: ``memory``, by default half of what is free there.

    Raises
    ------
    ArgumentError
        If ``memory`` is no positive integer.

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
    """Return the bytes that are free on ``device``, on the CPU within the limits of a container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    system, group = _free_in_system(), _free_in_control_group()
    return max(0, system if group is None else min(system, group))


def _free_in_system() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN


def _free_in_control_group() -> int | None:
    """Return what the limit of a container leaves; None if there is none, or none that is known."""
    for limit, used, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = int((_CONTROL_GROUP / limit).read_text())
            taken = int((_CONTROL_GROUP / used).read_text())
            stat = (_CONTROL_GROUP / used).with_name("memory.stat").read_text().split()
            # Files that were read count as used, and give way.
            return most - taken + int(stat[stat.index(files) + 1])
        except (OSError, ValueError, IndexError):  # "max" is no number
            continue
    return None
