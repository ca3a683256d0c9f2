"""The page "What we found": its numbers are those of its tables, and the tables are what they say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import howsmooth as hs
from howsmooth.study.plan import ModelSpec
from howsmooth.texts import load_text
from tests._shared import script, shared_data

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "what-we-found.md").read_text(encoding="utf-8")
TABLES = ROOT / "docs" / "_static" / "what-we-found"


page = script("scripts/what_we_found_page.py")
measuring = script("scripts/what_we_found.py")


def attention() -> pd.DataFrame:
    return pd.read_csv(TABLES / "attention.csv")


def test_the_page_is_what_the_tables_give() -> None:
    assert page.fill(PAGE) == PAGE
    assert page.fill(PAGE.replace("as published | ", "as published | 9")) == PAGE


def test_counts_of_the_answer() -> None:
    fits = attention()
    for words, quantity in (("**Corrected**", "corrected"), ("**As published**", "as published")):
        of = fits[fits["quantity"] == quantity]
        found = re.search(rf"- {re.escape(words)}, (\d+) fits .* and (\d+) are within 0\.03 of it\. ", PAGE)
        assert found is not None
        assert int(found[1]) == len(of)
        assert int(found[2]) == (of["slope"].between(0.22, 0.28)).sum()
        counts = re.search(rf"- {re.escape(words)}.* interval of (\d+), and refused in (\d+) by Holm", PAGE)
        assert counts is not None
        assert int(counts[1]) == ((of["low"] <= 0.25) & (of["high"] >= 0.25)).sum()
        # Holm: from the smallest p on, refuse while p times the number left is at most 5 %
        refused = 0
        for p in sorted(of["quarter"]):
            if p * (len(of) - refused) > 0.05:
                break
            refused += 1
        assert int(counts[2]) == refused
    right = fits[fits["quantity"] == "corrected"]
    growth = re.search(r"grows with \$n\$ in (\d+) of (\d+) fits .* in (\d+) of (\d+) \(below", PAGE)
    assert growth is not None
    counts = [(right["low"] > 0).sum(), len(right), (right["high"] < 0.5).sum(), len(right)]
    assert [int(one) for one in growth.groups()] == counts


def test_what_the_page_says_in_words() -> None:
    fits = attention()
    fits["inside"] = (fits["low"] <= 0.25) & (fits["high"] >= 0.25)
    right = fits[fits["quantity"] == "corrected"]
    there = fits[fits["quantity"] == "as published"]
    # "most of their intervals leave out 1/4", "slower than √n in nearly every layer", "between 0.1 and 0.3"
    assert right["inside"].mean() < 0.3
    assert (right["low"] > 0).mean() > 0.9
    assert (right["high"] < 0.5).mean() > 0.9
    assert right["slope"].between(0.1, 0.3).mean() > 0.6
    # "differ by several times their errors", within one model and on one text
    for _, of in right[~right["model"].str.contains("capp|gpt2")].groupby(["model", "text"]):
        assert of["slope"].max() - of["slope"].min() > 1.5 * ((of["high"] - of["low"]) / 4).median()
    # "most of the middle layers of all-MiniLM-L6-v2" on Alice
    minilm = right[(right["model"] == "all-MiniLM-L6-v2") & (right["text"] == "alice")]
    assert minilm[minilm["layer"].between(1, 4)]["inside"].sum() >= 3
    # "There the corrected and the published exponents also agree best"
    place = ["model", "text", "layer"]
    apart = (right.set_index(place)["slope"] - there.set_index(place)["slope"]).abs()
    assert apart.groupby("model").median().idxmin() == "all-MiniLM-L6-v2"
    # "most exponents are close to 1/4, and in the post-norm models trained here all of them are"
    assert ((there["slope"] - 0.25).abs() < 0.04).mean() > 0.6
    own = there[there["model"].str.startswith("builtin-encoder")]
    assert ((own["slope"] - 0.25).abs() < 0.03).all()
    refused = page.holm(there["quarter"])
    assert refused.mean() > 0.5  # "refused for more than half of them"
    # "output is what makes the difference": the published exponent moves as with output alone
    item = {name: of.set_index(["model", "text", "layer"])["slope"] for name, of in fits.groupby("quantity")}
    moved = {name: (slope - item["corrected"]).abs().median() for name, slope in item.items()}
    assert moved["only output"] > 2 * moved["only block"]
    assert moved["only stopping"] < 0.005


def test_what_the_page_says_of_adversarial_tokens() -> None:
    found = pd.read_csv(TABLES / "slices.csv")
    assert found["converged"].all()
    wide = found.pivot_table("lipschitz", ["model", "radius", "n"], "tokens", aggfunc="median")
    for (_, radius), of in wide.groupby(["model", "radius"]):
        growth = of.xs(392, level="n").iloc[0] / of.xs(12, level="n").iloc[0]
        if radius < 100:
            assert growth["wrong slices"] < 1.5
        root = (392 / 12) ** 0.5
        assert growth["own"] > (0.6 if radius == 15.5 else 0.9) * root
    largest = found[found["radius"] == 100].groupby(["model", "tokens"])["lipschitz"].max().unstack()
    assert (largest["wrong slices"] > 5 * largest["own"]).all()


def test_what_the_page_says_of_residuals() -> None:
    scopes = pd.read_csv(TABLES / "scopes.csv")
    assert scopes["slope"].notna().all()
    assert set(scopes["scope"]) == {"head", "head (median)", "heads", "attention", "residual", "block"}
    middle = scopes.groupby(["model", "scope"])["slope"].median().unstack()
    for model in ("capp_gpt", "gpt2 (random init)"):
        assert middle.loc[model, "residual"] < 0.3 * middle.loc[model, "attention"]


def test_what_the_page_says_of_whole_models() -> None:
    found = pd.read_csv(TABLES / "whole.csv")
    assert found["converged"].all()
    assert (found["lower"] <= found["lipschitz"]).all()
    unit = 10.0 ** (np.floor(np.log10(found["upper"])) - 4)  # of the last digit in the table
    assert (found["upper"] - found["lower"] <= 1e-3 * found["lipschitz"] + unit).all()
    assert not found.duplicated(["model", "n", "sample"]).any()
    assert set(found["model"]) == set(page.MODELS)
    of_text = {}
    for model, of in found.groupby("model"):
        assert set(of.groupby("n").size()) == {3 if "gpt2" in model else 5}
        assert set(of["text"]) == {"parts" if model == "capp_gpt" else "alice"}
        if model not in ("capp_gpt", "gpt2 (random init)"):
            of_text[model] = stats.linregress(np.log(of["n"]), np.log(of["lipschitz"]))
    assert len(of_text) == 5
    for fit in of_text.values():
        assert 2 * fit.stderr < fit.slope < 0.5 - 2 * fit.stderr
    slopes = [fit.slope for fit in of_text.values()]
    assert max(slopes) - min(slopes) > 2 * max(fit.stderr for fit in of_text.values())
    parts = found[found["model"] == "capp_gpt"]
    assert stats.linregress(np.log(parts["n"]), np.log(parts["lipschitz"])).slope > 0.5


def test_what_the_page_says_of_depth() -> None:
    found = pd.read_csv(TABLES / "depth.csv")
    assert found.filter(regex="_converged").fillna(value=True).all(axis=None)
    ratios = {}
    for model, of in found.groupby("model"):
        until, last = of.set_index("stage")["until"], of.iloc[-1]
        assert np.allclose(of["own"].cumprod(), of["product"], rtol=1e-3)
        assert np.allclose(of["until"] / of["product"], of["ratio"], rtol=1e-3)
        ratios[model] = 1 / last["ratio"]
        half = until[f"block {(until.index.str.startswith('block').sum() - 1) // 2}"]
        if model == "capp_gpt":
            assert until.iloc[-1] > 10 * until.iloc[-2]
        else:
            assert half > 0.4 * last["until"]
    assert 60 < min(ratios.values()) < 70
    assert 310_000 < max(ratios.values()) < 330_000
    assert max(ratios, key=lambda model: ratios[model]) == "all-MiniLM-L6-v2"
    # The measurement of depth is one of those of the lengths, or lies among them.
    whole = pd.read_csv(TABLES / "whole.csv").groupby(["model", "n"])["lipschitz"].agg(["min", "max"])
    for model, of in found.groupby("model"):
        least, most = whole.loc[(model, of["n"].iloc[0])]
        assert 0.5 * least < of["until"].iloc[-1] < 2 * most


def test_fits_are_consistent_in_themselves() -> None:
    fits = attention()
    inside = (fits["low"] <= 0.25) & (fits["high"] >= 0.25)
    assert (inside == (fits["quarter"] >= 0.05)).all()
    assert ((fits["low"] < fits["slope"]) & (fits["slope"] < fits["high"])).all()
    assert fits["note"].isna().all()
    assert (fits[fits["quantity"] == "corrected"]["ratio"] == 1).all()
    # One fit for each layer, text and quantity, and no layer left out
    assert not fits.duplicated(["model", "text", "layer", "quantity"]).any()
    layers = fits.groupby(["model", "text"])["layer"].agg(lambda found: sorted(set(found)))
    expected = {"stories260k": 5, "all-MiniLM-L6-v2": 6}
    for (model, text), found in layers.items():
        of_gpt2 = [0, 6, 11] if text == "alice" else [6]
        assert found == (of_gpt2 if "gpt2" in model else list(range(expected.get(model, 4))))


def test_slopes_agree_with_the_medians() -> None:
    """A fit through nine medians is another estimate of the same exponent."""
    fits, middle = attention(), pd.read_csv(TABLES / "medians.csv")
    differences = []
    known = fits.set_index(["model", "text", "layer", "quantity"])["slope"]
    for place, of in middle.groupby(["model", "text", "layer"]):
        for quantity in ("corrected", "as published"):
            slope = np.polyfit(np.log(of["n"]), np.log(of[quantity]), 1)[0]
            differences.append(abs(slope - known[(*place, quantity)]))
    assert np.median(differences) < 0.02
    assert max(differences) < 0.15


def test_holm_steps_down_and_stops() -> None:
    # .005 · 4, .01 · 3 and .015 · 2 are below .05, though .015 · 4 is not
    assert list(page.holm(pd.Series([0.01, 0.9, 0.015, 0.005]))) == [True, False, True, True]
    # .03 · 2 is not, so .04 · 1 is not looked at
    assert list(page.holm(pd.Series([0.01, 0.04, 0.03, 0.005]))) == [True, False, False, True]


def test_the_picture_has_every_exponent() -> None:
    fits = attention()
    fits = fits[fits["quantity"].isin(["corrected", "as published"])]
    figure = page.forest(dark=False)
    drawn = [
        x for axis in figure.axes for container in axis.containers for x in container.lines[0].get_xdata()
    ]
    assert np.allclose(sorted(drawn), sorted(fits["slope"]))
    for name in ("light", "dark"):
        assert (TABLES / f"exponents-{name}.png").stat().st_size > 10_000
        assert f"exponents-{name}.png" in PAGE


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


def test_parts_are_sequences_of_the_models_own_language(tmp_path: Path) -> None:
    folder = measuring.with_own_words(shared_data("capp_gpt"), tmp_path)
    measuring.write_parts(folder, tmp_path / "parts.txt", count=20)
    tokens = hs.load_model(str(folder)).tokenizer.encode(load_text(str(tmp_path / "parts.txt")).content)
    start, end = 49, 51
    assert max(tokens) < 52
    assert tokens.count(start) == tokens.count(end) == 20
    ends = [-1, *(place for place, token in enumerate(tokens) if token == end)]
    # six properties, in the order of the model's inputs, before each start
    for place in ends[:-1]:
        assert tokens[place + 7] == start
        assert sorted(tokens[place + 1 : place + 7]) == tokens[place + 1 : place + 7]
    assert torch.tensor(tokens).max() > start


def test_embedded_sentences_are_measured_where_the_encoder_gets_them() -> None:
    folder = shared_data("bert_tiny_sst2_encoder")
    found = measuring.embedded(folder, longest=10)
    kept = pd.read_csv(TABLES / "embedded.csv")
    keys = ["sentence", "layer", "quantity"]
    both = found.merge(kept, on=keys, suffixes=("", "_kept"))
    assert len(both) == len(found) == 10
    assert len(kept) == 50
    assert np.allclose(both["lipschitz"], both["lipschitz_kept"], rtol=1e-3)
