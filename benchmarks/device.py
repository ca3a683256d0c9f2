"""One device: its ceilings, how near to them products come, the paper's protocol, and one long layer.

    python benchmarks/device.py --device cuda
    python benchmarks/device.py --device cpu --cached 64,512 --streamed 1024 --samples 1 --layer 1024
    python benchmarks/device.py --device cuda --profile

A product with JᵀJ of one layer (d = 768, 12 heads, causal, float32) has two ceilings: its operations over the
device's rate of matrix products, and the bytes that it cannot help reading over the device's bandwidth; the
larger of the two times, over the time that it took, is its share of the roofline. Where all probabilities are
kept, J and Jᵀ read them once each; tile by tile they are formed, and the bytes are those of tokens only.

``--profile`` says of the protocol on a CUDA device how long it takes, how much of that kernels ran, and which
operations took most, there and on the processor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import howsmooth as hs
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.study.ranges import Ranges

GOAL_PROTOCOL, GOAL_LAYER = 10.0, 40.0


def seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median time of a call, the first of several left out."""
    times = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:] or times)


def ceilings(device: torch.device, rounds: int) -> tuple[float, float]:
    """Operations a second of a float32 matrix product, and bytes a second of a copy, read and written."""
    large = device.type == "cuda"
    size, entries = (8192, 1 << 30) if large else (2048, 1 << 26)
    a, b = torch.randn(2, size, size, device=device)
    source = torch.ones(entries // 4, device=device)
    target = torch.empty_like(source)
    rate = 2 * size**3 / seconds(lambda: torch.mm(a, b), device, rounds)
    return rate, 2 * entries / seconds(lambda: target.copy_(source), device, rounds)


def layer(options: argparse.Namespace, device: torch.device, *, causal: bool) -> hs.SelfAttention:
    d, heads, generator = options.d, options.heads, torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, heads, d // heads, d, generator=generator) / d**0.5
    output = torch.randn(d, d, generator=generator) / d**0.5
    return hs.SelfAttention(q, k, v, output, causal=causal).to(device=device)


def tokens(n: int, d: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    """Gaussian tokens; with the seed of the layer, 0, they would be its weights."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(device)


def roofline(options: argparse.Namespace, device: torch.device) -> None:
    rate, bandwidth = ceilings(device, options.rounds)
    print(
        f"ceilings: {rate / 1e12:.2f} · 10¹² operations/s in float32, {bandwidth / 1e9:.0f} · 10⁹ bytes/s\n"
    )
    print("way            n       time   operations      bytes  share of the roofline  bound by")
    d, heads, f = options.d, options.heads, layer(options, device, causal=True)
    for way, lengths in (("cached", options.cached), ("streamed", options.streamed)):
        for n in Ranges.parse(lengths, way).values() if lengths else ():
            at = closed_form_jacobian(f, tokens(n, d, device)[None], streamed=way == "streamed")
            e = tokens(n, d, device, 2)[None]
            took = seconds(lambda at=at, e=e: at.gram_product(e), device, options.rounds)
            operations = 9 * n * (n + 1) * d + 16 * n * d * d  # nine products over pairs, and projections
            if way == "cached":  # all entries, those that are zero too; P is not formed anew
                operations = 8 * 2 * n * n * d + 16 * n * d * d
            rows = 12 * n * d * 4
            read = rows + (2 * heads * n * n * 4 if way == "cached" else 0)
            by_operations, by_bytes = operations / rate, read / bandwidth
            bound = "operations" if by_operations > by_bytes else "bytes"
            share = max(by_operations, by_bytes) / took
            print(
                f"{way:8} {n:7} {took:8.4f} s {operations:12.2e} {read:10.2e} {share:22.0%}  {bound}",
                flush=True,
            )


def sequences(options: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """Those of Figure 1: of 2, 4, …, 98 tokens."""
    lengths, samples = range(2, 99, 2), range(options.samples)
    return [tokens(n, options.d, device, n * 100 + i) for n in lengths for i in samples]


def protocol(options: argparse.Namespace, device: torch.device) -> None:
    """Measure one layer at all sequences of Figure 1, three times."""
    xs = sequences(options, device)
    begun = time.perf_counter()
    for causal in (False, True, True):
        hs.local_lipschitz(layer(options, device, causal=causal), xs)
    took = time.perf_counter() - begun
    print(
        f"\nprotocol: 3 layers × {len(xs)} sequences in {took:.1f} s "
        f"(goal for 490 on one H200: {GOAL_PROTOCOL:g} s)"
    )


def profile(options: argparse.Namespace, device: torch.device) -> None:
    """Show where the time of one layer of the protocol goes."""
    xs, f = sequences(options, device), layer(options, device, causal=True)
    took = seconds(lambda: hs.local_lipschitz(f, xs), device, 1)
    with torch.profiler.profile() as profiler:
        seconds(lambda: hs.local_lipschitz(f, xs), device, 0)
    events = profiler.key_averages()
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    ran = sum(event.self_device_time_total for event in kernels) / 1e6
    count = sum(event.count for event in kernels)
    print(f"one layer, {len(xs)} sequences: {took:.2f} s, of which {count} kernels ran for {ran:.2f} s")
    for order in ("self_device_time_total", "self_cpu_time_total"):
        print(events.table(sort_by=order, row_limit=20, max_name_column_width=60))


def long_layer(options: argparse.Namespace, device: torch.device) -> None:
    begun = time.perf_counter()
    found = hs.local_lipschitz(
        layer(options, device, causal=True), tokens(options.layer, options.d, device), rtol=1e-3
    )
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
    parser.add_argument("--d", type=int, default=768, help="dimension of the tokens")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--cached", default="64,256,1024,4096", help="lengths with all probabilities kept")
    parser.add_argument("--streamed", default="1024,8192,32768,131072", help="lengths tile by tile")
    parser.add_argument("--samples", type=int, default=10, help="sequences a length of the protocol; 0: none")
    parser.add_argument("--layer", type=int, default=131_072, help="length of the long layer; 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each product")
    parser.add_argument("--profile", action="store_true", help="profile the protocol, nothing else")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.profile:
        profile(options, device)
        return
    roofline(options, device)
    if options.samples:
        protocol(options, device)
    if options.layer:
        long_layer(options, device)


if __name__ == "__main__":
    main()
