"""PyTorch's own attention modules, and a vision transformer as users write it, against their own autodiff."""

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


# ---- a vision transformer as timm writes it


class Attention(nn.Module):
    def __init__(self, norm: type[nn.Module] | None, fused: bool) -> None:
        super().__init__()
        self.fused, self.scale = fused, (D // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.q_norm = nn.Identity() if norm is None else norm(D // HEADS)
        self.k_norm = nn.Identity() if norm is None else norm(D // HEADS)
        self.attn_drop, self.proj_drop = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused:
            x = nn.functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0
            )
        else:
            x = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(b, n, d)))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((D,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module] | None, fused: bool, scaled: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D), Attention(norm, fused)
        self.ls1, self.ls2 = (LayerScale() if scaled else nn.Identity() for _ in range(2))
        self.norm2 = nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))

    def attended(self, x: Tensor) -> Tensor:
        return x + self.ls1(self.attn(self.norm1(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attended(x)
        return x + self.ls2(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, D))
        self.pos_embed = nn.Parameter(torch.zeros(1, N, D))
        self.blocks = nn.Sequential(*(Layer(**options) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


@pytest.mark.parametrize(
    ("norm", "fused", "scaled"),
    [(None, True, True), (None, False, False), (nn.LayerNorm, True, False), (nn.RMSNorm, False, True)],
)
def test_a_vision_transformer(norm: type[nn.Module] | None, fused: bool, scaled: bool) -> None:
    model = made(ViT(norm=norm, fused=fused, scaled=scaled))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    attention, block = (capture(model, images, layers=[1], scope=s)[0] for s in ("attention", "block"))
    assert (attention.name, attention.x.shape, attention.masking) == ("blocks.1.attn", (2, N, D), "none")
    assert attention.layout.startswith("pre-norm")
    if norm is None:
        assert isinstance(attention.map, SelfAttention)
    agrees(attention, model.blocks[1].attn)
    agrees(block, model.blocks[1].attended)
