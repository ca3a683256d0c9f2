"""What fails is recorded, tried again, and never taken for a result; the rest goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from howsmooth.errors import CaptureError, ModelError, NonFiniteError, StoreError, TextError
from howsmooth.study.measurement_outputs import write_outputs
from howsmooth.study.plans import ModelSpec
from howsmooth.study.store import Store
from tests._study import (
    FakeModel,
    Heard,
    Tools,
    contents_of,
    digest,
    make_plan,
    make_tools,
    rows_of,
    run,
    words,
)


def failures_of(folder: Path) -> pd.DataFrame:
    return contents_of(folder).failures


def whole(folder: Path, **changes: Any) -> set[tuple[Any, ...]]:
    run(make_plan(**changes), folder, make_tools()[0])
    return rows_of(folder)


def with_bad_measure(bad: Any, error: Exception) -> Tools:
    """Tools whose estimate fails for a layer, length and first token that ``bad`` says yes to."""
    tools, _ = make_tools()

    def measure(function: Any, x: torch.Tensor, **options: Any) -> Any:
        if any(bad(function.layer, x.shape[1], int(first)) for first in x[:, 0, 0]):
            raise error
        return tools.measure(function, x, **options)

    return replace(tools, measure=measure)


def test_one_layer_fails_and_the_rest_goes_on(tmp_path: Path) -> None:
    error = NonFiniteError("X", expected="finite values", got="nan")
    tools = with_bad_measure(lambda layer, n, first: layer == 1 and n == 4, error)
    heard = Heard()
    outcome = run(make_plan(bounds="none"), tmp_path, tools, keep_going=True, listener=heard)
    assert (outcome.measured, outcome.failed) == (40, 5)
    assert outcome.first_failure == "X: expected finite values, got nan."
    assert heard.told[-1][0] == pytest.approx(heard.told[-1][1])
    assert {(row[4 - 1], row[5]) for row in rows_of(tmp_path)} == {
        (k, n) for k in range(3) for n in (2, 4, 8)
    } - {(1, 4)}
    table = failures_of(tmp_path)
    assert table["sample"].tolist() == [0, 1, 2, 3, 4]
    assert set(table["layer"]) == {1}
    assert set(table["n"]) == {4}
    assert set(table["kind"]) == {"NonFiniteError"}
    assert table["happened"].str.startswith("20").all()
    assert table["detail"].str.contains("in measure").all()


def test_what_failed_is_tried_again_and_resolved(tmp_path: Path) -> None:
    tools = with_bad_measure(lambda layer, n, first: layer == 1, MemoryError())
    run(make_plan(), tmp_path / "a", tools, keep_going=True)
    assert set(failures_of(tmp_path / "a")["error"]) == {"no reason given"}
    run(make_plan(), tmp_path / "a", tools, keep_going=True)
    assert len(failures_of(tmp_path / "a")) == 15  # tried again, failed again: the latest is kept
    outcome = run(make_plan(), tmp_path / "a", make_tools()[0], keep_going=True)
    assert (outcome.measured, outcome.there, outcome.failed) == (15, 30, 0)
    assert rows_of(tmp_path / "a") == whole(tmp_path / "b")
    assert failures_of(tmp_path / "a").empty
    assert run(make_plan(), tmp_path / "a", make_tools()[0]).measured == 0


def test_one_sample_does_not_spoil_the_others_of_its_batch(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole")
    victim = next(row for row in sorted(expected, key=str) if row[3] == 2 and row[5] == 8)
    tools = with_bad_measure(
        lambda layer, n, first: (layer, n, first) == (2, 8, victim[7]),
        NonFiniteError("X", expected="e", got="g"),
    )
    outcome = run(make_plan(), tmp_path / "a", tools, keep_going=True)
    assert (outcome.measured, outcome.failed) == (44, 1)
    assert rows_of(tmp_path / "a") == expected - {victim}
    assert failures_of(tmp_path / "a")[["layer", "n", "sample"]].iloc[0].tolist() == [2, 8, victim[6]]


def test_a_layer_that_cannot_be_captured(tmp_path: Path) -> None:
    tools, _ = make_tools()

    def capture(*arguments: Any, layers: list[int], **options: Any) -> Any:
        if 0 in layers:
            raise CaptureError("layer 0 is strange.")
        return tools.capture(*arguments, layers=layers, **options)

    outcome = run(make_plan(), tmp_path, replace(tools, capture=capture), keep_going=True)
    assert (outcome.measured, outcome.failed) == (30, 3)
    table = failures_of(tmp_path)
    assert table[["layer", "n"]].to_numpy().tolist() == [[0, 2], [0, 4], [0, 8]]
    assert table["sample"].isna().all()
    run(make_plan(), tmp_path, make_tools()[0], keep_going=True)
    assert failures_of(tmp_path).empty


def test_a_model_that_cannot_be_loaded_stops_no_other(tmp_path: Path) -> None:
    plan = make_plan(models=(ModelSpec("missing"), ModelSpec("small"), ModelSpec("short")))
    models = {"small": FakeModel(), "short": FakeModel(max_length=4, fingerprint=digest("short"))}
    outcome = run(plan, tmp_path, make_tools(models=models)[0], keep_going=True)
    assert (outcome.measured, outcome.failed) == (45, 2)
    table = failures_of(tmp_path)
    assert table["model"].tolist() == ["missing", "short"]
    assert table["text"].isna().tolist() == [True, False]
    assert table["kind"].tolist() == ["ModelError", "ArgumentError"]
    models |= {"missing": FakeModel(fingerprint=digest("found")), "short": FakeModel()}
    outcome = run(plan, tmp_path, make_tools(models=models)[0], keep_going=True)
    assert (outcome.measured, outcome.there, outcome.failed) == (90, 45, 0)
    assert failures_of(tmp_path).empty


def test_a_model_that_changed_is_tried_once_only(tmp_path: Path) -> None:
    models = {"small": FakeModel(), "other": FakeModel(fingerprint=digest("other"))}

    def change(calls: int) -> None:
        models["other"] = FakeModel(fingerprint=digest("changed"))

    tools, _ = make_tools(models=models, before_measure=change)
    plan = make_plan(models=(ModelSpec("small"), ModelSpec("other")))
    outcome = run(plan, tmp_path, tools, keep_going=True)
    assert (outcome.measured, outcome.failed) == (45, 1)
    assert failures_of(tmp_path)["n"].isna().all()


def test_nothing_possible_is_a_refusal_that_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'missing' is not known"):
        run(make_plan(models=(ModelSpec("missing"),)), tmp_path / "out", make_tools()[0], keep_going=True)
    with pytest.raises(TextError, match="too short"):
        run(make_plan(), tmp_path / "out", make_tools(tokens=3)[0], keep_going=True)
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_far_too_short_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    tools, work = make_tools(texts={"prose": words(400), "note": "Two words."})
    with pytest.raises(TextError, match=r"'note' is too short for .* it has 10 characters"):
        run(make_plan(texts=("note",)), tmp_path, tools)
    assert work.loads == []
    outcome = run(make_plan(texts=("note", "prose")), tmp_path, tools, keep_going=True)
    assert (outcome.measured, outcome.failed) == (45, 1)
    assert list(failures_of(tmp_path)["text"]) == ["note"]


def test_without_keep_going_a_failure_is_raised_and_recorded(tmp_path: Path) -> None:
    tools = with_bad_measure(lambda layer, n, first: (layer, n) == (1, 4), ModelError("No."))
    with pytest.raises(ModelError, match="No"):
        run(make_plan(), tmp_path, tools)
    assert len(rows_of(tmp_path)) == 20
    assert len(failures_of(tmp_path)) == 1


def test_a_store_that_cannot_be_written_stops_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Store, *arguments: Any, **options: Any) -> None:
        raise StoreError("database or disk is full.")

    monkeypatch.setattr(Store, "add", full)
    tools = with_bad_measure(lambda layer, n, first: (layer, n) == (1, 4), ModelError("No."))
    with pytest.raises(StoreError, match="disk is full"):
        run(make_plan(), tmp_path, tools, keep_going=True)


def test_a_failure_is_no_result(tmp_path: Path) -> None:
    tools = with_bad_measure(lambda layer, n, first: layer == 1, ModelError("<No>."))
    run(make_plan(), tmp_path, tools, keep_going=True)
    published = write_outputs(tmp_path)
    assert set(pd.read_csv(published.report.with_name("measurements.csv"))["layer"]) == {0, 2}
    assert set(published.exponents["layer"]) == {0, 2}
    page = published.report.read_text()
    assert "15 measurements failed and are missing here" in page
    assert "&lt;No&gt;." in page
