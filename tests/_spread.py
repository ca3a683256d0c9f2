"""Stand-ins for a study on workers: functions of a module, so that they can be sent to other processes.

What each worker measured is written into the folder that the environment names, a file a process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from howsmooth.errors import ModelError, NonFiniteError
from howsmooth.study.records import SiteBounds
from howsmooth.study.tools import Tools
from tests._study import FakeModel, FakeText, make_tools

FOLDER = "HOWSMOOTH_TEST_WORKERS"
_TOOLS, WORK = make_tools()


def load_model(name: str, **options: Any) -> FakeModel:
    _note("loads", name)
    return _TOOLS.load_model(name, **options)  # type: ignore[return-value]


def load_text(name: str) -> FakeText:
    return _TOOLS.load_text(name)  # type: ignore[return-value]


def capture(*arguments: Any, **options: Any) -> Sequence[Any]:
    return _TOOLS.capture(*arguments, **options)


def measure(function: Any, x: torch.Tensor, **options: Any) -> Any:
    time.sleep(float(os.environ.get("HOWSMOOTH_TEST_PAUSE", "0")))
    for first in x[:, 0, 0]:
        _note("measured", f"{function.layer} {x.shape[1]} {int(first)}")
    return _TOOLS.measure(function, x, **options)


def bound(site: Any) -> SiteBounds:
    assert _TOOLS.bound is not None
    return _TOOLS.bound(site)


def fails_at_four(function: Any, x: torch.Tensor, **options: Any) -> Any:
    if x.shape[1] == 4 and function.layer == 1:
        raise NonFiniteError("X", expected="finite values", got="nan")
    return measure(function, x, **options)


def dies_once_at_five(function: Any, x: torch.Tensor, **options: Any) -> Any:
    died = Path(os.environ[FOLDER]) / "died"
    if x.shape[1] == 5 and function.layer == 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(function, x, **options)


def dies_once_after_five(function: Any, x: torch.Tensor, **options: Any) -> Any:
    found = measure(function, x, **options)
    if x.shape[1] == 5 and function.layer == 1:
        try:
            (Path(os.environ[FOLDER]) / "died").touch(exist_ok=False)
        except FileExistsError:
            return found
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def dies_once_at_five_and_always_at_eight(function: Any, x: torch.Tensor, **options: Any) -> Any:
    if x.shape[1] == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return dies_once_at_five(function, x, **options)


def loads_once(name: str, **options: Any) -> FakeModel:
    """Loads for the checks before the run, and not for a worker."""
    if threading.current_thread() is threading.main_thread():
        return load_model(name, **options)
    raise ModelError("model: it went away.")


def spread_tools(**changes: Any) -> Tools:
    values: dict[str, Any] = {
        "load_model": load_model,
        "load_text": load_text,
        "capture": capture,
        "measure": measure,
        "bound": bound,
    }
    return Tools(**(values | changes))


def _note(kind: str, words: str) -> None:
    folder = os.environ.get(FOLDER)
    if folder:
        with (Path(folder) / f"{kind}-{os.getpid()}").open("a") as file:
            file.write(words + "\n")


def noted(folder: Path, kind: str) -> dict[int, Counter[str]]:
    """What each process noted, by its number."""
    return {
        int(path.name.removeprefix(f"{kind}-")): Counter(path.read_text().splitlines())
        for path in sorted(folder.glob(f"{kind}-*"))
    }
