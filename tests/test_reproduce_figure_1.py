from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from howsmooth.errors import HowsmoothError, StoreError
from howsmooth.reproduce.columns import columns_of
from howsmooth.reproduce.drawing.figure_1 import draw
from howsmooth.reproduce.drawing.panels import panel_table, panel_words, quarter_line, read_panels
from howsmooth.reproduce.experiment import Request, Step
from howsmooth.reproduce.figure_1 import FIGURE_1
from howsmooth.reproduce.loading import remembering
from howsmooth.study.plan import ModelSpec
from howsmooth.study.ranges import Ranges
from howsmooth.study.store import Store
from howsmooth.study.tools import Tools, default_tools

from ._study import FakeModel, Work, make_tools, words

HOSTILE = "$x_{$\x1b[31m\u202ename\\frac"
DEEP = FakeModel(layers=9)


def tools_of_figure_1(**options: Any) -> tuple[Tools, Work]:
    """The three models of the paper as stand-ins; those with a variant are masked."""
    masked: set[int] = set()
    base, work = make_tools(
        models={"builtin-encoder": FakeModel(), "gpt2": DEEP, "other": FakeModel(layers=2)},
        texts={"python-docs": words(4000), "python-code": words(5000)},
        **options,
    )

    def load_model(name: str, **asked: Any) -> FakeModel:
        found = base.load_model(name, **asked)
        # An object of its own, as each loading gives one.
        model = FakeModel(layers=found.layers, heads=found.heads)
        if asked["as_decoder"] or asked["random_init"]:
            masked.add(id(model))
        kept.append(model)
        return model

    def capture(model: FakeModel, *arguments: Any, **named: Any) -> list[Any]:
        sites = base.capture(model, *arguments, **named)
        for site in sites:
            site.causal = id(model) in masked
        return sites

    kept: list[FakeModel] = []
    return Tools(load_model, base.load_text, capture, base.measure), work


def request(**changes: Any) -> Request:
    return Request(**({"lengths": (2, 4, 8, 16), "samples": 3} | changes))


def measured(folder: Path, tools: Tools, **changes: Any) -> list[Step]:
    steps: list[Step] = []
    FIGURE_1.measure(request(**changes), folder, tools, steps.append)
    return steps


def said_of(folder: Path) -> tuple[list[str], pd.DataFrame]:
    """What is said of a figure and its table, without drawing it."""
    panels = [panel for column in read_panels(folder)[0] for panel in column]
    return panel_words(panels), panel_table(panels)


# ---------------------------------------------------------------- columns


def test_the_columns_are_the_papers() -> None:
    tools, _ = tools_of_figure_1()
    found = [(one.spec.label, one.layer) for one in columns_of(request(), tools)]
    assert found == [
        ("builtin-encoder", 0),
        ("builtin-encoder (as decoder)", 2),  # it has three layers
        ("gpt2 (random init)", 6),
    ]


def test_models_and_layers_that_are_asked_for_replace_them() -> None:
    tools, _ = tools_of_figure_1()
    asked = request(models=(ModelSpec("other"),), layers=Ranges.parse("0,-1", "layers"))
    assert [(one.spec.label, one.layer) for one in columns_of(asked, tools)] == [("other", 0), ("other", 1)]


def test_a_layer_that_does_not_exist_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    tools, work = tools_of_figure_1()
    with pytest.raises(HowsmoothError, match="layers of builtin-encoder, which has 3"):
        measured(tmp_path, tools, layers=Ranges.parse("6", "layers"))
    assert not work.measured
    assert not list(tmp_path.iterdir())


def test_which_layer_is_masked_is_seen_in_the_real_models() -> None:
    specs = (ModelSpec("builtin-encoder"), ModelSpec("builtin-decoder"))
    found = columns_of(Request(models=specs, texts=("python-code",)), default_tools())
    assert [(one.layer, one.causal, one.width) for one in found] == [(0, False, 256), (3, True, 256)]


# ---------------------------------------------------------------- measuring


def test_the_same_again_measures_nothing_and_more_lengths_only_these(tmp_path: Path) -> None:
    tools, work = tools_of_figure_1()
    steps = measured(tmp_path, tools)
    first = len(work.measured)
    assert first == 3 * 2 * 4 * 3  # columns, texts, lengths, samples
    assert 0 < steps[0].planned == steps[-1].planned == steps[-1].done
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    measured(tmp_path, tools)
    assert len(work.measured) == first
    measured(tmp_path, tools, lengths=(2, 4, 8, 16, 32))
    assert {n for _, _, _, n, _ in work.measured[first:]} == {32}


def test_an_interrupted_figure_goes_on_where_it_was(tmp_path: Path) -> None:
    def stop(calls: int) -> None:
        if calls == 5:
            raise KeyboardInterrupt

    tools, work = tools_of_figure_1(before_measure=stop)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, tools)
    done = len(work.measured)
    assert 0 < done < 72
    tools, work = tools_of_figure_1()
    measured(tmp_path, tools)
    assert len(work.measured) == 72 - done


def test_models_are_not_loaded_again_and_again(tmp_path: Path) -> None:
    tools, work = tools_of_figure_1()
    measured(tmp_path, tools)
    # Each variant once to be looked at; then once for all, the untrained one once a text, as a tokenizer may
    # be trained on it.
    assert work.loads == ["builtin-encoder", "builtin-encoder", "gpt2"] * 2 + ["gpt2"]


def test_no_time_is_spent_on_bounds(tmp_path: Path) -> None:
    def bound(*arguments: Any, **named: Any) -> Any:
        raise AssertionError

    tools, _ = tools_of_figure_1()
    measured(tmp_path, replace(tools, bound=bound))


def test_remembered_models_of_another_name_are_let_go() -> None:
    base, work = make_tools(models={"a": FakeModel(), "b": FakeModel()})
    tools = remembering(base)
    for name in ("a", "a", "b", "a"):
        tools.load_model(name, seed=0)
    assert work.loads == ["a", "b", "a"]
    assert tools.load_text("prose") is tools.load_text("prose")


# ---------------------------------------------------------------- what is said


def test_what_is_said_comes_from_the_numbers(tmp_path: Path) -> None:
    tools, _ = tools_of_figure_1(slope=0.25)
    measured(tmp_path, tools, lengths=(2, 4, 8, 16, 32), samples=10)
    seen, table = said_of(tmp_path)
    note = json.loads((tmp_path / "asked.json").read_text())
    folders = {one["model"]: one["folder"] for one in note["columns"]}
    for row in table.itertuples():
        with Store.open(tmp_path / folders[row.model], write=False) as store:
            rows = store.contents().measurements
        rows = rows[rows["text"] == row.text]
        slope = np.polyfit(np.log(rows["n"]), np.log(rows["lipschitz"]), 1)[0]
        assert row.exponent == pytest.approx(slope, abs=1e-12)
        words = next(one for one in seen if one.startswith(f"{row.model}, layer") and row.text in one)
        assert f"n to the power {slope:.2f} (95 % interval {row.low:.2f} to {row.high:.2f})" in words
    inside = int(((table["low"] <= 0.25) & (table["high"] >= 0.25)).sum())
    assert f"The interval contains 1/4 in {inside} of 6 panels" in seen[0]


@pytest.mark.parametrize(
    ("slope", "words"), [(0.5, "wholly above 1/4 in 6 and wholly below in 0"), (0.0, "below in 6")]
)
def test_other_exponents_are_told_from_a_quarter(tmp_path: Path, slope: float, words: str) -> None:
    tools, _ = tools_of_figure_1(slope=slope)
    measured(tmp_path, tools, lengths=(2, 4, 8, 16, 32), samples=10)
    said = said_of(tmp_path)[0][0]
    assert "contains 1/4 in 0 of 6 panels" in said
    assert words in said


def test_the_figure_shows_what_was_asked_last_and_not_all_that_is_there(tmp_path: Path) -> None:
    tools, _ = tools_of_figure_1()
    measured(tmp_path, tools, lengths=(2, 4, 8, 16, 32), samples=6)
    measured(tmp_path, tools, lengths=(2, 4, 8), samples=2, texts=("python-code",))
    _, table = said_of(tmp_path)
    assert list(table["text"].unique()) == ["python-code"]
    assert list(table["sequences"]) == [6, 6, 6]


def test_unconverged_measurements_are_counted_and_neither_drawn_nor_fitted(tmp_path: Path) -> None:
    tools, _ = tools_of_figure_1()

    def loose(*arguments: Any, **named: Any) -> Any:
        found = tools.measure(*arguments, **named)
        converged = found.converged.clone()
        converged[0] = False
        value = torch.where(converged, found.value, 1e6)
        return SimpleNamespace(**{**vars(found), "converged": converged, "value": value, "upper": value * 3})

    measured(tmp_path, Tools(tools.load_model, tools.load_text, tools.capture, loose))
    seen, table = said_of(tmp_path)
    assert all("4 measurements are left out" in words for words in seen[1:])
    assert list(table["sequences"]) == [8] * 6
    assert table["exponent"].abs().max() < 2


def test_the_line_of_slope_a_quarter_has_the_factor_of_least_squares() -> None:
    n = np.array([2.0, 5.0, 9.0, 30.0])
    lipschitz = np.array([1.0, 3.0, 2.0, 5.0])
    factor, around = quarter_line(n, lipschitz)
    grid = np.exp(np.linspace(-2, 2, 400_001))
    misfit = sum((np.log(grid * a**0.25) - math.log(b)) ** 2 for a, b in zip(n, lipschitz, strict=True))
    assert factor == pytest.approx(grid[misfit.argmin()], rel=1e-5)
    assert around == pytest.approx(math.sqrt(misfit.min() / 3), rel=1e-6)


def test_drawing_needs_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, _ = tools_of_figure_1()
    measured(tmp_path, tools)
    monkeypatch.setattr("howsmooth.study.run.run", None)
    monkeypatch.setattr("howsmooth.models.load_model", None)
    said = FIGURE_1.draw(tmp_path)
    (picture,) = said.pictures
    assert picture.png.read_bytes().startswith(b"\x89PNG")
    content = picture.pdf.read_bytes()
    assert content.startswith(b"%PDF")
    assert b"/Type3" not in content
    assert b"/Subtype /Type0" in content or b"/TrueType" in content or b"/CIDFontType2" in content
    assert "gpt2 (random init), layer 6" in picture.alt


def test_more_than_three_columns_go_on_in_another_picture(tmp_path: Path) -> None:
    tools, _ = tools_of_figure_1()
    measured(tmp_path, tools, models=(ModelSpec("gpt2"),), layers=Ranges.parse("0:3", "layers"))
    assert [one.pdf.name for one in draw(tmp_path).pictures] == ["figure-1.pdf", "figure-1-2.pdf"]


def test_hostile_names_of_texts_are_only_drawn(tmp_path: Path) -> None:
    base, _ = make_tools(texts={HOSTILE: words(4000)})
    FIGURE_1.measure(
        request(models=(ModelSpec("small"),), texts=(HOSTILE,)), tmp_path, base, lambda step: None
    )
    said = draw(tmp_path)
    assert all(words.isprintable() for words in said.seen)


def test_without_a_measurement_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"says what was measured here, and cannot be read"):
        draw(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tools, _ = tools_of_figure_1()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        measured(tmp_path / "file", tools)


# ---------------------------------------------------------------- as published


@pytest.mark.slow
def test_the_published_quantity_stands_beside_the_corrected_one(tmp_path: Path) -> None:
    asked = Request(
        models=(ModelSpec("builtin-encoder"),),
        texts=("python-code",),
        lengths=(4, 8, 16),
        samples=2,
        as_published=True,
    )
    FIGURE_1.measure(asked, tmp_path, default_tools(), lambda step: None)
    said = FIGURE_1.draw(tmp_path)
    row = said.tables[0][1].iloc[0]
    with Store.open(next(tmp_path.glob("columns/*")), write=False) as store:
        rows = store.published()
    theirs = rows[rows["quantity"] == "as published"]
    assert row["published exponent"] == pytest.approx(
        np.polyfit(np.log(theirs["n"]), np.log(theirs["lipschitz"]), 1)[0], abs=1e-9
    )
    assert any("As published, the quantity goes like" in words for words in said.seen)
