"""Real sentences: thousands of ascents within the radius, none of which may break any bound."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from howsmooth.bounds.radius.margin_expansion import FirstDerivatives, SecondOrder
from howsmooth.bounds.radius.robust_radius import NetworkAtInput
from tests._shared import shared_data
from tests.bounds.radius._networks import left_out, moved

# The most sensitive token of each sentence.
TOKENS = {"sst2_val_1": 4, "tmp17": 5, "nuovo": 10, "tmp21": 1, "tmp27": 20}
ASCENTS = 10_000  # of each sentence
BATCH = 500
STEPS = 6


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENS)
def test_no_ascent_breaks_a_bound_of_a_real_sentence(name: str) -> None:
    folder = shared_data("bert_tiny_sst2_encoder")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    read = NetworkAtInput(model, load_file(folder / "sequences.safetensors")[name])
    found = read.radius(TOKENS[name], order=2, attack=False)
    injection = moved(read.x, [TOKENS[name]])
    direction = torch.eye(2, dtype=torch.float64)[found.label] * 2 - 1
    functional = torch.einsum("c,cnd->nd", direction, read.network.readout)
    offset = float(direction @ read.network.offset)
    expansion = SecondOrder(FirstDerivatives(read.jacobians, injection, functional, offset))

    def margin(delta: Tensor) -> Tensor:
        return direction @ read.network.logits(read.x + injection @ delta)

    slopes = torch.func.vmap(torch.func.grad_and_value(margin))
    g = torch.Generator().manual_seed(0)
    sizes = (found.radius, found.radius / 2)
    every = {epsilon: (expansion(epsilon), expansion.bounds(epsilon).stages) for epsilon in sizes}
    for batch in range(ASCENTS // BATCH):
        epsilon = sizes[batch % 2]
        stated, bounds = every[epsilon]
        delta = on_sphere(torch.randn(BATCH, read.x.shape[1], generator=g, dtype=torch.float64), epsilon)
        for step in range(STEPS):
            slope, values = slopes(delta)
            assert float(values.min()) >= stated.lower
            length = epsilon * (1 - step / STEPS)
            delta = on_sphere(delta - on_sphere(slope, length), epsilon)
        assert float(torch.func.vmap(margin)(delta).min()) >= stated.lower
        for change in delta[:5]:
            for left, bound in zip(
                left_out(read.network, expansion.first, False, change), bounds, strict=True
            ):
                assert inside(left.vector, bound.shape)
                assert abs(float(left.margin)) <= float(bound.margin) * (1 + 1e-9) + 1e-12


def on_sphere(vectors: Tensor, radius: float) -> Tensor:
    """Scale each vector (batch, k) to a length."""
    return vectors * (radius / vectors.norm(dim=1, keepdim=True))


def inside(vectors: Tensor, shapes: Tensor) -> bool:
    """Say whether each vector (n, d) is in its ellipsoid: along 20 directions, its own among them."""
    g = torch.Generator().manual_seed(0)
    along = torch.randn(20, *vectors.shape, generator=g, dtype=vectors.dtype)
    along[0] = vectors
    reached = (along * vectors).sum(-1).abs()
    width = torch.einsum("cnd,nde,cne->cn", along, shapes, along).clamp_min(0).sqrt()
    return bool((reached <= width * (1 + 1e-9) + 1e-12).all())
