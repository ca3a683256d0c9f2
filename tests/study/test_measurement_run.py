"""The runner, with stand-ins for models and estimates: what it asks for, and what it never asks twice."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError, ModelError, StoreError, TextError
from howsmooth.study import runner
from howsmooth.study.measurement_outputs import write_outputs
from howsmooth.study.measurement_run import dry_run
from howsmooth.study.measurement_run import run as real_run
from howsmooth.study.plan_file import read_plan
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import Measurement
from howsmooth.study.runner import _WorkProgress
from howsmooth.study.store import STORE_NAME, Store
from howsmooth.study.tasks.lipschitz_constants import batch_size
from howsmooth.study.tasks.task import Work
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


def test_one_row_a_measurement_with_its_own_seed_and_its_origin(study: Any) -> None:
    assert (study.outcome.measured, study.outcome.there, study.outcome.unconverged) == (135, 0, 0)
    work, contents = study.work, study.contents
    assert len(work.measured) == len(set(work.measured)) == len(set(work.seeds)) == len(study.rows) == 135
    # One capture a scope and length serves all layers, after a check of each scope.
    assert {layers for _, _, layers in work.captures[2:8]} == {(0, 1, 2)}
    assert contents.runs["command"].tolist() == ["howsmooth measure small"]
    assert contents.runs["finished"].notna().all()
    assert '"torch":' in contents.runs["environment"][0]
    assert contents.inputs["tokens"].tolist() == [4000]


def test_paths_are_strings_or_paths(tmp_path: Path) -> None:
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
    plan = Plan(models=[tmp_path / "model"], texts=tmp_path / "book.txt")
    assert (plan.models[0].name, plan.texts) == (str(tmp_path / "model"), (str(tmp_path / "book.txt"),))


def places_of(folder: Path) -> dict[tuple[Any, ...], set[tuple[int, int]]]:
    """Where the sequences of each model and text lie, as (first token, tokens)."""
    table = contents_of(folder).measurements
    return {
        key: set(zip(group["start"].tolist(), group["n"].tolist(), strict=True))
        for key, group in table.groupby(["model", "text"])
    }


def test_no_two_sequences_share_a_token_and_all_layers_see_the_same(study: Any) -> None:
    for n in (2, 4, 8):
        by_layer = [
            {first for _, layer, _, m, first in study.work.measured if (layer, m) == (k, n)} for k in range(3)
        ]
        assert by_layer[0] == by_layer[1] == by_layer[2]
        assert len(by_layer[0]) == 5
    ((_, places),) = places_of(study.folder).items()
    assert len(places) == 15
    assert overlapping(places) == 0


def test_the_same_plan_again_measures_nothing(study: Any, tmp_path: Path) -> None:
    shutil.copy(study.folder / STORE_NAME, tmp_path)
    tools, work = make_tools()
    outcome = run(study.plan, tmp_path, tools)
    assert (outcome.measured, outcome.there, work.measured) == (0, 135, [])
    assert rows_of(tmp_path) == study.rows


def test_a_text_that_is_full_stops_a_run_but_with_keep_going_not_the_others(tmp_path: Path) -> None:
    texts = {"prose": words(75), "more": words(400)}
    run(make_plan(texts=tuple(texts)), tmp_path, make_tools(texts=texts)[0])
    before = rows_of(tmp_path)
    tools, work = make_tools(texts=texts)
    longer = make_plan(texts=tuple(texts), lengths=(2, 3))
    full = r"'prose' is too short for more: .* windows of .* tokens do not fit .* another output folder"
    with pytest.raises(TextError, match=full):
        run(longer, tmp_path, tools)
    assert work.measured == []
    outcome = run(longer, tmp_path, tools, keep_going=True)
    assert (outcome.measured, outcome.there, outcome.failed) == (15, 15, 1)
    assert {(row[1], row[5]) for row in rows_of(tmp_path) - before} == {("more", 3)}
    (failure,) = contents_of(tmp_path).failures.to_dict("records")
    assert (failure["model"], failure["text"]) == ("small", "prose")
    assert "too short for more" in failure["error"]


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


def test_progress_is_told_from_nothing_to_everything(study: Any, tmp_path: Path) -> None:
    heard = study.heard
    told = [(done, total, said) for done, total, said in heard.told if said.find(" of 135, ") > 0]
    assert heard.phases[:2] == ["Reading texts and models", "Computing 135 constants"]
    counts = [int(said.split(" of 135, ")[0]) for _, _, said in told]
    assert sorted(set(counts)) == list(range(5, 136, 5))
    assert counts == sorted(counts)
    assert all(0 < done <= total for done, total, _ in told)
    assert told[-1][0] == pytest.approx(told[-1][1])
    shutil.copy(study.folder / STORE_NAME, tmp_path)
    again = Heard()
    run(replace(study.plan, samples=7), tmp_path, make_tools()[0], listener=again)
    assert "Computing 54 constants (135 more are in the store already)" in again.phases


BY_NAME = {"small": FakeModel(), "short": FakeModel(max_length=4)}


def test_memory_sets_how_many_sequences_are_measured_together() -> None:
    assert batch_size(12, 100, "float32") >= 10
    assert batch_size(12, 2000, "float32") == 1
    assert batch_size(12, 500, "float32") > batch_size(12, 500, "float64") >= 1


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], type[HowsmoothError], str]] = {
    "unknown model": ({"models": (ModelSpec("x"),)}, {}, ModelError, "'x' is not known"),
    "unknown text": ({"texts": ("x",)}, {}, TextError, "'x' is not there"),
    "empty text": ({}, {"texts": {"prose": "  \n"}}, TextError, "text 'prose' is empty"),
    "short text": ({"lengths": (2, 30)}, {"tokens": 100}, TextError, "need 160 tokens, and it has 100"),
    "tiny text": ({}, {"tokens": 3}, TextError, "it has 8 characters, at most 32 tokens. Use"),
    "too long": ({"lengths": (2, 65)}, {}, ArgumentError, "at most 64 tokens, the positions of small"),
    "too long for the second": (
        {"models": tuple(map(ModelSpec, BY_NAME))}, {"models": BY_NAME}, ArgumentError, "positions of short",
    ),
    "no such layer": (
        {"layers": Ranges.parse("0,3", "layers")}, {}, ArgumentError, "layers of small, which has 3",
    ),
    "no such head": (
        {"heads": Ranges.parse("2", "heads"), "scopes": ("head",)}, {}, ArgumentError, "heads of small",
    ),
    "odd captures": ({}, {}, CaptureError, "could not be assigned"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_impossible_is_refused_before_anything_is_measured_or_made(tmp_path: Path, case: str) -> None:
    changes, tool_changes, error, message = REFUSALS[case]
    tools, work = make_tools(**tool_changes)
    if error is CaptureError:
        capture = tools.capture
        tools = replace(tools, capture=lambda *arguments, **options: capture(*arguments, **options)[:-1])
    folder = tmp_path / "out"
    with pytest.raises(error, match=message):
        run(make_plan(**changes), folder, tools)
    assert work.measured == []
    assert not folder.exists()


def test_a_store_of_another_study_is_refused_without_loading_a_model(study: Any, tmp_path: Path) -> None:
    shutil.copy(study.folder / STORE_NAME, tmp_path)
    before = (tmp_path / STORE_NAME).read_bytes()
    tools, work = make_tools()
    for name, value, said in (
        ("seed", 1, "seed 0, not 1"), ("rtol", 1e-3, "rtol 0.0001, not 0.001"),
        ("confidence", 0.9, "confidence 0.999, not 0.9"), ("dtype", "float64", "dtype float32, not float64"),
        ("max_iterations", 9, "max-iterations 200, not 9"),
    ):  # fmt: skip
        with pytest.raises(StoreError, match=f"made with --{said}. Choose another --out, or repeat"):
            run(make_plan(**{name: value}), tmp_path, tools)
    assert work.loads == []
    assert (tmp_path / STORE_NAME).read_bytes() == before


def test_a_model_or_text_that_changed_under_its_name_is_refused(study: Any, tmp_path: Path) -> None:
    shutil.copy(study.folder / STORE_NAME, tmp_path)
    before = (tmp_path / STORE_NAME).read_bytes()
    retrained = {"small": FakeModel(fingerprint=digest("retrained"))}
    tokenizer = {"small": FakeModel(fingerprint=digest("x"), tokenizer_source="Letters.")}
    for changes, tool_changes, said in (
        ({}, {"models": retrained}, "its model 'small' has fingerprint .* the weights or the configuration"),
        ({}, {"models": tokenizer}, r"the tokenizer \('Words., .*' then, 'Letters., .*' now\) changed"),
        ({}, {"tokens": 401}, "its text 'prose' has SHA-256"),
        # On another text as well: a store holds one model under a name.
        (
            {"texts": ("more",)},
            {"models": retrained, "texts": {"more": words(300)}},
            "'small' has fingerprint",
        ),
    ):
        with pytest.raises(StoreError, match=said):
            run(make_plan(**changes), tmp_path, make_tools(**tool_changes)[0])
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


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def paced(
    monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[int, float]], steps: list[tuple[float, int, int, bool]]
) -> Heard:
    """Carry out steps (time, task, results, ended) of tasks with given sizes and work."""
    clock, heard = Clock(), Heard()
    monkeypatch.setattr(runner, "time", clock)
    tasks = [SimpleNamespace(size=size, work=work, words="words") for size, work in sizes]
    work = Work(Measurement, "constants", tasks, kept=7)  # type: ignore[arg-type]
    progress = _WorkProgress(heard, work, before=0, whole=0)  # type: ignore[arg-type]
    for now, task, results, ended in steps:
        clock.now = now
        progress.advance(tasks[task], results, ended=ended)  # type: ignore[arg-type]
    return heard


def test_results_are_counted_and_never_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(10.0, 0, 2, False), (11.0, 0, 2, False), (12.0, 0, 0, True), (13.0, 1, 4, False)]
    heard = paced(monkeypatch, [(6, 60.0), (4, 80.0)], [*steps, (14.0, 1, 0, True)])
    assert heard.phases == ["Computing 10 constants (7 more are in the store already)"]
    # Two results of the first task failed: they are over, but not there.
    assert [(done, total) for done, total, _ in heard.told] == [(2, 10), (4, 10), (6, 10), (10, 10), (10, 10)]
    assert [words for *_, words in heard.told][::3] == ["2 of 10, words", "8 of 10, words"]


def test_the_time_left_follows_from_the_work_and_not_from_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [(1000.0, 0, 5, False), (1001.0, 0, 1, False), (1010.0, 0, 4, True)]
    heard = paced(monkeypatch, [(10, 100.0), (10, 400.0)], [*steps, (1010.1, 1, 1, False)])
    # Nothing is said before the pace is known; then 50 of the work took 10 s, and 400 are left.
    assert heard.left == [None, None, pytest.approx(80.0)]
