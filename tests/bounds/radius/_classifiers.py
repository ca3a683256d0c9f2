"""Classifiers as people write them: of transformers, and by hand. Each comes with an input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

Made = Callable[[], tuple[nn.Module, Any]]

IDS = torch.tensor([[3, 7, 4, 9, 5]])
MASKED = {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}
LEFT = {"input_ids": torch.tensor([[0, 7, 4, 9, 5]]), "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3, "initializer_range": 0.3}
ENCODER = {**SMALL, "vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "pad_token_id": 0}
DECODER = {**ENCODER, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 1}
ROBERTA = {**ENCODER, "pad_token_id": 1, "max_position_embeddings": 20}
NAMED_OTHERWISE = {
    "vocab_size": 20, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    "initializer_range": 0.3, "n_embd": 8, "n_layer": 2, "n_head": 2,
}  # fmt: skip
IMAGES = {**SMALL, "hidden_size": 8, "intermediate_size": 16, "image_size": 8, "patch_size": 4}


def _text(name: str, given: dict[str, Any] | None = None, **options: Any) -> Made:
    def made() -> tuple[nn.Module, Any]:
        config = getattr(transformers, f"{name}Config")(**options)
        return getattr(transformers, f"{name}ForSequenceClassification")(config), given or {"input_ids": IDS}

    return made


def _image(name: str) -> Made:
    def made() -> tuple[nn.Module, Any]:
        config = getattr(transformers, f"{name}Config")
        if name in ("Siglip", "CLIP"):
            config = config(
                vision_config={key: value for key, value in IMAGES.items() if key != "num_labels"},
                num_labels=3,
            )
        else:
            config = config(**IMAGES)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
        return model, {"pixel_values": torch.randn(1, 3, 8, 8)}

    return made


class PatchViT(nn.Module):
    """A ViT in the manner of lucidrains: one map to queries, keys and values, and products of matrices."""

    def __init__(self, mean: bool, d: int = 8, patch: int = 4) -> None:
        super().__init__()
        self.patch, self.mean, p = patch, mean, 3 * patch * patch
        self.embed = nn.Sequential(nn.LayerNorm(p), nn.Linear(p, d), nn.LayerNorm(d))
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, d)), nn.Parameter(torch.randn(1, 5, d))
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 16), nn.GELU(), nn.Linear(16, d)) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 3)

    def forward(self, img: Tensor) -> Tensor:
        b, c, h, w = img.shape
        p = self.patch
        x = img.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        x = torch.cat([self.cls.expand(b, -1, -1), self.embed(x)], 1) + self.pos
        for qkv, out, norm, mlp in zip(self.qkv, self.out, self.norms, self.mlp, strict=True):
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in qkv(norm(x)).chunk(3, -1))
            weights = (torch.einsum("bhid,bhjd->bhij", q, k) * 4**-0.5).softmax(-1)
            x = out(torch.einsum("bhij,bhjd->bhid", weights, v).transpose(1, 2).flatten(2)) + x
            x = mlp(x) + x
        x = self.norm(x)
        return self.head(x.mean(1) if self.mean else x[:, 0])


class NanoGPT(nn.Module):
    """nanoGPT, whose classes are the next tokens."""

    def __init__(self, fused: bool, d: int = 8, vocabulary: int = 20) -> None:
        super().__init__()
        self.wte, self.wpe, self.fused = nn.Embedding(vocabulary, d), nn.Embedding(16, d), fused
        self.ln1, self.ln2 = (nn.ModuleList(nn.LayerNorm(d) for _ in range(2)) for _ in range(2))
        self.attn, self.proj, self.fc, self.back = (
            nn.ModuleList(nn.Linear(*size) for _ in range(2))
            for size in ((d, 3 * d), (d, d), (d, 16), (16, d))
        )
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, idx: Tensor) -> tuple[Tensor, None]:
        b, t = idx.shape
        x = self.wte(idx) + self.wpe(torch.arange(t))
        for i in range(2):
            q, k, v = (u.view(b, t, 2, -1).transpose(1, 2) for u in self.attn[i](self.ln1[i](x)).split(8, 2))
            if self.fused:
                y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
                y = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")).softmax(-1) @ v
            x = x + self.proj[i](y.transpose(1, 2).contiguous().view(b, t, -1))
            x = x + self.back[i](functional.gelu(self.fc[i](self.ln2[i](x))))
        return self.head(self.norm(x)[:, [-1], :]), None


class Own(nn.Module):
    """A classifier of one's own on embedded tokens, of several kinds."""

    KINDS = (
        "parallel", "layer scale", "batch norm", "gated", "bilinear", "plain", "RMS norm", "attention pool",
        "query pool", "first and mean", "some tokens", "biased scores",
    )  # fmt: skip

    def __init__(self, kind: str, d: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.a, self.b, self.c = nn.Linear(d, 16), nn.Linear(16, d), nn.Linear(d, 16)
        norm = nn.RMSNorm if kind == "RMS norm" else nn.LayerNorm
        self.n1, self.n2 = norm(d), norm(d)
        self.gamma, self.query = nn.Parameter(torch.randn(d)), nn.Parameter(torch.randn(1, 1, d))
        self.bn = nn.BatchNorm1d(d)
        self.bn.running_mean.copy_(torch.randn(d))
        self.bn.running_var.copy_(torch.rand(d) + 0.5)
        self.score, self.hidden, self.head = nn.Linear(d, 1), nn.Linear(d, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self._block(x)
        match self.kind:
            case "attention pool":
                x = (self.score(x).softmax(1).transpose(1, 2) @ x)[:, 0]
            case "query pool":
                x = self.attention(self.query, x, x)[0][:, 0]
            case "first and mean":
                x = (x[:, 0] + x.mean(1)) / 2
            case "some tokens":
                x = x[:, 1:4].mean(1)
            case _:
                x = x.mean(1)
        return self.head(torch.tanh(self.hidden(x)))

    def _block(self, x: Tensor) -> Tensor:
        u = self.n1(x)
        match self.kind:
            case "parallel":
                return x + self._attended(u) + self.b(functional.gelu(self.a(u)))
            case "layer scale":
                x = x + self.gamma * self._attended(u)
                return x + self.gamma * self.b(functional.relu(self.a(self.n2(x))))
            case "batch norm":
                return self.bn((x + self._attended(x)).transpose(1, 2)).transpose(1, 2)
            case "gated":
                x = x + self._attended(u)
                u = self.n2(x)
                return x + self.b(functional.silu(self.a(u)) * self.c(u))
            case "bilinear":
                return x + self.b(self.a(x) * self.c(x))
            case _:
                x = x + self._attended(u)
                return x + self.b(functional.gelu(self.a(self.n2(x)), approximate="tanh"))

    def _attended(self, u: Tensor) -> Tensor:
        n = u.shape[1]
        far = torch.arange(n)[:, None] - torch.arange(n)
        mask = 0.3 * far.to(u.dtype) if self.kind == "biased scores" else None
        return self.attention(u, u, u, attn_mask=mask)[0]


CLASSIFIERS: dict[str, Made] = {
    "BERT": _text("Bert", **ENCODER),
    "BERT with padding": _text("Bert", MASKED, **ENCODER),
    "BERT with padding, eager": _text("Bert", MASKED, **ENCODER, attn_implementation="eager"),
    "RoBERTa": _text("Roberta", **ROBERTA),
    "CamemBERT": _text("Camembert", **ROBERTA),
    "MPNet": _text("MPNet", **ROBERTA),
    "ESM": _text("Esm", **ROBERTA, position_embedding_type="rotary", mask_token_id=2),
    "DistilBERT": _text(
        "DistilBert", vocab_size=20, dim=8, n_layers=2, n_heads=2, hidden_dim=16, num_labels=3,
        initializer_range=0.3,
    ),
    "ALBERT": _text("Albert", **ENCODER, embedding_size=6),
    "ELECTRA": _text("Electra", **ENCODER, embedding_size=6),
    "MobileBERT": _text(
        "MobileBert", **ENCODER, embedding_size=8, intra_bottleneck_size=4, num_feedforward_networks=1
    ),
    "ModernBERT": _text(
        "ModernBert", **ENCODER, cls_token_id=3, sep_token_id=4, bos_token_id=1, eos_token_id=1
    ),
    "GPT-2": _text("GPT2", **NAMED_OTHERWISE),
    "GPT-Neo": _text(
        "GPTNeo", vocab_size=20, hidden_size=8, num_layers=2, num_heads=2, num_labels=3, window_size=2,
        attention_types=[[["global", "local"], 1]], pad_token_id=0, bos_token_id=1, eos_token_id=1,
        initializer_range=0.3,
    ),
    "GPT-NeoX": _text("GPTNeoX", **ENCODER),
    "GPT-J": _text("GPTJ", **NAMED_OTHERWISE, rotary_dim=2),
    "OPT": _text(
        "OPT", vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, ffn_dim=16,
        word_embed_proj_dim=8, num_labels=3, pad_token_id=1, init_std=0.3,
    ),
    "Bloom": _text("Bloom", **{**NAMED_OTHERWISE, "hidden_size": 8, "pad_token_id": 3}),
    "Falcon": _text("Falcon", **{k: v for k, v in ENCODER.items() if k != "intermediate_size"}),
    **{
        name: _text(name, **DECODER)
        for name in ("Llama", "Mistral", "Qwen2", "Phi", "Phi3", "Starcoder2", "Olmo")
    },
    **{name: _text(name, **DECODER, head_dim=4) for name in ("Qwen3", "Gemma", "Gemma3Text")},
    "Llama with padding on the left": _text("Llama", LEFT, **DECODER),
    **{
        name: _image(name)
        for name in ("ViT", "DeiT", "Beit", "Dinov2", "Dinov2WithRegisters", "IJepa", "Siglip", "CLIP")
    },
    "a ViT by hand": lambda: (PatchViT(False), {"img": torch.randn(1, 3, 8, 8)}),
    "a ViT by hand with a mean": lambda: (PatchViT(True), {"img": torch.randn(1, 3, 8, 8)}),
    "nanoGPT": lambda: (NanoGPT(True), {"idx": IDS}),
    "nanoGPT with a mask": lambda: (NanoGPT(False), {"idx": IDS}),
    **{kind: lambda kind=kind: (Own(kind), torch.randn(5, 8)) for kind in Own.KINDS},
}  # fmt: skip
