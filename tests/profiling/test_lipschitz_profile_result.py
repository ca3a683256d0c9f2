"""Profile: its ranking, words, digest and files."""

from __future__ import annotations

import dataclasses
import json

import pytest

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.profiling import Profile
from howsmooth.rounding import interval_in_digits


@pytest.fixture(scope="module")
def found() -> Profile:
    return hs.profile("builtin-encoder", "The cat & the dog_s $5 <b>sat</b> on 100% of it.", layers=[0, 1])


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
