"""CROWN of auto_LiRPA beside ``robust_radius``, on the first tokens of a sentence.

    python benchmarks/crown_radius.py --folder bert_tiny_sst2_encoder --tokens 6 --seconds 600
    python benchmarks/crown_radius.py --news ag_news/test.csv --sentences 3 --orders 2

``--news`` takes the shortest held-out headlines and the plain classifier of ``examples/news``.

Needs auto_LiRPA (https://github.com/Verified-Intelligence/auto_LiRPA; 0.7.1 was tried, with PyTorch 2.13 from
its source folder on PYTHONPATH, since its installer refuses PyTorch from 2.9 on) and appdirs. The network is
copied with plain operations: LayerNorm by sums, products, roots and reciprocals, and softmax as one operation
(its relaxation by log-sum-exp) or, with ``--softmax parts``, by exponentials, sums and reciprocals.
One token moves in the l2 norm, the one with the largest gradient of the margin. Seconds are those of the
processor, on one thread. The largest ε with a positive lower bound is found by bisection to 5 %, begun at
0.02, until ``--seconds`` are spent or even 0.001 is not shown: what is printed was shown, up to rounding in
float32. Other settings of auto_LiRPA may give more.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

import howsmooth as hs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


_LEAST = 1e-3


class PlainNorm(nn.Module):
    """LayerNorm by elementary operations."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        h = x - x.mean(-1, keepdim=True)
        variance = (h * h).mean(-1, keepdim=True)
        return h / torch.sqrt(variance + self.eps) * self.weight + self.bias


def gelu() -> nn.Module:
    """Return GELU as auto_LiRPA knows it."""
    from auto_LiRPA.operators.gelu import GELU

    return GELU()


class PlainLayer(nn.Module):
    """A layer of BERT without dropout, of one sequence."""

    def __init__(self, layer: nn.Module, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        own, mixed = layer.attention.self, layer.attention.output
        self.query, self.key, self.value = own.query, own.key, own.value
        self.heads, self.width = own.num_attention_heads, own.attention_head_size
        self.mix, self.norm = mixed.dense, PlainNorm(mixed.LayerNorm)
        self.up, self.down = layer.intermediate.dense, layer.output.dense
        self.second_norm = PlainNorm(layer.output.LayerNorm)
        self.activation = gelu()

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(1, -1, self.heads, self.width).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.width)
        if self.whole:
            weights = torch.softmax(scores, -1)
        else:
            weights = torch.exp(scores)
            weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(1, -1, self.heads * self.width)
        x = self.norm(self.mix(mixed) + x)
        return self.second_norm(self.down(self.activation(self.up(x))) + x)


class Plain(nn.Module):
    """From the change of one token (1, d) to the logits (1, classes)."""

    def __init__(
        self, model: BertForSequenceClassification, x: Tensor, token: int, whole: bool = True
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer(layer, whole) for layer in model.bert.encoder.layer)
        self.pooler, self.classifier = model.bert.pooler.dense, model.classifier
        where = torch.zeros(1, len(x), 1)
        where[0, token] = 1
        self.register_buffer("where", where)
        self.register_buffer("x", x[None])

    def forward(self, delta: Tensor) -> Tensor:
        x = self.x + self.where * delta.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def most_sensitive(model: BertForSequenceClassification, x: Tensor) -> tuple[int, int]:
    """Return the token with the largest gradient of the margin, and the class."""
    x = x.clone().requires_grad_()
    logits = Plain(model, x, 0)(torch.zeros(1, x.shape[1]))[0]
    label, rival = logits.topk(2).indices.tolist()
    (slope,) = torch.autograd.grad(logits[label] - logits[rival], x)
    return int(slope.norm(dim=1).argmax()), label


def crown(plain: Plain, label: int, seconds: float) -> tuple[float, float, int]:
    """Return the largest ε that was proved, the smallest that was not, and the number of bounds computed."""
    from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm

    delta = torch.zeros(1, plain.x.shape[2])
    bounded = BoundedModule(plain, delta, device="cpu", verbose=False)
    classes = plain.classifier.out_features
    rivals = torch.tensor([c for c in range(classes) if c != label])
    differences = (nn.functional.one_hot(torch.tensor(label), classes) - torch.eye(classes)[rivals])[None]
    low, high, epsilon, count, begin = 0.0, math.inf, 0.02, 0, time.process_time()
    while time.process_time() - begin < seconds and high > 1.05 * low:
        given = BoundedTensor(delta, PerturbationLpNorm(norm=2, eps=epsilon))
        count += 1
        try:
            lower, _ = bounded.compute_bounds(x=(given,), C=differences, method="backward", bound_upper=False)
        except AssertionError:  # auto_LiRPA has met NaN
            lower = torch.full((1, len(rivals)), math.nan)
        print(f"    ε {epsilon:.5f}: lower bound {float(lower.min()):.4g}", file=sys.stderr, flush=True)
        if bool((lower > 0).all()):  # false for NaN
            low = epsilon
        else:
            high = epsilon
        epsilon = 2 * low if math.isinf(high) else (low + high) / 2
        if high < _LEAST:
            break
    return low, high, count


def headlines(data: Path) -> tuple[BertForSequenceClassification, dict[str, Tensor]]:
    """Return the plain classifier of headlines, and the embedded tokens (n, d) of the held-out ones."""
    from examples.news.data import ids_of, load
    from examples.news.train import HERE, read_model, weights_path

    model = read_model(weights_path(HERE, "plain"))
    every = enumerate(ids_of(load(data)[1].texts))
    with torch.no_grad():
        embedded = {
            f"headline {index}": model.bert.embeddings(input_ids=ids[None])[0].float() for index, ids in every
        }
    return model.float(), embedded


def main() -> int:
    """Print both radii of each sentence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", type=Path, help="of the classifier and its sentences")
    where.add_argument("--news", type=Path, help="test.csv of AG_NEWS")
    parser.add_argument("--tokens", type=int, default=6, help="of a sentence, from the first")
    parser.add_argument("--sentences", type=int, default=1, help="how many, the shortest first")
    parser.add_argument("--orders", nargs="*", type=int, default=[2, 3], help="of robust_radius")
    parser.add_argument("--seconds", type=float, default=600, help="for CROWN on a sentence")
    parser.add_argument("--softmax", choices=["whole", "parts"], default="whole", help="for CROWN")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.news:
        model, sentences = headlines(asked.news)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(asked.folder).eval()
        sentences = load_file(asked.folder / "sequences.safetensors")
    model.requires_grad_(False)
    for name, x in sorted(sentences.items(), key=lambda item: len(item[1]))[: asked.sentences]:
        x = x[: asked.tokens]
        token, label = most_sensitive(model, x)
        print(f"{name}, {len(x)} tokens, token {token} moves", flush=True)
        for order in asked.orders:
            begin = time.process_time()
            found = hs.bounds.robust_radius(model, x, tokens=token, order=order)
            seconds = time.process_time() - begin
            attack = f"attack {found.attack:.2f}"
            print(f"  order {order}: {found.radius:.4f} ({attack}; {seconds:.0f} s)", flush=True)
        begin = time.process_time()
        low, high, count = crown(Plain(model, x, token, asked.softmax == "whole"), label, asked.seconds)
        seconds = time.process_time() - begin
        print(f"  CROWN: {low:.4f} (not {high:.4f}; {count} bounds, {seconds:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
