"""hs.functional.attention and models with it in torch.compile and torch.export, as one graph."""

from __future__ import annotations

import copy
import io
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.functional import attention, blockwise_autograd
from tests._selection import others_slow, pairs
from tests._tiny_models import token_ids
from tests.architectures.build import build
from tests.functional.test_attention import BOOLEAN, CASES, SECOND, agree, both, directions, drawn, inputs

hs.functional.register()

BACKENDS = ("eager", "aot_eager", "inductor")
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even few tokens into several blocks, and forget compiled graphs, whose number is limited."""
    if request.node.originalname != OUTER and request.config.getoption("--jaxtyping-packages"):
        pytest.skip("a compiler does not read the checks of shapes that tests add to functions")
    monkeypatch.setattr(blockwise_autograd, "_ENTRIES", {"cpu": 60})
    monkeypatch.setattr(blockwise_autograd, "_FEWEST_ROWS", 2)
    torch.compiler.reset()


OUTER = "test_without_checks_of_shapes"


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_without_checks_of_shapes(which: str) -> None:
    """The tests of this file, in a process in which nothing stands around the functions of the library."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-m", which, "-k", f"not {OUTER}"]
    done = subprocess.run([*command, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


def compiled(f: Function, backend: Any = "aot_eager", **options: Any) -> Function:
    return torch.compile(f, fullgraph=True, backend=backend, **options)


def with_gradients(f: Function, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The value, and the gradients of a random sum of it."""
    leaves = [t.detach().clone().requires_grad_() for t in x]
    out = f(*leaves)
    u = drawn(*out.shape, seed=30, dtype=out.dtype)
    return (out.detach(), *torch.autograd.grad(out, leaves, u))


@pytest.mark.parametrize(
    ("name", "backend"),
    others_slow(
        itertools.product(CASES, BACKENDS),
        [
            ("causal window", "eager"),
            ("all", "aot_eager"),
        ],
    ),
)
def test_value_and_gradients(name: str, backend: str) -> None:
    """The operator computes what eager mode computes, so the numbers are the same, unless inductor rounds
    otherwise around it."""
    ours, written, x = both(name)
    found, eager = with_gradients(compiled(ours, backend), x), with_gradients(ours, x)
    agree(found, eager, 0.0 if backend != "inductor" else 1e-14)
    agree(found, with_gradients(written, x))


@pytest.mark.parametrize(("dtype", "autocast"), pairs([torch.float32, torch.bfloat16], [True, False]))
def test_other_dtypes(dtype: torch.dtype, autocast: bool) -> None:
    x = tuple(t.to(dtype) for t in inputs(5, 7))

    def f(*x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return attention(*x, BOOLEAN)

    agree(with_gradients(compiled(f), x), with_gradients(f, x), 0.0)


def test_dropout_drops_the_same_entries_in_the_gradient() -> None:
    """With this backend the entries are those of eager mode for the same seed too."""

    def f(*x: Tensor) -> Tensor:
        return attention(*x, dropout_p=0.4)

    g, found = compiled(f), []
    for h in (f, g, g):
        torch.manual_seed(3 if len(found) < 2 else 4)
        found.append(with_gradients(h, inputs(5, 7)))
    agree(found[1], found[0], 0.0)
    assert not torch.equal(found[2][0], found[1][0])


def test_one_graph_for_all_lengths() -> None:
    """After the second length; a single query, as in generation, is compiled once more."""
    counter = CompileCounterWithBackend("aot_eager")

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, offset=k.shape[-2] - q.shape[-2], window=20)

    g, graphs = compiled(f, counter), []
    for m, n in ((5, 9), (6, 10), (7, 30), (40, 60), (1, 60), (1, 61)):
        x = tuple(t.expand(2, -1, -1, -1) for t in inputs(m, n))
        agree(with_gradients(g, x), with_gradients(f, x), 0.0)
        graphs.append(counter.frame_count)
    assert graphs == [1, 2, 2, 2, 3, 3]


TRANSFORMS: dict[str, Function] = {
    "vjp": lambda f, x, d: vjp(f, *x)[1](torch.ones_like(f(*x))),
    "jvp": lambda f, x, d: jvp(f, x, d),
    "jacfwd": lambda f, x, d: jacfwd(f)(*x),
    "jacrev": lambda f, x, d: jacrev(f)(*x),
    "vmap": lambda f, x, d: vmap(lambda s: f(s * x[0], *x[1:]))(torch.arange(3.0, dtype=x[0].dtype)),
    **{
        name: lambda f, x, d, way=way: way(lambda *y: (f(*y) ** 3).sum(), x, d, d)
        for name, way in SECOND.items()
        if name != "forward over forward"  # refused by Dynamo, as the guide says
    },
}


@pytest.mark.parametrize(
    ("name", "transform"),
    others_slow(
        itertools.product(
            ("causal window", "window, queries that see no key", "added mask", "all"), TRANSFORMS
        ),
        [
            ("added mask", "jvp"),
            ("all", "forward over reverse"),
            ("window, queries that see no key", "vmap"),
        ],
    ),
)
def test_transforms_inside(name: str, transform: str) -> None:
    ours, written, x = both(name)
    d = directions(x, 20)
    found = compiled(lambda *x: TRANSFORMS[transform](ours, x, d))(*x)
    agree(found, TRANSFORMS[transform](written, x, d))


def test_forward_mode_and_two_backward_passes() -> None:
    """Of a compiled function: what PyTorch does not differentiate, it refuses."""
    ours, written, x = both("all")
    d = directions(x, 20)

    def tangent(*x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = (forward_ad.make_dual(t, s) for t, s in zip(x, d, strict=True))
            return forward_ad.unpack_dual(ours(*dual)).tangent

    agree(compiled(tangent)(*x), jvp(written, x, d)[1])

    def twice(f: Function) -> tuple[Tensor, ...]:
        leaves = [t.detach().clone().requires_grad_() for t in x]
        found = torch.autograd.grad((f(*leaves) ** 3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in found), leaves)

    agree(twice(compiled(ours, "eager")), twice(written))
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        twice(compiled(ours))


def test_transforms_within_a_compiled_function_have_no_kernels() -> None:
    f = compiled(grad(lambda q: attention(q, q, q, kernels=True).sum()), "eager")
    with pytest.raises((ArgumentError, torch._dynamo.exc.Unsupported), match="kernels"):
        f(torch.randn(2, 5, 4))


@pytest.mark.parametrize(
    "derivatives", others_slow(["", "11101:1;", "11100:1;111001:101;"], ["", "11100:1;111001:101;"])
)
def test_the_operator_keeps_pytorchs_rules(derivatives: str) -> None:
    """Shapes, aliases, gradients, and what AOTAutograd makes of them, with free lengths."""
    shapes = ((2, 2, 2, 5, 3), (2, 2, 1, 7, 3), (2, 2, 1, 7, 2), (2, 1, 1, 5, 7), (1, 1, 1, 1, 7))
    x = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    more = [(2, 2, 2, 5, 2), (2, 2, 2, 5, 3), (2, 2, 1, 7, 2)][: max(0, derivatives.count(";") * 2 - 1)]
    leaves = [t.requires_grad_() for t in (*x, *(drawn(*shape, seed=9) for shape in more))]
    given = (leaves, "q,k,v,mask,bias", True, 4, 2, 0.5, 3.0, 0.0, False, derivatives)
    found = torch.library.opcheck(torch.ops.howsmooth.attention.default, given)
    assert set(found.values()) == {"SUCCESS"}


class Layer(nn.Module):
    """Causal attention of the last queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, offset=k.shape[-2] - q.shape[-2])


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_program(strict: bool) -> None:
    """With free lengths, its operators decomposed, saved and read again."""
    free = {name: {2: torch.export.Dim.AUTO} for name in "qkv"}
    program = torch.export.export(Layer(), inputs_of_layer(5, 9), dynamic_shapes=free, strict=strict)
    file = io.BytesIO()
    torch.export.save(program.run_decompositions(), file)
    file.seek(0)
    x = inputs_of_layer(20, 33)
    agree(torch.export.load(file).module()(*x), Layer()(*x), 0.0)


def inputs_of_layer(m: int, n: int) -> tuple[Tensor, ...]:
    return tuple(t.expand(2, *t.shape[-3:]) for t in inputs(m, n))


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("eager", marks=pytest.mark.slow),
        pytest.param("inductor", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_training_function(backend: str) -> None:
    """Losses, gradients and parameters of steps of which the whole function is compiled."""
    torch.manual_seed(0)
    # The bias of keys has the gradient zero, of whose rounding AdamW makes steps like all others.
    first = nn.Linear(8, 24, bias=False)
    x, found = torch.randn(2, 9, 8), []
    for compiling in (False, True):
        layer = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)

        def step(x: Tensor, layer: nn.Module = layer, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            q, k, v = layer(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-2, -3)
            loss = (attention(q, k, v, causal=True) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = torch.compile(step, backend=backend) if compiling else step
        losses = [run(x) for _ in range(3)]
        found.append((losses, [p.grad for p in layer.parameters()], list(layer.state_dict().values())))
    agree(found[1], found[0], 1e-5)


MODELS = ("llama", "gpt2", "bert", "gemma2", "gemma3_text", "gpt_oss")


def of_model(model: nn.Module, **given: Any) -> tuple[Tensor, Tensor]:
    """Outputs, and the gradient of a random sum of them."""
    model.zero_grad()
    out = next(iter(model(**given, use_cache=False).values()))
    (out * drawn(*out.shape, seed=1, dtype=out.dtype)).sum().backward()
    # Of weights that the sum does not reach, ahead-of-time autograd makes gradients that are zero.
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return out.detach(), torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize(
    ("name", "backend", "padded"),
    others_slow(
        itertools.product(MODELS, BACKENDS, [False, True]),
        [("llama", "aot_eager", True), ("gemma2", "eager", False)],
    ),
)
def test_a_model(name: str, backend: str, padded: bool) -> None:
    """As in eager mode, also where queries of padding see no key, and as its own attention otherwise."""
    model = build(name).float()
    if name == "gpt_oss":
        model.set_experts_implementation("grouped_mm")  # the eager one loops over data
    given = {"input_ids": token_ids(2, 9)}
    if padded:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][0, :3] = 0
    model.set_attn_implementation("howsmooth")
    ours = of_model(model, **given)
    counter = CompileCounterWithBackend(backend)
    found = of_model(compiled(model, counter), **given)
    agree(found, ours, 1e-4 if backend == "inductor" else 1e-5)
    assert any(
        "howsmooth.attention" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes
    )
    if not padded:
        model.set_attn_implementation("eager")
        agree(found, of_model(model, **given), 1e-4)
