from __future__ import annotations

import math
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from howsmooth.errors import HowsmoothError
from howsmooth.paper.figure_1 import result_sentences
from howsmooth.paper.figure_definition import choose_figures
from howsmooth.paper.figure_measurements import models_for, opened_bench
from howsmooth.paper.growth_with_length import LengthGrowth
from howsmooth.paper.model_with_texts import models_of
from howsmooth.paper.plotting import with_slope
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.paper.reproduction import make
from howsmooth.results.drawing import logarithmic, shades
from howsmooth.study.plans import ModelSpec
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import Measurement, PublishedValue
from howsmooth.study.runner import Means
from howsmooth.study.store import Store
from tests._figures import OTHER, Told, shown
from tests._study import FakeModel, Tools, Work, installed, make_tools, words

DEEP = FakeModel(layers=9)
(FIGURE_1,) = choose_figures(["figure-1"])

Panels = list[list[LengthGrowth]]


def tools_of_figure_1(**options: Any) -> tuple[Tools, Work]:
    """The three models of the paper as stand-ins; those with a variant are masked."""
    masked: set[int] = set()
    base, work = make_tools(
        models={"builtin-encoder": FakeModel(), "gpt2": DEEP, "other": FakeModel(layers=2)},
        texts={"prose": words(4000), "verse": words(5000)},
        **options,
    )
    kept: list[FakeModel] = []

    def load_model(name: str, **asked: Any) -> FakeModel:
        # An object of its own, as each loading gives one.
        kept.append(model := replace(base.load_model(name, **asked)))
        if asked["as_decoder"] or asked["random_init"]:
            masked.add(id(model))
        return model

    def capture(model: FakeModel, *arguments: Any, **named: Any) -> list[Any]:
        sites = base.capture(model, *arguments, **named)
        for site in sites:
            site.causal = id(model) in masked
        return sites

    return replace(base, load_model=load_model, capture=capture), work


def test_the_columns_are_the_papers_or_those_asked_for(tmp_path: Path) -> None:
    def columns(tools: Tools | None, **changes: Any) -> list[tuple[str, int]]:
        asked = options(**changes)
        means = Means(models=models_for(asked))
        with (
            installed(tools) if tools else nullcontext(),
            opened_bench(FIGURE_1, asked, tmp_path, means) as bench,
        ):
            models_of(bench)
        subjects = [study.subjects[0] for study in bench.studies]
        return [(subject.model.label, layer) for subject in subjects for layer in subject.layers]

    tools, work = tools_of_figure_1()
    assert columns(tools) == [
        ("builtin-encoder", 0),
        ("builtin-encoder (as decoder)", 2),  # it has three layers
        ("gpt2 (random init)", 6),
    ]
    asked = {"models": (ModelSpec("other"),), "layers": Ranges.parse("0,-1", "layers")}
    assert columns(tools, **asked) == [("other", 0), ("other", 1)]
    # The last layer of a real masked model.
    specs = (ModelSpec("builtin-encoder"), ModelSpec("builtin-decoder"))
    assert columns(None, models=specs, texts=("alice",)) == [("builtin-encoder", 0), ("builtin-decoder", 3)]
    with pytest.raises(HowsmoothError, match="layers of builtin-encoder, which has 4"):
        measured(tmp_path / "none", tools, layers=Ranges.parse("6", "layers"))
    assert not work.measured
    assert not list((tmp_path / "none").glob("*"))


def options(**changes: Any) -> FigureOptions:
    return FigureOptions(**({"texts": ("prose", "verse"), "lengths": (2, 4, 8, 16), "samples": 3} | changes))


def measured(folder: Path, tools: Tools, told: Told | None = None, **changes: Any) -> Panels:
    """Measure with stand-ins."""
    asked = options(**changes)
    means = Means(told or Told(), models=models_for(asked))
    with installed(tools), opened_bench(FIGURE_1, asked, folder, means) as bench:
        found: Panels = FIGURE_1.measure(bench)
    return found


def said_of(folder: Path, tools: Tools, **changes: Any) -> tuple[list[str], pd.DataFrame]:
    """Measure; what is said of the figure and its table, without drawing it."""
    found = measured(folder, tools, **changes)
    panels = [panel for column in found for panel in column]
    return result_sentences(panels), pd.DataFrame([panel.columns() for panel in panels])


def test_workers_share_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.study.executors.memory_budget", lambda *_: 1000)
    asked, (tools, _) = options(), tools_of_figure_1()
    with installed(tools), ProcessPoolExecutor(4) as pool:
        means = Means(executor=pool, models=models_for(asked))
        with opened_bench(FIGURE_1, asked, tmp_path, means) as bench:
            models = models_of(bench)
    assert {model.plan.memory for model in models} == {250}


def test_the_same_again_measures_nothing_and_more_lengths_only_these(tmp_path: Path) -> None:
    tools, work = tools_of_figure_1()
    measured(tmp_path, tools, told := Told())
    assert told.shares[-1] == pytest.approx(1)
    # Each variant is loaded to be looked at, and then for each text in turn.
    assert len(work.loads) <= 3 * 3
    done = len(work.measured)
    assert done == 3 * 2 * 4 * 3  # columns, texts, lengths, samples
    assert not work.bounded  # no time is spent on bounds
    measured(tmp_path, tools)
    assert len(work.measured) == done
    measured(tmp_path, tools, lengths=(2, 4, 8, 16, 32))
    assert {n for _, _, _, n, _ in work.measured[done:]} == {32}


@pytest.mark.parametrize(("slope", "place"), [(0.5, "above"), (0.0, "below")])
def test_unconverged_measurements_are_left_out_and_exponents_told_from_a_quarter(
    tmp_path: Path, slope: float, place: str
) -> None:
    tools, _ = tools_of_figure_1(slope=slope)

    def loose(*arguments: Any, **named: Any) -> Any:
        found = tools.measure(*arguments, **named)
        converged = found.converged.clone()
        converged[0] = False
        value = torch.where(converged, found.value, 1e6)
        return SimpleNamespace(**{**vars(found), "converged": converged, "value": value, "upper": value * 3})

    asked = {"lengths": (2, 4, 8, 16, 32), "samples": 10}
    seen, table = said_of(tmp_path, replace(tools, measure=loose), **asked)
    assert "contains 1/4 in 0 of 6 panels" in seen[0]
    assert f"{place} 1/4 in 6" in seen[0] or f"{place} in 6" in seen[0]
    assert all("5 measurements are left out" in words for words in seen[1:])
    assert list(table["sequences"]) == [45] * 6


def test_what_is_said_comes_from_the_numbers(tmp_path: Path) -> None:
    tools, _ = tools_of_figure_1(slope=0.25)
    asked = {"lengths": (2, 4, 8, 16, 32), "samples": 10}
    seen, table = said_of(tmp_path, tools, **asked)
    with Store.open(tmp_path, write=False) as store:
        measurements = store.table(Measurement)
    assert len(table) == 6
    for row in table.itertuples():
        rows = measurements[(measurements["model"] == row.model) & (measurements["text"] == row.text)]
        slope = np.polyfit(np.log(rows["n"]), np.log(rows["lipschitz"]), 1)[0]
        assert row.exponent == pytest.approx(slope, abs=1e-12)
        words = next(one for one in seen if one.startswith(f"{row.model}, layer") and row.text in one)
        assert f"n to the power {slope:.2f} (95 % interval {row.low:.2f} to {row.high:.2f})" in words
    inside = int(((table["low"] <= 0.25) & (table["high"] >= 0.25)).sum())
    assert f"The interval contains 1/4 in {inside} of 6 panels" in seen[0]
    # A later options shows what it asks for, and not all that is there.
    _, table = said_of(tmp_path, tools, lengths=(2, 4, 8), samples=2, texts=("verse",))
    assert list(table["text"].unique()) == ["verse"]
    assert list(table["sequences"]) == [6, 6, 6]


def test_the_line_of_slope_a_quarter_has_the_factor_of_least_squares() -> None:
    n = np.array([2.0, 5.0, 9.0, 30.0])
    lipschitz = np.array([1.0, 3.0, 2.0, 5.0])
    rows = pd.DataFrame({"n": n, "lipschitz": lipschitz})
    (line,) = with_slope(rows, "n", "lipschitz", 0.25, "", "black")
    factor = line.y[0] / 2**0.25
    assert list(line.x) == [2, 30]
    assert line.y[1] == pytest.approx(factor * 30**0.25)
    grid = np.exp(np.linspace(-2, 2, 400_001))
    misfit = sum((np.log(grid * a**0.25) - math.log(b)) ** 2 for a, b in zip(n, lipschitz, strict=True))
    assert factor == pytest.approx(grid[misfit.argmin()], rel=1e-5)


def test_more_than_three_columns_go_on_in_another_picture(tmp_path: Path) -> None:
    base, _ = make_tools(models={"deep": DEEP}, texts={OTHER: words(4000)})
    asked = {"models": (ModelSpec("deep"),), "texts": (OTHER,), "layers": Ranges.parse("0:3", "layers")}
    said = shown(FIGURE_1, measured(tmp_path, base, **asked), tmp_path)
    names = ["figure-1.pdf", "figure-1-2.pdf", "figure-1-radius.pdf", "figure-1-radius-2.pdf"]
    assert [one.pdf.name for one in said.pictures] == names
    assert "deep, layer 3" in said.pictures[1].title


def test_the_second_row_is_against_the_mean_radius(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, _ = tools_of_figure_1()
    found = measured(tmp_path, tools, texts=("prose",))
    # Radii of their own: those of the stand-ins are all alike.
    rows = found[0][0].rows.assign(radius_mean=np.linspace(1, 3, len(found[0][0].rows)) ** 2)
    found = [[replace(found[0][0], rows=rows)]]
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        "howsmooth.paper.plotting.write_picture",
        lambda canvas, _, stem, *__, **___: drawn.update({stem: canvas}),
    )
    ((_, table),) = FIGURE_1.show(found, tmp_path).tables
    for stem, across, colour in (("figure-1", "n", "radius_mean"), ("figure-1-radius", "radius_mean", "n")):
        axis, bar = drawn[stem].axes
        dots = next(one for one in axis.collections if len(one.get_offsets()) == len(rows))
        np.testing.assert_allclose(dots.get_offsets(), rows[[across, "lipschitz"]])
        shown = shades(rows[colour], logarithmic(rows[colour].to_numpy()))
        np.testing.assert_allclose(dots.get_facecolors()[:, :3], shown[:, :3])
        assert axis.get_xlabel().startswith({"n": "sequence length", "radius_mean": "mean radius"}[across])
        assert bar.get_xlabel() == {"n": "sequence length", "radius_mean": "mean radius"}[colour]
    together = np.corrcoef(np.log(rows["radius_mean"]), np.log(rows["lipschitz"]))[0, 1]
    assert table["correlation of constant and radius"][0] == pytest.approx(together, abs=1e-12)
    assert (table["radius from"][0], table["radius to"][0]) == (1, 9)


@pytest.mark.slow
def test_the_published_quantity_stands_beside_the_corrected_one(tmp_path: Path) -> None:
    asked = {
        "models": (ModelSpec("builtin-encoder"),),
        "texts": ("alice",),
        "lengths": (4, 8, 16),
        "samples": 2,
        "as_published": True,
    }
    said = make(FIGURE_1, options(**asked), tmp_path, Means(models=models_for(options(**asked))))
    row = said.tables[0][1].iloc[0]
    with Store.open(tmp_path / "figure-1", write=False) as store:
        rows = store.table(PublishedValue)
    theirs = rows[rows["quantity"] == "as published"]
    assert row["published exponent"] == pytest.approx(
        np.polyfit(np.log(theirs["n"]), np.log(theirs["lipschitz"]), 1)[0], abs=1e-9
    )
    assert any("As published, the quantity goes like" in words for words in said.seen)
