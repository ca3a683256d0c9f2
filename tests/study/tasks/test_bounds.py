"""Bounds beside the measurements of a study: where, which, and why one is left out."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import howsmooth as hs
from howsmooth.bounds.catalogue import CATALOGUE
from howsmooth.study.tasks import bounds
from howsmooth.study.tasks.bounds import bound_site
from tests._selection import others_slow
from tests._study import contents_of, make_plan, make_tools, run
from tests._tiny_models import tiny


def test_the_first_sample_of_every_length_and_attention_is_bounded(study: Any) -> None:
    assert (study.outcome.made["bounds"], study.outcome.kept["bounds"]) == (27, 0)
    table, bounded = study.contents.bounds, study.work.bounded
    assert len(bounded) == len(set(bounded)) == 3 * (3 + 6)
    assert len(table) == 2 * len(bounded)
    assert (set(table["sample"]), set(table["radius"])) == ({0}, {7.5})
    above = table[table["name"] == "above"]
    assert above["holds"].all()
    assert (above["value"] == 1000.0 * (1 + above["layer"])).all()
    dear = table[table["name"] == "dear"]
    assert dear["value"].isna().all()
    assert set(dear["source"]) == {"needs more"}
    starts = {(row.n, row.start) for row in table.itertuples()}
    rows = study.contents.measurements.query("sample == 0")
    assert starts <= {(row.n, row.start) for row in rows.itertuples()}
    assert starts == {(n, first) for _, _, _, n, first in bounded}
    assert study.heard.phases[-1] == "Computing 27 tables of bounds"
    done, total, words = study.heard.told[-1]
    assert words.endswith(", bounds")
    assert done == pytest.approx(total)


def test_bounds_that_fail_are_recorded_and_tried_again(tmp_path: Path) -> None:
    tools, work = make_tools()

    def bound(site: Any, *, dear: bool) -> Any:
        if site.layer == 1:
            raise MemoryError("No room.")
        return tools.bound(site, dear=dear)

    def measure(function: Any, x: torch.Tensor, **options: Any) -> Any:
        if function.layer == 2:
            raise MemoryError("No room.")
        return tools.measure(function, x, **options)

    # Without keep_going too: the measurements are there, and can be reported.
    outcome = run(make_plan(), tmp_path / "a", replace(tools, bound=bound))
    assert (outcome.measured, outcome.failed, outcome.first_failure) == (45, 3, "No room.")
    failures = contents_of(tmp_path / "a").failures
    assert failures[["what", "layer", "n"]].to_numpy().tolist() == [["bounds", 1, n] for n in (2, 4, 8)]
    assert run(make_plan(), tmp_path / "a", tools, keep_going=True).failed == 0
    contents = contents_of(tmp_path / "a")
    assert contents.failures.empty
    assert len(contents.bounds) == 18
    # What was not measured is not bounded.
    work.bounded.clear()
    outcome = run(make_plan(), tmp_path / "b", replace(tools, measure=measure), keep_going=True)
    assert (outcome.measured, outcome.failed) == (30, 15)
    assert {layer for _, layer, *_ in work.bounded} == {0, 1}
    assert set(contents_of(tmp_path / "b").failures["what"]) == {"measurements"}


def test_the_dear_bounds_are_added_later_and_each_once(tmp_path: Path) -> None:
    tools, work = make_tools()

    def dear() -> list[str]:
        table = contents_of(tmp_path).bounds
        return sorted(set(table[table["name"] == "dear"]["source"]))

    def of(choice: str, **changes: Any) -> tuple[int, int, int]:
        outcome = run(make_plan(bounds=choice, **changes), tmp_path, tools)
        return outcome.made["bounds"], outcome.kept["bounds"], len(contents_of(tmp_path).bounds)

    assert of("none") == (0, 0, 0)
    assert (of("auto"), dear()) == ((9, 0, 18), [bounds.LEFT_OUT])
    assert of("auto") == (0, 9, 18)
    assert (of("all"), dear()) == ((9, 0, 18), ["needs more"])
    before = contents_of(tmp_path).bounds
    work.bounded.clear()
    assert [of(choice) for choice in ("auto", "all", "none")] == [(0, 9, 18), (0, 9, 18), (0, 0, 18)]
    assert not work.bounded
    of("all", lengths=(2, 4, 8, 16, 32))
    assert {n for *_, n, _ in work.bounded} == {16, 32}
    after = contents_of(tmp_path).bounds
    pd.testing.assert_frame_equal(after[after["n"] < 16].reset_index(drop=True), before)


# ---- which


@pytest.fixture(scope="module")
def sites() -> dict[tuple[str, str], Any]:
    """Sites of seven tokens, of encoders and decoders with and without rotary positions."""
    ids = torch.tensor([[5, 9, 13, 2, 40, 41, 7]])
    return {
        (name, scope): hs.capture(tiny(name), ids, layers=[1], scope=scope)[0]
        for name in ("bert", "gpt2", "llama")
        for scope in ("attention", "head")
    }


@pytest.mark.parametrize(
    ("name", "scope"),
    others_slow(
        itertools.product(["bert", "gpt2", "llama"], ["attention", "head"]),
        [("bert", "head"), ("gpt2", "attention"), ("llama", "attention")],
    ),
)
def test_the_bounds_are_those_of_the_table_and_hold(
    sites: dict[tuple[str, str], Any], name: str, scope: str
) -> None:
    site = sites[name, scope]
    radius, found = bound_site(site)
    table = hs.bounds.table(site)
    table = table[table["name"] != "measured"]
    names = {(one.name, one.side) for one in found}
    assert len(names) == len(found)
    assert names == {(row["name"], row["side"]) for _, row in table.iterrows()}
    assert radius == table.attrs["radius"]
    values = table.set_index(["name", "side"])
    x = site.x[0].double()
    f = site.map.to(dtype=torch.float64)
    norm = float(torch.linalg.matrix_norm(torch.func.jacrev(f)(x).reshape(-1, x.numel()), 2))
    computed = 0
    for one in found:
        if not one.holds:
            assert one.value is one.log_value is None
            assert one.source.startswith("left out") or "needs: " in one.source
            continue
        computed += 1
        line = values.loc[(one.name, one.side)]
        assert (one.value, one.source) == (line["value"], line["source"])
        assert one.log_value is not None
        assert math.isclose(math.exp(min(one.log_value, 700)), min(float(one.value or 0), math.exp(700)))
        if one.side == "upper":
            assert norm <= float(one.value or 0)
        elif one.quantity == "‖D_X f‖":
            assert norm >= float(one.value or 0)
    assert computed >= (1 if name == "llama" else 4)


def test_what_is_left_out_is_said_with_the_rule(
    sites: dict[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reasons(site: Any) -> dict[str, str]:
        return {one.name: one.source for one in bound_site(site)[1] if one.source.startswith("left out")}

    one, several = sites["bert", "head"], sites["bert", "attention"]
    assert (
        set(reasons(one))
        == set(reasons(several))
        == {"two_heavy_tokens_lower_bound", "heavy_token_lower_bound"}
    )
    most, cubic = bounds._MOST_TOKENS, "yudin_theorem_3"
    monkeypatch.setattr(bounds, "_MOST_TOKENS", dict.fromkeys(most, 6) | {cubic: most[cubic]})
    searches = {"two_heavy_tokens_lower_bound", "heavy_token_lower_bound"}
    assert set(reasons(one)) == {"certificate"} | searches
    assert "more than 6 tokens; howsmooth bound" in reasons(several)["certificate"]
    monkeypatch.setattr(bounds, "_MOST_TOKENS", dict.fromkeys(most, 6))
    assert "more than 6 tokens; howsmooth bound" in reasons(one)["yudin_theorem_3"]
    monkeypatch.setattr(bounds, "_MOST_TOKENS", dict.fromkeys(most, 7))
    assert "certificate" not in reasons(several)
    monkeypatch.setattr(bounds, "_MOST_TOKENS_IF_WIDE", 6)
    assert "certificate" not in reasons(several)  # of 24 dimensions
    monkeypatch.setattr(bounds, "_WIDE", 24)
    assert "more than 6 tokens in 24 or more dimensions" in reasons(several)["certificate"]
    assert "certificate" not in reasons(one)
    monkeypatch.undo()
    cheap = {bound.name: bound.source for bound in bound_site(several, dear=False)[1]}
    assert {name for name, source in cheap.items() if source == bounds.LEFT_OUT} == set(bounds._DEAR)


def test_what_cannot_be_bounded_says_so(
    sites: dict[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sites["gpt2", "head"]
    broken = replace(site, x=torch.full_like(site.x, 1e200) if site.x.dtype == torch.float64 else site.x)

    def overflow(*arguments: object) -> None:
        raise OverflowError

    monkeypatch.setitem(CATALOGUE, "theorem_4_3", replace(CATALOGUE["theorem_4_3"], formula=overflow))
    found = {one.name: one for one in bound_site(broken)[1]}
    assert found["theorem_4_3"].value is None
    assert found["theorem_4_3"].source == "OverflowError"
    assert found["certificate"].holds
    nothing = bound_site(replace(site, x=torch.full_like(site.x, torch.nan)))[1]
    assert [(one.name, one.holds) for one in nothing] == [("any", False)]
    assert nothing[0].source.startswith("X: expected finite numbers")


def test_the_norms_of_a_layer_serve_all_lengths_until_a_matrix_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = tiny("bert"), torch.tensor([[5, 9, 13, 2, 40, 41, 7]])
    value = model.encoder.layer[1].attention.self.value.weight.requires_grad_(False)
    value.mul_(3)  # the matrices of no other test
    norms: list[torch.Size] = []
    eigh = torch.linalg.eigh

    def counted(a: torch.Tensor) -> Any:
        norms.append(a.shape)
        return eigh(a)

    monkeypatch.setattr(torch.linalg, "eigh", counted)

    def bounded(n: int) -> list[Any]:
        site = hs.capture(model, ids[:, :n], layers=[1])[0]
        norms.clear()
        return bound_site(site, dear=False)[1]

    first = bounded(7)
    assert norms
    bounded(4)
    assert not norms
    value.mul_(2)
    twice = bounded(7)
    assert norms
    compared = [(one.value, other.value) for one, other in zip(first, twice, strict=True) if one.holds]
    assert len(compared) >= 3
    assert all(other == pytest.approx(2 * one, rel=1e-9) for one, other in compared)
