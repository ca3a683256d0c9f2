"""Attention in stages against dense autodiff of the same layers with softmax written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import SoftmaxCore, StagedAttention
from howsmooth.attention.staged import Core
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.spectral import to_dense
from tests._cases import dense_jacobian, tokens

N, D, HEADS, KEY, VALUE = 6, 8, 4, 4, 3
Body = Callable[["Parameters", Tensor, Core], Tensor]


class Parameters:
    """Matrices by name, made when they are first asked for, the same in every conversion."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype

    def draw(self, seed: int, *shape: int) -> Tensor:
        """Gaussian numbers of order 1/√(last size)."""
        return (tokens(seed, *shape) / math.sqrt(shape[-1])).to(self.dtype)


class Around:
    """A layer that is a function of its parameters, its tokens and its core."""

    def __init__(self, body: Body, dtype: torch.dtype = torch.float64) -> None:
        self.body = body
        self.parameters = Parameters(dtype)

    def run(self, x: Tensor, core: Core) -> Tensor:
        return self.body(self.parameters, x, core)

    def to(self, *, dtype: torch.dtype | None = None, device: object = None) -> Around:
        return Around(self.body, dtype or self.parameters.dtype)


def staged(body: Body, *cores: SoftmaxCore, n: int = N, d_out: int = D, **keywords: Any) -> StagedAttention:
    placed: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
    return StagedAttention(
        Around(body), cores, d=D, d_out=d_out, heads=HEADS, n=n, causal=False, **placed, **keywords
    )


def naive_core(core: SoftmaxCore, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of its definition, keys repeated, every entry formed."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (t.repeat_interleave(group, dim=-3) for t in (k, v))
    s = core.scale * torch.einsum("...ik,...jk->...ij", q, k)
    if core.softcap is not None:
        s = core.softcap * torch.tanh(s / core.softcap)
    if core.score_bias is not None:
        s = s + core.score_bias.to(s)
    if core.causal:
        s = s + torch.full(s.shape[-2:], -1e30, dtype=s.dtype).triu(1)
    if core.mask is not None:
        s = torch.where(core.mask, s, -1e30)
    e = torch.exp(s - s.amax(-1, keepdim=True).detach())
    under = e.sum(-1, keepdim=True)
    if core.sinks is not None:
        sinks = core.sinks.to(s)[:, None, None]
        under = under + torch.exp(sinks - s.amax(-1, keepdim=True).detach())
    return torch.einsum("...ij,...jv->...iv", e / under, v)


def naive(f: StagedAttention) -> Callable[[Tensor], Tensor]:
    """The same layer around softmaxes that are written out."""

    def value(x: Tensor) -> Tensor:
        return f.layer.run(x, lambda i, q, k, v: naive_core(f.cores[i], q, k, v))

    return value


# ---- layers


def split(t: Tensor, heads: int) -> Tensor:
    """Rows (n, heads * dim) as (heads, n, dim)."""
    return t.unflatten(-1, (heads, -1)).transpose(-2, -3)


def joined(o: Tensor) -> Tensor:
    """Heads (..., heads, n, dim) side by side."""
    return o.transpose(-2, -3).flatten(-2)


def rms(t: Tensor) -> Tensor:
    return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6)


def projections(p: Parameters, x: Tensor, kv_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    q = split(x @ p.draw(1, HEADS * KEY, D).T, HEADS)
    k = split(x @ p.draw(2, kv_heads * KEY, D).T, kv_heads)
    return 2 * q, 2 * k, split(x @ p.draw(3, kv_heads * VALUE, D).T, kv_heads)


def output(p: Parameters, o: Tensor) -> Tensor:
    return joined(o) @ p.draw(4, D, HEADS * VALUE).T


def plain(p: Parameters, x: Tensor, core: Core) -> Tensor:
    return output(p, core(0, *projections(p, x)))


def normed(p: Parameters, x: Tensor, core: Core) -> Tensor:
    q, k, v = projections(p, x)
    return output(p, core(0, 2 * rms(q), rms(k), v))


def turned(t: Tensor) -> Tensor:
    """Interleaved rotary positions: entries 2i and 2i + 1 are a plane."""
    angles = torch.arange(t.shape[-2])[:, None] / 3.0 ** torch.arange(t.shape[-1] // 2)
    cos, sin = angles.cos().to(t), angles.sin().to(t)
    even, odd = t[..., ::2], t[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def interleaved(p: Parameters, x: Tensor, core: Core) -> Tensor:
    q, k, v = projections(p, x, 2)
    return output(p, core(0, turned(q), turned(k), v))


def gated(p: Parameters, x: Tensor, core: Core) -> Tensor:
    o = joined(core(0, *projections(p, x[None])))
    return (o * torch.sigmoid(x @ p.draw(5, HEADS * VALUE, D).T) @ p.draw(4, D, HEADS * VALUE).T)[0]


def normed_after(p: Parameters, x: Tensor, core: Core) -> Tensor:
    return rms(joined(core(0, *projections(p, x)))) @ p.draw(4, D, HEADS * VALUE).T


def windows(p: Parameters, x: Tensor, core: Core) -> Tensor:
    """Two windows of three tokens, shifted by one, as Swin has them."""
    parts = x.roll(-1, 0).unflatten(0, (2, 3))
    return output(p, core(0, *projections(p, parts))).flatten(0, 1).roll(1, 0)


def fewer_keys(p: Parameters, x: Tensor, core: Core) -> Tensor:
    """Keys and values of pairs of tokens, as SegFormer has them."""
    q, _, _ = projections(p, x)
    _, k, v = projections(p, x.unflatten(0, (3, 2)).mean(1))
    return output(p, core(0, q, k, v))


def fewer_queries(p: Parameters, x: Tensor, core: Core) -> Tensor:
    _, k, v = projections(p, x)
    q, _, _ = projections(p, x[::2])
    return output(p, core(0, q, k, v))


def differential(p: Parameters, x: Tensor, core: Core) -> Tensor:
    q, k, v = projections(p, x)
    other = split(x @ p.draw(6, HEADS * KEY, D).T, HEADS)
    return output(p, rms(core(0, q, k, v) - 0.6 * core(1, other, k, v)))


def chained(p: Parameters, x: Tensor, core: Core) -> Tensor:
    """The second softmax reads what the first gives."""
    first = output(p, core(0, *projections(p, x)))
    return output(p, core(1, *projections(p, x + first)))


def latent(p: Parameters, x: Tensor, core: Core) -> Tensor:
    """Keys and values from a normed latent, one key head, as multi-head latent attention has them."""
    q, _, _ = projections(p, x)
    low = rms(x @ p.draw(7, 5, D).T)
    return output(p, core(0, q, split(low @ p.draw(8, KEY, 5).T, 1), split(low @ p.draw(9, VALUE, 5).T, 1)))


def convolved(p: Parameters, x: Tensor, core: Core) -> Tensor:
    mixed = torch.nn.functional.conv1d(x.T[None], p.draw(10, D, D, 3), padding=1)[0].T
    return output(p, core(0, *projections(p, mixed)))


def _lower(n: int = N) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


CORE = SoftmaxCore(0.5)
CASES: dict[str, Callable[[], StagedAttention]] = {
    "plain": lambda: staged(plain, CORE),
    "norms of queries and keys, causal": lambda: staged(normed, replace(CORE, causal=True)),
    "interleaved rotary, grouped": lambda: staged(interleaved, replace(CORE, causal=True)),
    "gate": lambda: staged(gated, replace(CORE, mask=_lower()[None, None])),
    "norm after the core": lambda: staged(normed_after, CORE),
    "windows": lambda: staged(windows, CORE),
    "windows with masks and biases": lambda: staged(
        windows,
        SoftmaxCore(
            0.7,
            mask=torch.stack((_lower(3), _lower(3).T))[:, None],
            score_bias=tokens(1, 1, HEADS, 3, 3),
            sinks=tokens(2, HEADS),
        ),
    ),
    "fewer keys": lambda: staged(fewer_keys, CORE),
    "fewer keys, padded": lambda: staged(fewer_keys, SoftmaxCore(1.0, mask=torch.tensor([[1, 1, 0]]).bool())),
    "fewer queries": lambda: staged(fewer_queries, CORE),
    "differential": lambda: staged(differential, replace(CORE, causal=True), replace(CORE, scale=0.9)),
    "chained": lambda: staged(chained, CORE, replace(CORE, scale=-0.4, softcap=1.0)),
    "latent": lambda: staged(latent, CORE),
    "convolution": lambda: staged(convolved, CORE),
    "softcap": lambda: staged(plain, SoftmaxCore(0.5, softcap=0.8, score_bias=tokens(3, N, N))),
    "sinks, grouped, bias for each head": lambda: staged(
        interleaved,
        SoftmaxCore(0.5, causal=True, score_bias=tokens(4, HEADS, N, N), sinks=tokens(5, HEADS)),
    ),
    "a mask for each head": lambda: staged(
        plain, SoftmaxCore(0.5, mask=(tokens(6, HEADS, N, N) > 0) | torch.eye(N).bool())
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_jacobian_are_those_of_the_layer_written_out(name: str) -> None:
    f, x = CASES[name](), tokens(100, N, D)
    torch.testing.assert_close(f(x), naive(f)(x), rtol=1e-13, atol=1e-13)
    exact = dense_jacobian(naive(f), x)
    operator = closed_form_jacobian(f, x[None])
    ours = to_dense(operator)[0]
    size = max(1.0, float(exact.abs().max()))
    assert (ours - exact).abs().max() <= 1e-13 * size
    u = tokens(101, 1, *operator.out_shape)
    assert (operator.adjoint_product(u).flatten() - exact.T @ u.flatten()).abs().max() <= 1e-12 * size
    found = hs.local_lipschitz(f, x, rtol=1e-9)
    assert found.method == "closed form"
    assert float(found.value) == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-10)
