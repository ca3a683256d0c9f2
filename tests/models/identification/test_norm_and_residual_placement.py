"""The layouts of blocks: read from recorded layers, against each architecture's block written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import (
    AutoModel,
    BeitConfig,
    BloomConfig,
    DebertaConfig,
    Dinov2Config,
    Gemma2Config,
    GPTJConfig,
    GraniteConfig,
    Olmo2Config,
    T5Config,
)

import howsmooth as hs
from howsmooth.jacobian.closed_form import has_closed_form
from howsmooth.models.identification.norm_and_residual_placement import read_block, token_norm
from tests._cases import tokens
from tests._records import Own, record, shown
from tests._tiny_models import VOCABULARY, WithoutDowncast, token_ids

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


def _pre(m: Layer, h: Tensor) -> Tensor:
    h = h + m.mix(m.n1(h))
    return h + m.feed(m.n2(h))


def _pre_end(m: Layer, h: Tensor) -> Tensor:
    return h + m.mix(m.n1(h))


def _pre_experts(m: Layer, h: Tensor) -> Tensor:
    h = h + m.mix(m.g1(h))
    return h + m.hidden(m.g2(h))


def _post(m: Layer, h: Tensor) -> Tensor:
    h = m.n1(h + m.mix(h))
    return m.n2(h + m.feed(h))


def _post_end(m: Layer, h: Tensor) -> Tensor:
    return m.n1(h + m.mix(h))


def _deep_norm(m: Layer, h: Tensor) -> Tensor:
    h = m.n1(1.7 * h + m.mix(h))
    return m.n2(1.7 * h + m.feed(h))


def _no_first_norm(m: Layer, h: Tensor) -> Tensor:
    h = h + m.mix(h)
    return h + m.feed(m.n2(h))


def _no_norm(m: Layer, h: Tensor) -> Tensor:
    h = h + m.mix(h)
    return h + m.feed(h)


def _layer_scale(m: Layer, h: Tensor) -> Tensor:
    h = m.scale * m.mix(m.n1(h)) + h
    return h + m.feed(m.n2(h))


def _multiplier(m: Layer, h: Tensor) -> Tensor:
    h = h + m.mix(m.n1(h)) * m.multiplier
    return h + m.multiplier * m.feed(m.n2(h))


def _gated(m: Layer, h: Tensor) -> Tensor:
    h = h + m.gate.tanh() * m.mix(m.n1(h))
    return h + m.feed(m.n2(h))


def _weighted_residual(m: Layer, h: Tensor) -> Tensor:
    h = m.scale * h + m.mix(m.n1(h))
    return h + m.feed(m.n2(h))


def _two_numbers(m: Layer, h: Tensor) -> Tensor:
    h = 0.7 * h + 1.3 * m.mix(m.n1(h))
    return h + m.feed(m.n2(h))


def _sandwich(m: Layer, h: Tensor) -> Tensor:
    h = h + m.g2(m.mix(m.g1(h)))
    return h + m.n3(m.feed(m.n2(h)))


def _branch(m: Layer, h: Tensor) -> Tensor:
    h = h + m.g1(m.mix(h))
    return h + m.g2(m.feed(h))


def _branch_experts(m: Layer, h: Tensor) -> Tensor:
    h = h + m.g1(m.mix(h))
    return h + m.g2(m.hidden(h))


def _parallel(m: Layer, h: Tensor) -> Tensor:
    x = m.n1(h)
    return m.mix(x) + m.feed(x) + h


def _parallel_two_norms(m: Layer, h: Tensor) -> Tensor:
    return h + m.mix(m.n1(h)) + m.feed(m.n2(h))


def _post_experts(m: Layer, h: Tensor) -> Tensor:
    h = m.n1(h + m.mix(h))
    return h + m.hidden(h)


def _post_dropout(m: Layer, h: Tensor) -> Tensor:
    h = m.n1(m.dropout(h + m.mix(h)))
    return m.n2(h + m.feed(h))


def _pre_bare_experts(m: Layer, h: Tensor) -> Tensor:
    h = h + m.mix(m.n1(h))
    return h + m.hidden(h)


def _parallel_experts(m: Layer, h: Tensor) -> Tensor:
    x = m.n1(h)
    return m.mix(x) + m.hidden(x.flatten(0, 1)).reshape(h.shape) + h


def _after_norm(m: Layer, h: Tensor) -> Tensor:
    x = m.n1(h)
    h = x + m.mix(x)
    return h + m.feed(m.n2(h))


def _half_step_first(m: Layer, h: Tensor) -> Tensor:
    h = h + 0.5 * m.feed(m.n3(h))  # as a Conformer
    h = h + m.mix(m.n1(h))
    return h + m.feed(m.n2(h))


def _flattened(m: Layer, h: Tensor) -> Tensor:
    h = h + m.mix(m.n1(h))
    return h + m.feed(m.n2(h.flatten(0, 1))).reshape(h.shape)


Oracle = Callable[[Layer, Tensor], Tensor]
LAYOUTS: dict[str, tuple[Oracle, str, Oracle]] = {
    "pre": (_pre, "pre-norm", lambda m, h: h + m.mix(m.n1(h))),
    "pre, to the layer's end": (_pre_end, "pre-norm", lambda m, h: h + m.mix(m.n1(h))),
    "pre, experts": (_pre_experts, "pre-norm", lambda m, h: h + m.mix(m.g1(h))),
    "post": (_post, "post-norm", lambda m, h: m.n1(h + m.mix(h))),
    "post, to the layer's end": (_post_end, "post-norm", lambda m, h: m.n1(h + m.mix(h))),
    "deep norm": (_deep_norm, "post-norm, scaled residual", lambda m, h: m.n1(1.7 * h + m.mix(h))),
    "no first norm": (_no_first_norm, "pre-norm", lambda m, h: h + m.mix(h)),
    "no norm": (_no_norm, "no norm", lambda m, h: h + m.mix(h)),
    "layer scale": (_layer_scale, "pre-norm, layer scale", lambda m, h: h + m.scale * m.mix(m.n1(h))),
    "multiplier": (_multiplier, "pre-norm, scaled residual", lambda m, h: h + 0.22 * m.mix(m.n1(h))),
    "gate": (_gated, "pre-norm, scaled residual", lambda m, h: h + m.gate.tanh() * m.mix(m.n1(h))),
    "weights of the residual": (
        _weighted_residual, "pre-norm, scaled residual", lambda m, h: m.scale * h + m.mix(m.n1(h))
    ),
    "two numbers": (
        _two_numbers, "pre-norm, scaled residual", lambda m, h: 0.7 * h + 1.3 * m.mix(m.n1(h))
    ),
    "sandwich": (_sandwich, "sandwich norms", lambda m, h: h + m.g2(m.mix(m.g1(h)))),
    "branch": (_branch, "norm of the branch", lambda m, h: h + m.g1(m.mix(h))),
    "branch, experts": (_branch_experts, "norm of the branch", lambda m, h: h + m.g1(m.mix(h))),
    "parallel": (_parallel, "parallel", lambda m, h: h + m.mix(m.n1(h))),
    "parallel, two norms": (_parallel_two_norms, "parallel", lambda m, h: h + m.mix(m.n1(h))),
    "post, experts": (_post_experts, "post-norm", lambda m, h: m.n1(h + m.mix(h))),
    "post, dropout": (_post_dropout, "post-norm", lambda m, h: m.n1(h + m.mix(h))),
    "pre, experts without a norm": (_pre_bare_experts, "pre-norm", lambda m, h: h + m.mix(m.n1(h))),
    "parallel, experts": (_parallel_experts, "parallel", lambda m, h: h + m.mix(m.n1(h))),
    "after the norm": (
        _after_norm, "pre-norm, residual after the norm", lambda m, h: m.n1(h) + m.mix(m.n1(h))
    ),
    "flattened": (_flattened, "pre-norm", lambda m, h: h + m.mix(m.n1(h))),
    "half a step first": (_half_step_first, "pre-norm", lambda m, h: h + m.mix(m.n1(h))),
}  # fmt: skip


def _layer(run: Oracle, dtype: torch.dtype = torch.float64) -> Layer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = Layer(run)
        for norm in (layer.n1, layer.n2, layer.n3):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return layer.to(dtype).eval().requires_grad_(requires_grad=False)


def _read(layer: Layer, h: Tensor) -> Any:
    found, output = record(layer, layer.mix, layer.mix.o, lambda: layer(h))
    return read_block(found, Own(layer.mix, D, h.dtype), output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, dtype: torch.dtype) -> None:
    run, layout, oracle = LAYOUTS[name]
    layer = _layer(run, dtype)
    block = _read(layer, tokens(0, 1, N, D, dtype=dtype))
    assert (block.layout, block.obstacle) == (layout, "")
    close = 1e-12 if dtype == torch.float64 else 1e-5
    # The layer shows the block's value there, on tokens that the reading has not seen.
    h, value = shown(block, layer.mix, layer.mix.o, lambda: layer(3 * tokens(1, 1, N, D, dtype=dtype)))
    torch.testing.assert_close(oracle(layer, h), value, rtol=close, atol=close)
    torch.testing.assert_close(block.map(h), value, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["gate", "two numbers"])
def test_numbers_are_found_at_any_tokens(name: str, dtype: torch.dtype) -> None:
    """What is fitted must be as exact as the sum itself, on every processor."""
    run, layout, _ = LAYOUTS[name]
    layer = _layer(run, dtype)
    seen = [_read(layer, tokens(seed, 1, N, D, dtype=dtype)).layout for seed in range(20)]
    assert seen == [layout] * 20


@pytest.mark.parametrize("name", ["layer scale", "deep norm", "two numbers", "sandwich", "after the norm"])
def test_a_block_of_maps_in_closed_form_has_one_too(name: str) -> None:
    run, _, oracle = LAYOUTS[name]
    layer = _layer(run)
    found, output = record(layer, layer.mix, layer.mix.o, lambda: layer(tokens(0, 1, N, D)))
    m = layer.mix
    attention = hs.SelfAttention(
        m.q.weight[None], m.k.weight[None], m.v.weight[None], m.o.weight, query_bias=m.q.bias[None],
        key_bias=m.k.bias[None], value_bias=m.v.bias[None], output_bias=m.o.bias, scale=2.0,
    )  # fmt: skip
    block = read_block(found, attention, output)
    x = tokens(1, N, D)
    dense = torch.autograd.functional.jacobian(lambda h: oracle(layer, h), x, vectorize=True).reshape(
        N * D, N * D
    )
    assert has_closed_form(block.map)
    torch.testing.assert_close(
        float(hs.local_lipschitz(block.map, x, rtol=1e-10).value),
        float(torch.linalg.matrix_norm(dense, 2)),
        rtol=1e-9,
        atol=0,
    )


def _tanh_of_the_sum(m: Layer, h: Tensor) -> Tensor:
    h = (h + m.mix(m.n1(h))).tanh()
    return h + m.feed(m.n2(h))


def _unknown_feed(m: Layer, h: Tensor) -> Tensor:
    h = m.n1(h + m.mix(h))
    return h + gelu(h).square()


def _too_small(m: Layer, h: Tensor) -> Tensor:
    h = h + 1e-17 * m.mix(m.n1(h))
    return h + m.feed(m.n2(h))


def _unknown_parallel(m: Layer, h: Tensor) -> Tensor:
    return h + m.mix(m.n1(h)) + gelu(m.n2(h)).square()


def _only_the_branch(m: Layer, h: Tensor) -> Tensor:
    return m.feed(m.n2(m.mix(m.n1(h)))).tanh()


def _no_sum(m: Layer, h: Tensor) -> Tensor:
    return m.feed(m.mix(h))


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (_tanh_of_the_sum, r"input of its next norm \(n2\) is not H \+ attention\(norm\(H\)\)"),
        (_unknown_feed, r"added to the output of n1 was not recognised"),
        (_too_small, r"is the layer's own input.*too small"),
        (_unknown_parallel, r"is the layer's own input: the attention is parallel"),
        (_only_the_branch, r"is the attention's output alone"),
        (_no_sum, r"no norm follows its attention"),
    ],
)
def test_refused_by_what_was_not_found(run: Oracle, words: str) -> None:
    block = _read(_layer(run), tokens(0, 1, N, D))
    assert (block.layout, block.map, block.value_at) == ("", None, None)
    assert re.search(words, block.obstacle), block.obstacle


@pytest.mark.parametrize(
    ("name", "norm"),
    [("pre", "n1"), ("post", "n1"), ("sandwich", "g2"), ("sandwich", "g1"), ("after the norm", "n1")],
)
def test_an_unknown_norm_is_named(name: str, norm: str) -> None:
    class CubicNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**3 / x.square().mean(-1, keepdim=True)

    layer = _layer(LAYOUTS[name][0])
    setattr(layer, norm, CubicNorm())
    block = _read(layer, tokens(0, 1, N, D))
    assert block.map is None
    assert f"{norm} (CubicNorm) computes neither" in block.obstacle


def test_a_branch_that_is_zero_is_a_sum_with_zero() -> None:
    layer = _layer(_pre)
    nn.init.zeros_(layer.mix.o.weight)
    nn.init.zeros_(layer.mix.o.bias)
    assert _read(layer, tokens(0, 1, N, D)).layout == "pre-norm"


def test_an_attention_that_rounding_hides_confirms_nothing() -> None:
    layer = _layer(_pre)
    layer.mix.o.weight.mul_(1e-18)
    layer.mix.o.bias.mul_(1e-18)
    block = _read(layer, tokens(0, 1, N, D))
    assert block.map is None
    assert "too small beside it" in block.obstacle


def test_a_factor_that_the_layer_keeps_is_taken_as_it_is() -> None:
    block = _read(_layer(_multiplier, torch.float32), tokens(0, 1, N, D, dtype=torch.float32))
    assert isinstance(block.map, hs.Residual)
    assert isinstance(block.map.inner, hs.Compose)
    assert isinstance(block.map.inner.outer, hs.LayerScale)
    assert torch.equal(block.map.inner.outer.weight, torch.full((D,), 0.22))


def test_tokens_that_change_their_dimension() -> None:
    layer = _layer(_pre)
    found, output = record(layer, layer.mix, layer.feed.up, lambda: layer(tokens(0, 1, N, D)))
    assert read_block(found, Own(layer.mix, D), output).obstacle == "its tokens change their dimension"


def test_norm_of_the_tokens() -> None:
    layer = _layer(_pre)
    found, _ = record(layer, layer.mix, layer.mix.o, lambda: layer(tokens(0, 1, N, D)))
    norm = token_norm(found)
    assert isinstance(norm, hs.LayerNorm)
    torch.testing.assert_close(norm(tokens(3, N, D)), layer.n1(tokens(3, N, D)))
    layer = _layer(_no_first_norm)
    found, _ = record(layer, layer.mix, layer.mix.o, lambda: layer(tokens(0, 1, N, D)))
    assert token_norm(found) is None


# ---------------------------------------------------------------- the blocks of real model types, by hand

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
IMAGE: dict[str, Any] = {**SMALL, "image_size": 8, "patch_size": 4}
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 32,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

#: config, layer, attention in it, its output projection, layout, block from H and the attention
Case = tuple[
    Any, Callable[[Any], Any], str, str, str, Callable[[Any, Tensor, Callable[[Tensor], Tensor]], Tensor]
]
TYPES: dict[str, Case] = {
    "beit": (
        BeitConfig(**IMAGE, layer_scale_init_value=0.3, use_relative_position_bias=True),
        lambda m: m.layers[1], "attention", "attention.o_proj", "pre-norm, layer scale",
        lambda m, h, f: h + m.lambda_1 * f(m.layernorm_before(h)),
    ),
    "dinov2": (
        Dinov2Config(**IMAGE, layerscale_value=0.3),
        lambda m: m.encoder.layer[1], "attention", "attention.o_proj", "pre-norm, layer scale",
        lambda m, h, f: h + m.layer_scale1.lambda1 * f(m.norm1(h)),
    ),
    "gemma2": (
        Gemma2Config(**GROUPED, head_dim=6),
        lambda m: m.layers[1], "self_attn", "self_attn.o_proj", "sandwich norms",
        lambda m, h, f: h + m.post_attention_layernorm(f(m.input_layernorm(h))),
    ),
    "olmo2": (
        Olmo2Config(**GROUPED),
        lambda m: m.layers[1], "self_attn", "self_attn.o_proj", "norm of the branch",
        lambda m, h, f: h + m.post_attention_layernorm(f(h)),
    ),
    "granite": (
        GraniteConfig(**GROUPED, residual_multiplier=0.37),
        lambda m: m.layers[1], "self_attn", "self_attn.o_proj", "pre-norm, scaled residual",
        lambda m, h, f: h + 0.37 * f(m.input_layernorm(h)),
    ),
    "gptj": (
        GPTJConfig(**GPT), lambda m: m.h[1], "attn", "attn.out_proj", "parallel",
        lambda m, h, f: h + f(m.ln_1(h)),
    ),
    "bloom": (
        BloomConfig(
            vocab_size=VOCABULARY, hidden_size=24, n_layer=2, n_head=4,
            apply_residual_connection_post_layernorm=True,
        ),
        lambda m: m.h[1], "self_attention", "self_attention.dense", "post-norm",
        lambda m, x, f: m.post_attention_layernorm(x + f(x)),
    ),
    "t5": (
        T5Config(
            vocab_size=VOCABULARY, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        ),
        lambda m: m.encoder.block[1].layer[0], "SelfAttention", "SelfAttention.o", "pre-norm",
        lambda m, h, f: h + f(m.layer_norm(h)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_blocks_of_model_types(name: str) -> None:
    config, find, owner_path, projection_path, layout, oracle = TYPES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModel.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
    model = model.double().eval().requires_grad_(requires_grad=False)
    layer = find(model)
    owner, projection = layer.get_submodule(owner_path), layer.get_submodule(projection_path)
    if "Image" in type(model).__name__ or hasattr(config, "patch_size"):
        inputs: dict[str, Any] = {"pixel_values": tokens(0, 1, 3, 8, 8)}
    else:
        ids = token_ids(1, 6)
        inputs = {"input_ids": ids, "use_cache": False}
        inputs |= {"decoder_input_ids": ids} if name == "t5" else {}
    given: dict[str, Any] = {}

    def keep(what: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            given.setdefault(what, (args, kwargs))

        return hook

    def run() -> None:
        with WithoutDowncast():
            model(**inputs)

    for module, what in ((owner, "owner"), (layer, "layer")):
        module.register_forward_pre_hook(keep(what), with_kwargs=True)
    found, output = record(layer, owner, projection, run)

    def attention(x: Tensor) -> Tensor:
        args, kwargs = given["owner"]
        values: list[Tensor] = []
        handle = projection.register_forward_hook(lambda m, a, out: values.append(out))
        with WithoutDowncast():
            if args:
                owner(x, *args[1:], **kwargs)
            else:
                owner(**{**kwargs, "hidden_states": x})
        handle.remove()
        return values[0]

    block = read_block(found, Own(attention, 24), output)
    assert (block.layout, block.obstacle) == (layout, "")
    h = (
        found.x
        if block.pre_norm is None
        else next(c for c in found.before if c.module is block.pre_norm).inputs
    )
    assert h is not None
    h = h + 0.5 * tokens(1, *h.shape)
    with WithoutDowncast():
        expected = oracle(layer, h, attention)
    torch.testing.assert_close(block.map(h), expected, rtol=1e-10, atol=1e-10)


def test_a_float64_model_with_a_constant_of_float32_is_captured() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModel.from_config(DebertaConfig(**SMALL)).double().eval()  # its scale is one
    (site,) = hs.capture(model, token_ids(2, 6), layers=[1], scope="block")
    assert (site.layout, site.x.dtype) == ("post-norm", torch.float64)
