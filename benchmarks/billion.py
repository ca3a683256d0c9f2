"""A model of a billion parameters in bfloat16, on a processor: seconds and peak of memory.

    python benchmarks/billion.py --layers 2 --width 256 --n 256   # seconds
    python benchmarks/billion.py                                  # twelve minutes on two cores

The model is of Llama type with random weights: 22 layers, d = 2048, 32 heads on 4 keys and values, 1.1
billion parameters. Measured are the profile of four layers and all their heads, then the map of two blocks
(scope ``span``), each in a process of its own. Peaks are those of the whole process, on Linux.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import howsmooth as hs


def built(layers: int, width: int) -> LlamaForCausalLM:
    """Return a model with random weights in bfloat16."""
    heads = width // 64
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8),
        max_position_embeddings=1 << 15,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)
    finally:
        torch.set_default_dtype(torch.float32)


def said(what: str, began: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what:<40} {time.perf_counter() - began:8.1f} s   peak {peak:5.1f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--rtol", type=float, default=1e-2)
    parser.add_argument("--only", choices=["profile", "span"])
    arguments = parser.parse_args()
    if arguments.only is None:
        for part in ("profile", "span"):
            subprocess.run([sys.executable, *sys.argv, "--only", part], check=True)
        return
    began = time.perf_counter()
    model = built(arguments.layers, arguments.width)
    count = sum(p.numel() for p in model.parameters())
    said(f"{count / 1e9:.2f} billion parameters", began)
    ids = torch.randint(0, model.config.vocab_size, (1, arguments.n))
    began, half = time.perf_counter(), arguments.layers // 2
    if arguments.only == "profile":
        layers = sorted({0, arguments.layers // 3, 2 * arguments.layers // 3, arguments.layers - 1})

        def after(layer: int, of: int) -> None:
            said(f"{layer} of {of} layers", began)

        found = hs.profile(model, ids, layers=layers, rtol=arguments.rtol, on_layer=after)
        said(f"profile of layers {layers}", began)
        print(found.table.groupby("scope")["value"].describe()[["count", "min", "max"]])
        return
    (site,) = hs.capture(model, ids, scope="span", layers=(half - 1, half))
    said("capture of two blocks", began)
    began = time.perf_counter()
    estimate = hs.local_lipschitz(site.map, site.x[0], rtol=arguments.rtol)
    said(f"their constant, {int(estimate.iterations)} steps", began)
    print(estimate)


if __name__ == "__main__":
    main()
