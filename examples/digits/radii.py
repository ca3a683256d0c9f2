"""Compute how far a digit may be moved before a plain Vision Transformer changes its answer.

    python examples/digits/radii.py                        # 30 test images of each form: some 15 minutes
    python examples/digits/radii.py --order 3 --images 1   # goes further, some minutes an image

All 64 pixels move jointly, in the l2 norm. ``howsmooth.bounds.robust_radius`` does not know the modules of
this model, so that its stages are given here; they reproduce its logits. An image that is misclassified has
radius 0. Rows go into OUT/radii.json as soon as they are known, and what is there is not done again. The
1-Lipschitz form is left out: the method has no stage for ClipTokens and Flatten. Beside the radii stand those
of the Lipschitz certificates of the same images, of all three forms.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.digits.data import load
from examples.digits.evaluate import certified_radii
from examples.digits.models import Block, PlainViT
from examples.digits.train import HERE, read, read_model, weights_path, write
from torch import Tensor, nn

from howsmooth.bounds.radius import (
    ACTIVATIONS,
    Attention,
    FeedForward,
    Network,
    Norm,
    Stage,
    robust_radius,
)

FORMS = ("plain", "penalised")
# Preactivations of the embedding are raised by this, far from the kink of ReLU, which then is the identity.
_RAISED = 64.0
_ALL = slice(None)


def main() -> int:
    """Compute and write what is not there yet, image by image."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seed", type=int, default=0, help="of the trained weights")
    parser.add_argument("--images", type=int, default=30, help="how many of the test images, from the first")
    parser.add_argument("--order", type=int, choices=[2, 3], default=2)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of weights and radii")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    _, test = load()
    path = asked.out / "radii.json"
    models = {form: read_model(weights_path(asked.out, form, asked.seed), form) for form in asked.forms}
    networks = {
        form: network_of(model.double().eval().requires_grad_(False)) for form, model in models.items()
    }
    done = read(path)
    for form in (*asked.forms, "lipschitz"):
        done[f"{form}-{asked.seed}, certificate"] = certificates(asked.out, form, asked.seed, asked.images)
    write(path, done)
    for index in range(asked.images):
        for form in asked.forms:
            name, done = f"{form}-{asked.seed}, order {asked.order}", read(path)
            if str(index) in done.setdefault(name, {}):
                continue
            patches = models[form].patches(test.images[index : index + 1])[0]
            row = row_of(networks[form], patches, int(test.labels[index]), asked.order)
            done[name][str(index)] = row
            write(path, done)
            print(name, index, row, flush=True)
    return 0


def certificates(out: Path, form: str, seed: int, count: int) -> dict[str, float]:
    """Return the certified radius of each image, 0 if it is misclassified."""
    model = read_model(weights_path(out, form, seed), form).double().eval().requires_grad_(False)
    _, test = load()
    radii = certified_radii(model, test.images[:count], test.labels[:count])
    return {str(index): float(radius) for index, radius in enumerate(radii)}


def row_of(network: Network, patches: Tensor, label: int, order: int) -> dict[str, Any]:
    """Return what is known of one image, given by its patches (16, 4)."""
    begin = time.process_time()
    right = int(network.logits(patches).argmax()) == label
    row: dict[str, Any] = {"right": right, "radius": 0.0, "attack": 0.0}
    if right:
        found = robust_radius(network, patches, order=order)
        row |= {"radius": found.radius, "attack": found.attack, "first_order": found.first_order}
        row |= {"margin": found.margin, "losses": found.losses}
    return row | {"seconds": time.process_time() - begin}


@torch.no_grad()
def network_of(model: PlainViT) -> Network:
    """Return the stages from patches (16, 4) to logits, in float64."""
    shift = model.embed.bias + _RAISED
    unit = torch.eye(len(shift), dtype=torch.float64)
    embedding = FeedForward(model.embed.weight, shift, ACTIVATIONS["relu"], unit, model.positions - _RAISED)
    stages = [Stage("embedding", embedding, _ALL)]
    for index, block in enumerate(model.blocks):
        stages += _block(f"block {index}", block, len(model.positions))
    stages.append(Stage("last norm", _norm(model.norm), _ALL))
    n = len(model.positions)
    readout = (model.head.weight[:, None] / n).expand(-1, n, -1).contiguous()
    return Network(tuple(stages), readout, model.head.bias)


def _block(name: str, block: Block, n: int) -> list[Stage]:
    """Return the stages x, [x, norm], x + attention, [x, norm], x + MLP."""
    own, d = block.attention, block.attention.embed_dim
    heads, size = own.num_heads, d // own.num_heads
    weights, biases = own.in_proj_weight.chunk(3), own.in_proj_bias.chunk(3)
    (query, key, value), shifts = (
        [part.unflatten(0, (heads, size)) for part in parts] for parts in (weights, biases)
    )
    attention = Attention(
        query / size**0.5,
        shifts[0] / size**0.5,
        key,
        shifts[1],
        value,
        shifts[2],
        own.out_proj.weight.unflatten(1, (heads, size)).movedim(1, 0),
        own.out_proj.bias,
        torch.arange(n),
    )
    up, _, down = block.mlp
    mlp = FeedForward(up.weight, up.bias, ACTIVATIONS["gelu"], down.weight, down.bias)
    branch, residual = slice(d, 2 * d), slice(0, d)
    return [
        Stage(f"{name}.attention norm", _norm(block.norm_1), _ALL, keep=True),
        Stage(f"{name}.attention", attention, branch, residual),
        Stage(f"{name}.MLP norm", _norm(block.norm_2), _ALL, keep=True),
        Stage(f"{name}.MLP", mlp, branch, residual),
    ]


def _norm(norm: nn.LayerNorm) -> Norm:
    return Norm(norm.weight, norm.bias, norm.eps, centred=True)


if __name__ == "__main__":
    sys.exit(main())
