"""The leading singular value as a penalty, against dense Jacobians and their decompositions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from howsmooth.errors import ArgumentError, DerivativeError, NonFiniteError
from howsmooth.nn.penalty import Directions, SpectralPenalty, leading_singular_value

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
    y = f(x)
    rows = [torch.autograd.grad(e, x, create_graph=True)[0].reshape(-1) for e in y.reshape(-1)]
    return torch.stack(rows)


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


def test_gradient_is_that_of_finite_differences() -> None:
    layer, x = attention(3), tokens(4)
    with SpectralPenalty(layer, [""], first_steps=60, rtol=1e-6) as penalty:
        layer(x, x, x)
        penalty().backward()
    direction = torch.randn(layer.in_proj_weight.shape, generator=torch.Generator().manual_seed(0)).double()
    slope = float((layer.in_proj_weight.grad * direction).sum())

    def at(step: float) -> float:
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.in_proj_weight += step * direction
        return float(norms(other, x).detach().mean())

    assert slope == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-6)


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
        for seed in range(10):
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
    assert "NOT converged" in str(penalty.report)
    assert all(value != value for value in penalty.report.constants().values())


def test_a_remembered_direction_converges_at_one_product_a_step() -> None:
    layer, x = attention(), tokens()
    expected = norms(layer, x).detach()
    errors = []
    with SpectralPenalty(layer, [""], first_steps=2) as penalty:
        for _ in range(200):
            layer(x, x, x)
            penalty()
            errors.append(float((1 - penalty.report.layers[0].value / expected).max()))
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-7
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

        def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = True):  # type: ignore
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


def test_function_is_differentiable_by_weights_and_input() -> None:
    layer, x = attention(), tokens().requires_grad_()

    def f(t: Tensor) -> Tensor:
        return layer(t, t, t, need_weights=False)[0]

    found = leading_singular_value(f, x, first_steps=60, rtol=1e-6)
    assert bool(found.converged.all())
    found.value.sum().backward()
    by_weight, by_input = layer.in_proj_weight.grad.clone(), x.grad.clone()
    layer.zero_grad()
    again = x.detach().requires_grad_()
    expected = torch.stack([torch.linalg.svdvals(dense(of_one(layer), row)).max() for row in again.unbind()])
    expected.sum().backward()
    assert torch.allclose(found.value, expected, rtol=1e-8)
    assert torch.allclose(by_weight, layer.in_proj_weight.grad, rtol=1e-6, atol=1e-9)
    assert torch.allclose(by_input, again.grad, rtol=1e-6, atol=1e-9)
    # A step on leaves the state that it was given alone.
    kept = found.directions.state_dict()["left"].clone()
    leading_singular_value(f, tokens(9), found.directions)
    assert torch.equal(kept, found.directions.state_dict()["left"])


def test_a_jacobian_that_is_zero_has_value_and_gradient_zero() -> None:
    layer, x = attention(), tokens()
    with torch.no_grad():
        layer.out_proj.weight.zero_()
    with SpectralPenalty(layer, [""]) as penalty:
        layer(x, x, x)
        term = penalty()
        term.backward()
    assert float(term) == 0
    assert penalty.report.converged
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters() if p.grad is not None)


def test_errors() -> None:
    layer, x = attention(), tokens()
    with pytest.raises(ArgumentError, match="not attached"):
        SpectralPenalty(layer, [""])()
    with pytest.raises(ArgumentError, match=r"'nowhere'"):
        SpectralPenalty(Model(layer), ["nowhere"])
    with pytest.raises(ArgumentError, match="called attention"):
        SpectralPenalty(nn.Linear(2, 2))
    with SpectralPenalty(layer, [""]) as penalty:
        with torch.no_grad():
            layer(x, x, x)
        with pytest.raises(ArgumentError, match="none seen"):
            penalty()
        y = torch.full_like(x, torch.nan)
        layer(y, y, y)
        with pytest.raises(NonFiniteError):
            penalty()
    with pytest.raises(ArgumentError, match="steps"):
        SpectralPenalty(layer, [""], steps=0)
    with pytest.raises(ArgumentError, match="seed"):
        Directions(-1)

    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5)

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    for module, error, words in (
        (Random(), ArgumentError, "random"),
        (Constant(), DerivativeError, "depend"),
    ):
        with SpectralPenalty(module, [""]) as penalty:
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
        with pytest.raises(ArgumentError, match="could not be cut"):  # one mask for all, of (n, n)
            penalty._checked.clear()
            layer(given, given, given, attn_mask=mask[0])
            penalty()


def test_padded_tokens_are_neither_moved_nor_looked_at() -> None:
    layer, x = attention(), tokens()
    real = torch.tensor([[True] * 4, [True] * 3 + [False], [True] * 2 + [False] * 2])
    with SpectralPenalty(layer, [""], first_steps=60, rtol=1e-6) as penalty:
        layer(x, x, x, key_padding_mask=~real)
        penalty(tokens=real)
        found = penalty.report.layers[0].value
        layer(x, x, x, key_padding_mask=~real)
        with pytest.raises(ArgumentError, match="one truth value a token"):
            penalty(tokens=real[:, :2])
    for row, seen, value in zip(x, real, found, strict=True):
        assert torch.allclose(value, norms(layer, row[seen][None]).detach()[0], rtol=1e-8)


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
    with SpectralPenalty(model, first_steps=60, rtol=1e-6, **options) as penalty:  # type: ignore[arg-type]
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
