"""One sequence shared among processes with gloo: time of a step, speed-up, work and how even it is, bytes.

    python benchmarks/sequence_parallel.py --n 8192 --d 768 --heads 12 --causal --processes 1,2

Every process has one thread, so that as many are tried as the machine has cores. A step is one product with
JᵀJ. Work is processor time, which other programs on the machine hardly change: that of all processes over
that of one alone, and that of the process that has least over that of the one that has most.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import howsmooth as hs
from howsmooth.distributed import Device, step_cost
from howsmooth.distributed.communication import Exchange, ProcessGroupCollectives
from howsmooth.distributed.shared_jacobian import SharedMap
from howsmooth.distributed.token_partition import RowShares


def layer(options: argparse.Namespace) -> hs.SelfAttention:
    generator = torch.Generator().manual_seed(0)
    size = (options.heads, options.d // options.heads, options.d)
    q, k, v = (torch.randn(size, generator=generator) / options.d**0.5 for _ in range(3))
    output = torch.randn(options.d, options.d, generator=generator) / options.d**0.5
    return hs.SelfAttention(q, k, v, output, causal=options.causal)


def one(rank: int, world: int, folder: str, options: argparse.Namespace, told: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    shares = RowShares(options.n, world)
    exchange = Exchange(ProcessGroupCollectives(None), shares, torch.device("cpu"))
    f = layer(options).to(dtype=torch.float64)
    own = shares.count(rank)
    x = torch.randn(1, own, f.d, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    at = SharedMap(exchange, f.kv_heads).jacobian(f, x, torch.float32)
    e = x.float()
    times, work = [], []
    for _ in range(options.products + 1):  # the first is not counted
        dist.barrier()
        begun, worked = time.perf_counter(), time.thread_time()
        at.gram_product(e)
        work.append(time.thread_time() - worked)
        dist.barrier()
        times.append(time.perf_counter() - begun)
    told.put((statistics.median(times[1:]), statistics.median(work[1:])))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--d", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--products", type=int, default=3, help="how many are timed; the median counts")
    parser.add_argument("--processes", default="1,2")
    options = parser.parse_args()
    print("processes    a step  speed-up    work  least/most    received")
    alone: tuple[float, float] | None = None
    for world in map(int, options.processes.split(",")):
        context = multiprocessing.get_context("spawn")
        told = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            running = [
                context.Process(target=one, args=(rank, world, folder, options, told))
                for rank in range(world)
            ]
            for process in running:
                process.start()
            found = [told.get() for _ in running]
            for process in running:
                process.join()
        steps, work = zip(*found, strict=True)
        alone = alone or (max(steps), sum(work))
        counted = step_cost(layer(options), options.n, world, Device(1.0, 1e15, 1.0, "cpu"))
        print(
            f"{world:9}  {max(steps):6.2f} s  {alone[0] / max(steps):8.2f}  {sum(work) / alone[1]:6.2f}  "
            f"{min(work) / max(work):10.2f}  {counted.received / 2**20:7.1f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
