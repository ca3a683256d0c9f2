"""The pages of the documentation as they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")])
WIDTH = 88  # characters, beyond which a block of code gets a scroll bar


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_code_fit_the_width_of_a_page(page: Path) -> None:
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    blocks = [block for kind, block in found if not kind.startswith("{")]
    assert [line for block in blocks for line in block.splitlines() if len(line) > WIDTH] == []
