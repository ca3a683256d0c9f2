"""Linear maps with orthogonal weights or of spectral norm one, and activations that sort entries.

The activations are 1-Lipschitz and, unlike ReLU, preserve the norm of every gradient.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from howsmooth.errors import check_whole
from howsmooth.nn.checks import Placement, check, check_layer_input, check_placement, norm_above
from howsmooth.nn.lipschitz_module import TokenModule
from howsmooth.rounding import above, times

__all__ = ["GroupSort", "MaxMin", "OrthogonalLinear", "SpectralLinear"]

_MAPS = ("matrix_exp", "cayley", "householder")


class _ConstrainedLinear(TokenModule):
    """A linear module whose weight is kept orthogonal, or of spectral norm one, by a parametrization.

    ``in_features`` and ``out_features`` are the dimensions of the tokens, and ``bias`` says whether a bias is
    added. The reported constant is the spectral norm of the current weight, computed in float64 and rounded
    up.
    """

    _source = 'spectral norm of the weight, howsmooth documentation, "Enforce"'
    _shown = ("in_features", "out_features")

    def __init__(self, in_features: int, out_features: int, bias: bool, placed: Placement) -> None:
        super().__init__()
        check_placement(**placed)
        self.in_features = check_whole("in_features", in_features)
        self.out_features = check_whole("out_features", out_features)
        dtype = placed.get("dtype")
        check(dtype in (None, torch.float32, torch.float64), "dtype", "float32 or float64", dtype)
        self.linear = nn.Linear(in_features, out_features, bias=bias, **placed)
        if bias:
            nn.init.zeros_(self.linear.bias)

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
        check_layer_input("x", x, dim=self.in_features, like=stored)
        same = x.dtype == stored.dtype or torch.is_autocast_enabled(x.device.type)
        check(same, "x", f"{stored.dtype} as the weights", x.dtype, "Convert one, with .to(dtype).")
        y: Tensor = self.linear(x)
        return y

    def _constant(self, length: int, radius: float) -> float:
        self._stored()
        # Of a copy, as PyTorch updates its estimates of norms in training whenever a weight is read.
        return norm_above("weight", copy.deepcopy(self.linear).eval().weight)

    def _reach(self, length: int, radius: float) -> float:
        shift = 0.0 if self.bias is None else norm_above("bias", self.bias[None])
        return above(times(self._constant(length, radius), radius) + shift, 8)

    def _stored(self) -> Tensor:
        """Return the tensor from which PyTorch computes the weight, after checking its dtype."""
        stored = self.linear.parametrizations.weight.original  # type: ignore[union-attr]
        assert isinstance(stored, Tensor)
        expected = "float32 or float64, because PyTorch can parametrize only these"
        remedy = "Convert the model with .float(); autocast may choose a lower precision."
        check(stored.dtype in (torch.float32, torch.float64), "weight", expected, stored.dtype, remedy)
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
        check_whole("iterations", iterations)
        parametrizations.spectral_norm(self.linear, n_power_iterations=iterations)

    @torch.no_grad()
    def settle(self) -> None:
        """Set the spectral norm of the weight to 1, up to rounding, from its singular vectors."""
        chain: Any = self.linear.parametrizations["weight"]  # type: ignore[index]
        estimate = chain[0]
        left, _, right = torch.linalg.svd(chain.original, full_matrices=False)
        estimate._u.copy_(left[:, 0])
        estimate._v.copy_(right[0])


class GroupSort(TokenModule):
    """The 1-Lipschitz activation that sorts the entries of each token within groups of neighbours.

    The number ``group_size`` of entries in a group must divide the dimension of a token.
    """

    _source = "Anil, Lucas, Grosse, Sorting out Lipschitz function approximation, ICML 2019"
    _shown: ClassVar[tuple[str, ...]] = ("group_size",)

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self.group_size = check_whole("group_size", group_size)

    def forward(self, x: Tensor) -> Tensor:
        """Sort the entries of each token of x (..., d) within groups of ``group_size`` neighbours."""
        check_layer_input("x", x)
        d, size = x.shape[-1], self.group_size
        check(d % size == 0, "x", f"tokens of a multiple of {size} numbers", d)
        groups: Tensor = x.unflatten(-1, (d // size, size)).sort(dim=-1).values
        return groups.flatten(-2)


class MaxMin(GroupSort):
    """The 1-Lipschitz activation that replaces each pair of entries a, b by min(a, b), max(a, b)."""

    _shown = ()

    def __init__(self) -> None:
        super().__init__(2)
