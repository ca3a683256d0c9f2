"""What lies around a softmax in models: captured, and judged by finite differences of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AutoModel,
    BitNetConfig,
    GraniteConfig,
    MobileBertConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import AttentionInterface

from howsmooth.attention import SelfAttention, StagedAttention
from howsmooth.errors import CaptureError
from howsmooth.jacobian import AutodiffJacobian, closed_form_jacobian
from howsmooth.models import Site, capture
from tests._injected import central_difference, injected
from tests._selection import others_slow
from tests._tiny_models import VOCABULARY, WithoutDowncast, tiny, token_ids
from tests.architectures.build import build, inputs_of

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 6, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def double(config: Any) -> PreTrainedModel:
    """A model with weights so large that its attention is not uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModel.from_config(config).double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_((0.2 if p.ndim < 2 else p.shape[-1] ** -0.5) * torch.randn_like(p))
    return model


def agrees(site: Site, own: Callable[[Tensor], Tensor], closed_form: bool = True) -> None:
    """Hold a map, and its Jacobian in closed form, against the model."""
    with torch.no_grad():
        value = own(site.x).reshape(site.map(site.x).shape)
    torch.testing.assert_close(site.map(site.x), value, rtol=1e-5, atol=1e-6)
    e = torch.randn(site.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = central_difference(own, site.x, e).reshape(value.shape)
    derivative = (closed_form_jacobian if closed_form else AutodiffJacobian)(site.map, site.x).product(e)
    assert float((derivative - wanted).norm() / wanted.norm()) < 1e-7
    assert site.path == ("closed form" if closed_form else "autodiff")


@pytest.mark.parametrize(
    ("config", "projection", "kind", "words"),
    [
        (MobileBertConfig(vocab_size=VOCABULARY, num_hidden_layers=1, hidden_size=24, embedding_size=8,
                          intermediate_size=16, num_attention_heads=2, intra_bottleneck_size=8),
         "encoder.layer.0.attention.output.dense", StagedAttention, "queries of layer 0"),
        (BitNetConfig(**SMALL), "layers.0.self_attn.o_proj", StagedAttention,
         "attn_sub_norm (BitNetRMSNorm)"),
    ],
    ids=["values from elsewhere", "norm before the projection"],
)  # fmt: skip
def test_features(config: Any, projection: str, kind: type, words: str) -> None:
    model, ids = double(config), token_ids(2, 6)
    (site,) = capture(model, ids, layers=[0])
    assert isinstance(site.map, kind)
    assert words in site.path_reason
    agrees(site, injected(model, {"input_ids": ids}, site.name, projection))


# ---- what only values can tell: the structure looks right, and the numbers are not


def _gate_after_projection(layer: Any) -> None:
    layer.self_attn.v_proj.register_forward_hook(
        lambda m, args, out: out * args[0].norm(dim=-1, keepdim=True)
    )


def _output_gate(layer: Any) -> None:
    layer.self_attn.o_proj.register_forward_hook(lambda m, args, out: out * torch.sigmoid(args[0]))


def _input_to_output(layer: Any) -> None:
    layer.self_attn.o_proj.register_forward_pre_hook(lambda m, args: (args[0].sin(),))


@pytest.mark.parametrize(
    ("change", "closed_form", "words"),
    [
        (_gate_after_projection, True, "not confirmed"),
        (_output_gate, True, "not confirmed"),
        (_input_to_output, True, "not confirmed"),
    ],
)
def test_hidden_nonlinearity(change: Callable[[Any], None], closed_form: bool, words: str) -> None:
    model, ids = tiny("llama", torch.float64), token_ids(1, 5)
    change(model.layers[1])
    (site,) = capture(model, ids, layers=[1])
    assert words in site.path_reason
    agrees(site, injected(model, {"input_ids": ids}, site.name, f"{site.name}.o_proj"), closed_form)


def test_attention_of_another_meaning_under_the_users_implementation() -> None:
    def twice_as_sharp(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **kw: Any) -> Any:
        kw.pop("is_causal", None)
        p = (2 * scaling * q @ k.mT).softmax(dim=-1)
        return (p @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("twice_as_sharp", twice_as_sharp)
    try:
        model, ids = tiny("bert", torch.float64, attention="twice_as_sharp"), token_ids(1, 5)
        (site,) = capture(model, ids, layers=[1])
        projection = "encoder.layer.1.attention.output.dense"
        agrees(site, injected(model, {"input_ids": ids}, site.name, projection), closed_form=False)
    finally:
        AttentionInterface._global_mapping.pop("twice_as_sharp")


@pytest.mark.parametrize(
    ("mask", "kind", "words"),
    [
        (torch.linspace(-1, 1, 25).double().reshape(1, 1, 5, 5), SelfAttention, "none"),
        (torch.tensor([1, 1, 1, 0]).bool()[None, :, None, None] | torch.eye(5).bool(), StagedAttention,
         "a mask of its own for each head"),
    ],
    ids=["bias", "by head"],
)  # fmt: skip
def test_masks(mask: Tensor, kind: type, words: str) -> None:
    model, given = tiny("bert", torch.float64), {"input_ids": token_ids(1, 5), "attention_mask": mask}
    (site,) = capture(model, given, layers=[1])
    assert isinstance(site.map, kind)
    assert site.masking == words
    agrees(site, injected(model, given, site.name, "encoder.layer.1.attention.output.dense"))


# ---- what follows the output matrix, judged by the dense Jacobian of the model's own attention module


class Around(nn.Module):
    """A linear map, and something made of what it gives."""

    def __init__(self, base: nn.Module, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.base, self.of = base, of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, self.base(x))


class _Tripled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


def _matrix(*shape: int) -> Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _low_rank(x: Tensor, y: Tensor) -> Tensor:
    return y + x @ _matrix(x.shape[-1], 2) @ _matrix(2, y.shape[-1])


def _parametrized(base: nn.Module) -> nn.Module:
    return nn.utils.parametrize.register_parametrization(base, "weight", _Tripled())


def _hooked(base: nn.Module) -> nn.Module:
    base.register_forward_hook(lambda module, given, y: y.sin())
    return base


#: A module in the place of the output matrix, and whether every parameter is known then.
PROJECTIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "low rank": (lambda base: Around(base, _low_rank), False),
    "a small low rank": (lambda base: Around(base, lambda x, y: y + 1e-7 * (_low_rank(x, y) - y)), False),
    "a factor": (lambda base: Around(base, lambda x, y: 3 * y), False),
    "tanh": (lambda base: Around(base, lambda x, y: y.tanh()), False),
    "only of larger tokens": (lambda base: Around(base, lambda x, y: y - (y.abs() - 2).clamp(min=0)), False),
    "a gate": (lambda base: Around(base, lambda x, y: y * y.sigmoid()), False),
    "a norm": (lambda base: nn.Sequential(base, nn.LayerNorm(24)), False),
    "a norm before": (lambda base: nn.Sequential(nn.LayerNorm(24), base), False),
    "two matrices": (lambda base: nn.Sequential(base, nn.Linear(24, 24)), False),
    "a hook": (_hooked, False),
    "dropout": (lambda base: nn.Sequential(base, nn.Dropout(0.5)), True),
    "a parametrization": (_parametrized, True),
}
#: For each family: a layer, what computes its attention, what is exchanged, whose output is the attention.
PLACES = {
    "llama": ("layers.2", "self_attn", "self_attn.o_proj", "self_attn"),
    "gpt2": ("h.2", "attn", "attn.c_proj", "attn"),
    "bert": ("encoder.layer.2", "attention.self", "attention.output.dense", "attention.output.dense"),
    "albert": (
        "encoder.albert_layer_groups.0.albert_layers.0", "attention", "attention.dense", "attention.dense"
    ),
}  # fmt: skip


def _jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jacrev(lambda t: f(t).flatten())(x).flatten(1)


def _is_the_models(site: Site, own: Callable[[Tensor], Tensor]) -> None:
    """Hold a map, and its Jacobian, against the model at its tokens and at others."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(site.x.shape, dtype=torch.float64, generator=generator)
    for x in (site.x, site.x + 2 * noise):
        with torch.no_grad():
            value, wanted = site.map(x).flatten(), own(x).flatten()
        assert float((value - wanted).norm() / wanted.norm()) < 1e-10
        jacobian = _jacobian(own, x)
        operator = closed_form_jacobian(site.map, x)
        for e in torch.randn((3, *x.shape), dtype=torch.float64, generator=generator):
            wanted = jacobian @ e.flatten()
            assert float((operator.product(e).flatten() - wanted).norm() / wanted.norm()) < 1e-10


def _family(name: str) -> PreTrainedModel:
    if name != "albert":
        return tiny(name, torch.float64)
    sizes = {"embedding_size": 24, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4}
    return double(AlbertConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes))


def _captured(model: nn.Module, ids: Tensor, scope: str, layer: int = -1) -> Site:
    with WithoutDowncast():  # the positions too
        return capture(model, ids, layers=[layer], scope=scope)[-1]


@pytest.mark.parametrize(
    ("change", "family"),
    others_slow(
        [
            *((change, family) for change in PROJECTIONS for family in ("llama", "bert")),
            *((change, family) for change in ("low rank", "tanh") for family in ("gpt2", "albert")),
        ],
        [
            ("low rank", "albert"), ("tanh", "gpt2"), ("a norm before", "bert"), ("a hook", "llama"),
            ("a parametrization", "bert"),
        ],
    ),
)  # fmt: skip
def test_what_stands_in_the_place_of_the_output_matrix_is_part_of_the_map(change: str, family: str) -> None:
    model, plain, ids = _family(family), _family(family), token_ids(1, 4)
    replace, known = PROJECTIONS[change]
    layer = PLACES[family][0]
    owner, exchanged, end = (f"{layer}.{path}" for path in PLACES[family][1:])
    parent, _, name = exchanged.rpartition(".")
    torch.manual_seed(1)
    changed = replace(getattr(model.get_submodule(parent), name)).double().eval()
    setattr(model.get_submodule(parent), name, changed)
    given = {"input_ids": ids}

    attention = _captured(model, ids, "attention")
    own = injected(model, given, owner, end)
    _is_the_models(attention, own)
    assert attention.path_reason.startswith("every parameter") == known
    residual = _captured(model, ids, "residual")
    with torch.no_grad():
        torch.testing.assert_close(residual.map(residual.x), residual.x + own(residual.x))
    heads, plain_heads = (_captured(m, ids, "heads") for m in (model, plain))
    torch.testing.assert_close(heads.map(heads.x), plain_heads.map(heads.x))
    block = _captured(model, ids, "block")
    if family == "bert":
        _is_the_models(block, injected(model, given, layer, f"{layer}.attention"))


AFTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a factor": lambda x, y: 3 * y,
    "tanh": lambda x, y: y.tanh(),
    "a gate": lambda x, y: y * (x @ _matrix(24, 24)).sigmoid(),
    "a linear map of the tokens": lambda x, y: y + x @ _matrix(24, 24),
    "a norm": lambda x, y: nn.functional.layer_norm(y, (24,)),
    "a clamp": lambda x, y: y.clamp(-2, 2),
}


@pytest.mark.parametrize("name", others_slow(AFTER, ["a gate", "a linear map of the tokens"]))
def test_what_a_module_does_after_its_output_matrix_is_part_of_the_map(name: str) -> None:
    after = AFTER[name]
    model, ids = tiny("llama", torch.float64), token_ids(1, 4)
    module = model.layers[-1].self_attn
    module.register_forward_hook(
        lambda m, args, kwargs, out: (after(kwargs["hidden_states"], out[0]), *out[1:]), with_kwargs=True
    )
    site = _captured(model, ids, "attention")
    own = injected(model, {"input_ids": ids}, site.name)
    _is_the_models(site, own)
    assert "not confirmed" in site.path_reason
    norm = model.layers[-1].input_layernorm

    def block(h: Tensor) -> Tensor:
        with WithoutDowncast():
            return h + own(norm(h))

    site = _captured(model, ids, "block")
    assert site.layout == "pre-norm"
    _is_the_models(site, block)


def test_a_small_adapter_is_seen_weights_in_memory() -> None:
    model, ids = tiny("gpt2"), token_ids(1, 6)
    adapted = Around(
        model.h[1].attn.c_proj, lambda x, y: y + 1e-4 * (_low_rank(x.double(), y.double()) - y).float()
    )
    with torch.no_grad():  # large scores, for whose rounding much must be allowed
        model.h[1].attn.c_attn.weight[:, :48] *= 12
    assert capture(model, ids, [1])[0].path_reason == "every parameter is known"
    model.h[1].attn.c_proj = adapted
    assert capture(model, ids, [1])[0].path_reason != "every parameter is known"


def test_a_factor_outside_of_the_attention_module_is_of_the_block() -> None:
    model, ids = double(GraniteConfig(**SMALL, residual_multiplier=0.3)), token_ids(1, 4)
    site = _captured(model, ids, "attention")
    assert (site.layout, site.path_reason) == ("pre-norm, scaled residual", "every parameter is known")
    _is_the_models(site, injected(model, {"input_ids": ids}, site.name))


class WholeLayer(nn.Module):
    """A layer that computes its attention by itself, with a factor of it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.norm(x + self.factor * self.out(heads))


def test_a_layer_that_is_no_attention_module() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    plain, scaled = (nn.Sequential(WholeLayer(factor)).double().eval() for factor in (1.0, 3.0))
    (site,) = capture(plain, x)
    with torch.no_grad():
        heads = capture(plain, x, scope="heads")[0].map(x)
        torch.testing.assert_close(site.map(x), plain[0].out(heads))
    with pytest.raises(
        CaptureError, match=r"no scope 'attention': the output of 0.out \(Linear\) is neither"
    ):
        capture(scaled, x)
    (block,) = capture(scaled, x, scope="block")
    assert block.layout == "post-norm, scaled residual"
    _is_the_models(block, scaled)


@pytest.mark.parametrize("model_type", ["donut-swin", "timesformer"])
def test_the_projection_of_heads_over_windows_is_part_of_the_map(model_type: str) -> None:
    model = build(model_type)
    given = inputs_of(model_type, model)
    with WithoutDowncast():
        site = capture(model, given, layers=[0])[0]
    output = site.name.rpartition(".")[0] + ".output.dense"
    agrees(site, injected(model, given, site.name, output))
