"""A map of tokens that is defined by a function of tokens and weights.

It serves attention variants that have no class in howsmooth.attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.errors import ArgumentError

__all__ = ["LayerMap"]

Weights = Mapping[str, Tensor]


class LayerMap(TokenMap):
    """A map of tokens that is defined by a function of tokens and weights.

    Its Jacobian is computed by automatic differentiation.

    Parameters
    ----------
    apply
        Function from tokens (batch, n, d) and weights to outputs (batch, n, d_out).
    weights
        Weights by name, all of one dtype and device. They are copied.
    d, d_out
        Dimensions of input and output tokens.
    length
        The only number of tokens that the map accepts, or None for any number.
    description
        The phrase that :meth:`describe` returns.

    """

    def __init__(
        self,
        apply: Callable[[Tensor, Weights], Tensor],
        weights: Weights,
        *,
        d: int,
        d_out: int,
        length: int | None,
        description: str,
    ) -> None:
        self._apply = apply
        self._weights = {name: weight.detach().clone() for name, weight in weights.items()}
        self._sizes = (d, d_out)
        self._length = length
        self._description = description

    @property
    def d(self) -> int:
        """Dimension of the map's input tokens."""
        return self._sizes[0]

    @property
    def d_out(self) -> int:
        """Dimension of the map's output tokens."""
        return self._sizes[1]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the map's weights."""
        return next(iter(self._weights.values())).dtype

    @property
    def device(self) -> torch.device:
        """Device of the map's weights."""
        return next(iter(self._weights.values())).device

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> LayerMap:
        """Return the map with weights in another dtype or on another device."""
        moved = {name: weight.to(dtype=dtype, device=device) for name, weight in self._weights.items()}
        return LayerMap(
            self._apply,
            moved,
            d=self.d,
            d_out=self.d_out,
            length=self._length,
            description=self._description,
        )

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        return self._description

    def check_length(self, n: int) -> None:
        """Raise ArgumentError if the map does not accept ``n`` tokens."""
        if self._length is not None and n != self._length:
            raise ArgumentError("X", expected=f"{self._length} tokens, as in the mask", got=f"{n} tokens")

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        if weighting is not None:
            raise ArgumentError(
                "X", expected="tokens", got="a measure", remedy="This map acts on tokens only."
            )
        out = self._apply(x.reshape(-1, *x.shape[-2:]), self._weights)
        return out.reshape(*x.shape[:-1], self.d_out)
