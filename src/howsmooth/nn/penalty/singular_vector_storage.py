"""Storage of the singular vectors of the Jacobians of layers between training steps."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.seeds import torch_seed

__all__ = ["Directions"]


class Directions:
    """Stored estimates of singular vectors, one for each index in the batch.

    The next training step starts from these vectors. A smaller batch uses the first vectors and keeps the
    others. In a larger batch, the additional places start at random. For sequences of another length, each
    vector is cut, or continued with random numbers. For outputs of another shape, all vectors start at random
    again.

    Parameters
    ----------
    seed
        Seed of the random directions, which come from a separate generator.

    """

    def __init__(self, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ArgumentError("seed", expected="an integer >= 0", got=repr(seed))
        self._generator = torch.Generator().manual_seed(torch_seed(seed))
        self._left: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self._left is None else len(self._left)

    def state_dict(self) -> dict[str, Any]:
        """Return the singular vectors and the state of the random generator, for :meth:`load_state_dict`."""
        return {"left": self._left, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the singular vectors and the random generator from the result of :meth:`state_dict`."""
        self._left = state["left"]
        self._generator.set_state(state["generator"])

    def draw(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return Gaussian numbers of a given shape, drawn on the CPU so that every device gets the same
        numbers.
        """
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
        known = 0 if left is None else min(len(left), members)
        cold = torch.arange(members) >= known
        found = torch.zeros(members, *shape, dtype=like.dtype, device=like.device)
        if left is not None:
            found[:known] = left[:known].to(like)
            lengths = found.flatten(1).norm(dim=1)
            cold |= ~(lengths > 0).cpu()
        return found, cold

    def _relengthened(self, left: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        if len(shape) < 2 or left.ndim != len(shape) + 1 or tuple(left.shape[2:]) != shape[1:]:
            return None
        n, before = shape[0], left.shape[1]
        if n < before:
            left = left[:, :n]
        else:
            # Random numbers of the same size as the known entries continue the vectors.
            size = left.square().mean().sqrt()
            further = self.draw((len(left), n - before, *shape[1:]), left)
            left = torch.cat((left, size * further), dim=1)
        length = left.flatten(1).norm(dim=1).view(-1, *(1,) * len(shape))
        return torch.where(length > 0, left / length, torch.zeros_like(left))

    def keep(self, left: Tensor) -> None:
        """Store normalised copies of singular vectors (members, ...) for the next training step.

        A vector that is zero or not finite does not replace the old vector.
        """
        left = left.detach()
        length = left.flatten(1).norm(dim=1).view(-1, *(1,) * (left.ndim - 1))
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
