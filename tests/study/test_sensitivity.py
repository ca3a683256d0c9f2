"""Which tokens a constant depends on: the shares of the leading directions, and the words they belong to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import howsmooth as hs
from howsmooth.study.input_sequences import token_pieces
from howsmooth.study.measurement_run import run as carry_out
from howsmooth.study.plans import ModelSpec
from tests._study import FakeModel, FakeTokenizer, contents_of, make_plan, make_tools, run, words

ODD = "Größe naïve 漢字かな 🙂🙃 e\u0301\u200d x\u00a0y\n\n  tab\tend  " * 3


def test_the_first_sample_of_every_scope_layer_and_head_is_told(study: Any) -> None:
    table = study.contents.sensitivities
    assert len(table) == 3 * (3 + 6)
    assert set(table["sample"]) == {0}
    text = words(4000)
    for row in table.itertuples():
        weights = np.arange(1, row.n + 1) / (row.n * (row.n + 1) / 2)
        np.testing.assert_allclose(row.input_energy, weights, rtol=1e-6)
        np.testing.assert_allclose(row.output_energy, weights[::-1], rtol=1e-6)
        assert [word.strip() for word in row.tokens] == [f"w{row.start + i}" for i in range(row.n)]
        assert text[row.place :].startswith("".join(row.tokens))
        assert row.converged
    starts = table.merge(study.contents.measurements, on=["model", "text", "scope", "layer", "n", "sample"])
    assert (starts["start_x"] == starts["start_y"]).all()


def test_long_sequences_are_left_out_and_tokens_need_no_places(tmp_path: Path) -> None:
    model = FakeModel(max_length=None, tokenizer=FakeTokenizer(knows_places=False))
    run(make_plan(lengths=(4, 513), samples=1), tmp_path, make_tools(models={"small": model})[0])
    contents = contents_of(tmp_path)
    assert set(contents.measurements["n"]) == {4, 513}
    table = contents.sensitivities
    assert set(table["n"]) == {4}
    assert table["place"].isna().all()
    assert table["tokens"][0] == [f"w{table['start'][0] + i}" for i in range(4)]


def test_more_samples_and_another_run_move_nothing(tmp_path: Path) -> None:
    run(make_plan(lengths=(2, 8)), tmp_path, make_tools()[0])
    before = contents_of(tmp_path).sensitivities
    run(make_plan(lengths=(2, 8), samples=7), tmp_path, make_tools()[0])
    assert contents_of(tmp_path).sensitivities.equals(before)
    run(make_plan(lengths=(2, 4, 8), samples=7), tmp_path, make_tools()[0])
    after = contents_of(tmp_path).sensitivities
    assert after[after["n"] != 4].reset_index(drop=True).equals(before)
    assert (after["n"] == 4).sum() == 3


def test_a_constant_of_zero_moves_no_output(tmp_path: Path) -> None:
    tools, _ = make_tools()

    def measure(*arguments: Any, **options: Any) -> Any:
        found = tools.measure(*arguments, **options)
        found.output_direction = torch.zeros_like(found.output_direction)
        found.input_direction = 3 * found.input_direction  # whatever its length is
        return found

    run(make_plan(lengths=(4,)), tmp_path, replace(tools, measure=measure))
    table = contents_of(tmp_path).sensitivities
    assert table["output_energy"].tolist() == [[0.0] * 4] * 3
    assert all(sum(energy) == pytest.approx(1, abs=1e-6) for energy in table["input_energy"])


@pytest.mark.parametrize("scope", ["attention", pytest.param("head", marks=pytest.mark.slow)])
def test_the_shares_are_those_of_a_dense_decomposition(tmp_path: Path, scope: str) -> None:
    (tmp_path / "prose.txt").write_text(
        "The smooth map was measured at words that nobody had read before. " * 9
    )
    plan = make_plan(
        models=(ModelSpec("builtin-decoder"),), texts=(str(tmp_path / "prose.txt"),), lengths=(5,), samples=1,
        scopes=(scope,), rtol=1e-8, dtype="float64", bounds="none",
    )  # fmt: skip
    carry_out(plan, tmp_path / "out")
    table = contents_of(tmp_path / "out").sensitivities
    row = table[table["layer"] == 1].iloc[0]
    model = hs.load_model("builtin-decoder", dtype=torch.float64)
    text = (tmp_path / "prose.txt").read_text()
    ids = torch.tensor([model.tokenizer.encode(text)[row["start"] : row["start"] + 5]])
    site = hs.capture(model, ids, layers=[1], scope=scope)[0]
    x = site.x[0]
    jacobian = torch.func.jacrev(site.map)(x).reshape(-1, x.numel())
    left, _, right = torch.linalg.svd(jacobian)
    energy = right[0].reshape(x.shape).square().sum(dim=1)
    np.testing.assert_allclose(row["input_energy"], energy, atol=1e-4)
    energy = left[:, 0].reshape(5, -1).square().sum(dim=1)
    np.testing.assert_allclose(row["output_energy"], energy, atol=1e-4)
    assert text[row["place"] :].startswith("".join(row["tokens"]))


@pytest.mark.parametrize("name", ["builtin-encoder", "builtin-decoder"])
def test_tokens_of_odd_letters_are_pieces_of_the_text(name: str) -> None:
    tokenizer = hs.load_model(name).tokenizer
    ids, places = tokenizer.located(ODD)
    assert ids == tokenizer.encode(ODD)
    assert len(places) == len(ids)
    everything = token_pieces(ODD, places, 0, len(ids))
    assert "".join(everything) == ODD[places[0] :]
    for first, n in ((3, 9), (len(ids) - 4, 4)):
        found = token_pieces(ODD, places, first, n)
        assert len(found) == n
        assert ODD[places[first] :].startswith("".join(found))
    plain = "The smooth map was measured at words that no one had read."
    ids, places = tokenizer.located(plain)
    found = token_pieces(plain, places, 0, len(ids))
    assert [word.strip() for word in found] == [word.strip() for word in tokenizer.decoded(ids)]


@given(st.data())
def test_pieces_are_the_text(data: st.DataObject) -> None:
    content = data.draw(st.text(max_size=30))
    places = sorted(data.draw(st.lists(st.integers(0, len(content)), min_size=1, max_size=12)))
    first = data.draw(st.integers(0, len(places) - 1))
    n = data.draw(st.integers(1, len(places) - first))
    found = token_pieces(content, places, first, n)
    after = next((place for place in places[first + n :]), len(content))
    assert len(found) == n
    assert "".join(found) == content[places[first] : after]
