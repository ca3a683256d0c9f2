"""The page of evidence: its tables are those of the results, and these are what its sentences say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from examples.digits import page as digits
from examples.news import page as news
from examples.tables import PAGE, placed

from howsmooth.study.plans import ModelSpec
from tests._shared import script, shared_data

TABLES = PAGE.parent / "_static" / "what-we-found"
WORDS = PAGE.read_text(encoding="utf-8")

page = script("scripts/what_we_found_page.py")
measuring = script("scripts/what_we_found.py")
characters = script("examples/characters/page.py")


def attention() -> pd.DataFrame:
    return pd.read_csv(TABLES / "attention.csv")


def test_tables_are_those_of_the_results() -> None:
    of_characters = {"outcome": characters.outcome(characters.Results())}
    made = {**page.tables(), **digits.tables(), **news.tables(), **of_characters}
    assert placed(WORDS, made) == WORDS
    assert placed(WORDS.replace("as published | ", "as published | 9"), made) == WORDS
    assert len(made) == WORDS.count("<!-- table ")


def numbers(pattern: str) -> list[int]:
    """The numbers of a sentence of the page."""
    found = re.search(pattern, WORDS)
    assert found is not None
    return [int(one) for one in found.groups()]


def test_counts_of_the_answer() -> None:
    fits = attention()
    for words, quantity in (("Corrected", "corrected"), ("As published", "as published")):
        of = fits[fits["quantity"] == quantity]
        start = rf"- \*\*{words}\*\*"
        near = of["slope"].between(0.22, 0.28).sum()
        assert numbers(rf"{start}, (\d+) fits .* and (\d+) are within 0\.03 of it\. ") == [len(of), near]
        # Holm: from the smallest p on, refuse while p times the number left is at most 5 %
        refused = 0
        for p in sorted(of["quarter"]):
            if p * (len(of) - refused) > 0.05:
                break
            refused += 1
        around = ((of["low"] <= 0.25) & (of["high"] >= 0.25)).sum()
        assert numbers(rf"{start}.* interval of (\d+), and refused in (\d+) by Holm") == [around, refused]
    right = fits[fits["quantity"] == "corrected"]
    counts = [(right["low"] > 0).sum(), len(right), (right["high"] < 0.5).sum(), len(right)]
    assert numbers(r"grows with \$n\$ in (\d+) of (\d+) fits .* in (\d+) of (\d+) \(below") == counts


def test_sentences_on_real_models() -> None:
    fits = attention()
    item = {name: of.set_index(["model", "text", "layer"])["slope"] for name, of in fits.groupby("quantity")}
    moved = {name: (slope - item["corrected"]).abs() for name, slope in item.items()}
    assert moved["only output"].groupby("model").median().max() < 0.155
    assert moved["only stopping"].median() < 0.005
    slices = pd.read_csv(TABLES / "slices.csv")
    assert slices["converged"].all()
    middle = slices.pivot_table("lipschitz", ["model", "radius", "n"], "tokens", aggfunc="median")
    layer = next(name for name in middle.index.get_level_values(0) if "6" in str(name) or "gpt2" in str(name))
    told = [middle.loc[(layer, 15.5, n), of] for of in ("wrong slices", "own") for n in (12, 392)]
    assert [f"{value:.2f}" for value in told] == ["1.07", "1.23", "2.37", "8.45"]
    depth = pd.read_csv(TABLES / "depth.csv")
    for model, of in depth.groupby("model"):
        until = of.set_index("stage")["until"]
        half = until[f"block {(until.index.str.startswith('block').sum() - 1) // 2}"]
        assert half > 0.4 * until.iloc[-1] or (model == "capp_gpt" and until.iloc[-1] > 10 * until.iloc[-2])
        assert np.allclose(of["own"].cumprod(), of["product"], rtol=1e-3)


def test_sentences_on_trainings() -> None:
    results = characters.Results()
    ends = results.end_constants()
    for seed, loss in results.end_losses().iterrows():
        at = {form: ends.loc[(form, seed)] for form in results.forms}
        assert loss["spectral"] <= loss["plain"]
        assert (at["spectral"] < 0.6 * at["plain"])[["0", "1", "2"]].all()
        assert 0.9 < at["spectral"]["whole"] / at["plain"]["whole"] < 1.1
        assert at["blocks"]["whole"] < at["plain"]["whole"] / 2
        assert 0.08 < loss["blocks"] - loss["plain"] < 0.13
    own = {form: [row for row in rows if row["right"]] for form, rows in news.results().items()}
    medians = [np.median([row[name] for row in own[form]]) for name in ("radius", "attack") for form in own]
    assert [f"{value:.2f}" for value in medians] == ["0.32", "0.78", "5.35", "6.09"]


def test_holm_steps_down_and_stops() -> None:
    # .005 · 4, .01 · 3 and .015 · 2 are below .05, though .015 · 4 is not
    assert list(page.holm(pd.Series([0.01, 0.9, 0.015, 0.005]))) == [True, False, True, True]
    # .03 · 2 is not, so .04 · 1 is not looked at
    assert list(page.holm(pd.Series([0.01, 0.04, 0.03, 0.005]))) == [True, False, False, True]


def test_tables_from_known_rows() -> None:
    n = np.repeat([4, 8, 16, 32, 64], 4)
    noise = 1 + 0.01 * np.random.default_rng(0).standard_normal(n.size)
    rows = pd.DataFrame(
        {
            "model": "m", "text": "t", "layer": 0, "n": n, "sample": np.tile(range(4), 5), "items": "",
            "lower": 1.0, "upper": 1.0, "settled": True, "radius_mean": 3.0 * noise,
        }
    )  # fmt: skip
    right = rows.assign(quantity="corrected", lipschitz=2 * n**0.4 * noise)
    there = rows.assign(quantity="as published", lipschitz=3 * n**0.25 * noise, lower=np.nan)
    fits = measuring.attention_table(pd.concat([right, there])).set_index("quantity")
    assert np.allclose(fits["slope"], [0.4, 0.25], atol=0.01)
    assert np.allclose(fits["short_slope"], [0.4, 0.25], atol=0.03)
    heads = pd.concat(
        [right.assign(scope="head", head=head, converged=True) for head in range(3)]
    )  # fmt: skip
    heads.loc[heads["head"] == 2, "lipschitz"] *= 100.0 / n
    found = measuring.scopes_table(heads).set_index(["scope", "head"])["slope"]
    assert found["head", 0] == pytest.approx(0.4, abs=0.01)
    assert found["head", 2] == pytest.approx(-0.6, abs=0.01)
    # The median of two equal heads and a third one is one of the two
    assert found.xs("head (median)").item() == pytest.approx(0.4, abs=0.01)


def test_the_script_measures_goes_on_and_writes_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prose = tmp_path / "prose.txt"
    prose.write_text("A map is smooth if what it gives moves no faster than what it takes, it is said. " * 9)
    spec = ModelSpec("builtin-decoder")
    jobs = [
        measuring.Job(spec, str(prose), (2, 4, 8), 2, layers="0", items=("output",)),
        measuring.Job(spec, str(prose), (2, 4, 8), 2, layers="0", scopes=("attention",)),
    ]
    for job in jobs:
        measuring.carry_out(job, tmp_path / "work")
    measuring.collect(tmp_path / "work", tmp_path / "tables")
    fits = pd.read_csv(tmp_path / "tables" / "attention.csv").set_index("quantity")
    assert list(fits.index) == ["corrected", "as published"]
    assert list(fits["n_points"]) == [6, 6]
    scopes = pd.read_csv(tmp_path / "tables" / "scopes.csv")
    # The same sequences and seeds, so the same constants
    assert scopes["slope"].item() == fits.loc["corrected", "slope"]
    capsys.readouterr()
    for job in jobs:
        measuring.carry_out(job, tmp_path / "work")
    told = capsys.readouterr().out
    assert re.findall(r"(\d+) measured, (\d+) there", told) == [("0", "18"), ("0", "6")]


def test_embedded_sentences_are_measured_where_the_encoder_gets_them() -> None:
    folder = shared_data("bert_tiny_sst2_encoder")
    found = measuring.embedded(folder, longest=10)
    kept = pd.read_csv(TABLES / "embedded.csv")
    keys = ["sentence", "layer", "quantity"]
    both = found.merge(kept, on=keys, suffixes=("", "_kept"))
    assert len(both) == len(found) == 10
    assert len(kept) == 50
    assert np.allclose(both["lipschitz"], both["lipschitz_kept"], rtol=1e-3)
