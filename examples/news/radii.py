"""Compute how far the most sensitive token of each held-out headline may move, proved and attacked.

    python examples/news/radii.py --data ag_news/test.csv                  # all headlines, both forms: hours
    python examples/news/radii.py --data ag_news/test.csv --seconds 600    # as many as this time allows
    python examples/news/radii.py --data ag_news/test.csv --headlines 5 --out out/news

The most sensitive token is the one at which the gradient of the margin is largest. ``robust_radius`` of the
second order bounds its radius in the l2 norm; the attack beside it seeks the class that bounds the radius. A
headline that is misclassified has radius 0. Each row goes into OUT/radii.json as soon as it is known, and
what is there is not done again. The order is random and always the same, so that a part is a fair sample.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.news.data import ids_of, load
from examples.news.train import FORMS, HERE, read_model, weights_path
from torch import Tensor
from transformers import BertForSequenceClassification

import howsmooth as hs

Row = dict[str, Any]


def main() -> int:
    """Compute and write what is not there yet, headline by headline."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="test.csv of AG_NEWS")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--headlines", type=int, default=200, help="how many, in a random order")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after this time")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of weights and radii")
    parser.add_argument("--threads", type=int, default=1, help="of the processor; 1 by default")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    _, held_out = load(asked.data)
    models = {form: read_model(weights_path(asked.out, form)).double() for form in asked.forms}
    path, begin = asked.out / "radii.json", time.monotonic()
    every = list(enumerate(ids_of(held_out.texts)))
    random.Random(0).shuffle(every)
    for index, ids in every[: asked.headlines]:
        for form, model in models.items():
            done = read(path)
            if str(index) in done.setdefault(form, {}):
                continue
            if time.monotonic() - begin > asked.seconds:
                return 0
            done[form][str(index)] = row = row_of(model, ids, int(held_out.labels[index]))
            write(path, done)
            print(f"{form}, headline {index}: {json.dumps(row)}", flush=True)
    return 0


def row_of(model: BertForSequenceClassification, ids: Tensor, label: int) -> Row:
    """Return what is known of one headline; a radius 0 without any proof if it is misclassified."""
    begin = time.process_time()
    x = model.bert.embeddings(input_ids=ids[None])[0]
    token, answer = most_sensitive(model, x)
    row: Row = {
        "tokens": len(ids),
        "right": answer == label,
        "token": token,
        "radius": 0.0,
        "attack": 0.0,
        "constants": layer_constants(model, ids),
    }
    if answer == label:
        found = hs.bounds.robust_radius(model, x, tokens=token, order=2)
        row |= {"radius": found.radius, "attack": found.attack, "first_order": found.first_order}
        row |= {"margin": found.margin, "losses": found.losses}
    return row | {"seconds": time.process_time() - begin}


def most_sensitive(model: BertForSequenceClassification, x: Tensor) -> tuple[int, int]:
    """Return the token with the largest gradient of the margin at embedded tokens (n, d), and the answer."""
    x = x.clone().requires_grad_()
    hidden = x[None]
    for layer in model.bert.encoder.layer:
        hidden = layer(hidden)
    logits = model.classifier(model.bert.pooler(hidden))[0]
    (first, second), (answer, _) = logits.topk(2)
    (slope,) = torch.autograd.grad(first - second, x)
    return int(slope.norm(dim=1).argmax()), int(answer)


def layer_constants(model: BertForSequenceClassification, ids: Tensor) -> list[float]:
    """Measure the local Lipschitz constant of each layer at one headline."""
    sites = hs.capture(model, ids[None], scope="block")
    return [float(hs.local_lipschitz(site.map, site.x, rtol=1e-3).value) for site in sites]


def read(path: Path) -> dict[str, dict[str, Row]]:
    """Read the rows of each form, none if there are none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, rows: dict[str, dict[str, Row]]) -> None:
    """Write rows whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
