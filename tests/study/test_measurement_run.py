"""The runner, with stand-ins for models and estimates: what it asks for, and what it never asks twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError, ModelError, StoreError, TextError
from howsmooth.study.measurement_outputs import write_outputs
from howsmooth.study.measurement_run import dry_run
from howsmooth.study.measurement_run import run as real_run
from howsmooth.study.plan_file import read_plan
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import Measurement
from howsmooth.study.store import STORE_NAME, Store
from howsmooth.study.tasks.lipschitz_constants import batch_size
from tests._study import (
    FakeModel,
    Heard,
    contents_of,
    digest,
    make_plan,
    make_tools,
    overlapping,
    rows_of,
    run,
    words,
)


def test_one_row_a_measurement_with_its_own_seed(tmp_path: Path) -> None:
    tools, work = make_tools()
    outcome = run(make_plan(), tmp_path, tools)
    assert outcome.measured == 3 * 3 * 5
    assert outcome.there == outcome.unconverged == 0
    assert len(work.measured) == len(set(work.measured)) == 45
    assert len(set(work.seeds)) == 45
    assert len(rows_of(tmp_path)) == 45


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    folder, file = str(tmp_path / "out"), str(tmp_path / "plan.toml")
    (tmp_path / "plan.toml").write_text(
        'models = ["builtin-encoder"]\nlengths = "4"\nsamples = 1\nlayers = "0"\nbounds = "none"\n'
    )
    plan = read_plan(file).plan
    assert dry_run(plan, folder).parts[0].measurements == 1
    assert real_run(plan, folder).made["measurements"] == 1
    assert write_outputs(folder).report == tmp_path / "out" / "report.html"
    with Store.open(folder, write=False) as store:
        assert store.count(Measurement) == 1


def test_a_name_may_be_a_path(tmp_path: Path) -> None:
    plan = Plan(models=[tmp_path / "model"], texts=tmp_path / "book.txt")
    assert plan.models[0].name == str(tmp_path / "model")
    assert plan.texts == (str(tmp_path / "book.txt"),)


def places_of(folder: Path) -> dict[tuple[Any, ...], set[tuple[int, int]]]:
    """Where the sequences of each model and text lie, as (first token, tokens)."""
    table = contents_of(folder).measurements
    return {
        key: set(zip(group["start"].tolist(), group["n"].tolist(), strict=True))
        for key, group in table.groupby(["model", "text"])
    }


def test_no_two_sequences_share_a_token_and_all_layers_see_the_same(tmp_path: Path) -> None:
    tools, work = make_tools()
    run(make_plan(scopes=("attention", "head")), tmp_path, tools)
    for n in (2, 4, 8):
        by_layer = [
            {first for _, layer, _, m, first in work.measured if (layer, m) == (k, n)} for k in range(3)
        ]
        assert by_layer[0] == by_layer[1] == by_layer[2]
        assert len(by_layer[0]) == 5
    ((_, places),) = places_of(tmp_path).items()
    covered = [token for start, n in places for token in range(start, start + n)]
    assert len(covered) == len(set(covered)) == 5 * (2 + 4 + 8)


def test_one_capture_serves_all_layers(tmp_path: Path) -> None:
    tools, work = make_tools()
    run(make_plan(scopes=("attention", "block"), bounds="none"), tmp_path, tools)
    checks = 2  # one a scope, at the shortest length, before anything is measured
    assert len(work.captures) == checks + 3 * 2
    assert all(layers == (0, 1, 2) for _, _, layers in work.captures)


def test_the_same_plan_again_measures_nothing(tmp_path: Path) -> None:
    run(make_plan(), tmp_path, make_tools()[0])
    before = rows_of(tmp_path)
    tools, work = make_tools()
    outcome = run(make_plan(), tmp_path, tools)
    assert (outcome.measured, outcome.there, work.measured) == (0, 45, [])
    assert rows_of(tmp_path) == before


ADDITIONS: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": (2, 3, 4, 8, 16)},
    "samples": {"samples": 9},
    "layers": {"layers": Ranges.parse("all", "layers")},
    "layers and samples": {"layers": Ranges.parse("all", "layers"), "samples": 9},
    "heads": {"heads": Ranges.parse("all", "heads")},
    "scopes": {"scopes": ("head", "attention", "block")},
    "texts": {"texts": ("prose", "more")},
    "models": {"models": (ModelSpec("small"), ModelSpec("other"))},
    "variants": {"models": (ModelSpec("small"), ModelSpec("small", as_decoder=True))},
}


@pytest.mark.parametrize("axis", ADDITIONS)
def test_adding_to_an_axis_moves_nothing_else(tmp_path: Path, axis: str) -> None:
    """No row that is there loses its sequence, its seed or its value, whatever is added.

    Where no sequences are added, rows are the same whether their plan was carried out alone, before, or as
    part of a larger one. Added sequences take the room that is left, and so lie elsewhere if all are new.
    """
    base = {
        "layers": Ranges.parse("0,2", "layers"),
        "heads": Ranges.parse("1", "heads"),
        "scopes": ("head", "attention"),
        "bounds": "none",
    }
    texts = {"prose": words(400), "more": words(399)}
    models = {"small": FakeModel(), "other": FakeModel(fingerprint=digest("other"))}
    grown, at_once = tmp_path / "grown", tmp_path / "at-once"

    def go(folder: Path, changes: dict[str, Any]) -> set[tuple[Any, ...]]:
        run(make_plan(**(base | changes)), folder, make_tools(texts=texts, models=models)[0])
        return rows_of(folder)

    before = go(grown, {})
    assert before < go(grown, ADDITIONS[axis])
    go(at_once, ADDITIONS[axis])
    without_start = [{row[:7] + row[8:9] for row in rows_of(folder)} for folder in (grown, at_once)]
    assert without_start[0] == without_start[1]  # keys and seeds
    if "lengths" not in ADDITIONS[axis] and "samples" not in ADDITIONS[axis]:
        assert rows_of(grown) == rows_of(at_once)
    for folder in (grown, at_once):
        for places in places_of(folder).values():
            assert overlapping(places) == 0


def test_a_text_that_is_full_does_not_stop_the_others(tmp_path: Path) -> None:
    texts = {"prose": words(75), "more": words(400)}
    run(make_plan(texts=tuple(texts)), tmp_path, make_tools(texts=texts)[0])
    before = rows_of(tmp_path)
    outcome = run(
        make_plan(texts=tuple(texts), lengths=(2, 3)), tmp_path, make_tools(texts=texts)[0], keep_going=True
    )
    assert (outcome.measured, outcome.there, outcome.failed) == (15, 15, 1)
    added = rows_of(tmp_path) - before
    assert {(row[1], row[5]) for row in added} == {("more", 3)}
    (failure,) = contents_of(tmp_path).failures.to_dict("records")
    assert (failure["model"], failure["text"]) == ("small", "prose")
    assert "too short for more" in failure["error"]


def test_a_text_that_is_full_is_refused_before_anything_more_is_measured(tmp_path: Path) -> None:
    run(make_plan(), tmp_path, make_tools(tokens=75)[0])
    before = rows_of(tmp_path)
    tools, work = make_tools(tokens=75)
    with pytest.raises(
        TextError,
        match=r"'prose' is too short for more: .* windows of .* tokens do not fit .* another output folder",
    ):
        run(make_plan(lengths=(3,)), tmp_path, tools)
    assert work.measured == []
    assert rows_of(tmp_path) == before


@settings(max_examples=5, deadline=None)
@given(stops=st.lists(st.integers(0, 12), min_size=1, max_size=3))
def test_interrupted_anywhere_it_continues_and_repeats_nothing(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("interrupted")
    plan = make_plan(scopes=("attention", "head"))
    total = 3 * 5 * (3 + 3 * 2)
    measured = 0
    for stop in stops:

        def interrupt(calls: int, stop: int = stop) -> None:
            if calls == stop:
                raise KeyboardInterrupt

        tools, work = make_tools(before_measure=interrupt)
        try:
            run(plan, folder, tools)
        except KeyboardInterrupt:
            assert stop * 5 == len(work.measured)
        measured += len(work.measured)
    tools, work = make_tools()
    outcome = run(plan, folder, tools)
    assert outcome.measured == len(work.measured) == total - measured
    assert len(rows_of(folder)) == total


def test_progress_is_told_from_nothing_to_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.study.runner._BETWEEN_TELLING", 0.0)
    heard = Heard()
    run(make_plan(bounds="none"), tmp_path, make_tools()[0], listener=heard)
    assert heard.phases == ["Reading texts and models", "Computing 45 constants"]
    counts = [int(words.split(" of 45, ")[0]) for _, _, words in heard.told]
    assert sorted(set(counts)) == list(range(5, 46, 5))
    assert counts == sorted(counts)
    assert all(0 < done <= total for done, total, _ in heard.told)
    assert heard.told[-1][0] == pytest.approx(heard.told[-1][1])
    again = Heard()
    run(make_plan(samples=7, bounds="none"), tmp_path, make_tools()[0], listener=again)
    assert again.phases[-1] == "Computing 18 constants (45 more are in the store already)"


def test_memory_sets_how_many_sequences_are_measured_together() -> None:
    assert batch_size(12, 100, "float32") >= 10
    assert batch_size(12, 2000, "float32") == 1
    assert batch_size(12, 500, "float32") > batch_size(12, 500, "float64") >= 1


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], type[HowsmoothError], str]] = {
    "unknown model": ({"models": (ModelSpec("x"),)}, {}, ModelError, "'x' is not known"),
    "unknown text": ({"texts": ("x",)}, {}, TextError, "'x' is not there"),
    "empty text": ({}, {"texts": {"prose": "  \n"}}, TextError, "text 'prose' is empty"),
    "short text": (
        {"lengths": (2, 30)},
        {"tokens": 100},
        TextError,
        "its sequences need 160 tokens, and it has 100. Use fewer samples, or fewer or shorter lengths, or a "
        "longer text",
    ),
    "tiny text": ({}, {"tokens": 3}, TextError, "it has 8 characters, at most 32 tokens. Use"),
    "too long": ({"lengths": (2, 65)}, {}, ArgumentError, "at most 64 tokens, the positions of small"),
    "no such layer": (
        {"layers": Ranges.parse("0,3", "layers")}, {}, ArgumentError, "layers of small, which has 3",
    ),
    "no such head": (
        {"heads": Ranges.parse("2", "heads"), "scopes": ("head",)}, {}, ArgumentError, "heads of small",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_impossible_is_refused_before_anything_is_measured_or_made(tmp_path: Path, case: str) -> None:
    changes, tool_changes, error, message = REFUSALS[case]
    tools, work = make_tools(**tool_changes)
    folder = tmp_path / "out"
    with pytest.raises(error, match=message):
        run(make_plan(**changes), folder, tools)
    assert work.measured == []
    assert not folder.exists()


def test_a_second_model_is_checked_before_the_first_is_measured(tmp_path: Path) -> None:
    tools, work = make_tools(models={"small": FakeModel(), "short": FakeModel(max_length=4)})
    with pytest.raises(ArgumentError, match="positions of short"):
        run(make_plan(models=(ModelSpec("small"), ModelSpec("short"))), tmp_path / "out", tools)
    assert work.measured == []


def test_captures_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    tools, work = make_tools()
    wrong = replace(tools, capture=lambda *arguments, **options: tools.capture(*arguments, **options)[:-1])
    with pytest.raises(CaptureError, match="could not be assigned"):
        run(make_plan(), tmp_path / "out", wrong)
    assert work.measured == []


def test_a_model_that_changes_between_two_loads_is_refused(tmp_path: Path) -> None:
    models = {"small": FakeModel(), "other": FakeModel(fingerprint=digest("other"))}

    def change(calls: int) -> None:
        models["other"] = FakeModel(fingerprint=digest("changed"))

    tools, _ = make_tools(models=models, before_measure=change)
    plan = make_plan(models=(ModelSpec("small"), ModelSpec("other")))
    with pytest.raises(ModelError, match="other changed during the study"):
        run(plan, tmp_path, tools)
    assert {row[0] for row in rows_of(tmp_path)} == {"small"}


IDENTITIES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, "made with --seed 0, not 1. Choose another --out, or repeat --seed 0"),
    "rtol": ({"rtol": 1e-3}, "made with --rtol 0.0001, not 0.001"),
    "confidence": ({"confidence": 0.9}, "made with --confidence 0.999, not 0.9"),
    "dtype": ({"dtype": "float64"}, "made with --dtype float32, not float64"),
    "max_iterations": ({"max_iterations": 9}, "made with --max-iterations 200, not 9"),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_store_of_another_study_is_refused_without_loading_a_model(tmp_path: Path, name: str) -> None:
    run(make_plan(), tmp_path, make_tools()[0])
    before = (tmp_path / STORE_NAME).read_bytes()
    changes, message = IDENTITIES[name]
    tools, work = make_tools()
    with pytest.raises(StoreError, match=message):
        run(make_plan(**changes), tmp_path, tools)
    assert work.loads == []
    assert (tmp_path / STORE_NAME).read_bytes() == before


def test_a_model_or_text_that_changed_under_its_name_is_refused(tmp_path: Path) -> None:
    run(make_plan(), tmp_path, make_tools()[0])
    before = (tmp_path / STORE_NAME).read_bytes()
    changed = make_tools(models={"small": FakeModel(fingerprint=digest("retrained"))})[0]
    with pytest.raises(
        StoreError, match=r"its model 'small' has fingerprint .* the weights or the configuration"
    ):
        run(make_plan(), tmp_path, changed)
    tokenizer = FakeModel(fingerprint=digest("x"), tokenizer_source="Letters.")
    with pytest.raises(StoreError, match=r"the tokenizer \('Words., .*' then, 'Letters., .*' now\) changed"):
        run(make_plan(), tmp_path, make_tools(models={"small": tokenizer})[0])
    with pytest.raises(StoreError, match="its text 'prose' has SHA-256"):
        run(make_plan(), tmp_path, make_tools(tokens=401)[0])
    # On another text as well: a store holds one model under a name.
    retrained = {"small": FakeModel(fingerprint=digest("y"))}
    tools = make_tools(models=retrained, texts={"more": words(300)})[0]
    with pytest.raises(StoreError, match="its model 'small' has fingerprint"):
        run(make_plan(texts=("more",)), tmp_path, tools)
    assert (tmp_path / STORE_NAME).read_bytes() == before


def test_an_untrained_model_may_have_another_tokenizer_on_another_text(tmp_path: Path) -> None:
    spec = ModelSpec("small", random_init=True)
    first = FakeModel(fingerprint=digest("bpe of prose"))
    run(make_plan(models=(spec,)), tmp_path, make_tools(models={"small": first})[0])
    second = FakeModel(fingerprint=digest("bpe of more"))
    run(
        make_plan(models=(spec,), texts=("more",)),
        tmp_path,
        make_tools(models={"small": second}, texts={"more": words(300)})[0],
    )
    with pytest.raises(StoreError, match=r"its model 'small \(random init\)' has fingerprint"):
        run(make_plan(models=(spec,)), tmp_path, make_tools(models={"small": second})[0])


def test_where_the_numbers_came_from_is_recorded(tmp_path: Path) -> None:
    run(make_plan(), tmp_path, make_tools()[0], command="howsmooth measure small")
    contents = contents_of(tmp_path)
    assert contents.runs["command"].tolist() == ["howsmooth measure small"]
    assert contents.runs["finished"].notna().all()
    assert '"torch":' in contents.runs["environment"][0]
    assert contents.inputs["tokens"].tolist() == [4000]
