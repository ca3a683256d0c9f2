"""The monitor as a callback of the Hugging Face ``Trainer``: the only module here that needs transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from howsmooth.errors import ArgumentError
from howsmooth.nn.monitoring.monitor import LipschitzMonitor
from howsmooth.nn.monitoring.neutral import unwrapped

__all__ = ["MonitorCallback"]


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """A monitor's measurements within a ``Trainer``: before the first step, then at every so many.

    In training by several processes the first one measures.

    Parameters
    ----------
    monitor
        Of the model that the ``Trainer`` trains.

    Raises
    ------
    ArgumentError
        At the start of a training, if that is another model's.

    """

    def __init__(self, monitor: LipschitzMonitor) -> None:
        if not isinstance(monitor, LipschitzMonitor):
            raise ArgumentError("monitor", expected="a LipschitzMonitor", got=type(monitor).__name__)
        self.monitor = monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Measure the model as it begins."""
        model = rest.get("model")
        if model is not None and unwrapped(model) is not self.monitor.model:
            raise ArgumentError(
                "monitor",
                expected="a monitor of the model that is trained",
                got=f"that of another {type(self.monitor.model).__name__}",
                remedy="Build it with trainer.model, then call trainer.add_callback.",
            )
        if state.is_world_process_zero and state.global_step == 0:
            self.monitor.measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Measure if it is time."""
        if state.is_world_process_zero:
            self.monitor.step(state.global_step)
