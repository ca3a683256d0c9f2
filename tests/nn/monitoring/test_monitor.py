"""The monitor, against dense Jacobians, the model's own probabilities, and training without it."""

from __future__ import annotations

import copy
import itertools
import json
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2Model, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3Model

import howsmooth as hs
from howsmooth.errors import ArgumentError, HowsmoothError, NonFiniteError
from howsmooth.nn import (
    CosineAttention,
    L2Attention,
    LipschitzAttention,
    LipschitzMonitor,
    LipschitzNormAttention,
    QueryKeyNormAttention,
    SelfAttentionBlock,
    SinkhornAttention,
    SoftmaxAttention,
)
from howsmooth.nn.monitoring import measurement
from tests._forked import all_done
from tests._monitored_training import PROBES, WAYS, Restless, gpt2, train_in_all_ways
from tests._selection import others_slow
from tests._tiny_models import WithoutDowncast, sublayer, tiny, token_ids


def norm(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """‖D_x f‖ of one sequence (n, d), from the whole matrix in float64."""
    with WithoutDowncast():
        jacobian = torch.autograd.functional.jacobian(lambda y: f(y[None])[0], x, vectorize=True)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize(("name", "scope"), [("bert", "attention"), ("gpt2", "block"), ("gpt2", "attention")])
def test_constants_are_those_of_dense_jacobians(name: str, scope: str) -> None:
    model, ids = tiny(name, torch.float64).train(), token_ids(3, 5)
    monitor = LipschitzMonitor(model, ids, rtol=1e-6, strict=True, scope=scope)
    rows = monitor.measure(0)
    model.eval()
    for layer, row in enumerate(rows):
        x, f = sublayer(model, ids, layer, scope)
        true = [norm(f, member) for member in x]
        assert row.lower is not None
        assert row.upper is not None
        assert row.lower <= max(true) * (1 + 1e-9)
        assert max(true) <= row.upper * (1 + 1e-9)
        assert row.each == pytest.approx(true, rel=2e-6)
        assert row.lipschitz == pytest.approx(max(true), rel=2e-6)
        assert row.lipschitz_mean == pytest.approx(sum(true) / 3, rel=2e-6)
        assert (row.converged, row.confidence, row.rtol) == (True, 0.999, 1e-6)
        assert row.iterations is not None
        norms = x.norm(dim=-1)
        assert row.radius_max == pytest.approx(float(norms.max()))
        assert row.radius_mean == pytest.approx(float(norms.square().mean().sqrt()))
        assert (row.layer, row.step, row.sequences, row.tokens, row.scope) == (layer, 0, 3, 5, scope)
        assert row.method == "closed form"
    assert len(rows) == 3


def test_too_few_iterations_are_said() -> None:
    (row, *_) = LipschitzMonitor(tiny("bert"), token_ids(2, 5), max_iterations=1, strict=True).measure()
    assert row.converged is False
    assert row.lower is not None
    assert row.upper is not None
    assert row.upper > row.lower * 1.01


def test_score_norms_are_those_of_the_products_of_weights() -> None:
    model = tiny("bert", torch.float64)
    rows = LipschitzMonitor(model, token_ids(2, 4), strict=True).measure()
    for row, layer in zip(rows, model.encoder.layer, strict=True):
        own = layer.attention.self
        q, k = (m.weight.detach().reshape(4, 6, 24) for m in (own.query, own.key))
        true = max(float(np.linalg.norm((k[h].T @ q[h] / 6**0.5).numpy(), 2)) for h in range(4))
        assert row.score_norm == pytest.approx(true, rel=1e-10)
        assert row.score_norm_missing == ""


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral"])
def test_entropy_is_that_of_the_models_own_probabilities(name: str) -> None:
    model, ids = tiny(name, torch.float64, attention="eager"), token_ids(3, 8)
    rows = LipschitzMonitor(model, ids, strict=True).measure()
    with torch.no_grad():
        own = model(ids, output_attentions=True).attentions
    for row, probabilities in zip(rows, own, strict=True):
        entropies, shares = [], []
        for p in probabilities.double().reshape(-1, 8, 8):
            for i, line in enumerate(p.tolist()):
                entropies.append(-sum(q * math.log(q) for q in line if q > 0))
                seen = {"bert": 8, "mistral": min(i + 1, 3)}.get(name, i + 1)
                if seen > 1:
                    shares.append(entropies[-1] / math.log(seen))
        assert row.entropy == pytest.approx(np.mean(entropies), rel=1e-6)
        assert row.entropy_normalised == pytest.approx(np.mean(shares), rel=1e-6)


class Sinks(nn.Module):
    """A layer whose scores are a norm of the tokens' own, and whose rows lose a part to a sink."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8).double() for _ in range(4))
        self.sink = nn.Parameter(torch.tensor([0.5, -0.3], dtype=torch.float64))

    def probabilities(self, x: Tensor) -> Tensor:
        q, k = (m(x).unflatten(-1, (2, 4)).transpose(1, 2) for m in (self.q, self.k))
        column = self.sink[:, None, None].expand(len(x), 2, x.shape[1], 1)
        return torch.cat([q @ k.mT / 2, column], dim=-1).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return self.o((self.probabilities(x)[..., :-1] @ v).transpose(1, 2).flatten(2))


def test_a_sink_counts_as_a_key() -> None:
    torch.manual_seed(0)
    layer, x = Sinks(), torch.randn(2, 5, 8, dtype=torch.float64)
    (row,) = LipschitzMonitor(layer, x, strict=True, rtol=1e-6).measure()
    p = layer.probabilities(x)
    assert row.entropy == pytest.approx(float(-(p * p.log()).sum(-1).mean()), rel=1e-9)
    assert row.entropy_normalised == pytest.approx(
        float(-(p * p.log()).sum(-1).mean()) / math.log(6), rel=1e-9
    )
    assert row.each == pytest.approx([norm(layer, member) for member in x], rel=1e-5)


def test_sequences_of_several_lengths_are_one_row() -> None:
    model = tiny("gpt2", torch.float64)
    short, long = token_ids(2, 4, seed=1), token_ids(1, 9, seed=2)
    asked: dict[str, Any] = {"rtol": 1e-6, "strict": True, "layers": [1]}
    both = LipschitzMonitor(model, [short, {"input_ids": long}], **asked).measure()
    alone = [LipschitzMonitor(model, ids, **asked).measure() for ids in (short, long)]
    for row, a, b in zip(both, *alone, strict=True):
        assert row.each == pytest.approx((*a.each, *b.each), rel=2e-6)
        assert (row.sequences, row.tokens) == (3, 9)
        rows = [2 * 4, 9]
        assert row.entropy == pytest.approx(np.average([a.entropy, b.entropy], weights=rows), rel=1e-9)
        squares = np.average([a.radius_mean**2, b.radius_mean**2], weights=rows)
        assert row.radius_mean == pytest.approx(squares**0.5)
        assert row.radius_max == max(a.radius_max, b.radius_max)


def test_layers_are_chosen() -> None:
    model = tiny("bert")
    rows = LipschitzMonitor(model, token_ids(1, 4), layers=[-1, 0], strict=True).measure()
    assert [row.layer for row in rows] == [0, 2]
    with pytest.raises(ArgumentError, match=r"layers: expected indices from -3 to 2, got 3\."):
        LipschitzMonitor(model, token_ids(1, 4), layers=[3])


def padded(ids: Tensor, real: list[slice]) -> dict[str, Tensor]:
    mask = torch.zeros_like(ids)
    for line, part in zip(mask, real, strict=True):
        line[part] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "real"), [("bert", slice(0, 5)), ("gpt2", slice(3, 8)), ("llama", slice(0, 5))]
)
def test_padded_sequences_are_measured_without_their_padding(name: str, real: slice) -> None:
    model, ids = tiny(name, torch.float64), token_ids(3, 8)
    parts = [slice(0, 8), real, real]
    asked: dict[str, Any] = {"rtol": 1e-6, "strict": True, "layers": [-1]}
    monitor = LipschitzMonitor(model, padded(ids, parts), **asked)
    rows = monitor.measure(0)
    sites = hs.capture(model, padded(ids, parts), layers=[-1])
    for row in rows:
        own = [site for site in sites if site.layer == row.layer]
        assert [site.x.shape[1] for site in own] == [8, 5, 5]
        true = [norm(site.map, site.x[0]) for site in own]
        assert row.each == pytest.approx(true, rel=2e-6)
        assert (row.sequences, row.tokens) == (3, 8)
        norms = torch.cat([site.x[0].norm(dim=-1) for site in own])
        assert row.radius_mean == pytest.approx(float(norms.square().mean().sqrt()))


@pytest.mark.parametrize("own", [False, True])
def test_a_model_that_lets_padding_in_is_refused(own: bool) -> None:
    class Summing(nn.Module):
        """Adds the mean of all tokens, padding included, to each token."""

        def __init__(self) -> None:
            super().__init__()
            settings: dict[str, Any] = {"length": 5, "radius": 20.0, "mask": "any", "shorter": True}
            inner = SoftmaxAttention(8, 2, **settings) if own else None
            self.inner = inner or nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
            x = x + x.mean(dim=1, keepdim=True)
            return self.inner(x, x, x, key_padding_mask=key_padding_mask)[0]

    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, 3:] = True
    probes = {"x": torch.randn(2, 5, 8), "key_padding_mask": hidden}
    (row,) = LipschitzMonitor(Summing(), probes).measure()
    assert "are not the same without the padding" in row.failure
    assert row.lipschitz is None


def test_layers_of_this_library_are_measured_without_padding() -> None:
    torch.manual_seed(0)
    layer = SoftmaxAttention(8, 2, length=5, radius=20.0, mask="any", shorter=True).double()
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, 3:] = True
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    probes = {"query": x, "key_padding_mask": hidden}
    (row,) = LipschitzMonitor(layer, probes, rtol=1e-6, strict=True).measure()
    true = [norm(lambda y: layer(y)[0], member) for member in (x[0], x[1, :3])]
    assert row.each == pytest.approx(true, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    others_slow(
        itertools.product(["bert", "gpt2", "llama", "own"], [torch.bfloat16, torch.float16]),
        [("bert", torch.float16), ("llama", torch.bfloat16), ("own", torch.float16)],
    ),
)
def test_half_precision_weights_are_measured_in_float32(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    half = (Mixed(radius=20.0) if name == "own" else tiny(name)).to(dtype)
    probes = torch.randn(2, 5, 8) if name == "own" else token_ids(2, 5)
    asked: dict[str, Any] = {"rtol": 1e-4, "strict": True}
    monitor = LipschitzMonitor(half, probes, **asked)
    wide = LipschitzMonitor(copy.deepcopy(half).float(), probes, **asked)
    before = {key: (id(t), t._version, t.clone()) for key, t in half.state_dict(keep_vars=True).items()}
    for row, other in zip(monitor.measure(), wide.measure(), strict=True):
        assert row.lipschitz == pytest.approx(other.lipschitz, rel=1e-6)
        assert row.entropy == pytest.approx(other.entropy, rel=1e-6)
        assert row.logit_max == pytest.approx(other.logit_max, rel=1e-6)
        if name != "llama":  # whose positions are rotary
            assert row.score_norm == pytest.approx(other.score_norm, rel=1e-6)
    for key, t in half.state_dict(keep_vars=True).items():
        assert (id(t), t._version) == before[key][:2]
        assert torch.equal(t, before[key][2])


def test_a_deep_model_is_measured_one_layer_at_a_time() -> None:
    """At no time are there copies of the weights of many layers."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=8, n_head=2, n_positions=16)
    monitor = LipschitzMonitor(GPT2LMHeadModel(config), PROBES[:1], strict=True)
    alive: list[weakref.ref[Any]] = []
    most = 0
    local_lipschitz = measurement.local_lipschitz

    def watched_at(f: Any, *rest: Any, **options: Any) -> Any:
        nonlocal most
        alive.append(weakref.ref(f))
        most = max(most, sum(one() is not None for one in alive))
        return local_lipschitz(f, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement, "local_lipschitz", watched_at)
        rows = monitor.measure(0)
    assert [row.layer for row in rows] == [*range(8)]
    assert most <= 2


NORMED: dict[str, Any] = {"qwen3": (Qwen3Model, Qwen3Config), "gemma2": (Gemma2Model, Gemma2Config)}


@pytest.mark.parametrize("name", ["bert", "mistral", "llama", *NORMED])
def test_the_largest_logit_is_that_of_the_models_own_scores(name: str) -> None:
    """Rotary positions, normed queries and keys, soft-caps and windows included."""
    ids = token_ids(3, 8)
    if name in NORMED:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "head_dim": 6}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        model_class, config = NORMED[name]
        model = model_class(config(**sizes, **heads, attn_implementation="eager")).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    else:
        model = tiny(name, torch.float64, attention="eager")
    own: list[float] = []
    softmax = nn.functional.softmax

    def watched_softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own.append(float(scores.max()))
        return softmax(scores, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "softmax", watched_softmax)
        model(ids)
    rows = LipschitzMonitor(model, ids, strict=True).measure()
    assert [row.logit_max for row in rows] == pytest.approx(own, rel=1e-5)
    assert all(row.logit_missing == "" and row.entropy is not None for row in rows)
    if name == "llama":
        assert {(row.score_norm, row.score_norm_missing) for row in rows} == {(None, "rotary positions")}
    assert all(f"logit_max/{row.name}" in row.tagged() for row in rows)


# ---------------------------------------------------------------- the package's own layers


class Mixed(nn.Module):
    """A layer of the package between two of PyTorch's."""

    def __init__(self, call: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__()
        self.first, self.last = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.own = SoftmaxAttention(8, 2, length=5, **settings)
        self.call = call or {}

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x, need_weights=False)[0]
        x = x + self.own(x, **self.call)[0]
        return x + self.last(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    ("settings", "call", "method"),
    [
        ({"radius": 20.0, "constant": 1.0}, {}, "closed form"),
        ({"radius": 20.0, "mask": "causal"}, {}, "closed form"),
        ({"radius": 1.5, "constant": 0.5, "beyond": "clip"}, {}, "autodiff"),
        ({"radius": 20.0, "mask": "any"}, {"is_causal": True}, "autodiff"),
    ],
)
def test_own_layers_are_measured_as_they_are_called(settings, call, method) -> None:
    torch.manual_seed(0)
    model, x = Mixed(call, **settings).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        model.own.in_proj_weight *= 2
    rows = LipschitzMonitor(model, x, rtol=1e-6, strict=True).measure()
    assert [row.name for row in rows] == ["first", "own", "last"]
    assert [row.layer for row in rows] == [0, 1, 2]
    given: list[Tensor] = []
    hook = model.own.register_forward_pre_hook(lambda m, args: given.append(args[0].detach()))
    model(x)
    hook.remove()
    row = rows[1]
    assert row.method == method
    assert row.each == pytest.approx([norm(lambda y: model.own(y, **call)[0], m) for m in given[0]], rel=1e-5)
    p = model.own(given[0], **call, average_attn_weights=False)[1].clamp(min=1e-300)
    lines = -(p * p.log()).sum(-1)
    assert row.entropy == pytest.approx(float(lines.mean()), rel=1e-9)
    ordered = settings.get("mask") in ("causal", "any")
    most = torch.log(torch.arange(1.0, 6.0)) if ordered else torch.full((5,), math.log(5))
    shares = (lines / most)[..., most > 0].mean()
    assert row.entropy_normalised == pytest.approx(float(shares), rel=1e-6)
    q, k, _ = model.own.in_proj_weight.detach().reshape(3, 2, 4, 8)
    assert row.score_norm == pytest.approx(
        max(float(torch.linalg.matrix_norm(k[h].T @ q[h] / 2, 2)) for h in (0, 1))
    )
    assert row.bound == pytest.approx(float(model.own.lipschitz_bound(5, settings["radius"]).value))
    assert (row.bound_length, row.bound_radius) == (5, settings["radius"])
    assert row.lipschitz is not None
    assert row.lipschitz <= row.bound
    assert rows[0].bound is None


@pytest.mark.parametrize("norm_of_tokens", [1.999, 2.0005, 2.002, 2.5])
def test_clipping_is_seen_however_little_it_changes_the_output(norm_of_tokens: float) -> None:
    torch.manual_seed(0)
    d = 16
    layer, a = SoftmaxAttention(d, 4, length=4, radius=2.0, beyond="clip"), torch.randn(d)
    a /= a.norm()
    with torch.no_grad():  # the values grow along the tokens, where clipping removes all growth
        layer.in_proj_weight[2 * d :] = 0.05 * layer.in_proj_weight[2 * d :] + torch.outer(a, a)
        layer.out_proj.weight.copy_(torch.eye(d))
    x = norm_of_tokens * nn.functional.normalize(a + 1e-3 * torch.randn(1, 4, d), dim=-1)
    (row,) = LipschitzMonitor(SelfAttentionBlock(layer), x, rtol=1e-4, strict=True).measure()
    true = norm(lambda y: layer.double()(y)[0], x[0].double())
    assert row.lipschitz == pytest.approx(true, rel=1e-3)
    q, k, _ = layer.in_proj_weight.detach().reshape(3, 4, 4, d)
    inside = x[0].double() * min(1.0, 2.0 / norm_of_tokens)
    scores = (inside @ q.mT) @ (inside @ k.mT).mT / 2
    assert row.logit_max == pytest.approx(float(scores.max()), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (QueryKeyNormAttention, "normed queries or keys"),
        (L2Attention, ""),
        (CosineAttention, "scores that are no bilinear form of the tokens"),
        (SinkhornAttention, ""),
        (LipschitzNormAttention, "scores that are no bilinear form of the tokens"),
    ],
)
def test_every_kind_of_layer_is_measured(kind: type[LipschitzAttention], missing: str) -> None:
    torch.manual_seed(0)
    layer, x = kind(8, 2, length=4, radius=6.0).double(), torch.randn(2, 4, 8, dtype=torch.float64)
    (row,) = LipschitzMonitor(SelfAttentionBlock(layer), x, rtol=1e-5, strict=True).measure()
    assert row.each == pytest.approx([norm(lambda y: layer(y)[0], member) for member in x], rel=2e-5)
    assert row.lipschitz is not None
    assert row.bound is not None
    assert row.lipschitz <= row.bound
    p = layer(x, average_attn_weights=False)[1]
    assert p is not None
    entropy = float(torch.special.entr(p.detach()).sum(-1).mean())
    assert (row.entropy, row.entropy_normalised) == pytest.approx((entropy, entropy / math.log(4)), rel=1e-6)
    assert row.score_norm_missing == missing
    assert (row.score_norm is None) == bool(missing)
    if kind is SinkhornAttention:
        assert row.logit_max is None
        assert "not the scores" in row.logit_missing
    if kind is L2Attention:  # the cross term of the distances
        f = layer.map
        assert isinstance(f, hs.L2Attention)
        products = [2 * f.scale * k.T @ q for q, k in zip(f.query, f.key, strict=True)]
        assert row.score_norm == pytest.approx(max(float(torch.linalg.matrix_norm(a, 2)) for a in products))


# ---------------------------------------------------------------- training is what it was


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trainer")
    assert all_done([partial(train_in_all_ways, folder)])
    return dict(json.loads((folder / "found.json").read_text()))


@pytest.mark.parametrize("way", WAYS[1:])
def test_training_is_the_same_bit_by_bit(way: str, trainings: dict[str, Any]) -> None:
    plain, monitored = trainings["none"], trainings[way]
    assert len(set(plain["losses"])) == 6
    assert monitored["losses"] == plain["losses"]
    assert monitored["weights"] == plain["weights"]
    assert plain["steps"] == []
    assert monitored["steps"] == [2, 2, 4, 4, 6, 6]
    # Both layers fail, the second on the tokens that the first gives it.
    assert monitored["failures"] == (6 if way == "diverged" else 0)


def test_the_trainer_trains_as_without_it(trainings: dict[str, Any]) -> None:
    plain, monitored = trainings["trainer"], trainings["trainer, monitored"]
    assert len(set(plain["losses"])) == 5
    assert monitored["losses"] == plain["losses"]
    assert monitored["weights"] == plain["weights"]
    assert monitored["rows"] == [[step, layer] for step in (0, 2, 4) for layer in (0, 1)]
    # One log for all layers, and no loss of the same step is missing.
    assert [row["step"] for row in monitored["logged"]] == [0, 2, 4]
    for row in monitored["tagged"]:
        (logged,) = (one for one in monitored["logged"] if one["step"] == row["step"])
        assert logged | row == logged
    # Steps of the optimizer, not batches.
    assert trainings["trainer, accumulating"]["rows"] == monitored["rows"]


def test_mixed_precision_does_not_reach_the_pass_over_the_probes(trainings: dict[str, Any]) -> None:
    mixed = trainings["mixed precision"]
    assert mixed["losses"] != trainings["trainer"]["losses"]
    assert len(mixed["plain"]) == 2
    # Products may differ in the last digit where arrays lie elsewhere in memory; bfloat16 would change three.
    np.testing.assert_allclose(mixed["prepared"], mixed["plain"], rtol=1e-9)


def test_a_trainer_of_another_model_is_refused(trainings: dict[str, Any]) -> None:
    error = trainings["trainer of another model"]["error"]
    assert error.startswith("ArgumentError: monitor: expected a monitor of the model that is trained")


def watched(model: nn.Module) -> LipschitzMonitor:
    return LipschitzMonitor(model, PROBES, every=2, strict=True)


def test_everything_is_left_as_it_was() -> None:
    model = Restless(gpt2())
    model.train()
    model.frozen.eval()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    calls: list[int] = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    loss = model(PROBES).sum()
    loss.backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    versions = {n: t._version for n, t in [*model.named_parameters(), *model.named_buffers()]}
    identities = {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    state = {n: t.clone() for n, t in model.state_dict().items()}
    flags = {n: m.training for n, m in model.named_modules()}
    needs = {n: p.requires_grad for n, p in model.named_parameters()}
    hooks = {n: (list(m._forward_hooks), list(m._forward_pre_hooks)) for n, m in model.named_modules()}
    generators = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    cache, fast = model.model.config.use_cache, torch.backends.mha.get_fastpath_enabled()
    torch.set_default_dtype(torch.float64)
    try:
        watched(model).measure()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(calls) == 4  # the user's own hook ran in the pass over the probes, and in two to compare
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    assert {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]} == identities
    assert {n: m.training for n, m in model.named_modules()} == flags
    assert {n: p.requires_grad for n, p in model.named_parameters()} == needs
    assert {
        n: (list(m._forward_hooks), list(m._forward_pre_hooks)) for n, m in model.named_modules()
    } == hooks
    for n, p in model.named_parameters():
        assert (p.grad is None) == (gradients[n] is None)
        assert p.grad is None or torch.equal(p.grad, gradients[n])
        assert p._version == versions[n]
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert np.array_equal(np.random.get_state()[1], generators[1][1])  # noqa: NPY002
    assert (model.model.config.use_cache, torch.backends.mha.get_fastpath_enabled()) == (cache, fast)
    assert torch.is_grad_enabled()


def test_measured_without_dropout_whatever_the_mode() -> None:
    model = gpt2(dropout=0.9)
    first = watched(model.train()).measure()
    second = watched(model.eval()).measure()
    assert [row.each for row in first] == [row.each for row in second]


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_wrappers_are_looked_into(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = gpt2()
    rows = watched(wrap(model)).measure()
    assert [row.name for row in rows] == [f"transformer.h.{i}.attn" for i in (0, 1)]
    assert [row.each for row in rows] == [row.each for row in watched(model).measure()]


def test_a_module_compiled_in_place_is_not_compiled_anew() -> None:
    model, built = gpt2(), []

    def backend(graph: Any, inputs: Any) -> Any:
        built.append(graph)
        return graph.forward

    model.transformer.h[0].mlp.compile(backend=backend)
    x = torch.randn(2, 7, 16)
    before = model.eval().transformer.h[0].mlp(x)
    count = len(built)
    watched(model).measure()
    assert torch.equal(model.transformer.h[0].mlp(x), before)
    assert len(built) == count


# ---------------------------------------------------------------- what goes wrong


def test_a_diverged_layer_is_a_row_and_training_goes_on() -> None:
    model = gpt2()
    monitor = LipschitzMonitor(model, PROBES)
    weight = model.transformer.h[1].attn.c_attn.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = math.nan
    with pytest.warns(UserWarning, match=r"layer 1 \(transformer.h.1.attn\) at step 1: .*finite weights"):
        first, second = monitor.measure(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layer's first failure is told, and no further one
        monitor.measure(1)
    monitor.records[2:] = []
    assert first.failure == ""
    assert second.failure.startswith("model: expected finite weights in layer 1")
    assert "attn.c_attn.weight" in second.failure
    assert (second.lipschitz, second.entropy, second.each) == (None, None, ())
    assert second.tagged() == {f"failed/{second.name}": 1.0}
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        weight.copy_(kept)
    assert [row.failure for row in monitor.measure(2)] == ["", ""]
    with torch.no_grad():
        model.transformer.wte.weight[PROBES[0, 0], 0] = math.inf
    assert all("NaN or infinity from an earlier layer" in row.failure for row in monitor.measure(3))
    table = monitor.table()
    assert table["failure"].ne("").tolist() == [False, True, False, False, True, True]
    assert table["lipschitz"].isna().tolist() == [False, True, False, False, True, True]


def test_one_warning_names_the_weights_that_are_not_finite() -> None:
    model = gpt2()
    monitor = LipschitzMonitor(model, PROBES)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = math.nan
        model.transformer.wte.weight[PROBES[0, 0], 0] = math.inf
    with pytest.warns(UserWarning, match="could not measure layer 0") as told:
        monitor.measure(1)
    (words,) = [str(one.message) for one in told]
    assert "Not finite are 2 weights: transformer.wte.weight, transformer.h.1.mlp.c_fc.weight." in words
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [row.failure != "" for row in monitor.measure(2)] == [True, True]


def test_strict_raises_what_stands_in_the_way() -> None:
    model = gpt2()
    monitor = LipschitzMonitor(model, PROBES, strict=True)
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="finite weights in layer 1"):
        monitor.measure()
    assert monitor.records == []
    assert all(module.training for module in model.modules())


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SelfAttending(broken=True), SelfAttending(broken=False)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class SelfAttending(nn.Module):
    """Attention; the broken one looks at the keys with the largest scores only."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        if self.broken:
            least = scores.topk(2, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        return scores.softmax(-1) @ self.v(x)


def test_a_refused_layer_does_not_hide_the_others() -> None:
    torch.manual_seed(0)
    rows = LipschitzMonitor(OneOfTwo(), torch.randn(2, 5, 8)).measure()
    assert "sparsity" in rows[0].failure
    assert rows[1].failure == ""
    assert rows[1].lipschitz is not None


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x, x, x, need_weights=False)[0]
        if self.fails:
            raise KeyError("no such thing")
        return out


def test_a_model_that_fails_is_one_row() -> None:
    model = Failing()
    monitor = LipschitzMonitor(model, torch.randn(2, 4, 8))
    model.fails = True
    with pytest.warns(UserWarning, match="could not measure the model at step 7"):
        (row,) = monitor.measure(7)
    assert (row.step, row.layer, row.name) == (7, None, "")
    LipschitzMonitor(model, torch.randn(2, 4, 8), layers=[3])  # not known until the model runs
    assert "KeyError: 'no such thing'" in row.failure
    assert model.training
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    with pytest.raises(HowsmoothError):
        LipschitzMonitor(nn.Linear(8, 8), torch.randn(2, 4, 8), strict=True).measure()
    (row,) = LipschitzMonitor(nn.Linear(8, 8), torch.randn(2, 4, 8)).measure()
    assert "No softmax attention of Linear was seen" in row.failure


# ---------------------------------------------------------------- where rows go


def test_callback_and_table() -> None:
    model, seen = gpt2(), []
    monitor = LipschitzMonitor(model, PROBES, every=3, callback=seen.append)
    monitor.measure(0)
    for _ in range(7):
        monitor.step()
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.fill_(math.nan)
    monitor.step(9)
    assert [row.step for row in seen] == [0, 0, 3, 3, 6, 6, 9, 9]
    assert seen == monitor.records
    table = monitor.table()
    assert list(table["layer"]) == [0, 1] * 4
    rows = [json.loads(json.dumps(row.as_dict(), allow_nan=False)) for row in seen]
    assert [row["each"] for row in rows] == [list(row.each) for row in seen]
    assert [row["lipschitz"] for row in rows[:-2]] == table["lipschitz"].tolist()[:-2]
    assert rows[-1]["lipschitz"] is None
    assert rows[0]["probes"] == "input_ids 3 x 7; sha256 " + rows[0]["probes"].split()[-1]


def test_the_numbers_of_a_record_are_named_by_layer() -> None:
    model = gpt2()
    monitor = LipschitzMonitor(model, PROBES, layers=[0])
    (row,) = monitor.measure(5)
    numbers = row.tagged()
    assert {name.split("/")[1] for name in numbers} == {"transformer.h.0.attn"}
    quantities = ("lipschitz", "lower", "upper", "score_norm", "entropy", "radius_max")
    assert {q: numbers[f"{q}/transformer.h.0.attn"] for q in quantities} == {
        q: getattr(row, q) for q in quantities
    }
    assert not any("bound" in name or "failed" in name for name in numbers)
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.fill_(math.nan)
    (failed,) = monitor.measure(9)
    assert failed.tagged() == {"failed/transformer.h.0.attn": 1.0}


def test_starts_differ_between_steps_and_repeat_with_the_seed() -> None:
    model = gpt2()
    asked: dict[str, Any] = {"max_iterations": 2, "layers": [0]}
    a, b, c = (LipschitzMonitor(model, PROBES, seed=seed, **asked).measure(0) for seed in (0, 0, 1))
    assert [row.each for row in a] == [row.each for row in b]
    assert [row.each for row in a] != [row.each for row in c]
    later = LipschitzMonitor(model, PROBES, **asked).measure(100)
    assert [row.each for row in a] != [row.each for row in later]


# ---------------------------------------------------------------- arguments


def test_probes_are_copies_and_their_checksum_tells_them_apart() -> None:
    model, ids = gpt2(), PROBES.clone()
    monitor = LipschitzMonitor(model, ids, strict=True)
    before = monitor.measure(0)
    ids.zero_()
    after = monitor.measure(0)
    for one, other in zip(before, after, strict=True):  # memory may lie elsewhere, and sums be cut otherwise
        assert one.each == pytest.approx(other.each, rel=1e-12)
    assert before[0].probes == after[0].probes == LipschitzMonitor(model, PROBES).probes.words
    assert LipschitzMonitor(model, ids).probes.words != before[0].probes


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    ids = PROBES
    nothing = torch.ones_like(ids)
    nothing[0] = 0
    yield {"probes": []}, "at least one sequence, got none"
    yield {"probes": ids.float()}, "token ids as an integer tensor"
    yield {"probes": ids + 40}, "token ids from 0 to 39"
    yield {"probes": {"input_ids": ids, "attention_mask": nothing}}, "a sequence of nothing but padding"
    yield {"every": 0}, "every: expected a whole number >= 1, got 0"
    yield (
        {"scope": "head"},
        "scope: expected one of heads, attention, residual, block, got 'head'. A row is a whole",
    )
    yield {"layers": []}, "layers"
    yield {"layers": [3]}, "layers: expected indices from -2 to 1, got 3."
    yield {"probes": (ids, ids)}, "got a tuple. Give the inputs of one call as a dict"
    yield {"model": nn.ModuleDict({"model": gpt2()})}, "such as module.model"
    yield {"model": 3}, "model: expected a torch.nn.Module, got int"
    yield {"probes": "text"}, "inputs: expected token ids"
    yield {"every": 1.5}, "every: expected a whole number >= 1, got 1.5"
    yield {"callback": 3}, "callback: expected a function of a record, got int"
    yield {"layers": ["a"]}, "layers: expected a list of layer indices, or None, got ['a']"
    yield {"layers": "0"}, "layers: expected a list of layer indices, or None, got '0'"
    yield {"seed": 0.5}, "seed: expected a whole number >= 0, got 0.5"
    yield {"rtol": 1e-9}, "rtol"
    yield {"confidence": 2.0}, "confidence"
    yield {"max_iterations": 0}, "max_iterations"
    yield {"seed": -1}, "seed"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("changes", "words"), list(refusals()), ids=[words for _, words in refusals()])
def test_arguments_are_refused(changes: dict[str, Any], words: str) -> None:
    arguments = {"model": gpt2(), "probes": PROBES, **changes}
    model, probes = arguments.pop("model"), arguments.pop("probes")
    with pytest.raises(ArgumentError) as caught:
        LipschitzMonitor(model, probes, **arguments)
    assert words in str(caught.value)


def test_the_scores_of_a_layer_whose_constant_is_refused_are_kept() -> None:
    model = gpt2()
    (before, _) = LipschitzMonitor(model, PROBES).measure()
    with torch.no_grad():  # as in a training that diverges
        model.transformer.h[0].attn.c_attn.weight *= 1e6
    with pytest.warns(UserWarning, match="keep a digit"):
        (row, _) = LipschitzMonitor(model, PROBES).measure()
    assert "a Jacobian of which torch.float32 products keep a digit" in row.failure
    assert row.lipschitz is None
    assert row.logit_max is not None
    assert before.logit_max is not None
    assert row.logit_max > 1e6 * abs(before.logit_max)
    assert row.score_norm == pytest.approx(1e12 * before.score_norm, rel=1e-3)
    assert row.radius_max == pytest.approx(before.radius_max)


def test_steps_are_counted_as_told() -> None:
    monitor = LipschitzMonitor(gpt2(), PROBES, every=10)
    assert monitor.step() == []
    assert monitor.step(9) == []
    assert [row.step for row in monitor.step()] == [10, 10]
    assert [row.step for row in monitor.step(32)] == [32, 32]  # 30 was passed
    assert monitor.step(34) == []
    with pytest.raises(ArgumentError, match="step"):
        monitor.step(-1)
    monitor.measure(39)  # as at the start of a resumed training
    assert [row.step for row in monitor.step()] == [40, 40]
    assert repr(monitor).startswith("LipschitzMonitor(GPT2LMHeadModel, all layers, scope attention, ")
    with pytest.raises(ArgumentError, match=r"optimizer: expected a torch\.optim\.Optimizer, got int"):
        monitor.attach(3)
