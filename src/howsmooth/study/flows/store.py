"""The store of a flow: one SQLite file, a row for each frame, written when it is finished.

As with measurements, a process killed at any moment leaves whole rows, every row carries a digest of its
values, and a second writer is kept out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.errors import StoreError
from howsmooth.study.open_store import OpenStore, now
from howsmooth.study.schema import sealed_columns, translated
from howsmooth.study.tables import FLOWS

__all__ = ["GROWTH_COLUMNS", "Ending", "FlowStore", "Frame"]

GROWTH_COLUMNS = (
    "time", "value", "lower", "upper", "confidence", "converged", "product", "exponential",
    "discretisation_error", "method", "step",
)  # fmt: skip
"""The columns of ``growth.csv``, as :class:`howsmooth.dynamics.Growth` has them."""


@dataclass(frozen=True, eq=False)
class Frame:
    """The state at one time.

    Attributes
    ----------
    place
        0 for the start.
    time
        When.
    x
        The tokens.
    mean, covariance
        Of the Gaussian measure beside them, if it is followed.
    evaluations
        Of the field, since the frame before.
    seconds
        That it took.

    """

    place: int
    time: float
    x: Float64[Tensor, "n d"]
    mean: Float64[Tensor, " d"] | None = None
    covariance: Float64[Tensor, "d d"] | None = None
    evaluations: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ending:
    """Why there are no more frames.

    Attributes
    ----------
    status
        ``blew up``: there is no finite state beyond ``lower`` to ``upper``; ``stopped``: the integrator gave
        up between these times.
    what
        That did: the tokens, or the Gaussian measure.
    reason
        In one sentence.
    lower, upper
        Times.

    """

    status: str
    what: str
    reason: str
    lower: float
    upper: float


def _difference(name: str, stored: object, wanted: object) -> tuple[str, str]:
    """Say by which option, as it is typed, another flow was made, and how to have that one."""
    if name == "source":
        return f"from {stored}, not {wanted}", "take that source"
    if name in ("n", "d"):
        what = "tokens" if name == "n" else "dimensions"
        return f"with {stored} {what}, not {wanted}", "start from as many"
    if name == "fingerprint":
        return "with other parameters, or from other tokens (their fingerprint differs)", "take those again"
    option = f"--{name.replace('_', '-')}"
    if isinstance(wanted, bool):
        if stored:
            return f"with {option}, not without it", f"add {option}"
        return f"without {option}, not with it", f"leave {option} out"
    if stored is None:
        return f"with the default of {option}, not {_typed(wanted)}", f"leave {option} out"
    other = "its default" if wanted is None else _typed(wanted)
    return f"with {option} {_typed(stored)}, not {other}", f"take {option} {_typed(stored)}"


def _typed(value: object) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


class FlowStore(OpenStore):
    """An open store of a flow; use it as a context manager."""

    _schema = FLOWS

    def check(self, identity: Mapping[str, Any]) -> None:
        """Refuse to continue a flow with another one.

        Raises
        ------
        StoreError
            Naming the first thing that differs, and the remedy.

        """
        stored = self.identity()
        for name, wanted in identity.items():
            # A flag that is off may be younger than the store.
            there = stored.get(name, False if wanted is False else None)
            if stored and there != wanted:
                made, remedy = _difference(name, there, wanted)
                raise StoreError(
                    f"{self.path} holds another flow: it was made {made}. Choose another --out, or {remedy}."
                )

    def identity(self) -> dict[str, Any]:
        """Return what all frames have in common; empty if there are none."""
        with translated(self.path):
            row = self._connection.execute("SELECT identity FROM studies").fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def begin(self, identity: Mapping[str, Any], start: Frame) -> None:
        """Record what all frames have in common, and the first of them, once."""
        with self._transaction():
            if not self._count("studies"):
                self._insert("studies", {"created": now(), "identity": json.dumps(dict(identity))})
                self._insert("frames", _row(start, None))

    def start_run(self, command: str, environment: Mapping[str, str]) -> int:
        """Record that a process begins; returns the number that its frames carry."""
        with self._transaction():
            values = {"started": now(), "command": command, "environment": json.dumps(dict(environment))}
            return self._insert("runs", values)

    def add(self, frame: Frame, run: int) -> None:
        """Write a frame."""
        with self._transaction():
            self._insert("frames", _row(frame, run))

    def end(self, ending: Ending) -> None:
        """Record why there are no more frames, and take back those of times when it had ended."""
        with self._transaction():
            self._connection.execute("DELETE FROM frames WHERE place > 0 AND time >= ?", (ending.lower,))
            self._insert("endings", dict(ending.__dict__))

    def ending(self) -> Ending | None:
        """Return why there are no more frames, if there is a reason."""
        with translated(self.path):
            row = self._connection.execute(
                "SELECT status, what, reason, lower, upper FROM endings"
            ).fetchone()
        return None if row is None else Ending(*row)

    def count(self) -> int:
        """Count the frames, the start included."""
        with translated(self.path):
            return self._count("frames")

    def last(self) -> Frame:
        """Return the latest frame."""
        return self.frame(self.count() - 1)

    def frame(self, place: int) -> Frame:
        """Return the frame at a place."""
        with translated(self.path):
            row = self._connection.execute(
                "SELECT time, n, d, x, mean, covariance, evaluations, seconds FROM frames WHERE place = ?",
                (place,),
            ).fetchone()
        if row is None:
            raise StoreError(f"{self.path} is damaged (frame {place} is missing). Choose another --out.")
        time, n, d, x, mean, covariance, evaluations, seconds = row
        return Frame(
            place,
            time,
            _array(x, (n, d)),
            None if mean is None else _array(mean, (d,)),
            None if covariance is None else _array(covariance, (d, d)),
            evaluations,
            seconds,
        )

    def add_growth(self, rows: Sequence[Mapping[str, Any]], run: int) -> None:
        """Write how perturbations have grown at some times: all rows or none."""
        with self._transaction():
            for row in rows:
                self._insert("growths", {**row, "run": run})

    def growth(self) -> pd.DataFrame:
        """Tabulate how perturbations have grown; without rows if that was not measured."""
        with translated(self.path):
            cursor = self._connection.execute(
                f"SELECT {', '.join(GROWTH_COLUMNS)} FROM growths ORDER BY time"
            )
            table = pd.DataFrame(cursor.fetchall(), columns=list(GROWTH_COLUMNS))
        return table.astype({"converged": "bool", "discretisation_error": "float64"})

    # ---- plumbing

    def _count(self, table: str) -> int:
        return int(self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    def _insert(self, table: str, values: Mapping[str, Any]) -> int:
        names = list(values)
        seal = ", ".join(f":{name}" for name in sealed_columns(names))
        with translated(self.path):
            cursor = self._connection.execute(
                f"INSERT INTO {table} ({', '.join(names)}, seal) "
                f"VALUES ({', '.join(f':{name}' for name in names)}, seal({seal}))",
                values,
            )
        return int(cursor.lastrowid or 0)


def _row(frame: Frame, run: int | None) -> dict[str, Any]:
    n, d = frame.x.shape
    return {
        "place": frame.place,
        "time": frame.time,
        "n": n,
        "d": d,
        "x": _bytes(frame.x),
        "mean": None if frame.mean is None else _bytes(frame.mean),
        "covariance": None if frame.covariance is None else _bytes(frame.covariance),
        "evaluations": frame.evaluations,
        "seconds": frame.seconds,
        "run": run,
    }


def _bytes(x: Tensor) -> bytes:
    # Little-endian wherever the file was written.
    return x.detach().cpu().contiguous().numpy().astype("<f8").tobytes()


def _array(content: bytes, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype="<f8").astype(np.float64).reshape(shape))
