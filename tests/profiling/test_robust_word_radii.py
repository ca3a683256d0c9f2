"""``hs.word_radii``: one radius for each token, what is kept in its file, and what notebooks show."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import BertForSequenceClassification

import howsmooth as hs
from howsmooth.bounds.radius import NetworkAtInput
from howsmooth.errors import ArgumentError
from howsmooth.roundoff import limit_in_digits
from tests._classifier import save_classifier

TEXT = "the cat sat"
IDS = torch.tensor([[2, 5, 6, 7, 3]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("classifier") / "model"
    save_classifier(found)
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> BertForSequenceClassification:
    return BertForSequenceClassification.from_pretrained(folder)


@pytest.fixture(scope="module")
def found(folder: Path) -> hs.WordRadii:
    return hs.word_radii(folder, TEXT, attack=False)


def test_the_radii_are_those_of_single_tokens(
    found: hs.WordRadii, model: BertForSequenceClassification
) -> None:
    assert found.words == ("[CLS]", "the", "cat", "sat", "[SEP]")
    assert list(found.table["token"]) == list(found.words)
    alone = hs.bounds.robust_radius(model, {"input_ids": IDS}, tokens=3, order=2, attack=False)
    assert found.table["radius"][3] == pytest.approx(alone.radius, rel=5e-3)
    assert list(found.ranking["radius"]) == sorted(found.table["radius"])
    assert "rounding included" in repr(found)


def test_jointly_there_is_one_radius_in_the_norm_that_is_asked_for(
    model: BertForSequenceClassification,
) -> None:
    told: list[tuple[int, int]] = []
    one, largest = (
        hs.word_radii(model, IDS, jointly=True, norm=norm, on_token=lambda *at: told.append(at))
        for norm in (2, math.inf)
    )
    assert len({done for done, total in told if 0 < done < total}) > 10
    assert len(one.table) == 1
    assert one.table["radius"][0] == pytest.approx(math.sqrt(5 * 8) * largest.table["radius"][0], rel=5e-3)
    assert one.table["radius"][0] < one.table["attack"][0]
    assert "all tokens move jointly" in one.statement


def test_the_statement_is_about_what_was_asked(model: BertForSequenceClassification) -> None:
    usual = hs.word_radii(model, IDS, positions=1, attack=False)
    label, rival = usual.table["label"][0], usual.table["rival"][0]
    one = hs.word_radii(model, IDS, positions=1, target=int(rival), attack=False)
    assert f"does not answer class {rival} in place of class {label} (" in one.statement
    direction = torch.zeros(3)
    direction[label], direction[rival] = 1.0, -1.0
    one = hs.word_radii(model, IDS, positions=[1], target=direction, attack=False)
    assert "keeps a functional of its logits above the threshold (margin" in one.statement
    assert list(one.table["position"]) == [1]
    assert "1" in one._repr_html_()
    assert "while token 1 moves and the others stand still" in one.citation
    several = hs.word_radii(model, IDS, positions=[0, 1], attack=False)
    assert "while one of the tokens 0,1 moves" in several.citation
    assert "not searched" in several._repr_html_()


def test_the_class_has_the_name_that_the_model_gives_it(
    found: hs.WordRadii, model: BertForSequenceClassification, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = found.table["label"][0]
    assert f"(class {label}, margin" in found.statement  # LABEL_0 is no name
    monkeypatch.setattr(model.config, "id2label", {0: "bad", 1: "good", 2: "odd"})
    named = hs.word_radii(model, IDS, jointly=True, attack=False)
    name = model.config.id2label[named.table["label"][0]]
    assert f"(class {named.table['label'][0]} '{name}', margin" in named.statement


def test_with_time_the_third_order_raises_the_smallest_radii(
    model: BertForSequenceClassification, tmp_path: Path
) -> None:
    ids = IDS[:, :2]
    fast = hs.word_radii(model, ids, attack=False)
    options = {"attack": False, "file": tmp_path / "radius.jsonl"}
    one = hs.word_radii(model, ids, seconds=1e-9, **options)
    assert one.table["order"].to_dict() == {i: 3 - (i != fast.table["radius"].idxmin()) for i in range(2)}
    # The time was spent: the same call again gives the same result.
    assert hs.word_radii(model, ids, seconds=1e-9, **options).table.equals(one.table)
    far = hs.word_radii(model, ids, seconds=600, **options)
    assert set(far.table["order"]) == {3}
    assert (far.table["radius"] > fast.table["radius"]).all()
    # What is proved stays: without the time, the larger radii of the file are not replaced by smaller ones.
    assert hs.word_radii(model, ids, **options).table.equals(far.table)


def test_the_smallest_attack_of_both_orders_stands_beside_the_larger_radius(
    model: BertForSequenceClassification, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = NetworkAtInput(model, {"input_ids": IDS}).radius(1, order=2, attack=False)
    answers = {2: {"radius": 0.1, "attack": 1.0}, 3: {"radius": 0.2, "attack": 1.5}}

    def answered(self, tokens, *, order, **how):
        return dataclasses.replace(one, order=order, **answers[order])

    monkeypatch.setattr(NetworkAtInput, "radius", answered)
    (row,) = hs.word_radii(model, IDS, positions=1, seconds=60).table.to_dict("records")
    assert (row["radius"], row["order"], row["attack"]) == (0.2, 3, 1.0)


def test_what_is_kept_is_not_computed_again(
    model: BertForSequenceClassification, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    one = NetworkAtInput(model, {"input_ids": IDS}).radius(1, order=2, attack=False)

    def counted(self, tokens, **how):
        if len(made) == 2 and not resumed:
            raise KeyboardInterrupt
        made.append(tokens)
        return one

    monkeypatch.setattr(NetworkAtInput, "radius", counted)
    file, resumed = tmp_path / "folder" / "radius.jsonl", False
    with pytest.raises(KeyboardInterrupt):
        hs.word_radii(model, IDS, attack=False, file=file)
    with file.open("a") as cut:
        cut.write('{"key": "12')
    resumed = True
    found = hs.word_radii(model, IDS, attack=False, file=file)
    assert made == [0, 1, 2, 3, 4]
    again = hs.word_radii(model, IDS, attack=False, file=file)
    assert made == [0, 1, 2, 3, 4]
    assert again.table.equals(found.table)
    for changed in ({"norm": math.inf}, {"target": int(found.table["rival"][0])}, {"seed": 1}):
        made.clear()
        hs.word_radii(model, IDS, attack=False, file=file, **changed)
        assert made == [0, 1, 2, 3, 4]
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    assert len({row["key"] for row in rows}) == 4


def test_latex_rounds_radii_down_and_attacks_up_and_the_digest_is_of_no_times(found: hs.WordRadii) -> None:
    table = found.table.assign(radius=0.12345678, attack=[None, math.inf, 0.1234561, 0.1234561, 0.1234561])
    written = dataclasses.replace(found, table=table).to_latex()
    assert written.count("0.123456 & ") == 5
    assert (written.count("0.123457"), written.count("none")) == (3, 1)
    later = dataclasses.replace(found, table=found.table.assign(seconds=found.table["seconds"] + 1.0))
    other = dataclasses.replace(found, table=found.table.assign(radius=0.1))
    assert later.digest == found.digest != other.digest


def test_notebooks_show_the_text_coloured_by_radius(found: hs.WordRadii) -> None:
    html = found._repr_html_()
    weakest = found.ranking["token"][0]
    smallest = limit_in_digits(found.ranking["radius"][0], 3, upper=False)
    assert f'class="e9" title="{smallest}">{weakest} <' in html


def test_bad_arguments_are_refused(model: BertForSequenceClassification) -> None:
    with pytest.raises(ArgumentError, match="order: expected 2 or 3"):
        hs.word_radii(model, IDS, order=1)
    with pytest.raises(ArgumentError, match="seconds: expected"):
        hs.word_radii(model, IDS, seconds=3, jointly=True)
    with pytest.raises(ArgumentError, match="inputs: expected token ids"):
        hs.word_radii(model, TEXT)
