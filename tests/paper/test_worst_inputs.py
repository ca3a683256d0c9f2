"""The experiment of the worst inputs, on tiny models, against dense Jacobians of the models' own weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from howsmooth.attention import SelfAttention
from howsmooth.errors import ArgumentError
from howsmooth.paper import worst_inputs as worst_inputs
from howsmooth.paper.figure_definition import choose_figures
from howsmooth.paper.worst_inputs import side_by_side
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import FigureRow, Measurement
from howsmooth.study.store import Store
from tests._figures import (
    BERT,
    GPT2,
    LLAMA,
    asked,
    bert_head,
    counting,
    dense_norm,
    measured,
    never,
    quick,
    shown,
)
from tests._tiny_models import tiny

(WORST_INPUTS,) = choose_figures(["figure-2"])
ATTACKED = {
    "lengths": (4, 40),
    "layers": Ranges.parse("1", "layers"),
    "samples": 1,
    "texts": ("prose",),
    "search": True,
}


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Attack the ball of the model's own tokens only, with few starts."""
    with quick():
        yield


@pytest.fixture(scope="module")
def attacked(_quick: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, Path]:
    """What was found in two models, and the folder."""
    folder = tmp_path_factory.mktemp("attacked")
    options = asked(BERT, GPT2, as_published=True, **ATTACKED)
    return measured(WORST_INPUTS, folder, options), folder


def units(folder: Path) -> pd.DataFrame:
    with Store.open(folder, write=False) as store:
        kept = [row for row, _ in store.rows(FigureRow)]
    return pd.DataFrame([{**json.loads(row.unit), **json.loads(row.numbers)} for row in kept])


def _clusters(query: Tensor, key: Tensor, bias: Tensor, radius: float, n: int) -> list[Tensor]:
    """The paper's tokens for u and for −u, from numpy's eigenvectors; a bias is what tells them apart."""
    a = (key.T @ query / math.sqrt(len(key))).numpy()
    values, vectors = np.linalg.eig(a)
    real = np.flatnonzero(np.abs(values.imag) < 1e-9)
    low, high = real[values[real].real.argmin()], real[values[real].real.argmax()]
    half = values[high].real / 8 >= -values[low].real
    u = torch.from_numpy(vectors[:, high if half else low].real.copy())
    u = radius * u / u.norm()
    light = 0.5 if half else -1.0
    return [torch.stack([sign * u, *[light * sign * u] * (n - 1)]) for sign in (1, -1)]


def _root(head: SelfAttention, x: Tensor) -> float:
    """The root of |Jᵀ f(X)|, which the published iteration gives."""
    image, pull_back = torch.func.vjp(head, x)
    return float(pull_back(image)[0].norm()) ** 0.5


def _check(value: float, of: Callable[..., float], head: SelfAttention, tokens: list[Tensor]) -> None:
    assert min(abs(value / of(head, x) - 1) for x in tokens) < 1e-4


def test_the_papers_tokens_have_the_constant_of_the_dense_jacobian(
    attacked: tuple[pd.DataFrame, Path],
) -> None:
    with Store.open(attacked[1], write=False) as store:
        table = store.table(Measurement)
    longest = float(table.loc[table["model"] == "bert", "radius_max"].max())
    rows = units(attacked[1])
    rows = rows[rows["model"] == "bert"]
    assert set(rows["ball"]) == {repr(longest)}
    assert "wrong slices" not in set(rows["kind"])
    part = tiny("bert").encoder.layer[1].attention.self
    for h in (0, 2):
        query, key, value, bias = bert_head(1, h)
        shift = part.value.bias[6 * h : 6 * (h + 1)].detach().double()
        head = SelfAttention(
            query[None], key[None], value[None], query_bias=bias[None], value_bias=shift[None]
        )
        own = rows[(rows["head"] == h) & (rows["n"] == 4)]
        tokens = _clusters(query, key, bias, longest, 4)
        _check(own[own["kind"] == "paper"]["value"].item(), dense_norm, head, tokens)
        _check(own[own["kind"] == "as published"]["value"].item(), _root, head, tokens)


def test_the_published_tokens_of_gpt2_are_those_of_rows_instead_of_columns(
    attacked: tuple[pd.DataFrame, Path],
) -> None:
    rows, radius = units(attacked[1]), attacked[0].set_index("model").loc["gpt2", "R"].iloc[0]
    fused = tiny("gpt2").h[1].attn.c_attn
    weight, bias = fused.weight.detach().double(), fused.bias.detach().double()
    columns = [weight[:, 24 * part : 24 * (part + 1)] for part in range(3)]
    for h in (0, 3):
        place = slice(6 * h, 6 * (h + 1))
        query, key, value = (part[:, place].T for part in columns)
        head = SelfAttention(
            query[None], key[None], value[None], query_bias=bias[place][None],
            value_bias=bias[48:][place][None], causal=True,
        )  # fmt: skip
        of = (rows["model"] == "gpt2") & (rows["head"] == h) & (rows["n"] == 4)
        own = rows[of & rows["kind"].isin(["paper", "wrong slices", "as published"])].set_index("kind")[
            "value"
        ]
        wrong = _clusters(columns[0][place], columns[1][place], bias[place], radius, 4)
        _check(own["wrong slices"], dense_norm, head, wrong)
        _check(own["paper"], dense_norm, head, _clusters(query, key, bias[place], radius, 4))
        _check(own["as published"], _root, head, wrong)
        assert abs(own["wrong slices"] / own["paper"] - 1) > 1e-3


def test_bounds_and_constants_are_in_order(attacked: tuple[pd.DataFrame, Path]) -> None:
    rows = units(attacked[1])
    for _, part in rows[rows["head"] == 0].groupby(["model", "ball", "n"]):
        of = part.groupby("kind")
        upper = of.get_group("upper")["log_value"].item()
        found, paper = (of.get_group(kind).set_index("head")["value"][0] for kind in ("search", "paper"))
        assert paper * (1 - 1e-3) <= found
        assert math.log(found) <= upper
        assert upper <= of.get_group("theirs")["log_value"].item()


def test_the_worst_inputs_are_drawn_and_told(attacked: tuple[pd.DataFrame, Path]) -> None:
    finding = shown(WORST_INPUTS, *attacked)
    table = finding.tables[0][1]
    assert table["n"].tolist() == [4, 40] * 2
    # Beyond the model's positions there is no text, but the map is the same.
    assert table["text, median"].isna().tolist() == [False, True] * 2
    assert (table["largest found"] <= table["at most"]).all()
    assert (table["largest found"] >= table["paper's tokens"]).all()
    assert len(finding.pictures) == 2
    assert len(finding.seen) == 4
    ratios = table["largest found"] / table["at most"]
    for place, words in ((0, finding.seen[0]), (2, finding.seen[2])):
        low, high = sorted(ratios[place : place + 2])
        assert f"and is {low:.3g} to {high:.3g} times howsmooth's upper bound" in words
    assert "Theorem E.3" in table
    assert "as published: the published iteration" in finding.seen[1]
    assert "sliced along the wrong axis" in finding.seen[3]


def test_lengths_size_the_search_and_an_interruption_keeps_finished_balls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worst_inputs, "RADII", (5.0,))
    options = asked(BERT, **ATTACKED | {"lengths": (4,)})
    whole = measured(WORST_INPUTS, tmp_path / "whole", options, counting(calls := []))
    planned = len(calls)
    assert units(tmp_path / "whole")["ball"].nunique() == len(whole) == 2
    with pytest.raises(KeyboardInterrupt):
        measured(WORST_INPUTS, tmp_path / "part", options, counting([], stop=planned - 1))
    kept = units(tmp_path / "part")
    assert set(kept[kept["kind"] == "search"]["ball"]) == {"5.0"}
    again = measured(WORST_INPUTS, tmp_path / "part", options, counting(calls := []))
    assert len(calls) == 1  # at the worst tokens found in the other ball
    pd.testing.assert_frame_equal(whole, again)


def test_what_did_not_converge_is_left_out_and_counted() -> None:
    rows = pd.DataFrame(
        [
            (8, "paper", "two_cluster", 0, 3.0, True),
            (8, "paper", "two_cluster", 1, 5.0, True),
            (8, "paper", "two_cluster", 2, 99.0, False),
            (8, "search", "atoms", 1, 77.0, False),
            (8, "search", "two_heavy_tokens", 1, 7.0, True),
            (8, "search", "of another head", 0, 50.0, True),
            (8, "upper", "a", 0, None, None),
            (8, "theirs", "theorem_3_3", 0, None, None),
        ],
        columns=["n", "kind", "name", "head", "value", "converged"],
    ).assign(log_value=[math.nan] * 6 + [3.0, 4.0])
    text = pd.DataFrame({"head": [0, 1], "lipschitz": [1.0, 2.0]})
    row = side_by_side(rows, text, 1)
    assert (row["paper"], row["paper median"], row["paper high"]) == (5.0, 4.0, 5.0)
    assert (row["found"], row["found by"]) == (7.0, "two_heavy_tokens")
    assert (row["text median"], row["text own"], row["text high"]) == (1.5, 2.0, 2.0)
    assert row["unsettled"] == 2
    assert math.isnan(row["wrong slices"])


def test_what_was_asked_for_last_is_shown_of_what_was_measured(
    attacked: tuple[pd.DataFrame, Path], tmp_path: Path
) -> None:
    found, folder = attacked
    kept, before = units(folder), found[found["model"] == "bert"]
    rows = measured(WORST_INPUTS, folder, asked(BERT, **ATTACKED), never)
    pd.testing.assert_frame_equal(units(folder), kept)
    assert rows["as published"].isna().all()
    published = ["wrong slices", "as published", "unsettled"]
    pd.testing.assert_frame_equal(rows.drop(columns=published), before.drop(columns=published))
    # Without a search the paper's tokens are shown alone.
    rows = measured(WORST_INPUTS, folder, asked(BERT, **ATTACKED | {"search": False}), never)
    same = ["paper", "paper median", "text median", "upper", "theirs"]
    pd.testing.assert_frame_equal(rows[same], before[same])
    finding = shown(WORST_INPUTS, rows, tmp_path)
    assert "largest found" not in finding.tables[0][1]
    assert "found" not in finding.seen[0]
    ratio = (rows["paper"] / np.exp(rows["upper"])).sort_values()
    assert f"is {ratio.iloc[0]:.3g} to {ratio.iloc[1]:.3g} times howsmooth's upper bound" in finding.seen[0]
    # A constant that no larger radius raises is told.
    for factor, saturated in ((1.001, True), (1.1, False)):
        both = pd.concat([before, before.assign(R=2 * before["R"], paper=factor * before["paper"])])
        said = " ".join(shown(WORST_INPUTS, both, tmp_path).seen)
        assert ("at the paper's tokens has saturated: from R = " in said) == saturated


def test_rotary_heads_have_the_search_the_text_and_the_bound(
    tmp_path: Path,
) -> None:
    options = asked(LLAMA, **ATTACKED | {"lengths": (4, 40)})
    rows = measured(WORST_INPUTS, tmp_path, options)
    assert rows["n"].tolist() == [4]  # rotary positions are known for the model's lengths alone
    assert rows["paper"].isna().all()
    assert rows["theorem"].isna().all()
    assert (rows["found"] >= rows["text own"]).all()
    assert (np.log(rows["found"]) <= rows["upper"]).all()
    finding = shown(WORST_INPUTS, rows, tmp_path)
    assert "the paper's tokens" not in " ".join(finding.seen)
    assert "times howsmooth's upper bound" in finding.seen[0]
    with pytest.raises(ArgumentError, match="lengths of at most"):
        measured(WORST_INPUTS, tmp_path, asked(LLAMA, **ATTACKED | {"lengths": (40,)}))
