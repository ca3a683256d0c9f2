"""Float64 that stays float64, whichever way model code asks for less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from howsmooth.force_float64 import WithoutDowncast

NARROW = torch.ones(3)

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to dtype": lambda x: x.to(torch.float32),
    "to keyword": lambda x: x.to(dtype=torch.bfloat16),
    "to device and dtype": lambda x: x.to("cpu", torch.float32),
    "to tensor": lambda x: x.to(NARROW),
    "to tensor, not blocking": lambda x: x.to(NARROW, non_blocking=True),
    "type": lambda x: x.type(torch.float32),
    "type by name": lambda x: x.type("torch.FloatTensor"),
    "type_as": lambda x: x.type_as(NARROW),
    "softmax": lambda x: functional.softmax(x, dim=-1, dtype=torch.float32),
    "softmax, positional": lambda x: torch.softmax(x, -1, torch.float32),
    "sum": lambda x: x.sum(0, keepdim=True, dtype=torch.float32),
    "float of integers": lambda x: torch.arange(3).float() * x,
    "arange": lambda x: torch.arange(3, dtype=torch.float32) @ x,
    "new_ones": lambda x: x.new_ones(3, dtype=torch.float32) @ x,
    "autocast": lambda x: _autocast(x),
}


def _autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x[None] @ x[:, None]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_rounded(way: str) -> None:
    x = torch.tensor([1 / 3, 1e-9, 1 + 2**-40], dtype=torch.float64)
    with WithoutDowncast():
        result = WAYS[way](x)
    assert result.dtype == torch.float64
    # In float64 throughout: what a conversion leaves alone is the tensor itself.
    if result.shape == x.shape and "softmax" not in way and "integers" not in way:
        assert torch.equal(result, x)


def test_complex_numbers_are_widened_too() -> None:
    with WithoutDowncast():
        assert torch.ones(2, dtype=torch.float64).to(torch.complex64).dtype == torch.complex128


def test_other_conversions_are_left_alone() -> None:
    x = torch.ones(4, dtype=torch.float64)
    with WithoutDowncast():
        assert x.to(torch.int64).dtype == torch.int64
        assert x.bool().dtype == torch.bool
        assert x.to("cpu") is x
        assert x.type() == "torch.DoubleTensor"
        assert x.view(torch.float32).shape == (8,)  # the same bits, read anew
    assert x.float().dtype == torch.float32


def test_derivatives_agree_with_finite_differences_where_code_rounds_in_the_middle() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.to(torch.float32)
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    x, t = torch.linspace(-1, 2, 6, dtype=torch.float64), torch.linspace(1, -3, 6, dtype=torch.float64)
    norm, step = Norm(), 1e-5

    def error() -> float:
        tangent = torch.func.jvp(norm, (x,), (t,))[1]
        difference = (norm(x + step * t) - norm(x - step * t)) / (2 * step)
        return float((tangent - difference).abs().max())

    assert error() > 1e-4
    with WithoutDowncast():
        assert error() < 1e-9
