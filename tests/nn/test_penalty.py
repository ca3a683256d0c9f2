"""The leading singular value as a penalty, against dense Jacobians and their decompositions."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    DistilBertConfig,
    DistilBertModel,
    T5Config,
    T5EncoderModel,
)

from howsmooth.errors import ArgumentError, DerivativeError, NonFiniteError
from howsmooth.nn import LipschitzMonitor
from howsmooth.nn.penalty import (
    JasminPenalty,
    SpectralPenalty,
    jasmin,
)
from howsmooth.nn.penalty.jasmin import _jacobian_bound
from howsmooth.nn.penalty.singular_value import Directions
from tests._selection import others_slow
from tests._tiny_models import tiny, token_ids

D, N, B = 6, 4, 3


def attention(seed: int = 0, *, dropout: float = 0.0, batch_first: bool = True) -> nn.MultiheadAttention:
    torch.manual_seed(seed)
    layer = nn.MultiheadAttention(D, 2, dropout=dropout, batch_first=batch_first, dtype=torch.float64)
    with torch.no_grad():
        layer.in_proj_weight *= 2.0
        layer.in_proj_bias.normal_()
    return layer


def tokens(seed: int = 1, members: int = B, n: int = N) -> Tensor:
    return torch.randn(members, n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_one(layer: nn.MultiheadAttention) -> Callable[[Tensor], Tensor]:
    """The map of one sequence (n, d), written out: no code of PyTorch's attention."""

    def f(x: Tensor) -> Tensor:
        q, k, v = (x @ layer.in_proj_weight.T + layer.in_proj_bias).chunk(3, dim=-1)
        heads = []
        for i in range(2):
            part = slice(3 * i, 3 * i + 3)
            scores = q[:, part] @ k[:, part].T / 3**0.5
            heads.append(scores.softmax(-1) @ v[:, part])
        return torch.cat(heads, dim=-1) @ layer.out_proj.weight.T + layer.out_proj.bias

    return f


def dense(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Jacobian (n·d_out, n·d) of a map of one sequence, differentiable by its weights and x."""
    y = f(x).reshape(-1)
    eye = torch.eye(len(y), dtype=y.dtype)
    return torch.autograd.grad(y, x, eye, create_graph=True, is_grads_batched=True)[0].flatten(1)


def norms(layer: nn.MultiheadAttention, xs: Tensor) -> Tensor:
    """Spectral norms by dense singular value decompositions, differentiable."""
    f = of_one(layer)
    each = [x if x.requires_grad else x.detach().requires_grad_() for x in xs.unbind()]
    return torch.stack([torch.linalg.svdvals(dense(f, x)).max() for x in each])


class Model(nn.Module):
    """A linear map, attention, a linear map; residuals, dropout on the way."""

    def __init__(self, layer: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.before = nn.Linear(D, D, dtype=torch.float64)
        self.attention = layer
        self.dropout = nn.Dropout(dropout)
        self.after = nn.Linear(D, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.before(x))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.after(h).mean(dim=1)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("batch_first", [True, False])
def test_value_is_the_norm_of_the_dense_jacobian(batch_first: bool) -> None:
    layer, x = attention(batch_first=batch_first), tokens()
    given = x if batch_first else x.transpose(0, 1)
    with SpectralPenalty(layer, [""], first_steps=40, over_members="sum") as penalty:
        layer(given, given, given)
        total = penalty()
    expected = norms(layer, x).detach()
    (found,) = penalty.report.layers
    assert penalty.report.converged
    assert torch.allclose(found.value, expected, rtol=1e-8, atol=0)
    assert torch.allclose(total, expected.sum(), rtol=1e-8)
    # From a random start the interval holds.
    assert bool((found.upper >= expected * (1 - 1e-12)).all())
    assert bool((found.upper <= expected * 1.1).all())


def test_gradient_is_that_of_the_dense_singular_value() -> None:
    model, x = Model(attention()), tokens()
    with SpectralPenalty(model, first_steps=60, rtol=1e-6, on_input=True) as penalty:
        model(x)
        penalty().backward()
    found = gradients(model)

    model.zero_grad()
    h = model.before(x)
    f = of_one(model.attention)
    torch.stack([torch.linalg.svdvals(dense(f, row)).max() for row in h.unbind()]).mean().backward()
    expected = gradients(model)
    # The output's bias, and the key's but for rounding, have no effect; nor has what comes after.
    assert set(found) == set(expected) - {"attention.out_proj.bias"}
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("kind", [SpectralPenalty, JasminPenalty])
def test_a_model_is_copied_and_saved_while_a_penalty_is_attached(kind: type) -> None:
    model, x = Model(attention()), tokens()
    with kind(model) as penalty:
        model(x)
        before = penalty()
        before.backward()
        copied = copy.deepcopy(model)
        copied(2 * x)  # an average of weights, for example, is no pass of the model
        assert float(penalty()) == pytest.approx(float(before), rel=1e-3)
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x))


def test_without_on_input_nothing_flows_to_what_is_before() -> None:
    model, x = Model(attention()), tokens()
    with SpectralPenalty(model) as penalty:
        model(x)
        penalty().backward()
    assert model.before.weight.grad is None
    assert model.attention.in_proj_weight.grad is not None


def test_value_is_a_lower_estimate_before_it_has_converged() -> None:
    layer = attention()
    with SpectralPenalty(layer, [""], first_steps=2, rtol=1e-6) as penalty:
        for seed in range(4):
            x = tokens(seed)
            layer(x, x, x)
            penalty()
            (found,) = penalty.report.layers
            expected = norms(layer, x).detach()
            assert bool((found.value <= expected * (1 + 1e-12)).all())
            # What it says of itself is true: some singular value lies that near.
            f = of_one(layer)
            for row, value, residual in zip(x, found.value, found.residual, strict=True):
                spectrum = torch.linalg.svdvals(dense(f, row.requires_grad_()).detach())
                assert float((spectrum - value).abs().min()) <= float(residual * value) * (1 + 1e-9)
    assert not penalty.report.converged
    assert "have not converged" in str(penalty.report)
    assert all(value != value for value in penalty.report.constants().values())


def test_a_remembered_direction_converges_at_one_product_a_step() -> None:
    layer, x = attention(), tokens()
    expected = norms(layer, x).detach()
    errors = []
    with SpectralPenalty(layer, [""], first_steps=2) as penalty:
        for _ in range(80):
            layer(x, x, x)
            penalty()
            errors.append(float((1 - penalty.report.layers[0].value / expected).max()))
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-4
    # Power iteration never goes back.
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(errors))


@pytest.mark.parametrize(("steps", "off"), [(1, 0.05), (4, 0.005)])
def test_follows_the_constant_through_a_training(steps: int, off: float) -> None:
    torch.manual_seed(0)
    model, x = Model(attention(5)), tokens(6, members=8)
    target = torch.randn(8, 2, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    before = norms(model.attention, model.before(x).detach()).detach().mean()
    with SpectralPenalty(model, steps=steps) as penalty:
        for step in range(30):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            (loss + 0.3 * penalty()).backward()
            (found,) = penalty.report.layers
            if step % 5 == 4:
                expected = norms(model.attention, model.before(x).detach()).detach()
                # A penalty brings the largest singular values together, and one product a step lags where
                # the second takes over.
                near = (found.value - expected).abs() / expected
                assert float(near.mean() if steps == 1 else near.max()) <= off
                assert bool((found.value <= expected * (1 + 1e-12)).all())
                right = (found.value - expected).abs() <= 0.02 * expected
                assert bool((right | ~found.converged).all())
            optimizer.step()
    assert expected.mean() < 0.85 * before


def test_directions_outlive_other_batch_sizes_and_lengths() -> None:
    layer, x = attention(), tokens(members=5)
    expected = norms(layer, x).detach()
    with SpectralPenalty(layer, [""], first_steps=60, rtol=1e-6) as penalty:

        def values(given: Tensor) -> Tensor:
            layer(given, given, given)
            penalty()
            return penalty.report.layers[0].value

        values(x[:3])
        cold = values(x)  # two more places, which begin at random
        assert torch.allclose(cold, expected, rtol=1e-8)
        assert penalty.report.layers[0].upper.isfinite().tolist() == [False] * 3 + [True] * 2
        values(x[:1])
        assert torch.allclose(values(x), expected, rtol=1e-8)  # none forgotten
        assert not penalty.report.layers[0].upper.isfinite().any()
        shorter = x[:, :2]
        for _ in range(60):
            found = values(shorter)
        assert torch.allclose(found, norms(layer, shorter).detach(), rtol=1e-4)
        assert values(x).shape == (5,)
        assert not penalty.report.layers[0].upper.isfinite().any()


def test_the_model_is_left_as_it_was() -> None:
    class Counting(nn.MultiheadAttention):
        """Writes to a buffer, replaces another and leaves attributes, in any mode."""

        def __init__(self) -> None:
            super().__init__(D, 2, dropout=0.5, batch_first=True, dtype=torch.float64)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(1))
            self.seen: list[bool] = []

        def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = True):
            self.calls += 1
            self.last = query.detach().mean()[None]
            self.mode = self.training
            return super().forward(query, key, value, need_weights=need_weights)

    model, x = Model(Counting(), dropout=0.5).train(), tokens()
    model.after.eval()
    fired: list[str] = []
    model.attention.register_forward_hook(lambda *_: fired.append("outer"))
    model.attention.out_proj.register_forward_pre_hook(lambda *_: fired.append("inner"))
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    penalty = SpectralPenalty(model, steps=2)
    with penalty:
        out = model(x)
        random = torch.get_rng_state()
        modes = [m.training for m in model.modules()]
        buffers = {name: (b, b._version, b.clone()) for name, b in model.named_buffers()}
        fired.clear()
        term = penalty()
        assert torch.equal(random, torch.get_rng_state())
        assert modes == [m.training for m in model.modules()]
        for name, b in model.named_buffers():
            same, version, value = buffers[name]
            assert b is same
            assert b._version == version
            assert torch.equal(b, value)
        assert model.attention.mode is True
        assert not fired
        assert all(p.grad is None for p in model.parameters())
        (out.sum() + term).backward()
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_training_is_the_same_with_a_penalty_of_weight_zero() -> None:
    def losses(penalised: bool) -> list[float]:
        torch.manual_seed(0)
        model = Model(attention(2, dropout=0.3), dropout=0.3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        penalty = SpectralPenalty(model)
        if penalised:
            penalty.attach()
        found = []
        for step in range(5):
            optimizer.zero_grad()
            loss = model(tokens(step)).square().mean()
            if penalised:
                loss = loss + 0.0 * penalty()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        penalty.detach()
        return found

    assert losses(True) == losses(False)


def test_residual_is_that_of_the_pair() -> None:
    layer, x = attention(), tokens()
    with SpectralPenalty(layer, [""], first_steps=2) as penalty:
        layer(x, x, x)
        penalty()
        before = penalty.state_dict()[""]["left"].flatten(1).clone()
        penalty()
        (found,) = penalty.report.layers
    for row, u, value, residual in zip(x, before, found.value, found.residual, strict=True):
        jacobian = dense(of_one(layer), row.clone().requires_grad_()).detach()
        v = jacobian.T @ u
        assert torch.allclose(v.norm(), value)
        assert torch.allclose((jacobian @ v / value - value * u).norm() / value, residual, rtol=1e-9)
    assert float(found.residual.max()) > 1e-3


def test_a_jacobian_that_is_zero_has_value_and_gradient_zero() -> None:
    layer, x = attention(), tokens()
    with torch.no_grad():
        layer.out_proj.weight.zero_()
    with SpectralPenalty(layer, [""]) as penalty:
        layer(x, x, x)
        term = penalty()
        term.backward()
    assert float(term.detach()) == 0
    assert penalty.report.converged
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters() if p.grad is not None)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def test_what_is_refused() -> None:
    layer, x = attention(), tokens()
    for make, words in (
        (lambda: SpectralPenalty(layer, [""])(), "not attached"),
        (lambda: SpectralPenalty(Model(layer), ["nowhere"]), "'nowhere'"),
        (lambda: SpectralPenalty(nn.Linear(2, 2)), "contains 'attention'"),
        (lambda: SpectralPenalty(layer, [""], steps=0), "steps"),
        (lambda: SpectralPenalty(layer, [""], transform=3), "transform"),
        (lambda: Directions(-1), "seed"),
        (lambda: SpectralPenalty(layer, [""]).load_state_dict(None), r"returned, got NoneType"),
    ):
        with pytest.raises(ArgumentError, match=words):
            make()
    with SpectralPenalty(layer, [""]) as penalty:
        with torch.no_grad():
            layer(x, x, x)
        with pytest.raises(ArgumentError, match="no such pass"):
            penalty()
        y = torch.full_like(x, torch.nan)
        layer(y, y, y)
        with pytest.raises(NonFiniteError):
            penalty()
        layer(x, x, x)
        for mask, words in (
            (torch.arange(len(x))[:, None].expand(x.shape[:2]) > 0, "1 of .* without one.*~key_padding_mask"),
            (torch.ones(len(x), x.shape[1] + 1), "one penalty for each, by layers="),
            (torch.full(x.shape[:2], -torch.inf), "ones and zeros"),
        ):
            with pytest.raises(ArgumentError, match=words):
                penalty(mask)
        penalty()
        with pytest.raises(ArgumentError, match=r"state: expected .* the layers \w+, got a layer ''"):
            SpectralPenalty(Model(layer)).load_state_dict(penalty.state_dict())
    for module, options, error, words in (
        (Random(), {}, ArgumentError, "random"),
        (Constant(), {}, DerivativeError, "depend"),
        (nn.Linear(D, D).double(), {"transform": lambda s: None}, ArgumentError, "a function that returns a"),
    ):
        with SpectralPenalty(module, [""], **options) as penalty:
            module(x.clone().requires_grad_())
            state = torch.get_rng_state()
            with pytest.raises(error, match=words):
                penalty()
            assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_first_members_alone(batch_first: bool) -> None:
    layer, x = attention(batch_first=batch_first), tokens(members=4)  # as many sequences as tokens
    given = x if batch_first else x.transpose(0, 1)
    padding = torch.zeros(4, N, dtype=torch.bool)
    mask = torch.zeros(4 * 2, N, N, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(0))
    with SpectralPenalty(layer, [""], first_steps=60, rtol=1e-6) as penalty:
        layer(given, given, given, key_padding_mask=padding.double(), attn_mask=mask)
        penalty()
        whole = penalty.report.layers[0].value
    with SpectralPenalty(layer, [""], first_steps=60, rtol=1e-6, members=2) as penalty:
        layer(given, given, given, key_padding_mask=padding.double(), attn_mask=mask)
        penalty().backward()
        assert torch.allclose(penalty.report.layers[0].value, whole[:2], rtol=1e-8)
        penalty._checked.clear()
        layer(given, given, given, attn_mask=mask[0])  # one for all, as long as there are sequences
        with pytest.raises(ArgumentError, match="could not be cut"):
            penalty()


def test_padded_tokens_are_neither_moved_nor_looked_at() -> None:
    layer, x = attention(), tokens()
    real = torch.tensor([[True] * 4, [True] * 3 + [False], [True] * 2 + [False] * 2])
    with SpectralPenalty(layer, [""], first_steps=60, rtol=1e-6) as penalty:
        layer(x, x, x, key_padding_mask=~real)
        penalty(tokens=real)
        found = penalty.report.layers[0].value
        layer(x, x, x, key_padding_mask=~real)
        with pytest.raises(ArgumentError, match="a mask of shape"):
            penalty(tokens=real[:, :2])
    for row, seen, value in zip(x, real, found, strict=True):
        assert torch.allclose(value, norms(layer, row[seen][None]).detach()[0], rtol=1e-8)
    # Tokens that are seen and do not count: rows and columns of the Jacobian are left out.
    with SpectralPenalty(layer, [""], first_steps=60, rtol=1e-6) as penalty:
        layer(x, x, x)
        penalty(tokens=real.long())  # as tokenizers give masks
        (measured,) = penalty.measure(real.long(), rtol=1e-6).values()
        with pytest.raises(ArgumentError, match="a mask of shape"):
            penalty.measure(real[:, :2])
    values = penalty.report.layers[0].value
    for row, counts, value, constant in zip(x, real, values, measured.value, strict=True):
        jacobian = dense(of_one(layer), row.clone().requires_grad_()).detach()
        chosen = counts.repeat_interleave(D)
        part = jacobian[chosen][:, chosen]
        assert torch.allclose(value, torch.linalg.matrix_norm(part, 2), rtol=1e-8)
        assert float(constant) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "max", "sum"])
def test_values_become_one_as_asked(reduction: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = attention(0), attention(1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x, x, x)[0]
            return self.b(x, x, x)[0] + self.a(x, x, x)[0]

    def hinge(s: Tensor) -> Tensor:
        return (s - 2.0).clamp(min=0.0) ** 2

    model, x = Two(), tokens()
    options = {"over_members": reduction, "over_layers": reduction, "transform": hinge}
    with SpectralPenalty(model, first_steps=60, rtol=1e-6, **options) as penalty:
        model(x)
        total = penalty()
        total.backward()
    assert [layer.name for layer in penalty.report.layers] == ["a", "b", "a[1]"]
    found = gradients(model)
    model.zero_grad()
    y = model.a(x, x, x)[0].detach()
    each = [norms(model.a, x), norms(model.b, y), norms(model.a, y)]
    one = getattr(torch, reduction)
    expected = one(torch.stack([one(hinge(s)) for s in each]))
    assert bool((torch.cat(each) < 2).any())  # a member without a share is among them
    expected.backward()
    assert torch.allclose(total, expected, rtol=1e-8)
    for name, gradient in gradients(model).items():
        assert torch.allclose(found[name], gradient, rtol=1e-6, atol=1e-9), name
    # Members without a share were improved all the same.
    assert penalty.report.converged


@pytest.mark.parametrize(
    ("name", "attention"),
    others_slow(
        itertools.product(["bert", "gpt2", "llama"], ["sdpa", "eager"]),
        [("bert", "sdpa"), ("gpt2", "sdpa"), ("llama", "eager")],
    ),
)
def test_transformers_models(name: str, attention: str) -> None:
    model = tiny(name, torch.float64, attention).train()  # dropout 0.9 where the type has one
    ids = token_ids(2, 5)
    with SpectralPenalty(model, first_steps=120, rtol=1e-6) as penalty:
        model(input_ids=ids)
        penalty().backward()
        calls = list(penalty._named_calls().values())
    assert len(calls) == len(penalty.report.layers) == 3
    # Oracle: the module itself in evaluation mode, one backward pass an entry of its output.
    model.eval()
    call, found = calls[1], penalty.report.layers[1]
    module = dict(model.named_modules())[call.name]
    assert (call.layer is module) == (name != "bert")  # which has its output projection elsewhere
    x = call.members.requires_grad_()
    y = call.run(call.layer, x).flatten(1)
    rows = [torch.autograd.grad(e.sum(), x, retain_graph=True)[0] for e in y.unbind(1)]
    norms_of_both = torch.linalg.matrix_norm(torch.stack(rows, dim=1).flatten(2), 2)
    assert torch.allclose(found.value, norms_of_both, rtol=1e-6)
    assert found.converged.all()
    weights = [p for p in call.layer.parameters() if p.ndim == 2]
    assert all(p.grad is not None and bool(p.grad.any()) for p in weights)


TINY: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 2, 24, batch_first=True), 2),
    "distilbert": lambda: DistilBertModel(
        DistilBertConfig(vocab_size=60, dim=16, n_layers=2, n_heads=2, hidden_dim=24)
    ),
    "t5": lambda: T5EncoderModel(
        T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    ),
}


@pytest.mark.parametrize("name", others_slow(["bert", "gpt2", "llama", *TINY], ["llama", "torch", "t5"]))
def test_penalty_and_monitor_look_at_the_same_by_default(name: str) -> None:
    torch.manual_seed(0)
    model = TINY[name]().double().eval() if name in TINY else tiny(name, torch.float64)
    x = torch.randn(2, 5, 24, dtype=torch.float64) if name == "torch" else token_ids(2, 5)
    with SpectralPenalty(model) as penalty:
        model(x)
        penalty()
        measured = penalty.measure(rtol=1e-6)
    rows = LipschitzMonitor(model, x, rtol=1e-6, strict=True).measure()
    assert list(penalty.report.table()["scope"]) == ["attention"] * len(rows)
    assert {row.scope for row in rows} == {"attention"}
    for row, found in zip(rows, measured.values(), strict=True):
        assert row.each == pytest.approx(found.value.tolist(), rel=1e-5)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_modules_that_are_named_are_taken_as_they_are() -> None:
    model, ids = tiny("bert", torch.float64), token_ids(2, 5)
    names = [f"encoder.layer.{i}.attention.self" for i in range(3)]
    with SpectralPenalty(model, names) as penalty:
        model(ids)
        penalty()
        heads = penalty.measure(rtol=1e-6)
    rows = LipschitzMonitor(model, ids, rtol=1e-6, strict=True, scope="heads").measure()
    for row, found in zip(rows, heads.values(), strict=True):
        assert row.each == pytest.approx(found.value.tolist(), rel=1e-5)
    assert set(penalty.report.table()["scope"]) == {"module"}
    assert repr(penalty) == "SpectralPenalty(BertModel, 3 layers, scope module, steps=1, not attached)"
    assert "scope module" in str(penalty.report)


def test_a_star_stands_for_what_is_between_two_dots() -> None:
    model = tiny("bert")
    blocks = SpectralPenalty(model, ["encoder.layer.*"])
    assert [*blocks.layers] == [f"encoder.layer.{i}" for i in range(3)]
    assert "(BertModel, 3 layers," in repr(
        SpectralPenalty(model, ["encoder.*.*.attention", "encoder.layer.0.att*"])
    )
    for pattern in ("*.self", "encoder.layer*.self", "layer.*"):
        with pytest.raises(ArgumentError, match=r"layers: .*\* stands for what is between two dots"):
            SpectralPenalty(model, [pattern])


def test_an_output_projection_that_is_not_found_is_said() -> None:
    """ALBERT's attention module has residual and norm in it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = AlbertModel(AlbertConfig(vocab_size=60, embedding_size=8, **sizes))
    penalty = SpectralPenalty(model)
    assert penalty.scope == "attention"
    with penalty:
        with pytest.warns(UserWarning, match="output projection of encoder.* was not found"):
            model(token_ids(2, 5))
        penalty()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(token_ids(2, 5))  # said once
    assert set(penalty.report.table()["scope"]) == {"module"}


def test_half_precision_and_autocast_compute_weights_in_memory() -> None:
    layer, x = attention().float(), tokens().float()
    model = Model(layer).float()

    def gradient(**options: bool) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with SpectralPenalty(model, first_steps=40, rtol=1e-3) as penalty:
            with torch.autocast("cpu", torch.bfloat16, **options):
                model(x)
                term = penalty()
            term.backward()
        return penalty.report.layers[0].value, model.attention.in_proj_weight.grad.clone()

    value, full = gradient(enabled=False)
    cast_value, cast = gradient(enabled=True)
    assert cast_value.dtype == cast.dtype == torch.float32
    # Its inputs are those of the pass under autocast; what is computed with them is not rounded again.
    assert torch.allclose(cast_value, value, rtol=0.05)
    assert torch.allclose(cast, full, rtol=0.2, atol=0.02)

    half, y = copy.deepcopy(layer).bfloat16(), x.bfloat16()
    with SpectralPenalty(half, [""], first_steps=60, rtol=1e-3, on_input=True) as penalty:
        y.requires_grad_()
        half(y, y, y)
        penalty().backward()
    assert half.in_proj_weight.grad.dtype == y.grad.dtype == torch.bfloat16
    expected = norms(copy.deepcopy(half).double(), y.detach().double()).detach()
    assert torch.allclose(penalty.report.layers[0].value.double(), expected, rtol=1e-4)


def test_measured_with_an_interval() -> None:
    layer, x = attention(), tokens()
    with SpectralPenalty(layer, [""], first_steps=2) as penalty:
        layer(x, x, x)
        penalty()
        kept = penalty.state_dict()[""]["left"].clone()
        (found,) = penalty.measure(rtol=1e-6).values()
        assert torch.equal(kept, penalty.state_dict()[""]["left"])
    expected = norms(layer, x).detach()
    assert bool(((found.lower <= expected * (1 + 1e-9)) & (expected <= found.upper * (1 + 1e-9))).all())
    assert bool((penalty.report.layers[0].value <= found.upper).all())


def test_goes_on_from_its_state() -> None:
    layer, x = attention(), tokens()
    penalty = SpectralPenalty(layer, [""], first_steps=2, seed=3)
    with penalty:
        layer(x, x, x)
        penalty()
        other = SpectralPenalty(layer, [""], first_steps=2)
        other.load_state_dict(copy.deepcopy(penalty.state_dict()))
        with other:
            layer(x, x, x)
            assert torch.equal(penalty(), other())


def test_checkpointed_layers_are_counted_once() -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
            return h

    model, x = Checkpointed(attention()), tokens()
    plain = Model(model.attention)
    plain.load_state_dict(model.state_dict())
    found = []
    for m in (model, plain):
        m.zero_grad()
        with SpectralPenalty(m, first_steps=40) as penalty:
            (m(x).sum() + penalty()).backward()
            assert len(penalty._calls) == 1  # the second pass of the checkpoint is not counted
        found.append(gradients(m))
    assert all(torch.allclose(found[0][name], g) for name, g in found[1].items())
    with SpectralPenalty(plain) as penalty:
        out = torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)
        calls = list(penalty._calls)
        out.sum().backward()
        assert penalty._calls == calls


def test_an_argument_that_changed_since_is_refused() -> None:
    layer, x = attention(), tokens()
    mask = torch.zeros(N, N, dtype=torch.float64)
    with SpectralPenalty(layer, [""], first_steps=60, rtol=1e-6) as penalty:
        layer(x, x, x, attn_mask=mask)
        expected = norms(layer, x).detach()
        x.add_(1.0)  # X is a copy: nothing is lost
        penalty()
        assert torch.allclose(penalty.report.layers[0].value, expected, rtol=1e-6)
        mask.add_(1.0)
        with pytest.raises(DerivativeError, match="changed in place"):
            penalty()


def test_the_bound_of_a_softmax_jacobian() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(4 * torch.randn(200, 5, generator=generator, dtype=torch.float64), dim=-1)
    norm = torch.linalg.matrix_norm(torch.diag_embed(p) - p[:, :, None] * p[:, None, :], 2)
    g = _jacobian_bound(p)
    assert bool((norm <= g * (1 + 1e-12)).all())
    assert float((norm / g).max()) > 0.99
    for row, first, third in zip(p.tolist(), g, _jacobian_bound(p, 3), strict=True):
        a = sorted(row, reverse=True)
        assert float(first) == pytest.approx(a[0] * (1 - a[0] + a[1]))
        assert float(third) == pytest.approx(a[2] * (1 - a[2] + a[3]))
    assert float(_jacobian_bound(p[:1], 5)) == pytest.approx(min(p[0].tolist()) * (1 - min(p[0].tolist())))


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_jasmin_reads_the_probabilities_of_a_layer(k: int, causal: bool) -> None:
    layer, x = attention(dropout=0.5), tokens()
    mask = torch.ones(N, N, dtype=torch.bool).triu(1) if causal else None
    with JasminPenalty(layer, [""], k=k) as penalty:
        layer(x, x, x, attn_mask=mask)
        found = penalty()
        found.backward()
    by_penalty = layer.in_proj_weight.grad.clone()
    layer.zero_grad()
    q, key, _ = (x @ layer.in_proj_weight.T + layer.in_proj_bias).chunk(3, dim=-1)
    each = []
    for i in range(2):
        part = slice(3 * i, 3 * i + 3)
        scores = q[..., part] @ key[..., part].mT / 3**0.5
        p = (scores if mask is None else scores.masked_fill(mask, -torch.inf)).softmax(-1)
        for sequence in p:
            rows = []
            for row in sequence:
                a = [*row.sort(descending=True).values, torch.zeros(()), torch.zeros(())]
                first, other = a[0] * (1 - a[0] + a[1]), 1.0 if not k else a[k - 1] * (1 - a[k - 1] + a[k])
                if first > 1e-100 and other > 1e-100:
                    rows.append((first / other).log())
            each.append(torch.stack(rows).max())
    expected = torch.stack(each).mean()
    expected.backward()
    assert torch.allclose(found, expected, rtol=1e-10)
    assert torch.allclose(by_penalty, layer.in_proj_weight.grad, rtol=1e-8, atol=1e-12)


def test_jasmin_on_a_fused_kernel_and_its_refusals() -> None:
    model = tiny("gpt2", torch.float64, "sdpa")
    with JasminPenalty(model) as penalty:
        model(input_ids=token_ids(2, 5))
        terms = penalty.terms()
    model.set_attn_implementation("eager")
    weights = model(input_ids=token_ids(2, 5), output_attentions=True).attentions
    assert torch.allclose(terms["h.0.attn"], jasmin(weights[0]), rtol=1e-6)
    with pytest.raises(ArgumentError, match="always 1"):
        jasmin(weights[0], 1)
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        jasmin(2 * torch.ones(2, 2))
    linear = nn.Linear(D, D, dtype=torch.float64)
    with JasminPenalty(linear, [""]) as penalty:
        linear(tokens())
        with pytest.raises(ArgumentError, match="has no softmax attention"):
            penalty()


def test_weights_with_parametrizations() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            linear = nn.Linear(D, D, dtype=torch.float64)
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D, dtype=torch.float64))
            self.orthogonal = nn.utils.parametrizations.orthogonal(linear)

        def forward(self, x: Tensor) -> Tensor:
            return self.spectral(self.orthogonal(x).tanh())

    layer, x = Two().train(), tokens()
    with SpectralPenalty(layer, [""], first_steps=40, rtol=1e-6) as penalty:
        layer(x)
        buffers = {name: b.clone() for name, b in layer.named_buffers()}
        penalty().backward()
    # In training its own vectors move in each forward pass of the layer, but not in that of the penalty.
    assert all(torch.equal(b, buffers[name]) for name, b in layer.named_buffers())
    layer.eval()
    for row, value in zip(x, penalty.report.layers[0].value, strict=True):
        exact = torch.linalg.matrix_norm(dense(layer, row.clone().requires_grad_()).detach(), 2)
        assert torch.allclose(value, exact, rtol=1e-8)
    assert len(gradients(layer)) == 2 + 1  # both originals, and the bias before tanh


@pytest.mark.slow
def test_compiled_models() -> None:
    model, x = Model(attention()), tokens()
    with SpectralPenalty(model) as penalty:
        model(x)
        expected = penalty().detach()
    compiled = torch.compile(model, backend="eager")
    for given in (model, compiled):
        torch._dynamo.reset()
        with SpectralPenalty(given) as penalty:
            compiled(x)
            assert torch.allclose(penalty(), expected)


COMPILED: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "whole": lambda model: torch.compile(model, backend="eager"),
    "whole, in place": lambda model: [model.compile(backend="eager"), model][1],
    "part": lambda model: nn.Sequential(model[0], torch.compile(model[1], backend="eager")),
    "part, in place": lambda model: [model[1].compile(backend="eager"), model][1],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", COMPILED)
def test_what_was_compiled_and_run_before_is_not_left_out(way: str) -> None:
    torch._dynamo.reset()
    one, other = (nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=True).double() for _ in range(2))
    model, x, found = nn.Sequential(one, other), tokens(), []
    with SpectralPenalty(model) as penalty:
        model(x)
        found.append([*penalty.terms().values()])
    compiled = COMPILED[way](model)
    compiled(x)
    for _ in range(2):
        with SpectralPenalty(compiled) as penalty:
            compiled(x)
            found.append([*penalty.terms().values()])
    for terms in found[1:]:
        assert torch.allclose(torch.stack(terms), torch.stack(found[0]))


class Direct(nn.Module):
    """Calls the attention of its layers by ``forward``, as Llama of Meta does."""

    def __init__(self, direct: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([attention(0), attention(1)])
        self.direct = direct

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            call = layer.forward if self.direct else layer
            x = x + call(x, x, x)[0]
        return x


@pytest.mark.parametrize("kind", [SpectralPenalty, JasminPenalty])
@pytest.mark.parametrize("compiled", others_slow([False, True], [False]))
def test_layers_that_are_called_by_their_forward_are_seen(kind: type, compiled: bool) -> None:
    found = []
    for direct in (True, False):
        torch._dynamo.reset()
        model, x = Direct(direct), tokens()
        with kind(model) as penalty:
            (torch.compile(model, backend="eager") if compiled else model)(x)
            found.append(penalty.terms())
            penalty().backward()
        assert len(gradients(model)) >= 2
    assert [*found[0]] == [*found[1]] == ["layers.0", "layers.1"]
    assert torch.equal(torch.stack([*found[0].values()]), torch.stack([*found[1].values()]))


def test_two_penalties_watch_one_model_and_leave_it_as_it_was() -> None:
    model, x = Direct(), tokens()
    fields = [set(vars(m)) for m in model.modules()]
    one, other = SpectralPenalty(model).attach(), JasminPenalty(model).attach()
    for _ in range(2):
        model(x)
        assert len(one.terms()) == len(other.terms()) == 2
        assert [set(vars(m)) for m in model.modules()] == fields
    one.detach()
    model(x)
    assert len(other.terms()) == 2
    assert [set(vars(m)) for m in model.modules()] == fields


def test_a_copy_after_an_interrupted_pass_computes_with_its_own_weights() -> None:
    class Interrupted(Direct):
        stops = True

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if self.stops:
                raise KeyboardInterrupt
            return x

    model, x = Interrupted(), tokens()
    with SpectralPenalty(model) as penalty:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        copied = copy.deepcopy(model)
        model.stops = copied.stops = False
        with torch.no_grad():
            copied.layers[0].out_proj.weight.zero_()
        calls = len(penalty._calls)
        assert not torch.equal(copied(x), model(x))
        assert len(penalty._calls) == calls  # those of the model alone
    assert all("forward" not in vars(m) for m in model.modules())


def test_a_replica_of_data_parallel_is_refused() -> None:
    """Its layers hold tensors in place of parameters, so that a penalty would have no gradient."""
    model = Direct()
    with SpectralPenalty(model):
        replica = model._replicate_for_data_parallel()
        with pytest.raises(ArgumentError, match=r"nn\.DataParallel makes .* by DistributedDataParallel"):
            replica(tokens())
        with torch.no_grad():
            assert torch.equal(replica(tokens()), model(tokens()))


def test_frozen_encoder_layers_are_seen_too() -> None:
    """PyTorch computes their attention in one operation where no gradient is asked for."""
    model = TINY["torch"]().double().eval().requires_grad_(False)
    with SpectralPenalty(model) as penalty:
        model(torch.randn(2, 5, 24, dtype=torch.float64))
        assert len(penalty.measure()) == 2
    assert torch.backends.mha.get_fastpath_enabled()
