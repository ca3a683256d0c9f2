"""Blocks of models: self-attention from tokens to tokens, the sum x + f(x), and the average of x and f(x)."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor, nn

from howsmooth.bounds import Bound
from howsmooth.errors import ArgumentError, NonFiniteError, check_number
from howsmooth.nn.checks import Placement, check, check_layer_input, check_placement
from howsmooth.nn.lipschitz_module import LipschitzModule, TokenModule

if TYPE_CHECKING:
    from howsmooth.nn.certificates.torch_module_constants import Reach

__all__ = ["AverageResidual", "BranchModule", "Residual", "SelfAttentionBlock"]


class SelfAttentionBlock(LipschitzModule):
    """The module x ↦ attention(x, x, x), which returns tokens without attention weights.

    ``attention`` is an attention layer of ``hs.nn``, which itself returns a pair of tokens and weights, like
    ``torch.nn.MultiheadAttention``. The constant is that of the attention layer.
    """

    def __init__(self, attention: LipschitzModule) -> None:
        super().__init__()
        known = isinstance(attention, LipschitzModule)
        check(known, "attention", "an attention layer of hs.nn", type(attention).__name__)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """Return the self-attention output for tokens (batch, n, d), without the attention weights."""
        tokens: Tensor = self.attention(x, need_weights=False)[0]
        return tokens

    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        """Return the Lipschitz bound of the attention layer in this block."""
        return self.attention.lipschitz_bound(length, radius)

    def output_radius(self, length: int, radius: float) -> float:
        """Return the attention layer's upper bound on the norms of its output tokens."""
        return self.attention.output_radius(length, radius)

    def output_length(self, length: int) -> int:
        """Return the number of tokens that the attention layer returns."""
        return self.attention.output_length(length)


class BranchModule(TokenModule):
    """The base class of residual modules x ↦ p x + q inner(x) with p, q ≥ 0.

    The branch ``inner`` is a module that returns tokens of the same number and dimension as its input.
    """

    _source = 'residuals, howsmooth documentation, "Enforce"'

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        check(isinstance(inner, nn.Module), "inner", "a module", type(inner).__name__)
        self.inner = inner

    def _constant(self, length: int, radius: float) -> float:
        return self._propagated(length, radius).constant

    def _reach(self, length: int, radius: float) -> float:
        return self._propagated(length, radius).radius

    def _propagated(self, length: int, radius: float) -> Reach:
        # Residuals are among the modules that this propagation knows, so it imports them.
        from howsmooth.nn.certificates.module_propagation import branched

        return branched(self, length, radius, "", 0)

    def _branch(self, x: Tensor) -> Tensor:
        check_layer_input("x", x)
        y = self.inner(x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            expected = f"a module that returns tokens of shape {tuple(x.shape)}, the shape of its input"
            remedy = "Put an attention layer into hs.nn.SelfAttentionBlock, which returns tokens alone."
            raise ArgumentError("inner", expected=expected, got=got, remedy=remedy)
        # Under autocast the branch may return half precision.
        return y.to(x.dtype)

    @abstractmethod
    def _weights(self) -> tuple[float, float]: ...


class AverageResidual(BranchModule):
    """A module x ↦ (1 − w) x + w inner(x), with Lipschitz constant at most (1 − w) + w Lip(inner).

    For a branch of constant 1 the constant is 1. ``weight`` is w, from 0 to 1. If it is ``learnable``, w is
    trained as the sigmoid of a parameter, and starts strictly between 0 and 1.
    """

    _shown = ("weight",)

    def __init__(
        self, inner: nn.Module, weight: float = 0.5, *, learnable: bool = False, **placed: Unpack[Placement]
    ) -> None:
        super().__init__(inner)
        check_placement(**placed)
        self.learnable = bool(learnable)
        self._number = check_number("weight", weight, "a number from 0 to 1", lambda w: 0 <= w <= 1)
        if self.learnable:
            check(0 < self._number < 1, "weight", "a number strictly between 0 and 1", weight)
            logit = math.log(self._number) - math.log1p(-self._number)
            self.logit = nn.Parameter(torch.tensor(logit, **placed))

    @property
    def weight(self) -> float:
        """The weight w of the branch in the average (1 − w) x + w inner(x)."""
        return float(torch.sigmoid(self.logit.detach())) if self.learnable else self._number

    def forward(self, x: Tensor) -> Tensor:
        """Return (1 − w) x + w inner(x), where x are tokens (batch, n, d) and w is the weight in [0, 1]."""
        y = self._branch(x)
        return torch.lerp(x, y, torch.sigmoid(self.logit).to(x.dtype) if self.learnable else self._number)

    def _weights(self) -> tuple[float, float]:
        w = self.weight
        if math.isnan(w):
            raise NonFiniteError("logit", expected="finite numbers", got="NaN")
        return 1 - w, w


class Residual(BranchModule):
    """The usual residual connection x ↦ x + inner(x), with Lipschitz constant at most 1 + Lip(inner).

    The constants of consecutive modules multiply, so the bound grows fast with depth. With
    :class:`AverageResidual` it stays 1 if the branches have constant 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x + inner(x) for tokens x (batch, n, d)."""
        return x + self._branch(x)

    def _weights(self) -> tuple[float, float]:
        return 1.0, 1.0
