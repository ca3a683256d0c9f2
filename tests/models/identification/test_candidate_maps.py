"""Reading by value: columns, masks, norms, tolerances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from howsmooth.attention import LayerNorm, RMSNorm
from howsmooth.models.identification.layer_trace import ModuleCall
from howsmooth.models.identification.norm_placement import norm_map
from howsmooth.models.identification.qkv_projections import matching_columns
from howsmooth.models.tolerance import lowest_epsilon, relative_error, tolerance
from howsmooth.models.tracing.mask_and_bias import describe_mask


@given(st.data())
def test_columns_are_found_wherever_they_are(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12))
    columns = data.draw(st.integers(1, 20))
    wanted = data.draw(st.lists(st.integers(0, columns - 1), min_size=1, max_size=columns))
    outputs = torch.randn(n, columns, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    found = matching_columns(outputs[:, wanted], outputs, 0.0)
    assert found is not None
    assert found.tolist() == wanted


@given(st.integers(1, 40), st.integers(2, 10), st.data())
def test_columns_that_are_not_there_are_not_found(n: int, columns: int, data: st.DataObject) -> None:
    outputs = torch.randn(n, columns, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    wanted = outputs.flip(-1)  # so that no contiguous slice is the answer
    assert matching_columns(wanted, outputs, 0.0) is not None
    wanted[data.draw(st.integers(0, n - 1)), 0] += 1e-3
    assert matching_columns(wanted, outputs, 0.0) is None
    assert matching_columns(wanted, outputs, 1e-2) is not None


def test_equal_columns_are_told_apart_by_their_neighbours() -> None:
    a, b, c = torch.randn(3, 5)
    found = matching_columns(torch.stack([c, a, b], dim=1), torch.stack([a, b, c, a], dim=1), 0.0)
    assert found is not None
    assert found.tolist() == [2, 3, 1]


@pytest.mark.parametrize("n", [2, 5, 9])
def test_masks_in_words(n: int) -> None:
    ones = torch.ones(n, n, dtype=torch.bool)
    assert describe_mask(None, n) == (False, None, None, "none")
    assert describe_mask(ones, n) == (False, None, None, "none")
    assert describe_mask(ones.tril(), n) == (True, None, None, "causal")
    if n == 2:
        return
    assert describe_mask(ones.tril() & ones.triu(-1), n) == (True, 2, None, "sliding window 2, causal")
    both = describe_mask(ones.tril(1) & ones.triu(-1), n)
    assert both == (False, 2, None, "sliding window 1 to both sides")
    odd = ones.tril()
    odd[-1, 1] = False
    assert describe_mask(odd, n)[::3] == (True, "causal with a further mask")
    odd[0, -1] = True
    assert describe_mask(odd, n)[::3] == (False, "a mask of its own")


def _rms(weight: torch.Tensor, shift: float) -> nn.Module:
    class SomeRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)
            self.variance_epsilon = 1e-3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-3)
            return (y * (shift + self.weight.float())).to(x.dtype)

    return SomeRMSNorm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_by_value(dtype: torch.dtype) -> None:
    x, gain = torch.randn(1, 5, 8, dtype=dtype), torch.randn(8, dtype=dtype)

    def read(module: nn.Module) -> Any:
        return norm_map(ModuleCall("norm", module, x, module(x).detach()))

    stored_as_is, stored_minus_one = read(_rms(gain, 0.0)), read(_rms(gain, 1.0))
    assert isinstance(stored_as_is, RMSNorm)
    torch.testing.assert_close(stored_as_is.weight, gain)
    torch.testing.assert_close(stored_minus_one.weight, 1 + gain)
    assert stored_as_is.eps == 1e-3
    layer_norm = nn.LayerNorm(8, eps=1e-2, dtype=dtype)
    nn.init.normal_(layer_norm.weight)
    nn.init.normal_(layer_norm.bias)
    found = read(layer_norm)
    assert isinstance(found, LayerNorm)
    torch.testing.assert_close(found(x), layer_norm(x).detach())
    assert isinstance(read(nn.LayerNorm(8, elementwise_affine=False, dtype=dtype)), LayerNorm)
    assert isinstance(read(nn.RMSNorm(8, dtype=dtype)), RMSNorm)
    half = _rms(gain, 0.5)
    assert read(half) is None
    assert read(nn.GroupNorm(5, 5, dtype=dtype)) is None


def test_tolerance_is_of_the_precision_that_was_used() -> None:
    assert lowest_epsilon(torch.float64) == torch.finfo(torch.float64).eps
    assert (
        lowest_epsilon(torch.float64, downcast=True)
        == lowest_epsilon(torch.float32)
        == torch.finfo(torch.float32).eps
    )
    assert tolerance(1e-16, 10.0) > tolerance(1e-16)
    assert tolerance(lowest_epsilon(torch.float64)) < 1e-13
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0
    assert relative_error(torch.ones(3), torch.zeros(3)) == float("inf")
    assert relative_error(torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0])) == pytest.approx(0.05)
