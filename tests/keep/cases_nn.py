"""Layers with a proved constant: outputs, bounds, certificates; penalties and the monitor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs
from tests.keep.cases_models import TYPES, filled, token_ids
from tests.keep.numbers import Close, Interval, Number, case, digest_of, numbers

LENGTH, DIM, RADIUS = 4, 6, 1.5


def _attention(name: str, **own: Any) -> nn.Module:
    return getattr(hs.nn, name)(DIM, 2, **{"length": LENGTH, "radius": RADIUS, "constant": 1.0, **own})  # type: ignore[no-any-return]


def _classifier() -> nn.Module:
    return nn.Sequential(
        hs.nn.Patches(2),
        hs.nn.OrthogonalLinear(12, DIM, orthogonal_map="cayley"),
        hs.nn.ClipTokens(RADIUS),
        hs.nn.AverageResidual(hs.nn.SelfAttentionBlock(_attention("SoftmaxAttention")), 0.25),
        hs.nn.LipschitzLayerNorm(DIM),
        hs.nn.MaxMin(),
        hs.nn.MeanPool(),
        hs.nn.SpectralLinear(DIM, 3),
    )


_TOKENS, _IMAGES = (LENGTH, DIM), (3, 4, 4)

# name -> a layer or a model of layers, and the shape of its input
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "SoftmaxAttention": (lambda: _attention("SoftmaxAttention"), _TOKENS),
    "SoftmaxAttention, causal": (lambda: _attention("SoftmaxAttention", mask="causal"), _TOKENS),
    "SoftmaxAttention, own constant": (lambda: _attention("SoftmaxAttention", constant=None), _TOKENS),
    "QueryKeyNormAttention": (lambda: _attention("QueryKeyNormAttention"), _TOKENS),
    "L2Attention": (lambda: _attention("L2Attention"), _TOKENS),
    "L2Attention, own constant": (lambda: _attention("L2Attention", constant=None), _TOKENS),
    "CosineAttention": (lambda: _attention("CosineAttention", temperature=1.5, gain=0.5, eps=0.25), _TOKENS),
    "CosineAttention, own constant": (lambda: _attention("CosineAttention", constant=None), _TOKENS),
    "SinkhornAttention": (lambda: _attention("SinkhornAttention", tolerance=1e-12), _TOKENS),
    "SinkhornAttention, own constant": (lambda: _attention("SinkhornAttention", constant=None), _TOKENS),
    "LipschitzNormAttention": (lambda: _attention("LipschitzNormAttention"), _TOKENS),
    "LipschitzNormAttention, own constant": (
        lambda: _attention("LipschitzNormAttention", constant=None),
        _TOKENS,
    ),
    "SigmoidAttention": (lambda: _attention("SigmoidAttention", shift=-1.0), _TOKENS),
    "SigmoidAttention, own constant": (lambda: _attention("SigmoidAttention", constant=None), _TOKENS),
    "OrthogonalLinear": (lambda: hs.nn.OrthogonalLinear(DIM, 4, orthogonal_map="cayley"), _TOKENS),
    "SpectralLinear": (lambda: hs.nn.SpectralLinear(DIM, 8, bias=False, iterations=2), _TOKENS),
    "CenterNorm": (lambda: hs.nn.CenterNorm(DIM, scaled=True), _TOKENS),
    "LipschitzLayerNorm": (lambda: hs.nn.LipschitzLayerNorm(DIM, floor=0.5), _TOKENS),
    "LipschitzRMSNorm": (lambda: hs.nn.LipschitzRMSNorm(DIM), _TOKENS),
    "GroupSort": (lambda: hs.nn.GroupSort(3), _TOKENS),
    "MaxMin": (lambda: hs.nn.MaxMin(), _TOKENS),
    "Patches": (lambda: hs.nn.Patches(2), _IMAGES),
    "AddPositions": (lambda: hs.nn.AddPositions(LENGTH, DIM), _TOKENS),
    "PrependToken": (lambda: hs.nn.PrependToken(DIM), _TOKENS),
    "TakeToken": (lambda: hs.nn.TakeToken(-1), _TOKENS),
    "MeanPool": (lambda: hs.nn.MeanPool(), _TOKENS),
    "ClipTokens": (lambda: hs.nn.ClipTokens(1.25), _TOKENS),
    "Residual": (lambda: hs.nn.Residual(hs.nn.SpectralLinear(DIM, DIM)), _TOKENS),
    "AverageResidual": (
        lambda: hs.nn.AverageResidual(
            hs.nn.OrthogonalLinear(DIM, DIM, orthogonal_map="cayley"), 0.25, learnable=True
        ),
        _TOKENS,
    ),
    "a classifier": (_classifier, _IMAGES),
}


def _placed(model: nn.Module) -> nn.Module:
    """Replace what a constructor draws beside parameters: the matrix at which an orthogonal map starts, and
    the vectors of a power iteration, which then forgets them.
    """
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(".base"):
                buffer.copy_(torch.linalg.qr(numbers(705, *buffer.shape))[0])
    for module in model.modules():
        if isinstance(module, hs.nn.SpectralLinear):
            for _ in range(300):
                module.settle()
    return model


def _layer(name: str) -> Mapping[str, Number]:
    build, shape = LAYERS[name]
    model = _placed(filled(build()))
    x = numbers(700, 2, *shape)
    if shape == _TOKENS:
        x = x * (0.9 * RADIUS / torch.linalg.vector_norm(x, dim=-1, keepdim=True))

    def output(f: nn.Module) -> Tensor:
        return f(x, x, x)[0] if isinstance(f, hs.nn.LipschitzAttention) else f(x)  # type: ignore[no-any-return]

    certified: nn.Module = model
    if isinstance(model, hs.nn.LipschitzAttention):
        certified = hs.nn.SelfAttentionBlock(model)
    certificate = hs.nn.certify(certified, LENGTH, RADIUS)
    found: dict[str, Number] = {
        "output": digest_of(output(model)),
        "constant": certificate.constant,
        "output radius": certificate.output_radius,
    }
    with torch.no_grad():
        found["deployed"] = digest_of(hs.nn.deploy(certified)(x))
    return found


for _name in LAYERS:
    case(f"nn/{_name}")(partial(_layer, _name))


class _Written(nn.Module):
    """A block whose forward is written out by hand, of PyTorch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.outer(torch.relu(self.inner(x)))


@case("nn/certify a forward")
def _forward() -> Mapping[str, Number]:
    model = filled(_Written())
    found = hs.nn.certify(model, LENGTH, RADIUS, inputs=numbers(701, 2, *_TOKENS))
    return {"constant": found.constant, "output radius": found.output_radius}


@case("nn/from_torch")
def _from_torch() -> Mapping[str, Number]:
    given = filled(nn.MultiheadAttention(DIM, 2, batch_first=True))
    layer = hs.nn.SoftmaxAttention.from_torch(given, length=LENGTH, radius=RADIUS)
    x = numbers(702, 1, *_TOKENS) / 4
    return {"output": digest_of(layer(x, x, x)[0]), "constant": float(layer.lipschitz_bound(LENGTH, RADIUS))}


@case("nn/penalties")
def _penalties() -> Mapping[str, Number]:
    penalty, found = hs.nn.penalty, {}
    layer = filled(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)).train()
    x = numbers(703, 2, 5, 8)
    # So many steps that the start is forgotten: the value is a converged singular value.
    with penalty.SpectralPenalty(layer, first_steps=60, rtol=1e-10) as spectral:
        layer(x)
        value = spectral()
        slopes = torch.autograd.grad(value, layer.self_attn.in_proj_weight)[0]
    found["spectral"] = Close(value.item(), 1e-8)
    found["spectral, gradient"] = digest_of(slopes, rtol=1e-5)
    P = torch.softmax(3 * numbers(704, 2, 3, 5, 5), dim=-1)
    for k in (0, 2):
        found[f"jasmin, {k}"] = float(penalty.jasmin(P, k))
    with penalty.JasminPenalty(layer) as jasmin:
        layer(x)
        found["jasmin of a layer"] = jasmin().item()
    return found


@case("nn/monitor")
def _monitor() -> Mapping[str, Number]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = filled(GPT2LMHeadModel(GPT2Config(**TYPES["gpt2"][2])))
    monitor = hs.nn.LipschitzMonitor(model, token_ids(6, 40), rtol=1e-4)
    found: dict[str, Number] = {}
    for record in monitor.measure(0):
        assert not record.failure
        layer = f"layer {record.layer}"
        found[layer] = Interval(record.lower, record.lipschitz, record.upper, 1e-7, 1e-4)
        for name in ("score_norm", "logit_max", "entropy", "entropy_normalised", "radius_mean", "radius_max"):
            found[f"{layer}, {name}"] = float(getattr(record, name))
    return found
