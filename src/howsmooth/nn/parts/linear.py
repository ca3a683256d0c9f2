"""Linear maps whose weight matrix stays orthogonal, or of spectral norm one, during training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from howsmooth.errors import ArgumentError
from howsmooth.nn.checks import Placement, check, check_placement, check_size, check_tokens
from howsmooth.nn.lipschitz_module import TokenModule
from howsmooth.nn.upward_rounding import norm_above, rounded_up, times

__all__ = ["OrthogonalLinear", "SpectralLinear"]

_MAPS = ("matrix_exp", "cayley", "householder")


class _ConstrainedLinear(TokenModule):
    """A linear module whose weight a parametrization of PyTorch keeps orthogonal, or of spectral norm one.

    ``in_features`` and ``out_features`` are the dimensions of the tokens, and ``bias`` says whether a bias is
    added. The reported constant is the spectral norm of the current weight, computed in float64 and rounded
    up.
    """

    _source = 'spectral norm of the weight, howsmooth documentation, "Enforce"'
    _shown = ("in_features", "out_features")

    def __init__(self, in_features: int, out_features: int, bias: bool, placed: Placement) -> None:
        super().__init__()
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        dtype = placed.get("dtype")
        check(dtype in (None, torch.float32, torch.float64), "dtype", "float32 or float64", dtype)
        check_placement(**placed)
        self.linear = nn.Linear(in_features, out_features, bias=bias, **placed)
        if bias:
            nn.init.zeros_(self.linear.bias)

    @property
    def in_features(self) -> int:
        """The dimension of an input token."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """The dimension of an output token."""
        return self.linear.out_features

    @property
    def weight(self) -> Tensor:
        """The weight of the linear map after parametrization, (out_features, in_features)."""
        self._stored()
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the linear map, (out_features,), or None."""
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (..., in_features) to (..., out_features)."""
        stored = self._stored()
        check_tokens("x", x, dim=self.in_features, like=stored)
        if x.dtype != stored.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ArgumentError(
                "x",
                expected=f"{stored.dtype} as the weights",
                got=str(x.dtype),
                remedy="Convert one of the two, with .to(dtype).",
            )
        y: Tensor = self.linear(x)
        return y

    def _constant(self, length: int, radius: float) -> float:
        with _as_it_is(self.linear):
            return norm_above("weight", self.weight)

    def _reach(self, length: int, radius: float) -> float:
        shift = 0.0 if self.bias is None else norm_above("bias", self.bias[None])
        return rounded_up(times(self._constant(length, radius), radius) + shift)

    def _stored(self) -> Tensor:
        """Return the tensor from which PyTorch computes the weight, after checking its dtype."""
        stored = self.linear.parametrizations.weight.original  # type: ignore[union-attr]
        assert isinstance(stored, Tensor)
        if stored.dtype not in (torch.float32, torch.float64):
            raise ArgumentError(
                "weight",
                expected="float32 or float64, because PyTorch can parametrize only these",
                got=str(stored.dtype),
                remedy="Convert the model with .float(); autocast may choose a lower precision.",
            )
        return stored


class OrthogonalLinear(_ConstrainedLinear):
    """A 1-Lipschitz linear map whose weight has orthonormal rows or orthonormal columns.

    The smaller set of the two is orthonormal. ``torch.nn.utils.parametrizations.orthogonal`` keeps it
    orthonormal during training. With at least as many outputs as inputs, the map is an isometry (apart from
    the bias). The reported bound is the spectral norm of the computed weight, which is 1 up to rounding in
    the weight's dtype. ``orthogonal_map`` is "matrix_exp", "cayley" or "householder"; None for PyTorch's
    default.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        orthogonal_map: str | None = None,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__(in_features, out_features, bias, placed)
        expected = f"one of {', '.join(_MAPS)}, or None"
        check(orthogonal_map in (*_MAPS, None), "orthogonal_map", expected, repr(orthogonal_map))
        nn.init.orthogonal_(self.linear.weight)
        parametrizations.orthogonal(self.linear, orthogonal_map=orthogonal_map)


class SpectralLinear(_ConstrainedLinear):
    """A linear map whose weight is divided by an estimate of its spectral norm.

    ``torch.nn.utils.parametrizations.spectral_norm`` estimates the norm from below by power iterations during
    training, ``iterations`` of them in each forward pass, so the norm of the quotient is 1 or slightly more.
    The reported bound is computed from this quotient instead of being assumed to be 1. ``settle`` makes it 1
    up to rounding.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        iterations: int = 1,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__(in_features, out_features, bias, placed)
        check_size("iterations", iterations)
        parametrizations.spectral_norm(self.linear, n_power_iterations=iterations)

    @torch.no_grad()
    def settle(self) -> None:
        """Set the spectral norm of the weight to 1 up to rounding, by the singular vectors of an SVD."""
        chain: Any = self.linear.parametrizations["weight"]  # type: ignore[index]
        estimate = chain[0]
        left, _, right = torch.linalg.svd(chain.original, full_matrices=False)
        estimate._u.copy_(left[:, 0])
        estimate._v.copy_(right[0])


@contextmanager
def _as_it_is(linear: nn.Linear) -> Iterator[None]:
    """Keep PyTorch from updating its estimates of spectral norms, as it does in training whenever a weight is
    read.
    """
    stages = [stage for chain in linear.parametrizations.values() for stage in chain]  # type: ignore[operator]
    training = [stage.training for stage in stages]
    try:
        for stage in stages:
            stage.eval()
        with torch.no_grad():
            yield
    finally:
        for stage, was in zip(stages, training, strict=True):
            stage.train(was)
