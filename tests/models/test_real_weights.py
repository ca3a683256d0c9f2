"""Trained weights: every layer and scope against dense float64 Jacobians of the model's own sublayers.

The sublayers are called by hand, module by module, from each architecture's own order of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import howsmooth as hs
from howsmooth.model_names import builtin_folder
from howsmooth.scopes import SCOPES
from tests._shared import shared_data
from tests._tiny_models import WithoutDowncast

NAMES = ("bert_tiny_sst2_encoder", "stories260k", "capp_gpt", "builtin-encoder", "builtin-decoder")
TEXT = "Once upon a time there was a little girl who saw that the name of the file was a string."


@dataclass(frozen=True, eq=False)
class Real:
    """A trained model, what is captured of it, and its inputs."""

    kind: str  # how its sublayers are put together
    whole: nn.Module
    inputs: Any
    layers: list[nn.Module]

    @property
    def heads(self) -> int:
        return int(self.whole.config.num_attention_heads)


def load(name: str, n: int, dtype: torch.dtype = torch.float64, attention: str = "eager") -> Real:
    """Load a model without gradients, and n tokens for it."""
    if name == "bert_tiny_sst2_encoder":  # its embeddings are not there: sentences embedded by the model are
        folder = shared_data(name)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention
        ).eval()
        x = load_file(folder / "sequences.safetensors")["nuovo"][None, :n].to(dtype)
        encoder = model.bert.encoder.requires_grad_(requires_grad=False)
        return Real("bert", encoder, x, list(encoder.layer))
    folder = builtin_folder(name) if name.startswith("builtin") else shared_data(name)
    model = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    if name == "capp_gpt":  # plans of manufacturing, no text
        ids = torch.arange(3, 3 + n)[None]
    else:
        ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"][:n]])
    assert ids.shape == (1, n)
    model.requires_grad_(requires_grad=False)
    kind = {"bert": "bert", "gpt2": "gpt2", "llama": "llama"}[model.config.model_type]
    layers = {"bert": lambda: model.encoder.layer, "gpt2": lambda: model.h, "llama": lambda: model.layers}
    return Real(kind, model, ids, list(layers[kind]()))


@dataclass(frozen=True, eq=False)
class Sublayer:
    """The model's own sublayer at each scope."""

    x: Tensor  # the attention's input
    h: Tensor  # the block's
    functions: dict[str, Callable[[Tensor], Tensor]]


def sublayer(real: Real, index: int) -> Sublayer:
    """Run the model, and take the arguments of one layer and of its attention."""
    layer = real.layers[index]
    owner, projection = {
        "bert": lambda: (layer.attention.self, layer.attention.output.dense),
        "gpt2": lambda: (layer.attn, layer.attn.c_proj),
        "llama": lambda: (layer.self_attn, layer.self_attn.o_proj),
    }[real.kind]()
    given: dict[str, tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = {}

    def keep(what: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rest = {k: v for k, v in kwargs.items() if k != "hidden_states"}
            given[what] = (args[0] if args else kwargs["hidden_states"], args[1:], rest)

        return hook

    handles = [
        m.register_forward_pre_hook(keep(w), with_kwargs=True) for m, w in ((owner, "x"), (layer, "h"))
    ]
    with torch.no_grad():
        quiet = {"use_cache": False} if isinstance(real.whole, PreTrainedModel) else {}
        real.whole(real.inputs, **quiet)
    for handle in handles:
        handle.remove()
    x, args, kwargs = given["x"]
    n, width = x.shape[1], x.shape[2]

    def heads(tokens: Tensor) -> Tensor:
        taken: list[Tensor] = []
        handle = projection.register_forward_pre_hook(lambda m, a: taken.append(a[0]))
        try:
            out = owner(tokens, *args, **kwargs)[0]
        finally:
            handle.remove()
        return (taken[0] if taken else out).reshape(1, n, -1)

    def attention(tokens: Tensor) -> Tensor:
        return projection(heads(tokens).reshape(1, n, -1))

    def block(tokens: Tensor) -> Tensor:
        if real.kind == "bert":
            return layer.attention.output.LayerNorm(tokens + attention(tokens))
        norm = layer.ln_1 if real.kind == "gpt2" else layer.input_layernorm
        return tokens + attention(norm(tokens))

    assert given["h"][0].shape[2] == width
    functions = {"heads": heads, "attention": attention, "block": block}
    functions["residual"] = lambda tokens: tokens + attention(tokens)
    return Sublayer(x.detach(), given["h"][0].detach(), functions)


def dense(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Jacobian (n, d_out, n, d) of the model's own sublayer, nothing of it in float32."""
    with WithoutDowncast():
        return torch.func.jacrev(lambda t: f(t)[0])(x)[:, :, 0]


def check_layer(name: str, n: int, index: int, dtype: torch.dtype) -> None:
    real = load(name, n)
    own = sublayer(real, index)
    captured = real if dtype == torch.float64 else load(name, n, dtype, "sdpa")
    close = 1e-7 if dtype == torch.float64 else 3e-5
    for scope in SCOPES:
        sites = hs.capture(captured.whole, captured.inputs, layers=[index], scope=scope)
        assert {site.path for site in sites} == {"closed form"}
        if scope in ("head", "heads", "attention"):  # with matrices, so that bounds know them
            assert all(isinstance(site.map, hs.SelfAttention) for site in sites)
        x = own.h if scope == "block" else own.x
        torch.testing.assert_close(sites[0].x.double(), x, rtol=1e-4, atol=1e-4)
        # At the very tokens of the site: float32 has others by rounding.
        jacobian = dense(own.functions["heads" if scope == "head" else scope], sites[0].x.double())
        assert [s.head for s in sites] == (list(range(real.heads)) if scope == "head" else [None])
        parts = jacobian.unflatten(1, (real.heads, -1)).unbind(1) if scope == "head" else [jacobian]
        for site, part in zip(sites, parts, strict=True):
            matrix = part.reshape(part.shape[0] * part.shape[1], -1)
            expected = float(torch.linalg.matrix_norm(matrix, 2))
            found = hs.local_lipschitz(site.map, site.x, rtol=1e-8 if dtype == torch.float64 else 1e-4)
            where = f"{name}, layer {index}, {scope} {site.head}"
            assert abs(float(found.value) / expected - 1) < close, where
            assert float(found.lower) * (1 - close) <= expected <= float(found.upper) * (1 + close), where
            direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            _, tangent = torch.func.jvp(site.map.to(dtype=torch.float64), (site.x.double(),), (direction,))
            product = matrix @ direction.flatten()
            error = float((tangent.flatten() - product).norm() / product.norm())
            assert error < (1e-9 if dtype == torch.float64 else 1e-5), where


@pytest.mark.parametrize(
    ("name", "index"),
    [("bert_tiny_sst2_encoder", 1), ("stories260k", 4), ("capp_gpt", 2)],
)
def test_scopes_of_trained_models(name: str, index: int) -> None:
    check_layer(name, 4, index, torch.float64)


def test_scopes_of_a_built_in_model() -> None:
    check_layer("builtin-encoder", 3, 3, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_all_layers_and_scopes_of_trained_models(name: str, dtype: torch.dtype) -> None:
    n = 4 if name.startswith("builtin") else 10
    for index in range(len(load(name, n).layers)):
        check_layer(name, n, index, dtype)


def test_the_sentences_of_bert_tiny_go_straight_to_its_encoder() -> None:
    real = load("bert_tiny_sst2_encoder", 21)
    sites = hs.capture(real.whole, real.inputs)
    assert [(s.layer, s.layout, s.masking) for s in sites] == [
        (0, "post-norm", "none"),
        (1, "post-norm", "none"),
    ]
    torch.testing.assert_close(sites[0].x, real.inputs, rtol=0, atol=0)
    for index, site in enumerate(sites):
        own = sublayer(real, index)
        torch.testing.assert_close(
            site.map(site.x), own.functions["attention"](own.x), rtol=1e-10, atol=1e-10
        )
