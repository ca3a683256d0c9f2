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


def test_a_model_that_changes_between_two_loads_is_refused_and_tried_once_only(tmp_path: Path) -> None:
    models = {"small": FakeModel(), "other": FakeModel(fingerprint=digest("other"))}

    def change(calls: int) -> None:
        models["other"] = FakeModel(fingerprint=digest("changed"))

    plan = make_plan(models=(ModelSpec("small"), ModelSpec("other")))
    with pytest.raises(ModelError, match="other changed during the study"):
        run(plan, tmp_path / "off", make_tools(models=models, before_measure=change)[0])
    assert {row[0] for row in rows_of(tmp_path / "off")} == {"small"}
    models["other"] = FakeModel(fingerprint=digest("other"))
    outcome = run(plan, tmp_path / "on", make_tools(models=models, before_measure=change)[0], keep_going=True)
    assert (outcome.measured, outcome.failed) == (45, 1)
    assert contents_of(tmp_path / "on").failures["n"].isna().all()


def with_bad_measure(bad: Any, error: Exception) -> Tools:
    """Tools whose estimate fails for a layer, length and first token that ``bad`` says yes to."""
    tools, _ = make_tools()

    def measure(function: Any, x: torch.Tensor, **options: Any) -> Any:
        if any(bad(function.layer, x.shape[1], int(first)) for first in x[:, 0, 0]):
            raise error
        return tools.measure(function, x, **options)

    return replace(tools, measure=measure)


def test_one_layer_fails_and_the_rest_goes_on(tmp_path: Path) -> None:
    error = NonFiniteError("X", expected="finite <values>", got="nan")
    tools = with_bad_measure(lambda layer, n, first: layer == 1 and n == 4, error)
    with pytest.raises(NonFiniteError):
        run(make_plan(), tmp_path, tools)
    contents = contents_of(tmp_path)
    assert (len(contents.measurements), len(contents.failures)) == (20, 1)
    heard = Heard()
    outcome = run(make_plan(), tmp_path, tools, keep_going=True, listener=heard)
    assert (outcome.there, outcome.measured, outcome.failed) == (20, 20, 5)
    assert outcome.first_failure == "X: expected finite <values>, got nan."
    assert heard.told[-1][0] == pytest.approx(heard.told[-1][1])
    places = {(k, n) for k in range(3) for n in (2, 4, 8)} - {(1, 4)}
    assert {(row[3], row[5]) for row in rows_of(tmp_path)} == places
    table = contents_of(tmp_path).failures
    assert table["sample"].tolist() == [0, 1, 2, 3, 4]
    assert table[["layer", "n", "kind"]].drop_duplicates().to_numpy().tolist() == [[1, 4, "NonFiniteError"]]
    assert table["happened"].str.startswith("20").all()
    assert table["detail"].str.contains("in measure").all()
    written = write_outputs(tmp_path)  # a failure is no result
    assert len(pd.read_csv(tmp_path / "measurements.csv")) == 40
    assert written.exponents.set_index("layer")["n_points"].to_dict() == {0: 15, 1: 10, 2: 15}
    page = written.report.read_text()
    assert "5 measurements failed and are missing here" in page
    assert "finite &lt;values&gt;" in page


def strange_layer(tools: Tools) -> Tools:
    def capture(*arguments: Any, layers: list[int], **options: Any) -> Any:
        if 1 in layers:
            raise CaptureError("layer 1 is strange.")
        return tools.capture(*arguments, layers=layers, **options)

    return replace(tools, capture=capture)


@pytest.mark.parametrize("what", ["a layer", "one sample of a batch", "a capture"])
def test_what_failed_is_tried_again_and_resolved(study: Any, tmp_path: Path, what: str) -> None:
    whole = {row for row in study.rows if row[2] == "attention"}
    first = next(row[7] for row in whole if row[3:7] == (1, None, 8, 2))
    tools, failed, missing, error = {
        "a layer": (with_bad_measure(lambda layer, *_: layer == 1, MemoryError()), 15, 15, "no reason given"),
        "one sample of a batch": (
            with_bad_measure(lambda *place: place == (1, 8, first), ModelError("No.")), 1, 1, "No."
        ),
        "a capture": (strange_layer(make_tools()[0]), 3, 15, "layer 1 is strange."),
    }[what]  # fmt: skip
    for made in (45 - missing, 0):
        outcome = run(make_plan(), tmp_path, tools, keep_going=True)
        table = contents_of(tmp_path).failures  # the latest
        assert (outcome.measured, outcome.failed, len(table)) == (made, failed, failed)
        assert (set(table["layer"]), set(table["error"])) == ({1}, {error})
        assert rows_of(tmp_path) < whole
    if what == "one sample of a batch":
        assert table[["n", "sample"]].to_numpy().tolist() == [[8, 2]]
    outcome = run(make_plan(), tmp_path, make_tools()[0], keep_going=True)
    assert (outcome.measured, outcome.there, outcome.failed) == (missing, 45 - missing, 0)
    assert rows_of(tmp_path) == whole
    assert contents_of(tmp_path).failures.empty


def test_a_model_that_cannot_be_loaded_stops_no_other(tmp_path: Path) -> None:
    plan = make_plan(models=(ModelSpec("missing"), ModelSpec("small"), ModelSpec("short")))
    models = {"small": FakeModel(), "short": FakeModel(max_length=4, fingerprint=digest("short"))}
    outcome = run(plan, tmp_path, make_tools(models=models)[0], keep_going=True)
    assert (outcome.measured, outcome.failed) == (45, 2)
    table = contents_of(tmp_path).failures
    assert table["model"].tolist() == ["missing", "short"]
    assert table["text"].isna().tolist() == [True, False]
    assert table["kind"].tolist() == ["ModelError", "ArgumentError"]
    models |= {"missing": FakeModel(fingerprint=digest("found")), "short": FakeModel()}
    outcome = run(plan, tmp_path, make_tools(models=models)[0], keep_going=True)
    assert (outcome.measured, outcome.there, outcome.failed) == (90, 45, 0)
    assert contents_of(tmp_path).failures.empty


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
    assert list(contents_of(tmp_path).failures["text"]) == ["note"]


def test_a_store_that_cannot_be_written_stops_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Store, *arguments: Any, **options: Any) -> None:
        raise StoreError("database or disk is full.")

    monkeypatch.setattr(Store, "add", full)
    with pytest.raises(StoreError, match="disk is full"):
        run(make_plan(), tmp_path, make_tools()[0], keep_going=True)
