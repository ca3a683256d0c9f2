"""Every result has a table, a figure, a page, LaTeX with a line to cite, and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.errors import StoreError
from howsmooth.printed_table import PrintedTable
from howsmooth.results.curves import Curve, Panel, draw
from howsmooth.results.page import page, parts
from howsmooth.results.result import Result
from howsmooth.study.measurement_outputs import write_outputs
from tests._cases import random_attention
from tests._study import make_plan, make_tools, run

F = random_attention(0)
X = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _study(folder: Path) -> Result:
    run(make_plan(), folder, make_tools()[0])
    return write_outputs(folder)


MADE: dict[str, Callable[[Path], Result]] = {
    "estimates": lambda _: hs.local_lipschitz(F, X),
    "bounds": lambda _: hs.bounds.table(F, X[0]),
    "growth": lambda _: hs.dynamics.growth(F, X[0], times=[0.0, 0.1, 0.2], step=0.1),
    "influence": lambda _: hs.influence(F, X[0]),
    "study": _study,
}


@pytest.mark.parametrize("kind", MADE)
def test_every_result_has_all_five(kind: str, tmp_path: Path) -> None:
    found = MADE[kind](tmp_path / "made")
    assert isinstance(found, Result)
    assert isinstance(found.table, pd.DataFrame)
    assert isinstance(found.plot(), Figure)
    latex = found.to_latex()
    assert latex is not None
    assert latex.splitlines()[0] == f"% {' '.join(found.citation.split())}"
    assert found.digest in latex
    assert latex.count(r"\\") == len(found._in_latex()[0]) + 1
    assert "howsmooth " in found.citation
    image, *_ = written = [path.name for path in found.write(tmp_path / "out", parquet=True)]
    assert image == f"{found.NAME}.html"
    assert {f"{found.NAME}.png", f"{found.NAME}.pdf"} < set(written)
    name = next(name for name in written if name.endswith(".parquet"))
    assert pd.read_parquet(tmp_path / "out" / name).attrs["howsmooth"] == found.citation
    text = (tmp_path / "out" / image).read_text(encoding="utf-8")
    assert text.count("<main") == 1
    assert found._repr_html_()


def test_a_figure_of_estimates_has_a_point_and_an_interval_for_each_member() -> None:
    found = hs.local_lipschitz(F, X)
    (axis,) = found.plot().axes
    bars, dots = axis.collections
    assert [tuple(place) for place in dots.get_offsets()] == list(enumerate(found.value.tolist()))
    ends = [(low, high) for (_, low), (_, high) in bars.get_segments()]
    assert ends == list(zip(found.lower.tolist(), found.upper.tolist(), strict=True))


def test_a_table_of_bounds_is_a_table_and_its_parts_are_no_results() -> None:
    table = hs.bounds.table(F, X[0])
    assert isinstance(table, pd.DataFrame)
    part = table[table["holds"]]
    assert isinstance(part, PrintedTable)
    assert not isinstance(part, Result)
    upper = table[(table["side"] == "upper") & (table["name"] != "measured") & table["holds"]]
    for quantity in set(upper.index):
        sharpest = upper.loc[[quantity]].iloc[0]
        assert f"{quantity} at most {sharpest['value']:.6g} ({sharpest['name']})" in table.citation


def test_dots_have_a_colour_each_and_are_hollow_where_not_filled() -> None:
    colours = [(1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 1.0)]
    curve = Curve([1, 2], [3.0, 4.0], colour=colours, mark="o", alpha=0.5, filled=pd.Series([True, False]))
    figure, _ = draw([[Panel([curve])]], (2, 2))
    (dots,) = figure.axes[0].collections
    assert dots.get_edgecolor().tolist() == [[1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 1.0, 0.5]]
    assert dots.get_facecolor()[:, 3].tolist() == [0.5, 0.0]


def test_a_page_escapes_what_it_shows() -> None:
    hostile = "</style><script>alert(1)</script>\u202e"
    text = page(hostile, [parts().words(hostile), parts().table([(hostile, True)] * 6, [[hostile] * 6])])
    assert "<script" not in text
    assert "\u202e" not in text
    assert text.count("&lt;script&gt;") == 1 + 1 + 6 + 6 + 6  # title, words, heads, cells, and their names


def test_latex_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    found = hs.local_lipschitz(F, X)
    for path in (tmp_path, tmp_path / "none" / "x.tex"):
        with pytest.raises(StoreError, match=r"path: .* cannot be written"):
            found.to_latex(path)
