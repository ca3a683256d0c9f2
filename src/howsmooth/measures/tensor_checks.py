"""Checks that the numbers of a measure (atoms, weights, positions) are float32 or float64 and finite."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["check_numbers"]


def check_numbers(name: str, value: Tensor) -> None:
    """Raise ArgumentError unless the tensor ``value`` is float32 or float64, and NonFiniteError unless its
    numbers are finite.
    """
    if value.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            name,
            expected="float32 or float64",
            got=str(value.dtype),
            remedy="Convert it, for instance with .double().",
        )
    if not bool(torch.isfinite(value).all()):
        remedy = "Leave out atoms of weight zero." if name == "log_weights" else ""
        raise NonFiniteError(name, expected="finite numbers", got="NaN or infinity", remedy=remedy)
