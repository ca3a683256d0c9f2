"""A model is read only if it does nothing but what its stages do, also where it was not evaluated."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)
from transformers.activations import ACT2FN

from howsmooth.bounds.radius.classifier import Classifier
from howsmooth.bounds.radius.robust_radius import NetworkAtInput
from howsmooth.bounds.radius.transformer_network import Network
from howsmooth.errors import CertificateError

FAR = 1e3
Twist = Callable[[Tensor], Tensor]


class Encoder(nn.Module):
    """Two layers of PyTorch, with something between them."""

    def __init__(self, twist: Twist | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {
            "activation": "gelu",
            "norm_first": True,
            "batch_first": True,
            "dtype": torch.float64,
        } | options
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 6, **options) for _ in range(2))
        self.head, self.twist = nn.Linear(4, 2, dtype=torch.float64), twist

    def forward(self, x: Tensor) -> Tensor:
        u = self.layers[0](x)
        u = u if self.twist is None else self.twist(u)
        return self.head(self.layers[1](u).mean(1))


def x() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def read_network(model: nn.Module) -> Network:
    return Classifier.at(model.eval().requires_grad_(False), x()).network()[0]


def refused(model: nn.Module, match: str | None = None) -> None:
    with pytest.raises(CertificateError, match=match):
        read_network(model)


def _branch(u: Tensor) -> Tensor:
    return u.clamp(-1, 1) if u.abs().max() > FAR else u


def _numpy(u: Tensor) -> Tensor:
    return -u if float(u.detach().numpy().max()) > FAR else u


def _caught(u: Tensor) -> Tensor:
    try:
        return -u if max(u.flatten().tolist()) > FAR else u
    except Exception:
        return u


def _in_place(u: Tensor) -> Tensor:
    v = u.clone()
    v[:, 1:].clamp_(-FAR, FAR)
    return v


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return u.clamp(-FAR, FAR)


TWISTS: dict[str, Twist] = {
    "clamp": lambda u: u.clamp(-FAR, FAR),
    "hardtanh": nn.Hardtanh(-FAR, FAR),
    "where": lambda u: torch.where(u > FAR, -u, u),
    "masked_fill": lambda u: u.masked_fill(u > FAR, 0.0),
    "maximum": lambda u: torch.maximum(u, torch.tensor(-FAR, dtype=u.dtype)),
    "nan_to_num": lambda u: u.nan_to_num(posinf=0.0),
    "softshrink": lambda u: u - nn.functional.softshrink(u, FAR),
    "rounded": lambda u: (u * 2.0**40).round() / 2.0**40,
    "cubed": lambda u: u + 1e-13 * u**3,
    "exp": lambda u: u + (u - FAR).exp(),
    "bits": lambda u: torch.where(u.view(torch.int64) == 7, -u, u),
    "bits alone": lambda u: u.view(torch.int64).view(torch.float64),
    "sorted": lambda u: u.sort(-1).values.gather(-1, u.argsort(-1).argsort(-1)),
    "script": torch.jit.script(nn.Hardtanh(-FAR, FAR)),
    "own gradient": _Own.apply,
    "in place": _in_place,
    "vmap": torch.func.vmap(lambda u: u.clamp(max=FAR)),
    "compiled": torch.compile(lambda u: u.clamp(max=FAR), backend="eager"),
    "branch": _branch,
    "numpy": _numpy,
    "caught": _caught,
    "item": lambda u: -u if u.norm().item() > FAR else u,
    "equal": lambda u: -u if torch.equal(u, u + 1) else u,
    "apply": lambda u: u.clone().apply_(lambda v: min(v, FAR)),
    "deepcopy": lambda u: -u if copy.deepcopy(u).max() > FAR else u,
    "array": lambda u: -u if np.asarray(u.detach()).max() > FAR else u,
    "dlpack": lambda u: -u if np.from_dlpack(u.detach()).max() > FAR else u,
    "size of a selection": lambda u: -u if len(u[u > FAR]) else u,
}


@pytest.mark.parametrize("name", TWISTS)
def test_what_has_no_effect_at_the_points_of_comparison_is_refused(name: str) -> None:
    refused(Encoder(TWISTS[name]))


EQUAL: dict[str, Twist] = {
    "zero": lambda u: u + 0,
    "one": lambda u: 1.0 * u,
    "views": lambda u: u.transpose(1, 2).reshape(-1).view(4, 3).t().unsqueeze(0).contiguous(),
    "halves": lambda u: torch.cat(u.split(2, -1), -1),
    "in place": lambda u: u.clone().add_(0.0),
    "data": lambda u: u.data,
    "dropout": nn.Dropout(0.5).eval(),
    "shape": lambda u: u if u.shape[1] < 10 else u.clamp(max=FAR),
    "compiled": torch.compile(lambda u: u + 0, backend="eager"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_has_no_effect_anywhere_is_read(name: str) -> None:
    network = read_network(Encoder(EQUAL[name]))
    torch.testing.assert_close(network.logits(x()), Encoder().eval()(x()[None])[0].detach())


OTHERWISE: dict[str, Twist] = {
    "beyond": lambda u: u + torch.relu(u - FAR),
    "product": lambda u: u * (u + 1),
    "parallel": lambda u: nn.functional.gelu(u) + nn.functional.silu(u[..., [1, 0, 3, 2]]) + u,
    "scaled": lambda u: u * torch.tensor([1.0, 2.0, -1.0, 0.0]) - 1.5,
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_written_between_the_layers_is_part_of_the_network(name: str) -> None:
    model = Encoder(OTHERWISE[name])
    network = read_network(model)
    for scale in (1.0, 10 * FAR):
        torch.testing.assert_close(network.logits(scale * x()), model(scale * x()[None])[0])


def test_a_write_changes_every_view_of_its_memory() -> None:
    def twist(u: Tensor) -> Tensor:
        v = u.clone()
        v[:, 0].add_(1e-12 * v[:, 1])
        return v

    refused(Encoder(twist), "combines vectors of several tokens")


@torch.library.custom_op("howsmooth_tests::relu", mutates_args=())
def _relu(u: Tensor) -> Tensor:
    return u.clamp(0, FAR)


def test_an_operation_of_another_library_is_not_that_of_pytorch() -> None:
    refused(Encoder(lambda u: _relu(u)), "computes 'howsmooth_tests::relu'")


class Twice(nn.Module):
    """One attention, applied to the same tokens with two masks."""

    def __init__(self, *masks: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
        self.head, self.masks = nn.Linear(4, 2, dtype=torch.float64), masks

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.attention(x, x, x, attn_mask=mask, need_weights=False)[0] for mask in self.masks]
        return self.head((x + sum(seen)).mean(1))


def test_one_attention_with_two_masks_is_not_read_as_one() -> None:
    causal = torch.ones(3, 3, dtype=torch.bool).triu(1)
    network = read_network(Twice(causal))
    torch.testing.assert_close(network.logits(x()), Twice(causal)(x()[None])[0].detach())
    refused(Twice(causal, causal.T), "applies one attention twice to the same tokens")
    bias = torch.eye(3, dtype=torch.float64)
    refused(Twice(bias, 2 * bias), "applies one attention twice to the same tokens")


def test_a_result_may_stand_twice_in_what_a_map_is_given() -> None:
    class Doubled(Twice):
        def forward(self, x: Tensor) -> Tensor:
            found = self.attention(x, x, x, need_weights=False)[0]
            return self.head((x + self.both(torch.cat([found, found.flip(-1)], -1))).mean(1))

    model = Doubled()
    model.both = nn.Linear(8, 4, dtype=torch.float64)
    network = read_network(model)
    torch.testing.assert_close(network.logits(x()), model(x()[None])[0])


class Readout(nn.Module):
    """No layer at all."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.branch = nn.Linear(4, 2, dtype=torch.float64), branch

    def forward(self, x: Tensor) -> Tensor:
        return self.head(-x.mean(1) if self.branch and x.mean() > FAR else x.mean(1))


def test_a_linear_model_has_the_radius_of_its_gradient() -> None:
    found = NetworkAtInput(Readout(False), x()).radius(order=2)
    assert found.radius == pytest.approx(found.first_order, rel=5e-3)
    assert found.radius <= found.first_order
    refused(Readout(True), "averages over more than one dimension")


class Clipped(nn.GELU):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z).clamp(max=FAR)


class ClippedNorm(nn.LayerNorm):
    def forward(self, u: Tensor) -> Tensor:
        return super().forward(u.clamp(-FAR, FAR))


class ClippedLinear(nn.Linear):
    def forward(self, u: Tensor) -> Tensor:
        return super().forward(u).clamp(-FAR, FAR)


class Other(nn.Module):
    """A parametrisation after which the module's weight is another than the one it computes with."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _patched(layer: Any) -> None:
    own = layer.linear2.forward
    layer.linear2.forward = lambda u: own(u).clamp(-FAR, FAR)


def _patched_method(layer: Any) -> None:
    def block(self: Any, u: Tensor) -> Tensor:
        return type(self)._ff_block(self, u).clamp(-FAR, FAR)

    layer._ff_block = types.MethodType(block, layer)


def _other_weight(layer: Any) -> None:
    own = layer.linear1.weight.detach().clone()
    layer.linear1.forward = lambda u: nn.functional.linear(u, own + 1e-13, layer.linear1.bias)


def _hook(layer: Any) -> None:
    def clamp(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.clamp(-FAR, FAR)

    clamp.__module__ = "howsmooth.bounds"  # hooks of the library itself are taken off by it
    layer.linear1.register_forward_hook(clamp)


CHANGES: dict[str, Callable[[Any], None]] = {
    "patched": _patched,
    "patched method": _patched_method,
    "own norm": lambda layer: setattr(layer, "norm2", ClippedNorm(4, dtype=torch.float64)),
    "own linear": lambda layer: setattr(layer, "linear1", ClippedLinear(4, 6, dtype=torch.float64)),
    "own activation": lambda layer: setattr(layer, "activation", Clipped()),
    "other weight": _other_weight,
    "hook": _hook,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_computes_otherwise_far_away_is_refused(change: str) -> None:
    model = Encoder()
    CHANGES[change](model.layers[1])
    refused(model, "layers.1")


def test_a_fast_path_with_another_activation_is_refused() -> None:
    model = Encoder(activation=Clipped())  # PyTorch computes it as GELU where it takes the fast path
    refused(model, "fast path")
    refused(Encoder(activation=nn.GELU(approximate="tanh")), "fast path")
    same = Encoder(activation=nn.GELU(approximate="tanh"))
    for layer in same.layers:
        layer.activation_relu_or_gelu = 0
    read_network(same)


def test_a_parametrised_weight_is_read_as_it_is_computed() -> None:
    model = Encoder()
    parametrize.register_parametrization(model.layers[0].linear1, "weight", Other())
    network = read_network(model)
    torch.testing.assert_close(network.logits(x()), model(x()[None])[0])


# ---- models of transformers

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_labels": 2, "initializer_range": 0.5}


def gpt2(**options: Any) -> GPT2ForSequenceClassification:
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = GPT2Config(vocab_size=9, n_embd=4, n_positions=4, n_inner=6, **ids, **SMALL, **options)
    return GPT2ForSequenceClassification(config).double()


def bert(**options: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=9, hidden_size=4, intermediate_size=6, **SMALL, **options)
    return BertForSequenceClassification(config).double()


def test_gelu_clipped_at_ten_is_refused_by_name() -> None:
    refused(gpt2(activation_function="gelu_10"), r"mlp.act \(ClippedGELUActivation\).*'clamp'")


class Activated(nn.Module):
    def __init__(self, activation: nn.Module, d: int) -> None:
        super().__init__()
        self.up, self.activation = nn.Linear(d, d, bias=False, dtype=torch.float64), activation
        nn.init.eye_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.up(x))[:, 0]


@pytest.mark.parametrize("name", ACT2FN)
def test_activations_of_transformers_are_known_or_refused(name: str) -> None:
    # Far values too, where clips act.
    z = torch.cat([torch.linspace(-60, 60, 481), torch.tensor([-1e4, -FAR, FAR, 1e4])]).double()
    model = Activated(copy.deepcopy(ACT2FN[name]).double(), len(z)).eval().requires_grad_(False)
    try:
        network, _ = Classifier.at(model, z[None]).network()
    except CertificateError:
        assert name not in (
            "gelu",
            "gelu_new",
            "gelu_python",
            "gelu_pytorch_tanh",
            "quick_gelu",
            "silu",
            "relu",
        )
    else:
        torch.testing.assert_close(network.logits(z[None]), ACT2FN[name](z), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [gpt2, bert])
def test_both_ways_to_compute_attention_are_read(make: Callable[..., Any], implementation: str) -> None:
    model = make(attn_implementation=implementation).eval().requires_grad_(False)
    read = Classifier.at(model, x())
    torch.testing.assert_close(read.network()[0].logits(x()), read.logits(x()))


def test_attention_that_changes_large_scores_is_refused() -> None:
    def capped(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **other: Any) -> Any:
        scores = (query @ key.mT / query.shape[-1] ** 0.5).clamp(-FAR, FAR)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("capped", capped)
    model = gpt2(attn_implementation="capped")
    refused(model, r"h\.0\.attn \(GPT2Attention\) computes 'clamp'")


class Beside(GPT2ForSequenceClassification):
    """A model in which the embedded tokens reach the logits past the layers, once they are large."""

    def forward(
        self, inputs_embeds: Tensor | None = None, input_ids: Tensor | None = None, **other: Any
    ) -> Any:
        table = self.transformer.wte
        embeds = table(input_ids) if inputs_embeds is None else inputs_embeds
        found = super().forward(inputs_embeds=embeds, **other)
        found.logits = found.logits + torch.relu(embeds - FAR).sum((1, 2))[:, None]
        return found


def test_what_passes_by_the_layers_is_refused() -> None:
    model = Beside(gpt2().config).double().eval()
    refused(model)
    with pytest.raises(CertificateError):
        NetworkAtInput(model, {"input_ids": torch.tensor([[1, 5, 2]])})


def test_a_layer_that_stands_twice_is_read_as_two() -> None:
    model = bert()
    model.bert.encoder.layer.append(model.bert.encoder.layer[0])
    model.eval().requires_grad_(False)
    at = NetworkAtInput(model, {"input_ids": torch.tensor([[1, 5, 2]])})
    torch.testing.assert_close(at.logits, model(input_ids=torch.tensor([[1, 5, 2]])).logits[0])


# ---- epsilon of RMSNorm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_rms_norm_without_epsilon_has_that_of_the_dtype_it_computes_with(dtype: torch.dtype) -> None:
    norm = nn.RMSNorm(4, dtype=dtype)
    tiny = torch.full((4,), 1e-6, dtype=dtype)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.head = (
                Encoder().layers[0].to(dtype),
                norm,
                nn.Linear(4, 2, dtype=dtype),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.layer(x)).mean(1))

    found = NetworkAtInput(Last(), x()).network.stages[-1].map
    torch.testing.assert_close(found.value(tiny[None].double())[0], norm(tiny).double(), rtol=1e-2, atol=0)


# ---- masks, and attention whose query is no map of the tokens


class Pooled(nn.Module):
    """Attention of one layer's queries, keys and values, in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, d = kind, {"dtype": torch.float64}
        self.q, self.k, self.v, self.up, self.head, self.score = (
            nn.Linear(4, size, **d) for size in (4, 4, 4, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.kind == "temperature":
            return self.head((self.score(x) / 2).softmax(1).mT @ v)[:, 0]
        if self.kind == "turned keys":
            at = torch.arange(1.0, 4.0, dtype=x.dtype)[:, None]
            k = k * at.cos() + torch.cat([-k[..., 2:], k[..., :2]], -1) * at.sin()
            return self.head(nn.functional.scaled_dot_product_attention(self.up.weight[None, :1], k, v))[:, 0]
        other = torch.tensor([True, True, self.kind == "biased"]).expand(3, 3)
        if self.kind == "no key":
            other = torch.zeros(3, 3, dtype=torch.bool)
        given = torch.where(other, 0.0, -torch.inf).double()
        if self.kind == "biased":
            given[:, 1] = 1.0
        both = [nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask) for mask in (None, given)]
        one, two = (nn.functional.gelu(self.up(u)) for u in both)
        return self.head(one - two)[:, 0]


@pytest.mark.parametrize("kind", ["masked", "biased", "no key", "turned keys"])
def test_another_mask_or_bias_is_another_attention(kind: str) -> None:
    model = Pooled(kind)
    far = x()
    # The last token has no weight here; in the reader nothing may depend on that.
    keys = -400 * model.q(far).detach().mean(0)
    far[-1] = torch.linalg.solve(model.k.weight.detach(), keys - model.k.bias.detach())
    match = {"no key": "sees no key", "turned keys": "not maps of the same tokens"}.get(
        kind, "with other masks"
    )
    for tokens in (x(), far):
        with pytest.raises(CertificateError, match=match):
            Classifier.at(model.eval().requires_grad_(False), tokens).network()


def test_scores_with_a_temperature_are_read() -> None:
    model = Pooled("temperature")
    torch.testing.assert_close(read_network(model).logits(x()), model(x()[None])[0])
