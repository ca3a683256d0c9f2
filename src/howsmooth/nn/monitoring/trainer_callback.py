"""The training monitor of Lipschitz constants as a callback for Hugging Face's ``Trainer``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from howsmooth.errors import ArgumentError
from howsmooth.nn.monitoring.gathered_model import is_sharded, unwrapped
from howsmooth.nn.monitoring.monitor import LipschitzMonitor

__all__ = ["MonitorCallback"]


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """A ``Trainer`` callback that measures the attention layers of a model during training.

    They are measured before the first training step and then at regular steps. If several processes train the
    model, only the first one measures.

    Parameters
    ----------
    monitor
        A monitor of the model that the ``Trainer`` trains.

    Raises
    ------
    ArgumentError
        At the start of training, if the monitor belongs to another model.

    """

    def __init__(self, monitor: LipschitzMonitor) -> None:
        if not isinstance(monitor, LipschitzMonitor):
            raise ArgumentError("monitor", expected="a LipschitzMonitor", got=type(monitor).__name__)
        self.monitor = monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Check that the monitor belongs to the trained model, and measure the model if training starts at
        step 0.
        """
        model = rest.get("model")
        if model is not None and unwrapped(model) is not self.monitor.model:
            raise ArgumentError(
                "monitor",
                expected="a monitor of the model that is trained",
                got=f"a monitor of another {type(self.monitor.model).__name__}",
                remedy="Build it with trainer.model, then call trainer.add_callback.",
            )
        if model is not None and is_sharded(model):
            self.monitor.trained = model
        if state.global_step == 0 and self._takes_part(state):
            self.monitor.measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Measure the layers if the training step is a multiple of the monitor's setting ``every``."""
        if self._takes_part(state):
            self.monitor.step(state.global_step)

    def _takes_part(self, state: Any) -> bool:
        # Sharded parameters are gathered from all processes, so all of them must take part.
        return bool(state.is_world_process_zero) or is_sharded(self.monitor.trained)
