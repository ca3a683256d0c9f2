"""Detection of layers that mix tokens without a softmax: linear attention, state-space layers, convolutions.

The candidates are members of module lists in which no
softmax attention ran and whose output has the shape of their input. Each is run by itself with one token
changed; if the output at another token changes, the layer mixes tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth.errors import CaptureError
from howsmooth.models.float32_weights import weights_in_memory
from howsmooth.models.identification.self_attention_module import moved_tokens
from howsmooth.models.tracing.attention_recorder import AttentionLayer
from howsmooth.models.tracing.module_replay import ModuleReplay, first_tensor
from howsmooth.watching import Call, watched

__all__ = ["NO_SOFTMAX", "NonSoftmaxLayer", "NonSoftmaxTracer"]

#: Why a layer without softmax is not captured.
NO_SOFTMAX = "no softmax: a linear or state-space mixer, a convolution, or one that is written out"

_MEMBER = re.compile(r"(^|\.)\d+$")


@dataclass(frozen=True)
class NonSoftmaxLayer:
    """A layer of a model that mixes tokens without a softmax."""

    name: str  # path in the model
    module: str  # name of the class
    after: int  # how many attention layers ran before it


@dataclass(eq=False)
class _Running:
    """A layer that is still running, and whether softmax attention has run inside it so far."""

    call: Call
    first: int  # how many candidates there were when its call began
    has_softmax: bool = False  # whether a softmax attention ran inside it
    is_attention_layer: bool = False  # whether it is the innermost list member around that attention


class NonSoftmaxTracer:
    """A watcher that collects the layers (members of module lists) in which no softmax attention runs. It
    keeps the tokens of at most ``most`` layers.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._running: list[_Running] = []
        self._candidates: list[tuple[Call, int]] = []
        self._attention = 0

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager that observes all numbered modules of a model, such as ``layers.3``."""
        numbered = {name: module for name, module in model.named_modules() if _MEMBER.search(name)}
        return watched(numbered, self._starts, self._ends)

    def on_layer(self, layer: AttentionLayer) -> None:
        """Note for each running module that softmax attention has run inside it."""
        self._attention += 1
        for running in self._running:
            running.has_softmax = True
            running.is_attention_layer |= running.call.name == layer.root_name

    def find(self, batch: int) -> Iterator[NonSoftmaxLayer]:
        """Run each collected layer alone, and yield those that mix tokens. Skip layers that raise errors."""
        for call, after in self._candidates:
            x = call.inputs
            try:
                with weights_in_memory(call.module):
                    found = (
                        x is not None
                        and call.unchanged()
                        and _mixes_tokens(ModuleReplay(call, x, batch).of_first_sequence())
                    )
                if found:
                    yield NonSoftmaxLayer(call.name, type(call.module).__name__, after)
            except Exception:  # a module may raise any error when it runs by itself
                continue

    def _starts(self, call: Call) -> None:
        if self._most is None or len(self._candidates) < self._most:
            call.keep()
        self._running.append(_Running(call, len(self._candidates)))

    def _ends(self, call: Call) -> None:
        # If a module raised an exception that the model caught, its call is still in the list.
        running = self._running.pop()
        while running.call is not call:
            running = self._running.pop()
        if running.is_attention_layer:
            del self._candidates[running.first :]  # these are parts of an attention layer
        elif call.kept and not running.has_softmax and _keeps_shape(call):
            self._candidates[running.first :] = [(call, self._attention)]


def _keeps_shape(call: Call) -> bool:
    x = call.inputs
    try:
        y = first_tensor(call.output)
    except CaptureError:
        return False
    return x is not None and x.ndim >= 2 and y.shape == x.shape


def _mixes_tokens(call: ModuleReplay) -> bool:
    """Return True if changing one input token of a layer changes its output at another token."""
    x = call.x
    axis = next((a for a in range(x.ndim - 2, -1, -1) if x.shape[a] > 1), None)
    if axis is None:
        return False
    y = first_tensor(call(x))
    # The outputs of experts round differently if they get other tokens.
    slack = 64 * torch.finfo(y.dtype).eps * float(y.abs().max())

    def changed(other: Tensor) -> Tensor:
        rows: Tensor = ((other - y).abs() > slack).movedim(axis, 0).flatten(1).any(dim=1)
        return rows

    if bool(changed(first_tensor(call(x))).any()):
        return False  # the module is random, so that nothing can be concluded
    for token in dict.fromkeys((0, x.shape[axis] // 2, x.shape[axis] - 1)):
        other = x.clone()
        other.select(axis, token).copy_(moved_tokens(x).select(axis, token))
        rows = changed(first_tensor(call(other)))
        rows[token] = False
        if bool(rows.any()):
            return True
    return False
