"""certify: whole models held against the steepest point found, rules of PyTorch's modules, refusals."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

import howsmooth as hs
from howsmooth.bounds import Bound, Quantity, norm_radius
from howsmooth.errors import ArgumentError, CertificateError, NonFiniteError
from howsmooth.nn import ModelCertificate, certify
from howsmooth.nn.certificates.module_propagation import encoder_layer
from tests._steepest import dense_norm, steepest

N, D = 4, 6


def _seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = make().double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def _attention(radius: float = 2.0) -> nn.Module:
    layer = hs.nn.SoftmaxAttention(D, 2, length=N, radius=radius, constant=1.0, beyond="clip")
    return hs.nn.SelfAttentionBlock(layer)


def _undivided(length: int = N, radius: float | None = None) -> nn.Module:
    return hs.nn.SelfAttentionBlock(hs.nn.SoftmaxAttention(D, 2, length=length, radius=radius))


def _feed_forward(hidden: int = 8) -> nn.Module:
    return nn.Sequential(hs.nn.OrthogonalLinear(D, hidden), hs.nn.MaxMin(), hs.nn.OrthogonalLinear(hidden, D))


def _one_lipschitz() -> nn.Module:
    """A vision Transformer of constant 1, without its patches: tokens in, logits out."""
    blocks = [
        layer
        for _ in range(2)
        for layer in (hs.nn.AverageResidual(_attention()), hs.nn.AverageResidual(_feed_forward()))
    ]
    return nn.Sequential(
        hs.nn.OrthogonalLinear(D, D),
        hs.nn.AddPositions(N, D),
        *blocks,
        hs.nn.LipschitzLayerNorm(D, floor=2.0),
        hs.nn.MeanPool(),
        hs.nn.OrthogonalLinear(D, 3),
    )


def _plain() -> nn.Module:
    """As Transformers usually are, with torch's own norm, GELU and linear maps; norms with a large ε."""
    return nn.Sequential(
        hs.nn.Residual(nn.Sequential(nn.LayerNorm(D, eps=1.0), _undivided())),
        hs.nn.Residual(nn.Sequential(nn.RMSNorm(D, eps=1.0), nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D))),
        nn.Flatten(),
        nn.Linear(N * D, 3),
    )


def _few() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Tanh(), nn.Linear(D, D, bias=False))


# What the bound may be above the steepest point found, on these models.
MODELS = {
    "1-Lipschitz": (_one_lipschitz, 4.5),
    "plain": (_plain, 6.0),
    "two layers": (_few, 1.4),
    "one residual": (lambda: hs.nn.AverageResidual(_attention(1.0)), 1.6),
    "isometries": (
        lambda: nn.Sequential(hs.nn.OrthogonalLinear(D, 8), nn.Sequential(hs.nn.MaxMin()), nn.Flatten()),
        1 + 1e-6,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_point_is_steeper_and_one_is_nearly_as_steep(name: str) -> None:
    make, factor = MODELS[name]
    model = _seeded(make)
    certificate = certify(model, N, 1.0)
    found = steepest(model, N, 1.0, D, starts=3, steps=10)
    assert found <= certificate.constant <= factor * found


@pytest.mark.parametrize("name", MODELS)
def test_radii_cover_what_comes_out_of_every_module(name: str) -> None:
    make, _ = MODELS[name]
    model = _seeded(make)
    certificate = certify(model, N, 1.0)
    table = certificate.table.set_index("path")
    reached: dict[str, tuple[float, int]] = {}

    def watch(path: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, given: object, y: object) -> None:
            if isinstance(y, Tensor):
                tokens = y if y.ndim == 3 else y[:, None]
                longest = float(torch.linalg.vector_norm(tokens, dim=-1).max())
                reached[path] = (max(longest, reached.get(path, (0.0, 0))[0]), tokens.shape[1])

        return hook

    handles = [module.register_forward_hook(watch(path)) for path, module in model.named_modules()]
    x = torch.randn(200, N, D, dtype=torch.float64)
    model(x / torch.linalg.vector_norm(x, dim=-1, keepdim=True))
    for handle in handles:
        handle.remove()
    assert set(table.index) <= set(reached)
    for path, row in table.iterrows():
        longest, length = reached[str(path)]
        assert longest <= row.radius_out * (1 + 1e-12)
        assert length == row.length_out
    assert certificate.output_radius == table.radius_out.iloc[-1]
    assert certificate.output_length == table.length_out.iloc[-1]


def test_the_constant_is_the_product_of_the_rows_of_level_zero() -> None:
    certificate = certify(_seeded(_plain), N, 1.0)
    table = certificate.table
    assert list(table.columns) == [
        *("path", "kind", "level", "constant", "radius_in", "radius_out", "length_in", "length_out", "source")
    ]
    factors = table[table.level == 0].constant
    assert math.prod(factors) <= certificate.constant <= math.prod(factors) * (1 + 1e-9)
    assert list(table.path) == [
        *("0.inner.0", "0.inner.1", "0", "1.inner.0", "1.inner.1", "1.inner.2", "1.inner.3", "1", "2", "3")
    ]
    branch = table[table.path.str.startswith("1.inner")].constant
    residual = float(table[table.path == "1"].constant.iloc[0])
    assert residual == pytest.approx(1 + math.prod(branch), rel=1e-9)
    assert table.radius_in.iloc[0] == 1.0
    assert bool((table.radius_in > 0).all())


def test_the_constant_follows_the_weights_and_the_radius() -> None:
    model = _seeded(_one_lipschitz)
    one = certify(model, N, 1.0).constant
    assert one <= 1 + 1e-6
    with torch.no_grad():
        model[2].inner.attention.in_proj_weight.mul_(3.0)
    assert certify(model, N, 1.0).constant <= 1 + 1e-6  # it is divided by its bound
    plain = nn.Linear(D, D)
    before = certify(plain, N, 1.0).constant
    with torch.no_grad():
        plain.weight.mul_(3.0)
    assert certify(plain, N, 1.0).constant == pytest.approx(3 * before)
    attention = _seeded(lambda: hs.nn.SoftmaxAttention(D, 2, length=N))
    assert certify(attention, N, 2.0).constant > certify(attention, N, 1.0).constant


def test_certifying_leaves_model_and_random_numbers_as_they_were() -> None:
    torch.manual_seed(0)
    spectral = hs.nn.SpectralLinear(D, D).eval()
    model = nn.Sequential(spectral, _encoder(1).eval(), hs.nn.AverageResidual(_attention()).train())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    certify(model, N, 1.0)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- rules for PyTorch's modules

NUMBERS = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.Tanh(),
    nn.Softsign(),
    nn.LeakyReLU(0.2),
    nn.LeakyReLU(-3.0),
    nn.PReLU(init=-1.7),
    nn.ELU(),
    nn.ELU(2.5),
    nn.CELU(0.7),
    nn.SELU(),
    nn.Hardtanh(-0.5, 2.0),
    nn.Hardswish(),
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.SiLU(),
    nn.Mish(),
    nn.Tanhshrink(),
    nn.Sigmoid(),
    nn.Hardsigmoid(),
    nn.LogSigmoid(),
    nn.Identity(),
    nn.Dropout(0.3),
]


@pytest.mark.parametrize("module", NUMBERS, ids=repr)
def test_slopes_and_growth_of_maps_of_numbers(module: nn.Module) -> None:
    """Each number by itself: the derivative on a fine grid, the outputs against the radius."""
    module = copy.deepcopy(module).double().eval()
    t = torch.linspace(-12, 12, 240_001, dtype=torch.float64, requires_grad=True)
    y = module(t)
    (slope,) = torch.autograd.grad(y.sum(), t)
    constant = certify(module, 1, 5.0).constant
    steepest_slope = float(slope.abs().max())
    assert steepest_slope <= constant * (1 + 1e-12)
    assert constant <= steepest_slope * (1 + 2e-4)
    steps = (y.diff().abs() / t.diff()).max()
    assert float(steps.detach()) <= constant * (1 + 1e-9)  # it does not jump
    for radius in (0.1, 1.0, 12.0):
        inside = t.abs() <= radius
        assert float(y[inside].abs().max().detach()) <= certify(module, 1, radius).output_radius * (1 + 1e-12)


@pytest.mark.parametrize("radius", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norm_layers_of_torch(kind: type[nn.Module], radius: float) -> None:
    torch.manual_seed(0)
    norm = kind(D, eps=1e-2).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    certificate = certify(norm, N, radius)
    zero = torch.full((N, D), 1e-9, dtype=torch.float64)
    assert dense_norm(norm, zero) == pytest.approx(certificate.constant, rel=1e-9)
    assert steepest(norm, N, radius, D, starts=3, steps=4) <= certificate.constant
    x = torch.randn(2000, 1, D, dtype=torch.float64)
    x = radius * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    longest = float(torch.linalg.vector_norm(norm(x), dim=-1).max().detach())
    assert longest <= certificate.output_radius <= 1.2 * longest
    if radius == 50.0 and kind is nn.LayerNorm:
        whole = hs.LayerNorm(norm.weight, norm.bias, eps=1e-2)
        assert certificate.output_radius == pytest.approx(norm_radius(whole), rel=1e-3)


def test_norm_layers_of_torch_without_gains_or_an_epsilon() -> None:
    plain = certify(nn.LayerNorm(D, elementwise_affine=False), N, 1.0)
    assert plain.constant == pytest.approx(1e-5**-0.5)
    default = certify(nn.RMSNorm(D), N, 1.0).constant
    for dtype in (torch.float32, torch.float64):
        zero = torch.zeros(1, D, dtype=dtype)
        slope = dense_norm(nn.RMSNorm(D, dtype=dtype), zero)
        assert slope <= default * (1 + 1e-12)
    assert slope == pytest.approx(default)


def test_a_class_that_kept_forward_has_the_rule_of_its_base_and_another_none() -> None:
    class Named(nn.Linear):
        """A linear map by another name."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    named = Named(D, D)
    assert certify(named, N, 1.0).constant == certify(nn.Sequential(named), N, 1.0).table.constant[0]
    with pytest.raises(CertificateError) as caught:
        certify(Doubled(D, D), N, 1.0)
    assert "Doubled" in str(caught.value)


def test_flatten_and_softmax() -> None:
    flat = certify(nn.Flatten(), N, 2.0)
    assert (flat.constant, flat.output_length) == (1.0, 1)
    assert flat.output_radius == pytest.approx(2.0 * math.sqrt(N))
    softmax = certify(nn.Softmax(dim=-1), 1, 3.0)
    assert softmax.constant == pytest.approx(0.5)
    given = [torch.tensor([[0.0, 0.0]], dtype=torch.float64)]
    assert steepest(nn.Softmax(dim=-1), 1, 3.0, 2, starts=3, steps=5, given=given) == pytest.approx(0.5)
    assert softmax.output_radius == 1.0


def test_everywhere_or_on_the_ball_alone() -> None:
    for model in (nn.Sequential(hs.nn.ClipTokens(1.0), _attention(1.0)), _attention(1.0)):
        everywhere = certify(model, N, math.inf)
        assert everywhere.constant == pytest.approx(1.0)
        assert math.isfinite(everywhere.output_radius)
    for kind in (hs.nn.CosineAttention, hs.nn.L2Attention):
        torch.manual_seed(0)
        layer = hs.nn.SelfAttentionBlock(kind(D, 2, length=N))
        assert certify(layer, N, 1e3).constant <= certify(layer, N, math.inf).constant < math.inf
    assert "of norm" not in str(everywhere).splitlines()[0]
    assert certify(nn.Linear(D, 2), N, math.inf).output_radius == math.inf
    with pytest.raises(CertificateError) as caught:
        certify(
            nn.Sequential(nn.Linear(D, D), hs.nn.SelfAttentionBlock(hs.nn.SoftmaxAttention(D, 2, length=N))),
            N,
            math.inf,
        )
    assert caught.value.path == "1"


def test_a_branch_of_zeros_and_tokens_of_zeros() -> None:
    zero = nn.Linear(D, D, bias=False)
    nn.init.zeros_(zero.weight)
    certificate = certify(nn.Sequential(nn.Linear(D, D), zero, nn.Linear(D, D)), N, math.inf)
    assert certificate.constant == 0.0
    logits = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert certificate.certified_radius(logits).tolist() == [math.inf, 0.0]
    after = nn.Sequential(zero, _undivided())
    assert certify(after, N, 1.0).constant == 0.0


def test_an_empty_model_is_the_identity() -> None:
    certificate = certify(nn.Sequential(), N, 2.0)
    assert certificate.constant == pytest.approx(1.0)
    assert (certificate.output_radius, certificate.output_length) == (2.0, N)
    assert len(certificate.table) == 0
    # The constant is above 1 by its rounding margin, and is printed rounded up.
    assert str(certificate).startswith("Lipschitz constant at most 1.00001 on 4 tokens")


# ---- PyTorch's own Transformers


def _encoder(layers: int = 2, **settings: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True, layer_norm_eps=1.0, **settings)
    return nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(D, eps=1.0), enable_nested_tensor=False)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.SiLU()])
def test_encoder_layers_are_the_parts_that_they_are_certified_as(norm_first, activation) -> None:
    model = _seeded(lambda: _encoder(norm_first=norm_first, activation=activation, bias=activation != "gelu"))
    x = torch.randn(5, N, D, dtype=torch.float64)
    layer = model.layers[0]
    parts = encoder_layer(layer, N)
    assert isinstance(parts, nn.Module)
    torch.testing.assert_close(parts(x), layer(x))
    certificate = certify(nn.Sequential(nn.Identity(), model), N, 1.0)
    paths = {path for path, _ in nn.Sequential(nn.Identity(), model).named_modules()}
    missing = set(certificate.table.path) - paths
    assert {path for path in missing if not path.endswith("activation")} == set()
    assert list(certificate.table.path).count("1.layers.1") == 2
    assert certificate.rows[-1].path == "1.norm"


@pytest.mark.parametrize(("norm_first", "factor"), [(True, 4.0), (False, 4.5)])
def test_an_encoder_of_torch_is_certified(norm_first: bool, factor: float) -> None:
    model = _seeded(lambda: _encoder(1, norm_first=norm_first, activation="gelu"))
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivatives
        found = steepest(model, N, 1.0, D, starts=2, steps=8)
    assert found <= certify(model, N, 1.0).constant <= factor * found


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", [hs.nn.SoftmaxAttention, hs.nn.L2Attention])
def test_a_layer_in_the_place_of_self_attn_is_certified(kind: type[nn.Module], norm_first: bool) -> None:
    model = _seeded(lambda: _encoder(1, norm_first=norm_first))
    layer = model.layers[0]
    usual = certify(model, N, 1.0).constant
    layer.self_attn = kind(D, 2, length=N, radius=2.5, constant=0.01, beyond="clip").double()
    x = torch.randn(5, N, D, dtype=torch.float64)
    parts = encoder_layer(layer, N)
    assert isinstance(parts, nn.Module)
    torch.testing.assert_close(parts(x), layer(x))
    found = steepest(model, N, 1.0, D, starts=2, steps=8)
    certificate = certify(model, N, 1.0)
    assert found <= certificate.constant < usual
    (row,) = (row for row in certificate.rows if row.path == "layers.0.self_attn")
    assert row.constant < 0.0101


# ---- what is refused


def test_a_forward_replaced_in_a_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear.forward
    for kind, layer in ((nn.Linear, nn.Linear(D, D)), (hs.nn.OrthogonalLinear, hs.nn.OrthogonalLinear(D, D))):
        monkeypatch.setattr(kind, "forward", lambda self, x: 13 * x)
        with pytest.raises(CertificateError, match=r"a class whose forward was replaced \(by code of tests"):
            certify(nn.Sequential(layer).eval(), N, 1.0)
        monkeypatch.undo()
    assert nn.Linear.forward is linear


def test_global_hooks_are_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, x, y: 2 * y)
    try:
        with pytest.raises(CertificateError, match="has hooks"):
            certify(nn.Sequential(nn.Linear(D, D)).eval(), N, 1.0)
    finally:
        handle.remove()


def test_subclasses_with_a_constant_of_their_own_are_trusted() -> None:
    class Doubled(hs.nn.OrthogonalLinear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

        def lipschitz_bound(self, length: int, radius: float) -> Bound:
            return Bound.upper("doubled", Quantity.GLOBAL, "by definition", formula=2.0)

        def output_radius(self, length: int, radius: float) -> float:
            return 3 * radius

    assert certify(nn.Sequential(Doubled(D, D)).eval(), N, 1.0).constant >= 2.0
    with pytest.raises(ArgumentError, match="has a forward of its own"):
        hs.nn.deploy(nn.Sequential(Doubled(D, D)))

    class Tenfold(hs.nn.Residual):
        def forward(self, x: Tensor) -> Tensor:
            return 10 * super().forward(x)

        def lipschitz_bound(self, length: int, radius: float) -> Bound:
            inner = super().lipschitz_bound(length, radius)
            return Bound.upper("tenfold", inner.quantity, "by definition", formula=10 * inner.value)

    assert certify(nn.Sequential(Tenfold(nn.Identity())), N, 1.0).constant == pytest.approx(20.0)


class _Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class _Lower(hs.nn.LipschitzModule):
    """A bound whose hypothesis fails."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        failed = hs.bounds.Hypothesis("the moon is full", False)
        return Bound.upper("moon", Quantity.GLOBAL, "nowhere", formula=1.0, hypotheses=(failed,))

    def output_radius(self, length: int, radius: float) -> float:
        return radius


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Identity(), nn.Linear(D, D))
    model[1].register_forward_hook(lambda module, x, y: 2 * y)
    return model.eval()


def _patched() -> nn.Module:
    model = nn.Sequential(nn.Identity(), nn.Linear(D, D))
    model[1].forward = lambda x: 5 * x
    return model.eval()


def _exported() -> nn.Module:
    return torch.export.export(nn.Sequential(nn.Linear(D, D)).eval(), (torch.zeros(1, N, D),)).module()


def _patched_encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True).eval()
    layer.self_attn.forward = lambda *given, **named: (given[0], None)
    return layer


class _Counting(nn.Module):
    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * self.calls


def _counting() -> nn.Module:
    layer = nn.Linear(D, D)
    nn.utils.parametrize.register_parametrization(layer, "weight", _Counting())
    return nn.Sequential(layer).eval()


class _Turned(hs.nn.OrthogonalLinear):
    def forward(self, x: Tensor) -> Tensor:
        return 5 * super().forward(x)


class _Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 5 * super().__call__(x)


def _replaced_inside() -> nn.Module:
    block = hs.nn.SelfAttentionBlock(hs.nn.SoftmaxAttention(D, 2, length=N))
    attend = block.attention.forward
    block.attention.forward = lambda *given, **named: (5 * attend(*given, **named)[0], None)
    return block.eval()


REFUSED: list[tuple[str, Callable[[], nn.Module], str, str]] = [
    ("unknown", lambda: nn.Sequential(nn.ReLU(), _Unknown()), "1", "without a rule"),
    ("unknown alone", _Unknown, "", "the model (_Unknown)"),
    (
        "in a branch",
        lambda: hs.nn.Residual(nn.Sequential(nn.ReLU(), nn.Conv1d(4, 4, 1))),
        "inner.1",
        "Conv1d",
    ),
    ("dropout", lambda: nn.Sequential(nn.Dropout(0.1)), "0", "model.eval()"),
    ("half", lambda: nn.Sequential(nn.Linear(D, D).half()), "0", ".float() or .double()"),
    ("bfloat16", lambda: nn.Sequential(nn.LayerNorm(D).bfloat16()), "0", "torch.bfloat16"),
    ("meta", lambda: nn.Sequential(nn.Linear(D, D, device="meta")), "0", "meta device"),
    ("lazy", lambda: nn.Sequential(nn.LazyLinear(D)), "0", "Run the model on an input"),
    ("hook", _hooked, "1", "has hooks"),
    ("exported", _exported, "", "Certify the model that was exported"),
    (
        "old spectral norm",
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(D, D))).eval(),
        "0",
        "has hooks",
    ),
    (
        "spectral norm in training",
        lambda: parametrizations.spectral_norm(nn.Linear(D, D)),
        "parametrizations.weight.0",
        "model.eval()",
    ),
    (
        "sine",
        lambda: nn.Sequential(_encoder(activation=torch.sin)).eval(),
        "0.layers.0",
        "neither relu, gelu",
    ),
    (
        "softplus",
        lambda: nn.Sequential(_encoder(activation=nn.Softplus())).eval(),
        "0.layers.0.activation",
        "without a rule",
    ),
    ("tokens first", lambda: nn.TransformerEncoderLayer(D, 2, 8).eval(), "", "batch_first=True"),
    ("an encoder in training", lambda: _encoder().train(), "layers.0.dropout", "model.eval()"),
    ("a patched encoder layer", _patched_encoder_layer, "", "from_torch"),
    ("another weight in each call", _counting, "0", "whenever it is read"),
    ("forward of its own", _patched, "1", "forward that was replaced"),
    ("forward of a subclass", lambda: nn.Sequential(_Turned(D, D)), "0", "the constant of OrthogonalLinear"),
    ("call of a subclass", lambda: nn.Sequential(_Called(D, D)), "0", "__call__"),
    ("forward inside", _replaced_inside, "attention", "forward that was replaced"),
    ("in place", lambda: hs.nn.Residual(nn.ReLU(inplace=True)), "inner", "with inplace=False"),
    ("compiled", lambda: torch.compile(nn.Linear(D, D)), "", "from which torch.compile made it"),
    ("data parallel", lambda: nn.Sequential(nn.DataParallel(nn.Linear(D, D))), "0", "Certify its .module"),
    ("eps", lambda: nn.Sequential(nn.LayerNorm(D, eps=0.0)), "0", "eps = 0"),
    ("two axes", lambda: nn.LayerNorm((N, D)), "", "2 axes"),
    ("softmax of tokens", lambda: nn.Softmax(dim=1), "", "axis 1"),
    ("flatten", lambda: nn.Sequential(nn.Flatten(0)), "0", "other axes"),
    ("hardtanh", lambda: nn.Hardtanh(1.0, 2.0), "", "settings for which no constant"),
    ("softplus, which jumps", nn.Softplus, "", "without a rule"),
    ("length", lambda: nn.Sequential(hs.nn.AddPositions(N + 1, D)), "0", "expected 5"),
    ("attention length", lambda: nn.Sequential(_undivided(7)), "0", "7 tokens"),
    ("attention radius", lambda: nn.Sequential(nn.Identity(), _undivided(radius=0.1)), "1", "0.1"),
    ("a pair", lambda: nn.Sequential(hs.nn.SoftmaxAttention(D, 2, length=N)), "0", "SelfAttentionBlock"),
    ("residual over a pool", lambda: hs.nn.Residual(hs.nn.MeanPool()), "", "adds 4 tokens to the 1"),
    (
        "torch's attention",
        lambda: nn.Sequential(nn.MultiheadAttention(D, 2)),
        "0",
        "SoftmaxAttention.from_torch",
    ),
    ("convolution", lambda: nn.Conv2d(1, 1, 2, stride=2), "", "hs.nn.Patches"),
    ("none", lambda: nn.Sequential(nn.ReLU(), None), "1", "torch.nn.Identity()"),
    ("hypothesis", lambda: nn.Sequential(_Lower()), "0", "the moon is full"),
]


@pytest.mark.parametrize(
    ("make", "path", "words"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_refusals_name_the_module(make: Callable[[], nn.Module], path: str, words: str) -> None:
    with pytest.raises(CertificateError) as caught:
        certify(make(), N, 1.0)
    assert caught.value.path == path
    assert words in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path, again.kind) == (str(caught.value), path, caught.value.kind)


def test_weights_that_are_not_finite_are_named() -> None:
    model = nn.Sequential(nn.Identity(), hs.nn.Residual(nn.Linear(D, D)))
    with torch.no_grad():
        model[1].inner.bias[2] = math.nan
    with pytest.raises(NonFiniteError) as caught:
        certify(model, N, 1.0)
    assert caught.value.argument == "1.inner.bias"


@pytest.mark.parametrize(
    ("length", "radius", "argument"), [(0, 1.0, "length"), (4, -1.0, "radius"), (4, math.nan, "radius")]
)
def test_lengths_and_radii_are_checked(length: int, radius: float, argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        certify(nn.Identity(), length, radius)
    assert caught.value.argument == argument


def test_dropout_is_refused_wherever_it_is() -> None:
    """Within a layer that says nothing of it, in attention, and where a residual is asked by itself."""
    dropping = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True).eval()
    dropping.self_attn.train()
    with pytest.raises(CertificateError, match=r"model\.eval\(\)"):
        certify(dropping, N, 1.0)
    with pytest.raises(CertificateError) as caught:
        hs.nn.Residual(nn.Dropout(0.1)).lipschitz_bound(N, 1.0)
    assert caught.value.path == "inner"

    class Dropping(_Lower):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.1)

        def lipschitz_bound(self, length: int, radius: float) -> Bound:
            return Bound.upper("one", Quantity.GLOBAL, "here", formula=1.0)

    model = nn.Sequential(Dropping())
    with pytest.raises(CertificateError) as caught:
        certify(model, N, 1.0)
    assert caught.value.path == "0.dropout"
    assert certify(model.eval(), N, 1.0).constant == pytest.approx(1.0)


# ---- certified radii


def _certificate(constant: float) -> ModelCertificate:
    return ModelCertificate(constant, 1, 1.0, 1, 1.0, ())


def test_certified_radii_are_margins_over_root_two_constants() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 2.0], [5.0, 1.0, 4.0]])
    certificate = _certificate(2.0)
    root = math.sqrt(2) * 2
    torch.testing.assert_close(
        certificate.certified_radius(logits), torch.tensor([2 / root, 0, 1 / root], dtype=torch.float64)
    )
    labels = torch.tensor([0, 1, 2])
    torch.testing.assert_close(
        certificate.certified_radius(logits, labels), torch.tensor([2 / root, 0, 0], dtype=torch.float64)
    )


def test_no_move_within_the_certified_radius_changes_the_class_of_a_linear_model() -> None:
    """The nearest input of another class is known: the margin over |w_a − w_b|."""
    torch.manual_seed(0)
    model = nn.Linear(D, 3, dtype=torch.float64).eval()
    x = torch.randn(50, 1, D, dtype=torch.float64)
    logits = model(x)[:, 0].detach()
    certified = certify(model, 1, 10.0).certified_radius(logits)
    top = logits.argmax(dim=1)
    w = model.weight.detach()
    apart = torch.linalg.vector_norm(w[top][:, None] - w[None], dim=-1)
    nearest = ((logits.gather(1, top[:, None]) - logits) / apart).nan_to_num(math.inf).amin(dim=1)
    assert bool((certified <= nearest * (1 + 1e-12)).all())
    assert float((nearest / certified).min()) < 1.3


def test_no_attack_succeeds_within_the_certified_radius() -> None:
    """Gradient descent on the margin from a 1-Lipschitz Transformer, at twenty times the radius and at it."""
    model = _seeded(_one_lipschitz)
    certificate = certify(model, N, 1.0)
    torch.manual_seed(1)
    x = torch.randn(30, N, D, dtype=torch.float64)
    x = 0.5 * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    logits = model(x)
    labels = logits.argmax(dim=1)
    radii = certificate.certified_radius(logits)
    for times, succeeds in ((1.0, False), (20.0, True)):
        moved = torch.zeros_like(x).requires_grad_()
        reach = (times * radii)[:, None, None]
        for _ in range(30):
            given = model(x + moved)
            own = given.gather(1, labels[:, None])[:, 0]
            other = given.scatter(1, labels[:, None], -math.inf).amax(dim=1)
            (gradient,) = torch.autograd.grad((own - other).sum(), moved)
            size = torch.linalg.vector_norm(gradient.flatten(1), dim=1)[:, None, None].clamp(min=1e-30)
            with torch.no_grad():
                moved -= 0.2 * reach * gradient / size
                length = torch.linalg.vector_norm(moved.flatten(1), dim=1)[:, None, None]
                moved *= (reach / length.clamp(min=1e-30)).clamp(max=1.0)
        changed = model(x + moved).argmax(dim=1) != labels
        assert bool(changed.any()) is succeeds


@pytest.mark.parametrize(
    ("logits", "labels", "argument"),
    [
        (torch.ones(3, 1), None, "logits"),
        (torch.full((3, 2), math.nan), None, "logits"),
        (torch.ones(3, 2), torch.tensor([0, 1]), "labels"),
        (torch.ones(3, 2), torch.tensor([0, 1, 2]), "labels"),
        (torch.ones(3, 2), torch.tensor([0.0, 1.0, 0.7]), "labels"),
    ],
)
def test_logits_and_labels_are_checked(logits: Tensor, labels: Tensor | None, argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        _certificate(1.0).certified_radius(logits, labels)
    assert caught.value.argument == argument


# ---- the package


def test_token_ids_are_refused_with_what_to_certify_instead() -> None:
    with pytest.raises(ArgumentError, match="behind its embedding"):
        hs.nn.certify(nn.Linear(4, 4), 3, 1.0, inputs=torch.ones(1, 3, dtype=torch.long))
