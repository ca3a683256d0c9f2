"""Lower limits from backward passes, against dense Jacobians of the modules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from howsmooth.nn import LipschitzMonitor
from tests._monitored_training import PROBES, gpt2

N, D = 4, 6


class PostNorm(nn.Module):
    """A residual takes the same tensor as the attention, whose weights are returned too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = 2 * x
        y, weights = self.attention(x, x, x, average_attn_weights=False)
        if y.requires_grad:
            self.seen = {"x": x.detach()}
            y.register_hook(lambda g: self.seen.update(g=g))
        return 3 * x + y, weights


def watched() -> tuple[PostNorm, LipschitzMonitor, Tensor]:
    model, x = PostNorm().double(), torch.randn(2, N, D, dtype=torch.float64)
    monitor = LipschitzMonitor(model, x, gradients=True, strict=True)
    monitor.measure()
    assert monitor.gradient_lower() == {}
    return model, monitor, x.requires_grad_()


def jacobian(model: PostNorm) -> Tensor:
    def f(x: Tensor) -> Tensor:
        y: Tensor = model.attention(x, x, x)[0]
        return y

    made: Tensor = torch.func.jacrev(f)(model.seen["x"])
    return made.detach().reshape(2 * N * D, 2 * N * D)


def test_the_ratio_is_that_of_the_dense_jacobian_without_residuals() -> None:
    model, monitor, x = watched()
    ratios = []
    for power in (1, 3):
        model(x)[0].pow(power).sum().backward()
        g = model.seen["g"].flatten()
        whole = jacobian(model)
        ratios.append(float((whole.T @ g).norm() / g.norm()))
        assert ratios[-1] <= float(torch.linalg.matrix_norm(whole, 2))
    (found,) = monitor.gradient_lower().values()
    assert found == pytest.approx(max(ratios), rel=1e-12)
    (record,) = monitor.measure()
    assert record.gradient_lower == found
    assert record.tagged()["gradient_lower/attention"] == found
    assert monitor.gradient_lower() == {}


def test_what_is_no_limit_is_not_taken() -> None:
    """Gradients of the weights that are returned, second derivatives, and passes without a gradient."""
    model, monitor, x = watched()
    y, weights = model(x)
    (y.sum() + weights.square().sum()).backward()
    (slope,) = torch.autograd.grad(model(x)[0].pow(2).sum(), x, create_graph=True)
    slope.square().sum().backward()
    (0 * model(x)[0].sum()).backward()
    assert set(monitor.gradient_lower().values()) <= {0.0}


def test_a_pass_that_is_not_finite_gives_none_and_hides_no_other() -> None:
    model, monitor, x = watched()
    (math.nan * model(x)[0].sum()).backward()
    assert monitor.gradient_lower() == {}
    (record,) = monitor.measure()
    assert record.gradient_lower is None
    for factor in (1, math.inf):
        (factor * model(x)[0].pow(2).sum()).backward()
        assert monitor.gradient_lower()["attention"] > 0


def test_a_training_with_pre_norm_keeps_every_bit() -> None:
    grads = []
    for gradients in (False, True):
        model = gpt2(dropout=0.0)
        monitor = LipschitzMonitor(model, PROBES, gradients=gradients)
        monitor.measure()
        model(input_ids=PROBES, labels=PROBES).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert set(monitor.gradient_lower()) == {f"transformer.h.{i}.attn" for i in (0, 1)}
    for row in monitor.records:
        assert row.upper is not None
        assert 0 < monitor.gradient_lower()[row.name] <= row.upper
