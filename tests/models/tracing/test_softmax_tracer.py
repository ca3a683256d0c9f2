"""Seeing the softmax attention in hand-written code, and in torch's own modules."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from howsmooth.errors import ArgumentError
from howsmooth.models.tracing.softmax_call import SoftmaxCall
from howsmooth.models.tracing.softmax_tracer import SoftmaxTracer

B, H, M, D, DV = 2, 3, 5, 4, 7  # value_dim > n: the output tells the probabilities
MIN = torch.finfo(torch.float64).min
CAUSAL = torch.ones(M, M, dtype=torch.bool).tril()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Given:
    """Operands (b, h, m, d), and what hand-written attention adds to them."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    sinks: Tensor


def given() -> Given:
    q, k, v = random(B, H, M, D), random(B, H, M, D, seed=1), random(B, H, M, DV, seed=2)
    return Given(q, k, v, random(H, M, M, seed=3), random(H, seed=4))


def additive(fill: float = -math.inf) -> Tensor:
    return torch.zeros(M, M, dtype=torch.float64).masked_fill(~CAUSAL, fill)


def naive(call: SoftmaxCall) -> np.ndarray:
    """The attention of a call's operands, one query at a time."""
    assert call.obstacle == ""
    q, k, v = (t.detach().double().numpy() for t in (call.query, call.key, call.value))
    *lead, heads, m, _ = q.shape
    group = heads // k.shape[-3]
    out = np.empty((*lead, heads, m, v.shape[-1]))
    mask = None
    if call.mask is not None:
        mask = np.broadcast_to(call.mask.detach().numpy(), (*lead, heads, m, k.shape[-2]))
    for *at, h, i in np.ndindex(*lead, heads, m):
        at = tuple(at)
        s = call.scale * (k[(*at, h // group)] @ q[(*at, h, i)])
        if call.softcap is not None:
            s = call.softcap * np.tanh(s / call.softcap)
        if call.causal:
            s[i + 1 :] = -np.inf
        if mask is not None:
            row = mask[(*at, h, i)]
            s = np.where(row, s, -np.inf) if mask.dtype == bool else s + row
        top = s.max()
        weights = np.exp(s - top)
        total = weights.sum()
        if call.sinks is not None:
            total += np.exp(float(call.sinks[h].detach()) - top)
        out[(*at, h, i)] = (weights / total) @ v[(*at, h // group)]
    return out


def plain(call: SoftmaxCall) -> Tensor:
    """The same in torch, to be differentiated."""
    assert call.query is not None
    assert call.key is not None
    group = call.query.shape[-3] // call.key.shape[-3]
    k, v = call.key.repeat_interleave(group, -3), call.value.repeat_interleave(group, -3)
    s = call.scale * torch.einsum("...md,...nd->...mn", call.query, k)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if call.mask is not None:
        boolean = call.mask.dtype == torch.bool
        s = s.masked_fill(~call.mask, -math.inf) if boolean else s + call.mask
    if call.sinks is not None:
        s = torch.cat([s, call.sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
    return torch.einsum("...mn,...nd->...md", s.softmax(-1)[..., : k.shape[-2]], v)


def calls_of(run: Callable[[], Any], **options: Any) -> tuple[list[SoftmaxCall], Any]:
    calls: list[SoftmaxCall] = []
    with SoftmaxTracer(lambda call: calls.append(call), **options):
        out = run()
    return calls, out


SEVERAL = "its scores are a sum of several products of the tokens"


# --- Attention as people write it ----------------------------------------------------------------------


def matmul(g: Given) -> Tensor:
    return torch.matmul(functional.softmax(torch.matmul(g.q, g.k.transpose(-1, -2)) / 2, dim=-1), g.v)


def scaled_before(g: Given) -> Tensor:
    return ((g.q * 0.5) @ (g.k / 3).mT).softmax(-1) @ g.v


def scaled_in_place_by_numpy(g: Given) -> Tensor:
    s = g.q @ g.k.mT
    s /= np.sqrt(D)
    s += g.bias
    s *= 1.5
    return s.softmax(-1) @ g.v


def scaled_by_tensor(g: Given) -> Tensor:
    return ((g.q @ g.k.mT + g.bias) / torch.sqrt(torch.tensor(D, dtype=torch.float64))).softmax(-1) @ g.v


def masked_fill(g: Given) -> Tensor:
    s = (g.q @ g.k.mT).masked_fill(~CAUSAL, -1e9)
    return torch.softmax(s, -1) @ g.v


def masked_fill_in_place_then_bias(g: Given) -> Tensor:
    s = g.q @ g.k.mT
    s.masked_fill_(~CAUSAL, MIN)
    s += g.bias
    return nn.Softmax(dim=-1)(s) @ g.v


def where(g: Given) -> Tensor:
    s = torch.where(CAUSAL, g.q @ g.k.mT, torch.full([], MIN, dtype=torch.float64))
    return s.softmax(-1) @ g.v


def where_reversed(g: Given) -> Tensor:
    return torch.where(~CAUSAL, -math.inf, g.q @ g.k.mT).softmax(-1) @ g.v


def where_method(g: Given) -> Tensor:
    return (g.q @ g.k.mT).where(CAUSAL, torch.tensor(MIN, dtype=torch.float64)).softmax(-1) @ g.v


def added_mask_and_bias(g: Given) -> Tensor:
    return (additive(MIN) + (g.bias + 0.25 * (g.q @ g.k.mT))).softmax(-1) @ g.v


def subtracted(g: Given) -> Tensor:
    s = -(2.0 - (-(g.bias - g.q @ g.k.mT)))
    return (s - s.amax(-1, keepdim=True)).softmax(-1) @ g.v


def multiplied_mask(g: Given) -> Tensor:
    b = CAUSAL.double()
    return (g.q @ g.k.mT * b + -1e4 * (1 - b)).softmax(-1) @ g.v


def multiplied_mask_in_place(g: Given) -> Tensor:
    s = CAUSAL.to(torch.float64).expand(B, H, M, M).clone()
    s *= g.q @ g.k.mT
    return (s + additive(MIN)).softmax(-1) @ g.v


def baddbmm(g: Given) -> Tensor:
    q, k, v = (t.reshape(B * H, M, -1) for t in (g.q, g.k, g.v))
    alibi = g.bias[:, :1].repeat(B, 1, 1)
    s = alibi.baddbmm(batch1=q, batch2=k.mT, beta=0.7, alpha=0.3).view(B, H, M, M) + additive(MIN)
    return torch.bmm(s.softmax(-1).view(B * H, M, M), v).view(B, H, M, DV)


def baddbmm_in_place(g: Given) -> Tensor:
    q, k, v = (t.reshape(B * H, M, -1) for t in (g.q, g.k, g.v))
    s = g.bias.repeat(B, 1, 1).baddbmm_(q, k.mT)
    return torch.bmm(s.softmax(-1), v).view(B, H, M, DV)


def added_to_bias_in_place(g: Given) -> Tensor:
    s = g.bias.expand(B, H, M, M).clone()
    s += g.q @ g.k.mT
    return s.softmax(-1) @ g.v


def einsum(g: Given) -> Tensor:
    q, k, v = (t.permute(2, 0, 1, 3) for t in (g.q, g.k, g.v))
    s = torch.einsum("ibnd,jbnd->bnij", q, k) + g.bias
    return torch.einsum("bnij,jbnd->ibnd", s.softmax(dim=3), v).permute(1, 2, 0, 3)


def einsum_over_another_axis(g: Given) -> Tensor:
    s = torch.einsum("bhid, bhjd -> ijbh", g.q, g.k)
    return torch.einsum("ijbh,bhjd->bhid", functional.softmax(s, dim=1), g.v)


def einsum_ellipsis(g: Given) -> Tensor:
    p = torch.einsum("...id,...jd->...ij", g.q, g.k).softmax(-1)
    return torch.einsum("...ij,...jd->...id", p, g.v)


def transposed(g: Given) -> Tensor:
    s = g.k @ g.q.mT  # keys first
    return (g.v.mT @ s.softmax(-2)).mT


def by_name(g: Given) -> Tensor:
    s = torch.mul(input=torch.matmul(input=g.k, other=g.q.mT), other=0.5)
    return torch.softmax(input=torch.transpose(input=s, dim0=2, dim1=3), dim=-1) @ g.v


def upcast(g: Given) -> Tensor:
    s = (g.q @ g.k.mT).type(torch.float64).contiguous()
    return functional.softmax(s, dim=-1, dtype=torch.float64).to(g.q.dtype).type_as(g.v) @ g.v


def softcap(g: Given) -> Tensor:
    s = torch.tanh(g.q @ g.k.mT / 2 / 3.0) * 3.0
    return (s + additive()).softmax(-1) @ g.v


def sinks(g: Given) -> Tensor:
    s = g.q @ g.k.mT * 0.5 + additive()
    s = torch.cat([s, g.sinks.reshape(1, -1, 1, 1).expand(B, -1, M, -1)], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    return s.softmax(-1)[..., :-1] @ g.v


def sinks_first(g: Given) -> Tensor:
    s = torch.cat((g.sinks[None, :, None, None].repeat(B, 1, M, 1), g.q @ g.k.mT), -1)
    return s.softmax(-1).narrow(-1, 1, M) @ g.v


def with_dropout(g: Given) -> Tensor:
    p = functional.dropout((g.q @ g.k.mT).softmax(-1), 0.5, training=False)
    return nn.Dropout(0.3).eval()(p) * torch.ones(1, H, 1, 1, dtype=torch.float64) @ g.v


def masked_after(g: Given) -> Tensor:
    p = (g.q @ g.k.mT + additive(MIN)).softmax(-1)
    return torch.nan_to_num(p.masked_fill(~CAUSAL, 0.0)) @ g.v


def clamped(g: Given) -> Tensor:
    s = torch.clamp(g.q @ g.k.mT, min=-5e4, max=5e4)
    s = torch.max(s + additive(MIN), torch.tensor(MIN, dtype=torch.float64))
    return s.softmax(-1) @ g.v


def cosine(g: Given) -> Tensor:
    q, k = functional.normalize(g.q, dim=-1), functional.normalize(g.k, dim=-1)
    s = q @ k.mT * torch.exp(g.sinks)[:, None, None] / torch.tensor(0.5)
    s = (s + g.bias).view(1, B, H, M, M) + g.bias[0].expand(1, B, 1, M, M)
    return s.view(-1, H, M, M).softmax(-1) @ g.v


def scaled_keys(g: Given) -> Tensor:
    return (g.q @ g.k.mT * torch.exp(g.bias[:, :1])).softmax(-1) @ g.v


def one_key_head(g: Given) -> Tensor:
    s = g.q.reshape(B, H * M, D) @ g.k[:, 0].mT
    p = s.view(B, H, M, M).softmax(-1)
    return (p.view(B, H * M, M) @ g.v[:, 0]).view(B, H, M, DV)


def broadcast_key_head(g: Given) -> Tensor:
    return (g.q @ g.k[:, :1].mT + g.bias).softmax(-1) @ g.v[:, :1]


def grouped_einsum(g: Given) -> Tensor:
    q = g.q.view(B, 1, H, M, D)
    p = torch.einsum("bkgqd,bksd->bkgqs", q, g.k[:, :1]).softmax(-1)
    return torch.einsum("bkgqs,bksd->bkgqd", p, g.v[:, :1]).flatten(1, 2)


def fused(g: Given) -> Tensor:
    return functional.scaled_dot_product_attention(g.q, g.k, g.v, is_causal=True, scale=0.3)


def fused_mask(g: Given) -> Tensor:
    return functional.scaled_dot_product_attention(g.q, g.k, g.v, attn_mask=g.bias + additive())


def fused_boolean(g: Given) -> Tensor:
    return functional.scaled_dot_product_attention(g.q, g.k, g.v, CAUSAL)


def fused_grouped(g: Given) -> Tensor:
    return functional.scaled_dot_product_attention(g.q, g.k[:, :1], g.v[:, :1], enable_gqa=True)


PATTERNS = [
    matmul, scaled_before, scaled_in_place_by_numpy, scaled_by_tensor, masked_fill,
    masked_fill_in_place_then_bias, where, where_reversed, where_method, added_mask_and_bias, subtracted,
    multiplied_mask, multiplied_mask_in_place, baddbmm, baddbmm_in_place, added_to_bias_in_place, einsum,
    einsum_over_another_axis, by_name,
    einsum_ellipsis, transposed, upcast, softcap, sinks, sinks_first, with_dropout, masked_after, clamped,
    cosine, scaled_keys, one_key_head, broadcast_key_head, grouped_einsum, fused, fused_mask, fused_boolean,
    fused_grouped,
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda f: f.__name__)
def test_operands_of_hand_written_attention_give_its_output(pattern: Callable[[Given], Tensor]) -> None:
    g = given()
    expected = pattern(g)
    (call,), out = calls_of(lambda: pattern(g))
    assert torch.equal(out, expected)
    assert call.output is not None
    np.testing.assert_allclose(naive(call), call.output.numpy(), rtol=0, atol=1e-13)
    assert call.kind == ("sdpa" if "fused" in pattern.__name__ else "softmax")
    if call.probabilities is not None:
        torch.testing.assert_close(call.probabilities @ call.value, call.output, rtol=0, atol=1e-14)
    _, out = calls_of(lambda: pattern(g), check=False)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda f: f.__name__)
def test_output_is_replaced_where_it_stood(pattern: Callable[[Given], Tensor]) -> None:
    g = given()
    with SoftmaxTracer(lambda call: call.output * 2 + 1):
        out = pattern(g)
    torch.testing.assert_close(out, pattern(g) * 2 + 1, rtol=0, atol=1e-14)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda f: f.__name__)
def test_derivatives_go_through_what_was_read(pattern: Callable[[Given], Tensor]) -> None:
    g = given()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return pattern(Given(q, k, v, g.bias, g.sinks))

    at = (g.q, g.k, g.v)
    tangents = tuple(random(*t.shape, seed=9) for t in at)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.func.jvp(run, at, tangents)[1]
        cotangent = random(*expected.shape, seed=8)
        pulled = torch.func.vjp(run, *at)[1](cotangent)
    with SoftmaxTracer(plain, ahead=True):
        torch.testing.assert_close(torch.func.jvp(run, at, tangents)[1], expected, rtol=0, atol=1e-12)
    with SoftmaxTracer(plain):
        mine = torch.func.vjp(run, *at)[1](cotangent)
    for one, other in zip(mine, pulled, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_replaced_attention_can_be_pushed_forward_where_the_fused_one_cannot() -> None:
    g = given()
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda q: fused(Given(q, g.k, g.k, g.bias, g.sinks)), (g.q,), (g.q,))
    with SoftmaxTracer(plain, ahead=True):
        torch.func.jvp(lambda q: fused(Given(q, g.k, g.k, g.bias, g.sinks)), (g.q,), (g.q,))


def test_a_watch_ahead_is_told_before_the_attention_runs() -> None:
    g = given()
    for pattern in (matmul, fused, masked_fill):
        (call,), out = calls_of(lambda pattern=pattern: pattern(g), ahead=True)
        assert call.output is None
        assert call.obstacle == ""
        assert torch.equal(out, pattern(g))
    (call,), out = calls_of(lambda: two_products(g), ahead=True)
    assert call.obstacle == SEVERAL
    assert torch.equal(out, two_products(g))


def test_many_tangents_at_once() -> None:
    g = given()
    tangents = random(4, *g.q.shape, seed=5)

    def run(q: Tensor) -> Tensor:
        return added_mask_and_bias(Given(q, g.k, g.v, g.bias, g.sinks))

    def push(t: Tensor) -> Tensor:
        return torch.func.jvp(run, (g.q,), (t,))[1]

    expected = torch.stack([push(t) for t in tangents])
    with SoftmaxTracer(plain):
        torch.testing.assert_close(torch.vmap(push)(tangents), expected, rtol=0, atol=1e-13)


def test_many_inputs_at_once_cannot_be_looked_at_but_run() -> None:
    g = given()
    q = random(4, *g.q.shape, seed=5)
    for pattern in (matmul, multiplied_mask, sinks, with_dropout, masked_fill):

        def run(q: Tensor, pattern: Callable[[Given], Tensor] = pattern) -> Tensor:
            return pattern(Given(q, g.k, g.v, g.bias, g.sinks))

        expected = torch.stack([run(one) for one in q])
        with SoftmaxTracer(plain):
            torch.testing.assert_close(torch.vmap(run)(q), expected, rtol=0, atol=1e-13)


# --- What the fields say -------------------------------------------------------------------------------


def test_scale_mask_cap_and_sinks_are_named() -> None:
    g = given()
    assert calls_of(lambda: matmul(g))[0][0].scale == 0.5
    (call,), _ = calls_of(lambda: masked_fill(g))
    assert call.mask is not None
    assert call.mask.dtype == torch.bool
    assert torch.equal(call.mask, CAUSAL.expand(1, 1, M, M))
    assert call.mask.shape == (1, 1, M, M)
    (call,), _ = calls_of(lambda: softcap(g))
    assert (call.scale, call.softcap) == (0.5, 3.0)
    (call,), _ = calls_of(lambda: sinks(g))
    assert call.sinks is not None
    assert torch.equal(call.sinks, g.sinks)
    assert torch.equal(call.mask[0, 0], additive())
    (call,), _ = calls_of(lambda: subtracted(g))
    assert torch.equal(call.mask[0], -g.bias)  # the subtracted maximum moves no probability: it is no mask
    assert calls_of(lambda: fused(g))[0][0].scale == 0.3
    assert calls_of(lambda: fused_boolean(g))[0][0].scale == D**-0.5


def test_operands_are_the_tensors_of_the_code() -> None:
    g = given()
    for pattern in (matmul, masked_fill, softcap, sinks, fused, einsum, baddbmm, transposed):
        (call,), _ = calls_of(lambda pattern=pattern: pattern(g))
        assert torch.equal(call.query.reshape(g.q.shape), g.q), pattern.__name__
        assert torch.equal(call.key.reshape(g.k.shape), g.k), pattern.__name__
        assert torch.equal(call.value.reshape(g.v.shape), g.v), pattern.__name__
        assert call.query.data_ptr() == g.q.data_ptr(), pattern.__name__


def test_grouped_heads_are_not_repeated() -> None:
    g = given()
    for pattern in (broadcast_key_head, fused_grouped):
        (call,), _ = calls_of(lambda pattern=pattern: pattern(g))
        assert call.key.shape == (B, 1, M, D)
        assert call.value.shape == (B, 1, M, DV)
    (call,), _ = calls_of(lambda: one_key_head(g))
    assert call.query.shape == (B, H * M, D)
    assert call.output.shape == (B, H * M, DV)


def test_code_without_heads_gets_an_axis_of_one() -> None:
    q, k, v = random(M, D), random(M, D, seed=1), random(M, DV, seed=2)
    for run in (
        lambda: (q @ k.T).softmax(-1) @ v,
        lambda: torch.mm(torch.addmm(additive(), q, k.t()).softmax(-1), v),
        lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL),
    ):
        (call,), out = calls_of(run)
        assert call.query.shape == (1, M, D)
        assert call.output.shape == (1, M, DV)
        np.testing.assert_allclose(naive(call)[0], out.numpy(), rtol=0, atol=1e-13)
        with SoftmaxTracer(lambda call: call.output + 1):
            assert torch.equal(run(), out + 1)


def test_windows_and_fewer_keys_than_queries() -> None:
    q, k, v = random(B, 4, H, M, D), random(B, 4, H, 2, D, seed=1), random(B, 4, H, 2, DV, seed=2)
    (call,), _ = calls_of(lambda: (q @ k.mT).softmax(-1) @ v)
    assert call.query.shape == (B, 4, H, M, D)
    np.testing.assert_allclose(naive(call), call.output.numpy(), rtol=0, atol=1e-13)


def test_one_token() -> None:
    q, k, v = random(1, H, 1, D), random(1, H, 1, D, seed=1), random(1, H, 1, DV, seed=2)
    (call,), out = calls_of(lambda: (q @ k.mT + 1.0).softmax(-1) @ v)
    assert torch.equal(call.output, out)
    np.testing.assert_allclose(naive(call), v.numpy(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_allowed_its_rounding(dtype: torch.dtype) -> None:
    q, k, v = (random(1, H, 40, 16, seed=s).to(dtype) * 3 for s in range(3))
    (call,), _ = calls_of(lambda: functional.softmax(q @ k.mT / 4, -1, dtype=torch.float32).to(dtype) @ v)
    assert call.obstacle == ""
    np.testing.assert_allclose(
        naive(call), call.output.double().numpy(), rtol=0, atol=60 * torch.finfo(dtype).eps
    )


def test_softmax_weights_in_memory_of_a_float64_model_is_allowed_its_rounding() -> None:
    g = given()
    (call,), _ = calls_of(lambda: functional.softmax(g.q @ g.k.mT, -1, dtype=torch.float32).double() @ g.v)
    assert call.obstacle == ""
    assert np.abs(naive(call) - call.output.numpy()).max() > 1e-10  # it was rounded


def test_rows_that_see_nothing_do_not_count() -> None:
    g = given()
    mask = additive()
    mask[0] = -math.inf
    (call,), _ = calls_of(lambda: (g.q @ g.k.mT + mask).softmax(-1).nan_to_num() @ g.v)
    assert call.obstacle == ""
    assert not call.output[..., 0, :].any()


def test_every_row_is_checked_after_what_should_make_no_difference() -> None:
    q, k, v = random(1, 1, 80, D), random(1, 1, 80, D, seed=1), random(1, 1, 80, DV, seed=2)
    for row in range(80):
        mask = torch.zeros(80, 80, dtype=torch.bool)
        mask[row, 3] = True
        (call,), _ = calls_of(lambda mask=mask: (q @ k.mT).softmax(-1).masked_fill(mask, 0.0) @ v)
        assert call.obstacle == "its output is not that of the softmax of its scores", row


def test_every_attention_of_a_module_is_reported_in_order() -> None:
    g = given()
    calls, _ = calls_of(lambda: matmul(g) - 0.5 * fused(g) + masked_fill(g))
    assert [call.kind for call in calls] == ["softmax", "sdpa", "softmax"]
    assert [call.causal for call in calls] == [False, True, False]
    assert [call.mask is None for call in calls] == [True, True, False]


# --- What is no attention, and what cannot be read -----------------------------------------------------


def test_other_softmaxes_are_not_reported() -> None:
    x, w = random(B, M, 6), nn.Parameter(random(4, 6, seed=1))
    experts = random(B, M, 4, 6, seed=2)
    pool = nn.Linear(6, 1).double()

    def router() -> Tensor:
        p = functional.linear(x, w).softmax(-1)
        top, _ = p.topk(2, -1)
        return torch.einsum("bte,bted->btd", p, experts) + top.sum()

    def router_by_matmul() -> Tensor:
        return ((x @ w.t()).softmax(-1)[..., None, :] @ experts)[..., 0, :]

    def pooling() -> Tensor:
        return pool(x).softmax(1).mT @ x

    def head() -> Tensor:
        return functional.linear(x, w).softmax(-1)

    def learned_query() -> Tensor:
        return (w @ x.mT).softmax(-1) @ x

    for run in (router, router_by_matmul, pooling, head, learned_query):
        calls, out = calls_of(run)
        assert calls == [], run.__name__
        assert torch.equal(out, run()), run.__name__


def two_products(g: Given) -> Tensor:
    return (g.q @ g.k.mT + g.q @ g.q.mT).softmax(-1) @ g.v


def gathered_product(g: Given) -> Tensor:
    positions = torch.gather(g.q @ random(M, D, seed=7).mT, -1, torch.zeros(B, H, M, M, dtype=torch.long))
    return (positions + g.q @ g.k.mT).softmax(-1) @ g.v


def top_scores(g: Given) -> Tensor:
    return (g.q @ g.k.mT).topk(3, -1)[0].softmax(-1) @ g.v[:, :, :3]


def other_axis(g: Given) -> Tensor:
    return (g.q @ g.k.mT).softmax(-2) @ g.v


def rescaled(g: Given) -> Tensor:
    p = (g.q @ g.k.mT).softmax(-2)
    return (p / p.sum(-1, keepdim=True)) @ g.v


def pruned(g: Given) -> Tensor:
    return (g.q @ g.k.mT).softmax(-1) * torch.tensor([1.0, 0.0, 1.0])[:, None, None] @ g.v


def dropped(g: Given) -> Tensor:
    return functional.dropout((g.q @ g.k.mT).softmax(-1), 0.5) @ g.v


def fused_dropped(g: Given) -> Tensor:
    return functional.scaled_dot_product_attention(g.q, g.k, g.v, dropout_p=0.5)


def rectified(g: Given) -> Tensor:
    return (g.q @ g.k.mT).relu().softmax(-1) @ g.v


def talking(g: Given) -> Tensor:
    mix = random(H, H, seed=5)
    s = functional.linear((g.q @ g.k.mT).permute(0, 2, 3, 1), mix).permute(0, 3, 1, 2)
    return s.softmax(-1) @ g.v


def talking_after_positions(g: Given) -> Tensor:
    s = g.q @ g.k.mT + torch.roll(g.q @ g.q.mT, 1, -1)
    s = functional.linear(s.permute(0, 2, 3, 1), random(H, H, seed=5)).permute(0, 3, 1, 2)
    p = functional.linear(s.softmax(-1).permute(0, 2, 3, 1), random(H, H, seed=6))
    return p.permute(0, 3, 1, 2) @ g.v


def talking_after(g: Given) -> Tensor:
    p = (g.q @ g.k.mT).softmax(-1).permute(0, 2, 3, 1)
    return functional.linear(p, random(H, H, seed=5)).permute(0, 3, 1, 2) @ g.v


def capped_after_mask(g: Given) -> Tensor:
    return (torch.tanh(g.q @ g.k.mT + g.bias)).softmax(-1) @ g.v


def assigned(g: Given) -> Tensor:
    s = g.q @ g.k.mT
    s[..., 0, 1] = -3.0
    return s.softmax(-1) @ g.v


def in_pieces(g: Given) -> Tensor:
    s = torch.full((B, H, M, M), -1e9, dtype=torch.float64)
    s[..., :3, :3] = (g.q @ g.k.mT)[..., :3, :3]
    return s.softmax(-1) @ g.v


def two_blocks(g: Given) -> Tensor:
    s = torch.cat([g.q @ g.k.mT, g.q @ g.q.mT], -1)
    return s.softmax(-1)[..., :M] @ g.v


def pairwise_factor(g: Given) -> Tensor:
    return (g.q @ g.k.mT * g.bias).softmax(-1) @ g.v


def overwritten(g: Given) -> Tensor:
    return (g.q @ g.k.mT).masked_fill(~CAUSAL, 0.0).softmax(-1) @ g.v


def overwritten_by_tensor(g: Given) -> Tensor:
    return torch.where(CAUSAL, g.q @ g.k.mT, torch.zeros((), dtype=torch.float64)).softmax(-1) @ g.v


def operand_changed_later(g: Given) -> Tensor:
    k = g.k.clone()
    s = g.q @ k.mT
    k.zero_()
    return s.softmax(-1) @ g.v


def written_over(g: Given) -> Tensor:
    return (g.q @ g.k.mT).erf_().softmax(-1) @ g.v


def dropped_rows(g: Given) -> Tensor:
    return (g.q @ g.k.mT).softmax(-1).masked_fill(~CAUSAL, 0.0) @ g.v


def keys_of_their_own(g: Given) -> Tensor:
    r = random(M, M, D, seed=6)
    return torch.einsum("bhld,lrd->bhlr", g.q, r).softmax(-1) @ g.v


def infinite(g: Given) -> Tensor:
    return ((g.q * math.inf) @ g.k.mT).softmax(-1) @ g.v


def cut_across(g: Given) -> Tensor:
    s = (g.q[..., :4, :] @ g.k[..., :4, :].mT).reshape(B, H, 2, 8)
    return s.softmax(-1).reshape(B, H, 4, 4) @ g.v[..., :4, :]


def sinks_by_query(g: Given) -> Tensor:
    s = torch.cat([g.q @ g.k.mT, g.bias[None, :, :, :1].expand(B, -1, -1, -1)], -1)
    return s.softmax(-1)[..., :-1] @ g.v


def kept_sinks(g: Given) -> Tensor:
    s = torch.cat([g.q @ g.k.mT, g.sinks[None, :, None, None].expand(B, -1, M, -1)], -1)
    return s.softmax(-1) @ torch.cat([g.v, g.v[..., :1, :]], -2)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (two_products, "its scores are a sum of several products of the tokens"),
        (gathered_product, "its scores are a sum of several products of the tokens"),
        (top_scores, "its scores go through topk"),
        (other_axis, "its softmax does not run over the values that are summed"),
        (rescaled, "its probabilities are multiplied by other numbers"),
        (pruned, "its probabilities are multiplied by other numbers"),
        (dropped, "its probabilities are dropped at random"),
        (fused_dropped, "its probabilities are dropped at random"),
        (rectified, "its scores go through relu"),
        (talking, "its scores go through linear"),
        (talking_after_positions, "its scores are a sum of several products of the tokens"),
        (talking_after, "its probabilities go through linear"),
        (capped_after_mask, "its scores are capped after a bias or mask"),
        (assigned, "its scores are put together from pieces"),
        (in_pieces, "its scores are indexed"),
        (two_blocks, "its scores are joined to others"),
        (pairwise_factor, "its scores are multiplied by numbers of their own for every pair of tokens"),
        (overwritten, "its scores are written over by other numbers"),
        (overwritten_by_tensor, "its scores are written over by other numbers"),
        (operand_changed_later, "its output is not that of the softmax of its scores"),
        (written_over, "its scores are written over by erf"),
        (dropped_rows, "its output is not that of the softmax of its scores"),
        (keys_of_their_own, "its keys differ from query to query"),
        (infinite, "its output is not finite"),
        (cut_across, "its softmax does not run over the values that are summed"),
        (sinks_by_query, "its sinks differ from query to query"),
        (kept_sinks, "its softmax does not run over the values that are summed"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_be_read_is_reported_with_its_reason(
    pattern: Callable[[Given], Tensor], reason: str
) -> None:
    g = given()
    torch.manual_seed(0)
    expected = pattern(g)
    torch.manual_seed(0)
    calls, out = calls_of(lambda: pattern(g))
    assert [call.obstacle for call in calls] == [reason]
    assert calls[0].query is None
    assert calls[0].output is not None
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    with SoftmaxTracer(lambda call: torch.zeros_like(call.output)):  # yet its output can be replaced
        assert not pattern(g).any()


# --- Modules of torch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_multi_head_attention(weights: bool, masked: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(12, 3, batch_first=True).double().eval()
    nn.init.normal_(module.in_proj_bias)
    x = random(2, M, 12)
    mask = ~CAUSAL if masked else None
    with torch.no_grad():
        expected = module(x, x, x, attn_mask=mask, need_weights=weights)[0]
        (call,), (out, p) = calls_of(lambda: module(x, x, x, attn_mask=mask, need_weights=weights))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    assert (p is not None) == weights
    np.testing.assert_allclose(naive(call), call.output.numpy(), rtol=0, atol=1e-13)
    projected = (x @ module.in_proj_weight.T + module.in_proj_bias).detach()
    for part, operand in zip(projected.chunk(3, -1), (call.query, call.key, call.value), strict=True):
        heads = part.view(2, M, 3, 4).transpose(1, 2)
        scale = 0.5 if weights and operand is call.query else 1.0  # torch scales the queries itself
        torch.testing.assert_close(operand.reshape(2, 3, M, 4), heads * scale, rtol=0, atol=1e-14)
    assert call.scale == (1.0 if weights else 0.5)
    with torch.no_grad(), SoftmaxTracer(lambda call: torch.zeros_like(call.output)):
        out = module(x, x, x, attn_mask=mask, need_weights=weights)[0]
    torch.testing.assert_close(out, module.out_proj.bias.detach().expand_as(out), rtol=0, atol=1e-15)


def test_encoder_layers_are_seen_despite_their_fast_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    x, padding = random(2, M, 12), torch.zeros(2, M, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        expected = model(x)
        calls, out = calls_of(lambda: model(x))
        padded, _ = calls_of(lambda: model(x, src_key_padding_mask=padding))
    assert len(calls) == 2
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    for call in padded:
        np.testing.assert_allclose(naive(call), call.output.numpy(), rtol=0, atol=1e-13)
        assert torch.equal(call.mask[1].isinf().expand(2, M, M)[0], padding[1].expand(M, M))


# --- The mode itself -----------------------------------------------------------------------------------


def test_watches_nest() -> None:
    g = given()
    outer: list[SoftmaxCall] = []
    with SoftmaxTracer(lambda call: outer.append(call)):
        inner, out = calls_of(lambda: matmul(g))
        with SoftmaxTracer(lambda call: call.output * 2):
            doubled = matmul(g)
    assert len(inner) == 1
    assert len(outer) == 2
    assert torch.equal(doubled, 2 * out)


def test_threads_see_their_own_attention() -> None:
    g = given()
    seen: dict[int, int] = {}

    def work(times: int) -> None:
        calls, _ = calls_of(lambda: [matmul(g) for _ in range(times)])
        seen[times] = len(calls)

    threads = [threading.Thread(target=work, args=(times,)) for times in (3, 7, 11)]
    with SoftmaxTracer(lambda call: seen.update({-1: 1})):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {3: 3, 7: 7, 11: 11}


def test_an_error_leaves_nothing_behind() -> None:
    g = given()

    def refuse(call: SoftmaxCall) -> None:
        raise KeyError(call.kind)

    watch = SoftmaxTracer(refuse)
    with pytest.raises(KeyError, match="softmax"), watch:
        matmul(g)
    assert torch.overrides._get_current_function_mode() is None
    with pytest.raises(KeyError, match="sdpa"), watch:
        nn.MultiheadAttention(8, 2).eval()(*(torch.ones(3, 1, 8),) * 3, need_weights=False)
    assert torch.overrides._get_current_function_mode() is None
    assert matmul(g).shape == (B, H, M, DV)


def test_a_replacement_of_another_shape_is_refused() -> None:
    g = given()
    with pytest.raises(ArgumentError, match="on_softmax"), SoftmaxTracer(lambda call: call.output[..., :1]):
        matmul(g)


def test_tensors_are_not_kept_longer_than_the_code_keeps_them() -> None:
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def attention() -> Tensor:
        q, k, v, bias = random(B, H, M, D), random(B, H, M, D), random(B, H, M, DV), random(H, M, M)
        s = q @ k.mT + bias
        p = s.softmax(-1)
        held.extend(map(weakref.ref, (q, k, v, bias, s, p)))
        return p @ v

    with SoftmaxTracer(lambda call: None) as watch:
        gc.disable()  # nothing waits in a cycle either
        try:
            out = attention()
        finally:
            gc.enable()
        alive.append(sum(ref() is not None for ref in held))
        assert watch.known(out) is None
    assert alive == [0]


def test_probabilities_that_the_code_keeps_do_not_keep_their_operands_after_the_watch() -> None:
    q = random(B, H, M, D)
    watch = SoftmaxTracer(lambda call: None)
    with watch:
        p = (q @ random(B, H, M, D, seed=1).mT).softmax(-1)
        p @ random(B, H, M, DV)
        held = weakref.ref(q)
        del q
    gc.collect()
    assert held() is None
    assert p.shape == (B, H, M, M)
