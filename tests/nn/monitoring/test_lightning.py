"""The monitor in Lightning: the training of its own ``Trainer``, and a stub where it is not installed."""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from howsmooth.errors import ArgumentError
from howsmooth.nn import LipschitzMonitor, lightning_callback
from howsmooth.nn.monitoring import callbacks
from howsmooth.nn.penalty import SpectralPenalty
from tests._monitored_training import PROBES, gpt2


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("lightning.pytorch")
    package.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", package)


def trainer_of(module: nn.Module, first: bool = True) -> Any:
    strategy = types.SimpleNamespace(model=module)
    return types.SimpleNamespace(global_step=0, is_global_zero=first, strategy=strategy, loggers=[])


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("begun", "first", "measured"), [(0, True, [0, 2, 4]), (0, False, []), (3, True, [4])]
)
def test_measures_at_steps_of_the_optimizer_in_the_first_process(begun, first, measured) -> None:
    module = nn.ModuleDict({"inner": gpt2()})
    monitor = LipschitzMonitor(module["inner"], PROBES, every=2, layers=[0])
    callback, trainer = lightning_callback(monitor), trainer_of(module, first)
    trainer.global_step = begun
    callback.on_train_start(trainer, module)
    for batch in range(2 * begun, 8):  # two batches for each step of the optimizer
        trainer.global_step = (batch + 1) // 2
        callback.on_train_batch_end(trainer, module, None, None, batch)
    assert [row.step for row in monitor.records] == measured


@pytest.mark.usefixtures("stub")
def test_a_pickled_callback_has_its_monitor() -> None:
    callback = lightning_callback(LipschitzMonitor(gpt2(), PROBES, every=7))
    again = pickle.loads(pickle.dumps(callback))
    assert type(again).__name__ == "MonitorCallback"
    assert again.monitor.every == 7


@pytest.mark.usefixtures("stub")
def test_another_model_and_another_object_are_refused() -> None:
    callback = lightning_callback(LipschitzMonitor(gpt2(), PROBES))
    module = gpt2()
    with pytest.raises(ArgumentError, match="a monitor of another GPT2LMHeadModel"):
        callback.on_train_start(trainer_of(module), module)


def test_without_lightning_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name, name=name.split(".")[0])

    monkeypatch.setattr(callbacks, "import_module", missing)
    with pytest.raises(ArgumentError, match="pip install lightning"):
        lightning_callback(LipschitzMonitor(gpt2(), PROBES))


def test_lightning_trains_as_without_it(tmp_path: Path) -> None:
    pytorch = pytest.importorskip("lightning.pytorch")

    class Module(pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()
            self.losses: list[float] = []

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def trained(monitored: bool) -> tuple[Module, list[int]]:
        module = Module()
        monitor = LipschitzMonitor(module.model, PROBES, every=2, strict=True, layers=[0])
        ids = torch.randint(0, 40, (24, 7), generator=torch.Generator().manual_seed(0))
        trainer = pytorch.Trainer(
            max_steps=4, accumulate_grad_batches=2, accelerator="cpu", logger=False,
            default_root_dir=tmp_path, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[lightning_callback(monitor)] if monitored else [],
        )  # fmt: skip
        torch.manual_seed(3)
        trainer.fit(module, torch.utils.data.DataLoader(ids, batch_size=2))
        return module, [row.step for row in monitor.records]

    (plain, none), (monitored, steps) = trained(False), trained(True)
    assert (none, steps) == ([], [0, 2, 4])
    assert len(set(plain.losses)) == 8
    assert monitored.losses == plain.losses
    state = monitored.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in plain.state_dict().items())


def test_the_loggers_get_the_numbers_and_a_resumed_penalty_goes_on(tmp_path: Path) -> None:
    pytorch = pytest.importorskip("lightning.pytorch")

    class Module(pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2(dropout=0.0)
            self.penalty = SpectralPenalty(self.model, steps=1, first_steps=2)
            self.losses: list[float] = []

        def on_fit_start(self) -> None:
            self.penalty.attach()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.model(input_ids=batch, labels=batch).loss + 0.1 * self.penalty()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    ids = torch.randint(0, 40, (8, 7), generator=torch.Generator().manual_seed(0))

    def trained(name: str, epochs: int, start: Path | None = None) -> tuple[Module, Any]:
        module = Module()
        monitor = LipschitzMonitor(module.model, PROBES, every=2, layers=[0])
        loggers = [pytorch.loggers.CSVLogger(tmp_path / name / part) for part in "ab"]
        trainer = pytorch.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=loggers, default_root_dir=tmp_path / name,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[lightning_callback(monitor, module.penalty)],
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(ids, batch_size=4)
        trainer.fit(module, loader, ckpt_path=start)
        module.penalty.detach()
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        for logger in loggers:
            rows = pd.read_csv(Path(logger.log_dir, "metrics.csv"))
            assert [row.step for row in monitor.records] == list(rows["step"])
            for row in monitor.records:
                (logged,) = rows[rows["step"] == row.step].to_dict("records")
                assert {tag: logged[tag] for tag in row.tagged()} == pytest.approx(row.tagged())
        return module, trainer

    whole, _ = trained("whole", 2)
    trained("half", 1)
    resumed, _ = trained("resumed", 2, tmp_path / "half.ckpt")
    assert len(whole.losses) == 4
    assert resumed.losses == whole.losses[2:]
    torch.testing.assert_close(resumed.penalty.state_dict(), whole.penalty.state_dict(), rtol=0, atol=0)
