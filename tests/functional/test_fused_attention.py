"""hs.functional.attention in fused kernels: on a CUDA device, or by Triton's interpreter, against float64."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from howsmooth import triton_launch
from howsmooth.errors import ArgumentError
from howsmooth.functional import attention, fused_attention
from tests._interpreter import bfloat16_in_the_interpreter
from tests._selection import others_slow
from tests.functional.test_attention import SECOND, Function, directions, drawn, inner, written_out

pytest.importorskip(
    "triton.language", reason="Triton is not installed here; the kernels are for CUDA devices"
)
pytestmark = pytest.mark.usefixtures(bfloat16_in_the_interpreter.__name__)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, N = 2, 1, 37
# Of results in float32, relative to the largest number. Matrix units cut sums off that others round.
DIGITS = 1e-5 if DEVICE.type == "cuda" else 3e-6


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even few tokens into several tiles of rows and of keys, not all of them square."""
    monkeypatch.setattr(fused_attention, "_ROWS", (triton_launch.TileSize(32, 16, 4, 1),))
    monkeypatch.setattr(fused_attention, "_KEYS", (triton_launch.TileSize(16, 32, 4, 1),))
    monkeypatch.setattr(triton_launch, "_fitted", {})


def small(*shape: int, seed: int) -> Tensor:
    return drawn(*shape, seed=seed).float()


SEEN = drawn(2, 1, N, N, seed=4) > -0.3
SEEN[1, :, 2] = False
ADDED = small(HEADS, N, N, seed=5)
ADDED[drawn(HEADS, N, N, seed=6) < -0.4] = float("-inf")
ADDED[1, 3] = float("-inf")
PADDING = torch.arange(N).lt(torch.tensor([[N - 7], [N]])).view(2, 1, 1, N)

# What is given beside queries, keys and values, and which of it is differentiated with these.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "scale": ({"scale": 0.9}, ()),
    "causal": ({"causal": True}, ()),
    "window": ({"window": 9}, ()),
    "causal window": ({"causal": True, "window": 11}, ()),
    "padding": ({"mask": PADDING, "causal": True}, ()),
    "boolean mask": ({"mask": SEEN}, ()),
    "added mask": ({"mask": ADDED}, ()),
    "mask that is learned": ({"mask": small(N, 1, seed=7) + small(1, N, seed=8)}, ("mask",)),
    "bias of keys": ({"score_bias": small(HEADS, 1, N, seed=9)}, ()),
    "bias of queries and an axis of one": ({"score_bias": small(2, 1, N, 1, seed=9)}, ()),
    "softcap": ({"softcap": 0.8}, ()),
    "sinks": ({"sinks": small(HEADS, seed=10)}, ("sinks",)),
    "all": (
        {
            "mask": drawn(1, N, N, seed=11) > -1,
            "causal": True,
            "window": 30,
            "scale": 0.7,
            "score_bias": small(2, 1, N, N, seed=12),
            "softcap": 1.5,
            "sinks": small(HEADS, seed=13),
        },
        ("sinks",),
    ),
}


def both(name: str) -> tuple[Function, Function, tuple[Tensor, ...]]:
    """Return attention by kernels, that written out in float64, and the tensors of both, on the CPU."""
    given, moved = CASES[name]
    fixed = {key: value for key, value in given.items() if key not in moved}

    def ours(*x: Tensor) -> Tensor:
        there = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in fixed.items()}
        out: Tensor = attention(*x[:3], **there, **dict(zip(moved, x[3:], strict=True)), kernels=True)
        return out

    def theirs(*x: Tensor) -> Tensor:
        exact = {
            key: v.double() if isinstance(v, Tensor) and v.dtype != torch.bool else v
            for key, v in fixed.items()
        }
        return written_out(*x[:3], **exact, **dict(zip(moved, x[3:], strict=True)))

    x = (small(2, HEADS, N, 5, seed=1), small(1, KV_HEADS, N, 5, seed=2), small(KV_HEADS, N, 20, seed=3))
    return ours, theirs, (*x, *(given[key] for key in moved))


def few_tokens() -> tuple[Function, Function, tuple[Tensor, ...]]:
    """Return the same with sinks, at nine tokens, where tiles do not matter."""
    ours, theirs, x = both("sinks")
    return ours, theirs, (*(t[..., :9, :] for t in x[:3]), x[3])


def there(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.to(DEVICE) for t in tensors)


def exact(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() for t in tensors)


def agree(ours: Any, theirs: Any, tolerance: float = DIGITS) -> None:
    """Check tensors in a lower precision against float64's, relative to the largest number of each."""
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(ours), leaves(theirs), strict=True):
        assert a.shape == b.shape
        assert a.dtype != b.dtype == torch.float64
        assert a.device.type == DEVICE.type
        assert (a.cpu() - b).abs().max() <= tolerance * b.abs().max(), (
            a.cpu() - b
        ).abs().max() / b.abs().max()


@pytest.mark.parametrize(
    "name",
    others_slow(CASES, ["mask that is learned", "all"]),
)
def test_value_tangent_and_cotangents(name: str) -> None:
    ours, theirs, x = both(name)
    d, u = directions(exact(x), 20), drawn(2, HEADS, N, 20, seed=30)
    single = tuple(t.float() for t in d)
    agree(ours(*there(x)), theirs(*exact(x)))
    agree(jvp(ours, there(x), there(single)), jvp(theirs, exact(x), exact(single)))
    u = u.float()
    agree(vjp(ours, *there(x))[1](u.to(DEVICE)), vjp(theirs, *exact(x))[1](u.double()))


@pytest.mark.parametrize(
    ("name", "order"),
    others_slow(
        [(name, order) for name in ("added mask", "mask that is learned", "all") for order in SECOND],
        [
            ("added mask", "forward over forward"),
            ("mask that is learned", "reverse over reverse"),
            ("mask that is learned", "forward over reverse"),
        ],
    ),
)
def test_second_derivatives(name: str, order: str) -> None:
    """Forward over forward has no kernel, and goes block by block."""
    ours, theirs, x = both(name)
    d, e = (tuple(t.float() for t in directions(exact(x), seed)) for seed in (20, 40))

    def found(f: Function, place: Function) -> Any:
        def h(*y: Tensor) -> Tensor:
            cubes: Tensor = f(*y) ** 3
            # One sum of all tangents would be what cancelled terms leave of it.
            return cubes if order == "forward over forward" else cubes.sum()

        return SECOND[order](h, place(x), place(d), place(e))

    agree(found(ours, there), found(theirs, exact))


@pytest.mark.parametrize("moving", others_slow(["queries", "keys", "values", "sinks"], ["values"]))
def test_one_tensor_at_a_time(moving: str) -> None:
    """What does not move is as if it moved by zero, in both orders."""
    ours, theirs, x = few_tokens()
    i = ["queries", "keys", "values", "sinks"].index(moving)
    one, u = directions(exact(x), 20)[i].float(), drawn(2, HEADS, 9, 20, seed=30).float()

    def alone(f: Function, place: Function) -> Any:
        y, (e, cotangent) = place(x), place((one, u))
        g = partial(_at, f, y, i)
        pulled = vjp(g, y[i])[1](cotangent)
        return jvp(g, (y[i],), (e,)), pulled, jvp(lambda s: vjp(g, s)[1](cotangent), (y[i],), (e,))[1]

    agree(alone(ours, there), alone(theirs, exact))


def _at(f: Function, x: tuple[Tensor, ...], i: int, t: Tensor) -> Tensor:
    out: Tensor = f(*x[:i], t, *x[i + 1 :])
    return out


def test_third_derivatives() -> None:
    """There are no kernels of third order: blocks take over."""
    ours, theirs, x = few_tokens()
    d, e = (tuple(t.float() for t in directions(exact(x), seed)) for seed in (20, 40))

    def found(f: Function, place: Function) -> Any:
        y, first, again = place(x), place(d), place(e)

        def hessian_product(*y: Tensor) -> Tensor:
            return inner(jvp(grad(lambda *z: (f(*z) ** 2).sum(), (0, 1, 2)), y, first)[1], again[:3])

        return grad(hessian_product, (0, 1, 2, 3))(*y)

    agree(found(ours, there), found(theirs, exact))


def test_a_result_may_be_changed_in_place() -> None:
    ours, theirs, x = both("plain")
    gradients = []
    for f, y in ((ours, there(x)), (theirs, exact(x))):
        leaves = [t.clone().requires_grad_() for t in y]
        out = f(*leaves)
        out.mul_(2).add_(1)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    agree(*gradients)


def test_under_vmap() -> None:
    """Members that vmap brings are as if alone, in all derivatives, and some tensors do without."""
    x = (small(2, HEADS, 3, 2, seed=1), small(KV_HEADS, 2, 2, seed=2), small(KV_HEADS, 2, 2, seed=3))
    seen = drawn(2, 3, 2, seed=4) > -0.8

    def ours(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, s, softcap=2.0, kernels=True)
        return out

    def theirs(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        return written_out(q, k, v, s, softcap=2.0)

    def found(f: Function, place: Function) -> Any:
        q, k, v = place(x)
        masks = seen.to(q.device)

        def nested(q: Tensor) -> Tensor:
            return vmap(lambda q: vmap(lambda s: f(q, k, v, s))(masks))(q)

        def loss(q: Tensor, k: Tensor) -> Tensor:
            return (f(q, k, v, masks[0]) ** 2).sum()

        each = vmap(grad(loss, (0, 1)), in_dims=(0, None))(q, k)
        total = grad(lambda k: vmap(loss, in_dims=(0, None))(q, k).sum())(k)
        of_k = hessian(lambda k: loss(q[0], k))(k)
        both_modes = [mode(lambda v: f(q[0], k, v, masks[0]))(v) for mode in (jacrev, jacfwd)]
        return nested(q), each, total, of_k, both_modes

    agree(found(ours, there), found(theirs, exact))


@pytest.mark.parametrize("form", others_slow(["boolean", "added", "with sinks"], ["with sinks"]))
def test_a_query_that_sees_no_key(form: str) -> None:
    q, k, v = small(2, 20, 3, seed=1), small(2, 20, 3, seed=2), small(2, 20, 2, seed=3)
    seen = torch.ones(20, 20, dtype=torch.bool)
    seen[3] = False
    mask = torch.zeros(20, 20).masked_fill(~seen, float("-inf")) if form == "added" else seen
    sinks = torch.zeros(2, device=DEVICE) if form == "with sinks" else None

    def f(*x: Tensor) -> Tensor:
        out: Tensor = attention(*x, mask.to(DEVICE), sinks=sinks, kernels=True)
        return out

    x, e = there((q, k, v)), there((q.flip(1), k.flip(1), v.flip(1)))
    out, moved = jvp(f, x, e)
    gradient = grad(lambda *y: (f(*y) ** 2).sum(), (0, 1, 2))
    of_q, of_k, of_v = gradient(*x)
    second = jvp(gradient, x, e)[1]
    for t in (out, moved, of_q, second[0]):
        assert (t[:, 3] == 0).all()
        assert (t[:, 2] != 0).all()
    assert all(t.isfinite().all() for t in (of_k, of_v, *second))


@pytest.mark.parametrize(
    ("dtype", "rule"),
    others_slow(
        itertools.product(
            (torch.float32, torch.float16, torch.bfloat16), ("every key", "causal", "common keys")
        ),
        [(torch.float16, "common keys")],
    ),
)
def test_errors_are_at_most_twice_those_of_the_math_backend(
    dtype: torch.dtype, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value, both modes and one over the other, in tiles as on a device; keys may have much in common."""
    monkeypatch.setattr(fused_attention, "_ROWS", (triton_launch.TileSize(128, 64, 8, 1),))
    monkeypatch.setattr(fused_attention, "_KEYS", (triton_launch.TileSize(64, 128, 8, 1),))
    x = tuple(small(1, 1, 100, 32, seed=i) for i in range(3))
    if rule == "common keys":
        x = (x[0], x[1] + 10 * small(32, seed=7), x[2])
    x, d = tuple(t.to(dtype) for t in x), tuple(t.to(dtype) for t in directions(exact(x), 20))
    u, causal = small(1, 1, 100, 32, seed=30).to(dtype), rule == "causal"

    def every(f: Function, place: Function) -> list[Tensor]:
        y, e, (w,) = place(x), place(d), place((u,))
        return [*jvp(f, y, e), *vjp(f, *y)[1](w), *jvp(lambda *z: vjp(f, *z)[1](w), y, e)[1]]

    def ours(*y: Tensor) -> Tensor:
        out: Tensor = attention(*y, causal=causal, kernels=True)
        return out

    def math_backend(*y: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(*y, is_causal=causal)

    wanted = every(lambda *y: written_out(*y, causal=causal), exact)
    of_each = ("queries", "keys", "values")
    names = ("value", "tangent", *of_each, *(f"second, {name}" for name in of_each))
    for name, a, b, c in zip(names, every(ours, there), every(math_backend, there), wanted, strict=True):
        assert a.dtype == dtype
        error, theirs = (float((t.double().cpu() - c).norm() / c.norm()) for t in (a, b))
        assert error <= 2 * theirs, (name, error, theirs)


def test_large_scores_and_one_token() -> None:
    q, k, v = 1e3 * small(2, 20, 3, seed=1), 1e3 * small(2, 50, 3, seed=2), small(2, 50, 2, seed=3)
    best = (q.double() @ k.double().mT).argmax(dim=-1, keepdim=True).expand(2, 20, 2)
    agree(attention(*there((q, k, v)), kernels=True), v.double().gather(1, best))
    x = there((q, k, v))
    assert all(g.isfinite().all() for g in vjp(lambda *y: attention(*y, kernels=True), *x)[1](x[2][:, :20]))
    one = there((q[:, :1], k[:, :1], v[:, :1]))
    agree(attention(*one, kernels=True), v[:, :1].double())


def test_some_heads_wider_than_a_unit() -> None:
    """As wide as goes, with entries that fill up no power of two, and layouts that are not contiguous."""
    x = (small(30, 2, 160, seed=1), small(30, 1, 160, seed=2), small(30, 1, 256, seed=3))
    y = tuple(t.to(DEVICE).transpose(0, 1) for t in x)
    wide = tuple(t.double().transpose(0, 1) for t in x)
    out, pull = vjp(lambda *z: attention(*z, kernels=True), *y)
    truth, pulled = vjp(written_out, *wide)
    agree(out, truth)
    agree(pull(out), pulled(truth))


def test_smaller_tiles_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    from howsmooth.functional import fused_kernels

    tried, kernel = [], fused_kernels.value

    class Crowded:
        def __getitem__(self, grid: tuple[int, ...]) -> Function:
            def run(*arguments: object, **options: Any) -> None:
                tried.append(options["KEYS"])
                if options["KEYS"] > 16:
                    raise OutOfResources(300_000, 232_448, "shared memory")
                kernel[grid](*arguments, **options)

            return run

    monkeypatch.setattr(fused_kernels, "value", Crowded())
    monkeypatch.setattr(
        fused_attention, "_ROWS", (triton_launch.TileSize(32, 64, 4, 1), triton_launch.TileSize(32, 16, 4, 1))
    )
    x = tuple(small(1, 40, 8, seed=i).half() for i in range(3))
    for _ in range(2):
        agree(attention(*there(x), kernels=True), written_out(*exact(x)), 1e-3)
    assert tried == [64, 16, 16]


def test_what_there_are_no_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x = there((small(2, 8, 4, seed=1),) * 3)
    bias = small(8, 8, seed=2).to(DEVICE)
    refused: list[tuple[str, Function]] = [
        ("torch.float64", lambda: attention(*exact(x), kernels=True)),
        ("queries", lambda: attention(*(t.repeat(1, 1, 65) for t in x), kernels=True)),
        ("queries", lambda: attention(x[0][:, :0], *x[1:], kernels=True)),
        ("both a mask of numbers", lambda: attention(*x, bias, score_bias=bias, kernels=True)),
        (
            "a call that torch.func.linearize",
            lambda: linearize(lambda q: attention(q, *x[1:], kernels=True), x[0]),
        ),
    ]
    for words, call in refused:
        with pytest.raises(ArgumentError, match=f"^kernels: .*{words}"):
            call()
    with pytest.raises(ArgumentError, match=r"^kernels: expected True or False"):
        attention(*x, kernels="yes")
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ArgumentError, match=r"^kernels: .*tensors on cpu"):
        attention(*(t.cpu() for t in x), kernels=True)
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(ArgumentError, match=r"^kernels: .*Triton 3.5.1, where 3.6 is the oldest"):
        attention(*x, kernels=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        pytest.param("bf16", list(fused_attention._FIRST), id="bf16"),
        pytest.param("fp32", ["value"], id="fp32"),
    ],
)
def test_the_compiler_accepts_them(dtype: str, kernels: list[str]) -> None:
    """The interpreter is no compiler: types in a loop may change there, for instance."""
    program = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
    options = [
        "--dtypes",
        dtype,
        "--kernels",
        ",".join(kernels),
        "--widths",
        "64",
        "--rules",
        "all",
        "--first",
    ]
    done = subprocess.run(
        [sys.executable, str(program), *options],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 + len(kernels)
