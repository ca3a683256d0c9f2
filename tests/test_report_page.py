"""The report in a real browser: what it shows, how it answers, and what it refuses to run."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.published import ITEMS
from howsmooth.study.exponents import exponents
from howsmooth.study.figures import draw_all
from howsmooth.study.names import decimal
from howsmooth.study.plan import ModelSpec
from howsmooth.study.records import BOUND_COLUMNS, PUBLISHED_COLUMNS, SENSITIVITY_COLUMNS, Contents
from howsmooth.study.report import data, render
from howsmooth.study.report.bounding import bounds_beside, sharpest
from howsmooth.study.report.data import MOST_POINTS, embedded, scatter
from howsmooth.study.report.published import ITEM_MEANINGS
from howsmooth.study.report.tokens import MOST_ENERGIES, piece, sensitive
from howsmooth.study.run import run
from howsmooth.study.store import Store
from tests._browser import Complaints, chromium, opened
from tests._study import FakeModel, make_plan, make_tools, words

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
MODELS = ("small", "other")
TEXTS = ("prose", "verse")


# ---- contents with everything


def measured(folder: Path, models: tuple[str, ...] = MODELS, texts: tuple[str, ...] = TEXTS) -> Contents:
    """Measure with stand-ins, in two scopes."""
    known = {name: FakeModel(fingerprint=hashlib.sha256(name.encode()).hexdigest()) for name in models}
    tools, _ = make_tools(models=known, texts={name: words(4000) for name in texts})
    plan = make_plan(
        models=tuple(ModelSpec(name) for name in models),
        texts=texts,
        lengths=(2, 4, 8, 16),
        scopes=("attention", "head"),
    )
    run(plan, folder, tools, command="howsmooth measure small")
    with Store.open(folder, write=False) as store:
        return store.contents()


def with_all(
    contents: Contents, tokens: tuple[str, ...] = ("One", " day", " a", " cat", ",\n", " again")
) -> Contents:
    """Add sensitivities, bounds and published values to measurements."""
    rows = contents.measurements
    first = rows[rows["sample"] == 0]
    sensitivities, bounds, published = [], [], []
    for row in first.to_dict("records"):
        place = {
            name: row[name] for name in ("model", "text", "scope", "layer", "head", "n", "sample", "start")
        }
        energy = np.arange(1.0, row["n"] + 1)
        sensitivities.append(
            {
                **place,
                "place": 0,
                "tokens": [tokens[index % len(tokens)] for index in range(row["n"])],
                "input_energy": (energy / energy.sum()).tolist(),
                "output_energy": (energy[::-1] / energy.sum()).tolist(),
                "converged": True,
                "run": 1,
            }
        )
        value = row["lipschitz"]
        for name, side, quantity, bound, log in (
            ("measured", "lower", "‖D_X f‖", value, math.log(value)),
            ("near", "upper", "‖D_X f‖", 1.25 * value, math.log(1.25 * value)),
            ("far", "upper", "Lip(f; B_R)", 8 * value, math.log(8 * value)),
            ("elsewhere", "lower", "Lip(f; B_R)", 3 * value, math.log(3 * value)),
            ("enormous", "upper", "Lip(f; B_R)", math.inf, 5000.0),
            ("refused", "upper", "‖D_X f‖", None, None),
        ):
            bounds.append(
                {
                    **place,
                    "radius": 2.5,
                    "name": name,
                    "side": side,
                    "quantity": quantity,
                    "value": bound,
                    "log_value": log,
                    "holds": bound is not None,
                    "source": f"Theorem of {name}",
                    "run": 1,
                }
            )
    for row in rows[rows["scope"] == "attention"].to_dict("records"):
        for quantity, items, value in (
            ("corrected", "", row["lipschitz"]),
            ("as published", "output,stopping", 2 * row["lipschitz"] * row["n"] ** 0.25),
        ):
            published.append(
                {
                    **{
                        name: row[name]
                        for name in ("model", "text", "layer", "n", "sample", "radius_mean", "start")
                    },
                    "quantity": quantity,
                    "items": items,
                    "lipschitz": value,
                    "lower": row["lower"] if items == "" else math.nan,
                    "upper": row["upper"] if items == "" else math.nan,
                    "settled": True,
                    "steps": 9,
                    "seed": 0,
                    "map": "as it is",
                    "run": 1,
                }
            )
    return dataclasses.replace(
        contents,
        sensitivities=pd.DataFrame(sensitivities, columns=list(SENSITIVITY_COLUMNS)).astype(
            {"head": "Int64"}
        ),
        bounds=pd.DataFrame(bounds, columns=list(BOUND_COLUMNS)).astype(
            {"head": "Int64", "value": "float64", "log_value": "float64"}
        ),
        published=pd.DataFrame(published, columns=[*PUBLISHED_COLUMNS, "run"]),
    )


def many(contents: Contents, count: int) -> Contents:
    """Repeat the measurements as further samples until there are so many."""
    rows = contents.measurements
    copies = math.ceil(count / len(rows))
    random = np.random.default_rng(0)
    parts = []
    for copy in range(copies):
        noise = np.exp(0.1 * random.standard_normal(len(rows)))
        changed = {name: rows[name] * noise for name in ("lipschitz", "lower", "upper")}
        parts.append(rows.assign(sample=rows["sample"] + 5 * copy, **changed))
    return dataclasses.replace(contents, measurements=pd.concat(parts, ignore_index=True).iloc[:count])


def write(contents: Contents, folder: Path) -> Path:
    """Render a page, with figures of one layer only: they take time."""
    rows = contents.measurements
    one = rows[
        (rows["model"] == rows["model"].iloc[0]) & (rows["layer"] == 0) & (rows["scope"] == "attention")
    ]
    file = folder / "report.html"
    page = render(contents, exponents(rows), draw_all(one, folder / "figures"))
    file.write_text(page, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    return with_all(measured(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def file(contents: Contents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(contents, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    with opened(browser, file) as (found, heard):
        yield found
        assert_silent(found, heard)


def assert_silent(page: Any, heard: Complaints) -> None:
    assert heard == Complaints()
    assert page.evaluate("window.violations") == []
    assert page.evaluate("window.pwned") is None


def choose(page: Any, fields: str, key: str, words: str) -> None:
    page.locator(f"#{fields} select[data-key='{key}']").select_option(label=words)


# ---- what is inside


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
    assert not re.search(r"\sstyle=|\son\w+=|javascript:", content)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_embedded_data_are_json_and_nothing_else(value: Any) -> None:
    written = embedded(value)
    assert json.loads(written) == value
    assert not re.search("[<>&\u2028\u2029\ud800-\udfff]", written)


def test_numbers_that_json_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        embedded([math.nan])


def test_every_item_of_the_published_code_has_a_meaning() -> None:
    assert set(ITEM_MEANINGS) == set(ITEMS)


def test_the_lines_of_the_plot_are_those_of_the_table(contents: Contents) -> None:
    fits = exponents(contents.measurements)
    found = scatter(contents.measurements, fits, contents.published)
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
        for name in ("slope", "low", "high", "quarter", "intercept", "n_min", "n_max"):
            assert fit[name] == pytest.approx(row[name], rel=1e-6)
    published = [g for g in found["groups"] if names["quantity"][g["quantity"]] == "as published"]
    right = [g for g in found["groups"] if names["quantity"][g["quantity"]] == "corrected"]
    assert len(published) == len(right) == 2 * 2 * 3
    for wrong, corrected in zip(published, right, strict=True):
        assert wrong["fit"]["slope"] == pytest.approx(corrected["fit"]["slope"] + 0.25, abs=1e-6)


def test_a_very_large_store_is_thinned_evenly_and_the_page_says_so(
    contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_POINTS == 50_000
    monkeypatch.setattr(data, "MOST_POINTS", 500)
    fits = exponents(contents.measurements)
    total = len(contents.measurements) + len(contents.published)
    found = scatter(contents.measurements, fits, contents.published)
    shown = len(found["points"]["n"])
    assert 250 < shown <= 500
    assert found["total"] == total == 1200
    assert set(found["points"]["group"]) == set(range(len(found["groups"])))
    assert f"Of {total} measurements {shown} are here" in render(contents, fits, [])


def test_sensitive_tokens_are_thinned_by_length_keeping_the_longest(contents: Contents) -> None:
    rows = contents.sensitivities
    one = rows[(rows["n"] == 16)].iloc[:1]
    long = [
        one.assign(n=n, tokens=[["x"] * n], input_energy=[[1 / n] * n], output_energy=[[1 / n] * n])
        for n in range(100, 900)
    ]
    found = sensitive(pd.concat(long, ignore_index=True))
    assert found is not None
    lengths = [row["n"] for row in found["rows"]]
    assert sum(2 * n for n in lengths) <= MOST_ENERGIES * 1.01
    assert max(lengths) == 899
    assert found["total"] == 800
    assert len(set(np.diff(sorted(lengths)))) == 1


def test_bounds_are_compared_with_what_was_measured(contents: Contents) -> None:
    found = bounds_beside(contents.bounds, contents.measurements)
    assert found is not None
    table = sharpest(found)
    assert len(table) == 2 * 2 * 4 * (3 + 6)
    assert [row["head"] == "all" for row in table] == [True] * 48 + [False] * 96
    known = contents.measurements.set_index(["model", "text", "scope", "layer", "n", "sample"]).sort_index()
    for row in table:
        assert row["upper"]["name"] == "near"
        assert row["upper"]["ratio"] == pytest.approx(1.25, rel=1e-5)
        assert row["lower"]["name"] == "measured"  # not the one that speaks of the ball
        there = known.loc[[(row["model"], row["text"], row["scope"], row["layer"], row["n"], 0)]]
        assert any(row["measured"] == pytest.approx(value, rel=1e-6) for value in there["lipschitz"])


@given(st.text(max_size=300))
def test_a_token_stays_in_its_place(token: str) -> None:
    assert piece(token)
    assert piece(token).isprintable()
    assert len(piece(token)) <= 40


def test_tokens_that_are_not_seen_have_a_sign() -> None:
    assert [piece(token) for token in ("", "\n", " \t", " a\xa0b", "\u202e")] == [
        "∅",
        "↵",
        " →",
        " a b",
        "\ufffd",
    ]


# ---- in the browser


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"color_scheme": "dark"},
        {"viewport": {"width": 390, "height": 800}, "is_mobile": True, "has_touch": True},
    ],
    ids=["light", "dark", "phone"],
)
def test_the_page_opens_from_disk_without_a_complaint(
    browser: Any, file: Path, options: dict[str, Any]
) -> None:
    with opened(browser, file, **options) as (page, heard):
        page.wait_for_selector("#scatter-fields select", state="attached")
        for section in ("explore", "bounds-explore", "tokens-fields"):
            assert page.locator(f"#{section}").is_visible()
        painted = "[...document.querySelector('#scatter-points').getContext('2d')"
        painted += ".getImageData(0, 0, 300, 300).data].filter((part) => part > 0).length"
        assert page.evaluate(painted) > 1000
        assert_silent(page, heard)


def test_filters_choose_what_is_shown(page: Any, contents: Contents) -> None:
    rows = contents.measurements
    fits = exponents(rows).set_index(["model", "text", "scope", "layer"])
    said = page.locator("#scatter-summary")
    assert said.inner_text().startswith("60 measurements. 3 exponents")  # the first model, text and scope
    choose(page, "scatter-fields", "layer", "layer 1")
    assert said.inner_text().startswith("20 measurements. Exponent of layer 1")
    for name in ("slope", "low", "high"):
        assert decimal(float(fits.loc[("other", "prose", "attention", 1), name]), 3) in said.inner_text()
    choose(page, "scatter-fields", "model", "small")
    assert decimal(float(fits.loc[("small", "prose", "attention", 1), "slope"]), 3) in said.inner_text()
    choose(page, "scatter-fields", "scope", "head")
    assert said.inner_text().startswith("40 measurements. 2 exponents")
    choose(page, "scatter-fields", "head", "head 1")
    assert "Exponent of layer 1, head 1" in said.inner_text()
    choose(page, "scatter-fields", "text", "verse")
    assert said.inner_text().startswith("20 measurements.")
    for key in ("head", "layer", "scope", "text", "model", "quantity"):
        choose(page, "scatter-fields", key, f"every {key}")
    total = len(rows) + len(contents.published)
    assert said.inner_text().startswith(f"{total} measurements.")
    high = (
        fits["slope"].max() + 0.25
    )  # with all that was measured: the published exponents are larger by so much
    assert f"to {decimal(float(high), 3)} (layer 1, other, " in said.inner_text()
    assert said.inner_text().endswith(", attention, as published).")
    choose(page, "scatter-fields", "quantity", "as published")
    assert said.inner_text().startswith("240 measurements. 12 exponents")


def test_every_way_of_colouring_and_both_axes_draw_something_else(page: Any) -> None:
    for key in ("model", "text", "scope", "layer", "quantity"):
        choose(page, "scatter-fields", key, f"every {key}")
    seen = set()
    for across in ("length n", "radius R"):
        choose(page, "scatter-fields", "across", across)
        for colour in ("radius R", "length n", "layer", "head", "model", "text", "scope", "quantity"):
            choose(page, "scatter-fields", "colour", colour)
            seen.add(page.evaluate("document.querySelector('#scatter-points').toDataURL()"))
            assert page.locator("#scatter-legend li").count() == (
                {"model": 2, "text": 2, "scope": 2, "quantity": 3}.get(colour, 0)
            )
    assert len(seen) == 16


NUMBERS = re.compile(
    r"n = (\d+), radius ([\d.]+).*?constant ([\d.e+-]+), interval ([\d.e+-]+) to ([\d.e+-]+)", re.S
)


def tip(page: Any) -> tuple[float, ...] | None:
    """Read the numbers that the plot shows of a point."""
    if page.locator("#scatter-tip").is_hidden():
        return None
    text = page.locator("#scatter-tip").inner_text()
    found = NUMBERS.search(text)
    assert found, text
    (sample,) = re.findall(r"sample (\d+)", text)
    return (int(sample), *(float(number) for number in found.groups()))


def test_a_point_that_is_pointed_at_says_its_numbers_and_lies_where_they_are(
    page: Any, contents: Contents
) -> None:
    rows = contents.measurements
    rows = rows[(rows["model"] == "other") & (rows["text"] == "prose") & (rows["scope"] == "attention")]
    rows = rows[rows["layer"] == 2]
    choose(page, "scatter-fields", "layer", "layer 2")
    page.locator("#scatter").scroll_into_view_if_needed()
    box = page.locator("#scatter").bounding_box()
    found = {}
    for x in range(70, int(box["width"]) - 70, 25):
        for y in range(30, int(box["height"]) - 50, 50):
            page.mouse.move(box["x"] + x, box["y"] + y)
            if (numbers := tip(page)) is not None:
                found.setdefault(numbers, []).append((x, y))
    assert len(found) >= 5
    for sample, n, radius, value, lower, upper in found:
        (row,) = rows[(rows["n"] == n) & (rows["sample"] == sample)].to_dict("records")
        assert value == pytest.approx(row["lipschitz"], rel=1e-5)
        assert lower == pytest.approx(row["lower"], rel=1e-5)
        assert upper == pytest.approx(row["upper"], rel=1e-5)
        assert radius == pytest.approx(row["radius_mean"], rel=1e-3)
    places = np.array([np.mean(at, axis=0) for at in found.values()])
    numbers = np.array(list(found))
    assert np.corrcoef(places[:, 0], np.log(numbers[:, 1]))[0, 1] > 0.99
    assert np.corrcoef(places[:, 1], np.log(numbers[:, 3]))[0, 1] < -0.95
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] - 20)
    assert tip(page) is None


def test_the_keyboard_reaches_the_menus_and_every_point(page: Any, contents: Contents) -> None:
    page.locator("#scatter-fields select").first.focus()
    reached = []
    for _ in range(12):
        reached.append(page.evaluate("document.activeElement.dataset.key || document.activeElement.id"))
        if reached[-1] == "scatter":
            break
        page.keyboard.press("Tab")
    assert reached == ["model", "text", "scope", "layer", "quantity", "across", "colour", "scatter"]
    choose(page, "scatter-fields", "layer", "layer 0")
    page.locator("#scatter").focus()
    said = page.locator("#scatter-said")
    seen = set()
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
        for arrow in ["ArrowDown"] * 5 + ["ArrowUp"] * 5:
            assert tip(page) is not None
            seen.add((tip(page)[1], tip(page)[0]))
            assert said.inner_text() == page.locator("#scatter-tip").inner_text().replace("\n", "; ")
            page.keyboard.press(arrow)
    assert seen == {(n, sample) for n in (2, 4, 8, 16) for sample in range(5)}
    page.keyboard.press("End")
    assert tip(page)[1] == 16
    page.keyboard.press("PageUp")
    assert tip(page)[1] == 2
    page.keyboard.press("Escape")
    assert tip(page) is None


def test_the_tokens_are_shown_with_their_shares(page: Any) -> None:
    choose(page, "tokens-fields", "n", "n = 16")
    choose(page, "tokens-fields", "layer", "layer 2")
    for side, most in (("input", 15), ("output", 0)):
        spans = page.locator(f"#tokens-{side} span")
        assert spans.count() == 16
        assert page.locator(f"#tokens-{side}").inner_text().startswith("One day a cat,↵ againOne day")
        grounds = spans.evaluate_all("(all) => all.map((one) => one.className)")
        assert grounds[most] == "e9"
        assert grounds[15 - most] == f"e{round(9 / 16)}"
        widths = spans.evaluate_all(
            "(all) => all.map((one) => parseFloat(getComputedStyle(one).borderBottomWidth))"
        )
        assert widths == sorted(widths, reverse=side == "output")
        assert widths[most] > widths[15 - most] + 2
        assert (
            spans.nth(most).get_attribute("title") == f"token {most + 1}: 12 % of the {side} energy"
        )  # 16 of 136
    page.locator("summary", has_text="All tokens").click()
    lines = page.locator("#tokens-rows tr").evaluate_all(
        "(all) => all.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
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
    file = tmp_path / "report.html"
    changed = dataclasses.replace(contents, measurements=rows)
    file.write_text(render(changed, exponents(rows), []), encoding="utf-8")
    with opened(browser, file) as (page, heard):
        said = page.locator("#scatter-summary").inner_text()
        assert said.startswith(
            "56 measurements, 12 of them not converged (hollow, with their interval); 4 more are zero"
        )
        choose(page, "scatter-fields", "layer", "layer 2")
        assert "Exponent of layer 2: 0.000, 95 % interval 0.000 to 0.000" in (
            page.locator("#scatter-summary").inner_text()
        )
        choose(page, "scatter-fields", "layer", "layer 0")
        page.locator("#scatter").focus()
        shown = set()
        for key in ["Home"] + ["ArrowUp"] * 4:
            page.keyboard.press(key)
            shown.add("not converged" in page.locator("#scatter-tip").inner_text())
        assert shown == {True, False}
        assert_silent(page, heard)


def test_published_values_alone_can_be_explored(browser: Any, contents: Contents, tmp_path: Path) -> None:
    nothing = contents.measurements.iloc[:0]
    alone = dataclasses.replace(contents, measurements=nothing)
    alone = dataclasses.replace(
        alone, bounds=contents.bounds.iloc[:0], sensitivities=contents.sensitivities.iloc[:0]
    )
    file = tmp_path / "report.html"
    file.write_text(render(alone, exponents(nothing), []), encoding="utf-8")
    with opened(browser, file) as (page, heard):
        assert page.locator("#scatter-summary").inner_text().startswith("60 measurements. 3 exponents")
        assert page.locator("#sensitive, #bounds").count() == 0
        choose(page, "scatter-fields", "quantity", "as published")
        choose(page, "scatter-fields", "layer", "layer 1")
        page.locator("#scatter").focus()
        page.keyboard.press("End")
        assert "no interval" in page.locator("#scatter-tip").inner_text()
        assert_silent(page, heard)


def test_tokens_that_are_not_together_the_text_stand_apart(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    pieces = contents.sensitivities.assign(place=pd.NA)
    file = tmp_path / "report.html"
    changed = dataclasses.replace(contents, sensitivities=pieces)
    file.write_text(render(changed, exponents(contents.measurements), []), encoding="utf-8")
    with opened(browser, file) as (page, heard):
        spans = page.locator("#tokens-input.apart span")
        assert spans.count() == 16
        gap = (
            spans.nth(1).bounding_box()["x"]
            - spans.nth(0).bounding_box()["x"]
            - spans.nth(0).bounding_box()["width"]
        )
        assert gap > 4
        assert_silent(page, heard)


def test_all_bounds_at_a_sequence_are_on_one_scale(page: Any) -> None:
    choose(page, "bounds-fields", "n", "n = 8")
    lines = page.locator("#bounds-rows tr").evaluate_all(
        "(all) => all.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    by_name = {line[0]: line for line in lines}
    assert len(by_name) == 6
    assert by_name["near"][3] == "1.25"
    assert by_name["near"][1] == "this sequence"
    assert by_name["near"][2].startswith("≤ ")
    assert by_name["elsewhere"][1] == "the ball"
    assert by_name["elsewhere"][2].startswith("≥ ")
    assert by_name["enormous"][2] == "≤ 10^2171"
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


def test_what_was_published_is_beside_what_is_right(page: Any, contents: Contents) -> None:
    table = page.locator("table", has=page.locator("caption", has_text="Exponent of each quantity"))
    cells = table.locator("tbody tr:not(.family)").evaluate_all(
        "(all) => all.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert len(cells) == 2 * 2 * 3 * 2
    for right, wrong in zip(cells[::2], cells[1::2], strict=True):
        assert (right[1], wrong[1]) == ("corrected", "as published")
        assert float(wrong[2]) - float(right[2]) == pytest.approx(0.25, abs=0.0011)
        assert float(right[5]) == 1
        assert float(wrong[5]) == pytest.approx(2 * np.median([2, 4, 8, 16]) ** 0.25, rel=0.1)
    assert page.locator("dt", has_text="output").count() == 1
    assert page.locator("dt", has_text="dropout").count() == 0


def test_twenty_thousand_points_stay_responsive(browser: Any, contents: Contents, tmp_path: Path) -> None:
    large = many(contents, 20_000)
    file = tmp_path / "large.html"
    file.write_text(render(large, exponents(large.measurements), []), encoding="utf-8")
    with opened(browser, file) as (page, heard):
        for key in ("model", "text", "scope", "quantity"):
            choose(page, "scatter-fields", key, f"every {key}")
        assert "20480 measurements" in page.locator("#scatter-summary").inner_text()
        # From the choice to the end of the second frame after it: then it has been painted.
        times = page.evaluate(
            """async () => {
              const menu = document.querySelector("#scatter-fields select[data-key='layer']");
              const frame = () => new Promise(requestAnimationFrame);
              const times = [];
              for (let turn = 0; turn < 15; turn++) {
                menu.value = ["0", "1", ""][turn % 3];
                await frame();
                const begun = performance.now();
                menu.dispatchEvent(new Event("change"));
                await frame();
                await frame();
                times.push(performance.now() - begun);
              }
              return times;
            }"""
        )
        assert statistics.median(times) < 200, times
        box = page.locator("#scatter").bounding_box()
        hover = page.evaluate(
            """([x, y]) => {
              const plot = document.querySelector("#scatter");
              const begun = performance.now();
              for (let turn = 0; turn < 20; turn++) {
                plot.dispatchEvent(new PointerEvent("pointermove", { clientX: x + turn, clientY: y }));
              }
              return (performance.now() - begun) / 20;
            }""",
            [box["x"] + 400, box["y"] + 200],
        )
        assert hover < 50
        assert_silent(page, heard)


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_is_wider_than_a_phone(browser: Any, file: Path, width: int) -> None:
    with opened(browser, file, viewport={"width": width, "height": 700}, is_mobile=True, has_touch=True) as (
        page,
        heard,
    ):
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.locator("#scatter").scroll_into_view_if_needed()
        box = page.locator("#scatter").bounding_box()
        for step in range(20):
            page.touchscreen.tap(box["x"] + 70 + (width - 180) * step / 20, box["y"] + 150)
            if (numbers := tip(page)) is not None:
                break
        assert numbers is not None
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert_silent(page, heard)


CONTRASTS = """() => {
  const canvas = document.createElement('canvas'); canvas.width = canvas.height = 1;
  const context = canvas.getContext('2d', { willReadFrequently: true });
  const known = new Map();
  const parse = (colour) => {
    if (!known.has(colour)) {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
      known.set(colour, [r, g, b, a / 255]);
    }
    return known.get(colour);
  };
  const over = (top, under) => top.slice(0, 3).map((part, k) => part * top[3] + under[k] * (1 - top[3]));
  const light = (colour) => {
    const linear = (part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = colour.map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => node === null ? [255, 255, 255]
    : over(parse(getComputedStyle(node).backgroundColor), ground(node.parentElement));
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Map();
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const under = ground(node);
    const key = style.color + under;
    if (seen.has(key)) continue;
    const text = light(over(parse(style.color), under)), back = light(under);
    const ratio = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
    seen.set(key, [ratio, node.tagName + '.' + node.className, style.color, String(under)]);
  }
  return [...seen.values()];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_words_can_be_read_in_light_and_dark(browser: Any, file: Path, scheme: str) -> None:
    with opened(browser, file, color_scheme=scheme) as (page, heard):
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        choose(page, "tokens-fields", "n", "n = 16")
        found = page.evaluate(CONTRASTS)
        assert len(found) > 8
        assert [words for words in found if words[0] < 4.5] == []
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")
        assert_silent(page, heard)


def test_markers_can_be_told_from_the_paper() -> None:
    assets = Path(__file__).parents[1] / "src" / "howsmooth" / "study" / "templates" / "report"
    script = (assets / "colours.js").read_text(encoding="utf-8")

    def brightness(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for scheme, paper in (("light", "#ffffff"), ("dark", "#14181f")):
        (line,) = re.findall(rf"{scheme}: \[(.*)\]", script)
        colours = re.findall(r"#[0-9a-f]{6}", line)
        assert len(colours) == 8
        for colour in colours:
            ends = sorted((brightness(colour), brightness(paper)))
            assert (ends[1] + 0.05) / (ends[0] + 0.05) >= 3, colour


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


# ---- hostile data


def test_hostile_data_are_shown_and_never_run(browser: Any, tmp_path: Path) -> None:
    names = HOSTILE[:5]
    found = with_all(measured(tmp_path, models=names[:2], texts=names[2::2]), HOSTILE)
    found.measurements["masking"] = HOSTILE[1]
    found.bounds["name"] = [HOSTILE[place % len(HOSTILE)][:400] for place in range(len(found.bounds))]
    found.bounds["source"] = HOSTILE[1] * 20
    found.models["source"] = HOSTILE[6]
    found.runs["command"] = " ".join(HOSTILE[:7])
    file = tmp_path / "report.html"
    page_text = render(found, exponents(found.measurements), [])
    assert len(page_text) < 3_000_000  # a token of a megabyte stands there a few hundred times
    file.write_text(page_text, encoding="utf-8")
    with opened(browser, file) as (page, heard):
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        for key in ("model", "text", "scope", "quantity"):
            choose(page, "scatter-fields", key, f"every {key}")
        for colour in ("model", "text"):
            page.locator("#scatter-fields select[data-key='colour']").select_option(value=colour)
        page.locator("#scatter").focus()
        page.keyboard.press("Home")
        page.locator("#tokens-fields select[data-key='n']").select_option(label="n = 16")
        page.locator("#bounds-fields select[data-key='n']").select_option(label="n = 16")
        text = page.locator("body").inner_text()
        for shown in (
            "<script>window.pwned = 1</script>",
            "</script><img src=x onerror='window.pwned = 2'>",
            "<!--<script>",
        ):
            assert shown in text, shown
        assert HOSTILE[1] in page.locator("#scatter-tip").inner_text()
        tokens = page.locator("#tokens-input span")
        assert tokens.nth(0).inner_text() == HOSTILE[0]
        assert tokens.nth(7).inner_text() == "x" * 18 + "..." + "x" * 18
        assert tokens.nth(4).inner_text() == "\ufffdtxet desrever\ufffd"
        assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00-\x08\x1b]", page.content())
        assert page.locator("img").count() == 0
        assert page.locator("svg[onload], [onerror], iframe").count() == 0
        assert page.locator("script").count() == 4
        for width in (1100, 390):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") == width
        assert_silent(page, heard)
