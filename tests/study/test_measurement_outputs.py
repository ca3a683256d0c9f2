"""Figures, tables and the page, from stores made by stand-ins."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from PIL import Image

import howsmooth as hs
from howsmooth.errors import ArgumentError, StoreError
from howsmooth.results.drawing import add_colourbar, linear_ticks, log_ticks, new_figure, png, save
from howsmooth.study import figures
from howsmooth.study.measurement_outputs import Outputs, write_outputs
from howsmooth.study.plans import ModelSpec
from howsmooth.study.ranges import Ranges
from howsmooth.words import decimal, file_stem, readable
from tests._study import FakeModel, make_plan, make_tools, run

FIRST = Ranges.parse("0", "layers")


class Page(HTMLParser):
    """What a browser would make of a page: its elements and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    @property
    def scripts(self) -> list[str | None]:
        """Their types; None for the one that runs."""
        return [attributes.get("type") for tag, attributes in self.elements if tag == "script"]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    folder = tmp_path_factory.mktemp("published")
    tools, _ = make_tools()
    plan = make_plan(layers=Ranges.parse("0,1", "layers"), scopes=("attention", "head"))
    run(plan, folder, tools, command="howsmooth measure small")
    return write_outputs(folder, figures="all")


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


@pytest.fixture(scope="module")
def page(published: Outputs) -> Page:
    return Page(published.report.read_text(encoding="utf-8"))


def test_the_csv_has_the_columns_of_the_design_and_is_sorted(published: Outputs) -> None:
    table = pd.read_csv(published.report.with_name("measurements.csv"))
    assert tuple(table.columns) == (
        "model", "layer", "head", "scope", "causal", "text", "sample", "n", "radius_mean", "radius_max",
        "lipschitz", "lower", "upper", "confidence", "converged", "iterations", "seconds", "seed",
        "stored", "computed",
    )  # fmt: skip
    assert set(table["stored"]) == set(table["computed"]) == {"float32"}
    assert len(table) == 3 * 5 * (2 + 4)
    keys = ["model", "text", "scope", "layer", "head", "n", "sample"]
    pd.testing.assert_frame_equal(table, table.sort_values(keys).reset_index(drop=True))
    assert table.loc[table["scope"] == "attention", "head"].isna().all()
    assert set(table.loc[table["scope"] == "head", "head"]) == {0, 1}
    assert not table["head"].astype(str).str.contains(r"\.[1-9]").any()


def test_values_survive_the_csv_to_the_last_digit(published: Outputs) -> None:
    table = pd.read_csv(published.report.with_name("measurements.csv"))
    np.testing.assert_array_equal(table["lipschitz"], published.contents.measurements["lipschitz"])
    assert table["seed"].tolist() == published.contents.measurements["seed"].tolist()


def test_every_layer_and_head_has_a_figure_and_every_scope_an_overview(published: Outputs) -> None:
    shown = [(p.title.partition("prose: ")[2], p.overview) for p in published.pictures]
    attention = [("every layer", True), ("layer 0", False), ("layer 1", False)]
    heads = [("every layer and head", True)]
    heads += [(f"layer {layer}, head {head}", False) for layer in range(2) for head in range(2)]
    assert shown == attention + heads
    files = [path for picture in published.pictures for path in (picture.png, picture.pdf)]
    assert len(set(files)) == len(files) == 16
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files if path.suffix == ".png")
    assert all(path.read_bytes().startswith(b"%PDF") for path in files if path.suffix == ".pdf")
    assert published.pictures[1].png.name == "small--prose--attention--layer-00.png"


def test_on_a_phone_the_panels_stand_below_each_other(published: Outputs) -> None:
    text = published.page()
    for picture in published.pictures:
        wide, narrow = Image.open(picture.png), Image.open(io.BytesIO(picture.narrow))
        assert narrow.width < wide.width / 1.3
        assert narrow.height > narrow.width
        source = f'srcset="data:image/png;base64,{base64.b64encode(picture.narrow).decode()}"'
        assert source in text


def test_the_same_store_gives_the_same_files(tmp_path: Path) -> None:
    run(make_plan(layers=FIRST), tmp_path, make_tools()[0])
    published = write_outputs(tmp_path, figures="all")
    first = published.pictures[0]
    files = [
        published.report,
        published.report.with_name("measurements.csv"),
        published.report.with_name("exponents.csv"),
        first.png,
        first.pdf,
    ]
    before = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    write_outputs(tmp_path, figures="all")
    assert [path.read_bytes() for path in files] == before


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
    shown = [(one.title, one.overview) for one in written.pictures]
    title = "scope attention, text prose: every layer"
    assert shown == [(f"other, {title}", True), (f"small, {title}", True)]
    assert len(list((tmp_path / "figures").iterdir())) == 4
    page = written.report.read_text(encoding="utf-8")
    assert page.count("data:image") == 2 * len(shown)  # wide and narrow
    assert 'id="scatter"' in page
    assert "second panel" not in page  # which the figures of single layers have
    with pytest.raises(ArgumentError, match=r"figures: expected one of page, all, got 'none'"):
        write_outputs(tmp_path, figures="none")


def test_the_page_holds_everything_and_asks_nobody(published: Outputs, page: Page) -> None:
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert len(images) == len(published.pictures)
    prefix = "data:image/png;base64,"
    for attributes in images:
        source = attributes["src"] or ""
        assert source.startswith(prefix)
        assert base64.b64decode(source.removeprefix(prefix)).startswith(b"\x89PNG")
        assert len(attributes["alt"] or "") > 40
    content = published.report.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href|action)\s*=\s*[\"']?(?!data:)[\w/.#:]*//", content)
    assert not [tag for tag, _ in page.elements if tag in ("link", "iframe", "object", "form")]
    assert page.scripts[-1] is None
    assert set(page.scripts[:-1]) == {"application/json"}
    assert "url(" not in content
    assert "@import" not in content.partition("<style>")[2].partition("</style>")[0]
    assert page.open == []


def test_the_page_says_what_a_newcomer_needs(page: Page) -> None:
    for needed in (
        "spectral norm",
        "exponent",
        "90 measurements, all converged",
        "contains the true constant",
        "0.999",
        "one attention head with its value projection only",
        "all heads and the output projection",
        "howsmooth measure small",
        "Made up.",
        "A stand-in.",
        "Words.",
        "torch",
        "seed 0",
        "without special tokens",
    ):
        assert needed in page.text, needed


def test_the_page_gives_the_exponents_of_the_table(published: Outputs, page: Page) -> None:
    for slope in published.exponents["slope"]:
        assert decimal(slope, 3) in page.text


def test_unconverged_measurements_are_counted_drawn_and_not_fitted(tmp_path: Path) -> None:
    tools, _ = make_tools()

    def sometimes(*arguments: object, **options: object) -> object:
        estimate = tools.measure(*arguments, **options)
        estimate.converged[0] = False  # type: ignore[index]
        estimate.value[0] *= 50  # type: ignore[index,operator]
        estimate.upper[0] *= 99  # type: ignore[index,operator]
        return estimate

    run(make_plan(layers=FIRST), tmp_path, dataclasses.replace(tools, measure=sometimes))
    published = write_outputs(tmp_path, figures="all")
    text = Page(published.report.read_text(encoding="utf-8")).text
    assert "15 measurements, of which 12 converged" in text
    assert "3 measurements did not reach the tolerance" in text
    assert published.exponents["left_out"].tolist() == [3]
    assert published.exponents["slope"].between(0.1, 0.4).all()


def test_a_study_without_exponents_is_published_all_the_same(tmp_path: Path) -> None:
    run(make_plan(lengths=(1,), layers=FIRST), tmp_path, make_tools()[0])
    published = write_outputs(tmp_path, figures="all")
    assert published.exponents["note"].tolist() == ["fewer than 3 lengths to fit"]
    assert "too few lengths to fit an exponent" in published.report.read_text(encoding="utf-8")


def test_zero_constants_are_published(tmp_path: Path) -> None:
    tools, _ = make_tools(slope=-math.inf)
    run(make_plan(layers=FIRST), tmp_path, tools)
    published = write_outputs(tmp_path, figures="all")
    assert published.exponents["left_out"].tolist() == [15]
    assert "15 constants are zero" in published.report.read_text(encoding="utf-8")


def test_untrained_and_retokenised_models_are_marked(tmp_path: Path) -> None:
    model = FakeModel(tokenizer_source="BPE trained on the text.")
    tools, _ = make_tools(models={"small": model})
    run(make_plan(models=(ModelSpec("small", random_init=True),), layers=FIRST), tmp_path, tools)
    text = write_outputs(tmp_path).report.read_text(encoding="utf-8")
    assert "small (random init)" in text
    assert "have untrained weights" in text
    assert "Where a tokenizer was trained on the text" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_outputs_that_cannot_be_written_are_said(tmp_path: Path) -> None:
    run(make_plan(layers=FIRST), tmp_path, make_tools()[0])
    (tmp_path / ".report.html.partial").symlink_to("/dev/full")
    with pytest.raises(
        StoreError, match=r"cannot be written: No space left on device. The measurements are saved"
    ):
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


def test_line_ends_and_tabs_are_recognised() -> None:
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
    page = Page(published.report.read_text(encoding="utf-8"))
    (row,) = published.exponents.to_dict("records")
    assert 0.001 < row["quarter"] < 1
    for name in (
        "quarter", "radius_correlation", "radius_correlation_low", "radius_correlation_high",
        "small_radius_slope", "middle_radius_slope", "large_radius_slope", "large_radius_low",
    ):  # fmt: skip
        assert not math.isnan(row[name])
        assert decimal(row[name], 3) in page.text


def test_colours_span_radii_that_are_nearly_equal() -> None:
    radii = pd.Series([4.0, 4.003, 4.006])
    norm = figures._radius_norm(radii)
    assert (norm.vmin, norm.vmax) == pytest.approx((4.0, 4.006))
    same = figures._radius_norm(radii * 0 + 4.0)  # rounding alone is no difference of colour
    assert same.vmax - same.vmin == pytest.approx(8e-4)


def test_sequences_that_do_not_overlap_are_not_blamed(page: Page) -> None:
    assert "No two windows overlap, whatever their lengths." in page.text
    assert "overlap others" not in page.text


def test_the_name_of_a_colour_bar_is_above_the_bar() -> None:
    # Beside the bar it would read as the name of an axis of the panel.
    figure = Figure()
    add_colourbar(figure, figure.subplots(), Normalize(1, 8), "radius R")
    _, bar = figure.axes
    assert (bar.get_ylabel(), bar.get_title(loc="right")) == ("", "radius R")


def test_a_panel_says_which_interval_excludes_zero() -> None:
    n = np.arange(4, 100)
    value = 1 + 0.1 * np.cos(n)
    rows = pd.DataFrame({"n": n, "lipschitz": value, "lower": value, "upper": value, "radius_mean": 1.0})
    rows = rows.assign(layer=0, head=None, converged=True)
    (part,) = figures._parts_of(rows)
    fit = dataclasses.replace(part.fit, slope=0.071, low=-0.003, high=0.145)
    part = part._replace(fit=fit)
    figure = figures._draw_overview([part], "text", "title")
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.071 [\N{MINUS SIGN}0.003, 0.145]"]
