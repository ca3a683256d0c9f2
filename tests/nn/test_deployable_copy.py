"""hs.nn.deploy: the copy computes what the model computes, with plain weights and without checks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import howsmooth as hs
from howsmooth.errors import ArgumentError
from tests._nn_layers import ATTENTION, LAYERS, LENGTH, RADIUS, inputs, tokens_of

N, D = 16, 12


def vit(beyond: str = "clip") -> nn.Sequential:
    """Return a small Vision Transformer for images of 8 × 8 pixels in [0, 1], of constant at most 1."""

    def block() -> nn.Sequential:
        attention = hs.nn.SoftmaxAttention(D, 2, length=N, radius=4.0, constant=1.0, beyond=beyond)
        mlp = nn.Sequential(hs.nn.OrthogonalLinear(D, 16), hs.nn.MaxMin(), hs.nn.SpectralLinear(16, D))
        return nn.Sequential(
            hs.nn.AverageResidual(hs.nn.SelfAttentionBlock(attention), learnable=True),
            hs.nn.AverageResidual(mlp),
        )

    torch.manual_seed(0)
    return nn.Sequential(
        hs.nn.Patches(2),
        parametrizations.orthogonal(nn.Linear(4, D)),
        hs.nn.AddPositions(N, D),
        block(),
        block(),
        hs.nn.LipschitzLayerNorm(D, floor=2.0),
        hs.nn.MeanPool(),
        hs.nn.OrthogonalLinear(D, 10),
    ).eval()


@pytest.mark.parametrize("beyond", ["clip", "refuse"])
def test_a_vision_transformer(beyond: str) -> None:
    model, images = vit(beyond), torch.rand(5, 1, 8, 8)
    if beyond == "clip":
        images[0] *= 100
    before = copy.deepcopy(model.state_dict())
    plain = hs.nn.deploy(model)
    assert not plain.training
    torch.testing.assert_close(plain(images), model(images), rtol=1e-6, atol=1e-6)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(parametrize.is_parametrized(one) for one in plain.modules())
    kinds = {type(one) for one in plain.modules()}
    assert kinds.isdisjoint({hs.nn.OrthogonalLinear, hs.nn.SpectralLinear, hs.nn.LipschitzLayerNorm})
    assert all(one.constant is None for one in plain.modules() if isinstance(one, hs.nn.LipschitzAttention))
    graph = torch.export.export(plain, (images,))
    assert "_assert_async" not in graph.graph_module.code
    torch.testing.assert_close(graph.module()(images), model(images), rtol=1e-6, atol=1e-6)
    for exact in (model, plain):
        exact.double()
    constant = hs.nn.certify(model, N, 2.0).constant
    assert hs.nn.certify(plain, N, 2.0).constant == pytest.approx(constant, rel=1e-5)


def test_nothing_checks_the_radius_but_clip_tokens_does() -> None:
    model = vit("refuse")
    plain, far = hs.nn.deploy(model), 100 * torch.rand(2, 1, 8, 8)
    with pytest.raises(ArgumentError, match="radius"):
        model(far)
    plain(far)
    everywhere = nn.Sequential(plain[0], hs.nn.ClipTokens(2.0), *plain[1:])
    inside = hs.nn.ClipTokens(2.0)(model[0](far))
    torch.testing.assert_close(everywhere(far), model[1:](inside), rtol=1e-6, atol=1e-6)
    assert hs.nn.certify(everywhere, N, float("inf")).constant < 1 + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = LAYERS[name].build()
    with torch.no_grad():  # gains above and below one, biases that are not zero
        for weight in layer.parameters():
            weight.add_(0.5 * torch.randn_like(weight))
    layer = layer.eval().to(dtype)
    x = inputs(LAYERS[name], dtype=dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    plain = hs.nn.deploy(layer)
    torch.testing.assert_close(tokens_of(plain(x)), tokens_of(layer(x)), rtol=tolerance, atol=tolerance)
    assert next(plain.parameters(), x).dtype == dtype
    if name in ATTENTION:
        assert isinstance(layer, hs.nn.LipschitzAttention)
        bounds = [one.lipschitz_bound(LENGTH, RADIUS).value for one in (layer, plain)]
        assert bounds[1] == pytest.approx(bounds[0], rel=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_saved_weights_loaded_into_the_class_that_made_them_give_the_same_layer(name, tmp_path) -> None:
    torch.manual_seed(1)
    layer, x = LAYERS[name].build(), inputs(LAYERS[name])
    if weights := list(layer.parameters()):  # estimates of norms and bases of orthogonal maps move, too
        tokens_of(layer(x)).square().sum().backward()
        torch.optim.SGD(weights, lr=0.05).step()
    layer.eval()
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    again = LAYERS[name].build().eval()
    again.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(tokens_of(again(x)), tokens_of(layer(x)))
    bounds = [one.lipschitz_bound(LENGTH, RADIUS).value for one in (layer, again)]
    assert bounds[0] == bounds[1]


def test_masks_stay() -> None:
    x = inputs(LAYERS["SoftmaxAttention"])
    padding = torch.tensor([[False] * 4, [False, False, False, True]])
    for mask in ("causal", "any"):
        layer = LAYERS["SoftmaxAttention"].build(mask=mask).eval()
        given = padding if mask == "any" else None
        outputs = [tokens_of(one(x, key_padding_mask=given)) for one in (layer, hs.nn.deploy(layer))]
        torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)


def test_one_graph_for_all_lengths() -> None:
    layer = LAYERS["SoftmaxAttention"].build(mask="causal", shorter=True).eval()
    lengths = ({1: torch.export.Dim("n", min=2, max=LENGTH)},)
    for one in (hs.nn.SelfAttentionBlock(layer), hs.nn.deploy(hs.nn.SelfAttentionBlock(layer))):
        x = inputs(LAYERS["SoftmaxAttention"])
        graph = torch.export.export(one, (x[:, : LENGTH - 1].contiguous(),), dynamic_shapes=lengths).module()
        for n in range(2, LENGTH + 1):
            assert torch.equal(graph(x[:, :n].contiguous()), one(x[:, :n]))


def test_a_module_at_two_places_stays_one() -> None:
    linear, norm = hs.nn.OrthogonalLinear(D, D), hs.nn.LipschitzRMSNorm(D)
    model: nn.Module = nn.Sequential(linear, norm, linear, nn.Sequential(norm, linear)).eval()
    plain, x = hs.nn.deploy(model), torch.rand(3, D)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-6, atol=1e-6)
    assert plain.get_submodule("0") is plain.get_submodule("2") is plain.get_submodule("3.1")
    assert plain.get_submodule("1") is plain.get_submodule("3.0")
    attention = hs.nn.SoftmaxAttention(D, 2, length=N, radius=1.0, constant=1.0)
    model = nn.Sequential(hs.nn.SelfAttentionBlock(attention), hs.nn.SelfAttentionBlock(attention)).eval()
    x = torch.rand(1, N, D) / D
    torch.testing.assert_close(hs.nn.deploy(model)(x), model(x), rtol=1e-6, atol=1e-6)


def test_what_is_refused() -> None:
    for model, words in (
        (LAYERS["SoftmaxAttention"].build(beyond="clip"), "SelfAttentionBlock"),
        (nn.Linear(2, 2, dtype=torch.bfloat16), "float32 or float64"),
        (Tensor([1.0]), r"torch\.nn\.Module"),
    ):
        with pytest.raises(ArgumentError, match=words):
            hs.nn.deploy(model)


def test_layers_that_share_weights_are_refused() -> None:
    # The divisor of each would be folded into the one matrix of both.
    blocks = [
        hs.nn.SelfAttentionBlock(hs.nn.SoftmaxAttention(4, 2, length=3, radius=1.0, constant=c))
        for c in (1.0, 8.0)
    ]
    hs.nn.deploy(nn.Sequential(*blocks, blocks[0]))  # the same layer twice has one divisor
    linear = nn.Linear(4, 4)
    linear.weight = blocks[1].attention.out_proj.weight
    blocks[0].attention.out_proj = blocks[1].attention.out_proj
    for model in (nn.Sequential(*blocks), nn.Sequential(linear, blocks[1])):
        with pytest.raises(ArgumentError, match=r"shares weights with .* Use the same layer in both places"):
            hs.nn.deploy(model)


def test_what_the_copy_would_leave_out_is_refused() -> None:
    class Turned(hs.nn.OrthogonalLinear):
        def forward(self, x: Tensor) -> Tensor:
            return 5 * super().forward(x)

    hooked = hs.nn.OrthogonalLinear(4, 4)
    hooked.register_forward_hook(lambda module, x, y: 2 * y)
    for layer in (Turned(4, 4), hooked):
        with pytest.raises(
            ArgumentError, match=r"model: .* got 0 \(\w+\), which has .*Deploy the model without it"
        ):
            hs.nn.deploy(nn.Sequential(layer))
