"""The certified accuracy of a classifier is that of its radii, input by input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.profiling import certified_answers

INPUTS: list[Any] = [torch.tensor([2, 11, 5, 3]), torch.tensor([[2, 4, 3]]), torch.tensor([2, 9, 9, 17, 3])]
MASKED = {"input_ids": torch.tensor([[2, 7, 8, 3, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}


@pytest.fixture(scope="module")
def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=20, initializer_range=0.4, num_labels=3, **sizes)
    return BertForSequenceClassification(config).eval()


def answer(model: BertForSequenceClassification, given: Any) -> int:
    inputs = given if isinstance(given, dict) else {"input_ids": given.view(1, -1)}
    with torch.no_grad():
        return int(model(**inputs).logits[0].argmax())


def test_each_row_is_the_radius_of_the_most_sensitive_token(
    model: BertForSequenceClassification, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [*INPUTS, MASKED]
    labels = [answer(model, given) for given in inputs]
    labels[1] = (labels[1] + 1) % 3  # a wrong answer
    file = tmp_path / "rows.jsonl"
    found = hs.certified_accuracy(model, inputs, labels, file=file)
    assert list(found.table["answer"] == found.table["label"]) == [True, False, True, True]
    assert found.table["radius"][1] == 0
    for place in (0, 3):
        given = inputs[place] if isinstance(inputs[place], dict) else {"input_ids": inputs[place][None]}
        embedded = model.bert.embeddings(given["input_ids"]).detach()

        def margin(x: Tensor, given: Any = given) -> Tensor:
            hidden = model.bert(inputs_embeds=x, attention_mask=given.get("attention_mask")).pooler_output
            logits = model.classifier(hidden)[0].topk(2).values
            return logits[0] - logits[1]

        # BERT adds positions and a norm to what it is given, so its layers are run by themselves.
        x = embedded.double().requires_grad_()
        wide = BertForSequenceClassification(model.config).double().eval()
        wide.load_state_dict(model.state_dict())
        mask = given.get("attention_mask")
        hidden = wide.bert.encoder(
            x, attention_mask=None if mask is None else (mask[:, None, None] - 1) * 1e9
        )
        logits = wide.classifier(wide.bert.pooler(hidden.last_hidden_state))[0].topk(2).values
        (slope,) = torch.autograd.grad(logits[0] - logits[1], x)
        token = int(slope[0].norm(dim=1).argmax())
        assert found.table["token"][place] == token
        alone = hs.bounds.robust_radius(model, given, tokens=token, order=2)
        assert found.table["radius"][place] == pytest.approx(alone.radius, rel=5e-3)
        assert found.table["attack"][place] == pytest.approx(alone.attack)
    monkeypatch.setattr(
        certified_answers, "_row", lambda *_, **__: None
    )  # what is kept is not computed again
    again = hs.certified_accuracy(model, inputs, labels, file=file)
    assert again.table.equals(found.table)


def test_shares_fall_with_the_radius_and_the_proved_one_is_smaller(
    model: BertForSequenceClassification,
) -> None:
    labels = [answer(model, given) for given in INPUTS]
    found = hs.certified_accuracy(model, INPUTS, [labels[0], labels[1], (labels[2] + 1) % 3], jointly=True)
    assert found.at(0.0) == (2 / 3, 2 / 3)
    first, second = sorted(found.table["radius"])[1:]
    assert found.at(first)[0] == 2 / 3
    assert found.at((first + second) / 2)[0] == 1 / 3
    assert found.at(2 * second)[0] == 0
    assert found.at(1e9) == (0.0, float((found.table["attack"] == math.inf).mean()))
    assert found.table["token"].isna().all()
    assert "66.7% proved" in repr(found)
    assert "while all tokens move (l2 norm)" in repr(found)


def test_without_a_search_nothing_is_said_of_attacks(model: BertForSequenceClassification) -> None:
    found = hs.certified_accuracy(model, INPUTS[:1], [answer(model, INPUTS[0])], attack=False)
    proved, upper = found.at(0.0)
    assert proved == 1
    assert math.isnan(upper)
    assert "attack" not in repr(found)
    assert [line.get_label() for line in found.plot().axes[0].lines] == ["proved"]


@pytest.mark.parametrize(
    ("inputs", "labels"), [([], []), (INPUTS, [0]), (INPUTS[:1], [7])], ids=["none", "too few", "no class"]
)
def test_labels_that_do_not_fit_are_refused(
    model: BertForSequenceClassification, inputs: list[Any], labels: list[int]
) -> None:
    with pytest.raises(ArgumentError, match=r"^labels: expected"):
        hs.certified_accuracy(model, inputs, labels)


@pytest.mark.parametrize("wrong", [{"norm": 3}, {"order": 4}], ids=str)
def test_options_are_refused_even_if_every_answer_is_wrong(
    model: BertForSequenceClassification, wrong: dict[str, Any]
) -> None:
    label = (answer(model, INPUTS[0]) + 1) % 3
    with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))}: expected 2 or"):
        hs.certified_accuracy(model, INPUTS[:1], [label], **wrong)


@pytest.mark.parametrize("jointly", [False, True])
def test_a_model_of_one_logit_is_refused(jointly: bool) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    one = BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=1, **sizes)).eval()
    with pytest.raises(ArgumentError, match=r"^model: expected a classifier of two or more classes"):
        hs.certified_accuracy(one, INPUTS[:1], [0], jointly=jointly)
