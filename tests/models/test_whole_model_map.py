"""Whole models and spans of blocks: their constants against dense Jacobians of the model's own forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    CLIPConfig,
    CLIPModel,
    EncoderDecoderModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import howsmooth as hs
from tests._monitored_training import gpt2
from tests._selection import others_slow
from tests._tiny_models import WithoutDowncast, tiny, token_ids
from tests.architectures.build import build, inputs_of, spread

QUICK = ("bert", "gemma2", "gpt2", "llama")
ITERATIONS = 400


def _model(model_type: str) -> tuple[PreTrainedModel, Tensor]:
    """A tiny model in float64, and ids (1, n) of one sequence."""
    model = build(model_type).requires_grad_(False)
    return model, inputs_of(model_type, model)["input_ids"][:1]


def _own(model: PreTrainedModel, name: str = "last_hidden_state") -> Any:
    """The model's own forward from embedded tokens (n, d), in float64 throughout."""

    def f(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH), WithoutDowncast():
            return model(inputs_embeds=x[None])[name][0]

    return f


def _norm(f: Any, x: Tensor, *, plain: bool = False) -> float:
    """The spectral norm of the dense Jacobian in float64; ``plain`` without torch.func."""
    if plain:
        dense = torch.autograd.functional.jacobian(f, x, vectorize=True).reshape(-1, x.numel())
        return float(torch.linalg.matrix_norm(dense, 2))
    jacobian = torch.func.jacrev(f)(x).detach().reshape(-1, x.numel())
    return float(torch.linalg.matrix_norm(jacobian, 2))


def _holds(site: hs.Site, exact: float, rtol: float) -> None:
    """The interval contains the dense norm, and is as narrow as asked for."""
    found = hs.local_lipschitz(site.map, site.x, rtol=rtol, max_iterations=ITERATIONS)
    assert bool(found.converged.all())
    assert float(found.lower[0]) <= exact * (1 + 1e-9)
    assert exact * (1 - 1e-9) <= float(found.upper[0])
    assert float(found.upper[0]) <= exact * (1 + 2 * rtol)


def _check(model_type: str) -> None:
    model, ids = _model(model_type)
    (site,) = hs.capture(model, ids, scope="model")
    exact = _norm(_own(model), site.x[0], plain=False)
    _holds(site, exact, 1e-6)
    (single,) = hs.capture(model.float(), ids, scope="model")
    assert single.x.dtype == torch.float32
    _holds(single, exact, 1e-3)


@pytest.mark.parametrize("model_type", others_slow(QUICK, ["bert", "gpt2", "llama"]))
def test_the_interval_contains_the_dense_norm(model_type: str) -> None:
    _check(model_type)


def test_an_image_begins_at_the_input_of_the_first_block() -> None:
    model = build("vit").requires_grad_(False)
    images = inputs_of("vit", model)["pixel_values"]
    (site,) = hs.capture(model, images, scope="model")

    def own(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(x[None])[0]
        return model.layernorm(x)

    with torch.no_grad():
        embedded = model.embeddings(images)
    assert torch.equal(site.x, embedded)
    _holds(hs.capture(model, images[:1], scope="model")[0], _norm(own, embedded[0]), 1e-6)


def test_logits_and_margin() -> None:
    single = gpt2().eval()
    spread(single)
    model = copy.deepcopy(single).double()
    ids = token_ids(1, 4) % 40
    logits = _own(model, "logits")
    (site,) = hs.capture(model, ids, scope="model", output="logits", last_token=True)
    assert site.map(site.x).shape == (1, 1, model.config.vocab_size)
    _holds(site, _norm(lambda x: logits(x)[-1], site.x[0]), 1e-6)

    def margin(x: Tensor) -> Tensor:
        first, second = logits(x)[-1].sort(descending=True).values[:2]
        return (first - second)[None]

    for whose, rtol in ((model, 1e-6), (single, 1e-3)):
        (found,) = hs.capture(whose, ids, scope="model", output="margin")
        _holds(found, _norm(margin, site.x[0]), rtol)


def test_the_margin_of_a_class() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, vocab_size=60
    )
    model = BertForSequenceClassification(config).double().eval()
    spread(model)
    (site,) = hs.capture(model, token_ids(1, 5), scope="model", output="margin")
    logits = lambda x: model(inputs_embeds=x[None]).logits[0]  # noqa: E731
    _holds(site, _norm(lambda x: (logits(x).max() - logits(x).min())[None], site.x[0]), 1e-6)


def test_a_span_is_the_composition_of_its_blocks() -> None:
    model = tiny("mistral", torch.float64)
    ids = token_ids(2, 5)
    (span,) = hs.capture(model, ids, scope="span", layers=(0, 2))
    x, blocks = span.x, []
    for layer in range(3):
        (block,) = hs.capture(model, ids, scope="span", layers=layer)
        assert torch.allclose(block.x, x, rtol=1e-5, atol=1e-5)
        blocks.append(block.map)
        x = block.map(block.x)
    assert torch.allclose(span.map(span.x), x, rtol=1e-5, atol=1e-5)
    composed = lambda x: blocks[2](blocks[1](blocks[0](x)))  # noqa: E731
    found = hs.local_lipschitz(span.map, span.x, rtol=1e-6)
    exact = torch.tensor([_norm(composed, one) for one in span.x])
    assert torch.allclose(found.value, exact.double(), rtol=1e-6)


def test_a_span_does_not_run_the_blocks_before_it() -> None:
    model = tiny("llama", torch.float64)
    ids = token_ids(1, 5)
    (span,) = hs.capture(model, ids, scope="span", layers=(1, -1))
    whole = hs.capture(model, ids, scope="model")[0].map
    with torch.no_grad():
        for p in span.map.own.model.layers[0].parameters():  # not copied: the model's own
            p.mul_(0)
        hidden = span.map(span.x)[0]
        assert torch.allclose(span.map.own.model.norm(hidden), whole(whole.own.x), rtol=1e-5, atol=1e-5)


def test_the_model_and_the_site_do_not_change_each_other() -> None:
    model = tiny("gpt2").train()
    ids = token_ids(1, 6)
    (site,) = hs.capture(model, ids, scope="model")
    before = site.map(site.x)
    assert all(module.training for module in model.modules())
    assert model.config.use_cache
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(site.map(site.x), before)


def test_the_hidden_state_of_an_encoder_decoder_with_a_head_is_its_decoders() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
    of_bert = BertConfig(**sizes, vocab_size=60)
    decoder = BertConfig(**sizes, vocab_size=60, is_decoder=True, add_cross_attention=True)
    t5 = T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=8, num_heads=2, num_layers=2, d_ff=20, vocab_size=60)
    )
    bert = EncoderDecoderModel(encoder=BertModel(of_bert), decoder=BertLMHeadModel(decoder))
    ids = {"input_ids": token_ids(1, 5), "decoder_input_ids": token_ids(1, 4, seed=1)}
    for whole, stack in ((t5, t5.decoder), (bert, bert.decoder.bert)):
        spread(whole)
        whole.double().eval().requires_grad_(False)
        memory = whole.get_encoder()(ids["input_ids"]).last_hidden_state

        def own(x: Tensor, stack: Any = stack, memory: Tensor = memory) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH), WithoutDowncast():
                given = {"encoder_hidden_states": memory, "use_cache": False}
                return stack(inputs_embeds=x[None], **given).last_hidden_state[0]

        (site,) = hs.capture(whole, ids, scope="model", side="queries")
        assert torch.allclose(site.map(site.x)[0], own(site.x[0]), rtol=1e-9, atol=1e-9)
        _holds(site, _norm(own, site.x[0]), 1e-6)


def test_the_hidden_state_of_a_model_that_returns_one_is_not_its_base_models() -> None:
    model = build("dinov3_vit").requires_grad_(False)
    assert model.base_model is not model  # a stack without the last norm
    images = inputs_of("dinov3_vit", model)["pixel_values"][:1]
    (site,) = hs.capture(model, images, scope="model")
    assert torch.allclose(site.map(site.x), model(images).last_hidden_state)


def test_a_model_without_a_hidden_state_is_refused() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
    pictures = {**sizes, "image_size": 8, "patch_size": 4}
    clip = CLIPModel(CLIPConfig(text_config={**sizes, "vocab_size": 60}, vision_config=pictures)).eval()
    given = {"input_ids": token_ids(1, 4), "pixel_values": torch.randn(1, 3, 8, 8)}
    with pytest.raises(
        hs.errors.CaptureError, match=r"no last_hidden_state among its outputs \(logits_per_im"
    ):
        hs.capture(clip, given, scope="model")


class _Own(nn.Module):
    """A model as people write them: it embeds ids itself, and returns the logits of the last token."""

    def __init__(self, body: nn.Module, returns: Any = lambda logits: (None, logits)) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(30, 8), nn.Embedding(9, 8)
        self.norm, self.body, self.head = nn.LayerNorm(8), body, nn.Linear(8, 30)
        self.returns = returns

    def embedded(self, x: Tensor) -> Tensor:
        return self.norm(3 * x + self.positions(torch.arange(x.shape[-2])))

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedded(x))[:, [-1]])

    def forward(self, ids: Tensor) -> Any:
        return self.returns(self.logits(self.embedding(ids)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        return x + self.mlp(x).tanh()


BODIES = {
    "one layer": lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True),
    "a list": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2, enable_nested_tensor=False
    ),
    "its own block": _Block,
}


@pytest.mark.parametrize("body", BODIES)
def test_a_model_of_ones_own_begins_at_its_embeddings(body: str) -> None:
    torch.manual_seed(0)
    model = _Own(BODIES[body]()).double().eval().requires_grad_(False)
    (site,) = hs.capture(model, torch.arange(5)[None], scope="model")
    assert torch.equal(site.x[0], model.embedding.weight[:5])
    assert site.map.describe() == "_Own from its embeddings to its output, shape (1, 30)"
    _holds(site, _norm(lambda x: model.logits(x[None])[0], site.x[0]), 1e-6)


RETURNS = {
    "a tensor": lambda logits: logits,
    "a tuple": lambda logits: (logits, None),
    "a dict": lambda logits: {"loss": logits.sum(), "logits": logits},
}


@pytest.mark.parametrize("returns", RETURNS)
def test_the_logits_of_a_model_of_ones_own(returns: str) -> None:
    torch.manual_seed(0)
    model = _Own(_Block(), RETURNS[returns]).double().eval().requires_grad_(False)
    ids = torch.arange(5)[None]
    (site,) = hs.capture(model, ids, scope="model", output="logits")
    assert site.map.describe().endswith("to its output as logits, shape (1, 30)")
    logits = lambda x: model.logits(x[None])[0]  # noqa: E731
    assert torch.allclose(site.map(site.x)[0], logits(site.x[0]))

    def margin(x: Tensor) -> Tensor:
        first, second = logits(x)[0].sort(descending=True).values[:2]
        return (first - second)[None]

    (found,) = hs.capture(model, ids, scope="model", output="margin")
    _holds(found, _norm(margin, site.x[0]), 1e-6)


def test_logits_under_another_name_are_refused() -> None:
    model = _Own(_Block(), lambda logits: {"scores": logits}).eval()
    with pytest.raises(hs.errors.CaptureError, match="under the name logits"):
        hs.capture(model, torch.arange(5)[None], scope="model", output="logits")


class _InPlace(nn.Module):
    """A block that adds to its argument, as transformers' MoonshineStreamingDecoder does to its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return x + self.attention(x, x, x)[0]


def test_what_a_model_changes_in_place_is_its_own_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_InPlace(), _InPlace(), _InPlace()).double().eval().requires_grad_(False)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    for scope, layers in (("model", None), ("span", (1, 2))):
        (site,) = hs.capture(model, x, scope=scope, layers=layers)
        given, wanted = site.x.clone(), model(x.clone())
        assert torch.allclose(site.map(site.x), wanted)
        assert torch.allclose(site.map(site.x), wanted)
        assert torch.equal(site.x, given)
        part = model if scope == "model" else model[1:]
        _holds(site, _norm(lambda x, part=part: part(x[None].clone())[0], site.x[0]), 1e-6)


def test_answers_that_a_model_changes_in_place_stay_as_they_were() -> None:
    model = build("moonshine_streaming").requires_grad_(False)
    inputs = {name: t[:1] for name, t in inputs_of("moonshine_streaming", model).items()}
    (site,) = hs.capture(model, inputs, scope="model", side="queries")
    wanted = model(**inputs).last_hidden_state
    for _ in range(2):
        assert torch.allclose(site.map(site.x), wanted, atol=1e-5)


class _KnowsItself(nn.Module):
    """A layer that computes something else in a copy, by as much as ``error``."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.error = error
        self.own = id(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x, x, x)[0]
        return y if id(self) == self.own else y + self.error


def test_a_map_that_is_not_the_models_is_refused() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8)
    hs.capture(nn.Sequential(_KnowsItself(0.0)).eval(), x, scope="model")
    with pytest.raises(hs.errors.CaptureError, match="differs from the model"):
        hs.capture(nn.Sequential(_KnowsItself(1e-2)).eval(), x, scope="model")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scope": "model", "output": "logit"}, "output: expected one of hidden, logits, margin"),
        ({"scope": "span", "output": "logits"}, "output: expected 'hidden' unless"),
        ({"scope": "attention", "output": "logits"}, "output: expected 'hidden' unless"),
        ({"scope": "attention", "last_token": True}, "last_token: expected False unless"),
        ({"scope": "model", "layers": [0]}, "layers: expected None"),
        ({"scope": "model", "heads": 0}, "heads: expected None"),
        ({"scope": "span", "layers": (2, 1)}, "layers: expected a pair of layers from -3 to 2"),
        ({"scope": "span", "layers": (0, 3)}, "layers: expected a pair of layers from -3 to 2"),
        ({"scope": "whole"}, "scope: expected one of .*, span, model"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(hs.errors.ArgumentError, match=words):
        hs.capture(tiny("gpt2"), token_ids(1, 4), **arguments)


def test_what_is_refused() -> None:
    with pytest.raises(hs.errors.CaptureError, match=r"no logits.*head=True"):
        hs.capture(tiny("gpt2"), token_ids(1, 4), scope="model", output="logits")
    padded = {"input_ids": token_ids(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}
    with pytest.raises(hs.errors.ArgumentError, match="without padding"):
        hs.capture(tiny("bert"), padded, scope="model")
    with pytest.raises(hs.errors.CaptureError, match="encoder-decoder"):
        hs.capture(build("t5"), token_ids(1, 4), scope="model")
    with pytest.raises(hs.errors.ModelError, match="names none under 'architectures'"):
        hs.load_model("gpt2", random_init=True, head=True, most_weights=1)


class Outside(nn.Module):
    """Attention with its residual outside of the list of its layers, which a part of the model passes by."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def test_a_span_that_a_residual_passes_by_is_refused() -> None:
    model, ids = Outside().double().eval(), token_ids(1, 4) % 20
    with pytest.raises(hs.HowsmoothError, match="past that point"):
        hs.capture(model, ids, scope="span", layers=(0, 1))
    assert hs.capture(model, ids, scope="model")[0].map.d_out == 8
