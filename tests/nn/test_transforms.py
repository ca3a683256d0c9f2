"""Every layer of hs.nn under PyTorch's function transforms: vmap, jacrev, jvp, and backward passes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import howsmooth as hs
from howsmooth.errors import ArgumentError
from tests._nn_layers import ATTENTION, LAYERS, LENGTH, inputs, tokens_of
from tests._selection import others_slow, pairs

# A token that two others do not see, nor it them: Sinkhorn attention takes it too.
MASK = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
MASK[0, 1:3] = MASK[1:3, 0] = True


def made(name: str, **settings: Any) -> nn.Module:
    """Return a layer in float64."""
    torch.manual_seed(0)
    return LAYERS[name].build(**settings).double()


def several(name: str, members: int = 3) -> Tensor:
    """Return a batch of what the layer takes."""
    return torch.stack([inputs(LAYERS[name], seed=i, dtype=torch.float64) for i in range(members)])


def called(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: tokens_of(layer(x))


@pytest.mark.parametrize(("name", "training"), pairs(LAYERS, [False, True]))
def test_vmap_gives_what_calls_one_by_one_give(name: str, training: bool) -> None:
    # Spectral normalisation changes its estimate in every call of training, whoever calls.
    f, x = called(made(name).train(training and name != "SpectralLinear")), several(name)
    torch.testing.assert_close(vmap(f)(x), torch.stack([f(one) for one in x]))
    torch.testing.assert_close(vmap(jacfwd(f))(x[:2]), torch.stack([jacrev(f)(one) for one in x[:2]]))


@pytest.mark.parametrize(("name", "training"), pairs(ATTENTION, [False, True]))
def test_gradients_of_each_sample(name: str, training: bool) -> None:
    layer, x = made(name).train(training), several(name)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return tokens_of(functional_call(layer, weights, (x,))).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    for i, one in enumerate(x):
        layer.zero_grad()
        tokens_of(layer(one)).square().sum().backward()
        for key, weight in layer.named_parameters():
            torch.testing.assert_close(found[key][i], weight.grad)


@pytest.mark.parametrize(("name", "transform"), pairs(LAYERS, [jacrev, jacfwd, lambda f: vmap(jacrev(f))]))
def test_nothing_of_a_transform_is_kept(name: str, transform: Callable[..., Any]) -> None:
    layer = LAYERS[name].build().eval().double()
    x = several(name, 2)
    transform(lambda one: called(layer)(one).sum())(x if "lambda" in transform.__name__ else x[0])
    kept = copy.deepcopy(layer)  # refuses what lives in a transform only
    torch.testing.assert_close(called(kept)(x[0]), called(layer)(x[0]))


@pytest.mark.parametrize(("name", "argument"), pairs(ATTENTION, ["attn_mask", "key_padding_mask"]))
def test_vmap_over_masks(name: str, argument: str) -> None:
    layer, x = made(name, mask="any"), several(name, 2)
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, 3] = True
    mask = MASK if argument == "attn_mask" else padding
    masks = torch.stack([torch.zeros_like(mask), mask])

    def f(x: Tensor, mask: Tensor) -> Tensor:
        return tokens_of(layer(x, **{argument: mask}))

    wanted = torch.stack([f(one, its) for one, its in zip(x, masks, strict=True)])
    torch.testing.assert_close(vmap(f)(x, masks), wanted)
    masks[1] = True  # a query that sees nothing, of the second member alone
    with pytest.raises(ArgumentError, match=argument):
        vmap(f)(x, masks)


@pytest.mark.parametrize("name", ATTENTION)
def test_what_is_refused_is_refused_under_vmap(name: str) -> None:
    layer, x = made(name), several(name)
    x[2] *= 2
    with pytest.raises(ArgumentError, match="radius"):
        vmap(called(layer))(x)
    masks = torch.stack([torch.zeros_like(MASK), torch.zeros_like(MASK), MASK])
    with pytest.raises(ArgumentError, match="attn_mask"):
        vmap(lambda x, mask: tokens_of(layer(x, attn_mask=mask)))(x / 2, masks)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_weights_of_a_batch_have_no_one_divisor(name: str, training: bool) -> None:
    x = several(name, 1)[0]
    layer = made(name).train(training)
    weights = {name: torch.stack([weight, 2 * weight]).detach() for name, weight in layer.named_parameters()}

    def f(layer: nn.Module, weights: dict[str, Tensor]) -> Tensor:
        return tokens_of(functional_call(layer, weights, (x,)))

    with pytest.raises(ArgumentError, match="without constant"):
        vmap(lambda weights: f(layer, weights))(weights)
    plain = made(name, constant=None).train(training)
    wanted = [f(plain, {name: weight[i] for name, weight in weights.items()}) for i in range(2)]
    torch.testing.assert_close(vmap(lambda weights: f(plain, weights))(weights), torch.stack(wanted))


@pytest.mark.parametrize(
    ("name", "training"),
    others_slow(
        itertools.product(ATTENTION, (False, True)),
        list(zip(ATTENTION, itertools.cycle((False, True)), strict=False)),
    ),
)
def test_a_given_mask_and_a_constant_under_every_transform(name: str, training: bool) -> None:
    """Judged by the quotient of a layer without constant and the constant that it states."""
    layer = made(name, mask=MASK).train(training)
    plain = made(name, mask=MASK, constant=None)
    x = several(name, 1)[0, 0]

    def quotient(x: Tensor) -> Tensor:
        return tokens_of(plain(x)) / plain.lipschitz_bound(LENGTH, layer.radius).value

    wanted = jacrev(quotient)(x)
    torch.testing.assert_close(jacrev(called(layer))(x), wanted)
    torch.testing.assert_close(jacfwd(called(layer))(x), wanted)
    tangent = jvp(called(layer), (x,), (x,))[1]
    torch.testing.assert_close(tangent, torch.einsum("idjk,jk->id", wanted, x))
    norm = float(torch.linalg.matrix_norm(wanted.detach().reshape(x.numel(), -1), 2))
    estimate = hs.local_lipschitz(called(layer), x)
    assert float(estimate.lower) * (1 - 1e-9) <= norm <= float(estimate.upper) * (1 + 1e-9)
