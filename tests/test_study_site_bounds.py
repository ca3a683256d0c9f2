"""Bounds beside the measurements of a study: where, which, and why one is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import howsmooth as hs
from howsmooth.cli import main
from howsmooth.study import publish as publishing
from howsmooth.study import site_bounds
from howsmooth.study.progress import Progress
from howsmooth.study.run import run
from howsmooth.study.site_bounds import bound_site, bounded_lengths
from howsmooth.study.status import status
from howsmooth.study.store import Contents, Store
from tests._study import make_plan, make_tools
from tests._tiny_models import tiny


def contents_of(folder: Path) -> Contents:
    with Store.open(folder, write=False) as store:
        return store.contents()


@pytest.mark.parametrize(
    ("lengths", "picked"),
    [((8,), (8,)), ((8, 2), (2, 8)), ((2, 4, 6), (2, 4, 6)), (tuple(range(2, 101, 2)), (2, 52, 100))],
)
def test_three_lengths_are_bounded(lengths: tuple[int, ...], picked: tuple[int, ...]) -> None:
    assert bounded_lengths(lengths) == picked


def test_the_first_sample_of_three_lengths_of_every_attention_is_bounded(tmp_path: Path) -> None:
    tools, work = make_tools()
    lengths = (2, 3, 4, 5, 8)
    told: list[Progress] = []
    plan = make_plan(scopes=("attention", "head", "block", "residual"), lengths=lengths)
    run(plan, tmp_path, tools, on_progress=told.append)
    contents = contents_of(tmp_path)
    table = contents.bounds
    assert len(work.bounded) == len(set(work.bounded)) == 3 * (3 + 6)
    assert len(table) == 2 * len(work.bounded)
    assert set(table["n"]) == {2, 4, 8}
    assert set(table["sample"]) == {0}
    assert set(table["scope"]) == {"attention", "head"}
    assert set(table["radius"]) == {7.5}
    above = table[table["name"] == "above"]
    assert above["holds"].all()
    assert (above["value"] == 1000.0 * (1 + above["layer"])).all()
    dear = table[table["name"] == "dear"]
    assert dear["value"].isna().all()
    assert set(dear["source"]) == {"left out"}
    starts = {(row.n, row.start) for row in table.itertuples()}
    rows = contents.measurements.query("sample == 0")
    assert starts <= {(row.n, row.start) for row in rows.itertuples()}
    assert starts == {(n, first) for _, _, _, n, first in work.bounded}
    assert [one.bounding for one in told] == sorted(one.bounding for one in told)
    assert told[-1].bounding
    assert told[-1].cost_done == pytest.approx(told[-1].cost_planned)


def test_bounds_are_added_once_and_can_be_left_out(tmp_path: Path) -> None:
    tools, work = make_tools()
    run(make_plan(bounds=False), tmp_path, tools)
    assert contents_of(tmp_path).bounds.empty
    outcome = run(make_plan(), tmp_path, tools)
    assert (outcome.measured, outcome.kept) == (0, 45)
    before = contents_of(tmp_path)
    assert len(before.bounds) == 2 * 9
    assert len(before.runs) == 2
    work.bounded.clear()
    run(make_plan(), tmp_path, tools)
    assert work.bounded == []
    run(make_plan(lengths=(2, 4, 8, 16, 32)), tmp_path, tools)  # 8 is the median, 32 the longest
    assert {n for *_, n, _ in work.bounded} == {32}
    after = contents_of(tmp_path).bounds
    kept = after[after["n"] < 32].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, before.bounds)


def test_bounds_that_fail_are_recorded_and_tried_again(tmp_path: Path) -> None:
    tools, _ = make_tools()

    def bound(site: Any) -> Any:
        if site.layer == 1:
            raise MemoryError("No room.")
        return tools.bound(site)

    # Without keep_going too: the measurements are there, and can be reported.
    outcome = run(make_plan(), tmp_path, replace(tools, bound=bound))
    assert (outcome.measured, outcome.failed, outcome.first_failure) == (45, 3, "No room.")
    failures = contents_of(tmp_path).failures
    assert set(failures["what"]) == {"bounds"}
    assert failures["n"].tolist() == [2, 4, 8]
    assert set(failures["layer"]) == {1}
    found = status(make_plan(), ["prose"], tmp_path)
    assert [(part.done, part.failed) for part in found.parts] == [(45, 0)]
    assert found.reasons == (("No room.", 3),)
    assert run(make_plan(), tmp_path, tools, keep_going=True).failed == 0
    contents = contents_of(tmp_path)
    assert contents.failures["resolved"].notna().all()
    assert len(contents.bounds) == 18


def test_what_was_not_measured_is_not_bounded(tmp_path: Path) -> None:
    tools, work = make_tools()

    def measure(function: Any, x: torch.Tensor, **options: Any) -> Any:
        if function.layer == 1:
            raise MemoryError("No room.")
        return tools.measure(function, x, **options)

    outcome = run(make_plan(), tmp_path, replace(tools, measure=measure), keep_going=True)
    assert (outcome.measured, outcome.failed) == (30, 15)
    assert {layer for _, layer, *_ in work.bounded} == {0, 2}
    assert set(contents_of(tmp_path).failures["what"]) == {"measurement"}


def test_a_run_that_is_stopped_goes_on_with_the_bounds(tmp_path: Path) -> None:
    tools, work = make_tools()

    def bound(site: Any) -> Any:
        if len(work.bounded) == 4:
            raise KeyboardInterrupt
        return tools.bound(site)

    with pytest.raises(KeyboardInterrupt):
        run(make_plan(), tmp_path, replace(tools, bound=bound))
    assert len(contents_of(tmp_path).bounds) == 2 * 4
    run(make_plan(), tmp_path, tools)
    assert len(work.bounded) == len(set(work.bounded)) == 9


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


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("scope", ["attention", "head"])
def test_the_bounds_are_those_of_the_table_and_hold(
    sites: dict[tuple[str, str], Any], name: str, scope: str
) -> None:
    site = sites[name, scope]
    found = bound_site(site)
    table = hs.bounds.table(site)
    table = table[table["name"] != "measured"]
    names = {(one.name, one.side) for one in found.bounds}
    assert len(names) == len(found.bounds)
    assert names == {(row["name"], row["side"]) for _, row in table.iterrows()}
    assert found.radius == table.attrs["radius"]
    values = table.set_index(["name", "side"])
    x = site.x[0].double()
    f = site.map.to(dtype=torch.float64)
    norm = float(torch.linalg.matrix_norm(torch.func.jacrev(f)(x).reshape(-1, x.numel()), 2))
    computed = 0
    for one in found.bounds:
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
        return {one.name: one.source for one in bound_site(site).bounds if one.source.startswith("left out")}

    one, several = sites["bert", "head"], sites["bert", "attention"]
    assert set(reasons(one)) == set(reasons(several)) == {"tie", "no_real_eigenvalue"}
    monkeypatch.setattr(site_bounds, "_MOST_TOKENS", 6)
    slow = {"certificate_n", "certificate_r", "certificate_cheap", "three_terms"}
    assert set(reasons(one)) == slow | {"tie", "no_real_eigenvalue"}
    assert "more than 6 tokens; howsmooth bound" in reasons(several)["certificate_joint"]
    monkeypatch.setattr(site_bounds, "_MOST_TOKENS_IF_CUBIC", 6)
    assert "more than 6 tokens; howsmooth bound" in reasons(one)["yudin"]
    monkeypatch.setattr(site_bounds, "_MOST_TOKENS_IF_CUBIC", 7)
    monkeypatch.setattr(site_bounds, "_MOST_TOKENS", 7)
    assert "certificate_joint" not in reasons(several)
    monkeypatch.setattr(site_bounds, "_MOST_TOKENS_IF_WIDE", 6)
    assert "certificate_joint" not in reasons(several)  # of 24 dimensions
    monkeypatch.setattr(site_bounds, "_WIDE", 24)
    assert "more than 6 tokens in 24 or more dimensions" in reasons(several)["certificate_joint"]
    assert "certificate_r" not in reasons(one)


def test_what_cannot_be_bounded_says_so(
    sites: dict[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sites["gpt2", "head"]
    broken = replace(site, x=torch.full_like(site.x, 1e200) if site.x.dtype == torch.float64 else site.x)

    def overflow(*arguments: object) -> None:
        raise OverflowError

    monkeypatch.setattr("howsmooth.bounds.statements.theorem_4_3", overflow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overflow, "__name__", "theorem_4_3")
        found = {one.name: one for one in bound_site(broken).bounds}
    assert found["theorem_4_3"].value is None
    assert found["theorem_4_3"].source == "OverflowError"
    assert found["certificate_r"].holds
    nothing = bound_site(replace(site, x=torch.full_like(site.x, torch.nan))).bounds
    assert [(one.name, one.holds) for one in nothing] == [("any", False)]
    assert nothing[0].source.startswith("X: expected finite numbers")


def test_the_command_leaves_bounds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "draw_all", lambda *_: [])
    monkeypatch.setattr("howsmooth.study.tools.default_tools", lambda: make_tools()[0])
    command = ["measure", "small", "--text", "prose", "--lengths", "2,4", "--samples", "2", "-q"]
    assert main([*command, "--no-bounds", "--out", str(tmp_path / "a")]) == 0
    assert contents_of(tmp_path / "a").bounds.empty
    assert main([*command, "--out", str(tmp_path / "b")]) == 0
    assert len(contents_of(tmp_path / "b").bounds) == 2 * 2 * 3
