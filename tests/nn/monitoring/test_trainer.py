"""The callback of the monitor in the ``Trainer`` of transformers: a penalty that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from howsmooth.errors import ArgumentError
from howsmooth.nn import LipschitzMonitor, MonitorCallback
from howsmooth.nn.penalty import SpectralPenalty
from tests._monitored_training import PROBES, gpt2

IDS = torch.randint(0, 40, (16, 7), generator=torch.Generator().manual_seed(0))


class Smooth(Trainer):
    """A trainer with a penalty in its loss."""

    penalty: SpectralPenalty

    def compute_loss(self, model: Any, inputs: Any, **rest: Any) -> Any:
        return super().compute_loss(model, inputs, **rest) + 0.1 * self.penalty()


def trained(folder: Path, start: Path | None = None) -> list[float]:
    """Train, from a checkpoint or from the beginning, and return the losses."""
    arguments = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = Smooth(gpt2(), arguments, train_dataset=data)
    monitor = LipschitzMonitor(trainer.model, PROBES, every=2, layers=[0])
    with SpectralPenalty(trainer.model, first_steps=2) as trainer.penalty:
        trainer.add_callback(MonitorCallback(monitor, trainer.log, trainer.penalty))
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_a_resumed_penalty_goes_on(tmp_path: Path) -> None:
    losses = trained(tmp_path / "run")
    assert len(set(losses)) == 4
    assert trained(tmp_path / "run", tmp_path / "run" / "checkpoint-2") == losses
    # The checkpoint of another folder is not found, which is said.
    with pytest.warns(UserWarning, match=r"begins anew at step 2: there is no file .*penalty\.safetensors"):
        others = trained(tmp_path / "other", tmp_path / "run" / "checkpoint-2")
    assert others[:2] == losses[:2]
    assert others != losses


def test_arguments_of_other_types_are_refused() -> None:
    monitor: Any = LipschitzMonitor(gpt2(), PROBES)
    wrong: Any
    for wrong, name in (((3,), "monitor"), ((monitor, 3), "log"), ((monitor, print, 3), "penalty")):
        with pytest.raises(ArgumentError) as caught:
            MonitorCallback(*wrong)
        assert caught.value.argument == name
