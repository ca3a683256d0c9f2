"""Stand-ins for a study on workers: functions of a module, so that they can be sent to other processes.

What each worker measured is written into the folder that the environment names, a file a process.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from howsmooth.study import runner
from tests._study import Tools, installed, make_tools

FOLDER = "HOWSMOOTH_TEST_WORKERS"
_TOOLS = make_tools()[0]
_worker_results = runner._worker_results


def measure(function: Any, x: torch.Tensor, **options: Any) -> Any:
    """Measure as the stand-in does, and note what was measured here."""
    time.sleep(float(os.environ.get("HOWSMOOTH_TEST_PAUSE", "0")))
    if FOLDER in os.environ:
        with Path(os.environ[FOLDER], f"measured-{os.getpid()}").open("a") as file:
            file.writelines(f"{function.layer} {x.shape[1]} {int(first)}\n" for first in x[:, 0, 0])
    return _TOOLS.measure(function, x, **options)


def dies_once_after_five(function: Any, x: torch.Tensor, **options: Any) -> Any:
    """Measure, and end the process with what was measured and not sent."""
    found = measure(function, x, **options)
    if x.shape[1] == 5 and function.layer == 1:
        try:
            (Path(os.environ[FOLDER]) / "died").touch(exist_ok=False)
        except FileExistsError:
            return found
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def spread_tools(measure: Callable[..., Any] = measure) -> Tools:
    return replace(_TOOLS, measure=measure)


def _computed_with_stand_ins(*task: Any, measure: Callable[..., Any]) -> Any:
    with installed(spread_tools(measure)):
        return _worker_results(*task)


@contextmanager
def stand_ins_sent(measure: Callable[..., Any] = measure) -> Iterator[None]:
    """Let workers that are no forks of this process use stand-ins too."""
    with patch("howsmooth.study.runner._worker_results", partial(_computed_with_stand_ins, measure=measure)):
        yield


def noted(folder: Path) -> dict[int, Counter[str]]:
    """What each process measured, by its number."""
    return {
        int(path.name.removeprefix("measured-")): Counter(path.read_text().splitlines())
        for path in sorted(folder.glob("measured-*"))
    }
