"""PyTorch's own attention modules against their own autodiff."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from howsmooth.attention import SelfAttention, StagedAttention
from howsmooth.errors import CaptureError
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.models import Site, capture
from howsmooth.scopes import SCOPES
from tests._operators import to_dense

N, D, HEADS = 5, 8, 2


def tokens(batch: int = 2, n: int = N) -> Tensor:
    return torch.randn(batch, n, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def made(module: nn.Module) -> nn.Module:
    """The module in float64, with weights so large that its attention is not uniform, and with biases."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.double().parameters():
            scale = 0.3 if p.ndim < 2 else 1.5 / p.shape[-1] ** 0.5
            noise = scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise + (1 if p.ndim == 1 and float(p.mean()) == 1 else 0))
    return module.eval()


def agrees(site: Site, own: Callable[[Tensor], Tensor]) -> None:
    """Hold a map and its Jacobian against a function of the tokens (1, n, d) of one sequence."""
    assert site.path == "closed form"
    for x in site.x[:1], site.x[-1:]:
        torch.testing.assert_close(site.map(x), own(x), rtol=1e-10, atol=1e-10)
    x = site.x[-1:]
    dense = torch.autograd.functional.jacobian(own, x, vectorize=True)
    found = to_dense(closed_form_jacobian(site.map, x))[0]
    wanted = dense.reshape(found.shape)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-11


BAND = (torch.arange(N)[:, None] - torch.arange(N)[None, :]).abs() > 1  # True is blocked
BIAS = torch.linspace(-1, 1, N * N, dtype=torch.float64).reshape(N, N)


@pytest.mark.parametrize(
    ("options", "mask", "masking"),
    [
        ({}, None, "none"),
        ({"bias": False, "batch_first": False}, None, "none"),
        ({"kdim": D, "vdim": D}, BAND, "sliding window 1 to both sides"),
        ({"batch_first": False}, BIAS, "none"),
        ({}, torch.ones(N, N, dtype=torch.bool).triu(1), "causal"),
        ({"add_bias_kv": True}, None, f"{N} queries see {N + 1} keys"),
        ({"add_zero_attn": True, "batch_first": False}, BAND, f"{N} queries see {N + 1} keys"),
    ],
)
def test_multihead_attention(options: dict[str, Any], mask: Tensor | None, masking: str) -> None:
    module = made(nn.MultiheadAttention(D, HEADS, **{"batch_first": True, **options}))
    first, x = options.get("batch_first", True), tokens()
    given = x if first else x.transpose(0, 1)
    (site,) = capture(module, dict.fromkeys(("query", "key", "value"), given) | {"attn_mask": mask})
    assert torch.equal(site.x, x)
    assert site.masking == masking
    further = {"add_bias_kv", "add_zero_attn"} & options.keys()
    assert isinstance(site.map, StagedAttention if further else SelfAttention)

    def own(x: Tensor) -> Tensor:
        t = x if first else x.transpose(0, 1)
        out = module(t, t, t, attn_mask=mask, need_weights=False)[0]
        return out if first else out.transpose(0, 1)

    agrees(site, own)


class OnlyAttention(nn.Module):
    """A call of the module with or without its weights, in training as in evaluation."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, HEADS, dropout=0.5, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


@pytest.mark.parametrize("need_weights", [True, False])
def test_with_and_without_weights(need_weights: bool) -> None:
    module = made(OnlyAttention(need_weights))
    fast = torch.backends.mha.get_fastpath_enabled()
    (site,) = capture(module.train(), tokens())
    assert module.attention.training
    assert torch.backends.mha.get_fastpath_enabled() == fast
    module.eval()
    assert isinstance(site.map, SelfAttention)
    agrees(site, module)


@pytest.mark.parametrize("mask", [BAND, BIAS], ids=["blocked", "bias"])
def test_all_scopes_of_multihead_attention(mask: Tensor) -> None:
    module, x = made(OnlyAttention(need_weights=False)).attention, tokens(1)
    inputs = dict.fromkeys(("query", "key", "value"), x) | {"attn_mask": mask}
    found = {scope: capture(module, inputs, scope=scope) for scope in SCOPES if scope != "block"}
    (heads,), (attention,), (residual,) = found["heads"], found["attention"], found["residual"]
    side_by_side = torch.cat([site.map(x) for site in found["head"]], dim=-1)
    torch.testing.assert_close(side_by_side, heads.map(x))
    torch.testing.assert_close(module.out_proj(heads.map(x)), attention.map(x))
    torch.testing.assert_close(residual.map(x), x + attention.map(x))


@pytest.mark.parametrize("scope", ["attention", "residual", "block"])
@pytest.mark.parametrize(("norm_first", "batch_first"), [(False, True), (True, False)])
def test_encoder_layers(scope: str, norm_first: bool, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(D, HEADS, 16, batch_first=batch_first, norm_first=norm_first)
    model = made(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = tokens()
    given = {"src": x if batch_first else x.transpose(0, 1), "mask": BAND}
    sites = capture(model, given, scope=scope)
    assert [(s.layer, s.name) for s in sites] == [(i, f"layers.{i}.self_attn") for i in range(2)]
    site, inner = sites[1], model.layers[1]
    assert site.layout == ("pre-norm" if norm_first else "post-norm")
    assert site.norm is None if scope == "block" and norm_first else site.norm is not None

    def attention(x: Tensor) -> Tensor:
        t = x if batch_first else x.transpose(0, 1)
        out = inner.self_attn(t, t, t, attn_mask=BAND, need_weights=False)[0]
        return out if batch_first else out.transpose(0, 1)

    def block(h: Tensor) -> Tensor:
        return h + attention(inner.norm1(h)) if norm_first else inner.norm1(h + attention(h))

    agrees(site, {"attention": attention, "residual": lambda x: x + attention(x), "block": block}[scope])


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_layers(norm_first: bool) -> None:
    layer = nn.TransformerDecoderLayer(D, HEADS, 16, batch_first=True, norm_first=norm_first)
    model = made(nn.TransformerDecoder(layer, 2))
    causal = torch.ones(N, N, dtype=torch.bool).triu(1)
    given = {"tgt": tokens(), "memory": tokens(n=3), "tgt_mask": causal}
    sites = capture(model, given, scope="block")
    assert [(s.layer, s.causal) for s in sites] == [(0, True), (2, True)]
    with pytest.raises(CaptureError, match=r"layer 1 .*cross-attention"):
        capture(model, given, layers=[1])
    inner = model.layers[0]

    def block(h: Tensor) -> Tensor:
        x = inner.norm1(h) if norm_first else h
        out = h + inner.self_attn(x, x, x, attn_mask=causal, need_weights=False)[0]
        return out if norm_first else inner.norm1(out)

    agrees(sites[0], block)
