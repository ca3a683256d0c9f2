"""Attention layers with a constant: values and masks of PyTorch's, the claim attacked, the gradient."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import howsmooth as hs
from howsmooth.bounds import (
    ball_upper_bound,
    best,
    causal_ball_upper_bound,
    masked_ball_upper_bound,
    two_cluster_lower_bound,
)
from howsmooth.bounds.differentiable_upper_bounds import HeadMatrices, softmax_layer
from howsmooth.bounds.visible_key_counts import visible_rows
from howsmooth.errors import ArgumentError
from howsmooth.nn import QueryKeyNormAttention, SoftmaxAttention
from tests._selection import others_slow
from tests._steepest import dense_norm, steepest

Layer = SoftmaxAttention | QueryKeyNormAttention
D, N, R = 4, 4, 2.0
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)
# A window of two tokens, and a token that all see.
WINDOW = ~(torch.eye(N, dtype=torch.bool) | torch.eye(N, dtype=torch.bool).roll(-1, 1).tril())
WINDOW[:, 0] = False
KINDS: dict[str, object] = {
    "none": "none",
    "causal": "causal",
    "fixed": WINDOW,
    "any": "any",
    "additive": "additive",
}
LAYERS: tuple[type[Layer], ...] = (SoftmaxAttention, QueryKeyNormAttention)


@pytest.mark.parametrize("stacked", [False, True])
def test_takes_the_place_of_attention_in_an_encoder_layer(stacked: bool) -> None:
    """Evaluation calls the layer as training does, and no fused kernel of PyTorch."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
    layer = SoftmaxAttention.from_torch(encoder.self_attn, length=N, radius=9.0, mask="any")
    x, padding = torch.randn(2, N, D), torch.zeros(2, N, dtype=torch.bool)
    padding[1, -1] = True
    plain = encoder(x, src_key_padding_mask=padding)
    encoder.self_attn = layer  # type: ignore[assignment]
    model = nn.TransformerEncoder(encoder, 1) if stacked else encoder
    for training in (True, False):
        with torch.no_grad():
            found = model.train(training)(x, src_key_padding_mask=padding)
        torch.testing.assert_close(found[~padding], plain[~padding])
    encoder.self_attn = hs.nn.L2Attention(D, 2, length=N)  # type: ignore[assignment]
    torch.testing.assert_close(encoder.eval()(x), encoder.train()(x))


def made(
    cls: type[Layer], heads: int = 2, *, seed: int = 0, size: float = 1.0, d: int = D, **keywords: Any
) -> Layer:
    """Return a layer in float64 with random weights, biases among them."""
    arguments: dict[str, Any] = {"length": N, "radius": R, "dtype": torch.float64} | keywords
    layer = cls(d, heads, **arguments)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim:
                draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(size * draw / math.sqrt(d))
    return layer


def tokens(*lead: int, seed: int = 0, n: int = N, d: int = D, radius: float = R) -> Tensor:
    """Return tokens in the ball, some of them on the sphere."""
    x = torch.randn(*lead, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    inside: Tensor = x * (radius * (1 - 1e-12) / torch.linalg.vector_norm(x, dim=-1, keepdim=True))
    inside[..., 1, :] *= 0.5
    return inside


def as_torch(layer: Layer) -> nn.MultiheadAttention:
    """Return torch.nn.MultiheadAttention with the weights of the layer."""
    attention = nn.MultiheadAttention(
        layer.embed_dim, layer.num_heads, bias=layer.bias, batch_first=True, dtype=torch.float64
    )
    attention.load_state_dict(layer.state_dict())
    return attention


# ---- the interface of torch.nn.MultiheadAttention


def padding() -> Tensor:
    mask = torch.zeros(3, N, dtype=torch.bool)
    mask[0, 2:] = mask[2, 0] = True
    return mask


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("none", {}),
    "each head": ("none", {"average_attn_weights": False}),
    "boolean": ("any", {"attn_mask": WINDOW}),
    "a mask for each head": (
        "any",
        {"attn_mask": torch.stack([WINDOW, CAUSAL] * 3), "average_attn_weights": False},
    ),
    "0 and -inf": ("any", {"attn_mask": torch.zeros(N, N).double().masked_fill(CAUSAL, -math.inf)}),
    "padding": ("any", {"key_padding_mask": padding()}),
    "padding and a mask": (
        "any",
        {"key_padding_mask": padding(), "attn_mask": torch.eye(N, dtype=torch.bool).flip(0)},
    ),
    "numbers": ("additive", {"attn_mask": torch.linspace(-3, 3, N * N).double().reshape(N, N)}),
    "numbers for each head": (
        "additive",
        {"attn_mask": torch.linspace(-3, 3, 6 * N * N).double().reshape(6, N, N)},
    ),
    "numbers on keys": (
        "additive",
        {"key_padding_mask": torch.linspace(-2, 2, 3 * N).double().reshape(3, N)},
    ),
    "causal": ("any", {"attn_mask": CAUSAL, "is_causal": True}),
    "the mask of the layer": ("causal", {"attn_mask": CAUSAL}),
    "the given mask of the layer": ("fixed", {"attn_mask": WINDOW}),
}


@pytest.mark.parametrize("name", CALLS)
def test_output_and_weights_are_those_of_torch(name: str) -> None:
    kind, call = CALLS[name]
    layer = made(SoftmaxAttention, mask=KINDS[kind])
    x = tokens(3)
    output, weights = layer(x, x, x, **call)
    expected, expected_weights = as_torch(layer)(x, x, x, **call)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert weights is not None
    torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["causal", "fixed"])
def test_the_mask_of_a_layer_is_always_there(kind: str) -> None:
    layer = made(SoftmaxAttention, mask=KINDS[kind])
    x = tokens(3)
    hidden = {"causal": CAUSAL, "fixed": WINDOW}[kind]
    expected, expected_weights = as_torch(layer)(x, x, x, attn_mask=hidden)
    for output, weights in (layer(x), layer(x, is_causal=kind == "causal")):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, N])
def test_a_fixed_mask_of_any_length_warns_of_nothing(n: int) -> None:
    """NumPy's diagonals are read-only, of which PyTorch warns."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            SoftmaxAttention(D, 2, length=n, radius=R, mask=torch.zeros(n, n, dtype=torch.bool))
    finally:
        torch.set_warn_always(False)


def test_one_sequence_and_no_weights() -> None:
    layer = made(SoftmaxAttention)
    x = tokens()
    output, weights = layer(x)
    expected, expected_weights = as_torch(layer)(x, x, x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-12)
    again, none = layer(x, need_weights=False)
    assert none is None
    assert torch.equal(again, output)


@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_named_shaped_and_drawn_as_in_torch(bias: bool) -> None:
    torch.manual_seed(3)
    ours = SoftmaxAttention(D, 2, length=N, bias=bias).state_dict()
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(D, 2, bias=bias).state_dict()
    assert list(ours) == list(theirs)
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name])


def test_taken_over_from_torch() -> None:
    attention = nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64).eval()
    layer = SoftmaxAttention.from_torch(attention, length=N, radius=R)
    x = tokens(2)
    torch.testing.assert_close(layer(x)[0], attention(x, x, x)[0], rtol=1e-12, atol=1e-12)
    assert not layer.training
    for other in (
        nn.MultiheadAttention(D, 2, add_zero_attn=True),
        nn.MultiheadAttention(D, 2, add_bias_kv=True),
        nn.MultiheadAttention(D, 2, kdim=3),
        nn.MultiheadAttention(D, 2),
        nn.Linear(2, 2),
    ):
        with pytest.raises(ArgumentError, match="attention: expected"):
            SoftmaxAttention.from_torch(other, length=N, radius=R)


def test_normalised_attention_by_hand() -> None:
    layer = made(QueryKeyNormAttention, temperature=3.0, eps=0.25)
    x = tokens(2)
    q, k, v = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1)
    heads = []
    for part in (slice(0, 2), slice(2, 4)):
        unit_q, unit_k = (
            t[..., part] / (t[..., part].norm(dim=-1, keepdim=True) ** 2 + 0.25) ** 0.5 for t in (q, k)
        )
        heads.append(torch.softmax(3.0 * unit_q @ unit_k.mT, dim=-1) @ v[..., part])
    torch.testing.assert_close(layer(x)[0], layer.out_proj(torch.cat(heads, dim=-1)), rtol=1e-12, atol=1e-12)


# ---- the bound


@pytest.mark.parametrize("size", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["none", "causal", "fixed"])
def test_for_one_head_it_is_theorem_a(kind: str, size: float) -> None:
    layer = made(SoftmaxAttention, heads=1, size=size, mask=KINDS[kind])
    theorem = {"none": ball_upper_bound, "causal": causal_ball_upper_bound, "fixed": masked_ball_upper_bound}[
        kind
    ]
    expected = theorem(layer.map, N, R).value
    assert layer.lipschitz_bound(N, R).value == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("size", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["none", "causal", "fixed"])
@pytest.mark.parametrize("heads", [2, 4])
def test_for_several_heads_it_is_never_above_the_best_bound(heads: int, kind: str, size: float) -> None:
    layer = made(SoftmaxAttention, heads=heads, size=size, mask=KINDS[kind])
    expected = best(layer.map, length=N, radius=R).value
    assert layer.lipschitz_bound(N, R).value <= expected * (1 + 1e-11)


@pytest.mark.parametrize("cls", LAYERS)
def test_without_scores_it_is_attained_by_several_heads(cls: type[Layer]) -> None:
    layer = made(cls)
    with torch.no_grad():
        layer.in_proj_weight[: 2 * D] = 0
        assert layer.in_proj_bias is not None
        layer.in_proj_bias.zero_()
    # f(X)_i = O · mean(X): the norm is that of Σ_h O_h
    truth = dense_norm(layer, tokens())
    assert layer.lipschitz_bound(N, R).value == pytest.approx(truth, rel=1e-10)
    assert truth < 0.9 * best(made(SoftmaxAttention).map, length=N, radius=R).value


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("kind", ["any", "additive"])
def test_without_scores_it_is_attained_under_a_mask(cls: type[Layer], kind: str) -> None:
    layer = made(cls, heads=1, mask=kind)
    with torch.no_grad():
        layer.in_proj_weight[: 2 * D] = 0
        assert layer.in_proj_bias is not None
        layer.in_proj_bias.zero_()
    # All see the first token alone: the norm is √n ‖V‖, twice that without a mask
    mask: Tensor = torch.ones(N, N, dtype=torch.bool)
    mask[:, 0] = False
    if kind == "additive":
        mask = torch.zeros(N, N, dtype=torch.float64)
        mask[:, 0] = 60.0
    truth = dense_norm(layer, tokens(), attn_mask=mask)
    assert layer.lipschitz_bound(N, R).value == pytest.approx(truth, rel=1e-10)


def test_a_high_temperature_makes_normalised_attention_steep() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    layer = made(QueryKeyNormAttention, 1, d=2, temperature=30.0, eps=1.0, bias=False)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat([0.5 * eye, -0.5 * eye, eye]))
        layer.out_proj.weight.copy_(eye)
    found = steepest(layer, N, R, 2, starts=5, steps=30)
    assert found <= layer.lipschitz_bound(N, R).value <= 5 * found


def test_gradients_of_large_layers_in_evaluation() -> None:
    d = 100
    layer = made(SoftmaxAttention, 2, d=d, constant=1.0)
    x = tokens(n=N, d=d)
    slopes = []
    for training in (True, False):
        layer.train(training).zero_grad()
        layer(x)[0].square().sum().backward()
        slopes.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-15)


def test_worst_of_all_boolean_masks() -> None:
    layer = made(SoftmaxAttention, heads=1, mask="any", size=0.6)
    f = layer.map
    assert isinstance(f, hs.SelfAttention)
    assert f.output is not None
    n, worst = 3, 0.0
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(n, n, generator=generator) < 0.6 for _ in range(60)]
    masks.append(torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 1]]).bool())  # the worst, if two keys are
    for seen in masks:
        if bool(seen.any(dim=1).all()):
            fixed = hs.SelfAttention(f.query, f.key, f.value, f.output, query_bias=f.query_bias, mask=seen)
            worst = max(worst, masked_ball_upper_bound(fixed, n, R).value)
    parts = HeadMatrices(f.query, f.key, f.value, f.output, f.query_bias)
    found = softmax_layer(parts, visible_rows(n, "any"), R, scale=f.scale)
    assert worst == pytest.approx(float(found), rel=1e-11)


# ---- the claim, attacked

# Bound over the largest found, with random weights and with those of scores −γ⟨x_i, x_j⟩, by the number of
# heads; stated in the guide.
FACTORS = {SoftmaxAttention: 7.2, QueryKeyNormAttention: 8.2}
NEAR = {SoftmaxAttention: {1: 1.9, 2: 2.6}, QueryKeyNormAttention: {1: 4.2, 2: 6.0}}


@pytest.mark.parametrize(
    ("kind", "heads"),
    others_slow(
        itertools.product(["none", "causal", "fixed"], [1, 2]), [("none", 1), ("causal", 2), ("fixed", 2)]
    ),
)
@pytest.mark.parametrize("cls", LAYERS)
def test_ascent_never_exceeds_the_bound_and_comes_near(cls: type[Layer], kind: str, heads: int) -> None:
    layer = made(cls, heads, mask=KINDS[kind], constant=1.5)
    assert layer.lipschitz_bound(N, R).value == pytest.approx(1.5, rel=1e-9)
    found = steepest(layer, N, R, D, starts=3, steps=25, seed=1)
    assert found <= 1.5
    assert found >= 1.5 / FACTORS[cls]


@pytest.mark.parametrize(
    ("kind", "heads"),
    others_slow(itertools.product(["none", "causal"], [1, 2]), [("none", 2), ("causal", 1)]),
)
@pytest.mark.parametrize("cls", LAYERS)
def test_the_bound_is_near_where_scores_are_large(cls: type[Layer], kind: str, heads: int) -> None:
    d = 2 * heads
    eye = torch.eye(d, dtype=torch.float64)
    worst = 0.0
    for gamma in (0.5, 2.0):
        layer = made(cls, heads, d=d, mask=KINDS[kind], bias=False)
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.cat([gamma * eye, -gamma * eye, eye]))
            layer.out_proj.weight.copy_(eye)
        heavy = R * torch.tensor([[1.0, 0.0]] + [[-1.0, 1e-3]] * 3).repeat(1, heads) / math.sqrt(heads)
        found = steepest(layer, N, R, d, starts=5, steps=40, given=[heavy])
        bound = layer.lipschitz_bound(N, R).value
        assert found <= bound
        worst = max(worst, bound / found)
    assert worst <= NEAR[cls][heads]


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("kind", ["any", "additive"])
def test_no_mask_of_a_call_exceeds_the_bound(cls: type[Layer], kind: str) -> None:
    layer = made(cls, mask=kind, constant=1.0, size=0.7)
    generator = torch.Generator().manual_seed(5)
    largest = 0.0
    for trial in range(4):
        mask: Tensor = torch.rand(2, N, N, generator=generator) < 0.5
        mask.diagonal(dim1=1, dim2=2).fill_(False)
        if trial == 0:  # all see the first token, and themselves
            mask = (~torch.eye(N, dtype=torch.bool)).repeat(2, 1, 1)
            mask[..., 0] = False
        if kind == "additive":
            mask = 4 * torch.randn(2, N, N, generator=generator, dtype=torch.float64)
            mask[..., 0] += 4.0 * trial
        found = steepest(layer, N, R, D, starts=3, steps=8, seed=trial, attn_mask=mask)
        largest = max(largest, found)
        assert found <= 1.0
    assert largest >= 0.2


def test_the_attack_finds_what_is_known() -> None:
    assert steepest(lambda x: 3 * x, 2, 1.0, 2, starts=1, steps=1) == pytest.approx(3.0)
    # |x|²x has the norm 3R² at the sphere, |x|x 2R
    cubic = steepest(lambda x: x * x.square().sum(dim=-1, keepdim=True), 2, 1.5, 3, starts=2, steps=30)
    assert cubic == pytest.approx(3 * 1.5**2, rel=1e-9)
    # Every token to the ends of the first axis, 2R, from anywhere
    square = steepest(lambda x: x[..., :1].square(), 2, 1.5, 3, starts=1, steps=40, seed=3)
    assert 2.99 <= square <= 3.0
    # A lower bound of hs.bounds, at inputs that it knows: A = −2I
    eye = torch.eye(2, dtype=torch.float64)[None]
    f = hs.SelfAttention(-2.0 * eye, eye, eye, scale=1.0)
    assert steepest(f, 4, 1.0, 2, starts=6, steps=40) >= two_cluster_lower_bound(f, 4, 1.0).value


# ---- the division


@pytest.mark.parametrize("cls", LAYERS)
def test_the_output_is_divided_by_bound_over_constant(cls: type[Layer]) -> None:
    plain, divided = made(cls), made(cls, constant=0.25)
    divisor = plain.lipschitz_bound(N, R).value / 0.25
    x = tokens(2)
    torch.testing.assert_close(divided(x)[0] * divisor, plain(x)[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(divided(x)[1], plain(x)[1], rtol=0, atol=0)
    assert plain.output_radius(N, R) == pytest.approx(divisor * divided.output_radius(N, R), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cls", LAYERS)
def test_gradients_are_those_of_the_quotient(cls: type[Layer], training: bool, kind: str) -> None:
    layer = made(cls, length=3, constant=1.0, mask=WINDOW[:3, :3] if kind == "fixed" else kind, size=0.8)
    layer.train(training)
    x = tokens(n=3, seed=2)
    names = list(dict(layer.named_parameters()))

    def output(*weights: Tensor) -> Tensor:
        result = functional_call(layer, dict(zip(names, weights, strict=True)), (x,))[0]
        assert isinstance(result, Tensor)
        return result

    weights = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(output, weights, eps=1e-6, atol=1e-8, rtol=1e-5, fast_mode=True)


def test_training_goes_where_finite_differences_lead() -> None:
    """Steps of gradient descent on the quotient, one head: PyTorch's output over Theorem A, differenced."""
    layer = made(SoftmaxAttention, heads=1, constant=1.0)
    x, target = tokens(2, seed=3), torch.randn(2, N, D, dtype=torch.float64)
    shapes = [p.shape for p in layer.parameters()]
    reference = [p.detach().clone() for p in layer.parameters()]

    def reference_loss(flat: Tensor) -> float:
        parts = [p.reshape(s) for p, s in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        attention = nn.MultiheadAttention(D, 1, batch_first=True, dtype=torch.float64)
        with torch.no_grad():
            for own, part in zip(attention.parameters(), parts, strict=True):
                own.copy_(part)
            q, k, v = (p[None] for p in parts[0].chunk(3))
            f = hs.SelfAttention(q, k, v, parts[2], query_bias=parts[1][:D][None])
            quotient = attention(x, x, x)[0] / ball_upper_bound(f, N, R).value
            return float((quotient - target).square().mean())

    optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
    flat = torch.cat([p.flatten() for p in reference])
    for _ in range(2):
        loss = (layer(x)[0] - target).square().mean()
        assert float(loss.detach()) == pytest.approx(reference_loss(flat), rel=1e-9)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        slopes = torch.zeros_like(flat)
        for i in range(len(flat)):
            e = torch.zeros_like(flat)
            e[i] = 1e-5
            slopes[i] = (reference_loss(flat + e) - reference_loss(flat - e)) / 2e-5
        flat = flat - 0.5 * slopes
    now = torch.cat([p.detach().flatten() for p in layer.parameters()])
    torch.testing.assert_close(now, flat, rtol=1e-7, atol=1e-8)


def test_gradients_through_torch_func_and_of_zero_weights() -> None:
    layer = made(SoftmaxAttention, constant=1.0)
    x = tokens(2)
    weights = dict(layer.named_parameters())

    def loss(given: Mapping[str, Tensor]) -> Tensor:
        value = functional_call(layer, dict(given), (x,))[0].square().sum()
        assert isinstance(value, Tensor)
        return value

    plain = torch.autograd.grad(loss(weights), list(weights.values()))
    functional = torch.func.grad(loss)({name: p.detach() for name, p in weights.items()})
    for one, other in zip(plain, functional.values(), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        layer.in_proj_weight[: 2 * D].zero_()  # A = 0 for both heads
        layer.in_proj_weight[2 * D : 2 * D + 2].zero_()  # and V_1 = 0
    layer(x)[0].square().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters() if p.grad is not None)


Change = Callable[[Layer], None]


def _step(layer: Layer) -> None:
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(tokens(1))[0].square().sum().backward()
    optimiser.step()


def _in_place(layer: Layer) -> None:
    with torch.no_grad():
        layer.out_proj.weight.mul_(3)


def _through_data(layer: Layer) -> None:
    layer.in_proj_weight.data[0] += 1


def _replaced(layer: Layer) -> None:
    layer.out_proj.weight = nn.Parameter(2 * layer.out_proj.weight.detach())


def _loaded(layer: Layer) -> None:
    layer.load_state_dict(made(SoftmaxAttention, seed=8).state_dict())


def _parametrised(layer: Layer) -> None:
    nn.utils.parametrizations.orthogonal(layer.out_proj, "weight")


SETTINGS: list[tuple[type[Any], dict[str, Any], str, float]] = [
    (hs.nn.CosineAttention, {}, "temperature", 5.0),
    (hs.nn.CosineAttention, {}, "gain", 5.0),
    (hs.nn.CosineAttention, {}, "eps", 0.1),
    (hs.nn.L2Attention, {}, "num_heads", 1),
    (hs.nn.QueryKeyNormAttention, {"radius": R}, "eps", 0.1),
    (hs.nn.SigmoidAttention, {"radius": R}, "shift", 2.0),
]


@pytest.mark.parametrize(("cls", "how", "name", "value"), SETTINGS)
def test_the_divisor_is_that_of_the_settings_of_now(
    cls: type[Any], how: dict[str, Any], name: str, value: float
) -> None:
    layer = cls(8, 2, length=N, constant=1.0, **how).eval()
    before = layer._log_divisor(layer._weights())
    setattr(layer, name, value)
    fresh = cls(8, 2, length=N, constant=1.0, **how).eval()
    setattr(fresh, name, value)
    fresh.load_state_dict(layer.state_dict())
    found = layer._log_divisor(layer._weights())
    assert found == pytest.approx(fresh._log_divisor(fresh._weights()), rel=1e-12)
    assert found != pytest.approx(before, rel=1e-4)


@pytest.mark.parametrize("change", [_step, _in_place, _through_data, _replaced, _loaded, _parametrised])
def test_the_divisor_is_kept_until_weights_change(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made(SoftmaxAttention, constant=1.0)
    counted: list[int] = []
    own = SoftmaxAttention._log_bound

    def counting(self: SoftmaxAttention, *arguments: Any) -> Tensor:
        counted.append(1)
        return own(self, *arguments)

    monkeypatch.setattr(SoftmaxAttention, "_log_bound", counting)
    layer.eval()
    x = tokens(2)
    with torch.no_grad():
        first = layer(x)[0]
        assert torch.equal(layer(x)[0], first)
        assert torch.equal(layer(x)[0], first)
    assert len(counted) == 1
    change(layer)
    counted.clear()
    with torch.no_grad():
        again = layer(x)[0]
    assert len(counted) == (change is not _loaded)  # loading computes the divisor for graphs
    plain = made(SoftmaxAttention)
    state = {name: weight.clone() for name, weight in layer._weights().items()}
    plain.load_state_dict(state)
    torch.testing.assert_close(
        again * plain.lipschitz_bound(N, R).value, plain(x)[0].detach(), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("cls", LAYERS)
def test_the_map_is_the_layer(cls: type[Layer]) -> None:
    for kind in ("none", "causal", "fixed"):
        layer = made(cls, mask=KINDS[kind], constant=2.0)
        x = tokens(2)
        torch.testing.assert_close(layer.map(x), layer(x)[0], rtol=1e-11, atol=1e-12)
        measured = hs.local_lipschitz(layer.map, x[0], rtol=1e-6)
        assert float(measured.value) == pytest.approx(dense_norm(layer, x[0]), rel=1e-5)


def test_the_representation_shows_the_settings() -> None:
    shown = repr(made(SoftmaxAttention, mask=KINDS["fixed"], constant=2.0, beyond="clip"))
    assert "constant=2.0" in shown
    assert "beyond='clip'" in shown
    assert "mask='fixed'" in shown


# ---- what is refused, and what is clipped


def test_beyond_the_radius() -> None:
    refuse, clip = made(SoftmaxAttention, constant=1.0), made(SoftmaxAttention, constant=1.0, beyond="clip")
    x = tokens(2)
    torch.testing.assert_close(clip(x)[0], refuse(x)[0], rtol=1e-14, atol=1e-14)
    far = x.clone()
    far[1, 0] *= 1.01
    with pytest.raises(ArgumentError, match=r"norm at most 2.*beyond='clip'"):
        refuse(far)
    torch.testing.assert_close(clip(far)[0], refuse(x)[0], rtol=1e-11, atol=1e-11)
    with pytest.raises(ArgumentError, match="at most 2, the radius of the layer"):
        refuse.lipschitz_bound(N, 2.5)
    with pytest.raises(ArgumentError, match=r"layer, got 2\.0000002\. .* larger radius"):
        refuse.lipschitz_bound(N, 2.0000002)
    # What is clipped is Lipschitz everywhere: the attack is on a larger ball
    assert clip.lipschitz_bound(N, 100.0).value == clip.lipschitz_bound(N, R).value
    assert steepest(clip, N, 3 * R, D, starts=2, steps=15) <= 1.0


def test_lengths() -> None:
    layer, shorter = made(SoftmaxAttention, constant=1.0), made(SoftmaxAttention, constant=1.0, shorter=True)
    with pytest.raises(ArgumentError, match=r"4 tokens, the length of the layer.*3 tokens.*shorter=True"):
        layer(tokens(2, n=3))
    assert shorter.lipschitz_bound(3, R).value < 1
    assert steepest(shorter, 3, R, D, starts=2, steps=15) <= shorter.lipschitz_bound(3, R).value
    with pytest.raises(ArgumentError, match="at most 4 tokens"):
        shorter(tokens(2, n=5))


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("causal", {"attn_mask": WINDOW}),
        ("causal", {"attn_mask": CAUSAL.clone().fill_(False)}),
        ("causal", {"key_padding_mask": padding()}),
        ("fixed", {"attn_mask": CAUSAL}),
    ],
)
def test_masks_without_a_theorem_are_refused(kind: str, call: dict[str, Any]) -> None:
    layer = made(SoftmaxAttention, mask=KINDS[kind])
    with pytest.raises(ArgumentError, match=r"attn_mask|key_padding_mask|is_causal"):
        layer(tokens(3), **call)


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("radius", {"radius": None, "constant": 1.0}),
        ("shorter", {"mask": CAUSAL, "shorter": True}),
    ],
)
def test_arguments_are_named(argument: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as raised:
        SoftmaxAttention(D, 2, **({"length": N, "radius": R} | wrong))
    assert raised.value.argument == argument


def test_a_constant_layer_has_no_quotient() -> None:
    layer = made(SoftmaxAttention, constant=1.0)
    nn.init.zeros_(layer.out_proj.weight)
    for ask in (lambda: layer(tokens(2)), lambda: layer.lipschitz_bound(N, R)):
        with pytest.raises(
            ArgumentError, match="constant: expected a layer whose bound is a positive number"
        ):
            ask()
    plain = made(SoftmaxAttention)
    nn.init.zeros_(plain.out_proj.weight)
    assert plain.lipschitz_bound(N, R).value == 0
    huge = made(SoftmaxAttention, constant=1.0, size=1e200)
    with pytest.raises(ArgumentError, match="a huge bound"):
        huge(tokens(2))


def test_norms_of_the_bound_have_the_right_gradient() -> None:
    """The expression against finite differences of hs.bounds, for one head and around h*'s bend."""
    eye = torch.eye(2, dtype=torch.float64)
    for mask, theorem in (("none", ball_upper_bound), ("causal", causal_ball_upper_bound)):
        for gamma in (0.1, 0.4, 0.6, 2.0, 9.0):

            def bound(g: Tensor, mask: Any = mask) -> Tensor:
                parts = HeadMatrices((g * eye)[None], eye[None], eye[None], eye)
                return softmax_layer(parts, visible_rows(30, mask), 1.0, scale=1.0)

            def truth(g: float, theorem: Any = theorem, mask: str = mask) -> float:
                f = hs.SelfAttention(
                    (g * eye)[None], eye[None], eye[None], scale=1.0, causal=mask == "causal"
                )
                return float(theorem(f, 30, 1.0).value)

            g = torch.tensor(gamma, dtype=torch.float64, requires_grad=True)
            (slope,) = torch.autograd.grad(bound(g), g)
            step = 1e-6
            expected = (truth(gamma + step) - truth(gamma - step)) / (2 * step)
            assert float(slope) == pytest.approx(expected, rel=1e-7)
