"""The worked case of examples/retrieval: its task, its models, and its results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from examples.retrieval import train as training

import howsmooth as hs
from tests._steepest import dense_norm

RESULTS = json.loads((Path(training.__file__).parent / "results.json").read_text(encoding="utf-8"))


def test_the_class_is_the_content_of_the_marked_token() -> None:
    x, labels = training.sequences(50, torch.Generator().manual_seed(0))
    for sequence, label in zip(x, labels, strict=True):
        (marked,) = sequence[:, training.CONTENTS].nonzero()[:, 0].tolist()
        assert sequence[marked].nonzero()[:, 0].tolist() == [int(label), training.CONTENTS]
    assert bool((x[..., : training.CONTENTS].sum(dim=-1) == 1).all())


@pytest.mark.parametrize("kind", ["softmax", "softmax, front token alone attends"])
def test_only_attention_brings_the_token_in_front_what_the_others_hold(kind: str) -> None:
    torch.manual_seed(0)
    model = training.build(**training.KINDS[kind]).double().eval()
    x = training.sequences(5, torch.Generator().manual_seed(1))[0].double()
    assert float(model(x).std(dim=0).max()) > 1e-4
    without = training.without_attention(model)(x)
    torch.testing.assert_close(without, without[:1].expand_as(without))
    constant = hs.nn.certify(model, training.LENGTH, math.inf).constant
    assert dense_norm(model, x[0]) <= constant < 1 + 1e-4


def test_results_are_of_three_seeds_and_ordered() -> None:
    assert {row["attention"] for row in RESULTS.values()} == set(training.KINDS)
    assert len(RESULTS) == 3 * len(training.KINDS)
    for row in RESULTS.values():
        assert row["certified"] == sorted(row["certified"], reverse=True)
        assert row["certified"][0] <= row["clean"]
        assert row["constant"] < 1 + 1e-5
        assert row["without"] < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid-0", "none-0"])
def test_a_model_trained_anew_has_the_numbers_of_the_results(name: str) -> None:
    row = RESULTS[name]
    model = training.fit(row["seed"], training.STEPS, **training.KINDS[row["attention"]])
    found = training.evaluate(model)
    assert abs(found["clean"] - row["clean"]) < 0.05
    assert abs(found["certified"][0] - row["certified"][0]) < 0.05
