"""hs.bounds.robust_radius on models of transformers, beside attacks; and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

import howsmooth as hs
from howsmooth.bounds.radius.reading import embedded, model_logits, read_classifier
from howsmooth.errors import ArgumentError, CertificateError, NonFiniteError
from tests._shared import shared_data
from tests.bounds.radius._networks import normal, post_norm

IDS = torch.tensor([[1, 7, 3, 9, 4]])


@pytest.fixture(scope="module")
def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
        hidden_dropout_prob=0.5,
        initializer_range=0.3,
    )
    return BertForSequenceClassification(config)


def test_the_stages_are_the_model(classifier: BertForSequenceClassification) -> None:
    model = classifier.double().eval()
    x = embedded(model, {"input_ids": IDS})
    network = read_classifier(model, x)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits[0]
    torch.testing.assert_close(network.logits(x), expected, rtol=1e-12, atol=1e-12)
    changed = x + normal(torch.Generator().manual_seed(1), *x.shape)
    expected = model_logits(model, changed)
    torch.testing.assert_close(network.logits(changed), expected, rtol=1e-12, atol=1e-12)
    classifier.float()


@pytest.mark.parametrize("order", [2, 3])
def test_the_attack_lies_outside_of_the_radius(order: int, classifier: BertForSequenceClassification) -> None:
    classifier.train()  # dropout is of no effect, and the model is left as it is
    found = hs.bounds.robust_radius(classifier, {"input_ids": IDS}, tokens=2, order=order)
    assert classifier.training
    assert next(classifier.parameters()).dtype == torch.float32
    assert found.attack is not None
    assert 0 < found.radius < found.attack
    assert float(found) == found.radius
    assert found.tokens == (2,)
    assert sum(found.losses.values()) + found.polynomial_loss == pytest.approx(found.margin, rel=0.02)
    lower = [value for _, value in found.curve]
    assert found.margin - 1e-6 < lower[0] < found.margin
    assert lower == sorted(lower, reverse=True)
    assert lower[-1] < 0 < lower[-2]
    assert "certified" in str(found)


def test_the_radius_is_that_of_the_nearest_class() -> None:
    network, x = post_norm(0)
    classes = [int(c) for c in network.logits(x).argsort(descending=True)]
    every = hs.bounds.robust_radius(network, x, tokens=1, order=2, attack=False)
    assert every.label == classes[0]
    each = [
        hs.bounds.robust_radius(network, x, tokens=1, target=c, order=2, attack=False) for c in classes[1:]
    ]
    assert every.radius == pytest.approx(min(one.radius for one in each), rel=1e-2)
    assert every.rival == min(each, key=float).rival


def test_more_freedom_gives_a_smaller_radius() -> None:
    network, x = post_norm(0)
    one, two, every = (
        hs.bounds.robust_radius(network, x, tokens=tokens, order=2, attack=False)
        for tokens in (1, [1, -1], None)
    )
    assert every.tokens == (0, 1, 2, 3)
    assert two.tokens == (1, 3)
    assert every.radius < two.radius < one.radius
    entries = hs.bounds.robust_radius(network, x, tokens=1, norm=math.inf, order=2, attack=False)
    assert entries.radius == pytest.approx(one.radius / math.sqrt(x.shape[1]), rel=1e-9)
    assert entries.first_order <= one.first_order


def test_bad_arguments_are_refused() -> None:
    network, x = post_norm(0)
    radius = hs.bounds.robust_radius
    for wrong in (4, [], [0, 9], True, "0"):
        with pytest.raises(ArgumentError, match="tokens: expected"):
            radius(network, x, tokens=wrong)
    with pytest.raises(ArgumentError, match="norm: expected 2"):
        radius(network, x, norm=1)
    with pytest.raises(ArgumentError, match="order: expected 2"):
        radius(network, x, order=4)
    with pytest.raises(ArgumentError, match="target: expected one of the other classes"):
        radius(network, x, target=int(network.logits(x).argmax()))
    with pytest.raises(ArgumentError, match="Token ids go into a dict"):
        radius(network, torch.tensor([1, 2]))
    with pytest.raises(NonFiniteError):
        radius(network, x * math.nan)
    with pytest.raises(ArgumentError, match="model: expected"):
        radius("bert", x)


def test_models_without_remainders_are_refused_by_name(classifier: BertForSequenceClassification) -> None:
    with pytest.raises(CertificateError, match=r"Linear\) is not of the BERT kind"):
        hs.bounds.robust_radius(nn.Linear(3, 2), torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match="ids up to 90"):
        hs.bounds.robust_radius(classifier, {"input_ids": 10 * IDS})
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    with pytest.raises(ArgumentError, match="padding"):
        hs.bounds.robust_radius(classifier, {"input_ids": IDS, "attention_mask": mask})
    config = BertConfig(
        vocab_size=12,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_act="relu",
    )
    with pytest.raises(CertificateError, match=r"intermediate_act_fn.*has no remainder"):
        hs.bounds.robust_radius(BertForSequenceClassification(config), {"input_ids": IDS})


def test_a_model_that_computes_something_else_is_refused(classifier: BertForSequenceClassification) -> None:
    class Scaled(BertForSequenceClassification):
        def forward(self, **inputs: Tensor):
            found = super().forward(**inputs)
            found.logits = found.logits * 1.001
            return found

    with pytest.raises(CertificateError, match="not reproduced by its stages"):
        hs.bounds.robust_radius(Scaled(classifier.config), {"input_ids": IDS})


def test_a_real_sentence_keeps_its_radius() -> None:
    folder = shared_data("bert_tiny_sst2_encoder")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    x = load_file(folder / "sequences.safetensors")["sst2_val_1"]
    assert len(x) == json.loads((folder / "sequences.json").read_text())["sst2_val_1"]["tokens"]
    found = hs.bounds.robust_radius(model, x, tokens=4, order=2)
    assert found.margin == pytest.approx(1.8001, abs=1e-4)
    assert 0.19 < found.radius < found.attack < 1.3
