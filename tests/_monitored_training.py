"""Training with and without a monitor, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from howsmooth.nn import LipschitzMonitor

PROBES = torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(5))
WAYS = ("none", "after the step", "before the backward pass", "attached", "diverged")


def gpt2(dropout: float = 0.3, seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2,
        attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Restless(nn.Module):
    """Draws from every generator, writes to a buffer in evaluation mode too, and replaces another."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.dropout = nn.Dropout(0.3)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        self.last = torch.tensor(random.random() + np.random.rand())  # noqa: NPY002
        logits = self.frozen(self.dropout(self.model(input_ids).logits))
        return logits * (1 + 0.01 * self.calls + 0.01 * self.last)


def checksum(model: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def trained(way: str, device: str = "cpu") -> dict[str, Any]:
    """Train with dropout and with random numbers from three generators."""
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    model = Restless(gpt2()).to(device)
    monitor = None if way == "none" else LipschitzMonitor(model, PROBES, every=2, strict=way != "diverged")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if monitor is not None and way == "attached":
        monitor.attach(optimizer)
    losses = []
    for _ in range(6):
        ids = torch.as_tensor(np.random.randint(0, 40, (4, 7))).to(device)  # noqa: NPY002
        loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if monitor is not None and way == "before the backward pass":
            monitor.step()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None and way == "after the step":
            monitor.step()
        if monitor is not None and way == "diverged":
            _measure_diverged(model, monitor)
        losses.append(loss.item())
    records = [] if monitor is None else monitor.records
    return {
        "losses": losses,
        "weights": checksum(model),
        "steps": [record.step for record in records],
        "failures": sum(bool(record.failure) for record in records),
    }


def _measure_diverged(model: Restless, monitor: LipschitzMonitor) -> None:
    """Measure with weights that are not numbers, which are then put back."""
    weight = model.model.transformer.h[0].attn.c_attn.weight.data
    kept = weight.clone()
    weight.fill_(torch.nan)
    monitor.step()
    weight.copy_(kept)


def by_trainer(folder: Path, prepare: Callable[[Any], list[Any]], **settings: Any) -> dict[str, Any]:
    """Train by the Hugging Face ``Trainer``."""
    from transformers import Trainer, TrainingArguments

    ids = torch.randint(0, 40, (24, 7), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    model = gpt2()
    arguments = TrainingArguments(
        str(folder), max_steps=5, per_device_train_batch_size=4, logging_steps=1, report_to=[], seed=3,
        use_cpu=True, save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)  # type: ignore[arg-type]
    for callback in prepare(trainer):
        trainer.add_callback(callback)
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    history = trainer.state.log_history
    return {
        "losses": [row["loss"] for row in history if "loss" in row],
        "weights": checksum(model),
        "logged": [row for row in history if any("/" in name for name in row)],
    }


def train_in_all_ways(folder: Path) -> None:
    """Write losses and a checksum of the final weights, for each way of monitoring, to ``found.json``."""
    from howsmooth.nn import MonitorCallback

    jaxtyping.config.update("jaxtyping_disable", True)  # checks of annotations draw from Python's generator
    found: dict[str, Any] = {way: trained(way) for way in WAYS}
    kept: list[LipschitzMonitor] = []

    def monitored(trainer: Any) -> list[Any]:
        kept.append(LipschitzMonitor(trainer.model, PROBES, every=2, strict=True))
        return [MonitorCallback(kept[-1], trainer.log)]

    found["trainer"] = by_trainer(folder, lambda trainer: [])
    found["trainer, monitored"] = by_trainer(folder, monitored)
    found["trainer, monitored"]["rows"] = [(row.step, row.layer) for row in kept[-1].records]
    found["trainer, monitored"]["tagged"] = [row.tagged() | {"step": row.step} for row in kept[-1].records]
    found["trainer, accumulating"] = by_trainer(folder, monitored, gradient_accumulation_steps=2)
    found["trainer, accumulating"]["rows"] = [(row.step, row.layer) for row in kept[-1].records]
    other = LipschitzMonitor(gpt2(), PROBES)
    found["trainer of another model"] = by_trainer(folder, lambda trainer: [MonitorCallback(other)])

    def at_padded_probes(trainer: Any) -> list[Any]:
        mask = torch.ones_like(PROBES)
        mask[1, 4:] = 0
        probes = {"input_ids": PROBES, "attention_mask": mask}
        kept.append(LipschitzMonitor(trainer.model, probes, every=5, strict=True))
        return [MonitorCallback(kept[-1])]

    found["mixed precision"] = by_trainer(folder, at_padded_probes, bf16=True)
    prepared = kept[-1].model
    plain = gpt2()
    plain.load_state_dict(prepared.state_dict())
    fresh = at_padded_probes(SimpleNamespace(model=plain))[0].monitor.measure(5)
    rows = {"prepared": kept[-2].records[-2:], "plain": fresh}
    for name, records in rows.items():
        found["mixed precision"][name] = [(row.step, *row.each, row.logit_max) for row in records]
    (folder / "found.json").write_text(json.dumps(found))
