"""Rotary position embedding: a rotation of each query and key by an angle that depends on its position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from howsmooth.attention.map import as_parameter
from howsmooth.errors import ArgumentError

__all__ = ["Rotary"]


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary position embedding in the half-split convention of Hugging Face transformers.

    The first ``rot_dim`` entries t of each query and key become t∘cos + rotate_half(t)∘sin, with
    rotate_half(t) = (−t[rot_dim/2:], t[:rot_dim/2]). The other entries do not change.

    Parameters
    ----------
    cos, sin
        Tables (n_max, rot_dim), float32 or float64, with one row for each position; rot_dim is even.

    """

    cos: Float[Tensor, "n_max rot_dim"]
    sin: Float[Tensor, "n_max rot_dim"]

    def __post_init__(self) -> None:
        cos = as_parameter("cos", self.cos, ("n", "rot_dim"))
        sin = as_parameter("sin", self.sin, tuple(cos.shape), like=cos)
        if cos.shape[1] % 2:
            raise ArgumentError("cos", expected="an even rot_dim", got=f"shape {tuple(cos.shape)}")
        object.__setattr__(self, "cos", cos)
        object.__setattr__(self, "sin", sin)

    @property
    def n_max(self) -> int:
        """Number of positions in the tables of cosines and sines."""
        return self.cos.shape[0]

    @property
    def rot_dim(self) -> int:
        """Number of entries of a query or key that are rotated."""
        return self.cos.shape[1]

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Rotary:
        """Return the rotary embedding with its tables converted to another dtype or device."""
        return Rotary(self.cos.to(dtype=dtype, device=device), self.sin.to(dtype=dtype, device=device))

    def at(self, positions: Int[Tensor, " chosen"]) -> Rotary:
        """Return the rotary embedding that rotates token i by the angles of position ``positions[i]``."""
        return Rotary(self.cos[positions], self.sin[positions])

    def rotate(self, t: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n dim"]:
        """Rotate each query or key (..., n, dim), or its tangent, by the angles of its position."""
        n, half = t.shape[-2], self.rot_dim // 2
        turned, rest = t[..., : self.rot_dim], t[..., self.rot_dim :]
        swapped = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
        return torch.cat((turned * self.cos[:n] + swapped * self.sin[:n], rest), dim=-1)

    def rotate_adjoint(self, t: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n dim"]:
        """Apply the transpose of the rotation to vectors (..., n, dim)."""
        n, half = t.shape[-2], self.rot_dim // 2
        turned, rest = t[..., : self.rot_dim], t[..., self.rot_dim :]
        s = turned * self.sin[:n]
        swapped = torch.cat((s[..., half:], -s[..., :half]), dim=-1)
        return torch.cat((turned * self.cos[:n] + swapped, rest), dim=-1)
