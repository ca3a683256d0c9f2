"""A process that trains with others, with a monitor and without, and saves losses, weights and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from howsmooth.nn import LipschitzMonitor
from tests._monitored_training import PROBES, gpt2

WAYS = (
    "ddp",
    "ddp in bfloat16",
    "fsdp",
    "fsdp, original parameters",
    "fully_shard",
    "fully_shard in bfloat16",
)


def wrapped(way: str) -> nn.Module:
    """Return the model of the training, with dropout, in a wrapper of distributed training."""
    model = gpt2()
    if "bfloat16" in way:
        model = model.to(torch.bfloat16)
    if way.startswith("ddp"):
        return DistributedDataParallel(model)
    if way.startswith("fully_shard"):
        for layer in model.transformer.h:
            fully_shard(layer)
        fully_shard(model)
        return model
    original = {"use_orig_params": "original" in way, "device_id": torch.device("cpu")}
    for i, layer in enumerate(model.transformer.h):
        model.transformer.h[i] = FullyShardedDataParallel(layer, **original)
    return FullyShardedDataParallel(model, **original)


def trained(way: str, monitored: bool) -> dict[str, Any]:
    """Train for four steps; each process has sequences of its own."""
    model = wrapped(way)
    monitor = LipschitzMonitor(model, PROBES, every=2, strict=True) if monitored else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(10 + dist.get_rank())
    if monitor is not None:
        monitor.measure(0)
    losses = []
    for _ in range(4):
        ids = torch.randint(0, 40, (2, 7), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step()
    rows = [] if monitor is None else monitor.records
    # The weights that the other process must have too, and what one process measures of them by itself.
    alone = []
    state = {name: whole(t) for name, t in full_state(model).items()}
    if monitor is not None:
        plain = gpt2()
        plain.load_state_dict(state)
        alone = LipschitzMonitor(plain.to(next(iter(state.values())).dtype), PROBES, strict=True).measure(4)
    return {
        "losses": losses,
        "weights": state,
        "rows": [(row.step, row.layer, row.name, row.lipschitz) for row in rows],
        "alone": [(row.step, row.layer, row.name, row.lipschitz) for row in alone],
    }


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            found = {name: t.detach().clone() for name, t in model.state_dict().items()}
    else:
        found = {name: t.detach().clone() for name, t in model.state_dict().items()}
    for part in ("_fsdp_wrapped_module.", "module."):
        found = {name.replace(part, ""): t for name, t in found.items()}
    return found


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def main(folder: Path, way: str, rank: int, world: int) -> None:
    """Train in one of ``world`` processes, which meet in a folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    torch.save([trained(way, monitored=False), trained(way, monitored=True)], folder / f"found-{rank}.pt")
    dist.destroy_process_group()
