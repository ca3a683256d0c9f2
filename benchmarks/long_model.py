"""Capture and measurement of one layer of a model at a long sequence: time and peak of memory of each.

    python benchmarks/long_model.py                          # seconds: n = 2048, d = 256
    python benchmarks/long_model.py --n 16384 --d 768 --heads 12 --memory 8GiB
    python benchmarks/long_model.py --kind Olmo2             # attention in stages

A model of transformers with two layers and random weights, float32, PyTorch's fused attention; its second
layer is captured with its block, and some steps of the solver are made. Peaks are those of the process
(Linux) above what it held when the model was there; beside them what matrices of probabilities would take.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
import transformers

import howsmooth as hs
from howsmooth.memory import parse_bytes
from howsmooth.models import capture


def peak() -> int:
    """Largest resident size of the process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", default="Llama", choices=["Llama", "Olmo2", "Qwen3"])
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--d", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", default="2GiB")
    arguments = parser.parse_args()
    n, d, heads = arguments.n, arguments.d, arguments.heads
    sizes = {"hidden_size": d, "intermediate_size": 3 * d, "num_attention_heads": heads}
    limits = {"vocab_size": 100, "num_hidden_layers": 2, "max_position_embeddings": n}
    config = getattr(transformers, f"{arguments.kind}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{arguments.kind}Model")(
        config(num_key_value_heads=heads, head_dim=d // heads, **sizes, **limits)
    ).eval()
    tokens = torch.randint(0, 100, (1, n))
    before, began = peak(), time.perf_counter()
    (site,) = capture(model, tokens, layers=[-1], scope="block")
    captured, now = time.perf_counter() - began, peak()
    numbers = (now - before) / (4 * n * d)
    print(f"{site.name}: {site.path_reason}")
    print(
        f"capture      {captured:8.1f} s   peak {(now - before) / 2**20:8.0f} MiB ({numbers:.0f} n d numbers)"
    )
    began = time.perf_counter()
    found = hs.local_lipschitz(
        site.map, site.x[0], max_iterations=arguments.steps, memory=parse_bytes(arguments.memory)
    )
    seconds = time.perf_counter() - began
    print(f"{int(found.iterations):3d} steps    {seconds:8.1f} s   peak {(peak() - before) / 2**20:8.0f} MiB")
    print(f"probabilities of {heads} heads would take {4 * heads * n * n / 2**20:.0f} MiB in float32")


if __name__ == "__main__":
    main()
