"""Callbacks for Hugging Face's Trainer and for Lightning that run the monitor of Lipschitz constants."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from howsmooth.errors import ArgumentError
from howsmooth.nn.checks import check
from howsmooth.nn.monitoring.gathered_model import is_sharded, without_wrappers
from howsmooth.nn.monitoring.monitor import LipschitzMonitor
from howsmooth.nn.monitoring.record import MonitorRecord
from howsmooth.nn.penalty.spectral_penalty import SpectralPenalty

__all__ = ["MonitorCallback", "lightning_callback"]


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """A ``Trainer`` callback that measures the attention layers of a model during training.

    They are measured before the first training step and then at regular steps. If several processes train the
    model, only the first one measures. ArgumentError names an argument of a wrong type; at the start of
    training, it says that the monitor belongs to another model.

    Parameters
    ----------
    monitor
        A monitor of the model that the ``Trainer`` trains, or of a module in it.
    log
        ``trainer.log``, which sends the numbers of each measurement to all that the ``Trainer`` reports to,
        under the names of :meth:`~howsmooth.nn.MonitorRecord.tagged`. None to log nothing.
    penalty
        A penalty in the training loss whose singular vectors are saved in every checkpoint, in a file
        ``penalty.safetensors`` (``penalty_1.safetensors`` and so on of further processes). A training that is
        resumed reads them from ``checkpoint-<step>`` in ``output_dir``; if they are elsewhere, it warns.
    """

    def __init__(
        self,
        monitor: LipschitzMonitor,
        log: Callable[[dict[str, float]], object] | None = None,
        penalty: SpectralPenalty | None = None,
    ) -> None:
        _check_arguments(monitor, penalty)
        check(log is None or callable(log), "log", "the method log of a Trainer", type(log).__name__)
        self.monitor, self.log, self.penalty = monitor, log, penalty

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Measure the model if training starts at step 0; otherwise load the saved state of the penalty."""
        if (model := rest.get("model")) is not None:
            _check_model(self.monitor, model, model)
        file = _state_file(args, state)
        if state.global_step > 0 and self.penalty is not None:
            if file.is_file():
                state_of: dict[str, dict[str, Tensor | None]] = {}
                for name, tensor in load_file(file).items():
                    part, _, layer = name.partition(":")
                    state_of.setdefault(layer, {"left": None})[part] = tensor
                self.penalty.load_state_dict(state_of)
            elif not self.penalty.state_dict():
                warnings.warn(
                    f"The penalty begins anew at step {state.global_step}: there is no file {file}. If the "
                    "checkpoint is elsewhere, copy its file there.",
                    stacklevel=2,
                )
        if state.global_step == 0 and _takes_part(self.monitor, state.is_world_process_zero):
            self._send(self.monitor.measure(0), control)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Measure the layers if the training step is a multiple of the monitor's setting ``every``."""
        if _takes_part(self.monitor, state.is_world_process_zero):
            self._send(self.monitor.step(state.global_step), control)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Save the state of the penalty in the checkpoint."""
        file = _state_file(args, state)
        if self.penalty is not None and file.parent.is_dir():
            parts = (
                (f"{part}:{layer}", tensor)
                for layer, of in self.penalty.state_dict().items()
                for part, tensor in of.items()
            )
            save_file({name: tensor.contiguous() for name, tensor in parts if tensor is not None}, file)

    def _send(self, records: list[MonitorRecord], control: Any) -> None:
        if self.log is None or not records:
            return
        # Trainer.log takes every log for its own: without this, the losses of this step would not be logged.
        wanted = control.should_log
        self.log(_tagged(records))
        control.should_log = wanted


def lightning_callback(monitor: LipschitzMonitor, penalty: SpectralPenalty | None = None) -> Any:
    """Return a Lightning ``Callback`` that measures the attention layers of a model during training.

    It does what :class:`MonitorCallback` does, and the numbers go to every logger of the trainer. Steps are
    ``trainer.global_step``, the steps of all optimizers together, whatever the accumulation of gradients. The
    state of the ``penalty`` is part of every checkpoint. The callback is of ``lightning``, or of
    ``pytorch_lightning`` if that is the package that is imported or installed; ArgumentError is also raised
    if neither is.
    """
    _check_arguments(monitor, penalty)
    base: Any = _lightning().Callback

    class MonitorCallback(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.monitor = monitor
            self._last = -1

        def __reduce__(self) -> tuple[Any, ...]:
            # Processes that are spawned get the callback pickled, which a class in a function is not.
            return lightning_callback, (self.monitor, penalty)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            _check_model(monitor, pl_module, trainer.strategy.model)
            self._last = trainer.global_step
            if trainer.global_step == 0 and _takes_part(monitor, trainer.is_global_zero):
                self._send(monitor.measure(0), trainer)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step != self._last and _takes_part(monitor, trainer.is_global_zero):
                self._send(monitor.step(trainer.global_step), trainer)
            self._last = trainer.global_step

        def state_dict(self) -> dict[str, Any]:
            return {} if penalty is None else penalty.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if penalty is not None:
                penalty.load_state_dict(state_dict)

        def _send(self, records: list[MonitorRecord], trainer: Any) -> None:
            for logger in trainer.loggers if records else ():
                logger.log_metrics(_tagged(records), step=trainer.global_step)

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
    remedy = "Install it with: pip install lightning"
    raise ArgumentError("lightning", expected="the package lightning", got="no such package", remedy=remedy)


def _check_arguments(monitor: object, penalty: object) -> None:
    check(isinstance(monitor, LipschitzMonitor), "monitor", "a LipschitzMonitor", type(monitor).__name__)
    known = penalty is None or isinstance(penalty, SpectralPenalty)
    check(known, "penalty", "a SpectralPenalty", type(penalty).__name__)


def _check_model(monitor: LipschitzMonitor, model: nn.Module, trained: nn.Module) -> None:
    """Check that the monitor measures this model, and give it the wrapped model if parameters are sharded."""
    own = any(without_wrappers(module) is monitor.model for module in model.modules())
    got = f"a monitor of another {type(monitor.model).__name__}"
    remedy = "Build it with the model that is given to the trainer, as trainer.model has it."
    check(own, "monitor", "a monitor of the model that is trained, or of a module in it", got, remedy)
    if is_sharded(trained):
        monitor.trained = trained


def _takes_part(monitor: LipschitzMonitor, first: Any) -> bool:
    # Sharded parameters are gathered from all processes, so all of them must take part.
    return bool(first) or is_sharded(monitor.trained)


def _state_file(args: Any, state: Any) -> Path:
    process = "" if args.process_index == 0 else f"_{args.process_index}"
    return Path(args.output_dir, f"checkpoint-{state.global_step}", f"penalty{process}.safetensors")


def _tagged(records: list[MonitorRecord]) -> dict[str, float]:
    return {tag: value for record in records for tag, value in record.tagged().items()}
