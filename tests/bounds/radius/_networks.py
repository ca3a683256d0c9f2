"""Small networks with random weights, and what their stages really leave out at given changes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.bounds.radius import (
    ACTIVATIONS,
    Attention,
    FeedForward,
    GatedFeedForward,
    Network,
    Norm,
    Stage,
)
from howsmooth.bounds.radius.error_propagation import partial_jacobians
from howsmooth.bounds.radius.margin_expansion import FirstDerivatives, SecondOrder, ThirdOrder
from howsmooth.bounds.radius.packed_quadratic_forms import Pairs

ALL = slice(None)


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def attention(
    generator: torch.Generator, d: int, heads: int, rows: Tensor, visible: Tensor | None = None
) -> Attention:
    e = d // heads
    maps = []
    for scale in (1.0 / e**0.5, 1.0, 1.0):
        maps += [
            normal(generator, heads, e, d, scale=scale * d**-0.5),
            normal(generator, heads, e, scale=0.1),
        ]
    output = normal(generator, heads, d, e, scale=d**-0.5)
    return Attention(*maps, output, normal(generator, d, scale=0.1), rows, visible)


def feed_forward(generator: torch.Generator, d: int, m: int, out: int, kind: str = "gelu") -> FeedForward:
    return FeedForward(
        normal(generator, m, d, scale=d**-0.5),
        normal(generator, m, scale=0.3),
        ACTIVATIONS[kind],
        normal(generator, out, m, scale=m**-0.5),
        normal(generator, out, scale=0.1),
    )


def gated_feed_forward(g: torch.Generator, d: int, m: int, out: int, kind: str = "silu") -> GatedFeedForward:
    plain = feed_forward(g, d, m, out, kind)
    up, up_bias = normal(g, m, d, scale=d**-0.5), normal(g, m, scale=0.3)
    return GatedFeedForward(
        plain.up, plain.up_bias, up, up_bias, plain.activation, plain.down, plain.down_bias
    )


def rotations(generator: torch.Generator, n: int, e: int) -> Tensor:
    """Return random orthogonal matrices (n, e, e)."""
    return torch.linalg.qr(normal(generator, n, e, e))[0]


def norm(generator: torch.Generator, d: int, centred: bool = True) -> Norm:
    return Norm(1 + normal(generator, d, scale=0.2), normal(generator, d, scale=0.1), 1e-5, centred)


def post_norm(seed: int, n: int = 4, d: int = 6, layers: int = 2) -> tuple[Network, Tensor]:
    """Return a classifier of the BERT kind with one computed token at the end, and tokens for it."""
    g = torch.Generator().manual_seed(seed)
    stages = []
    for layer in range(layers):
        rows = torch.arange(n) if layer < layers - 1 else torch.tensor([0])
        stages += [
            Stage(f"{layer} attention", attention(g, d, 2, rows), ALL, ALL),
            Stage(f"{layer} norm", norm(g, d), ALL),
            Stage(f"{layer} feed-forward", feed_forward(g, d, 2 * d, d), ALL, ALL),
            Stage(f"{layer} second norm", norm(g, d), ALL),
        ]
    stages.append(Stage("pooler", feed_forward(g, d, d, d, "tanh"), ALL))
    network = Network(tuple(stages), normal(g, 3, 1, d), normal(g, 3, scale=0.1))
    return network, normal(g, n, d)


def pre_norm(seed: int, n: int = 3, d: int = 6) -> tuple[Network, Tensor]:
    """Return two causal pre-norm blocks without and with centring, whose readout averages all tokens."""
    g = torch.Generator().manual_seed(seed)
    first, second = slice(0, d), slice(d, 2 * d)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    stages = []
    for layer in range(2):
        stages += [
            Stage(f"{layer} norm", norm(g, d, layer == 1), ALL, keep=True),
            Stage(f"{layer} attention", attention(g, d, 2, torch.arange(n), causal), second, first),
            Stage(f"{layer} second norm", norm(g, d, layer == 1), ALL, keep=True),
            Stage(f"{layer} feed-forward", feed_forward(g, d, 2 * d, d), second, first),
        ]
    readout = normal(g, 2, 1, d).expand(-1, n, -1) / n
    return Network(tuple(stages), readout.contiguous(), normal(g, 2)), normal(g, n, d)


def decoder(seed: int, kind: str = "silu", n: int = 3, d: int = 8) -> tuple[Network, Tensor]:
    """Return a causal pre-norm block with rotations, keys and values shared by heads, and a gate."""
    g = torch.Generator().manual_seed(seed)
    first, second = slice(0, d), slice(d, 2 * d)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    own = attention(g, d, 2, torch.tensor([n - 1]), causal)
    shared = {
        name: getattr(own, name)[:1].expand(2, *[-1] * (getattr(own, name).ndim - 1))
        for name in ("key", "key_bias", "value_weight", "value_bias")
    }
    stages = (
        Stage("norm", norm(g, d, False), ALL, keep=True),
        Stage("attention", replace(own, turns=rotations(g, n, d // 2), **shared), second, first),
        Stage("second norm", norm(g, d, False), ALL, keep=True),
        Stage("gated", gated_feed_forward(g, d, 2 * d, d, kind), second, first),
        Stage("last norm", norm(g, d, False), ALL),
    )
    return Network(stages, normal(g, 2, 1, d), normal(g, 2)), normal(g, n, d)


def feed_forwards(seed: int, *kinds: str, d: int = 5) -> tuple[Network, Tensor]:
    """Return feed-forward layers with residuals, one for each activation."""
    g = torch.Generator().manual_seed(seed)
    stages = tuple(Stage(kind, feed_forward(g, d, 3 * d, d, kind), ALL, ALL) for kind in kinds)
    return Network(stages, normal(g, 2, 2, d), normal(g, 2)), normal(g, 2, d)


def moved(x: Tensor, tokens: list[int]) -> Tensor:
    """Return the injection (n, d, k) of changes of some tokens."""
    n, d = x.shape
    found = torch.zeros(n, d, len(tokens) * d, dtype=x.dtype)
    for place, token in enumerate(tokens):
        found[token, :, place * d : (place + 1) * d] = torch.eye(d, dtype=x.dtype)
    return found


def expanded(
    order: int, network: Network, x: Tensor, injection: Tensor, functional: Tensor, offset: float = 0.0
) -> SecondOrder:
    """Return the expansion of a margin of order 2 or 3."""
    first = FirstDerivatives(partial_jacobians(network, x), injection, functional, offset)
    return SecondOrder(first) if order == 2 else ThirdOrder(first)


class Left(NamedTuple):
    """What one stage leaves out at one δ: vectors (n', d'), and its effect on the margin."""

    vector: Tensor
    margin: Tensor


def left_out(network: Network, first: FirstDerivatives, cubic: bool, delta: Tensor) -> list[Left]:
    """Compute remainders from values of the stages, their Jacobians and second derivatives alone.

    The derivatives are the stages' own, which test_transformer_layers compares with autodiff.

    With ``cubic`` the vectors are what lies beyond the second order in δ.
    """
    x = first.states[0] + torch.einsum("ndk,k->nd", first.tangents[0], delta)
    found = []
    for place, stage in enumerate(network.stages):
        base, linear = first.states[place], first.tangents[place] @ delta
        change = x - base

        def second(tangent: Tensor, at: Tensor = base, stage: Stage = stage) -> Tensor:
            own = stage.second(at, tangent[..., None], Pairs(1))[..., 0]
            kept = torch.zeros(len(own), at.shape[1] if stage.keep else 0, dtype=at.dtype)
            return torch.cat([kept, own], 1)

        after = stage.value(x)
        remainder = after - stage.value(base) - stage.push(base, change[..., None])[..., 0]
        a = first.adjoints[place + 1]
        # ½ eᵀMe + a·T; the cross term (M G δ)·e belongs to the derivatives of the adjoints.
        beyond = remainder - second(change) / 2
        margin = (a * beyond).sum() + (a * second(change - linear)).sum() / 2
        vector = remainder - second(linear) / 2 if cubic else remainder
        found.append(Left(stage.output_adjoint(base, vector), margin))
        x = after
    return found
