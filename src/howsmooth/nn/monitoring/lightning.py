"""The training monitor of Lipschitz constants as a callback for Lightning's ``Trainer``."""

from __future__ import annotations

from typing import Any

from howsmooth.errors import ArgumentError
from howsmooth.nn.monitoring.gathered_model import is_sharded, unwrapped
from howsmooth.nn.monitoring.logging import imported
from howsmooth.nn.monitoring.monitor import LipschitzMonitor

__all__ = ["lightning_callback"]


def lightning_callback(monitor: LipschitzMonitor) -> Any:
    """Return a Lightning ``Callback`` that measures the attention layers of a model during training.

    They are measured before the first training step and then at regular steps. Steps are
    ``trainer.global_step``, the steps of all optimizers together, whatever the accumulation of gradients. If
    several processes train the model, only the first one measures.

    Parameters
    ----------
    monitor
        A monitor of the ``LightningModule`` that is trained, or of a module in it.

    Returns
    -------
    lightning.pytorch.Callback
        Of ``lightning``, or of ``pytorch_lightning`` if that is the package that is imported or installed.

    Raises
    ------
    ArgumentError
        If the monitor has another type, or Lightning is not installed; at the start of training, if the
        monitor belongs to another model.

    """
    if not isinstance(monitor, LipschitzMonitor):
        raise ArgumentError("monitor", expected="a LipschitzMonitor", got=type(monitor).__name__)
    base: Any = imported("lightning.pytorch", "pytorch_lightning").Callback

    class MonitorCallback(base):  # type: ignore[misc]
        """A callback that measures a model during the training with a Lightning ``Trainer``."""

        def __init__(self) -> None:
            super().__init__()
            self.monitor = monitor
            self._last = -1

        def __reduce__(self) -> tuple[Any, ...]:
            # Processes that are spawned get the callback pickled, which a class in a function is not.
            return lightning_callback, (self.monitor,)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Check that the monitor belongs to the trained model, and measure the model if training starts
            at step 0.
            """
            if all(unwrapped(module) is not monitor.model for module in pl_module.modules()):
                raise ArgumentError(
                    "monitor",
                    expected="a monitor of the LightningModule that is trained, or of a module in it",
                    got=f"a monitor of another {type(monitor.model).__name__}",
                )
            if is_sharded(trainer.strategy.model):
                monitor.trained = trainer.strategy.model
            self._last = trainer.global_step
            if trainer.global_step == 0 and self._takes_part(trainer):
                monitor.measure(0)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            """Call the monitor after each optimizer step.

            The monitor measures the model if the number of steps has reached a multiple of its setting
            ``every``.
            """
            if trainer.global_step != self._last and self._takes_part(trainer):
                monitor.step(trainer.global_step)
            self._last = trainer.global_step

        def _takes_part(self, trainer: Any) -> bool:
            return bool(trainer.is_global_zero) or is_sharded(monitor.trained)

    return MonitorCallback()
