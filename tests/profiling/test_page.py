"""The page of a profile: what it shows, and that hostile text stays text."""

from __future__ import annotations

import base64
import dataclasses
import html
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.errors import StoreError
from howsmooth.profiling import Profile
from howsmooth.words import visible_token


@pytest.fixture(scope="module")
def found() -> Profile:
    return hs.profile("builtin-encoder", "A <script>alert(1)</script> & more", layers=[1])


def test_every_file_is_written(found: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: saved.append(a[0]) or save(self, *a, **k))
    written = found.write(tmp_path / "new")
    assert [path.name for path in written] == [
        "profile.html",
        "profile.png",
        "profile.pdf",
        "profile.csv",
        "tokens.csv",
    ]
    assert all(path.stat().st_size > 500 for path in written)
    stored = pd.read_csv(written[3]).astype({"head": "Int64"})
    pd.testing.assert_frame_equal(stored, pd.DataFrame(found.table), check_dtype=False)
    assert len(saved) == 2  # the PNG, for the page and the file, and the PDF
    assert base64.b64encode(written[1].read_bytes()).decode() in written[0].read_text()


def test_the_page_shows_the_text_once_a_side_with_the_shade_of_each_token(found: Profile) -> None:
    page = found.page({"profile": "data:image/png;base64,"})
    texts = re.findall(r'<p class="tokens">(.*?)</p>', page, re.DOTALL)
    assert len(texts) == 2 * len(found.table) == 2 * page.count("<details")
    words = "".join(visible_token(word) for word in found.words)
    assert {html.unescape(re.sub(r"</?span[^>]*>", "", text)) for text in texts} == {words}
    top = found.ranking.iloc[0]
    rows = found.tokens[(found.tokens["layer"] == top["layer"]) & (found.tokens["head"] == top["head"])]
    shades = [round(9 * share / rows["input_share"].max()) for share in rows["input_share"]]
    shown = re.findall(r'<span class="e(\d)" title="token (\d+): ([^"]*) %">', texts[0])
    # Tokens without a shade are plain text: with a span for each, the page of a long text takes a megabyte.
    assert [(int(i), int(shade)) for shade, i, _ in shown] == [(i, s) for i, s in enumerate(shades) if s]


def test_influence_is_shown_where_it_was_measured(found: Profile, tmp_path: Path) -> None:
    assert "Which token moves which" not in found.page({"profile": "data:,"})
    full = hs.profile("builtin-encoder", "A <b>cat</b>", layers=[1], scopes="attention", influence=True)
    assert full.influence is not None
    page, *_, path, image, vector = full.write(tmp_path)
    assert [one.name for one in (path, image, vector)] == [
        f"influence.{end}" for end in ("csv", "png", "pdf")
    ]
    table = pd.read_csv(path)
    assert table["input_token"].tolist() == [full.words[j] for j in full.influence.table["input"]]
    pd.testing.assert_frame_equal(table, full.influence.table, check_exact=True, check_dtype=False)
    text = page.read_text()
    assert "Which token moves which, layer 1" in text
    assert text.count('<img src="data:image/png;base64,') == full._repr_html_().count("<img") == 2
    ends = dataclasses.replace(full.influence.token_wise, lower=1.2346, upper=1.2354)
    rounded = dataclasses.replace(full, influence=dataclasses.replace(full.influence, token_wise=ends))
    assert "moves by a distance in [1.234, 1.236]" in rounded._repr_html_()
    assert "<b>cat" not in text


def test_hostile_text_and_names_stay_text(found: Profile) -> None:
    named = dataclasses.replace(found, model="<img src=x onerror=alert(1)>", refused=("<b>no</b>",))
    for page in (named.page({"profile": "data:,"}), named._repr_html_()):
        assert "<script" not in page
        assert "<img src=x" not in page
        assert "<b>no" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', named.page({"profile": "data:,"}))
    assert policy is not None
    assert "default-src 'none'" in policy[1].replace("&#39;", "'")


def test_the_figure_has_a_cell_for_each_head_and_a_scale_for_each_panel(found: Profile) -> None:
    figure = found.plot()
    assert isinstance(figure, Figure)
    (of_heads,), (whole,) = (axis.images for axis in figure.axes[::2])  # a colour bar behind each
    heads, layers = (found.table[found.table["head"].isna() == none]["value"] for none in (False, True))
    assert of_heads.get_array().tolist() == [heads.tolist()]
    assert whole.get_array().tolist() == [layers.tolist()]
    assert (of_heads.norm.vmin, of_heads.norm.vmax) == (heads.min(), heads.max())
    assert whole.norm.vmin < layers.min() < whole.norm.vmax
    doubtful = dataclasses.replace(found, table=found.table.assign(converged=False))
    crosses = [text.get_text() for axis in doubtful.plot().axes for text in axis.texts]
    assert crosses.count("×") == len(found.table)


@pytest.mark.parametrize("scope", ["head", "attention", None])
def test_the_title_of_a_narrow_figure_covers_nothing(found: Profile, scope: str | None) -> None:
    table = found.table if scope is None else found.table[found.table["scope"] == scope]
    figure = dataclasses.replace(found, model="A name of some length", table=table).plot()
    figure.draw_without_rendering()
    title = figure._suptitle.get_window_extent()
    assert figure.bbox.x0 <= title.x0 < title.x1 <= figure.bbox.x1
    for axis in figure.axes:
        assert not title.overlaps(axis.get_tightbbox())


def test_a_folder_that_cannot_be_written(found: Profile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="another output folder"):
        found.write(tmp_path / "file")
