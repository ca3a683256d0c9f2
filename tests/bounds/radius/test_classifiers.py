"""Any classifier is read from its operations: the network is the model, at the input and far from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from howsmooth.bounds.radius.classifier import Classifier
from howsmooth.bounds.radius.robust_radius import NetworkAtInput
from howsmooth.errors import ArgumentError
from tests.bounds.radius._classifiers import CLASSIFIERS


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, given = CLASSIFIERS[name]()
    for parameter in model.parameters():  # no norm with a weight of one, no bias of zero
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval(), given


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_network_is_the_model(name: str) -> None:
    model, given = made(name)
    model = model.double().requires_grad_(False)
    if isinstance(given, torch.Tensor):
        given = given.double()
    else:
        given = {k: t.double() if t.is_floating_point() else t for k, t in given.items()}
    read = Classifier.at(model, given)
    network, reads = read.network()
    x = read.place.tokens
    if isinstance(given, torch.Tensor):
        expected = model(given[None])[0]
    else:  # in a run without any of the library's modes
        output = model(**given)
        expected = getattr(output, "logits", output)
        expected = (expected[0] if isinstance(expected, tuple) else expected).flatten()
    # Some models round to float32 in between.
    torch.testing.assert_close(network.logits(x[reads]), expected, rtol=1e-5, atol=1e-5)
    noise = torch.Generator().manual_seed(1)
    for scale in (0.3, 3.0, 30.0):
        moved = x + scale * torch.randn(x.shape, generator=noise, dtype=x.dtype)
        torch.testing.assert_close(network.logits(moved[reads]), read.logits(moved), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_no_attack_lies_within_the_radius(name: str, order: int) -> None:
    at = NetworkAtInput(*made(name))
    found = at.radius(at.reads[1], order=order)
    assert 0 < found.radius < found.attack


def test_masked_tokens_are_not_read() -> None:
    at = NetworkAtInput(*made("BERT with padding"))
    assert at.reads == [0, 1, 2, 3]
    assert at.radius(order=2, attack=False).tokens == (0, 1, 2, 3)
    with pytest.raises(ArgumentError, match=r"tokens: expected tokens on which the logits depend.*masked"):
        at.radius([3, 4])
    assert NetworkAtInput(*made("Llama with padding on the left")).reads == [1, 2, 3, 4]


def test_all_of_the_input_passes_through_the_embedded_tokens() -> None:
    """What is measured is as far behind the input as all of it passes through one tensor of tokens."""
    model, given = made("ALBERT")
    model = model.double()
    embedded = model.albert.embeddings(given["input_ids"])
    found = Classifier.at(model, given).place.tokens
    torch.testing.assert_close(found, model.albert.encoder.embedding_hidden_mapping_in(embedded)[0])
    vit, image = made("a ViT by hand")
    assert NetworkAtInput(vit, image).x.shape == (5, 8)  # with the class token
