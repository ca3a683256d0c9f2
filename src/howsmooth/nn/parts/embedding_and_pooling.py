"""1-Lipschitz modules for the first and last steps of a model, from patches of images to pooling."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor, nn

from howsmooth.errors import check_number, check_whole
from howsmooth.nn.checks import Placement, check, check_layer_input, check_length, check_placement, norm_above
from howsmooth.nn.lipschitz_module import TokenModule
from howsmooth.nn.parts.norms import norm_with_one
from howsmooth.rounding import above

__all__ = ["AddPositions", "ClipTokens", "MeanPool", "Patches", "PrependToken", "TakeToken"]


class _SequenceModule(TokenModule):
    _source = 'maps of the sequence, howsmooth documentation, "Enforce"'


class Patches(_SequenceModule):
    """A module that cuts images (batch, channels, height, width) into square patches and preserves distances.

    The tokens are (batch, n, channels · size²). Patches are ordered row by row, and the entries of a patch
    channel by channel. The distance of two images equals the distance of their tokens. ``length`` and
    ``radius`` of a certificate refer to the patches: pixels in [0, 1] give tokens of norm at most size ·
    √channels. ``patch_size`` must divide height and width of the images.
    """

    _shown = ("patch_size",)

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        self.patch_size = check_whole("patch_size", patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the patches of images as tokens (batch, n, channels · size²)."""
        check_layer_input("x", x, ndim=4)
        p = self.patch_size
        height, width = x.shape[-2:]
        fits = not (height % p or width % p or not height or not width)
        check(fits, "x", f"images whose sides are multiples of {p}", x.shape)
        rows = x.unflatten(3, (width // p, p)).unflatten(2, (height // p, p))  # batch, c, h, p, w, p
        patches: Tensor = rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return patches


class AddPositions(_SequenceModule):
    """A 1-Lipschitz module that adds a learned vector to the token at each position.

    It takes sequences of ``length`` tokens of dimension ``dim``. The weight begins with Gaussian numbers of
    standard deviation 0.02.
    """

    def __init__(self, length: int, dim: int, **placed: Unpack[Placement]) -> None:
        super().__init__()
        check_whole("length", length)
        self.positions = _drawn(placed, length, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Add the learned vector of each position to tokens (batch, n, d)."""
        length, dim = self.positions.shape
        check_layer_input("x", x, dim=dim, like=self.positions)
        check(x.ndim > 1 and x.shape[-2] == length, "x", f"{length} tokens", x.shape)
        return x + self.positions

    def _check(self, length: object) -> int:
        n, own = check_length(length), len(self.positions)
        check(n == own, "length", f"{own}, as many as positions", n)
        return n

    def _reach(self, length: int, radius: float) -> float:
        positions = self.positions.detach().to("cpu", torch.float64)
        longest = torch.linalg.vector_norm(positions, dim=1).argmax()
        return above(radius + norm_above("positions", positions[longest, None]), 8)


class PrependToken(_SequenceModule):
    """A 1-Lipschitz module that puts a learned token before each sequence, like the class token of a ViT."""

    def __init__(self, dim: int, **placed: Unpack[Placement]) -> None:
        super().__init__()
        self.token = _drawn(placed, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Put the learned token before tokens (batch, n, d), which gives tokens (batch, n + 1, d)."""
        check_layer_input("x", x, dim=len(self.token), ndim=3, like=self.token)
        return torch.cat([self.token.to(x.dtype).expand(len(x), 1, -1), x], dim=1)

    def _count(self, length: int) -> int:
        return length + 1

    def _reach(self, length: int, radius: float) -> float:
        return max(radius, norm_above("token", self.token[None]))


class TakeToken(_SequenceModule):
    """A 1-Lipschitz module that selects the token at ``index``, which may be negative, of each sequence."""

    _shown = ("index",)

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        whole = isinstance(index, int) and not isinstance(index, bool)
        check(whole, "index", "a whole number", repr(index))
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """Return the token at position ``self.index`` of each sequence, with the shape (batch, d)."""
        check_layer_input("x", x, ndim=3)
        self._check(x.shape[1])
        return x[:, self.index]

    def _check(self, length: object) -> int:
        n = check_length(length)
        check(-n <= self.index < n, "length", f"a token number {self.index}", f"{n} tokens")
        return n

    def _count(self, length: int) -> int:
        return 1


class MeanPool(_SequenceModule):
    """A 1-Lipschitz module that maps tokens (batch, n, d) to √n times their mean, (batch, d).

    The mean itself has constant 1/√n, so the factor √n makes the constant 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the tokens divided by √n."""
        check_layer_input("x", x, ndim=3)
        check_length(x.shape[1])
        return x.sum(dim=1) / math.sqrt(x.shape[1])

    def _count(self, length: int) -> int:
        return 1

    def _reach(self, length: int, radius: float) -> float:
        return above(math.sqrt(length) * radius, 8)


class ClipTokens(_SequenceModule):
    """A 1-Lipschitz module that projects each token onto the ball of a given ``radius`` around zero.

    If a model begins with this module, its certificate holds for all inputs instead of inputs in a ball only.
    """

    _shown = ("radius",)

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = check_number("radius", radius)

    def forward(self, x: Tensor) -> Tensor:
        """Scale each token of x (..., d) whose norm exceeds ``self.radius`` down to this norm."""
        check_layer_input("x", x)
        return x / norm_with_one(x / self.radius, torch.maximum)

    def _reach(self, length: int, radius: float) -> float:
        # The radius may have been changed since the construction, which checks it.
        return min(check_number("radius", self.radius), radius)


def _drawn(placed: Placement, *shape: int) -> nn.Parameter:
    check_whole("dim", shape[-1])
    check_placement(**placed)
    return nn.Parameter(0.02 * torch.randn(*shape, **placed))
