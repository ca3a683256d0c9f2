"""Records of a monitor, each of one layer at one training step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["MonitorRecord"]


@dataclass(frozen=True)
class MonitorRecord:
    """The measurements of one layer at one step, or the reason why they failed."""

    #: Number of optimizer steps before the measurement.
    step: int
    #: Index of the layer in the order of the forward pass; None if the model could not be run.
    layer: int | None
    #: Path of the attention module in the model.
    name: str
    #: The part of the layer that was measured, as in :class:`~howsmooth.models.Site`.
    scope: str
    #: Sizes of the probe inputs and a checksum. Rows with equal entries were measured at the same inputs.
    probes: str
    #: Number of sequences in the probe inputs.
    sequences: int
    #: Why the measurement failed; empty if it succeeded.
    failure: str = ""
    #: Number of tokens of the longest sequence.
    tokens: int | None = None
    #: Description of the measured map.
    map: str = ""
    #: ``closed form`` or ``autodiff``.
    method: str = ""
    #: The largest local Lipschitz constant over the probe sequences. The interval from ``lower`` to ``upper``
    #: contains it with probability at least ``confidence``.
    lipschitz: float | None = None
    lower: float | None = None
    upper: float | None = None
    #: Mean of the local constants over the sequences.
    lipschitz_mean: float | None = None
    confidence: float | None = None
    #: The requested relative width of the intervals.
    rtol: float | None = None
    #: Whether the intervals of all sequences have reached this width.
    converged: bool | None = None
    #: Largest number of solver steps over the sequences.
    iterations: int | None = None
    #: For layers of :mod:`howsmooth.nn` with a radius: the proved bound for ``bound_length`` tokens of norm
    #: at most ``bound_radius``.
    bound: float | None = None
    bound_length: int | None = None
    bound_radius: float | None = None
    #: With ``gradients``: the largest ‖Jᵀg‖ / ‖g‖ ≤ ‖J‖ of backward passes since the last measurement; J is
    #: the derivative of the attention module at a training batch, with its dropout, g its output's gradient.
    gradient_lower: float | None = None
    #: Largest ‖A_h‖₂ over the heads, where A_h is the matrix of the scores ⟨A_h x_i + b_h, x_j⟩.
    score_norm: float | None = None
    #: Why ``score_norm`` is missing.
    score_norm_missing: str = ""
    #: The largest logit over the heads, rows, visible keys and sequences: the largest number that enters a
    #: softmax, after the norms and rotary positions of queries and keys.
    logit_max: float | None = None
    #: With ``clip_logits``: how many heads were scaled after this measurement, or why none can be.
    clipped: str = ""
    #: Why ``logit_max`` is missing.
    logit_missing: str = ""
    #: Entropy of the attention probabilities in nats, averaged over heads, rows and sequences.
    entropy: float | None = None
    #: The same average, with each row's entropy divided by the log of its number of visible keys; 1 is
    #: uniform.
    entropy_normalised: float | None = None
    #: Why ``entropy`` is missing.
    entropy_missing: str = ""
    #: Root mean square of the token norms over the probe sequences, and the largest token norm.
    radius_mean: float | None = None
    radius_max: float | None = None
    #: The local constant at each sequence, in the order of the probes.
    each: tuple[float, ...] = ()
    #: Seconds of processor time for this row.
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the record by name, as JSON values."""
        return asdict(self) | {"each": list(self.each)}

    def tagged(self) -> dict[str, float]:
        """Return the measured numbers of the record for a logger, under the names ``<quantity>/<layer>``.

        Missing numbers are left out. If the measurement failed, ``failed/<layer>`` is 1.
        """
        place = self.name or "model"
        names = (
            "lipschitz", "lower", "upper", "lipschitz_mean", "bound", "gradient_lower", "score_norm",
            "logit_max", "entropy", "entropy_normalised", "radius_mean", "radius_max",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names} | {"failed": 1.0 if self.failure else None}
        return {f"{name}/{place}": float(value) for name, value in values.items() if value is not None}
