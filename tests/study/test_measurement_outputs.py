"""Figures, tables and the page, from stores made by stand-ins."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import howsmooth as hs
from howsmooth.errors import ArgumentError, StoreError
from howsmooth.results.drawing import linear_ticks, log_ticks, new_figure, png, save
from howsmooth.study.measurement_outputs import Outputs, write_outputs
from howsmooth.study.plans import ModelSpec
from howsmooth.study.ranges import Ranges
from howsmooth.words import decimal, file_stem, readable
from tests._study import FakeModel, Tools, make_plan, make_tools, run

FIRST = Ranges.parse("0", "layers")


def test_the_csv_has_the_columns_of_the_design_is_sorted_and_loses_no_digit(published: Outputs) -> None:
    table = pd.read_csv(published.report.with_name("measurements.csv"))
    assert tuple(table.columns) == (
        "model", "layer", "head", "scope", "causal", "text", "sample", "n", "radius_mean", "radius_max",
        "lipschitz", "lower", "upper", "confidence", "converged", "iterations", "seconds", "seed",
        "stored", "computed",
    )  # fmt: skip
    assert set(table["stored"]) == set(table["computed"]) == {"float32"}
    assert len(table) == 3 * 5 * (3 + 6)
    keys = ["model", "text", "scope", "layer", "head", "n", "sample"]
    pd.testing.assert_frame_equal(table, table.sort_values(keys).reset_index(drop=True))
    assert table.loc[table["scope"] == "attention", "head"].isna().all()
    assert set(table.loc[table["scope"] == "head", "head"].astype(str)) == {"0.0", "1.0"}
    for name in ("lipschitz", "seed"):
        assert table[name].tolist() == published.contents.measurements[name].tolist()


def test_tables_in_python_are_those_in_the_files(published: Outputs) -> None:
    folder = published.report.parent
    tables = hs.read(folder)
    for name in ("measurements", "exponents"):
        written = pd.read_csv(folder / f"{name}.csv")
        written = written.fillna({"note": ""}) if "note" in written else written
        read = pd.DataFrame(tables[name])[list(written)]
        pd.testing.assert_frame_equal(read, written, check_dtype=False)
    extra = [name for name in tables["measurements"] if name not in pd.read_csv(folder / "measurements.csv")]
    assert extra == ["method", "masking", "site", "start", "input_energy", "output_energy", "run"]
    lines = tables["exponents"].attrs["howsmooth"].splitlines()
    assert len(lines) == 2  # scopes
    assert all(line.startswith("Local Lipschitz constant of small, scope ") for line in lines)
    assert "%" not in lines[0]  # LaTeX would begin a comment there


def test_every_layer_and_head_has_a_figure_and_every_scope_an_overview(published: Outputs) -> None:
    shown = [(p.title.partition("prose: ")[2], p.overview) for p in published.pictures]
    attention = [("every layer", True)] + [(f"layer {layer}", False) for layer in range(3)]
    heads = [(f"layer {layer}, head {head}", False) for layer in range(3) for head in range(2)]
    assert shown == [*attention, ("every layer and head", True), *heads]
    assert published.pictures[1].png.name == "small--prose--attention--layer-00.png"
    assert len({path for one in published.pictures for path in (one.png, one.pdf)}) == 2 * len(shown)
    text = published.report.read_text(encoding="utf-8")
    for one in published.pictures:
        assert one.pdf.read_bytes().startswith(b"%PDF")
        # On a phone the panels stand below each other.
        wide, narrow = Image.open(one.png), Image.open(io.BytesIO(one.narrow))
        assert narrow.width < wide.width / 1.3
        assert narrow.height > narrow.width
        assert f'srcset="data:image/png;base64,{base64.b64encode(one.narrow).decode()}"' in text


def test_the_same_store_gives_the_same_files(study: Any, tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
        shutil.copy(study.folder / "study.sqlite", folder)
        written = write_outputs(folder)
        assert written.report == folder / "report.html"
    names = sorted(path.relative_to(folders[0]) for path in folders[0].rglob("*") if path.is_file())
    assert len(names) == 6  # the store and its lock, tables, the page, one overview twice
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


@pytest.mark.filterwarnings("error")
def test_characters_that_the_font_lacks_give_no_warning(tmp_path: Path) -> None:
    figure = new_figure(2, 1)
    figure.suptitle("\u7231")
    assert png(figure)
    save(figure, tmp_path, "figure", "title")


def test_by_default_each_model_has_one_overview_and_the_page_draws_all_points(tmp_path: Path) -> None:
    models = tuple(ModelSpec(name) for name in ("small", "other"))
    tools, _ = make_tools(models={name.name: FakeModel() for name in models})
    run(make_plan(models=models, scopes=("head", "attention")), tmp_path, tools)
    written = write_outputs(tmp_path)
    title = "scope attention, text prose: every layer"
    assert [(one.title, one.overview) for one in written.pictures] == [
        (f"other, {title}", True),
        (f"small, {title}", True),
    ]
    assert len(list((tmp_path / "figures").iterdir())) == 4
    page = written.report.read_text(encoding="utf-8")
    assert page.count("data:image") == 2 * 2  # wide and narrow
    assert 'id="scatter"' in page
    with pytest.raises(ArgumentError, match=r"figures: expected one of page, all, got 'none'"):
        write_outputs(tmp_path, figures="none")


def test_the_page_says_where_the_numbers_came_from(published: Outputs) -> None:
    page = published.report.read_text(encoding="utf-8")
    for needed in (
        "135 measurements, all converged", "0.999", "howsmooth measure small", "Made up.", "A stand-in.",
        "Words.", "torch", "seed 0", "without special tokens", "No two windows overlap",
    ):  # fmt: skip
        assert needed in page, needed


def sometimes(tools: Tools) -> Tools:
    """Stand-ins whose first estimate of a batch does not converge."""

    def measure(*arguments: Any, **options: Any) -> Any:
        estimate = tools.measure(*arguments, **options)
        estimate.converged[0] = False
        estimate.value[0] *= 50
        estimate.upper[0] *= 99
        return estimate

    return dataclasses.replace(tools, measure=measure)


RETOKENISED = {"small": FakeModel(tokenizer_source="BPE trained on the text.")}


@pytest.mark.parametrize(
    ("changes", "tools", "column", "value", "words"),
    [
        ({}, sometimes(make_tools()[0]), "left_out", 3, "15 measurements, of which 12 converged"),
        ({"lengths": (1,)}, make_tools()[0], "note", "fewer than 3 lengths to fit", "too few lengths to fit"),
        ({}, make_tools(slope=-math.inf)[0], "left_out", 15, "15 constants are zero"),
        (
            {"models": (ModelSpec("small", random_init=True),)}, make_tools(models=RETOKENISED)[0],
            "model", "small (random init)", "Where a tokenizer was trained on the text",
        ),
    ],
)  # fmt: skip
def test_what_is_unusual_is_counted_and_said(
    tmp_path: Path, changes: dict[str, Any], tools: Tools, column: str, value: Any, words: str
) -> None:
    run(make_plan(layers=FIRST, **changes), tmp_path, tools)
    published = write_outputs(tmp_path, figures="all")
    assert published.exponents[column].tolist() == [value]
    if value == 3:
        assert published.exponents["slope"].between(0.1, 0.4).all()
    assert words in published.report.read_text(encoding="utf-8")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_outputs_that_cannot_be_written_are_said(study: Any, tmp_path: Path) -> None:
    shutil.copy(study.folder / "study.sqlite", tmp_path)
    (tmp_path / ".report.html.partial").symlink_to("/dev/full")
    with pytest.raises(StoreError, match=r"cannot be written: No space left .* The measurements are saved"):
        write_outputs(tmp_path)


@given(st.text(max_size=200), st.text(max_size=200))
def test_file_names_are_harmless_and_never_shared(one: str, other: str) -> None:
    stem = file_stem(one)
    assert re.fullmatch(r"[a-z0-9.-]+", stem)
    assert not stem.startswith(".")
    assert len(stem) < 140
    assert (stem == file_stem(other)) == (one == other)
    assert file_stem(one, other) != file_stem(other, one) or one == other


@given(st.text(max_size=200))
def test_readable_names_stay_on_their_line(words: str) -> None:
    assert readable(words).isprintable()
    assert len(readable(words)) <= 60
    assert readable("a\n\tb\r\x1b") == "a↵→b↵\N{REPLACEMENT CHARACTER}"


@given(st.floats(1e-6, 1e6), st.floats(1.02, 1e6))
def test_ticks_are_within_the_axis_and_neither_none_nor_many(low: float, factor: float) -> None:
    high = low * factor
    for ticks in (log_ticks(low, high), linear_ticks(low, high)):
        assert 2 <= len(ticks) <= 12
        assert ticks == sorted(ticks)
        assert low <= ticks[0] * (1 + 1e-9)
        assert ticks[-1] <= high * (1 + 1e-9)


def test_the_page_gives_the_test_of_a_quarter_and_the_exponents_at_three_radii(tmp_path: Path) -> None:
    run(make_plan(layers=FIRST, lengths=(2, 4, 8, 16), samples=12), tmp_path, make_tools()[0])
    published = write_outputs(tmp_path)
    page = published.report.read_text(encoding="utf-8")
    (row,) = published.exponents.to_dict("records")
    assert 0.001 < row["quarter"] < 1
    for name in (
        "slope", "quarter", "radius_correlation", "radius_correlation_low", "radius_correlation_high",
        "small_radius_slope", "middle_radius_slope", "large_radius_slope", "large_radius_low",
    ):  # fmt: skip
        assert not math.isnan(row[name])
        assert decimal(row[name], 3) in page
