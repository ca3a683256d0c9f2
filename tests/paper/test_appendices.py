"""The experiments of the appendices, on tiny models, against dense Jacobians and the models themselves."""

from __future__ import annotations

import itertools
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.bounds.attention_parameters import Head, parameters_of
from howsmooth.errors import ArgumentError, CaptureError, ModelError
from howsmooth.models import capture
from howsmooth.paper import gamma_r2 as gamma_radius
from howsmooth.paper import quadratic_growth as quadratic_growth
from howsmooth.paper.balanced_tokens import balanced_direction
from howsmooth.paper.figure_definition import PaperFigure, choose_figures
from howsmooth.paper.gamma_r2 import over_texts
from howsmooth.paper.growth_with_length import LengthGrowth
from howsmooth.paper.quadratic_growth import FAR, IDENTITY, exponents_in_radius, lengths_from_3
from howsmooth.study.measurement_run import run
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import Measurement, PublishedValue
from howsmooth.study.store import Store
from howsmooth.words import decimal
from tests._figures import (
    BERT,
    DECODER,
    GPT2,
    OTHER,
    TEXT,
    Words,
    asked,
    bert_head,
    dense_norm,
    measured,
    never,
    quick,
    shown,
    tiny_library,
)  # fmt: skip
from tests._tiny_models import tiny

GAMMA_RADIUS, QUADRATIC_GROWTH, GPT2_GROWTH = choose_figures(["gamma-r2", "quadratic-growth", "gpt2"])

# ---- γR²


@pytest.fixture(scope="module")
def gammas(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    options = asked(BERT, GPT2, lengths=(6,), samples=3)
    return measured(GAMMA_RADIUS, tmp_path_factory.mktemp("gamma"), options)


def test_gamma_is_that_of_the_eigenvalues_and_radius_that_of_the_model(
    gammas: pd.DataFrame, tmp_path: Path
) -> None:
    assert len(gammas) == 2 * 2 * 3 * 4
    finding = shown(GAMMA_RADIUS, gammas, tmp_path)
    bert = finding.tables[0][1].query("model == 'bert'")["γR²"]
    enough = int((bert >= math.log(99) / 2).sum())
    assert f"γR² is from {bert.min():z.3g} to {bert.max():.3g} over its 12 heads" in finding.seen[0]
    assert f"In {enough} of 12 heads γR² is at least 2.30" in finding.seen[0]
    rows = gammas[gammas["model"] == "bert"]
    for layer, h in itertools.product(range(3), range(4)):
        query, key, _, _ = bert_head(layer, h)
        values = np.linalg.eigvals((key.T @ query / math.sqrt(6)).numpy())
        real = values[np.abs(values.imag) < 1e-9].real
        (row, *_) = rows[(rows["layer"] == layer) & (rows["head"] == h)].to_dict("records")
        assert row["gamma_min"] == pytest.approx(min(real), rel=1e-6, abs=1e-9)
        assert row["gamma_max"] == pytest.approx(max(real), rel=1e-6, abs=1e-9)
        assert row["gamma"] == pytest.approx(max(-min(real), max(real) / 8), rel=1e-6)
    windows = _windows("bert", 6, 3)
    hidden = tiny("bert")(windows, output_hidden_states=True).hidden_states[1].detach().double()
    norms = hidden.norm(dim=-1)
    per_sequence = norms.square().mean(dim=1).sqrt()
    row = rows[(rows["layer"] == 1) & (rows["text"] == "prose")].iloc[0]
    assert row["radius"] == pytest.approx(float(norms.square().mean().sqrt()), rel=1e-5)
    assert row["radius_from"] == pytest.approx(float(per_sequence.min()), rel=1e-5)
    assert row["radius_to"] == pytest.approx(float(per_sequence.max()), rel=1e-5)


def _windows(model: str, n: int, samples: int) -> Tensor:
    """The sequences that ``howsmooth measure`` takes, found by measuring with it."""
    with tempfile.TemporaryDirectory() as folder, tiny_library():
        plan = Plan((ModelSpec(model),), ("prose",), (n,), samples, layers=Ranges.parse("0", "layers"))
        run(plan, Path(folder))
        with Store.open(Path(folder), write=False) as store:
            held = store.sequences(model, "prose")
    ids = Words().encode(TEXT)
    return torch.tensor([ids[held[n, sample] : held[n, sample] + n] for sample in range(samples)])


NAMES = ("gamma_min", "gamma_max", "gamma", "n", "radius", "radius_from", "radius_to")


def test_radii_are_weighed_by_tokens_and_heads_without_eigenvalues_counted_apart() -> None:
    gammas = {0: (-2.0, 8.0, 2.0), 1: (None, None, None)}
    rows = [
        dict(zip(NAMES, (*gamma, *radii), strict=True))
        | {"model": "m", "layer": 0, "head": head, "samples": 3}
        for head, gamma in gammas.items()
        for radii in ((10, 1.0, 0.5, 1.5), (30, 3.0, 2.0, 4.0))
    ]
    table = over_texts(pd.DataFrame(rows))
    row, nothing = table.to_dict("records")
    assert row["radius"] == pytest.approx(math.sqrt((30 * 1 + 90 * 9) / 120))
    assert row["strength"] == pytest.approx(2 * (30 * 1 + 90 * 9) / 120)
    assert (row["strength_from"], row["strength_to"]) == (2 * 0.25, 2 * 16.0)
    assert math.isnan(nothing["strength"])
    words = gamma_radius.result_sentences(table)
    assert "from 14 to 14 over its 1 heads" in words
    assert "In 1 of 1 heads" in words
    assert words.endswith("Without any real eigenvalue: 1 more.")


@pytest.mark.parametrize("figure", [GAMMA_RADIUS, QUADRATIC_GROWTH], ids=lambda one: one.name)
def test_models_with_other_scores_are_refused_in_a_sentence(figure: PaperFigure, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"mistral, with rotary positions and a window"):
        measured(figure, tmp_path, asked(ModelSpec("mistral"), lengths=(6,)))


def test_models_without_a_tokenizer_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: Words, text: str) -> list[int]:
        raise ModelError("'bert' has no usable tokenizer.")

    monkeypatch.setattr(Words, "encode", nothing)
    for spec, words in (
        (BERT, r"bert, without one. Put one into its folder, or add ,random-init;"),
        (ModelSpec("bert", random_init=True), r"without one. Put one into its folder; howsmooth measure"),
    ):
        with pytest.raises(ArgumentError, match=words):
            measured(GAMMA_RADIUS, tmp_path, asked(spec, lengths=(6,)))


# ---- quadratic growth


@pytest.mark.parametrize("n", [3, 6, 7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_formula_is_the_last_block_of_the_jacobian(causal: bool, biased: bool, n: int) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = torch.randn(3, 1, 2, 4, generator=generator, dtype=torch.float64)
    bias = torch.randn(1, 2, generator=generator, dtype=torch.float64) if biased else None
    f = SelfAttention(query, key, value, query_bias=bias, causal=causal)
    tokens = balanced_direction(parameters_of(f).folded(0))
    x = tokens.tokens(n, 1.7)
    assert x.shape == (n, 4)
    assert float(x.sum(0).norm()) < 1e-12
    assert float(x[-1].norm()) == 0
    assert int((x.norm(dim=1) > 1.69).sum()) == 2 * ((n - 1) // 2)
    block = torch.func.jacrev(lambda last: f(torch.cat([x[:-1], last[None]]))[-1])(x[-1])
    assert tokens.formula(n, 1.7) == pytest.approx(float(torch.linalg.matrix_norm(block, 2)), rel=1e-10)
    assert tokens.formula(n, 1.7) <= dense_norm(f, x) * (1 + 1e-12)


def test_of_many_lengths_a_few_are_taken_with_both_ends_from_three_on(tmp_path: Path) -> None:
    taken = lengths_from_3(tuple(range(2, 101, 2)))
    assert len(taken) == 4
    assert (taken[0], taken[-1]) == (4, 100)
    assert taken == sorted(set(taken))
    assert lengths_from_3((1, 2, 5, 4)) == [4, 5]
    with pytest.raises(ArgumentError, match="at least 3"):
        measured(QUADRATIC_GROWTH, tmp_path, asked(BERT, lengths=(1, 2)))


def test_the_identity_grows_as_the_paper_says() -> None:
    eye = torch.eye(3, dtype=torch.float64)
    for n in (3, 9):
        value = balanced_direction(Head(2.5 * eye, eye)).formula(n, 4.0)
        assert value == pytest.approx(1 / n + 2.5 * 16 * (n - 1) / n, rel=1e-12)
    with pytest.raises(ArgumentError, match="not zero"):
        balanced_direction(Head(0 * eye, eye))


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    options = asked(BERT, DECODER, lengths=(3, 5), layers=Ranges.parse("1", "layers"), texts=("prose",))
    with quick():
        return measured(QUADRATIC_GROWTH, tmp_path_factory.mktemp("growth"), options)


def test_quadratic_growth_measures_the_norm_of_the_jacobian(growth: pd.DataFrame, tmp_path: Path) -> None:
    rows = growth
    assert rows["converged"].all()
    identity = rows[rows["model"] == IDENTITY]
    assert sorted(identity["n"].unique()) == [3, 5]
    eye = torch.eye(4, dtype=torch.float64)[None]
    f = SelfAttention(eye, eye, eye, scale=1.0)
    for row in identity.iloc[[0, -3]].to_dict("records"):
        signs = torch.tensor([1.0, -1.0] * ((row["n"] - 1) // 2) + [0.0], dtype=torch.float64)
        x = row["radius"] * signs[:, None] * torch.eye(4, dtype=torch.float64)[0]
        assert row["value"] == pytest.approx(dense_norm(f, x), rel=1e-6)
    table = shown(QUADRATIC_GROWTH, growth, tmp_path).tables[0][1]
    assert len(table) == 2 + 4 + 4
    assert table["exponent"].between(1.9, 2.1).all()
    for h in (0, 3):
        query, key, value, bias = bert_head(1, h)
        head = SelfAttention(query[None], key[None], value[None], query_bias=bias[None])
        own = rows[(rows["model"] == "bert") & (rows["head"] == h)]
        assert set(own["n"]) == {5}
        assert int(own["real"].sum()) == 1
        tokens = balanced_direction(parameters_of(head).folded(0))
        for row in own.iloc[[0, 2, -1]].to_dict("records"):
            x = tokens.tokens(5, row["radius"])
            assert row["value"] == pytest.approx(dense_norm(head, x), rel=1e-5)
            assert math.log(row["value"]) <= row["log_sharp"]


def test_exponents_in_the_radius_are_those_planted() -> None:
    radius = np.geomspace(1, 100, 9)
    common = {"model": "m", "layer": 0, "n": 5, "converged": True, "real": False}
    rows = [
        {**common, "head": 0, "radius": r, "strength": r * 40, "value": 3 * r**1.5 if r * 40 >= FAR else 7.0}
        for r in radius
    ]
    rows.append({**common, "head": 0, "radius": 50.0, "strength": 2000.0, "value": 1e6, "real": True})
    rows.append({**common, "head": 0, "radius": 60.0, "strength": 2400.0, "value": 1e6, "converged": False})
    (fit,) = exponents_in_radius(pd.DataFrame(rows)).to_dict("records")
    assert fit["exponent"] == pytest.approx(1.5, abs=1e-9)
    assert fit["points"] == int((radius * 40 >= FAR).sum())


# ---- GPT-2


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("gpt2")
    return measured(GPT2_GROWTH, folder, asked(GPT2, lengths=(4, 6, 9))), folder


def test_the_norms_are_those_of_the_models_own_hidden_states(gpt2: tuple[Any, Path]) -> None:
    (series, reasons), folder = gpt2
    assert not reasons
    rows = pd.concat([one.entering for layer in series for one in layer])
    assert len(rows) == 2 * 3 * 3 * 2
    with Store.open(folder, write=False) as store:
        held, table = store.sequences("gpt2", "prose"), store.table(Measurement)
    model, ids = tiny("gpt2"), Words().encode(TEXT)
    for layer in (0, 1, 2):
        tokens = torch.tensor([ids[held[9, sample] : held[9, sample] + 9] for sample in range(2)])
        entering = model(tokens, output_hidden_states=True).hidden_states[layer].double()
        attended = model.h[layer].ln_1(entering.float()).double()
        own = rows[(rows["text"] == "prose") & (rows["layer"] == layer) & (rows["n"] == 9)]
        expected = entering.norm(dim=-1).square().mean(dim=1).sqrt()
        assert own["radius"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
        given = table[(table["text"] == "prose") & (table["layer"] == layer) & (table["n"] == 9)]
        expected = attended.norm(dim=-1).square().mean(dim=1).sqrt()
        assert given["radius_mean"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_gpt2_is_drawn_and_told(gpt2: tuple[Any, Path]) -> None:
    finding = shown(GPT2_GROWTH, *gpt2)
    table = finding.tables[0][1]
    places = [[layer, text] for layer in (0, 1, 2) for text in ("prose", OTHER)]
    assert table[["layer", "text"]].to_numpy().tolist() == places
    assert f"n to the power {decimal(table.iloc[0]['exponent'], 2)}" in finding.seen[0]
    radii = gpt2[0][0][0][0].entering["radius"]
    assert f"those that enter the layer {radii.min():.3g} to {radii.max():.3g}" in finding.seen[0]
    # Norms that are all the same have no correlation.
    rows = pd.DataFrame({"n": [4, 8, 16, 32], "radius_mean": [5.0] * 4, "lipschitz": [1.0, 2.0, 4.0, 8.0]})
    growing = pd.DataFrame({"n": rows["n"], "radius": rows["n"] * 2.0})
    columns = LengthGrowth("m", 0, "prose", rows.assign(converged=True), rows.iloc[:0], growing).columns()
    assert math.isnan(columns["correlation, given to attention"])
    assert columns["correlation, entering the layer"] == pytest.approx(1)


def test_what_was_asked_for_last_is_shown_and_no_more(gpt2: tuple[Any, Path]) -> None:
    options = asked(GPT2, lengths=(4, 9), texts=(OTHER,), samples=1)
    series, _ = measured(GPT2_GROWTH, gpt2[1], options, never)
    assert [one.text for layer in series for one in layer] == [OTHER] * 3
    assert [one.fit.n_points for layer in series for one in layer] == [2] * 3


def test_what_is_published_stands_beside_it(tmp_path: Path) -> None:
    options = asked(GPT2, lengths=(4, 6, 9), samples=1, texts=("prose",), layers=Ranges.parse("1", "layers"))
    found = measured(GPT2_GROWTH, tmp_path, replace(options, as_published=True))
    finding = shown(GPT2_GROWTH, found, tmp_path)
    (row,) = finding.tables[0][1].to_dict("records")
    with Store.open(tmp_path, write=False) as store:
        table, theirs = store.table(Measurement), store.table(PublishedValue)
    theirs = theirs[theirs["quantity"] == "as published"].sort_values("n")
    ratios = theirs["lipschitz"].to_numpy() / table.sort_values("n")["lipschitz"].to_numpy()
    assert row["published / corrected"] == pytest.approx(np.median(ratios), rel=1e-3)
    slope = np.polyfit(np.log(theirs["n"]), np.log(theirs["lipschitz"]), 1)[0]
    assert row["published exponent"] == pytest.approx(slope, rel=1e-6)
    assert f"{row['published / corrected']:.3g} times the corrected constant" in finding.seen[0]
    # Not asked for, it is not shown.
    finding = shown(GPT2_GROWTH, measured(GPT2_GROWTH, tmp_path, options, never), tmp_path)
    assert "published exponent" not in finding.tables[0][1]
    assert "published" not in finding.seen[0]


def test_without_the_entering_tokens_the_constants_are_shown_with_the_reason(tmp_path: Path) -> None:
    def refusing(*arguments: Any, **named: Any) -> Any:
        if named["scope"] == "block":
            raise CaptureError("Its block is hidden.")
        return capture(*arguments, **named)

    options = asked(GPT2, lengths=(4, 6, 9), samples=1, texts=("prose",))
    with patch("howsmooth.models.capture", refusing):
        found = measured(GPT2_GROWTH, tmp_path, options)
    finding = shown(GPT2_GROWTH, found, tmp_path)
    assert len(finding.seen) == 3 + 1
    assert finding.seen[-1] == "gpt2: the tokens that enter a layer are not shown. Its block is hidden."
    # What could not be captured is tried again.
    _, reasons = measured(GPT2_GROWTH, tmp_path, options)
    assert not reasons
