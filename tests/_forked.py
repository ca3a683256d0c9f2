"""Work done in a process of its own: a fork of this one, which has imported all that the work needs."""

from __future__ import annotations

import os
import resource
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


def begun(work: Callable[[], object]) -> int:
    """Begin some work in a fork, and return its number; what it raises is printed there."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        torch.set_num_threads(1)  # those of the parent are not here
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(process: int) -> int:
    """Wait for a fork, and return how it ended: its exit code, or minus the number of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def all_done(works: Sequence[Callable[[], object]]) -> bool:
    """Do every work in a fork of its own, at the same time, and tell whether all ended well."""
    return [ended(process) for process in [begun(work) for work in works]] == [0] * len(works)


def memory_added(work: Callable[[], object], folder: Path) -> int:
    """Return by how many bytes some work raises the largest size of a fork, once it was done small."""
    path = folder / "added"

    def measured() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        path.write_text(str(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))

    assert all_done([measured])
    return int(path.read_text())
