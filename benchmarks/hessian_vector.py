"""Hessian-vector products of a whole Llama-type model: time and memory, by attention implementation.

    python benchmarks/hessian_vector.py                              # some minutes
    python benchmarks/hessian_vector.py --tokens 512,2048 --ways whole,layers

The loss is a sum over all entries of the last hidden state, the point is the embeddings (1, n, d). ``whole``
is ``jvp(grad(loss))`` of the model. ``dense`` is the whole Hessian by
``jacrev(grad(loss))``, for few tokens. ``layers`` is the same product, one layer after the other: the forward
pass keeps the input of each layer and its tangent, and the backward pass takes forward over reverse mode of
one layer at a time, so that the memory is that of one layer. ``math`` is the implementation ``"sdpa"`` with
PyTorch's math backend, which alone has these derivatives. Each run is a process of its own with one
thread; memory is its largest size, the interpreter with PyTorch included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaModel
from transformers.masking_utils import create_causal_mask

import howsmooth as hs


def made(n: int, implementation: str, *, hidden: int = 256, layers: int = 4) -> LlamaModel:
    """A random model with eight heads."""
    hs.functional.register()
    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=8 * hidden // 3, num_hidden_layers=layers,
        num_attention_heads=8, max_position_embeddings=n, use_cache=False,
        attn_implementation="sdpa" if implementation == "math" else implementation,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaModel(config).eval().requires_grad_(False)


def loss(hidden: Tensor) -> Tensor:
    return (hidden**3).sum()


def of(model: LlamaModel) -> Callable[[Tensor], Tensor]:
    """Return the loss as a function of the embeddings."""
    return lambda x: loss(functional_call(model, {}, kwargs={"inputs_embeds": x}).last_hidden_state)


def whole(model: LlamaModel, x: Tensor, e: Tensor) -> Tensor:
    """Return the product of the Hessian at x with e, of the model as one function."""
    return jvp(grad(of(model)), (x,), (e,))[1]


def dense(model: LlamaModel, x: Tensor, e: Tensor) -> Tensor:
    """Return the same product by the whole Hessian."""
    hessian = jacrev(grad(of(model)), chunk_size=64)(x)
    return (hessian.reshape(x.numel(), x.numel()) @ e.flatten()).reshape(x.shape)


def layers(model: LlamaModel, x: Tensor, e: Tensor) -> Tensor:
    """Return the same product, in the memory of one layer."""
    positions = torch.arange(x.shape[1])[None]
    given = {
        "position_embeddings": model.rotary_emb(x, positions),
        "attention_mask": create_causal_mask(model.config, x, None, None, positions),
    }
    steps: list[Callable[[Tensor], Tensor]] = [
        *(lambda h, layer=layer: layer(h, **given) for layer in model.layers),
        model.norm,
    ]
    kept = []
    for step in steps:
        kept.append((x, e))
        x, e = jvp(step, (x,), (e,))
    u, du = jvp(grad(loss), (x,), (e,))
    for step, (x, e) in zip(reversed(steps), reversed(kept), strict=True):
        u, du = jvp(lambda x, u, step=step: vjp(step, x)[1](u)[0], (x, u), (e, du))
    return du


WAYS = {"dense": dense, "whole": whole, "layers": layers}


def one(n: int, implementation: str, way: str) -> None:
    """Print the seconds and the largest size of this process in MiB."""
    torch.set_num_threads(1)
    model = made(n, implementation)
    x, e = torch.randn(2, 1, n, model.config.hidden_size)
    began, processor = time.perf_counter(), time.process_time()
    with sdpa_kernel(SDPBackend.MATH):
        WAYS[way](model, x, e)
    clock, processor = time.perf_counter() - began, time.process_time() - processor
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    print(clock, processor, peak)


def measured(n: int, implementation: str, way: str) -> tuple[float, float, float]:
    """Seconds on the clock and of the processor, and MiB, of a process of its own."""
    command = [sys.executable, __file__, "--one", f"{n},{implementation},{way}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    clock, processor, peak = map(float, done.stdout.split())
    return clock, processor, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="16,512,2048,8192")
    parser.add_argument("--implementations", default="howsmooth,math,eager")
    parser.add_argument("--ways", default="layers,whole,dense")
    parser.add_argument("--most", type=int, default=2048, help="tokens at most with other attention")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        n, implementation, way = options.one.split(",")
        one(int(n), implementation, way)
        return
    print(f"{'n':>6} {'attention':>10} {'way':>7} {'s':>8} {'cpu s':>8} {'MiB':>8}")
    for n in map(int, options.tokens.split(",")):
        for implementation in options.implementations.split(","):
            for way in options.ways.split(","):
                if (implementation == "howsmooth" or n <= options.most) and (way != "dense" or n <= 16):
                    clock, processor, peak = measured(n, implementation, way)
                    row = f"{n:6} {implementation:>10} {way:>7} {clock:8.1f} {processor:8.1f} {peak:8.0f}"
                    print(row, flush=True)


if __name__ == "__main__":
    main()
