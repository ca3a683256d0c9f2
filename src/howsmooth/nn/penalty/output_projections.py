"""Detection of the output projections of attention layers in a forward pass of the model, by hooks that stay
with their module where it is copied or saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from howsmooth.nn.attention.base import LipschitzAttention

__all__ = ["OutputProjections", "UncopiedHook", "first_output"]


class OutputProjections:
    """A detector of the output projection of each attention layer in a model.

    The layer itself applies its output projection, or the module that calls the layer does. A layer applies
    its output projection itself if its output is, dropout aside, the output of a linear map inside the layer.
    If no module inside the layer returns the layer's output, and a linear map elsewhere is given the same
    tensor object, that map is the output projection, as in BERT. Otherwise the projection is not known.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        self._model = model
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
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Register the hooks that track the outputs of layers whose output projections are not known yet."""
        missing = {name: layer for name, layer in self._layers.items() if name not in self.found}
        if not missing or self._handles:
            return
        inside = {id(m) for layer in missing.values() for m in layer.modules()}
        for name, layer in missing.items():
            for module in layer.modules():
                hook = self._returned(name) if module is layer else self._computed
                self._handles.append(module.register_forward_hook(UncopiedHook(hook)))
        for module in self._model.modules():
            if _is_linear(module) and id(module) not in inside:
                self._handles.append(module.register_forward_pre_hook(UncopiedHook(self._given)))

    def detach(self) -> None:
        """Remove the hooks, and forget the outputs of the last forward pass."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forget()

    def settle(self) -> None:
        """Finish a forward pass: remove the hooks, and warn of layers whose output projection was
        not found.
        """
        for name in self._waiting:
            self._unknown(name)
        if all(name in self.found for name in self._layers):
            self.detach()
        self._forget()

    def _forget(self) -> None:
        self._waiting, self._linear, self._others = {}, [], []

    def _computed(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        passes_on = isinstance(module, nn.Dropout | nn.Identity) and _holds(self._linear, args[0])
        (self._linear if passes_on or _is_linear(module) else self._others).append(output)

    def _returned(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            y = first_output(output)
            if name not in self.found and y is not None:
                if _holds(self._linear, y):
                    self.found[name] = layer
                elif _holds(self._others, y):
                    self._unknown(name)
                else:
                    self._waiting[name] = y
            self._linear, self._others = [], []

        return hook

    def _given(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for name, y in list(self._waiting.items()):
            if args and args[0] is y:
                self.found[name] = _Projected(self._layers[name], module)
                del self._waiting[name]

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
    """An attention layer followed by its output projection, as one module."""

    def __init__(self, layer: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.layer, self.projection = layer, projection

    def forward(self, **given: Any) -> Tensor:
        """Call the layer with keyword arguments, and return its output after the output projection."""
        output: Tensor = self.projection(first_output(self.layer(**given)))
        return output


def first_output(output: Any) -> Tensor | None:
    """Return the first floating-point tensor in the output of a module, or None if there is none."""
    leaves: Any = [output]
    if not isinstance(output, Tensor):
        leaves = output.values() if isinstance(output, dict) else output
    return next((t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()), None)


def _holds(tensors: list[Tensor], t: Tensor) -> bool:
    return any(one is t for one in tensors)


def _is_linear(module: nn.Module) -> bool:
    # transformers' Conv1D is a linear map too; its import takes seconds.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


class UncopiedHook:
    """A forward hook, or a forward pre-hook, in whose place a copy of the module, or a file, has a function
    that does nothing.

    Parameters
    ----------
    function
        What the hook calls, with the arguments that PyTorch passes to hooks.

    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        """Call the function."""
        self._function(*arguments)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _hook_of_copies, ()


def _hook_of_copies() -> Callable[..., None]:
    return _nothing


def _nothing(*arguments: Any) -> None:
    pass
