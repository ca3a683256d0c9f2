from __future__ import annotations

import base64
import html.parser
import re
from pathlib import Path

import pandas as pd
import pytest

from howsmooth.reproduce.finding import Finding, Picture, read_note, write_note
from howsmooth.reproduce.page import Section, render

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


def page_of(
    folder: Path, *, words: str = "It is seen.", table: pd.DataFrame | None = None, refused: str = ""
) -> str:
    inner = folder / "figure-1"
    inner.mkdir(parents=True, exist_ok=True)
    for name in ("a b#1.pdf", "a.png"):
        (inner / name).write_bytes(PNG)
    picture = Picture(inner / "a b#1.pdf", inner / "a.png", f"alt {words}", f"caption {words}")
    finding = Finding(
        [picture], [words], [] if table is None else [(f"Table {words}", table)], [(words, words)]
    )
    section = Section("figure-1", f"Title {words}", "Figure 1", f"About {words}", finding, refused)
    return render(folder, [section], f"howsmooth reproduce {words}", {"python": "3", "cpu": words})


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


def test_what_could_not_be_made_is_said(tmp_path: Path) -> None:
    page = render(tmp_path, [Section("a", "A", "Figure 9", "About.", None, "It has no heads.")], "x", {})
    assert "could not be made" in page
    assert "It has no heads." in page


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", '"word"'])
def test_a_note_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    from howsmooth.errors import StoreError

    (tmp_path / "asked.json").write_text(content)
    with pytest.raises(StoreError, match="cannot be read"):
        read_note(tmp_path)


def test_a_note_comes_back_as_it_was(tmp_path: Path) -> None:
    note = {"texts": ["a\u2028b"], "lengths": [1, 2], "as_published": True}
    write_note(tmp_path / "new", note)
    assert read_note(tmp_path / "new") == note
