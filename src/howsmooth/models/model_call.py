"""A model together with the arguments of one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from howsmooth.models.float32_weights import device_of, stored_dtype
from howsmooth.models.measurement_mode import implementation

__all__ = ["ModelCall"]


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A model together with the arguments of one call, which have been checked."""

    model: nn.Module
    #: The arguments of the model by name: tensors first, then numbers, words, True, False and None.
    named: dict[str, Any]
    batch: int  # the number of sequences
    #: The layers that a run has shown already, as of ``trace_forward_pass``; None if there was none.
    record: Any = field(default=None, init=False)

    @property
    def kind(self) -> str:
        """Name of the model's class, for messages."""
        return type(self.model).__name__

    @property
    def implementation(self) -> str:
        """The user's attention implementation. It is "" for a model that is not from transformers."""
        return implementation(self.model)

    @cached_property
    def stored(self) -> torch.dtype:
        """The dtype in which the weights of the model are stored."""
        return stored_dtype(self.model)

    @cached_property
    def device(self) -> torch.device:
        """The device on which the model expects its inputs."""
        return device_of(self.model)
