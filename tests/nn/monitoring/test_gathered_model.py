"""A monitor in distributed training: two processes on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._distributed_training import main
from tests._forked import all_done

WAYS = ["fully_shard"]
SLOW_WAYS = ["ddp", "ddp in bfloat16", "fsdp", "fsdp, original parameters", "fully_shard in bfloat16"]


def in_two_processes(way: str, folder: Path) -> list[Any]:
    assert all_done([partial(main, folder, way, rank, 2) for rank in range(2)])
    return [torch.load(folder / f"found-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW_WAYS)])
def test_distributed_training_is_the_same_and_the_first_process_measures(way: str, tmp_path: Path) -> None:
    first, second = in_two_processes(way, tmp_path)
    for plain, monitored in (first, second):
        assert len(set(plain["losses"])) == 4
        assert monitored["losses"] == plain["losses"]
        assert monitored["weights"].keys() == plain["weights"].keys()
        assert all(torch.equal(t, monitored["weights"][name]) for name, t in plain["weights"].items())
    # The processes have different sequences, and the same weights.
    assert first[1]["losses"] != second[1]["losses"]
    assert all(torch.equal(t, second[1]["weights"][name]) for name, t in first[1]["weights"].items())
    rows = first[1]["rows"]
    names = [f"transformer.h.{i}.attn" for i in (0, 1)]
    assert [row[:3] for row in rows] == [(step, i, names[i]) for step in (0, 2, 4) for i in (0, 1)]
    assert second[1]["rows"] == []
    alone = first[1]["alone"]
    assert [row[3] for row in rows[-2:]] == pytest.approx([row[3] for row in alone], rel=1e-6)
