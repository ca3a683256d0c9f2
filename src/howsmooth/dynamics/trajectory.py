"""The class Trajectory, the result of a flow: the states at increasing times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.map import AbstractMeasure
from howsmooth.dynamics.integrate import Status

__all__ = ["State", "Trajectory"]

State = Tensor | AbstractMeasure


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The states of a flow at increasing times, and how the flow ended.

    Attributes
    ----------
    times
        The times that the flow reached, float64: all requested times, or only those before its end.
    states
        The state at each time: a tensor (times, n, d) or (times, batch, n, d) for tokens, or a tuple of
        measures.
    status
        "finished" if all times were reached, "blew up" if no finite state exists beyond ``blow_up``, or
        "stopped" if the integrator could not go on.
    reason
        Why the flow ended before the last time, in one sentence; empty if it finished.
    blow_up
        Interval (lower, upper) with the estimated time of the blow-up, or None. It comes from two runs, the
        second with half the step or a tenth of the tolerances. The interval is widened on both sides by twice
        the difference of the two blow-up times, and by one step or rtol times the elapsed time. For residual
        layers it is the time interval of the layer at which the numbers overflow.
    error
        Estimate of the error of the last state, or None if it was not requested. It is the root mean square
        distance (weighted, for a measure) between the tokens of the last state and the tokens of the exact
        flow, estimated by a second run with half the step or a tenth of the tolerances. The distance W₂ of
        the two measures is at most this number. Rounding is not included.
    drift
        On a sphere, the largest relative distance of a token from the sphere before a projection; otherwise
        None.
    evaluations
        Number of evaluations of the velocity in all runs.
    method, step, rtol, atol
        The method and its settings. ``step`` is None for adaptive methods; the tolerances are None for the
        others.
    field
        Description of the velocity.

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
        """The state of the flow at the last time that it reached."""
        return self.states[-1]

    @property
    def points(self) -> Float[Tensor, "times *batch n d"]:
        """The tokens, or the atoms of the measures, at all times of the trajectory.

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
