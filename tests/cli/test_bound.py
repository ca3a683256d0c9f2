"""``howsmooth bound``: what is printed and written, against dense Jacobians."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import BertConfig, ViTConfig, ViTModel

import howsmooth as hs
from howsmooth.bounds import ball_upper_bound, norm_radius, table
from howsmooth.cli import main
from howsmooth.cli.terminal_output import amount
from howsmooth.study.attention_sources import Target
from howsmooth.study.bound_run import search_ball
from tests._cases import D, dense_jacobian, random_attention
from tests._cases import tokens as gaussian
from tests._documented import check_documented
from tests._sources import SmallModel, norm, plain_table, small_sources, tokens
from tests._study import contents_of, make_plan, make_tools, run, words
from tests._tiny_models import tiny

Result = tuple[int, str, str]
Howsmooth = Callable[..., Result]


@pytest.fixture
def howsmooth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Howsmooth:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, model: SmallModel | None = None, real: bool = False, count: int = 100) -> Result:
        monkeypatch.setattr("howsmooth.bounds.table", table if real else plain_table)
        capsys.readouterr()
        with small_sources(model, count):
            code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@dataclass(frozen=True)
class OneHead(SmallModel):
    """A model of one head, without a norm before it."""

    layers: int = 1
    heads: int = 1
    normed: bool = False

    def attention(self, layer: int, n: int) -> hs.SelfAttention:
        return random_attention(31, heads=1, d_out=None, dtype=torch.float32)


ONE = ["bound", "small", "--text", "prose", "--scope", "head"]


@pytest.fixture
def head(howsmooth: Howsmooth) -> tuple[Howsmooth, hs.SelfAttention]:
    """``howsmooth bound`` for a model of one head on a text of five tokens; and this head."""
    run = partial(howsmooth, *ONE, "--lengths", "5", "-q", model=OneHead(), count=5)
    return run, OneHead().attention(0, 5).to(dtype=torch.float64)


def x_of(n: int = 5) -> torch.Tensor:
    """The tokens of the first n ids."""
    return tokens(torch.arange(n)[None])[0].double()


def said(out: str) -> dict[str, Any]:
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(found, dict)
    return found


def values(attention: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(b["name"], b["side"]): b["value"] for b in attention["bounds"] if b["holds"]}


Head = tuple[Howsmooth, hs.SelfAttention]


def test_bounds_hold_at_the_tokens(head: Head) -> None:
    run, f = head
    code, out, _ = run("--json", real=True)
    check_documented("bound", said(out))
    (found,) = said(out)["attentions"]
    x = x_of()
    true = float(torch.linalg.matrix_norm(dense_jacobian(f, x), 2))
    radius = float(torch.linalg.vector_norm(x, dim=1).max())
    assert code == 0
    assert (found["n"], found["radius"]) == (5, pytest.approx(radius, rel=1e-6))
    assert found["radius_from"] == "the longest of 5 tokens"
    bounds = values(found)
    assert bounds["measured", "lower"] <= true * (1 + 1e-5)
    assert true <= bounds["measured", "upper"] * (1 + 1e-5)
    limit = ball_upper_bound(f, 5, found["radius"]).value
    assert bounds["ball_upper_bound", "upper"] == pytest.approx(limit, rel=1e-6)
    uppers = [value for (_, side), value in bounds.items() if side == "upper" and value is not None]
    assert len(uppers) > 5
    assert min(uppers) >= true * (1 - 1e-5)


def test_a_ball_of_a_given_radius_is_compared_only_with_tokens_in_it(head: Head) -> None:
    run, f = head
    _, out, _ = run("--radius", "0.5", "--json")
    (found,) = said(out)["attentions"]
    true = float(torch.linalg.matrix_norm(dense_jacobian(f, x_of()), 2))
    assert [b["name"] for b in found["bounds"]] == ["measured", "measured", "certificate", "theorem", "other"]
    assert values(found)["measured", "upper"] == pytest.approx(true, rel=1e-5)
    assert (found["radius"], found["radius_from"]) == (0.5, "given")
    # A bound beyond all numbers is null with its logarithm.
    *_, theorem, other = found["bounds"]
    assert (theorem["value"], theorem["log_value"], theorem["holds"]) == (None, 800.0, True)
    assert (other["value"], other["log_value"], other["holds"]) == (None, None, False)
    for radius, compared in (("0.5", 1), ("50", 2)):
        _, out, _ = run("--radius", radius)
        assert out.count("÷ measured") == compared
        assert ("outside of this ball" in " ".join(out.split())) == (compared == 1)
        assert "2.7264e+347" in out


def test_a_model_gives_one_table_a_layer_with_the_radius_of_its_norm(howsmooth: Howsmooth) -> None:
    code, out, err = howsmooth("bound", "small", "--text", "prose", "--lengths", "6")
    assert code == 0
    assert "small, layer 0, scope attention, unmasked, n = 6" in out
    assert "small, layer 1, scope attention, causal, n = 6" in out
    assert f"R = {norm_radius(norm()):.4g} (the LayerNorm before the attention)" in out
    assert "(the longest of 6 tokens)" in out
    assert "measured" in out
    assert "needs: luck" in out
    assert "Bounding" in err


@pytest.mark.parametrize("lengths", ["8", "5,8,11"])
def test_the_sequence_is_that_of_measure(howsmooth: Howsmooth, tmp_path: Path, lengths: str) -> None:
    tools, _ = make_tools(models={"small": SmallModel()}, texts={"prose": words(100)})
    run(make_plan(lengths=(8,), samples=1, seed=7, bounds="none"), tmp_path / "measured", tools)
    (start,) = set(contents_of(tmp_path / "measured").measurements["start"])
    options = ["--lengths", lengths, "--seed", "7", "--layers", "1", "--json", "-q"]
    _, out, _ = howsmooth("bound", "small", "--text", "prose", *options)
    (found,) = [attention for attention in said(out)["attentions"] if attention["n"] == 8]
    x = tokens(torch.arange(start, start + 8)[None])[0].double()
    f = SmallModel().attention(1, 8).to(dtype=torch.float64)
    true = float(torch.linalg.matrix_norm(dense_jacobian(f, x), 2))
    assert values(found)["measured", "upper"] == pytest.approx(true, rel=1e-5)
    _, other, _ = howsmooth("bound", "small", "--text", "prose", *options, "--seed", "8")
    assert values(said(other)["attentions"][0]) != values(said(out)["attentions"][0])


def test_heads_are_told_apart_and_written(howsmooth: Howsmooth, tmp_path: Path) -> None:
    options = ["--scope", "head", "--heads", "0,2", "--layers", "1", "--lengths", "5,7", "--out", "tables"]
    code, out, _ = howsmooth("bound", "small", "--text", "prose", *options)
    table = pd.read_csv(tmp_path / "tables" / "bounds.csv")
    assert code == 0
    assert "Written: tables/bounds.csv" in out
    assert set(zip(table["head"], table["n"], strict=True)) == {(0, 5), (0, 7), (2, 5), (2, 7)}
    assert "layer 1, head 2, scope head, causal, n = 7" in out


def test_rotary_positions_have_certificates_and_one_bound_on_a_ball(howsmooth: Howsmooth) -> None:
    command = ("bound", "small", "--text", "prose", "--lengths", "5", "-q")
    code, out, _ = howsmooth(*command, "--json", model=SmallModel(rotary=True), real=True)
    found = said(out)["attentions"]
    assert code == 0
    on_ball = {b["name"] for one in found for b in one["bounds"] if b["quantity"] != "‖D_X f‖"}
    assert on_ball == {"any_scores_ball_upper_bound"}
    assert all(("certificate", "upper") in values(one) for one in found)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models of three types, token ids and embedded tokens."""
    folder = tmp_path_factory.mktemp("models")
    tiny("llama").save_pretrained(folder / "llama")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(folder / "vit")
    # Its table of embeddings is a placeholder, so that its encoder takes tokens that are embedded.
    BertConfig(vocab_size=1, pad_token_id=0, **sizes).save_pretrained(folder / "bert")
    np.save(folder / "ids.npy", [3 + i * 7 % 20 for i in range(40)])
    np.save(folder / "x.npy", gaussian(5, 9, 24).numpy().astype("float32"))
    return folder


@pytest.mark.parametrize(
    ("model", "option", "lengths"),
    [
        ("llama", ["--tokens", "ids.npy"], "7"),
        ("llama", ["--embeddings", "x.npy"], "5"),
        ("bert", ["--random-init", "--part", "encoder", "--embeddings", "x.npy"], "5"),
        ("vit", ["--images", "builtin"], None),
    ],
)
def test_other_inputs_than_a_text(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    models: Path,
    model: str,
    option: list[str],
    lengths: str | None,
) -> None:
    monkeypatch.chdir(models)
    limits = [] if lengths is None else ["--lengths", lengths]
    assert main(["bound", model, *option, *limits, "--json", "-q"]) == 0
    found = said(capsys.readouterr().out)["attentions"]
    assert {one["layer"] for one in found} >= {0, 1}
    if lengths is not None:
        assert {one["n"] for one in found} == {int(lengths)}
    for one in found:
        measured = values(one)["measured", "lower"]  # the certificate may lie within the interval
        limit = min(b["value"] for b in one["bounds"] if b["side"] == "upper" and b["name"] != "measured")
        assert 0 < measured <= limit


def test_numbers_beyond_all_range_are_written_with_their_power() -> None:
    assert amount(1000.0) == "1.9701e+434"
    assert amount(-1000.0) == "5.0760e-435".replace("0e", "e")
    assert amount(math.log(12.5)) == "12.5"
    assert amount(1e160) == "10^(4.3429e+159)"
    assert [amount(math.log(552.2286), 4, upper=upper) for upper in (False, True)] == ["552.2", "552.3"]
    assert [amount(1000.0, upper=upper) for upper in (False, True)] == ["1.97e+434", "1.9701e+434"]
    assert amount(math.inf) == "inf"
    assert amount(-math.inf) == "0"


def test_a_table_has_80_columns_and_its_sources_below(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    run, f = head
    for width in ("80", None):
        monkeypatch.setenv("COLUMNS", width) if width else monkeypatch.delenv("COLUMNS")
        code, out, _ = run(real=True)
        tables, sources = out.split("\nSources;")
        assert code == 0
        assert max(len(line.rstrip()) for line in tables.splitlines() if "[" in line) <= 80
        for bound in hs.bounds.table(f, x_of()).query("name != 'measured'").itertuples():
            (number,) = {row.split()[-1] for row in tables.splitlines() if row.split()[:1] == [bound.name]}
            source = str(bound.source).removeprefix("howsmooth documentation, ")
            assert f"{number} {source}" in " ".join(sources.split())


# ---- the worst inputs

SEARCH = ["--search", "--steps", "2", "-q"]


def test_what_a_search_finds_is_written_and_reaches_its_constant(howsmooth: Howsmooth, head: Head) -> None:
    run = partial(howsmooth, model=OneHead())
    options = [*ONE, "--lengths", "4", "--radius", "2", *SEARCH, "--json", "--out", "found"]
    code, out, _ = run(*options, real=True)
    check_documented("bound", said(out))
    (one,) = said(out)["found"]
    with np.load(said(out)["tokens"]) as file:
        x = torch.from_numpy(file["layer 0, head 0, n = 4"])
    true = float(torch.linalg.matrix_norm(dense_jacobian(head[1], x), 2))
    assert code == 0
    assert (one["n"], one["radius"], one["by"], one["converged"]) == (4, 2.0, "ascent", True)
    assert one["lower"] <= true * (1 + 1e-12)
    assert true <= one["upper"] * (1 + 1e-12)
    assert float(x.norm(dim=1).max()) <= 2.0 * (1 + 1e-12)
    (bounded,) = said(out)["attentions"]
    found = values(bounded)
    assert found["found", "lower"] == one["lower"]
    assert found["two_heavy_tokens_lower_bound", "lower"] <= one["upper"]
    assert one["lower"] <= found["ball_upper_bound", "upper"]
    table = pd.read_csv("found/bounds.csv").set_index("name")
    assert table.loc["found", "value"] == pytest.approx(one["lower"], rel=1e-12)
    assert table.loc["found", "log_value"] == pytest.approx(math.log(one["lower"]))
    _, same, _ = run(*options)
    _, other, _ = run(*options, "--seed", "1")
    assert said(same)["found"] == [one] != said(other)["found"]


def test_bounds_on_a_ball_are_compared_with_what_was_found(head: Head) -> None:
    run, _ = head
    code, out, _ = run("--radius", "0.5", *SEARCH, real=True)
    assert code == 0
    assert "The largest constant found: " in out
    assert (out.count("÷ measured"), out.count("÷ found")) == (1, 1)
    (row,) = [line.split() for line in out.splitlines() if line.split()[:1] == ["found"]]
    assert row[3] == "1"
    lines = out[out.index("÷ found") :].splitlines()[1:]
    sides = [
        line.split()[1] for line in lines if line.split()[1:2] in (["≥"], ["≤"]) and "not valid" not in line
    ]
    assert sides == sorted(sides, reverse=True)  # the lower bounds come first
    assert "outside" not in out
    _, out, _ = run("--radius", "1", "--search", "--steps", "1")
    assert "Written" not in out


@pytest.mark.parametrize(("shorter", "given"), [(0.0, True), (1e-7, True), (1e-4, False)])
def test_tokens_that_leave_the_ball_by_rounding_count_as_in_it(
    shorter: float, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, x = random_attention(31, heads=1, d_out=None), gaussian(3, 5, D)
    longest = float(x.norm(dim=1).max())
    one = Target(0, 0, "head", "none", f, None, x)
    monkeypatch.setattr("howsmooth.adversarial.constructions", lambda *_: [])
    # The ascent goes nowhere.
    still = hs.adversarial.ascend(f, 5, 1e-6, steps=1, atom_restarts=0, random_starts=1)
    monkeypatch.setattr("howsmooth.adversarial.ascend", lambda *_, **__: still)
    found = search_ball(one, 5, longest * (1 - shorter), steps=1, seed=0, told=lambda _: None)
    assert (found.by == "tokens") == given
    assert float(found.x.norm(dim=1).max()) <= longest * (1 - shorter) * (1 + 1e-9)


@pytest.mark.parametrize("model", [SmallModel(rotary=True), SmallModel(masked=True)])
def test_a_search_takes_rotary_positions_and_masks(howsmooth: Howsmooth, model: SmallModel) -> None:
    command = ["bound", "small", "--text", "prose", "--lengths", "1,4", "--layers", "0", *SEARCH, "--json"]
    code, out, _ = howsmooth(*command, model=model)
    assert code == 0
    for one, bounded in zip(said(out)["found"], said(out)["attentions"], strict=True):
        measured = values(bounded)["measured", "lower"]
        assert one["upper"] >= measured * (1 - 1e-4)
        assert one["radius"] == bounded["radius"]


@dataclass(frozen=True)
class OtherSecondLayer(SmallModel):
    """A model whose second layer is L2 attention, which has no bound on a ball here."""

    def attention(self, layer: int, n: int) -> Any:
        f = super().attention(layer, n)
        return f if layer == 0 else hs.L2Attention(f.query, f.key, f.value, f.output)


def test_a_layer_without_a_known_bound_is_named(howsmooth: Howsmooth) -> None:
    run = partial(howsmooth, "bound", "small", "--text", "prose", "--lengths", "5", model=OtherSecondLayer())
    code, _, error = run(real=True)
    assert code == 2
    assert "layers: expected layers with a known bound, got layer 1: L2 attention" in " ".join(error.split())
    assert "Leave this layer out with --layers" in " ".join(error.split())
    assert run("--layers", "0", real=True)[0] == 0
