"""What a flow gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import AbstractMeasure
from howsmooth.dynamics.integrate import Status

__all__ = ["State", "Trajectory"]

State = Tensor | AbstractMeasure


@dataclass(frozen=True, eq=False)
class Trajectory:
    """States at increasing times.

    Attributes
    ----------
    times
        The times reached, float64: all that were asked for, or those before the flow ended.
    states
        The state at each of them: a tensor (times, n, d) or (times, batch, n, d) for tokens, a tuple of
        measures for a measure.
    status
        "finished"; "blew up": there is no finite state beyond ``blow_up``; "stopped": the integrator gave up.
    reason
        Why the flow ended before the last time, in one sentence; empty if it finished.
    blow_up
        Interval (lower, upper) that holds the time of the blow-up, if there is one. It is estimated by a
        second run at half the step or a tenth of the tolerances. Twice the difference, and one step or the
        relative tolerance, are added on both sides. For residual layers it is the layer at which the
        numbers overflow.
    error
        Estimate of the error of the last state, or None where it was not asked for: the root mean square
        distance of its tokens (with the weights of a measure) from those of the flow, from a second run at
        half the step or a tenth of the tolerances. It bounds the distance W₂ of the two measures. It does
        not include rounding.
    drift
        On a sphere: the largest relative distance of a token from it, before it was put back. Else None.
    evaluations
        How many times the velocity was evaluated, over all runs.
    method, step, rtol, atol
        As integrated; ``step`` is None for adaptive methods, the tolerances are None for the others.
    field
        What the velocity is, in words.

    """

    times: Float[Tensor, " times"]
    states: Tensor | tuple[AbstractMeasure, ...]
    status: Status
    reason: str
    blow_up: tuple[float, float] | None
    error: float | None
    drift: float | None
    evaluations: int
    method: str
    step: float | None
    rtol: float | None
    atol: float | None
    field: str

    def __len__(self) -> int:
        return self.times.shape[0]

    @property
    def final(self) -> State:
        """The last state."""
        return self.states[-1]

    @property
    def points(self) -> Float[Tensor, "times *batch n d"]:
        """Tokens or atoms at all times.

        Raises
        ------
        ArgumentError
            If the states are Gaussians, which have no atoms.

        """
        if isinstance(self.states, Tensor):
            return self.states
        return torch.stack([state.weighted_tokens()[0] for state in self.states])

    def __repr__(self) -> str:
        how = f"step {self.step:g}" if self.step is not None else f"rtol {self.rtol:g}, atol {self.atol:g}"
        until = f"{len(self)} states from t = {float(self.times[0]):g} to {float(self.times[-1]):g}"
        error = (
            "error not estimated" if self.error is None else f"error of the last state about {self.error:.1e}"
        )
        drift = "" if self.drift is None else f", drift {self.drift:.1e}"
        ended = "" if self.status == "finished" else f": {self.reason}"
        return (
            f"Trajectory({until}, {self.status}{ended}; {self.method}, {how}, "
            f"{self.evaluations} evaluations, {error}{drift})"
        )
