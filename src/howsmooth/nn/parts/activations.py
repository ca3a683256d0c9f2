"""Activations by sorting, which are 1-Lipschitz and, unlike ReLU, preserve the norm of every gradient."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.nn.checks import check_size, check_tokens
from howsmooth.nn.lipschitz_module import TokenModule

__all__ = ["GroupSort", "MaxMin"]


class GroupSort(TokenModule):
    """The 1-Lipschitz activation that sorts the entries of each token within groups of neighbours.

    The number ``group_size`` of entries in a group must divide the dimension of a token.
    """

    _source = "Anil, Lucas, Grosse, Sorting out Lipschitz function approximation, ICML 2019"
    _shown: ClassVar[tuple[str, ...]] = ("group_size",)

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self.group_size = check_size("group_size", group_size)

    def forward(self, x: Tensor) -> Tensor:
        """Sort the entries of each token of x (..., d) within groups of ``group_size`` neighbours."""
        check_tokens("x", x)
        d = x.shape[-1]
        if d % self.group_size:
            raise ArgumentError(
                "x", expected=f"tokens of a multiple of {self.group_size} numbers", got=str(d)
            )
        groups: Tensor = x.unflatten(-1, (d // self.group_size, self.group_size)).sort(dim=-1).values
        return groups.flatten(-2)


class MaxMin(GroupSort):
    """The 1-Lipschitz activation that replaces each pair of entries a, b by min(a, b), max(a, b)."""

    _shown = ()

    def __init__(self) -> None:
        super().__init__(2)
