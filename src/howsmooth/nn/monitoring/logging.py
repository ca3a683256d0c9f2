"""Output of monitoring records to JSON lines, CSV files, TensorBoard, Weights & Biases, MLflow and
Trackio.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from howsmooth.errors import ArgumentError
from howsmooth.nn.monitoring.record import MonitorRecord

__all__ = [
    "RecordFile",
    "ScalarWriter",
    "log_to_mlflow",
    "log_to_trackio",
    "log_to_wandb",
    "write_scalars",
]

_SUFFIXES = (".jsonl", ".csv")


@runtime_checkable
class ScalarWriter(Protocol):
    """The interface of a logger with the method ``add_scalar``, such as TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Log a number under the name ``tag`` at a training step."""


def write_scalars(writer: ScalarWriter, record: MonitorRecord) -> None:
    """Log the numbers of a record under names ``<quantity>/<layer>``, which TensorBoard groups by quantity.

    For a failed record, 1 is written under ``failed/<layer>``.
    """
    for tag, value in _tagged(record).items():
        writer.add_scalar(tag, value, record.step)


def log_to_mlflow(run_id: str | None = None) -> Callable[[MonitorRecord], None]:
    """Return a monitor callback that logs each record to a run of MLflow, by default the active run.

    Numbers have the names ``<quantity>/<layer>`` and the record's training step.

    Parameters
    ----------
    run_id
        The id of the run; None for the active run.

    Raises
    ------
    ArgumentError
        If the package is not installed.

    """
    mlflow = imported("mlflow")
    return lambda record: mlflow.log_metrics(_tagged(record), step=record.step, run_id=run_id)


def log_to_trackio() -> Callable[[MonitorRecord], None]:
    """Return a monitor callback that logs each record to the run of ``trackio.init``."""
    trackio = imported("trackio")
    return lambda record: trackio.log(_tagged(record), step=record.step)


def log_to_wandb(run: Any = None) -> Callable[[MonitorRecord], None]:
    """Return a monitor callback that logs each record to a run of Weights & Biases.

    By default it is the run of ``wandb.init``. Names begin with ``howsmooth/``, and the step is logged as
    ``howsmooth/step``, so that the step counter of the run does not matter. The callback raises ArgumentError
    at the first record if there is no run.

    Parameters
    ----------
    run
        What ``wandb.init`` returned; None for the current run.

    """
    wandb = imported("wandb")
    prepared: list[Any] = []

    def log(record: MonitorRecord) -> None:
        own = wandb.run if run is None else run
        if own is None:
            raise ArgumentError("run", expected="a run of wandb", got="none", remedy="Call wandb.init first.")
        if own not in prepared:
            own.define_metric("howsmooth/*", step_metric="howsmooth/step")
            prepared.append(own)
        named = _tagged(record) | {"step": record.step}
        own.log({f"howsmooth/{name}": value for name, value in named.items()})

    return log


def imported(*names: str) -> Any:
    """Return the first of the given modules that is already imported, or else the first that is installed.

    Raises
    ------
    ArgumentError
        If none is installed.

    """
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.split(".")[0]:
                raise
    package = names[0].split(".")[0]
    raise ArgumentError(
        package,
        expected=f"the package {package}",
        got="no such package",
        remedy=f"Install it with: pip install {package}",
    )


def _tagged(record: MonitorRecord) -> dict[str, float]:
    """Return the numbers of a record in a dict with keys ``<quantity>/<layer>``.

    If the measurement failed, the dict has the entry 1 for ``failed/<layer>``.
    """
    place = record.name or "model"
    tagged = {f"{quantity}/{place}": value for quantity, value in record.scalars().items()}
    return {**tagged, f"failed/{place}": 1.0} if record.failure else tagged


class RecordFile:
    """A file to which each record of a monitor is appended as one line.

    The file is opened for each record, so records are not lost if the training is killed.

    Parameters
    ----------
    path
        A name that ends in ``.jsonl`` for JSON lines with all fields, or in ``.csv`` for a table with all
        fields except the constants of single sequences. Records are appended to an existing file.

    Raises
    ------
    ArgumentError
        If the name has another suffix, its folder does not exist, or an existing CSV file has other columns.

    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.suffix not in _SUFFIXES:
            raise ArgumentError(
                "file", expected=f"a name that ends in {' or '.join(_SUFFIXES)}", got=repr(str(path))
            )
        if not self.path.parent.is_dir():
            raise ArgumentError("file", expected="a name in a folder that exists", got=repr(str(path)))
        self._columns = [name for name in MonitorRecord.__dataclass_fields__ if name != "each"]
        if self.path.suffix == ".csv" and self.path.exists() and self.path.stat().st_size:
            with self.path.open(newline="", encoding="utf-8") as file:
                found = next(csv.reader(file), [])
            if found != self._columns:
                raise ArgumentError(
                    "file",
                    expected="a new file, or a file that a monitor wrote",
                    got=f"{path}, a table with other columns",
                )

    def write(self, record: MonitorRecord) -> None:
        """Append a record of the monitor to the file."""
        fields = record.as_dict()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            if self.path.suffix == ".jsonl":
                file.write(json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n")
                return
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({k: "" if v is None else v for k, v in fields.items()})
