"""Bounds of recorded maps against the steepest tokens that an ascent finds, on layers of today's models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.bounds import recorded_map_ball_upper_bound
from howsmooth.errors import ArgumentError
from tests._cases import tokens
from tests._tiny_models import WithoutDowncast
from tests.architectures.build import build, inputs_of

# Types of transformers whose attention is known by its code: latent, gated, with a bias of the tokens, with
# queries before a depthwise convolution, and whole blocks.
MODELS = {
    "deepseek_v3": "attention",
    "qwen3_next": "attention",
    "deberta": "attention",
    "wavlm": "attention",
    "gpt2": "block",
    "llama": "block",
}


def _site(name: str) -> hs.Site:
    model = build(name)
    with WithoutDowncast():
        return hs.capture(model, inputs_of(name, model), scope=MODELS[name])[-1]


def _steepest(f: Any, x: Tensor, radius: float, steps: int) -> float:
    """Return the largest derivative found on the ball by an ascent along its power iteration."""
    largest, u = 0.0, torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        x = x.detach().requires_grad_()
        v = torch.func.jvp(f, (x.detach(),), (u,))[1]
        v = v / v.norm()
        (back,) = torch.autograd.grad((f(x) * v).sum(), x, create_graph=True)
        largest = max(largest, float(back.norm()))
        (ascent,) = torch.autograd.grad(back.norm(), x)
        u = (back / back.norm()).detach()
        x = x.detach() + 0.05 * radius * ascent / ascent.norm().clamp_min(1e-30)
        x = x * (radius / x.norm(dim=-1, keepdim=True)).clamp(max=1.0)
    return largest


@pytest.mark.parametrize("name", MODELS)
def test_no_tokens_of_the_ball_exceed_the_bound_of_a_layer(name: str) -> None:
    site = _site(name)
    x = site.x[0].double()
    radius = float(x.norm(dim=-1).max())
    bound = recorded_map_ball_upper_bound(site, len(x), radius)
    assert bound.holds
    f = site.map.to(dtype=torch.float64)
    starts = [scale * x for scale in (1.0, 0.3, 1e-2)]
    found = max(_steepest(f, start, radius, 12) for start in starts)
    assert float(hs.local_lipschitz(f, x).lower) <= bound.value
    assert found <= bound.value
    # A smaller ball has a smaller bound, of which the derivative at its centre is a part.
    near = recorded_map_ball_upper_bound(site, len(x), 1e-3)
    assert float(hs.local_lipschitz(f, 0 * x + 1e-5).lower) <= near.value < bound.value


def test_what_the_recording_cannot_see_is_refused() -> None:
    class Hidden(nn.Module):
        """Attention whose queries are scaled by a number that leaves PyTorch on the way."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (m(x)[:, None] for m in (self.q, self.k, self.v))
            q = q * torch.from_numpy(x.detach().numpy() ** 2).mean()
            return nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]

    from howsmooth.nn.attention.map_from_function import LayerMap

    module = Hidden().double().requires_grad_(requires_grad=False)
    f = LayerMap(
        lambda x, _: module(x), {"w": module.q.weight}, d=6, d_out=6, length=None, description="a layer"
    )
    with pytest.raises(ArgumentError, match="a layer, with other operations at other tokens"):
        recorded_map_ball_upper_bound(f, 4, 1.0)


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match="a map of tokens or a captured site, got Linear"):
        recorded_map_ball_upper_bound(nn.Linear(3, 3), 4, 1.0)
    f = hs.SelfAttention(*(tokens(i, 1, 3, 3) for i in range(3)))
    assert recorded_map_ball_upper_bound(f, 4, 1.0).value >= float(
        hs.local_lipschitz(f, tokens(4, 4, 3) / 9).lower
    )
    with pytest.raises(ArgumentError, match="length"):
        recorded_map_ball_upper_bound(f, 0, 1.0)
    with pytest.raises(ArgumentError, match="radius"):
        recorded_map_ball_upper_bound(f, 4, -1.0)
