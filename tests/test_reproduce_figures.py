"""The experiments of the appendices, on tiny models, against dense Jacobians and the models themselves."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.bounds.parameters import Head, parameters_of
from howsmooth.errors import ArgumentError, StoreError
from howsmooth.reproduce import adversarial_figure, quadratic_growth
from howsmooth.reproduce.adversarial_figure import ADVERSARIAL
from howsmooth.reproduce.drawing.adversarial_figure import side_by_side
from howsmooth.reproduce.drawing.gamma_radius import over_texts
from howsmooth.reproduce.drawing.gpt2_growth import Series
from howsmooth.reproduce.drawing.quadratic_growth import FAR, IDENTITY, exponents_in_radius
from howsmooth.reproduce.experiment import Experiment, Request, Step
from howsmooth.reproduce.finding import Finding, read_note
from howsmooth.reproduce.gamma_radius import GAMMA_RADIUS
from howsmooth.reproduce.gpt2_growth import GPT2_GROWTH
from howsmooth.reproduce.kept import Kept
from howsmooth.reproduce.quadratic_growth import QUADRATIC_GROWTH, balanced
from howsmooth.reproduce.registry import EXPERIMENTS
from howsmooth.study.exponents import fit_exponent
from howsmooth.study.names import decimal
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.ranges import Ranges
from howsmooth.study.run import run
from howsmooth.study.store import Store

from ._reproduce import TEXT, Words, dense_norm, tiny_tools
from ._tiny_models import tiny

BERT, DECODER, GPT2, LLAMA = (ModelSpec(name) for name in ("bert", "bert-decoder", "gpt2", "llama"))


def asked(*models: ModelSpec, **changes: Any) -> Request:
    values: dict[str, Any] = {"models": models, "texts": ("prose", "other"), "samples": 2}
    return Request(**(values | changes))


def measured(experiment: Experiment, request: Request, folder: Path) -> pd.DataFrame:
    """Carry an experiment out, and return the rows of its units."""
    experiment.measure(request, folder, tiny_tools(), lambda step: None)
    return units(folder)


@pytest.fixture
def few_radii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadratic_growth, "_STRENGTHS", (0.3, 400.0, 3000.0, 20000.0))


def units(folder: Path) -> pd.DataFrame:
    note = read_note(folder)
    parts = note.get("models", note.get("columns", [note]))
    return Kept(folder / "units").table([unit for part in parts for unit in part["units"]])


def checked(finding: Finding) -> Finding:
    """What every finding must be: pictures that are there, with words for them, and no nan in a sentence."""
    for picture in finding.pictures:
        assert picture.png.read_bytes().startswith(b"\x89PNG")
        content = picture.pdf.read_bytes()
        assert content.startswith(b"%PDF")
        assert b"/Type3" not in content
        assert len(picture.alt) > 40
        assert len(picture.caption) > 40
    assert finding.seen
    assert not [line for line in finding.seen if "nan" in line.lower() or "inf" in line.split()]
    assert finding.made
    return finding


def bert_head(layer: int, h: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and query bias of a head, read from the model's own weights, in float64."""
    part = tiny("bert").encoder.layer[layer].attention.self
    width = 24 // 4
    place = slice(h * width, (h + 1) * width)
    weights = [getattr(part, name).weight[place].detach().double() for name in ("query", "key", "value")]
    return weights[0], weights[1], weights[2], part.query.bias[place].detach().double()


# ---- γR²


def test_gamma_is_that_of_the_eigenvalues_and_radius_that_of_the_model(tmp_path: Path) -> None:
    rows = measured(GAMMA_RADIUS, asked(BERT, lengths=(6,), samples=3), tmp_path)
    assert len(rows) == 2 * 3 * 4
    for layer, h in ((0, 1), (2, 3)):
        query, key, _, _ = bert_head(layer, h)
        values = np.linalg.eigvals((key.T @ query / math.sqrt(6)).numpy())
        real = values[np.abs(values.imag) < 1e-9].real
        (row, *_) = rows[(rows["layer"] == layer) & (rows["head"] == h)].to_dict("records")
        assert row["gamma_min"] == pytest.approx(min(real), rel=1e-6, abs=1e-9)
        assert row["gamma_max"] == pytest.approx(max(real), rel=1e-6, abs=1e-9)
        assert row["gamma"] == pytest.approx(max(-min(real), max(real) / 8), rel=1e-6)
    windows = _windows("bert", 6, 3)
    hidden = tiny("bert")(windows, output_hidden_states=True).hidden_states[1].detach().double()
    norms = hidden.norm(dim=-1)
    per_sequence = norms.square().mean(dim=1).sqrt()
    row = rows[(rows["layer"] == 1) & (rows["text"] == "prose")].iloc[0]
    assert row["radius"] == pytest.approx(float(norms.square().mean().sqrt()), rel=1e-5)
    assert row["radius_from"] == pytest.approx(float(per_sequence.min()), rel=1e-5)
    assert row["radius_to"] == pytest.approx(float(per_sequence.max()), rel=1e-5)


def _windows(model: str, n: int, samples: int) -> Tensor:
    """The sequences that ``howsmooth measure`` takes, found by measuring with it."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan((ModelSpec(model),), ("prose",), (n,), samples, layers=Ranges.parse("0", "layers"))
        run(plan, Path(folder), tiny_tools())
        with Store.open(Path(folder), write=False) as store:
            held = store.sequences(model, "prose")
    ids = Words()(TEXT)
    return torch.tensor([ids[held[n, sample] : held[n, sample] + n] for sample in range(samples)])


def test_radii_of_texts_are_weighed_by_their_tokens() -> None:
    common = {"model": "m", "layer": 0, "head": 0, "gamma_min": -2.0, "gamma_max": 8.0, "gamma": 2.0}
    rows = pd.DataFrame(
        [
            {**common, "n": 10, "samples": 3, "radius": 1.0, "radius_from": 0.5, "radius_to": 1.5},
            {**common, "n": 30, "samples": 3, "radius": 3.0, "radius_from": 2.0, "radius_to": 4.0},
        ]
    )
    (row,) = over_texts(rows).to_dict("records")
    assert row["radius"] == pytest.approx(math.sqrt((30 * 1 + 90 * 9) / 120))
    assert row["strength"] == pytest.approx(2 * (30 * 1 + 90 * 9) / 120)
    assert (row["strength_from"], row["strength_to"]) == (2 * 0.25, 2 * 16.0)


def test_a_head_without_real_eigenvalue_is_counted_apart() -> None:
    common = {
        "model": "m",
        "layer": 0,
        "n": 1,
        "samples": 1,
        "radius": 1.0,
        "radius_from": 1.0,
        "radius_to": 1.0,
    }
    rows = pd.DataFrame(
        [
            {**common, "head": 0, "gamma_min": -4.0, "gamma_max": 1.0, "gamma": 4.0},
            {**common, "head": 1, "gamma_min": None, "gamma_max": None, "gamma": None},
        ]
    )
    table = over_texts(rows)
    assert table["strength"].tolist()[0] == 4.0
    assert math.isnan(table["strength"].tolist()[1])


def test_gamma_is_drawn_and_told(tmp_path: Path) -> None:
    measured(GAMMA_RADIUS, asked(BERT, GPT2, lengths=(6,)), tmp_path)
    finding = checked(GAMMA_RADIUS.draw(tmp_path))
    table = finding.tables[0][1]
    bert = table[table["model"] == "bert"]["γR²"]
    assert f"γR² is from {bert.min():.3g} to {bert.max():.3g} over its 12 heads" in finding.seen[0]
    enough = int((bert >= math.log(99) / 2).sum())
    assert f"In {enough} of 12 heads γR² is at least 2.30" in finding.seen[0]
    assert "gpt2" in finding.seen[1]


def test_rotary_models_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"llama, with rotary positions"):
        measured(GAMMA_RADIUS, asked(LLAMA, lengths=(6,)), tmp_path)


# ---- quadratic growth


def _heads() -> Iterator[SelfAttention]:
    generator = torch.Generator().manual_seed(3)
    for causal in (False, True):
        for biased in (False, True):
            query, key, value = torch.randn(3, 1, 2, 4, generator=generator, dtype=torch.float64)
            bias = torch.randn(1, 2, generator=generator, dtype=torch.float64) if biased else None
            yield SelfAttention(query, key, value, query_bias=bias, causal=causal)


@pytest.mark.parametrize("n", [3, 6, 7])
@pytest.mark.parametrize("f", list(_heads()), ids=lambda f: f.describe()[:60])
def test_the_formula_is_the_last_block_of_the_jacobian(f: SelfAttention, n: int) -> None:
    head = _head(f)
    tokens = balanced(head)
    x = tokens.tokens(n, 1.7)
    assert x.shape == (n, 4)
    assert float(x.sum(0).norm()) < 1e-12
    assert float(x[-1].norm()) == 0
    assert int((x.norm(dim=1) > 1.69).sum()) == 2 * ((n - 1) // 2)
    block = torch.func.jacrev(lambda last: f(torch.cat([x[:-1], last[None]]))[-1])(x[-1])
    assert tokens.formula(n, 1.7) == pytest.approx(float(torch.linalg.matrix_norm(block, 2)), rel=1e-10)
    assert tokens.formula(n, 1.7) <= dense_norm(f, x) * (1 + 1e-12)


def _head(f: SelfAttention) -> Head:
    return parameters_of(f).folded(0)


def test_the_identity_grows_as_the_paper_says() -> None:
    head = Head(2.5 * torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64))
    for n in (3, 9):
        assert balanced(head).formula(n, 4.0) == pytest.approx(1 / n + 2.5 * 16 * (n - 1) / n, rel=1e-12)


@pytest.mark.parametrize("radius", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("f", [f for f in _heads() if not f.causal], ids=["plain", "biased"])
def test_the_mean_field_constant_is_that_of_split_atoms(f: SelfAttention, radius: float) -> None:
    tokens = balanced(_head(f))
    x = tokens.tokens(5, radius)
    # The same measure with every token twice: the sequence feels each atom split.
    split = dense_norm(f, x.repeat_interleave(2, dim=0))
    assert tokens.mean_field(5, radius, dense_norm(f, x)) == pytest.approx(split, rel=1e-9)


def test_heads_without_scores_are_refused() -> None:
    nothing = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises(ArgumentError, match="not zero"):
        balanced(Head(nothing, torch.eye(3, dtype=torch.float64)))


@pytest.mark.usefixtures("few_radii")
def test_quadratic_growth_measures_the_norm_of_the_jacobian(tmp_path: Path) -> None:
    request = asked(BERT, lengths=(3, 5), layers=Ranges.parse("1", "layers"))
    rows = measured(QUADRATIC_GROWTH, request, tmp_path)
    assert rows["converged"].all()
    identity = rows[rows["model"] == IDENTITY]
    assert sorted(identity["n"].unique()) == [3, 5]
    eye = torch.eye(4, dtype=torch.float64)[None]
    f = SelfAttention(eye, eye, eye, scale=1.0)
    for row in identity.iloc[[0, -3]].to_dict("records"):
        signs = torch.tensor([1.0, -1.0] * ((row["n"] - 1) // 2) + [0.0], dtype=torch.float64)
        x = row["radius"] * signs[:, None] * torch.eye(4, dtype=torch.float64)[0]
        assert row["value"] == pytest.approx(dense_norm(f, x), rel=1e-6)
    for h in (0, 3):
        query, key, value, bias = bert_head(1, h)
        head = SelfAttention(query[None], key[None], value[None], query_bias=bias[None])
        own = rows[(rows["model"] == "bert") & (rows["head"] == h)]
        assert set(own["n"]) == {5}
        assert int(own["real"].sum()) == 1
        tokens = balanced(_head(head))
        for row in own.iloc[[0, 2, -1]].to_dict("records"):
            x = tokens.tokens(5, row["radius"])
            assert row["value"] == pytest.approx(dense_norm(head, x), rel=1e-5)
            assert math.log(row["value"]) <= row["log_sharp"]


def test_exponents_in_the_radius_are_those_planted() -> None:
    radius = np.geomspace(1, 100, 9)
    common = {"model": "m", "layer": 0, "n": 5, "converged": True, "real": False}
    rows = [
        {**common, "head": 0, "radius": r, "strength": r * 40, "value": 3 * r**1.5 if r * 40 >= FAR else 7.0}
        for r in radius
    ]
    rows.append({**common, "head": 0, "radius": 50.0, "strength": 2000.0, "value": 1e6, "real": True})
    rows.append({**common, "head": 0, "radius": 60.0, "strength": 2400.0, "value": 1e6, "converged": False})
    (fit,) = exponents_in_radius(pd.DataFrame(rows)).to_dict("records")
    assert fit["exponent"] == pytest.approx(1.5, abs=1e-9)
    assert fit["points"] == int((radius * 40 >= FAR).sum())


@pytest.mark.usefixtures("few_radii")
def test_quadratic_growth_is_drawn_and_told(tmp_path: Path) -> None:
    request = asked(BERT, DECODER, lengths=(5,), layers=Ranges.parse("1", "layers"))
    rows = measured(QUADRATIC_GROWTH, request, tmp_path)
    finding = checked(QUADRATIC_GROWTH.draw(tmp_path))
    table = finding.tables[0][1]
    assert len(finding.seen) == 3
    assert len(table) == 1 + 4 + 4
    assert table["exponent"].between(1.98, 2.02).all()
    real = rows[(rows["model"] == "bert") & rows["real"]]
    assert f"R = {real['radius'].iloc[0]:.4g}" in finding.seen[1]
    assert f"constants from {real['value'].min():.3g} to {real['value'].max():.3g}" in finding.seen[1]


def test_lengths_too_short_for_a_pair_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least 3"):
        measured(QUADRATIC_GROWTH, asked(BERT, lengths=(2, 5)), tmp_path)


# ---- all


@pytest.mark.usefixtures("few_radii")
@pytest.mark.parametrize("experiment", [GAMMA_RADIUS, QUADRATIC_GROWTH], ids=lambda one: one.name)
def test_an_interrupted_experiment_goes_on_and_a_finished_one_measures_nothing(
    experiment: Experiment, tmp_path: Path
) -> None:
    request = asked(BERT, lengths=(5,), layers=Ranges.parse("1", "layers"))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    calls = 0

    def count(before: int) -> None:
        nonlocal calls
        calls += 1

    def stop(before: int) -> None:
        if before == 12:
            raise KeyboardInterrupt

    experiment.measure(request, whole, tiny_tools(count), lambda step: None)
    planned = calls
    with pytest.raises(StoreError, match="cannot be read"):
        experiment.draw(broken)
    if planned:
        with pytest.raises(KeyboardInterrupt):
            experiment.measure(request, broken, tiny_tools(stop), lambda step: None)
    calls = 0
    experiment.measure(request, broken, tiny_tools(count), lambda step: None)
    assert calls <= planned - 8 if planned else calls == 0  # at least two units of the first run were kept
    pd.testing.assert_frame_equal(units(whole), units(broken))
    calls = 0
    experiment.measure(request, broken, tiny_tools(count), lambda step: None)
    assert calls == 0


@pytest.mark.usefixtures("few_radii")
@pytest.mark.parametrize("experiment", [GAMMA_RADIUS, QUADRATIC_GROWTH], ids=lambda one: one.name)
def test_progress_goes_from_nothing_to_all(experiment: Experiment, tmp_path: Path) -> None:
    steps: list[Step] = []
    request = asked(BERT, DECODER, lengths=(5,), layers=Ranges.parse("1", "layers"))
    experiment.measure(request, tmp_path, tiny_tools(), steps.append)
    done = [step.done for step in steps]
    assert done == sorted(done)
    assert steps[-1].done == steps[-1].planned == steps[0].planned


def test_the_experiments_are_registered_in_the_order_of_the_paper() -> None:
    names = [one.name for one in EXPERIMENTS]
    assert len(set(names)) == len(names)
    ours = ["figure-1", "adversarial", "gamma-r2", "quadratic-growth", "gpt2"]
    assert [name for name in names if name in ours] == ours


# ---- GPT-2


def test_the_norms_are_those_of_the_models_own_hidden_states(tmp_path: Path) -> None:
    rows = measured(GPT2_GROWTH, asked(GPT2, lengths=(4, 6, 9), samples=2), tmp_path)
    assert len(rows) == 2 * 3 * 3 * 2
    with Store.open(tmp_path / "studies" / "gpt2", write=False) as store:
        held, table = store.sequences("gpt2", "prose"), store.measurements()
    model, ids = tiny("gpt2"), Words()(TEXT)
    for layer in (0, 1, 2):
        tokens = torch.tensor([ids[held[9, sample] : held[9, sample] + 9] for sample in range(2)])
        entering = model(tokens, output_hidden_states=True).hidden_states[layer].double()
        attended = model.h[layer].ln_1(entering.float()).double()
        own = rows[(rows["text"] == "prose") & (rows["layer"] == layer) & (rows["n"] == 9)]
        expected = entering.norm(dim=-1).square().mean(dim=1).sqrt()
        assert own["radius"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
        given = table[(table["text"] == "prose") & (table["layer"] == layer) & (table["n"] == 9)]
        expected = attended.norm(dim=-1).square().mean(dim=1).sqrt()
        assert given["radius_mean"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_gpt2_is_drawn_and_told(tmp_path: Path) -> None:
    measured(GPT2_GROWTH, asked(GPT2, lengths=(4, 6, 9)), tmp_path)
    finding = checked(GPT2_GROWTH.draw(tmp_path))
    table = finding.tables[0][1]
    assert table[["layer", "text"]].to_numpy().tolist() == [
        [layer, text] for layer in (0, 1, 2) for text in ("prose", "other")
    ]
    first = table.iloc[0]
    assert f"n to the power {decimal(first['exponent'], 2)}" in finding.seen[0]
    assert f"{decimal(first['correlation, entering the layer'], 2)} (95 % interval" in finding.seen[0]
    # What was asked last is shown, and no more.
    measured(GPT2_GROWTH, asked(GPT2, lengths=(4, 6, 9), texts=("other",), samples=1), tmp_path)
    table = GPT2_GROWTH.draw(tmp_path).tables[0][1]
    assert table["text"].tolist() == ["other"] * 3
    assert table["sequences"].tolist() == [3] * 3


def test_norms_that_are_all_the_same_have_no_correlation(tmp_path: Path) -> None:
    rows = pd.DataFrame({"n": [4, 8, 16, 32], "radius_mean": [5.0] * 4, "lipschitz": [1.0, 2.0, 4.0, 8.0]})
    fit = fit_exponent(rows["n"].to_numpy(), rows["lipschitz"].to_numpy(), np.ones(4, dtype=bool))
    growing = pd.DataFrame({"n": rows["n"], "radius": rows["n"] * 2.0})
    series = Series("m", 0, "prose", rows, fit, growing)
    assert math.isnan(series.attended_correlation.value)
    assert series.entering_correlation.value == pytest.approx(1)


# ---- the worst inputs

ATTACKED = {"lengths": (4, 40), "layers": Ranges.parse("1", "layers"), "samples": 1, "texts": ("prose",)}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two models were attacked at one radius and at that of their tokens."""
    folder = tmp_path_factory.mktemp("attacked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adversarial_figure, "RADII", (6.0,))
        patch.setattr(adversarial_figure, "_RESTARTS", 2)
        patch.setattr(adversarial_figure, "_ATOM_STEPS", 5)
        measured(ADVERSARIAL, asked(BERT, GPT2, as_published=True, **ATTACKED), folder)
    return folder


def _clusters(query: Tensor, key: Tensor, bias: Tensor, radius: float, n: int) -> list[Tensor]:
    """The paper's tokens for u and for −u, from numpy's eigenvectors; a bias is what tells them apart."""
    a = (key.T @ query / math.sqrt(len(key))).numpy()
    values, vectors = np.linalg.eig(a)
    real = np.flatnonzero(np.abs(values.imag) < 1e-9)
    low, high = real[values[real].real.argmin()], real[values[real].real.argmax()]
    half = values[high].real / 8 >= -values[low].real
    u = torch.from_numpy(vectors[:, high if half else low].real.copy())
    u = radius * u / u.norm()
    light = 0.5 if half else -1.0
    return [torch.stack([sign * u, *[light * sign * u] * (n - 1)]) for sign in (1, -1)]


def _check_published(head: SelfAttention, tokens: list[Tensor], value: float) -> None:
    """The published iteration gives the root of |Jᵀ f(X)|."""
    roots = []
    for x in tokens:
        image, pull_back = torch.func.vjp(head, x)
        roots.append(float(pull_back(image)[0].norm()) ** 0.5)
    assert min(abs(value / root - 1) for root in roots) < 1e-4


def _check_constant(head: SelfAttention, tokens: list[Tensor], value: float) -> None:
    assert min(abs(value / dense_norm(head, x) - 1) for x in tokens) < 1e-4


def test_the_papers_tokens_have_the_constant_of_the_dense_jacobian(attacked: Path) -> None:
    note = read_note(attacked)["columns"][0]
    with Store.open(attacked / note["store"], write=False) as store:
        longest = float(store.measurements()["radius_max"].max())
    rows = units(attacked)
    rows = rows[rows["model"] == "bert"]
    assert set(rows["ball"]) == {"6.0", repr(longest)}
    assert "wrong slices" not in set(rows["kind"])
    part = tiny("bert").encoder.layer[1].attention.self
    for h in (0, 2):
        query, key, value, bias = bert_head(1, h)
        shift = part.value.bias[6 * h : 6 * (h + 1)].detach().double()
        head = SelfAttention(
            query[None], key[None], value[None], query_bias=bias[None], value_bias=shift[None]
        )
        for ball in (6.0, longest):
            own = rows[(rows["head"] == h) & (rows["ball"] == repr(ball)) & (rows["n"] == 4)]
            tokens = _clusters(query, key, bias, ball, 4)
            _check_constant(head, tokens, own[own["kind"] == "paper"]["value"].item())
            _check_published(head, tokens, own[own["kind"] == "as published"]["value"].item())


def test_the_published_tokens_of_gpt2_are_those_of_rows_instead_of_columns(attacked: Path) -> None:
    rows = units(attacked)
    fused = tiny("gpt2").h[1].attn.c_attn
    weight, bias = fused.weight.detach().double(), fused.bias.detach().double()
    columns = [weight[:, 24 * part : 24 * (part + 1)] for part in range(3)]
    for h in (0, 3):
        place = slice(6 * h, 6 * (h + 1))
        query, key, value = (part[:, place].T for part in columns)
        head = SelfAttention(
            query[None], key[None], value[None], query_bias=bias[place][None],
            value_bias=bias[48:][place][None], causal=True,
        )  # fmt: skip
        of = (rows["model"] == "gpt2") & (rows["head"] == h) & (rows["ball"] == "6.0") & (rows["n"] == 4)
        own = rows[of & rows["kind"].isin(["paper", "wrong slices", "as published"])].set_index("kind")[
            "value"
        ]
        wrong = _clusters(columns[0][place], columns[1][place], bias[place], 6.0, 4)
        _check_constant(head, wrong, own["wrong slices"])
        _check_constant(head, _clusters(query, key, bias[place], 6.0, 4), own["paper"])
        _check_published(head, wrong, own["as published"])
        assert abs(own["wrong slices"] / own["paper"] - 1) > 1e-3


def test_bounds_and_constants_are_in_order(attacked: Path) -> None:
    rows = units(attacked)
    for _, part in rows[rows["head"] == 0].groupby(["model", "ball", "n"]):
        of = part.groupby("kind")
        upper = of.get_group("upper")["log_value"].item()
        proved = of.get_group("proved")["log_value"].item()
        constants = [of.get_group(kind)["value"].max() for kind in ("paper", "construction", "search")]
        assert proved - 1e-3 <= math.log(max(constants)) <= upper
        assert upper <= of.get_group("theirs")["log_value"].item()


def test_the_worst_inputs_are_drawn_and_told(attacked: Path) -> None:
    finding = checked(ADVERSARIAL.draw(attacked))
    table = finding.tables[0][1]
    assert table["n"].tolist() == [4, 40] * 4
    # Beyond the model's positions there is no text, but the map is the same.
    assert table["text, median"].isna().tolist() == [False, True] * 4
    assert (table["largest found"] <= table["at most"]).all()
    assert (table["largest found"] >= table["paper's tokens"]).all()
    assert len(finding.pictures) == 2
    assert len(finding.seen) == 6
    ratios = table["largest found"] / table["paper's tokens"]
    for place, words in ((0, finding.seen[0]), (2, finding.seen[1]), (4, finding.seen[3])):
        low, high = sorted(ratios[place : place + 2])
        assert f"is {low:.3g} to {high:.3g} times that at the paper's tokens" in words
    assert "Theorem E.3 is" in finding.seen[0]
    assert "as published: the published iteration" in finding.seen[2]
    assert "sliced along the wrong axis" in finding.seen[5]


def test_the_published_items_are_shown_if_they_were_asked_for_last(attacked: Path) -> None:
    before = sorted((attacked / "units").iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adversarial_figure, "RADII", (6.0,))
        patch.setattr(adversarial_figure, "_RESTARTS", 2)
        patch.setattr(adversarial_figure, "_ATOM_STEPS", 5)
        ADVERSARIAL.measure(asked(BERT, **ATTACKED), attacked, tiny_tools(_never), lambda step: None)
    assert sorted((attacked / "units").iterdir()) == before
    finding = ADVERSARIAL.draw(attacked)
    assert len(finding.seen) == 2
    assert "as published" not in finding.tables[0][1]


def _never(calls: int) -> None:
    raise AssertionError("everything was measured before")


def test_what_did_not_converge_is_left_out_and_counted() -> None:
    rows = pd.DataFrame(
        [
            {"n": 8, "kind": "paper", "name": "two_cluster", "head": 0, "value": 3.0, "converged": True},
            {"n": 8, "kind": "paper", "name": "two_cluster", "head": 1, "value": 5.0, "converged": True},
            {"n": 8, "kind": "paper", "name": "two_cluster", "head": 2, "value": 99.0, "converged": False},
            {"n": 8, "kind": "search", "name": "tie", "head": 0, "value": 77.0, "converged": False},
            {"n": 8, "kind": "construction", "name": "tie", "head": 0, "value": 7.0, "converged": True},
            {"n": 8, "kind": "upper", "name": "a", "head": 0, "log_value": 3.0},
            {"n": 8, "kind": "theirs", "name": "b", "head": 0, "log_value": 4.0},
            {"n": 8, "kind": "proved", "name": "c", "head": 0, "log_value": 1.0},
        ]
    )
    text = pd.DataFrame({"n": [8, 8, 9], "head": [0, 1, 0], "lipschitz": [1.0, 2.0, 50.0]})
    (row,) = side_by_side(rows, text, 0).to_dict("records")
    assert (row["paper"], row["paper median"], row["paper high"]) == (3.0, 4.0, 5.0)
    assert (row["found"], row["found by"]) == (7.0, "tie")
    assert (row["text median"], row["text own"], row["text high"]) == (1.5, 1.0, 2.0)
    assert row["unsettled"] == 2
    assert math.isnan(row["wrong slices"])
