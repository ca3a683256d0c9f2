"""The pages of the documentation as they are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")])
WIDTH = 88  # characters, beyond which a block of code gets a scroll bar


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_code_fit_the_width_of_a_page(page: Path) -> None:
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    blocks = [block for kind, block in found if not kind.startswith("{")]
    assert [line for block in blocks for line in block.splitlines() if len(line) > WIDTH] == []


@pytest.mark.slow
def test_pictures_are_those_that_the_command_draws(tmp_path: Path) -> None:
    words = "measure builtin-decoder --bounds none --figures all --out"
    command = (Path(sys.executable).with_name("howsmooth"), *words.split(), tmp_path)
    subprocess.run(command, check=True, capture_output=True)
    for shown, part in {"builtin-decoder": "overview", "builtin-decoder-layer-2": "layer-02"}.items():
        with Image.open(ROOT / "docs" / "_static" / f"{shown}.png") as image:
            kept = np.asarray(image.convert("L"), dtype=float)
        with Image.open(tmp_path / "figures" / f"builtin-decoder--alice--attention--{part}.png") as image:
            found = np.asarray(image.convert("L"), dtype=float)
        assert kept.shape == found.shape
        assert np.abs(kept - found).mean() < 1  # other sequences give about 14
    slopes = [f"{slope:.3f}" for slope in pd.read_csv(tmp_path / "exponents.csv")["slope"]]
    exponents = f"{', '.join(slopes[:-1])} and {slopes[-1]}"
    assert exponents in (ROOT / "README.md").read_text("utf-8").replace("\n", " ")
