"""Merging: everything of all stores, once; a conflict writes nothing."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from howsmooth.cli import main
from howsmooth.errors import ArgumentError, ModelError, StoreError
from howsmooth.study import measurement_outputs as outputs
from howsmooth.study.merge import merge_stores
from howsmooth.study.plans import ModelSpec
from howsmooth.study.ranges import Ranges
from howsmooth.study.store import STORE_NAME, Store
from tests._documented import check_documented
from tests._study import FakeModel, contents_of, digest, make_plan, make_tools, rows_of, run, words
from tests.study.test_store import bounding, failure, published, row, sensitivity, sequence


def study(folder: Path, tools: Any = None, **changes: Any) -> Path:
    run(make_plan(**changes), folder, tools or make_tools()[0], command=f"howsmooth measure {folder.name}")
    return folder


def layers(text: str) -> Ranges:
    return Ranges.parse(text, "layers")


def refused(sources: list[Path], folder: Path, message: str) -> None:
    before = {path: path.read_bytes() for path in sources[0].parent.rglob("*.sqlite")}
    with pytest.raises(StoreError, match=message):
        merge_stores(sources, folder)
    assert {path: path.read_bytes() for path in sources[0].parent.rglob("*.sqlite")} == before
    with pytest.raises(StoreError, match="merged"):
        merge_stores(sources[::-1], folder)


def test_parts_of_a_study_make_the_whole(tmp_path: Path) -> None:
    scopes = ("attention", "head")
    a = study(tmp_path / "a", layers=layers("0,1"), scopes=scopes)
    b = study(tmp_path / "b", layers=layers("1,2"), scopes=scopes)
    whole = study(tmp_path / "whole", scopes=scopes)
    before = [(one / STORE_NAME).read_bytes() for one in (a, b)]
    merged = merge_stores([a, b / STORE_NAME], tmp_path / "out")
    assert (merged.added, merged.same, merged.total, merged.failures) == (135, 45, 135, 0)
    assert rows_of(tmp_path / "out") == rows_of(whole)
    assert [(one / STORE_NAME).read_bytes() for one in (a, b)] == before
    runs = contents_of(tmp_path / "out").runs
    assert runs["command"].tolist() == ["howsmooth measure a", "howsmooth measure b"]
    # A merged store is a store: nothing is left to measure, and it can grow.
    tools, work = make_tools()
    run(make_plan(scopes=scopes), tmp_path / "out", tools)
    assert work.measured == []
    assert run(make_plan(scopes=(*scopes, "block")), tmp_path / "out", make_tools()[0]).measured == 45


def test_merging_again_adds_nothing(tmp_path: Path) -> None:
    a, b = study(tmp_path / "a", layers=layers("0")), study(tmp_path / "b", layers=layers("1"))
    merge_stores([a], tmp_path / "out")
    merged = merge_stores([b], tmp_path / "out")
    assert (merged.added, merged.same, merged.total) == (15, 0, 30)
    before = contents_of(tmp_path / "out")
    merged = merge_stores([a, b], tmp_path / "out")
    assert (merged.added, merged.same, merged.total) == (0, 30, 30)
    after = contents_of(tmp_path / "out")
    for name in ("measurements", "runs", "models", "texts", "inputs"):
        pd.testing.assert_frame_equal(getattr(after, name), getattr(before, name))


def test_rows_keep_all_their_values_and_their_run(tmp_path: Path) -> None:
    a, b = study(tmp_path / "a", layers=layers("0")), study(tmp_path / "b", layers=layers("1"))
    merge_stores([a, b], tmp_path / "out")
    out = contents_of(tmp_path / "out")
    both = pd.concat([contents_of(one).measurements for one in (a, b)], ignore_index=True)
    pd.testing.assert_frame_equal(out.measurements.drop(columns="run"), both.drop(columns="run"))
    commands = out.measurements["run"].map(out.runs.set_index("id")["command"])
    assert commands.tolist() == ["howsmooth measure a"] * 15 + ["howsmooth measure b"] * 15


def test_models_and_texts_of_all(tmp_path: Path) -> None:
    models = {"small": FakeModel(), "other": FakeModel(fingerprint=digest("other"))}
    tools = make_tools(models=models, texts={"prose": words(400), "more": words(399)})[0]
    a = study(tmp_path / "a", tools, models=(ModelSpec("small"),))
    b = study(tmp_path / "b", tools, models=(ModelSpec("other", as_decoder=True),), texts=("prose", "more"))
    assert merge_stores([a, b], tmp_path / "out").total == 135
    out = contents_of(tmp_path / "out")
    assert out.models["label"].tolist() == ["other (as decoder)", "small"]
    assert out.texts["name"].tolist() == ["more", "prose"]
    assert len(out.inputs) == 3


def test_failures_come_along_and_a_measurement_of_the_other_makes_them_good(tmp_path: Path) -> None:
    tools = make_tools()[0]

    def measure(function: Any, x: Any, **options: Any) -> Any:
        if function.layer == 1:
            raise ModelError("No.")
        return tools.measure(function, x, **options)

    run(make_plan(), tmp_path / "a", replace(tools, measure=measure), keep_going=True)
    study(tmp_path / "b", layers=layers("1"), lengths=(2, 4, 8))
    merged = merge_stores([tmp_path / "a"], tmp_path / "one")
    assert (merged.total, merged.failures) == (30, 15)
    for sources in (["a", "b"], ["b", "a"]):
        merged = merge_stores([tmp_path / name for name in sources], tmp_path / "-".join(sources))
        assert (merged.total, merged.failures) == (45, 0)
        assert contents_of(tmp_path / "-".join(sources)).failures.empty
    assert merge_stores([tmp_path / "a"], tmp_path / "a-b").total == 45
    assert contents_of(tmp_path / "a-b").failures.empty


def with_more(folder: Path, **published_changes: Any) -> Path:
    """Add a sensitivity, bounds, a published value, a failure that is over and one that is not."""
    place: dict[str, Any] = {"model": "small", "text": "prose", "n": 4, "sample": 0}
    with Store.open(folder) as store:
        start = store.sequences("small", "prose")[4, 0]
        number = store.start_run("more", "cpu", {})
        of = {**place, "layer": 9}
        bounds = [bounding(**of, start=start), bounding(**of, start=start, name="b", value=None)]
        values = [published(**place, start=start, **published_changes)]
        words = [sensitivity(**of), sequence(("a", "b", "c", "d"), **place, start=start)]
        store.add([row(**of, start=start), *words, *bounds, *values], number)
        store.add([failure(**of, what="bounds"), failure(**place, layer=8)], number)
    return folder


def test_bounds_published_values_and_sensitivities_come_along(tmp_path: Path) -> None:
    a, b = with_more(study(tmp_path / "a")), study(tmp_path / "b", layers=layers("1"))
    for sources in ([a, b], [b, a]):
        out = tmp_path / "-".join(one.name for one in sources)
        merged = merge_stores(sources, out)
        assert (merged.total, merged.published, merged.failures) == (46, 1, 1)
        there, here = contents_of(a), contents_of(out)
        for name in ("sensitivities", "bounds", "published"):
            assert len(getattr(there, name)) >= 1
            same = [getattr(one, name).drop(columns="run", errors="ignore") for one in (here, there)]
            pd.testing.assert_frame_equal(*same)
        commands = here.published["run"].map(here.runs.set_index("id")["command"])
        assert set(commands) == {"more"}
        again = merge_stores([a], out)
        assert (again.added, again.published) == (0, 0)
        pd.testing.assert_frame_equal(contents_of(out).bounds, here.bounds)


def test_published_values_that_differ_are_a_conflict(tmp_path: Path) -> None:
    a = with_more(study(tmp_path / "a"))
    b = with_more(study(tmp_path / "b"), lower=3.5, lipschitz=3.6, upper=3.7)
    where = "published \\(model small, text prose, layer 0, n 4, sample 0, quantity corrected, items \\)"
    refused([a, b], tmp_path / "out", where + r" has the interval \[3.5, 3.7\], and there \[2.9, 3.1\]")
    c = with_more(study(tmp_path / "c"), lower=None, upper=None, lipschitz=3.02)
    d = with_more(study(tmp_path / "d"), lower=None, upper=None, lipschitz=3.2)
    refused([a, d], tmp_path / "out", r"has the value 3.2, and there 3.0")
    assert not (tmp_path / "out").exists()
    assert merge_stores([a, c], tmp_path / "out").published == 1
    e = with_more(study(tmp_path / "e"), map="another map")
    refused([a, e], tmp_path / "second", r"has map another map, and there a map")


def test_another_identity_is_a_conflict(tmp_path: Path) -> None:
    a, b = study(tmp_path / "a"), study(tmp_path / "b", seed=1)
    refused([a, b], tmp_path / "out", "b cannot be merged with .*/a: its seed is 1, and there 0")
    assert not (tmp_path / "out").exists()
    merge_stores([a], tmp_path / "out")
    refused([b], tmp_path / "out", "b cannot be merged with .*/out: its seed is 1, and there 0")
    assert rows_of(tmp_path / "out") == rows_of(a)


def test_another_text_or_model_under_the_same_name_is_a_conflict(tmp_path: Path) -> None:
    a = study(tmp_path / "a")
    b = study(tmp_path / "b", make_tools(tokens=401)[0])
    refused([a, b], tmp_path / "out", "the same row of texts \\(name prose\\) has digest")
    c = study(tmp_path / "c", make_tools(models={"small": FakeModel(fingerprint=digest("c"))})[0])
    refused([a, c], tmp_path / "out", "the same row of inputs \\(model small, text prose\\) has fingerprint")
    d = study(tmp_path / "d", make_tools(models={"small": FakeModel(layers=2)})[0])
    refused([a, d], tmp_path / "out", "the same row of models \\(label small\\) has layers 2, and there 3")
    assert not (tmp_path / "out").exists()


def test_another_value_of_the_same_measurement_is_a_conflict(tmp_path: Path) -> None:
    a, b = study(tmp_path / "a"), study(tmp_path / "b", make_tools(slope=0.5)[0])
    where = r"measurements \(model small, text prose, scope attention, layer 0, n 2, sample \d\)"
    remedy = "Merge studies with the same settings, texts, lengths and samples"
    refused([a, b], tmp_path / "out", where + " has the interval .* " + remedy)
    assert not (tmp_path / "out").exists()


def test_values_whose_intervals_meet_are_the_same_and_the_first_is_kept(tmp_path: Path) -> None:
    a, b = study(tmp_path / "a"), study(tmp_path / "b", make_tools(slope=0.25 + 1e-7)[0])
    assert rows_of(a) != rows_of(b)
    assert merge_stores([a, b], tmp_path / "out").total == 45
    assert rows_of(tmp_path / "out") == rows_of(a)


def test_one_number_for_two_sequences_is_a_conflict(tmp_path: Path) -> None:
    layers = [Ranges.parse(words, "layers") for words in ("0", "1")]
    a = study(tmp_path / "a", lengths=(4,), samples=2, layers=layers[0])
    b = study(tmp_path / "b", lengths=(4,), samples=3, layers=layers[1])
    # The report would show the shares of one sequence on the tokens of the other.
    refused(
        [a, b], tmp_path / "out", r"sequence 0 of 4 tokens of 'prose' with 'small' begins at token \d+ in"
    )
    assert not (tmp_path / "out").exists()


def test_sequences_that_overlap_are_a_conflict(tmp_path: Path) -> None:
    a = study(tmp_path / "a", lengths=(30,), samples=8)
    b = study(tmp_path / "b", lengths=(20,), samples=8)
    refused([a, b], tmp_path / "out", "sequences of 'prose' with 'small' overlap")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    a = study(tmp_path / "a")
    with pytest.raises(ArgumentError, match="which has none"):
        merge_stores([a, tmp_path / "none"], tmp_path / "out")
    with pytest.raises(ArgumentError, match="each store once"):
        merge_stores([a, a / ".." / "a" / STORE_NAME], tmp_path / "out")
    with pytest.raises(ArgumentError, match="another folder than those merged"):
        merge_stores([a], a)
    with pytest.raises(ArgumentError, match="at least one store"):
        merge_stores([], tmp_path / "out")
    Store.open(tmp_path / "empty").close()
    with pytest.raises(StoreError, match="there is nothing to merge"):
        merge_stores([tmp_path / "empty"], tmp_path / "out")
    assert merge_stores([tmp_path / "empty", a], tmp_path / "out").total == 45
    with sqlite3.connect(a / STORE_NAME) as connection:
        connection.execute("UPDATE measurements SET lipschitz = 9 WHERE rowid = 3")
    connection.close()
    with pytest.raises(StoreError, match=r"a/study.sqlite is damaged"):
        merge_stores([a], tmp_path / "second")


def test_a_merge_that_stops_halfway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = study(tmp_path / "a", layers=layers("0")), study(tmp_path / "b", layers=layers("1"))
    merge_stores([a], tmp_path / "out")
    before = rows_of(tmp_path / "out")

    def stop(self: Store) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "drop_failures_made_good", stop)
    with pytest.raises(KeyboardInterrupt):
        merge_stores([b], tmp_path / "out")
    assert rows_of(tmp_path / "out") == before
    monkeypatch.undo()
    assert merge_stores([b], tmp_path / "out").total == 30


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "draw_all", lambda *_: [])
    a, b = study(tmp_path / "a", layers=layers("0")), study(tmp_path / "b", layers=layers("1"))
    out = tmp_path / "out"
    assert main(["study", "--merge", str(a), str(b), "--out", str(out)]) == 0
    assert (
        "30 measurements were added, 0 were already there. The store now holds 30" in capsys.readouterr().out
    )
    assert (out / "report.html").exists()
    assert len(pd.read_csv(out / "measurements.csv")) == 30
    assert main(["study", "--merge", str(a), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_documented("study --merge", found)
    assert (found["added"], found["same"], found["total"]) == (0, 15, 30)
    study(tmp_path / "c", seed=1)
    assert main(["study", "--merge", str(tmp_path / "c"), "--out", str(out)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
