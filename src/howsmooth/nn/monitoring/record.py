"""One row of a monitor: what was measured of one layer at one step of a training run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

__all__ = ["MonitorRecord", "table"]


@dataclass(frozen=True)
class MonitorRecord:
    """What a :class:`LipschitzMonitor` measured of one layer at one step, or why it could not."""

    #: Optimizer steps done before.
    step: int
    #: Index of the layer, in the order of the model's pass; None if the model as a whole could not be run.
    layer: int | None
    #: Path of the attention module in the model.
    name: str
    #: What is called attention, as in :class:`~howsmooth.models.Site`.
    scope: str
    #: The probe inputs, in words, with a checksum: rows with the same words were measured at the same inputs.
    probes: str
    #: How many sequences these are.
    sequences: int
    #: Why nothing was measured; empty if something was.
    failure: str = ""
    #: Tokens of the longest sequence.
    tokens: int | None = None
    #: The map in words.
    map: str = ""
    #: ``closed form`` or ``autodiff``.
    method: str = ""
    #: The largest local Lipschitz constant over the probe sequences; ``lower`` and ``upper`` hold it with
    #: probability ``confidence`` at least.
    lipschitz: float | None = None
    lower: float | None = None
    upper: float | None = None
    #: Mean over the sequences of the local constants.
    lipschitz_mean: float | None = None
    confidence: float | None = None
    #: Relative width of the intervals that was asked for.
    rtol: float | None = None
    #: Whether the intervals of all sequences are as narrow.
    converged: bool | None = None
    #: Most steps that a sequence took.
    iterations: int | None = None
    #: For layers of :mod:`howsmooth.nn`: the proven constant at their length and radius, if these are stated.
    bound: float | None = None
    #: Largest ‖A_h‖₂ over the heads, A_h the matrix of the scores ⟨A_h x_i + b_h, x_j⟩.
    score_norm: float | None = None
    #: Why there is no ``score_norm``.
    score_norm_missing: str = ""
    #: Mean over heads, rows and sequences of the entropy of attention probabilities, in nats.
    entropy: float | None = None
    #: The same with each row divided by the logarithm of the number of keys that it sees: 1 is uniform.
    entropy_normalised: float | None = None
    #: Why there is no ``entropy``.
    entropy_missing: str = ""
    #: Root mean square of the token norms, and the largest, over the probe sequences.
    radius_mean: float | None = None
    radius_max: float | None = None
    #: The local constant at each sequence, in their order.
    each: tuple[float, ...] = ()
    #: Processor seconds that this row took.
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as JSON values."""
        fields = asdict(self)
        fields["each"] = list(self.each)
        return fields

    def scalars(self) -> dict[str, float]:
        """Return the numbers that change in training, by name; none of a failed row."""
        names = (
            "lipschitz", "lower", "upper", "lipschitz_mean", "bound", "score_norm", "entropy",
            "entropy_normalised", "radius_mean", "radius_max",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        return {name: float(value) for name, value in values.items() if value is not None}


def table(records: Iterable[MonitorRecord]) -> pd.DataFrame:
    """Return records as a table, a column for each field but ``each``."""
    columns = [name for name in MonitorRecord.__dataclass_fields__ if name != "each"]
    frame = pd.DataFrame([record.as_dict() for record in records], columns=columns)
    words = {"name", "scope", "probes", "failure", "map", "method", "score_norm_missing", "entropy_missing"}
    for column in columns:
        if column in ("layer", "tokens", "iterations"):
            frame[column] = frame[column].astype("Int64")
        elif column == "converged":
            frame[column] = frame[column].astype("boolean")
        elif column not in words and column not in ("step", "sequences"):
            frame[column] = frame[column].astype(float)
    return frame
