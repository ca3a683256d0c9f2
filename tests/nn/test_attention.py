"""Attention layers with a constant: values of the definition and of PyTorch's, attacks, gradients."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import lambertw
from torch import Tensor
from torch.func import functional_call

import howsmooth as hs
from howsmooth import bounds, nn
from howsmooth.attention import SinkhornAttention as SinkhornMap
from howsmooth.bounds import differentiable_upper_bounds as ball
from howsmooth.bounds.visible_key_counts import visible_rows
from howsmooth.errors import ArgumentError, HowsmoothError, NonFiniteError
from howsmooth.nn.attention.sinkhorn import doubly_stochastic
from tests._search import Point, largest_ratio
from tests._selection import others_slow
from tests._steepest import dense_norm, steepest

LAYERS: dict[str, type[Any]] = {
    "softmax": nn.SoftmaxAttention,
    "query_key_norm": nn.QueryKeyNormAttention,
    "l2": nn.L2Attention,
    "cosine": nn.CosineAttention,
    "sinkhorn": nn.SinkhornAttention,
    "lipschitz_norm": nn.LipschitzNormAttention,
    "sigmoid": nn.SigmoidAttention,
}
ON_A_BALL = ("softmax", "query_key_norm")
OTHERS = [kind for kind in LAYERS if kind not in ON_A_BALL]
OPTIONS: dict[str, dict[str, float]] = {
    "query_key_norm": {"temperature": 3.0, "eps": 0.25},
    "cosine": {"temperature": 3.0, "gain": -1.5, "eps": 0.3},
}
N, D, R = 5, 4, 2.0
F64 = torch.float64
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)
BAND = (torch.arange(N)[:, None] - torch.arange(N)).abs() > 1
# All but the first two tokens see these two alone: not even themselves.
STAR = torch.ones(N, N, dtype=torch.bool)
STAR[:, :2] = False
# A window of two tokens, and a token that all see.
WINDOW = ~(torch.eye(N, dtype=torch.bool) | torch.eye(N, dtype=torch.bool).roll(-1, 1).tril())
WINDOW[:, 0] = False


def with_masks(masks: list[str], kinds: Iterable[str] = LAYERS) -> list[tuple[str, str]]:
    """Every kind with every mask it takes; doubly stochastic and causal is the identity alone."""
    return [(kind, mask) for kind in kinds for mask in masks if (kind, mask) != ("sinkhorn", "causal")]


def layer(kind: str, *, seed: int = 0, size: float = 1.0, heads: int = 2, d: int = D, **settings: Any) -> Any:
    """A layer in float64, with biases that are not zero."""
    if settings.get("mask") == "band":
        settings["mask"] = BAND[: settings.get("length", N), : settings.get("length", N)]
    made = LAYERS[kind](d, heads, **({"length": N, "dtype": F64} | settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator, dtype=F64) / 1.5)
    return made


def tokens(seed: int, *shape: int, radius: float | None = None) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return (
        x if radius is None else radius * (1 - 1e-12) * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    )


def hiding(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=F64).masked_fill(hidden, -math.inf)


# ---- values


def _heads(w: Tensor, b: Tensor | None, heads: int, x: Tensor) -> list[Tensor]:
    rows = x @ w.T if b is None else x @ w.T + b
    return list(rows.split(rows.shape[-1] // heads, dim=-1))


def _unit(t: Tensor, eps: float) -> Tensor:
    return t / torch.sqrt((t * t).sum(dim=1, keepdim=True) + eps)


def plain(
    kind: str, weights: dict[str, Tensor], heads: int, x: Tensor, added: Tensor, **more: float
) -> Tensor:
    """The layer on tokens x (n, d), from its definition, a head at a time; ``added`` (n, n) to the scores."""
    w = weights["in_proj_weight"]
    parts = []
    if kind == "l2":
        wq, wv = (list(t.chunk(heads)) for t in w.chunk(2))
        bias = weights["value_bias"].chunk(heads)
        for q, v, b in zip(wq, wv, bias, strict=True):
            k = q.shape[0]
            u = x @ q.T
            scores = torch.stack([-((row - u) ** 2).sum(dim=1) for row in u]) / math.sqrt(k) + added
            parts.append(torch.softmax(scores, dim=1) @ (x @ q.T @ q @ v.T / math.sqrt(k) + b))
        return torch.cat(parts, dim=1) @ weights["out_proj.weight"].T + weights["out_proj.bias"]
    bias = weights["in_proj_bias"].chunk(3)
    q3, k3, v3 = (_heads(m, b, heads, x) for m, b in zip(w.chunk(3), bias, strict=True))
    for q, k, v in zip(q3, k3, v3, strict=True):
        root = math.sqrt(q.shape[1])
        if kind == "softmax":
            parts.append(torch.softmax(q @ k.T / root + added, dim=1) @ v)
        elif kind == "query_key_norm":
            scores = weights["log_temperature"].exp() * _unit(q, more["eps"]) @ _unit(k, more["eps"]).T
            parts.append(torch.softmax(scores + added, dim=1) @ v)
        elif kind == "cosine":
            q, k, v = (_unit(t, more["eps"]) for t in (q, k, v))
            p = torch.softmax(more["temperature"] * q @ k.T + added, dim=1)
            parts.append(more["gain"] * p @ v)
        elif kind == "sinkhorn":
            log_p = q @ k.T / root + added
            for _ in range(int(more.get("iterations", 400))):
                log_p = torch.log_softmax(torch.log_softmax(log_p, dim=0), dim=1)
            parts.append(log_p.exp() @ v)
        elif kind == "sigmoid":
            seen = added > -math.inf
            scores = q @ k.T / root - math.log(more.get("length", N))
            logistic = 1 / (1 + torch.exp(-scores - torch.where(seen, added, 0.0)))
            parts.append(torch.where(seen, logistic, 0.0) @ v)
        else:
            u, top, far = q.norm(), k.norm(dim=1).max(), v.norm(dim=1).max()
            c = torch.stack((u * top, u * far, top * far)).max()
            parts.append(torch.softmax(q @ k.T / c + added, dim=1) @ v)
    return torch.cat(parts, dim=1) @ weights["out_proj.weight"].T + weights["out_proj.bias"]


@pytest.mark.parametrize(("kind", "mask"), with_masks(["none", "causal", "band", "additive"]))
def test_values_are_those_of_the_definition(kind: str, mask: str) -> None:
    added = {
        "none": torch.zeros(N, N, dtype=F64),
        "causal": hiding(CAUSAL),
        "band": hiding(BAND),
        "additive": hiding(BAND) + tokens(7, N, N),
    }[mask]
    f = layer(kind, mask=mask, **OPTIONS.get(kind, {}))
    x = tokens(1, 2, N, D, radius=1.0)
    given = {"attn_mask": added} if mask == "additive" else {}
    output, weights = f(x, x, x, average_attn_weights=False, **given)
    for member, image in zip(x, output, strict=True):
        expected = plain(kind, dict(f.named_parameters()), 2, member, added, **OPTIONS.get(kind, {}))
        torch.testing.assert_close(image, expected, rtol=1e-8, atol=1e-8)
    assert weights.shape == (2, 2, N, N)
    if kind != "sigmoid":
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, N).double())
    assert bool((weights[..., torch.isinf(added)] == 0).all())
    alone, none = f(x[0], need_weights=False, **given)
    assert none is None
    torch.testing.assert_close(alone, output[0], rtol=1e-12, atol=1e-12)
    if mask != "additive":  # the map that is measured is the layer
        torch.testing.assert_close(f.map(x), output, rtol=1e-8, atol=1e-8)


def padding() -> Tensor:
    mask = torch.zeros(3, N, dtype=torch.bool)
    mask[0, 2:] = mask[2, 0] = True
    return mask


EACH = {"average_attn_weights": False}
# The mask of a layer of PyTorch's interface, and what a call gives.
CALLS: dict[str, tuple[object, dict[str, Any]]] = {
    "plain": ("none", {}),
    "each head": ("none", EACH),
    "boolean": ("any", {"attn_mask": WINDOW}),
    "a mask for each head": ("any", {"attn_mask": torch.stack([WINDOW, CAUSAL] * 3)} | EACH),
    "0 and -inf": ("any", {"attn_mask": hiding(CAUSAL)}),
    "padding": ("any", {"key_padding_mask": padding()}),
    "padding and a mask": ("any", {"key_padding_mask": padding(), "attn_mask": ~STAR.flip(1)}),
    "numbers": ("additive", {"attn_mask": torch.linspace(-3, 3, N * N).double().reshape(N, N)}),
    "numbers for each head": ("additive", {"attn_mask": tokens(8, 6, N, N)}),
    "numbers on keys": ("additive", {"key_padding_mask": tokens(9, 3, N)}),
    "causal": ("any", {"attn_mask": CAUSAL, "is_causal": True}),
    "the mask of the layer": ("causal", {"attn_mask": CAUSAL}),
    "the given mask of the layer": (WINDOW, {"attn_mask": WINDOW}),
}


@pytest.mark.parametrize("name", CALLS)
def test_output_and_weights_are_those_of_torch(name: str) -> None:
    mask, call = CALLS[name]
    f, x = layer("softmax", mask=mask, radius=R), tokens(0, 3, N, D, radius=R)
    theirs = torch.nn.MultiheadAttention(D, 2, batch_first=True, dtype=F64)
    theirs.load_state_dict(f.state_dict())
    for found, expected in zip(f(x, x, x, **call), theirs(x, x, x, **call), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if mask == "causal":
        torch.testing.assert_close(f(x, is_causal=True), f(x))


@pytest.mark.parametrize("n", [1, N])
def test_a_fixed_mask_of_any_length_warns_of_nothing(n: int) -> None:
    """NumPy's diagonals are read-only, of which PyTorch warns."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nn.SoftmaxAttention(D, 2, length=n, radius=R, mask=torch.zeros(n, n, dtype=torch.bool))
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_named_shaped_and_drawn_as_in_torch(bias: bool) -> None:
    torch.manual_seed(3)
    ours = nn.SoftmaxAttention(D, 2, length=N, bias=bias).state_dict()
    torch.manual_seed(3)
    theirs = torch.nn.MultiheadAttention(D, 2, bias=bias).state_dict()
    assert list(ours) == list(theirs)
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name])


def test_taken_over_from_torch() -> None:
    theirs = torch.nn.MultiheadAttention(D, 2, batch_first=True, dtype=F64).eval()
    f, x = nn.SoftmaxAttention.from_torch(theirs, length=N, radius=R), tokens(0, 2, N, D, radius=R)
    torch.testing.assert_close(f(x)[0], theirs(x, x, x)[0], rtol=1e-12, atol=1e-12)
    assert not f.training
    for other in (
        torch.nn.MultiheadAttention(D, 2, add_zero_attn=True),
        torch.nn.MultiheadAttention(D, 2, add_bias_kv=True),
        torch.nn.MultiheadAttention(D, 2, kdim=3),
        torch.nn.MultiheadAttention(D, 2),
        torch.nn.Linear(2, 2),
    ):
        with pytest.raises(ArgumentError, match="attention: expected"):
            nn.SoftmaxAttention.from_torch(other, length=N, radius=R)


@pytest.mark.parametrize("stacked", [False, True])
def test_takes_the_place_of_attention_in_an_encoder_layer(stacked: bool) -> None:
    """Evaluation calls the layer as training does, and no fused kernel of PyTorch."""
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
    f = nn.SoftmaxAttention.from_torch(encoder.self_attn, length=N, radius=9.0, mask="any")
    x, hidden = torch.randn(2, N, D), torch.zeros(2, N, dtype=torch.bool)
    hidden[1, -1] = True
    expected = encoder(x, src_key_padding_mask=hidden)
    encoder.self_attn = f
    model = torch.nn.TransformerEncoder(encoder, 1) if stacked else encoder
    for training in (True, False):
        with torch.no_grad():
            found = model.train(training)(x, src_key_padding_mask=hidden)
        torch.testing.assert_close(found[~hidden], expected[~hidden])
    encoder.self_attn = nn.L2Attention(D, 2, length=N)
    torch.testing.assert_close(encoder.eval()(x), encoder.train()(x))


def test_maps_are_those_of_the_library() -> None:
    assert isinstance(layer("l2").map, hs.L2Attention)
    assert isinstance(layer("sinkhorn").map, SinkhornMap)
    f, x = layer("cosine", radius=2.0, constant=1.0), tokens(0, N, D, radius=1.0)
    assert float(hs.local_lipschitz(f.map, x).value) == pytest.approx(dense_norm(f, x), rel=1e-6)
    assert f.map.to(dtype=torch.float32)(x.float()).dtype == torch.float32
    with pytest.raises(ArgumentError, match="tokens only"):
        f.map(hs.measures.DiscreteMeasure(x))
    with pytest.raises(ArgumentError, match="as in the mask"):
        layer("cosine", mask=BAND).map(tokens(0, N + 1, D))


@pytest.mark.parametrize("kind", ["sinkhorn", "lipschitz_norm"])
def test_padding_leaves_the_other_tokens_as_they_are_without_it(kind: str) -> None:
    f, alone = layer(kind, mask="any"), layer(kind, length=3)
    x = tokens(2, 2, N, D)
    hidden = torch.tensor([[False, False, False, True, True]]).expand(2, N)
    expected = alone(x[:, :3])[0]
    for scale in (1.0, 100.0):
        x[:, 3:] *= scale
        torch.testing.assert_close(f(x, key_padding_mask=hidden)[0][:, :3], expected, rtol=1e-7, atol=1e-7)


# ---- gradients


MASKS = with_masks(["none", "causal", "band", "any", "additive"])
QUOTIENTS = [
    (*one, training, radius)
    for one, (training, radius) in zip(MASKS, itertools.cycle([(True, 0.8), (False, 5.0)]), strict=False)
]


# A third of them has each kind, mask and mode.
@pytest.mark.parametrize(("kind", "mask", "training", "radius"), others_slow(QUOTIENTS, QUOTIENTS[::3]))
def test_gradients_of_the_quotient_are_those_of_finite_differences(kind, mask, training, radius) -> None:
    f = layer(kind, radius=radius, constant=1.0, length=3, mask=mask).train(training)
    x = tokens(3, 3, D, radius=0.7).requires_grad_()
    names = [name for name, _ in f.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        output: Tensor = functional_call(f, dict(zip(names, weights, strict=True)), (x,))[0]
        return output

    weights = [p.detach().clone().requires_grad_() for p in f.parameters()]
    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradient_at_zero_weights_is_finite(kind: str) -> None:
    f, divided = layer(kind), layer(kind, radius=R, constant=1.0)
    with torch.no_grad():
        for parameter in f.parameters():
            parameter.zero_()
        if kind == "softmax":
            divided.in_proj_weight[: 2 * D + 2].zero_()  # no scores, and no values of the first head
    for one in (f, divided):
        x = tokens(0, N, D, radius=1.0).requires_grad_()
        one(x)[0].sum().backward()
        found = [x.grad, *(p.grad for p in one.parameters())]
        assert all(bool(torch.isfinite(g).all()) for g in found if g is not None)


def test_gradients_of_large_layers_in_evaluation() -> None:
    d, slopes = 100, []
    f, x = layer("softmax", d=d, size=0.15, radius=R, constant=1.0), tokens(0, N, d, radius=R)
    for training in (True, False):
        f.train(training).zero_grad()
        f(x)[0].square().sum().backward()
        slopes.append([p.grad.clone() for p in f.parameters() if p.grad is not None])
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-15)


def test_training_goes_where_finite_differences_lead() -> None:
    """Steps of gradient descent on the quotient, one head: PyTorch's output over Theorem A, differenced."""
    f, x = layer("softmax", heads=1, size=0.75, radius=R, constant=1.0), tokens(3, 2, N, D, radius=R)
    target = tokens(4, 2, N, D)
    theirs = torch.nn.MultiheadAttention(D, 1, batch_first=True, dtype=F64)
    flat = torch.nn.utils.parameters_to_vector(f.parameters()).detach()

    def loss_at(flat: Tensor) -> float:
        torch.nn.utils.vector_to_parameters(flat, theirs.parameters())
        q, k, v = (p[None] for p in theirs.in_proj_weight.detach().chunk(3))
        bias = theirs.in_proj_bias.detach()[:D][None]
        softmax = hs.SelfAttention(q, k, v, theirs.out_proj.weight.detach(), query_bias=bias)
        quotient = theirs(x, x, x)[0].detach() / bounds.ball_upper_bound(softmax, N, R).value
        return float((quotient - target).square().mean())

    optimiser = torch.optim.SGD(f.parameters(), lr=0.5)
    for _ in range(2):
        loss = (f(x)[0] - target).square().mean()
        assert float(loss.detach()) == pytest.approx(loss_at(flat), rel=1e-9)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        steps = 1e-5 * torch.eye(len(flat), dtype=F64)
        slopes = [(loss_at(flat + e) - loss_at(flat - e)) / 2e-5 for e in steps]
        flat = flat - 0.5 * torch.tensor(slopes, dtype=F64)
    now = torch.nn.utils.parameters_to_vector(f.parameters()).detach()
    torch.testing.assert_close(now, flat, rtol=1e-7, atol=1e-8)


def test_gradients_through_torch_func() -> None:
    f, x = layer("softmax", radius=R, constant=1.0), tokens(0, 2, N, D, radius=R)
    weights = dict(f.named_parameters())

    def loss(given: dict[str, Tensor]) -> Tensor:
        return functional_call(f, given, (x,))[0].square().sum()

    own = torch.autograd.grad(loss(weights), list(weights.values()))
    functional = torch.func.grad(loss)({name: p.detach() for name, p in weights.items()})
    for one, other in zip(own, functional.values(), strict=True):
        torch.testing.assert_close(one, other)


def test_norms_of_the_bound_have_the_right_gradient() -> None:
    """The expression against finite differences of hs.bounds, for one head and around h*'s bend."""
    eye, step = torch.eye(2, dtype=F64), 1e-6
    theorems = {"none": bounds.ball_upper_bound, "causal": bounds.causal_ball_upper_bound}
    for (mask, theorem), gamma in itertools.product(theorems.items(), (0.1, 0.4, 0.6, 2.0, 9.0)):

        def truth(g: float, theorem: Any = theorem, mask: str = mask) -> float:
            f = hs.SelfAttention((g * eye)[None], eye[None], eye[None], scale=1.0, causal=mask == "causal")
            return float(theorem(f, 30, 1.0).value)

        g = torch.tensor(gamma, dtype=F64, requires_grad=True)
        parts = ball.HeadMatrices((g * eye)[None], eye[None], eye[None], eye)
        (slope,) = torch.autograd.grad(ball.softmax_layer(parts, visible_rows(30, mask), 1.0, scale=1.0), g)
        expected = (truth(gamma + step) - truth(gamma - step)) / (2 * step)
        assert float(slope) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("kind", LAYERS)
def test_penalties_have_their_gradients(kind: str) -> None:
    """d‖J‖ by a weight, which is a second derivative of the layer, against differences of dense Jacobians."""
    f = layer(kind, radius=2.0, constant=1.0)
    x, direction = tokens(5, 1, N, D, radius=1.0), tokens(6, *f.in_proj_weight.shape)
    model = torch.nn.Sequential(nn.SelfAttentionBlock(f))
    penalty = nn.penalty.SpectralPenalty(model, steps=30)
    with penalty:
        model(x)
        value = penalty()
    value.backward()
    norms, weight, h = [], f.in_proj_weight.detach().clone(), 1e-5
    for sign in (1, -1, 0):
        with torch.no_grad():
            f.in_proj_weight.copy_(weight + sign * h * direction)
        norms.append(dense_norm(f, x[0]))
    assert float(value.detach()) == pytest.approx(norms[2], rel=1e-6)
    slope = float((f.in_proj_weight.grad * direction).sum())
    assert slope == pytest.approx((norms[0] - norms[1]) / (2 * h), rel=1e-4, abs=1e-7)


# ---- the doubly stochastic matrix


def unrolled(scores: Tensor) -> Tensor:
    for _ in range(400):
        scores = torch.log_softmax(torch.log_softmax(scores, dim=-2), dim=-1)
    return scores.exp()


def limit(scores: Tensor) -> Tensor:
    return doubly_stochastic(scores, tolerance=1e-13)


def energy(p: Tensor) -> Tensor:
    return (p**3).sum()


def test_implicit_derivatives_are_those_of_unrolled_iterations() -> None:
    """First and second order, in every composition of modes."""
    s, e = tokens(0, 2, 5, 5)
    torch.testing.assert_close(limit(s), unrolled(s), rtol=1e-12, atol=1e-13)
    expected = torch.func.jacrev(unrolled)(s)
    for mode in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(mode(limit)(s), expected, rtol=1e-10, atol=1e-12)
    second = torch.func.hessian(lambda t: energy(unrolled(t)))(s)
    found = torch.func.hessian(lambda t: energy(limit(t)))(s)
    torch.testing.assert_close(found, second, rtol=1e-9, atol=1e-12)
    leaf = s.clone().requires_grad_()
    (first,) = torch.autograd.grad(energy(limit(leaf)), leaf, create_graph=True)
    (along,) = torch.autograd.grad((first * e).sum(), leaf)
    torch.testing.assert_close(along, (second * e).sum(dim=(2, 3)), rtol=1e-9, atol=1e-12)

    def steepness(f: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.func.grad(lambda t: torch.func.jvp(f, (t,), (e,))[1].square().sum())(s)

    torch.testing.assert_close(steepness(limit), steepness(unrolled), rtol=1e-9, atol=1e-12)
    batch = tokens(1, 3, 5, 5)
    torch.testing.assert_close(torch.func.vmap(limit)(batch), limit(batch), rtol=0, atol=0)


def test_derivatives_with_blocks_that_do_not_see_one_another() -> None:
    """The systems have a kernel of the dimension of the number of blocks; P does not see it."""
    hidden = torch.block_diag(torch.ones(3, 3), torch.ones(1, 1), torch.ones(2, 2)) == 0
    s = tokens(2, 6, 6)

    def whole(t: Tensor) -> Tensor:
        return limit(t.masked_fill(hidden, -math.inf))

    found = torch.func.jacrev(whole)(s)
    for block in (slice(0, 3), slice(3, 4), slice(4, 6)):
        torch.testing.assert_close(whole(s)[block, block], limit(s[block, block]))
        expected = torch.func.jacrev(limit)(s[block, block])
        torch.testing.assert_close(found[block, block, block, block], expected, rtol=1e-9, atol=1e-12)
    assert bool(torch.isfinite(found).all())
    far = limit((300 * tokens(8, 20, 6, 6)).masked_fill(hidden, -math.inf))
    torch.testing.assert_close(far.sum(dim=-2), torch.ones(20, 6).double(), rtol=1e-12, atol=0)
    second = torch.func.hessian(lambda t: energy(whole(t)))(s)[:3, :3, :3, :3]
    expected = torch.func.hessian(lambda t: energy(limit(t)))(s[:3, :3])
    torch.testing.assert_close(second, expected, rtol=1e-9, atol=1e-12)
    p = limit(torch.where(BAND, -math.inf, tokens(3, N, N)))
    torch.testing.assert_close(p.sum(dim=0), torch.ones(N).double(), rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(
        lambda t: limit(t.masked_fill(BAND, -math.inf)), tokens(3, N, N).requires_grad_()
    )


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_converges_where_iterations_alone_are_slow(scale: float) -> None:
    p = doubly_stochastic(scale * tokens(4, 50, 8, 8), tolerance=1e-11, max_iterations=60)
    torch.testing.assert_close(p.sum(dim=-2), torch.ones(50, 8).double(), rtol=1e-11, atol=0)
    torch.testing.assert_close(p.sum(dim=-1), torch.ones(50, 8).double(), rtol=1e-13, atol=0)
    saturated = torch.func.jacrev(limit)(500 * torch.eye(4, dtype=F64))
    assert float(saturated.abs().max()) < 1e-100


def test_no_matrix_changes_with_its_company() -> None:
    easy, hard = tokens(5, 6, 6), 30 * tokens(6, 6, 6)
    together = doubly_stochastic(torch.stack((easy, hard)), tolerance=1e-6)
    # To rounding: products of a batch are made by other code than those of one matrix on some processors.
    for scores, p in zip((easy, hard), together, strict=True):
        alone = doubly_stochastic(scores, tolerance=1e-6)
        torch.testing.assert_close(p, alone, rtol=0, atol=1e-14)


def test_the_bound_is_false_for_a_few_iterations() -> None:
    """Why the layer refuses: a tolerance that lets the first iteration pass is softmax attention."""
    n, a = 60, 3.0
    f = nn.SinkhornAttention(1, 1, length=n, bias=False, radius=1.0, dtype=F64)
    with torch.no_grad():
        f.in_proj_weight.copy_(torch.tensor([[-a], [1.0], [1.0]]))
        f.out_proj.weight.fill_(1.0)
    bound = f.lipschitz_bound(n, 1.0).value
    x = torch.tensor([[1.0]] + [[-1.0]] * (n - 1), dtype=F64)
    softmax = torch.func.jacrev(lambda x: torch.softmax(-a * x @ x.T, dim=1) @ x)(x).reshape(n, n)
    assert float(torch.linalg.matrix_norm(softmax, 2)) > 1.5 * bound
    assert dense_norm(f, x) <= bound == pytest.approx(1 + 2 * a)


def test_sinkhorn_is_refused_where_it_has_not_converged() -> None:
    with pytest.raises(ArgumentError, match=r"3, after which a column is off by .* for the limit") as caught:
        layer("sinkhorn", max_iterations=3)(5 * tokens(0, N, D))
    assert caught.value.argument == "max_iterations"
    with pytest.raises(NonFiniteError):
        layer("sinkhorn")(torch.full((N, D), 1e200, dtype=F64))
    f, x = layer("sinkhorn", mask="any"), tokens(0, N, D)
    f(x, attn_mask=BAND)
    for hidden in (CAUSAL, torch.eye(N).bool()):  # no doubly stochastic matrix has these zeros
        with pytest.raises(ArgumentError, match="a symmetric mask"):
            f(x, attn_mask=hidden)


# ---- constants under attack


def test_the_attack_finds_what_is_known() -> None:
    assert steepest(lambda x: 3 * x, 2, 1.0, 2, starts=1, steps=1) == pytest.approx(3.0)
    # |x|²x has the norm 3R² at the sphere, |x|x 2R
    cubic = steepest(lambda x: x * x.square().sum(dim=-1, keepdim=True), 2, 1.5, 3, starts=2, steps=30)
    assert cubic == pytest.approx(3 * 1.5**2, rel=1e-9)
    # Every token to the ends of the first axis, 2R, from anywhere
    square = steepest(lambda x: x[..., :1].square(), 2, 1.5, 3, starts=1, steps=40, seed=3)
    assert 2.99 <= square <= 3.0
    # A lower bound of hs.bounds, at inputs that it knows: A = −2I
    eye = torch.eye(2, dtype=F64)[None]
    f = hs.SelfAttention(-2.0 * eye, eye, eye, scale=1.0)
    found = steepest(f, 4, 1.0, 2, starts=6, steps=40)
    assert found >= bounds.two_cluster_lower_bound(f, 4, 1.0).value


# bound / largest found at random weights, d = 4: n = 4 with one and two heads for layers on a ball, and n = 5
# with two heads for others
FACTORS = {
    "softmax": 7.2,
    "query_key_norm": 8.2,
    "l2": 5.0,
    "cosine": 7.5,
    "sinkhorn": 7.0,
    "lipschitz_norm": 9.0,
    "sigmoid": 12.0,
}


FIXED = with_masks(["none", "causal", "band"], OTHERS)


@pytest.mark.parametrize(("kind", "mask"), others_slow(FIXED, FIXED[::2]))
def test_constant_is_not_exceeded(kind: str, mask: str) -> None:
    for seed, radius in ((0, 0.5), (1, 2.0)):
        f = layer(kind, mask=mask, radius=radius, constant=2.0, seed=seed)
        found = steepest(f, N, radius, D, starts=3, steps=12)
        assert f.lipschitz_bound(N, radius).value == pytest.approx(2.0, rel=1e-11)
        assert 2.0 / FACTORS[kind] < found <= 2.0


@pytest.mark.parametrize(
    ("mask", "heads"),
    others_slow(
        itertools.product(["none", "causal", "window"], [1, 2]),
        [("none", 1), ("causal", 2), ("window", 2)],
    ),
)
@pytest.mark.parametrize("kind", ON_A_BALL)
def test_constant_of_layers_on_a_ball_is_not_exceeded(kind: str, mask: str, heads: int) -> None:
    hidden = WINDOW[:4, :4] if mask == "window" else mask
    f = layer(kind, heads=heads, size=0.75, length=4, mask=hidden, radius=R, constant=1.5)
    assert f.lipschitz_bound(4, R).value == pytest.approx(1.5, rel=1e-9)
    assert 1.5 / FACTORS[kind] <= steepest(f, 4, R, D, starts=3, steps=25, seed=1) <= 1.5


@pytest.mark.parametrize("kind", ON_A_BALL)
@pytest.mark.parametrize("mask", ["any", "additive"])
def test_no_mask_of_a_call_exceeds_the_constant(kind: str, mask: str) -> None:
    n, largest = 4, 0.0
    f = layer(kind, size=0.525, length=n, mask=mask, radius=R, constant=1.0)
    generator = torch.Generator().manual_seed(5)
    for trial in range(4):
        given: Tensor = torch.rand(2, n, n, generator=generator) < 0.5
        given.diagonal(dim1=1, dim2=2).fill_(False)
        if trial == 0:  # all see the first token, and themselves
            given = (~torch.eye(n, dtype=torch.bool)).repeat(2, 1, 1)
            given[..., 0] = False
        if mask == "additive":
            given = 4 * torch.randn(2, n, n, generator=generator, dtype=F64)
            given[..., 0] += 4.0 * trial
        found = steepest(f, n, R, D, starts=3, steps=8, seed=trial, attn_mask=given)
        largest = max(largest, found)
        assert found <= 1.0
    assert largest >= 0.2


def test_a_high_temperature_makes_normalised_attention_steep() -> None:
    eye = torch.eye(2, dtype=F64)
    options = {"radius": R, "temperature": 30.0, "eps": 1.0, "bias": False}
    f = layer("query_key_norm", heads=1, d=2, length=4, **options)
    with torch.no_grad():
        f.in_proj_weight.copy_(torch.cat([0.5 * eye, -0.5 * eye, eye]))
        f.out_proj.weight.copy_(eye)
    found = steepest(f, 4, R, 2, starts=5, steps=30)
    assert found <= f.lipschitz_bound(4, R).value <= 5 * found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mask"), with_masks(["none", "causal", "band"]))
@pytest.mark.parametrize("heads", [1, 2])
def test_constant_is_not_exceeded_long(kind: str, mask: str, heads: int) -> None:
    for seed, radius in itertools.product(range(3), (0.3, 1.0, 3.0)):
        f = layer(kind, mask=mask, radius=radius, heads=heads, seed=seed)
        assert steepest(f, N, radius, D, starts=4, steps=60) <= f.lipschitz_bound(N, radius).value


NEAR = {"softmax": {1: 1.9, 2: 2.6}, "query_key_norm": {1: 4.2, 2: 6.0}}


@pytest.mark.parametrize(
    ("kind", "mask", "heads"),
    others_slow(
        itertools.product(NEAR, ["none", "causal"], [1, 2]),
        [("softmax", "none", 2), ("query_key_norm", "causal", 1)],
    ),
)
def test_the_bound_is_near_where_scores_are_large(kind: str, mask: str, heads: int) -> None:
    n, d, worst = 4, 2 * heads, 0.0
    eye = torch.eye(d, dtype=F64)
    for gamma in (0.5, 2.0):
        f = layer(kind, heads=heads, d=d, length=n, mask=mask, radius=R, bias=False)
        with torch.no_grad():
            f.in_proj_weight.copy_(torch.cat([gamma * eye, -gamma * eye, eye]))
            f.out_proj.weight.copy_(eye)
        heavy = R * torch.tensor([[1.0, 0.0]] + [[-1.0, 1e-3]] * 3).repeat(1, heads) / math.sqrt(heads)
        found = steepest(f, n, R, d, starts=5, steps=40, given=[heavy])
        bound = f.lipschitz_bound(n, R).value
        assert found <= bound
        worst = max(worst, bound / found)
    assert worst <= NEAR[kind][heads]


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "sinkhorn"])
@pytest.mark.parametrize("mask", ["any", "additive"])
def test_constant_covers_the_masks_of_a_call(kind: str, mask: str) -> None:
    """Tokens that do not see themselves, far from two that they see: L2 has no bound in R^d for it."""
    radius = 3.0
    f = layer(kind, mask=mask, radius=radius, constant=1.0)
    direction = torch.linalg.svd(f.in_proj_weight.detach()[:D])[2][0]
    x = torch.stack([direction, -direction, *[0 * direction] * (N - 2)]) * radius * 0.999
    steep = steepest(f, N, radius, D, starts=1, steps=6, given=[x], attn_mask=STAR)
    # At scores this large the sum of the largest weights is far from what one point has.
    assert 1 / (30 if kind == "sigmoid" else 12) < steep <= 1
    if kind == "l2":  # far above the bound for tokens that see themselves
        values = [layer(kind, **of, radius=radius).lipschitz_bound(N, radius) for of in ({"mask": mask}, {})]
        assert steep * values[0].value > 1.5 * values[1].value
    others = 3 * tokens(9, 2, N, N) if mask == "additive" else (tokens(9, 2, N, N) < 0).triu(1)
    assert steepest(f, N, radius, D, starts=2, steps=6, attn_mask=others) <= 1


def test_finite_numbers_do_not_change_the_constant_of_sinkhorn() -> None:
    f = layer("sinkhorn", mask="additive", radius=1.0, constant=1.0)
    assert steepest(f, N, 1.0, D, starts=2, steps=8, attn_mask=2 * tokens(3, N, N)) <= 1
    undivided = layer("sinkhorn", mask="additive", radius=1.0)
    assert undivided.lipschitz_bound(N, 1.0).value == layer("sinkhorn").lipschitz_bound(N, 1.0).value


@pytest.mark.parametrize("kind", ["l2", "cosine", "lipschitz_norm"])
def test_without_a_radius_the_constant_holds_everywhere(kind: str) -> None:
    f = layer(kind, constant=1.0, mask=BAND)
    for radius in (0.5, 5.0, 50.0):
        assert steepest(f, N, radius, D, starts=2, steps=5) <= 1
        assert f.lipschitz_bound(N, radius).value <= 1 + 1e-11
    assert f.lipschitz_bound(N, 1e9).value == pytest.approx(1, rel=1e-5)


def _weight_search(kind: str, n: int, radius: float, mask: str, heads: int, *, steps: int) -> float:
    """Return the largest ‖D_X f‖ / bound over weights and tokens together, two dimensions a head."""
    hidden = torch.ones(n, n).triu(1).bool() if mask == "causal" else torch.zeros(n, n).bool()
    d, more = 2 * heads, {"temperature": 1.0, "gain": 1.0, "eps": 1.0, "iterations": 40, "length": n}
    f = LAYERS[kind](d, heads, length=n, bias=False, mask=mask, radius=radius, dtype=F64)
    names = [name for name, _ in f.named_parameters()]
    zero = {"value_bias": torch.zeros(d), "in_proj_bias": torch.zeros(3 * d), "out_proj.bias": torch.zeros(d)}

    def draw(generator: torch.Generator) -> Point:
        point = {name: torch.randn(p.shape, generator=generator).double() for name, p in f.named_parameters()}
        return point | {"X": radius * torch.randn(n, d, generator=generator).double()}

    def ratio(point: Point) -> Tensor:
        x = radius * point["X"] / torch.linalg.vector_norm(point["X"], dim=1, keepdim=True).clamp(min=radius)
        weights = {name: point[name] for name in names}
        jacobian = torch.func.jacrev(lambda x: plain(kind, weights | zero, heads, x, hiding(hidden), **more))(
            x
        )
        truth = torch.linalg.matrix_norm(jacobian.reshape(n * d, n * d), 2)
        return truth / f._log_bound(n, radius, weights).exp()

    return largest_ratio(ratio, draw, trials=2, steps=steps)


@pytest.mark.parametrize(
    ("kind", "n", "radius", "mask", "least"),
    [
        ("l2", 3, 0.4, "none", 0.9),
        pytest.param("l2", 3, 3.0, "causal", 0.25, marks=pytest.mark.slow),
        pytest.param("cosine", 3, 0.5, "none", 0.8, marks=pytest.mark.slow),
        ("cosine", 3, 2.0, "causal", 0.5),
        ("sinkhorn", 3, 0.5, "none", 0.9),
        ("lipschitz_norm", 3, 1.0, "causal", 0.25),
        ("sigmoid", 3, 0.7, "none", 0.9),
    ],
)
def test_worst_weights(kind: str, n: int, radius: float, mask: str, least: float) -> None:
    """No weights make the bound false, and some make it nearly true."""
    assert least < _weight_search(kind, n, radius, mask, 1, steps=25) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mask"), with_masks(["none", "causal"], OTHERS))
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("radius", [0.3, 1.0, 4.0])
def test_worst_weights_long(kind: str, heads: int, radius: float, mask: str) -> None:
    assert 0.2 < _weight_search(kind, 4, radius, mask, heads, steps=120) <= 1


# ---- the layers' bounds, those of hs.bounds, and closed forms


@pytest.mark.parametrize("size", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_bounds_of_softmax_attention_are_those_of_the_theorems(mask: str, size: float) -> None:
    """For one head; for several they are never above the best bound."""
    theorem = {
        "none": bounds.ball_upper_bound,
        "causal": bounds.causal_ball_upper_bound,
        "window": bounds.masked_ball_upper_bound,
    }[mask]
    for heads in (1, 2, 4):
        f = layer("softmax", heads=heads, size=size, radius=R, mask=WINDOW if mask == "window" else mask)
        found = f.lipschitz_bound(N, R).value
        if heads == 1:
            assert found == pytest.approx(theorem(f.map, N, R).value, rel=1e-11)
        assert found <= bounds.best(f.map, length=N, radius=R).value * (1 + 1e-11)


@pytest.mark.parametrize("kind", ON_A_BALL)
def test_without_scores_bounds_are_attained(kind: str) -> None:
    alone = torch.ones(N, N, dtype=torch.bool)
    alone[:, 0] = False
    added = torch.zeros(N, N, dtype=F64)
    added[:, 0] = 60.0
    # Several heads: f(X)_i = O · mean(X), and the norm is that of Σ_h O_h. Under the masks all see the first
    # token alone: √n ‖V‖, √n times that without a mask.
    for heads, mask, given in ((2, "none", None), (1, "any", alone), (1, "additive", added)):
        f = layer(kind, heads=heads, mask=mask, radius=R)
        with torch.no_grad():
            f.in_proj_weight[: 2 * D] = 0
            f.in_proj_bias.zero_()
        truth = dense_norm(f, tokens(0, N, D, radius=R), attn_mask=given)
        assert f.lipschitz_bound(N, R).value == pytest.approx(truth, rel=1e-10)


def test_worst_of_all_boolean_masks() -> None:
    f = layer("softmax", heads=1, mask="any", radius=R, size=0.6).map
    n, worst = 3, 0.0
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(n, n, generator=generator) < 0.6 for _ in range(60)]
    masks.append(torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 1]]).bool())  # the worst, if two keys are
    for seen in masks:
        if bool(seen.any(dim=1).all()):
            fixed = hs.SelfAttention(f.query, f.key, f.value, f.output, query_bias=f.query_bias, mask=seen)
            worst = max(worst, bounds.masked_ball_upper_bound(fixed, n, R).value)
    parts = ball.HeadMatrices(f.query, f.key, f.value, f.output, f.query_bias)
    found = ball.softmax_layer(parts, visible_rows(n, "any"), R, scale=f.scale)
    assert worst == pytest.approx(float(found), rel=1e-11)


def test_bounds_are_those_of_the_library_for_one_head_and_below_them_for_several() -> None:
    for heads in (1, 2):
        far = 1e8
        f = layer("l2", heads=heads)
        q, v = (t.unflatten(0, (heads, -1)) for t in f.in_proj_weight.detach().chunk(2))
        everywhere = bounds.l2_attention_upper_bound(q, v, f.out_proj.weight.detach(), N).value
        found = f.lipschitz_bound(N, far).value
        assert f.lipschitz_bound(N, 0.01).value < 0.6 * found <= 0.6 * everywhere * (1 + 1e-10)

        f = layer("cosine", heads=heads, bias=False, **OPTIONS["cosine"])
        stacked = bounds.scaled_cosine_upper_bound(
            *f.in_proj_weight.detach().chunk(3), N, **OPTIONS["cosine"]
        )
        expected = stacked.value * float(torch.linalg.matrix_norm(f.out_proj.weight.detach(), 2))
        assert f.lipschitz_bound(N, far).value == pytest.approx(expected, rel=1e-6)
        assert f.lipschitz_bound(N, 0.1).value < 0.6 * expected

        f = layer("sinkhorn", heads=heads)
        q, k, v = (t.detach().unflatten(0, (heads, -1)) for t in f.in_proj_weight.chunk(3))
        softmax = hs.SelfAttention(q, k, v, f.out_proj.weight.detach())
        parts = [bounds.sinkhorn(softmax.head(h), 1.5).value for h in range(heads)]
        whole = math.hypot(*parts) * float(torch.linalg.matrix_norm(softmax.output, 2))
        assert 0.3 * whole < f.lipschitz_bound(N, 1.5).value <= whole * (1 + 1e-10)

        f = layer("lipschitz_norm", heads=heads)
        w, p = (float(torch.linalg.matrix_norm(t.detach(), 2)) for t in (f.out_proj.weight, f.in_proj_weight))
        whole = bounds.lipschitz_norm_upper_bound(N, N).value * w * p
        assert 0.5 * whole < f.lipschitz_bound(N, 1.0).value <= whole * (1 + 1e-10)


def test_one_token_is_a_linear_map() -> None:
    factors = {"l2": 1.2, "sinkhorn": 4.0, "lipschitz_norm": 4.0, "cosine": 4.0}
    for kind, factor in factors.items():
        f = layer(kind, heads=1, length=1)
        truth = dense_norm(f, torch.zeros(1, D, dtype=F64))
        assert truth <= f.lipschitz_bound(1, 1e-3).value * (1 + 1e-9)
        assert f.lipschitz_bound(1, 1e-3).value < factor * truth * (1 + 1e-5)


GROWING = with_masks(["none", "causal", "any", "additive"])


@pytest.mark.parametrize(("kind", "mask"), others_slow(GROWING, GROWING[::3]))
def test_bounds_grow_with_length_and_radius(kind: str, mask: str) -> None:
    f = layer(kind, mask=mask, length=200, radius=30.0 if kind in ON_A_BALL else None, shorter=True)
    for radius in (0.1, 1.0, 10.0):
        values = [f.lipschitz_bound(n, radius).value for n in (1, 2, 3, 5, 17, 200)]
        assert values == sorted(values)
    values = [f.lipschitz_bound(40, radius).value for radius in (1e-3, 0.1, 1.0, 3.0, 30.0)]
    assert values == sorted(values)
    # The worst mask for sigmoid attention hides nothing.
    if mask in ("any", "additive") and kind not in ("sinkhorn", "sigmoid"):
        assert f.lipschitz_bound(40, 1.0).value > layer(kind, length=40).lipschitz_bound(40, 1.0).value
    assert f(tokens(0, 7, D))[0].shape == (7, D)


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_stay_within_their_radius(kind: str) -> None:
    for seed, radius in ((0, 0.5), (1, 4.0)):
        f = layer(kind, seed=seed, radius=radius, constant=3.0)
        x = tokens(seed, 200, N, D, radius=radius * 0.999)
        x[:100] = x[:100, :1] + 0.0 * x[:100]
        largest = float(torch.linalg.vector_norm(f(x)[0].detach(), dim=-1).max())
        assert largest <= f.output_radius(N, radius) < 8 * largest


@pytest.mark.parametrize("mask", ["none", "causal", "band"])
def test_formulas_with_masks(mask: str) -> None:
    """One head, all matrices the identity in one dimension: the formulas of the theory, row by row."""
    seen = {"none": torch.ones(N, N).bool(), "causal": ~CAUSAL, "band": ~BAND}[mask]
    seen[0, 2] |= mask == "band"  # not symmetric: rows and columns differ
    rows = visible_rows(N, seen if mask == "band" else mask)
    one, radius, tau = torch.ones(1, 1, 1).double(), 0.6, 2.0
    counts = [int(row.sum()) for row in seen]

    def heaviest(numbers: list[float]) -> float:
        return max(sum(numbers[i] for i in range(N) if seen[i, j]) for j in range(N))

    a, squares, spreads = radius**2, [], []
    for m in counts:
        phi = float(lambertw((m - 1) / math.e).real)
        var, dist, p = min(a, phi), min(4 * a, phi), 1 / (1 + (m - 1) * math.exp(-4 * a))
        r = math.sqrt(p) + 2 * min(math.sqrt(var * dist), math.sqrt(4 * a * var * p), math.sqrt(2) * a)
        squares.append(r**2)
        spreads.append(var)
    parts = ball.HeadMatrices(one, one, one, one[0])
    l2 = float(ball.l2_layer(parts, rows, radius))
    assert l2 == pytest.approx(math.sqrt(heaviest(squares)) + 2 * max(spreads), rel=1e-10)

    rho = radius / math.sqrt(radius**2 + 1)
    p = [1 / (1 + (m - 1) * math.exp(-2 * tau * rho**2)) for m in counts]
    c, spread = heaviest(p), heaviest([min(0.5, t) if m > 1 else 0.0 for t, m in zip(p, counts, strict=True)])
    cosine = float(ball.scaled_cosine_layer(parts, rows, radius, temperature=tau, gain=1.0, eps=1.0))
    assert cosine == pytest.approx(math.sqrt(c) + tau * rho**2 * (1 + math.sqrt(spread)), rel=1e-10)

    # Sigmoid attention: scores lie in [b − a, b + a].
    b = -math.log(2.0)
    largest = 1 / (1 + math.exp(-b - a))
    steepest_at = max(b - a, min(b + a, 0.0))
    slope = math.exp(-steepest_at) / (1 + math.exp(-steepest_at)) ** 2
    mu, m = float(np.linalg.norm(seen.double().numpy(), 2)), max(counts)
    sigmoid = float(ball.sigmoid_layer(parts, rows, radius, scale=1.0, shift=b))
    assert sigmoid == pytest.approx(mu * largest + slope * a * (m + mu), rel=1e-10)


def test_the_bound_of_sigmoid_attention_is_attained_for_small_scores() -> None:
    """All tokens at the end of the ball, ‖A‖R² <= log n: the Jacobian there has the norm that is claimed."""
    f = nn.SigmoidAttention(1, 1, length=N, bias=False, radius=1.2, dtype=F64)
    with torch.no_grad():
        f.in_proj_weight.copy_(torch.tensor([[1.1], [1.0], [0.7]]))
        f.out_proj.weight.fill_(1.0)
    truth = dense_norm(f, torch.full((N, 1), 1.2, dtype=F64))
    assert math.log(N) > 1.1 * 1.2**2  # ‖A‖R² is within the range of the claim
    assert f.lipschitz_bound(N, 1.2).value == pytest.approx(truth, rel=1e-10)


# ---- the division


@pytest.mark.parametrize("kind", LAYERS)
def test_the_output_is_divided_by_bound_over_constant(kind: str) -> None:
    whole, divided = layer(kind, radius=R), layer(kind, radius=R, constant=0.25)
    divisor = whole.lipschitz_bound(N, R).value / 0.25
    x = tokens(0, 2, N, D, radius=R)
    torch.testing.assert_close(divided(x)[0] * divisor, whole(x)[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(divided(x)[1], whole(x)[1], rtol=0, atol=0)
    torch.testing.assert_close(divided.map(x), divided(x)[0], rtol=1e-8, atol=1e-10)
    assert whole.output_radius(N, R) == pytest.approx(divisor * divided.output_radius(N, R), rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("cosine", "temperature", 5.0),
        ("cosine", "gain", 5.0),
        ("cosine", "eps", 0.1),
        ("l2", "num_heads", 1),
        ("query_key_norm", "eps", 0.1),
        ("sigmoid", "shift", 2.0),
    ],
)
def test_the_divisor_is_that_of_the_settings_of_now(kind: str, name: str, value: float) -> None:
    f, fresh = (LAYERS[kind](8, 2, length=N, constant=1.0, radius=R).eval() for _ in range(2))
    before = f._log_divisor(f._weights())
    for one in (f, fresh):
        setattr(one, name, value)
    fresh.load_state_dict(f.state_dict())
    found = f._log_divisor(f._weights())
    assert found == pytest.approx(fresh._log_divisor(fresh._weights()), rel=1e-12)
    assert found != pytest.approx(before, rel=1e-4)


def _step(f: Any) -> None:
    optimiser = torch.optim.SGD(f.parameters(), lr=0.1)
    f(tokens(0, 1, N, D, radius=R))[0].square().sum().backward()
    optimiser.step()


CHANGES: dict[str, Callable[[Any], object]] = {
    "a step": _step,
    "in place": lambda f: f.out_proj.weight.detach().mul_(3),
    "through data": lambda f: f.in_proj_weight.data[0].add_(1),
    "replaced": lambda f: setattr(f.out_proj, "weight", torch.nn.Parameter(2 * f.out_proj.weight.detach())),
    "loaded": lambda f: f.load_state_dict(layer("softmax", seed=8).state_dict()),
    "parametrised": lambda f: torch.nn.utils.parametrizations.orthogonal(f.out_proj, "weight"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_divisor_is_kept_until_weights_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f, x = layer("softmax", radius=R, constant=1.0), tokens(0, 2, N, D, radius=R)
    counted: list[int] = []
    own = nn.SoftmaxAttention._log_bound

    def counting(self: nn.SoftmaxAttention, *arguments: Any) -> Tensor:
        counted.append(1)
        return own(self, *arguments)

    monkeypatch.setattr(nn.SoftmaxAttention, "_log_bound", counting)
    f.eval()
    with torch.no_grad():
        first = f(x)[0]
        assert torch.equal(f(x)[0], first)
    assert len(counted) == 1
    CHANGES[name](f)
    counted.clear()
    with torch.no_grad():
        again = f(x)[0]
    assert len(counted) == (name != "loaded")  # loading computes the divisor for graphs
    whole = layer("softmax", radius=R)
    whole.load_state_dict({name: weight.clone() for name, weight in f._weights().items()})
    torch.testing.assert_close(
        again * whole.lipschitz_bound(N, R).value, whole(x)[0].detach(), rtol=1e-10, atol=1e-12
    )


def test_a_constant_layer_has_no_quotient() -> None:
    f, whole = (layer("softmax", radius=R, **of) for of in ({"constant": 1.0}, {}))
    for one in (f, whole):
        torch.nn.init.zeros_(one.out_proj.weight)
    for ask in (lambda: f(tokens(0, 2, N, D, radius=R)), lambda: f.lipschitz_bound(N, R)):
        with pytest.raises(ArgumentError, match="constant: expected a layer whose bound is a positive"):
            ask()
    assert whole.lipschitz_bound(N, R).value == 0
    with pytest.raises(ArgumentError, match="a huge bound"):
        layer("softmax", radius=R, constant=1.0, size=1e200)(tokens(0, 2, N, D, radius=R))


@pytest.mark.parametrize("size", [1e-30, 1e-20, pytest.param(1e20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "query_key_norm"])
def test_tiny_and_huge_weights_in_float32_are_divided_in_float64(kind: str, size: float) -> None:
    """The products of such weights, and the inverse of their bound, leave the range of float32."""
    if kind == "sinkhorn" and size > 1:
        pytest.skip("no convergence")
    made, in_double = (
        LAYERS[kind](D, 2, length=N, radius=1.0, constant=1.0, bias=False, dtype=dtype)
        for dtype in (torch.float32, F64)
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(size)
    x = tokens(1, 1, N, D, radius=0.9)
    in_double.load_state_dict(made.state_dict())
    for training in (True, False):
        made.train(training)
        try:
            found = made(x.float())[0]
        except NonFiniteError:
            assert float(in_double(x)[0].detach().abs().max()) > torch.finfo(torch.float32).max
        else:
            expected = in_double(x.float().double())[0]
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(made.map(x[0]), in_double(x)[0][0], rtol=1e-5, atol=0.0)
    with pytest.raises(HowsmoothError, match="double"):
        nn.deploy(made.eval())


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(kind: str, dtype: torch.dtype) -> None:
    x = tokens(0, N, D, radius=1.0).to(dtype)
    f, lower = (layer(kind, radius=2.0, constant=1.0).to(one) for one in (F64, dtype))
    output = lower(x)[0]
    assert output.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output.double(), f(x.double())[0], rtol=tolerance, atol=tolerance)
    output.float().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in lower.parameters())


def test_small_weights_in_float64_have_the_bound_of_their_rescaling() -> None:
    """W_O is a factor of the bound, and squares of products of small matrices do not underflow."""
    made = nn.SoftmaxAttention(D, 2, length=N, radius=1.0, dtype=F64)
    before = made.lipschitz_bound(N, 1.0).log_value
    with torch.no_grad():
        made.out_proj.weight.mul_(1e-150)
        made.in_proj_weight[2 * D :].mul_(1e-81)
    expected = before + math.log(1e-150) + math.log(1e-81)
    assert made.lipschitz_bound(N, 1.0).log_value == pytest.approx(expected, abs=1e-9)


def test_queries_that_overflow_in_float64_are_refused() -> None:
    """The bound of Lipschitz normalisation does not grow with the queries, whose squares are infinite."""
    made = nn.LipschitzNormAttention(D, 2, length=N, radius=1.0, constant=1.0, dtype=F64)
    with torch.no_grad():
        made.in_proj_weight.mul_(1e300)
        made.in_proj_weight[2 * D :].mul_(1e-300)
    with pytest.raises(NonFiniteError, match=r"range of torch\.float64"):
        made(tokens(1, 1, N, D, radius=0.9))


# ---- what is refused, and what is clipped


def test_beyond_the_radius() -> None:
    refuse, clip = (layer("softmax", radius=R, constant=1.0, beyond=way) for way in ("refuse", "clip"))
    x = tokens(0, 2, N, D, radius=R)
    torch.testing.assert_close(clip(x)[0], refuse(x)[0], rtol=1e-14, atol=1e-14)
    far = x.clone()
    far[1, 0] *= 1.01
    with pytest.raises(ArgumentError, match=r"norm at most 2.*beyond='clip'"):
        refuse(far)
    torch.testing.assert_close(clip(far)[0], refuse(x)[0], rtol=1e-11, atol=1e-11)
    with pytest.raises(ArgumentError, match=r"layer, got 2\.0000002\. .* larger radius"):
        refuse.lipschitz_bound(N, 2.0000002)
    # What is clipped is Lipschitz everywhere: the attack is on a larger ball
    assert clip.lipschitz_bound(N, 100.0).value == clip.lipschitz_bound(N, R).value
    assert steepest(clip, N, 3 * R, D, starts=2, steps=15) <= 1.0


def test_lengths() -> None:
    f, shorter = (layer("softmax", radius=R, constant=1.0, shorter=way) for way in (False, True))
    with pytest.raises(ArgumentError, match=r"5 tokens, the length of the layer.*3 tokens.*shorter=True"):
        f(tokens(0, 2, 3, D, radius=R))
    assert steepest(shorter, 3, R, D, starts=2, steps=15) <= shorter.lipschitz_bound(3, R).value < 1
    with pytest.raises(ArgumentError, match="at most 5 tokens"):
        shorter(tokens(0, 2, 6, D, radius=R))
    assert "shorter=True" in repr(shorter)


@pytest.mark.parametrize(
    ("mask", "call"),
    [
        ("causal", {"attn_mask": WINDOW}),
        ("causal", {"attn_mask": torch.zeros_like(CAUSAL)}),
        ("causal", {"key_padding_mask": padding()}),
        (WINDOW, {"attn_mask": CAUSAL}),
    ],
)
def test_masks_without_a_theorem_are_refused(mask: object, call: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"attn_mask|key_padding_mask|is_causal"):
        layer("softmax", mask=mask)(tokens(0, 3, N, D), **call)


@pytest.mark.parametrize(
    ("kind", "settings", "argument", "words"),
    [
        ("softmax", {"constant": 1.0}, "radius", "ball"),
        ("softmax", {"mask": CAUSAL, "shorter": True}, "shorter", "mask"),
        ("sinkhorn", {"mask": "causal"}, "mask", "the identity"),
        ("sinkhorn", {"mask": CAUSAL}, "mask", "the identity"),
        ("sinkhorn", {"tolerance": 0.0}, "tolerance", "1e-13"),
        ("sinkhorn", {"max_iterations": 0}, "max_iterations", ">= 1"),
        ("sinkhorn", {"constant": 1.0}, "radius", "bound on a ball"),
        ("l2", {"constant": 1.0, "mask": "any"}, "radius", "hidden from itself"),
        ("l2", {"constant": 1.0, "mask": STAR}, "radius", "hidden from itself"),
        ("cosine", {"eps": 0.0}, "eps", "not Lipschitz at zero"),
        ("cosine", {"temperature": math.nan}, "temperature", "finite"),
        ("cosine", {"gain": math.inf}, "gain", "finite"),
        ("sigmoid", {"constant": 1.0}, "radius", "bound on a ball"),
        ("sigmoid", {"shift": math.nan}, "shift", "finite"),
        ("query_key_norm", {"eps": 0.0}, "eps", "> 0"),
        ("query_key_norm", {"temperature": -1.0}, "temperature", "> 0"),
        ("query_key_norm", {"temperature": math.nan}, "temperature", "finite"),
    ],
)
def test_refused_when_built(kind: str, settings: dict[str, Any], argument: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        layer(kind, **settings)
    assert caught.value.argument == argument
