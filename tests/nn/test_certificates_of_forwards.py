"""certify with inputs: models with a forward of their own, held against parts and against ascents."""

from __future__ import annotations

import math
import random
import sys
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
from examples.digits.models import PlainViT, certifiable
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import howsmooth as hs
from howsmooth.errors import ArgumentError, CertificateError
from howsmooth.nn import certify
from howsmooth.nn.certificates import forward_propagation
from tests._steepest import dense_norm, steepest

D = 6


class Block(nn.Module):
    """A block with PyTorch's attention and an MLP of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(D, eps=1.0), nn.RMSNorm(D, eps=1.0)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.up, self.down = nn.Linear(D, 8), nn.Linear(8, D)

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm_1(x)
        x = x + self.attention(u, u, u, need_weights=False)[0]
        hidden = nn.functional.gelu(self.up(self.norm_2(x)), approximate="tanh")
        return x + nn.functional.dropout(self.down(hidden), 0.5, self.training)


class ViT(nn.Module):
    """A plain model: patches by a convolution, a class token, positions, and the class token's logits."""

    def __init__(self, side: int = 4, last: str = "token") -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, D, 2, stride=2)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, D))
        self.positions = nn.Parameter(0.1 * torch.randn(1, (side // 2) ** 2 + 1, D))
        self.blocks = nn.ModuleList([Block()])
        self.head = parametrizations.orthogonal(nn.Linear(D, 3))
        self.last = last

    def forward(self, images: Tensor, scale: float = 2.0) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = scale * x
        for block in self.blocks:
            x = block(x)
        if self.last == "token":
            return self.head(x[:, 0])
        return self.head(x.mean(dim=1)) if self.last == "mean" else self.head(x)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model in float64 and in evaluation mode."""
    torch.manual_seed(0)
    return make().double().eval()


class OfPatches(nn.Module):
    """A model as a function of patches (batch, n, size²), from which images are put together."""

    def __init__(self, model: nn.Module, side: int, size: int) -> None:
        super().__init__()
        self.model, self.side, self.size = model, side, size

    def forward(self, tokens: Tensor) -> Tensor:
        images = nn.functional.fold(tokens.mT, self.side, self.size, stride=self.size)
        y: Tensor = self.model(images)
        return y


def test_a_forward_is_certified_as_its_parts_are() -> None:
    model = seeded(PlainViT)
    with torch.no_grad():  # larger weights, so that no factor of the constant is hidden by another
        model.blocks[0].mlp[0].weight.mul_(3)
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    wanted = certify(certifiable(model, 16).double(), 16, 2.0)
    found = certify(model, 16, 2.0, inputs=images)
    assert found.constant == pytest.approx(wanted.constant, rel=1e-9)
    assert found.output_radius == pytest.approx(wanted.output_radius, rel=1e-9)
    assert [row.path for row in found.rows if row.kind == "MultiheadAttention"] == [
        "blocks.0.attention",
        "blocks.1.attention",
    ]


def test_the_rows_of_a_forward_multiply_and_branches_stand_inside_their_sum() -> None:
    model = seeded(lambda: ViT(last="mean"))
    found = certify(model, 4, 2.0, inputs=torch.rand(1, 1, 4, 4, dtype=torch.float64))
    assert [(row.path, row.level) for row in found.rows] == [
        ("patches", 0),
        ("cat", 0),
        ("add", 0),
        ("mul", 0),
        ("blocks.0.norm_1", 1),
        ("blocks.0.attention", 1),
        ("add_1", 0),
        ("blocks.0.norm_2", 1),
        ("blocks.0.up", 1),
        ("gelu", 1),
        ("blocks.0.down", 1),
        ("add_2", 0),
        ("mean", 0),
        ("head", 0),
    ]
    constants = {row.path: row.constant for row in found.rows}
    assert constants["mean"] == pytest.approx(5**-0.5)
    assert constants["add_1"] == pytest.approx(
        1 + constants["blocks.0.norm_1"] * constants["blocks.0.attention"]
    )

    def nested(f: nn.Module, x: Tensor) -> Tensor:
        f(x)  # is not used
        y, z = f(x), 2.0 * x
        return (y + 3.0 * f(y) + z) / 4.0

    found = certify(own(nested), 4, 1.0, inputs=torch.randn(2, 4, D, dtype=torch.float64))
    levels = {"mul": 1, "mul_1": 2, "add": 1, "add_1": 0, "div": 0}
    assert [row.level for row in found.rows if row.path == "linear"] == [1, 2]
    assert {row.path: row.level for row in found.rows if row.path != "linear"} == levels


# The class token sees the image through the attention alone, which a product of bounds does not know.
@pytest.mark.parametrize(("last", "factor"), [("token", 100), ("mean", 18), ("all", 16)])
def test_no_image_is_steeper_than_the_certificate(last: str, factor: float) -> None:
    model = seeded(lambda: ViT(last=last))
    certificate = certify(model, 4, 2.0, inputs=torch.rand(1, 1, 4, 4, dtype=torch.float64))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = steepest(OfPatches(model, 4, 2), 4, 2.0, 4, starts=3, steps=10)
    assert found <= certificate.constant <= factor * found
    images = OfPatches(nn.Identity(), 4, 2)(2 * nn.functional.normalize(torch.randn(500, 4, 4), dim=-1))
    longest = torch.linalg.vector_norm(model(images.double()), dim=-1).max()
    assert float(longest) <= certificate.output_radius


CASES: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], float]] = {
    "a residual": (lambda f, x: x + f(x), 1.0),
    "a difference": (lambda f, x: f(x) - x, 1.0),
    "a sum thrice": (lambda f, x: x + f(x) + x, 1.0),
    "a constant": (lambda f, x: f(x) + torch.arange(4.0).double()[:, None], 1.0),
    "a factor": (lambda f, x: f(x) * 2.5, 1.0),
    "a factor for each number": (lambda f, x: f(x) * torch.arange(float(D)).double(), 1.0),
    "a quotient": (lambda f, x: f(x) / 0.3, 1.0),
    "two copies": (lambda f, x: torch.cat([f(x), x], dim=1), 1.0),
    "a mean": (lambda f, x: f(x).mean(1), 1.0),
    "a token": (lambda f, x: f(x)[:, -1], 1.0),
    "some tokens": (lambda f, x: f(x)[:, 1:3], 1.0),
    "flattened": (lambda f, x: f(x).flatten(1), 1.0),
    "to and fro": (lambda f, x: f(x).permute(0, 2, 1).contiguous().transpose(-1, 1), 1.0),
    "transposed at last": (lambda f, x: f(x).transpose(1, 2), 1.0),
    "relu": (lambda f, x: nn.functional.relu(f(x)), 1.0),
    "sigmoid": (lambda f, x: torch.sigmoid(f(x)), 1.0),
}


class Own(nn.Module):
    """A module with a linear map and a given forward."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(D, D), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.linear, x)


def own(forward: Callable[[nn.Module, Tensor], Tensor], sign: float = 1.0) -> nn.Module:
    """Return such a module whose linear map is symmetric, with largest eigenvalue 1.5 in modulus."""
    model = seeded(lambda: Own(forward))
    basis = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64)).Q
    with torch.no_grad():
        model.linear.weight.copy_(sign * basis @ torch.linspace(0.1, 1.5, D).double().diag() @ basis.mT)
    return model


@pytest.mark.parametrize("name", CASES)
def test_operations_against_the_steepest_point(name: str) -> None:
    model = own(CASES[name][0], -1.0 if name == "a difference" else 1.0)
    x = torch.randn(2, 4, D, dtype=torch.float64)
    certificate = certify(model, 4, 3.0, inputs=x)
    found = steepest(model, 4, 3.0, D, starts=4, steps=5)
    loose = 1.9 if name in ("a factor for each number", "sigmoid") else 1 + 1e-9
    assert found <= certificate.constant <= found * loose
    factors = [row.constant for row in certificate.rows if row.level == 0]
    assert math.prod(factors) == pytest.approx(certificate.constant, rel=1e-9)
    points = 3 * nn.functional.normalize(torch.randn(500, 4, D, dtype=torch.float64), dim=-1)
    y = model(points)
    assert float(torch.linalg.vector_norm(y, dim=-1).max()) <= certificate.output_radius
    assert certificate.output_length == (y.shape[1] if y.ndim == 3 else 1)


@pytest.mark.parametrize(
    ("rule", "name"), [("_sum", "a residual"), ("_product", "a factor"), ("_cat", "two copies")]
)
def test_a_wrong_rule_is_caught(rule: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(forward_propagation, rule)

    def wrong(value: Tensor, *arguments: object, **keywords: object) -> object:
        found = right(value, *arguments, **keywords)
        states = arguments[0] if isinstance(arguments[0], list) else arguments
        (first, *_) = [one for one in states if isinstance(one, forward_propagation._State)]
        return forward_propagation.replace(found, constant=first.constant)

    table = {key: wrong if value is right else value for key, value in forward_propagation._RULES.items()}
    monkeypatch.setattr(forward_propagation, "_RULES", table)
    with pytest.raises(AssertionError):
        test_operations_against_the_steepest_point(name)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda f, x: x * f(x), "mul.*multiplies two tensors"),
        (lambda f, x: 1 / (1 + f(x)), "div.*divides by"),
        (lambda f, x: torch.softmax(f(x), dim=-1), "softmax.*without a rule"),
        (lambda f, x: x.add_(f(x)), "add_.*without a rule"),
        (lambda f, x: nn.functional.relu(f(x), inplace=True), "inplace"),
        (lambda f, x: x + f(x)[:, :1], "whose tokens do not correspond"),
        (lambda f, x: f(x)[:, :1] + torch.ones(4, 1).double(), "larger"),
        (lambda f, x: x.mean(0), "another mean"),
        (lambda f, x: f(x)[0], "takes something else"),
        (lambda f, x: x.transpose(0, 1), "axis of the batch"),
        (lambda f, x: f(x.transpose(1, 2)[:, :, [0, 1, 2, 3, 0, 1]]), "takes something else"),
        (lambda f, x: x.flatten(0, 1), "joins other axes"),
        (lambda f, x: f(x) if x.sum() > 0 else x, "sum.*without a rule"),
        (lambda f, x: torch.add(x, f(x), alpha=2), "arguments for which there is no rule"),
        (lambda f, x: (x, f(x)), "not one tensor"),
        (lambda f, x: f(x) + torch.randn(D).double(), "random"),
        (lambda f, x: f(x) * random.random(), "computes something else"),
        (lambda f, x: torch.cat([f(x), torch.full((2, 1, D), torch.nan).double()], dim=1), "not finite"),
        (lambda f, x: f(x) * torch.tensor(torch.nan), "NaN"),
    ],
)
def test_operations_without_a_rule_are_named(forward, words) -> None:
    with pytest.raises(CertificateError, match=words):
        certify(own(forward), 4, 1.0, inputs=torch.randn(2, 4, D, dtype=torch.float64))


def _despite(f: nn.Module, x: Tensor) -> Tensor:
    try:
        return 5 * f(x) if bool(x) else x
    except Exception:
        return x


_OUTSIDE = nn.Linear(D, D).double()


@torch.jit.script
def _compiled(x: Tensor) -> Tensor:
    return x * x


@pytest.mark.parametrize(
    "read",
    [
        _despite,
        lambda f, x: x * float(x[0, 0, 0]),
        lambda f, x: x * x.detach(),
        lambda f, x: x * x.data,
        lambda f, x: x * x.as_subclass(Tensor),
        lambda f, x: x * torch.from_numpy(np.asarray(x)),
        lambda f, x: _compiled(x),
        lambda f, x: torch.func.vmap(lambda t: t * t)(x),
        lambda f, x: torch.ops.aten.mul(x, x),
        lambda f, x: f(torch.empty_like(x).copy_(x)),
        lambda f, x: torch.zeros(4, D).double().index_put_((torch.tensor(0),), x[:, 0]) + x,
        lambda f, x: torch.add(x, 1.0, out=torch.empty(2, 4, D).double()),
        lambda f, x: _OUTSIDE(x),
        lambda f, x: nn.functional.linear(x, f.weight),
    ],
)
def test_values_reach_the_output_by_no_other_way(read) -> None:
    with pytest.raises(
        CertificateError, match=r"without a rule|no rule|something else than tokens|no part of"
    ):
        certify(own(read), 4, 1.0, inputs=torch.randn(2, 4, D, dtype=torch.float64))


def test_values_that_a_layer_keeps_are_no_constants() -> None:
    class Keeping(hs.nn.SpectralLinear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

        def lipschitz_bound(self, length: int, radius: float) -> hs.Bound:
            return super().lipschitz_bound(length, radius)

    model = own(lambda f, x: f(x) * f.last)
    model.linear = Keeping(D, D).double().eval()
    with pytest.raises(CertificateError, match="computes something else"):
        certify(model, 4, 1.0, inputs=torch.randn(2, 4, D, dtype=torch.float64))


def test_a_forward_may_read_shapes() -> None:
    def forward(f: nn.Module, x: Tensor) -> Tensor:
        batch, n, _ = x.shape
        first, *_ = (f(x[:, i : i + 1]) for i in range(n) if batch > 1)
        return torch.cat([first, x], dim=1) if len(x) == x.size(0) and isinstance(x, Tensor) else first

    x = torch.randn(2, 4, D, dtype=torch.float64)
    assert certify(own(forward), 4, 1.0, inputs=x).constant == pytest.approx(math.hypot(1, 1.5))


def test_patches_by_a_convolution() -> None:
    images = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    conv = seeded(lambda: nn.Conv2d(1, 5, 2, stride=2))
    certificate = certify(nn.Sequential(conv), 4, 1.0, inputs=images)
    assert certificate.constant == pytest.approx(dense_norm(conv, images[0]), rel=1e-9)
    for wrong in (
        nn.Conv2d(1, 5, 3, stride=1),
        nn.Conv2d(1, 5, 2, stride=2, padding=1),
        nn.Conv2d(1, 5, 2, stride=2, dilation=2),
        nn.ConvTranspose2d(1, 5, 2, stride=2),
    ):
        with pytest.raises(CertificateError):
            certify(nn.Sequential(wrong.double()), 4, 1.0, inputs=images)
    twice = Own(lambda f, x: x)
    twice.one, twice.other = conv, seeded(lambda: nn.Conv2d(1, 5, (1, 4), stride=(1, 4)))
    twice.call = lambda f, x: twice.one(x).flatten(2) + twice.other(x).flatten(2)
    with pytest.raises(CertificateError, match="second time"):
        certify(twice.double(), 4, 1.0, inputs=images)
    with pytest.raises(ArgumentError, match="9 patches"):
        certify(nn.Sequential(conv), 9, 1.0, inputs=images)
    with pytest.raises(CertificateError, match="inputs="):
        certify(conv, 4, 1.0)
    with pytest.raises(ArgumentError, match="inputs"):
        certify(nn.Sequential(conv), 4, 1.0, inputs=torch.randn(2, 3, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["SpectralLinear", "FrobeniusLinear"])
def test_linear_maps_of_torchlip(kind: str) -> None:
    torchlip = pytest.importorskip("deel.torchlip")
    torch.manual_seed(0)
    layer = getattr(torchlip, kind)(D, 4, k_coef_lip=1.5)
    layer(torch.randn(2, D))
    layer.eval()
    true = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
    assert certify(layer, 1, 1.0).constant == pytest.approx(true, rel=1e-9)
    # What the layer states about itself is not believed: here it is another.
    with torch.no_grad():
        for chain in layer.parametrizations.values():
            for step in chain:
                for name in ("_w_bjorck", "_coef"):
                    if hasattr(step, name):
                        setattr(step, name, 3 * getattr(step, name))
    true = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
    assert certify(layer, 1, 1.0).constant == pytest.approx(true, rel=1e-9)
    assert true > 2


@pytest.mark.parametrize("name", ["GroupSort2", "FullSort", "GroupSort"])
def test_sorting_of_torchlip(name: str) -> None:
    torchlip = pytest.importorskip("deel.torchlip")
    sort = getattr(torchlip, name)(*([3] if name == "GroupSort" else []), k_coef_lip=1.5)
    assert certify(sort, 1, 2.0).constant == pytest.approx(1.5, rel=1e-9)
    x = 2 * nn.functional.normalize(torch.randn(500, 6), dim=-1).double()
    assert dense_norm(sort, x[0]) == pytest.approx(1.5)
    # On tokens it sorts along the axis of the tokens, which may give one of them all large numbers.
    tokens = x.view(100, 5, 6)[:, :3].repeat_interleave(2, dim=1)
    longest = float(torch.linalg.vector_norm(sort(tokens), dim=-1).max())
    assert longest <= certify(sort, 6, 2.0).output_radius
    if name == "FullSort":
        assert longest > 3.01  # 1.5 times the radius would be false


# ---- layers of deel-torchlip and of PyTorch's parametrizations


def test_a_stand_in_for_torchlip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are known by their module and name, without an import of the package."""
    name = "deel.torchlip.modules.activation"

    class GroupSort(nn.Module):
        _coefficient_lip = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    GroupSort.__module__ = name
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert certify(GroupSort(), 1, 1.0).constant == pytest.approx(2.0)
    GroupSort.__module__ = "elsewhere"
    with pytest.raises(CertificateError, match="GroupSort"):
        certify(GroupSort(), 1, 1.0)


def test_arguments_that_are_none_are_none() -> None:
    """A model that takes a padding mask has the certificate of the model without it, if none is given."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = hs.nn.SoftmaxAttention(D, 2, length=4, radius=2.0, mask="any")

        def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
            return self.attention(x, x, x, key_padding_mask=padding, attn_mask=None)[0]

    class Unmasked(Masked):
        def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
            return self.attention(x, x, x)[0]

    model, other, x = Masked(), Unmasked(), 0.1 * torch.randn(1, 4, D)
    other.load_state_dict(model.state_dict())
    found, expected = (certify(one, 4, 2.0, inputs=x) for one in (model, other))
    assert found.constant == expected.constant

    class Padded(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(1, 4, dtype=torch.bool))

        def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
            return super().forward(x, self.mask)

    with pytest.raises(CertificateError, match="is called with key_padding_mask"):
        certify(Padded(), 4, 2.0, inputs=x)


@pytest.mark.parametrize("stretch", [1.0, 4.0])
def test_parametrizations_are_computed_not_believed(stretch: float) -> None:
    torch.manual_seed(0)
    orthogonal = parametrizations.orthogonal(nn.Linear(D, 4), orthogonal_map="cayley").eval()
    spectral = parametrizations.spectral_norm(nn.Linear(D, 4)).eval()
    with torch.no_grad():  # the weights change, the estimate of the norm does not
        spectral.parametrizations.weight.original.mul_(stretch)
    for layer in (orthogonal, spectral):
        true = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
        assert certify(layer, 1, 1.0).constant == pytest.approx(true, rel=1e-9)
        assert certify(layer, 1, 1.0).constant >= true
        found = certify(nn.Sequential(layer), 1, 1.0, inputs=torch.randn(2, D)).constant
        assert found == pytest.approx(true, rel=1e-9)
