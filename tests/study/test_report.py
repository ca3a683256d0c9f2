"""The report in a real browser: what it shows, how it answers, and what it refuses to run."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from howsmooth.study import report
from howsmooth.study.exponents import compare, exponents
from howsmooth.study.figures import draw_all
from howsmooth.study.progress_listener import Listener
from howsmooth.study.records import PLACE, Bounding, Contents, PublishedValue
from howsmooth.study.report import (
    MOST_ENERGIES,
    MOST_POINTS,
    bounds_data,
    headline,
    render,
    scatter_data,
    script_json,
    sensitivity_data,
    sharpest,
)
from howsmooth.words import decimal, visible_token
from tests._browser import Complaints, chromium, opened


def paged(contents: Contents, folder: Path, *, figures: bool = False) -> Path:
    """Render a page, with figures of one layer only, if any: they take time."""
    rows, drawn = contents.measurements, []
    if figures:
        one = rows.query("model == model.iloc[0] and layer == 0 and scope == 'attention'")
        drawn = draw_all(one, folder / "figures", Listener())
    file = folder / "report.html"
    file.write_text(render(contents, exponents(rows), compare(contents.published), drawn), encoding="utf-8")
    return file


@contextmanager
def quiet(browser: Any, file: Path, **options: Any) -> Iterator[Any]:
    """Open a page that must not complain, ask for anything, or run what is not its own."""
    with opened(browser, file, **options) as (page, heard):
        yield page
        assert heard == Complaints()
        assert page.evaluate("window.violations") == []
        assert page.evaluate("window.pwned") is None


def test_the_headline_counts_the_fits_in_which_the_constant_may_not_grow() -> None:
    fit = {"note": "", "slope": 0.1, "low": -0.1, "high": 0.3, "quarter": 0.2, "layer": 0, "head": None}
    fits = pd.DataFrame([fit, fit | {"layer": 1, "slope": 0.4, "low": 0.3, "high": 0.5, "quarter": 0.01}])
    said = headline(pd.DataFrame({"n": [2, 8], "lipschitz": [1.0, 2.0]}), fits)
    assert "between 0.100 (layer 0) and 0.400 (layer 1)" in said
    assert "(in 1 of 2 fits the interval contains 0, no growth)" in said
    assert "The interval of 1 of the 2 exponents contains 1/4." in said


UPLOT = Path(__file__).parents[2] / "src" / "howsmooth" / "study" / "templates" / "report" / "uplot"

# Each would set window.pwned, leave its element, or turn around the words behind it.
HOSTILE = (
    "<script>window.pwned = 1</script>",
    "</script><img src=x onerror='window.pwned = 2'>",
    "<!--<script>",
    "]]></style><svg onload='window.pwned = 3'>",
    "\u202etxet desrever\u202c",
    "\u2066\u2069\u200f\x00\x07\x1b[31m\u2028\u2029\ud800",
    "&lt;b&gt; &amp; \"quoted\" 'quoted' `${window.pwned = 4}` {{ 7 * 7 }}",
    "x" * 1_000_000,
)
ENERGIES = ("input_energy", "output_energy")
SENSITIVITY_COLUMNS = [*PLACE, *ENERGIES, "start", "place", "tokens", "converged", "run"]
PUBLISHED_COLUMNS = [*PublishedValue.columns(), "run"]
BOUND_COLUMNS = list(Bounding.columns())


def measured(
    models: tuple[str, ...] = ("other", "small"),
    texts: tuple[str, ...] = ("prose", "verse"),
    lengths: tuple[int, ...] = (2, 4, 8, 16),
) -> Contents:
    """Make up measurements in two scopes: three layers of two heads, five samples a length."""
    sites = [("attention", layer, None) for layer in range(3)]
    sites += [("head", layer, head) for layer in range(3) for head in range(2)]
    places = itertools.product(models, texts, sites, lengths, range(5))
    rows = pd.DataFrame(
        [(model, text, *site, n, sample) for model, text, site, n, sample in places],
        columns=["model", "text", "scope", "layer", "head", "n", "sample"],
    ).astype({"head": "Int64"})
    random = np.random.default_rng(0)
    value = (1 + rows["layer"]) * rows["n"] ** 0.25 * np.exp(0.1 * random.standard_normal(len(rows)))
    rows = rows.assign(
        lipschitz=value, lower=0.9999 * value, upper=1.0001 * value, converged=True,
        radius_mean=random.uniform(1, 8, len(rows)), masking="none", iterations=9, seconds=0.1,
        start=100 * rows["sample"], run=1,
    )  # fmt: skip
    run = {"started": "today", "finished": "today", "command": "howsmooth measure small", "environment": "{}"}
    return Contents(
        measurements=rows,
        models=pd.DataFrame({"label": models, "name": models}).assign(
            random_init=0, as_decoder=0, source="A stand-in.", stored="float32",
            layers=3, heads=2, max_length=64,
        ),
        texts=pd.DataFrame({"name": texts}).assign(
            digest="0", source="Made up.", characters=9, kind="text"
        ),
        inputs=pd.DataFrame(itertools.product(models, texts), columns=["model", "text"]).assign(
            fingerprint="0", tokenizer_source="Words.", tokens=9
        ),
        runs=pd.DataFrame([run]),
        failures=pd.DataFrame(),
        study={"seed": 0, "dtype": "float32", "rtol": 1e-4, "confidence": 0.999, "max_iterations": 200},
        sensitivities=pd.DataFrame(columns=SENSITIVITY_COLUMNS),
        bounds=pd.DataFrame(columns=BOUND_COLUMNS),
        published=pd.DataFrame(columns=PUBLISHED_COLUMNS).astype(
            {"settled": bool, "lower": float, "lipschitz": float}
        ),
    )  # fmt: skip


# Name, side, quantity, and the bound as a multiple of the constant; "refused" has none.
BOUNDS = pd.DataFrame(
    [
        ("measured", "lower", "‖D_X f‖", 1.0),
        ("near", "upper", "‖D_X f‖", 1.25),
        ("far", "upper", "Lip(f; B_R)", 8.0),
        ("elsewhere", "lower", "Lip(f; B_R)", 3.0),
        ("enormous", "upper", "Lip(f; B_R)", math.inf),
        ("refused", "upper", "‖D_X f‖", math.nan),
    ],
    columns=["name", "side", "quantity", "factor"],
)


def with_all(
    contents: Contents, tokens: tuple[str, ...] = ("One", " day", " a", " cat", ",\n", " again")
) -> Contents:
    """Add sensitivities, bounds and published values to measurements."""
    rows = contents.measurements
    first = rows[rows["sample"] == 0]
    energies = [np.arange(1.0, n + 1) / (n * (n + 1) / 2) for n in first["n"]]
    words = [[tokens[index % len(tokens)] for index in range(n)] for n in first["n"]]
    sensitivities = first.assign(
        place=0,
        tokens=words,
        input_energy=[energy.tolist() for energy in energies],
        output_energy=[energy[::-1].tolist() for energy in energies],
    )
    bounds = first.merge(BOUNDS, how="cross")
    value = bounds["lipschitz"] * bounds["factor"]
    bounds = bounds.assign(
        radius=2.5,
        value=value,
        log_value=np.log(value).where(bounds["name"] != "enormous", 5000.0),
        holds=value.notna(),
        source="Theorem of " + bounds["name"],
    )
    right = rows[rows["scope"] == "attention"].assign(quantity="corrected", items="", settled=True)
    wrong = right.assign(quantity="as published", items="output,stopping", lower=math.nan, upper=math.nan)
    wrong = wrong.assign(lipschitz=2 * right["lipschitz"] * right["n"] ** 0.25)
    published = pd.concat([right, wrong], ignore_index=True).assign(steps=9, seed=0, map="as it is")
    return dataclasses.replace(
        contents,
        sensitivities=sensitivities[SENSITIVITY_COLUMNS],
        bounds=bounds[BOUND_COLUMNS],
        published=published[PUBLISHED_COLUMNS],
    )


@pytest.fixture(scope="module")
def contents() -> Contents:
    return with_all(measured())


@pytest.fixture(scope="module")
def file(contents: Contents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paged(contents, tmp_path_factory.mktemp("page"), figures=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    with quiet(browser, file) as found:
        yield found


def choose(page: Any, fields: str, key: str, words: str) -> None:
    page.locator(f"#{fields} select[data-key='{key}']").select_option(label=words)


def test_the_policy_names_the_one_style_and_the_one_script(file: Path) -> None:
    content = file.read_text(encoding="utf-8")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', content)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.replace("&#39;", "'").split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for rule, element in (("style-src", "style"), ("script-src", "script")):
        (inside,) = re.findall(rf"<{element}>(.*?)</{element}>", content, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert not re.search(r"\sstyle=|\son\w+=|javascript:", content.partition("<script>")[0])


def test_the_plotting_library_is_the_published_one_with_its_licence(file: Path) -> None:
    notes = (UPLOT / "README.md").read_text(encoding="utf-8")
    (version,) = re.findall(r"version (\S+),", notes)
    digests = dict(re.findall(r"\| `(\S+)` \| `([0-9a-f]{64})` \|", notes))
    assert set(digests) == {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE"}
    for name, digest in digests.items():
        assert hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() == digest
    assert f"uPlot (v{version})" in (UPLOT / "uPlot.iife.min.js").read_text(encoding="utf-8")
    content = file.read_text(encoding="utf-8")
    assert (UPLOT / "LICENSE").read_text(encoding="utf-8") in content
    assert "Permission is hereby granted, free of charge" in content


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_embedded_data_are_json_and_nothing_else(value: Any) -> None:
    written = script_json(value)
    assert json.loads(written) == value
    assert not re.search("[<>&\u2028\u2029\ud800-\udfff]", written)
    with pytest.raises(ValueError, match="Out of range"):
        script_json([value, math.nan])


def test_the_lines_of_the_plot_are_those_of_the_table(contents: Contents) -> None:
    fits = exponents(contents.measurements)
    found = scatter_data(contents.measurements, fits, contents.published, compare(contents.published))
    assert found is not None
    names = found["names"]
    drawn = {
        (
            names["model"][g["model"]],
            names["text"][g["text"]],
            names["scope"][g["scope"]],
            g["layer"],
            g["head"],
        ): g
        for g in found["groups"]
        if names["quantity"][g["quantity"]] == "measured"
    }
    assert len(drawn) == len(fits) == 2 * 2 * (3 + 6)
    for row in fits.to_dict("records"):
        head = None if pd.isna(row["head"]) else row["head"]
        fit = drawn[row["model"], row["text"], row["scope"], row["layer"], head]["fit"]
        for name in ("slope", "intercept", "n_min", "n_max"):
            assert fit[name] == pytest.approx(row[name], rel=1e-6)
    for row, group, value in zip(
        contents.measurements.itertuples(), found["points"]["group"], found["points"]["value"], strict=False
    ):
        head = None if pd.isna(row.head) else row.head
        assert drawn[row.model, row.text, row.scope, row.layer, head] is found["groups"][group]
        assert value == pytest.approx(row.lipschitz, rel=1e-6)
    published = [g for g in found["groups"] if names["quantity"][g["quantity"]] == "as published"]
    right = [g for g in found["groups"] if names["quantity"][g["quantity"]] == "corrected"]
    assert len(published) == len(right) == 2 * 2 * 3
    for wrong, corrected in zip(published, right, strict=True):
        assert wrong["fit"]["slope"] == pytest.approx(corrected["fit"]["slope"] + 0.25, abs=1e-6)


def test_a_very_large_store_is_thinned_evenly_and_the_page_says_so(
    contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_POINTS == 50_000
    monkeypatch.setattr(report, "MOST_POINTS", 500)
    fits, compared = exponents(contents.measurements), compare(contents.published)
    found = scatter_data(contents.measurements, fits, contents.published, compared)
    assert found is not None
    shown, total = len(found["points"]["n"]), found["total"]
    assert total == len(contents.measurements) + len(contents.published) == 1200
    assert 250 < shown <= 500
    assert set(found["points"]["group"]) == set(range(len(found["groups"])))
    assert f"The plot shows {shown} of {total} measurements" in render(contents, fits, compared, [])
    # Sensitive tokens are thinned by length, keeping the longest.
    lengths = range(100, 900)
    shares = [[1 / n] * n for n in lengths]
    rows = contents.sensitivities.iloc[[0] * len(lengths)].assign(
        n=lengths, tokens=[["x"] * n for n in lengths], input_energy=shares, output_energy=shares
    )
    found = sensitivity_data(rows)
    assert found is not None
    kept = [row["n"] for row in found["rows"]]
    assert sum(2 * n for n in kept) <= MOST_ENERGIES * 1.01
    assert (max(kept), found["total"]) == (899, 800)
    assert len(set(np.diff(sorted(kept)))) == 1


def test_bounds_are_compared_with_what_was_measured(contents: Contents) -> None:
    found = bounds_data(contents.bounds, contents.measurements)
    assert found is not None
    table = sharpest(found)
    assert len(table) == 2 * 2 * 4 * (3 + 6)
    assert [row["head"] is None for row in table] == [True] * 48 + [False] * 96
    known = contents.measurements.set_index(["model", "text", "scope", "layer", "n", "sample"]).sort_index()
    for row in table:
        assert row["upper"]["name"] == "near"
        assert row["upper"]["ratio"] == pytest.approx(1.25, rel=1e-5)
        assert row["lower"]["name"] == "measured"  # not the one that speaks of the ball
        there = known.loc[[(row["model"], row["text"], row["scope"], row["layer"], row["n"], 0)]]
        (value,) = [one for one in there["lipschitz"] if row["measured"] == pytest.approx(one, rel=1e-6)]
        assert row["lower"]["value"] <= value
        assert row["upper"]["value"] >= 1.25 * value


@given(st.text(max_size=300))
def test_a_token_stays_in_its_place(token: str) -> None:
    assert visible_token(token)
    assert visible_token(token).isprintable()
    assert len(visible_token(token)) <= 40
    unseen = {"": "∅", "\n": "↵", " \t": " →", " a\xa0b": " a b", "\u202e": "\ufffd"}
    assert {one: visible_token(one) for one in unseen} == unseen


# ---- in the browser


def test_filters_choose_what_is_shown(page: Any, contents: Contents) -> None:
    rows = contents.measurements
    fits = exponents(rows).set_index(["model", "text", "scope", "layer"])
    said = page.locator("#scatter-summary")
    assert said.inner_text().startswith("60 measurements. 3 exponents.")  # the first model, text and scope
    for key, words, start in (
        ("layer", "layer 1", "20 measurements. One exponent: layer 1, exponent "),
        ("model", "small", "20 measurements. One exponent: layer 1, exponent "),
        ("scope", "head", "40 measurements. 2 exponents."),
        ("head", "head 1", "20 measurements. One exponent: layer 1, head 1, exponent "),
        ("text", "verse", "20 measurements."),
    ):
        choose(page, "scatter-fields", key, words)
        assert said.inner_text().startswith(start)
        if key in ("layer", "model"):
            fit = fits.loc[("small" if key == "model" else "other", "prose", "attention", 1)]
            assert all(decimal(float(fit[name]), 3) in said.inner_text() for name in ("slope", "low", "high"))
    for key in ("head", "layer", "scope", "text", "model", "quantity"):
        choose(page, "scatter-fields", key, f"every {key}")
    assert said.inner_text().startswith(f"{len(rows) + len(contents.published)} measurements.")
    label = page.locator("#scatter").get_attribute("aria-label")
    ends = r"Scatter plot of constants from 1\.\d+ to 2\d\.\d+, against the length n from 2 to 16\."
    assert re.match(ends, label)
    choose(page, "scatter-fields", "quantity", "as published")
    assert said.inner_text().startswith("240 measurements. 12 exponents.")
    # The published exponents are larger by a quarter.
    high = fits.loc[fits.index.get_level_values("scope") == "attention", "slope"].max() + 0.25
    assert re.search(rf"largest: layer \d, \w+, \w+, exponent {decimal(float(high), 3)},", said.inner_text())


UNFOLD = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
CELLS = "(all) => all.map((row) => [...row.cells].map((cell) => cell.textContent))"
PAINTED = "document.querySelector('#scatter canvas').toDataURL()"


def test_every_way_of_colouring_and_both_axes_draw_something_else(page: Any) -> None:
    for key in ("model", "text", "scope", "layer", "quantity"):
        choose(page, "scatter-fields", key, f"every {key}")
    entries = {
        "radius R": 8, "length n": 4, "layer": 3, "head": 3, "model": 2, "text": 2, "scope": 2, "quantity": 3,
    }  # fmt: skip
    seen = set()
    for across in ("length n", "radius R"):
        choose(page, "scatter-fields", "across", across)
        for colour, count in entries.items():
            choose(page, "scatter-fields", "colour", colour)
            assert page.locator("#scatter-legend button").count() == count
            seen.add(page.evaluate(PAINTED))
    assert len(seen) == 16


def test_the_legend_takes_points_away_and_brings_them_back(page: Any) -> None:
    said, layer = page.locator("#scatter-summary"), page.locator("#scatter-legend button")
    assert layer.all_inner_texts() == ["layer 0", "layer 1", "layer 2"]
    before = page.evaluate(PAINTED)
    layer.nth(1).click()
    assert layer.nth(1).get_attribute("aria-pressed") == "false"
    assert said.inner_text().startswith("40 measurements. 2 exponents. The least: layer ")
    assert "layer 1" not in said.inner_text()
    page.wait_for_function(f"{PAINTED} !== {json.dumps(before)}")
    page.locator("#scatter").focus()
    page.keyboard.press("Home")
    seen = set()
    for _ in range(40):
        seen.add(re.search(r"layer \d", page.locator("#scatter-tip").inner_text()).group())
        page.keyboard.press("ArrowUp")
    assert seen == {"layer 0", "layer 2"}
    for key, pressed in (("Enter", "true"), (" ", "false")):  # brought back and taken away again
        layer.nth(1).focus()
        page.keyboard.press(key)
        assert layer.nth(1).get_attribute("aria-pressed") == pressed
    layer.nth(1).click()
    assert said.inner_text().startswith("60 measurements. 3 exponents.")
    page.wait_for_function(f"{PAINTED} === {json.dumps(before)}")
    for place in range(3):
        layer.nth(place).click()
    assert said.inner_text() == "0 measurements."


NUMBERS = re.compile(
    r"sample (\d+)\s*n = (\d+), radius ([\d.]+).*?constant ([\d.e+-]+), interval ([\d.e+-]+) to ([\d.e+-]+)",
    re.DOTALL,
)


def tip(page: Any) -> tuple[float, ...] | None:
    """Read the numbers that the plot shows of a point."""
    if page.locator("#scatter-tip").is_hidden():
        return None
    found = NUMBERS.search(page.locator("#scatter-tip").inner_text())
    assert found, page.locator("#scatter-tip").inner_text()
    return tuple(float(number) for number in found.groups())


def marked(page: Any) -> tuple[float, float]:
    """Where the point is that the plot shows."""
    box = page.locator("#scatter-mark").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_keys_and_pointer_reach_every_point_where_its_numbers_are(page: Any, contents: Contents) -> None:
    rows = contents.measurements
    rows = rows[(rows["model"] == "other") & (rows["text"] == "prose") & (rows["scope"] == "attention")]
    rows = rows[rows["layer"] == 2].set_index(["sample", "n"])
    choose(page, "scatter-fields", "layer", "layer 2")
    page.locator("#scatter-fields select").first.focus()
    reached = []
    for _ in range(8):
        reached.append(page.evaluate("document.activeElement.dataset.key || document.activeElement.id"))
        page.keyboard.press("Tab")
    assert reached == ["model", "text", "scope", "layer", "quantity", "across", "colour", "scatter"]
    page.locator("#scatter").focus()
    page.keyboard.press("Home")
    found, places = [], []
    for _ in range(20):
        found.append(tip(page))
        places.append(marked(page))
        assert page.locator("#scatter-said").inner_text() == "; ".join(
            page.locator("#scatter-tip > div").all_inner_texts()
        )
        page.keyboard.press("ArrowUp")
    for sample, n, radius, *interval in found:
        row = rows.loc[(sample, n)]
        assert interval == pytest.approx(row[["lipschitz", "lower", "upper"]].tolist(), rel=1e-5)
        assert interval[1] <= row["lower"]
        assert row["upper"] <= interval[2]
        assert radius == pytest.approx(row["radius_mean"], rel=1e-3)
    assert len(set(found)) == 20
    # Both axes are logarithmic: pixels are a line in the logarithms.
    numbers, pixels = np.log(np.array(found)[:, [1, 3]]), np.array(places)
    for axis, sign in ((0, 1), (1, -1)):
        fit = np.polynomial.Polynomial.fit(numbers[:, axis], pixels[:, axis], 1)
        assert np.abs(fit(numbers[:, axis]) - pixels[:, axis]).max() < 0.1
        assert sign * fit.deriv()(0) > 0
    for key, n in (("Home", 2), ("ArrowRight", 4), ("End", 16), ("ArrowLeft", 8)):
        page.keyboard.press(key)
        assert tip(page)[1] == n
    page.keyboard.press("Escape")
    assert tip(page) is None
    apart = np.hypot(*(pixels[:, None] - pixels).T) + 1000 * np.eye(20)
    for place in np.flatnonzero(apart.min(axis=0) > 3)[:5]:
        page.mouse.move(*pixels[place] + 1)
        assert tip(page) == found[place]
    page.mouse.move(5, 5)
    assert tip(page) is None


def test_a_part_of_the_plot_can_be_shown_larger(page: Any) -> None:
    choose(page, "scatter-fields", "layer", "layer 2")

    def ends() -> np.ndarray:
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.locator("#scatter").focus()
        found = []
        for key in ("Home", "End"):
            page.keyboard.press(key)
            found.append(marked(page) if tip(page) else None)
        return np.array(found)

    whole = ends()
    (left, _), (right, _) = whole
    box = page.locator("#scatter").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(left + 20, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(right - 20, middle + 120, steps=4)
    page.mouse.up()
    page.keyboard.press("Escape")
    page.keyboard.press("Home")  # It is outside, so that the plot moves there.
    page.wait_for_function("!document.querySelector('#scatter-mark').hidden")
    assert abs(marked(page)[0] - (left + right) / 2) < 60
    page.mouse.dblclick(left + 40, middle)
    assert ends() == pytest.approx(whole, abs=1)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Zoom out").press("Enter")
    smaller = ends()
    assert left + 50 < smaller[0][0] < smaller[1][0] < right - 50
    page.get_by_role("button", name="Show everything").press("Enter")
    assert ends() == pytest.approx(whole, abs=1)
    page.get_by_role("button", name="Zoom in").press("Enter")  # around the point at the end
    page.wait_for_function("!document.querySelector('#scatter-mark').hidden")
    assert abs(marked(page)[0] - (left + right) / 2) < 60


def test_parts_of_a_study_can_be_explored(browser: Any, contents: Contents, tmp_path: Path) -> None:
    with quiet(browser, paged(measured(lengths=(8,)), tmp_path)) as page:  # which has no slopes
        assert page.locator("#scatter-summary").inner_text() == "15 measurements."
        assert page.locator("#scatter-lines").is_hidden()
        page.locator("#scatter").focus()
        page.keyboard.press("Home")
        assert "no exponent: fewer than 3 lengths to fit" in page.locator("#scatter-tip").inner_text()
    published = {"measurements": contents.measurements.iloc[:0], "published": contents.published}
    with quiet(browser, paged(dataclasses.replace(measured(), **published), tmp_path)) as page:
        assert page.locator("#scatter-summary").inner_text().startswith("60 measurements. 3 exponents.")
        assert page.locator("#sensitive, #bounds").count() == 0
        choose(page, "scatter-fields", "quantity", "as published")
        choose(page, "scatter-fields", "layer", "layer 1")
        page.locator("#scatter").focus()
        page.keyboard.press("End")
        assert "no interval" in page.locator("#scatter-tip").inner_text()
    # Tokens that are not together the text stand apart.
    pieces = contents.sensitivities.assign(place=pd.NA)
    with quiet(browser, paged(dataclasses.replace(contents, sensitivities=pieces), tmp_path)) as page:
        spans = page.locator("#tokens-input.apart span")
        assert spans.count() == 16
        one, other = (spans.nth(place).bounding_box() for place in (0, 1))
        assert other["x"] - one["x"] - one["width"] > 4


def test_the_tokens_are_shown_with_their_shares(page: Any) -> None:
    choose(page, "tokens-fields", "n", "n = 16")
    choose(page, "tokens-fields", "layer", "layer 2")
    thickness = "(all) => all.map((one) => parseFloat(getComputedStyle(one).borderBottomWidth))"
    for side, most in (("input", 15), ("output", 0)):
        spans = page.locator(f"#tokens-{side} span")
        assert page.locator(f"#tokens-{side}").inner_text().startswith("One day a cat,↵ againOne day")
        grounds = spans.evaluate_all("(all) => all.map((one) => one.className)")
        assert (len(grounds), grounds[most], grounds[15 - most]) == (16, "e9", f"e{round(9 / 16)}")
        widths = spans.evaluate_all(thickness)
        assert widths == sorted(widths, reverse=side == "output")
        assert widths[most] > widths[15 - most] + 2
        title = f"token {most + 1}: 12 % of the {side} energy"  # 16 of 136
        assert spans.nth(most).get_attribute("title") == title
    page.locator("summary", has_text="All tokens").click()
    lines = page.locator("#tokens-rows tr").evaluate_all(CELLS)
    assert lines[0] == ["16", " cat", "12 %", "0.7 %"]
    assert [int(line[0]) for line in lines] == list(range(16, 0, -1))
    assert "half of the input energy is on 5 of the 16 tokens" in page.locator("#tokens-said").inner_text()


def test_unconverged_and_vanishing_constants_are_said(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    rows = contents.measurements.copy()
    first = (rows["model"] == "other") & (rows["text"] == "prose") & (rows["scope"] == "attention")
    rows.loc[first & (rows["sample"] == 0), "converged"] = False
    rows.loc[first & (rows["sample"] == 0), "upper"] *= 2
    rows.loc[first & (rows["sample"] == 1) & (rows["layer"] == 1), ["lipschitz", "lower", "upper"]] = 0.0
    level = first & (rows["layer"] == 2)
    rows.loc[level, ["lipschitz", "lower"]] = np.outer(3 * rows.loc[level, "n"] ** -1e-5, [1, 1])
    with quiet(browser, paged(dataclasses.replace(contents, measurements=rows), tmp_path)) as page:
        said = page.locator("#scatter-summary")
        start = "56 measurements, 12 of them not converged (hollow, with their interval); 4 more are zero"
        assert said.inner_text().startswith(start)
        choose(page, "scatter-fields", "layer", "layer 2")
        assert "layer 2, exponent 0.000, 95 % interval 0.000 to 0.000" in said.inner_text()
        choose(page, "scatter-fields", "layer", "layer 0")
        page.locator("#scatter").focus()
        shown = set()
        for key in ["Home"] + ["ArrowUp"] * 4:
            page.keyboard.press(key)
            shown.add("not converged" in page.locator("#scatter-tip").inner_text())
        assert shown == {True, False}


def test_all_bounds_at_a_sequence_are_on_one_scale(page: Any) -> None:
    choose(page, "bounds-fields", "n", "n = 8")
    lines = page.locator("#bounds-rows tr").evaluate_all(CELLS)
    by_name = {line[0]: line for line in lines}
    assert len(by_name) == 6
    assert by_name["near"][3] == "1.25"
    assert by_name["near"][1] == "this sequence"
    assert by_name["near"][2].startswith("≤ ")
    assert by_name["elsewhere"][1] == "the ball"
    assert by_name["elsewhere"][2].startswith("≥ ")
    assert by_name["enormous"][2] == "≤ 10^2172"
    assert by_name["refused"][2] == "none"
    assert by_name["refused"][5] == "Theorem of refused"
    ends = page.locator("#bounds-rows tr").evaluate_all(
        """(all) => all.map((row) => {
          const box = (part) => row.querySelector(part)?.getBoundingClientRect();
          const middle = (one) => one && one.left + one.width / 2;
          return [row.cells[0].textContent, middle(box('.measured')), middle(box('.bound'))];
        })"""
    )
    place = {name: bound for name, _, bound in ends}
    (line,) = {round(measured, 3) for _, measured, _ in ends}
    assert place["measured"] == pytest.approx(line, abs=0.1)
    assert place["enormous"] is None
    step = (place["far"] - line) / math.log(8)
    assert step > 20
    assert place["near"] - line == pytest.approx(step * math.log(1.25), abs=0.1)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_bounds_are_shown_rounded_outwards(page: Any, contents: Contents, n: int) -> None:
    choose(page, "bounds-fields", "n", f"n = {n}")
    lines = page.locator("#bounds-rows tr").evaluate_all(CELLS)
    shown = {name: float(words[2:]) for name, _, words, *_ in lines if words[2:].replace(".", "").isdigit()}
    place = ["model", "text", "scope", "layer", "head"]
    rows = contents.bounds[contents.bounds["n"] == n]
    first = next(iter(rows.groupby(place, dropna=False, sort=False)))[1]
    bounds = first.set_index("name")["value"]
    assert shown == pytest.approx(bounds[list(shown)].to_dict(), rel=1e-3)
    assert all((shown[name] >= bounds[name]) == (name in ("near", "far")) for name in shown)

    said = page.locator("#bounds-said").inner_text().partition("here: ")[2]
    value, low, high = map(float, re.findall(r"[\d.]*\d", said))
    row = contents.measurements.merge(first.head(1)[[*place, "n", "sample"]]).iloc[0]
    assert low <= row["lower"]
    assert row["upper"] <= high
    assert [value, low, high] == pytest.approx(row[["lipschitz", "lower", "upper"]].tolist(), rel=1e-5)

    table = page.locator("table", has=page.locator("caption", has_text="The sharpest bounds"))
    cells = table.locator("tbody tr:not(.family)").evaluate_all(CELLS)
    at_least, at_most = next((float(one[3]), float(one[5])) for one in cells if one[2] == str(n))
    assert bounds["measured"] * 0.99 < at_least <= bounds["measured"]
    assert bounds["near"] <= at_most < bounds["near"] * 1.01


def test_what_was_published_is_beside_what_is_right(page: Any, contents: Contents) -> None:
    table = page.locator("table", has=page.locator("caption", has_text="Exponent of each quantity"))
    cells = table.locator("tbody tr:not(.family)").evaluate_all(CELLS)
    assert len(cells) == 2 * 2 * 3 * 2
    for right, wrong in zip(cells[::2], cells[1::2], strict=True):
        assert (right[1], wrong[1]) == ("corrected", "as published")
        assert float(wrong[2]) - float(right[2]) == pytest.approx(0.25, abs=0.0011)
        assert float(right[5]) == 1
        assert float(wrong[5]) == pytest.approx(2 * np.median([2, 4, 8, 16]) ** 0.25, rel=0.1)
    assert page.locator("dt", has_text="output").count() == 1
    assert page.locator("dt", has_text="dropout").count() == 0


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_is_wider_than_a_phone(browser: Any, file: Path, width: int) -> None:
    phone = {"viewport": {"width": width, "height": 700}, "is_mobile": True, "has_touch": True}
    with quiet(browser, file, **phone) as page:
        page.evaluate(UNFOLD)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        # Tables fit without scrolling, their cells below each other where there are many columns.
        both = "(all) => all.map((one) => [one.scrollWidth, one.clientWidth])"
        widths = page.locator(".wide").evaluate_all(both)
        assert all(inner <= outer + 1 for inner, outer in widths)
        page.locator("#scatter").focus()
        for key in ("Home", "ArrowRight", "End"):
            page.keyboard.press(key)
            place, numbers = marked(page), tip(page)
            page.keyboard.press("Escape")
            page.touchscreen.tap(*place)
            assert tip(page)[1] == numbers[1]
            assert page.evaluate("document.documentElement.scrollWidth") == width


CONTRASTS = """() => {
  const context = Object.assign(document.createElement('canvas'), { width: 1, height: 1 })
    .getContext('2d', { willReadFrequently: true });
  const parse = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => top.slice(0, 3).map((part, k) => part * top[3] + under[k] * (1 - top[3]));
  const ground = (node) => node === null ? [255, 255, 255]
    : over(parse(getComputedStyle(node).backgroundColor), ground(node.parentElement));
  const pair = (colour, under) => [over(parse(colour), under), under];
  const words = [...document.querySelectorAll('body *')].filter((node) => node.getClientRects().length
    && [...node.childNodes].some((one) => one.nodeType === Node.TEXT_NODE && one.textContent.trim()));
  const swatches = [...document.querySelectorAll('.swatch')];
  const paper = ground(document.body);
  return [words.map((one) => [pair(getComputedStyle(one).color, ground(one)), one.outerHTML.slice(0, 99)]),
    swatches.map((one) => pair(getComputedStyle(one).backgroundColor, paper))];
}"""


def contrast(pair: list[list[float]]) -> float:
    """The ratio of WCAG 2 between two colours."""
    parts = np.array(pair) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return float((high + 0.05) / (low + 0.05))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_points_can_be_told_from_the_paper(browser: Any, file: Path, scheme: str) -> None:
    with quiet(browser, file, color_scheme=scheme) as page:
        page.evaluate(UNFOLD)
        choose(page, "tokens-fields", "n", "n = 16")
        choose(page, "scatter-fields", "colour", "radius R")
        words, points = page.evaluate(CONTRASTS)
        assert len(words) > 99
        assert [where for pair, where in words if contrast(pair) < 4.5] == []
        assert len(points) == 8
        assert min(map(contrast, points)) > 3
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")
        # A figure, black on white, has no card on a dark page: its corner is as dark as the page.
        page.locator("figure img").first.scroll_into_view_if_needed()
        place = page.locator("figure img").first.bounding_box()
        corner = {"x": place["x"] - 2, "y": place["y"] - 2, "width": 4, "height": 4}
        colours = Image.open(io.BytesIO(page.screenshot(clip=corner))).convert("RGB").getcolors()
        assert len(colours) == 1


def test_without_a_script_the_figures_and_tables_stay(browser: Any, file: Path) -> None:
    with opened(browser, file, java_script_enabled=False) as (page, _):
        for section in ("explore", "bounds-explore", "tokens-fields"):
            assert page.locator(f"#{section}").is_hidden()
        assert page.locator("figure img").first.is_visible()
        assert page.locator("#tokens-input span").count() == 16
        assert page.locator("table", has_text="The sharpest bounds").is_visible()


def test_on_paper_everything_is_unfolded_and_what_needs_a_hand_is_gone(page: Any) -> None:
    page.emulate_media(media="print")
    assert page.locator("#explore").is_hidden()
    assert page.locator("#tokens-fields").is_hidden()
    assert page.locator("figure img").first.is_visible()
    folded = page.locator("details:not([open])")
    before = folded.count()
    assert before >= 1
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert folded.count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert folded.count() == before
    assert page.pdf().startswith(b"%PDF")


def test_hostile_data_are_shown_and_never_run(browser: Any, tmp_path: Path) -> None:
    names = HOSTILE[:5]
    found = with_all(measured(names[:2], names[2::2]), HOSTILE)

    def spread(words: list[str] | str, table: pd.DataFrame) -> pd.Series:
        # As objects: with pyarrow, columns of strings cannot hold a lone surrogate.
        return pd.Series(words, table.index, dtype=object)

    found.measurements["masking"] = HOSTILE[1]
    named = [HOSTILE[place % len(HOSTILE)][:400] for place in range(len(found.bounds))]
    found.bounds["name"] = spread(named, found.bounds)
    found.bounds["source"] = HOSTILE[1] * 20
    found.models["source"] = spread(HOSTILE[6], found.models)
    found.runs["command"] = spread(" ".join(HOSTILE[:7]), found.runs)
    file = paged(found, tmp_path)
    assert file.stat().st_size < 3_000_000  # a token of a megabyte stands there a few hundred times
    with quiet(browser, file) as page:
        page.evaluate(UNFOLD)
        for key in ("model", "text", "scope", "quantity"):
            choose(page, "scatter-fields", key, f"every {key}")
        for colour in ("model", "text"):
            page.locator("#scatter-fields select[data-key='colour']").select_option(value=colour)
        page.locator("#scatter").focus()
        page.keyboard.press("Home")
        for fields in ("tokens", "bounds"):
            page.locator(f"#{fields}-fields select[data-key='n']").select_option(label="n = 16")
        text = page.locator("body").inner_text()
        assert [shown for shown in HOSTILE[:3] if shown not in text] == []
        assert HOSTILE[1] in page.locator("#scatter-tip").inner_text()
        tokens = page.locator("#tokens-input span")
        for place, shown in (
            (0, HOSTILE[0]), (7, "x" * 18 + "..." + "x" * 18), (4, "\ufffdtxet desrever\ufffd")
        ):  # fmt: skip
            assert tokens.nth(place).inner_text() == shown
        assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00-\x08\x1b]", page.content())
        assert page.locator("img").count() == 0
        assert page.locator("svg[onload], [onerror], iframe").count() == 0
        assert page.locator("script").count() == 4
        for width in (1100, 390):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") == width
