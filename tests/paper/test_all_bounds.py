from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch

from howsmooth.bounds import diameter_upper_bound, norm_radius
from howsmooth.errors import HowsmoothError
from howsmooth.models import Site, capture
from howsmooth.paper import all_bounds as all_bounds
from howsmooth.paper.bound_ratios import AS_CODED, KINDS, bound_table, bound_words
from howsmooth.paper.figure_definition import choose_figures
from howsmooth.paper.published_code import c_3_as_coded
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.measurement_run import run
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.ranges import Ranges
from howsmooth.study.store import Store
from tests._cases import dense_jacobian
from tests._figures import BERT, GPT2, LLAMA, Told, measured, shown, tiny_library

(ALL_BOUNDS,) = choose_figures(["bounds"])

Bounded = tuple[pd.DataFrame, list[Site], Path, Told]


def asked(*models: ModelSpec, **changes: Any) -> FigureOptions:
    values: dict[str, Any] = {"models": models or (BERT, GPT2), "texts": ("prose",), "lengths": (3, 6)}
    return FigureOptions(**(values | changes))


@pytest.mark.slow
def test_of_a_masked_model_too_no_bound_is_violated(tmp_path: Path) -> None:
    rows = measured(ALL_BOUNDS, tmp_path, asked(GPT2, lengths=(6,)))
    assert set(zip(rows["layer"], rows["masking"], strict=True)) == {(2, "causal")}
    assert "none of them was violated" in bound_words(rows)[0]


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Bounded:
    folder, told = tmp_path_factory.mktemp("bounds"), Told()
    sites: list[Site] = []

    def noted(*arguments: Any, **named: Any) -> list[Site]:
        sites.extend(found := capture(*arguments, **named))
        return found

    with patch("howsmooth.models.capture", noted):
        options = asked(BERT, lengths=(6,), as_published=True)
        found = measured(ALL_BOUNDS, folder, options, told=told)
    places = found[["model", "layer", "scope", "head", "text", "n"]].drop_duplicates()
    assert places[["model", "layer"]].drop_duplicates().to_numpy().tolist() == [["bert", 0]]
    assert places["head"].fillna(-1).tolist() == [0, 1, 2, 3, -1]  # heads, and all together
    # The last of each place: others were captured before, to see whether they can be.
    last = {(site.name, site.scope, site.head): site for site in sites if site.x.shape[1] == 6}
    return found, list(last.values()), folder, told


def test_the_measured_constant_is_the_norm_of_the_dense_jacobian(bounded: Bounded) -> None:
    rows, sites, *_ = bounded
    checked = 0
    for site in sites:
        if site.head not in (None, 1):
            continue
        true = float(
            torch.linalg.matrix_norm(dense_jacobian(site.map.to(dtype=torch.float64), site.x[0].double()), 2)
        )
        mine = rows[(rows["n"] == 6) & (rows["scope"] == site.scope)]
        mine = mine[(mine["lower"] - true).abs() < 1e-5 * true]
        assert len(mine) > 3
        assert (mine["lower"] <= true * (1 + 1e-9)).all()
        assert (mine["upper"] >= true * (1 - 1e-9)).all()
        # What is said to hold does.
        local = mine[(mine["quantity"] == "‖D_X f‖") & mine["holds"] & (mine["side"] == "upper")]
        assert len(local)
        assert (local["log_value"] >= math.log(true) - 1e-9).all()
        checked += 1
    assert checked == 2


def test_bounds_are_those_of_the_library_at_these_tokens_and_this_ball(bounded: Bounded) -> None:
    rows, sites, *_ = bounded
    heads = [site for site in sites if site.scope == "head"]
    assert len(heads) == 4
    for site in heads:
        f, x = site.map.to(dtype=torch.float64), site.x[0].double()
        there = rows[(rows["head"] == site.head) & (rows["n"] == 6)]
        values = {"diameter_upper_bound": diameter_upper_bound(f, x).value, AS_CODED: c_3_as_coded(f, x)}
        for name, value in values.items():
            logs = there.loc[there["name"] == name, "log_value"]
            assert (logs - math.log(value)).abs().min() < 1e-9
        assert site.norm is not None
        assert (there["radius"] - norm_radius(site.norm)).abs().min() < 1e-9


def test_the_sequences_are_those_of_a_study(tmp_path: Path, bounded: Bounded) -> None:
    plan = Plan((BERT,), ("prose",), lengths=(6,), samples=1, layers=Ranges.parse("0", "layers"))
    with tiny_library():
        run(plan, tmp_path)
    with Store.open(tmp_path, write=False) as store:
        theirs = store.contents().measurements
    ours = bounded[0]
    ours = ours[(ours["model"] == "bert") & (ours["scope"] == "attention")]
    for row in theirs.itertuples():
        mine = ours[(ours["text"] == row.text) & (ours["n"] == row.n)]
        assert mine["lower"].iloc[0] == pytest.approx(row.lipschitz, rel=2e-4)


def test_the_same_again_measures_nothing(bounded: Bounded, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _, folder, told = bounded
    assert told.shares[-1] == 1
    monkeypatch.setattr(all_bounds, "table", None)
    again = measured(ALL_BOUNDS, folder, asked(BERT, lengths=(6,), as_published=True))
    pd.testing.assert_frame_equal(rows, again)
    without = measured(ALL_BOUNDS, folder, asked(BERT, lengths=(6,)))
    pd.testing.assert_frame_equal(without, rows[rows["name"] != AS_CODED])


def test_of_wide_models_all_heads_together_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, str]] = []

    def noted(scope: str, seed: int, sites: list[Site]) -> list[dict[str, Any]]:
        found.extend((site.x.shape[1], scope) for site in sites)
        return made_up().drop(columns=["model", "layer", "scope", "text", "n"]).to_dict("records")

    monkeypatch.setattr(all_bounds, "WIDE", 24)
    monkeypatch.setattr(all_bounds, "_rows", noted)
    measured(ALL_BOUNDS, tmp_path, asked(BERT, texts=("prose", "other")))
    assert [key for key in found if key[1] == "attention"] == [(3, "attention")]
    assert len(found) == 1 + 4 * 4  # of each text and length, each head


def test_heads_with_rotary_positions_are_bounded_without_the_published_formula(tmp_path: Path) -> None:
    options = asked(LLAMA, lengths=(3,), as_published=True)
    rows = measured(ALL_BOUNDS, tmp_path, options)
    assert {"certificate", "any_scores_ball_upper_bound"} <= set(rows["name"])
    assert AS_CODED not in set(rows["name"])
    assert "none of them was violated" in bound_words(rows)[0]


def test_what_cannot_be_bounded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HowsmoothError):
        measured(ALL_BOUNDS, tmp_path, asked(BERT, lengths=(3, 10_000)))
    assert not list(tmp_path.iterdir())


def made_up(**changes: Any) -> pd.DataFrame:
    """Two heads with a bound each way; ratios 2 and 8, 4, and 0.5."""
    common = {
        "source": "A theorem", "model": "m", "layer": 0, "scope": "head", "text": "t", "n": 8,
        "lower": 1.0, "upper": 1.0, "quantity": "q",
    }  # fmt: skip
    rows = [
        common | {"head": head, "name": name, "side": kind.split()[1], "kind": kind, "holds": holds,
                  "log_value": math.log(value), "log_ratio": math.log(value)}
        for head, name, kind, value, holds in (
            (0, "certificate", "local upper", 2.0, True),
            (1, "certificate", "local upper", 8.0, True),
            (0, "theorem_3_3", "ball upper", 16.0, True),
            (1, "theorem_3_3", "ball upper", 0.1, False),
            (0, "two_heavy_tokens_lower_bound", "ball lower", 0.5, True),
        )
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(**changes)


def test_the_words_and_the_table_follow_the_numbers() -> None:
    table = bound_table(made_up()).set_index("bound")
    assert list(table.index) == ["certificate", "Theorem 3.3", "two heavy tokens lower bound"]
    assert (table.loc["Theorem 3.3", "cases"], table.loc["Theorem 3.3", "holds in"]) == (2, 1)
    ratios = ["least ratio", "median ratio", "largest ratio"]
    assert table.loc["certificate", ratios].to_list() == pytest.approx([2, 4, 8])
    assert bound_table(made_up(holds=False))["median ratio"].isna().all()
    first, second = bound_words(made_up())
    assert first.startswith("3 bounds ")
    for words in ("certificate, 4 (2 to 8)", "Theorem 3.3, 16 (16 to 16)", "lower bound, 0.5 (0.5 to 0.5)"):
        assert words in second
    # Of the published code, the formula is none.
    rows = made_up()
    rows.loc[0, ["name", "holds", "log_value", "log_ratio"]] = [AS_CODED, False, math.log(0.5), math.log(0.5)]
    assert "lies below the measured constant in 1 of 1 cases" in bound_words(rows)[-1]
    # Bounds without a logarithm are no number.
    rows = made_up()
    rows.loc[4, ["log_value", "log_ratio"]] = -math.inf
    rows.loc[0, ["log_value", "log_ratio"]] = math.inf
    assert "inf" not in " ".join(bound_words(rows)[1:])
    table = bound_table(rows).set_index("bound")
    assert table.loc["two heavy tokens lower bound", "median ratio"] == 0
    assert table.loc["certificate", ["least ratio", "largest ratio"]].to_list() == pytest.approx(
        [8, math.inf]
    )


@pytest.mark.parametrize(
    ("lower", "words"),
    [(1.0, "none of them was"), (3.0, "1 of them was"), (9.0, "2 of them were"), (20.0, "3 of them were")],
)
def test_a_violated_bound_would_be_said(lower: float, words: str) -> None:
    assert f"{words} violated" in bound_words(made_up(lower=lower))[0]


def test_the_tightest_is_the_smallest_upper_and_the_largest_lower_bound() -> None:
    rows = made_up()
    above, below = (
        rows.iloc[[0, 1]].assign(name="yudin_theorem_3"),
        rows.iloc[[4]].assign(name="equal_tokens_lower_bound"),
    )
    above["log_ratio"] += 1
    below["log_ratio"] -= 1
    words = bound_words(pd.concat([above, below, rows], ignore_index=True))[1]
    assert "upper bounds at the tokens certificate" in words
    assert "lower bounds over the ball two heavy tokens lower bound" in words


def test_the_pictures_and_the_published_formula(bounded: Bounded) -> None:
    found, _, folder, _ = bounded
    said = shown(ALL_BOUNDS, found, folder)
    assert [one.pdf.name for one in said.pictures] == ["bounds-head.pdf", "bounds-attention.pdf"]
    assert "none of them was violated" in said.seen[0]
    assert "as coded" in " ".join(said.tables[0][1]["bound"])
    assert set(said.tables[0][1]["of"]) <= set(KINDS.values())
    every = said.tables[1][1]
    assert np.isfinite(every.loc[every["holds"] & (every["side"] == "upper"), "log_value"]).all()
