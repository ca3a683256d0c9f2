"""One device: its ceilings, how near to them products come, the paper's protocol, and one long layer.

    python benchmarks/device.py --device cuda
    python benchmarks/device.py --device cpu --cached 64,512 --streamed 1024 --samples 1 --layer 1024

A product with JᵀJ of one layer (d = 768, 12 heads, causal, float32) has two ceilings: its operations over the
device's rate of matrix products, and the bytes that it cannot help reading over the device's bandwidth; the
larger of the two times, over the time that it took, is its share of the roofline. Where all probabilities are
kept, J and Jᵀ read them once each; tile by tile they are formed, and the bytes are those of tokens only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import howsmooth as hs
from howsmooth.distributed import Device, step_cost
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.study.ranges import Ranges

D, HEADS = 768, 12
GOAL_PROTOCOL, GOAL_LAYER = 10.0, 60.0


def seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median time of a call, the first left out."""
    times = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def ceilings(device: torch.device, rounds: int) -> tuple[float, float]:
    """Operations a second of a float32 matrix product, and bytes a second of a copy, read and written."""
    large = device.type == "cuda"
    size, entries = (8192, 1 << 30) if large else (2048, 1 << 26)
    a, b = torch.randn(2, size, size, device=device)
    source = torch.ones(entries // 4, device=device)
    target = torch.empty_like(source)
    rate = 2 * size**3 / seconds(lambda: torch.mm(a, b), device, rounds)
    return rate, 2 * entries / seconds(lambda: target.copy_(source), device, rounds)


def layer(device: torch.device, *, causal: bool) -> hs.SelfAttention:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, HEADS, D // HEADS, D, generator=generator) / D**0.5
    output = torch.randn(D, D, generator=generator) / D**0.5
    return hs.SelfAttention(q, k, v, output, causal=causal).to(device=device)


def tokens(n: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    """Gaussian tokens; with the seed of the layer, 0, they would be its weights."""
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed)).to(device)


def roofline(options: argparse.Namespace, device: torch.device) -> None:
    rate, bandwidth = ceilings(device, options.rounds)
    print(
        f"ceilings: {rate / 1e12:.2f} · 10¹² operations/s in float32, {bandwidth / 1e9:.0f} · 10⁹ bytes/s\n"
    )
    print("way            n       time   operations      bytes  share of the roofline  bound by")
    f = layer(device, causal=True)
    for way, lengths in (("cached", options.cached), ("streamed", options.streamed)):
        for n in Ranges.parse(lengths, way).values() if lengths else ():
            at = closed_form_jacobian(f, tokens(n, device)[None], streamed=way == "streamed")
            e = tokens(n, device, 2)[None]
            took = seconds(lambda at=at, e=e: at.gram_product(e), device, options.rounds)
            operations = step_cost(f, n, 1, Device(1.0, 1e18, 1.0, device.type)).operations
            if way == "cached":  # all entries, those that are zero too; P is not formed anew
                operations = 8 * 2 * n * n * D + 16 * n * D * D
            rows = 12 * n * D * 4
            read = rows + (2 * HEADS * n * n * 4 if way == "cached" else 0)
            by_operations, by_bytes = operations / rate, read / bandwidth
            bound = "operations" if by_operations > by_bytes else "bytes"
            share = max(by_operations, by_bytes) / took
            print(
                f"{way:8} {n:7} {took:8.4f} s {operations:12.2e} {read:10.2e} {share:22.0%}  {bound}",
                flush=True,
            )


def protocol(options: argparse.Namespace, device: torch.device) -> None:
    """Measure one layer at the lengths 2, 4, …, 98 of Figure 1, some sequences each, three times."""
    xs = [tokens(n, device, n * 100 + i) for n in range(2, 99, 2) for i in range(options.samples)]
    begun = time.perf_counter()
    for causal in (False, True, True):
        hs.local_lipschitz(layer(device, causal=causal), xs)
    took = time.perf_counter() - begun
    print(
        f"\nprotocol: 3 layers × {len(xs)} sequences in {took:.1f} s "
        f"(goal for 490 on one H200: {GOAL_PROTOCOL:g} s)"
    )


def long_layer(options: argparse.Namespace, device: torch.device) -> None:
    begun = time.perf_counter()
    found = hs.local_lipschitz(layer(device, causal=True), tokens(options.layer, device), rtol=1e-3)
    took = time.perf_counter() - begun
    status = "converged" if bool(found.converged) else "NOT converged"
    print(
        f"\none causal layer, n = {options.layer}: {float(found.value):.6g}, {status} in "
        f"{int(found.iterations)} steps and {took:.1f} s (goal for 131072 on one H200: {GOAL_LAYER:g} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cached", default="64,256,1024,4096", help="lengths with all probabilities kept")
    parser.add_argument("--streamed", default="1024,8192,32768,131072", help="lengths tile by tile")
    parser.add_argument("--samples", type=int, default=10, help="sequences a length of the protocol; 0: none")
    parser.add_argument("--layer", type=int, default=131_072, help="length of the long layer; 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each product")
    options = parser.parse_args()
    device = torch.device(options.device)
    roofline(options, device)
    if options.samples:
        protocol(options, device)
    if options.layer:
        long_layer(options, device)


if __name__ == "__main__":
    main()
