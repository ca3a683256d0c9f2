"""What a profile shows: its ranking, words, LaTeX, page, figure and files; hostile text stays text."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.errors import ArgumentError, StoreError
from howsmooth.profiling import Profile
from howsmooth.rounding import interval_in_digits
from howsmooth.words import visible_token

TEXT = "A <script>alert(1)</script> & the dog_s $5 <b>sat</b> on 100% of it."


@pytest.fixture(scope="module")
def found() -> Profile:
    return hs.profile("builtin-encoder", TEXT, layers=[0, 1])


def test_the_ranking_goes_down_within_each_scope(found: Profile) -> None:
    ranking = found.ranking
    assert list(ranking["scope"]) == ["head"] * 16 + ["attention"] * 2
    for _, rows in ranking.groupby("scope"):
        assert rows["value"].is_monotonic_decreasing
    # pandas hides the middle columns of what is wider than a terminal.
    assert max(map(len, str(ranking).splitlines())) < 80
    top = ranking.iloc[0]
    assert f"layer {top['layer']}, head {top['head']}" in repr(found).splitlines()[4]
    assert f"{top['value']:.6g} in {interval_in_digits(top['lower'], top['upper'])}" in found.citation


def test_the_digest_depends_on_numbers_and_model(found: Profile) -> None:
    assert found.digest == dataclasses.replace(found).digest
    assert found.digest != dataclasses.replace(found, fingerprint="another").digest
    moved = found.table.assign(value=found.table["value"] + 1e-9)
    assert found.digest != dataclasses.replace(found, table=moved).digest


def test_the_printed_tokens_have_the_largest_shares(found: Profile) -> None:
    top = found.ranking.iloc[0]
    first = found.sensitive_tokens(int(top["layer"]), int(top["head"])).iloc[0]
    said = f"]  {first['position']} {first['token']!r} {100 * first['input_share']:.0f} % → "
    assert said in repr(found).splitlines()[4]
    with pytest.raises(ArgumentError, match="layer 3"):
        found.sensitive_tokens(3)


def test_what_did_not_converge_is_said(found: Profile) -> None:
    table = found.table.assign(converged=False)
    doubtful = dataclasses.replace(found, table=table, refused=("Layer 2: no.",))
    assert "18 of 18 did not reach rtol = 0.001" in repr(doubtful)
    assert "(not converged)" in doubtful.citation
    assert "not measured: Layer 2: no." in repr(doubtful)
    assert ", not converged" in doubtful._repr_html_()


def test_the_table_in_latex(found: Profile) -> None:
    latex = found.to_latex()
    assert latex is not None
    assert latex.count(r"\\") == 19  # a row for each layer and head, and the heading
    assert r"\%" not in latex.split("caption")[0]
    comment, table = latex.split("\n", 1)
    assert comment == f"% {found.citation}"
    assert "upper & converged" in table
    assert f"\\label{{tab:howsmooth-{found.digest}}}" in table
    caption = table.split("caption{")[1].split("}\n")[0]
    assert found.digest in caption
    assert len(caption) < 200


def test_json_has_the_ranking_with_its_tokens(found: Profile) -> None:
    described = json.loads(json.dumps(found.described()))
    first = described["ranking"][0]
    token = found.sensitive_tokens(first["layer"], first["head"]).iloc[0]
    assert first["most_sensitive"] == {"position": token["position"], "token": token["token"]}
    assert (described["n"], described["computed"]) == (found.n, "float32")
    assert described["ranking"][-1]["head"] is None


# ---- files, page and figure


def test_every_file_is_written(found: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: saved.append(a[0]) or save(self, *a, **k))
    written = found.write(tmp_path / "new")
    names = ["profile.html", "profile.png", "profile.pdf", "profile.csv", "tokens.csv"]
    assert [path.name for path in written] == names
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
    assert [one.suffix for one in (path, image, vector)] == [".csv", ".png", ".pdf"]
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
    assert of_heads.get_array().flatten().tolist() == heads.tolist()
    assert whole.get_array().flatten().tolist() == layers.tolist()
    assert (of_heads.norm.vmin, of_heads.norm.vmax) == (heads.min(), heads.max())
    assert (whole.norm.vmin, whole.norm.vmax) == (layers.min(), layers.max())
    one = dataclasses.replace(found, table=found.table[found.table["layer"] == 1]).plot().axes[2].images[0]
    assert one.norm.vmin < layers.iloc[1] < one.norm.vmax
    doubtful = dataclasses.replace(found, table=found.table.assign(converged=False))
    crosses = [text.get_text() for axis in doubtful.plot().axes for text in axis.texts]
    assert crosses.count("×") == len(found.table)


def test_the_title_of_a_narrow_figure_covers_nothing(found: Profile) -> None:
    for scopes in (["head"], ["attention"], ["head", "attention"]):
        table = found.table[found.table["scope"].isin(scopes)]
        figure = dataclasses.replace(found, model="A name of some length", table=table).plot()
        figure.draw_without_rendering()
        title = figure._suptitle.get_window_extent()
        assert figure.bbox.x0 <= title.x0 < title.x1 <= figure.bbox.x1
        assert not any(title.overlaps(axis.get_tightbbox()) for axis in figure.axes)


def test_a_folder_that_cannot_be_written(found: Profile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="another output folder"):
        found.write(tmp_path / "file")
