"""hs.functional.attention against attention written out, PyTorch's own, and finite differences."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import howsmooth as hs
from howsmooth.attention.masks import Visibility
from howsmooth.errors import ArgumentError
from howsmooth.functional import attention, blockwise_autograd
from howsmooth.functional.blockwise_autograd import Grid
from tests._forked import memory_added
from tests._selection import pairs

D = torch.float64
HEADS, KV_HEADS = 4, 2
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even few tokens into several blocks of rows, of heads and of members."""
    monkeypatch.setattr(blockwise_autograd, "_ENTRIES", {"cpu": 60})
    monkeypatch.setattr(blockwise_autograd, "_FEWEST_ROWS", 2)


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    offset: int = 0,
    scale: float | None = None,
    score_bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention as one would write it, with all of its matrices; a row that sees nothing is zero."""
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if score_bias is not None:
        s = s + score_bias
    m, n = s.shape[-2:]
    seen = torch.ones(s.shape, dtype=torch.bool)
    i, j = torch.arange(m)[:, None] + offset, torch.arange(n)
    if causal:
        seen = seen & (j <= i)
    if window is not None:
        seen = seen & ((i - j).abs() < window)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        seen = seen & (mask != float("-inf"))
        s = s + torch.where(mask == float("-inf"), 0.0, mask)
    e = torch.where(seen, torch.exp(s), 0.0)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None, None] if sinks.ndim == 1 else sinks)
    return e / torch.where(total == 0, 1.0, total) @ v


def drawn(*shape: int, seed: int, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(m: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values that lack one leading axis."""
    return (
        drawn(2, HEADS, m, 3, seed=1),
        drawn(1, KV_HEADS, n, 3, seed=2),
        drawn(KV_HEADS, n, 2, seed=3),
    )


BOOLEAN = drawn(2, 1, 5, 7, seed=4) > -0.3
BOOLEAN[1, :, 2] = False
ADDED = drawn(HEADS, 5, 7, seed=5)
ADDED[drawn(HEADS, 5, 7, seed=6) < -0.4] = float("-inf")
ADDED[1, 3] = float("-inf")

# Queries, keys, what else is given, and which of it is differentiated besides q, k and v.
CASES: dict[str, tuple[int, int, dict[str, Any], tuple[str, ...]]] = {
    "plain": (5, 7, {}, ()),
    "scale": (5, 7, {"scale": 1.3}, ()),
    "causal": (7, 7, {"causal": True}, ()),
    "window": (7, 7, {"window": 2}, ()),
    "causal window": (9, 9, {"causal": True, "window": 3}, ()),
    "causal, more keys": (5, 9, {"causal": True}, ()),
    "causal, more queries": (9, 5, {"causal": True}, ()),
    "causal, last queries": (3, 9, {"causal": True, "offset": 6}, ()),
    "window, last queries": (4, 9, {"causal": True, "window": 3, "offset": 5}, ()),
    "window, queries that see no key": (9, 4, {"window": 2, "offset": 1}, ()),
    "boolean mask": (5, 7, {"mask": BOOLEAN}, ()),
    "added mask": (5, 7, {"mask": ADDED}, ()),
    "mask that is learned": (5, 7, {"mask": drawn(5, 1, seed=7) + drawn(1, 7, seed=8)}, ("mask",)),
    "bias of keys": (5, 7, {"score_bias": drawn(HEADS, 1, 7, seed=9)}, ("score_bias",)),
    "softcap": (5, 7, {"softcap": 0.8}, ()),
    "sinks": (5, 7, {"sinks": drawn(HEADS, seed=10)}, ("sinks",)),
    "sinks of each query": (5, 7, {"sinks": drawn(2, HEADS, 5, 1, seed=10)}, ("sinks",)),
    "all": (
        7,
        7,
        {
            "mask": drawn(1, 7, 7, seed=11) > -1,
            "causal": True,
            "window": 5,
            "scale": 0.7,
            "score_bias": drawn(2, 1, 7, 7, seed=12),
            "softcap": 1.5,
            "sinks": drawn(HEADS, seed=13),
        },
        ("score_bias", "sinks"),
    ),
}


def both(name: str) -> tuple[Function, Function, tuple[Tensor, ...]]:
    """Return ours and the one written out as functions of tensors, and those tensors."""
    m, n, given, moved = CASES[name]

    def of(f: Function) -> Function:
        def g(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
            out: Tensor = f(q, k, v, **{**given, **dict(zip(moved, others, strict=True))})
            return out

        return g

    return of(attention), of(written_out), (*inputs(m, n), *(given[key] for key in moved))


def directions(tensors: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    return tuple(drawn(*t.shape, seed=seed + i) for i, t in enumerate(tensors))


def agree(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    """Check that two structures of tensors are equal, relative to the largest number of each tensor."""
    pairs = zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs), strict=True)
    for a, b in pairs:
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max(), (a, b)


def along(f: Function, d: tuple[Tensor, ...]) -> Function:
    """Return x ↦ the derivative of f along d at x, by forward mode."""
    return lambda *x: jvp(f, x, d)[1]


def inner(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([(s * t).sum() for s, t in zip(a, b, strict=True)]).sum()


@pytest.mark.parametrize("name", CASES)
def test_value_tangent_and_cotangents(name: str) -> None:
    ours, theirs, x = both(name)
    agree(ours(*x), theirs(*x))
    agree(jvp(ours, x, directions(x, 20)), jvp(theirs, x, directions(x, 20)))
    u = drawn(*ours(*x).shape, seed=30)
    agree(vjp(ours, *x)[1](u), vjp(theirs, *x)[1](u))


@pytest.mark.parametrize("name", ["softcap", "all"])
def test_one_tensor_at_a_time(name: str) -> None:
    """Where only some tensors move, less is computed."""
    ours, theirs, x = both(name)
    u = drawn(*ours(*x).shape, seed=30)
    for i, d in enumerate(directions(x, 20)):
        alone = [lambda t, f=f, i=i: f(*x[:i], t, *x[i + 1 :]) for f in (ours, theirs)]
        agree(*(jvp(f, x[i : i + 1], (d,))[1] for f in alone))
        agree(*(vjp(f, x[i])[1](u) for f in alone))


SECOND: dict[str, Function] = {
    "forward over reverse": lambda h, x, d, e: jvp(grad(h, tuple(range(len(x)))), x, d)[1],
    "reverse over reverse": lambda h, x, d, e: grad(
        lambda *y: inner(grad(h, tuple(range(len(x))))(*y), d), tuple(range(len(x)))
    )(*x),
    "reverse over forward": lambda h, x, d, e: grad(along(h, d), tuple(range(len(x))))(*x),
    "forward over forward": lambda h, x, d, e: along(along(h, d), e)(*x),
}


@pytest.mark.parametrize(
    ("name", "order"),
    pairs(
        [
            "causal, last queries",
            "window, queries that see no key",
            "boolean mask",
            "added mask",
            "mask that is learned",
            "softcap",
            "sinks of each query",
            "all",
        ],
        SECOND,
    ),
)
def test_second_derivatives(name: str, order: str) -> None:
    ours, theirs, x = both(name)
    d, e = directions(x, 20), directions(x, 40)

    def found(f: Function) -> Any:
        return SECOND[order](lambda *y: (f(*y) ** 3).sum(), x, d, e)

    agree(found(ours), found(theirs))


def test_third_derivatives() -> None:
    ours, theirs, x = both("all")
    d, e = directions(x, 20), directions(x, 40)

    def found(f: Function) -> Any:
        return grad(along(along(lambda *y: (f(*y) ** 2).sum(), d), e), tuple(range(len(x))))(*x)

    agree(found(ours), found(theirs))


@pytest.mark.parametrize("outer", ["jvp", "vjp"])
def test_a_second_derivative_of_one_kind_is_differentiated_again(outer: str) -> None:
    """The gradient in a tangent alone is an adjoint, and that in a cotangent alone is a tangent."""

    def in_the_tangent(f: Function) -> Function:
        def found(q: Tensor, dq: Tensor, u: Tensor) -> Tensor:
            return vjp(lambda dq: jvp(lambda q: f(q, *kv), (q,), (dq,))[1], dq)[1](u)[0]

        return found

    def in_the_cotangent(f: Function) -> Function:
        def found(q: Tensor, dq: Tensor, u: Tensor) -> Tensor:
            return vjp(lambda u: vjp(lambda q: f(q, *kv), q)[1](u)[0], u)[1](dq)[0]

        return found

    ours, theirs, (q, *kv) = both("softcap")
    at = (q, drawn(*q.shape, seed=20), drawn(*ours(q, *kv).shape, seed=21))
    for derivative in (in_the_tangent, in_the_cotangent):
        results = []
        for f in (ours, theirs):
            if outer == "jvp":
                results.append(jvp(derivative(f), at, directions(at, 22)))
            else:
                out, pull = vjp(derivative(f), *at)
                results.append((out, *pull(drawn(*out.shape, seed=23))))
        agree(*results)


def test_finite_differences() -> None:
    """PyTorch's own checks, without torch.func: reverse, forward, and one over the other."""
    sizes = ((2, 4, 2), (1, 4, 2), (1, 4, 1), (1, 4), (2,))
    x = [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(sizes)]

    def f(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, causal=True, score_bias=bias, softcap=2.0, sinks=sinks)
        return out

    batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, **batched)
    assert torch.autograd.gradgradcheck(
        f, x, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True, fast_mode=True
    )


OPINFO = """
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_methods_invocations import op_db
import torch
from howsmooth.functional import attention
op = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
count = 0
for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
    given = sample.kwargs
    x, count = (sample.input, *sample.args), count + 1
    def f(q, k, v):
        torch.manual_seed(1)
        rule = {"causal": given["is_causal"], "dropout_p": given["dropout_p"]}
        return attention(q, k, v, given.get("attn_mask"), **rule)
    assert given["dropout_p"] or (f(*x) - op(*x, **given)).abs().max() <= 1e-12
    # Forward mode within the older vmap calls f there, where PyTorch refuses all random operations.
    batched = {"check_batched_grad": True, "check_batched_forward_grad": not given["dropout_p"]}
    assert gradcheck(f, x, check_forward_ad=True, fast_mode=True, **batched)
    assert gradgradcheck(
        f, x, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True, fast_mode=True
    )
print(count)
"""


def test_dropout() -> None:
    """P is multiplied by a constant matrix M, which the output of equal scores and unit values shows."""
    (q, k, v), p = (drawn(2, heads, 6, 3, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS)), 0.4
    bias, sinks = drawn(2, HEADS, 6, 6, seed=4), drawn(HEADS, seed=5)

    def ours(*x: Tensor) -> Tensor:
        torch.manual_seed(6)
        out: Tensor = attention(*x[:3], score_bias=x[3], sinks=x[4], softcap=2.0, causal=True, dropout_p=p)
        return out

    torch.manual_seed(6)
    units = torch.eye(6, dtype=D).expand(2, KV_HEADS, 6, 6)
    m = attention(0 * q, k, units, dropout_p=p) * 6
    assert sorted(m.unique().tolist()) == pytest.approx([0.0, 1 / (1 - p)])

    def theirs(*x: Tensor) -> Tensor:
        q, k, v, bias, sinks = x
        eyes = units.to(v)
        weights = written_out(q, k, eyes, score_bias=bias, sinks=sinks, softcap=2.0, causal=True)
        return (m * weights) @ v.repeat_interleave(HEADS // KV_HEADS, -3)

    x = (q, k, v, bias, sinks)
    agree(ours(*x), theirs(*x))
    every, d = tuple(range(5)), directions(x, 10)
    agree(along(ours, d)(*x), along(theirs, d)(*x))

    def gradients(f: Function) -> Function:
        return grad(lambda *y: (f(*y) ** 2).sum(), every)

    agree(gradients(ours)(*x), gradients(theirs)(*x))
    agree(along(gradients(ours), d)(*x), along(gradients(theirs), d)(*x))
    assert not attention(q, k, v, dropout_p=1).any()


def test_dropout_is_random_in_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, keys, heads, members and calls are dropped independently, at the rate that was asked for.

    In blocks as they are, so that the numbers do not depend on blocks is seen as well.
    """
    n, p = 128, 0.3
    units = torch.eye(n).expand(2, 4, n, n)
    q = torch.zeros(2, 4, n, 1)
    torch.manual_seed(0)
    first = attention(q, q, units, dropout_p=p) * n
    monkeypatch.setattr(blockwise_autograd, "_ENTRIES", {"cpu": 1 << 20})
    second = attention(q, q, units, dropout_p=p) * n
    torch.manual_seed(0)
    assert torch.equal(attention(q, q, units, dropout_p=p) * n, first)
    centred = torch.cat((first, second)).flatten(0, 1).double()
    centred = (centred * (1 - p) - (1 - p)) / (p * (1 - p)) ** 0.5
    assert centred.mean().abs() < 5 / centred.numel() ** 0.5
    for axes in ("hin,hjn->hij", "hni,hnj->hij", "gin,hin->igh"):
        products = torch.einsum(axes, centred, centred).triu(1)
        size = products[products != 0].pow(2).mean() / n
        assert abs(size - 1) < 0.1
    dropped = vmap(lambda q: attention(q, q, units[0], dropout_p=p), randomness="different")(q)
    assert not torch.equal(dropped[0], dropped[1])


@pytest.mark.slow
def test_the_sample_inputs_of_pytorch() -> None:
    """In a process of its own, because PyTorch's tests change settings when they are imported."""
    pytest.importorskip("expecttest")
    done = subprocess.run([sys.executable, "-c", OPINFO], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 25


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobians(strategy: str) -> None:
    """The older vmap of torch.autograd.functional, also where its result is differentiated again."""
    ours, theirs, x = both("causal, last queries")

    def of_queries(f: Function) -> Function:
        return lambda q: f(q, *x[1:])

    def cubes(q: Tensor) -> Tensor:
        out: Tensor = (of_queries(ours)(q) ** 3).sum()
        return out

    found = torch.autograd.functional.jacobian(of_queries(ours), x[0], vectorize=True, strategy=strategy)
    agree(found, jacrev(of_queries(theirs))(x[0]))
    found = torch.autograd.functional.hessian(cubes, x[0], vectorize=True, outer_jacobian_strategy=strategy)
    agree(found, hessian(lambda q: (of_queries(theirs)(q) ** 3).sum())(x[0]))


def test_the_gradient_of_a_vectorized_jacobian() -> None:
    ours, theirs, x = both("sinks")
    q = x[0].clone().requires_grad_()
    found = torch.autograd.functional.jacobian(
        lambda q: ours(q, *x[1:]), q, create_graph=True, vectorize=True
    )
    u = drawn(*found.shape, seed=30)
    truth = vjp(jacrev(lambda q: theirs(q, *x[1:])), x[0])[1](u)
    agree(torch.autograd.grad(found, q, u), truth)


@pytest.mark.parametrize("dims", [(0, None, None), (None, 1, None), (2, 0, 1), (None, None, 3)])
def test_vmap_over_some(dims: tuple[int | None, ...]) -> None:
    """Each member as if it were alone: values, gradients, and gradients of a sum over members."""
    shapes = ((HEADS, 5, 3), (KV_HEADS, 7, 3), (KV_HEADS, 7, 2))
    x = tuple(
        drawn(*shape[:dim], 3, *shape[dim:], seed=i) if dim is not None else drawn(*shape, seed=i)
        for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True))
    )

    def alone(f: Function) -> Tensor:
        picked = (
            [t if d is None else t.select(d, i) for t, d in zip(x, dims, strict=True)] for i in range(3)
        )
        return torch.stack([f(*one) for one in picked])

    agree(vmap(attention, in_dims=dims)(*x), alone(written_out))

    def scalar(f: Function) -> Function:
        return lambda *y: (f(*y) ** 2).sum()

    def whole(f: Function) -> Function:
        return lambda *y: (vmap(f, in_dims=dims)(*y) ** 2).sum()

    for i in range(3):
        agree(vmap(grad(scalar(attention), i), in_dims=dims)(*x), alone(grad(scalar(written_out), i)))
        agree(grad(whole(attention), i)(*x), grad(whole(written_out), i)(*x))
        # Along values alone, results may be the same for all members.
        d, u = drawn(*shapes[i], seed=20), drawn(HEADS, 5, 2, seed=30)

        def tangent(f: Function, i: int = i, d: Tensor = d) -> Function:
            return lambda *y: jvp(lambda t: f(*y[:i], t, *y[i + 1 :]), (y[i],), (d,))[1]

        def cotangent(f: Function, i: int = i, u: Tensor = u) -> Function:
            return lambda *y: vjp(f, *y)[1](u)[i]

        agree(vmap(tangent(attention), in_dims=dims)(*x), alone(tangent(written_out)))
        agree(vmap(cotangent(attention), in_dims=dims)(*x), alone(cotangent(written_out)))


def test_vmap_within_and_around_derivatives() -> None:
    """Two axes at once, over masks too, with Jacobians and Hessians within and around."""
    x = (drawn(3, 2, 4, 2, seed=1), drawn(1, 4, 2, seed=2), drawn(1, 4, 2, seed=3))
    seen = drawn(2, 4, 4, seed=4) > -0.8
    f, g = (
        lambda q, k, s, f=f: vmap(lambda q: vmap(lambda s: f(q, k, x[2], s, softcap=2.0))(s))(q)
        for f in (attention, written_out)
    )
    agree(f(*x[:2], seen), g(*x[:2], seen))
    for derivative in (jacrev, jacfwd):
        agree(derivative(f, (0, 1))(*x[:2], seen), derivative(g, (0, 1))(*x[:2], seen))
    total = [lambda q, k, f=f: (f(q, k, seen) ** 2).sum() for f in (f, g)]
    agree(*(grad(lambda q, k, t=t: (hessian(t, 1)(q, k) ** 2).sum(), (0, 1))(*x[:2]) for t in total))
    each = [lambda k, s, f=f: (f(x[0][0], k, x[2], s) ** 2).sum() for f in (attention, written_out)]
    agree(*(vmap(hessian(one), in_dims=(None, 0))(x[1], seen) for one in each))
    agree(*(vmap(jacfwd(jacfwd(one)), in_dims=(None, 0))(x[1], seen) for one in each))


def test_linearize(monkeypatch: pytest.MonkeyPatch) -> None:
    """What linearize records is right at every call, not at the first one only."""
    monkeypatch.setattr(blockwise_autograd, "_ENTRIES", {"cpu": 250})
    ours, theirs, x = both("sinks")
    with pytest.warns(UserWarning, match="get_attr"):
        _, product = linearize(ours, *x)
    for seed in (20, 40):
        agree(product(*directions(x, seed)), jvp(theirs, x, directions(x, seed))[1])


@pytest.mark.parametrize("given", ["plain", "causal", "boolean", "added"])
def test_scaled_dot_product_attention(given: str) -> None:
    """PyTorch's math backend has values, gradients and tangents; so do we, and they are equal."""
    q, k, v = (
        drawn(2, HEADS, 6, 3, seed=1),
        drawn(2, KV_HEADS, 6, 3, seed=2),
        drawn(2, KV_HEADS, 6, 3, seed=3),
    )
    mask = {"boolean": drawn(6, 6, seed=4) > -0.5, "added": drawn(HEADS, 6, 6, seed=5)}.get(given)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = given == "causal"
        return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=0.4, enable_gqa=True)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, mask, causal=given == "causal", scale=0.4)
        return out

    x, u = (q, k, v), drawn(2, HEADS, 6, 3, seed=9)
    with sdpa_kernel(SDPBackend.MATH):
        agree(ours(*x), theirs(*x))
        agree(jvp(ours, x, directions(x, 20)), jvp(theirs, x, directions(x, 20)))
        agree(vjp(ours, *x)[1](u), vjp(theirs, *x)[1](u))


@pytest.mark.parametrize("form", ["boolean", "added", "bias", "with sinks"])
def test_a_query_that_sees_no_key(form: str) -> None:
    q, k, v = drawn(2, 5, 3, seed=1), drawn(2, 7, 3, seed=2), drawn(2, 7, 2, seed=3)
    seen = torch.ones(5, 7, dtype=torch.bool)
    seen[3] = False
    added = torch.zeros(5, 7, dtype=D).masked_fill(~seen, float("-inf"))
    mask = seen if form in ("boolean", "with sinks") else added if form == "added" else None
    bias = added if form == "bias" else None
    sinks = torch.zeros(2, dtype=D) if form == "with sinks" else None

    def f(*x: Tensor) -> Tensor:
        out: Tensor = attention(*x, mask, score_bias=bias, sinks=sinks)
        return out

    x = (q, k, v)
    assert (f(*x)[:, 3] == 0).all()
    assert (f(*x)[:, 2] != 0).all()
    for derivative in (jacrev, jacfwd):
        of_q, of_k, of_v = derivative(f, (0, 1, 2))(*x)
        assert (of_q[:, 3] == 0).all()
        assert (of_k[:, 3] == 0).all()
        assert (of_v[:, 3] == 0).all()
        assert of_q.isfinite().all()
        assert (of_q[0, 2, :, 0, 2] != 0).all()
    second = hessian(lambda *x: (f(*x) ** 2).sum())(*x)
    assert second.isfinite().all()
    assert (second[:, 3] == 0).all()
    assert (second[0, 2, :, 0, 2] != 0).all()
    assert (scaled_dot_product_attention(q, k, v, seen)[:, 3] == 0).all()  # as the guide says


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 5e-3)]
)
def test_precisions(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are rounded to the dtype once: sums over 300 keys are not made in it."""
    monkeypatch.setattr(blockwise_autograd, "_ENTRIES", {"cpu": 20_000})
    x = (drawn(2, 300, 8, seed=1), drawn(2, 300, 8, seed=2), drawn(2, 300, 4, seed=3))
    x = tuple(t.to(dtype) for t in x)
    exact = tuple(t.double() for t in x)
    d, u = tuple(t.to(dtype) for t in directions(x, 20)), drawn(2, 300, 4, seed=30, dtype=dtype)
    tangents = tuple(t.double() for t in d)
    (out, moved), (_, pull) = jvp(attention, x, d), vjp(attention, *x)
    assert out.dtype == moved.dtype == pull(u)[0].dtype == dtype
    agree(out.double(), written_out(*exact), tolerance)
    agree(moved.double(), jvp(written_out, exact, tangents)[1], tolerance)
    agree(tuple(g.double() for g in pull(u)), vjp(written_out, *exact)[1](u.double()), tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_autocast_as_in_scaled_dot_product_attention(dtype: torch.dtype, masked: bool) -> None:
    """The dtypes of outputs and gradients, and inputs that are rounded once: sums are float32 throughout."""
    x = tuple(drawn(2, 40, 8, seed=seed).to(dtype) for seed in (1, 2, 3))
    mask = drawn(40, 40, seed=4).to(dtype) if masked else None
    u = drawn(2, 40, 8, seed=5)
    found = []
    for f in (attention, scaled_dot_product_attention):
        leaves = [t.clone().requires_grad_() for t in x]
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            out = f(*leaves, mask)
        found.append([out, *torch.autograd.grad(out, leaves, u.to(out.dtype))])
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
    rounded = dtype != torch.float64
    exact = tuple((t.bfloat16() if rounded else t).double() for t in x)
    bias = None if mask is None else (mask.bfloat16() if rounded else mask).double()
    agree(found[0][0].double(), written_out(*exact, bias), 5e-3 if rounded else 1e-12)


def test_large_scores() -> None:
    """Exponents far beyond the range of float64, where nothing overflows."""
    q, k, v = 1e3 * drawn(2, 4, 3, seed=1), 1e3 * drawn(2, 6, 3, seed=2), drawn(2, 6, 2, seed=3)
    best = (q @ k.mT).argmax(dim=-1, keepdim=True).expand(2, 4, 2)
    agree(attention(q, k, v), v.gather(1, best))
    assert all(g.isfinite().all() for g in vjp(attention, q, k, v)[1](torch.ones(2, 4, 2, dtype=D)))


def test_one_head_and_nothing_at_all() -> None:
    q, k, v = drawn(5, 3, seed=1), drawn(7, 3, seed=2), drawn(7, 2, seed=3)
    agree(attention(q, k, v), written_out(q[None], k[None], v[None])[0])
    assert attention(q[:0], k, v).shape == (0, 2)
    nothing = jacrev(attention, (0, 1, 2))(q, k[:0], v[:0])
    assert attention(q, k[:0], v[:0]).eq(torch.zeros(5, 2)).all()
    assert nothing[0].eq(0).all()
    assert nothing[1].shape == (5, 2, 0, 3)
    assert attention(q.expand(0, 2, 5, 3), k.expand(2, 7, 3), v.expand(2, 7, 2)).shape == (0, 2, 5, 2)


@pytest.mark.parametrize(
    ("causal", "window", "offset", "share"),
    [
        (False, None, 0, 1.0),
        (True, None, 0, 0.6),
        (True, 20, 0, 0.2),
        (False, 10, 0, 0.2),
        (True, 20, 300, 0.2),
    ],
)
def test_blocks_hold_what_is_seen_once_and_little_else(
    causal: bool, window: int | None, offset: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n = 400, 400 + offset
    visible = Visibility(n, causal, window, offset=offset)
    monkeypatch.setattr(blockwise_autograd, "_ENTRIES", {"cpu": 20_000})
    monkeypatch.setattr(blockwise_autograd, "_FEWEST_ROWS", 16)
    times = torch.zeros(3, 2, m, n)
    for block in Grid(3, 2, 1, m, visible).blocks(1, torch.device("cpu")):
        times[block.lead, block.heads, block.rows, block.keys] += 1
    assert times.max() == 1
    seen = visible.block(slice(0, m), slice(0, n))
    assert times.min() == 1 if seen is None else (times[:, :, seen] == 1).all()
    assert times.mean() <= share


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no tensor": (lambda: call(q=[1.0]), "q: expected a torch.Tensor, got list"),
    "integers": (lambda: call(q=torch.ones(2, 4, 3, dtype=torch.int64)), "q: expected float16"),
    "two dtypes": (lambda: call(k=drawn(2, 6, 3, seed=2).float()), "k: expected torch.float64, as q"),
    "two devices": (lambda: call(v=drawn(2, 6, 2, seed=2).to("meta")), "v: expected a tensor on cpu"),
    "one axis": (lambda: call(q=drawn(3, seed=1)), "q: expected queries, keys and values"),
    "no heads in keys": (lambda: call(k=drawn(6, 3, seed=1)), "k: expected queries, keys and values"),
    "key entries": (lambda: call(k=drawn(2, 6, 4, seed=1)), "k: expected keys of the 3 entries"),
    "no entries": (lambda: call(q=drawn(2, 4, 0, seed=1), k=drawn(2, 6, 0, seed=1)), "k: expected entries"),
    "values": (lambda: call(v=drawn(2, 5, 2, seed=1)), "v: expected values for the 2 heads and 6 tokens"),
    "heads": (lambda: call(q=drawn(3, 4, 3, seed=1)), "k: expected a number of key heads that divides the 3"),
    "leading axes": (lambda: call(q=drawn(2, 2, 4, 3, seed=1), k=drawn(3, 2, 6, 3, seed=1)), "q, k, v: "),
    "mask's shape": (lambda: call(mask=torch.ones(4, 5, dtype=torch.bool)), "mask: expected a shape"),
    "mask's axes": (lambda: call(mask=torch.ones(1, 2, 4, 6, dtype=torch.bool)), "mask: expected a shape"),
    "mask's dtype": (lambda: call(mask=torch.ones(4, 6, dtype=torch.int64)), "mask: expected torch.bool, or"),
    "boolean bias": (
        lambda: call(score_bias=torch.ones(4, 6, dtype=torch.bool)),
        "score_bias: expected torch.float64",
    ),
    "sinks": (lambda: call(sinks=torch.zeros(3, dtype=D)), "sinks: expected a shape that broadcasts to"),
    "offset": (lambda: call(offset=-1), "offset: expected a whole number >= 0"),
    "causal": (lambda: call(causal=1), "causal: expected True or False"),
    "window": (lambda: call(window=0), "window: expected a whole number"),
    "scale": (lambda: call(scale=float("nan")), "scale: expected a finite number"),
    "softcap": (lambda: call(softcap=0), "softcap: expected a finite number > 0"),
}


def call(**changed: object) -> Tensor:
    x: dict[str, Any] = {
        "q": drawn(2, 4, 3, seed=1),
        "k": drawn(2, 6, 3, seed=2),
        "v": drawn(2, 6, 2, seed=3),
    }
    out: Tensor = hs.functional.attention(**{**x, **changed})
    return out


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    made, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=f"^{message}"):
        made()


def added_memory(n: int, what: str, folder: Path) -> int:
    """Return the bytes that a derivative at n tokens adds to the largest size of a process."""

    def f(*x: Tensor) -> Tensor:
        return (attention(*x, causal=True) ** 2).sum()

    def run(n: int) -> None:
        x, g = tuple(torch.randn(3, 1, n, 8)), grad(f, (0, 1, 2))
        runs = {
            "forward": lambda: jvp(f, x, x),
            "reverse": lambda: g(*x),
            "forward over reverse": lambda: jvp(g, x, x),
            "reverse over reverse": lambda: grad(lambda *y: (g(*y)[0] ** 2).sum(), (0, 1, 2))(*x),
            "forward over forward": lambda: jvp(lambda *y: jvp(f, y, x)[1], x, x),
            "vmap": lambda: vmap(g)(*(t.expand(2, *t.shape) for t in x)),
        }
        runs[what]()

    return memory_added(partial(run, n), folder)


@pytest.mark.parametrize(
    ("what", "n", "share"),
    [
        *((what, 8192, 4) for what in ("forward", "reverse")),
        *(
            pytest.param(what, 16_384, 10, marks=pytest.mark.slow)
            for what in ("forward over reverse", "reverse over reverse", "forward over forward", "vmap")
        ),
    ],
)
def test_memory(what: str, n: int, share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # blocks of the true size
    assert added_memory(n, what, tmp_path) < n * n * 4 / share
