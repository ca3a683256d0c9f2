"""The worked case of the character model: the script, tiny, and the tables and the page that it made."""

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
from tests._selection import others_slow
from tests._shared import script

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "characters"


train = script("examples/characters/train.py")
page = script("examples/characters/page.py")

TINY = train.Setting(
    steps=6,
    batch=4,
    length=12,
    width=16,
    layers=2,
    heads=2,
    warm_up=2,
    every=3,
    validation=4,
    probe=2,
    final=2,
)

LONGER = replace(TINY, steps=40, every=40)


@pytest.fixture(scope="module")
def text() -> Text:
    words = [
        "the",
        "map",
        "is",
        "as",
        "smooth",
        "as",
        "one",
        "would",
        "have",
        "it",
        ",",
        "and",
        "so",
        "we",
        "ask",
    ]
    picks = torch.randint(len(words), (900, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return Text("made-up", "\n\n".join(" ".join(words[i] for i in row) + "é" for row in picks), "this test")


@pytest.fixture(scope="module")
def data(text: Text) -> Any:
    stream, held_out = train.split(text)
    return train.Data(stream, *train.held_out_windows(held_out, TINY), text.digest)


@pytest.fixture(scope="module")
def runs(data: Any) -> dict[str, Any]:
    return {form: train.train(form, 3, TINY, data) for form in train.FORMS}


@pytest.fixture(scope="module")
def plain(data: Any) -> Any:
    return train.train("plain", 0, LONGER, data)


def test_ids_are_characters_and_nothing_is_lost_in_the_split(text: Text) -> None:
    assert train.ids_of("\n ~é").tolist() == [1, 2, 96, 0]
    assert len(set(train.ids_of(train.ALPHABET).tolist())) == 96
    stream, held_out = train.split(text)
    paragraphs = train.ids_of(text.content.strip()).bincount(minlength=97)
    joints = 2 * torch.eye(97, dtype=torch.int64)[1]
    # Where the two parts meet, one empty line stood.
    assert torch.equal(stream.bincount(minlength=97) + held_out.bincount(minlength=97) + joints, paragraphs)
    assert 0.2 < len(held_out) / len(stream) < 0.3


def test_held_out_windows_have_nothing_in_common(text: Text) -> None:
    numbered = torch.arange(40 * (TINY.length + 1) + 5)
    parts = train.held_out_windows(numbered, TINY)
    assert [len(part) for part in parts] == [4, 2, 2]
    places = torch.cat(parts).flatten()
    assert len(places.unique()) == len(places)
    assert all((part.diff(dim=1) == 1).all() for part in parts)
    with pytest.raises(SystemExit, match="fewer than 8"):
        train.held_out_windows(numbered[:60], TINY)


def test_a_batch_depends_on_seed_and_step_alone(data: Any) -> None:
    first = train.batch_of(data.stream, TINY, 1, 5)
    torch.rand(3)
    assert torch.equal(first, train.batch_of(data.stream, TINY, 1, 5))
    assert not torch.equal(first, train.batch_of(data.stream, TINY, 1, 6))
    assert not torch.equal(first, train.batch_of(data.stream, TINY, 2, 5))
    joined = "".join(map(chr, data.stream.tolist()))
    assert all("".join(map(chr, window)) in joined for window in first.tolist())


@pytest.mark.parametrize("form", others_slow(train.FORMS, ["spectral"]))
def test_watching_changes_nothing(form: str, data: Any, runs: dict[str, Any]) -> None:
    alone = train.train(form, 3, TINY, data, watch=False)
    watched = runs[form]
    assert watched.losses == alone.losses
    assert all(map(torch.equal, watched.model.state_dict().values(), alone.model.state_dict().values()))
    assert alone.tables == {}


def test_forms_begin_alike_and_only_then_part(runs: dict[str, Any]) -> None:
    assert len({run.losses[0] for run in runs.values()}) == 1
    looks = {form: run.tables["losses"] for form, run in runs.items()}
    assert {tuple(look["step"]) for look in looks.values()} == {(0, 3, 6), (0, 3, 4)}
    assert len({look["held_out"].iloc[0] for look in looks.values()}) == 1
    assert len({look["held_out"].iloc[-1] for look in looks.values()}) == len(runs)
    assert looks["plain"]["penalty"].isna().all()
    for form, run in runs.items():
        assert set(run.tables["layers"]["layer"]) == {0, 1}
        assert set(looks[form]["form"]) == {form}
        assert math.isclose(looks[form]["training"].iloc[-1], sum(run.losses[-3:]) / 3, rel_tol=1e-9)
        assert len(run.losses) == (4 if form == "plain-short" else 6)


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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, text: Text, runs: dict[str, Any]) -> list[tuple[str, int]]:
    """Let the script take runs that were made before; return which it asked for."""
    asked: list[tuple[str, int]] = []

    def take(form: str, seed: int, *_: Any) -> Any:
        asked.append((form, seed))
        tables = {name: table.assign(seed=seed) for name, table in runs[form].tables.items()}
        return replace(runs[form], tables=tables)

    monkeypatch.setattr(train, "QUICK", TINY)
    monkeypatch.setattr(train, "load_text", lambda _: text)
    monkeypatch.setattr(train, "train", take)
    return asked


def test_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[tuple[str, int]]
) -> None:
    wanted = ["--quick", "--forms", "plain", "spectral", "--seeds", "0", "1", "--out"]
    train.main([*wanted, str(tmp_path / "whole")])
    assert made == [("plain", 0), ("spectral", 0), ("plain", 1), ("spectral", 1)]
    take = train.train

    def falls_over(form: str, seed: int, *others: Any) -> Any:
        if (form, seed) == ("spectral", 1):
            raise KeyboardInterrupt
        return take(form, seed, *others)

    monkeypatch.setattr(train, "train", falls_over)
    with pytest.raises(KeyboardInterrupt):
        train.main([*wanted, str(tmp_path / "parts")])
    monkeypatch.setattr(train, "train", take)
    made.clear()
    train.main([*wanted, str(tmp_path / "parts")])
    assert made == [("spectral", 1)]
    for name in ("losses", "layers", "constants", "robustness"):
        whole = (tmp_path / "whole" / f"{name}.csv").read_bytes()
        assert whole == (tmp_path / "parts" / f"{name}.csv").read_bytes()
    made.clear()
    train.main([*wanted, str(tmp_path / "parts")])
    assert made == []
    page.main(["--results", str(tmp_path / "parts"), "--figures", str(tmp_path / "drawn")])
    assert len(list((tmp_path / "drawn").glob("*.png"))) == 4


def test_results_of_another_setting_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[tuple[str, int]]
) -> None:
    given = ["--quick", "--forms", "plain", "--seeds", "0", "--out", str(tmp_path)]
    train.main(given)
    before = (tmp_path / "losses.csv").read_bytes()
    with pytest.raises(SystemExit, match="another setting"):
        train.main([*given, "--steps", "3"])
    with monkeypatch.context() as changed:
        changed.setitem(train.FORMS, "spectral", train.Form("spectral", 7.0))
        with pytest.raises(SystemExit, match="another setting"):
            train.main(given)
    assert (tmp_path / "losses.csv").read_bytes() == before
    # A form more is no other setting.
    monkeypatch.setitem(train.FORMS, "more", train.Form("spectral", 7.0))
    train.main(given)
    assert made == [("plain", 0)]
    train.main([*given, "--steps", "3", "--fresh"])
    assert made == [("plain", 0)] * 2


@pytest.mark.parametrize(
    "given", [["--steps", "0"], ["--seeds", "-1"], ["--forms", "none"], ["--steps", "x"]]
)
def test_what_is_no_option_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main(given)
    assert stopped.value.code == 2
    assert given[0].removeprefix("--") in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert all(f"--{name}" in said for name in ("forms", "seeds", "steps", "out", "fresh", "quick"))


# ---------------------------------------------------------------- what is committed


@pytest.fixture(scope="module")
def results() -> Any:
    return page.Results()


def test_the_tables_are_whole_and_of_the_scripts_setting(results: Any) -> None:
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


def test_all_forms_of_a_seed_began_alike(results: Any) -> None:
    begin = results.losses[results.losses["step"] == 0]
    assert (begin.groupby("seed")["held_out"].nunique() == 1).all()
    layers = results.layers[results.layers["step"] == 0]
    assert (layers.groupby(["seed", "layer"])["lipschitz_mean"].nunique() == 1).all()
    assert begin["held_out"].nunique() == len(train.SEEDS)


def test_the_table_of_the_page_is_that_of_the_results(results: Any) -> None:
    words = page.PAGE.read_text(encoding="utf-8")
    assert page.outcome(results) in words
    assert page.fill(words, results) == words


@pytest.mark.slow
def test_a_full_training_gives_about_the_committed_numbers(tmp_path: Path, results: Any) -> None:
    train.main(["--forms", "plain", "spectral-strong", "--seeds", "0", "--out", str(tmp_path)])
    again = page.Results(tmp_path)
    for form in ("plain", "spectral-strong"):
        # Another processor rounds otherwise.
        assert abs(again.end_losses().loc[0, form] - results.end_losses().loc[0, form]) < 0.1
    ends, before = again.end_constants(), results.end_constants()
    for key in (("plain", 0), ("spectral-strong", 0)):
        assert ((ends.loc[key] / before.loc[key]).drop("whole").between(0.5, 2)).all()


def test_what_the_page_says_in_words_is_so_in_every_seed(results: Any) -> None:
    losses, ends = results.end_losses(), results.end_constants()
    rise = results.robustness.pivot_table(index="seed", columns=["form", "kind", "size"], values="rise")
    for seed in results.seeds:
        at = {form: ends.loc[(form, seed)] for form in results.forms}
        loss, moved = losses.loc[seed], rise.loc[seed]
        assert loss["spectral"] <= loss["plain"]
        assert 0.55 < at["spectral"]["0"] / at["plain"]["0"] < 0.6
        assert (at["spectral"][["1", "2"]] < at["plain"][["1", "2"]] / 7).all()
        assert 0.9 < at["spectral"]["whole"] / at["plain"]["whole"] < 1.1
        assert (at["spectral-strong"][["1", "2"]] < 0.02).all()
        assert 0.7 < at["spectral-strong"]["whole"] / at["plain"]["whole"] < 0.8
        assert at["plain-short"]["whole"] < at["spectral-strong"]["whole"]
        assert loss["plain"] < loss["spectral-strong"] < loss["plain-short"]
        share = (loss["spectral-strong"] - loss["plain"]) / (loss["plain-short"] - loss["plain"])
        line = at["plain"]["whole"] + share * (at["plain-short"]["whole"] - at["plain"]["whole"])
        assert 1.06 < line / at["spectral-strong"]["whole"] < 1.26
        attack = {form: moved[form, "attack", 0.05] for form in results.forms}
        between = attack["plain"] + share * (attack["plain-short"] - attack["plain"])
        assert abs(between / attack["spectral-strong"] - 1) < 0.06
        assert loss["blocks"] < loss["plain-short"]
        assert at["blocks"]["whole"] < min(0.7 * at["plain-short"]["whole"], at["plain"]["whole"] / 2)
        assert 0.08 < loss["blocks"] - loss["plain"] < 0.13
        assert abs(loss["jasmin"] - loss["plain"]) < 0.0125
        assert 0.89 < at["jasmin"]["0"] / at["plain"]["0"] < 1.11
        assert 0.75 < at["jasmin"]["whole"] / at["plain"]["whole"] < 0.9
        for kind, size in (("noise", 0.5), ("attack", 0.05)):
            assert moved["blocks", kind, size] < moved["plain-short", kind, size]
            assert moved["plain-short", kind, size] < moved["spectral-strong", kind, size]
            assert moved["spectral-strong", kind, size] < moved["plain", kind, size]
            assert moved["spectral", kind, size] > 0.9 * moved["plain", kind, size]


def test_the_page_counts_the_parameters() -> None:
    count = sum(p.numel() for p in train.new_model(train.Setting(), 0).parameters())
    assert f"{count:,} parameters" in page.PAGE.read_text(encoding="utf-8")
