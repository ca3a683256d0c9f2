"""The layouts of blocks: read from recorded layers, against each architecture's block written by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import (
    AutoModel,
    DebertaConfig,
)

import howsmooth as hs
from howsmooth.errors import CaptureError
from howsmooth.jacobian.closed_form import has_closed_form
from tests._cases import dense_jacobian, tokens
from tests._selection import others_slow
from tests._tiny_models import VOCABULARY, token_ids

D, N = 12, 5


class Mixing(nn.Module):
    """Softmax attention with an output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        p = (2 * self.q(x) @ self.k(x).mT).softmax(dim=-1)
        return self.o(p @ self.v(x))


class GainMinusOne(nn.Module):
    """RMSNorm as Gemma stores it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(D))
        self.eps = 1e-2

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


GainMinusOne.__name__ = "GainMinusOneNorm"


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 20), nn.Linear(20, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Hidden(nn.Module):
    """A feed-forward part without a linear map, as mixtures of experts are."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x).square()


class Layer(nn.Module):
    """All that the layouts need; ``run`` and ``block`` are written out for each."""

    def __init__(self, run: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.feed, self.hidden, self.dropout = Mixing(), Feed(), Hidden(), nn.Dropout(0.9)
        self.n1, self.n2, self.n3 = nn.LayerNorm(D), nn.LayerNorm(D, eps=1e-3), nn.LayerNorm(D)
        self.g1, self.g2 = GainMinusOne(), GainMinusOne()
        self.scale = nn.Parameter(torch.randn(D))
        self.gate = nn.Parameter(torch.tensor([0.4]))
        self.multiplier = 0.22
        self._run = run

    def forward(self, h: Tensor) -> Tensor:
        return self._run(self, h)


Oracle = Callable[[Layer, Tensor], Tensor]


def _feed(m: Layer, h: Tensor) -> Tensor:
    return h + m.feed(m.n2(h))


#: The layout, the block, and what the layer does with its value.
LAYOUTS: dict[str, tuple[str, Oracle, Oracle]] = {
    "pre": ("pre-norm", lambda m, h: h + m.mix(m.n1(h)), _feed),
    "pre, to the layer's end": ("pre-norm", lambda m, h: h + m.mix(m.n1(h)), lambda m, h: h),
    "pre, experts": ("pre-norm", lambda m, h: h + m.mix(m.g1(h)), lambda m, h: h + m.hidden(m.g2(h))),
    "pre, experts without a norm": (
        "pre-norm", lambda m, h: h + m.mix(m.n1(h)), lambda m, h: h + m.hidden(h)
    ),
    "post": ("post-norm", lambda m, h: m.n1(h + m.mix(h)), lambda m, h: m.n2(h + m.feed(h))),
    "post, to the layer's end": ("post-norm", lambda m, h: m.n1(h + m.mix(h)), lambda m, h: h),
    "post, experts": ("post-norm", lambda m, h: m.n1(h + m.mix(h)), lambda m, h: h + m.hidden(h)),
    "post, dropout": (
        "post-norm", lambda m, h: m.n1(m.dropout(h + m.mix(h))), lambda m, h: m.n2(h + m.feed(h))
    ),
    "deep norm": (
        "post-norm, scaled residual",
        lambda m, h: m.n1(1.7 * h + m.mix(h)), lambda m, h: m.n2(1.7 * h + m.feed(h)),
    ),
    "no first norm": ("pre-norm", lambda m, h: h + m.mix(h), _feed),
    "no norm": ("no norm", lambda m, h: h + m.mix(h), lambda m, h: h + m.feed(h)),
    "layer scale": ("pre-norm, layer scale", lambda m, h: m.scale * m.mix(m.n1(h)) + h, _feed),
    "multiplier": (
        "pre-norm, scaled residual",
        lambda m, h: h + m.mix(m.n1(h)) * m.multiplier, lambda m, h: h + m.multiplier * m.feed(m.n2(h)),
    ),
    "gate": ("pre-norm, scaled residual", lambda m, h: h + m.gate.tanh() * m.mix(m.n1(h)), _feed),
    "weights of the residual": (
        "pre-norm, scaled residual", lambda m, h: m.scale * h + m.mix(m.n1(h)), _feed
    ),
    "two numbers": ("pre-norm, scaled residual", lambda m, h: 0.7 * h + 1.3 * m.mix(m.n1(h)), _feed),
    "sandwich": (
        "sandwich norms", lambda m, h: h + m.g2(m.mix(m.g1(h))), lambda m, h: h + m.n3(m.feed(m.n2(h)))
    ),
    "branch": ("norm of the branch", lambda m, h: h + m.g1(m.mix(h)), lambda m, h: h + m.g2(m.feed(h))),
    "branch, experts": (
        "norm of the branch", lambda m, h: h + m.g1(m.mix(h)), lambda m, h: h + m.g2(m.hidden(h))
    ),
    "flattened": (
        "pre-norm",
        lambda m, h: h + m.mix(m.n1(h)),
        lambda m, h: h + m.feed(m.n2(h.flatten(0, 1))).reshape(h.shape),
    ),
}  # fmt: skip


def _parallel(m: Layer, h: Tensor) -> Tensor:
    x = m.n1(h)
    return m.mix(x) + m.feed(x) + h


def _parallel_experts(m: Layer, h: Tensor) -> Tensor:
    x = m.n1(h)
    return m.mix(x) + m.hidden(x.flatten(0, 1)).reshape(h.shape) + h


def _after_norm(m: Layer, h: Tensor) -> Tensor:
    x = m.n1(h)
    return _feed(m, x + m.mix(x))


def _post_after_norm(m: Layer, h: Tensor) -> Tensor:
    x = m.n1(h)  # as Bloom, if its residuals start after the norms
    y = m.n2(x + m.mix(x))
    return y + m.feed(y)


def _half_step_first(m: Layer, h: Tensor) -> Tensor:
    h = h + 0.5 * m.feed(m.n3(h))  # as a Conformer
    return _feed(m, h + m.mix(m.n1(h)))


#: Layers that are more than a block and what follows it: the layout, the block, the layer.
WHOLE: dict[str, tuple[str, Oracle, Oracle]] = {
    "parallel": ("parallel", lambda m, h: h + m.mix(m.n1(h)), _parallel),
    "parallel, two norms": (
        "parallel", lambda m, h: h + m.mix(m.n1(h)), lambda m, h: h + m.mix(m.n1(h)) + m.feed(m.n2(h))
    ),
    "parallel, experts": ("parallel", lambda m, h: h + m.mix(m.n1(h)), _parallel_experts),
    "after the norm": (
        "pre-norm, residual after the norm", lambda m, h: m.n1(h) + m.mix(m.n1(h)), _after_norm
    ),
    "post, after the norm": ("post-norm", lambda m, h: m.n2(h + m.mix(h)), _post_after_norm),
    "half a step first": ("pre-norm", lambda m, h: h + m.mix(m.n1(h)), _half_step_first),
}  # fmt: skip


def _made(name: str) -> tuple[Oracle, str, Oracle]:
    """How a layer runs, its layout, and its block."""
    if name in WHOLE:
        layout, block, run = WHOLE[name]
        return run, layout, block
    layout, block, rest = LAYOUTS[name]
    return lambda m, h: rest(m, block(m, h)), layout, block


def _layer(run: Oracle, dtype: torch.dtype = torch.float64) -> Layer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = Layer(run)
        for norm in (layer.n1, layer.n2, layer.n3):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return layer.to(dtype).eval().requires_grad_(requires_grad=False)


def _captured(layer: Layer, seed: int = 0, scope: str = "block") -> hs.Site:
    dtype = layer.scale.dtype
    (site,) = hs.capture(nn.Sequential(layer), tokens(seed, 1, N, D, dtype=dtype), scope=scope)
    return site


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*LAYOUTS, *WHOLE])
def test_layouts(name: str, dtype: torch.dtype) -> None:
    run, layout, oracle = _made(name)
    layer = _layer(run, dtype)
    site = _captured(layer)
    assert site.layout == layout
    close = 1e-12 if dtype == torch.float64 else 1e-5
    for h in (site.x, 3 * tokens(1, 1, N, D, dtype=dtype)):  # on tokens that the reading has not seen
        torch.testing.assert_close(site.map(h), oracle(layer, h), rtol=close, atol=close)


@pytest.mark.parametrize(
    ("name", "dtype"),
    others_slow(
        itertools.product(["gate", "two numbers"], [torch.float32, torch.float64]),
        [("gate", torch.float64), ("two numbers", torch.float32)],
    ),
)
def test_numbers_are_found_at_any_tokens(name: str, dtype: torch.dtype) -> None:
    """What is fitted must be as exact as the sum itself, on every processor."""
    run, layout, _ = _made(name)
    layer = _layer(run, dtype)
    assert [_captured(layer, seed).layout for seed in range(20)] == [layout] * 20


@pytest.mark.parametrize("name", ["layer scale", "deep norm", "two numbers", "sandwich", "after the norm"])
def test_a_block_of_maps_in_closed_form_has_one_too(name: str) -> None:
    run, _, oracle = _made(name)
    layer = _layer(run)
    site = _captured(layer)
    assert has_closed_form(site.map)
    x = tokens(1, N, D)
    truth = float(torch.linalg.matrix_norm(dense_jacobian(lambda h: oracle(layer, h[None])[0], x), 2))
    assert float(hs.local_lipschitz(site.map, x, rtol=1e-10).value) == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda m, h: _feed(m, (h + m.mix(m.n1(h))).tanh()),
         r"input of its next norm \(0.n2\) is not H \+ attention\(norm\(H\)\)"),
        (lambda m, h: (lambda y: y + gelu(y).square())(m.n1(h + m.mix(h))),
         r"added to the output of 0.n1 was not recognised"),
        (lambda m, h: _feed(m, h + 1e-17 * m.mix(m.n1(h))), r"is the layer's own input.*too small"),
        (lambda m, h: h + m.mix(m.n1(h)) + gelu(m.n2(h)).square(),
         r"is the layer's own input: the attention is parallel"),
        (lambda m, h: m.feed(m.n2(m.mix(m.n1(h)))).tanh(), r"is the attention's output alone"),
        (lambda m, h: m.feed(m.mix(h)), r"no norm follows its attention"),
    ],
    ids=["tanh", "unknown feed-forward part", "too small", "unknown parallel part", "the branch", "no sum"],
)  # fmt: skip
def test_refused_by_what_was_not_found(run: Oracle, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        _captured(_layer(run))


@pytest.mark.parametrize(
    ("name", "norm"),
    [("pre", "n1"), ("post", "n1"), ("sandwich", "g2"), ("sandwich", "g1"), ("after the norm", "n1")],
)
def test_an_unknown_norm_is_named(name: str, norm: str) -> None:
    class CubicNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**3 / x.square().mean(-1, keepdim=True)

    layer = _layer(_made(name)[0])
    setattr(layer, norm, CubicNorm())
    with pytest.raises(CaptureError, match=rf"{norm} \(CubicNorm\) computes neither"):
        _captured(layer)


def test_an_attention_that_rounding_hides_confirms_nothing() -> None:
    layer = _layer(_made("pre")[0])
    layer.mix.o.weight.mul_(1e-18)
    layer.mix.o.bias.mul_(1e-18)
    with pytest.raises(CaptureError, match="too small beside it"):
        _captured(layer)
    nn.init.zeros_(layer.mix.o.weight)  # but zero is zero
    nn.init.zeros_(layer.mix.o.bias)
    assert _captured(layer).layout == "pre-norm"


def test_a_factor_that_the_layer_keeps_is_taken_as_it_is() -> None:
    f = _captured(_layer(_made("multiplier")[0], torch.float32)).map
    assert isinstance(f, hs.Residual)
    assert isinstance(f.inner, hs.Compose)
    assert isinstance(f.inner.outer, hs.LayerScale)
    assert torch.equal(f.inner.outer.weight, torch.full((D,), 0.22))


def test_norm_of_the_tokens() -> None:
    layer = _layer(_made("pre")[0])
    norm = _captured(layer, scope="attention").norm
    assert isinstance(norm, hs.LayerNorm)
    torch.testing.assert_close(norm(tokens(3, N, D)), layer.n1(tokens(3, N, D)))
    assert _captured(_layer(_made("no first norm")[0]), scope="attention").norm is None


def test_a_float64_model_with_a_constant_of_float32_is_captured() -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModel.from_config(DebertaConfig(**sizes)).double().eval()  # its scale is one
    (site,) = hs.capture(model, token_ids(2, 6), layers=[1], scope="block")
    assert (site.layout, site.x.dtype) == ("post-norm", torch.float64)
