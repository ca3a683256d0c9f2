"""Items at real layers: which apply, and what the model's own modules give for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.paper import published_code as published
from tests._cases import dense_jacobian
from tests._tiny_models import sublayer, tiny, token_ids

TWO = token_ids(2, 6)


def measured(
    model: Any, tokens: Any, layer: int, items: Sequence[str] | None = None, seed: int = 0
) -> published.AsPublished:
    """A layer measured with some items, or with all that apply to a trained model."""
    seeds = [seed + member for member in range(len(tokens))]
    training = "dropout" in (items or ())
    (captured,) = published.capture_layers(model, tokens, [layer], training=training, seeds=seeds)
    return published.measure_layer(captured, published.items_that_apply(captured, items), seeds=seeds)


@pytest.mark.parametrize(
    ("name", "untrained", "items", "reasons"),
    [
        (
            "bert",
            False,
            ("output", "block", "stopping"),
            {"unmasked": "it is not an encoder run as a decoder"},
        ),
        ("bert-decoder", False, ("output", "block", "unmasked", "stopping"), {}),
        ("bert", True, ("output", "block", "dropout", "stopping"), {}),
        ("gpt2", False, ("output", "stopping"), {"block": "its layers are not post-norm"}),
        ("gpt2", True, ("output", "dropout", "stopping"), {}),
        ("qwen2", True, ("output", "stopping"), {"dropout": "its configuration states no dropout"}),
    ],
)
def test_which_items_apply(
    name: str, untrained: bool, items: tuple[str, ...], reasons: dict[str, str]
) -> None:
    (layer,) = published.capture_layers(tiny(name), TWO, [0], training=False, seeds=[0, 1])
    assert published.items_that_apply(layer, untrained=untrained) == items
    for item, reason in reasons.items():
        with pytest.raises(ArgumentError, match=f"{item}': {reason}"):
            measured(tiny(name), TWO, 0, [item])
    with pytest.raises(ArgumentError, match=r"inputs: expected token ids as an integer tensor \(batch, n\)"):
        measured(tiny(name), TWO[0], 0)


def test_without_items_it_is_the_corrected_quantity() -> None:
    model = tiny("bert-decoder")
    found = measured(model, TWO, 1, [], seed=3)
    (site,) = hs.capture(model, TWO, layers=[1])
    exact = hs.local_lipschitz(site.map, site.x, seed=[3, 4])
    assert torch.equal(found.value, exact.value)
    assert torch.equal(found.upper, exact.upper)
    assert bool(found.settled.all())


def test_block_alone_is_the_norm_of_the_models_own_block() -> None:
    model = tiny("bert")
    x, block = sublayer(model, TWO, 1, "block")
    found = measured(model, TWO, 1, ["block"])
    for member in range(2):
        J = dense_jacobian(lambda t: block(t.float()[None])[0].double(), x[member])
        assert float(found.value[member]) == pytest.approx(float(torch.linalg.matrix_norm(J, 2)), rel=1e-4)


def test_all_items_of_an_encoder_run_as_a_decoder_are_its_layer_called_alone() -> None:
    model = tiny("bert-decoder", attention="eager")
    x, _ = sublayer(model, TWO, 1, "block")
    found = measured(model, TWO, 1)
    assert found.items == ("output", "block", "unmasked", "stopping")
    assert "unmasked" in found.map
    for member in range(2):
        point = x[member : member + 1].clone().requires_grad_()
        out = model.encoder.layer[1].attention(point)[0]
        (pulled,) = torch.autograd.grad(out, point, out.detach())
        assert float(found.value[member]) == pytest.approx(math.sqrt(float(pulled.norm())), rel=1e-5)
    assert bool(torch.isnan(found.lower).all())


def test_dropout_runs_the_tokens_through_training_mode_and_leaves_the_model_as_it_was() -> None:
    model = tiny("gpt2")
    state = torch.get_rng_state()
    one, two = published.capture_layers(model, TWO, [0, 2], seeds=[5, 6])
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training or module._forward_pre_hooks for module in model.modules())
    seen = []
    hooks = [model.h[i].ln_1.register_forward_hook(lambda m, a, out: seen.append(out)) for i in (0, 2)]
    with torch.random.fork_rng(), torch.no_grad():
        model.train()
        torch.manual_seed(6)
        model(TWO[1:])
    model.eval()
    for hook in hooks:
        hook.remove()
    for layer, expected in zip((one, two), seen, strict=True):
        assert layer.training_x is not None
        assert torch.equal(layer.training_x[1], expected[0])
        assert not torch.equal(layer.training_x[0], layer.attention.x[0])


def test_the_dropout_item_takes_the_tokens_of_training_mode() -> None:
    model = tiny("gpt2")  # its embeddings have dropout of 0.9
    model.config.attn_pdrop = model.config.resid_pdrop = 1e-12
    found = measured(model, TWO, 0, ["output", "dropout"], seed=7)
    (layer,) = published.capture_layers(model, TWO, [0], seeds=[7, 8])
    assert layer.training_x is not None
    for member in range(2):
        expected, evaluated = (
            published.power_iteration(
                layer.attention.map, x[member], output=True, absolute=False, seed=0
            ).value
            for x in (layer.training_x, layer.attention.x)
        )
        assert float(found.value[member]) == pytest.approx(expected, rel=1e-5)
        assert abs(expected / evaluated - 1) > 0.01
    # It is random, but reproducible.
    model.config.attn_pdrop = model.config.resid_pdrop = 0.1
    items = ["dropout", "stopping"]
    one, same, other = (measured(model, TWO[:1], 0, items, seed=seed) for seed in (0, 0, 9))
    assert torch.equal(one.value, same.value)
    assert not torch.equal(one.value, other.value)
    assert (one.settled.tolist(), one.steps.tolist()) == ([False], [100])
    assert "dropout 0.1 of weights and 0.1 of outputs" in one.map
