"""Output of a monitor's records: JSON lines, CSV files and TensorBoard."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

from howsmooth.errors import ArgumentError
from howsmooth.nn.monitoring.record import MonitorRecord

__all__ = ["RecordFile", "ScalarWriter", "write_scalars"]

_SUFFIXES = (".jsonl", ".csv")


@runtime_checkable
class ScalarWriter(Protocol):
    """A logger with the method ``add_scalar`` of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Log a number under the name ``tag`` at a training step."""


def write_scalars(writer: ScalarWriter, record: MonitorRecord) -> None:
    """Log a record's numbers as ``<quantity>/<layer>``, which groups the layers in TensorBoard.

    For a failed record, 1 is written under ``failed/<layer>``.
    """
    place = record.name or "model"
    for quantity, value in record.scalars().items():
        writer.add_scalar(f"{quantity}/{place}", value, record.step)
    if record.failure:
        writer.add_scalar(f"failed/{place}", 1.0, record.step)


class RecordFile:
    """A file to which each of a monitor's records is appended as one line.

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
