from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest

from howsmooth.paper.figure_definition import Finding, PaperFigure
from howsmooth.paper.plotting import Picture
from howsmooth.paper.reproduction import figures_page, section
from tests._browser import Complaints, chromium, opened

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m\x00{{ 7 * 7 }}&amp;'\""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def page_of(
    folder: Path, *, words: str = "It is seen.", table: pd.DataFrame | None = None, refused: str = ""
) -> str:
    inner = folder / "figure-1"
    inner.mkdir(parents=True, exist_ok=True)
    for name in ("a b#1.pdf", "a.png"):
        (inner / name).write_bytes(PNG)
    picture = Picture(inner / "a b#1.pdf", inner / "a.png", f"title {words}", f"alt {words}", 700)
    tables = [] if table is None else [(f"Table {words}", table)]
    finding = Finding([picture], [words], tables, {words: words})
    nothing = Mock(side_effect=AssertionError("the page measures and draws nothing"))
    figure = PaperFigure("figure-1", f"Title {words}", "Figure 1", f"About {words}", nothing, nothing)
    text = section(figure, finding, folder, refused)
    return figures_page([(figure, text)], f"howsmooth reproduce {words}", {"python": "3", "cpu": words})


def test_hostile_words_are_shown_and_never_markup_and_nothing_outside_is_needed(tmp_path: Path) -> None:
    table = pd.DataFrame({HOSTILE: [HOSTILE], "n": [1]})
    page = page_of(tmp_path, words=HOSTILE, table=table, refused=HOSTILE)
    tags = re.findall(r"<(\w+)([^>]*)>", page)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in tags}
    (image,) = [attributes for tag, attributes in tags if tag == "img"]
    assert 'src="data:image/png;base64,' in image
    links = re.findall('href="([^"]*)"', page)
    assert {"figure-1/a%20b%231.pdf", "figure-1/table-1.csv"} < set(links)
    assert all(link.startswith("#") or ":" not in link for link in links)
    assert "content=\"default-src 'none'; img-src data:; style-src 'sha256-" in html.unescape(page)
    shown = html.unescape(re.sub("<[^>]*>", "", page))
    for words in ("{{ 7 * 7 }}&amp;", "onerror=alert(1)>", "This figure could not be made."):
        assert words in shown
    assert not re.search("[\u202e\x1b\x00]", page)


def test_tables_are_written_for_readers(tmp_path: Path) -> None:
    table = pd.DataFrame(
        {
            "name": ["a", None],
            "n": [12, 100],
            "ratio": [1.23456, float("nan")],
            "far": [float("inf"), -2.0],
            "holds": [True, False],
            "head": pd.array([None, 3], dtype="Int64"),
        }
    )
    page = page_of(tmp_path, table=table)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells == ["a", "12", "1.23", "∞", "yes", "", "", "100", "", "−2", "no", "3"]
    numbers = [bool(found) for found in re.findall(r"<th scope=\"col\"( class=\"n\")?>", page)]
    assert numbers == [False, True, True, True, False, True]
    # Long tables are closed, and very long ones are left to their file.
    pages = {
        count: page_of(tmp_path, table=pd.DataFrame({"n": range(count)})) for count in (12, 13, 300, 301)
    }
    assert [("<details open>" in page) for page in pages.values()] == [True, False, False, False]
    assert [("<td" in page) for page in pages.values()] == [True, True, True, False]
    assert "(301 rows)" in pages[301]


@pytest.mark.parametrize(
    ("width", "scheme"), [(1100, "light"), (1100, "dark"), (390, "light"), (390, "dark")]
)
def test_in_a_browser_it_is_readable_and_asks_for_nothing(
    tmp_path: Path, browser: Any, width: int, scheme: str
) -> None:
    long = "name-without-end" * 20
    table = pd.DataFrame({f"column {k}": [long, HOSTILE] for k in range(12)})
    file = tmp_path / "reproduce.html"
    file.write_text(page_of(tmp_path, words=f"{HOSTILE} {long}", table=table), encoding="utf-8")
    view = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with opened(browser, file, **view) as (page, heard):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("window.violations") == []
        assert page.evaluate("document.images.length") == 1
        assert page.evaluate("document.images[0].complete && document.images[0].naturalWidth === 1")
        ink, paper = page.evaluate(
            "['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])"
        )
        assert contrast(ink, paper) > 7
        # The keyboard reaches links and what scrolls.
        reached = set()
        for _ in range(8):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.tagName"))
        assert {"A", "DIV", "SUMMARY"} <= reached
        page.emulate_media(media="print")
        assert page.locator("td").first.is_visible()
        assert page.locator("img").is_visible()
        assert not page.locator("nav").is_visible()
    assert heard == Complaints()


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2 between two colours as browsers write them."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)
