"""Stability of predictions: every number against dense Jacobians of the models' own modules, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import howsmooth as hs
from howsmooth.errors import ArgumentError, CaptureError, NonFiniteError
from howsmooth.force_float64 import WithoutDowncast
from tests._shared import shared_data
from tests._tiny_models import tiny, token_ids

EPSILON = 1e-6
_LLAMA: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}

_BERT: dict[str, Any] = {
    "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1,
    "vocab_size": 60,
}  # fmt: skip


def _language_model(kind: str) -> nn.Module:
    few: dict[str, Any] = {"vocab_size": 60, "initializer_range": 0.25}
    torch.manual_seed(0)
    if kind == "gpt2":
        model: nn.Module = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **few))
    else:
        model = LlamaForCausalLM(LlamaConfig(**_LLAMA, num_hidden_layers=2, **few))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 or "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model.double().eval().requires_grad_(False)


def _blocks(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


class _Moved:
    """The logits at a position if the output of a block moves at a token: by a hook, without capture."""

    def __init__(self, model: nn.Module, ids: Tensor, layer: int, token: int, at: int = -1) -> None:
        self.model, self.ids, self.layer, self.token, self.at = model, ids, layer, token, at
        self.seen: list[Tensor] = []
        with torch.no_grad():
            self._run(lambda x: self.seen.append(x) or x)

    def _run(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        def changed(module: nn.Module, args: Any, output: Any) -> Any:
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        hook = _blocks(self.model)[self.layer].register_forward_hook(changed)
        try:
            return self.model(self.ids, use_cache=False).logits[0, self.at]
        finally:
            hook.remove()

    def __call__(self, change: Tensor) -> Tensor:
        at = nn.functional.one_hot(torch.tensor(self.token), self.ids.shape[1]).to(change)[:, None]
        with WithoutDowncast():
            return self._run(lambda _: self.seen[0] + at * change)

    def still(self) -> Tensor:
        return torch.zeros(self.seen[0].shape[-1], dtype=torch.float64)

    def fisher(self) -> Tensor:
        """Jᵀ F J, with all of its matrices formed."""
        rows = torch.autograd.functional.jacobian(self, self.still())
        p = self(self.still()).softmax(0)
        return rows.T @ (torch.diag(p) - torch.outer(p, p)) @ rows

    def divergence(self, change: Tensor) -> Tensor:
        log_p, log_q = (self(c).log_softmax(0) for c in (self.still(), change))
        return (log_p.exp() * (log_p - log_q)).sum()


def _largest_divergence(f: _Moved, size: float, start: Tensor) -> float:
    """The largest divergence that ascents find among changes of a size, from both signs of a start."""
    best = 0.0
    for sign in (1.0, -1.0):
        change = sign * size * start / start.norm()
        for _ in range(12):
            change.requires_grad_()
            value = f.divergence(change)
            best = max(best, float(value.detach()))
            (slope,) = torch.autograd.grad(value, change)
            turned = (change / size + slope / slope.norm()).detach()
            change = size * turned / turned.norm()
    return best


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_number_is_that_of_dense_matrices(kind: str) -> None:
    model, ids = _language_model(kind), token_ids(1, 4)
    table = hs.prediction_stability(model, ids, positions="0,3", epsilon=EPSILON).table
    assert [(row.layer, row.position) for row in table.itertuples()] == [(0, 0), (0, 3), (1, 0), (1, 3)]
    for row in table.to_dict("records"):
        f = _Moved(model, ids, row["layer"], row["position"])
        values, vectors = torch.linalg.eigh(f.fisher())
        exact = math.sqrt(max(0.0, float(values[-1])))
        assert row["lower"] <= exact * (1 + 1e-9)
        assert exact * (1 - 1e-9) <= row["upper"] <= exact * 1.002
        assert row["converged"]
        assert row["agrees"]
        if row["layer"] == 1 and row["position"] == 0:  # nothing but the norm and the output layer follows
            assert row["value"] == 0
            assert {row[name] for name in ("predicted", "attack", "first_order", "radius")} == {math.inf}
            continue
        # At the predicted size the divergence is the wanted one, to second order.
        along = row["predicted"] * vectors[:, -1]
        assert float(f.divergence(along)) == pytest.approx(EPSILON, rel=0.03)
        # The attack does what it says, and no more than needed.
        assert _largest_divergence(f, row["attack"], vectors[:, -1]) >= EPSILON * (1 - 1e-6)
        assert _largest_divergence(f, 0.99 * row["attack"], vectors[:, -1]) < EPSILON
        z = f(f.still())
        top, *others = z.topk(4).indices.tolist()
        slopes = torch.autograd.functional.jacobian(f, f.still())
        distances = {i: float((z[top] - z[i]) / (slopes[top] - slopes[i]).norm()) for i in others}
        assert row["first_order"] == pytest.approx(min(distances.values()), rel=1e-9)
        assert row["rival"] == min(distances, key=distances.__getitem__)


@pytest.mark.parametrize(("kind", "epsilon"), [("gpt2", 0.5), ("llama", 0.05)])
def test_attacks_succeed_and_are_not_far_from_the_smallest(kind: str, epsilon: float) -> None:
    model, ids = _language_model(kind), token_ids(1, 3)
    table = hs.prediction_stability(model, ids, layers=0, positions="1:2", epsilon=epsilon).table
    assert (table["attack"] / table["predicted"])[1 if kind == "gpt2" else 0] == pytest.approx(
        {"gpt2": 1.013, "llama": 0.4}[kind], rel=0.05 if kind == "llama" else 0.005
    )
    for row in table[np.isfinite(table["attack"])].to_dict("records"):
        f = _Moved(model, ids, 0, row["position"])
        start = torch.linalg.eigh(f.fisher())[1][:, -1]
        assert _largest_divergence(f, row["attack"], start) >= epsilon
        assert _largest_divergence(f, 0.9 * row["attack"], start) < epsilon


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_radii_after_the_last_block_hold_and_are_not_far_from_the_attack(kind: str) -> None:
    model, ids = _language_model(kind), token_ids(1, 4)
    found = hs.prediction_stability(model, ids, epsilon=0.1)
    before, last = found.table.to_dict("records")
    assert np.isnan(before["radius"])
    assert np.isnan(before["answer_radius"])
    assert 0.8 * last["attack"] < last["radius"] < last["attack"]
    f = _Moved(model, ids, 1, 3)
    generator = torch.Generator().manual_seed(0)
    answer = int(f(f.still()).argmax())
    for _ in range(5):
        start = torch.randn(16, generator=generator, dtype=torch.float64)
        assert _largest_divergence(f, last["radius"], start) <= 0.1
        assert int(f(last["answer_radius"] * start / start.norm()).argmax()) == answer
    assert last["answer_radius"] <= last["first_order"]
    assert last["answer_radius"] > 0.9 * last["first_order"]


def test_another_position_and_a_model_in_float32() -> None:
    model, ids = _language_model("llama"), token_ids(1, 4)
    found = hs.prediction_stability(model.float(), ids, at=1, layers=0, positions="0:2")
    exact = [
        math.sqrt(float(torch.linalg.eigvalsh(_Moved(model.double(), ids, 0, t, 1).fisher())[-1]))
        for t in (0, 1)
    ]
    assert list(found.table["value"][:2]) == pytest.approx(exact, rel=1e-3)
    assert found.table["value"][2] == 0  # a later token
    assert "After token 1, LlamaForCausalLM predicts 'id " in found.statement


def test_the_builtin_decoder() -> None:
    model = hs.load_model("builtin-decoder", head=True, dtype=torch.float64)
    ids = torch.tensor([model.tokenizer.encode("Alice was")])
    found = hs.prediction_stability(model, "Alice was", layers=-1, epsilon=EPSILON)
    (row,) = found.table.to_dict("records")
    f = _Moved(model.model.requires_grad_(False), ids, row["layer"], len(ids[0]) - 1)
    rows = torch.func.jacfwd(f)(f.still())
    p = f(f.still()).softmax(0)
    exact = math.sqrt(float(torch.linalg.eigvalsh(rows.T @ (p[:, None] * (rows - p @ rows)))[-1]))
    assert row["lower"] <= exact <= row["upper"]
    assert row["radius"] < row["attack"] < 1.1 * row["radius"]
    assert row["token"] == " was"


class _Own(nn.Module):
    """A language model of one's own, whose last norm is followed by a function."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(60, 8), nn.LayerNorm(8), nn.Linear(8, 60)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
        self.after = after

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.after(self.norm(self.blocks[0](self.embed(ids)))))


def test_where_more_than_a_norm_follows_nothing_is_proved_and_it_is_said() -> None:
    torch.manual_seed(0)
    ids, largest = token_ids(1, 3), []
    model = _Own(lambda x: largest.append(float(x.abs().max())) or x).eval()
    assert hs.prediction_stability(model, ids).table["radius"][0] > 0
    # Neither changes a number at these tokens, but the second does at others.
    for after, proved in (
        (lambda x: x.clamp(-99, 99), True),
        (lambda x: x.clamp(max=1.01 * largest[0]), False),
    ):
        model.after = after
        found = hs.prediction_stability(model, ids)
        assert np.isfinite(found.table[["radius", "answer_radius"]]).all(axis=None) == proved
        assert ("not proved: more than a norm layer and a linear output layer" in repr(found)) != proved


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(CaptureError, match="the model has no head"):
        hs.prediction_stability(tiny("gpt2"), token_ids(1, 4))
    config = BertConfig(**_BERT)
    pooled = _Own(lambda x: x.mean(1, keepdim=True)).eval()
    for model in (BertForSequenceClassification(config), BertForTokenClassification(config), pooled):
        with pytest.raises(ArgumentError, match="expected one with logits over a vocabulary"):
            hs.prediction_stability(model.eval(), token_ids(1, 4))
    model = _language_model("llama")
    for name, wrong in {"epsilon": 0.0, "layers": 2, "positions": "4", "at": 4}.items():
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            hs.prediction_stability(model, token_ids(1, 4), **{name: wrong})  # type: ignore[arg-type]


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = _language_model("llama")
    model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = math.nan
    with pytest.raises(
        NonFiniteError, match=r"^model: .* infinity in model\.layers\.1\.mlp\.up_proj\.weight\."
    ):
        hs.prediction_stability(model, token_ids(1, 4))
    (refused,) = hs.profile(model, token_ids(1, 4), layers=[1], scopes=["attention", "mlp"]).refused
    assert "infinity in model.layers.1.mlp.up_proj.weight." in refused


def test_what_a_result_shows(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = hs.prediction_stability(
        _language_model("llama"), token_ids(1, 3), positions="all", on_token=lambda *step: told.append(step)
    )
    assert told == [(i, 6) for i in range(7)]
    row = found.table.iloc[found.table["value"].argmax()]
    assert f"token {row['position']} {row['token']!r}: {row['value']:.6g} in [" in found.citation
    assert found.statement in found.citation
    assert found.statement in " ".join(repr(found).split())
    assert "proved " in repr(found)
    assert "attack none" in repr(found)
    page = found.page({"stability": "data:,"})
    assert "After block 1: the darker a token" in page
    assert '<span class="e9"' in page
    (image, *_) = found.plot().axes[0].get_images()
    assert np.array_equal(np.asarray(image.get_array()), found.table["value"].to_numpy().reshape(2, 3))
    assert [path.name for path in found.write(tmp_path)] == [
        f"stability.{end}" for end in ("html", "png", "pdf", "csv")
    ]
    assert found.described()["rows"][0]["layer"] == 0
    assert "stability of the prediction" in str(found.to_latex()).lower()


def test_a_trained_language_model() -> None:
    found = hs.prediction_stability(
        shared_data("stories260k"), "Once upon a time, there was a little", layers=-1, epsilon=0.01
    )
    (row,) = found.table.to_dict("records")
    assert 0 < row["radius"] < row["attack"] <= 1.02 * row["predicted"]
    assert 0 < row["answer_radius"] <= row["first_order"]


def test_an_output_layer_that_moves_nothing() -> None:
    model = _language_model("llama")
    model.get_output_embeddings().weight.zero_()  # type: ignore[operator]
    (row,) = hs.prediction_stability(model, token_ids(1, 3), layers=-1).table.to_dict("records")
    assert row["radius"] == row["answer_radius"] == math.inf


@pytest.mark.parametrize(("factor", "single"), [(60, True), (200, True), (500, False)])
def test_predictions_however_sure(factor: float, single: bool) -> None:
    model, ids = _language_model("llama"), token_ids(1, 3)
    model.get_output_embeddings().weight.mul_(factor)  # type: ignore[operator]
    f = _Moved(model, ids, 0, 2)
    log_p, rows = f(f.still()).log_softmax(0), torch.autograd.functional.jacobian(f, f.still())
    moves = rows - rows[log_p.argmax()]  # beside the sure token all is small, and none of it may be lost
    roots = (log_p[:, None] / 2).exp()
    exact = float(torch.linalg.matrix_norm(roots * (moves - log_p.exp() @ moves), 2))
    found = hs.prediction_stability(model.float() if single else model, ids, rtol=0.01)
    row, last = found.table.to_dict("records")
    assert row["lower"] <= exact <= row["upper"]
    assert row["upper"] < 1.01 * exact
    assert not row["agrees"]
    assert "(second order does not hold), attack 0." in found.citation
    assert 0 < last["radius"] < last["attack"] < 1


def test_a_prediction_too_sure_for_the_precision_leaves_what_is_proved(tmp_path: Path) -> None:
    model = _language_model("llama").float()
    model.get_output_embeddings().weight.mul_(1000)  # type: ignore[operator]
    found = hs.prediction_stability(model, token_ids(1, 3))
    assert found.table[["value", "lower", "upper", "predicted", "attack"]].isna().all(axis=None)
    assert 0 < found.table["answer_radius"][1] < found.table["first_order"][1]
    assert found.table["radius"][1] > 0
    assert "not proved: the constants are below the numbers of the precision" in repr(found)
    assert "block 1, token 2 'id " in repr(found)
    found.write(tmp_path)


def test_a_masked_language_model_predicts_its_own_token() -> None:
    model = BertForMaskedLM(BertConfig(**_BERT)).eval()
    assert hs.prediction_stability(model, token_ids(1, 4)).statement.startswith("At token 3, Bert")
    assert hs.prediction_stability(model, token_ids(1, 1)).statement.startswith("At token 0, Bert")
    decoder = _language_model("gpt2")
    assert hs.prediction_stability(decoder, token_ids(1, 1)).statement.startswith("After token 0, GPT2")


def test_a_divergence_that_rounds_to_zero_is_no_attack() -> None:
    found = hs.prediction_stability(
        _language_model("llama").float(), token_ids(1, 3), layers=0, epsilon=1e-30
    )
    assert found.table["attack"][0] == math.inf
    assert "(second order does not hold), attack none" in repr(found)


def test_a_token_that_does_not_reach_the_logits_has_the_constant_zero() -> None:
    """Words of tiny probability make products underflow: that is no reason to refuse the row."""
    text = hs.texts.load_text("alice").content[3000:3080]
    found = hs.prediction_stability("builtin-decoder", text, layers=3, positions=0)
    assert found.table.loc[0, ["value", "lower", "upper", "radius"]].tolist() == [0, 0, 0, math.inf]
    assert not found.refused
