"""``howsmooth measure --as-published``: rows, exponents, files, resuming and refusals."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from howsmooth.cli import main
from howsmooth.errors import CaptureError
from howsmooth.published import ITEMS
from howsmooth.study import publish as publishing
from howsmooth.study import published_run, published_tables
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.published_rows import PUBLISHED_COLUMNS, quantities, read_rows
from howsmooth.study.published_tables import compare
from howsmooth.study.ranges import Ranges
from howsmooth.study.run import run
from howsmooth.study.store import Store
from howsmooth.study.tools import default_tools

MODEL = ["measure", "builtin-encoder", "--as-decoder", "--layers", "0"]
SMALL = [*MODEL, "--lengths", "2,4,8", "--samples", "2", "--text", "prose.txt", "--as-published"]
PLAN = Plan(
    models=(ModelSpec("builtin-encoder", as_decoder=True),),
    texts=("prose.txt",),
    lengths=(2, 4, 8),
    samples=2,
    layers=Ranges.parse("0", "layers"),
)
# Short, since most of the time of a small run goes into a long text.
PROSE = "A map is smooth if what it gives moves no faster than what it takes, and that is measured. " * 12


@pytest.fixture(scope="module", autouse=True)
def _in_a_folder_with_prose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prose.txt").write_text(PROSE)
    with contextlib.chdir(folder):
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, _in_a_folder_with_prose: None) -> Path:
    folder = tmp_path_factory.mktemp("published")
    assert main([*SMALL, "all", "-q", "--out", str(folder)]) == 0
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in err if line.startswith("error: ")]) == 1
    return err[-1]


def test_every_quantity_of_every_sequence_is_there(made: Path) -> None:
    rows = read_rows(made)
    names = ["corrected", "only output", "only block", "only unmasked", "only stopping", "as published"]
    assert list(rows["quantity"][:6]) == names
    assert len(rows) == 6 * 3 * 2
    assert not rows.duplicated(["n", "sample", "quantity"]).any()
    last = rows[rows["quantity"] == "as published"]
    assert set(last["items"]) == {"output,block,unmasked,stopping"}
    assert (
        rows["lower"].isna().equals(rows["quantity"].isin(["only output", "only stopping", "as published"]))
    )
    corrected = rows[rows["quantity"] == "corrected"]
    assert bool((corrected["lower"] <= corrected["lipschitz"]).all())
    assert corrected["map"].str.contains("causal").all()
    assert last["map"].str.contains("unmasked").all()


def test_the_corrected_quantity_is_that_of_the_study(made: Path, tmp_path: Path) -> None:
    assert main([*SMALL[:-1], "-q", "--out", str(tmp_path)]) == 0
    study = pd.read_csv(tmp_path / "measurements.csv").set_index(["n", "sample"])
    rows = read_rows(made)
    mine = rows[rows["quantity"] == "corrected"].set_index(["n", "sample"])
    assert len(mine) == len(study) == 6
    np.testing.assert_allclose(mine["lipschitz"].sort_index(), study["lipschitz"].sort_index(), rtol=1e-12)
    assert list(mine["seed"].sort_index()) == list(study["seed"].sort_index())


def test_the_same_command_repeats_nothing_and_another_length_adds_to_it(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(made, folder)
    before = (folder / "published.csv").read_bytes()
    assert main([*SMALL, "all", "--json", "--out", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["measured"], found["kept"]) == (0, 36)
    assert (folder / "published.csv").read_bytes() == before
    longer = ["4,16" if word == "2,4,8" else word for word in SMALL]
    assert main([*longer, "all", "--json", "--out", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["measured"], found["kept"]) == (12, 12)
    old, new = read_rows(made), read_rows(folder)
    assert len(new) == 48
    pd.testing.assert_frame_equal(new[new["n"] < 16].reset_index(drop=True), old)


def test_the_exponents_are_fitted_for_all_and_shown(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pd.read_csv(made / "published-exponents.csv")
    assert len(table) == 6
    rows = read_rows(made)
    mine = rows[rows["quantity"] == "as published"]
    slope = np.polyfit(np.log(mine["n"]), np.log(mine["lipschitz"]), 1)[0]
    line = table.set_index("quantity").loc["as published"]
    assert line["slope"] == pytest.approx(slope, abs=1e-9)
    assert line["low"] < slope < line["high"]
    corrected = rows[rows["quantity"] == "corrected"]
    ratio = np.median(mine["lipschitz"].to_numpy() / corrected["lipschitz"].to_numpy())
    assert line["ratio"] == pytest.approx(ratio, rel=1e-9)
    assert table.set_index("quantity").loc["corrected", "ratio"] == 1
    for kind in ("png", "pdf"):
        assert len(list((made / "figures").glob(f"published-*.{kind}"))) == 1
    capsys.readouterr()
    assert main([*SMALL, "all", "--out", str(made)]) == 0
    out = capsys.readouterr().out
    assert "only unmasked" in out
    assert "36 were there already" in out


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
    table = compare(pd.DataFrame(rows)[list(PUBLISHED_COLUMNS)]).set_index("quantity")
    assert table["slope"].to_dict() == pytest.approx({"corrected": 0.5, "as published": 1.0})
    assert table["n_points"].to_dict() == {"corrected": 3, "as published": 4}


def test_one_item_is_not_measured_twice() -> None:
    assert quantities(("output",)) == {"corrected": (), "as published": ("output",)}
    assert list(quantities(tuple(ITEMS))) == [
        "corrected",
        *(f"only {item}" for item in ITEMS),
        "as published",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--as-published", "tangent"], "expected all, or some of output, block"),
        (["--as-published", "dropout,unmasked"], "'unmasked': it is not an encoder run as a decoder"),
        (["--as-published", "all", "--scope", "block"], "expected attention together with --as-published"),
    ],
)
def test_refusals_before_anything_is_measured(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["measure", "builtin-encoder", "--lengths", "2,4", "--samples", "1", "--text", "prose.txt"]
    command += [*arguments, "--out", str(out)]
    assert words in refusal(capsys, *command)
    assert not out.exists()


def test_rows_of_other_settings_texts_or_versions_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(made, folder)
    out = ["--out", str(folder)]
    assert "made with seed 0, not 1" in refusal(capsys, *SMALL, "all", "--seed", "1", *out)
    other = tmp_path / "prose.txt"
    other.write_text(PROSE + "And more.")
    changed = [str(other) if word == "prose.txt" else word for word in SMALL]
    assert "its text 'prose' has SHA-256" in refusal(capsys, *changed, "all", *out)
    (folder / "published.json").write_text("{}")  # as the first version left it, beside published.csv
    before = (folder / "published.csv").read_bytes()
    assert "of an earlier howsmooth" in refusal(capsys, *SMALL, "all", *out)
    assert (folder / "published.csv").read_bytes() == before


def test_an_interrupted_run_keeps_its_rows_and_goes_on(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = published_run.measure_layer, 0

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:  # within the second of three lengths
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(published_run, "measure_layer", interrupted)
        assert main([*SMALL, "all", "-q", "--out", str(tmp_path)]) == 130
    assert "12 of 36 measurements are kept" in capsys.readouterr().err
    assert len(read_rows(tmp_path)) == 12
    assert main([*SMALL, "all", "-q", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "published.csv").read_bytes() == (made / "published.csv").read_bytes()


def test_two_processes_do_not_write_one_store(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "held"
    shutil.copytree(made, folder)
    before = read_rows(made)
    with Store.open(folder):
        assert "in use by another howsmooth process" in refusal(capsys, *SMALL, "all", "--out", str(folder))
    pd.testing.assert_frame_equal(read_rows(folder), before)


def test_the_file_holds_the_rows_of_the_store(made: Path) -> None:
    empty = {"lower": [""], "upper": [""]}
    rows = pd.read_csv(made / "published.csv", keep_default_na=False, na_values=empty)
    assert list(rows.columns) == list(PUBLISHED_COLUMNS)
    pd.testing.assert_frame_equal(rows, read_rows(made), rtol=1e-15)


def test_measurements_and_published_values_share_a_folder_and_its_sequences(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "draw_all", lambda *_: [])
    monkeypatch.setattr(published_tables, "draw_published", lambda *_: [])
    folder = tmp_path / "both"
    shutil.copytree(made, folder)
    # A length that one of them measured has the same sequences for the other, whichever comes first.
    run(replace(PLAN, lengths=(2, 16), bounds=False), folder, default_tools(), command="howsmooth measure")
    command = [*SMALL, "output", "-q", "--out", str(folder)]
    assert main(["4,16" if word == "2,4,8" else word for word in command]) == 0
    with Store.open(folder, write=False) as store:
        contents = store.contents()
    assert len(contents.measurements) == 4
    both = contents.published.merge(contents.measurements, on=["model", "text", "layer", "n", "sample"])
    assert set(both["n"]) == {2, 16}
    assert (both["start_x"] == both["start_y"]).all()
    right = both[both["quantity"] == "corrected"]
    np.testing.assert_allclose(right["lipschitz_x"], right["lipschitz_y"], rtol=1e-12)
    assert contents.runs["command"].str.contains("--as-published").tolist() == [True, False, True]
    assert (folder / "report.html").exists()


def test_items_added_later_measure_only_what_is_missing(made: Path, tmp_path: Path) -> None:
    assert main([*SMALL, "output", "-q", "--out", str(tmp_path)]) == 0
    assert len(read_rows(tmp_path)) == 2 * 6
    calls: list[tuple[str, ...]] = []
    real = published_run.measure_layer

    def counted(layer: Any, items: Any, **keywords: Any) -> Any:
        calls.append(tuple(items))
        return real(layer, items, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_run, "measure_layer", counted)
        assert main([*SMALL, "all", "-q", "--out", str(tmp_path)]) == 0
    assert () not in calls  # the corrected ones were there
    assert len(calls) == 3 * 5
    keys = ["n", "sample", "quantity", "items"]
    mine, theirs = (one.set_index(keys)["lipschitz"] for one in (read_rows(tmp_path), read_rows(made)))
    assert len(mine) == 36 + 6  # "as published" with one item is another quantity than with four
    pd.testing.assert_series_equal(mine[mine.index.isin(theirs.index)].sort_index(), theirs.sort_index())


def test_what_fails_is_recorded_and_made_good(made: Path, tmp_path: Path) -> None:
    real = published_run.measure_layer

    def failing(layer: Any, items: Any, **keywords: Any) -> Any:
        if layer.attention.x.shape[1] == 4 and "output" in items:
            raise CaptureError("Not today.")
        found = real(layer, items, **keywords)
        if layer.attention.x.shape[1] == 8:
            found.value[0] = np.nan
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_run, "measure_layer", failing)
        outcome = published_run.run_as_published(PLAN, None, tmp_path, default_tools(), keep_going=True)
    assert (outcome.measured, outcome.failed, outcome.first_failure) == (12, 4, "Not today.")
    with Store.open(tmp_path, write=False) as store:
        failures = store.failures()
    assert set(failures["what"]) == {"published"}
    assert failures["n"].tolist() == [4, 4, 8, 8]
    assert failures["error"].str.contains("expected a finite value, got nan").sum() == 2
    assert set(read_rows(tmp_path)["n"]) == {2}
    outcome = published_run.run_as_published(PLAN, None, tmp_path, default_tools(), keep_going=True)
    assert (outcome.measured, outcome.kept, outcome.failed) == (24, 12, 0)
    with Store.open(tmp_path, write=False) as store:
        assert store.failures()["resolved"].notna().all()
    pd.testing.assert_frame_equal(read_rows(tmp_path), read_rows(made))


def test_a_model_to_which_an_item_does_not_apply_stops_no_other(tmp_path: Path) -> None:
    plan = Plan(
        models=(ModelSpec("builtin-decoder"), ModelSpec("builtin-encoder")), texts=("prose.txt",),
        lengths=(2,), samples=1, layers=Ranges.parse("0", "layers"),
    )  # fmt: skip
    outcome = published_run.run_as_published(plan, ["block"], tmp_path, default_tools(), keep_going=True)
    assert (outcome.measured, outcome.failed) == (2, 1)
    assert "'block': its layers are not post-norm" in outcome.first_failure
    assert set(read_rows(tmp_path)["model"]) == {"builtin-encoder"}


def planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a plan of two models with published values; nothing will be drawn."""
    monkeypatch.setattr(publishing, "draw_all", lambda *_: [])
    monkeypatch.setattr(published_tables, "draw_published", lambda *_: [])
    (folder / "prose.txt").write_text(PROSE)
    plan = folder / "plan.toml"
    plan.write_text(
        'models = [{name = "builtin-encoder", layers = 0}, {name = "builtin-decoder", layers = -1}]\n'
        'texts = ["prose.txt"]\nlengths = [2, 4]\nsamples = 1\nbounds = false\n'
        'scopes = ["attention", "head"]\nheads = 1\nas_published = "all"\nout = "out"\n'
    )
    return plan


def parts(plan: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[int | None, int]]:
    """Return what is planned and done of published values, model by model."""
    capsys.readouterr()
    assert main(["study", str(plan), "--status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return [(part["planned"], part["done"]) for part in found["parts"] if part["scope"] == "as published"]


def test_a_plan_file_asks_for_published_values_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path, monkeypatch)
    assert parts(plan, capsys) == [(None, 0), (None, 0)]
    assert main(["study", str(plan)]) == 0
    out = capsys.readouterr().out
    assert "8 measurements made" in out
    assert "18 published values" in out
    rows = read_rows(tmp_path / "out")
    assert rows.groupby("model")["quantity"].count().to_dict() == {
        "builtin-decoder": 8,
        "builtin-encoder": 10,
    }
    assert (tmp_path / "out" / "published-exponents.csv").exists()

    assert parts(plan, capsys) == [(2, 2), (2, 2)]
    assert main(["study", str(plan), "--resume", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["published"] == {"measured": 0, "kept": 18, "failed": 0, "in_store": 18}
    assert found["measurements"]["measured"] == 0
    # Other items are other values.
    plan.write_text(plan.read_text().replace('"all"', '["block", "stopping"]'))
    assert parts(plan, capsys) == [(2, 0), (2, 0)]
    plan.write_text(plan.read_text().replace('["block", "stopping"]', '"output,stopping"'))
    assert parts(plan, capsys) == [(2, 0), (2, 2)]  # all that the decoder has


@pytest.mark.slow
def test_items_of_a_plan_file_that_some_or_all_models_have_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path, monkeypatch)
    plan.write_text(plan.read_text().replace('"all"', '["block", "stopping"]'))
    assert parts(plan, capsys) == [(None, 0), (None, 0)]
    assert main(["study", str(plan), "-q"]) == 3
    assert "'block': its layers are not post-norm" in capsys.readouterr().err
    assert parts(plan, capsys) == [(2, 2), (2, 0)]
    # Items that no model has are refused before anything is measured.
    plan.write_text(plan.read_text().replace("block", "unmasked").replace('"out"', '"other"'))
    assert "'unmasked': it is not an encoder run as a decoder" in refusal(capsys, "study", str(plan))
    assert not (tmp_path / "other").exists()


def test_stores_of_published_values_alone_are_merged(made: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_tables, "draw_published", lambda *_: [])
        assert main(["study", "--merge", str(made), "--out", str(merged)]) == 0
    pd.testing.assert_frame_equal(read_rows(merged), read_rows(made))
    assert (merged / "published.csv").read_bytes() == (made / "published.csv").read_bytes()
    assert not (merged / "report.html").exists()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "out")
    assert "expected a " in refusal(capsys, *SMALL, "output", "--out", out)
