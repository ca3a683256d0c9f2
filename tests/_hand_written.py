"""Transformers as people write and publish them, small, and where each of their values stands.

Each is written in the style of one code base, from its published source: names of modules, shapes, order of
operations. ``direct`` on any of their modules makes its calls ``self.attention.forward(x)`` in place of
``self.attention(x)``, as Llama's published code does. The layers that take a mask or positions get them as
that code hands them over. A ``Case`` says where the tokens of a layer enter, and where what it gives is read:
the judge in ``tests._judge`` then runs the model itself with other tokens there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

D, HEADS, VOCABULARY, N, BATCH = 8, 2, 11, 5, 2
WIDTH = D // HEADS


class Module(nn.Module):
    """A module that may call its parts by ``forward``."""

    direct = False


def _split(x: Tensor, heads: int = HEADS) -> Tensor:
    """(batch, n, heads * width) as (batch, heads, n, width)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _causal(n: int, like: Tensor) -> Tensor:
    return torch.full((n, n), float("-inf"), dtype=like.dtype).triu(1)


class RMSNorm(Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class MLP(Module):
    def __init__(self, dim: int = D) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


# ---- nanoGPT


class CausalSelfAttention(Module):
    """Of nanoGPT: ``flash`` where PyTorch has it, else a mask in a buffer that is called ``bias``."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.n_head, self.n_embd, self.dropout, self.flash = HEADS, D, 0.0, flash
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = functional.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class NanoBlock(Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(D), CausalSelfAttention(flash)
        self.ln_2, self.mlp = nn.LayerNorm(D), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.attn.forward if self.direct else self.attn)(self.ln_1(x))
        return x + (self.mlp.forward if self.direct else self.mlp)(self.ln_2(x))


class NanoGPT(Module):
    """Returns logits and a loss; without targets only the logits of the last token."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, D),
                "wpe": nn.Embedding(16, D),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([NanoBlock(flash) for _ in range(2)]),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.lm_head = nn.Linear(D, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
            return logits, loss
        return self.lm_head(x[:, [-1], :]), None


# ---- Llama: Meta's code and llama2.c


def precompute_freqs_cis(dim: int, end: int) -> Tensor:
    freqs = 1.0 / (100.0 ** (torch.arange(0, dim, 2).double() / dim))
    freqs = torch.outer(torch.arange(end).double(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Of complex numbers, as Meta's code has it: (batch, n, heads, width)."""
    xq_ = torch.view_as_complex(_wide(xq).reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(_wide(xk).reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[-1]).to(xq_.dtype)
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    return (
        x[:, :, :, None, :]
        .expand(bs, slen, n_kv_heads, n_rep, head_dim)
        .reshape(bs, slen, n_kv_heads * n_rep, head_dim)
    )


class LlamaAttention(Module):
    """Of Meta's Llama, with its cache of keys and values, or of llama2.c, which has none."""

    def __init__(self, cache: bool, flash: bool) -> None:
        super().__init__()
        self.n_kv, self.n_rep, self.flash, self.cached = 1, HEADS, flash, cache
        self.wq, self.wk = nn.Linear(D, D, bias=False), nn.Linear(D, WIDTH, bias=False)
        self.wv, self.wo = nn.Linear(D, WIDTH, bias=False), nn.Linear(D, D, bias=False)
        if cache:
            self.cache_k, self.cache_v = torch.zeros(4, 16, 1, WIDTH), torch.zeros(4, 16, 1, WIDTH)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, HEADS, WIDTH)
        xk, xv = xk.view(bsz, seqlen, self.n_kv, WIDTH), xv.view(bsz, seqlen, self.n_kv, WIDTH)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis=freqs_cis)
        if self.cached:
            self.cache_k, self.cache_v = self.cache_k.to(xq), self.cache_v.to(xq)
            self.cache_k[:bsz, start_pos : start_pos + seqlen] = xk
            self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv
            xk, xv = self.cache_k[:bsz, : start_pos + seqlen], self.cache_v[:bsz, : start_pos + seqlen]
        keys, values = repeat_kv(xk, self.n_rep), repeat_kv(xv, self.n_rep)
        xq, keys, values = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        if self.flash:
            output = functional.scaled_dot_product_attention(xq, keys, values, is_causal=True)
        else:
            scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(WIDTH)
            if mask is not None:
                scores = scores + mask
            scores = functional.softmax(_wide(scores), dim=-1).type_as(xq)
            output = torch.matmul(scores, values)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class FeedForward(Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(D, 2 * D, bias=False), nn.Linear(2 * D, D, bias=False)
        self.w3 = nn.Linear(D, 2 * D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(Module):
    def __init__(self, cache: bool, flash: bool) -> None:
        super().__init__()
        self.attention, self.feed_forward = LlamaAttention(cache, flash), FeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(D), RMSNorm(D)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        attention = self.attention.forward if self.direct else self.attention
        feed_forward = self.feed_forward.forward if self.direct else self.feed_forward
        h = x + attention(self.attention_norm(x), start_pos, freqs_cis, mask)
        return h + feed_forward(self.ffn_norm(h))


class Llama(Module):
    def __init__(self, cache: bool, flash: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, D)
        self.layers = nn.ModuleList(LlamaBlock(cache, flash) for _ in range(2))
        self.norm, self.output = RMSNorm(D), nn.Linear(D, VOCABULARY, bias=False)
        self.freqs_cis = precompute_freqs_cis(WIDTH, 16)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
        mask = None
        if seqlen > 1:
            mask = torch.full((1, 1, seqlen, seqlen), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=start_pos + 1).type_as(h)
        for layer in self.layers:
            h = layer(h, start_pos, freqs_cis, mask)
        return self.output(self.norm(h))


# ---- x-transformers


class XAttention(Module):
    """Of x-transformers: memory keys and values of its own, and heads that talk, before and after."""

    def __init__(self, mem_kv: int = 0, talking: bool = False) -> None:
        super().__init__()
        self.heads, self.scale, self.mem = HEADS, WIDTH**-0.5, mem_kv
        self.to_q, self.to_k = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.to_v, self.to_out = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        if mem_kv:
            self.mem_k, self.mem_v = (nn.Parameter(torch.randn(HEADS, mem_kv, WIDTH)) for _ in range(2))
        self.talking = talking
        if talking:
            self.pre_softmax_talking_heads = nn.Conv2d(HEADS, HEADS, 1, bias=False)
            self.post_softmax_talking_heads = nn.Conv2d(HEADS, HEADS, 1, bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        kv_input = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(kv_input), self.to_v(kv_input)
        q, k, v = (_split(t, self.heads) for t in (q, k, v))
        if self.mem:
            k = torch.cat((self.mem_k.expand(len(x), -1, -1, -1), k), dim=-2)
            v = torch.cat((self.mem_v.expand(len(x), -1, -1, -1), v), dim=-2)
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        if self.talking:
            sim = self.pre_softmax_talking_heads(sim)
        i, j = sim.shape[-2:]
        mask = torch.ones((i, j), dtype=torch.bool, device=x.device).triu(j - i + 1)
        sim = sim.masked_fill(mask, -torch.finfo(sim.dtype).max)
        attn = functional.softmax(sim, dim=-1, dtype=sim.dtype)
        attn = attn.type(sim.dtype)
        if self.talking:
            attn = self.post_softmax_talking_heads(attn)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(_join(out)), {"attn": attn}


class XResidual(Module):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


class XFeedForward(Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Sequential(
            nn.Sequential(nn.Linear(D, 2 * D), nn.GELU()), nn.Dropout(0.0), nn.Linear(2 * D, D)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.ff(x)


class AttentionLayers(Module):
    """A list of triples (norms, block, residual), called by the kind of the block."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer_types = ("a", "f") * 2
        self.layers = nn.ModuleList()
        for kind in self.layer_types:
            block = XAttention(**options) if kind == "a" else XFeedForward()
            self.layers.append(
                nn.ModuleList([nn.ModuleList([nn.LayerNorm(D), None, None]), block, XResidual()])
            )
        self.final_norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for kind, (norm, block, residual_fn) in zip(self.layer_types, self.layers, strict=True):
            pre_norm, post_branch_norm, post_main_norm = norm
            residual = x
            x = pre_norm(x)
            call = block.forward if self.direct else block
            out = call(x)[0] if kind == "a" else call(x)
            if post_branch_norm is not None:
                out = post_branch_norm(out)
            x = residual_fn(out, residual)
            if post_main_norm is not None:
                x = post_main_norm(x)
        return self.final_norm(x)


class XTransformer(Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.token_emb, self.attn_layers = nn.Embedding(VOCABULARY, D), AttentionLayers(**options)
        self.to_logits = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token_emb(x)
        return self.to_logits((self.attn_layers.forward if self.direct else self.attn_layers)(x))


# ---- vision: lucidrains' ViT and timm's


class LucidAttention(Module):
    """The norm stands inside; the output projection is a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale, self.norm = HEADS, WIDTH**-0.5, nn.LayerNorm(D)
        self.attend, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.0)
        self.to_qkv = nn.Linear(D, 3 * D, bias=False)
        self.to_out = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (_split(t, self.heads) for t in qkv)
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        attn = self.attend(dots)
        attn = self.dropout(attn)
        return self.to_out(_join(torch.matmul(attn, v)))


class LucidTransformer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(D), nn.ModuleList([])
        for _ in range(2):
            feed_forward = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
            self.layers.append(nn.ModuleList([LucidAttention(), feed_forward]))

    def forward(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = (attn.forward if self.direct else attn)(x) + x
            x = ff(x) + x
        return self.norm(x)


class LucidViT(Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, D), nn.LayerNorm(D))
        self.cls_token, self.pos_embedding = (
            nn.Parameter(torch.randn(1, 1, D)),
            nn.Parameter(torch.randn(1, N, D)),
        )
        self.dropout, self.transformer = nn.Dropout(0.0), LucidTransformer()
        self.mlp_head = nn.Linear(D, VOCABULARY)

    def forward(self, img: Tensor) -> Tensor:
        patches = img.unfold(2, 2, 2).unfold(3, 2, 2)  # (batch, channels, rows, columns, 2, 2)
        x = self.to_patch_embedding(patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2))
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        x = self.dropout(x + self.pos_embedding[:, : x.shape[1]])
        return self.mlp_head(self.transformer(x)[:, 0])


class LayerScale(Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((D,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class TimmAttention(Module):
    def __init__(self, fused: bool, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale, self.fused_attn = HEADS, WIDTH, WIDTH**-0.5, fused
        self.qkv = nn.Linear(D, 3 * D)
        self.q_norm = nn.LayerNorm(WIDTH) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(WIDTH) if qk_norm else nn.Identity()
        self.attn_drop, self.norm, self.proj = nn.Dropout(0.0), nn.Identity(), nn.Linear(D, D)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, n, C = x.shape
        qkv = self.qkv(x).reshape(B, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0
            )
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v
        x = x.transpose(1, 2).reshape(B, n, C)
        return self.proj_drop(self.proj(self.norm(x)))


class TimmBlock(Module):
    def __init__(self, fused: bool, qk_norm: bool, scaled: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D), TimmAttention(fused, qk_norm)
        self.ls1 = LayerScale() if scaled else nn.Identity()
        self.drop_path1, self.norm2, self.mlp = nn.Identity(), nn.LayerNorm(D), MLP()
        self.ls2, self.drop_path2 = LayerScale() if scaled else nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1((self.attn.forward if self.direct else self.attn)(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class TimmViT(Module):
    def __init__(self, fused: bool, qk_norm: bool, scaled: bool) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, D, 2, 2)
        self.cls_token, self.pos_embed = (
            nn.Parameter(torch.randn(1, 1, D)),
            nn.Parameter(torch.randn(1, N, D)),
        )
        self.pos_drop = nn.Dropout(0.0)
        self.blocks = nn.Sequential(*[TimmBlock(fused, qk_norm, scaled) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        return self.norm(self.blocks(self.pos_drop(x + self.pos_embed)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)[:, 0])


# ---- one attention each, in a decoder or encoder that is pre-norm unless it says otherwise


class Projected(Module):
    """Queries, keys and values by a matrix each, and an output matrix; ``mix`` does the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(_join(self.mix(_split(self.q(x)), _split(self.k(x)), _split(self.v(x)))))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        return torch.softmax(s + _causal(s.shape[-1], s), dim=-1) @ v


class LatentAttention(Module):
    """Of DeepSeek: keys and values out of a small latent, one rotated key for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.nope, self.rope, self.rank = 4, 2, 4
        self.wq_a, self.q_norm = nn.Linear(D, 5, bias=False), RMSNorm(5)
        self.wq_b = nn.Linear(5, HEADS * (self.nope + self.rope), bias=False)
        self.wkv_a, self.kv_norm = nn.Linear(D, self.rank + self.rope), RMSNorm(self.rank)
        self.wkv_b = nn.Linear(self.rank, HEADS * (self.nope + WIDTH), bias=False)
        self.wo = nn.Linear(HEADS * WIDTH, D, bias=False)
        self.freqs_cis = precompute_freqs_cis(self.rope, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(b, n, HEADS, -1)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [self.rank, self.rope], dim=-1)
        q_pe, k_pe = apply_rotary_emb(q_pe, k_pe.unsqueeze(2), self.freqs_cis[:n])
        kv = self.wkv_b(self.kv_norm(kv)).view(b, n, HEADS, self.nope + WIDTH)
        k_nope, v = torch.split(kv, [self.nope, WIDTH], dim=-1)
        q = torch.cat([q_nope, q_pe], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, HEADS, -1)], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * (self.nope + self.rope) ** -0.5
        scores = scores + _causal(n, scores).unsqueeze(1)
        scores = scores.softmax(dim=-1)
        return self.wo(torch.einsum("bsht,bthd->bshd", scores, v).flatten(2))


class GatedAttention(Projected):
    """A sigmoid gate of the token, after the heads (Qiu et al. 2025, Qwen3-Next)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(_split(self.q(x)), _split(self.k(x)), _split(self.v(x)))
        return self.o(_join(heads) * torch.sigmoid(self.gate(x)))


class L2Attention(Projected):
    """Kim, Papamakarios, Mnih 2021: scores of distances, here with tied queries and keys."""

    def forward(self, x: Tensor) -> Tensor:
        q = _split(self.q(x))
        distances = q.square().sum(-1)[..., :, None] - 2 * q @ q.mT + q.square().sum(-1)[..., None, :]
        return self.o(_join(torch.softmax(-distances / math.sqrt(WIDTH), dim=-1) @ _split(self.v(x))))


class LinearAttention(Projected):
    """Katharopoulos et al. 2020: no softmax."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        norm = torch.einsum("bhnd,bhd->bhn", q, k.sum(2))
        return torch.einsum("bhnd,bhde->bhne", q, torch.einsum("bhnd,bhne->bhde", k, v)) / norm[..., None]


class FlexAttention(Projected):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return torch.where(q_idx >= kv_idx, score + 0.1 * (kv_idx - q_idx), -float("inf"))

        return flex_attention(q, k, v, score_mod=score_mod)


class ExpSum(Projected):
    """The softmax written out."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        s = s + _causal(s.shape[-1], s)
        e = torch.exp(s - s.max(dim=-1, keepdim=True).values)
        return (e / e.sum(dim=-1, keepdim=True)) @ v


class Chunked(Projected):
    """A softmax for every two queries, which saves memory."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([torch.softmax(c @ k.mT / math.sqrt(WIDTH), -1) @ v for c in q.split(2, 2)], dim=2)


class LectureHead(Module):
    """One head, a module of its own (Karpathy's lecture)."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(D, WIDTH, bias=False), nn.Linear(D, WIDTH, bias=False)
        self.value, self.dropout = nn.Linear(D, WIDTH, bias=False), nn.Dropout(0.0)
        self.register_buffer("tril", torch.tril(torch.ones(16, 16)))

    def forward(self, x: Tensor) -> Tensor:
        T, k, q = x.shape[1], self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.dropout(functional.softmax(wei, dim=-1))
        return wei @ self.value(x)


class LectureAttention(Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.proj = nn.ModuleList(LectureHead() for _ in range(HEADS)), nn.Linear(D, D)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat([(h.forward if self.direct else h)(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))


class MixtureOfExperts(Module):
    """A router whose softmax stands before a product, and is no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 2), nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        w = torch.softmax(self.router(x), dim=-1)
        return (w.unsqueeze(-2) @ torch.stack([e(x) for e in self.experts], dim=-2)).squeeze(-2)


class PreNorm(Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = (
            nn.LayerNorm(D),
            attention(),
            nn.LayerNorm(D),
            MLP(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.attention.forward if self.direct else self.attention)(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Mixture(PreNorm):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__(attention)
        self.mlp = MixtureOfExperts()


class Parallel(PreNorm):
    """Of GPT-J: attention and feed-forward part side by side, behind one norm."""

    def forward(self, x: Tensor) -> Tensor:
        residual, x = x, self.norm1(x)
        return (self.attention.forward if self.direct else self.attention)(x) + self.mlp(x) + residual


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + (self.attention.forward if self.direct else self.attention)(x))
        return self.norm2(x + self.mlp(x))


class Stack(Module):
    """Token ids, two blocks, a norm, logits; ``shared`` runs one block twice, as ALBERT does."""

    def __init__(
        self,
        attention: Callable[[], nn.Module],
        block: Callable[[Callable[[], nn.Module]], nn.Module] = PreNorm,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.emb, self.shared = nn.Embedding(VOCABULARY, D), shared
        self.layers = nn.ModuleList(block(attention) for _ in range(1 if shared else 2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in [*self.layers] * (2 if self.shared else 1):
            x = layer(x)
        return self.head(self.norm(x))


class Pooling(Projected):
    """Queries that are learned: attention from the module to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = nn.Parameter(torch.randn(N, D))

    def forward(self, x: Tensor) -> Tensor:
        q = _split(self.q(self.seed).expand(len(x), -1, -1))
        return self.o(_join(torch.softmax(q @ _split(self.k(x)).mT, dim=-1) @ _split(self.v(x))))


class Pooled(Stack):
    def __init__(self) -> None:
        super().__init__(Projected)
        self.pool = Pooling()
        self.head = nn.Sequential(self.pool, self.head)


class DetrLayer(PreNorm):
    """Of DETR: queries and keys are the tokens with their positions, values the tokens alone."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.MultiheadAttention(D, HEADS, batch_first=True))
        self.pos = nn.Parameter(torch.randn(1, N, D))

    def forward(self, x: Tensor) -> Tensor:
        q = k = x + self.pos
        attention = self.attention.forward if self.direct else self.attention
        x = self.norm1(x + attention(q, k, value=x, need_weights=False)[0])
        return self.norm2(x + self.mlp(x))


# ---- the cases


@dataclass(frozen=True)
class Spot:
    """A value in a run of a model: the first floating tensor that a module is given or returns.

    ``call`` counts the calls of its ``method``.
    """

    path: str
    side: str = "in"
    call: int = 0
    method: str = "forward"

    @property
    def point(self) -> tuple[str, str, str, int]:
        return self.path, self.method, self.side, self.call


@dataclass(frozen=True)
class Block:
    """From where to where scope "block" goes; ``adds`` says that the residual is still to be added."""

    enter: Spot
    leave: Spot
    adds: bool = False


SCOPES = ("head", "heads", "attention", "residual", "block", "model")


@dataclass(frozen=True, eq=False)
class Case:
    """A model, its inputs, and where the values of one of its layers stand.

    Where several places are given, the tokens of the site decide which is meant. ``heads`` is the place of
    all heads side by side, in one of several ways to mean it, or the path of the square output matrix, whose
    inverse then gives them back.
    ``expected`` says what becomes of each scope: "closed form"; "measured", in whichever way; "any", measured
    or refused; "refused: word", with a word of the sentence; "measured, or refused: word". A scope that is
    not named is to be "closed form", and scope "model" "measured".
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    tokens: tuple[Spot, ...]
    attention: tuple[Spot, ...]
    heads: tuple[Spot | str, ...]
    block: tuple[Block, ...]
    model: tuple[Spot, ...]
    layer: int = 1
    expected: Mapping[str, str] = field(default_factory=dict)
    blocks: str = ""  # the list whose entries are compiled one by one
    half: bool = True  # whether its weights can be bfloat16
    count: int = HEADS
    differences: bool = False  # whether PyTorch has no derivative of it on a processor

    def expects(self, scope: str) -> str:
        return self.expected.get(scope, "measured" if scope == "model" else "closed form")


def spread(model: nn.Module) -> nn.Module:
    """Weights so large that no attention is uniform, gains that are not one, biases that are not zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.double().parameters():
            scale = 0.3 if p.ndim < 2 else 1.0 if p.shape[0] in (1, VOCABULARY) else 1.5 / p[0].numel() ** 0.5
            noise = scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise + (1 if p.ndim == 1 and float(p.mean()) == 1 else 0))
    return model.eval()


def _ids(name: str, **more: Any) -> Callable[[], dict[str, Any]]:
    ids = torch.randint(VOCABULARY, (BATCH, N), generator=torch.Generator().manual_seed(1))
    return lambda: {name: ids, **more}


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _layer(
    root: str, attention: str, projection: str, norm: str, following: str, entries: tuple[Spot, ...]
) -> dict[str, Any]:
    """The places of a pre-norm layer: what follows the sum is the input of the next norm."""
    return {
        "tokens": (Spot(f"{root}.{attention}"),),
        "attention": (Spot(f"{root}.{attention}", "out"),),
        "heads": (Spot(f"{root}.{attention}.{projection}"),),
        "block": (Block(Spot(root), Spot(f"{root}.{following}")),),
        "model": entries,
    }


def _stack(kind: Callable[[], nn.Module], /, **more: Any) -> Case:
    places = _layer("layers.1", "attention", "o", "norm1", "norm2", (Spot("emb", "out"),))
    fixed = {"make": lambda: Stack(kind), "inputs": _ids("ids"), "blocks": "layers"}
    return Case(**{**fixed, **places, **more})


_NANO = _layer(
    "transformer.h.1", "attn", "c_proj", "ln_1", "ln_2",
    (Spot("transformer.wte", "out"), Spot("transformer.drop"), Spot("transformer.h.0")),
)  # fmt: skip
_LLAMA = _layer("layers.1", "attention", "wo", "attention_norm", "ffn_norm", (Spot("tok_embeddings", "out"),))
_X = {
    "tokens": (Spot("attn_layers.layers.2.1"),),
    "attention": (Spot("attn_layers.layers.2.1", "out"),),
    "heads": (Spot("attn_layers.layers.2.1.to_out"),),
    "block": (Block(Spot("attn_layers.layers.2.0.0"), Spot("attn_layers.layers.2.1", "out"), adds=True),),
    "model": (Spot("token_emb", "out"),),
}
_TIMM = _layer("blocks.1", "attn", "proj", "norm1", "norm2", (Spot("pos_drop"), Spot("blocks.0"), Spot("")))
_LUCID = "transformer.layers.1.0"
_UNKNOWN = "measured, or refused: local_lipschitz"
_MIXED = {"head": "any", "heads": "any"} | dict.fromkeys(("attention", "residual", "block"), _UNKNOWN)
_POST = {"block": (Block(Spot("layers.1"), Spot("layers.1.norm1", "out")),)}
_NO_BLOCK = {"block": "any"}  # none of their modules is a block with its residual
_CACHED = dict.fromkeys(SCOPES, "measured, or refused: cache")


CASES: dict[str, Case] = {
    "nanogpt flash": Case(lambda: NanoGPT(True), _ids("idx"), **_NANO, blocks="transformer.h"),
    "nanogpt plain": Case(lambda: NanoGPT(False), _ids("idx"), **_NANO, blocks="transformer.h"),
    "llama2.c": Case(lambda: Llama(False, True), _ids("tokens"), **_LLAMA, blocks="layers"),
    "llama2.c plain": Case(lambda: Llama(False, False), _ids("tokens"), **_LLAMA, blocks="layers"),
    "meta llama": Case(
        lambda: Llama(True, False), _ids("tokens", start_pos=0), **_LLAMA, blocks="layers", expected=_CACHED
    ),
    "x-transformers": Case(XTransformer, _ids("x"), **_X, expected=_NO_BLOCK),
    "x-transformers memory": Case(lambda: XTransformer(mem_kv=2), _ids("x"), **_X, expected=_NO_BLOCK),
    "x-transformers talking": Case(
        lambda: XTransformer(talking=True), _ids("x"), **_X, expected={**_MIXED, **_NO_BLOCK}
    ),
    "lucidrains vit": Case(
        LucidViT,
        lambda: {"img": _noise(BATCH, 3, 4, 4)},
        tokens=(Spot(f"{_LUCID}.to_qkv"), Spot(_LUCID)),  # its norm stands inside
        attention=(Spot(_LUCID, "out"),),
        heads=(Spot(f"{_LUCID}.to_out"),),
        block=(Block(Spot(_LUCID), Spot("transformer.layers.1.1")),),
        model=(Spot("dropout"), Spot("")),
        expected=_NO_BLOCK,
    ),
    "timm vit": Case(
        lambda: TimmViT(True, False, True), lambda: {"x": _noise(BATCH, 3, 4, 4)}, **_TIMM, blocks="blocks"
    ),
    "timm vit plain": Case(
        lambda: TimmViT(False, True, False), lambda: {"x": _noise(BATCH, 3, 4, 4)}, **_TIMM, blocks="blocks"
    ),
    "latent": _stack(LatentAttention, heads=(Spot("layers.1.attention.wo"),)),
    "gated": _stack(
        GatedAttention, heads=(Spot("layers.1.attention.o"), Spot("layers.1.attention", "out", method="mix"))
    ),
    "l2": _stack(L2Attention, expected=_MIXED),
    "linear attention": _stack(
        LinearAttention, expected=dict.fromkeys(SCOPES[:5], "refused: local_lipschitz")
    ),
    "flex": _stack(
        FlexAttention, half=False, differences=True, expected={"model": "measured, or refused: FlexAttention"}
    ),
    "exp and sum": _stack(ExpSum, expected=dict.fromkeys(SCOPES[:5], _UNKNOWN)),
    # Whether their layers are the modules or the softmaxes is free: the last is in the last block.
    "chunked": _stack(Chunked, layer=-1, expected=dict.fromkeys(SCOPES[:5], "any")),
    "lecture": _stack(
        LectureAttention,
        layer=-1,
        attention=(Spot("layers.1.attention", "out"), Spot("layers.1.attention.heads.1", "out")),
        heads=(Spot("layers.1.attention.proj"), Spot("layers.1.attention.heads.1", "out")),
        expected={**dict.fromkeys(SCOPES[:5], "any"), "attention": "measured"},
    ),
    "mixture of experts": _stack(Projected, make=lambda: Stack(Projected, Mixture)),
    "pooling": _stack(
        Pooling,
        make=Pooled,
        layer=-1,
        tokens=(Spot("pool"),),
        attention=(Spot("pool", "out"),),
        heads=(Spot("pool.o"),),
        block=(Block(Spot("pool"), Spot("pool", "out"), adds=True),),
        expected=dict.fromkeys(SCOPES[:5], "any"),
    ),
    "detr": _stack(
        Projected,
        make=lambda: Stack(Projected, lambda attention: DetrLayer()),
        tokens=(Spot("layers.1"),),
        heads=("layers.1.attention.out_proj",),
        expected={
            **dict.fromkeys(("head", "heads", "attention", "residual"), "any"),
            "block": "refused: cannot be identified",
        },
        **_POST,
    ),
    "parallel": _stack(
        Projected, make=lambda: Stack(Projected, Parallel),
        block=(Block(Spot("layers.1.norm1"), Spot("layers.1.attention", "out"), adds=True),),
    ),
    "post-norm": _stack(Projected, make=lambda: Stack(Projected, PostNorm), **_POST),
    "shared weights": _stack(
        Projected, make=lambda: Stack(Projected, PostNorm, shared=True),
        tokens=(Spot("layers.0.attention", call=1),),
        attention=(Spot("layers.0.attention", "out", call=1),),
        heads=(Spot("layers.0.attention.o", call=1),),
        block=(Block(Spot("layers.0", call=1), Spot("layers.0.norm1", "out", call=1)),),
    ),
}  # fmt: skip
