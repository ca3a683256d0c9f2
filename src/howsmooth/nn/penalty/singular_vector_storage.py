"""Storage of the singular vectors of the Jacobians of layers between training steps."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.nn.checks import check_size
from howsmooth.seeds import torch_seed

__all__ = ["Directions", "lengths", "unit"]


def lengths(t: Tensor) -> Tensor:
    """Return the norm of each tensor of a batch, in a shape that divides the batch."""
    length: Tensor = t.flatten(1).norm(dim=1)
    return length.view(-1, *(1,) * (t.ndim - 1))


def unit(t: Tensor) -> Tensor:
    """Divide each tensor of a batch by its norm, and leave zero tensors unchanged."""
    length = lengths(t)
    return torch.where(length > 0, t / length, torch.zeros_like(t))


class Directions:
    """Stored estimates of singular vectors, one for each index in the batch.

    The next training step starts from these vectors. A smaller batch uses the first vectors and keeps the
    others. In a larger batch, the additional places start at random. For sequences of another length, each
    vector is cut, or continued with random numbers. For outputs of another shape, all vectors start at random
    again. ``seed`` is that of the random directions, which come from a separate generator.
    """

    def __init__(self, seed: int = 0) -> None:
        check_size("seed", seed, least=0)
        self._generator = torch.Generator().manual_seed(torch_seed(seed))
        self._left: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self._left is None else len(self._left)

    def state_dict(self) -> dict[str, Any]:
        """Return the singular vectors and the state of the random generator, for :meth:`load_state_dict`."""
        return {"left": self._left, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._left = state["left"]
        self._generator.set_state(state["generator"])

    def draw(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return Gaussian numbers, drawn on the CPU so that every device gets the same ones."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(like)

    def recall(
        self, members: int, shape: tuple[int, ...], like: Tensor
    ) -> tuple[Tensor, Bool[Tensor, " members"]]:
        """Return the stored singular vectors, and a mask that is True where a batch index has no vector.

        The vectors have shape (members, *shape); a missing vector is zero.
        """
        left = self._left
        if left is not None and tuple(left.shape[1:]) != shape:
            left = self._left = self._relengthened(left, shape)
        found = torch.zeros(members, *shape, dtype=like.dtype, device=like.device)
        if left is not None:
            known = min(len(left), members)
            found[:known] = left[:known].to(like)
        return found, ~(lengths(found).flatten() > 0).cpu()

    def _relengthened(self, left: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        if len(shape) < 2 or left.ndim != len(shape) + 1 or tuple(left.shape[2:]) != shape[1:]:
            return None
        n, before = shape[0], left.shape[1]
        if n < before:
            return unit(left[:, :n])
        # Random numbers of the same size as the known entries continue the vectors.
        further = self.draw((len(left), n - before, *shape[1:]), left)
        return unit(torch.cat((left, left.square().mean().sqrt() * further), dim=1))

    def keep(self, left: Tensor) -> None:
        """Store normalised copies of singular vectors (members, ...) for the next training step.

        A vector that is zero or not finite does not replace the old vector.
        """
        left = left.detach()
        length = lengths(left)
        good = torch.isfinite(length) & (length > 0)
        new = torch.where(good, left / length, torch.zeros_like(left))
        before = self._left
        if before is not None and before.shape[1:] == new.shape[1:]:
            before = before.to(new)
            common = min(len(before), len(new))
            # Places that have no new vector keep the old one.
            kept = torch.where(good[:common], new[:common], before[:common])
            new = torch.cat((kept, new[common:], before[common:]))
        self._left = new
