from __future__ import annotations

import base64
import html.parser
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


class Reader(html.parser.HTMLParser):
    """Collects tags with their attributes, and the words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


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
    finding = Finding(
        [picture], [words], [] if table is None else [(f"Table {words}", table)], {words: words}
    )
    figure = figure_of(f"Title {words}", f"About {words}")
    text = section(figure, finding, folder, refused)
    return figures_page([(figure, text)], f"howsmooth reproduce {words}", {"python": "3", "cpu": words})


def figure_of(title: str, about: str) -> PaperFigure:
    def nothing(*arguments: Any) -> Any:
        raise AssertionError("the page measures and draws nothing")

    return PaperFigure("figure-1", title, "Figure 1", about, nothing, nothing)


def test_the_page_needs_nothing_outside(tmp_path: Path) -> None:
    found = Reader(page_of(tmp_path))
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in found.tags}
    assert [attributes["src"][:22] for tag, attributes in found.tags if tag == "img"] == [
        "data:image/png;base64,"
    ]  # type: ignore[index]
    links = [attributes["href"] for tag, attributes in found.tags if tag == "a"]
    assert all(link is not None and (link.startswith("#") or ":" not in link) for link in links)
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy


def test_links_lead_to_the_files(tmp_path: Path) -> None:
    page = page_of(tmp_path, table=pd.DataFrame({"n": [1]}))
    assert 'href="figure-1/a%20b%231.pdf"' in page
    assert 'href="figure-1/table-1.csv"' in page


def test_hostile_words_are_shown_and_never_markup(tmp_path: Path) -> None:
    table = pd.DataFrame({HOSTILE: [HOSTILE], "n": [1]})
    page = page_of(tmp_path, words=HOSTILE, table=table, refused=HOSTILE)
    found = Reader(page)
    assert all("onerror" not in attributes for _, attributes in found.tags)
    assert sum(tag == "img" for tag, _ in found.tags) == 1
    assert "{{ 7 * 7 }}" in found.words
    assert "onerror=alert(1)>" in found.words
    for letter in "\u202e\x1b\x00":
        assert letter not in page


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
    assert [bool(m) for m in re.findall(r"<th scope=\"col\"( class=\"n\")?>", page)] == [
        False,
        True,
        True,
        True,
        False,
        True,
    ]


def test_long_tables_are_closed_and_short_ones_open(tmp_path: Path) -> None:
    short = page_of(tmp_path, table=pd.DataFrame({"n": range(12)}))
    long = page_of(tmp_path, table=pd.DataFrame({"n": range(13)}))
    assert "<details open>" in short
    assert "<details open>" not in long
    assert "(13 rows)" in long


def test_very_long_tables_are_left_to_their_file(tmp_path: Path) -> None:
    page = page_of(tmp_path, table=pd.DataFrame({"n": range(1000, 1301)}))
    assert "(301 rows)" in page
    assert "This page has no room for so many rows" in page
    assert "<table>" not in page
    assert "<td" in page_of(tmp_path, table=pd.DataFrame({"n": range(1000, 1300)}))


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
    assert heard == Complaints()


def test_printed_it_holds_pictures_and_tables(tmp_path: Path, browser: Any) -> None:
    file = tmp_path / "reproduce.html"
    file.write_text(page_of(tmp_path, table=pd.DataFrame({"n": [7]})), encoding="utf-8")
    with opened(browser, file) as (page, _):
        page.emulate_media(media="print")
        assert page.locator("td").is_visible()
        assert page.locator("img").is_visible()
        assert not page.locator("nav").is_visible()


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2 between two colours as browsers write them."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_what_could_not_be_made_is_said(tmp_path: Path) -> None:
    page = page_of(tmp_path, refused="It has no heads.")
    assert "could not be made" in page
    assert "It has no heads." in page
