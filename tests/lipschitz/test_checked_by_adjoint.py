"""A float32 measurement by automatic differentiation, checked in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.jacobian import AutodiffJacobian

N, D = 6, 20


class _Network(TokenMap):
    """Two layers with a tanh between, which mix tokens and entries, and have no closed form.

    The two terms ± cancelling x, which leave rounding errors alone, are added one after the other.
    """

    def __init__(self, weights: Tensor, cancelling: float) -> None:
        self.weights, self.cancelling = weights, cancelling

    d = property(lambda self: D)
    d_out = property(lambda self: D)
    dtype = property(lambda self: self.weights.dtype)
    device = property(lambda self: self.weights.device)

    def to(self, *, dtype: torch.dtype | None = None, device: object = None) -> _Network:
        return _Network(self.weights.to(dtype=dtype, device=device), self.cancelling)

    def describe(self) -> str:
        return "two layers"

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        tokens = x.flatten(-2)
        hidden = torch.tanh(tokens @ self.weights[0]) @ self.weights[1]
        return (hidden + self.cancelling * tokens - self.cancelling * tokens).view(x.shape)


@pytest.mark.parametrize(
    ("cancelling", "rtol", "forward"),
    [(0.0, 2e-5, False), (5e4, 1e-3, True)],
    ids=["rounding is negligible", "terms that cancel"],
)
def test_one_adjoint_product_in_float64_decides_where_rounding_is_negligible(
    cancelling: float, rtol: float, forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, made = torch.Generator().manual_seed(1), []
    weights = torch.randn(2, N * D, N * D, generator=generator).double() / (N * D) ** 0.5
    f, x = _Network(weights.float().double(), cancelling), torch.randn(N, D, generator=generator).double()
    true = torch.linalg.matrix_norm(torch.func.jacrev(f)(x).reshape(N * D, N * D), 2)
    original = AutodiffJacobian._product

    def counted(self: AutodiffJacobian, e: Tensor) -> Tensor:
        made.append(self.dtype == torch.float64)
        return original(self, e)

    monkeypatch.setattr(AutodiffJacobian, "_product", counted)
    found = hs.local_lipschitz(f.to(dtype=torch.float32), x.float(), rtol=rtol)
    assert any(made) == forward
    assert float(found.lower) <= float(true) <= float(found.upper)
    assert float(found.value) == pytest.approx(float(true), rel=rtol)
