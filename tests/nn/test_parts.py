"""Parts of 1-Lipschitz models: every constant and every radius attacked, and shown to be nearly reached."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.nn import LipschitzModule
from tests._steepest import steepest


@dataclass(frozen=True)
class Case:
    """A part, the tokens it is given, and how far its bounds may be from what is found."""

    name: str
    make: Callable[[], nn.Module]
    n: int = 3
    d: int = 4
    radius: float = 1.5
    factor: float = 1.0
    radius_factor: float = 1.05


def _times(factor: float, module: nn.Module) -> nn.Module:
    """The module with weights so many times as large."""
    with torch.no_grad():
        for weight in module.parameters():
            weight *= factor
    return module


def _varied(module: nn.Module) -> nn.Module:
    """Give gains, shifts and biases, which start alike, values that are not."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        if name.split(".")[-1] in ("gain", "shift", "bias"):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                parameter.copy_(parameter + 0.4 * noise.to(parameter.dtype))
    return module


def _inner() -> nn.Module:
    return nn.Sequential(hs.nn.OrthogonalLinear(4, 6), hs.nn.MaxMin(), hs.nn.OrthogonalLinear(6, 4))


CASES = [
    Case("orthogonal", lambda: _varied(hs.nn.OrthogonalLinear(4, 4, dtype=torch.float64))),
    Case("orthogonal, wide", lambda: _varied(hs.nn.OrthogonalLinear(4, 7)), radius_factor=1.3),
    Case("orthogonal, narrow", lambda: hs.nn.OrthogonalLinear(4, 2, orthogonal_map="cayley"), n=1),
    Case("spectral", lambda: _varied(hs.nn.SpectralLinear(4, 6)), radius_factor=1.3),
    Case("spectral, no bias", lambda: hs.nn.SpectralLinear(4, 2, bias=False, iterations=3)),
    Case("center", lambda: _varied(hs.nn.CenterNorm(4)), radius_factor=1.25),
    Case("center, plain", lambda: hs.nn.CenterNorm(4), radius_factor=1.001),
    Case("center, scaled", lambda: hs.nn.CenterNorm(4, scaled=True), radius_factor=1.001),
    Case("layer norm", lambda: _varied(hs.nn.LipschitzLayerNorm(4, floor=0.7))),
    Case("layer norm, high floor", lambda: hs.nn.LipschitzLayerNorm(4, floor=5.0)),
    Case("rms norm", lambda: _varied(hs.nn.LipschitzRMSNorm(4, floor=0.7))),
    Case("rms norm, long tokens", lambda: hs.nn.LipschitzRMSNorm(4), radius=100.0),
    Case("group sort", lambda: hs.nn.GroupSort(4)),
    Case("max min", hs.nn.MaxMin),
    Case("positions", lambda: _times(50, hs.nn.AddPositions(3, 4))),
    Case("prepended", lambda: _times(50, hs.nn.PrependToken(4))),
    Case("prepended, long", lambda: _times(450, hs.nn.PrependToken(4))),
    Case("taken", lambda: hs.nn.TakeToken(-1)),
    Case("pooled", hs.nn.MeanPool),
    Case("clipped", lambda: hs.nn.ClipTokens(0.5)),
    Case("clipped, all inside", lambda: hs.nn.ClipTokens(3.0)),
    Case("average", lambda: hs.nn.AverageResidual(_inner(), 0.3), factor=1.15, radius_factor=1.6),
    Case("average, attained", lambda: hs.nn.AverageResidual(nn.Linear(4, 4), 0.0)),
    Case(
        "average, learned", lambda: hs.nn.AverageResidual(nn.Tanh(), 0.8, learnable=True), radius_factor=1.2
    ),
    Case("sum", lambda: hs.nn.Residual(_inner()), factor=1.4, radius_factor=1.7),
    Case("sum, attained", lambda: hs.nn.Residual(nn.Sequential(hs.nn.MaxMin(), nn.Identity()))),
]


def _tokens(n: int, d: int, radius: float, seed: int) -> Tensor:
    """Return sequences in the ball, of lengths over several orders of magnitude: (batch, n, d)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, n, d, generator=generator, dtype=torch.float64)
    sizes = 10 ** (-3 * torch.rand(60, n, 1, generator=generator, dtype=torch.float64))
    sizes[:10] = 1.0
    return radius * sizes * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _longest(module: nn.Module, case: Case) -> float:
    """Ascend on the norm of an output token over the ball."""
    x = (_tokens(case.n, case.d, 1.0, 3)).requires_grad_()
    optimiser = torch.optim.Adam([x], lr=0.05, maximize=True)
    best = 0.0
    for _ in range(40):
        y = module(case.radius * x).flatten(0, -2)
        norms = torch.linalg.vector_norm(y, dim=-1)
        best = max(best, float(norms.detach().max()))
        optimiser.zero_grad()
        norms.sum().backward()
        optimiser.step()
        with torch.no_grad():
            x /= torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1.0)
    return best


def _frozen(case: Case) -> nn.Module:
    torch.manual_seed(5)
    return case.make().eval().double().requires_grad_(False)


each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each
def test_constants_hold_and_are_nearly_attained(case: Case) -> None:
    module = _frozen(case)
    assert isinstance(module, LipschitzModule)
    bound = module.lipschitz_bound(case.n, case.radius).value
    zero = torch.zeros(case.n, case.d, dtype=torch.float64)
    found = steepest(module, case.n, case.radius, case.d, starts=3, steps=6, given=[zero + 1e-9])
    assert found <= bound * (1 + 1e-12)
    assert bound <= case.factor * found * (1 + 1e-6)


@each
def test_pairs_of_inputs_come_no_further_apart(case: Case) -> None:
    """Without derivatives, which say nothing of a map that jumps."""
    module = _frozen(case)
    bound = module.lipschitz_bound(case.n, case.radius).value
    x, y = _tokens(case.n, case.d, case.radius, 1), _tokens(case.n, case.d, case.radius, 2)
    near = x + 1e-3 * (y - x)
    for other in (y, near):
        apart = torch.linalg.vector_norm((module(x) - module(other)).flatten(1), dim=1)
        assert bool((apart <= bound * torch.linalg.vector_norm((x - other).flatten(1), dim=1) + 1e-12).all())


@each
def test_radii_hold_and_are_nearly_attained(case: Case) -> None:
    module = _frozen(case)
    radius = module.output_radius(case.n, case.radius)
    y = module(_tokens(case.n, case.d, case.radius, 4))
    assert (1 if y.ndim == 2 else y.shape[1]) == module.output_length(case.n)
    found = _longest(module, case)
    assert found <= radius * (1 + 1e-12)
    assert radius <= case.radius_factor * found


# ---- linear maps


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (7, 5), (5, 7)])
def test_an_orthogonal_weight_stays_one_in_training(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    layer = hs.nn.OrthogonalLinear(columns, rows, dtype=torch.float64)
    optimiser = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    for _ in range(5):
        optimiser.zero_grad()
        layer(torch.randn(8, columns, dtype=torch.float64)).square().sin().sum().backward()
        optimiser.step()
    w = layer.weight.detach()
    assert float((w - before).abs().max()) > 0.05
    gram = w.mT @ w if rows >= columns else w @ w.mT
    torch.testing.assert_close(gram, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
    assert layer.lipschitz_bound(1, 1.0).value == pytest.approx(1.0, rel=1e-10)


def test_a_spectral_constant_is_computed_and_settles_at_one() -> None:
    torch.manual_seed(0)
    layer = hs.nn.SpectralLinear(40, 40, dtype=torch.float64)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        optimiser.zero_grad()
        layer(torch.randn(64, 40, dtype=torch.float64)).square().mean().backward()
        optimiser.step()
    assert layer.training
    estimate = layer.linear.parametrizations["weight"][0]._u.clone()
    claimed = layer.lipschitz_bound(1, 1.0).value
    assert torch.equal(estimate, layer.linear.parametrizations["weight"][0]._u)
    assert layer.training
    true = float(torch.linalg.matrix_norm(layer.eval().weight.detach(), 2))
    assert true * (1 - 1e-13) <= claimed <= true * (1 + 1e-10)
    assert true > 1 + 1e-6  # the estimate is from below: it must not be believed
    layer.settle()
    assert layer.lipschitz_bound(1, 1.0).value == pytest.approx(1.0, rel=1e-10)


# ---- norm layers


def test_norm_layers_are_those_of_torch_with_a_large_epsilon() -> None:
    x = _tokens(3, 6, 4.0, 0)
    floor = 0.9
    eps = floor**2 / 6
    want = nn.functional.layer_norm(x, (6,), eps=eps) * (floor / math.sqrt(6))
    torch.testing.assert_close(hs.nn.LipschitzLayerNorm(6, floor=floor)(x), want)
    want = nn.functional.rms_norm(x, (6,), eps=eps) * (floor / math.sqrt(6))
    torch.testing.assert_close(hs.nn.LipschitzRMSNorm(6, floor=floor)(x), want)


def test_gains_are_divided_by_the_largest_if_it_is_above_one() -> None:
    norm = hs.nn.LipschitzRMSNorm(3, floor=2.0, dtype=torch.float64)
    x = _tokens(2, 3, 1.0, 0)
    with torch.no_grad():
        plain = norm(x)
        norm.gain.copy_(torch.tensor([2.0, -4.0, 1.0]))
        torch.testing.assert_close(norm(x), plain * torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64))
        norm.gain.copy_(torch.tensor([0.2, -0.4, 0.1]))
        torch.testing.assert_close(norm(x), plain * torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64))
    assert norm.lipschitz_bound(2, 1.0).value == pytest.approx(0.4)


@pytest.mark.parametrize("make", [hs.nn.CenterNorm, hs.nn.LipschitzLayerNorm, hs.nn.LipschitzRMSNorm])
def test_norm_layers_are_smooth_at_zero_and_finite_far_out(make: type[nn.Module]) -> None:
    norm = make(4)
    x = torch.zeros(1, 2, 4, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    far = torch.tensor([[[1e30, -1e30, 1e30, -1e30]]])  # whose squares are no float32 numbers
    want = far if make is hs.nn.CenterNorm else far / 2e30
    torch.testing.assert_close(norm(far).detach(), want)


# ---- tokens


def test_patches_hold_the_pixels_of_a_patch_and_keep_distances() -> None:
    images = torch.arange(2 * 3 * 4 * 6, dtype=torch.float64).reshape(2, 3, 4, 6)
    patches = hs.nn.Patches(2)(images)
    assert patches.shape == (2, 6, 12)
    for row in range(2):
        for column in range(3):
            cut = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(patches[:, 3 * row + column], cut.flatten(1))
    assert float(torch.linalg.vector_norm(patches)) == float(torch.linalg.vector_norm(images))


def test_patches_are_those_of_a_convolution() -> None:
    """A patch embedding as ViTs have it: a convolution whose kernels do not overlap."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 5, 2, stride=2)
    images = torch.randn(2, 3, 4, 6)
    linear = nn.functional.linear(hs.nn.Patches(2)(images), convolution.weight.flatten(1), convolution.bias)
    torch.testing.assert_close(linear, convolution(images).flatten(2).mT)


def test_a_clipped_token_is_the_nearest_one_in_the_ball() -> None:
    clip = hs.nn.ClipTokens(2.0)
    x = torch.tensor([[[3.0, 4.0], [0.6, 0.8], [0.0, 0.0]]])
    torch.testing.assert_close(clip(x), torch.tensor([[[1.2, 1.6], [0.6, 0.8], [0.0, 0.0]]]))
    assert clip.output_radius(3, math.inf) == 2.0
    assert clip.lipschitz_bound(3, math.inf).value == pytest.approx(1.0)
    clip.radius = 0.5
    assert clip.output_radius(3, math.inf) == 0.5
    for changed in (0.0, -1.0, math.nan, math.inf):
        clip.radius = changed
        with pytest.raises(ArgumentError, match="radius: expected"):
            clip.output_radius(3, math.inf)


def test_an_attention_block_gives_tokens_alone_with_the_constant_of_its_layer() -> None:
    torch.manual_seed(0)
    layer = hs.nn.SoftmaxAttention(4, 2, length=3, radius=1.0, constant=1.0, dtype=torch.float64)
    block = hs.nn.SelfAttentionBlock(layer)
    x = _tokens(3, 4, 1.0, 0)
    torch.testing.assert_close(block(x), layer(x)[0], rtol=0, atol=0)
    assert block.lipschitz_bound(3, 0.5).value == layer.lipschitz_bound(3, 0.5).value
    assert block.output_radius(3, 0.5) == layer.output_radius(3, 0.5)
    assert block.output_length(3) == 3

    residual = hs.nn.AverageResidual(block)
    torch.testing.assert_close(residual(x), (x + layer(x)[0]) / 2)
    assert residual.lipschitz_bound(3, 1.0).value == pytest.approx(1.0)
    found = steepest(residual, 3, 1.0, 4, starts=4, steps=20)
    assert 0.7 <= found <= 1.0


# ---- bad input


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: hs.nn.OrthogonalLinear(4, 4, orthogonal_map="qr"), "orthogonal_map"),
        (lambda: hs.nn.SpectralLinear(4, 4, iterations=0), "iterations"),
        (lambda: hs.nn.CenterNorm(1, scaled=True), "dim"),
        (lambda: hs.nn.LipschitzLayerNorm(4, floor=0.0), "floor"),
        (lambda: hs.nn.LipschitzRMSNorm(4, floor=math.nan), "floor"),
        (lambda: hs.nn.AverageResidual(nn.Identity(), 1.5), "weight"),
        (lambda: hs.nn.AverageResidual(nn.Identity(), math.nan), "weight"),
        (lambda: hs.nn.AverageResidual(nn.Identity(), 1.0, learnable=True), "weight"),
        (lambda: hs.nn.MaxMin()(torch.ones(1, 3, 5)), "x"),
        (lambda: hs.nn.TakeToken(3)(torch.ones(1, 3, 4)), "length"),
        (lambda: hs.nn.AddPositions(3, 4).lipschitz_bound(4, 1.0), "length"),
        (lambda: hs.nn.Residual(nn.Linear(4, 3))(torch.ones(1, 3, 4)), "inner"),
        (
            lambda: hs.nn.Residual(hs.nn.SoftmaxAttention(4, 2, length=3))(torch.ones(1, 3, 4)),
            "inner",
        ),
    ],
)
def test_bad_input_is_refused(make: Callable[[], object], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.argument == argument
