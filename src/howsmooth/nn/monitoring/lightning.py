"""The training monitor of Lipschitz constants as a callback for Lightning's ``Trainer``."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from howsmooth.errors import ArgumentError
from howsmooth.nn.monitoring.gathered_model import is_sharded, without_wrappers
from howsmooth.nn.monitoring.monitor import LipschitzMonitor
from howsmooth.nn.monitoring.record import MonitorRecord, tagged
from howsmooth.nn.monitoring.trainer_callback import check_arguments
from howsmooth.nn.penalty.spectral_penalty import SpectralPenalty

__all__ = ["lightning_callback"]


def lightning_callback(monitor: LipschitzMonitor, penalty: SpectralPenalty | None = None) -> Any:
    """Return a Lightning ``Callback`` that measures the attention layers of a model during training.

    They are measured before the first training step and then at regular steps, and the numbers go to every
    logger of the trainer, under the names of :meth:`~howsmooth.nn.MonitorRecord.tagged`. Steps are
    ``trainer.global_step``, the steps of all optimizers together, whatever the accumulation of gradients. If
    several processes train the model, only the first one measures.

    Parameters
    ----------
    monitor
        A monitor of the ``LightningModule`` that is trained, or of a module in it.
    penalty
        A penalty in the training loss whose singular vectors are saved in every checkpoint, and restored with
        it.

    Returns
    -------
    lightning.pytorch.Callback
        Of ``lightning``, or of ``pytorch_lightning`` if that is the package that is imported or installed.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type, or Lightning is not installed; at the start of training, if the
        monitor belongs to another model.

    """
    check_arguments(monitor, penalty)
    base: Any = _lightning().Callback

    class MonitorCallback(base):  # type: ignore[misc]
        """A callback that measures a model during the training with a Lightning ``Trainer``."""

        def __init__(self) -> None:
            super().__init__()
            self.monitor = monitor
            self._last = -1

        def __reduce__(self) -> tuple[Any, ...]:
            # Processes that are spawned get the callback pickled, which a class in a function is not.
            return lightning_callback, (self.monitor, penalty)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Check that the monitor belongs to the trained model, and measure the model if training starts
            at step 0.
            """
            if all(without_wrappers(module) is not monitor.model for module in pl_module.modules()):
                raise ArgumentError(
                    "monitor",
                    expected="a monitor of the LightningModule that is trained, or of a module in it",
                    got=f"a monitor of another {type(monitor.model).__name__}",
                )
            if is_sharded(trainer.strategy.model):
                monitor.trained = trainer.strategy.model
            self._last = trainer.global_step
            if trainer.global_step == 0 and self._takes_part(trainer):
                self._send(monitor.measure(0), trainer)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            """Call the monitor after each optimizer step."""
            if trainer.global_step != self._last and self._takes_part(trainer):
                self._send(monitor.step(trainer.global_step), trainer)
            self._last = trainer.global_step

        def state_dict(self) -> dict[str, Any]:
            """Return the state of the penalty for a checkpoint."""
            return {} if penalty is None else penalty.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Restore the state of the penalty from a checkpoint."""
            if penalty is not None:
                penalty.load_state_dict(state_dict)

        def _send(self, records: list[MonitorRecord], trainer: Any) -> None:
            for logger in trainer.loggers if records else ():
                logger.log_metrics(tagged(records), step=trainer.global_step)

        def _takes_part(self, trainer: Any) -> bool:
            return bool(trainer.is_global_zero) or is_sharded(monitor.trained)

    return MonitorCallback()


def _lightning() -> Any:
    """Return the package ``lightning.pytorch`` or ``pytorch_lightning``, preferably one that is imported."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.split(".")[0]:
                raise
    raise ArgumentError(
        "lightning",
        expected="the package lightning",
        got="no such package",
        remedy="Install it with: pip install lightning",
    )
