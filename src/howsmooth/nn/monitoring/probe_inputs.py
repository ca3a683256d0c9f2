"""The fixed inputs of a model (probe inputs) at which a monitor measures its attention layers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from howsmooth.errors import ArgumentError
from howsmooth.models.inputs.model_inputs import model_inputs
from howsmooth.models.padded_sequences import padding_of

__all__ = ["ProbeInputs", "Probes"]

#: The types of probe inputs: token ids (batch, n), the model's inputs by name, or a list of these.
ProbeInputs = Tensor | Mapping[str, Any] | list[Tensor | Mapping[str, Any]]


class Probes:
    """Copies of the fixed inputs of a monitor, so that later changes of the originals have no effect.

    Attributes
    ----------
    inputs
        The copies.
    sequences
        Number of sequences.
    words
        Sizes of the inputs and a checksum, for records.

    Raises
    ------
    ArgumentError
        If the model does not accept the inputs.

    """

    def __init__(self, model: nn.Module, given: ProbeInputs) -> None:
        if isinstance(given, tuple):
            raise ArgumentError(
                "probes",
                expected="token ids, inputs of the model by name, or a list of these",
                got="a tuple",
                remedy="Give the inputs of one call as a dict, and several inputs as a list.",
            )
        several: list[Any] = given if isinstance(given, list) else [given]
        if not several:
            raise ArgumentError("probes", expected="inputs of the model, at least one sequence", got="none")
        self.inputs: list[Tensor | dict[str, Any]] = []
        self.sequences = 0
        checksum, shapes = hashlib.sha256(), []
        for one in several:
            checked = model_inputs(model, one)
            padding_of(checked)  # raises an error for a sequence of nothing but padding
            self.sequences += checked.batch
            for name, value in checked.named.items():
                if not isinstance(value, Tensor):
                    checksum.update(f"{name} {value!r}".encode())
                    shapes.append(f"{name}={value!r}")
                    continue
                raw = value.detach().cpu().contiguous()
                checksum.update(f"{name} {raw.dtype} {tuple(raw.shape)}".encode())
                checksum.update(raw.reshape(-1).view(torch.uint8).numpy().tobytes())
                shapes.append(f"{name} {' x '.join(map(str, raw.shape))}")
            given = one if isinstance(one, Tensor) else dict(one)
            self.inputs.append(tree_map_only(Tensor, lambda t: t.detach().clone(), given))
        self.words = f"{', '.join(shapes)}; sha256 {checksum.hexdigest()[:12]}"
