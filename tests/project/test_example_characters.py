"""The worked case of the character model: the script, tiny, and the tables that it made."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from howsmooth.texts import Text
from tests._shared import script

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "characters"


train = script("examples/characters/train.py")
page = script("examples/characters/page.py")

TINY = train.Setting(
    steps=6, batch=4, length=12, width=16, layers=2, heads=2, warm_up=2, every=3, validation=4, probe=2,
    final=2,
)  # fmt: skip
LONGER = replace(TINY, steps=40, every=40)


@pytest.fixture(scope="module")
def text() -> Text:
    words = ["the", "map", "is", "smooth", "as", "one", "would", "have", "it", ",", "and", "so"]
    picks = torch.randint(len(words), (900, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return Text("made-up", "\n\n".join(" ".join(words[i] for i in row) + "é" for row in picks), "this test")


@pytest.fixture(scope="module")
def data(text: Text) -> Any:
    stream, held_out = train.split(text)
    return train.Data(stream, *train.held_out_windows(held_out, TINY), text.digest)


@pytest.fixture(scope="module")
def plain(data: Any) -> Any:
    return train.train("plain", 0, LONGER, data)


def test_the_penalty_lowers_the_constant(data: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(train.FORMS, "spectral", train.Form("spectral", 5.0))
    penalised = train.train("spectral", 0, LONGER, data)

    def means(run: Any) -> Any:
        return run.tables["constants"].groupby("layer")["constant"].mean().drop("whole")

    assert (means(penalised) < 0.6 * means(plain)).all()
    assert 0 < penalised.tables["losses"]["penalty"].iloc[-1] < 2 * means(penalised).mean()


def test_constants_are_those_of_dense_jacobians(data: Any) -> None:
    model = train.new_model(TINY, 0).eval().requires_grad_(requires_grad=False)
    for block in model.transformer.h:
        block.attn.c_attn.weight.mul_(20)  # untrained, attention is nearly uniform
    found = train.constants(model, data.final).set_index(["layer", "window"])
    double = train.new_model(TINY, 0).eval().requires_grad_(requires_grad=False).double()
    double.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    embedded = double.transformer.wte(data.final[:, :-1])
    seen: dict[str, torch.Tensor] = {}
    for index, block in enumerate(double.transformer.h):
        block.ln_1.register_forward_hook(lambda _m, _i, out, index=index: seen.update({str(index): out}))
    double(inputs_embeds=embedded)
    seen["whole"] = embedded
    for layer, x in seen.items():
        f = double.transformer.h[int(layer)].attn if layer != "whole" else None
        for window in range(len(x)):

            def image(tokens: torch.Tensor, f: Any = f) -> torch.Tensor:
                given = tokens[None]
                out: torch.Tensor = double(inputs_embeds=given).logits if f is None else _causal(f, given)
                return out[0]

            dense = torch.autograd.functional.jacobian(image, x[window], vectorize=True)
            sizes = (dense.shape[0] * dense.shape[1], -1)
            exact = float(torch.linalg.matrix_norm(dense.reshape(sizes), 2))
            row = found.loc[(layer, window)]
            assert row["lower"] * (1 - 1e-4) <= exact <= row["upper"] * (1 + 1e-4), (layer, window)
            assert math.isclose(row["constant"], exact, rel_tol=1e-2)
            assert math.isclose(row["relative"], exact * float(x[window].norm()), rel_tol=1e-2)


def _causal(attention: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """GPT-2's attention, whose mask comes from outside."""
    hidden = torch.full((tokens.shape[1],) * 2, -torch.inf, dtype=tokens.dtype).triu(1)
    out: torch.Tensor = attention(tokens, attention_mask=hidden[None, None])[0]
    return out


def test_perturbations_have_their_size_and_their_effect(data: Any, plain: Any) -> None:
    model, windows = plain.model, data.validation
    embedded = model.transformer.wte(windows[:, :-1])
    sizes = embedded.flatten(1).norm(dim=1)
    move = train.attack(model, embedded, windows, 0.1)
    assert torch.allclose(move.flatten(1).norm(dim=1) / sizes, torch.tensor(0.1))
    found = train.robustness(model, windows).set_index(["kind", "size"])
    before, after = (model(inputs_embeds=x).logits for x in (embedded, embedded + move))
    targets = windows[:, 1:]
    losses = [functional.cross_entropy(x.transpose(1, 2), targets).item() for x in (before, after)]
    row = found.loc[("attack", 0.1)]
    assert math.isclose(row["rise"], losses[1] - losses[0], abs_tol=1e-5)
    p, q = before.double().softmax(-1), after.double().softmax(-1)
    assert math.isclose(row["divergence"], (p * (p / q).log()).sum(-1).mean().item(), abs_tol=1e-5)
    assert row["changed"] == (before.argmax(-1) != after.argmax(-1)).double().mean().item()
    # The attack finds far more than noise does, and noise more where it is larger.
    assert row["rise"] > 3 * abs(found.loc[("noise", 0.1)]["rise"])
    assert found.loc["noise"]["divergence"].is_monotonic_increasing
    assert found.loc["attack"]["rise"].is_monotonic_increasing


def test_what_is_done_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: Text, data: Any
) -> None:
    runs = {form: train.train(form, 3, TINY, data) for form in ("plain", "spectral")}
    asked: list[tuple[str, int]] = []

    def take(form: str, seed: int, *_: Any) -> Any:
        asked.append((form, seed))
        tables = {name: table.assign(seed=seed) for name, table in runs[form].tables.items()}
        return replace(runs[form], tables=tables)

    monkeypatch.setattr(train, "QUICK", TINY)
    monkeypatch.setattr(train, "load_text", lambda _: text)
    monkeypatch.setattr(train, "train", take)
    given = ["--quick", "--forms", "plain", "spectral", "--out", str(tmp_path), "--seeds"]
    train.main([*given, "0"])
    train.main([*given, "0", "1"])
    assert asked == [("plain", 0), ("spectral", 0), ("plain", 1), ("spectral", 1)]
    monkeypatch.setitem(train.FORMS, "spectral", train.Form("spectral", 7.0))
    with pytest.raises(SystemExit, match="another setting"):
        train.main([*given, "0"])
    page.main(["--results", str(tmp_path), "--figures", str(tmp_path / "drawn")])
    assert len(list((tmp_path / "drawn").glob("*.png"))) == 2


# ---------------------------------------------------------------- what is committed


def test_the_tables_are_whole_and_of_the_scripts_setting() -> None:
    results = page.Results()
    facts = json.loads((FOLDER / "results" / "setting.json").read_text("utf-8"))
    assert facts["setting"] == asdict(train.Setting())
    assert facts["forms"] == {name: asdict(form) for name, form in train.FORMS.items()}
    runs = {(form, seed) for form in train.FORMS for seed in train.SEEDS}
    setting = train.Setting()
    looks = {run: train.FORMS[run[0]].steps(setting) // setting.every + 1 for run in runs}
    for table, rows in (
        (results.losses, looks),
        (results.layers, {run: count * setting.layers for run, count in looks.items()}),
        (results.constants, dict.fromkeys(runs, setting.final * (setting.layers + 1))),
        (results.robustness, dict.fromkeys(runs, len(train.NOISE) + len(train.ATTACK))),
    ):
        assert table.groupby(["form", "seed"]).size().to_dict() == rows
    for table in (results.layers, results.constants):
        value = "lipschitz" if "lipschitz" in table else "constant"
        assert (table["lower"] <= table[value] * 1.0001).all()
        assert (table[value] <= table["upper"] * 1.0001).all()
