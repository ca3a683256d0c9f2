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


BROKEN = {
    '<a href="nowhere.html">x</a>': "no such file",
    '<a href="other%20page.html#nowhere">x</a>': "no such anchor",
    '<img src="nowhere.png">': "no such file",
    '<a href="../docs/index.md">x</a>': "a file outside the site",
    '<script src="https://example.org/x.js"></script>': "it would be fetched from elsewhere",
}


@pytest.mark.parametrize("written", [{}, BROKEN], ids=["sound", "broken"])
def test_each_broken_link_is_an_error(
    written: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "docs"
    (folder / "static").mkdir(parents=True)
    (folder / "static" / "there.txt").write_text("there")
    (folder / "conf.py").write_text(CONF + "myst_heading_anchors = 3\n")
    (folder / "index.md").write_text("\n\n".join([INDEX, *written]))
    (folder / "other page.md").write_text(OTHER)
    options = ["-q", "-E", "-N", "-W", "--keep-going", "-b", "html"]  # -N: words without colours
    code = build_main([*options, str(folder), str(tmp_path / "html")])
    found = [line for line in capsys.readouterr().err.splitlines() if "is broken" in line]
    assert code == bool(written)
    assert all("index.html" in line for line in found)
    assert sorted(line.partition("is broken: ")[2] for line in found) == sorted(written.values())


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_pages_beside_the_documentation(name: str) -> None:
    words = (ROOT / name).read_text("utf-8")
    found = [target for target in re.findall(r"\]\(([^)\s]+)\)", words) if "://" not in target]
    assert [target for target in found if not (ROOT / target.partition("#")[0]).exists()] == []
    assert found
