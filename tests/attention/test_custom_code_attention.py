"""Attention in stages against dense autodiff of the same layers with softmax written out."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import howsmooth as hs
from howsmooth import batching
from howsmooth.attention import Residual, StagedAttention
from howsmooth.attention.custom_code_attention import Core, SoftmaxCore
from howsmooth.errors import ArgumentError, DerivativeError, NonFiniteError
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.jacobian.closed_form import has_closed_form
from howsmooth.jacobian.custom_code_attention import StagedJacobian
from howsmooth.jacobian.memory_footprint import cached_bytes
from howsmooth.measures import DiscreteMeasure
from tests._cases import dense_jacobian, tokens
from tests._operators import to_dense
from tests._selection import others_slow, pairs

N, D, HEADS, KEY, VALUE = 6, 5, 4, 4, 3
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


def in_place(p: Parameters, x: Tensor, core: Core) -> Tensor:
    o = core(0, *projections(p, x))
    o.mul_(1.5)
    return output(p, o).mul_(3.0)


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
    low = rms(x @ p.draw(7, 3, D).T)
    return output(p, core(0, q, split(low @ p.draw(8, KEY, 3).T, 1), split(low @ p.draw(9, VALUE, 3).T, 1)))


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
    "in place after the core": lambda: staged(in_place, CORE),
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


@pytest.mark.parametrize(("name", "streamed"), pairs(CASES, (False, True)))
def test_value_and_jacobian_are_those_of_the_layer_written_out(name: str, streamed: bool) -> None:
    f, x = CASES[name](), tokens(100, N, D)
    torch.testing.assert_close(f(x), naive(f)(x), rtol=1e-13, atol=1e-13)
    exact = dense_jacobian(naive(f), x)
    operator = closed_form_jacobian(f, x[None], streamed=streamed)
    ours = to_dense(operator)[0]
    size = max(1.0, float(exact.abs().max()))
    assert (ours - exact).abs().max() <= 1e-13 * size
    assert operator.members[0].kept.twice
    u = tokens(101, 1, *operator.out_shape)
    assert (operator.adjoint_product(u).flatten() - exact.T @ u.flatten()).abs().max() <= 1e-12 * size


class _Square(torch.autograd.Function):
    """Has both modes, and no second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.x = x
        return x * x

    @staticmethod
    def jvp(ctx: Any, e: Tensor) -> Tensor:
        return 2 * ctx.x * e

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * u


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return u.clone()

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> Tensor:
        raise NotImplementedError("no second derivative")


class _SquareOnce(_Square):
    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * _Once.apply(u)


@pytest.mark.parametrize("square", [_Square, _SquareOnce])
def test_a_layer_whose_backward_has_no_graph_is_run_with_tangents(square: type) -> None:
    f = staged(lambda p, x, core: plain(p, square.apply(x), core), CORE)
    exact_map = naive(staged(lambda p, x, core: plain(p, x * x, core), CORE))
    x = tokens(124, N, D)
    operator = closed_form_jacobian(f, x[None])
    assert not operator.members[0].kept.twice
    torch.testing.assert_close(to_dense(operator)[0], dense_jacobian(exact_map, x), rtol=1e-11, atol=1e-12)


# ---- batches, dtypes, wider and narrower scopes


def test_members_of_a_batch_are_measured_by_themselves() -> None:
    f, x = CASES["norms of queries and keys, causal"](), tokens(102, 2, 2, N, D)
    assert f(x).shape == (2, 2, N, D)
    flat = x.reshape(4, N, D)
    operator = closed_form_jacobian(f, flat)
    exact = torch.stack([dense_jacobian(naive(f), member) for member in flat])
    torch.testing.assert_close(to_dense(operator), exact, rtol=1e-12, atol=1e-12)
    chosen = operator.select(torch.tensor([3, 1]))
    torch.testing.assert_close(to_dense(chosen), exact[[3, 1]], rtol=1e-12, atol=1e-12)
    found = hs.local_lipschitz(f, x, rtol=1e-8)
    assert found.method == "closed form"
    torch.testing.assert_close(found.value.flatten(), torch.linalg.matrix_norm(exact, 2), rtol=1e-9, atol=0)


def test_one_member_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at, sizes = StagedJacobian.at, []

    def counted(f: StagedAttention, x: Tensor, dtype: torch.dtype, **keywords: Any) -> StagedJacobian:
        sizes.append(len(x))
        return at(f, x, dtype, **keywords)

    monkeypatch.setattr(StagedJacobian, "at", counted)
    f = hs.Residual(hs.Compose(CASES["gate"](), hs.RMSNorm(torch.ones(D).double())))
    found = hs.local_lipschitz(f, tokens(125, 3, N, D), rtol=1e-3)
    assert found.value.shape == (3,)
    assert sizes == [1, 1, 1]


def test_the_layer_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    to, made = Around.to, []

    def counted(layer: Around, *, dtype: torch.dtype, device: object) -> Around:
        made.append(dtype)
        return to(layer, dtype=dtype)

    monkeypatch.setattr(Around, "to", counted)
    placed: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    layer = Around(plain, torch.float32)
    f = StagedAttention(layer, (CORE,), d=D, d_out=D, heads=HEADS, n=N, causal=False, **placed)
    hs.local_lipschitz(f, tokens(127, 2, N, D).float(), rtol=1e-2)
    assert made == [torch.float64]


def test_wider_scopes_are_compositions() -> None:
    x, norm = tokens(103, N, D), hs.RMSNorm(tokens(104, D), 1e-6)
    inner = CASES["gate"]()
    for f, written in (
        (hs.Residual(hs.Compose(inner, norm)), lambda x: x + naive(inner)(norm(x))),
        (hs.Compose(norm, hs.Residual(inner)), lambda x: norm(x + naive(inner)(x))),
    ):
        assert has_closed_form(f)
        exact = dense_jacobian(written, x)
        assert (
            to_dense(closed_form_jacobian(f, x[None]))[0] - exact
        ).abs().max() <= 1e-13 * exact.abs().max()


@pytest.mark.parametrize(
    ("name", "fits"),
    others_slow(
        itertools.product(
            ("norms of queries and keys, causal", "windows with masks and biases", "differential"),
            (True, False),
        ),
        [("norms of queries and keys, causal", True), ("differential", False)],
    ),
)
def test_single_precision_has_an_interval_that_holds(name, fits, monkeypatch) -> None:
    if not fits:
        monkeypatch.setattr(batching, "cached_bytes", lambda *arguments: 1 << 60)
    f, x = CASES[name](), tokens(105, 2, N, D)
    single, point = f.to(dtype=torch.float32), x.float()
    assert single.to(dtype=torch.float64) is f
    found = hs.local_lipschitz(single, point, rtol=1e-4)
    exact = torch.stack([torch.linalg.matrix_norm(dense_jacobian(naive(f), m), 2) for m in point.double()])
    assert bool(found.converged.all())
    assert bool(((found.lower <= exact) & (exact <= found.upper)).all())
    torch.testing.assert_close(found.value, exact, rtol=1e-6, atol=0)


def test_bytes_are_counted_by_the_softmaxes_as_they_are() -> None:
    one, graphs = HEADS * N * N, 64 * N * D
    f = CASES["differential"]()  # two softmaxes, each of all heads
    assert cached_bytes(f, N, torch.float64) == graphs * 8 + 2 * one * 3 * 8
    assert cached_bytes(f, N, torch.float32) == graphs * (4 + 8) + 2 * one * (4 + 3 * 8)
    assert cached_bytes(Residual(f), N, torch.float64) == cached_bytes(f, N, torch.float64)
    f = CASES["windows"]()  # two windows of half the tokens: half the scores
    assert cached_bytes(f, N, torch.float64) == graphs * 8 + one // 2 * 3 * 8
    assert cached_bytes(f.to(dtype=torch.float32), N, torch.float64) == graphs * 8 + one // 2 * 3 * 8


@pytest.mark.parametrize("name", ["norms of queries and keys, causal", "gate", "a mask for each head"])
def test_narrower_scopes_stop_at_the_softmax(name: str) -> None:
    f, x = CASES[name](), tokens(106, N, D)
    seen: list[Tensor] = []

    def written(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(naive_core(f.cores[i], q, k, v).reshape(HEADS, N, VALUE))
        return seen[-1].reshape(*q.shape[:-1], VALUE)

    f.layer.run(x, written)
    heads = f.without_output()
    torch.testing.assert_close(heads(x), joined(seen[0]), rtol=1e-13, atol=1e-13)
    assert heads.d_out == HEADS * VALUE
    assert "heads concatenated" in heads.describe()
    parts = [f.head(h) for h in range(HEADS)]
    assert [part.d_out for part in parts] == [VALUE] * HEADS
    torch.testing.assert_close(torch.cat([part(x) for part in parts], 1), heads(x), rtol=1e-13, atol=1e-13)
    for part in (heads, parts[2]):
        exact = dense_jacobian(part, x)
        ours = to_dense(closed_form_jacobian(part, x[None]))[0]
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)


def test_what_follows_in_place_does_not_reach_the_heads() -> None:
    def body(p: Parameters, x: Tensor, core: Core) -> Tensor:
        q, k, v = (t[:1] for t in projections(p, x))
        return core(0, q, k, v)[0].mul_(3.0)

    placed: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
    f = StagedAttention(Around(body), (CORE,), d=D, d_out=VALUE, heads=1, n=N, causal=False, **placed)
    x = tokens(123, N, D)
    for scope in (f.without_output(), f.head(0)):
        torch.testing.assert_close(3 * scope(x), f(x))


def test_a_head_of_a_group_reads_its_own_keys() -> None:
    f, x = CASES["interleaved rotary, grouped"](), tokens(107, N, D)
    torch.testing.assert_close(f.head(3)(x), f.without_output()(x)[:, 3 * VALUE :], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("name", "words"), [("differential", "2 softmaxes"), ("windows", "2 windows")])
def test_narrower_scopes_of_what_has_no_heads_are_refused(name: str, words: str) -> None:
    f = CASES[name]()
    with pytest.raises(ArgumentError, match=words):
        f.without_output()
    with pytest.raises(ArgumentError, match=words):
        f.head(0)
    with pytest.raises(ArgumentError, match="from 0 to 3"):
        f.head(HEADS)


# ---- long sequences


@pytest.mark.parametrize(
    "core",
    [
        SoftmaxCore(0.5, causal=True),
        SoftmaxCore(0.5),
        SoftmaxCore(0.5, softcap=1.0, sinks=tokens(110, HEADS)),
        SoftmaxCore(0.5, mask=torch.ones(1, 700, dtype=torch.bool).index_fill(1, torch.arange(600, 700), 0)),
        SoftmaxCore(0.5, score_bias=tokens(111, 2, 1, 1, 700)),
        SoftmaxCore(0.5, mask=tokens(112, 2, HEADS, 1, 700) > 0),
    ],
)
def test_long_sequences_are_cut_into_blocks(core: SoftmaxCore) -> None:
    m = 700 if core.causal else 800
    q, k = 3 * tokens(113, 2, HEADS, m, KEY), tokens(114, 2, 2, 700, KEY)
    v = tokens(115, 2, 2, 700, VALUE)
    torch.testing.assert_close(core.attend(q, k, v), naive_core(core, q, k, v), rtol=1e-12, atol=1e-13)


def test_what_an_operator_keeps_goes_with_it() -> None:
    f, x = CASES["gate"](), tokens(116, 1, N, D)
    e = tokens(117, 1, N, D)
    operator = closed_form_jacobian(f, x)
    operator.product(e), operator.adjoint_product(e)
    gc.collect()
    gc.disable()  # references in a circle would only be found by the collector
    try:
        before = _tensors()
        for _ in range(3):
            operator.product(e), operator.adjoint_product(e)
        assert _tensors() == before
        (member,) = operator.members
        kept = [weakref.ref(member.kept.y), weakref.ref(member.cores[0].derivative)]
        del operator, member
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


def _tensors() -> int:
    return sum(type(thing) is Tensor for thing in gc.get_objects())


# ---- refusals


class _WrongSquare(_Square):
    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Tensor:
        return 2.1 * ctx.saved_tensors[0] * u


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (lambda p, x, core: plain(p, _WrongSquare.apply(x), core), DerivativeError, "reverse mode disagree"),
        (lambda p, x, core: torch.nn.functional.dropout(plain(p, x, core)), ArgumentError, "the same output"),
        (
            lambda p, x, core: plain(p, x, core) * (1 + x.detach().square()),
            DerivativeError,
            "finite differences contradict",
        ),
        (lambda p, x, core: x, ArgumentError, r"\[\]"),
        (lambda p, x, core: plain(p, plain(p, x, core), core), ArgumentError, r"\[0, 0\]"),
        (
            lambda p, x, core: output(p, sum(core(i, *projections(p, x)) for i in (0, 1))),
            ArgumentError,
            r"\[0, 1\]",
        ),
        (lambda p, x, core: plain(p, x, core)[None], ArgumentError, r"\(1, 6, 5\)"),
        (lambda p, x, core: plain(p, x, core).float(), ArgumentError, "float32"),
        (lambda p, x, core: plain(p, x, core) / 0.0, NonFiniteError, "finite outputs"),
    ],
)
def test_a_layer_that_breaks_its_contract_is_refused(body: Body, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        hs.local_lipschitz(staged(body, CORE), tokens(118, N, D))


@pytest.mark.parametrize(
    ("keywords", "argument"),
    [
        ({"scale": math.nan}, "scale"),
        ({"softcap": 0.0}, "softcap"),
        ({"mask": torch.zeros(N, N)}, "mask"),
        ({"mask": torch.eye(N).bool().logical_not(), "causal": True}, "mask"),
        ({"mask": torch.tensor([[False, True]]), "causal": True}, "mask"),
        ({"score_bias": torch.full((N, N), -math.inf)}, "score_bias"),
        ({"score_bias": torch.zeros(N)}, "score_bias"),
        ({"sinks": torch.zeros(1, HEADS)}, "sinks"),
    ],
)
def test_a_core_that_makes_no_sense_is_refused(keywords: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        SoftmaxCore(**({"scale": 1.0} | keywords))
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("core", "argument"),
    [
        (SoftmaxCore(1.0, causal=True), "causal"),
        (SoftmaxCore(1.0, mask=torch.ones(N, N + 1).bool()), "mask"),
        (SoftmaxCore(1.0, score_bias=torch.zeros(2, 1, N, 3)), "score_bias"),
        (SoftmaxCore(1.0, sinks=torch.zeros(HEADS + 1)), "sinks"),
    ],
)
def test_a_core_that_does_not_fit_its_operands_is_refused(core: SoftmaxCore, argument: str) -> None:
    q, k, v = torch.zeros(HEADS, N, KEY), torch.zeros(2, 3, KEY), torch.zeros(2, 3, VALUE)
    with pytest.raises(ArgumentError) as caught:
        core.attend(q, k, v)
    assert caught.value.argument == argument


def test_a_number_of_key_heads_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ArgumentError, match="divides the 4"):
        CORE.attend(torch.zeros(4, N, KEY), torch.zeros(3, N, KEY), torch.zeros(3, N, VALUE))


def test_lengths_and_measures_are_refused() -> None:
    f = CASES["plain"]()
    with pytest.raises(ArgumentError, match="n = 6 tokens"):
        f(tokens(0, N + 1, D))
    atoms = DiscreteMeasure.sequence(tokens(0, N, D))
    for ask in (f, partial(hs.local_lipschitz, f), partial(hs.local_lipschitz, f, method="autodiff")):
        with pytest.raises(ArgumentError, match="act on measures"):
            ask(atoms)


def _wild(p: Parameters, x: Tensor, core: Core) -> Tensor:
    """Its derivative changes with the last digit of a token."""
    return plain(p, torch.sin(3e4 * x), core)


def test_rounding_inside_the_layer_is_allowed_for() -> None:
    f, x = staged(_wild, CORE).to(dtype=torch.float32), tokens(121, 1, N, D).float()
    operator = closed_form_jacobian(f, x)
    exact = dense_jacobian(naive(f.to(dtype=torch.float64)), x[0])
    error = torch.linalg.matrix_norm(to_dense(operator)[0].double() - exact, 2)
    size = torch.linalg.matrix_norm(exact, 2)
    assert 1e-4 * size < error <= operator.rounding[0] * size
    assert float(closed_form_jacobian(f.to(dtype=torch.float64), x.double()).rounding[0]) < 1e-9
