"""The extension that follows the links of the built documentation, on a site of two pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parents[2]

CONF = f"""
import sys
sys.path.insert(0, {str(ROOT / "docs" / "_ext")!r})
extensions = ["myst_parser", "links"]
html_static_path = ["static"]
html_theme = "basic"
"""

INDEX = """# Start

```{toctree}
other page
```

[A part of it](other%20page.md#a-part), [a file](static/there.txt), [elsewhere](https://example.org/x#y),
[here](#start) and <a href="other%20page.html#raw">an anchor of raw HTML</a>.
"""

OTHER = """# Other

## A part

<p id="raw">raw</p> <a href="index.html#start">back</a> <a href=".">the folder</a>
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "static").mkdir(parents=True)
    (folder / "static" / "there.txt").write_text("there")
    (folder / "conf.py").write_text(CONF + "myst_heading_anchors = 3\n")
    (folder / "index.md").write_text(INDEX)
    (folder / "other page.md").write_text(OTHER)
    return folder


def build(site: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Build as the documentation is built; return the exit code and the warnings of links."""
    options = ["-q", "-E", "-N", "-W", "--keep-going", "-b", "html"]  # -N: words without colours
    code = build_main([*options, str(site), str(site.parent / "html")])
    said = capsys.readouterr().err
    return code, [line for line in said.splitlines() if "is broken" in line]


def test_a_site_without_broken_links(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(site, capsys) == (0, [])


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ('<a href="nowhere.html">x</a>', "no such file"),
        ('<a href="other%20page.html#nowhere">x</a>', "no such anchor"),
        ('<img src="nowhere.png">', "no such file"),
        ('<a href="../docs/index.md">x</a>', "a file outside the site"),
        ('<script src="https://example.org/x.js"></script>', "it would be fetched from elsewhere"),
    ],
)
def test_a_broken_link_is_an_error(
    site: Path, capsys: pytest.CaptureFixture[str], written: str, reason: str
) -> None:
    with (site / "index.md").open("a") as page:
        page.write(f"\n{written}\n")
    code, found = build(site, capsys)
    assert code == 1
    assert len(found) == 1
    assert "index.html" in found[0]
    assert found[0].endswith(f"is broken: {reason}")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_pages_beside_the_documentation(name: str) -> None:
    words = (ROOT / name).read_text("utf-8")
    found = [target for target in re.findall(r"\]\(([^)\s]+)\)", words) if "://" not in target]
    assert [target for target in found if not (ROOT / target.partition("#")[0]).exists()] == []
    assert found
