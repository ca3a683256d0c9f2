"""Proved radii and their times: sentences, a model with a linear probe, layers with random weights.

    python benchmarks/radius.py                              # the built-in encoder, and twelve random layers
    python benchmarks/radius.py --only random --orders 3     # further, in more time
    python benchmarks/radius.py --only encoder --model all-MiniLM-L6-v2     # any folder of the BERT kind
    python benchmarks/radius.py --only sentences joint --sst2 bert_tiny_sst2_encoder --orders 2 both

"sentences" are those of the SST-2 classifier, whose most sensitive token moves; "joint" lets all of their
tokens move. The margin of the other two is a random linear functional of the first token's output minus the
threshold at which the first-order radius is one: a radius of 0.05 is a twentieth of what a linear network
would allow. One token moves in the l2 norm, that with the largest gradient. Random layers have the weights
with which PyTorch begins. Seconds are those of the clock, for all that ``robust_radius`` does without its
attack; before them stand those of the processor. The peak of memory is that of the process so far.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

import howsmooth as hs
from howsmooth.bounds.radius.robust_radius import NetworkAtInput

TEXT = "the old man looked at her"


class Probe(nn.Module):
    """Encoder layers, then a linear readout (classes,) of the first token."""

    def __init__(self, layers: list[nn.TransformerEncoderLayer], seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        width = layers[0].linear1.in_features
        self.readout = nn.Linear(width, 1, bias=False)
        direction = torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
        self.readout.weight.data = direction / direction.norm()
        self.double().eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, n, d) to the probe (batch, 1)."""
        return self.readout(self.layers(x)[:, 0])


def encoder_layer(width: int, heads: int, hidden: int, eps: float = 1e-5) -> nn.TransformerEncoderLayer:
    """Return a post-norm layer without dropout."""
    return nn.TransformerEncoderLayer(width, heads, hidden, 0.0, "gelu", eps, batch_first=True)


def copied(layer: nn.Module, heads: int) -> nn.TransformerEncoderLayer:
    """Return a layer of BERT, which has exact GELU, as one of PyTorch."""
    own, mixed, up, down = (
        layer.attention.self,
        layer.attention.output,
        layer.intermediate.dense,
        layer.output,
    )
    found = encoder_layer(up.in_features, heads, up.out_features, down.LayerNorm.eps)
    parts = (own.query, own.key, own.value)
    found.self_attn.in_proj_weight.data = torch.cat([part.weight.data for part in parts])
    found.self_attn.in_proj_bias.data = torch.cat([part.bias.data for part in parts])
    pairs = (
        (found.self_attn.out_proj, mixed.dense),
        (found.norm1, mixed.LayerNorm),
        (found.linear1, up),
        (found.linear2, down.dense),
        (found.norm2, down.LayerNorm),
    )
    for new, old in pairs:
        new.load_state_dict(old.state_dict())
    return found


def pretrained(name: str, text: str) -> tuple[Probe, Tensor]:
    """Return the layers of a model of the BERT kind, and the embedded tokens (n, d) of a text."""
    loaded = hs.models.load_model(name)
    base = getattr(loaded.model, "bert", loaded.model)
    layers = [copied(layer, base.config.num_attention_heads) for layer in base.encoder.layer]
    given = {"input_ids": torch.tensor([loaded.tokenizer.encode(text, special=True)])}
    with torch.no_grad():
        x = base.embeddings(input_ids=given["input_ids"])[0].double()
        expected = base(**given).last_hidden_state[0].double()
    probe = Probe(layers)
    difference = float((probe.layers(x[None])[0] - expected).abs().max())
    if difference > 1e-3:  # the model computes in float32
        raise SystemExit(f"The copy of {name} differs from it by {difference:.1e}.")
    return probe, x


def random_layers(count: int, n: int, width: int = 128) -> tuple[Probe, Tensor]:
    """Return layers with random weights, and tokens with normal entries (n, d)."""
    torch.manual_seed(0)
    probe = Probe([encoder_layer(width, 4, 2 * width) for _ in range(count)])
    return probe, torch.randn(n, width, dtype=torch.float64)


def sensitive(probe: Probe, x: Tensor) -> tuple[int, float]:
    """Return the token with the largest gradient, and the threshold at which the first-order radius is 1."""
    moved = x.clone().requires_grad_()
    value = probe(moved[None])[0, 0]
    (slope,) = torch.autograd.grad(value, moved)
    token = int(slope.norm(dim=1).argmax())
    return token, float(value.detach() - slope[token].norm())


def most_sensitive(model: nn.Module, x: Tensor) -> int:
    """Return the token at which the gradient of a classifier's margin is largest, for two classes."""
    at = NetworkAtInput(model, x)
    moved = at.x.clone().requires_grad_()
    logits = at.network.logits(moved)
    (slope,) = torch.autograd.grad(logits[0] - logits[1], moved)
    return int(slope.norm(dim=1).argmax())


def rows(asked: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table, one after another."""
    one = torch.ones(1, dtype=torch.float64)
    for only in asked.only:
        if only in ("joint", "sentences"):
            model = AutoModelForSequenceClassification.from_pretrained(asked.sst2).eval()
            tokens = load_file(asked.sst2 / "sequences.safetensors")
            for name, x in sorted(tokens.items(), key=lambda item: len(item[1]))[: asked.sentences]:
                if only == "joint":
                    yield row(f"SST-2, {name}, all tokens", "2", model, x, None, seconds=asked.seconds)
                    continue
                token = most_sensitive(model, x)
                for order in asked.orders:
                    yield row(f"SST-2, {name}, token {token}", order, model, x, token, seconds=asked.seconds)
            continue
        if only == "encoder":
            title, (probe, x) = f"{asked.model}, probe", pretrained(asked.model, asked.text)
        else:
            title, (probe, x) = f"{asked.layers} random layers", random_layers(asked.layers, asked.tokens)
        token, threshold = sensitive(probe, x)
        for order in asked.orders:
            goal = {"target": one, "threshold": threshold, "seconds": asked.seconds}
            yield row(title, order, probe, x, token, **goal)


def row(
    title: str, order: str, model: nn.Module, x: Tensor, token: int | None, **goal: Any
) -> tuple[str, ...]:
    """Compute a radius, and say it in the cells of a row."""
    begin, used = time.perf_counter(), time.process_time()
    only = None if order == "both" else int(order)
    found = hs.bounds.robust_radius(model, x, tokens=token, order=only, attack=False, **goal)
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    worst = max(found.losses, key=lambda name: found.losses[name])
    lost = f"{worst}: {found.losses[worst] / found.margin:.0%}"
    numbers = (
        f"{found.radius:.4f}",
        f"{found.first_order:.3f}",
        f"{used:.1f}",
        f"{seconds:.1f}",
        f"{memory:.1f}",
    )
    return (title, f"{x.shape[0]}", f"{x.shape[1]}", f"{found.order}", *numbers, lost)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("encoder", "random", "joint", "sentences")
    parser.add_argument("--only", nargs="+", choices=kinds, default=["encoder", "random"])
    parser.add_argument("--orders", nargs="+", choices=["2", "3", "both"], default=["2"])
    parser.add_argument("--model", default="builtin-encoder", help="a name or folder, of the BERT kind")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--layers", type=int, default=12, help="with random weights")
    parser.add_argument("--tokens", type=int, default=8, help="beside random layers")
    parser.add_argument("--sst2", type=Path, help="folder of the SST-2 classifier and its sentences")
    parser.add_argument("--sentences", type=int, default=5, help="so many of them, the shortest first")
    parser.add_argument("--seconds", type=float, help="end the search for a radius after so long")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    names = ("radius", "first order", "processor", "seconds", "GiB", "largest loss")
    table = Table("network", "tokens", "d", "order", *names)
    for cells in rows(asked):
        print(" · ".join(cells), file=sys.stderr, flush=True)
        table.add_row(*cells)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
