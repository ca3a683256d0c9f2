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


def plain(call: SoftmaxCall) -> Tensor:
    """The attention of a call's operands in float64, to be differentiated."""
    assert call.obstacle == ""
    assert call.query is not None
    assert call.key is not None
    group = call.query.shape[-3] // call.key.shape[-3]
    q, k, v = (
        call.query.double(),
        *(t.double().repeat_interleave(group, -3) for t in (call.key, call.value)),
    )
    s = call.scale * torch.einsum("...md,...nd->...mn", q, k)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if call.mask is not None:
        s = s.masked_fill(~call.mask, -math.inf) if call.mask.dtype == torch.bool else s + call.mask
    if call.sinks is not None:
        s = torch.cat([s, call.sinks.double()[:, None, None].expand(*s.shape[:-1], 1)], -1)
    return torch.einsum("...mn,...nd->...md", s.softmax(-1)[..., : k.shape[-2]], v)


def calls_of(run: Callable[[], Any], **options: Any) -> tuple[list[SoftmaxCall], Any]:
    calls: list[SoftmaxCall] = []
    with SoftmaxTracer(lambda call: calls.append(call), **options):
        out = run()
    return calls, out


SEVERAL = "its scores are a sum of several products of the tokens"


# --- Attention as people write it ----------------------------------------------------------------------


def scaled_in_place_by_numpy(g: Given) -> Tensor:
    s = g.q @ g.k.mT
    s /= np.sqrt(D)
    s += g.bias
    s *= 1.5
    return s.softmax(-1) @ g.v


def masked_fill_in_place_then_bias(g: Given) -> Tensor:
    s = g.q @ g.k.mT
    s.masked_fill_(~CAUSAL, MIN)
    s += g.bias
    return nn.Softmax(dim=-1)(s) @ g.v


def subtracted(g: Given) -> Tensor:
    s = -(2.0 - (-(g.bias - g.q @ g.k.mT)))
    return (s - s.amax(-1, keepdim=True)).softmax(-1) @ g.v


def multiplied_mask_in_place(g: Given) -> Tensor:
    s = CAUSAL.to(torch.float64).expand(B, H, M, M).clone()
    s *= g.q @ g.k.mT
    return (s + additive(MIN)).softmax(-1) @ g.v


def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.reshape(B * H, M, -1) for t in tensors)


def baddbmm(g: Given) -> Tensor:
    q, k, v = flat(g.q, g.k, g.v)
    alibi = g.bias[:, :1].repeat(B, 1, 1)
    s = alibi.baddbmm(batch1=q, batch2=k.mT, beta=0.7, alpha=0.3).view(B, H, M, M) + additive(MIN)
    return torch.bmm(s.softmax(-1).view(B * H, M, M), v).view(B, H, M, DV)


def baddbmm_in_place(g: Given) -> Tensor:
    q, k, v = flat(g.q, g.k, g.v)
    return torch.bmm(g.bias.repeat(B, 1, 1).baddbmm_(q, k.mT).softmax(-1), v).view(B, H, M, DV)


def added_to_bias_in_place(g: Given) -> Tensor:
    s = g.bias.expand(B, H, M, M).clone()
    s += g.q @ g.k.mT
    return s.softmax(-1) @ g.v


def einsum(g: Given) -> Tensor:
    q, k, v = (t.permute(2, 0, 1, 3) for t in (g.q, g.k, g.v))
    s = torch.einsum("ibnd,jbnd->bnij", q, k) + g.bias
    return torch.einsum("bnij,jbnd->ibnd", s.softmax(dim=3), v).permute(1, 2, 0, 3)


def sinks(g: Given) -> Tensor:
    s = g.q @ g.k.mT * 0.5 + additive()
    s = torch.cat([s, g.sinks.reshape(1, -1, 1, 1).expand(B, -1, M, -1)], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    return s.softmax(-1)[..., :-1] @ g.v


def with_dropout(g: Given) -> Tensor:
    p = functional.dropout((g.q @ g.k.mT).softmax(-1), 0.5, training=False)
    return nn.Dropout(0.3).eval()(p) * torch.ones(1, H, 1, 1, dtype=torch.float64) @ g.v


def clamped(g: Given) -> Tensor:
    s = torch.clamp(g.q @ g.k.mT, min=-5e4, max=5e4)
    s = torch.max(s + additive(MIN), torch.tensor(MIN, dtype=torch.float64))
    return s.softmax(-1) @ g.v


def cosine(g: Given) -> Tensor:
    q, k = functional.normalize(g.q, dim=-1), functional.normalize(g.k, dim=-1)
    s = q @ k.mT * torch.exp(g.sinks)[:, None, None] / torch.tensor(0.5)
    s = (s + g.bias).view(1, B, H, M, M) + g.bias[0].expand(1, B, 1, M, M)
    return s.view(-1, H, M, M).softmax(-1) @ g.v


def one_key_head(g: Given) -> Tensor:
    s = g.q.reshape(B, H * M, D) @ g.k[:, 0].mT
    p = s.view(B, H, M, M).softmax(-1)
    return (p.view(B, H * M, M) @ g.v[:, 0]).view(B, H, M, DV)


def grouped_einsum(g: Given) -> Tensor:
    p = torch.einsum("bkgqd,bksd->bkgqs", g.q.view(B, 1, H, M, D), g.k[:, :1]).softmax(-1)
    return torch.einsum("bkgqs,bksd->bkgqd", p, g.v[:, :1]).flatten(1, 2)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


sdpa = functional.scaled_dot_product_attention
PATTERNS: dict[str, Callable[[Given], Tensor]] = {
    "matmul": lambda g: torch.matmul(
        functional.softmax(torch.matmul(g.q, g.k.transpose(-1, -2)) / 2, dim=-1), g.v
    ),
    "scaled before": lambda g: ((g.q * 0.5) @ (g.k / 3).mT).softmax(-1) @ g.v,
    "scaled in place by numpy": scaled_in_place_by_numpy,
    "scaled by a tensor": lambda g: (
        ((g.q @ g.k.mT + g.bias) / torch.sqrt(number(D))).softmax(-1) @ g.v
    ),
    "masked_fill": lambda g: torch.softmax((g.q @ g.k.mT).masked_fill(~CAUSAL, -1e9), -1) @ g.v,
    "masked_fill in place, then a bias": masked_fill_in_place_then_bias,
    "where": lambda g: torch.where(CAUSAL, g.q @ g.k.mT, number(MIN)).softmax(-1) @ g.v,
    "where, reversed": lambda g: torch.where(~CAUSAL, -math.inf, g.q @ g.k.mT).softmax(-1) @ g.v,
    "where, a method": lambda g: (g.q @ g.k.mT).where(CAUSAL, number(MIN)).softmax(-1) @ g.v,
    "added mask and bias": lambda g: (
        (additive(MIN) + (g.bias + 0.25 * (g.q @ g.k.mT))).softmax(-1) @ g.v
    ),
    "subtracted": subtracted,
    "multiplied mask": lambda g: (
        (g.q @ g.k.mT * CAUSAL.double() + -1e4 * (1 - CAUSAL.double())).softmax(-1) @ g.v
    ),
    "multiplied mask in place": multiplied_mask_in_place,
    "baddbmm": baddbmm,
    "baddbmm in place": baddbmm_in_place,
    "added to a bias in place": added_to_bias_in_place,
    "einsum": einsum,
    "einsum over another axis": lambda g: torch.einsum(
        "ijbh,bhjd->bhid", functional.softmax(torch.einsum("bhid, bhjd -> ijbh", g.q, g.k), dim=1), g.v
    ),
    "einsum, ellipsis": lambda g: torch.einsum(
        "...ij,...jd->...id", torch.einsum("...id,...jd->...ij", g.q, g.k).softmax(-1), g.v
    ),
    "keys first": lambda g: (g.v.mT @ (g.k @ g.q.mT).softmax(-2)).mT,
    "by name": lambda g: torch.softmax(
        input=torch.transpose(
            input=torch.mul(input=torch.matmul(input=g.k, other=g.q.mT), other=0.5), dim0=2, dim1=3
        ),
        dim=-1,
    ) @ g.v,
    "upcast": lambda g: functional.softmax(
        (g.q @ g.k.mT).type(torch.float64).contiguous(), dim=-1, dtype=torch.float64
    ).to(g.q.dtype).type_as(g.v) @ g.v,
    "softcap": lambda g: (torch.tanh(g.q @ g.k.mT / 2 / 3.0) * 3.0 + additive()).softmax(-1) @ g.v,
    "sinks": sinks,
    "sinks first": lambda g: torch.cat(
        (g.sinks[None, :, None, None].repeat(B, 1, M, 1), g.q @ g.k.mT), -1
    ).softmax(-1).narrow(-1, 1, M) @ g.v,
    "with dropout": with_dropout,
    "masked after": lambda g: torch.nan_to_num(
        (g.q @ g.k.mT + additive(MIN)).softmax(-1).masked_fill(~CAUSAL, 0.0)
    ) @ g.v,
    "clamped": clamped,
    "cosine": cosine,
    "scaled keys": lambda g: (g.q @ g.k.mT * torch.exp(g.bias[:, :1])).softmax(-1) @ g.v,
    "one key head": one_key_head,
    "broadcast key head": lambda g: (g.q @ g.k[:, :1].mT + g.bias).softmax(-1) @ g.v[:, :1],
    "grouped einsum": grouped_einsum,
    "fused": lambda g: sdpa(g.q, g.k, g.v, is_causal=True, scale=0.3),
    "fused, mask": lambda g: sdpa(g.q, g.k, g.v, attn_mask=g.bias + additive()),
    "fused, boolean": lambda g: sdpa(g.q, g.k, g.v, CAUSAL),
    "fused, grouped": lambda g: sdpa(g.q, g.k[:, :1], g.v[:, :1], enable_gqa=True),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_operands_of_hand_written_attention_give_its_output(name: str) -> None:
    g, pattern = given(), PATTERNS[name]
    expected = pattern(g)
    (call,), out = calls_of(lambda: pattern(g))
    assert torch.equal(out, expected)
    assert call.output is not None
    torch.testing.assert_close(plain(call), call.output, rtol=0, atol=1e-13)
    assert call.kind == ("sdpa" if "fused" in name else "softmax")
    if call.probabilities is not None:
        torch.testing.assert_close(call.probabilities @ call.value, call.output, rtol=0, atol=1e-14)
    _, out = calls_of(lambda: pattern(g), check=False)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", PATTERNS)
def test_output_is_replaced_where_it_stood(name: str) -> None:
    g, pattern = given(), PATTERNS[name]
    with SoftmaxTracer(lambda call: call.output * 2 + 1):
        out = pattern(g)
    torch.testing.assert_close(out, pattern(g) * 2 + 1, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", PATTERNS)
def test_derivatives_go_through_what_was_read(name: str) -> None:
    g, pattern = given(), PATTERNS[name]

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
        torch.func.jvp(lambda q: PATTERNS["fused"](Given(q, g.k, g.k, g.bias, g.sinks)), (g.q,), (g.q,))
    with SoftmaxTracer(plain, ahead=True):
        torch.func.jvp(lambda q: PATTERNS["fused"](Given(q, g.k, g.k, g.bias, g.sinks)), (g.q,), (g.q,))


def test_a_watch_ahead_is_told_before_the_attention_runs() -> None:
    g = given()
    for name in ("matmul", "fused", "masked_fill"):
        pattern = PATTERNS[name]
        (call,), out = calls_of(lambda pattern=pattern: pattern(g), ahead=True)
        assert call.output is None
        assert call.obstacle == ""
        assert torch.equal(out, pattern(g))
    (call,), out = calls_of(lambda: REFUSED["two products"][0](g), ahead=True)
    assert call.obstacle == SEVERAL
    assert torch.equal(out, REFUSED["two products"][0](g))


def test_many_tangents_at_once() -> None:
    g = given()
    tangents = random(4, *g.q.shape, seed=5)

    def run(q: Tensor) -> Tensor:
        return PATTERNS["added mask and bias"](Given(q, g.k, g.v, g.bias, g.sinks))

    def push(t: Tensor) -> Tensor:
        return torch.func.jvp(run, (g.q,), (t,))[1]

    expected = torch.stack([push(t) for t in tangents])
    with SoftmaxTracer(plain):
        torch.testing.assert_close(torch.vmap(push)(tangents), expected, rtol=0, atol=1e-13)


def test_many_inputs_at_once_cannot_be_looked_at_but_run() -> None:
    g = given()
    q = random(4, *g.q.shape, seed=5)
    for name in ("matmul", "multiplied mask", "sinks", "with dropout", "masked_fill"):
        pattern = PATTERNS[name]

        def run(q: Tensor, pattern: Callable[[Given], Tensor] = pattern) -> Tensor:
            return pattern(Given(q, g.k, g.v, g.bias, g.sinks))

        expected = torch.stack([run(one) for one in q])
        with SoftmaxTracer(plain):
            torch.testing.assert_close(torch.vmap(run)(q), expected, rtol=0, atol=1e-13)


# --- What the fields say -------------------------------------------------------------------------------


def test_scale_mask_cap_and_sinks_are_named() -> None:
    g = given()
    assert calls_of(lambda: PATTERNS["matmul"](g))[0][0].scale == 0.5
    (call,), _ = calls_of(lambda: PATTERNS["masked_fill"](g))
    assert call.mask is not None
    assert call.mask.dtype == torch.bool
    assert torch.equal(call.mask, CAUSAL.expand(1, 1, M, M))
    assert call.mask.shape == (1, 1, M, M)
    (call,), _ = calls_of(lambda: PATTERNS["softcap"](g))
    assert (call.scale, call.softcap) == (0.5, 3.0)
    (call,), _ = calls_of(lambda: sinks(g))
    assert call.sinks is not None
    assert torch.equal(call.sinks, g.sinks)
    assert torch.equal(call.mask[0, 0], additive())
    (call,), _ = calls_of(lambda: subtracted(g))
    assert torch.equal(call.mask[0], -g.bias)  # the subtracted maximum moves no probability: it is no mask
    assert calls_of(lambda: PATTERNS["fused"](g))[0][0].scale == 0.3
    assert calls_of(lambda: PATTERNS["fused, boolean"](g))[0][0].scale == D**-0.5


def test_operands_are_the_tensors_of_the_code() -> None:
    g = given()
    for name in ("matmul", "masked_fill", "softcap", "sinks", "fused", "einsum", "baddbmm", "keys first"):
        pattern = PATTERNS[name]
        (call,), _ = calls_of(lambda pattern=pattern: pattern(g))
        assert torch.equal(call.query.reshape(g.q.shape), g.q), name
        assert torch.equal(call.key.reshape(g.k.shape), g.k), name
        assert torch.equal(call.value.reshape(g.v.shape), g.v), name
        assert call.query.data_ptr() == g.q.data_ptr(), name


def test_grouped_heads_are_not_repeated() -> None:
    g = given()
    for name in ("broadcast key head", "fused, grouped"):
        pattern = PATTERNS[name]
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
        torch.testing.assert_close(plain(call)[0], out, rtol=0, atol=1e-13)
        with SoftmaxTracer(lambda call: call.output + 1):
            assert torch.equal(run(), out + 1)


def test_windows_and_fewer_keys_than_queries() -> None:
    q, k, v = random(B, 4, H, M, D), random(B, 4, H, 2, D, seed=1), random(B, 4, H, 2, DV, seed=2)
    (call,), _ = calls_of(lambda: (q @ k.mT).softmax(-1) @ v)
    assert call.query.shape == (B, 4, H, M, D)
    torch.testing.assert_close(plain(call), call.output, rtol=0, atol=1e-13)


def test_one_token() -> None:
    q, k, v = random(1, H, 1, D), random(1, H, 1, D, seed=1), random(1, H, 1, DV, seed=2)
    (call,), out = calls_of(lambda: (q @ k.mT + 1.0).softmax(-1) @ v)
    assert torch.equal(call.output, out)
    torch.testing.assert_close(plain(call), v, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_allowed_its_rounding(dtype: torch.dtype) -> None:
    q, k, v = (random(1, H, 40, 16, seed=s).to(dtype) * 3 for s in range(3))
    (call,), _ = calls_of(lambda: functional.softmax(q @ k.mT / 4, -1, dtype=torch.float32).to(dtype) @ v)
    assert call.obstacle == ""
    torch.testing.assert_close(plain(call), call.output.double(), rtol=0, atol=60 * torch.finfo(dtype).eps)


def test_softmax_weights_in_memory_of_a_float64_model_is_allowed_its_rounding() -> None:
    g = given()
    (call,), _ = calls_of(lambda: functional.softmax(g.q @ g.k.mT, -1, dtype=torch.float32).double() @ g.v)
    assert call.obstacle == ""
    assert (plain(call) - call.output).abs().max() > 1e-10  # it was rounded


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
    calls, _ = calls_of(
        lambda: PATTERNS["matmul"](g) - 0.5 * PATTERNS["fused"](g) + PATTERNS["masked_fill"](g)
    )
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


def linear(t: Tensor, seed: int) -> Tensor:
    """Heads that talk."""
    return functional.linear(t.permute(0, 2, 3, 1), random(H, H, seed=seed)).permute(0, 3, 1, 2)


def joined(g: Given, further: Tensor) -> Tensor:
    return torch.cat([g.q @ g.k.mT, further], -1).softmax(-1)


def gathered_product(g: Given) -> Tensor:
    positions = torch.gather(g.q @ random(M, D, seed=7).mT, -1, torch.zeros(B, H, M, M, dtype=torch.long))
    return (positions + g.q @ g.k.mT).softmax(-1) @ g.v


def rescaled(g: Given) -> Tensor:
    p = (g.q @ g.k.mT).softmax(-2)
    return (p / p.sum(-1, keepdim=True)) @ g.v


def talking_after_positions(g: Given) -> Tensor:
    s = g.q @ g.k.mT + torch.roll(g.q @ g.q.mT, 1, -1)
    return linear(linear(s, 5).softmax(-1), 6) @ g.v


def assigned(g: Given) -> Tensor:
    s = g.q @ g.k.mT
    s[..., 0, 1] = -3.0
    return s.softmax(-1) @ g.v


def in_pieces(g: Given) -> Tensor:
    s = torch.full((B, H, M, M), -1e9, dtype=torch.float64)
    s[..., :3, :3] = (g.q @ g.k.mT)[..., :3, :3]
    return s.softmax(-1) @ g.v


def operand_changed_later(g: Given) -> Tensor:
    k = g.k.clone()
    s = g.q @ k.mT
    k.zero_()
    return s.softmax(-1) @ g.v


def cut_across(g: Given) -> Tensor:
    s = (g.q[..., :4, :] @ g.k[..., :4, :].mT).reshape(B, H, 2, 8)
    return s.softmax(-1).reshape(B, H, 4, 4) @ g.v[..., :4, :]


MULTIPLIED = "its probabilities are multiplied by other numbers"
AT_RANDOM = "its probabilities are dropped at random"
OTHER_AXIS = "its softmax does not run over the values that are summed"
OTHER_OUTPUT = "its output is not that of the softmax of its scores"
OVERWRITTEN = "its scores are written over by other numbers"
REFUSED: dict[str, tuple[Callable[[Given], Tensor], str]] = {
    "two products": (lambda g: (g.q @ g.k.mT + g.q @ g.q.mT).softmax(-1) @ g.v, SEVERAL),
    "gathered product": (gathered_product, SEVERAL),
    "talking after positions": (talking_after_positions, SEVERAL),
    "top scores": (
        lambda g: (g.q @ g.k.mT).topk(3, -1)[0].softmax(-1) @ g.v[:, :, :3], "its scores go through topk"
    ),
    "other axis": (lambda g: (g.q @ g.k.mT).softmax(-2) @ g.v, OTHER_AXIS),
    "cut across": (cut_across, OTHER_AXIS),
    "kept sinks": (
        lambda g: joined(g, g.sinks[None, :, None, None].expand(B, -1, M, -1))
        @ torch.cat([g.v, g.v[..., :1, :]], -2),
        OTHER_AXIS,
    ),
    "rescaled": (rescaled, MULTIPLIED),
    "pruned": (
        lambda g: (g.q @ g.k.mT).softmax(-1) * torch.tensor([1.0, 0.0, 1.0])[:, None, None] @ g.v, MULTIPLIED
    ),
    "dropped": (lambda g: functional.dropout((g.q @ g.k.mT).softmax(-1), 0.5) @ g.v, AT_RANDOM),
    "fused, dropped": (lambda g: sdpa(g.q, g.k, g.v, dropout_p=0.5), AT_RANDOM),
    "rectified": (lambda g: (g.q @ g.k.mT).relu().softmax(-1) @ g.v, "its scores go through relu"),
    "talking": (lambda g: linear(g.q @ g.k.mT, 5).softmax(-1) @ g.v, "its scores go through linear"),
    "talking after": (
        lambda g: linear((g.q @ g.k.mT).softmax(-1), 5) @ g.v, "its probabilities go through linear"
    ),
    "capped after a mask": (
        lambda g: torch.tanh(g.q @ g.k.mT + g.bias).softmax(-1) @ g.v,
        "its scores are capped after a bias or mask",
    ),
    "assigned": (assigned, "its scores are put together from pieces"),
    "in pieces": (in_pieces, "its scores are indexed"),
    "two blocks": (lambda g: joined(g, g.q @ g.q.mT)[..., :M] @ g.v, "its scores are joined to others"),
    "pairwise factor": (
        lambda g: (g.q @ g.k.mT * g.bias).softmax(-1) @ g.v,
        "its scores are multiplied by numbers of their own for every pair of tokens",
    ),
    "overwritten": (lambda g: (g.q @ g.k.mT).masked_fill(~CAUSAL, 0.0).softmax(-1) @ g.v, OVERWRITTEN),
    "overwritten by a tensor": (
        lambda g: torch.where(CAUSAL, g.q @ g.k.mT, number(0.0)).softmax(-1) @ g.v, OVERWRITTEN
    ),
    "operand changed later": (operand_changed_later, OTHER_OUTPUT),
    "dropped rows": (
        lambda g: (g.q @ g.k.mT).softmax(-1).masked_fill(~CAUSAL, 0.0) @ g.v, OTHER_OUTPUT
    ),
    "written over": (
        lambda g: (g.q @ g.k.mT).erf_().softmax(-1) @ g.v, "its scores are written over by erf"
    ),
    "keys of their own": (
        lambda g: torch.einsum("bhld,lrd->bhlr", g.q, random(M, M, D, seed=6)).softmax(-1) @ g.v,
        "its keys differ from query to query",
    ),
    "infinite": (lambda g: ((g.q * math.inf) @ g.k.mT).softmax(-1) @ g.v, "its output is not finite"),
    "sinks by query": (
        lambda g: joined(g, g.bias[None, :, :, :1].expand(B, -1, -1, -1))[..., :-1] @ g.v,
        "its sinks differ from query to query",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_reported_with_its_reason(name: str) -> None:
    g, (pattern, reason) = given(), REFUSED[name]
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


# --- The mode itself -----------------------------------------------------------------------------------


def test_watches_nest() -> None:
    g = given()
    outer: list[SoftmaxCall] = []
    with SoftmaxTracer(lambda call: outer.append(call)):
        inner, out = calls_of(lambda: PATTERNS["matmul"](g))
        with SoftmaxTracer(lambda call: call.output * 2):
            doubled = PATTERNS["matmul"](g)
    assert len(inner) == 1
    assert len(outer) == 2
    assert torch.equal(doubled, 2 * out)


def test_threads_see_their_own_attention() -> None:
    g = given()
    seen: dict[int, int] = {}

    def work(times: int) -> None:
        calls, _ = calls_of(lambda: [PATTERNS["matmul"](g) for _ in range(times)])
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
        PATTERNS["matmul"](g)
    assert torch.overrides._get_current_function_mode() is None
    with pytest.raises(KeyError, match="sdpa"), watch:
        nn.MultiheadAttention(8, 2).eval()(*(torch.ones(3, 1, 8),) * 3, need_weights=False)
    assert torch.overrides._get_current_function_mode() is None
    assert PATTERNS["matmul"](g).shape == (B, H, M, DV)


def test_a_replacement_of_another_shape_is_refused() -> None:
    g = given()
    with pytest.raises(ArgumentError, match="on_softmax"), SoftmaxTracer(lambda call: call.output[..., :1]):
        PATTERNS["matmul"](g)


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
