"""``hs.word_radii``: one radius for each token, what is kept in its file, and what notebooks show."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import howsmooth as hs
from howsmooth.bounds.radius.robust_radius import NetworkAtInput
from howsmooth.errors import ArgumentError
from howsmooth.profiling.model_input import GivenInputs
from howsmooth.rounding import limit_in_digits
from tests._classifier import save_classifier

TEXT = "the cat sat"
IDS = torch.tensor([[2, 5, 6, 7, 3]])
SMALL: dict[str, Any] = {
    "vocab_size": 9,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 6,
}


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
    assert all(word in one._repr_html_() for word in one.words)  # also of the tokens that stand still
    assert "while token 1 moves by less than the radius" in one.citation
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


class Encoder(nn.Module):
    """One layer of PyTorch, whose weights do not depend on its settings."""

    def __init__(
        self, heads: int = 1, pool: str = "mean", norm: nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__()
        options = {"activation": "gelu", "batch_first": True, "dtype": torch.float64} | options
        self.layer = nn.TransformerEncoderLayer(4, heads, 6, **options)
        self.norm = nn.LayerNorm(4) if norm is None else norm
        self.head, self.pool = nn.Linear(4, 2), pool
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.norm(self.layer(x))
        return self.head({"mean": u.mean(1), "first": u[:, 0], "last": u[:, -1]}[self.pool])


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "heads": {"heads": 2},
    "activation": {"activation": "relu"},
    "norm placement": {"norm_first": True},
    "epsilon": {"layer_norm_eps": 0.1},
    "epsilon of the last norm": {"norm": nn.LayerNorm(4, eps=0.1)},
    "readout": {"pool": "first"},
    "another token": {"pool": "last"},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_weights_do_not_share_what_is_kept(name: str, tmp_path: Path) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"positions": 0, "attack": False}
    kept = tmp_path / "radius.jsonl"
    first = hs.word_radii(Encoder(), x, file=kept, **options)
    other = Encoder(**ARCHITECTURES[name])
    found = hs.word_radii(other, x, file=kept, **options)
    own = hs.word_radii(other, x, **options)
    assert found.table["radius"][0] == own.table["radius"][0] != first.table["radius"][0]
    assert all(map(torch.equal, Encoder().parameters(), other.parameters()))
    again = hs.word_radii(Encoder(), x, file=kept, **options)
    assert again.table.equals(first.table)


LAYERS: dict[str, dict[str, Any]] = {
    "heads": {"heads": 2},
    "activation": {"activation": torch.nn.functional.relu},
    "norm placement": {"norm_first": True},
    "epsilon": {"norm": nn.LayerNorm(4, eps=0.1)},
    "activation of a module": {"activation": nn.GELU(approximate="tanh")},
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_fingerprint_of_a_module_has_its_settings(name: str) -> None:
    def fingerprint(module: nn.Module) -> str:
        return GivenInputs(module, None, None, "").origin()["fingerprint"]

    assert fingerprint(Encoder()) == fingerprint(Encoder()) == fingerprint(Encoder().train(False))
    assert fingerprint(Encoder()) != fingerprint(Encoder(**LAYERS[name]))


def test_the_fingerprint_of_a_model_has_its_configuration() -> None:
    def fingerprint(**options: Any) -> str:
        torch.manual_seed(0)
        module = BertForSequenceClassification(BertConfig(**SMALL | options))
        return GivenInputs(module, None, None, "").origin()["fingerprint"]

    assert fingerprint() == fingerprint(name_or_path="elsewhere")
    options: list[dict[str, Any]] = [
        {"num_attention_heads": 1},
        {"hidden_act": "relu"},
        {"layer_norm_eps": 0.1},
    ]
    assert len({fingerprint(), *(fingerprint(**one) for one in options)}) == 4


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
