"""Detection of the output projections of attention layers in a forward pass of the model."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.watching import Call, Watch

__all__ = ["OutputProjections", "first_output"]


class OutputProjections:
    """A detector of the output projection of each attention layer in a model.

    The layer itself applies its output projection, or the module that calls the layer does. A layer applies
    its output projection itself if its output is, dropout aside, the output of a linear map inside the layer.
    If no module inside the layer returns the layer's output, and a linear map elsewhere is given the same
    tensor object, that map is the output projection, as in BERT. Otherwise the projection is not known.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        self._layers = layers
        #: The layers with their output projections, by name, as far as they have been found.
        self.found: dict[str, nn.Module] = {
            name: layer
            for name, layer in layers.items()
            if isinstance(layer, nn.MultiheadAttention | LipschitzAttention)
        }
        #: The names of the layers whose projection is not known.
        self.unknown: set[str] = set()
        self._waiting: dict[str, Tensor] = {}  # outputs of layers that are no output of a module in them
        self._linear: list[Tensor] = []  # outputs of linear maps in the running layer, also after dropout
        self._others: list[Tensor] = []  # outputs of other modules in it
        missing = [layer for name, layer in layers.items() if name not in self.found]
        self._inside = {module for layer in missing for module in layer.modules()}
        modules = {
            name: m for name, m in model.named_modules() if m in self._inside or (missing and _is_linear(m))
        }
        self._watch = Watch(
            model, modules, starts=self._starts, ends=self._ends, begins=self._forget, finishes=self._settle
        )

    def attach(self) -> None:
        """Begin to track the outputs of layers whose output projections are not known yet."""
        if any(name not in self.found for name in self._layers):
            self._watch.attach()

    def detach(self) -> None:
        """Stop the tracking, and forget the outputs of the last forward pass."""
        self._watch.detach()
        self._forget()

    def _settle(self) -> None:
        """Warn of the layers whose projection was not found, and end the tracking when all are known."""
        for name in self._waiting:
            self._unknown(name)
        if all(name in self.found for name in self._layers):
            self.detach()
        self._forget()

    def _forget(self) -> None:
        self._waiting, self._linear, self._others = {}, [], []

    def _starts(self, call: Call) -> None:
        if call.module in self._inside:
            return
        for name, y in list(self._waiting.items()):
            if call.args and call.args[0] is y:
                self.found[name] = _Projected(self._layers[name], call.module)
                del self._waiting[name]

    def _ends(self, call: Call) -> None:
        name, y = call.name, call.output
        if self._layers.get(name) is call.module:
            y = first_output(y)
            if name not in self.found and y is not None:
                if _holds(self._linear, y):
                    self.found[name] = call.module
                elif _holds(self._others, y):
                    self._unknown(name)
                else:
                    self._waiting[name] = y
            self._linear, self._others = [], []
        elif call.module in self._inside and isinstance(y, Tensor):
            dropout = isinstance(call.module, nn.Dropout | nn.Identity)
            passes_on = dropout and any(_holds(self._linear, given) for given in call.args)
            (self._linear if passes_on or _is_linear(call.module) else self._others).append(y)

    def _unknown(self, name: str) -> None:
        layer = self._layers[name]
        self.found[name] = layer
        self.unknown.add(name)
        warnings.warn(
            f"The output projection of {name} ({type(layer).__name__}) was not found. The penalty is that of "
            "the module as it is, scope 'module', which a monitor does not measure.",
            stacklevel=2,
        )


class _Projected(nn.Module):
    def __init__(self, layer: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.layer, self.projection = layer, projection

    def forward(self, **given: Any) -> Tensor:
        output: Tensor = self.projection(first_output(self.layer(**given)))
        return output


def first_output(output: Any) -> Tensor | None:
    """Return the first floating-point tensor in the output of a module, or None if there is none."""
    leaves: Any = [output]
    if output is not None and not isinstance(output, Tensor):
        leaves = output.values() if isinstance(output, dict) else output
    return next((t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()), None)


def _holds(tensors: list[Tensor], t: Tensor) -> bool:
    return any(one is t for one in tensors)


def _is_linear(module: nn.Module) -> bool:
    # transformers' Conv1D is a linear map too; its import takes seconds.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
