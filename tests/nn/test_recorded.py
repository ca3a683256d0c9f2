"""Every layer of hs.nn as a graph: torch.compile, torch.export, torch.onnx.export and torch.jit.trace."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import howsmooth as hs
from howsmooth.errors import HowsmoothError
from tests._nn_layers import ATTENTION, DIM, LAYERS, LENGTH, inputs, names, tokens_of
from tests._selection import others_slow

Recorder = Callable[[nn.Module, Tensor], Callable[[Tensor], Any]]


def _traced(layer: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # checks of shapes become constants, and jit is deprecated
        return torch.jit.trace(layer, (x,), check_trace=False)


RECORDERS: dict[str, Recorder] = {
    "compile": lambda layer, x: torch.compile(layer, fullgraph=True, backend="aot_eager"),
    "export": lambda layer, x: torch.export.export(layer, (x,)).module(),
    "trace": _traced,
}

# Where only what a graph refuses is asked, PyTorch's compiler need not trace derivatives as well.
REFUSING = RECORDERS | {"compile": lambda layer, x: torch.compile(layer, fullgraph=True, backend="eager")}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Forget compiled graphs, whose number for one piece of code is limited."""
    torch.compiler.reset()


def made(name: str, **settings: Any) -> nn.Module:
    """Return a layer in evaluation mode."""
    torch.manual_seed(0)
    return LAYERS[name].build(**settings).eval()


def test_every_layer_is_recorded() -> None:
    assert set(LAYERS) == names()
    with pytest.raises(AttributeError):
        _ = hs.nn.Nothing


# By default attention is compiled below, with a mask and where it refuses; what export and tracing do beside,
# softmax attention shows.
@pytest.mark.parametrize(
    ("name", "how"),
    others_slow(
        itertools.product(LAYERS, RECORDERS),
        [
            (name, how)
            for name in LAYERS
            for how in RECORDERS
            if name == "SoftmaxAttention"
            or (how == "compile" and name not in (*ATTENTION, "SelfAttentionBlock"))
        ],
    ),
)
def test_a_graph_gives_what_the_layer_gives(name: str, how: str) -> None:
    layer, x = made(name), inputs(LAYERS[name])
    graph = RECORDERS[how](layer, x)
    for given in (x, inputs(LAYERS[name], seed=1)):
        torch.testing.assert_close(tokens_of(graph(given)), tokens_of(layer(given)))


@pytest.mark.parametrize("name", others_slow(LAYERS, ["SoftmaxAttention"]))
def test_a_compiled_layer_under_function_transforms(name: str) -> None:
    """Transforms of a compiled layer are traced whole, so they are taken inside what is compiled."""
    layer = made(name).double()
    x = inputs(LAYERS[name], dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return tokens_of(layer(x))

    members = torch.stack([x, x / 2])
    torch.testing.assert_close(vmap(f)(members), torch.stack([f(x), f(x / 2)]))
    jacobian = jacrev(f)(x)
    torch.testing.assert_close(vmap(jacfwd(f))(members)[0], jacobian)
    torch.testing.assert_close(jvp(f, (x,), (x,))[1], torch.tensordot(jacobian, x, dims=x.ndim))
    slope = grad(lambda x: f(x).sum())(x)
    torch.testing.assert_close(slope, jacobian.flatten(0, -1 - x.ndim).sum(dim=0))
    compiled = torch.compile(lambda x: f(x).sum(), fullgraph=True, backend="aot_eager")
    y = x.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(compiled(y), y)[0], slope)


# ONNX has no operator for an iteration that solves systems, nor for products of reflections, which ``deploy``
# folds.
WITHOUT_ONNX = {
    "SinkhornAttention": "doubly_stochastic",
    "OrthogonalLinear": "householder",
    "AverageResidual": "matrix_exp",
}


@pytest.mark.parametrize("deployed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_onnx(name: str, deployed: bool) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    layer, x = made(name), inputs(LAYERS[name])
    layer = hs.nn.deploy(layer) if deployed else layer
    missing = WITHOUT_ONNX.get(name)
    if missing == "doubly_stochastic" or (missing and not deployed):
        with pytest.raises(torch.onnx.OnnxExporterError, match=missing):
            torch.onnx.export(layer, (x,), dynamo=True, verbose=False)
        return
    program = torch.onnx.export(layer, (x,), dynamo=True, verbose=False)
    assert program is not None
    file = io.BytesIO()
    program.save(file)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    given = inputs(LAYERS[name], seed=1)
    (output, *_) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), tokens_of(layer(given)).detach())


@pytest.mark.parametrize(
    ("name", "how"),
    others_slow(
        itertools.product(ATTENTION, ["compile", "export"]),
        [
            ("LipschitzNormAttention", "compile"),
            ("SinkhornAttention", "compile"),
            ("SoftmaxAttention", "export"),
        ],
    ),
)
def test_a_graph_refuses_what_the_layer_refuses(name: str, how: str) -> None:
    layer, x = made(name), inputs(LAYERS[name])
    graph = REFUSING[how](layer, x)
    graph(x)
    long = x.clone()
    long[1, 2] *= 2
    for bad in (long, torch.full_like(x, torch.nan)):
        with pytest.raises(RuntimeError, match="norm at most"):
            graph(bad)
    if how != "export":  # an exported program has weights of its own
        with torch.no_grad():
            next(layer.parameters()).mul_(2)
        with pytest.raises(RuntimeError, match="weight has changed"):
            graph(x)
    if how == "compile":
        layer.eval()
        torch.testing.assert_close(tokens_of(graph(x)), tokens_of(layer(x)))


@pytest.mark.parametrize("how", others_slow(RECORDERS, ["compile", "trace"]))
def test_a_divisor_of_earlier_weights_is_not_recorded(how: str) -> None:
    layer, x = made("SoftmaxAttention"), inputs(LAYERS["SoftmaxAttention"])
    weights = {key: 2 * weight for key, weight in layer.state_dict().items()}
    layer.load_state_dict(weights)  # in evaluation mode, the divisor is computed anew
    graph = REFUSING[how](layer, x)
    torch.testing.assert_close(tokens_of(graph(x)), tokens_of(layer(x)))
    torch.compiler.reset()
    with torch.no_grad():
        layer.in_proj_weight.add_(1)
    if how == "trace":  # it has the values of the weights
        torch.testing.assert_close(tokens_of(REFUSING[how](layer, x)(x)), tokens_of(layer(x)))
        return
    with pytest.raises(RuntimeError, match="weight has changed"):
        REFUSING[how](layer, x)(x)
    torch.compiler.reset()
    refused = (HowsmoothError, torch._dynamo.exc.TorchDynamoException)
    with pytest.raises(refused, match=r"model.eval\(\) after"):
        REFUSING[how](layer.double(), x.double())(x.double())
    layer.eval()
    layer.constant = 2.0
    torch.compiler.reset()
    with pytest.raises(refused, match=r"model.eval\(\) after"):
        REFUSING[how](layer, x.double())(x.double())
    layer.train()
    torch.compiler.reset()
    with pytest.raises(refused, match="training mode"):
        REFUSING[how](layer, x.double())(x.double())


def test_a_graph_gives_weights_no_part_of_a_gradient() -> None:
    layer, x = made("SoftmaxAttention"), inputs(LAYERS["SoftmaxAttention"]).requires_grad_()
    graph = RECORDERS["compile"](layer, x)
    tokens_of(graph(x)).square().sum().backward()
    assert x.grad is not None
    assert all(weight.grad is None for weight in layer.parameters())


@pytest.mark.parametrize("name", others_slow(ATTENTION, ["SinkhornAttention"]))
def test_masks_in_a_graph(name: str) -> None:
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[0, 1:3] = mask[1:3, 0] = True
    layer, x = made(name, mask="any"), inputs(LAYERS[name])

    def f(x: Tensor, mask: Tensor) -> Tensor:
        return tokens_of(layer(x, attn_mask=mask))

    graph = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(x, mask), f(x, mask))
    with pytest.raises(RuntimeError, match="at least one visible key"):
        graph(x, torch.ones_like(mask))
    torch.compiler.reset()


@pytest.mark.slow
def test_inductor() -> None:
    x = inputs(LAYERS["SoftmaxAttention"])
    layer = nn.Sequential(made("SelfAttentionBlock"), hs.nn.LipschitzLayerNorm(DIM))
    graph = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(graph(x), layer(x))
    with pytest.raises(RuntimeError, match="norm at most"):
        graph(2 * x)
