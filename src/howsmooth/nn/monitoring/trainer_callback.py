"""The training monitor of Lipschitz constants as a callback for Hugging Face's ``Trainer``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from howsmooth.errors import ArgumentError
from howsmooth.nn.monitoring.gathered_model import is_sharded, without_wrappers
from howsmooth.nn.monitoring.monitor import LipschitzMonitor
from howsmooth.nn.monitoring.record import MonitorRecord, tagged
from howsmooth.nn.penalty.spectral_penalty import SpectralPenalty

__all__ = ["MonitorCallback", "check_arguments"]


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """A ``Trainer`` callback that measures the attention layers of a model during training.

    They are measured before the first training step and then at regular steps. If several processes train the
    model, only the first one measures.

    Parameters
    ----------
    monitor
        A monitor of the model that the ``Trainer`` trains.
    log
        ``trainer.log``, which sends the numbers of each measurement to all that the ``Trainer`` reports to,
        under the names of :meth:`~howsmooth.nn.MonitorRecord.tagged`. None to log nothing.
    penalty
        A penalty in the training loss whose singular vectors are saved in every checkpoint, in a file
        ``penalty.safetensors`` (``penalty_1.safetensors`` and so on of further processes). A training that
        is resumed reads them from ``checkpoint-<step>`` in ``output_dir``; if they are elsewhere, it warns.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type; at the start of training, if the monitor belongs to another model.

    """

    def __init__(
        self,
        monitor: LipschitzMonitor,
        log: Callable[[dict[str, float]], object] | None = None,
        penalty: SpectralPenalty | None = None,
    ) -> None:
        check_arguments(monitor, penalty)
        if log is not None and not callable(log):
            raise ArgumentError("log", expected="the method log of a Trainer", got=type(log).__name__)
        self.monitor = monitor
        self.log = log
        self.penalty = penalty

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Check that the monitor belongs to the trained model, and measure the model if training starts at
        step 0; otherwise read the state of the penalty.
        """
        model = rest.get("model")
        if model is not None and without_wrappers(model) is not self.monitor.model:
            raise ArgumentError(
                "monitor",
                expected="a monitor of the model that is trained",
                got=f"a monitor of another {type(self.monitor.model).__name__}",
                remedy="Build it with trainer.model, then call trainer.add_callback.",
            )
        if model is not None and is_sharded(model):
            self.monitor.trained = model
        file = _state_file(args, state)
        if state.global_step > 0 and self.penalty is not None:
            if file.is_file():
                self.penalty.load_state_dict(_nested(load_file(file)))
            elif not self.penalty.state_dict():
                warnings.warn(
                    f"The penalty begins anew at step {state.global_step}: there is no file {file}. If the "
                    "checkpoint is elsewhere, copy its file there.",
                    stacklevel=2,
                )
        if state.global_step == 0 and self._takes_part(state):
            self._send(self.monitor.measure(0), control)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Measure the layers if the training step is a multiple of the monitor's setting ``every``."""
        if self._takes_part(state):
            self._send(self.monitor.step(state.global_step), control)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Save the state of the penalty in the checkpoint."""
        file = _state_file(args, state)
        if self.penalty is not None and file.parent.is_dir():
            save_file(_flat(self.penalty.state_dict()), file)

    def _send(self, records: list[MonitorRecord], control: Any) -> None:
        if self.log is None or not records:
            return
        # Trainer.log takes every log for its own: without this, the losses of this step would not be logged.
        wanted = control.should_log
        self.log(tagged(records))
        control.should_log = wanted

    def _takes_part(self, state: Any) -> bool:
        # Sharded parameters are gathered from all processes, so all of them must take part.
        return bool(state.is_world_process_zero) or is_sharded(self.monitor.trained)


def check_arguments(monitor: object, penalty: object) -> None:
    """Raise ArgumentError if the arguments of a callback have wrong types."""
    if not isinstance(monitor, LipschitzMonitor):
        raise ArgumentError("monitor", expected="a LipschitzMonitor", got=type(monitor).__name__)
    if penalty is not None and not isinstance(penalty, SpectralPenalty):
        raise ArgumentError("penalty", expected="a SpectralPenalty", got=type(penalty).__name__)


def _state_file(args: Any, state: Any) -> Path:
    process = "" if args.process_index == 0 else f"_{args.process_index}"
    return Path(args.output_dir, f"checkpoint-{state.global_step}", f"penalty{process}.safetensors")


def _flat(state: dict[str, dict[str, Tensor | None]]) -> dict[str, Tensor]:
    """Return the state of a penalty as tensors with names, as a file of safetensors holds them."""
    return {
        f"{part}:{layer}": tensor.contiguous()
        for layer, parts in state.items()
        for part, tensor in parts.items()
        if tensor is not None
    }


def _nested(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor | None]]:
    state: dict[str, dict[str, Tensor | None]] = {}
    for name, tensor in tensors.items():
        part, _, layer = name.partition(":")
        state.setdefault(layer, {"left": None})[part] = tensor
    return state
