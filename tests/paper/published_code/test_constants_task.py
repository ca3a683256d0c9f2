"""``howsmooth measure --as-published``: rows, exponents, files, resuming and refusals."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest

from howsmooth.cli import main
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.paper.published_code import constants_task as published_task
from howsmooth.paper.published_code.constants_task import published_left
from howsmooth.study.exponents import compare
from howsmooth.study.plans import ModelSpec
from howsmooth.study.records import PublishedValue, quantities
from tests._documented import check_documented
from tests._study import (
    FakeModel,
    contents_of,
    digest,
    installed,
    make_plan,
    make_tools,
    published_of,
    published_stand_ins,
    run,
)

# ---- of a real model

# Short, since most of the time of a small run goes into a long text.
PROSE = "A map is smooth if what it gives moves no faster than what it takes, and that is measured. " * 12


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A command line without items, typed where its text is."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prose.txt").write_text(PROSE)
    with contextlib.chdir(folder):
        words = (
            "measure builtin-encoder --layers 0 --lengths 2,4,8 --samples 2 --text prose.txt --bounds none"
        )
        yield words.split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, command: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("published")
    words = ["--as-decoder", "--as-published", "all", "-q", "--out", str(folder)]
    assert main([*command, *words]) == 0
    return folder


def test_every_quantity_of_every_sequence_is_there(made: Path) -> None:
    contents = contents_of(made)
    rows = contents.published
    names = ["corrected", "only output", "only block", "only unmasked", "only stopping", "as published"]
    assert list(rows["quantity"][:6]) == names
    assert len(rows) == 6 * 3 * 2
    assert not rows.duplicated(["n", "sample", "quantity"]).any()
    last = rows[rows["quantity"] == "as published"]
    assert set(last["items"]) == {"output,block,unmasked,stopping"}
    without = rows["quantity"].isin(["only output", "only stopping", "as published"])
    assert rows["lower"].isna().equals(without)
    corrected = rows[rows["quantity"] == "corrected"]
    assert bool((corrected["lower"] <= corrected["lipschitz"]).all())
    assert corrected["map"].str.contains("causal").all()
    assert last["map"].str.contains("unmasked").all()
    # The corrected quantity is that of the study.
    both = corrected.merge(contents.measurements, on=["layer", "n", "sample"])
    assert len(both) == len(contents.measurements) == 6
    np.testing.assert_allclose(both["lipschitz_x"], both["lipschitz_y"], rtol=1e-12)
    for name in ("seed", "start"):
        assert (both[f"{name}_x"] == both[f"{name}_y"]).all()
    # With one item, it alone is what is published.
    assert quantities(("output",)) == {"corrected": (), "as published": ("output",)}


def test_exponents_are_fitted_and_shown_and_the_same_command_repeats_nothing(
    made: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (made / "published.csv").read_bytes()
    capsys.readouterr()
    assert main([*command, "--as-decoder", "--as-published", "all", "--out", str(made)]) == 0
    out = capsys.readouterr().out
    assert "only unmasked" in out
    assert "0 measurements made" in out
    assert (made / "published.csv").read_bytes() == before
    table = pd.read_csv(made / "published-exponents.csv").set_index("quantity")
    assert len(table) == 6
    rows = contents_of(made).published
    mine = rows[rows["quantity"] == "as published"]
    slope = np.polyfit(np.log(mine["n"]), np.log(mine["lipschitz"]), 1)[0]
    line = table.loc["as published"]
    assert line["slope"] == pytest.approx(slope, abs=1e-9)
    assert line["low"] < slope < line["high"]
    corrected = rows[rows["quantity"] == "corrected"]
    ratio = np.median(mine["lipschitz"].to_numpy() / corrected["lipschitz"].to_numpy())
    assert line["ratio"] == pytest.approx(ratio, rel=1e-9)
    assert table.loc["corrected", "ratio"] == 1
    # The file holds the rows of the store.
    empty = {"lower": [""], "upper": [""]}
    written = pd.read_csv(made / "published.csv", keep_default_na=False, na_values=empty)
    assert list(written.columns) == list(PublishedValue.columns())
    pd.testing.assert_frame_equal(written, rows.drop(columns="run"), rtol=1e-15, check_dtype=False)


def test_refusals_before_anything_is_measured(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--as-published", "dropout,unmasked", "--out", str(tmp_path / "out")]) == 2
    assert "'unmasked': it is not an encoder run as a decoder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---- what is compared


def test_unconverged_constants_are_not_fitted_and_published_values_are() -> None:
    n = np.array([2, 4, 8, 16])
    base = {
        "model": "m", "text": "t", "layer": 0, "sample": 0, "steps": 1, "radius_mean": 1.0, "start": 0,
        "seed": 0, "map": "",
    }  # fmt: skip
    rows = [
        {**base, "n": int(k), "quantity": name, "items": items, "lipschitz": value, "lower": lower,
         "upper": lower, "settled": settled}
        for k in n
        for name, items, value, lower, settled in (
            ("corrected", "", k**0.5 if k < 16 else 100.0, 1.0, k < 16),
            ("as published", "output", float(k), np.nan, False),
        )
    ]  # fmt: skip
    table = compare(pd.DataFrame(rows)[list(PublishedValue.columns())]).set_index("quantity")
    assert table["slope"].to_dict() == pytest.approx({"corrected": 0.5, "as published": 1.0})
    assert table["n_points"].to_dict() == {"corrected": 3, "as published": 4}


# ---- on the runner, with stand-ins: three layers, three lengths, five samples, and by default two items


@pytest.fixture
def stand_ins() -> Iterator[None]:
    with published_stand_ins():
        yield


def changed(change: Callable[[Any, tuple[str, ...], Any], Any]) -> Any:
    """Let ``change`` see each layer, its items and what was measured, and say what is measured."""
    real = published_task.measure_layer
    return patch.object(
        published_task, "measure_layer", lambda one, items, **o: change(one, items, real(one, items, **o))
    )


def go(folder: Path, items: list[str] | None = None, **options: Any) -> Any:
    plan = make_plan(bounds="none", lengths=options.pop("lengths", (2, 4, 8)))
    outcome = run(plan, folder, make_tools()[0], beside=[published_left(items)], **options)
    return outcome.made["published"], outcome.kept["published"], outcome


TOTAL = 3 * 3 * 5 * 4


def test_items_added_later_measure_only_what_is_missing(stand_ins: None, tmp_path: Path) -> None:
    run(make_plan(lengths=(2, 16), bounds="none"), tmp_path, make_tools()[0])
    go(tmp_path, ["output"], lengths=(4, 16))
    seen: list[tuple[str, ...]] = []

    def see(one: Any, items: tuple[str, ...], found: Any) -> Any:
        seen.append(items)
        return found

    with changed(see):
        made, kept, _ = go(tmp_path, ["output", "stopping"], lengths=(4, 16))
    # The corrected ones were there; "as published" with one item is another quantity than with two.
    assert (made, kept) == (2 * 3 * 5 * 3, 2 * 3 * 5)
    assert set(seen) == {("output",), ("stopping",), ("output", "stopping")}
    assert len(published_of(tmp_path)) == 2 * 3 * 5 * 5
    # They are of the sequences of the constants.
    contents = contents_of(tmp_path)
    both = contents.published.merge(contents.measurements, on=["model", "text", "layer", "n", "sample"])
    assert set(both["n"]) == {4, 16}
    assert (both["start_x"] == both["start_y"]).all()


def test_what_fails_is_recorded_and_made_good(stand_ins: None, tmp_path: Path) -> None:
    calls: dict[tuple[int, tuple[str, ...]], int] = {}

    def fail(one: Any, items: tuple[str, ...], found: Any) -> Any:
        # The second time that a layer is measured is the second of three lengths.
        key = (one.attention.layer, items)
        calls[key] = calls.get(key, 0) + 1
        if key == (1, ("output",)) and calls[key] == 2:
            raise CaptureError("Not today.")
        if key == (2, ()) and calls[key] == 3:
            found.value[0] = np.nan
        return found

    with changed(fail):
        made, _, outcome = go(tmp_path, keep_going=True)
    assert (made, outcome.failed, outcome.first_failure) == (TOTAL - 2 * 5 * 4, 10, "Not today.")
    failures = contents_of(tmp_path).failures
    assert set(failures["what"]) == {"published"}
    assert set(zip(failures["layer"], failures["n"], strict=True)) == {(1, 4), (2, 8)}
    assert failures["error"].str.contains("expected a finite value, got nan").sum() == 5
    assert go(tmp_path, keep_going=True)[:2] == (40, TOTAL - 40)
    assert contents_of(tmp_path).failures.empty


def test_a_model_to_which_an_item_does_not_apply_stops_no_other(stand_ins: None, tmp_path: Path) -> None:
    models = {"small": FakeModel(), "other": FakeModel(fingerprint=digest("other"))}
    plan = make_plan(models=(ModelSpec("small"), ModelSpec("other")), lengths=(2,), bounds="none")
    applying, asked = published_task.items_that_apply, []

    def first_not(layer: Any, items: Any = None, **options: Any) -> tuple[str, ...]:
        asked.append(layer)
        if len(asked) == 1:
            raise ArgumentError("as-published", expected="items that apply", got="'block'")
        return applying(layer, items, **options)

    with patch.object(published_task, "items_that_apply", first_not):
        tools = make_tools(models=models)[0]
        outcome = run(plan, tmp_path, tools, beside=[published_left(None)], keep_going=True)
    assert (outcome.made["published"], outcome.failed) == (3 * 5 * 4, 1)
    assert "got 'block'" in outcome.first_failure
    assert {row[0] for row in published_of(tmp_path)} == {"other"}
    assert outcome.measured == 30


# ---- a plan file


def test_a_plan_file_asks_for_published_values_too(
    stand_ins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'models = "small"\ntexts = "prose"\nlengths = [2, 4]\nsamples = 1\nbounds = "none"\nlayers = 0\n'
        'scopes = ["attention", "head"]\nheads = 1\nas_published = ["output", "stopping"]\nout = "out"\n'
    )
    for counts in ({"made": 8, "kept": 0, "in_store": 8}, {"made": 0, "kept": 8, "in_store": 8}):
        with installed(make_tools()[0]):
            assert main(["measure", "--plan", str(plan), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        check_documented("measure", found)
        assert {name: found["published"][name] for name in counts} == counts
