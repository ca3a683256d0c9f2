"""Attention in stages around modules of transformers, against dense autodiff of the modules themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.attention import StagedAttention
from howsmooth.attention.custom_code_attention import Core, SoftmaxCore
from howsmooth.errors import ArgumentError
from howsmooth.force_float64 import WithoutDowncast
from howsmooth.jacobian import closed_form_jacobian
from tests._cases import dense_jacobian, tokens
from tests._operators import to_dense

transformers = pytest.importorskip("transformers")

N, D, KEY = 5, 16, 4


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    yield
    transformers.AttentionInterface._global_mapping.pop(AroundModule.name, None)


class AroundModule:
    """An attention module of transformers as a layer, its calls of the attention function as the cores."""

    name = "howsmooth_test_staged"

    def __init__(self, module: nn.Module, rotary: tuple[Tensor, Tensor]) -> None:
        self.module = module
        self.rotary = rotary

    def to(self, *, dtype: torch.dtype | None = None, device: object = None) -> AroundModule:
        return AroundModule(
            copy.deepcopy(self.module).to(dtype=dtype), tuple(t.to(dtype=dtype) for t in self.rotary)
        )

    def run(self, x: Tensor, core: Core) -> Tensor:
        count = iter(range(9))

        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> Any:
            return core(next(count), q, k, v).transpose(1, 2), None

        transformers.AttentionInterface.register(self.name, attend)
        with WithoutDowncast():
            return self.module(x[None], self.rotary, None)[0][0]


def _module(family: str, kind: str, **keywords: Any) -> tuple[nn.Module, AroundModule]:
    """The attention of the first layer of a tiny model, with causal SDPA, and around cores of ours."""
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=D,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        head_dim=KEY,
        **keywords,
    )
    modeling = getattr(transformers.models, family)
    torch.manual_seed(0)
    module = (
        getattr(getattr(modeling, f"modeling_{family}"), f"{kind}Attention")(config, layer_idx=0)
        .double()
        .eval()
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    module.requires_grad_(False)
    module.config._attn_implementation = "sdpa"
    rotary = getattr(getattr(modeling, f"modeling_{family}"), f"{kind}RotaryEmbedding")(config)
    with WithoutDowncast():
        tables = tuple(t.double() for t in rotary(torch.zeros(1, N, D).double(), torch.arange(N)[None]))
    ours = copy.deepcopy(module)
    ours.config._attn_implementation = AroundModule.name
    return module, AroundModule(ours, tables)


def _written(module: nn.Module, layer: AroundModule) -> Callable[[Tensor], Tensor]:
    def value(x: Tensor) -> Tensor:
        with WithoutDowncast():
            return module(x[None], layer.rotary, None)[0][0]

    return value


def _matrices(module: nn.Module, layer: AroundModule) -> dict[str, Any]:
    """The parameters of a module of Llama's kind as those of SelfAttention."""
    cos, sin = (t[0] for t in layer.rotary)

    def heads(linear: nn.Module) -> Tensor:
        return linear.weight.unflatten(0, (-1, KEY))

    return {
        "query": heads(module.q_proj),
        "key": heads(module.k_proj),
        "value": heads(module.v_proj),
        "output": module.o_proj.weight,
        "causal": True,
        "rotary": hs.Rotary(cos, sin),
    }


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "Qwen3"), ("olmo2", "Olmo2")])
def test_norms_of_queries_and_keys_are_those_of_transformers(family: str, kind: str) -> None:
    module, layer = _module(family, kind)
    norms = (hs.RMSNorm(norm.weight, norm.variance_epsilon) for norm in (module.q_norm, module.k_norm))
    query_norm, key_norm = norms
    f = hs.SelfAttention(**_matrices(module, layer), query_norm=query_norm, key_norm=key_norm)
    x, written = tokens(122, N, D), _written(module, layer)
    torch.testing.assert_close(f(x), written(x), rtol=1e-13, atol=1e-14)
    exact = dense_jacobian(written, x)
    ours = to_dense(closed_form_jacobian(f, x[None]))[0]
    assert (ours - exact).abs().max() <= 1e-13 * exact.abs().max()
    size = float(torch.linalg.matrix_norm(exact, 2))
    assert float(hs.local_lipschitz(f, x, rtol=1e-9).value) == pytest.approx(size, rel=1e-10)
    single = hs.local_lipschitz(f.to(dtype=torch.float32), x.float(), rtol=1e-4)
    assert float(single.value) == pytest.approx(size, rel=1e-5)
    torch.testing.assert_close(f.without_output()(x) @ f.output.T, f(x))
    if family == "qwen3":
        heads = torch.cat([f.head(h)(x) for h in range(4)], dim=1)
        torch.testing.assert_close(heads, f.without_output()(x))
    else:
        with pytest.raises(ArgumentError, match="all heads together"):
            f.head(0)


def test_differential_attention_is_two_softmaxes() -> None:
    module, layer = _module("diffllama", "DiffLlama", lambda_std_dev=0.5)
    core = SoftmaxCore(KEY**-0.5, causal=True)
    f = StagedAttention(
        layer,
        (core, core),
        d=D,
        d_out=D,
        heads=4,
        n=N,
        causal=True,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    x = tokens(120, N, D)
    exact_map = _written(module, layer)
    torch.testing.assert_close(f(x), exact_map(x), rtol=1e-13, atol=1e-14)
    exact = dense_jacobian(exact_map, x)
    ours = to_dense(closed_form_jacobian(f, x[None]))[0]
    assert (ours - exact).abs().max() <= 1e-12 * exact.abs().max()
    found = hs.local_lipschitz(f, x, rtol=1e-9)
    assert found.method == "closed form"
    assert float(found.value) == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-10)


class Keeps(nn.Module):
    """An attention that keeps its last values, as a cache that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.kept = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, self.kept = self.qkv(x).chunk(3, dim=-1)
        return torch.tanh(torch.softmax(q @ k.mT, dim=-1) @ self.kept)


@pytest.mark.parametrize("scope", ["attention", "model"])
def test_a_tensor_that_a_module_keeps_is_copied_without_its_graph(scope: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, model = torch.randn(1, 4, 8), Keeps()
    (site,) = hs.capture(model, x, scope=scope)
    site.map(site.x.requires_grad_())  # the copy keeps a tensor with a graph now
    other = site.map.to(dtype=torch.float64)
    torch.testing.assert_close(other(x.double()), model.double()(x.double()))
